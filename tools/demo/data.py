"""Data and model of the demo: additions of two-digit numbers, a character tokenizer, a small Qwen2 with random weights.

Everything is made here, from a seed, without a network. Invariant: no held-out problem is in the training files.

    python -m tools.demo.data --output runs/demo
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from model_specs.weight_files import follow_umask
from tools import arguments as cli

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*="
"""With the two special tokens 16 tokens in all: divisible by every small tensor-parallel size."""

SMALLEST, LARGEST = 10, 99
NUM_HELD_OUT = 512


class Problem(TypedDict):
    """A row of the prompt data set."""

    prompt: str
    task: str
    query_id: str
    solutions: list[str]


@dataclass(frozen=True, kw_only=True)
class DemoFiles:
    """The paths of the demo's files."""

    sft: Path
    """{"prompt": "47+58=", "answer": "105"}"""
    train: Path
    """{"prompt", "task", "query_id", "solutions"}: the same problems, without an answer to imitate"""
    held_out: Path
    """Rows like those of `train`, none of them in it."""
    model: Path
    """Hugging Face folder: config.json, random weights, tokenizer."""


def make_demo_data(folder: str | Path, *, seed: int = 1) -> DemoFiles:
    """Write additions as data sets, and a small model with random weights, under `folder`; return where they are.

    The split is the same for every seed, the weights are not."""
    folder = Path(folder)
    files = DemoFiles(
        sft=folder / "data" / "sft.jsonl",
        train=folder / "data" / "train.jsonl",
        held_out=folder / "data" / "held_out.jsonl",
        model=folder / "model",
    )
    rows = problems()
    held_out, train = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    write_jsonl(files.sft, [{"prompt": row["prompt"], "answer": answer_of(row)} for row in train])
    write_jsonl(files.train, train)
    write_jsonl(files.held_out, held_out)
    save_model(files.model, seed=seed)
    return files


def problems() -> list[Problem]:
    """Return all 8,100 additions of two two-digit numbers, shuffled, in the schema of the prompt data set."""
    operands = range(SMALLEST, LARGEST + 1)
    rows: list[Problem] = [
        {"prompt": f"{a}+{b}=", "task": "math", "query_id": f"{a}+{b}", "solutions": [f"\\boxed{{{a + b}}}"]}
        for a in operands
        for b in operands
    ]
    random.Random(0).shuffle(rows)
    return rows


def answer_of(row: Problem) -> str:
    """Return the text that answers a row: its solution without the box."""
    return row["solutions"][0].removeprefix("\\boxed{").removesuffix("}")


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer with one token per character of CHARACTERS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def save_model(folder: Path, *, seed: int, **shape: int) -> None:
    """Write a Qwen2-shaped model with random weights, and the tokenizer, as a Hugging Face folder. `shape`: keys of its
    config.json; without any it has 0.9M parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    tokenizer = make_tokenizer()
    demo = {
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        # Ten positions at most: a base of 10,000 would leave most of the rotations unused.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        # At the usual 0.02 so small a model spends most of a short warm-up leaving its starting point.
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **{**demo, **shape},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if shows_progress:
        logging.enable_progress_bar()
    follow_umask(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = cli.parser_of("tools.demo.data", "Make the demo's data sets and model.")
    parser.add_argument("--output", type=cli.new_folder, required=True, help="folder to write to")
    parser.add_argument("--seed", type=cli.seed, default=1, help="seed of the model's weights")
    arguments = parser.parse_args()
    files = make_demo_data(arguments.output, seed=arguments.seed)
    print(f"actor.path={files.model} dataset.path={files.train} evaluation.path={files.held_out}")


if __name__ == "__main__":
    main()
