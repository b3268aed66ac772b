"""The experiments as configuration trees: `ppo-math`, `sft` and `dpo`. Sections are defined in the other modules of
core/config.

Code reads a key as an attribute: `config.ppo.eps_clip`. What a null stands for is a property or a method, so that the
rule is written once. Every experiment has the properties of `SFTConfig`, so that callers never look at the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from allocation import GENERATOR_ROLE, TRAINER_ROLE
from core.algorithms import PRESETS
from core.algorithms.presets import with_preset
from core.algorithms.settings import Correction
from core.config.algorithm_section import AlgorithmConfig
from core.config.base import Section, key, section
from core.config.models import GenerationRoleConfig, MFCConfig, ModelTrainEvalConfig, ModelUse
from core.config.ppo import (
    DemonstrationConfig,
    DPOHyperparameters,
    PPOHyperparameters,
    PreferenceDatasetConfig,
    PromptAnswerDatasetConfig,
    PromptConfig,
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
    SamplesConfig,
    WandBConfig,
    WorkflowConfig,
)
from core.masking import masked_urls
from rollout.data.source import DataSource

_DEFAULT_TOKENS_PER_MB = 16384
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=-]*$"

_N_GPUS = "GPUs per node; without GPUs: processes per node, one per rank"
_NO_SLURM = "there is no SLURM mode; Ray places the processes"
_NO_LIMITS = "Ray places the processes without resource limits"
_NO_SERVICES = "generators and rollout service are Ray actors of the run"


class CommonExperimentConfig(Section):
    """Keys that both experiments have."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "cluster.fileroot": "external_configs.cluster_config.fileroot",
        "workflow.prompt_template": "prompt.template",
    }
    """Other spellings of our keys, with the same meaning."""
    IGNORED: ClassVar[Mapping[str, str]] = {
        "debug": "assertions are always on",
        "metric_discovery_port": "metrics go to the log folder and to monitor.*",
        "tensorboard": "TensorBoard files go to the log folder: see monitor.tensorboard",
        "swanlab": "see monitor.* and wandb.*",
        "recover_after": "a restart begins when all processes of the previous attempt have exited",
        "cache_clear_freq": "Ray deletes batches that are no longer referenced",
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
        "ray_temp_path": "Ray uses its default folder",
        "cluster": "determined by the Ray cluster",
        "auto_eval_config": "see evaluation.*",
    }
    FIXED: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {
        "auto_eval": (("false",), "set exp_ctrl.eval_freq_* and evaluation.path"),
        "ignore_worker_error": (("false",), "a failed worker ends the attempt; recover_mode=auto starts another one"),
    }

    experiment_name: str = key(description="Name of the experiment; part of every output path", pattern=_NAME)
    trial_name: str = key(description="Name of the trial; part of every output path", pattern=_NAME)
    mode: Literal["ray", "local"] = key("ray", "How processes are started. local: Ray on this machine only")
    n_nodes: int = key(1, "Number of nodes", ge=1)
    n_gpus_per_node: int = key(2, _N_GPUS, ge=1)
    allocation_mode: str = key(
        "embedded.d1m1p1+d1m1p1", "Layouts of generators and trainer. d, m, p: data, tensor, pipeline parallel size"
    )
    recover_mode: Literal["auto", "resume", "disabled"] = key(
        "auto",
        "auto: continue from the newest recover checkpoint, if any. resume: fail without one. disabled: begin at step "
        "0 and write none",
    )
    recover_retries: int = key(
        1,
        "Maximum of consecutive restarts without progress, after a process failure, out-of-memory or a timeout",
        ge=0,
        needs="recover_mode=auto",
    )
    recover_keep: int = key(2, "Number of recover checkpoints to keep; older ones are deleted", ge=1)
    recover_ignore_changes: bool = key(
        False,
        "Recover even if batch size, group size or data changed: keep model and optimizer, sample incompatible "
        "completions again",
        needs="recover_mode=auto or resume",
    )
    resume_from: str | None = key(
        None,
        "Recover checkpoint of another trial (.../recover/<user>/<experiment>/<trial>/globalstepN) to continue from if "
        "this trial has none",
        needs="recover_mode=auto or resume",
    )
    seed: int = key(1, "Random seed of the run", ge=0, le=2**32 - 1)
    shuffle_dataset: bool = key(True, "Shuffle the data set in every epoch")
    exp_ctrl: ExperimentSaveEvalControl = section(
        ExperimentSaveEvalControl, "Length of the run; frequency of saving, recover checkpoints and evaluation"
    )
    prompt: PromptConfig = section(PromptConfig, "Templates of prompts and conversations")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases")
    monitor: MonitorConfig = section(MonitorConfig, "Metrics and logs of the run")
    launch: LaunchConfig = section(LaunchConfig, "Ray cluster, devices and start of the processes")
    deadlines: DeadlineConfig = section(DeadlineConfig, "Timeouts of operations; an exceeded one ends the attempt")
    external_configs: ExternalConfigs = section(ExternalConfigs, "Output folder and environment")

    @property
    def recovers(self) -> bool:
        """True if the run writes recover checkpoints and continues from them. Benchmarks do not."""
        return self.recover_mode != "disabled" and self.exp_ctrl.benchmark_steps is None

    def masked(self) -> Self:
        """Return the same, to be printed or uploaded: without secrets."""
        uri = self.monitor.mlflow_uri
        monitor = self.monitor.model_copy(update={"mlflow_uri": uri and masked_urls(uri)})
        return self.model_copy(update={"external_configs": self.external_configs.masked(), "monitor": monitor})


