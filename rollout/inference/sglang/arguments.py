"""Which arguments of a SGLang server its user may set, and to what; SGLang itself is not needed."""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys

from rollout.inference.backend import FlagValue
from rollout.inference.sglang.server_arguments import KINDS, VERSION
from rollout.inference.sglang.server_choices import CHOICES

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


_FIND_SECONDS = 30.0
_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


def why_not_installed(python: str | None) -> str | None:
    """Return why the interpreter `python` (None: this one) cannot run a server; None if it can import SGLang."""
    install = "pip install -e '.[gpu]', or set this to an interpreter that has SGLang"
    if python is None:
        return None if is_installed() else f"SGLang is not installed for {sys.executable}; {install}"
    try:
        found = subprocess.run([python, "-P", "-c", _FIND], capture_output=True, timeout=_FIND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "gives no answer" if isinstance(error, subprocess.TimeoutExpired) else f"{error.strerror}"
        return f"{python}: {why}; set this to a Python interpreter that has SGLang"
    return None if found.returncode == 0 else f"SGLang is not installed for {python}; {install}"


def refusal(key: str, value: FlagValue) -> str | None:
    """Return why the server argument `key` cannot be set to `value`; None where it can."""
    if why := decided_elsewhere(key):
        return f"cannot be set: {why}; leave it out"
    name = key.replace("-", "_")
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1)
        way_out = f"did you mean {near[0]!r}?" if near else "`python -m sglang.launch_server --help` lists all"
        return f"SGLang {VERSION} has no such server argument; {way_out}"
    return None if value is None else _wrong_value(name, value)


def _wrong_value(name: str, value: FlagValue) -> str | None:
    kind = KINDS[name]
    if kind == "flag":
        return None if isinstance(value, bool) else f"must be true or false, got {value!r}"
    if kind == "list":  # one value is a list, too
        items = value if isinstance(value, list) else [value]
        return next((why for item in items if (why := _wrong_choice(name, item))), None)
    if name == "context_length":  # 32k is a length
        return None
    if isinstance(value, (list, bool)):
        return f"must be {_ONE.get(kind, 'one value')}, got {value!r}"
    try:
        {"integer": int, "number": float}.get(kind, str)(str(value))
    except ValueError:
        return f"must be {_ONE[kind]}, got {value!r}"
    return _wrong_choice(name, value)


def _wrong_choice(name: str, value: FlagValue) -> str | None:
    choices = CHOICES.get(name)
    if choices is None or str(value) in choices:
        return None
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"must be one of {', '.join(choices)}, got {value!r}" + (f"; did you mean {near[0]!r}?" if near else "")


_ONE = {"integer": "an integer", "number": "a number"}
