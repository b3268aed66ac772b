"""For every text there is: it becomes an allocation, or an AllocationError; and what is an allocation comes back."""

import contextlib
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from allocation import GENERATOR_BACKENDS, MEGATRON_ROLES, ROLES, AllocationError, parse, parse_device_mappings

DEGREES = st.integers(1, 4)
WORDS = st.sampled_from(
    [*ROLES, *GENERATOR_BACKENDS, "megatron", "vllm", "rew_inf", "attn", "ffn", "*", ".", ":", ",", "+", "|", "(", ")"]
    + [" ", "d4", "m2", "t2", "p1", "c2", "e2", "v2", "d1m1p1", "8", "heuristic", "manual", "-1", "９", "range(", "[0]"]
)
TEXTS = st.one_of(st.text(), st.lists(WORDS, max_size=14).map("".join))
DEVICE_TEXTS = st.one_of(
    st.text(),
    st.text(alphabet="listrange[](),+-*0123 \n"),
    st.lists(
        st.sampled_from(["list(", "range(", "[", "]", ")", "(", ",", "+", "-", "*", "0", "1", "8", " "]), max_size=20
    ).map("".join),
)


@st.composite
def training_layouts(draw: st.DrawFn) -> tuple[str, int]:
    """(text of a layout in any order and spelling, its world size)"""
    dims = {letter: draw(DEGREES) for letter in "dmpcv"}
    if dims["p"] == 1:
        dims["v"] = 1
    per_stage = dims["d"] * dims["m"] * dims["c"]
    divisors = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
    dims["e"] = draw(st.sampled_from(divisors))
    world_size = per_stage * dims["p"]
    if draw(st.booleans()):
        etp = draw(st.sampled_from([n for n in divisors if per_stage % (n * dims["e"]) == 0]))
        attn = "".join(draw(st.permutations([f"{k}{dims[k]}" for k in "dmpcv"])))
        ffn = "".join(draw(st.permutations([f"t{etp}", f"e{dims['e']}", f"p{dims['p']}"])))
        return f"(attn:{attn}|ffn:{ffn})", world_size
    tensor = draw(st.sampled_from("mt"))
    parts = [f"{tensor if k == 'm' else k}{n}" for k, n in dims.items() if n > 1 or draw(st.booleans())] or ["d1"]
    return "".join(draw(st.permutations(parts))), world_size


@st.composite
def training_sides(draw: st.DrawFn) -> tuple[str, int]:
    """(one layout, or one for some roles; the number of slots)"""
    text, world_size = draw(training_layouts())
    if draw(st.booleans()):
        return draw(st.sampled_from(["", "megatron:", "megatron."])) + text, world_size
    others = draw(st.lists(st.sampled_from(MEGATRON_ROLES[1:]), unique=True))
    entries = [f"{draw(st.sampled_from(['actor_train', '*']))}:{text}"]
    for role in others:
        tp = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
        entries.append(f"{role}:d{world_size // tp}m{tp}")
    return ",".join(draw(st.permutations(entries))), world_size


@st.composite
def allocations(draw: st.DrawFn) -> tuple[str, int, int]:
    """(text, n_nodes, n_gpus_per_node) of an allocation that fits"""
    training, world_size = draw(training_sides())
    shape = draw(st.sampled_from(["+", "|", ""]))
    total = world_size
    if shape:
        backend = draw(st.sampled_from(GENERATOR_BACKENDS))
        size = draw(st.integers(1, 32)) if shape == "+" else world_size
        pieces = [n for n in range(1, size + 1) if size % n == 0]
        tp = 1 if backend == "embedded" else draw(st.sampled_from(pieces))
        pp = 1 if backend == "embedded" else draw(st.sampled_from([n for n in pieces if size % (n * tp) == 0]))
        sides = [f"{backend}{draw(st.sampled_from('.:'))}d{size // (tp * pp)}t{tp}p{pp}", training]
        training = draw(st.sampled_from([shape, f" {shape} "])).join(draw(st.permutations(sides)))
        total += size if shape == "+" else 0
    n_nodes = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    return training, n_nodes, total // n_nodes


