"""The demonstrations of a step are a function of its number, and rows or shares that change are refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from core.data.datasets import AnswerDataset, Demonstrations
from rollout.data.encoder import Encoder
from rollout.data.rows import DatasetError


@pytest.fixture
def rows(assets, tmp_path: Path) -> AnswerDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(10)))
    return AnswerDataset(path, Encoder(AutoTokenizer.from_pretrained(assets.model)), max_seqlen=8, seed=1, shuffle=True)


class WithoutQuestions(Encoder):
    """Has no token for a question mark, as a tokenizer whose vocabulary lacks it."""

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        return [[] if text == "?" else ids for text, ids in zip(texts, super().tokenise(texts), strict=True)]


def write(path: Path, rows: Sequence[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))
    return path


def test_rows_that_nothing_can_be_learnt_from_are_left_out_and_counted(assets, tmp_path, caplog) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [("1+1=", "2"), ("1+1+1+1=", "4"), ("?", "2")]
    write(path, rows)
    encoder = WithoutQuestions(AutoTokenizer.from_pretrained(assets.model))
    with caplog.at_level("INFO"):
        data = AnswerDataset(path, encoder, max_seqlen=8, seed=1, shuffle=True)
    assert len(data) == 1
    said = "3 rows, 1 sequences, 2 left out: 1 longer than max_seqlen=8 (the longest has 10 tokens), 1 without prompt"
    assert said in caplog.text
    assert [r.levelname for r in caplog.records if "left out" in r.getMessage()] == ["WARNING"], "more than a tenth"
    with pytest.raises(
        DatasetError, match=r"1 have more than dataset.max_seqlen=3 .*shortest has 2\), 1 have no prompt"
    ):
        AnswerDataset(write(path, rows[1:]), encoder, max_seqlen=3, seed=1, shuffle=True)


def shown(batch) -> list[int]:
    return batch.token_ids[batch.cu_seqlens[:-1]].tolist()


def test_every_step_has_a_whole_batch_and_epochs_differ_in_order(rows: AnswerDataset) -> None:
    data = Demonstrations(rows, 4)
    steps = [shown(data.of_step(step)) for step in range(6)]
    assert all(len(step) == 4 for step in steps)
    for epoch in (steps[:2], steps[2:4]):
        assert len({*epoch[0], *epoch[1]}) == 8, "no row twice in an epoch"
    assert steps[:2] != steps[2:4]
    assert torch.equal(Demonstrations(rows, 4).of_step(5).token_ids, data.of_step(5).token_ids)


def test_a_step_that_takes_more_rows_than_there_are_is_refused(rows: AnswerDataset) -> None:
    with pytest.raises(DatasetError, match="demonstrations.path has 10 sequences, and a step takes 11"):
        Demonstrations(rows, 11)


def test_another_number_of_demonstrations_does_not_continue_a_run(rows: AnswerDataset) -> None:
    data = Demonstrations(rows, 4)
    data.check_continues(data.state_dict())
    with pytest.raises(DatasetError, match="the checkpoint has 5 demonstrations a step, this run 4"):
        data.check_continues(Demonstrations(rows, 5).state_dict())
