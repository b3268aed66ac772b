"""What of the SGLang side needs no SGLang: arguments, GPUs, processes, buckets, checksums, messages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import logging
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from mcore_adapter.hf.block_fp8 import quantize, quantize_bucket
from model_specs.hf_config import parse_config
from rollout.bucket import FlatBucket
from rollout.inference.errors import GeneratorCallError, GeneratorGone, GeneratorStartError
from rollout.inference.gpus import Gpu, GpuUser, check_gpus, device_names, query_gpus
from rollout.inference.sglang.checksums import ExpectedChecksums, ModelShape
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.hooks import main
from rollout.inference.sglang.hooks.checksums import position_checksum
from rollout.inference.sglang.hooks.precision import no_cache_scales
from rollout.inference.sglang.hooks.prefills import many_at_once
from rollout.inference.sglang.hooks.table import SGLANG, hooks, reason_for
from rollout.inference.sglang.server import ServerSettings, SGLangServer, decode_graph_sizes, server_flags
from rollout.inference.sglang.start.command_line import EXIT_USAGE
from rollout.inference.sglang.weights import ServerAddress, payload_of, post

MODEL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 4096, "vocab_size": 512,
}  # fmt: skip


def settings(**changes: Any) -> ServerSettings:
    values: dict[str, Any] = {"name": "generator-0", "model_path": "/m", "log_file": Path("log"), "gpus": (0,)}
    return ServerSettings(**values | changes)


def flags(model: dict[str, Any] = MODEL, **changes: Any) -> dict[str, Any]:
    return server_flags(settings(**changes), parse_config(model), port=1, nccl_port=2)


def test_the_cuda_graphs_cover_what_may_run_at_once() -> None:
    assert flags(max_running=512)["cuda_graph_max_bs_decode"] == flags(max_running=512)["max_running_requests"] == 512


@pytest.mark.parametrize("max_running", [1, 7, 8, 64, 100, 256, 512, 1000, 4096])
def test_graph_sizes_are_few_and_reach_the_last_request(max_running: int) -> None:
    sizes = decode_graph_sizes(max_running)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_running
    assert len(sizes) <= 20


@pytest.mark.parametrize(("places", "free"), [(1, 1), (8, 1), (32, 4), (128, 13), (520, 52), (0, 0)])
def test_a_tenth_of_the_places_makes_a_prefill_worth_it(places: int, free: int) -> None:
    delayer = object()
    info = {"local_prefillable": True, "running_batch": 3, "max_prefill_bs": 99, "max_running_requests": places}
    assert many_at_once(delayer, **info) == ((delayer,), {**info, "max_prefill_bs": free})


def test_admission_goes_by_no_clock_about_which_tensor_parallel_ranks_could_disagree() -> None:
    for tp in (1, 2):
        chosen = flags(tp=tp, gpus=tuple(range(tp)))
        assert chosen["enable_prefill_delayer"] is True
        assert not chosen.keys() & {"prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms"}
    assert "enable_prefill_delayer" not in flags(flags={"disable_overlap_schedule": True})


def test_the_users_server_arguments_win_over_the_defaults() -> None:
    chosen = flags(flags={"mem_fraction_static": 0.7, "disable_prefill_cuda_graph": False})
    assert chosen["mem_fraction_static"] == 0.7 and chosen["disable_prefill_cuda_graph"] is False


@pytest.mark.parametrize("key", ["tp_size", "port", "skip-tokenizer-init"])
def test_an_argument_that_something_else_decides_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match=f"actor.sglang.{key} cannot be set: .+"):
        settings(flags={key: 1})


def test_only_a_shared_gpu_gets_a_server_that_can_release_memory() -> None:
    assert "enable_memory_saver" not in flags() and flags(colocated=True)["enable_memory_saver"] is True


@pytest.mark.parametrize("key", ["json_model_override_args", "json-model-override-args"])
def test_fp8_servers_take_the_format_from_an_argument_and_the_weights_from_the_first_push(key: str) -> None:
    assert not flags().keys() & {"json_model_override_args", "load_format"}
    chosen = flags(weight_format="fp8_block", flags={key: '{"rope_theta": 2.0}'})
    assert chosen["load_format"] == "dummy"
    assert json.loads(chosen["json_model_override_args"]) == {
        "rope_theta": 2.0,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        },
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"num_attention_heads \* head_dim / 1 is 960"):
        flags(MODEL | {"head_dim": 80}, weight_format="fp8_block")
    with pytest.raises(ValueError, match="weight_format=fp8_block needs GPUs"):
        settings(weight_format="fp8_block", gpus=())


def test_fp8_weights_come_without_scales_of_a_cache() -> None:
    class RadixAttention: ...

    class Other: ...

    def original(config: Any, layer: Any, prefix: str) -> str:
        return f"{type(layer).__name__} {prefix}"

    def chosen(layer: Any, block: list[int] | None) -> Any:
        return no_cache_scales(original, SimpleNamespace(weight_block_size=block), layer, prefix="p")

    assert chosen(RadixAttention(), [128, 128]) is None
    assert chosen(RadixAttention(), None) == "RadixAttention p" and chosen(Other(), [128, 128]) == "Other p"


def test_a_head_dimension_without_kernels_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert "attention_backend" not in flags()  # 1536 / 12 = 128
    with caplog.at_level(logging.WARNING):
        assert flags(MODEL | {"head_dim": 80})["attention_backend"] == "triton"
    assert "head dimension 80" in caplog.text
    assert (
        flags(MODEL | {"head_dim": 80}, flags={"attention_backend": "flashinfer"})["attention_backend"] == "flashinfer"
    )


CARD = Gpu(index=0, name="H", used_mib=30_000, total_mib=141_000, users=(GpuUser(pid=77, name="python3", mib=29_000),))


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put an nvidia-smi first on the path: one shell command prints the GPUs, one the processes that use them."""

    def show(cards: str, users: str) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f'#!/bin/sh\ncase "$1" in *query-gpu*) {cards};; *) {users};; esac\n')
        script.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return show


