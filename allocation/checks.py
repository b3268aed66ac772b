"""Does a layout suit the model, the batch and the cluster, and if not, what is the nearest one that does? Checked
before anything starts, from numbers of the configuration.

Invariants: the `*_errors` functions find every broken rule and raise nothing; `check_*` raise the first of them. Every
suggestion made here is itself accepted on the cluster it is made for.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from allocation.layout import (
    GENERATOR_ROLE,
    TRAINER_ROLE,
    AllocationError,
    ParallelLayout,
    divisors,
    nearest_layout,
    nearest_layouts,
    nearest_of,
)
from allocation.plan import Allocation, Cluster, Layouts

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
    if role == GENERATOR_ROLE:
        return []
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
            f"{text} are fewer than the {ranks}", key="dataset.train_bs_n_seqs", value=prompts, nearest=nearest_batches
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


_MOST_SLOTS_TRIED = 200_000
"""Slots of all allocations that are tried for one suggestion, which bounds its time to seconds."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What a suggestion has to pass beside the checks of this package: of the batch, the model, the backend."""

    suits: Callable[[str, ParallelLayout], bool] = lambda role, layout: True
    """Whether a role can have a layout; the cheaper check, made first."""
    accepts: Callable[[Allocation], bool] = lambda allocation: True
    """Whether an allocation passes every check."""

    def nearest(self, role: str, layouts: Iterable[ParallelLayout]) -> ParallelLayout | None:
        """Return the first of `layouts` that suits the role."""
        return next((layout for layout in layouts if self.suits(role, layout)), None)


