"""Calls of workflows, which are user code: what they return, raise or cancel reaches the caller as a value, and what
they return is checked where a group enters the run.

Invariant: a call raises CancelledError if, and only if, the task that awaits it is cancelled. asyncio.TaskGroup cancels
the task that it runs in when a child fails, and up to Python 3.12 leaves its count cancelling() above 0. Each call
therefore runs in a task of its own.

Invariant: no exit in the task of a call, nor in a task that it starts, ends the event loop. asyncio ends the loop when
a task raises SystemExit or KeyboardInterrupt, and no other sample would be finished. A task of a workflow therefore
raises what as_failure() makes of them. A KeyboardInterrupt in the main thread is not converted: it may be a Ctrl-C.
Not covered: callbacks of the loop, and tasks that are not made by create_task() or a TaskGroup.

Invariant: the error of a malformed group names the prompt, the field, the value and the rule.
"""

import asyncio
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import numpy as np

from rollout.plugins import clarify
from rollout.trajectories import turns
from rollout.types import PROMPT_VERSION, Completion, FinishReason, Prompt, Trajectory

T = TypeVar("T")

_in_workflow: ContextVar[bool] = ContextVar("in_workflow", default=False)
"""Whether the current task is that of a call, or was started by one."""


async def outcome_of(call: Callable[[], Awaitable[T]], *, fatal: tuple[type[Exception], ...] = ()) -> T | Exception:
    """Await `call()` to its end; return its result, or the error that it failed with, see as_failure().

    Cancelling the caller cancels the call and waits for its end."""
    outcome: T | BaseException
    task = asyncio.current_task()
    _contain_exits(asyncio.get_running_loop())
    try:
        outcome = await asyncio.create_task(_caught(call))
    except asyncio.CancelledError as error:  # of the caller, or of its own task by the call
        outcome = error
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # the call has taken the cancellation for its own
    return as_failure(outcome, fatal=fatal) if isinstance(outcome, BaseException) else outcome


async def _caught(call: Callable[[], Awaitable[T]]) -> T | BaseException:
    _in_workflow.set(True)
    try:
        return await call()
    except BaseException as error:  # noqa: BLE001 - user code
        if _may_be_signal(error):
            raise
        clarify(error)
        return error


def _contain_exits(loop: asyncio.AbstractEventLoop) -> None:
    """Let tasks that are started inside a call contain exits, from now on."""
    factory = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        loop.set_task_factory(_TaskFactory(factory))


class _TaskFactory:
    """A task factory in front of `factory`, or of asyncio.Task."""

    def __init__(self, factory: Callable[..., Any] | None) -> None:
        self._factory = factory

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Generator[asyncio.Future[object] | None, None, T] | Coroutine[object, object, T],
        **options: Any,
    ) -> asyncio.Future[T]:
        if _in_workflow.get() and asyncio.iscoroutine(coro):
            coro = _Contained(coro)
        return (
            asyncio.Task(coro, loop=loop, **options) if self._factory is None else self._factory(loop, coro, **options)
        )


class _Contained(Coroutine[object, object, T]):
    """A coroutine, of which an exit is an error. No `async def` around it: that would leave it without an await, with a
    warning, where its task is cancelled before it starts."""

    def __init__(self, coro: Coroutine[object, object, T]) -> None:
        self._coro = coro

    def send(self, value: object) -> object:
        return _without_exits(self._coro.send, value)

    def throw(self, *error: object) -> object:
        return _without_exits(self._coro.throw, *error)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[object, object, T]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> object:
        return getattr(self._coro, name)  # its name and its frames, for asyncio's messages


def _without_exits(step: Callable[..., T], *arguments: object) -> T:
    """Call `step`; raise the failure in place of an exit."""
    try:
        return step(*arguments)
    except (SystemExit, KeyboardInterrupt) as error:
        if _may_be_signal(error):
            raise
        failure = as_failure(error)
    raise failure  # not while the exit is handled: the traceback would have it twice


