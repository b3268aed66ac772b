"""The weight files of a Hugging Face folder, read from their headers: names, formats, shapes and places of all tensors.

The one door of the dry run, the trainer, the converter and the embedded generator: which files count, and whether their
tensors are those of config.json. Standard library only, and tensors are read only to compare two output layers.

In the block-wise FP8 format of DeepSeek-V3 and Qwen3-FP8 the weight of a linear layer, `X.weight`, is float8_e4m3fn;
`X.weight_scale_inv`, float32 [ceil(out / 128), ceil(in / 128)], holds the factor that each block of 128 x 128 values is
multiplied by. Embeddings, the output layer, norms, biases and routers stay as they are.
"""

import math
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from model_specs.tensors import EMBEDDING, OUTPUT, VALUE_HEAD, iter_shapes
from model_specs.untrusted import MAX_BYTES, UntrustedFileError, is_inside, open_regular, parse_json, read_json_object

BLOCK = 128
SCALE = "_scale_inv"
"""Added to the name of a quantized weight: the name of its scales."""
QUANTIZATION_CONFIG: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The entry `quantization_config` of such a checkpoint's config.json."""
SERVED_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
"""Model types that SGLang's loaders hold in this format. Its Llama renames the scales to names that it does not have;
latent attention derives other weights from quantized ones."""

_OF_LINEAR_LAYER = re.compile(r"(.*\.)?layers\.\d+\..*_proj\.weight")


def follow_umask(folder: Path) -> None:
    """Give the weight files of a folder the mode of any new file; safetensors makes them readable by this user alone.
    Raises OSError."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def is_quantized(name: str) -> bool:
    """Return whether the tensor of this Hugging Face name is FP8 in the format."""
    return _OF_LINEAR_LAYER.fullmatch(name) is not None


def serving_problems(config: ModelConfig, tp: int) -> Iterator[str]:
    """Yield each reason why servers of `tp` tensor-parallel ranks cannot hold the model in this format."""
    if config.model_type not in SERVED_FAMILIES:
        yield f"fp8_block is for models of type {', '.join(SERVED_FAMILIES)}, got {config.model_type}"
        return
    for name, size in _sizes(config, tp).items():
        if size % BLOCK:
            yield f"fp8_block needs sizes divisible by {BLOCK} on every rank, {name} is {size}"


def _sizes(config: ModelConfig, tp: int) -> Mapping[str, int]:
    """Return rows and columns of the fused weights of one rank; a block must not reach into the next tensor."""
    sizes = {
        "hidden_size": config.hidden_size,
        f"num_attention_heads * head_dim / {tp}": config.num_heads * config.head_dim // tp,
        f"num_key_value_heads * head_dim / {tp}": max(1, config.num_kv_heads // tp) * config.head_dim,
    }
    moe = config.moe
    if moe is None or not all(moe.sparse_layers):
        sizes[f"intermediate_size / {tp}"] = config.intermediate_size // tp
    if moe is not None:
        sizes[f"moe_intermediate_size / {tp}"] = moe.intermediate_size // tp
    return sizes


SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Formats of weights that can be trained."""
_LORA, _QUANTIZED = ("lora_", "base_model."), ("scale", "qweight", "qzeros", "g_idx", "absmax", "quant_", "_packed")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_COMPARED_BYTES = 1 << 24
_DOWNLOAD = "download the model again"


class WeightsError(ValueError):
    """Weights that are missing, truncated, or not of the model that their config.json describes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: Path
    dtype: str
    """As in the header: "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int


Stored = Mapping[str, StoredTensor]
"""Hugging Face name -> tensor."""


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder's weight files. Raises OSError, and WeightsError with the damaged file."""
    by_file = _weight_files(Path(folder))
    found: dict[str, StoredTensor] = {}
    for file, expected in by_file.items():
        tensors = _read_header(file)
        if missing := sorted(expected - tensors.keys()):
            raise WeightsError(f"{file}: has no {missing[0]}, which {INDEX_FILE} lists; {_DOWNLOAD}")
        if twice := sorted(found.keys() & tensors.keys()):
            raise WeightsError(f"{file}: {twice[0]} is in {found[twice[0]].file.name} too; {_DOWNLOAD}")
        found |= tensors
    return found


def check_tensors(folder: str | Path, stored: Stored, config: ModelConfig, *, value_head: bool | None) -> None:
    """Raise WeightsError unless the tensors of a folder are those of the model, by name, shape and format, and no
    others that would have an effect. `value_head`: whether they end in one, as a critic does, or in an output layer;
    None: either will do for a critic."""
    has_head = VALUE_HEAD in stored
    if value_head is True and not has_head:
        raise WeightsError(
            f"{folder}: holds no critic ({VALUE_HEAD} is missing); set critic.init_critic_from_actor=true to start one "
            "from this language model"
        )
    if value_head is False and has_head:
        raise WeightsError(
            f"{folder}: holds a critic ({VALUE_HEAD} is a value head); write the folder of a language model"
        )
    is_critic = value_head is not False
    used = {VALUE_HEAD, OUTPUT} if is_critic else set()
    for name, shape in iter_shapes(config, is_critic=is_critic):
        used.add(name)
        if name in stored:
            _check_one(name, stored[name], shape)
        elif name != VALUE_HEAD:
            raise WeightsError(f"{folder}: {name} is missing{_why_missing(stored, config)}")
    if config.tied and not is_critic and OUTPUT in stored:
        used.add(OUTPUT)
        if not _equal(stored[OUTPUT], stored[EMBEDDING]):
            raise WeightsError(
                f"{folder}: tie_word_embeddings=true in config.json, but {OUTPUT} differs from {EMBEDDING}; write "
                "tie_word_embeddings=false to keep both"
            )
    ignored = FAMILIES[config.model_type].ignored_tensors(config)
    for name, tensor in stored.items():
        if name not in used and not name.endswith("rotary_emb.inv_freq") and not name.startswith(ignored):
            why = _why_unknown(name, config)
            raise WeightsError(f"{tensor.file}: {name} has no place in a {config.model_type} model{why}")


