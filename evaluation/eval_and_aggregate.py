"""Evaluate a model under the path and with the options of the AReaL tutorial: the same as `python -m tools.eval`.

python evaluation/eval_and_aggregate.py --model_path M --output_path O --data_names math_500,aime24,amc23
    --max_gen_tokens 32768
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by its path, from any folder

from tools.eval.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