def test_memory_in_the_hands_of_others_is_an_error_with_names(show: Callable[[str, str], None]) -> None:
    living = os.getppid()
    show('echo "0, GPU-aa, H, 30000, 141000"', f'echo "GPU-aa, {living}, python3, 29000"')
    with pytest.raises(
        ValueError, match=rf"GPU 0: 30000 of its 141000 MiB .* process {living} \(python3\) holds 29000 MiB"
    ):
        check_gpus([0])
    check_gpus([0], own_pids=[living])
    show('echo "0, GPU-aa, H, 9000, 141000"', ":")
    with pytest.raises(ValueError, match="processes outside this container"):
        check_gpus([0])


def test_memory_that_stays_in_use_is_an_error_in_the_end(
    show: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a living process at once; of one that has ended when the patience is over. Other GPUs do not matter."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    cards = (f"{i}, GPU-{i}{i}, H, {mib}, 141000" for i, mib in enumerate((4, 3000, 3000)))
    show(
        "; ".join((f"echo >> {tmp_path}/looks", *(f'echo "{card}"' for card in cards))),
        f'echo "GPU-11, {ended.pid}, [Not Found], 2996"; echo "GPU-22, {os.getppid()}, sh, 2996"',
    )

    def looks(*indices: int) -> int:
        (tmp_path / "looks").write_text("")
        with pytest.raises(ValueError, match="are in use by other processes") if any(indices) else nullcontext():
            check_gpus(indices)
        return len((tmp_path / "looks").read_text())

    assert (looks(0), looks(2)) == (1, 1)
    monkeypatch.setattr("rollout.inference.gpus._PATIENCE_SECONDS", 0.3)
    assert looks(1) > 1


@pytest.mark.parametrize("reaped", [True, False])
def test_memory_of_a_process_that_has_ended_is_waited_for(
    show: Callable[[str, str], None], tmp_path: Path, reaped: bool
) -> None:
    """A GPU whose memory is held by a zombie, or by a process that is gone; free at the third look."""
    ended = subprocess.Popen(["true"])
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    if reaped:
        ended.wait()
    looks = tmp_path / "looks"
    free = f"[ $(wc -l < {looks}) -ge 3 ]"
    show(
        f'echo >> {looks}; held=4; {free} || held=3000; echo "0, GPU-aa, NVIDIA H, $held, 141000"',
        f'{free} || echo "GPU-aa, {ended.pid}, [No data], 2996"',
    )
    check_gpus([0])
    ended.wait()


def test_missing_gpus_are_an_error_with_a_way_out(show: Callable[[str, str], None]) -> None:
    show(":", ":")
    with pytest.raises(ValueError, match=r"write embedded\. instead of sglang\."):
        check_gpus([0])
    show('echo "0, GPU-aa, H, 4, 141000"', ":")
    with pytest.raises(ValueError, match="requires GPU 3, this machine has 1"):
        check_gpus([0, 3])


def test_nvidia_smi_is_read_as_it_prints(tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        textwrap.dedent("""\
            #!/bin/sh
            case "$1" in
              *query-gpu*) echo "0, GPU-aa, NVIDIA H, 30000, 141000"; echo "1, GPU-bb, NVIDIA H, 4, 141000";;
              *) echo "GPU-aa, 77, python3, 29000"; echo "GPU-aa, 78, [Not Found], [N/A]";;
            esac
            """)
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    first, second = query_gpus(str(script))
    assert (first.used_mib, first.users) == (30_000, (CARD.users[0], GpuUser(pid=78, name="[Not Found]", mib=0)))
    assert (second.index, second.name, second.users) == (1, "NVIDIA H", ())
    assert query_gpus(str(tmp_path / "absent")) == []


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("3,1", ["card3", "card1"]),
        ("GPU-c2", ["card2"]),
        ("0, 7,1", ["card0"]),
        ("", []),
        ("-1,0", []),
        ("1,GPU-c0", ["card1", "card0"]),
    ],
)
def test_the_gpus_of_a_run_are_those_that_cuda_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, visible: str, names: list[str]
) -> None:
    script = tmp_path / "nvidia-smi"
    cards = "\n".join(f"{i}, GPU-c{i}-0, card{i}, 4, 141000" for i in range(4))
    script.write_text(f"#!/bin/sh\ncase \"$1\" in *query-gpu*) printf '{cards}\\n';; esac\n")
    script.chmod(0o755)
    monkeypatch.delenv("SLIPSTREAM_GPUS", raising=False)
    assert device_names([0, 2]) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = query_gpus(str(script))
    assert [(gpu.index, gpu.name) for gpu in found] == list(enumerate(names))
    for unusable in ("MIG-aa", "9"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", unusable)
        assert query_gpus(str(script)) == []
        assert f"CUDA_VISIBLE_DEVICES={unusable}: {unusable} is no number or UUID of a whole GPU" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=f"requires GPU 5, CUDA_VISIBLE_DEVICES={visible} contains"):
        device_names([5])
    if found:
        assert device_names([len(found) - 1]) == visible.split(",")[len(found) - 1].strip()
        monkeypatch.setenv("SLIPSTREAM_GPUS", visible)  # a process of the run, which sees one of them itself
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        assert [gpu.name for gpu in query_gpus(str(script))] == names


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "sglang").mkdir()  # an empty package: what the server needs of it is missing
    (tmp_path / "sglang" / "__init__.py").touch()
    dying = settings(
        model_path=str(tmp_path), log_file=tmp_path / "logs" / "generator-0.log", gpus=(),
        python=sys.executable, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    with pytest.raises(
        GeneratorStartError, match=r"(?s)generator-0: .* exited at start \(exit code 1\).*ModuleNotFoundError"
    ):
        asyncio.run(SGLangServer(dying).start())
    dying.log_file.write_text("".join(f"line {i}\n" for i in range(30)))
    _, *last = SGLangServer(dying).last_lines().splitlines()
    assert last == [f"line {i}" for i in range(10, 30)]


def test_a_usage_error_is_reported_whatever_follows_it_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    python = tmp_path / "python"
    lines = "a warning\nactor.sglang.max_runing: SGLang 0 has no such server argument\nkernels compiled ahead: norm\n"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\nprintf '{lines}'\nexit {EXIT_USAGE}\n")
    python.chmod(0o755)
    ending = settings(model_path=str(tmp_path), log_file=tmp_path / "log", gpus=(), python=str(python))
    with pytest.raises(ValueError, match="^actor.sglang.max_runing: SGLang 0 has no such server argument$"):
        asyncio.run(SGLangServer(ending).start())


def test_a_server_receives_at_its_start_the_process_that_it_ends_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    python, received = tmp_path / "python", tmp_path / "received.json"
    python.write_text(f"#!/bin/sh\ncat > {received}\nexit 3\n")
    python.chmod(0o755)
    ending = settings(model_path=str(tmp_path), log_file=tmp_path / "log", gpus=(), python=str(python))
    with pytest.raises(GeneratorStartError, match="exit code 3"):
        asyncio.run(SGLangServer(ending).start())
    assert json.loads(received.read_text())["parent"] == os.getpid()


def test_a_server_that_cannot_be_used_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def start(self: SGLangServer) -> None:
        calls.append("start")

    monkeypatch.setattr(SGLangServer, "start", start)
    monkeypatch.setattr(SGLangServer, "stop", lambda self: calls.append("stop"))
    with pytest.raises(ValueError, match="interrupt=retract needs p1 on the generator's side"):
        asyncio.run(SGLangGenerator.start(settings(pp=2, gpus=()), interrupt="retract"))
    assert calls == ["start", "stop"]


def test_a_server_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    """The parent is killed and cannot clean up; the server has a child of its own."""
    inside = Path(main.__file__)
    server = (
        "import runpy, sys, subprocess, time; "
        f"space = runpy.run_path({str(inside)!r}); space['end_with'](int(sys.argv[1])); "
        "child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); time.sleep(1000)"
    )
    parent = (
        "import subprocess, sys, os, time; "
        f"p = subprocess.Popen([sys.executable, '-P', '-c', {server!r}, str(os.getpid())], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(1000)"
    )
    root = str(Path(__file__).resolve().parents[4])
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}, text=True
    )
    assert process.stdout is not None
    family = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    for survivor in alive:
        survivor.kill()
    assert not alive


