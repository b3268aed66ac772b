"""The learning rate's shape over a run."""

import pytest

from mcore_adapter.optimizer.training import DECAYS, learning_rate


def rates(kind: str, *, warmup: float = 0.1, min_lr_ratio: float = 0.0, total_steps: int = 100) -> list[float]:
    return [
        learning_rate(
            step,
            lr=2.0,
            min_lr_ratio=min_lr_ratio,
            lr_scheduler_type=kind,
            warmup_steps_proportion=warmup,
            total_steps=total_steps,
        )
        for step in range(total_steps + 20)
    ]


@pytest.mark.parametrize("kind", DECAYS)
def test_warmup_rises_linearly_and_its_first_step_already_learns(kind):
    lrs = rates(kind)
    assert lrs[:10] == pytest.approx([2.0 * (i + 1) / 10 for i in range(10)])
    assert lrs[10] == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_decay_is_monotone_ends_at_the_minimum_and_stays_there(kind, ratio):
    lrs = rates(kind, min_lr_ratio=ratio)
    assert all(a >= b for a, b in zip(lrs[10:], lrs[11:], strict=False))
    assert lrs[100:] == pytest.approx([2.0 * ratio] * 20)
    assert lrs[55] == pytest.approx(2.0 * (ratio + (1 - ratio) / 2))  # half way, for both shapes


def test_constant_stays_constant_after_warmup():
    assert set(rates("constant")[10:]) == {2.0}


def test_a_run_without_warmup_starts_at_the_full_rate():
    assert rates("cosine", warmup=0.0)[0] == 2.0


def test_a_run_of_one_step_trains():
    assert rates("linear", warmup=0.001, total_steps=1)[0] == 2.0


def test_an_unknown_type_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="lr_scheduler_type='exp' is unknown; use one of constant, linear, cosine"):
        rates("exp")
