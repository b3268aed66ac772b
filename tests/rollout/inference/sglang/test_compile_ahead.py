"""Kernels that are compiled ahead of a server: which ones, all at once, once on a host, and what fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.sglang_environment import PYTHON, WHY_NOT, environment
from rollout.inference.sglang.hooks import compile_ahead
from rollout.inference.sglang.hooks import main as hooks
from rollout.inference.sglang.hooks.compile_ahead import kernels

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
}  # fmt: skip
RECORDING = """
import sys, time
from pathlib import Path
def {function}(*arguments):
    began = time.monotonic()
    folder = Path({folder!r})
    import os
    (folder / "{function}").write_text(" ".join(map(str, arguments)))
    assert "{function}" == "build" or os.environ["TVM_FFI_CUDA_ARCH_LIST"] == "9.0a"
    while len(list(folder.iterdir())) < {together}:  # all the others must run at once
        time.sleep(0.01)
        assert time.monotonic() - began < 240, "they do not run at once"
    {then}
"""
ARCH = """
from types import SimpleNamespace
def get_jit_cuda_arch():
    return SimpleNamespace(target_name="9.0a")
"""
NORM = """
class Spec:
    is_aot = False
    def build(self, verbose):
        build()
def gen_norm_module():
    return Spec()
"""
SIGNATURES = """
import inspect, importlib, json, sys
for module, function, arguments in json.loads(sys.argv[1]):
    inspect.signature(getattr(importlib.import_module(module), function)).bind(*arguments)
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.core import JitSpec
assert isinstance(JitSpec.is_aot, property) and inspect.signature(JitSpec.build).bind(None, verbose=False)
from sglang.kernels.jit.utils.arch import ArchInfo, get_jit_cuda_arch
assert isinstance(ArchInfo.target_name, property) and not inspect.signature(get_jit_cuda_arch).parameters
import tvm_ffi.cpp
print("bound")
"""


def named(flags: dict[str, Any], config: dict[str, Any]) -> dict[str, list[Any]]:
    return {function: arguments for _, function, arguments in kernels({"dtype": "bfloat16"} | flags, config)}


def test_the_kernels_are_those_that_a_server_of_this_model_compiled() -> None:
    # As SGLang 0.5.17 compiled them for this shape on an H200: kvcache_512_512, fused_rope_true_128_true_bf16_t_bf16_t.
    assert named({}, QWEN2) == {
        "activation_module": ["bfloat16"], "_jit_clamp_position_module": ["int64"], "_jit_kvcache_module": [512, 512],
        "_jit_fused_rope_module": [True, 128, "bfloat16", "bfloat16"],
    }  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_qwen3_normalizes_queries_and_keys(model_type: str) -> None:
    qwen3 = QWEN2 | {"model_type": model_type, "head_dim": 64}
    assert named({}, qwen3)["_jit_qknorm_module"] == [64, "bfloat16"]
    assert named({"dtype": "float32"}, qwen3)["_jit_kvcache_module"] == [512, 512]


@pytest.mark.parametrize(
    ("keys", "rotated"),
    [
        ({}, 64),
        ({"partial_rotary_factor": 0.25}, 32),
        ({"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 1.0}}, 128),
        ({"rope_scaling": {"partial_rotary_factor": 0.25}, "rope_parameters": None}, 32),
    ],
)
def test_glm4_rotates_a_part_of_each_head(keys: dict[str, Any], rotated: int) -> None:
    glm4 = QWEN2 | {"model_type": "glm4", **keys}
    assert named({}, glm4)["_jit_fused_rope_module"] == [False, rotated, "bfloat16", "bfloat16"]


def test_latent_attention_has_kernels_of_its_own() -> None:
    assert named({}, {"model_type": "deepseek_v2", "kv_lora_rank": 512}).keys() == {
        "activation_module", "_jit_clamp_position_module",
    }  # fmt: skip


class Host:
    """Libraries that record what they are asked to compile, and a model."""

    def __init__(self, folder: Path) -> None:
        self.packages, self.ran, self.cache = (folder / name for name in ("packages", "ran", "cache"))
        self.ran.mkdir()
        self.flags = {"model_path": str(folder), "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(QWEN2))
        self.listed = list(kernels(self.flags, QWEN2))
        for name in ("sglang", "torch"):
            self.install(name, "1.0")
        self.module("tvm_ffi.cpp", "")
        self.module("sglang.kernels.jit.utils.arch", ARCH)
        self.module("torch", "bfloat16 = 'torch.bfloat16'\nint64 = 'torch.int64'\n")
        self.module("flashinfer.jit.norm", self._recording("build") + NORM)
        for module, function, _ in self.listed:
            self.module(module, self._recording(function))

    def install(self, name: str, version: str) -> None:
        info = self.packages / f"{name}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def _recording(self, function: str, then: str = "") -> str:
        together = len(self.listed) + 1
        return RECORDING.format(function=function, folder=str(self.ran), together=together, then=then or "pass")

    def module(self, name: str, text: str) -> None:
        path = self.packages.joinpath(*name.split("."))
        for parent in reversed(path.relative_to(self.packages).parents[:-1]):
            (self.packages / parent).mkdir(exist_ok=True)
            (self.packages / parent / "__init__.py").touch()
        path.with_suffix(".py").write_text(text)

    def fail(self, number: int, message: str) -> None:
        module, function, _ = self.listed[number]
        self.module(module, self._recording(function, f"raise OSError({message!r})"))

    def run(self) -> str:
        env = os.environ | {"PYTHONPATH": str(self.packages), "TVM_FFI_CACHE_DIR": str(self.cache)}
        env.pop("TVM_FFI_CUDA_ARCH_LIST", None)
        done = subprocess.run(
            [sys.executable, "-P", compile_ahead.__file__], input=json.dumps(self.flags), env=env,
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return done.stderr

    def compiled(self) -> dict[str, str]:
        found = {path.name: path.read_text() for path in self.ran.iterdir()}
        for path in self.ran.iterdir():
            path.unlink()
        return found


def test_all_kernels_are_compiled_at_once_and_once_on_a_host(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert ", activation_module, norm in " in host.run()
    assert host.compiled() == {
        "build": "", "activation_module": "torch.bfloat16", "_jit_clamp_position_module": "torch.int64",
        "_jit_kvcache_module": "512 512", "_jit_fused_rope_module": "True 128 torch.bfloat16 torch.bfloat16",
    }  # fmt: skip
    assert host.run() == ""
    assert host.compiled() == {}
    host.install("sglang", "1.1")
    host.run()
    assert host.compiled()["_jit_kvcache_module"] == "512 512"
    host.flags["tp_size"] = "2"  # other kernels
    host.run()
    assert host.compiled()["_jit_kvcache_module"] == "256 256"


def test_a_kernel_that_fails_is_named_and_the_others_are_compiled(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.fail(1, "no compiler\nhere")
    log = host.run()
    assert "_jit_clamp_position_module is left to the server: OSError: no compiler here\n" in log
    assert log.count("left to the server") == 1
    assert log.count("_jit_clamp_position_module") == 1, "it is not among those that were compiled"
    assert len(host.compiled()) == len(host.listed) + 1
    assert "left to the server" in host.run(), "what failed is tried again"


def test_hooks_start_it_beside_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(host.packages))
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(host.cache))
    hooks.compile_ahead(host.flags)
    deadline = time.monotonic() + 60
    while not (host.cache.exists() and list(host.cache.iterdir())):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(host.compiled()) == len(host.listed) + 1


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
def test_sglang_has_the_functions_that_compile() -> None:
    qwen3 = QWEN2 | {"model_type": "qwen3"}
    listed = json.dumps(list(kernels({"dtype": "bfloat16"}, qwen3)))
    done = subprocess.run(
        [str(PYTHON), "-c", SIGNATURES, listed], env=os.environ | environment(), capture_output=True, text=True
    )
    assert done.stdout.endswith("bound\n"), done.stderr
