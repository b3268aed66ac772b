"""Keys that all experiments have, and the sections about models: which one, how it is optimised, where and in what
pieces it runs.

Key names and defaults follow the AReaL 0.2 schema that tutorials for this kind of trainer use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypedDict

from config_schema.needs import equals, fact, given
from config_schema.section import ModelPath, Section, Violation, key, section
from core.config.ppo import PromptConfig
from core.config.runtime import (
    RECOVERS,
    DeadlineConfig,
    ExperimentSaveEvalControl,
    ExternalConfigs,
    LaunchConfig,
    MonitorConfig,
    WandBConfig,
    WorkflowConfig,
)
from mcore_adapter.settings import EXPERTS, EngineConfig, EngineModel
from model_specs.families import FAMILIES
from rollout.inference.backend import FlagValue


class ModelFamily(Section):
    """Kind of a model."""

    family: str = key(
        "auto",
        f"Model family ({', '.join(FAMILIES)}); must agree with config.json. auto: read from config.json",
        alias="_class",
    )
    is_critic: bool = key(False, "True for a model with a value head")


class _ModelFolder(Section):
    """Which model."""

    type: ModelFamily = section(ModelFamily, "Model family and head")
    path: ModelPath = key(
        "",
        "Hugging Face model folder, or id of a model of the hub, as owner/name or owner/name@revision. ref and critic: "
        "empty means actor.path",
        first=True,
    )

    @property
    def has_folder(self) -> bool:
        """True if a folder is given for this model itself."""
        return bool(self.path)

    def folder_or_of(self, model: _ModelFolder) -> str:
        """Return the folder to load; that of `model` where none is given."""
        return self.path or model.path


class ModelTrainEvalConfig(EngineConfig, _ModelFolder):
    """One model: its weights, numeric format and optimizer."""

    moe_routing_replay: bool = key(
        False,
        "Train each token through the experts that the generator used for it",
        needs=fact("actor with servers") & EXPERTS,
    )
    sglang: dict[str, FlagValue] = key(
        {},
        "Flags of the servers by name, as in mem_fraction_static: 0.8",
        needs=fact("actor with servers") & fact("servers"),
    )


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model that a run loads, and the roles that use it."""

    key: str
    section: ModelTrainEvalConfig
    path: str
    roles: tuple[str, ...]
    tokenizer: bool = False

    @property
    def value_head(self) -> bool | None:
        """Whether the weights at `path` must end in a value head; None: a critic starts from either."""
        if self.key == "critic":
            return True if self.section.needs_value_head else None
        return False


class MicroBatchSpec(Section):
    """How a minibatch is cut into microbatches."""

    max_tokens_per_mb: int | None = key(
        None,
        "Maximum tokens per microbatch, prompts included (on CPU a prompt shared by completions counts once). "
        "Reduce it to use less memory. "
        "null: value of actor_train; for actor_train 16384 or the longest possible sequence, whichever is larger",
        ge=1,
        first=True,
    )


class GenerationRoleConfig(Section):
    """Where the generators run, if allocation_mode does not specify it."""

    device_mapping: str | list[int] | None = key(
        None, "Global GPU indices of the role, such as list(range(0,8)); replaces allocation_mode"
    )
    layout: str | None = key(
        None,
        "Parallel layout of device_mapping, such as d4m2p1. null: all data parallel",
        needs=given(".device_mapping"),
    )

    @property
    def is_mapped(self) -> bool:
        """True if device_mapping places the role, not allocation_mode."""
        return self.device_mapping is not None


class MFCConfig(GenerationRoleConfig):
    """One use of a model (training or inference): microbatches, and where it runs if allocation_mode does not specify
    it."""

    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "Size of microbatches")

    def most_tokens(self, training: MFCConfig, longest: int) -> int:
        """Return the maximum of tokens of one forward pass: that of `training`, or enough for the `longest` sequence,
        where none is given."""
        for limit in (self.mb_spec.max_tokens_per_mb, training.mb_spec.max_tokens_per_mb):
            if limit is not None:
                return limit
        return max(DEFAULT_TOKENS_PER_MB, longest)


Job = Literal["both", "explore", "train", "bench", "serve"]
Mode = Literal["ray", "local", Job]
DEFAULT_TOKENS_PER_MB = 16384
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+=-]*$"

_LONGEST = 128
"""Characters of a name that becomes a folder, to which an earlier run's has a date added."""