def _may_be_signal(error: BaseException) -> bool:
    """Return whether the error may be a Ctrl-C or a SIGTERM, which Python raises in the main thread only."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def as_failure(error: BaseException, *, fatal: tuple[type[Exception], ...] = ()) -> Exception:
    """Return the failure of a workflow as an error to raise: an exit of the workflow does not end the process, nor does
    a cancellation inside it cancel the caller. The error has the traceback and the cause of the exit.

    An exception group, as of asyncio.TaskGroup, becomes its first error, with the others in a note: an error of a type
    in `fatal` only if all of them are."""
    if isinstance(error, BaseExceptionGroup):
        errors = list(_errors_in(error))
        first = next((e for e in errors if not isinstance(e, fatal)), errors[0])
        failure = as_failure(first)
        if others := [repr(e) for e in errors if e is not first]:
            failure.add_note(f"raised together with {len(others)} more: {', '.join(others)}")
        return failure
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError("something that the workflow awaited was cancelled")
    failure = RuntimeError(f"the workflow raised {type(error).__name__}({error}): it must return or raise an Exception")
    failure.__cause__, failure.__context__ = error.__cause__, error.__context__
    failure.__suppress_context__ = error.__suppress_context__
    return failure.with_traceback(error.__traceback__)  # its last frame is the place that a message names


def _errors_in(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group and of the groups in it, in their order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _errors_in(error)
        else:
            yield error


_MAX_LOGPROB = 0.1
"""A log-probability is at most 0; servers that compute in bfloat16 round it to a little more."""
_ENDS = frozenset(get_args(FinishReason)) - {"abort"}
_MAX_REWARD = float(np.finfo(np.float32).max)
_AT_ONCE = 4096
"""Groups of more tokens are checked trajectory by trajectory."""
_NUMBER = float | int | numbers.Real | np.bool_
"""Types of a reward or a metric, the frequent ones first: isinstance tries them in turn."""
_ARRAYS = (
    ("token_ids", "iu", "integers"), ("loss_mask", "b", "booleans"), ("rollout_logprobs", "f", "numbers"),
    ("versions", "iu", "integers"),
)  # fmt: skip
"""Field, kinds of dtype, and what they are called."""
CUT_TOKENS = "cut_tokens"
"""Metric of a trajectory that was longer than a microbatch: the tokens that it lost."""
_NAMES = tuple(name for name, _, _ in _ARRAYS)


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """What the configuration and the model allow. None: not known."""

    group_size: int = 1
    """Rollouts of a group, at least."""
    vocab_size: int | None = None
    max_tokens: int | None = None
    """Of one trajectory: the smallest microbatch of the trainer. Longer ones are cut after their last turn that
    fits."""


def check_group(group: object, prompt: Prompt, *, version: int, limits: GroupLimits) -> list[Trajectory]:
    """Return the trajectories of `group`; those that are too long are cut, and have the metric CUT_TOKENS. `version`:
    the newest that may have sampled a token.

    Raises TypeError when it is not a list of trajectories with arrays of the right shapes and types, ValueError when a
    value is impossible."""
    if not isinstance(group, list) or not group or not all(isinstance(t, Trajectory) for t in group):
        raise TypeError(f"{prompt.query_id}: a workflow returns a non-empty list of Trajectory, not {group!r:.200}")
    num_rollouts = len({i if t.rollout is None else ("branch", t.rollout) for i, t in enumerate(group)})
    if num_rollouts < limits.group_size:
        branches = "" if num_rollouts == len(group) else f" in {len(group)} trajectories"
        raise ValueError(
            f"{prompt.query_id}: the workflow returned {num_rollouts} rollouts{branches}, "
            f"group_size={limits.group_size} are needed: advantages compare the rollouts of a group"
        )
    for index, trajectory in enumerate(group):
        for wrong in _type_errors(trajectory):
            raise TypeError(f"{prompt.query_id}, trajectory {index}: {wrong}")
    if limits.max_tokens is not None and any(len(t.token_ids) > limits.max_tokens for t in group):
        group = [_cut(t, limits.max_tokens) if len(t.token_ids) > limits.max_tokens else t for t in group]
    if _is_suspect(group, version, limits):
        for index, trajectory in enumerate(group):
            for wrong in (*_own_errors(trajectory), *_token_errors(trajectory, version, limits)):
                raise ValueError(f"{prompt.query_id}, trajectory {index}: {wrong}")
    return group


def check_sampled(group: Iterable[Trajectory], completions: Iterable[Completion], prompt: Prompt) -> None:
    """Raise ValueError where a token is trained that is none of the tokens of `completions`, with its log-probability:
    a workflow edited what was sampled, or tokenised it again."""
    sampled = list(completions)
    known = {(c.token_ids.tobytes(), c.logprobs.tobytes()) for c in sampled}
    pairs: np.ndarray | None = None
    for index, t in enumerate(group):
        for start, end in turns(t.loss_mask):
            token_ids, logprobs = t.token_ids[start:end], t.rollout_logprobs[start:end]
            if (token_ids.tobytes(), logprobs.tobytes()) in known:
                continue
            if pairs is None:
                pairs = np.concatenate([_pairs(c.token_ids, c.logprobs) for c in sampled])
            foreign = ~np.isin(_pairs(token_ids, logprobs), pairs)
            if foreign.any():
                at = start + int(np.argmax(foreign))
                raise ValueError(
                    f"{prompt.query_id}, trajectory {index}: token_ids[{at}]={t.token_ids[at]} is trained, but no "
                    "generator sampled it with this log-probability in this rollout; append completions with "
                    "TrajectoryBuilder.sampled(), unchanged, and other tokens with observed()"
                )


def _pairs(token_ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Return tokens with their log-probabilities as one integer each: [n] uint64."""
    bits = np.ascontiguousarray(logprobs, np.float32).view(np.uint32)
    return (token_ids.astype(np.uint64) << np.uint64(32)) | bits


