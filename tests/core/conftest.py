"""A tiny model, tokenizer and data set, and a way to run the real command line on them."""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Command


@dataclass(frozen=True)
class Assets:
    model: Path
    prompts: Path
    pairs: Path

    def with_model(self, config: Any, folder: Path) -> Path:
        """A new folder with the tokenizer of `model`, and random weights as `config` says."""
        import torch
        from transformers import AutoModelForCausalLM

        shutil.copytree(self.model, folder)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """Model of two layers over single characters; sums of two digits as prompts, and the same with answers."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("assets")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    sums = [(a, b) for a in range(8) for b in range(5)]
    rows = [
        {"prompt": f"{a}+{b}=", "task": "math", "query_id": f"{a}{b}", "solutions": [f"\\boxed{{{a + b}}}"]}
        for a, b in sums
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return Assets(model=folder / "model", prompts=folder / "prompts.jsonl", pairs=folder / "pairs.jsonl")


@pytest.fixture(scope="session")
def wide_heads(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `assets` with heads that GPU kernels have, and room for the prompts of recipes."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=16, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return assets.with_model(config, tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """As if the tests were started without `nohup`, whose children ignore signals."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def run_command(tmp_path: Path) -> Iterator:
    """start(experiment, config) -> Command; several share one fileroot, as restarts of one trial do."""
    started: list[Command] = []

    def start(experiment: str, config: dict, *, fresh: bool = False) -> Command:
        started.append(Command(experiment, config, tmp_path, fresh=fresh))
        return started[-1]

    yield start
    for command in started:
        command.stop()
