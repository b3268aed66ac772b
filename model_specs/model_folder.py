"""Is a folder a model that can be trained? Looked at from outside: config.json, file sizes, safetensors headers.

Standard library only, and no tensor is read: a folder of many GB takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model_specs.hf_config import ModelConfig, ModelConfigError, read_config
from model_specs.untrusted import UntrustedFileError, read_json
from model_specs.weight_files import WeightsError, check_tensors, stored_tensors

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelFolderError(ValueError):
    """A model folder that cannot be used."""


def read_model_folder(path: str, *, weights: bool, tokenizer: bool, value_head: bool | None = None) -> ModelConfig:
    """Return the model's shape, after checking what else must be in the folder. `value_head`: whether the weights must
    end in one; None: either. Raises ModelFolderError."""
    try:
        return _read(path, weights=weights, tokenizer=tokenizer, value_head=value_head)
    except PermissionError as error:
        raise ModelFolderError(f"{error.filename}: {error.strerror}; change its permissions") from None
    except OSError as error:
        raise ModelFolderError(
            f"{error.filename or path}: {error.strerror}; a model is a local Hugging Face folder"
        ) from None


def _read(path: str, *, weights: bool, tokenizer: bool, value_head: bool | None) -> ModelConfig:
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(
            f"{path}: no such folder; a model is a local Hugging Face folder, from "
            "`hf download <name> --local-dir <folder>` for instance"
        )
    try:
        config = read_config(folder)
    except ModelConfigError as error:
        raise ModelFolderError(str(error)) from None
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelFolderError(f"{path}: no tokenizer; one of {', '.join(_TOKENIZERS)} must be in the folder")
    try:
        if tokenizer and (folder / _TOKENIZERS[0]).is_file():
            _check_tokenizer(folder / _TOKENIZERS[0], config.vocab_size)
        if weights:
            check_tensors(path, stored_tensors(folder), config, value_head=value_head)
    except (ModelConfigError, WeightsError) as error:
        raise ModelFolderError(str(error)) from None
    return config


def _check_tokenizer(file: Path, vocab_size: int) -> None:
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
