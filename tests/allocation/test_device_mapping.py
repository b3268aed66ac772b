"""device_mapping per role, as an expression: what it may say, and the failures that such mappings are known for."""

import pytest

from allocation import AllocationError, ParallelLayout, parse, parse_device_mappings
from allocation.resolve import parse_devices


def error_of(mappings: dict, n_nodes: int = 1, n_gpus_per_node: int = 8) -> AllocationError:
    with pytest.raises(AllocationError) as caught:
        parse_device_mappings(mappings, n_nodes=n_nodes, n_gpus_per_node=n_gpus_per_node)
    return caught.value


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,8))", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("range(8)", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("list(range(0, 8, 2))", [0, 2, 4, 6]),
        ("range(7, -1, -1)", [7, 6, 5, 4, 3, 2, 1, 0]),
        ("[0, 2, 4,]", [0, 2, 4]),
        ("[5]", [5]),
        (" [ 7,0 , 10 ]\n", [7, 0, 10]),
        ("list(range(0,2)) + list(range(4,6)) + [7]", [0, 1, 4, 5, 7]),
        ("list([3, 1])", [3, 1]),
        ("  list(\n range(0,\n2))\n", [0, 1]),
        ([4, 5], [4, 5]),
    ],
)
def test_lists_ranges_and_their_sums_are_read(text: str | list[int], devices: list[int]) -> None:
    assert parse_devices(text, limit=8) == devices
    assert parse_devices(text, limit=len(devices)) == devices


@pytest.mark.parametrize(
    "text",
    [
        "",
        "__import__('os').system('true')",
        "list(range(0,8)",
        "[0] * 8",
        "range(0,8,0)",
        "[x for x in range(8)]",
        "range(999999999)",
        "[" + "9" * 5000 + "]",
        "(" * 500 + "1" + ")" * 500,
        "+".join(["[0]"] * 50_000),
        "[１]",
        "[1 2]",
        "[0,1,2,3,4,5,6,7,8]",
    ],
)
def test_anything_else_is_refused_and_nothing_is_evaluated(text: str) -> None:
    with pytest.raises(AllocationError):
        parse_devices(text, limit=8)


def test_the_same_slots_for_every_role_are_a_colocated_run() -> None:
    mappings = {role: ("list(range(0,8))", None) for role in ("actor_train", "actor_infer", "reference")}
    allocation = parse_device_mappings(mappings, n_nodes=1, n_gpus_per_node=8)
    assert allocation.colocated
    assert allocation == parse("d8m1p1", n_nodes=1, n_gpus_per_node=8)
    assert str(allocation) == "embedded.d8m1p1"


def test_disjoint_slots_are_a_disaggregated_run() -> None:
    mappings = {
        "actor_train": ("list(range(0,8))", ParallelLayout(dp=4, tp=2)),
        "actor_infer": ("list(range(8,16))", "sglang.d2m4p1"),
        "reference": ("list(range(16,24))", None),
    }
    allocation = parse_device_mappings(mappings, n_nodes=3, n_gpus_per_node=8)
    assert not allocation.colocated
    assert allocation.trainer.slots == tuple((0, gpu) for gpu in range(8))
    assert allocation.generator.slots == tuple((1, gpu) for gpu in range(8))
    assert allocation.generator.backend == "sglang"
    assert allocation.roles["ref_inf"].slots == tuple((2, gpu) for gpu in range(8))
    assert allocation.roles["critic_inf"].slots == allocation.trainer.slots
    assert str(allocation) == (
        "actor_gen=sglang.d2m4p1 on node 1: 0-7, actor_train=d4m2p1 on node 0: 0-7, ref_inf=d8m1p1 on node 2: 0-7"
    )


def test_rank_r_runs_on_entry_r() -> None:
    allocation = parse_device_mappings({"actor_train": ("[3, 1, 2, 0]", "d2m2")}, n_nodes=2, n_gpus_per_node=2)
    assert allocation.trainer.slots == ((1, 1), (0, 1), (1, 0), (0, 0))
    assert allocation.trainer.tp_groups_across_nodes == 2


