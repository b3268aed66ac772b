"""Does a layout suit the model and the batch? Checked before anything starts, from numbers of the two configurations.

Invariant: the `*_errors` functions find every broken rule and raise nothing; `check_*` raise the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from allocation.errors import AllocationError, divisors, nearest_of
from allocation.layout import GENERATOR_ROLE, ParallelLayout

_TRAINING_ROLES = ("actor_train", "critic_train")


def model_errors(
    layout: ParallelLayout,
    role: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    num_layers: int,
    vocab_size: int,
    path: str,
    intermediate_size: int = 0,
    num_experts: int = 0,
    key: str = "allocation_mode",
) -> list[AllocationError]:
    """Return every way in which the model at `path` cannot be split as `layout` specifies.

    A generator pads its vocabulary and copies a KV head to several ranks; a role that Megatron runs does not.
    `intermediate_size` 0: not checked; `num_experts` 0: a dense model.
    """
    megatron = role != GENERATOR_ROLE
    tensor_rules = [
        (num_heads, f"m{layout.tp} must divide num_attention_heads={num_heads}"),
        (intermediate_size, f"m{layout.tp} must divide intermediate_size={intermediate_size}"),
        (vocab_size if megatron else 0, f"m{layout.tp} must divide vocab_size={vocab_size}"),
    ]

    def kv_heads_fit(tp: int) -> bool:
        return num_kv_heads % tp == 0 or (not megatron and tp % num_kv_heads == 0)

    working = [tp for tp in divisors(num_heads) if kv_heads_fit(tp) and all(size % tp == 0 for size, _ in tensor_rules)]
    nearest_tp = f"m = {nearest_of(layout.tp, working)}"
    broken = [(rule, nearest_tp) for size, rule in tensor_rules if size % layout.tp]
    if not kv_heads_fit(layout.tp):
        rule = f"m{layout.tp} must divide num_key_value_heads={num_kv_heads}"
        broken.append((rule if megatron else f"{rule}, or be a multiple of it", nearest_tp))
    chunks = layout.pp * layout.vpp
    if megatron and num_layers < chunks:
        virtual = min(layout.vpp, num_layers // layout.pp)
        nearest = f"v = {virtual}" if virtual > 1 else f"p = {min(layout.pp, num_layers)} without v"
        text = f"p{layout.pp}" + (f" x v{layout.vpp} = {chunks} chunks" if layout.vpp > 1 else "")
        broken.append((f"{text}: each needs a layer, and num_hidden_layers={num_layers}", nearest))
    if megatron and layout.etp > 1:
        broken.append((f"m{layout.etp} of ffn: single experts are not split", "m1 for ffn"))
    if num_experts == 0 and (layout.ep, layout.etp) != (1, 1):
        broken.append((f"e{layout.ep}: the model has no experts to spread", "e1"))
    elif num_experts % layout.ep:
        nearest = f"e = {nearest_of(layout.ep, divisors(num_experts))}"
        broken.append((f"e{layout.ep} must divide num_experts={num_experts}", nearest))
    return [AllocationError(f"{role}:{layout} of {path}: {rule}", key=key, nearest=near) for rule, near in broken]


def batch_errors(
    layout: ParallelLayout,
    role: str,
    *,
    train_bs_n_seqs: int,
    group_size: int = 1,
    ppo_n_minibatches: int = 1,
    beside: Mapping[str, ParallelLayout] | None = None,
) -> list[AllocationError]:
    """Return every way in which a batch of train_bs_n_seqs prompts x group_size answers cannot be dealt out to the
    role. `beside`: layouts of the other roles that take the batch, for which a suggested number works, too.

    The data-parallel ranks are world_size / tp / pp / cp; expert parallelism does not divide. Every role but the
    generator needs a sequence for each of them. A training role makes ppo_n_minibatches updates of a batch and needs
    the same number of sequences, at least one, for each rank in each update: the batch is a multiple of
    ppo_n_minibatches * dp.
    """
    counts = {
        "dataset.train_bs_n_seqs": train_bs_n_seqs,
        "group_size": group_size,
        "ppo.ppo_n_minibatches": ppo_n_minibatches,
    }
    errors = [
        AllocationError("must be from 1 up", key=key, value=count, nearest="1")
        for key, count in counts.items()
        if count < 1
    ]
    if errors or role == GENERATOR_ROLE:
        return errors
    layouts = {**(beside or {}), role: layout}
    error = _dealing_error(layout, role, _Batch(train_bs_n_seqs, group_size, ppo_n_minibatches), layouts)
    return [error] if error else []


def nearest_minibatches(
    layouts: Mapping[str, ParallelLayout], *, train_bs_n_seqs: int, group_size: int = 1, ppo_n_minibatches: int = 1
) -> str:
    """Return the numbers of minibatches next to ppo_n_minibatches for which every role can take the batch; the batch
    to write instead where there is none."""
    batch = _Batch(train_bs_n_seqs, group_size, ppo_n_minibatches)
    near = _nearest_updates(batch, layouts)
    return near or f"dataset.train_bs_n_seqs={_nearest_batches(batch, layouts)}"


class _Batch(NamedTuple):
    prompts: int
    group_size: int
    minibatches: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group_size

    def units(self, role: str, layout: ParallelLayout) -> int:
        """Return what the sequences must be a multiple of for a role: 1 for those that make no updates."""
        return self.minibatches * layout.dp if role in _TRAINING_ROLES else 1

    def deals(self, role: str, layout: ParallelLayout) -> bool:
        """Return whether the role can take the batch."""
        return self.sequences >= layout.dp and self.sequences % self.units(role, layout) == 0


def _dealing_error(
    layout: ParallelLayout, role: str, batch: _Batch, layouts: Mapping[str, ParallelLayout]
) -> AllocationError | None:
    if batch.deals(role, layout):
        return None
    prompts, updates, unit = batch.prompts, batch.minibatches, batch.units(role, layout)
    text = f"{prompts} prompts x group_size={batch.group_size} = {batch.sequences} sequences"
    ranks = f"{layout.dp} data-parallel ranks of {role}:{layout}"
    nearest_batches = _nearest_batches(batch, layouts)
    if batch.sequences < layout.dp:
        return AllocationError(
            f"{text} are fewer than the {ranks}",
            key="dataset.train_bs_n_seqs",
            value=prompts,
            nearest=nearest_batches,
        )
    nearest_updates = nearest_minibatches(
        layouts, train_bs_n_seqs=prompts, group_size=batch.group_size, ppo_n_minibatches=updates
    )
    if batch.sequences < unit:
        return AllocationError(
            f"an update has {batch.sequences // updates} of the {text}, fewer than the {ranks}: a rank without "
            f"sequences has no step to schedule",
            nearest_updates,
            key="ppo.ppo_n_minibatches",
            value=updates,
        )
    if batch.sequences % updates:
        return AllocationError(f"must divide {text}", nearest_updates, key="ppo.ppo_n_minibatches", value=updates)
    return AllocationError(
        f"{text} must be a multiple of ppo_n_minibatches={updates} x {layout.dp} = {unit}, for the {ranks} "
        f"(world size {layout.world_size} / m{layout.tp} / p{layout.pp} / c{layout.cp}; e does not divide)",
        nearest_batches,
        key="dataset.train_bs_n_seqs",
        value=prompts,
    )


def _nearest_batches(batch: _Batch, layouts: Mapping[str, ParallelLayout]) -> str | None:
    """Return the numbers of prompts next to that of `batch` that every role can take."""
    units = math.lcm(*(batch.units(role, layout) for role, layout in layouts.items()))
    # Whole groups go into each minibatch, so the number of prompts is a multiple of the minibatches as well.
    step = math.lcm(units // math.gcd(units, batch.group_size), batch.minibatches)
    fewest = -(-max(layout.dp for layout in layouts.values()) // batch.group_size)
    below, above = batch.prompts // step * step, max(batch.prompts // step + 1, -(-fewest // step)) * step
    return f"{below} or {above}" if below >= fewest else str(above)


def _nearest_updates(batch: _Batch, layouts: Mapping[str, ParallelLayout]) -> str | None:
    """Return the numbers of minibatches next to that of `batch` for which every role can take it; None if no number
    does."""

    def works(minibatches: int) -> bool:
        changed = batch._replace(minibatches=minibatches)
        return all(changed.deals(role, layout) for role, layout in layouts.items())

    return nearest_of(batch.minibatches, filter(works, divisors(batch.prompts)))
