"""An allocation string, read and placed on a cluster.

    mode    := 'heuristic' | side | side '+' side | side '|' side      '+' separate slots, '|' and alone: the same slots
    side    := [backend sep] layout | entry (',' entry)*
    entry   := (role | '*') sep [backend sep] layout
    layout  := (letter number)+ | '(' 'attn:' dims '|' 'ffn:' dims ')'  letters d, m (or t), p, c, e, v in any order
    sep     := '.' | ':'

Invariants: whatever the text, the outcome is an Allocation or an AllocationError. An Allocation that comes out uses
every slot of the cluster, gives every role in `ROLES` a layout, and has as many slots per role as the layout has ranks.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

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
    nearest_layouts,
)
from allocation.plan import FALLBACK, SAME_WEIGHTS, Allocation, Cluster, Layouts, RoleAllocation, Slot, spans
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
        if name is None and entry.strip() in _all_backends():
            raise AllocationError(f"a dot stands between a backend and its layout: {text.replace(',', '.', 1)}")
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
            f"the {other} backend is not supported; use {ours}", _REPLACED.sub(lambda m: _REPLACED_BACKENDS[m[1]], text)
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
    text: str, cluster: Cluster, default_backend: Backend | Callable[[], Backend], trainer_only: bool, checks: Checks
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


_NUMBER = r"\s*-?[0-9]{1,9}\s*"
_TERM = re.compile(
    rf"range\((?P<range>{_NUMBER}(?:,{_NUMBER}){{0,2}})\)|\[(?P<items>(?:{_NUMBER},)*(?:{_NUMBER}|\s*))\]"
)
_LIST_OF = re.compile(r"list\((.*)\)", re.DOTALL)
_EXAMPLE = "list(range(0,8))"


def parse_devices(mapping: str | Sequence[int], *, limit: int) -> list[int]:
    """Return the slot of each rank, in rank order: 'list(range(0,4)) + [6, 7]' -> [0, 1, 2, 3, 6, 7].

    `limit` is the number of slots in the cluster: a longer list cannot be meant. Raises AllocationError without key.
    """
    terms = map(_term, mapping.split("+")) if isinstance(mapping, str) else [mapping]
    devices: list[int] = []
    for numbers in terms:
        count = len(devices) + len(numbers)
        if count > limit:
            rule = f"names {count} slots or more, and n_nodes x n_gpus_per_node = {limit}"
            raise AllocationError(rule, f"list(range(0,{limit}))")
        devices += numbers
    return devices


def _term(text: str) -> Sequence[int]:
    """Return a list or a range; list(...) around it changes nothing."""
    inner = _LIST_OF.fullmatch(text.strip())
    found = _TERM.fullmatch(inner[1].strip() if inner else text.strip())
    if found is None:
        raise _wrong(f"expected a list, range(start, stop, step) or a sum of these, got {text.strip()[:40]!r}")
    if found["range"] is None:
        return [int(number) for number in found["items"].split(",") if number.strip()]
    arguments = [int(number) for number in found["range"].split(",")]
    if arguments[2:] == [0]:
        raise _wrong("the step of range must not be 0")
    return range(*arguments)


def _wrong(rule: str) -> AllocationError:
    return AllocationError(rule, _EXAMPLE)


DeviceMapping: TypeAlias = tuple[str | Sequence[int], ParallelLayout | str | None]
"""(slots in rank order, layout). None for the layout: data parallel over all of them."""


def parse_device_mappings(
    mappings: Mapping[str, DeviceMapping],
    *,
    n_nodes: int,
    n_gpus_per_node: int,
    default_backend: Backend | Callable[[], Backend] = "embedded",
    checks: Checks | None = None,
) -> Allocation:
    """Place every role on the slots written for it: {"actor_train": ("list(range(0,8))", layout), ...}.

    Slot i is GPU i % n_gpus_per_node of node i // n_gpus_per_node. Roles whose slots overlap are colocated. A role
    without a mapping takes that of the role it falls back to (plan.FALLBACK; the generator: the trainer's slots). The
    layout of actor_gen may name its backend ('sglang.d4m2p1'). Raises AllocationError; its key is the device_mapping
    or the layout. The layouts that it suggests suit `checks`.
    """
    cluster = make_cluster(n_nodes, n_gpus_per_node)
    slots = [Slot(node, gpu) for node in range(n_nodes) for gpu in range(n_gpus_per_node)]
    roles: dict[str, RoleAllocation] = {}
    used: set[int] = set()
    read: dict[str, list[int]] = {}
    for name, (mapping, layout) in mappings.items():
        try:
            role = _placed_role(name, roles)
            # Colocated roles repeat one text: read it once.
            devices = read.get(str(mapping)) or parse_devices(mapping, limit=cluster.num_slots)
            _check_devices(devices, cluster)
        except AllocationError as error:
            raise error.within(f"{name}.device_mapping", mapping) from None
        try:
            backend, degrees = _role_layout(role, layout, len(devices), default_backend)
        except AllocationError as error:
            raise error.within(f"{name}.layout", layout) from None
        _check_count(role, degrees, len(devices), checks or Checks(), key=f"{name}.device_mapping", value=mapping)
        read[str(mapping)] = devices
        used.update(devices)
        roles[role] = RoleAllocation(role, backend, degrees, tuple(slots[i] for i in devices))
    if TRAINER_ROLE not in roles:
        raise AllocationError(
            "missing, and every run has a trainer",
            key=f"{TRAINER_ROLE}.device_mapping",
            nearest=f"list(range(0,{cluster.num_slots}))",
        )
    _check_all_used(used, cluster, key=f"{name}.device_mapping")
    trainer = roles[TRAINER_ROLE]
    if GENERATOR_ROLE not in roles:
        backend = chosen_backend(default_backend, lambda choice: f"{GENERATOR_ROLE}.layout={choice}.{trainer.layout}")
        shared = generator_layout_for(trainer.layout, backend)
        roles[GENERATOR_ROLE] = RoleAllocation(GENERATOR_ROLE, backend, shared, trainer.slots)
    for role in MEGATRON_ROLES:
        if role not in roles:
            roles[role] = replace(roles[FALLBACK[role]], role=role)
    return Allocation({role: roles[role] for role in ROLES}, n_nodes, n_gpus_per_node)


def _placed_role(name: str, taken: Mapping[str, RoleAllocation]) -> str:
    role = role_name(name)
    if role not in ROLES:
        raise AllocationError(f"{name} has no slots of its own; roles: {', '.join(ROLES)}")
    if role in taken:
        raise AllocationError(f"{role} has two device mappings")
    return role


def _check_devices(devices: Sequence[int], cluster: Cluster) -> None:
    total = cluster.num_slots
    everything = f"list(range(0,{total}))"
    if not devices:
        raise AllocationError("names no slot", nearest=everything)
    if min(devices) < 0 or max(devices) >= total:
        wrong = max(devices) if max(devices) >= total else min(devices)
        raise AllocationError(
            f"slot {wrong} does not exist: n_nodes={cluster.n_nodes} x n_gpus_per_node={cluster.n_gpus_per_node} = "
            f"{total} slots, 0 to {total - 1}",
            nearest=f"{everything}, or n_nodes={wrong // cluster.n_gpus_per_node + 1}" if wrong > 0 else everything,
        )
    if len(set(devices)) != len(devices):
        twice = next(device for device, count in Counter(devices).items() if count > 1)
        raise AllocationError(f"slot {twice} is given to two ranks of the role", nearest=everything)


def _role_layout(
    role: str, layout: ParallelLayout | str | None, num_devices: int, default_backend: Backend | Callable[[], Backend]
) -> tuple[Backend, ParallelLayout]:
    backend, degrees = parse_role_layout(layout) if isinstance(layout, str) else (None, layout)
    degrees = degrees or ParallelLayout(dp=num_devices)
    if role == GENERATOR_ROLE:
        backend = backend or chosen_backend(default_backend, lambda choice: f"{choice}.{degrees}")
        if backend not in GENERATOR_BACKENDS:
            raise AllocationError(f"{role} runs on {', '.join(GENERATOR_BACKENDS)}, not on {backend}")
        check_generator_layout(degrees, backend)
    elif backend in GENERATOR_BACKENDS:
        raise AllocationError(f"{role} runs on megatron, not on {backend}", nearest=str(degrees))
    else:
        backend = "megatron"
    return backend, degrees


def _check_count(
    role: str, degrees: ParallelLayout, num_devices: int, checks: Checks, *, key: str, value: object
) -> None:
    if degrees.world_size != num_devices:
        near = checks.nearest(role, nearest_layouts(degrees, num_devices))
        raise AllocationError(
            f"lists {num_devices} slots for the {degrees.world_size} ranks of {degrees}",
            key=key,
            value=value,
            nearest=f"{degrees.world_size} slots" + ("" if near is None else f", or layout {near}"),
        )


def _check_all_used(used: set[int], cluster: Cluster, *, key: str) -> None:
    """Raise AllocationError for a slot that no role names: it would be idle for the whole run."""
    idle = sorted(set(range(cluster.num_slots)) - used)
    if not idle:
        return
    raise AllocationError(
        f"no role uses slots {spans(idle)} of the {cluster.num_slots} in n_nodes={cluster.n_nodes} x "
        f"n_gpus_per_node={cluster.n_gpus_per_node}; all must be used",
        key=key,
        nearest=f"extend a device_mapping to {cluster.num_slots - 1}",
    )
