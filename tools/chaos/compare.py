"""Whether a run that was killed did the same as one left alone."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.chaos.agent import effects_of, num_executions
from tools.chaos.run import Trial

if TYPE_CHECKING:
    from torch import Tensor

_COMPARED = (
    "step",
    "loss",
    "actor_loss",
    "grad_norm",
    "lr",
    "task_reward",
    "ppo_approx_kl",
    "n_tokens",
    "n_valid_tokens",
    "critic_loss",
    "critic_grad_norm",
    "critic_lr",
    "critic_values",
    "margin",
    "demonstration_nll",
    "demonstration_weight",
)


@dataclass(kw_only=True)
class Verdict:
    """The result of the comparisons so far."""

    compared: int = 0
    """Runs that were killed and compared with the undisturbed one."""
    lost: int = 0
    duplicated: int = 0
    losses_equal: bool = True
    problems: list[str]
    effects: int = 0
    """Of tools, in all runs that were killed."""
    repeated: int = 0
    """Executions of a tool whose effect was there already."""

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def summary(self) -> str:
        """What was found, in one line."""
        if not self.compared:
            return "nothing was compared, as a run failed"
        equal = "yes" if self.losses_equal else "no"
        return f"{self.lost} lost, {self.duplicated} duplicated, losses bit-equal: {equal}"


def compare(expected: Trial, found: Trial, verdict: Verdict) -> None:
    """Compare prompts in their order, losses, and the tensors of the last checkpoint."""
    verdict.compared += 1
    wanted = [(row["step"], row["prompts"]) for row in expected.rows("consumed.jsonl")]
    got = [(row["step"], row["prompts"]) for row in found.rows("consumed.jsonl")]
    wanted_counts = Counter(p for _, prompts in wanted for p in prompts)
    got_counts = Counter(p for _, prompts in got for p in prompts)
    verdict.lost += (wanted_counts - got_counts).total()
    verdict.duplicated += (got_counts - wanted_counts).total()
    if wanted != got:
        verdict.problems.append(f"{found.name}: other prompts, or another order: {first_difference(wanted, got)}")
    figures = [
        [{k: row[k] for k in _COMPARED if k in row} for row in t.rows("metrics.jsonl")] for t in (expected, found)
    ]
    if expected.with_critic and not any("critic_loss" in row for row in figures[0]):
        verdict.problems.append(f"{expected.name}: the metrics have no critic_loss")
    if figures[0] != figures[1]:
        verdict.losses_equal = False
        verdict.problems.append(f"{found.name}: other losses: {first_difference(*figures)}")
    if expected.agent:
        _compare_effects(expected, found, verdict)
    last = f"globalstep{expected.steps}"
    if not (found.recover / last).exists():
        verdict.problems.append(f"{found.name}: there is no checkpoint of its last step")
        return
    for engine in expected.engines:
        for (name, one), (_, other) in zip(
            optimizer_state(expected.recover / last, engine),
            optimizer_state(found.recover / last, engine),
            strict=True,
        ):
            if one.numpy().tobytes() != other.numpy().tobytes():
                verdict.problems.append(f"{found.name}: {engine}/{name} of the last checkpoint differs")


def _compare_effects(expected: Trial, found: Trial, verdict: Verdict) -> None:
    """Compare what the tools of two runs did, as it is seen outside of them."""
    wanted, got = effects_of(expected.effects), effects_of(found.effects)
    verdict.effects += len(got)
    verdict.repeated += num_executions(found.effects) - len(got)
    if wanted != got:
        missing, more = len(wanted.keys() - got.keys()), len(got.keys() - wanted.keys())
        other = sum(wanted[name] != got[name] for name in wanted.keys() & got.keys())
        problem = f"{found.name}: other effects: {missing} missing, {more} more, {other} with another content"
        verdict.problems.append(problem)


def first_difference(wanted: list, got: list) -> str:
    for one, other in zip(wanted, got, strict=False):
        if one != other:
            return f"{other} instead of {one}"
    return f"{len(got)} steps instead of {len(wanted)}"


def optimizer_state(checkpoint: Path, engine: str) -> Iterator[tuple[str, Tensor]]:
    """Return (name, tensor) of everything of one engine in a recover checkpoint: weights, masters, moments."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint / engine)
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that this is one process
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    yield from sorted(tensors.items())
