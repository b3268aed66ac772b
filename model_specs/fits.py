"""Do weights and tokenizer fit config.json? Compared from outside: shapes of the safetensors headers, ids of
tokenizer.json. No tensor is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_specs.config import ModelConfig
from model_specs.untrusted import UntrustedFileError, read_json
from model_specs.values import ModelConfigError

VALUE_HEAD = "score.weight"
"""Name of the value head in a Hugging Face folder."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_tokenizer(file: Path, vocab_size: int) -> None:
    """Raise ModelConfigError where tokenizer.json is none, or its vocabulary has ids that the model has no embedding
    for. Added tokens may be beyond: many models have some that no text contains."""
    try:
        content = read_json(file)
    except UntrustedFileError as error:
        raise ModelConfigError(f"{error}; download the file again") from None
    try:
        ids = list(_token_ids(content))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelConfigError(
            f"{file}: not a tokenizer: {type(error).__name__} {error}; it needs model.vocab. Download the file again"
        ) from None
    if not ids:
        raise ModelConfigError(f"{file}: the tokenizer has no tokens; download the file again")
    if max(ids) >= vocab_size:
        raise ModelConfigError(
            f"{file}: its largest token id is {max(ids)}, but vocab_size={vocab_size} in config.json: the tokenizer is "
            "of another model"
        )


def _token_ids(content: Any) -> Iterator[int]:
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        yield from map(int, vocabulary.values())
    else:
        yield from range(len(vocabulary))


def check_shapes(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ModelConfigError where tensors have other shapes than config.json has, or layers are missing. `shapes`: of
    all weight files, by name; names of no family are not looked at."""
    c = config
    expected = {
        "model.embed_tokens.weight": [c.vocab_size, c.hidden_size],
        "lm_head.weight": [c.vocab_size, c.hidden_size],
        "model.norm.weight": [c.hidden_size],
    }
    if c.mla is None:
        prefix = "model.layers.0.self_attn"
        expected[f"{prefix}.q_proj.weight"] = [c.num_heads * c.head_dim, c.hidden_size]
        expected[f"{prefix}.k_proj.weight"] = [c.num_kv_heads * c.head_dim, c.hidden_size]
    if c.moe is None:
        expected["model.layers.0.mlp.down_proj.weight"] = [c.hidden_size, c.intermediate_size]
    for name, shape in expected.items():
        if name in shapes and list(shapes[name]) != shape:
            raise ModelConfigError(
                f"{name} has the shape {list(shapes[name])} in the weight files, config.json requires {shape}: one of "
                "them is of another model"
            )
    layers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    if layers and not layers.issuperset(range(c.num_layers)):
        missing = min(set(range(c.num_layers)) - layers)
        raise ModelConfigError(
            f"num_hidden_layers={c.num_layers} in config.json, but the weight files have no layer {missing}"
        )


def check_head(names: Collection[str], value_head: bool | None) -> None:
    """Raise ModelConfigError where the weight files, whose tensors have these names, lack a value head that they must
    have, or have one that they must not have; None: either is right."""
    if value_head is True and VALUE_HEAD not in names:
        raise ModelConfigError(
            f"holds no critic ({VALUE_HEAD} is missing); set critic.init_critic_from_actor=true to start one from this "
            "language model"
        )
    if value_head is False and VALUE_HEAD in names:
        raise ModelConfigError(f"holds a critic ({VALUE_HEAD} is a value head); write the folder of a language model")
