"""The experiments as configuration trees: `ppo-math`, and `sft` and `dpo`, which train on files.

Sections are defined in the other modules of core/config. Code reads a key as an attribute: `config.ppo.eps_clip`. What
a null stands for is a property or a method, so that the rule is written once. Every experiment has the properties of
`SFTConfig`, so that callers never look at the class.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from allocation import TRAINER_ROLE
from config_schema.section import Section, Violation, key, section
from core.config.common import (
    N_GPUS,
    CommonExperimentConfig,
    GenerationRoleConfig,
    Judged,
    MFCConfig,
    ModelTrainEvalConfig,
    ModelUse,
    RunIdentity,
    Summary,
    no_evaluation_data,
    reference_with_values,
    too_small_microbatches,
    untrained_model,
)
from core.config.ppo import DPOHyperparameters, PreferenceDatasetConfig, PromptAnswerDatasetConfig
from core.config.ppo_experiment import PPOMATHConfig
from core.config.runtime import WorkflowConfig
from rollout.data.rows import PreferenceFields
from rollout.data.source import DataSource
from rollout.rewards.config import RewardConfig


class SFTOptions(Section):
    """Keys of `sft` alone."""

    model: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The model to train")
    dataset: PromptAnswerDatasetConfig = key(description="Prompts with answers")
    allocation: MFCConfig = section(MFCConfig, "Training of the model")


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

    n_gpus_per_node: int = key(1, N_GPUS, ge=1, first=True)
    allocation_mode: str = key(
        "d1m1p1", "Layout of the trainer. d, m, p: data, tensor, pipeline parallel size", first=True
    )

    def rules(self, at: str) -> Iterator[Violation]:
        yield from super().rules(at)
        yield from too_small_microbatches(self.roles, self.max_seqlen, self.LENGTH_KEYS)
        yield from () if self.evaluates else no_evaluation_data(self.exp_ctrl, self.EVALUATION_KEY)
        yield from untrained_model("model", self.model)
        if self.job != "both":
            yield Violation(
                ("mode",), f"mode={self.job} works with ppo-math only; {self.NAME} samples nothing: write mode=ray"
            )

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
    def models(self) -> dict[str, ModelTrainEvalConfig]:
        return {"model": self.model}

    @property
    def model_uses(self) -> tuple[ModelUse, ...]:
        roles = (TRAINER_ROLE,)
        return (ModelUse(key="model", section=self.model, path=self.model_folder, roles=roles, tokenizer=True),)

    @property
    def batch_size(self) -> int:
        """Prompts, or rows of a file, of a training step."""
        return self.dataset.train_bs_n_seqs

    @property
    def batch_key(self) -> str:
        """The key that sets batch_size."""
        return "dataset.train_bs_n_seqs"

    @property
    def batch_shape(self) -> dict[str, int]:
        """Arguments of allocation.batch_errors: what a batch is dealt out as."""
        return {"train_bs_n_seqs": self.batch_size}

    @property
    def trained_tokens(self) -> tuple[int, int]:
        """Tokens of the longest (prompt, answer) of a batch; of examples, which are not divided, (sequence, 0)."""
        return self.dataset.max_seqlen, 0

    @property
    def sampling(self) -> None:
        """The configuration itself where it has generators."""

    @property
    def identity(self) -> RunIdentity:
        """What must be the same for a recover checkpoint to continue."""
        return self._identity(batch_size=self.batch_size)

    @property
    def algorithm_name(self) -> str:
        """The name of the algorithm."""
        return self.NAME

    @property
    def evaluates(self) -> bool:
        """True if there is data to evaluate on."""
        return bool(self.dataset.valid_path)

    @property
    def summary(self) -> Summary:
        """What the lines at the start of a run show."""
        batch = f"{self.batch_size} sequences a step"
        return Summary(model=self.model_folder, optimizer=self.model.optimizer.about, batch=batch)

    @property
    def judged_by(self) -> Judged:
        """How evaluations of its models sample and judge."""
        return Judged(WorkflowConfig(), "math", RewardConfig().threshold, None)

    @property
    def data_sources(self) -> tuple[tuple[str, DataSource], ...]:
        """(key, data set) of every data set of the run."""
        data = self.dataset
        train, valid = ("dataset.train_path", data.train_source), data.valid_source
        return (train,) if valid is None else (train, ("dataset.valid_path", valid))

    @property
    def pair_columns(self) -> PreferenceFields | None:
        """Columns of preference pairs. None: the rows are prompts with answers."""
        return self.dataset.pair_columns

    @property
    def max_seqlen(self) -> int:
        """Longest possible sequence in tokens."""
        return self.dataset.max_seqlen

    def max_tokens_per_mb(self, role: str = "allocation") -> int:
        """Return the maximum of tokens of one forward pass."""
        return self.roles[role].most_tokens(self.allocation, self.max_seqlen)


class DPOConfig(SFTConfig):
    """`dpo`: direct preference optimization on pairs of answers."""

    NAME: ClassVar[str] = "dpo"
    RUN: ClassVar[str] = "core.experiments.sft:run_dpo"
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("dataset.max_seqlen", "dataset.max_seqlen")

    dataset: PreferenceDatasetConfig = key(description="Preference pairs")  # type: ignore[assignment]
    ref: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The reference policy; without a path, model.path")
    dpo: DPOHyperparameters = section(DPOHyperparameters, "Direct preference optimization")

    def rules(self, at: str) -> Iterator[Violation]:
        yield from super().rules(at)
        yield from reference_with_values(self.ref)

    @property
    def ref_path(self) -> str:
        return self.ref.folder_or_of(self.model)

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


__all__ = ["EXPERIMENTS", "DPOConfig", "ExperimentConfig", "PPOMATHConfig", "SFTConfig"]

ExperimentConfig = PPOMATHConfig | SFTConfig | DPOConfig

EXPERIMENTS: Mapping[str, type[PPOMATHConfig] | type[SFTConfig] | type[DPOConfig]] = {
    "ppo-math": PPOMATHConfig, "sft": SFTConfig, "dpo": DPOConfig
}  # fmt: skip
