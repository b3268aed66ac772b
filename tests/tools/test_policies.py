"""The simulation of policies: every prompt is accounted for, and each policy loses what it is known to lose."""

import pytest

from rollout.experience import Schedule
from tools.experience.policies import BATCH, STALENESS, Prompts, Result, main, policies, simulate

COUNT = 12 * BATCH
PROMPTS = Prompts.make(COUNT)
SCHEDULE = Schedule(num_prompts=COUNT, batch_size=BATCH, total_epochs=2)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: simulate(policy, PROMPTS, SCHEDULE) for name, policy in policies(SCHEDULE).items()}


def test_what_each_policy_loses(results: dict[str, Result]) -> None:
    assert {name for name, result in results.items() if not result.lost} == {
        "wait", "admission by batch", "skip and resume",
    }  # fmt: skip
    assert {name for name, result in results.items() if result.ages.max() > STALENESS} == {
        "admission by batch", "filter after the fact", "skip and resume",
    }  # fmt: skip
    assert sorted(results["wait"].trained) == list(range(COUNT))
    mean = PROMPTS.lengths.mean()
    for name in ("drop over-age", "over-rollout"):
        assert PROMPTS.lengths[results[name].trained].mean() < 0.9 * mean, name
    for name in ("dynamic sampling", "filter after the fact"):
        assert PROMPTS.spread[results[name].trained].all(), name


def test_the_command_shows_a_table_and_draws_a_picture(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    assert main(["--prompts", str(10 * BATCH), "--picture", str(tmp_path / "p.svg")]) == 0
    assert "over-rollout" in capsys.readouterr().out
    text = (tmp_path / "p.svg").read_text()
    assert all(f">{name}<" in text for name in policies(SCHEDULE))
