"""The two experiments as configuration trees: `ppo-math` and `sft`. Sections live in core/config_*.py.

Whoever reads a key reads it here as an attribute: `config.ppo.eps_clip`. What a null stands for is a property or a
method, so that the rule is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from core.config.base import Section, key, section
from core.config.models import GenerationRoleConfig, MFCConfig, ModelTrainEvalConfig
from core.config.ppo import (
    AlgorithmConfig,
    PPOHyperparameters,
    PromptAnswerDatasetConfig,
    PromptOnlyDatasetConfig,
    StalenessConfig,
)
from core.config.push import PushConfig
from core.config.runtime import (
    DeadlineConfig,
    EvaluationConfig,
    ExperimentSaveEvalControl,
    ExternalConfigs,
    GeneratorConfig,
    LaunchConfig,
    MonitorConfig,
    RewardConfig,
    WandBConfig,
    WorkflowConfig,
)

_DEFAULT_TOKENS_PER_MB = 16384
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=-]*$"

_N_GPUS = "GPUs of a machine; on the embedded default: processes, one a rank"
_NO_SLURM = "there is no SLURM mode; Ray places the processes"
_NO_LIMITS = "Ray places the processes; they take what they need"
_NO_SERVICES = "the generators and the producer are actors of the run"


class CommonExperimentConfig(Section):
    """Keys that both experiments have."""

    RENAMED: ClassVar[Mapping[str, str]] = {"cluster.fileroot": "external_configs.cluster_config.fileroot"}
    """Other spellings of our keys, with the same meaning."""
    IGNORED: ClassVar[Mapping[str, str]] = {
        "debug": "assertions are always on",
        "metric_discovery_port": "metrics go to the log folder and to monitor.*",
        "tensorboard": "TensorBoard files go to the log folder: see monitor.tensorboard",
        "swanlab": "see monitor.* and wandb.*",
        "recover_after": "a restart begins as soon as the processes of the last attempt are gone",
        "cache_clear_freq": "batches leave the object store when they are no longer used",
        "torch_cache_mysophobia": "device memory is managed by the engine",
        "allocation_use_cache": "there is no allocation search",
        "partition": _NO_SLURM,
        "schedule_strategy": _NO_SLURM,
        "image_name": _NO_SLURM,
        "nodelist": _NO_SLURM,
        "exclude": _NO_SLURM,
        "cpus_per_master_worker": _NO_LIMITS,
        "mem_per_master_worker": _NO_LIMITS,
        "cpus_per_model_worker": _NO_LIMITS,
        "mem_per_model_worker": _NO_LIMITS,
        "ray_temp_path": "Ray's own default",
        "cluster": "Ray knows the cluster",
        "auto_eval_config": "see evaluation.*",
    }
    FIXED: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {
        "auto_eval": (("false",), "set exp_ctrl.eval_freq_* and evaluation.path"),
        "ignore_worker_error": (("false",), "a failed worker ends the run; recover_mode=auto continues it"),
    }

    experiment_name: str = key(description="Name of the experiment; part of every output path", pattern=_NAME)
    trial_name: str = key(description="Name of this run of it; part of every output path", pattern=_NAME)
    mode: Literal["ray", "local"] = key("ray", "How processes are started; local is Ray on this machine alone")
    n_nodes: int = key(1, "Number of machines", ge=1)
    n_gpus_per_node: int = key(2, _N_GPUS, ge=1)
    allocation_mode: str = key(
        "embedded.d1m1p1+d1m1p1", "Generators + trainer. d: data, m: tensor, p: pipeline parallel size of each"
    )
    recover_mode: Literal["auto", "resume", "disabled"] = key(
        "disabled", "auto: continue from the last recover checkpoint if there is one. resume: there must be one"
    )
    recover_retries: int = key(
        1,
        "With recover_mode=auto: restarts in a row without progress between them, after any process was lost, or "
        "memory or time ran out",
        ge=0,
    )
    recover_keep: int = key(2, "Recover checkpoints that stay; older ones are removed", ge=1)
    recover_ignore_changes: bool = key(
        False,
        "Recover although batch size, group size or data changed: keep model and optimizer, sample again what does "
        "not fit",
    )
    seed: int = key(1, "Seed of everything random", ge=0, le=2**32 - 1)
    shuffle_dataset: bool = key(True, "Shuffle the data set in every epoch")
    exp_ctrl: ExperimentSaveEvalControl = section(ExperimentSaveEvalControl, "Length, saving, evaluation")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases")
    monitor: MonitorConfig = section(MonitorConfig, "Metrics and logs")
    launch: LaunchConfig = section(LaunchConfig, "Processes")
    deadlines: DeadlineConfig = section(DeadlineConfig, "Longest times; nothing waits for ever")
    external_configs: ExternalConfigs = section(ExternalConfigs, "Output folder and environment")

    def masked(self) -> Self:
        """The same, to be printed or uploaded: without secrets."""
        return self.model_copy(update={"external_configs": self.external_configs.masked()})


class PPOMATHOptions(Section):
    """Keys of `ppo-math` alone."""

    actor: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The policy")
    critic: ModelTrainEvalConfig = section(
        ModelTrainEvalConfig, "The value model; not used with ppo.disable_value", type={"is_critic": True}
    )
    ref: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The reference policy; not used with ppo.kl_ctl=0")
    actor_train: MFCConfig = section(MFCConfig, "Training of the actor")
    critic_train: MFCConfig = section(MFCConfig, "Training of the critic")
    actor_gen: GenerationRoleConfig = section(GenerationRoleConfig, "Generation")
    actor_inf: MFCConfig = section(MFCConfig, "The trainer's log-probabilities at the start of a batch")
    critic_inf: MFCConfig = section(MFCConfig, "The critic's values")
    ref_inf: MFCConfig = section(MFCConfig, "The reference's log-probabilities")
    dataset: PromptOnlyDatasetConfig = key(description="Prompts")
    ppo: PPOHyperparameters = section(PPOHyperparameters, "PPO")
    group_size: int = key(1, "Answers sampled for each prompt", ge=1)
    group_adv_norm: bool = key(False, "Normalise advantages over the answers to one prompt (GRPO)")
    staleness: StalenessConfig = section(StalenessConfig, "How far off policy")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Off-policy correction, KL, entropy")
    generator: GeneratorConfig = section(GeneratorConfig, "The generators")
    workflow: WorkflowConfig = section(WorkflowConfig, "From prompt to trajectories")
    reward: RewardConfig = section(RewardConfig, "Scoring")
    push: PushConfig = section(PushConfig, "Weight push")
    evaluation: EvaluationConfig = section(EvaluationConfig, "Evaluation")


class PPOMATHConfig(CommonExperimentConfig, PPOMATHOptions):
    """`ppo-math`: asynchronous PPO on problems with verifiable answers."""

    RENAMED = {
        **CommonExperimentConfig.RENAMED,
        "actor_infer": "actor_gen",
        "reference": "ref_inf",
        "critic.device_mapping": "critic_train.device_mapping",
        "critic.layout": "critic_train.layout",
        "mask_no_eos_with_zero": "ppo.mask_no_eos_with_zero",
        "max_head_offpolicyness": "staleness.max_staleness",
        "ppo.use_decoupled_loss": "algorithm.decoupled",
        "ppo.behav_imp_weight_cap": "algorithm.behave_imp_weight_cap",
        "actor.sglang.max_running_requests": "generator.max_running",
    }
    IGNORED = {
        **CommonExperimentConfig.IGNORED,
        "rew": "there is no reward model; rewards are functions: see reward.function",
        "rew_inf": "there is no reward model; rewards are functions: see reward.function",
        "use_dense_reward": "one reward an answer",
        "reward_delta": "one reward an answer",
        "n_rollout_workers": _NO_SERVICES,
        "max_concurrent_rollouts": "staleness.max_staleness bounds what is under way",
        "flush_request_timeout": "see push.timeout_seconds",
        "new_tokens_per_chunk": "generation is interrupted between tokens",
        "schedule_policy": "the router sends requests to the least loaded generator",
        "cpus_per_generation_server": _NO_LIMITS,
        "mem_per_generation_server": _NO_LIMITS,
        "cpus_per_gserver_manager": _NO_LIMITS,
        "mem_per_gserver_manager": _NO_LIMITS,
        "cpus_per_rollout_worker": _NO_LIMITS,
        "mem_per_rollout_worker": _NO_LIMITS,
    }
    FIXED = {
        **CommonExperimentConfig.FIXED,
        "generation_size": (("null",), "every sampled answer is trained on: set group_size"),
        "mask_too_long": (("false",), "see ppo.mask_no_eos_with_zero"),
        "check_verifier_status": (("false",), "the reward's failures are counted in the metrics"),
        "check_xml_format": (("false",), "bring your own reward.function"),
        "ref_ema_eta": (("null",), "the reference stays as it is"),
        "rw_type": (("sparse",), "one reward an answer"),
        "dataset_filter_threshold": (("100", "100.0"), "prompts are not filtered"),
        "dataset_max_filter_percentage": (("0", "0.0"), "prompts are not filtered"),
        "success_rate_ub": (("1", "1.0"), "prompts are not filtered"),
        "success_rate_lb": (("0", "0.0"), "prompts are not filtered"),
        "no_training": (("false",), "use exp_ctrl.benchmark_steps"),
    }

    @property
    def uses_critic(self) -> bool:
        return not self.ppo.disable_value

    @property
    def uses_reference(self) -> bool:
        return self.ppo.kl_ctl > 0

    @property
    def critic_path(self) -> str:
        return self.critic.path or self.actor.path

    @property
    def ref_path(self) -> str:
        return self.ref.path or self.actor.path

    @property
    def decoupled(self) -> bool:
        """Whether the loss is the decoupled one."""
        given = self.algorithm.decoupled
        return self.staleness.max_staleness > 0 if given is None else given

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        return self.algorithm.kl_estimator or ("k1" if self.algorithm.kl_in == "reward" else "k3")

    @property
    def max_seqlen(self) -> int:
        """Longest possible sequence, prompt and answer, in tokens."""
        return self.dataset.max_prompt_len + self.ppo.gen.max_new_tokens

    @property
    def roles(self) -> dict[str, MFCConfig]:
        """The trainer's uses of models that this run has, by role."""
        roles = {"actor_train": self.actor_train, "actor_inf": self.actor_inf}
        if self.uses_critic:
            roles |= {"critic_train": self.critic_train, "critic_inf": self.critic_inf}
        if self.uses_reference:
            roles |= {"ref_inf": self.ref_inf}
        return roles

    def max_tokens_per_mb(self, role: str) -> int:
        """Most tokens of one forward pass of `role` (a key of `roles`)."""
        for name in (role, "actor_train"):
            given = self.roles[name].mb_spec.max_tokens_per_mb
            if given is not None:
                return given
        return max(_DEFAULT_TOKENS_PER_MB, self.max_seqlen)


