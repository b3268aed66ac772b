"""Start a process of pytest-xdist as a fork of a server: `launcher.py SERVER -u -c CODE`, not `python -u -c CODE`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.forks.server import start_program  # noqa: E402

address, _unbuffered, *words = sys.argv[1:]
program = start_program(address, words, env=dict(os.environ), cwd=os.getcwd(), streams=(0, 1, 2))
for stream in (0, 1):  # the fork alone holds its ends of the pipes
    os.close(stream)
sys.exit(program.wait())