def test_slots_beyond_the_cluster_are_named_instead_of_a_key_error_of_a_node() -> None:
    # Elsewhere: self.node2pg[node_rank] KeyError: 1, where max(device_mapping) is larger than the number of GPUs.
    error = error_of({"actor_train": ("list(range(0,8))", None), "actor_infer": ("list(range(8,16))", None)})
    assert error.key == "actor_infer.device_mapping"
    assert "slot 15 does not exist: n_nodes=1 x n_gpus_per_node=8 = 8 slots" in str(error)
    assert error.nearest == "list(range(0,8)), or n_nodes=2"
    just_beyond = error_of({"actor_train": ("list(range(1,9))", None)})
    assert "slot 8 does not exist" in str(just_beyond)


def test_slots_that_no_role_uses_are_named_instead_of_a_key_error_of_a_node() -> None:
    # Elsewhere: self.node2pg[node_rank] KeyError: 1, where max(device_mapping) is smaller than the number of GPUs.
    error = error_of({"actor_train": ("list(range(0,8))", None)}, n_nodes=2)
    assert error.key == "actor_train.device_mapping", "a key of the file"
    assert "no role uses slots 8-15 of the 16" in str(error)
    gap = error_of({"actor_train": ("[0, 1, 3]", None)}, n_gpus_per_node=4)
    assert "slots 2 of the 4" in str(gap)


def test_more_slots_than_the_cluster_has_are_counted() -> None:
    error = error_of({"actor_train": ("list(range(0,9))", None)})
    assert "9 slots or more" in str(error)
    assert error.nearest == "list(range(0,8))"


@pytest.mark.parametrize(
    ("mappings", "rule", "nearest"),
    [
        ({"actor_train": ("[0, 0, 1]", None)}, "slot 0 is given to two ranks", "list(range(0,8))"),
        ({"actor_train": ("[0, -1]", None)}, "slot -1 does not exist", "list(range(0,8))"),
        ({"actor_train": ("[]", None)}, "names no slot", "list(range(0,8))"),
        ({"actor_train": ("range(8)", "d2m2")}, "8 slots for the 4 ranks", "4 slots, or layout d4m2p1"),
        ({"actor_gen": ("range(8)", None), "actor_infer": ("range(8)", None)}, "two device mappings", None),
        ({"ref_inf": ("range(8)", None)}, "every run has a trainer", "list(range(0,8))"),
        ({"refernce": ("range(8)", None)}, "did you mean 'ref_inf'?", None),
        ({"*": ("range(8)", None)}, "no slots of its own", None),
        ({}, "every run has a trainer", "list(range(0,8))"),
    ],
)
def test_a_mapping_that_cannot_work_is_answered_with_the_rule(mappings: dict, rule: str, nearest: str | None) -> None:
    error = error_of(mappings)
    assert rule in str(error)
    assert error.key.endswith("device_mapping")
    if nearest is not None:
        assert error.nearest == nearest


@pytest.mark.parametrize(
    ("mappings", "message"),
    [
        ({"actor_train": ("range(8)", "sglang.d8")}, "actor_train.layout='sglang.d8': actor_train runs on megatron"),
        ({"actor_train": ("range(8)", "nonsense")}, "actor_train.layout='nonsense': a layout is letters with numbers"),
        ({"actor_train": ("range(8)", None), "actor_gen": ("range(8)", "vllm.d8")}, "actor_gen.layout='vllm.d8': "),
        ({"actor_train": ("range(8)", None), "actor_gen": ("range(8)", "megatron.d8")}, "not on megatron"),
        ({"actor_train": ("range(8)", None), "actor_gen": ("range(8)", "embedded.d4m2")}, "one process a replica"),
    ],
)
def test_a_layout_that_cannot_work_is_named_by_its_own_key(mappings: dict, message: str) -> None:
    assert message in str(error_of(mappings))
