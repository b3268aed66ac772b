"""Batches whose completions could not be scored: a warning at once, the end after some."""

import pytest

from rollout.rewards.config import RewardConfig
from rollout.rewards.pool import FailedScores, RewardFailureError


class Pool:
    """Counts as RewardPool.stats() has them, since the start."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(("scored", "unparsable", "error", "memory", "timeout", "crash"), 0.0)

    def batch(self, **counts: float) -> dict[str, float]:
        for name, count in counts.items():
            self._counts[name] += count
        return {f"reward/num_{name}": count for name, count in self._counts.items()} | {"reward/num_waiting": 3.0}


def test_most_failures_warn_at_once_and_end_the_run_after_batches_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    pool, scores = Pool(), FailedScores(RewardConfig(max_failed_share=0.5, max_failed_batches=3))
    common = {"last_error": "KeyError: 'answer'"}
    assert scores.check(pool.batch(scored=8), step=1, **common) == 0.0
    assert scores.check(pool.batch(error=6, timeout=2), step=2, **common) == 1.0
    said = "step 2: 8 of 8 completions could not be scored (6 error, 2 timeout) and count as wrong (-1)"
    assert caplog.messages == [f"{said}. The last error: KeyError: 'answer'"]
    scores.check(pool.batch(crash=8), step=3, **common)
    with pytest.raises(RewardFailureError, match=r"reward.function: step 4: 5 of 8 .* in the 3 steps .* KeyError"):
        scores.check(pool.batch(error=5, scored=3), step=4, **common)


def test_a_batch_that_is_scored_begins_the_count_anew_and_wrong_answers_are_no_failures() -> None:
    pool, scores = Pool(), FailedScores(RewardConfig(max_failed_share=0.5, max_failed_batches=2))
    for step in range(1, 10, 2):
        scores.check(pool.batch(error=8), step=step, last_error="")
        assert scores.check(pool.batch(unparsable=4, error=4), step=step + 1, last_error="") == 0.5


def test_a_step_for_which_nothing_was_scored_is_no_failure() -> None:
    """As in a workflow that computes its rewards itself."""
    scores = FailedScores(RewardConfig(max_failed_share=0.0, max_failed_batches=1))
    assert scores.check({}, step=1, last_error="") == 0.0