def _cut(t: Trajectory, max_tokens: int) -> Trajectory:
    """Return the turns of a trajectory that `max_tokens` hold; where they do not hold the first, the part of it that
    they hold."""
    ends = [end for _, end in turns(t.loss_mask) if end <= max_tokens]
    end = ends[-1] if ends else max_tokens
    return replace(
        t,
        token_ids=t.token_ids[:end],
        loss_mask=t.loss_mask[:end],
        rollout_logprobs=t.rollout_logprobs[:end],
        versions=t.versions[:end],
        routed_experts=None if t.routed_experts is None else t.routed_experts[:end],
        finish_reason="length",
        turn_rewards=None if t.turn_rewards is None else t.turn_rewards[: max(len(ends), 1)],
        turn_states=None if t.turn_states is None else t.turn_states[: max(len(ends), 1)],
        metrics={**t.metrics, CUT_TOKENS: float(len(t.token_ids) - end)},
    )


def _is_suspect(group: list[Trajectory], version: int, limits: GroupLimits) -> bool:
    """Return whether a value may be wrong: True wherever a rule is broken, in a quarter of the rules' time for short
    answers. Long ones are better checked one by one, in the processor's cache."""
    lens = [len(t.token_ids) for t in group]
    if sum(lens) > _AT_ONCE or min(lens) == 0:
        return True
    if not all(abs(float(t.reward)) <= _MAX_REWARD and t.finish_reason in _ENDS for t in group):  # NaN is not
        return True
    if any(t.turn_rewards is not None for t in group):
        return True
    token_ids, loss_mask, logprobs, versions = (np.concatenate([getattr(t, name) for t in group]) for name in _NAMES)
    starts = np.cumsum([0, *lens[:-1]])
    return bool(
        loss_mask[starts].any()
        or not np.logical_or.reduceat(loss_mask, starts).all()
        or (limits.vocab_size is not None and not 0 <= token_ids.min() <= token_ids.max() < limits.vocab_size)
        or not -math.inf < logprobs.min() <= logprobs.max() <= _MAX_LOGPROB
        or versions.max() > version
        or versions[loss_mask].min() <= PROMPT_VERSION
    )