class PPOMATHOptions(Section):
    """Keys of `ppo-math` alone."""

    actor: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The policy")
    critic: ModelTrainEvalConfig = section(
        ModelTrainEvalConfig, "The value model", needs="ppo.disable_value=false", type={"is_critic": True}
    )
    ref: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The reference policy", needs="ppo.kl_ctl > 0")
    actor_train: MFCConfig = section(MFCConfig, "Training of the actor")
    critic_train: MFCConfig = section(MFCConfig, "Training of the critic", needs="ppo.disable_value=false")
    actor_gen: GenerationRoleConfig = section(GenerationRoleConfig, "Slots of the generators")
    actor_inf: MFCConfig = section(MFCConfig, "Log-probabilities at the start of a batch (old_logprobs)")
    critic_inf: MFCConfig = section(MFCConfig, "The critic's values", needs="ppo.disable_value=false")
    ref_inf: MFCConfig = section(MFCConfig, "Log-probabilities of the reference policy", needs="ppo.kl_ctl > 0")
    dataset: PromptOnlyDatasetConfig = key(description="Prompts to train on")
    ppo: PPOHyperparameters = section(PPOHyperparameters, "Advantages and loss of PPO and the other algorithms")
    group_size: int = key(1, "Completions sampled per prompt", ge=1)
    group_adv_norm: bool = key(
        False, "Normalize advantages within each group of completions (GRPO)", needs="group_size > 1"
    )
    staleness: StalenessConfig = section(StalenessConfig, "Bound on the age of the weights that sampled a batch")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Algorithm, off-policy correction, KL divergence, entropy")
    demonstrations: DemonstrationConfig = section(
        DemonstrationConfig, "Expert data beside rollouts", needs="algorithm.demonstration_weight > 0"
    )
    generator: GeneratorConfig = section(GeneratorConfig, "Generators of all backends")
    workflow: WorkflowConfig = section(WorkflowConfig, "Workflow")
    reward: RewardConfig = section(RewardConfig, "Scoring of completions")
    samples: SamplesConfig = section(SamplesConfig, "Answers of training as text")
    push: PushConfig = section(PushConfig, "Weight updates, sent by the trainer to the generators")
    evaluation: EvaluationConfig = section(EvaluationConfig, "Evaluation during training", needs="exp_ctrl.eval_freq_*")


