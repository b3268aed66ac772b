"""Record the transcript of a real SGLang server on the CPU: `python tests/helpers/sglang_double/record.py TP`.

tests/helpers/sglang_environment.py lists the environment variables that name the SGLang.
"""

import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers.sglang_double import model  # noqa: E402
from helpers.sglang_double.recorder import Recorder, stored, text_of  # noqa: E402
from helpers.sglang_environment import TWO_RANKS, environment, running_server, settings_for  # noqa: E402


def main() -> None:
    tp = int(sys.argv[1])
    env = environment() | (TWO_RANKS if tp > 1 else {})
    with tempfile.TemporaryDirectory() as name:
        settings = settings_for(model.write(Path(name) / "model"), Path(name) / "server.log", tp=tp, env=env)
        with running_server(settings) as server:
            entries = Recorder(server.endpoint.url, tp=tp, folder=Path(name)).record()
    stored(tp).write_text(text_of(entries), encoding="utf-8")
    print(f"{stored(tp)}: {len(entries)} calls")


if __name__ == "__main__":
    main()
