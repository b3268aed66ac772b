"""Configurations of engines that the planner is held to: predicted before they are measured."""

from __future__ import annotations

import random
from dataclasses import dataclass

from allocation import ParallelLayout
from core.planning.scene import Engine
from mcore_adapter.settings import Level
from model_specs.hf_config import parse_config
from tools.bench.gpu.shapes import PLANNED

_SHORTEST = 16  # sequence of a mix, in tokens
_SPREAD = 0.8  # of the logarithm of the lengths of a mix


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of an engine, and the sequences of an update."""

    model: str
    recompute: Level
    length: int
    """Of each sequence; in a mix their median, with a lognormal distribution."""
    tokens: int
    """Of a microbatch."""
    microbatches: int = 1
    """On each data-parallel rank."""
    layout: ParallelLayout = ParallelLayout()
    is_mix: bool = False
    is_critic: bool = False
    offload: bool = False
    fp32_gradients: bool = True

    def __str__(self) -> str:
        sequences = f"mix{self.length}in{self.tokens}" if self.is_mix else f"{self.tokens // self.length}x{self.length}"
        words = [self.model, self.recompute, sequences, str(self.layout)]
        marks = {"critic": self.is_critic, "offload": self.offload, "bf16-gradients": not self.fp32_gradients}
        return " ".join([*words, *(word for word, holds in marks.items() if holds)])

    @property
    def engine(self) -> Engine:
        """The engine as the planner describes it."""
        return Engine(
            name="actor", config=parse_config(PLANNED[self.model]), layout=self.layout, trains=True,
            is_critic=self.is_critic, itemsize=2, gradient_itemsize=4 if self.fp32_gradients else 2,
            recompute=self.recompute, fp8=False, offload=self.offload, tokens=self.tokens, limit_gib=None,
            host_gib=None,
        )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        """The sequences of an update. Those of a mix fill one microbatch for each data-parallel rank."""
        if not self.is_mix:
            return [self.length] * (self.tokens // self.length * self.microbatches * self.layout.dp)
        draw, lengths = random.Random(0), list[int]()
        while (left := self.tokens - sum(lengths)) > 0:
            drawn = max(_SHORTEST, round(self.length * draw.lognormvariate(0.0, _SPREAD)))
            lengths.append(left if left < drawn + _SHORTEST else drawn)
        return lengths * self.layout.dp


CASES = (
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, layout=ParallelLayout(tp=2)),
    Case(model="1.5B", recompute="selective", length=2048, tokens=8192, microbatches=6, layout=ParallelLayout(pp=2)),
    Case(model="1.5B", recompute="linear", length=65536, tokens=65536, layout=ParallelLayout(cp=2)),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, layout=ParallelLayout(dp=2)),
    Case(model="experts", recompute="selective", length=4096, tokens=16384, layout=ParallelLayout(dp=2, ep=2)),
    Case(model="1.5B", recompute="linear", length=16384, tokens=32768),
    Case(model="experts", recompute="selective", length=4096, tokens=16384),
    Case(model="0.5B", recompute="linear", length=65536, tokens=65536),
    Case(model="1.5B", recompute="selective", length=1024, tokens=16384, is_mix=True),
    Case(model="6 layers of 7B", recompute="selective", length=4096, tokens=8192),
    Case(model="1.5B", recompute="none", length=1024, tokens=8192),
    Case(model="0.6B", recompute="none", length=4096, tokens=16384),
    Case(model="4B", recompute="linear", length=16384, tokens=16384),
    Case(model="0.5B", recompute="full", length=65536, tokens=65536),
    Case(model="0.6B", recompute="linear", length=32768, tokens=32768),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, microbatches=2),
    Case(model="0.5B", recompute="offload", length=32768, tokens=32768),
    Case(model="8 layers of 8B", recompute="full", length=8192, tokens=16384),
    Case(model="0.5B", recompute="selective", length=2048, tokens=16384, is_critic=True),
    Case(model="1.5B", recompute="full", length=32768, tokens=65536),
    Case(model="experts", recompute="linear", length=2048, tokens=32768, is_mix=True),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, offload=True),
    Case(model="1.5B", recompute="selective", length=4096, tokens=16384, fp32_gradients=False),
    Case(model="0.5B", recompute="none", length=512, tokens=16384),
    Case(model="0.5B", recompute="selective", length=2048, tokens=32768),
    Case(model="0.5B", recompute="qkv", length=8192, tokens=32768),
    Case(model="1.5B", recompute="linear", length=16384, tokens=32768, layout=ParallelLayout(tp=2)),
    Case(model="4B", recompute="selective", length=8192, tokens=8192, microbatches=4, layout=ParallelLayout(pp=2)),
)
"""The most informative first: time may run out."""
TRIAL = (
    Case(model="tiny", recompute="linear", length=64, tokens=128, layout=ParallelLayout(pp=2), microbatches=3),
    Case(model="tiny", recompute="selective", length=64, tokens=128),
    Case(model="tiny", recompute="full", length=32, tokens=256, is_mix=True),
)
"""In place of CASES without GPUs."""