def _type_errors(t: Trajectory) -> Iterator[str]:
    n = len(t.token_ids) if isinstance(t.token_ids, np.ndarray) else 0
    for name, kinds, called in _ARRAYS:
        array = getattr(t, name)
        if not isinstance(array, np.ndarray) or array.shape != (n,):
            yield f"{name} must be an array of {n} entries, one per token, not {array!r:.80}"
        elif array.dtype.kind not in kinds:
            yield f"{name} must be an array of {called}, not of {array.dtype}"
    if not isinstance(t.reward, _NUMBER):
        yield f"reward must be a number, not {t.reward!r:.80}"
    for name, kind, called in (("turn_rewards", _NUMBER, "numbers"), ("turn_states", str | None, "texts")):
        of_turns = getattr(t, name)
        if of_turns is None:
            continue
        if not isinstance(of_turns, list | tuple) or not all(isinstance(one, kind) for one in of_turns):
            yield f"{name} must be a list of {called}, not {of_turns!r:.80}"
        elif len(of_turns) != (num_turns := len(turns(np.asarray(t.loss_mask, np.bool_)))):
            yield f"{name} has {len(of_turns)} entries, loss_mask has {num_turns} turns (runs of trained tokens)"
    for name, value in t.metrics.items():
        if not isinstance(value, _NUMBER):
            yield f"metrics[{name!r}] must be a number, not {value!r:.80}"


def _own_errors(t: Trajectory) -> Iterator[str]:
    """Yield what is wrong with a trajectory as a whole."""
    if not all(math.isfinite(reward) for reward in t.turn_rewards or ()):
        yield f"turn_rewards={list(t.turn_rewards or ())} must be finite numbers"
    if not math.isfinite(t.reward) or abs(t.reward) > _MAX_REWARD:
        yield f"reward={float(t.reward)} must be a finite number of float32"
    if t.finish_reason not in _ENDS:
        yield f"finish_reason={t.finish_reason!r} must be 'stop' or 'length'"
    if not t.loss_mask.any():
        yield "loss_mask is True for no token: there is nothing to train"
    elif t.loss_mask[0]:
        yield "loss_mask is True for the first token, which nothing precedes; a trajectory begins with its prompt"


def _token_errors(t: Trajectory, version: int, limits: GroupLimits) -> Iterator[str]:
    """Yield what is wrong with single tokens."""
    if limits.vocab_size is not None:
        yield from _first(t.token_ids, (t.token_ids < 0) | (t.token_ids >= limits.vocab_size), "token_ids",
                          f"outside 0..{limits.vocab_size - 1}, the vocabulary of the model")  # fmt: skip
    logprobs, sampled = t.rollout_logprobs, t.loss_mask
    yield from _first(logprobs, ~np.isfinite(logprobs), "rollout_logprobs", "not finite")
    yield from _first(logprobs, sampled & (logprobs > _MAX_LOGPROB), "rollout_logprobs", "above 0")
    yield from _first(t.versions, t.versions > version, "versions", f"newer than the weights, {version}")
    yield from _first(t.versions, sampled & (t.versions <= PROMPT_VERSION), "versions",
                      "of a token that loss_mask trains: it must be the version that sampled it")  # fmt: skip


def _first(values: np.ndarray, wrong: np.ndarray, name: str, rule: str) -> Iterator[str]:
    """Yield the first of the `wrong` values."""
    if wrong.any():
        at = int(np.argmax(wrong))
        yield f"{name}[{at}]={values[at]} is {rule} ({int(wrong.sum())} of {len(values)} tokens)"
