"""What a workflow may return: checked where a group enters the run, so that no later part meets a malformed one.

Invariant: the error names the prompt, the field, the value and the rule.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from rollout.trajectories import turns
from rollout.types import PROMPT_VERSION, Completion, FinishReason, Prompt, Trajectory

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


def check_group(group: Any, prompt: Prompt, *, version: int, limits: GroupLimits) -> list[Trajectory]:
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
