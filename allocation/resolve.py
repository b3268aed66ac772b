"""An allocation string, read and placed on a cluster.

    mode    := 'heuristic' | side | side '+' side | side '|' side      '+' separate slots, '|' and alone: the same slots
    side    := [backend sep] layout | entry (',' entry)*
    entry   := (role | '*') sep [backend sep] layout
    layout  := (letter number)+ | '(' 'attn:' dims '|' 'ffn:' dims ')'  letters d, m (or t), p, c, e, v in any order
    sep     := '.' | ':'

Invariants: whatever the text, the outcome is an Allocation or an AllocationError. An Allocation that comes out uses
every slot of the cluster, gives every role in `ROLES` a layout, and has as many slots per role as the layout has ranks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from allocation.checks import Checks, check_sizes, make_cluster, nearest_to
from allocation.layout import (
    GENERATOR_BACKENDS,
    GENERATOR_ROLE,
    MEGATRON_ROLES,
    ROLES,
    TRAINER_ROLE,
    AllocationError,
    Backend,
    ParallelLayout,
    check_generator_layout,
    chosen_backend,
    generator_layout_for,
)
from allocation.plan import FALLBACK, SAME_WEIGHTS, Allocation, Cluster, Layouts
from config_schema import did_you_mean

logger = logging.getLogger(__name__)


REST = "*"
ROLE_ALIASES = {"actor_infer": "actor_gen", "critic": "critic_train", "reference": "ref_inf"}
"""The same roles under the names that a `device_mapping` configuration uses."""
UNPLACED_ROLE = "rew_inf"
"""Accepted and not placed: rewards run in worker processes on the host's CPU."""

_REPLACED_BACKENDS = {"vllm": "sglang", "fsdp": "megatron", "archon": "megatron", "deepspeed": "megatron"}
_REPLACED = re.compile(rf"\b({'|'.join(_REPLACED_BACKENDS)})(?=\s*[.:])")
_FIELDS = {"d": "dp", "m": "tp", "t": "tp", "p": "pp", "c": "cp", "e": "ep", "v": "vpp"}
_DIM = re.compile(r"([a-z])([0-9]+)")
_PREFIX = re.compile(r"\s*(\*|[A-Za-z_][A-Za-z_0-9]*)\s*[.:]\s*")
_MAX_DIGITS = 6


@dataclass(frozen=True)
class Spec:
    """Content of an allocation string. `generator` is None where no layout was written for it: it then follows from the
    others."""

    disaggregated: bool = False
    generator: ParallelLayout | None = None
    backend: Backend | None = None
    trainer: Mapping[str, ParallelLayout] = field(default_factory=dict)
    """By role name, or `REST` for the roles that are not named."""


def parse_spec(text: str) -> Spec:
    """Parse an allocation string. Raises AllocationError (without key and value, which the caller adds) where `text` is
    not in the grammar."""
    _reject_other_backends(text)
    pluses, bars = _split(text, "+"), _split(text, "|")
    if len(pluses) > 1 and len(bars) > 1:
        raise AllocationError(
            "'+' (separate slots) and '|' (the same slots) cannot be combined", "sglang.d4m1p1+d2m2p1"
        )
    if len(pluses) > 2 or len(bars) > 2:
        raise AllocationError(
            f"one generator side and one training side, got {max(len(pluses), len(bars))} sides", "sglang.d4m1p1+d2m2p1"
        )
    if len(pluses) == 2:
        return _two_sides(pluses, "+")
    if len(bars) == 2:
        return _two_sides(bars, "|")
    side = _side(text)
    if isinstance(side, Spec):
        return side
    backend, layout = side
    return Spec(backend=None if backend == "megatron" else backend, trainer={REST: layout})


def parse_role_layout(text: str) -> tuple[Backend | None, ParallelLayout]:
    """Parse the layout of one role: 'sglang.d4m2p1' -> ('sglang', layout), 'd4m2p1' -> (None, layout). Raises
    AllocationError."""
    _reject_other_backends(text)
    name, rest = _prefix(text)
    if name is None:
        return None, parse_layout(text)
    return _backend(name), parse_layout(rest)


def parse_layout(text: str) -> ParallelLayout:
    """Parse 'd4m2p1', in any order, or '(attn:...|ffn:...)'. Raises AllocationError."""
    stripped = text.strip()
    if stripped.startswith("("):
        return _parse_moe(stripped)
    return ParallelLayout(**_dims(stripped))


