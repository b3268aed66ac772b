"""Pairs become packed batches: answers alone are trained on, pairs stay together, and recovery continues the order."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from core.data.datasets import AnswerDataset, PreferenceDataset
from mcore_adapter.data.batch import PAIR, BatchShape, shape_of
from mcore_adapter.data.planner import PassLimits, Planner
from rollout.data.encoder import Encoder
from rollout.data.rows import PreferenceFields
from rollout.data.source import DatasetError, DataSource, Fields


def write(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    keys = ("prompt", "chosen", "rejected")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return path


ROWS = [(f"{i}+{i}=", str(2 * i), str(2 * i + 1)) for i in range(1, 31)]


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets.model)


def load(path: Path, tokenizer, **changes) -> PreferenceDataset:
    settings = {"fields": PreferenceFields(), "max_seqlen": 16, "seed": 3, "shuffle": True} | changes
    return PreferenceDataset(path, Encoder(tokenizer), **settings)


def test_a_batch_holds_whole_pairs_and_trains_their_answers(tmp_path: Path, tokenizer) -> None:
    data = load(write(tmp_path / "pairs.jsonl", ROWS), tokenizer)
    batch = data.batch(epoch=2, epoch_step=1, batch_size=4)
    assert batch.num_sequences == 8
    found = set()
    for i in range(0, 8, 2):
        texts = []
        for k, sign in ((i, 1), (i + 1, -1)):
            row = batch.select([k])
            assert row.fields[PAIR].tolist() == [sign * (i // 2 + 1)] * row.num_tokens
            answer = tokenizer.decode(row.token_ids[row.loss_mask].tolist())
            assert answer.endswith("<eos>")
            texts.append((tokenizer.decode(row.token_ids[~row.loss_mask].tolist()), answer.removesuffix("<eos>")))
        (prompt, chosen), (same, rejected) = texts
        assert prompt == same and (prompt, chosen, rejected) in ROWS
        found.add(prompt)
    assert len(found) == 4
    again = load(tmp_path / "pairs.jsonl", tokenizer)
    assert torch.equal(again.batch(2, 1, 4).token_ids, batch.token_ids)
    assert not torch.equal(data.batch(1, 1, 4).token_ids, batch.token_ids)
    seen = {tuple(b.token_ids.tolist()) for step in range(1, 9) for b in [data.batch(1, step, 4).select([0, 1])]}
    assert len(seen) == 8 and data.batch(1, 8, 4).num_sequences == 4


def test_pairs_without_a_token_of_a_prompt_are_counted_apart(tmp_path: Path, tokenizer, caplog, monkeypatch) -> None:
    tokenise = Encoder.tokenise
    monkeypatch.setattr(Encoder, "tokenise", lambda self, texts: [ids[1:] for ids in tokenise(self, texts)])
    caplog.set_level("INFO")
    path = write(tmp_path / "pairs.jsonl", [("1", "22", "33"), ("1", "2" * 20, "3"), *ROWS[-2:]])
    assert len(load(path, tokenizer)) == 2
    assert "4 pairs, 2 left out: 0 with equal answers, 1 longer than max_seqlen=16 " in caplog.text
    assert ", 1 without a prompt" in caplog.text


CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}+{{ m['content'] }}={% endfor %}"
    "{% if add_generation_prompt %}a+{% endif %}"
)


def test_conversations_go_through_the_chat_template(tmp_path: Path, assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    said = {role: [{"role": "user", "content": "1"}, {"role": "assistant", "content": role}] for role in ("2", "3")}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"chosen": said["2"], "rejected": said["3"]}) + "\n")
    with pytest.raises(DatasetError, match=":1: a conversation, and the model has no chat template"):
        load(path, tokenizer)
    tokenizer.chat_template = CHAT
    batch = load(path, tokenizer, max_seqlen=32).batch(1, 1, 1)
    trained = [batch.select([i]).token_ids[batch.select([i]).loss_mask].tolist() for i in (0, 1)]
    written = tokenizer(["2=", "3="], add_special_tokens=False)["input_ids"]
    assert trained == [[*ids, tokenizer.eos_token_id] for ids in written]


def test_only_the_assistants_turns_of_an_answer_are_trained(tmp_path: Path, assets, caplog) -> None:
    caplog.set_level("INFO")
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    tokenizer.chat_template = CHAT.replace(
        "{% for m in messages %}", "{% for m in messages %}{{ eos_token * (loop.index % 2) }}"
    )
    asked = [{"role": "user", "content": "1"}]
    answers = {
        name: [{"role": role, "content": f"{k}{i}"} for i, role in enumerate(("assistant", "user", "assistant"))]
        for name, k in (("chosen", 2), ("rejected", 3))
    }
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({name: asked + turns for name, turns in answers.items()}) + "\n")
    batch = load(path, tokenizer, max_seqlen=64).batch(1, 1, 1)
    trained = [str(tokenizer.decode(batch.select([i]).token_ids[batch.select([i]).loss_mask])) for i in (0, 1)]
    assert trained == ["20=<eos>22=<eos>", "30=<eos>32=<eos>"]
    assert "[[20=<eos>]]+21=+[[22=<eos>]]" in caplog.text


def test_rows_at_another_path_and_at_another_time_continue_a_run(tmp_path: Path, assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    tokenizer.chat_template = "{{ strftime_now('%f') }}" + CHAT
    (tmp_path / "job2").mkdir()
    paths = [write(folder / "train.jsonl", ROWS) for folder in (tmp_path, tmp_path / "job2")]
    before, after = (load(path, tokenizer, max_seqlen=64) for path in paths)
    after.check_continues(before.state_dict())
    options = {"max_seqlen": 64, "seed": 3, "shuffle": True}
    answers = [
        AnswerDataset(DataSource(path=str(path), fields=Fields(answer="chosen")), Encoder(tokenizer), **options)
        for path in paths
    ]
    assert answers[0].batch(1, 1, 1).token_ids.tolist() != answers[1].batch(1, 1, 1).token_ids.tolist()
    answers[1].check_continues(answers[0].state_dict())
    exchanged = write(tmp_path / "exchanged.jsonl", [(prompt, rejected, chosen) for prompt, chosen, rejected in ROWS])
    with pytest.raises(DatasetError, match="checksum="):
        load(exchanged, tokenizer, max_seqlen=64).check_continues(before.state_dict())
    tokenizer.chat_template = CHAT
    with pytest.raises(DatasetError, match="restore the rows of dataset.train_path and the keys of prompt"):
        load(paths[0], tokenizer, max_seqlen=64).check_continues(before.state_dict())


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    dp=st.integers(1, 3),
    pp=st.integers(1, 2),
    share_prompts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_cut_splits_a_pair(lens: list[tuple[int, int]], dp: int, pp: int, share_prompts: bool, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(2 * len(lens))
    flat, units = np.array(lens).ravel()[order], (np.arange(2 * len(lens)) // 2 + 1)[order]
    zeros = np.zeros(len(flat), np.int64)
    shape = BatchShape(seq_lens=flat, prompt_lens=zeros, prompt_ids=zeros, units=units)
    planner = Planner(dp=dp, pp=pp, share_prompts=share_prompts)
    limit = planner.limit(shape, PassLimits(40, 1000))
    assert limit == max(40, *map(sum, lens))
    plan = planner.plan(shape, limit)
    assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == list(range(len(flat)))
    for microbatch in (m for rank in plan for m in rank):
        assert flat[microbatch].sum() <= limit
        assert all(count == 2 for count in np.unique(units[microbatch], return_counts=True)[1])


def test_the_shape_of_a_batch_of_pairs_keeps_them_together(tmp_path: Path, tokenizer) -> None:
    batch = load(write(tmp_path / "pairs.jsonl", ROWS), tokenizer).batch(1, 1, 3)
    assert shape_of(batch).select([5, 2, 3, 4]).units.tolist() == [3, 2, 2, 3]  # type: ignore[union-attr]
