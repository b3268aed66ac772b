"""Layouts: the split of a role over ranks, and the nearest layouts to one that does not work; the exception of this
package. Bottom of this package.

Invariants: a `ParallelLayout` that exists is consistent in itself; whether it fits a cluster or a model is checked by
resolve.py and checks.py. Every message of an AllocationError names the key, the value, the broken rule with its
numbers, and a way out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_SHOWN_CHARACTERS = 120


class AllocationError(ValueError):
    """An allocation that cannot work. `key` is the configuration key to change, `nearest` what works instead."""

    def __init__(self, rule: str, nearest: str | None = None, *, key: str = "allocation_mode", value: object = None):
        self.rule = rule
        self.key = key
        self.value = value
        self.nearest = nearest
        super().__init__(rule)

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={shorten(self.value)}"
        hint = "" if self.nearest is None else f"; nearest: {self.nearest}"
        return f"{self.key}{shown}: {self.rule}{hint}"

    def within(self, key: str, value: object) -> AllocationError:
        """Return the same error as seen from the configuration: about `key`, whose whole value is `value`."""
        part = "" if self.value is None else f"{self.key} {shorten(self.value)}: "
        return AllocationError(part + self.rule, key=key, value=value, nearest=self.nearest)


def shorten(value: object) -> str:
    """Return the value as an error shows it: quoted when text, cut in the middle when long."""
    text = repr(value) if isinstance(value, str) else str(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


def nearest_of(value: int, working: Iterable[int]) -> str | None:
    """Return '2 or 4' for the valid numbers next to `value` below and above; None when there is none."""
    numbers = sorted(set(working))
    below = [n for n in numbers if n < value][-1:]
    above = [n for n in numbers if n > value][:1]
    return " or ".join(map(str, below + above)) or None


def divisors(n: int) -> list[int]:
    """Return all positive divisors of n >= 1, ascending."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


Device = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
"""What a user may write; auto leaves the choice to the run, which reports it with the reason."""

CPU: Device = "cpu"
GPU: Device = "cuda"


@dataclass(frozen=True)
class DeviceDecision:
    """The device of a role, and the reason in words for the start-up table."""

    device: Device
    reason: str


Backend = Literal["sglang", "embedded", "mock", "megatron"]
GENERATOR_BACKENDS: tuple[Backend, ...] = ("sglang", "embedded", "mock")

