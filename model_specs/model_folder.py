"""Is a folder a model that can be trained? Looked at from outside: config.json, file sizes, safetensors headers.

No tensor is read: a folder of many GB takes milliseconds, and its tokenizer up to a second.
"""

import math
from pathlib import Path

from tokenizers import Tokenizer

from model_specs.config import ModelConfig
from model_specs.families import read_config
from model_specs.hub import HubError, model_folder
from model_specs.untrusted import (
    ModelConfigError,
    RawConfig,
    UntrustedFileError,
    boolean,
    open_regular,
    read_json_object,
)
from model_specs.weight_files import WeightsError, check_tensors, stored_tensors

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a saved model gets from the folder that it was trained from."""


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
        raise ModelFolderError(_no_folder(path))
    try:
        config = read_config(folder)
    except ModelConfigError as error:
        raise ModelFolderError(str(error)) from None
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelFolderError(f"{path}: no tokenizer; one of {', '.join(_TOKENIZERS)} must be in the folder")
    if tokenizer:
        _check_tokenizer(folder, config.vocab_size)
    if weights:
        try:
            check_tensors(path, stored_tensors(folder), config, value_head=value_head)
        except WeightsError as error:
            raise ModelFolderError(str(error)) from None
    return config


def _no_folder(path: str) -> str:
    """Return why a path is no folder, and what a model may be."""
    try:
        model_folder(path, weights=False)
    except HubError as error:
        return str(error)
    return f"{path}: no such folder; write a Hugging Face folder, or the id of a model of the hub (owner/name@revision)"


def tokenizer_files(folder: str | Path) -> list[Path]:
    """Return the files of TOKENIZER_FILES that a folder has. Raises ModelFolderError for a link to a file elsewhere,
    whose content would become part of saved models, which people publish."""
    folder = Path(folder)
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    own = folder.resolve()
    blobs = (own / "../../blobs").resolve()  # of a Hugging Face cache
    for path in found:
        if path.resolve().parent not in (own, blobs):
            raise ModelFolderError(
                f"{path}: a link to {path.resolve()}, outside of the model's folder; copy the file into the folder"
            )
    return found


def stored_parameters(folder: str | Path) -> int:
    """Return the number of parameters in a folder's weight files. Raises OSError and WeightsError (a ValueError)."""
    return sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())


def read_end_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Return the token ids of eos_token_id in generation_config.json; none without the file or the key. Raises
    ModelFolderError for a file that holds anything else."""
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return ()
    try:
        ends = read_json_object(path).get("eos_token_id")
    except UntrustedFileError as error:
        raise ModelFolderError(f"{error}; download the file again, or remove it") from None
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if any(type(end) is not int or end < 0 for end in listed):
        raise ModelFolderError(f"{path}: eos_token_id={ends!r} must be a token id or a list of them")
    return tuple(listed)


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise ModelFolderError where a file of the tokenizer or generation_config.json is damaged, or has ids that the
    model has no embedding for. Added tokens may be beyond: many models have some that no text contains."""
    for path in tokenizer_files(folder):
        try:
            if path.suffix == ".json":
                _check_settings(path, read_json_object(path))
            else:
                open_regular(path).close()
            if path.name == "tokenizer.json":
                _check_ids(path, "its largest token id is ", _largest_id(path), vocab_size)
        except UntrustedFileError as error:
            raise ModelFolderError(f"{error}; download the file again") from None
    for end in read_end_token_ids(folder):
        _check_ids(folder / "generation_config.json", "eos_token_id=", end, vocab_size)


def _check_settings(path: Path, settings: RawConfig) -> None:
    """Raise ModelFolderError for settings of a tokenizer that load, and have no effect or another one."""
    template = settings.get("chat_template")
    if not isinstance(template, str | list | None):
        raise ModelFolderError(f"{path}: chat_template={template!r} must be text, or a list of templates with names")
    for key in ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"):
        if settings.get(key) is not None:
            try:
                boolean(settings, key, False)
            except ModelConfigError as error:
                raise ModelFolderError(f"{path}: {error}") from None


def _check_ids(path: Path, what: str, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise ModelFolderError(
            f"{path}: {what}{largest}, but vocab_size={vocab_size} in config.json: the file is of another model"
        )


def _largest_id(path: Path) -> int:
    try:
        tokens = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (the library raises Exception, and PanicException, which is none)
        why = str(error).removeprefix("Cannot instantiate Tokenizer from file: ")
        raise UntrustedFileError(f"{path}: not a tokenizer: {why}") from None
    if not tokens:
        raise UntrustedFileError(f"{path}: not a tokenizer: its vocabulary is empty")
    return max(tokens.values())
