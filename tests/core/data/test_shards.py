"""Ranks that fetch only their own sequences run the same microbatches as ranks that hold the whole batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.data.stored_batch import (
    Arrays,
    BatchWriter,
    RankBatch,
    StoredFields,
    Unit,
    Use,
    assemble,
    deal_minibatches,
    units_of,
)
from mcore_adapter.data.batch import (
    ROUTED_EXPERTS,
    TOKEN_WEIGHTS,
    BatchShape,
    PackedBatch,
    TokenWeights,
    sequence_mean,
    shape_of,
    token_mean,
    token_sum,
    weigh_tokens,
)
from mcore_adapter.data.planner import PassLimits, Planner

GROUPS = (4, 2, 2, 4)
"""Answers to each prompt."""


def make_batch() -> PackedBatch:
    """Twelve sequences of 5, 5, 6, 15, 8, 10, 17, 11, 8, 14, 6 and 9 tokens with four prompts."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 50, n) for n in (4, 2, 7, 3)]
    sequences, masks = [], []
    for prompt, count in zip(prompts, GROUPS, strict=True):
        for n in rng.integers(1, 12, count):
            sequences.append(np.concatenate((prompt, rng.integers(2, 50, n))))
            masks.append([False] * len(prompt) + [True] * int(n))
    lens = [0] + [len(sequence) for sequence in sequences]
    num_tokens = sum(lens)
    return PackedBatch(
        token_ids=torch.tensor(np.concatenate(sequences)),
        cu_seqlens=torch.tensor(lens).cumsum(0),
        loss_mask=torch.tensor(np.concatenate(masks)),
        fields={
            "advantages": torch.from_numpy(rng.normal(size=num_tokens).astype(np.float32)),
            ROUTED_EXPERTS: torch.from_numpy(rng.integers(0, 8, (num_tokens, 2, 1)).astype(np.int16)),
        },
    )


@dataclass
class Store:
    """An object store that counts."""

    objects: list[Arrays] = field(default_factory=list)
    fetched: Counter[int] = field(default_factory=Counter)

    def put(self, arrays: Arrays) -> int:
        self.objects.append({name: values.copy() for name, values in arrays.items()})
        for values in self.objects[-1].values():
            values.flags.writeable = False
        return len(self.objects) - 1

    def fetch(self, refs: list[int]) -> list[Arrays]:
        self.fetched.update(refs)
        return [self.objects[ref] for ref in refs]


@dataclass
class Stored:
    """make_batch() in a store."""

    batch: PackedBatch
    minibatches: list[list[int]]
    uses: list[Use]
    store: Store
    writer: BatchWriter
    fields: StoredFields

    def rank(self, dp_rank: int) -> RankBatch:
        batch = RankBatch(self.writer.stored, ("trainer", dp_rank), self.store.fetch)
        batch.add_fields(self.fields)
        return batch


def store_batch(
    planner: Planner, limit: int, *, unit: Unit = "sequence", count: int = 3, passes: bool = True,
    weights: TokenWeights | None = None, max_sequence_tokens: int | None = None,
) -> Stored:  # fmt: skip
    batch, store = make_batch(), Store()
    group_ids = np.repeat(np.arange(len(GROUPS)), GROUPS)
    minibatches = deal_minibatches(units_of(group_ids, unit), count, seed=3)
    limits = PassLimits(limit, max_sequence_tokens or limit)
    use = partial(Use, group="trainer", planner=planner, limits=limits)
    uses = [use(trains=False)] * passes + [use(trains=True)]
    writer = BatchWriter(
        store.put, token_ids=batch.token_ids.numpy(), cu_seqlens=batch.cu_seqlens.numpy(),
        loss_mask=batch.loss_mask.numpy(), routed_experts=batch.fields[ROUTED_EXPERTS].numpy(),
        minibatches=minibatches, uses=uses,
    )  # fmt: skip
    fields = writer.put_fields({"advantages": batch.fields["advantages"].numpy()}, {"actor": weights})
    return Stored(batch, minibatches, uses, store, writer, fields)