class PPOMATHConfig(CommonExperimentConfig, PPOMATHOptions):
    """`ppo-math`: asynchronous PPO on problems with verifiable answers."""

    NAME: ClassVar[str] = "ppo-math"
    RUN: ClassVar[str] = "core.experiments.ppo:run_ppo"
    TRAINER_ONLY: ClassVar[bool] = False
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("dataset.max_prompt_len", "ppo.gen.max_new_tokens")
    EVALUATION_KEY: ClassVar[str] = "evaluation.path"
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
        "actor.sglang.device": "generator.device",
        "actor.sglang.max_running_requests": "generator.max_running",
        "generator.sglang_python": "generator.python",
    }
    IGNORED = {
        **CommonExperimentConfig.IGNORED,
        "rew": "reward models are not supported; see reward.function",
        "rew_inf": "reward models are not supported; see reward.function",
        "use_dense_reward": "each completion has one reward",
        "reward_delta": "each completion has one reward",
        "n_rollout_workers": _NO_SERVICES,
        "max_concurrent_rollouts": "see staleness.max_staleness and generator.max_running",
        "flush_request_timeout": "see push.timeout_seconds",
        "new_tokens_per_chunk": "generation can be interrupted after every token",
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
        "generation_size": (("null",), "all sampled completions are trained on; set group_size"),
        "mask_too_long": (("false",), "see ppo.mask_no_eos_with_zero"),
        "check_verifier_status": (("false",), "failures of the reward are counted in the metrics"),
        "check_xml_format": (("false",), "use a custom reward.function"),
        "ref_ema_eta": (("null",), "the reference model is not updated"),
        "rw_type": (("sparse",), "each completion has one reward"),
        "dataset_filter_threshold": (("100", "100.0"), "prompts are not filtered"),
        "dataset_max_filter_percentage": (("0", "0.0"), "prompts are not filtered"),
        "success_rate_ub": (("1", "1.0"), "prompts are not filtered"),
        "success_rate_lb": (("0", "0.0"), "prompts are not filtered"),
        "no_training": (("false",), "use exp_ctrl.benchmark_steps"),
    }

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, tree: Any) -> Any:
        """Fill in what algorithm.name stands for; keys that are given win."""
        return with_preset(tree) if isinstance(tree, Mapping) else tree

    @property
    def algorithm_name(self) -> str:
        """A key of PRESETS, or package.module:Class."""
        return self.algorithm.name or "ppo"

    @property
    def uses_critic(self) -> bool:
        has_critic = self.algorithm.name not in PRESETS or self.algorithm.advantage == "gae"
        return not self.ppo.disable_value and has_critic

    @property
    def uses_reference(self) -> bool:
        return self.ppo.kl_ctl > 0

    @property
    def differences(self) -> tuple[str, ...]:
        """Defaults that decide how this run trains and that the schema of the tutorials does not have: what they are
        here, and there."""
        if self.staleness.max_staleness == 0 or "max_staleness" in self.staleness.model_fields_set:
            return ()
        bound = f"staleness.max_staleness={self.staleness.max_staleness} (there: synchronous, 0)"
        if self.correction != "decoupled" or self.algorithm.name is not None:
            return (bound,)
        cap = self.algorithm.behave_imp_weight_cap
        return bound, f"algorithm.correction=decoupled with behave_imp_weight_cap={cap} (there: none)"

    @property
    def critic_path(self) -> str:
        return self.critic.path or self.actor.path

    @property
    def ref_path(self) -> str:
        return self.ref.path or self.actor.path

    @property
    def correction(self) -> Correction:
        """Off-policy correction; algorithm.decoupled and the staleness bound decide where it is not given."""
        if self.algorithm.correction is not None:
            return self.algorithm.correction
        given = self.algorithm.decoupled
        return "decoupled" if (self.staleness.max_staleness > 0 if given is None else given) else "bypass"

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

    @property
    def batch_roles(self) -> tuple[str, ...]:
        return tuple(self.roles)

    @property
    def placed_roles(self) -> dict[str, GenerationRoleConfig]:
        return {GENERATOR_ROLE: self.actor_gen, **self.roles}

    @property
    def role_sections(self) -> dict[str, GenerationRoleConfig]:
        optional = {"critic_train": self.critic_train, "critic_inf": self.critic_inf, "ref_inf": self.ref_inf}
        return {**optional, **self.placed_roles}

    @property
    def models(self) -> dict[str, ModelTrainEvalConfig]:
        return {"actor": self.actor, "critic": self.critic, "ref": self.ref}

    @property
    def model_uses(self) -> tuple[ModelUse, ...]:
        policy = (GENERATOR_ROLE, TRAINER_ROLE, "actor_inf")
        uses = [ModelUse(key="actor", section=self.actor, path=self.actor.path, roles=policy, tokenizer=True)]
        if self.uses_critic:
            value = ("critic_train", "critic_inf")
            uses.append(ModelUse(key="critic", section=self.critic, path=self.critic_path, roles=value))
        if self.uses_reference:
            uses.append(ModelUse(key="ref", section=self.ref, path=self.ref_path, roles=("ref_inf",)))
        return tuple(uses)

    @property
    def batch_shape(self) -> dict[str, int]:
        return {
            "train_bs_n_seqs": self.dataset.train_bs_n_seqs,
            "group_size": self.group_size,
            "ppo_n_minibatches": self.ppo.ppo_n_minibatches,
        }

    @property
    def longest_sequences(self) -> dict[str, tuple[int, int]]:
        answers = {"ppo.gen": self.ppo.gen.max_new_tokens, "evaluation": self.evaluation.max_new_tokens}
        prompt = self.dataset.max_prompt_len
        return {f"{key}.max_new_tokens": (prompt, longest) for key, longest in answers.items() if longest is not None}

    @property
    def generator_device(self) -> str:
        return self.generator.device

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluation.paths)

    @property
    def data_sources(self) -> tuple[tuple[str, DataSource], ...]:
        return (
            ("dataset.path", self.dataset.source(self.dataset.path)),
            *(("evaluation.path", source) for source in self.evaluation_sources),
        )

    @property
    def evaluation_sources(self) -> tuple[DataSource, ...]:
        """The held-out data sets."""
        given = self.evaluation
        return tuple(replace(given.source(path), hints=self.dataset.columns, prefer="test") for path in given.paths)

    @property
    def demonstrations_per_step(self) -> int:
        """Demonstrations of a step, beside its completions."""
        if not self.algorithm.demonstration_weight or not self.demonstrations.path:
            return 0
        share = self.demonstrations.share
        return max(1, round(share / (1.0 - share) * self.dataset.train_bs_n_seqs * self.group_size))

    def max_tokens_per_mb(self, role: str) -> int:
        """Return the maximum of tokens of one forward pass of `role` (a key of `roles`)."""
        for name in (role, "actor_train"):
            given = self.roles[name].mb_spec.max_tokens_per_mb
            if given is not None:
                return given
        return max(_DEFAULT_TOKENS_PER_MB, self.max_seqlen)