class SFTOptions(Section):
    """Keys of `sft` alone."""

    model: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The model")
    dataset: PromptAnswerDatasetConfig = key(description="Prompts with answers")
    allocation: MFCConfig = section(MFCConfig, "Microbatches")


class SFTConfig(CommonExperimentConfig, SFTOptions):
    """`sft`: supervised fine-tuning."""

    n_gpus_per_node: int = key(1, _N_GPUS, ge=1)
    allocation_mode: str = key("d1m1p1", "Layout of the trainer, d: data, m: tensor, p: pipeline parallel")

    @property
    def roles(self) -> dict[str, MFCConfig]:
        """As in PPOMATHConfig."""
        return {"allocation": self.allocation}

    @property
    def max_seqlen(self) -> int:
        """Longest possible sequence in tokens."""
        return self.dataset.max_seqlen

    def max_tokens_per_mb(self, role: str = "allocation") -> int:
        """Most tokens of one forward pass."""
        return self.roles[role].mb_spec.max_tokens_per_mb or max(_DEFAULT_TOKENS_PER_MB, self.max_seqlen)


ExperimentConfig = PPOMATHConfig | SFTConfig

EXPERIMENTS: Mapping[str, type[PPOMATHConfig] | type[SFTConfig]] = {"ppo-math": PPOMATHConfig, "sft": SFTConfig}