def assert_same(actual: PackedBatch, expected: PackedBatch) -> None:
    assert torch.equal(actual.token_ids, expected.token_ids) and actual.token_ids.dtype == torch.int64
    assert torch.equal(actual.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(actual.loss_mask, expected.loss_mask)
    assert actual.fields.keys() == expected.fields.keys()
    for name, value in expected.fields.items():
        assert torch.equal(actual.fields[name], value) and actual.fields[name].dtype == value.dtype


@pytest.mark.parametrize("weights", [None, sequence_mean, partial(token_sum, divisor=100.0)])
def test_token_weights_and_their_sums_are_those_of_whole_minibatches(weights: TokenWeights | None) -> None:
    stored = store_batch(Planner(dp=2), 30, weights=weights)
    for i, minibatch in enumerate(stored.minibatches):
        expected, divisors = weigh_tokens(stored.batch.select(minibatch), weights or token_mean)
        for dp_rank in range(2):
            shard = stored.rank(dp_rank).minibatch(i, "actor", replay_routing=False)
            assert shard.divisors == divisors
            for places in Planner(dp=2).plan(shard.shape, 30)[dp_rank]:
                found = shard.select(places).fields[TOKEN_WEIGHTS]
                assert torch.equal(found, expected.select(places).fields[TOKEN_WEIGHTS])


def run_step(stored: Stored, dp_rank: int, planner: Planner, limits: Sequence[int]) -> None:
    """Every pass of a step on one rank; the last limit counts for updates, those before for passes."""
    rank = stored.rank(dp_rank)
    for limit in limits[:-1]:
        whole = rank.whole(replay_routing=True)
        for sequences in planner.plan(whole.shape, limit, whole.owners)[dp_rank]:
            assert_same(whole.select(sequences), with_experts_alone(stored.batch.select(sequences)))
    for i, minibatch in enumerate(stored.minibatches):
        shard = rank.minibatch(i, "actor", replay_routing=False)
        for places in planner.plan(shard.shape, limits[-1])[dp_rank]:
            expected = stored.batch.select([minibatch[j] for j in places])
            found = shard.select(places)
            assert torch.equal(found.token_ids, expected.token_ids)
            assert torch.equal(found.fields["advantages"], expected.fields["advantages"])


def with_experts_alone(batch: PackedBatch) -> PackedBatch:
    return PackedBatch(**{**vars(batch), "fields": {ROUTED_EXPERTS: batch.fields[ROUTED_EXPERTS]}})


@pytest.mark.parametrize("passes", [True, False], ids=["passes before the update", "the update alone"])
@pytest.mark.parametrize("max_sequence_tokens", [30, 500])
def test_every_token_is_stored_once_and_a_rank_fetches_what_it_trains_on_once_a_step(
    max_sequence_tokens: int, passes: bool
) -> None:
    planner = Planner(dp=3)
    stored = store_batch(planner, 30, passes=passes, max_sequence_tokens=max_sequence_tokens)
    num_pieces = len(stored.writer.stored.pieces)
    assert num_pieces == 3
    assert sum(len(arrays["token_ids"]) for arrays in stored.store.objects[:num_pieces]) == stored.batch.num_tokens
    for dp_rank in range(3):
        stored.store.fetched.clear()
        run_step(stored, dp_rank, planner, [30] * (3 if passes else 1))
        assert set(stored.store.fetched.values()) == {1} and len(stored.store.fetched) == 2  # tokens, then fields
        trained = {
            minibatch[j]
            for minibatch in stored.minibatches
            for microbatch in planner.plan(shape_of(stored.batch.select(minibatch)), 30)[dp_rank]
            for j in microbatch
        }
        fetched = sum(len(next(iter(stored.store.objects[ref].values()))) for ref in stored.store.fetched)
        assert fetched == 2 * sum(int(stored.batch.seq_lens[i]) for i in trained)


def test_readers_are_those_who_run_the_microbatches_of_this_limit() -> None:
    """Not of max_sequence_tokens; a limit below the longest sequence makes way for that one."""
    lens = np.array([35, 7, 23, 29, 34, 21])
    shape = BatchShape(seq_lens=lens, prompt_lens=np.ones_like(lens), prompt_ids=np.arange(6))
    use = partial(Use, group="actor", planner=Planner(dp=2), trains=True)
    found = {
        limit: [
            sorted(sum(rank, [])) for plan in use(limits=PassLimits(limit, 500)).plan(shape).values() for rank in plan
        ]
        for limit in (20, 56)
    }
    cuts = {at: [sorted(sum(rank, [])) for rank in Planner(dp=2).plan(shape, at)] for at in (35, 56, 500)}
    assert found == {20: cuts[35], 56: cuts[56]} and cuts[56] != cuts[500]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dp=st.integers(1, 4), pp=st.integers(1, 3), share=st.booleans())
