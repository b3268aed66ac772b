"""Run the checks, and write the matrix of the peers as markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.conformance.checks import Check
from tools.conformance.compare import Outcome, run_peer
from tools.conformance.golden import GOLDEN
from tools.conformance.gradients import gradients
from tools.conformance.rows import ROWS


def peer_checks(interpreters: Mapping[str, Path]) -> list[str]:
    """Compare with peers, by name of a peer its Python interpreter, and print the matrix; return what does not hold."""
    versions: dict[str, str] = {}
    outcomes: list[Outcome] = []
    for peer, python in interpreters.items():
        versions[peer], found = run_peer(peer, python, ROWS)
        outcomes += found
    if outcomes:
        print(matrix(ROWS, outcomes, versions))
    return [f"{o.check.name}, {o.peer}: {o.verdict}" for o in outcomes if o.verdict.startswith("problem")]


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
