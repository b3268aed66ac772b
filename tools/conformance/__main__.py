"""Run every golden number and gradient check, and the functions of other projects on the same random cases.

    python -m tools.conformance [--peer NAME --python PATH]...

NAME is trl, verl, trinity or openrlhf; PATH the Python interpreter of an environment that has the project. Peers give
the matrix of docs/algorithms.md as markdown. The exit status is 1 where a number is wrong, where a peer differs without
a known formula, or where a known deviation is not reproduced.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.conformance.peers import PEERS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0 where everything holds."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", choices=PEERS, default=[], help="a project to compare with")
    parser.add_argument("--python", action="append", type=Path, default=[], help="its Python interpreter")
    given = parser.parse_args(arguments)
    if len(given.peer) != len(given.python) or len(set(given.peer)) != len(given.peer):
        parser.error("--peer and --python belong together, once for each peer")
    for python in given.python:
        if not os.access(python, os.X_OK):
            parser.error(f"argument --python: {python}: no such interpreter")
    from tools.conformance.report import own_checks, peer_checks

    problems = [*own_checks(), *peer_checks(dict(zip(given.peer, given.python, strict=True)))]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