N_GPUS = "GPUs per node; without GPUs: processes per node, one per rank"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The rules of the tutorial (batch size, group size and nodes), and the algorithm."""

    train_bs_n_seqs: int
    group_size: int
    n_nodes: int
    algorithm: str = ""
    """Algorithms of the same value continue each other's state: "preset", or the import path of one. Empty where there
    is no such state."""

    def changes_since(self, before: RunIdentity) -> dict[str, str]:
        """Return {field: what it is now and was before} of the fields that differ."""
        now, then = asdict(self), asdict(before)
        return {
            key: f"{key}={now[key]} (the checkpoint has {then[key] or 'none'})" for key in now if now[key] != then[key]
        }


class Judged(NamedTuple):
    """How the answers of a run's models are sampled and judged."""

    workflow: WorkflowConfig
    reward: str
    right_at: float | None
    """The reward from which an answer is right. None: not known."""
    max_new_tokens: int | None
    """None: the run samples nothing."""
    stop: Sequence[str] = ()


class RowOrder(TypedDict):
    """The order of the rows of a file, as arguments of its reader."""

    seed: int
    shuffle: bool


class Summary(NamedTuple):
    """What the lines at the start of a run show of its configuration."""

    model: str
    """Folder of the model that is trained."""
    optimizer: str
    batch: str
    """What one step trains on."""
    sampled: tuple[str, ...] = ()
    """How answers are sampled and judged."""
    algorithm: str | None = None


class CommonExperimentConfig(Section):
    """Keys that every experiment has."""

    experiment_name: str = key(
        description="Name of the experiment; part of every output path",
        pattern=_NAME,
        max_length=_LONGEST,
        first=True,
    )
    trial_name: str = key(
        "",
        "Name of the trial; part of every output path. Default: date and time of the start. The same name continues "
        "the trial",
        pattern=_NAME,
        max_length=_LONGEST,
        first=True,
    )
    mode: Mode = key(
        "ray",
        "What a job of ppo-math does. both: sample and train. explore: sample into a store that other jobs share. "
        "train: train on that store. bench: evaluate models. serve: answer requests. ray: same as both. "
        "local: both, with Ray on this machine only",
    )
    n_nodes: int = key(1, "Number of nodes", ge=1, first=True)
    n_gpus_per_node: int = key(2, N_GPUS, ge=1, first=True)
    allocation_mode: str = key(
        "embedded.d1m1p1+d1m1p1",
        "Layouts of generators and trainer. d, m, p: data, tensor, pipeline parallel size",
        first=True,
    )
    recover_mode: Literal["auto", "resume", "disabled"] = key(
        "auto",
        "auto: continue from the newest recover checkpoint, if any. resume: fail without one. disabled: begin at step "
        "0 and write none",
        first=True,
    )
    recover_retries: int = key(
        1,
        "Maximum of consecutive restarts without progress, after a process failure, out-of-memory or a timeout",
        ge=0,
        needs=equals("recover_mode", "auto"),
    )
    recover_keep: int = key(2, "Number of recover checkpoints to keep; older ones are deleted", ge=1, needs=RECOVERS)
    recover_ignore_changes: bool = key(
        False,
        "Recover even if batch size, group size or data changed: keep model and optimizer, sample incompatible "
        "completions again",
        needs=RECOVERS,
    )
    resume_from: str | None = key(
        None,
        "Recover checkpoint of another trial (.../recover/<user>/<experiment>/<trial>/globalstepN) to continue from if "
        "this trial has none",
        needs=RECOVERS,
    )
    seed: int = key(1, "Random seed of the run", ge=0, le=2**32 - 1, first=True)
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
    def model_uses(self) -> tuple[ModelUse, ...]:
        """The models that this run loads, the policy first."""
        raise NotImplementedError

    def engine_model(self, key: str, *, total_updates: int | None = None) -> EngineModel:
        """Return what the engine of a model loads, by its key in model_uses. `total_updates`: None where the model is
        not trained."""
        use = next(use for use in self.model_uses if use.key == key)
        is_critic = key == "critic"
        seed = self.seed + is_critic
        return EngineModel(
            config=use.section, path=use.path, is_critic=is_critic, seed=seed, total_updates=total_updates
        )

    @property
    def row_order(self) -> RowOrder:
        return {"seed": self.seed, "shuffle": self.shuffle_dataset}

    @property
    def models(self) -> dict[str, ModelTrainEvalConfig]:
        """Sections of all models, by their key, whether this run loads them or not; the policy first."""
        raise NotImplementedError

    @property
    def model_folder(self) -> str:
        """Folder of the policy, with the tokenizer of the run."""
        return next(iter(self.models.values())).path

    def rules(self, at: str) -> Iterator[Violation]:
        if self.is_local and self.n_nodes > 1:
            yield Violation(("mode", "n_nodes"), f"mode=local is for one node, n_nodes={self.n_nodes}; write mode=ray")
        if self.is_local:
            yield from self.launch.rules_of_local()

    @property
    def run_name(self) -> str:
        """Experiment and trial."""
        return f"{self.experiment_name}/{self.trial_name}"

    @property
    def is_local(self) -> bool:
        """True if the run starts Ray on this machine, whatever cluster there is."""
        return self.mode == "local"

    @property
    def job(self) -> Job:
        """What the job does: `mode`, of which ray and local are both."""
        return "both" if self.mode == "ray" or self.mode == "local" else self.mode

    @property
    def launcher(self) -> str:
        """The mode as the launcher of the AReaL tutorial logs it."""
        return self.mode.upper()

    @property
    def num_slots(self) -> int:
        """GPUs, or processes without GPUs, of all nodes."""
        return self.n_nodes * self.n_gpus_per_node

    def _identity(self, *, batch_size: int, group_size: int = 1, algorithm: str = "") -> RunIdentity:
        return RunIdentity(train_bs_n_seqs=batch_size, group_size=group_size, n_nodes=self.n_nodes, algorithm=algorithm)

    @property
    def recover_setting(self) -> str:
        """The setting of recover_mode, as messages write it."""
        return f"recover_mode={self.recover_mode}"

    @property
    def retries(self) -> int:
        """Restarts without progress after which the run ends."""
        return self.recover_retries if self.recover_mode == "auto" else 0

    @property
    def earlier_checkpoint(self) -> Path | None:
        """Recover checkpoint of another trial to continue from if this trial has none."""
        return None if self.resume_from is None else Path(self.resume_from).expanduser()

    @property
    def continues_exactly(self) -> bool:
        """True if the run continues from recover checkpoints, of the same settings and data alone."""
        return self.recovers and not self.recover_ignore_changes

    @property
    def must_recover(self) -> bool:
        """True if the run may not begin without a recover checkpoint."""
        return self.recover_mode == "resume"

    @property
    def recovers(self) -> bool:
        """True if the run writes recover checkpoints and continues from them. Benchmarks do not."""
        trains = self.job in ("both", "train")
        return self.writes_checkpoints and trains and not self.exp_ctrl.is_benchmark

    @property
    def writes_checkpoints(self) -> bool:
        """True if recover checkpoints are not disabled."""
        return self.recover_mode != "disabled"

    def masked(self) -> Self:
        """Return the same, to be printed or uploaded: without secrets."""
        masked = {"external_configs": self.external_configs.masked(), "monitor": self.monitor.masked()}
        return self.model_copy(update=masked)


