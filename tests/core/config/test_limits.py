"""Values at a limit are accepted, and those just beyond it are refused."""

from pathlib import Path

import pytest

from core.config.parsing.problems import ConfigError
from helpers.config_inputs import problems, write_run


def refusals(folder: Path, *overrides: str) -> list[str]:
    """What is wrong with the smallest configuration and these overrides."""
    try:
        return problems(write_run(folder), *overrides)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("allowed", "beyond", "key"),
    [
        # A model of 128 positions; prompts of at most 16 tokens, 16 new ones; 4 prompts a step.
        ("ppo.gen.max_new_tokens=112", "ppo.gen.max_new_tokens=113", "ppo.gen.max_new_tokens"),
        ("evaluation.path=DATA evaluation.max_new_tokens=112", "evaluation.path=DATA evaluation.max_new_tokens=113",
         "evaluation.max_new_tokens"),
        ("actor_train.mb_spec.max_tokens_per_mb=32", "actor_train.mb_spec.max_tokens_per_mb=31",
         "actor_train.mb_spec.max_tokens_per_mb"),
        ("ppo.gen.min_new_tokens=16", "ppo.gen.min_new_tokens=17", "ppo.gen.min_new_tokens"),
        ("ppo.ppo_n_minibatches=4", "ppo.ppo_n_minibatches=5", "ppo.ppo_n_minibatches"),
        ("group_size=2 group_adv_norm=true", "group_size=1 group_adv_norm=true", "group_adv_norm"),
        ("group_size=2 algorithm.name=rloo", "group_size=1 algorithm.name=rloo", "group_size"),
        ("ppo.gen.top_k=1", "ppo.gen.top_k=0", "ppo.gen.top_k"),
        ("ppo.gen.top_p=1", "ppo.gen.top_p=1.01", "ppo.gen.top_p"),
        ("staleness.max_staleness=0", "staleness.max_staleness=-1", "staleness.max_staleness"),
    ],
)  # fmt: skip
def test_a_limit_itself_is_allowed(tmp_path: Path, allowed: str, beyond: str, key: str) -> None:
    def given(overrides: str) -> list[str]:
        return overrides.replace("DATA", str(tmp_path / "prompts.jsonl")).split(" ")

    assert refusals(tmp_path, *given(allowed)) == []
    (refused,) = refusals(tmp_path, *given(beyond))
    assert key in refused