def test_owned_sequences_run_once_on_their_ranks_in_equal_numbers_of_microbatches(data, dp, pp, share) -> None:
    lens = np.array(data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=20)), np.int64)
    owners = np.array(data.draw(st.lists(st.integers(0, dp - 1), min_size=len(lens), max_size=len(lens))), np.int64)
    shape = BatchShape(seq_lens=lens, prompt_lens=np.ones_like(lens), prompt_ids=np.arange(len(lens)) // 3)
    planner = Planner(dp=dp, pp=pp, interleaved=pp > 1 and data.draw(st.booleans()), share_prompts=share)
    plan = planner.plan(shape, 50, owners)
    assert len(plan) == dp and len({len(rank) for rank in plan}) == 1
    assert not planner.interleaved or len(plan[0]) % pp == 0
    assert all(lens[part].sum() <= 50 for rank in plan for part in rank if part) or share
    for rank, microbatches in enumerate(plan):
        run = sorted(i for part in microbatches for i in part)
        assert run == (sorted(range(len(lens))) if dp == 1 else np.flatnonzero(owners == rank).tolist())


def test_a_limit_that_was_lowered_since_runs_on_the_right_tokens() -> None:
    planner = Planner(dp=2)
    stored = store_batch(planner, 60, passes=False)
    for dp_rank in range(2):
        run_step(stored, dp_rank, planner, [40, 17])


def test_fewer_sequences_than_ranks_leave_a_rank_with_an_empty_microbatch_of_every_field() -> None:
    planner = Planner(dp=3)
    stored = store_batch(planner, 40, unit="group", count=4)
    (index,) = [i for i, minibatch in enumerate(stored.minibatches) if minibatch == [4, 5]]
    empty = stored.rank(2).minibatch(index, "actor", replay_routing=True).select([])
    assert empty.num_sequences == 0 and empty.fields.keys() == {"advantages", ROUTED_EXPERTS, TOKEN_WEIGHTS}


def test_a_rank_that_trains_on_nothing_in_the_whole_step_runs_an_empty_microbatch_of_every_field() -> None:
    planner = Planner(dp=13)  # for twelve sequences
    stored = store_batch(planner, 60, unit="group", count=1, passes=False)
    readers = {reader for piece in stored.writer.stored.pieces for reader in piece.readers}
    (idle,) = [rank for rank in range(13) if ("trainer", rank) not in readers][:1]
    empty = stored.rank(idle).minibatch(0, "actor", replay_routing=True).select([])
    assert empty.num_sequences == 0 and empty.fields.keys() == {"advantages", ROUTED_EXPERTS, TOKEN_WEIGHTS}


def test_results_of_ranks_come_together_in_the_order_of_the_batch() -> None:
    cu_seqlens = np.array([0, 2, 3, 6])
    first = (np.array([2, 0]), np.array([6.0, 7.0, 8.0, 1.0, 2.0], np.float32))
    assert assemble([first], cu_seqlens).tolist() == [1.0, 2.0, 0.0, 6.0, 7.0, 8.0]
    second = (np.array([1]), np.array([5.0], np.float32))
    assert assemble([first, second], cu_seqlens).tolist() == [1.0, 2.0, 5.0, 6.0, 7.0, 8.0]
