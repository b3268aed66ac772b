"""What the engines of a run get of the configuration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.checks.rules import load_config
from core.config.experiments import PPOMATHConfig
from core.experiments.workers import build_ppo_engines
from helpers.config_inputs import SMALLEST_PPO, write_run
from mcore_adapter.settings import EngineModel

OPTIMIZERS = {
    "actor": {"lr": 1e-4, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.85, "eps": 1e-7, "min_lr_ratio": 0.3,
              "lr_scheduler_type": "linear", "warmup_steps_proportion": 0.2, "gradient_clipping": 0.5},
    "critic": {"lr": 2e-4, "weight_decay": 0.2, "beta1": 0.7, "beta2": 0.75, "eps": 2e-7, "min_lr_ratio": 0.6,
               "lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.4, "gradient_clipping": 0.25},
}  # fmt: skip


class Group:
    """Ranks that record the engines that they build."""

    def __init__(self) -> None:
        self.built: dict[str, EngineModel] = {}

    def build(self, name: str, loaded: EngineModel) -> None:
        self.built[name] = loaded


def built(folder: Path, *overrides: str) -> dict[str, EngineModel]:
    """The engines of a run of 10 updates with a critic and a reference."""
    given = [f"{model}.optimizer.{key}={value}" for model, of in OPTIMIZERS.items() for key, value in of.items()]
    models = ["ppo.disable_value=false", "critic.init_critic_from_actor=true", "ppo.kl_ctl=0.1", "seed=5"]
    config = load_config("ppo-math", write_run(folder, SMALLEST_PPO), [*models, *given, *overrides]).config
    assert isinstance(config, PPOMATHConfig)
    group = Group()
    workers: Any = SimpleNamespace(
        **{attribute: SimpleNamespace(group=group, name=name) for attribute, name in
                         (("actor", "actor"), ("critic", "critic"), ("reference", "ref"))},
    )  # fmt: skip
    build_ppo_engines(config, workers, total_updates=10)
    return group.built


def test_schedules_end_with_the_last_update_of_their_own_model(tmp_path: Path) -> None:
    engines = built(tmp_path, "ppo.actor_sample_reuse=2", "ppo.critic_sample_reuse=3")
    assert [engines[name].total_updates for name in ("actor", "critic", "ref")] == [20, 30, None]


def test_every_key_of_an_optimizer_reaches_its_own_engine(tmp_path: Path) -> None:
    engines = built(tmp_path)
    for model, given in OPTIMIZERS.items():
        assert given.items() <= engines[model].config.optimizer.model_dump().items()


def test_engines_differ_in_what_they_are_initialised_from(tmp_path: Path) -> None:
    settings = ["moe_aux_loss_coeff=0.01", "moe_bias_update_rate=0.02"]
    settings += ["gradient_checkpointing=auto", "gradient_checkpointing_limit_gib=80"]
    settings += ["gradient_checkpointing_host_gib=7"]
    engines = built(tmp_path, *(f"actor.{key}" for key in settings), "ref.path=" + str(tmp_path / "other"),
                    "critic.init_from_scratch=true")  # fmt: skip
    models = [engines[name] for name in ("actor", "critic", "ref")]
    actor, critic, _ = (model.config for model in models)
    assert [model.is_critic for model in models] == [False, True, False]
    assert [model.config.init_critic_from_actor for model in models] == [False, True, False]
    assert [model.config.init_from_scratch for model in models] == [False, True, False]
    model = str(tmp_path / "model")
    assert [loaded.path for loaded in models] == [model, model, str(tmp_path / "other")]
    assert [model.seed for model in models] == [5, 6, 5], "a new value head has a seed of its own"
    assert (actor.moe_aux_loss_coeff, actor.moe_bias_update_rate) == (0.01, 0.02)
    assert (critic.moe_aux_loss_coeff, critic.moe_bias_update_rate) == (0.0, 0.0)
    assert actor.recompute(on_gpu=True) == "auto"
    assert (actor.gradient_checkpointing_limit_gib, actor.gradient_checkpointing_host_gib) == (80.0, 7.0)
    assert (critic.recompute(on_gpu=False), critic.recompute(on_gpu=True)) == ("none", "selective")
