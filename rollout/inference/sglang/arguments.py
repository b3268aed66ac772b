"""Arguments of a SGLang server by name: which of them users may set, and their check by SGLang's own parser.

Read by the server's processes too, so nothing else of this project is imported. As a program (arguments by name as JSON
on stdin) it checks them and starts nothing; it exits with EXIT_USAGE where one is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rollout.inference.backend import FlagValue

SGLANG = "0.5.17"
"""The SGLang that this project is written for: its symbols, its HTTP interface, and the pin in pyproject.toml."""
EXIT_USAGE = 64
"""Exit code of a server that was given wrong arguments; a line of its log names them."""
USAGE_ERRORS = ("actor.sglang.", "SGLang ")
"""Beginnings of that line. The last such line counts; others may follow it."""
_CHECK_SECONDS = 120.0
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
    name = _key(key)
    return FROM_ELSEWHERE.get(_SYNONYMS.get(name, name))


def is_installed() -> bool:
    """Return whether this interpreter can import SGLang. A folder of that name on the path has no origin."""
    found = importlib.util.find_spec("sglang")
    return found is not None and found.origin is not None


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
            [runs, "-P", __file__], input=json.dumps(dict(flags)),
            capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "gives no answer" if isinstance(error, subprocess.TimeoutExpired) else f"{error.strerror}"
        yield "generator.python", f"{runs}: {why}; {way_out}"
        return
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == EXIT_USAGE:
        key, _, message = last.partition(": ")
        yield key, message
    elif done.returncode:
        yield "generator.python", f"{runs} cannot import SGLang ({last}); {way_out}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.partition(": ")[2])


def command_line(flags: Mapping[str, object]) -> list[str]:
    """Return server arguments by name as an argument list, in a process that has SGLang. Raises SystemExit(EXIT_USAGE)
    for a name that this SGLang lacks, or a value that it does not take."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False)
    ServerArgs.add_cli_args(parser)  # type: ignore[arg-type]
    for action in parser._actions:
        action.required = False
    options = {_key(option): option for action in parser._actions for option in action.option_strings}
    argv: list[str] = []
    for key, value in flags.items():
        name = _key(key)
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            _refuse(key, f"SGLang {sglang_version()} has no such server argument" + _hint(near))
        one = _words(parser, options, name, value)
        if one is None:
            _refuse(key, f"must be true or false, got {value!r}")
        try:
            parser.parse_args(one)
        except ValueError as error:
            _refuse(key, str(error))
        argv += one
    return argv


def _words(parser: argparse.ArgumentParser, options: Mapping[str, str], name: str, value: object) -> list[str] | None:
    """Return one argument as words; None for a switch that is neither on nor off."""
    option = options[name]
    if value is None:
        return []
    if parser._option_string_actions[option].nargs == 0:
        off = options.get(f"no_{name}")
        return [option] if value is True else ([off] if off else []) if value is False else None
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, json.dumps(value) if isinstance(value, dict) else str(value)]


def _key(option: str) -> str:
    """Return --mem-fraction-static as a key: mem_fraction_static."""
    return option.lstrip("-").replace("-", "_")


def _hint(near: list[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else "; `python -m sglang.launch_server --help` lists all"


def _refuse(key: str, why: str) -> NoReturn:
    sys.stderr.write(f"actor.sglang.{key}: {why}\n")
    raise SystemExit(EXIT_USAGE)


def sglang_version() -> str:
    """Return the version of the SGLang that is installed."""
    import sglang

    version: str = sglang.__version__
    return version


if __name__ == "__main__":
    command_line(json.load(sys.stdin))