GENERATOR_ROLE = "actor_gen"
TRAINER_ROLE = "actor_train"
MEGATRON_ROLES = ("actor_train", "actor_inf", "critic_train", "critic_inf", "ref_inf")
ROLES = (GENERATOR_ROLE, *MEGATRON_ROLES)


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism of one role.

    `ep` (expert parallelism) and `etp` (tensor parallelism inside an expert) spread the experts of a MoE model over the
    same ranks: they do not enter `world_size`. `vpp` is the number of model chunks that a pipeline stage holds.
    Raises AllocationError where the degrees contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise AllocationError(
                f"v{self.vpp} cuts the stages of a pipeline into chunks, and there is one stage (p1)",
                key="layout",
                value=self._dims(),
                nearest="v1, or p2",
            )
        per_stage = self.dp * self.tp * self.cp
        if per_stage % (self.ep * self.etp):
            working = [n for n in range(1, min(per_stage, 2 * self.ep) + 1) if per_stage % (n * self.etp) == 0]
            nearest = nearest_of(self.ep, working)
            raise AllocationError(
                f"expert parallelism {self.ep} x expert tensor parallelism {self.etp} must divide the "
                f"{per_stage} ranks of a pipeline stage (d{self.dp} x m{self.tp} x c{self.cp})",
                key="layout",
                value=self._dims(),
                nearest=nearest and f"e = {nearest}",
            )

    @property
    def world_size(self) -> int:
        """Ranks of the role. Expert parallelism does not enter."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.dp * self.tp * self.cp // (self.ep * self.etp)

    def _dims(self) -> str:
        extra = "".join(f"{c}{n}" for c, n in (("c", self.cp), ("e", self.ep), ("v", self.vpp)) if n != 1)
        return f"d{self.dp}m{self.tp}p{self.pp}{extra}"

    def __str__(self) -> str:
        """Return the canonical text: always d, m, p, then c, e, v where they differ from 1; the attn|ffn form where etp
        does."""
        if self.etp == 1:
            return self._dims()
        attn = ParallelLayout(self.dp, self.tp, self.pp, self.cp, vpp=self.vpp)
        experts = f"d{self.expert_dp}m{self.etp}p{self.pp}" + (f"e{self.ep}" if self.ep != 1 else "")
        return f"(attn:{attn}|ffn:{experts})"


def layers_of_chunks(num_layers: int, layout: ParallelLayout) -> list[range]:
    """Return the layers of each model chunk in the order of the network: chunk i lies on stage i % pp, as its i //
    pp-th. What does not divide evenly goes to the first ones, as the last one has the output layer."""
    chunks = layout.pp * layout.vpp
    base, extra = divmod(num_layers, chunks)
    starts = [i * base + min(i, extra) for i in range(chunks + 1)]
    return [range(*pair) for pair in zip(starts, starts[1:], strict=False)]


def stages_of_layers(num_layers: int, layout: ParallelLayout) -> list[int]:
    """Return the pipeline stage of each layer."""
    chunks = layers_of_chunks(num_layers, layout)
    return [chunk % layout.pp for chunk, layers in enumerate(chunks) for _ in layers]


def generator_layout_for(trainer: ParallelLayout, backend: Backend) -> ParallelLayout:
    """Return the generator's layout where one layout is given for every role: the same slots, without what is training
    only.

    A server keeps m and p, and the context-parallel ranks become further replicas. An embedded replica is one process,
    so there is one on every slot.
    """
    if backend == "embedded":
        return ParallelLayout(dp=trainer.world_size)
    return ParallelLayout(dp=trainer.dp * trainer.cp, tp=trainer.tp, pp=trainer.pp)


def check_generator_layout(layout: ParallelLayout, backend: Backend) -> None:
    """Raise AllocationError where `backend` cannot run a generator of this layout."""
    if backend == "embedded" and layout != ParallelLayout(dp=layout.dp):
        raise AllocationError(
            "an embedded generator is one process a replica, so m, p, c, e and v must be 1",
            key="embedded",
            value=str(layout),
            nearest=f"embedded.{ParallelLayout(dp=layout.world_size)}",
        )
    if (layout.cp, layout.vpp, layout.etp) != (1, 1, 1):
        raise AllocationError(
            "c, v and (attn:|ffn:) are for training; a generator takes d, m, p and e",
            key=backend,
            value=str(layout),
            nearest=f"{backend}.{ParallelLayout(dp=layout.dp * layout.cp, tp=layout.tp, pp=layout.pp)}",
        )
    if layout.tp % layout.ep:
        raise AllocationError(
            f"the experts of a server are spread over its tensor-parallel ranks: e{layout.ep} must divide m{layout.tp}",
            key=backend,
            value=str(layout),
            nearest=f"e = {nearest_of(layout.ep, divisors(layout.tp))}",
        )


class UndecidedBackendError(ValueError):
    """No backend of the generators is named, and none can be chosen. `choices` are those to name."""

    def __init__(self, rule: str, choices: Sequence[Backend]) -> None:
        super().__init__(rule)
        self.rule, self.choices = rule, choices


def chosen_backend(default: Backend | Callable[[], Backend], written: Callable[[Backend], str]) -> Backend:
    """Return the backend of a generator that names none. `written`: what names a backend. Raises AllocationError."""
    try:
        return default() if callable(default) else default
    except UndecidedBackendError as error:
        raise AllocationError(error.rule, nearest=" or ".join(map(written, error.choices))) from None


def nearest_layout(layout: ParallelLayout, world_size: int) -> ParallelLayout:
    """Return the layout closest to `layout` on exactly `world_size` ranks: d moves first, then c, p and m; e and v
    follow."""
    return next(nearest_layouts(layout, world_size))


def nearest_layouts(layout: ParallelLayout, world_size: int) -> Iterator[ParallelLayout]:
    """Yield the layouts on exactly `world_size` ranks, those closest to `layout` first. Where it spreads or splits
    experts, those that spread them over about as many ranks follow."""

    def distance(shape: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        steps = (abs(math.log2(a / b)) for a, b in zip(shape, (layout.tp, layout.pp, layout.cp), strict=True))
        return sum(weight * step for weight, step in zip((3, 2, 1), steps, strict=True)), shape

    sizes = divisors(world_size)
    shapes = [(tp, pp, cp) for tp in sizes for pp in sizes for cp in {1, layout.cp} if world_size % (tp * pp * cp) == 0]
    for tp, pp, cp in sorted(shapes, key=distance):
        dp, per_stage = world_size // (tp * pp * cp), world_size // pp
        for ep, etp in _expert_splits(layout, per_stage):
            yield ParallelLayout(dp, tp, pp, cp, ep, layout.vpp if pp > 1 else 1, etp)


def _expert_splits(layout: ParallelLayout, per_stage: int) -> Iterator[tuple[int, int]]:
    """Yield (ep, etp) for so many ranks of a pipeline stage: those of `layout`, close ones, and that of a dense
    model."""
    spread = layout.ep * layout.etp
    if per_stage % spread == 0:
        yield layout.ep, layout.etp
    near = sorted(divisors(per_stage), key=lambda ep: abs(math.log2(ep / spread)))[:3] if spread > 1 else []
    for ep in dict.fromkeys([*near, 1]):
        if (ep, 1) != (layout.ep, layout.etp):
            yield ep, 1
