"""Start Python programs as forks of one process that has imported their libraries; see server.py."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from helpers.forks.server import ForkedProgram, start_program
from rollout.inference.gpus import query_gpus

Program = ForkedProgram | subprocess.Popen[bytes]
ROOT = Path(__file__).resolve().parents[3]
FRESH = "SLIPSTREAM_TEST_FRESH"
"""Set: start whole runs in new interpreters, not as forks of one that has imported the libraries."""

LIBRARIES = (
    "torch", "transformers", "mcore_adapter.engine", "core.quickstart", "helpers.forks.workers",
    "requests", "jsonschema", "pyarrow", "pydantic", "attr", "google.protobuf", "msgpack", "charset_normalizer",
    "core.algorithms", "core.trainer", "core.data.rollout_batch", "core.explore.service", "rollout.workflows",
    "rollout.inference.embedded.generator", "transformers.models.qwen2.modeling_qwen2", "tokenizers",
    "safetensors.torch",
)  # fmt: skip
"""What the server imports. Not Ray: it reads its environment when it is imported."""


def start(
    words: Sequence[str],
    *,
    output: IO[Any],
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Program:
    """Start `python WORDS` in a session of its own, with what it writes in the file `output`. `fresh`: in a new
    interpreter, as always where there are GPUs: CUDA does not work in a fork of a process that has used it."""
    env = dict(os.environ if env is None else env)
    if fresh or env.get(FRESH) or sys.platform != "linux" or _uses_gpus(env):
        return subprocess.Popen(
            [sys.executable, *words], cwd=cwd, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    with open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), output.fileno(), output.fileno())
        return start_program(server(), words, env=env, cwd=str(cwd), streams=streams, session=True)


def _uses_gpus(env: Mapping[str, str]) -> bool:
    return env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and bool(query_gpus())


@functools.cache
def server() -> str:
    """Start the server of this test session, unless one of its processes has; return its address. It ends with the
    session: the process of pytest, or the one that has started the processes of pytest-xdist."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address = f"slipstream-tests-{owner}"
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), *given])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [sys.executable, "-m", "helpers.forks.server", address, str(owner), *LIBRARIES]
    process = subprocess.Popen(words, cwd=ROOT, env=env)
    with open(os.devnull, "r+b") as nothing:
        while True:
            try:
                probe = start_program(address, ["-m", "this"], env=env, cwd="/", streams=(nothing.fileno(),) * 3)
            except ConnectionRefusedError:  # it does not listen yet
                assert not process.poll(), "the fork server did not start"
                time.sleep(0.05)
            else:
                assert probe.wait() == 0
                return address
