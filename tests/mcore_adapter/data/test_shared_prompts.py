"""Sequences that share a prompt: fewer rows, the same numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allocation import ParallelLayout
from helpers.engine_cases import VOCAB, make_engine, per_token, policy_loss, value_loss
from helpers.mcore_ranks import Rank, RankPool
from helpers.tiny_models import write_model
from mcore_adapter.cpu import attention
from mcore_adapter.cpu.attention import packed_causal_attention, plan_trees, tree_attention
from mcore_adapter.data.batch import PackedBatch, prompt_units, shape_of
from mcore_adapter.data.packing import PackingLayout, SharedPromptParams, pack_microbatch

CPU = torch.device("cpu")


def grouped_batch(prompts: list[list[int]], completions: list[tuple[int, list[int]]], seed: int = 0) -> PackedBatch:
    """Sequences (index of the prompt, completion); the middle of a completion may be untrained, as a second turn is."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mask, lens = [], [], []
    for prompt, completion in completions:
        trained = (torch.rand(len(completion), generator=generator) < 0.7).tolist()
        tokens += prompts[prompt] + completion
        mask += [False] * len(prompts[prompt]) + trained
        lens.append(len(prompts[prompt]) + len(completion))
    return PackedBatch(
        token_ids=torch.tensor(tokens),
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0),
        loss_mask=torch.tensor(mask),
        fields={"advantages": torch.randn(len(tokens), generator=generator)},
    )


few_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=4)
batches = st.builds(
    grouped_batch,
    st.lists(few_tokens, min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 3), max_size=4)), min_size=1, max_size=10),
    st.integers(0, 9),
)


def test_a_prompt_has_one_row_a_token_and_the_last_token_of_a_sequence_none() -> None:
    batch = grouped_batch([[1, 2, 3], [4]], [(0, [5, 6]), (1, [7]), (0, [8]), (0, [9, 9, 9])])
    batch = replace(batch, loss_mask=torch.tensor([0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1]).bool())
    packed = pack_microbatch(batch, range(4), PackingLayout(share_prompts=True), device=CPU)
    assert packed.token_ids.tolist() == [[1, 2, 3, 5, 4, 9, 9]]
    assert packed.packed_seq_params.cu_seqlens_q.tolist() == [0, 4, 5, 8, 13]