def _two_sides(texts: list[str], separator: str) -> Spec:
    sides = [_side(text) for text in texts]
    generators = [i for i, s in enumerate(sides) if isinstance(s, tuple) and s[0] in GENERATOR_BACKENDS]
    if len(generators) != 1:
        found = "neither side does" if not generators else "both sides do"
        left, right = (text.strip() for text in texts)
        if generators:
            nearest = f"{left}{separator}{parse_role_layout(right)[1]}"
        else:
            nearest = f"sglang.{left}{separator}{right} (or embedded., without GPUs)"
        raise AllocationError(
            f"exactly one side of '{separator}' names the generator ({', '.join(GENERATOR_BACKENDS)}), {found}", nearest
        )
    generator, trainer = sides[generators[0]], sides[1 - generators[0]]
    assert isinstance(generator, tuple), "sides with a backend are tuples"
    if isinstance(trainer, tuple):
        trainer = Spec(trainer={REST: trainer[1]})
    if trainer.generator is not None:
        raise AllocationError(
            f"{GENERATOR_ROLE} is given twice, by the side with {generator[0]} and by name: drop one of them"
        )
    return replace(trainer, disaggregated=separator == "+", backend=generator[0], generator=generator[1])


def _side(text: str) -> tuple[Backend | None, ParallelLayout] | Spec:
    """Return (backend, layout) for a side with one layout; a Spec for per-role entries."""
    entries = _split(text, ",")
    name, rest = _prefix(text)
    if len(entries) == 1 and not (name and _is_role(name)):
        return parse_role_layout(text)
    if name in _all_backends() and (inner := _prefix(rest)[0]) is not None and _is_role(inner):
        raise AllocationError(
            f"a backend in front of per-role layouts is ambiguous: write it at {GENERATOR_ROLE}",
            f"{GENERATOR_ROLE}:{name}.d1m1p1,{rest.strip()[:60]}",
        )
    spec = Spec()
    trainer: dict[str, ParallelLayout] = {}
    seen: set[str] = set()
    for entry in entries:
        name, rest = _prefix(entry)
        if name is None:
            raise AllocationError(
                f"every part of a per-role list is role:layout, got {entry.strip()!r}", f"actor_train:{entry.strip()}"
            )
        role = role_name(name)
        if role in seen:
            raise AllocationError(f"{role} is given twice")
        seen.add(role)
        backend, layout = parse_role_layout(rest)
        if role == GENERATOR_ROLE:
            if backend == "megatron":
                raise AllocationError(
                    f"{GENERATOR_ROLE} runs on {', '.join(GENERATOR_BACKENDS)}, not on megatron", f"sglang.{layout}"
                )
            spec = replace(spec, generator=layout, backend=backend)
            continue
        if backend in GENERATOR_BACKENDS:
            raise AllocationError(f"{role} runs on megatron; {backend} is for {GENERATOR_ROLE}", f"{name}:{layout}")
        if role == UNPLACED_ROLE:
            logger.warning("allocation: %s has no slots: rewards run in worker processes on the CPU", UNPLACED_ROLE)
            continue
        trainer[role] = layout
    return replace(spec, trainer=trainer)


def role_name(name: str) -> str:
    """Return the role's name here, `REST` for '*'. Raises AllocationError for a name that is no role."""
    role = ROLE_ALIASES.get(name, name)
    if role not in ROLES and role not in (REST, UNPLACED_ROLE):
        raise AllocationError(
            f"{name} is no role; roles: {', '.join(ROLES)}, or * for the rest" + did_you_mean(name, ROLES, cutoff=0.5)
        )
    return role


def _is_role(name: str) -> bool:
    return name in ROLES or name in ROLE_ALIASES or name in (REST, UNPLACED_ROLE)


def _all_backends() -> tuple[str, ...]:
    return (*GENERATOR_BACKENDS, "megatron")


def _backend(name: str) -> Backend:
    if name not in _all_backends():
        known = (*_all_backends(), *ROLES)
        raise AllocationError(
            f"{name} is neither a backend ({', '.join(_all_backends())}) nor a role" + did_you_mean(name, known)
        )
    return cast(Backend, name)


