"""An allocation string meets a cluster.

Invariant: an Allocation that comes out uses every slot of the cluster, gives every role in `ROLES` a layout, and has as
many slots per role as the layout has ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from allocation.errors import AllocationError
from allocation.grammar import REST, Spec, parse_spec
from allocation.layout import (
    MEGATRON_ROLES,
    TRAINER_ROLE,
    Backend,
    ParallelLayout,
    check_generator_layout,
    chosen_backend,
    generator_layout_for,
)
from allocation.plan import FALLBACK, SAME_WEIGHTS, Allocation, Cluster
from allocation.sizes import Checks, Layouts, check_sizes, make_cluster, nearest_to
from config_schema.nearest import did_you_mean


def parse(
    text: str,
    *,
    n_nodes: int,
    n_gpus_per_node: int,
    key: str = "allocation_mode",
    default_backend: Backend | Callable[[], Backend] = "embedded",
    trainer_only: bool = False,
    checks: Checks | None = None,
) -> Allocation:
    """Place every role of `text` on a cluster of n_nodes x n_gpus_per_node slots.

    The grammar is in grammar.py; without '+' every role uses all slots. `default_backend` is the generator's where the
    text names none; a function is called only then, and may raise AllocationError. `trainer_only`: nothing is sampled,
    so a side for the generator is an error. What an error suggests passes `checks`. Raises AllocationError.
    """
    cluster = make_cluster(n_nodes, n_gpus_per_node)
    if not isinstance(text, str):
        raise AllocationError("expected text", key=key, value=text, nearest="'sglang.d4m2p1+d2m4p1'")
    try:
        return _resolve(text.strip(), cluster, default_backend, trainer_only, checks or Checks())
    except AllocationError as error:
        raise error.within(key, text) from None


def _resolve(
    text: str,
    cluster: Cluster,
    default_backend: Backend | Callable[[], Backend],
    trainer_only: bool,
    checks: Checks,
) -> Allocation:
    def heuristic() -> Spec:
        def written(backend: Backend) -> str:
            return str(_layouts(_heuristic(cluster, backend, trainer_only), backend))

        return _heuristic(cluster, chosen_backend(default_backend, written), trainer_only)

    if text in ("manual", "search"):
        way = "set device_mapping for each role, or" if text == "manual" else "no search over layouts is made here:"
        near = nearest_to(cluster, _layouts(heuristic(), default_backend), checks)
        as_heuristic = near == _layouts(heuristic(), default_backend)
        nearest = None if near is None else f"{'heuristic, or ' if as_heuristic else ''}{_text(near, trainer_only)}"
        raise AllocationError(f"{way} write the layouts", nearest=nearest)
    if text != "heuristic" and (meant := did_you_mean(text, ["heuristic"])):
        raise AllocationError(f"neither a layout nor a rule{meant}", nearest="heuristic")
    spec = heuristic() if text == "heuristic" else parse_spec(text)
    if trainer_only and spec.generator is not None:
        alone = _layouts(replace(spec, generator=None, disaggregated=False), default_backend)
        near = nearest_to(cluster, alone, checks)
        raise AllocationError(
            "this experiment has no generators; remove the generator side",
            nearest=None if near is None else _text(near, trainer_only),
        )
    layouts = _layouts(spec, default_backend)
    check_generator_layout(layouts.generator, layouts.backend)
    check_sizes(cluster, layouts, checks)
    return layouts.place(cluster)


def _layouts(spec: Spec, default_backend: Backend | Callable[[], Backend]) -> Layouts:
    """Return the layouts of every role, also of those for which the text has none."""
    trainer = _layouts_by_role(spec.trainer)
    backend = spec.backend or chosen_backend(default_backend, lambda choice: str(_layouts(spec, choice)))
    shared = spec.trainer.get(REST, trainer[TRAINER_ROLE])
    generator = spec.generator or generator_layout_for(shared, backend)
    return Layouts(backend=backend, generator=generator, trainer=trainer, disaggregated=spec.disaggregated)


def _text(layouts: Layouts, trainer_only: bool) -> str:
    return str(layouts.trainer[TRAINER_ROLE]) if trainer_only else str(layouts)


def _heuristic(cluster: Cluster, backend: Backend, trainer_only: bool) -> Spec:
    """Give half of the slots to generators, the rest to a data-parallel trainer; all of them to the trainer where
    nothing is sampled.

    Half is rounded down; where there are several nodes it is half of the nodes. A single slot is shared.
    """
    if trainer_only:
        return Spec(backend=backend, trainer={REST: ParallelLayout(dp=cluster.num_slots)})
    if cluster.num_slots == 1:
        return Spec(backend=backend, generator=ParallelLayout(), trainer={REST: ParallelLayout()})
    granule = cluster.n_gpus_per_node if cluster.n_nodes > 1 else 1
    sampling = cluster.num_slots // granule // 2 * granule
    return Spec(
        disaggregated=True,
        backend=backend,
        generator=ParallelLayout(dp=sampling),
        trainer={REST: ParallelLayout(dp=cluster.num_slots - sampling)},
    )


def _layouts_by_role(written: Mapping[str, ParallelLayout]) -> dict[str, ParallelLayout]:
    """Return a layout for each Megatron role: its own, else that of the trained role whose weights it uses, where that
    is named, else that of '*', else that of the role it falls back to."""
    if REST not in written and TRAINER_ROLE not in written:
        raise AllocationError(
            f"{TRAINER_ROLE} has no layout: name it, or give the rest one with *:", nearest=f"{TRAINER_ROLE}:d8m1p1"
        )
    layouts: dict[str, ParallelLayout] = {}
    for role in MEGATRON_ROLES:
        rest = None if SAME_WEIGHTS.get(role) in written else written.get(REST)
        layouts[role] = written.get(role) or rest or layouts[FALLBACK[role]]
    return layouts