def attended(inputs: list[torch.Tensor], attend: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def trees_of_12_and_11() -> PackedBatch:
    """Two prompts with five completions each, of which the last one is shorter: its tree is padded."""
    lens = [2 if i == 9 else 3 for i in range(10)]
    batch = grouped_batch([[1, 2], [3, 1]], [(i // 5, [i % 3 + 1] * n) for i, n in enumerate(lens)])
    return replace(batch, loss_mask=torch.cat([torch.arange(2 + n) >= 2 for n in lens]))


@settings(max_examples=200, deadline=None)
@given(batches, st.integers(1, 3))
@example(trees_of_12_and_11(), 1)
def test_a_prompt_attends_with_all_its_completions_as_each_sequence_does(batch: PackedBatch, sp: int) -> None:
    layout = PackingLayout(sequence_parallel_size=sp, share_prompts=True)
    packed = pack_microbatch(batch, range(batch.num_sequences), layout, device=CPU)
    params, rows = packed.packed_seq_params, packed.token_ids.shape[1]
    if not isinstance(params, SharedPromptParams):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SCORES_PER_COPY", 2**20)
        trees = plan_trees(params)
    assert trees is not None
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(rows, heads, 8, generator=generator) for heads in (4, 2, 2)]

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lens = params.cu_seqlens_q.diff().tolist()
        return params.to_packed(packed_causal_attention(*map(params.to_sequences, (q, k, v)), lens, scale=0.3))

    found = attended(inputs, lambda q, k, v: tree_attention(q, k, v, trees, scale=0.3))
    for value, expected in zip(found, attended(inputs, whole), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(batches, st.integers(1, 12), st.integers(1, 12))
def test_units_hold_one_prompt_each_and_respect_the_limit(batch: PackedBatch, limit: int, at_least: int) -> None:
    shape = shape_of(batch)
    units, sizes = prompt_units(shape, max_tokens=limit, at_least=at_least)
    assert len(units) >= min(at_least, batch.num_sequences)
    prompt_lens = shape.prompt_lens
    for unit, size in zip(units, sizes, strict=True):
        one = batch.select(unit)
        ends = one.cu_seqlens[:-1] + prompt_lens[unit]
        prompts = [one.token_ids[a:b].tolist() for a, b in zip(one.cu_seqlens[:-1], ends, strict=True)]
        assert all(prompt == prompts[0] for prompt in prompts)
        assert size == one.num_tokens - sum(map(len, prompts[1:]))
    assert sorted(i for unit in units for i in unit) == list(range(batch.num_sequences))
    lens = batch.seq_lens.tolist()
    for unit, size in zip(units, sizes, strict=True):
        assert size <= (lens[unit[0]] if len(unit) == 1 else limit)
        assert size <= sum(lens[i] for i in unit)


def mixed_batch() -> PackedBatch:
    """Four groups of eight, and what groups are not made of: sequences of one token, without trained tokens, twice the
    same, beginning as another's prompt does, and trained later than another of the same prompt."""
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prompts = [draw(3, 12) for _ in range(4)]
    prompts += [prompts[0][:1], prompts[0] + [5]]
    completions = [(i % 4, draw(2, 9)) for i in range(32)]
    completions += [(4, []), (4, []), (0, []), completions[3], (5, [7, 8]), (4, prompts[0][1:] + [9])]
    return grouped_batch(prompts, completions)


def shared_run(
    rank: Rank, layout: ParallelLayout, model: str, share: bool, recompute: str = "none", as_trees: bool = True
) -> dict[str, Any]:
    """Log-probabilities, values and two updates of actor and critic, prompts shared or not, and attended with all their
    completions at once or not."""
    with rank.joined(layout) as (parallel, device), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SCORES_PER_COPY", 2**20 if as_trees else 0)
        patch.setattr(attention, "_LONGEST_TREE", 2**20 if as_trees else 0)
        device.shares_prompts = share
        batch = mixed_batch()
        batch = batch.with_fields(returns=batch.fields["advantages"].flip(0))
        actor = make_engine(parallel, device, model, recompute=recompute)
        critic = make_engine(parallel, device, model, recompute=recompute, is_critic=True, init_critic_from_actor=True)
        shards = (
            actor.logprobs(batch, max_tokens_per_mb=128, temperature=0.8),
            critic.values(batch, max_tokens_per_mb=128),
        )
        steps = [actor.train_step(batch, policy_loss, max_tokens_per_mb=128, with_entropy=True) for _ in range(2)]
        steps += [critic.train_step(batch, value_loss, max_tokens_per_mb=128) for _ in range(2)]
        return {"steps": steps, "per_token": [None if shard is None else per_token(batch, shard) for shard in shards]}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A model's folder, and what one rank computes with it when nothing is shared."""
    folder = tmp_path_factory.mktemp("shared") / "model"
    write_model("qwen3", folder)
    return str(folder), ranks.run(shared_run, 1, ParallelLayout(), str(folder), False)[0]


@pytest.mark.parametrize(
    ("layout", "recompute", "as_trees"),
    [
        (ParallelLayout(), "selective", False),
        (ParallelLayout(tp=2), "full", True),
        (ParallelLayout(pp=2, vpp=2), "selective", True),
        (ParallelLayout(dp=2), "none", False),
    ],
    ids=str,
)
def test_sharing_prompts_changes_no_number(ranks, alone, layout, recompute, as_trees):
    folder, expected = alone
    assert_same_numbers(ranks.run(shared_run, layout.world_size, layout, folder, True, recompute, as_trees), expected)


def assert_same_numbers(shared: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for kind in range(2):
        parts = [r["per_token"][kind] for r in shared if r["per_token"][kind] is not None]
        assert torch.equal((~torch.stack(parts).isnan()).sum(0), torch.ones(len(parts[0]), dtype=torch.int64))
        found = torch.stack(parts).nan_to_num().sum(0)
        torch.testing.assert_close(found, expected["per_token"][kind], rtol=1e-5, atol=1e-5)
    for step, reference in zip(shared[0]["steps"], expected["steps"], strict=True):
        for key in step.keys() - {"num_microbatches"}:
            assert step[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-5), key


def one_prompt_run(rank: Rank, layout: ParallelLayout, model: str) -> Any:
    with rank.joined(layout) as (parallel, device):
        engine = make_engine(parallel, device, model, train=False)
        batch = grouped_batch([list(range(60))], [(0, [i % 7, 1]) for i in range(32)])
        batch = replace(batch, loss_mask=torch.arange(batch.num_tokens) % 62 >= 60)
        plan = engine.planner.plan(shape_of(batch), 4096)
        return [[len(microbatch) for microbatch in rank_plan] for rank_plan in plan]


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(pp=2, vpp=2)], ids=str)
def test_completions_of_one_prompt_leave_no_rank_without_work(ranks, alone, layout):
    plan = ranks.run(one_prompt_run, layout.world_size, layout, alone[0])[0]
    assert sum(map(sum, plan)) == 32
    assert min(map(min, plan)) >= 8
