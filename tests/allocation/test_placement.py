"""Where ranks land: disjoint, complete, and tensor-parallel groups on one node wherever that can be had."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from allocation import MEGATRON_ROLES, Allocation, parse
from allocation.layout import ParallelLayout
from allocation.plan import Cluster, split

LAYOUTS = st.builds(ParallelLayout, dp=st.integers(1, 6), tp=st.integers(1, 6), pp=st.integers(1, 3))


def nodes_of_groups(allocation: Allocation, role: str) -> list[set[int]]:
    placed = allocation.roles[role]
    tp = placed.layout.tp
    return [{slot.node for slot in placed.slots[i : i + tp]} for i in range(0, len(placed.slots), tp)]


def crossings(order: list[int], tp: int, per_node: int) -> int:
    return sum(len({slot // per_node for slot in order[i : i + tp]}) > 1 for i in range(0, len(order), tp))


def test_the_generator_gets_the_first_nodes_and_the_trainer_the_rest() -> None:
    allocation = parse("sglang.d8m2p1+d2m4p2", n_nodes=4, n_gpus_per_node=8)
    assert allocation.generator.slots == tuple((node, gpu) for node in (0, 1) for gpu in range(8))
    assert allocation.trainer.slots == tuple((node, gpu) for node in (2, 3) for gpu in range(8))


def test_colocated_groups_keep_to_one_node_where_the_node_is_no_multiple_of_them() -> None:
    allocation = parse("sglang.d3m4p1", n_nodes=2, n_gpus_per_node=6)
    assert [len(nodes) for nodes in nodes_of_groups(allocation, "actor_train")] == [1, 1, 2]
    assert allocation.table()[0].tp_groups_across_nodes == 1


def test_a_whole_server_stays_on_one_node_and_its_slots_are_neighbours() -> None:
    allocation = parse("sglang.d3m2p2+d1m4p1", n_nodes=2, n_gpus_per_node=8)
    assert allocation.generator.replicas == [
        ((0, 0), (0, 1), (0, 2), (0, 3)),
        ((0, 4), (0, 5), (0, 6), (0, 7)),
        ((1, 0), (1, 1), (1, 2), (1, 3)),
    ]


def test_servers_that_are_split_off_keep_their_own_slots_whole() -> None:
    generator = parse("sglang.d3m2p1+d2m1p1", n_nodes=1, n_gpus_per_node=8).generator
    first, last = generator.split(1)
    assert last is not None and first.layout.dp == 2 and last.layout.dp == 1
    assert (first.replicas, last.replicas) == (generator.replicas[:2], generator.replicas[2:])
    assert generator.split(0) == (generator, None)


def test_the_context_parallel_ranks_of_a_replica_keep_to_one_node() -> None:
    # In a row, the second replica would be GPU 4 of node 0 with 0 to 2 of node 1.
    order = Cluster(4, 5).whole().order(ParallelLayout(dp=5, cp=4), generator=False)
    assert order[:16] == [*range(0, 4), *range(5, 9), *range(10, 14), *range(15, 19)]
    # The generator could have all of node 0 but two GPUs; each node gives it two instead.
    generator, trainer = split(Cluster(2, 6), ParallelLayout(dp=4), ParallelLayout(dp=2, cp=2, tp=2))
    assert generator.gpus == ((0, 2), (0, 2)) and trainer.gpus == ((2, 6), (2, 6))


def test_roles_with_other_layouts_keep_their_groups_whole_on_the_trainers_slots() -> None:
    allocation = parse("sglang.d12+actor_train:d6m2,ref_inf:d3m4", n_nodes=4, n_gpus_per_node=6)
    for role in MEGATRON_ROLES:
        assert all(len(nodes) == 1 for nodes in nodes_of_groups(allocation, role)), role


@settings(deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(1, 8))
def test_pools_are_disjoint_and_complete_and_no_group_crosses_in_vain(generator, trainer, per_node) -> None:
    total = generator.world_size + trainer.world_size
    n_nodes = -(-total // per_node)
    # Fill the last node with further data-parallel replicas of a generator that has no other parallelism.
    if n_nodes * per_node != total:
        generator = ParallelLayout(dp=n_nodes * per_node - trainer.world_size)
    cluster = Cluster(n_nodes, per_node)
    generator_pool, trainer_pool = split(cluster, generator, trainer)
    sampling = generator_pool.order(generator, generator=True)
    training = trainer_pool.order(trainer, generator=False)
    assert len(sampling) == generator.world_size
    assert sorted(sampling + training) == list(range(cluster.num_slots))
    if crossings(sampling, generator.tp, per_node) or crossings(training, trainer.tp, per_node):
        assert not crossing_free_split_exists(generator, trainer, n_nodes, per_node)


def crossing_free_split_exists(generator: ParallelLayout, trainer: ParallelLayout, n_nodes: int, per_node: int) -> bool:
    """By trying every number of the generator's slots on every node: sums reachable with only whole groups."""
    if max(generator.tp, trainer.tp) > per_node:
        return False
    whole = [c for c in range(per_node + 1) if c % generator.tp == 0 and (per_node - c) % trainer.tp == 0]
    reachable = {0}
    for _ in range(n_nodes):
        reachable = {a + b for a, b in product(reachable, whole)}
    return generator.world_size in reachable


@settings(deadline=None)
@given(LAYOUTS, st.integers(1, 8))
def test_a_colocated_role_crosses_no_more_than_the_nodes_force(layout: ParallelLayout, per_node: int) -> None:
    n_nodes = layout.world_size // per_node
    if n_nodes * per_node != layout.world_size:
        n_nodes, per_node = 1, layout.world_size
    order = Cluster(n_nodes, per_node).whole().order(layout, generator=False)
    assert sorted(order) == list(range(layout.world_size))
    whole_groups = n_nodes * (per_node // layout.tp)
    assert crossings(order, layout.tp, per_node) == layout.dp * layout.pp - whole_groups