def mixed_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(7, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def test_a_flat_bucket_gives_every_tensor_back_aligned_whatever_the_mixture() -> None:
    tensors = mixed_tensors()
    bucket = FlatBucket.of(tensors)
    assert bucket.num_bytes == 15 * 2 + 7 * 4 + 24 * 4 + 8
    back = bucket.tensors()
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_a_payload_pickles_with_nothing_but_torch_and_the_standard_library() -> None:
    """SGLang unpickles it under a list of modules it trusts; this project is not among them."""

    class Strict(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert module.partition(".")[0] in {"torch", "types", "collections", "builtins", "_codecs"}, module
            return super().find_class(module, name)

    bucket = FlatBucket.of(mixed_tensors())
    content = Strict(io.BytesIO(base64.b64decode(payload_of(bucket, bucket.flat, number=1)))).load()
    assert content["names"] == ("scalar", "wide", "transposed", "odd")
    assert content["dtypes"] == bucket.dtypes and content["shapes"] == bucket.shapes
    assert content["memory"].equal(bucket.flat) and (content["num_bytes"], content["number"]) == (len(bucket.flat), 1)


def test_tensors_that_fill_one_piece_of_memory_make_a_bucket_of_it() -> None:
    memory = torch.arange(10, dtype=torch.float32)
    parts = {"a": memory[:4].view(2, 2), "b": memory[4:]}
    bucket = FlatBucket.of(parts)
    assert bucket.flat.data_ptr() == memory.data_ptr() and bucket.num_bytes == 40
    assert all(torch.equal(bucket.tensors()[name], part) for name, part in parts.items())
    for copied in (
        {"b": parts["b"], "a": parts["a"]},  # another order
        {"a": memory[:4].view(2, 2).T, "b": memory[4:]},  # not contiguous
        {"a": memory[:4], "b": memory[5:]},  # a hole
        {"b": memory[4:]},  # its end
        {"a": memory[:4]},  # its beginning
        {"a": memory[:5], "b": memory[4:]},  # one place twice
    ):
        bucket = FlatBucket.of(copied)
        assert bucket.flat.untyped_storage().data_ptr() != memory.data_ptr()
        assert all(torch.equal(bucket.tensors()[name], part) for name, part in copied.items())


def test_a_checksum_adds_up_over_parts_and_sees_place_and_value() -> None:
    tensor = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = position_checksum(tensor)
    assert whole == position_checksum(tensor[:13]) + position_checksum(tensor[13:], 13 * 6)
    assert whole == position_checksum(torch.cat([tensor, torch.zeros(5, 6, dtype=torch.bfloat16)]))
    swapped = tensor.clone()
    swapped[3], swapped[4] = tensor[4], tensor[3]
    bit = tensor.clone()
    bit.view(torch.int16)[20, 2] ^= 1
    assert len({int(whole), int(position_checksum(swapped)), int(position_checksum(bit))}) == 3


def small_model(*, tied: bool) -> tuple[ModelShape, dict[str, Tensor]]:
    """Two layers, the second with three experts; 8 heads, 2 key/value heads of 4; a vocabulary that needs padding."""
    shape = ModelShape(num_heads=8, num_kv_heads=2, head_dim=4, vocab_size=70)
    generator = torch.Generator().manual_seed(2)
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (70, 32), "model.norm.weight": (32,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for part, rows in (("q", 32), ("k", 8), ("v", 8)):
            sizes |= {f"{layer}self_attn.{part}_proj.weight": (rows, 32), f"{layer}self_attn.{part}_proj.bias": (rows,)}
        sizes |= {f"{layer}self_attn.o_proj.weight": (32, 32), f"{layer}self_attn.k_norm.weight": (4,)}
        for mlp, width in (("mlp.", 24),) if i == 0 else ((f"mlp.experts.{e}.", 8) for e in range(3)):
            sizes |= {f"{layer}{mlp}{part}_proj.weight": (width, 32) for part in ("gate", "up")}
            sizes[f"{layer}{mlp}down_proj.weight"] = (32, width)
        sizes |= {f"{layer}mlp.gate.weight": (3, 32)} if i else {}
        sizes[f"{layer}input_layernorm.weight"] = (32,)
    if not tied:
        sizes["lm_head.weight"] = (70, 32)
    return shape, {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def on_server(shape: ModelShape, tensors: dict[str, Tensor], *, tp: int, rank: int) -> dict[str, Tensor]:
    """The parameters of one rank as a server holds them, built the plain way: whole heads, fused, cut, padded."""
    held: dict[str, Tensor] = {}
    heads, kv_heads, dim = shape.num_heads // tp, max(1, shape.num_kv_heads // tp), shape.head_dim
    kv_first = rank * shape.num_kv_heads // tp
    experts = "model.layers.1.mlp.experts."
    gate, up, down = (
        [tensors[f"{experts}{e}.{part}_proj.weight"] for e in range(3)] for part in ("gate", "up", "down")
    )
    halves = [torch.cat([g.chunk(tp)[rank], u.chunk(tp)[rank]]) for g, u in zip(gate, up, strict=True)]
    held[f"{experts}w13_weight"] = torch.stack(halves)
    held[f"{experts}w2_weight"] = torch.stack([d.chunk(tp, dim=1)[rank] for d in down])
    for name, tensor in tensors.items():
        if ".experts." in name:
            continue
        if ".q_proj." in name:
            key, value = (tensors[name.replace("q_proj", part)] for part in ("k_proj", "v_proj"))
            kv = slice(kv_first * dim, (kv_first + kv_heads) * dim)
            query = tensor[rank * heads * dim : (rank + 1) * heads * dim]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat([query, key[kv], value[kv]])
        elif ".gate_proj." in name:
            parts = [t.chunk(tp)[rank] for t in (tensor, tensors[name.replace("gate_proj", "up_proj")])]
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif any(part in name for part in (".o_proj.", ".down_proj.")):
            held[name] = tensor.chunk(tp, dim=1)[rank]
        elif "embed_tokens" in name or "lm_head" in name:
            held[name] = torch.cat([tensor, torch.zeros(128 - 70, 32)]).chunk(tp)[rank]
        elif not any(f".{part}_proj." in name for part in ("k", "v", "up")):
            held[name] = tensor
    return held


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_follow_a_tensor_that_is_fused_in_the_checkpoint(tp: int) -> None:
    glm4 = {"model_type": "glm4", "head_dim": 128, "num_key_value_heads": 2, "intermediate_size": 24}
    shape = ModelShape.from_config(parse_config({**MODEL, **glm4}))
    name, gate_up = "model.layers.0.mlp.gate_up_proj.weight", torch.randn(48, 32)
    expected = ExpectedChecksums(shape, tp=tp)
    expected.add({name: gate_up})
    gate, up = gate_up.split(24)
    held = [torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]) for rank in range(tp)]
    assert expected.mismatches([{name: int(position_checksum(part))} for part in held]) == []
    if tp > 1:
        plain = gate_up.chunk(tp)
        wrong = expected.mismatches([{name: int(position_checksum(part))} for part in plain])
        assert wrong == [f"{name} (rank {rank})" for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_of_quantized_tensors_predict_quantized_parameters(tp: int) -> None:
    """Blocks divide every part, so quantizing commutes with fusing and cutting."""
    shape = ModelShape(num_heads=4, num_kv_heads=2, head_dim=128, vocab_size=70)
    generator = torch.Generator().manual_seed(4)
    sizes = {
        **{f"model.layers.0.self_attn.{x}_proj.weight": (n, 512) for x, n in (("q", 512), ("k", 256), ("v", 256))},
        "model.layers.0.self_attn.o_proj.weight": (512, 512),
        **{f"model.layers.0.mlp.{part}_proj.weight": (512, 512) for part in ("gate", "up", "down")},
        **{
            f"model.layers.1.mlp.experts.{e}.{part}_proj.weight": (512, 512)
            for e in range(3) for part in ("gate", "up", "down")
        },
    }  # fmt: skip
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    expected = ExpectedChecksums(shape, tp=tp)
    expected.add(quantize_bucket(tensors))
    received, held = [], []
    for rank in range(tp):
        pairs = {name: quantize(t) for name, t in on_server(shape, tensors, tp=tp, rank=rank).items()}
        flat = {name: values for name, (values, _) in pairs.items()}
        flat |= {f"{name}_scale_inv": scales for name, (_, scales) in pairs.items()}
        received.append({name: int(position_checksum(t)) for name, t in flat.items()})
        held.append({name: str(t.dtype).removeprefix("torch.") for name, t in flat.items()})
    assert expected.mismatches(received) == []
    assert {row.held for row in expected.formats(held) if row.name.endswith(".weight")} == {"float8_e4m3fn"}
    held[-1]["model.layers.0.self_attn.qkv_proj.weight"] = "bfloat16"
    wrong = [(row.name.split(".")[-2], row.held) for row in expected.formats(held) if row.held != row.sent]
    assert wrong == [("q_proj", "bfloat16"), ("k_proj", "bfloat16"), ("v_proj", "bfloat16")]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_checksums_of_full_tensors_predict_those_of_fused_and_cut_ones(tp: int, tied: bool) -> None:
    shape, tensors = small_model(tied=tied)
    expected = ExpectedChecksums(shape, tp=tp)
    expected.add(dict(reversed(tensors.items())))
    ranks = [on_server(shape, tensors, tp=tp, rank=rank) for rank in range(tp)]

    def received() -> list[dict[str, int]]:
        return [{name: int(position_checksum(t)) for name, t in rank.items()} for rank in ranks]

    assert expected.mismatches(received()) == []
    ranks[-1]["model.layers.1.self_attn.qkv_proj.weight"].view(-1)[-1] += 1e-3
    ranks[0]["model.layers.1.mlp.experts.w13_weight"][[0, 1]] = ranks[0]["model.layers.1.mlp.experts.w13_weight"][
        [1, 0]
    ]
    missing = "model.layers.0.mlp.down_proj.weight"
    del ranks[0][missing]
    assert expected.mismatches(received()) == sorted(
        [
            f"{missing} (rank 0)",
            "model.layers.1.mlp.experts.w13_weight (rank 0)",
            f"model.layers.1.self_attn.qkv_proj.weight (rank {tp - 1})",
        ]
    )


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/slow":
            time.sleep(3)
        status = {"/refused": 400, "/absent": 404}.get(self.path, 200)
        body = b'{"success": false, "message": "wrong shape"}' if status == 400 else b"{}"
        with contextlib.suppress(BrokenPipeError):  # who asked for /slow has left
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def answering() -> Iterator[ServerAddress]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ServerAddress(name="generator-3", url=f"http://127.0.0.1:{server.server_port}", tp=1)
        server.shutdown()
        thread.join()


def test_what_a_server_answers_becomes_an_error_that_names_it(answering: ServerAddress) -> None:
    assert post(answering, ("/fine", {}), timeout_seconds=10) == {}
    with pytest.raises(GeneratorCallError, match=r"generator-3: /refused failed \(HTTP 400\): wrong shape"):
        post(answering, ("/refused", {}), timeout_seconds=10)
    with pytest.raises(GeneratorCallError, match=r"generator-3: this SGLang has no /absent; .* SGLang 0\.5\.17"):
        post(answering, ("/absent", {}), timeout_seconds=10)
    with pytest.raises(GeneratorGone, match="generator-3 .* did not respond to /slow within 0.2 s"):
        post(answering, ("/slow", {}), timeout_seconds=0.2)


def test_a_server_that_is_not_there_is_named() -> None:
    nobody = ServerAddress(name="generator-4", url="http://127.0.0.1:9", tp=1)
    with pytest.raises(GeneratorGone, match="generator-4 .* is unreachable"):
        post(nobody, ("/x", {}), timeout_seconds=5)


MANY_POSTS = """
import asyncio, resource, sys
from rollout.inference.sglang.client import SGLangClient
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
async def main():
    client = SGLangClient("generator-0", sys.argv[1])
    answers = await asyncio.gather(*(client.post(("/x", {})) for _ in range(600)))
    await client.close()
    print(len(answers))
asyncio.run(main())
"""


def test_more_requests_than_a_process_may_have_open_files_at_first_are_in_flight_at_once() -> None:
    async def main() -> bytes:
        waiting, all_there = 0, asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal waiting
            await reader.readuntil(b"{}")
            waiting += 1
            if waiting == 600:
                all_there.set()
            await all_there.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
            writer.close()

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
        try:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            command = [sys.executable, "-c", MANY_POSTS, url]
            root = Path(__file__).resolve().parents[4]
            child = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=subprocess.PIPE)
            out, _ = await asyncio.wait_for(child.communicate(), 60)
        finally:
            server.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return out

    assert asyncio.run(main()) == b"600\n"


def test_every_hook_has_a_reason_and_the_version_that_is_pinned() -> None:
    pinned = (Path(__file__).parents[4] / "setup.py").read_text() + (
        Path(__file__).parents[4] / "pyproject.toml"
    ).read_text()
    assert f'"sglang=={SGLANG}"' in pinned
    for hook in hooks():
        assert hook.reason and SGLANG in hook.versions
        assert hook.link.startswith(f"https://github.com/sgl-project/sglang/blob/v{SGLANG}/python/sglang/srt/")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("class Here: ...", "lacks what this server's hooks change: served.part.Here.method"),
        (None, "lacks what this server's hooks change: served.part.Here.method"),
        ("import served.pa", "cannot import served.part: ModuleNotFoundError: No module named 'served.pa'"),
        ("import absent_kernels", "cannot import served.part: ModuleNotFoundError: No module named 'absent_kernels'"),
        (
            "raise OSError('a kernel\\n of another version')",
            "cannot import served.part: OSError: a kernel of another version",
        ),
    ],
)
def test_a_hook_without_its_target_names_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, reason: str
) -> None:
    package = tmp_path / "served"
    package.mkdir()
    (package / "__init__.py").touch()
    if content is not None:
        (package / "part.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert reason_for(["served.part.Here.method"]) == reason
    finally:
        for name in ("served", "served.part"):
            sys.modules.pop(name, None)
