"""Start Python programs as forks of one process that has imported their libraries; see server.py."""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from helpers.forks.ray_worker import AGENTS
from helpers.forks.server import ForkedProgram, agents_address, server_address, start_program
from rollout.inference.gpus import query_gpus

Program = ForkedProgram | subprocess.Popen[bytes]
ROOT = Path(__file__).resolve().parents[3]
HAS_GPUS = bool(query_gpus())
FRESH = "SLIPSTREAM_TEST_FRESH"
"""Set: start whole runs in new interpreters, not as forks of one that has imported the libraries."""

LIBRARIES = (
    "torch", "transformers", "mcore_adapter.engine", "core.quickstart", "helpers.forks.programs",
    "requests", "jsonschema", "pyarrow", "pydantic", "attr", "google.protobuf", "msgpack", "charset_normalizer",
    "core.algorithms", "core.trainer", "core.data.rollout_batch", "core.explore.service", "rollout.workflows",
    "rollout.inference.embedded.generator", "transformers.models.qwen2.modeling_qwen2", "tokenizers",
    "safetensors.torch", "transformers.models.auto.modeling_auto", "matplotlib.figure", "nbclient",
    "transformers.models.auto.tokenization_auto", "transformers.models.qwen2.tokenization_qwen2",
    "mcore_adapter.cpu.device", "megatron.core.models.gpt.gpt_layer_specs", "core.processes.meeting",
    "core.weight_sync.push", "google.protobuf.json_format", "google.protobuf.timestamp_pb2", "pdb", "pyarrow.json",
    "pydantic.v1", "pydantic.deprecated.class_validators", "starlette.datastructures", "wcwidth",
)  # fmt: skip
"""What the server imports, also of what Ray imports. Not Ray: it reads its environment when it is imported."""


def start(
    words: Sequence[str],
    *,
    output: IO[Any],
    errors: IO[Any] | None = None,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Program:
    """Start `python WORDS` in a session of its own, with what it writes in the file `output`, or to stderr in `errors`.
    `fresh`: in a new interpreter, as always where there are GPUs: CUDA does not work in a fork of a process that has
    used it."""
    errors = output if errors is None else errors
    env = dict(os.environ if env is None else env)
    if fresh or not can_fork(env):
        return subprocess.Popen(
            [sys.executable, *words], cwd=cwd, env=env, stdout=output, stderr=errors, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    env[AGENTS] = agents_address(server())
    with open(os.devnull, "rb") as nothing:
        streams = (nothing.fileno(), output.fileno(), errors.fileno())
        return start_program(
            server(), words, env=env, cwd=str(cwd), streams=streams, session=True, first="helpers.forks.workers"
        )


def with_tests() -> dict[str, str]:
    """Return the environment of this process, extended so that programs can import `helpers` and the packages."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT), *given])}


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether programs with this environment start as forks."""
    has_gpus = env.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and HAS_GPUS
    return not env.get(FRESH) and sys.platform == "linux" and not has_gpus


@functools.cache
def server() -> str:
    """Return the address of the server of this test session; start it, unless this process is a fork of it. The server
    ends with the process that has started it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return server_address(os.getppid())
    env = with_tests() | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "helpers.forks.server", str(os.getpid()), *LIBRARIES]
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline(), "the fork server did not start"
    return server_address(process.pid)
