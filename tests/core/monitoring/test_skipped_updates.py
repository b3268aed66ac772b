"""A run whose updates are all skipped ends."""

import math

import pytest

from core.monitoring.metrics import SkippedUpdateError, SkippedUpdates

BAD = {"loss": math.nan, "update_skipped": 1.0, "grad_norm": math.nan}


def test_steps_in_a_row_without_an_update_end_the_run_with_what_is_not_finite() -> None:
    updates = SkippedUpdates(3)
    updates.check(1, BAD)
    updates.check(2, BAD)
    with pytest.raises(SkippedUpdateError) as error:
        updates.check(3, BAD)
    said = str(error.value)
    assert said.startswith("step 3: all updates of the last 3 steps were skipped (exp_ctrl.max_skipped_steps=3)")
    assert "not finite: loss=nan, grad_norm=nan" in said and isinstance(error.value, ValueError)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_step_with_an_update_begins_the_count_anew(share: float, caplog: pytest.LogCaptureFixture) -> None:
    updates = SkippedUpdates(2)
    for step in range(1, 10, 2):
        updates.check(step, BAD)
        updates.check(step + 1, {"loss": 1.0, "update_skipped": share, "critic_update_skipped": 0.0})
    assert ("Step 2: the gradient norm was not finite" in caplog.text) == (share > 0)
    assert "Step 1: the gradient norm was not finite, updates were skipped: update_skipped 1.00." in caplog.text


def test_the_critic_counts_too() -> None:
    updates = SkippedUpdates(1)
    with pytest.raises(SkippedUpdateError):
        updates.check(1, {"update_skipped": 0.0, "critic_update_skipped": 1.0})
