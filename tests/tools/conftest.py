"""A model that cannot add and sums for it to try."""

from pathlib import Path

import pytest
import torch

from helpers.eval_cases import write_rows
from tools.demo.data import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over single digits: now and then an answer is right."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("eval") / "model"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "sums").mkdir()
    sums = [{"id": i, "problem": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
    write_rows(folder / "sums" / "test.jsonl", sums)
    write_rows(folder / "own.jsonl", [{"ask": "2+2=", "gold": "4"}, {"ask": "3+3=", "gold": 6}])
    return folder
