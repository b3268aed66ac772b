"""What Ray runs to start a worker, where the driver is a fork server: request the worker there, and end."""

import json
import os
import sys
from pathlib import Path

ADDRESS = "SLIPSTREAM_TEST_FORK_SERVER"
_CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from helpers.forks.server import start_program

    context = next((json.loads(word[len(_CONTEXT) :]) for word in sys.argv if word.startswith(_CONTEXT)), {})
    words = [word for word in sys.argv[1:] if not word.startswith((_CONTEXT, "--language="))]
    env = os.environ | {name: os.path.expandvars(value) for name, value in context.get("env_vars", {}).items()}
    start_program(os.environ[ADDRESS], words, env=dict(env), cwd=os.getcwd(), streams=(0, 1, 2))


if __name__ == "__main__":
    main()