class SFTOptions(Section):
    """Keys of `sft` alone."""

    model: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The model of sft")
    dataset: PromptAnswerDatasetConfig = key(description="Prompts with answers")
    allocation: MFCConfig = section(MFCConfig, "Training of the model of sft")


class SFTConfig(CommonExperimentConfig, SFTOptions):
    """`sft`: supervised fine-tuning."""

    NAME: ClassVar[str] = "sft"
    """The experiment's key in EXPERIMENTS."""
    RUN: ClassVar[str] = "core.experiments.sft:run_sft"
    """module:function that runs an attempt; imported after all checks have passed."""
    TRAINER_ONLY: ClassVar[bool] = True
    """No generators: allocation_mode is the layout of the trainer alone."""
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("dataset.max_seqlen",)
    """Keys whose sum is max_seqlen."""
    EVALUATION_KEY: ClassVar[str] = "dataset.valid_path"

    n_gpus_per_node: int = key(1, _N_GPUS, ge=1)
    allocation_mode: str = key("d1m1p1", "Layout of the trainer. d, m, p: data, tensor, pipeline parallel size")

    @property
    def roles(self) -> dict[str, MFCConfig]:
        """The trainer's uses of models that this run has, by the section of their microbatches."""
        return {"allocation": self.allocation}

    @property
    def batch_roles(self) -> tuple[str, ...]:
        """Roles of the allocation that a batch is dealt out to."""
        return (TRAINER_ROLE,)

    @property
    def placed_roles(self) -> dict[str, GenerationRoleConfig]:
        """Sections of the roles of the allocation that this run has, each of which may have a device_mapping."""
        return {TRAINER_ROLE: self.allocation}

    @property
    def role_sections(self) -> dict[str, GenerationRoleConfig]:
        """Sections of all roles, by their key, whether this run has them or not."""
        return {"allocation": self.allocation}

    @property
    def models(self) -> dict[str, ModelTrainEvalConfig]:
        """Sections of all models, by their key, whether this run loads them or not."""
        return {"model": self.model}

    @property
    def model_uses(self) -> tuple[ModelUse, ...]:
        """The models that this run loads."""
        roles = (TRAINER_ROLE,)
        return (ModelUse(key="model", section=self.model, path=self.model.path, roles=roles, tokenizer=True),)

    @property
    def batch_shape(self) -> dict[str, int]:
        """Arguments of allocation.batch_errors: what a batch is dealt out as."""
        return {"train_bs_n_seqs": self.dataset.train_bs_n_seqs}

    @property
    def longest_sequences(self) -> dict[str, tuple[int, int]]:
        """Key of the longest answer -> tokens of the longest (prompt, answer) that generators sample."""
        return {}

    @property
    def generator_device(self) -> str:
        """generator.device of runs with generators."""
        return "auto"

    @property
    def differences(self) -> tuple[str, ...]:
        """Defaults that decide how this run trains and that the schema of the tutorials does not have."""
        return ()

    @property
    def evaluates(self) -> bool:
        """True if there is data to evaluate on."""
        return bool(self.dataset.valid_path)

    @property
    def data_sources(self) -> tuple[tuple[str, DataSource], ...]:
        """(key, data set) of every data set of the run."""
        data = self.dataset
        train, valid = ("dataset.train_path", data.source(data.train_path)), data.valid_source
        return (train,) if valid is None else (train, ("dataset.valid_path", valid))

    @property
    def max_seqlen(self) -> int:
        """Longest possible sequence in tokens."""
        return self.dataset.max_seqlen

    def max_tokens_per_mb(self, role: str = "allocation") -> int:
        """Return the maximum of tokens of one forward pass."""
        return self.roles[role].mb_spec.max_tokens_per_mb or max(_DEFAULT_TOKENS_PER_MB, self.max_seqlen)


