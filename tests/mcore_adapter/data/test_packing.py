"""Packing on its own: where every token goes, for arbitrary lengths and layouts."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_adapter.data.batch import ROUTED_EXPERTS, PackedBatch
from mcore_adapter.data.packing import PackingLayout, pack_microbatch

CPU = torch.device("cpu")


def batch_of(lens: list[int], seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0)
    total = int(cu_seqlens[-1])
    loss_mask = torch.rand(total, generator=generator) < 0.6
    loss_mask[cu_seqlens[:-1]] = False
    return PackedBatch(
        token_ids=torch.arange(1, total + 1),  # every token is unique, 0 is padding
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        fields={"advantages": torch.randn(total, generator=generator)},
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 3), st.randoms())
def test_context_parallel_ranks_together_hold_every_token_once_with_its_predictor(lens, cp, sp, random):
    batch = batch_of(lens)
    sequences = random.sample(range(len(lens)), random.randint(1, len(lens)))
    expected = batch.select(sequences)
    seen_tokens, seen_trained = [], []
    for rank in range(cp):
        layout = PackingLayout(cp_size=cp, cp_rank=rank, sequence_parallel_size=sp)
        packed = pack_microbatch(batch, sequences, layout, device=CPU)
        assert packed.num_tokens == expected.num_tokens
        assert packed.token_ids.shape[1] % sp == 0
        cu_seqlens = packed.packed_seq_params.cu_seqlens_q
        assert int(cu_seqlens[-1]) == packed.token_ids.shape[1] * cp
        if cp > 1:
            assert torch.all(cu_seqlens % (2 * cp) == 0)
        # the packed position that predicts a trained token holds the token before it
        assert torch.equal(packed.token_ids[0, packed.rows], packed.targets - 1)
        own = torch.arange(expected.num_tokens) if packed.token_index is None else packed.token_index
        assert torch.equal(packed.fields["advantages"], expected.fields["advantages"][own])
        assert torch.equal(packed.fields["loss_mask"], expected.loss_mask[own])
        assert torch.equal(packed.targets, expected.token_ids[own][packed.trained])
        starts = expected.cu_seqlens[:-1].repeat_interleave(expected.seq_lens)
        within = torch.arange(expected.num_tokens) - starts
        assert torch.equal(packed.position_ids[0, packed.rows] + 1, within[own][packed.trained])
        seen_tokens += own.tolist()
        seen_trained += packed.targets.tolist()
    assert sorted(seen_tokens) == list(range(expected.num_tokens))
    assert sorted(seen_trained) == sorted(expected.token_ids[expected.loss_mask].tolist())


def test_without_tensor_or_context_parallelism_nothing_is_padded():
    packed = pack_microbatch(batch_of([3, 5, 2]), [2, 0, 1], PackingLayout(), device=CPU)
    assert packed.token_ids.tolist() == [[9, 10, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 2, 5, 10]
    assert packed.packed_seq_params.max_seqlen_q == 5


def test_sequence_parallelism_pads_the_end_only_as_a_sequence_of_its_own():
    packed = pack_microbatch(batch_of([3, 2]), [0, 1], PackingLayout(sequence_parallel_size=4), device=CPU)
    assert packed.token_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 5, 8]


def test_context_parallel_ranks_hold_an_early_and_a_late_chunk_of_each_sequence():
    """As Megatron's attention takes them: chunks r and 2 cp - 1 - r."""
    ranks = [
        pack_microbatch(batch_of([8, 3]), [0, 1], PackingLayout(cp_size=2, cp_rank=rank), device=CPU).token_ids.tolist()
        for rank in range(2)
    ]
    assert ranks == [[[1, 2, 7, 8, 9, 0]], [[3, 4, 5, 6, 10, 11]]]


def test_no_tensor_on_a_context_parallel_rank_is_as_long_as_the_sequence() -> None:
    batch = batch_of([64])
    for rank in range(4):
        packed = pack_microbatch(batch, [0], PackingLayout(cp_size=4, cp_rank=rank, routes=True), device=CPU)
        params: Any = packed.packed_seq_params
        held = {**vars(packed), **packed.fields, **vars(params), **vars(params.routing)}
        sizes = {name: value.numel() for name, value in held.items() if isinstance(value, torch.Tensor)}
        assert {"token_ids", "targets", "advantages", "sequences"} <= sizes.keys() and max(sizes.values()) <= 17


def test_for_8_bit_products_every_rank_gets_rows_in_multiples_of_16():
    for cp, sp in ((1, 1), (1, 2), (2, 2)):
        layout = PackingLayout(cp_size=cp, sequence_parallel_size=sp, row_multiple=16)
        for lens in ([3, 2], [15, 16, 2], [31, 1]):
            packed = pack_microbatch(batch_of(lens), range(len(lens)), layout, device=CPU)
            assert packed.token_ids.shape[1] % (16 * sp) == 0


def test_a_filler_has_one_token_and_trains_nothing():
    packed = pack_microbatch(batch_of([3, 2]), [], PackingLayout(sequence_parallel_size=2), device=CPU)
    assert packed.num_tokens == 1
    assert packed.trained.numel() == 0
    assert packed.fields["loss_mask"].tolist() == [False]
    assert packed.fields["advantages"].tolist() == [0.0]


def test_routers_get_the_tokens_that_predict_another_and_the_experts_of_their_rows() -> None:
    batch = batch_of([3, 1, 4])
    experts = torch.arange(8 * 2 * 2).view(8, 2, 2)
    batch = batch.with_fields(**{ROUTED_EXPERTS: experts})
    packed: Any = pack_microbatch(batch, [2, 0], PackingLayout(routes=True), device=CPU)
    routing = packed.packed_seq_params.routing
    assert routing.rows.tolist() == [0, 1, 2, 4, 5], "the last token of a sequence predicts nothing"
    assert routing.sequences.tolist() == [0, 0, 0, 1, 1] and routing.lens.tolist() == [3.0, 2.0]
    assert routing.batch_tokens == 5, "of all three sequences"
    assert torch.equal(routing.experts, experts[[4, 5, 6, 7, 0, 1, 2]])
    assert ROUTED_EXPERTS not in packed.fields
