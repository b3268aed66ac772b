"""Which arguments of a SGLang server its user may set. Their names and values are checked by SGLang's own parser, where
SGLang is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping

from rollout.inference.backend import FlagValue
from rollout.inference.sglang.start import command_line

COLOCATED_MEM_FRACTION = 0.6
"""Share of a GPU that a server beside the trainer takes for weights and cache; what the trainer keeps there in the
generators' turn must fit beside it."""
FROM_ELSEWHERE = {
    "model_path": "set by actor.path",
    "tp_size": "set by allocation_mode",
    "pp_size": "set by allocation_mode",
    "dp_size": "set by allocation_mode: one server per data-parallel replica",
    "base_gpu_id": "set by allocation_mode",
    "device": "generator.device sets it",
    "nnodes": "a replica is on one node",
    "host": "chosen at start",
    "port": "a free one is chosen at start",
    "nccl_port": "a free one is chosen at start",
    "api_key": "made for each run",
    "admin_api_key": "api_key, made for each run, covers every call",
    "dtype": "set by generator.dtype",
    "max_running_requests": "set by generator.max_running",
    "skip_tokenizer_init": "requests and answers are token ids",
    "enable_return_routed_experts": "set by actor.moe_routing_replay",
    "enable_memory_saver": "set by allocation_mode",
    "disable_shared_experts_fusion": "pushed weights need shared experts in parameters of their own",
    "enforce_shared_experts_fusion": "pushed weights need shared experts in parameters of their own",
    "tokenizer_worker_num": "the hooks require a single tokenizer process",
    "speculative_algorithm": "a step that samples several tokens has no per-token versions",
}
"""Server arguments that are not the user's to set, and what decides them."""


_SYNONYMS = {
    "model": "model_path",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
}
"""Second names of arguments in FROM_ELSEWHERE."""


def decided_elsewhere(key: str) -> str | None:
    """Return the key or mechanism that determines the server argument `key`; None where users may set it."""
    name = key.replace("-", "_")
    return FROM_ELSEWHERE.get(_SYNONYMS.get(name, name))


def is_installed() -> bool:
    """Return whether this interpreter can import SGLang."""
    return importlib.util.find_spec("sglang") is not None


_CHECK_SECONDS = 120.0


def host_problems(python: str | None, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
    """Yield (configuration key, message) of why the interpreter `python` (None: this one) cannot run a server with
    these arguments."""
    runs = python or sys.executable
    way_out = "pip install -e '.[gpu]', or set this to an interpreter that has SGLang"
    if flags:
        way_out += "; actor.sglang and generator.flags were not checked"
    if python is None and not is_installed():
        yield "generator.python", f"SGLang is not installed for {runs}; {way_out}"
        return
    try:
        done = subprocess.run(
            [runs, "-P", command_line.__file__], input=json.dumps(dict(flags)),
            capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "gives no answer" if isinstance(error, subprocess.TimeoutExpired) else f"{error.strerror}"
        yield "generator.python", f"{runs}: {why}; {way_out}"
        return
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == command_line.EXIT_USAGE:
        key, _, message = last.partition(": ")
        yield key, message
    elif done.returncode:
        yield "generator.python", f"{runs} cannot import SGLang ({last}); {way_out}"
