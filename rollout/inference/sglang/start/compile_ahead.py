"""Compiles kernels of a server while it imports its modules, at the first start on a host.

SGLang and FlashInfer compile kernels where they are first used, one after the other. This program, which hooks.py
starts by its path, compiles all at once those that a model with plain attention uses.
Invariant: it writes nothing but caches of compiled kernels. What fails here, or is not listed, is compiled by the
server itself; both libraries lock a kernel while they compile it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

_OPS = "sglang.kernels.ops."
_NORM = "flashinfer.jit.norm"  # of the FlashInfer that SGLang requires
_QK_NORMED = ("qwen3", "qwen3_moe")
Kernel = tuple[str, str, list[Any]]
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
    rotated = int(head_dim * config.get("partial_rotary_factor", 1))
    yield f"{_OPS}attention.rope", "_jit_fused_rope_module", [config["model_type"] != "glm4", rotated, dtype, dtype]
    if config["model_type"] in _QK_NORMED:
        yield f"{_OPS}layernorm.norm", "_jit_qknorm_module", [head_dim, dtype]


def compile_norm() -> None:
    """Compile FlashInfer's norms, which takes longest, unless a package brought them."""
    spec = importlib.import_module(_NORM).gen_norm_module()
    if not spec.is_aot:
        spec.build(verbose=False)


def compile_kernel(kernel: Kernel) -> None:
    import torch

    module, function, arguments = kernel
    formats = [getattr(torch, value, value) if isinstance(value, str) else value for value in arguments]
    getattr(sys.modules[module], function)(*formats)


def compile_all(listed: list[Kernel]) -> None:
    """Compile norms and the listed kernels, each in a thread that waits for compilers; log what failed."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(listed) + 1) as pool:
        # Modules are imported by this thread alone: two that import at once may each see the other's unfinished ones.
        running = {"norm": (_importing(_NORM), pool.submit(compile_norm))}
        for kernel in listed:
            running[kernel[1]] = _importing(kernel[0]), pool.submit(compile_kernel, kernel)
    for name, (error, done) in running.items():
        if failure := error or done.exception():
            _log(f"{name} is left to the server: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}")
    _log(f"compiled or found {', '.join(running)} in {time.monotonic() - begin:.1f} s")


def _importing(module: str) -> Exception | None:
    """Import a module; return its error."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (an import runs any code)
        return error
    return None


def _log(message: str) -> None:
    sys.stderr.write(f"kernels compiled ahead: {message}\n")


def mark(listed: list[Kernel]) -> Path:
    """Return the file that shows that these kernels were compiled on this host."""
    key = json.dumps([listed, version("sglang"), version("torch")])
    folder = Path(os.environ.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser()
    return folder / f"slipstream-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def main() -> None:
    flags = json.load(sys.stdin)
    try:
        config = json.loads(Path(flags["model_path"], "config.json").read_text())
        listed = list(kernels(flags, config))
    except (KeyError, OSError, ValueError):  # the server reports it
        return
    done = mark(listed)
    if done.exists():
        return
    compile_all(listed)
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()


if __name__ == "__main__":
    main()
