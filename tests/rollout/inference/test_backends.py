"""Capabilities and registry of the inference backends, against what the backends do."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from allocation import GENERATOR_BACKENDS
from helpers.sglang_environment import replica
from model_specs.families import parse_config
from rollout.inference.backend import BackendSettings, GeneratorConfig, Interrupt, WeightFormat
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.inference.mock import MockGenerator
from rollout.inference.registry import BACKENDS, DEFAULT_BACKEND
from rollout.inference.sglang.generator import SGLangGenerator
from rollout.inference.sglang.server import SGLangServer, server_flags

ROOT = Path(__file__).resolve().parents[3]
GENERATORS: dict[str, Any] = {"sglang": SGLangGenerator, "embedded": EmbeddedGenerator, "mock": MockGenerator}
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def settings(model: str, **changes: Any) -> BackendSettings:
    values: dict[str, Any] = {"model_path": model, "dtype": "float32", "device": "cpu"}
    return BackendSettings(**values | changes)


def test_every_backend_of_an_allocation_is_in_the_registry() -> None:
    assert set(BACKENDS) == set(GENERATOR_BACKENDS) == set(GENERATORS)
    for device, name in DEFAULT_BACKEND.items():
        assert BACKENDS[name].capabilities.devices[0] == device


def test_the_registry_loads_without_the_libraries_of_the_backends() -> None:
    code = (
        "import sys, rollout.inference.registry\n"
        "sys.exit(str({'torch', 'sglang', 'ray', 'transformers', 'aiohttp'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_the_methods_that_its_capabilities_name(name: str) -> None:
    can, generator = BACKENDS[name].capabilities, GENERATORS[name]
    assert hasattr(generator, "endpoint") == (can.transports != ("local",))
    assert hasattr(generator, "release_memory") == hasattr(generator, "resume_memory") == can.colocates
    assert set(can.staged_transports) <= set(can.transports)


@pytest.mark.parametrize("name", ["embedded", "mock"])
@pytest.mark.parametrize("dtype", get_args(WeightFormat))
async def test_a_backend_inside_this_program_starts_with_every_format_that_it_names(model, name, dtype) -> None:
    backend = BACKENDS[name]

    assert dtype in backend.capabilities.weight_formats and backend.capabilities.devices == ("cpu",)

    generator = await backend.start(settings(model, dtype=dtype, load_weights=False))
    try:
        assert (await generator.health()).num_running == 0
        await generator.pause()
    finally:
        await generator.close()


def test_an_embedded_generator_loads_the_weights_unless_a_push_brings_them(model: str) -> None:
    with pytest.raises(ValueError, match="safetensors"):
        asyncio.run(BACKENDS["embedded"].start(settings(model)))


@pytest.mark.parametrize("interrupt", get_args(Interrupt))
def test_a_server_of_several_stages_takes_the_interrupt_modes_of_its_capabilities(model, tmp_path, interrupt) -> None:
    server = SGLangServer(
        replica(name="g", model_path=model, log_file=tmp_path / "log", gpus=(), pp=2, interrupt=interrupt)
    )
    server._url = "http://127.0.0.1:9"

    async def make() -> None:
        await SGLangGenerator(server).close()

    if interrupt in BACKENDS["sglang"].capabilities.staged_interrupts:
        asyncio.run(make())
    else:
        with pytest.raises(ValueError, match="pipeline stages does not return per-token versions"):
            asyncio.run(make())


@pytest.mark.parametrize("load_weights", [True, False])
def test_settings_of_any_backend_become_arguments_of_a_server(model: str, load_weights: bool) -> None:
    given = settings(
        model, tp=2, gpus=(4, 5), device="cuda", colocated=True, load_weights=load_weights, reports_experts=True,
        config=GeneratorConfig(flags={"context_length": 7}, max_running=4), host="10.0.0.1", key="abc",
    )  # fmt: skip
    arguments = server_flags(given, parse_config(CONFIG), port=1, nccl_port=2)
    assert arguments.get("load_format") == (None if load_weights else "dummy")
    expected = {"context_length": 7, "api_key": "abc", "tp_size": 2, "dtype": "float32", "max_running_requests": 4}
    expected |= {"model_path": model, "host": "10.0.0.1", "enable_memory_saver": True}
    assert expected.items() <= arguments.items() and arguments["enable_return_routed_experts"] is True
    assert "api_key" not in server_flags(replace(given, key=""), parse_config(CONFIG), port=1, nccl_port=2)


def test_flags_that_are_decided_elsewhere_are_refused_by_the_backend() -> None:
    refused = dict(BACKENDS["sglang"].refused_flags({"tp-size": 2, "device": "cpu", "context_length": 7}))
    assert refused.keys() == {"tp-size", "device"} and "generator.device" in refused["device"]
    assert [flag for flag, _ in BACKENDS["sglang"].refused_flags({"model": "m", "tensor_parallel_size": 2})] == [
        "model", "tensor_parallel_size",
    ]  # fmt: skip
    assert list(BACKENDS["mock"].refused_flags({"tp-size": 2})) == []
