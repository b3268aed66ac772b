"""Prompts that are too long are counted in one line, which warns where they are many."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.data import prompts
from rollout.data.encoder import PromptFormat
from rollout.data.prompts import check_lengths, count_left_out
from rollout.data.rows import Row

CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }} {% endfor %}"


def rows(*prompts: str) -> list[Row]:
    return [
        Row(place=f"d:{i}", query_id=str(i), task="math", prompt=p, solutions=("1",)) for i, p in enumerate(prompts)
    ]


def words_model(folder: Path, *, chat_template: str | None = None) -> Path:
    """A tokenizer with one token per word."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>")
    made.chat_template = chat_template
    made.save_pretrained(folder)
    return folder


def check(folder: Path, prompts: list[Row], *, max_prompt_len: int, **format_: Any) -> None:
    prompt_format = PromptFormat(**format_)
    check_lengths("d.jsonl", prompts, model=folder, prompt_format=prompt_format, max_prompt_len=max_prompt_len)


@pytest.mark.parametrize(("num_long", "level"), [(1, "INFO"), (2, "WARNING")])
def test_more_than_a_tenth_left_out_is_a_warning(caplog: pytest.LogCaptureFixture, num_long: int, level: str) -> None:
    caplog.set_level(logging.INFO)
    lengths = [4] * (10 - num_long) + [7, 9][-num_long:]
    count_left_out("d.jsonl", lengths, max_prompt_len=4).report(logging.getLogger("here"))
    said = f"d.jsonl: {num_long} of 10 prompts are left out: {num_long} with more than dataset.max_prompt_len=4 tokens "
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, said + "(the longest has 9)")]


def test_empty_prompts_are_counted_apart_and_none_left_out_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    count_left_out("d.jsonl", [1, 0, 4], max_prompt_len=4).report(logging.getLogger("here"))
    assert caplog.messages == ["d.jsonl: 1 of 3 prompts are left out: 1 without a token"]
    caplog.clear()
    count_left_out("d.jsonl", [1, 4], max_prompt_len=4).report(logging.getLogger("here"))
    assert caplog.messages == []


def test_of_many_rows_a_sample_is_tokenised_and_the_rest_where_none_of_it_fits(tmp_path, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(prompts, "SAMPLE", 5)
    words = words_model(tmp_path / "words")
    check(words, rows(*["one " * 4, "one " * 30] * 5), max_prompt_len=4)
    assert caplog.messages == ["d.jsonl: tokenising 5 of 10 prompts to measure them"]
    caplog.clear()
    check(words, rows(*["one " * 30, "one " * 4] * 5), max_prompt_len=4)
    assert "d.jsonl: 5 of 10 prompts are left out: 5 with more" in caplog.text
    check(words, rows(*["one " * 30] * 3, *["one " * 4] * 3, *["one " * 30] * 4), max_prompt_len=4)
    assert "d.jsonl: 4 of a sample of 5 prompts (the data set has 10) are left out" in caplog.text