def _reject_other_backends(text: str) -> None:
    if match := _REPLACED.search(text):
        other, ours = match[1], _REPLACED_BACKENDS[match[1]]
        raise AllocationError(
            f"the {other} backend is not supported; use {ours}",
            _REPLACED.sub(lambda m: _REPLACED_BACKENDS[m[1]], text),
        )


def _prefix(text: str) -> tuple[str | None, str]:
    match = _PREFIX.match(text)
    return (match[1], text[match.end() :]) if match else (None, text)


def _parse_moe(text: str) -> ParallelLayout:
    parts = [_prefix(part) for part in _split(text[1:-1], "|")] if text.endswith(")") else []
    if [name for name, _ in parts] != ["attn", "ffn"]:
        raise AllocationError("a MoE layout is (attn:layout|ffn:layout)", "(attn:d4m2p2c2|ffn:d8m1p2e2)")
    attn, ffn = (_dims(rest.strip()) for _, rest in parts)
    if "ep" in attn:
        raise AllocationError(f"e{attn['ep']} belongs to the experts: write it in ffn")
    if wrong := {"cp", "vpp"} & ffn.keys():
        raise AllocationError(f"{' and '.join(sorted(wrong))} belong to the whole model: write them in attn")
    pp = attn.get("pp", 1)
    if ffn.get("pp", pp) != pp:
        raise AllocationError(
            f"attention and experts share their pipeline stages: p{pp} in attn, p{ffn['pp']} in ffn", f"p{pp} in both"
        )
    layout = ParallelLayout(**attn, ep=ffn.get("ep", 1), etp=ffn.get("tp", 1))
    if ffn.get("dp", layout.expert_dp) != layout.expert_dp:
        raise AllocationError(
            f"attention and experts use the same {layout.world_size} ranks: ffn d{ffn['dp']} x m{layout.etp} x p{pp} x "
            f"e{layout.ep} = {ffn['dp'] * layout.etp * pp * layout.ep}",
            f"d{layout.expert_dp} in ffn",
        )
    return layout


def _dims(text: str) -> dict[str, int]:
    """Return {'dp': 4, 'tp': 2, 'pp': 1} for 'd4m2p1'."""
    dims: dict[str, int] = {}
    position = 0
    while position < len(text) or not text:
        match = _DIM.match(text, position)
        if match is None:
            raise AllocationError(
                f"a layout is letters with numbers, got {text[position : position + 20]!r} "
                f"(d data, m or t tensor, p pipeline, c context, e expert, v virtual pipeline)",
                "d4m2p1",
            )
        letter, digits = match[1], match[2]
        if letter not in _FIELDS:
            raise AllocationError(
                f"no dimension is called {letter!r}: d data, m or t tensor, p pipeline, c context, e expert, v virtual"
            )
        name = _FIELDS[letter]
        if name in dims:
            raise AllocationError(
                f"{letter} is given twice" if letter not in "mt" else "m (its synonym is t) is given twice"
            )
        if len(digits) > _MAX_DIGITS or int(digits) == 0:
            raise AllocationError(
                f"{letter}{digits[:20]} must be a whole number from 1 to {10**_MAX_DIGITS - 1}", f"{letter}1"
            )
        dims[name] = int(digits)
        position = match.end()
    return dims


def _split(text: str, separator: str) -> list[str]:
    """Split at `separator` outside of parentheses. Raises AllocationError where those do not match up."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth < 0:
                raise AllocationError("')' without '('")
        elif character == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise AllocationError("'(' without ')'")
    return [*parts, text[start:]]


def parse(
    text: str,
    *,
    n_nodes: int,
    n_gpus_per_node: int,
    default_backend: Backend | Callable[[], Backend] = "embedded",
    trainer_only: bool = False,
    checks: Checks | None = None,
) -> Allocation:
    """Place every role of `text` on a cluster of n_nodes x n_gpus_per_node slots.

    See the file for the grammar; without '+' every role uses all slots. `default_backend` is the generator's where the
    text names none; a function is called only then, and may raise AllocationError. `trainer_only`: nothing is sampled,
    so a side for the generator is an error. What an error suggests passes `checks`. Raises AllocationError.
    """
    cluster = make_cluster(n_nodes, n_gpus_per_node)
    try:
        return _resolve(text.strip(), cluster, default_backend, trainer_only, checks or Checks())
    except AllocationError as error:
        raise error.within("allocation_mode", text) from None


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
