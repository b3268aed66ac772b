"""Is a folder a model that can be trained? Looked at from outside: config.json, file sizes, safetensors headers.

Standard library and model_specs/hf_config.py only, and no tensor is read: a folder of many GB takes milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from model_specs.fits import check_head, check_shapes, check_tokenizer
from model_specs.hf_config import ModelConfig, ModelConfigError, read_config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library itself accepts."""


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
    shapes: dict[str, list[int]] = {}
    for shard, names in _shards(folder) if weights else ():
        shapes |= _check_shard(shard, names)
    try:
        if tokenizer and (folder / _TOKENIZERS[0]).is_file():
            check_tokenizer(folder / _TOKENIZERS[0], config.vocab_size)
        check_shapes(config, shapes)
        if weights:
            check_head(shapes, value_head)
    except ModelConfigError as error:
        raise ModelFolderError(f"{path}: {str(error).removeprefix(f'{path}/')}") from None
    return config


def _shards(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield every weight file with the tensors that the index expects in it (none known without an index)."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            by_file: dict[str, set[str]] = {}
            for tensor, name in weight_map.items():
                by_file.setdefault(name, set()).add(tensor)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFolderError(f"{index}: not an index of safetensors files ({type(error).__name__})") from None
        yield from ((folder / name, names) for name, names in sorted(by_file.items()))
    elif (folder / _SINGLE).is_file():
        yield folder / _SINGLE, set()
    else:
        raise ModelFolderError(
            f"{folder}: no weights: neither {_SINGLE} nor {_INDEX}; convert other formats to safetensors, "
            "or start from random weights with init_from_scratch=true"
        )


def _check_shard(path: Path, expected: set[str]) -> dict[str, list[int]]:
    """Check that the header is readable, the file as long as its header requires, and every expected tensor present.
    Return the shapes of its tensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
                raise ModelFolderError(f"{path}: not a safetensors file ({size} bytes)")
            header = json.loads(file.read(length))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            shapes = {name: list(header[name]["shape"]) for name in ends}
    except PermissionError:
        raise
    except OSError as error:
        raise ModelFolderError(f"{path}: {error.strerror}; download the model again") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{path}: the safetensors header cannot be read; download the file again") from None
    needed = 8 + length + max(ends.values(), default=0)
    if size != needed:
        what = "truncated" if size < needed else "longer than its header requires"
        raise ModelFolderError(f"{path}: {what}: {size} bytes, the header requires {needed}; download the file again")
    missing = sorted(expected - ends.keys())
    if missing:
        raise ModelFolderError(f"{path}: has no {missing[0]}, which {_INDEX} lists; download the model again")
    return shapes
