"""One reward worker: a process of its own that scores answers until its pool closes the socket. Started by pool.py.

Over the socket come pickled lists of (prompt, text); back goes one `_RESULT` per answer, in order and as soon as it is
known, so the pool always has the answer that is being scored when a worker hangs or exits. Invariant: whatever an
answer does to this process, the pool gets a result or sees the process end; it never outlives its parent.
"""

import contextlib
import importlib
import json
import logging
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum

from rollout.plugins import PluginError, clarify
from rollout.processes import die_with
from rollout.rewards.load import load_reward, uses_math
from rollout.rewards.math import WRONG, UnparsableAnswerError
from rollout.types import Prompt, Score

RESULT = struct.Struct("<dBI")
"""Score, Outcome, length of the UTF-8 message that follows: why there is no verdict, or the parts (JSON)."""

_MAX_SCORE = 3.4028234663852886e38
"""Of float32, in which the trainer holds rewards."""

LENGTH = struct.Struct("<Q")
"""Length of the pickle that follows."""


class Outcome(IntEnum):
    """How scoring one answer ended; all but SCORED come with the score of a wrong answer."""

    SCORED = 0
    UNPARSABLE = 1
    ERROR = 2
    MEMORY = 3
    TIMEOUT = 4
    CRASH = 5
    """Set by the pool: the worker has exited."""

    @property
    def is_verdict(self) -> bool:
        """The answer was judged; else it counts as wrong because judging it failed."""
        return self in (Outcome.SCORED, Outcome.UNPARSABLE)


class _TimeLimitError(BaseException):
    """Not an Exception: sympy catches those."""


def main(argv: list[str]) -> None:
    """Run a worker. `argv`: socket's file descriptor, reward spec, seconds per answer, memory limit in bytes, parent's
    process id."""
    fd, spec, timeout_seconds, memory_bytes, parent = int(argv[0]), argv[1], float(argv[2]), int(argv[3]), int(argv[4])
    die_with(parent)
    channel = socket.socket(fileno=fd)
    try:
        reward = _prepare(spec)
    except Exception as error:  # noqa: BLE001 - user code: reported to the pool, which raises it
        message = str(error) if isinstance(error, PluginError) else traceback.format_exc()
        _send(channel, WRONG, Outcome.ERROR, message)
        return
    _limit_memory(memory_bytes)
    signal.signal(signal.SIGALRM, _on_alarm)
    _send(channel, 1.0, Outcome.SCORED, "")
    with channel, channel.makefile("rb") as stream:
        while header := stream.read(LENGTH.size):
            for prompt, text in pickle.loads(stream.read(*LENGTH.unpack(header))):
                _send(channel, *_score(reward, prompt, text, timeout_seconds))


def _prepare(spec: str) -> Callable[[Prompt, str], Score]:
    """Return the reward function, with the libraries that its first call would import already there."""
    if uses_math(spec):
        importlib.import_module("rollout.rewards.math_equality")
        logging.getLogger("math_verify").setLevel(logging.ERROR)
    return load_reward(spec)


def _score(
    reward: Callable[[Prompt, str], Score], prompt: Prompt, text: str, timeout_seconds: float
) -> tuple[float, Outcome, str]:
    try:
        with _time_limit(timeout_seconds):
            score = reward(prompt, text)
        if not abs(score) <= _MAX_SCORE:  # NaN is not
            return WRONG, Outcome.ERROR, f"reward function returned {score}; a reward is a finite number of float32"
    except UnparsableAnswerError:
        return WRONG, Outcome.UNPARSABLE, ""
    except MemoryError:
        return WRONG, Outcome.MEMORY, ""
    except _TimeLimitError:
        return WRONG, Outcome.TIMEOUT, ""
    except BaseException as error:  # noqa: BLE001 - an answer must not end the worker, not even by SystemExit
        clarify(error)
        return WRONG, Outcome.ERROR, traceback.format_exc(limit=-8)
    return score, Outcome.SCORED, json.dumps(score.parts) if score.parts else ""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End Python code that takes longer. The pool kills a process whose code never returns to the interpreter."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _on_alarm(signum: int, frame: object) -> None:
    raise _TimeLimitError


def _send(channel: socket.socket, score: float, outcome: Outcome, message: str) -> None:
    encoded = message.encode(errors="replace")
    channel.sendall(RESULT.pack(score, outcome, len(encoded)) + encoded)


def _limit_memory(extra_bytes: int) -> None:
    """Cap the address space at what is mapped now plus `extra_bytes`, where the system reports what is mapped now."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as statm:
            mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + extra_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(sys.argv[1:])
