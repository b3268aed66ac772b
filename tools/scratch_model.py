"""A small model without a past for a data set: a tokenizer learned from its prompts and random Qwen2-shaped weights.

For trying a recipe where no pretrained model is at hand:

    python -m tools.scratch_model --data problems.jsonl --output runs/small
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollout.data.rows import scan_rows

PAD, EOS = "<pad>", "<eos>"


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Train byte-level BPE with single digits, at most `vocab_size` tokens, as a transformers tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(
    data: Path, output: Path, *, hidden_size: int, num_layers: int, vocab_size: int, seed: int, head_dim: int = 32
) -> int:
    """Write a Hugging Face folder; returns the number of parameters. Raises DatasetError for an unusable data set."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer([row.prompt for row in scan_rows(data)], vocab_size)
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
    tokenizer.save_pretrained(output)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="jsonl file of prompts")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 64, of twice --head-dim")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32, help="SGLang's GPU kernels require 64 or more")
    parser.add_argument("--vocab-size", type=int, default=768)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    size = {"hidden_size": given.hidden_size, "num_layers": given.num_layers, "vocab_size": given.vocab_size}
    size["head_dim"] = given.head_dim
    count = make_model(given.data, given.output, seed=given.seed, **size)
    print(f"{given.output}: {count / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
