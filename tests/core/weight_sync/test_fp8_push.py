"""A push into FP8 servers: what travels, what is compared, and the audit of formats."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from core.weight_sync.buckets import FP8, Buckets, make_sender, wrong_formats
from core.weight_sync.push import PushError, SenderSettings, SendReport
from model_specs.weight_files import QUANTIZATION_CONFIG
from rollout.bucket import FlatBucket
from rollout.inference.backend import TensorFormat
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.client import SGLangEndpoint
from rollout.inference.sglang.hooks.checksums import position_checksum

SHAPE = ModelShape(num_heads=2, num_kv_heads=1, head_dim=128, vocab_size=64)
ATTENTION, QKV = "model.layers.0.self_attn.", "model.layers.0.self_attn.qkv_proj.weight"


def weights(version: int) -> dict[str, Tensor]:
    """One layer, as a trainer in bfloat16 has it."""
    generator = torch.Generator().manual_seed(version)
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,)}
    sizes |= {f"{ATTENTION}{part}_proj.weight": (rows, 256) for part, rows in (("q", 256), ("k", 128), ("v", 128))}
    sizes |= {f"{ATTENTION}q_proj.bias": (256,), f"{ATTENTION}o_proj.weight": (256, 256)}
    sizes |= {f"model.layers.0.mlp.{part}_proj.weight": (1024, 256) for part in ("gate", "up")}
    sizes["model.layers.0.mlp.down_proj.weight"] = (256, 1024)
    return {name: torch.randn(size, generator=generator).to(torch.bfloat16) for name, size in sizes.items()}


class Holder(SGLangEndpoint):
    """A server in this process: it keeps what it receives, fused as SGLang fuses it."""

    received: dict[str, Tensor] = {}  # noqa: RUF012  set anew for each
    takes: torch.dtype | None = None
    """Format of the parameter that holds queries, keys and values; None: as they come."""

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        self.received.update(bucket.tensors())
        return ""

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None: ...

    def load_folder(self, path: str, *, timeout_seconds: float) -> None:
        for file in sorted(Path(path).glob("*.safetensors")):
            self.received.update(load_file(file))
        type(self).config = json.loads((Path(path) / "config.json").read_text())

    config: dict[str, Any] = {}  # noqa: RUF012

    def expected_checksums(self) -> ExpectedChecksums:
        return ExpectedChecksums(SHAPE, tp=1)

    def parameters(self) -> dict[str, Tensor]:
        held = dict(self.received)
        for fused, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            for rest in ("weight", "weight_scale_inv", "bias"):
                names = [name for part in parts for name in list(held) if name.endswith(f"{part}_proj.{rest}")]
                if names:
                    whole = torch.cat([held.pop(name).view(torch.uint8) for name in names])
                    held[names[0].replace(f"{parts[0]}_proj", fused)] = whole.view(self.received[names[0]].dtype)
        if self.takes is not None:
            held[QKV] = held[QKV].to(self.takes)
        return held

    def checksums(self, *, timeout_seconds: float) -> list[dict[str, int]]:
        return [{name: int(position_checksum(t)) for name, t in self.parameters().items()}]

    def formats(self, *, timeout_seconds: float) -> list[dict[str, str]]:
        return [{name: str(t.dtype).removeprefix("torch.") for name, t in self.parameters().items()}]


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Holder:
    monkeypatch.setattr(Holder, "received", {})
    monkeypatch.setattr(Holder, "takes", None)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    return Holder(name="generator-0", url="", tp=1, trainer_ranks=(0,), model_path=str(tmp_path))


def push(holder: Holder, version: int, *, kind: str = "ipc", quantizes: bool = True) -> SendReport:
    settings: dict[str, Any] = {"type": kind, "quantizes": quantizes, "model_path": holder.model_path}
    settings |= {"dtype": "bfloat16", "timeout_seconds": 30.0, "bucket_bytes": 1 << 20}
    sender: Any = make_sender(SenderSettings(**settings, folder=Path(holder.model_path)))
    sender.connect([holder])

    def buckets() -> Iterator[Mapping[str, Tensor]]:
        items = list(weights(version).items())
        yield dict(items[::2])
        yield {}
        yield dict(items[1::2])

    sender.prepare(buckets(), verify=True)
    report: SendReport = sender.send()
    return report


@pytest.mark.parametrize("kind", ["ipc", "disk"])
def test_linear_layers_travel_as_fp8_and_halve_the_bytes(holder: Holder, kind: str) -> None:
    for version in (1, 2):
        report = push(holder, version, kind=kind)
        assert report.compared == "all checksums equal"
        for name, tensor in weights(version).items():
            if name.endswith("_proj.weight"):
                values, scales = holder.received[name], holder.received[f"{name}_scale_inv"]
                assert (values.dtype, scales.dtype) == (FP8, torch.float32)
                factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(tensor), : tensor.shape[1]]
                assert (values.float() * factors - tensor.float()).abs().max() < 0.2
            else:
                assert torch.equal(holder.received[name], tensor)
    Holder.received.clear()
    plain = push(holder, 2, kind=kind, quantizes=False)
    assert report.num_bytes < 0.53 * plain.num_bytes


@pytest.mark.parametrize("quantizes", [False, True])
def test_correction_biases_travel_as_float32_beside_other_formats(quantizes: bool) -> None:
    """SGLang holds them so; every transport lays its buckets out here."""
    settings = SenderSettings(type="nccl", dtype="bfloat16", timeout_seconds=30.0, bucket_bytes=1, quantizes=quantizes)
    gate = "model.layers.1.mlp.gate."
    tensors = {f"{gate}weight": torch.randn(8, 32), f"{gate}e_score_correction_bias": torch.randn(8)}
    (bucket,) = Buckets(iter([tensors]), settings, (), verify=False)
    assert bucket is not None
    sent = bucket.tensors()
    assert torch.equal(sent[f"{gate}e_score_correction_bias"], tensors[f"{gate}e_score_correction_bias"])
    assert sent[f"{gate}weight"].dtype == torch.bfloat16


def test_a_folder_says_in_what_format_its_weights_are(holder: Holder) -> None:
    push(holder, 1, kind="disk")
    assert Holder.config == {"model_type": "qwen2", "quantization_config": dict(QUANTIZATION_CONFIG)}
    Holder.received.clear()
    push(holder, 1, kind="disk", quantizes=False)
    assert Holder.config == {"model_type": "qwen2"}


def test_a_verified_push_logs_the_format_of_every_tensor(holder: Holder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        push(holder, 1)
    lines = [line.split() for line in caplog.text.splitlines()]
    assert [
        "1",
        f"{ATTENTION}q_proj.weight".replace(".0.", ".*."),
        FP8_NAME,
        QKV.replace(".0.", ".*."),
        FP8_NAME,
    ] in lines
    assert ["1", "model.norm.weight", "bfloat16", "model.norm.weight", "bfloat16"] in lines


FP8_NAME = "float8_e4m3fn"


def test_a_server_that_holds_bfloat16_in_place_of_fp8_ends_the_push(holder: Holder, monkeypatch) -> None:
    monkeypatch.setattr(Holder, "takes", torch.bfloat16)
    with pytest.raises(
        PushError, match=rf"generator-0: 3 tensors .*q_proj.weight was sent as {FP8_NAME}, .* is bfloat16"
    ):
        push(holder, 1)


def row(name: str = f"{ATTENTION}q_proj.weight", sent: str = FP8_NAME, held: str | None = FP8_NAME) -> TensorFormat:
    return TensorFormat(name=name, sent=sent, parameter=name, held=held)


def test_a_weight_that_was_sent_as_bfloat16_is_reported_also_where_both_sides_agree() -> None:
    fine = [
        row(),
        row(f"{ATTENTION}q_proj.weight_scale_inv", "float32", "float32"),
        row("model.norm.weight", "bfloat16", "bfloat16"),
    ]
    assert list(wrong_formats(fine)) == []
    (message,) = wrong_formats([*fine, row(f"{ATTENTION}o_proj.weight", "bfloat16", "bfloat16")])
    assert message == f"{ATTENTION}o_proj.weight was sent as bfloat16, not as {FP8_NAME}"
    (message,) = wrong_formats([*fine, row(f"{ATTENTION}o_proj.weight_scale_inv", "bfloat16", "bfloat16")])
    assert message.endswith("was sent as bfloat16, not as float32")


def test_only_a_tied_output_layer_may_be_missing_on_a_server() -> None:
    assert list(wrong_formats([row(), row("lm_head.weight", "bfloat16", None)])) == []
    (message,) = wrong_formats([replace(row(), held=None)])
    assert message.endswith("q_proj.weight is missing")
    assert list(wrong_formats([row("model.norm.weight", "bfloat16", "bfloat16")])) == [
        f"no tensor ought to be {FP8_NAME}"
    ]
