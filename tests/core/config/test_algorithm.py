"""algorithm.name chooses; what the chosen algorithm has no use for is reported before the start."""

from pathlib import Path

import pytest

from core.algorithms.build import build_algorithm, check_algorithm
from core.checks.rules import config_warnings, load_config, unused_keys
from core.config.experiments import PPOMATHConfig
from core.config.presets import PRESETS
from core.config.reference import listing
from helpers.config_inputs import SMALLEST_PPO, write_run

WITH_CRITIC = "ppo.disable_value=false critic.init_critic_from_actor=true"


def load(tmp_path: Path, overrides: str = "") -> PPOMATHConfig:
    """A run without a critic; `overrides` separated by spaces."""
    config = load_config("ppo-math", write_run(tmp_path, SMALLEST_PPO), overrides.split()).config
    assert isinstance(config, PPOMATHConfig)
    return config


GIVEN = ("ppo.adv_norm", "ppo.kl_ctl")
"""Keys of SMALLEST_PPO that presets set as well."""


def preset(tmp_path: Path, name: str) -> PPOMATHConfig:
    """A run of a preset, with groups, and demonstrations where it needs them."""
    shown = "demonstrations.path=rows.jsonl" if name in ("mix", "chord") else ""
    return load(tmp_path, f"algorithm.name={name} group_size=2 {shown}")


def reported(config: PPOMATHConfig) -> str:
    """The keys of the warnings about those without effect, of each section in the order of the alphabet."""
    found = [w.partition(": not used by this run (") for w in config_warnings(config)]
    keys = [key for keys, sign, _ in found if sign for key in keys.split(", ")]
    sections = ("ppo", "algorithm", "")
    return ", ".join(sorted(keys, key=lambda key: (sections.index(key.rpartition(".")[0]), key)))


def messages(config: PPOMATHConfig) -> list[str]:
    return [f"{p.key}: {p.message}" for p in check_algorithm(config)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_with_its_values_and_none_of_them_is_without_effect(tmp_path: Path, name: str) -> None:
    config = preset(tmp_path, name)
    assert messages(config) == [] and reported(config) in ("", "ppo.disable_value")
    lines = listing(config).splitlines()
    for dotted, value in PRESETS[name].values.items():
        above, _, key = dotted.partition(".")
        if dotted not in GIVEN:
            assert getattr(getattr(config, above), key) == value
            assert any(line.startswith(f"{dotted} (") and line.endswith(f" - {value}") for line in lines), dotted
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"kl_ctl": 0.1})})
    assert not dict(unused_keys(config, set(PRESETS[name].values)))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_and_keeps_groups_together_where_it_compares_answers(tmp_path, name: str) -> None:
    algorithm = build_algorithm(preset(tmp_path, name))
    assert algorithm.unit == ("sequence" if name in ("ppo", "reinforce_pp") else "group")
    without_old = ("topr", "opmd", "opmd_logavgexp")
    assert algorithm.passes == (frozenset() if name in without_old else {"old_logprobs"})


def test_a_key_that_is_given_wins_over_the_preset(tmp_path: Path) -> None:
    config = load(tmp_path, "algorithm.name=dapo group_size=2 algorithm.clip_high=0.4 ppo.kl_ctl=0.2")
    assert config.algorithm.clip_high == 0.4 and config.ppo.kl_ctl == 0.2
    assert (config.algorithm.clip_low, config.algorithm.overlong_share) == (0.2, 0.2)


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


def test_k1_in_the_loss_is_reported_unless_its_gradient_is_replaced(tmp_path: Path) -> None:
    given = "ppo.kl_ctl=0.1 algorithm.kl_in=loss algorithm.kl_estimator=k1"
    (warning,) = config_warnings(load(tmp_path, given))
    assert warning.startswith("algorithm.kl_estimator=k1: in the loss its gradient has zero mean on policy; ")
    assert list(config_warnings(load(tmp_path, f"{given} algorithm.kl_gradient=k2"))) == []


