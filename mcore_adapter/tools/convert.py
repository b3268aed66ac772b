"""`python mcore_adapter/tools/convert.py ...`: an alternative path of the converter.

It is tools/convert.py, run as it stands: nothing is imported from there.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[0] = str(root)
    runpy.run_path(str(root / "tools" / "convert.py"), run_name="__main__")
