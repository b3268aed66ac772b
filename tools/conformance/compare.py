"""Run the functions of a peer in its own interpreter, and compare them with the code that trains."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.conformance.batches import SEEDS, Batch, make_batch
from tools.conformance.checks import Call, Check, Result, of, ours

TOLERANCE = 1e-6
SERVE = Path(__file__).with_name("peers") / "serve.py"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row of the matrix for one peer."""

    check: Check
    peer: str
    difference: float
    """Largest difference between the peer and this project over all cases; inf for NaN."""
    from_formula: float | None
    """Largest difference between the peer and the formula of its deviation."""
    case: str
    """Where the difference is largest."""
    error: str = ""

    @property
    def verdict(self) -> str:
        """equal, deviates (as its formula states), or a problem: the row is wrong."""
        if self.error:
            return f"problem: {self.error}"
        if self.from_formula is None:
            return (
                "equal" if self.difference <= TOLERANCE else f"problem: differs by {self.difference:.2g}, {self.case}"
            )
        if self.from_formula > TOLERANCE:
            return f"problem: the formula differs by {self.from_formula:.2g} from the peer"
        return "deviates" if self.difference > TOLERANCE else "problem: the deviation is not reproduced"


def run_peer(peer: str, python: Path, checks: Sequence[Check]) -> tuple[str, list[Outcome]]:
    """Compare every row that a peer has: its version, and the outcomes. Raises RuntimeError where its adapter fails."""
    rows = [(check, check.peers[peer]) for check in checks if peer in check.peers]
    batches = {f"{check.kind} {seed}": make_batch(check.kind, seed) for check, _ in rows for seed in SEEDS}
    calls = [
        {"operation": call.operation, "options": dict(call.options), "batch": f"{check.kind} {seed}"}
        for check, call in rows
        for seed in SEEDS
    ]
    process = subprocess.run(
        [str(python), "-P", "-W", "ignore", str(SERVE), peer],
        input=json.dumps({"batches": batches, "calls": calls}), capture_output=True, text=True,
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"{peer}: {python} ended with {process.returncode}:\n{process.stderr[-3000:]}")
    answer = json.loads(process.stdout.splitlines()[-1])
    results = iter(answer["results"])
    return answer["version"], [
        judge(check, call, peer, [(batches[f"{check.kind} {seed}"], next(results)) for seed in SEEDS])
        for check, call in rows
    ]


def judge(check: Check, call: Call, peer: str, found: Sequence[tuple[Batch, Mapping[str, Any]]]) -> Outcome:
    """Compare the results of a peer on all batches of a row with this project and with the formula of its deviation."""
    worst, case, from_formula = 0.0, "", None
    for batch, result in found:
        if "error" in result:
            text = result["error"].strip().splitlines()
            return Outcome(
                check=check, peer=peer, difference=0.0, from_formula=None, case="", error=" ".join(text[-3:])
            )
        theirs = {name: torch.tensor(value, dtype=torch.float64) for name, value in result.items()}
        expected = ours(check, batch)
        apart = difference(theirs, expected, batch)
        if apart >= worst:
            worst, case = apart, describe(check, theirs, expected, batch)
        if call.deviation is not None:
            from_formula = max(from_formula or 0.0, difference(theirs, call.deviation.formula(batch), batch))
    return Outcome(check=check, peer=peer, difference=worst, from_formula=from_formula, case=case)


def difference(first: Result, second: Result, batch: Batch) -> float:
    """Return the largest difference between two results over trained tokens, relative to `second` where that is above
    1; inf where one is NaN."""
    apart = [
        ((first[name] - value).abs() / value.abs().clamp(min=1.0) * _mask(value, batch)).max()
        for name, value in second.items()
    ]
    return float(torch.stack(apart).nan_to_num(nan=torch.inf).max())


def describe(check: Check, theirs: Result, expected: Result, batch: Batch) -> str:
    """Name the token of the largest difference, with its advantage or reward and ratios, and both values."""
    name = next(n for n in ("grads", "advantages", "weights") if n in expected)
    apart = ((theirs[name] - expected[name]).abs() * of(batch, "mask")).nan_to_num(nan=torch.inf)
    if name == "grads" and float(apart.max()) <= TOLERANCE:
        return f"equal gradients, loss {theirs['loss']:.6g}, here {expected['loss']:.6g}"
    i, t = divmod(int(apart.argmax()), apart.shape[1])
    if name == "advantages":
        where = f"R = {batch['rewards'][i]:g}"
    elif check.quantity == "preferences":
        where = "rejected token" if i % 2 else "chosen token"
    else:
        low, high = ("rollout_logprobs", "old_logprobs") if name == "weights" else ("old_logprobs", "logprobs")
        ratio = (of(batch, high) - of(batch, low))[i, t].exp()
        where = f"{'w' if name == 'weights' else 'r'} = {ratio:.3g}, A = {batch['advantages'][i][t]:.3g}"
    what = {"grads": "gradient", "advantages": "A", "weights": "weight"}[name]
    return f"{where}: {what} {theirs[name][i, t]:.8g}, here {expected[name][i, t]:.8g}"


def _mask(value: torch.Tensor, batch: Batch) -> torch.Tensor:
    return of(batch, "mask") if value.dim() == 2 else torch.ones(())