@pytest.mark.parametrize("name", ["", "algorithm.name=ppo"])
@pytest.mark.parametrize(
    ("keys", "unit"),
    [
        ("", "sequence"),
        ("group_adv_norm=true", "group"),
        ("algorithm.advantage=group", "group"),
        ("algorithm.advantage=returns", "sequence"),
    ],
)
def test_minibatches_keep_the_groups_that_an_advantage_compares_with_and_without_a_name(
    tmp_path: Path, name: str, keys: str, unit: str
) -> None:
    config = load(tmp_path, f"group_size=2 {name} {keys}")
    assert build_algorithm(config).unit == unit
    assert messages(config) == []


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ("", "ppo.value_eps_clip"),
        ("algorithm.name=ppo", "ppo.value_eps_clip"),
        ("algorithm.name=grpo", "ppo.disable_value, ppo.value_eps_clip, group_adv_norm"),
        ("algorithm.name=rloo", "ppo.disable_value, ppo.gae_lambda, ppo.value_eps_clip, group_adv_norm"),
        ("algorithm.name=gspo", "ppo.disable_value, ppo.eps_clip, ppo.value_eps_clip, group_adv_norm"),
    ],
)
def test_keys_that_the_algorithm_does_not_read_are_reported(tmp_path: Path, overrides: str, unread: str) -> None:
    given = "ppo.value_eps_clip=0.3 ppo.eps_clip=0.1 group_adv_norm=true ppo.gae_lambda=0.9"
    assert reported(load(tmp_path, f"{overrides} group_size=2 {given}")) == unread


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ("algorithm.sapo_tau_positive=2", "algorithm.sapo_tau_positive"),
        ("algorithm.loss=sapo algorithm.sapo_tau_positive=2", ""),
        ("algorithm.loss=sapo algorithm.clip_low=0.1 ppo.eps_clip=0.1", "ppo.eps_clip, algorithm.clip_low"),
        ("algorithm.clip_low=0.1 algorithm.clip_high=0.3 ppo.eps_clip=0.1", "ppo.eps_clip"),
        ("algorithm.correction=tis algorithm.correction_max=3 algorithm.behave_imp_weight_cap=3",
         "algorithm.behave_imp_weight_cap"),
        ("algorithm.correction=none algorithm.correction_veto=0.1", "algorithm.correction_veto"),
        ("algorithm.correction=icepop algorithm.correction_level=token", "algorithm.correction_level"),
        ("algorithm.kl_gradient=k2 algorithm.kl_in=loss", "algorithm.kl_gradient, algorithm.kl_in"),
        ("ppo.kl_ctl=0.1 algorithm.kl_gradient=k2 algorithm.kl_in=loss", ""),
        ("ppo.kl_ctl=0.1 algorithm.kl_loss_coeff=0.1", "algorithm.kl_loss_coeff"),
        ("algorithm.overlong_penalty=2", "algorithm.overlong_penalty"),
        ("algorithm.overlong_share=0.5 algorithm.overlong_penalty=2", ""),
        ("algorithm.dynamic_sampling_limit=2", "algorithm.dynamic_sampling_limit"),
        ("algorithm.name=dapo group_size=2 algorithm.dynamic_sampling_limit=2", ""),
        ("algorithm.demonstration_loss=chord", "algorithm.demonstration_loss"),
        ("algorithm.demonstration_weight=0.2 algorithm.demonstration_valley=0.1", "algorithm.demonstration_valley"),
        ("algorithm.demonstration_weight=0.2 algorithm.demonstration_loss=chord demonstrations.path=x", ""),
        ("algorithm.name=ppo ppo.critic_sample_reuse=2", "ppo.critic_sample_reuse"),
        ("algorithm.aggregation_constant=5", "algorithm.aggregation_constant"),
        ("ppo.adv_norm=false algorithm.adv_norm_std=sample", "algorithm.adv_norm_std"),
        ("algorithm.name=sapo group_size=2 algorithm.loss=clip", ""),
        ("algorithm.name=opmd group_size=2 algorithm.ratio=sequence", "algorithm.ratio"),
    ],
)  # fmt: skip
def test_settings_that_others_leave_without_effect_are_reported(tmp_path: Path, overrides: str, unread: str) -> None:
    assert (
        reported(load(tmp_path, overrides)).removeprefix("ppo.disable_value, ").removeprefix("ppo.disable_value")
        == unread
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.name=gpso", "algorithm.name: unknown algorithm 'gpso'; use one of ppo, grpo, dr_grpo, dapo, "),
        ("algorithm.name=dpo", "algorithm.name: dpo trains on files, without generators; run `python -m core.quick"),
        ("algorithm.name=no_such.module:X", "algorithm.name: algorithm no_such.module:X: there is no module 'no_such'"),
        ("algorithm.name=gspo group_size=2 algorithm.options.clip_low=1e-3",
         "algorithm.options: clip_low: options belong to an algorithm of your own; write algorithm.clip_low"),
        ("algorithm.options.clip_low=1e-3", "algorithm.options: clip_low: options belong to an algorithm of your own"),
        ("algorithm.name=rloo", "group_size: algorithm.name=rloo compares the answers to one prompt and needs at"),
        ("algorithm.advantage=maxrl", "group_size: algorithm.advantage=maxrl compares the answers to one prompt and"),
        ("algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling: true, but the only answer to a prompt has no"),
        ("algorithm.name=mix group_size=2", "demonstrations.path: required: algorithm.name=mix trains on prompts with"),
        ("algorithm.demonstration_weight=0.1 algorithm.aggregation=constant demonstrations.path=x",
         "algorithm.aggregation: constant has no scale to mix demonstrations with; write token_mean"),
        ("algorithm.demonstration_weight=0.1 demonstrations.path=x demonstrations.share=0.01 ppo.ppo_n_minibatches=2",
         "demonstrations.share: 0.01: 1 demonstrations of a step are fewer than ppo_n_minibatches=2"),
        ("algorithm.correction=tis algorithm.correction_level=geometric",
         "algorithm.correction_level: geometric does not exist for correction=tis; write token or sequence"),
        ("algorithm.correction=mis algorithm.correction_min=4", "algorithm.correction_min: 4.0 must be less than corr"),
        ("algorithm.correction=mis algorithm.correction_min=2 algorithm.correction_max=2",
         "algorithm.correction_min: 2.0 must be less than correction_max=2"),
        ("algorithm.correction=bypass algorithm.m2po_threshold=0.1", "algorithm.m2po_threshold: has nothing to "),
        ("algorithm.correction=bypass algorithm.proximal=reused", "algorithm.proximal: reused, but with correction="),
        ("ppo.ppo_n_minibatches=2 algorithm.proximal=reused", "algorithm.proximal: reused needs one update per step, "),
        ("ppo.ppo_n_minibatches=1 ppo.actor_sample_reuse=3 algorithm.proximal=reused",
         "algorithm.proximal: reused needs one update per step, got 3"),
        ("staleness.max_staleness=0 algorithm.correction=none algorithm.proximal=loglinear",
         "algorithm.proximal: loglinear has nothing to interpolate with staleness.max_staleness=0; write recomputed"),
        ("algorithm.clip_low=1", "algorithm.clip_low: 1.0, but loss=clip keeps ratios in 1 - clip_low to"),
        ("algorithm.dual_clip=0.5", "algorithm.dual_clip: must be greater than 1, got 0.5"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip: must be greater than 1, got 1"),
        ("algorithm.kl_target=0.1", "algorithm.kl_target: needs the KL divergence in the reward"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_choice_is_one_clear_error(tmp_path: Path, overrides: str, message: str) -> None:
    (found,) = messages(load(tmp_path, overrides))
    assert found.startswith(message)


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