def first_accepted(cluster: Cluster, candidates: Iterable[Layouts], checks: Checks) -> Layouts | None:
    """Return the first of the candidates, each of which fills the cluster, that is accepted; None if none is."""
    for layouts in islice(candidates, max(1, _MOST_SLOTS_TRIED // cluster.num_slots)):
        if checks.accepts(layouts.place(cluster)):
            return layouts
    return None


def nearest_to(cluster: Cluster, layouts: Layouts, checks: Checks) -> Layouts | None:
    """Return accepted layouts that fill the cluster and are close to `layouts`; None if there are none."""
    return first_accepted(cluster, _fill(cluster.num_slots, layouts, checks), checks)


def nearest_layouts_of(allocation: Allocation, checks: Checks) -> Layouts | None:
    """Return accepted layouts on the same cluster, close to those of an allocation whose layouts are refused."""
    return nearest_to(allocation.cluster, allocation.layouts, checks)


def _fill(total: int, layouts: Layouts, checks: Checks) -> Iterator[Layouts]:
    """Yield layouts of `total` slots whose roles suit them, those closest to `layouts` first."""
    if not layouts.disaggregated or total == 1:
        # A single slot is shared.
        yield from _of_sizes(replace(layouts, disaggregated=False), total, total, checks)
        return
    generator, trainer = layouts.generator, layouts.trainer[TRAINER_ROLE]
    replica, model = generator.tp * generator.pp, trainer.tp * trainer.pp * trainer.cp
    wanted = total * generator.world_size / (generator.world_size + trainer.world_size)
    kept = [n for n in range(replica, total, replica) if (total - n) % model == 0]
    for n in sorted(kept, key=lambda n: abs(n - wanted)):
        for found in _of_sizes(layouts, n, total - n, checks):
            if (found.generator.tp, found.generator.pp) == (generator.tp, generator.pp) and _same_model(found, trainer):
                yield found
    # Where no data parallelism fits, m, p and c give way: of halves first, if there is no ratio to keep.
    middle = wanted if kept else total // 2
    for n in sorted(range(1, total), key=lambda n: abs(n - middle)):
        yield from _of_sizes(layouts, n, total - n, checks)


def _same_model(layouts: Layouts, trainer: ParallelLayout) -> bool:
    found = layouts.trainer[TRAINER_ROLE]
    return (found.tp, found.pp, found.cp) == (trainer.tp, trainer.pp, trainer.cp)


def _of_sizes(layouts: Layouts, sampling: int, training: int, checks: Checks) -> Iterator[Layouts]:
    """Yield layouts for `sampling` slots of the generator and `training` slots of the trainer, the closest first."""
    written = layouts.trainer[TRAINER_ROLE]
    others = {role: layout for role, layout in layouts.trainer.items() if layout != written}
    fitted = {role: checks.nearest(role, nearest_layouts(layout, training)) for role, layout in others.items()}
    if None in fitted.values():
        return
    for near in nearest_layouts(written, training):
        # Roles without a layout of their own stay with the trainer.
        trainer = {role: fitted.get(role) or near for role in layouts.trainer}
        if not all(checks.suits(role, layout) for role, layout in trainer.items()):
            continue
        for generator in nearest_generators(layouts.generator, sampling):
            if checks.suits(GENERATOR_ROLE, generator):
                yield replace(layouts, generator=generator, trainer=trainer)


def nearest_generators(layout: ParallelLayout, world_size: int) -> Iterator[ParallelLayout]:
    """Yield the generator's layouts on exactly `world_size` ranks, those closest to `layout` first."""
    if layout.tp == layout.pp == 1:
        yield ParallelLayout(dp=world_size)
        return
    for fitted in nearest_layouts(replace(layout, ep=1), world_size):
        yield replace(fitted, ep=layout.ep if fitted.tp % layout.ep == 0 else 1)


MAX_SLOTS = 100_000
"""Largest cluster: a bound on what a typing error in n_nodes can make this package compute."""
_NO_LAYOUT = (
    "; no layout near this one passes the checks of batch, model and backend: change the batch, n_nodes or "
    "n_gpus_per_node"
)


def make_cluster(n_nodes: int, n_gpus_per_node: int) -> Cluster:
    """Build the cluster. Raises AllocationError for one that is too large."""
    for key, count, other in (("n_gpus_per_node", n_gpus_per_node, 1), ("n_nodes", n_nodes, n_gpus_per_node)):
        if count * other > MAX_SLOTS:
            raise AllocationError(
                f"{count * other} GPUs are more than the {MAX_SLOTS} that a run may have",
                key=key,
                value=count,
                nearest=str(MAX_SLOTS // other),
            )
    return Cluster(n_nodes, n_gpus_per_node)


def check_sizes(cluster: Cluster, layouts: Layouts, checks: Checks) -> None:
    """Raise AllocationError unless every slot is used and the roles that share slots are equally large. What the error
    suggests passes `checks`."""
    _check_total(cluster, layouts, checks)
    training = layouts.trainer[TRAINER_ROLE].world_size
    for role, layout in layouts.trainer.items():
        if layout.world_size != training:
            near = first_accepted(cluster, _with_role(layouts, role, training), checks)
            raise AllocationError(
                f"{role}:{layout} has {layout.world_size} ranks and shares its slots with "
                f"{TRAINER_ROLE}:{layouts.trainer[TRAINER_ROLE]}, which has {training}" + ("" if near else _NO_LAYOUT),
                nearest=None if near is None else f"{role}:{near.trainer[role]}",
            )
    generator = layouts.generator
    if not layouts.disaggregated and generator.world_size != training:
        fitting = (replace(layouts, generator=near) for near in nearest_generators(generator, training))
        near = first_accepted(cluster, fitting, checks)
        raise AllocationError(
            f"{GENERATOR_ROLE}:{generator} has {generator.world_size} ranks and shares its slots with "
            f"{TRAINER_ROLE}:{layouts.trainer[TRAINER_ROLE]}, which has {training}" + ("" if near else _NO_LAYOUT),
            nearest=None if near is None else f"{near.backend}.{near.generator}",
        )


def _check_total(cluster: Cluster, layouts: Layouts, checks: Checks) -> None:
    needed = layouts.num_slots
    if needed == cluster.num_slots:
        return
    near = nearest_to(cluster, layouts, checks)
    ways = [] if near is None else [str(near)]
    counts = _nearest_cluster(cluster, needed)
    shared = [*layouts.trainer.values(), *([] if layouts.disaggregated else [layouts.generator])]
    are_of_one_size = len({layout.world_size for layout in shared}) == 1
    if needed <= MAX_SLOTS and are_of_one_size and checks.accepts(layouts.place(replace(cluster, **counts))):
        ways.append(" ".join(f"{key}={count}" for key, count in counts.items()))
    sampling, training = layouts.generator.world_size, layouts.trainer[TRAINER_ROLE].world_size
    raise AllocationError(
        f"needs {f'{sampling} + {training} = ' if layouts.disaggregated else ''}{needed} GPUs, but too "
        f"{'few' if needed > cluster.num_slots else 'many'} are available: n_nodes={cluster.n_nodes} x "
        f"n_gpus_per_node={cluster.n_gpus_per_node} = {cluster.num_slots}, and all must be used"
        + (" (without GPUs, n_gpus_per_node counts processes)" if layouts.backend == "embedded" else "")
        + ("" if ways else _NO_LAYOUT),
        nearest=", or ".join(ways) or None,
    )


def _with_role(layouts: Layouts, role: str, training: int) -> Iterator[Layouts]:
    """Yield the layouts with another one of `training` ranks for a role; the roles still to be checked fit too."""
    generator = layouts.generator
    if not layouts.disaggregated:
        generator = next(nearest_generators(generator, training))
    others = {name: nearest_layout(layout, training) for name, layout in layouts.trainer.items()}
    for near in nearest_layouts(layouts.trainer[role], training):
        yield replace(layouts, generator=generator, trainer={**others, role: near})


def _nearest_cluster(cluster: Cluster, needed: int) -> dict[str, int]:
    """Return the counts to change so that the cluster has `needed` slots."""
    if needed % cluster.n_gpus_per_node == 0:
        return {"n_nodes": needed // cluster.n_gpus_per_node}
    if needed % cluster.n_nodes == 0:
        return {"n_gpus_per_node": needed // cluster.n_nodes}
    return {"n_nodes": 1, "n_gpus_per_node": needed}
