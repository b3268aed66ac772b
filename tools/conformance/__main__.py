"""Run every golden number and gradient check, and the functions of other projects on the same random cases.

    python -m tools.conformance [--peer NAME --python PATH]...

NAME is trl, verl, trinity or openrlhf; PATH the Python interpreter of an environment that has the project. Peers give
the matrix of docs/algorithms.md as markdown. The exit status is 1 where a number is wrong, where a peer differs without
a known formula, or where a known deviation is not reproduced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.conformance.checks import Check
from tools.conformance.compare import PEERS, Outcome, run_peer
from tools.conformance.golden import GOLDEN
from tools.conformance.gradients import gradients
from tools.conformance.rows import ROWS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0 where everything holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=PEERS, default=[], help="a project to compare with")
    parser.add_argument("--python", action="append", type=Path, default=[], help="its Python interpreter")
    given = parser.parse_args(arguments)
    if len(given.peer) != len(given.python) or len(set(given.peer)) != len(given.peer):
        parser.error("--peer and --python belong together, once for each peer")
    problems = own_checks()
    versions: dict[str, str] = {}
    outcomes: list[Outcome] = []
    for peer, python in zip(given.peer, given.python, strict=True):
        versions[peer], found = run_peer(peer, python, ROWS)
        outcomes += found
    problems += [f"{o.check.name}, {o.peer}: {o.verdict}" for o in outcomes if o.verdict.startswith("problem")]
    if outcomes:
        print(matrix(ROWS, outcomes, versions))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def own_checks() -> list[str]:
    """Run the checks that need no peer; return what does not hold."""
    numbers, slopes = [g for family in GOLDEN.values() for g in family()], list(gradients())
    wrong = [f"{g.name}: {g.found}, expected {g.expected}" for g in numbers if not g.holds]
    wrong += [f"gradient of {g.name}: {g.difference:.2g} from finite differences" for g in slopes if not g.holds]
    print(f"{len(numbers)} golden numbers, gradients of {len(slopes)} presets: {len(wrong)} wrong")
    return wrong


def matrix(checks: Sequence[Check], outcomes: Sequence[Outcome], versions: Mapping[str, str]) -> str:
    """Write the matrix and the list of deviations as markdown."""
    cells = {(outcome.check.name, outcome.peer): outcome for outcome in outcomes}
    notes: list[str] = []
    head = ["check", *(f"{peer} {version}" for peer, version in versions.items())]
    lines = ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for check in checks:
        row = [check.name]
        for peer in versions:
            outcome = cells.get((check.name, peer))
            if outcome is None:
                row.append("")
            elif outcome.verdict == "equal":
                row.append("=")
            elif outcome.verdict == "deviates":
                deviation = check.peers[peer].deviation
                assert deviation is not None, "only a deviation deviates"
                notes.append(f"{len(notes) + 1}. {check.name}, {peer}: {deviation.text}. {outcome.case}.")
                row.append(f"≠ {len(notes)}")
            else:
                row.append("problem")
        if any(row[1:]):
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    sys.exit(main())
