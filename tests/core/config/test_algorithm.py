"""algorithm.name chooses; what the chosen algorithm has no use for is reported before the start."""

from pathlib import Path

import pytest
from config_inputs import SMALLEST_PPO, write_run

from core.algorithms import ALGORITHMS
from core.config.algorithm import algorithm_settings, build_algorithm, check_algorithm
from core.config.experiments import PPOMATHConfig
from core.config.load import load_config
from core.config.rules import config_warnings

WITH_CRITIC = "ppo.disable_value=false critic.init_critic_from_actor=true"


def load(tmp_path: Path, overrides: str = "") -> PPOMATHConfig:
    """A run without a critic; `overrides` separated by spaces."""
    config = load_config("ppo-math", write_run(tmp_path, SMALLEST_PPO), overrides.split()).config
    assert isinstance(config, PPOMATHConfig)
    return config


def messages(config: PPOMATHConfig) -> list[str]:
    return [f"{p.key}: {p.message}" for p in check_algorithm(config)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_of_the_dict_can_be_built_and_reads_settings_that_exist(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, f"algorithm.name={name} group_size=2")
    assert messages(config) == []
    algorithm = build_algorithm(config)
    assert type(algorithm).__name__ == name.upper()
    known = set(vars(algorithm_settings(config)))
    assert algorithm.reads is not None and algorithm.reads <= known
    assert algorithm.unit == ("sequence" if name == "ppo" else "group")


@pytest.mark.parametrize(
    ("overrides", "critic"),
    [
        ("", False),
        (WITH_CRITIC, True),
        (f"algorithm.name=ppo {WITH_CRITIC}", True),
        ("algorithm.name=ppo", False),
        (f"algorithm.name=gspo {WITH_CRITIC}", False),
    ],
)
def test_only_ppo_has_a_critic_and_only_where_it_is_not_disabled(tmp_path: Path, overrides: str, critic: bool) -> None:
    config = load(tmp_path, f"{overrides} group_size=2")
    assert config.uses_critic == critic
    algorithm = build_algorithm(config)
    assert ("values" in algorithm.passes) == (algorithm.critic is not None) == critic


def test_without_a_name_the_keys_decide_and_nothing_is_reported(tmp_path: Path) -> None:
    config = load(tmp_path, "group_size=2 group_adv_norm=true ppo.value_eps_clip=0.3")
    assert build_algorithm(config).unit == "sequence"
    assert list(config_warnings(config)) == [] and messages(config) == []


@pytest.mark.parametrize(
    ("name", "unread"),
    [
        ("ppo", ""),
        ("grpo", "ppo.value_eps_clip, ppo.disable_value, group_adv_norm"),
        ("rloo", "ppo.value_eps_clip, ppo.gae_lambda, ppo.disable_value, group_adv_norm"),
        ("gspo", "ppo.eps_clip, ppo.value_eps_clip, ppo.gae_lambda, ppo.disable_value, group_adv_norm"),
    ],
)
def test_keys_that_the_named_algorithm_does_not_read_are_reported(tmp_path: Path, name: str, unread: str) -> None:
    given = "ppo.value_eps_clip=0.3 ppo.eps_clip=0.1 group_adv_norm=true ppo.gae_lambda=0.9"
    warnings = list(config_warnings(load(tmp_path, f"algorithm.name={name} group_size=2 {given}")))
    assert [w.partition(": not used by this run")[0] for w in warnings] == [unread] * bool(unread)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.name=gpso", "algorithm.name: unknown algorithm 'gpso'; use one of ppo, grpo, rloo, gspo, or "),
        ("algorithm.name=no_such.module:X", "algorithm.name: algorithm no_such.module:X: there is no module 'no_such'"),
        ("algorithm.name=gspo group_size=2 algorithm.options.clip_lo=1e-3", "algorithm.options.clip_lo: unknown"),
        ("algorithm.name=gspo group_size=2 algorithm.options.clip_low=2", "algorithm.options.clip_low: must be "),
        ("algorithm.name=ppo algorithm.options.eps=1", "algorithm.options.eps: unknown option; options are none"),
        ("algorithm.options.clip_low=1e-3", "algorithm.options: clip_low: options belong to an algorithm; set"),
        ("algorithm.name=rloo", "group_size: algorithm.name=rloo compares the answers to one prompt and needs at"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_choice_is_one_clear_error(tmp_path: Path, overrides: str, message: str) -> None:
    (found,) = messages(load(tmp_path, overrides))
    assert found.startswith(message)


def test_options_reach_the_algorithm_as_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, "algorithm.name=gspo group_size=2 algorithm.options.clip_low=1e-3")
    assert config.algorithm.options == {"clip_low": 1e-3} and messages(config) == []


OWN = """
from core.algorithms.base import Algorithm

class Own(Algorithm):
    def __init__(self, settings, options):
        self.settings, self.options = settings, options
"""


def test_an_algorithm_of_the_user_is_found_by_its_import_path_and_decides_about_the_critic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = load(tmp_path, "algorithm.name=own_algorithm:Own algorithm.options.a=1 ppo.eps_clip=0.1")
    assert messages(config) == [] and list(config_warnings(config)) == []
    assert build_algorithm(config).options == {"a": 1}  # type: ignore[attr-defined]
    (message,) = messages(load(tmp_path, f"algorithm.name=own_algorithm:Own {WITH_CRITIC}"))
    assert message.startswith("ppo.disable_value: false, but algorithm.name=own_algorithm:Own has no use for a critic")
