"""The arguments of a SGLang server, its start and end, and its table of hooks."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from helpers.sglang_environment import replica
from model_specs.families import parse_config
from rollout.errors import GeneratorStartError
from rollout.inference.backend import BackendSettings
from rollout.inference.sglang.arguments import EXIT_USAGE
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.hooks import main
from rollout.inference.sglang.hooks.models import no_cache_scales
from rollout.inference.sglang.hooks.table import SGLANG, hooks, reason_for
from rollout.inference.sglang.server import SGLangServer, decode_graph_sizes, server_environment, server_flags

MODEL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 4096, "vocab_size": 512,
}  # fmt: skip


def settings(**changes: Any) -> BackendSettings:
    values: dict[str, Any] = {"name": "generator-0", "model_path": "/m", "log_file": Path("log"), "gpus": (0,)}
    return replica(**values | changes)


def flags(model: dict[str, Any] = MODEL, **changes: Any) -> dict[str, Any]:
    return server_flags(settings(**changes), parse_config(model), port=1, nccl_port=2)


@pytest.mark.parametrize("max_running", [1, 7, 8, 64, 100, 256, 512, 1000, 4096])
def test_graph_sizes_are_few_and_reach_the_last_request(max_running: int) -> None:
    sizes = decode_graph_sizes(max_running)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_running
    assert len(sizes) <= 20


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
        SGLangServer(settings(flags={key: 1}))


def test_a_cache_that_cannot_drop_what_an_update_made_old_is_refused() -> None:
    name = "SGLANG_ENABLE_UNIFIED_RADIX_TREE"
    with pytest.raises(ValueError, match=f"{name}=1: its cache cannot tell .*; remove the variable"):
        server_environment(settings(env={name: "1"}))
    assert server_environment(settings(env={name: "0"}))[name] == "0"


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
        SGLangServer(settings(weight_format="fp8_block", gpus=()))


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


def test_a_server_that_cannot_be_used_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def start(self: SGLangServer) -> None:
        calls.append("start")

    monkeypatch.setattr(SGLangServer, "start", start)
    monkeypatch.setattr(SGLangServer, "stop", lambda self: calls.append("stop"))
    with pytest.raises(ValueError, match="interrupt=retract needs p1 on the generator's side"):
        asyncio.run(SGLangGenerator.start(settings(pp=2, gpus=(), interrupt="retract")))
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
    _, alive = psutil.wait_procs(family, timeout=100)
    for survivor in alive:
        survivor.kill()
    assert not alive


def test_the_processes_of_a_server_need_no_other_package_of_this_project() -> None:
    """They run in SGLang's environment, where a library may look for its own `core` or `tools`."""
    program = """
import runpy, sys
sys.modules.update(dict.fromkeys(["allocation", "config_schema", "core", "model_specs", "mcore_adapter", "tools"]))
runpy.run_path(sys.argv[1])["make_importable"]()
import rollout.inference.sglang.hooks.table, rollout.inference.sglang.hooks.compile_ahead
"""
    run = subprocess.run([sys.executable, "-P", "-c", program, main.__file__], capture_output=True, text=True, env={})
    assert run.returncode == 0, run.stderr


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
def test_a_hook_without_its_target_names_the_reason(tmp_path, monkeypatch, content: str | None, reason: str) -> None:
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
