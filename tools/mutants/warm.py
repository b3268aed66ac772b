"""Run selections of tests, each in a fork of this process, which has imported the slow libraries already.

Started by its path in a process of its own (trial.py): nothing of the project may be imported here, as the forks import
it from a tree with a bug. Jobs come as JSON lines on stdin, {tests, tree, output, limit_seconds}; each is answered by
{code, seconds}, where code is null when the tests exceeded the limit. Nothing that a job started outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from types import FrameType

import psutil

_LIBRARIES = (
    "pytest", "numpy", "psutil", "rich.progress", "yaml", "pydantic", "hypothesis.strategies", "xdist.plugin",
    "pytest_timeout", "orjson", "aiohttp", "torch", "torch.distributed", "torch.testing", "torch.multiprocessing",
    "safetensors.torch", "tokenizers", "transformers", "transformers.models.auto", "transformers.models.qwen2",
    "ray",
)  # fmt: skip
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    for library in _LIBRARIES:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(library)
    signal.signal(signal.SIGTERM, _end)
    if sys.platform == "linux":  # what a job leaves behind becomes a child of this process, which ends with its parent
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(**json.loads(line))) + "\n")
        sys.stdout.flush()


def run(*, tests: list[str], tree: str, output: str, limit_seconds: float) -> dict[str, float | None]:
    """Run pytest on `tests` in the folder `tree`, its output in the file `output`; kill it at the limit."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_here(tests, tree, output)
    code = None
    while time.monotonic() - start < limit_seconds and code is None:
        ended, status = os.waitpid(-1, os.WNOHANG)  # orphans of the job too, as an init process does
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
        elif not ended:
            time.sleep(_POLL_SECONDS)
    seconds = time.monotonic() - start
    _end_children()
    return {"code": code, "seconds": seconds}


def _run_here(tests: list[str], tree: str, output: str) -> None:
    """Run the tests in the fork; never return."""
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(tree)
        sys.path[0:0] = [tree]
        # The tree must come before an editable installation of the package, in processes that tests start too.
        os.environ["PYTHONPATH"] = tree
        os.environ.pop("PYTEST_ADDOPTS", None)
        sys.argv = ["pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        try:
            runpy.run_module("pytest", run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 (the fork must end here, whatever it is)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_children() -> None:
    """Kill everything below this process."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_SECONDS)


def _end(number: int, frame: FrameType | None) -> None:
    _end_children()
    os._exit(1)


if __name__ == "__main__":
    main()
