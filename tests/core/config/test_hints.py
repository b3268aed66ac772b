"""Keys of other trainers: what is proposed for them exists, and is what they mean."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from config_schema.section import all_keys
from core.checks.rules import load_config
from core.config.experiments import EXPERIMENTS
from core.config.migrate import HINTS, System, hint, systems
from core.config.parsing.problems import ConfigError, Problem
from core.quickstart import main

KEYS = {key for model in EXPERIMENTS.values() for key in all_keys(model)}
SECTIONS = {key[: at.start()] for key in KEYS for at in re.finditer(r"\.", key)}
REQUIRED = ("experiment_name=x", "actor.path=x", "dataset.path=x", "ppo.disable_value=true")


def exists(name: str) -> bool:
    """Return whether a name of a hint is a key, a section, or the start of a key followed by a star."""
    name = name.removesuffix(".*")
    if name.endswith("*"):
        return any(key.startswith(name[:-1]) for key in KEYS)
    return any(key == name or key.endswith(f".{name}") for key in KEYS | SECTIONS)


@pytest.mark.parametrize("key", sorted(HINTS))
def test_what_a_hint_names_exists(key: str) -> None:
    named = re.findall(r"[a-z_]+(?:\.[a-z_]+)*(?:\.\*|\*)?", HINTS[key].removeprefix("write "))
    dotted = [name for name in named if ("." in name or "_" in name) and not name.startswith("tools.")]
    assert all(exists(name) for name in dotted), [name for name in dotted if not exists(name)]
    assert key not in all_keys(EXPERIMENTS["ppo-math"]), "it is a key here"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate=1", "actor.optimizer.lr"),
        ("max_completion_length=9", "ppo.gen.max_new_tokens"),
        ("max_steps=9", "exp_ctrl.total_train_steps"),
        ("beta=0", "ppo.kl_ctl"),
        ("gconfig.n_samples=8", "group_size"),
        ("async_generation_ratio=1", "staleness.max_staleness"),
        ("loss_type=dapo", "algorithm.aggregation"),
        ("num_generations=8", "group_size"),
        ("scale_rewards=none", "algorithm.advantage_std"),
        ("pretrain=x", "actor.path"),
        ("async_training=true", "staleness.max_staleness"),
        ("algorithm.adv_estimator=grpo", "algorithm.name"),
        ("actor_rollout_ref.rollout.n=8", "group_size"),
        ("actor_rollout_ref.rollout.mode=async", "generator"),
        ("trainer.total_epochs=1", "exp_ctrl.total_train_epochs"),
        ("trainer.nnodes=2", "n_nodes at the top level"),
        ("explorer.eval_interval=5", "exp_ctrl.eval_freq_steps"),
        ("synchronizer.sync_method=nccl", "synchronizer.method"),
        ("loss_agg_mode=token-mean", "algorithm.aggregation"),
        ("async_train=true", "staleness.max_staleness"),
        ("reward_weights=[1]", "reward.weights"),
        ("use_lora=true", "LoRA is not supported"),
        ("vllm_gpu_memory_utilization=0.4", "generator.flags"),
    ],
)
def test_keys_of_other_trainers_are_answered_with_ours(given: str, meant: str) -> None:
    (problem,) = _problems(given)
    assert meant in problem.message and "did you mean" not in problem.message


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)
def test_no_key_of_another_trainer_is_taken_for_a_misspelt_one(system: System) -> None:
    """The nearest of our names is another thing; one of the same name, in another section, may be proposed."""
    names = {key.rpartition(".")[2] for key in (*system.keys, *system.without)}
    for problem in _problems(*(f"{name}=x" for name in sorted(names) if "*" not in name)):
        proposed = re.findall(r"'([\w.]+)'", problem.message.partition("unknown key; did you mean")[2])
        assert {key.rpartition(".")[2] for key in proposed} <= {problem.key}, problem


def test_of_a_section_of_another_trainer_each_known_key_is_answered() -> None:
    given = "trainer={total_epochs: 1, nnodes: 2, device: cuda, balance_batch: true}"
    assert [(problem.key, problem.message.removeprefix("unknown key; ")) for problem in _problems(given)] == [
        ("trainer.total_epochs", "write exp_ctrl.total_train_epochs"),
        ("trainer.nnodes", "write n_nodes at the top level"),
        ("trainer", HINTS["trainer"]),
    ]


def _problems(*given: str) -> Sequence[Problem]:
    try:
        load_config("ppo-math", None, [*REQUIRED, *given])
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("actor.ppo_epochs", "write ppo.actor_sample_reuse"),
        ("critic.ppo_epochs", "write ppo.critic_sample_reuse"),
        ("saver.freq_steps", "write exp_ctrl.save_freq_steps"),
        ("actor.freq_steps", None),
        ("wandb.experiment_name", None),
    ],
)
def test_a_name_of_several_meanings_is_answered_by_its_section_or_not_at_all(path: str, said: str | None) -> None:
    assert hint(path.rpartition(".")[2], path) == said


def test_an_option_of_another_trainer_is_answered_with_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ppo-math", "--n-samples-per-prompt", "8"]) == 2
    assert "--n-samples-per-prompt: no such option; write group_size" in capsys.readouterr().err


def test_the_experiments_share_the_names_of_model_and_data(tmp_path: Path) -> None:
    given = ["experiment_name=x", "actor.path=m", "dataset.path=d", "evaluation.path=e", "actor.optimizer.lr=0.5"]
    supervised = load_config("sft", None, given).config
    assert (supervised.model.path, supervised.dataset.train_path, supervised.dataset.valid_path) == ("m", "d", "e")
    assert supervised.model.optimizer.lr == 0.5
    assert load_config("dpo", None, given).config.model.path == "m"
    other = ["experiment_name=x", "model.path=m", "dataset.train_path=d", "dataset.valid_path=e"]
    trained = load_config("ppo-math", None, [*other, "ppo.disable_value=true"]).config
    assert (trained.actor.path, trained.dataset.path, trained.evaluation.path) == ("m", "d", "e")


def test_a_key_of_another_experiment_is_called_that() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sft", None, ["experiment_name=x", "actor.path=m", "dataset.path=d", "dataset.max_prompt_len=8"])
    assert error.value.problems[0].message == "unknown key; it is a key of ppo-math, not of this experiment"
    (problem,) = _problems("dataset.max_seqlen=8")
    assert problem.message == "unknown key; it is a key of sft and dpo, not of this experiment"


def test_two_names_of_one_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="actor: is another name of model, which is given too"):
        load_config("sft", None, ["experiment_name=x", "actor.path=m", "model.path=m", "dataset.path=d"])


def test_a_problem_of_a_shared_key_has_the_name_that_was_given() -> None:
    with pytest.raises(ConfigError) as error:
        load_config("sft", None, ["experiment_name=x", "actor.path=m", "actor.optimizer.lr=-1", "dataset.path=d"])
    assert [problem.key for problem in error.value.problems] == ["actor.optimizer.lr"]
