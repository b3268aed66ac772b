"""How code runs in a locked process: what it prints, the value of a last expression, and the traceback of an error.
Standard library only."""

import ast
import io
import os
import random
import sys
import traceback

PRELOADED = (
    "abc", "ast", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math",
    "numbers", "operator", "pprint", "queue", "random", "re", "statistics", "string", "textwrap", "threading", "time",
    "traceback", "typing", "unicodedata",
)  # fmt: skip
"""Modules that code can import at every level; in namespaces it can import the whole standard library."""
_NAME = "<code>"
FAILED = 1
"""Exit code of code that raised."""


_TYPICAL = "import math\ndef f(n):\n    return n * f(n - 1) if n else 1\nprint(f(5), [math.pi])\nsum(range(9))"


def warm_up() -> None:
    """Fill the interpreter's caches, so that each process that is forked to run code copies less memory."""
    for _ in range(20):  # the interpreter specializes what ran 8 times
        _run(_TYPICAL)


def run_code(code_bytes: int) -> int:
    """Run the code that standard input begins with; return the exit code. What follows is the program's input."""
    source = os.read(0, code_bytes) if code_bytes else b""
    while len(source) < code_bytes and (more := os.read(0, code_bytes - len(source))):
        source += more
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", errors="backslashreplace"
    )
    random.seed(0)  # equal calls, as after a restart, have equal results
    code = FAILED
    try:
        code = _run(source.decode(errors="replace"))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else FAILED if end.code else 0
        if end.code and not isinstance(end.code, int):
            sys.stdout.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001 - the code of a model: anything may go wrong in it
        sys.stdout.write("".join(_shown(error)))
    finally:
        sys.stdout.flush()
    return code & 255


def _run(source: str) -> int:
    names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    tree = ast.parse(source, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    return 0


def _shown(error: BaseException) -> list[str]:
    """Return the traceback of an error without the frames of this file."""
    found = traceback.TracebackException.from_exception(error, lookup_lines=False, limit=-20)
    found.stack = traceback.StackSummary.from_list(
        [
            traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line="")  # nothing is read from files
            for frame in found.stack
            if frame.filename != __file__
        ]
    )
    return list(found.format(chain=False))
