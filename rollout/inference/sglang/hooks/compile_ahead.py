"""Compiles kernels of a server while it imports its modules, at the first start on a host.

SGLang and FlashInfer compile kernels where they are first used, one after the other. This program, which hooks/main.py
starts by its path, compiles in parallel those of a model with plain attention.
Invariant: it writes nothing but caches of compiled kernels. What fails here, or is not listed, is compiled by the
server itself. FlashInfer locks a kernel while it compiles and loads it; SGLang locks the compilation, and compiles
again what it cannot load.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

_OPS = "sglang.kernels.ops."
_ARCH = "sglang.kernels.jit.utils.arch"
_NORM, _COMPILER = "flashinfer.jit.norm", "tvm_ffi.cpp"  # of packages that SGLang requires
_QK_NORMED = ("qwen3", "qwen3_moe")
Kernel = tuple[str, str, list[str | int | bool]]
"""Module, its function that compiles and loads, and the arguments of that; formats are named as in torch."""


def kernels(flags: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Kernel]:
    """Yield the kernels of SGLang for a server with these arguments and this config.json."""
    dtype = str(flags["dtype"])
    yield f"{_OPS}activation.activation", "activation_module", [dtype]
    yield f"{_OPS}attention.clamp_position", "_jit_clamp_position_module", ["int64"]
    if "kv_lora_rank" in config:  # latent attention has kernels of its own
        return
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    own_kv_heads = max(1, (config.get("num_key_value_heads") or heads) // int(flags.get("tp_size", 1)))
    row = own_kv_heads * head_dim * (4 if dtype == "float32" else 2)  # bytes
    yield f"{_OPS}kvcache.kvcache", "_jit_kvcache_module", [row, row]
    is_glm4 = config["model_type"] == "glm4"
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rotated = int(head_dim * (rope.get("partial_rotary_factor") or (0.5 if is_glm4 else 1)))
    yield f"{_OPS}attention.rope", "_jit_fused_rope_module", [not is_glm4, rotated, dtype, dtype]
    if config["model_type"] in _QK_NORMED:
        yield f"{_OPS}layernorm.norm", "_jit_qknorm_module", [head_dim, dtype]


def compile_norm() -> None:
    """Compile FlashInfer's norms, which takes longest, unless a package brought them."""
    spec = sys.modules[_NORM].gen_norm_module()
    if not spec.is_aot:
        spec.build(verbose=False)


def compile_kernel(kernel: Kernel) -> None:
    import torch

    module, function, arguments = kernel
    formats = [getattr(torch, value, value) if isinstance(value, str) else value for value in arguments]
    getattr(sys.modules[module], function)(*formats)


def compile_all(listed: list[Kernel]) -> bool:
    """Compile norms and the listed kernels, each in a thread that waits for compilers; log what failed. Returns whether
    nothing did."""
    begin = time.monotonic()
    jobs: dict[str, tuple[str, Callable[[], None]]] = {"norm": (_NORM, compile_norm)}
    jobs |= {kernel[1]: (kernel[0], partial(compile_kernel, kernel)) for kernel in listed}
    failed: dict[str, BaseException] = {}
    running = {}
    with ThreadPoolExecutor(len(jobs)) as pool:
        for name, (module, job) in jobs.items():
            try:
                # By this thread alone: two that import at the same time may see each other's unfinished modules.
                importlib.import_module(module)
                if module != _NORM:
                    prepare()
            except Exception as error:  # noqa: BLE001 (an import runs any code)
                failed[name] = error
            else:
                running[name] = pool.submit(job)
    failed |= {name: failure for name, done in running.items() if (failure := done.exception())}
    for name, failure in failed.items():
        _log(f"{name} is left to the server: {type(failure).__name__}: {' '.join(str(failure).split())[-300:]}")
    if found := jobs.keys() - failed.keys():
        _log(f"compiled or found {', '.join(sorted(found))} in {time.monotonic() - begin:.1f} s")
    return not failed


def prepare() -> None:
    """Import what SGLang imports when it compiles, and set the variable that it sets for each compilation and then
    takes away, which another thread may be about to read."""
    importlib.import_module(_COMPILER)
    arch = importlib.import_module(_ARCH).get_jit_cuda_arch()
    os.environ.setdefault("TVM_FFI_CUDA_ARCH_LIST", arch.target_name)


def _log(message: str) -> None:
    sys.stderr.write(f"kernels compiled ahead: {message}\n")


def mark(listed: list[Kernel]) -> Path:
    """Return the file that shows that these kernels were compiled on this host. SGLang pins FlashInfer's version."""
    key = json.dumps([listed, version("sglang"), version("torch"), socket.gethostname()])
    folder = Path(os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser()
    return folder / f"slipstream-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def main() -> None:
    flags = json.load(sys.stdin)
    try:
        config = json.loads(Path(flags["model_path"], "config.json").read_text())
        listed = list(kernels(flags, config))
    except (KeyError, OSError, TypeError, ValueError):  # the server reports it
        return
    done = mark(listed)
    if done.exists():
        return
    if compile_all(listed):
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


if __name__ == "__main__":
    main()