class DPOConfig(SFTConfig):
    """`dpo`: direct preference optimization on pairs of answers."""

    NAME: ClassVar[str] = "dpo"
    RUN: ClassVar[str] = "core.experiments.dpo:run_dpo"
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("dataset.max_seqlen", "dataset.max_seqlen")

    dataset: PreferenceDatasetConfig = key(description="Preference pairs")  # type: ignore[assignment]
    ref: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The reference policy; without a path, model.path")
    dpo: DPOHyperparameters = section(DPOHyperparameters, "Direct preference optimization")

    @property
    def ref_path(self) -> str:
        return self.ref.path or self.model.path

    @property
    def models(self) -> dict[str, ModelTrainEvalConfig]:
        return {"model": self.model, "ref": self.ref}

    @property
    def model_uses(self) -> tuple[ModelUse, ...]:
        reference = ModelUse(key="ref", section=self.ref, path=self.ref_path, roles=(TRAINER_ROLE,))
        return (*super().model_uses, reference)

    @property
    def max_seqlen(self) -> int:
        """Longest possible pair in tokens: its two sequences run in one microbatch."""
        return 2 * self.dataset.max_seqlen


ExperimentConfig = PPOMATHConfig | SFTConfig | DPOConfig

EXPERIMENTS: Mapping[str, type[PPOMATHConfig] | type[SFTConfig] | type[DPOConfig]] = {
    "ppo-math": PPOMATHConfig, "sft": SFTConfig, "dpo": DPOConfig
}  # fmt: skip