def too_small_microbatches(roles: Mapping[str, MFCConfig], longest: int, parts: Sequence[str]) -> Iterator[Violation]:
    """Yield limits of microbatches that cannot hold the `longest` sequence, whose length `parts` are the keys of."""
    for role, placed in roles.items():
        limit = placed.mb_spec.max_tokens_per_mb
        if limit is not None and limit < longest:
            yield Violation(
                (f"{role}.mb_spec.max_tokens_per_mb", *parts),
                f"max_tokens_per_mb={limit} cannot hold the longest sequence, {' + '.join(parts)} = {longest}; "
                f"raise it to at least {longest}",
            )


def no_evaluation_data(control: ExperimentSaveEvalControl, key: str) -> Iterator[Violation]:
    """Yield that evaluations are due, of a run without data for them, which `key` would name."""
    if any(control.eval_frequency):
        yield Violation((key, "exp_ctrl"), "exp_ctrl.eval_freq_* enables evaluation; set this to a jsonl file")


def untrained_model(name: str, model: ModelTrainEvalConfig) -> Iterator[Violation]:
    """Yield what keeps the language model of section `name` from being trained."""
    if not model.path:
        yield Violation((f"{name}.path",), "required: the Hugging Face folder of the model to train")
    if model.type.is_critic:
        yield Violation((f"{name}.type.is_critic",), f"{name} is a language model; only the critic has a value head")
    if not model.optimizer.trains:
        yield Violation((f"{name}.optimizer.type",), f"{name} is trained; write adam")


def reference_with_values(reference: ModelTrainEvalConfig) -> Iterator[Violation]:
    """Yield that the reference model cannot have a value head."""
    if reference.type.is_critic:
        yield Violation(("ref.type.is_critic",), "ref is a language model; only the critic has a value head")