def _check_one(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise WeightsError(
            f"{tensor.file}: {name} has the shape {list(tensor.shape)}, config.json requires {list(shape)}: one of "
            "them is of another model"
        )
    if tensor.dtype not in _ITEM_BYTES:
        raise WeightsError(f"{tensor.file}: {name} is {tensor.dtype}{_IS_QUANTIZED}")


_IS_QUANTIZED = ": the weights are quantized, and only float16, bfloat16 and float32 can be trained; take those"
_IS_LORA = ": a LoRA adapter is in the folder; merge it into the model (merge_and_unload of peft) and save that"


def _why_missing(stored: Stored, config: ModelConfig) -> str:
    """Return what the names that are there say about one that is not."""
    if any(name.startswith(_LORA) or ".lora_" in name for name in stored):
        return _IS_LORA
    if any(part in name for name in stored for part in _QUANTIZED):
        return _IS_QUANTIZED
    embedding = EMBEDDING.removeprefix("model.")
    for name in stored:
        if name.endswith(embedding) and name != EMBEDDING:
            wrong = name.removesuffix(embedding)
            return f": names begin with {wrong!r} in place of 'model.'; save the model itself, without its wrapper"
    layers = {found[1] for name in stored if (found := _LAYER.match(name))}
    if len(layers) == config.num_layers:
        return f"; {_DOWNLOAD}"
    return f"; num_hidden_layers={config.num_layers} in config.json, the weight files have {len(layers)} layers"


def _why_unknown(name: str, config: ModelConfig) -> str:
    if "lora_" in name:
        return _IS_LORA
    layer = _LAYER.match(name)
    if layer is not None and int(layer[1]) >= config.num_layers:
        return f": num_hidden_layers={config.num_layers} in config.json"
    return _IS_QUANTIZED if any(part in name for part in _QUANTIZED) else ""


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors are equal byte for byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_regular(one.file) as first, open_regular(other.file) as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for start in range(one.begin, one.end, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, one.end - start)
            if first.read(length) != second.read(length):
                return False
    return True


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return the files that count, each with the tensors that the index expects in it (empty: all that it has)."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not index.exists():
        if not single.exists():
            raise WeightsError(
                f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; convert other formats to safetensors, "
                "or start from random weights with init_from_scratch=true"
            )
        return {single: set()}
    by_file: dict[Path, set[str]] = {}
    for tensor, name in _weight_map(index):
        by_file.setdefault(folder / name, set()).add(tensor)
    if single.exists() and set(by_file) != {single}:
        raise WeightsError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}, which lists other files; remove the one that is "
            "not of this model: transformers reads the first, servers the second"
        )
    return dict(sorted(by_file.items()))


def _weight_map(index: Path) -> Iterator[tuple[str, str]]:
    try:
        weight_map = read_json_object(index).get("weight_map")
    except UntrustedFileError as error:
        raise WeightsError(f"{error}: not an index of safetensors files; {_DOWNLOAD}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: not an index of safetensors files: it needs weight_map; {_DOWNLOAD}")
    for tensor, name in weight_map.items():
        if not is_inside(name):
            raise WeightsError(f"{index}: {tensor} is in {name!r}, which is no file of the folder; {_DOWNLOAD}")
        yield tensor, name


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, after checking that the file is as long as its header requires."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= MAX_BYTES:
                raise WeightsError(f"{path}: not a safetensors file ({size} bytes); {_DOWNLOAD}")
            content = file.read(length)
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file, though {INDEX_FILE} lists it; {_DOWNLOAD}") from None
    except UntrustedFileError as error:
        raise WeightsError(str(error)) from None
    begin = 8 + length
    if size < begin:
        raise WeightsError(f"{path}: truncated in its header: {size} bytes; {_DOWNLOAD}")
    try:
        header = parse_json(content)
        if not isinstance(header, dict):
            raise TypeError(f"a JSON object is expected, not {type(header).__name__}")
        if not all(isinstance(text, str) for text in dict(header.pop("__metadata__", None) or {}).values()):
            raise TypeError("__metadata__ must hold texts")
        tensors = {name: _entry(path, begin, **entry) for name, entry in header.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: the safetensors header cannot be read: {error}; {_DOWNLOAD}") from None
    needed = begin
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != needed:
            raise WeightsError(
                f"{path}: the safetensors header cannot be read: its tensors overlap, or leave bytes out"
            )
        needed = tensor.end
    if size != needed:
        what = "truncated" if size < needed else "longer than its header requires"
        raise WeightsError(f"{path}: {what}: {size} bytes, the header requires {needed}; {_DOWNLOAD}")
    return tensors


def _entry(path: Path, after_header: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> StoredTensor:
    """Return an entry of a header. Raises ValueError, TypeError."""
    begin, end = data_offsets
    if not isinstance(dtype, str) or any(type(size) is not int or size < 0 for size in (*shape, begin, end)):
        raise ValueError(f"dtype {dtype!r}, shape {shape!r}, data_offsets {data_offsets!r}")
    num_bytes = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if begin > end or (num_bytes and end - begin != num_bytes):
        raise ValueError(f"{dtype} of shape {shape} has {end - begin} bytes")
    return StoredTensor(path, dtype, tuple(shape), after_header + begin, after_header + end)
