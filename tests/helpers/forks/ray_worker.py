"""What Ray runs to start a worker or an agent, where these are forks: request it from a server.

A worker registers with Ray by itself, so this process ends at once; for an agent it stands in until that ends."""

import json
import os
import sys
from pathlib import Path
from typing import Any

ADDRESS = "SLIPSTREAM_TEST_FORK_SERVER"
AGENTS = "SLIPSTREAM_TEST_AGENT_SERVER"
_CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from helpers.forks.server import start_program

    context = next((json.loads(word[len(_CONTEXT) :]) for word in sys.argv if word.startswith(_CONTEXT)), {})
    words = [word for word in sys.argv[1:] if not word.startswith((_CONTEXT, "--language="))]
    env = os.environ | {name: os.path.expandvars(value) for name, value in context.get("env_vars", {}).items()}
    is_agent = Path(words[0]).name != "default_worker.py"
    address, first = (AGENTS, "helpers.forks.agents") if is_agent else (ADDRESS, "")
    options: dict[str, Any] = {"env": dict(env), "cwd": os.getcwd(), "streams": (0, 1, 2), "first": first}
    program = start_program(os.environ[address], words, **options)
    if is_agent:
        sys.exit(program.wait())


if __name__ == "__main__":
    main()