@settings(deadline=None, max_examples=150)
@given(allocations(), st.sampled_from(GENERATOR_BACKENDS), st.sampled_from(GENERATOR_BACKENDS))
def test_the_canonical_text_parses_back_to_the_same_allocation(case, backend, other_backend) -> None:
    text, n_nodes, n_gpus_per_node = case
    size = {"n_nodes": n_nodes, "n_gpus_per_node": n_gpus_per_node}
    allocation = parse(text, **size, default_backend=backend)
    canonical = str(allocation)
    again = parse(canonical, **size, default_backend=other_backend)
    assert again == allocation
    assert str(again) == canonical


@settings(deadline=None, max_examples=100)
@given(allocations(), st.sampled_from(GENERATOR_BACKENDS))
def test_every_role_has_a_place_of_its_own_for_each_rank(case: tuple[str, int, int], backend: str) -> None:
    text, n_nodes, n_gpus_per_node = case
    allocation = parse(text, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node, default_backend=backend)
    everything = {(node, gpu) for node in range(n_nodes) for gpu in range(n_gpus_per_node)}
    assert list(allocation.roles) == list(ROLES)
    for placed in allocation.roles.values():
        assert len(set(placed.slots)) == len(placed.slots) == placed.layout.world_size
    assert {slot for placed in allocation.roles.values() for slot in placed.slots} == everything
    assert allocation.colocated == ("+" not in text)
    mappings = {
        role: ([node * n_gpus_per_node + gpu for node, gpu in placed.slots], str(placed.layout))
        for role, placed in allocation.roles.items()
    }
    again = parse_device_mappings(
        mappings, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node, default_backend=allocation.generator.backend
    )
    assert again == allocation


@settings(deadline=None, max_examples=150)
@given(allocations(), st.integers(1, 6), st.integers(1, 9))
def test_what_is_suggested_for_another_cluster_works_there(case, n_nodes, n_gpus_per_node) -> None:
    text, fitting_nodes, fitting_gpus = case
    try:
        parse(text, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node)
    except AllocationError as error:
        assert error.nearest is not None
        nearest, counts = error.nearest.split(", or ")
        assert parse(nearest, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node).roles
        cluster = {"n_nodes": n_nodes, "n_gpus_per_node": n_gpus_per_node}
        cluster.update({key: int(count) for key, count in (part.split("=") for part in counts.split())})
        assert parse(text, **cluster).roles
    else:
        assert math.prod((fitting_nodes, fitting_gpus)) == n_nodes * n_gpus_per_node


@settings(deadline=None, max_examples=250)
@given(TEXTS, st.integers(1, 4), st.integers(1, 9))
@example("d" + "1" * 5000, 1, 8)
@example("(" * 5000, 1, 8)
@example("d999999m999999p999999c999999e999999v999999", 1, 8)
@example("sglang.d1|" * 100, 1, 8)
@example("d٤m２p1", 1, 8)
@example("heuristic", 10**9, 10**9)
def test_any_text_is_an_allocation_or_an_allocation_error(text: str, n_nodes: int, n_gpus_per_node: int) -> None:
    with contextlib.suppress(AllocationError):
        allocation = parse(text, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node)
        assert parse(str(allocation), n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node) == allocation


@settings(deadline=None, max_examples=250)
@given(DEVICE_TEXTS, st.one_of(st.none(), TEXTS), st.sampled_from([*ROLES, "reference", "*", "nobody"]))
@example("[" * 99 + "]" * 99, None, "actor_train")
@example("[" + "-" * 900 + "1]", None, "actor_train")
@example("[" + "+".join(["[0]"] * 900) + "]", None, "actor_train")
def test_any_mapping_is_an_allocation_or_an_allocation_error(text: str, layout: str | None, role: str) -> None:
    mappings = {"actor_train": ("range(8)", None)} | {role: (text, layout)}
    with contextlib.suppress(AllocationError):
        assert parse_device_mappings(mappings, n_nodes=2, n_gpus_per_node=4).roles
