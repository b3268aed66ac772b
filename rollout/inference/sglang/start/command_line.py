"""Server arguments by name, as a command line for SGLang's own parser, which checks names and values.

Read by the server's processes, so nothing else of this project is imported. As a program (arguments by name as JSON on
stdin) it checks them and starts nothing; it exits with EXIT_USAGE where one is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

EXIT_USAGE = 64
"""Exit code of a server that was given wrong arguments; a line of its log names them."""
USAGE_ERRORS = ("actor.sglang.", "SGLang ")
"""What that line begins with, the last such line: others may follow it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.partition(": ")[2])


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Return server arguments by name as an argument list. Raises SystemExit(EXIT_USAGE) for a name that this SGLang
    lacks, or a value that it does not take."""
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
