"""A small model without a past for a data set: a tokenizer learned from its prompts and random Qwen2-shaped weights.

For trying a recipe where no pretrained model is at hand:

    python -m tools.scratch_model --data problems.jsonl --output runs/small          # --chat: with a chat template
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from model_specs.weight_files import follow_umask
from rollout.data.rows import scan_rows
from rollout.data.source import DatasetError, DataSource, Fields
from tools import arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TURN, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKER = ".slipstream-scratch-model"
"""File that identifies a folder that this tool has written, and may write again."""
_BYTES_PER_PARAMETER = 8
"""The float32 weights, and a copy while they are saved."""


def train_tokenizer(texts: list[str], vocab_size: int, *, chat: bool = False) -> PreTrainedTokenizerFast:
    """Train byte-level BPE with single digits, at most `vocab_size` tokens, as a transformers tokenizer. `chat`: with a
    chat template, whose turns end with a token of their own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, *((TURN, END) if chat else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if not chat:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def make_model(
    data: DataSource,
    output: Path,
    *,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    seed: int,
    head_dim: int = 32,
    chat: bool = False,
) -> int:
    """Write a Hugging Face folder; returns the number of parameters. Raises DatasetError for an unusable data set."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer([row.prompt for row in scan_rows(data, solved=False)], vocab_size, chat=chat)
    # A multiple of 8 splits over every small tensor-parallel size.
    rows = -(-len(tokenizer) // 8) * 8
    config = Qwen2Config(
        vocab_size=rows,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // head_dim,
        num_key_value_heads=max(1, hidden_size // (2 * head_dim)),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(output)
    follow_umask(output)
    tokenizer.save_pretrained(output)
    return sum(p.numel() for p in model.parameters())


def problems(
    data: DataSource, output: Path, *, hidden_size: int, num_layers: int, vocab_size: int, head_dim: int
) -> list[str]:
    """Return what is wrong with the arguments, one line each."""
    found = []
    if hidden_size % (2 * head_dim):
        near = max(1, round(hidden_size / (2 * head_dim))) * 2 * head_dim
        found.append(f"--hidden-size {hidden_size} must be a multiple of twice --head-dim, {2 * head_dim}; try {near}")
    if head_dim % 2:
        found.append(f"--head-dim {head_dim} must be even: rotary embeddings turn pairs")
    # Attention has 3 matrices of hidden^2 (two of half the size), the MLP 3 of 3 * hidden^2.
    parameters = num_layers * 12 * hidden_size**2 + vocab_size * hidden_size
    needed, free = parameters * _BYTES_PER_PARAMETER / 2**30, psutil.virtual_memory().available / 2**30
    if needed > free:
        found.append(
            f"--hidden-size {hidden_size} --num-layers {num_layers}: {parameters / 1e9:.1f}e9 parameters need "
            f"{needed:.0f} GiB, {free:.0f} GiB of memory are free; choose smaller ones"
        )
    if output.is_dir() and any(output.iterdir()) and not (output / MARKER).is_file():
        found.append(f"--output {output} is not empty and was not written by this tool; name another folder")
    try:
        next(iter(scan_rows(data, solved=False)))
    except (DatasetError, StopIteration) as error:
        found.append(f"--data: {error}")
    return found


def main() -> int:
    """Write the model; return 0, or 2 for bad input, with one line on stderr for each problem."""
    parser = arguments.parser_of("tools.scratch_model", __doc__)
    add, size = parser.add_argument, arguments.integer(least=1)
    add("--data", type=arguments.data_file, required=True, help="file of prompts: jsonl, json, csv, parquet or arrow")
    add("--prompt_field", help="column of the prompt; default: detected")
    add("--chat", action="store_true", help="with a chat template: turns between <|im_start|> and <|im_end|>")
    add("--output", type=arguments.new_folder, required=True, help="folder to write to; a model of others stays")
    add("--hidden-size", type=size, default=128, help="a multiple of 64, of twice --head-dim")
    add("--num-layers", type=size, default=4)
    add("--head-dim", type=size, default=32, help="SGLang's GPU kernels require 64 or more")
    add(
        "--vocab-size", type=arguments.integer(least=260), default=768, help="at least the 256 bytes and 4 special ones"
    )
    add("--seed", type=arguments.seed, default=1)
    given = parser.parse_args()
    shape = {"hidden_size": given.hidden_size, "num_layers": given.num_layers, "vocab_size": given.vocab_size}
    shape["head_dim"] = given.head_dim
    data = DataSource(path=str(given.data), fields=Fields(prompt=given.prompt_field))
    if wrong := problems(data, given.output, **shape):
        print("\n".join(f"error: {line}" for line in wrong), file=sys.stderr)
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / MARKER).write_text("python -m tools.scratch_model wrote this folder and may write it again.\n")
    try:
        count = make_model(data, given.output, seed=given.seed, chat=given.chat, **shape)
    except DatasetError as error:
        return arguments.refused(f"--data: {error}")
    print(f"{given.output}: {count / 1e6:.1f}M parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
