"""Sections about the run itself: how long, what is written when, which processes, what is logged, weight updates, and
what jobs of other modes than `both` share and do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Self

from allocation import DeviceChoice
from config_schema.needs import above, equals, fact, given, refused_without, unlike
from config_schema.section import ModelPath, OutputPath, Section, Violation, key, section
from core.config.parsing.problems import MASK, is_secret, masked_urls
from core.config.ppo import DataSection, SetConfig
from rollout.errors import OnError
from rollout.inference.backend import FlagValue

if TYPE_CHECKING:
    from rollout.experience.episode import Processor
    from rollout.experience.rules import Priority

Verify = Literal["never", "first", "always"]
Changes = Literal["never", "always"]
Method = Literal["folder", "nccl"]
"""How weights come from a train job to other jobs."""


class PushConfig(Section):
    """Weight updates, sent by the trainer to the generators."""

    type: Literal["auto", "local", "nccl", "ipc", "disk"] = key(
        "auto",
        "Transport of weights. nccl: broadcast to servers on separate GPUs. ipc: CUDA IPC to servers on the "
        "trainer's GPUs. disk: files that every server can read. local: Ray object store, for "
        "embedded generators. auto: selected from the allocation",
    )
    verify: Verify = key(
        "first",
        "After which updates to compare the checksums of all tensors on the servers with what was sent. first: the "
        "first two after the start of the run or of a server; in the first one a server finds parameters by their "
        "names, in later ones it copies to the same places",
        needs=fact("servers"),
    )
    changes: Changes = key(
        "never",
        "Whether to send only the values that differ from the last update: faster where the folder is on a network. "
        "With always, the first trainer rank keeps a copy of the weights in host memory",
        needs=equals("push.type", "disk") & fact("servers on GPUs of their own"),
    )
    bucket_mib: int = key(
        1024,
        "Bucket size of weight updates in MiB. Larger buckets are faster. With nccl and ipc a trainer GPU needs memory "
        "for at least three of them",
        ge=1,
    )
    timeout_seconds: float = key(120.0, "Timeout of a weight update; a longer one ends the attempt", gt=0)

    @property
    def never_verifies(self) -> bool:
        return self.verify == "never"

    @property
    def sends_changes(self) -> bool:
        """True if only the values are sent that differ from the last update."""
        return self.changes == "always"

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib << 20


_SAVES = equals("exp_ctrl.benchmark_steps", None).else_("benchmarks save nothing")
RECOVERS = unlike("recover_mode", "disabled") & _SAVES
_EVALUATES = (
    equals("exp_ctrl.benchmark_steps", None).else_("benchmarks do not evaluate after steps")
    & refused_without("evaluation.path (sft, dpo: dataset.valid_path)")
)  # fmt: skip
_SAVES_MODELS = _SAVES & unlike("exp_ctrl.save_hf_checkpoint", "never")


class ExperimentSaveEvalControl(Section):
    """Length of the run, and how often it saves, checkpoints and evaluates: at the first frequency that is due, and
    after the last step if any frequency is set."""

    total_train_epochs: int = key(1, "Epochs over the data set", ge=1, first=True)
    total_train_steps: int | None = key(
        None, "Stop after this many steps, or at the end of the epochs", ge=1, first=True
    )
    save_freq_epochs: int | None = key(
        None, "Save the model as a Hugging Face folder every N epochs", ge=1, needs=_SAVES_MODELS
    )
    save_freq_steps: int | None = key(None, "Save the model every N steps", ge=1, needs=_SAVES_MODELS, first=True)
    save_freq_secs: float | None = key(None, "Save the model every N seconds", gt=0, needs=_SAVES_MODELS)
    save_keep: int | None = key(
        None,
        "Number of saved models to keep per engine; older ones of this trial are deleted. null: all",
        ge=1,
        needs=_SAVES_MODELS,
    )
    save_hf_checkpoint: Literal["always", "last", "never"] = key(
        "always",
        "Which models are saved. always: when due, and at the end or a signal. last: at the end or a signal. never: "
        "none; recover checkpoints can be converted",
        needs=_SAVES,
    )
    ckpt_freq_epochs: int | None = key(None, "Write a recover checkpoint every N epochs", ge=1, needs=RECOVERS)
    ckpt_freq_steps: int | None = key(None, "Write a recover checkpoint every N steps", ge=1, needs=RECOVERS)
    ckpt_freq_secs: float | None = key(600.0, "Write a recover checkpoint every N seconds", gt=0, needs=RECOVERS)
    eval_freq_epochs: int | None = key(None, "Evaluate every N epochs", ge=1, needs=_EVALUATES)
    eval_freq_steps: int | None = key(None, "Evaluate every N steps", ge=1, needs=_EVALUATES, first=True)
    eval_freq_secs: float | None = key(None, "Evaluate every N seconds", gt=0, needs=_EVALUATES)
    eval_at_start: bool = key(
        True, "Evaluate before the first step, too", needs=fact("ppo-math") & given("evaluation.path")
    )
    max_skipped_steps: int = key(
        10, "End the run after this many steps in a row whose updates were all skipped (gradient norm not finite)", ge=1
    )
    benchmark_steps: int | None = key(None, "Stop after this many steps; for benchmarks", ge=1)

    @property
    def evaluates(self) -> bool:
        """True if evaluations are due, before the first step or after others."""
        return self.eval_at_start or (not self.is_benchmark and any(self.eval_frequency))

    @property
    def eval_frequency(self) -> tuple[int | None, int | None, float | None]:
        """Epochs, steps and seconds between evaluations; None: not for that reason."""
        return self.eval_freq_epochs, self.eval_freq_steps, self.eval_freq_secs

    @property
    def is_benchmark(self) -> bool:
        """True if the run only measures: it writes no recover checkpoints and evaluates after no step."""
        return self.benchmark_steps is not None

    @property
    def length(self) -> tuple[int, int | None]:
        """Epochs and steps of which the run ends with the first."""
        return self.total_train_epochs, self.total_train_steps

    @property
    def length_keys(self) -> dict[str, int | None]:
        """The keys that set the length of a run."""
        return {"total_train_epochs": self.total_train_epochs, "total_train_steps": self.total_train_steps}

    @property
    def steps_limit(self) -> int | None:
        """Steps after which the run ends before its epochs do. None: no such limit."""
        limits = [n for n in (self.total_train_steps, self.benchmark_steps) if n is not None]
        return min(limits, default=None)


class WorkflowConfig(Section):
    """How a prompt becomes trajectories."""

    type: str = key(
        "math",
        "math (single-turn), endpoint (a program that talks to the API of OpenAI or Anthropic), environment (a game or "
        "task with reset and step), or a custom class as package.module:Class",
        first=True,
    )
    by_task: dict[str, str] = key(
        {}, "Workflows by the task of a row, as {task: workflow}; rows of other tasks use workflow.type"
    )
    options: dict[str, FlagValue] = key({}, "Settings of the workflow: fields of its class Config")
    timeout_seconds: float | None = key(
        600.0,
        "Time limit of a rollout, without its waits for generators and reward workers; bounds tools and "
        "environments. null: none",
        gt=0,
    )
    dynamic_timeout: float | None = key(
        None,
        "End the sampling of a prompt that takes so many times the mean duration of the last batch of prompts, ended "
        "ones included: it is late, and another one takes its place. null: no limit",
        gt=1,
    )
    max_retries: int = key(
        3, "Further runs, with the same seeds, of a workflow that raised or exceeded its limit", ge=0
    )
    on_error: OnError = key(
        "skip",
        "When a workflow has failed max_retries + 1 times for one prompt. skip: another "
        "prompt takes its place, with a warning. fail: the run ends",
    )
    max_error_share: float = key(
        0.1, "End the run when more than this share of the last 100 prompts was skipped", ge=0, le=1,
        needs=equals("workflow.on_error", "skip"),
    )  # fmt: skip

    @property
    def types(self) -> tuple[str, ...]:
        """The workflow of rows, then those of tasks."""
        return self.type, *self.by_task.values()

    def replaced_by(self, type: str) -> Self:
        """Return the workflow `type` for every task, with the options of this one where it is of that type."""
        options = self.options if type == self.type else {}
        return self.model_copy(update={"type": type, "by_task": {}, "options": options})

    def identity(self) -> dict[str, object]:
        """Return what decides the answers, for the record of an evaluation."""
        given = {"workflow_options": dict(self.options), "workflow_by_task": dict(self.by_task)}
        return {"workflow": self.type, **{name: value for name, value in given.items() if value}}


class EvaluationSetConfig(SetConfig):
    """A held-out set. Keys that are null have the values of `evaluation`, and workflow and reward those of the run."""

    path: str = key(description="Held-out prompts, as dataset.path")
    num_prompts: int | None = key(None, "Use only the first N prompts", ge=1)
    repeat: int | None = key(None, "Completions of each prompt", ge=1)
    max_new_tokens: int | None = key(None, "Maximum tokens per completion", ge=1)
    temperature: float | None = key(None, "Sampling temperature; 0: greedy", ge=0)
    top_p: float | None = key(None, "As ppo.gen.top_p. null: 1", gt=0, le=1)
    top_k: int | None = key(None, "As ppo.gen.top_k. null: -1", ge=-1)


class EvaluationConfig(DataSection):
    """Evaluation during training. Columns that are not given are those of `dataset`, where they exist, or detected."""

    path: str | list[str] | None = key(None, "Held-out prompts, as dataset.path, or a list", first=True)
    max_new_tokens: int | None = key(None, "Maximum tokens per completion. null: ppo.gen.max_new_tokens", ge=1)
    temperature: float = key(0.0, "Sampling temperature; 0: greedy", ge=0)
    num_prompts: int | None = key(None, "Use only the first N prompts of each file. null: all", ge=1)
    repeat: int = key(1, "Completions of each prompt", ge=1)
    sets: dict[str, EvaluationSetConfig] = key({}, "Held-out sets by name, with settings of their own, beside `path`")
    beside: bool = key(
        True,
        "With several generators that share no GPU with the trainer, evaluate on one of them, which keeps its weights "
        "meanwhile, while the others sample and the trainer trains. false: the trainer waits",
    )

    @property
    def paths(self) -> list[str]:
        """All the files."""
        return [self.path] if isinstance(self.path, str) else list(self.path or ())


class SamplesConfig(Section):
    """Prompts and answers of training as text, to be read with `python -m tools.samples RUN`."""

    share: float = key(
        0.1,
        "Share of the prompts of each step whose answers go to samples.jsonl in the log folder, of one at least, with "
        "the best, worst and longest answer of the step. 0: none",
        ge=0,
        le=1,
    )
    log_freq_steps: int | None = key(
        10,
        "Show the best, worst and longest answer in the log, TensorBoard, Weights & Biases and MLflow after the first "
        "step and every N steps. null: never",
        ge=1,
        needs=above("samples.share", 0),
    )
    max_file_mib: int = key(
        64, "Begin another file when samples.jsonl has this size", ge=1, needs=above("samples.share", 0)
    )
    keep_files: int = key(8, "Files of samples to keep; older ones are deleted", ge=1, needs=above("samples.share", 0))

    @property
    def shown_every(self) -> int | None:
        """Steps after which answers are shown. None: never."""
        return self.log_freq_steps if self.share else None


class LaunchConfig(Section):
    """Processes."""

    ray_address: str | None = key(
        None,
        "Ray cluster to join: host:port; auto: the one that `ray start` made this node a part of. local: start one for "
        "this run. null: RAY_ADDRESS if set; else auto with several nodes if there is one, and local otherwise",
    )
    trainer_device: DeviceChoice = key(
        "auto",
        "Where the trainer's ranks compute. auto: where the generators do; in sft, which has none, on GPUs if this "
        "machine has any, or with several nodes (not with a joined Ray cluster: then write the device)",
    )
    master_port: int = key(0, "Rendezvous port of the trainer ranks; 0: any free port", ge=0, le=65535)
    threads_per_process: int = key(
        0, "CPU threads per trainer or generator process. 0: divide the cores, with GPUs 8 at most", ge=0
    )
    startup_timeout_seconds: float = key(300.0, "Timeout for processes to become ready", gt=0)

    def rules_of_local(self) -> Iterator[Violation]:
        """Yield what mode=local contradicts."""
        if self.ray_address:
            message = f"mode=local is for this machine, launch.ray_address={self.ray_address}; write mode=ray"
            yield Violation(("mode", "launch.ray_address"), message)


class DeadlineConfig(Section):
    """How long anything may take. What takes longer ends the attempt with an error that names the process and its
    phase, and the Python stacks of all processes in the log folder."""

    collective_seconds: float = key(600.0, "Timeout of one collective of the trainer ranks", gt=0)
    call_seconds: float = key(
        3600.0, "Timeout of one driver call: an update, log-probabilities of a batch, a saved model", gt=0
    )
    batch_seconds: float = key(3600.0, "Timeout of the next batch or an evaluation", gt=0)
    interrupt_seconds: float = key(
        30.0,
        "After Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: time to finish the running step, then time to save the recover "
        "checkpoint and the model. A second Ctrl-C ends the run at once",
        ge=0,
    )
    driver_seconds: float = key(
        300.0,
        "Heartbeat timeout of the driver, which sends a heartbeat every second. After the timeout the driver is "
        "killed; with recover_mode=auto another attempt starts",
        ge=5,
    )

    @property
    def of_call(self) -> tuple[float, str]:
        """Timeout of a call, and its key."""
        return self.call_seconds, "call_seconds"

    @property
    def end_seconds(self) -> float:
        """Time that an interrupted driver has to end: for its step, for saving, and some more."""
        return 2 * self.interrupt_seconds + 30


_ONLINE = unlike(".mode", "disabled")


class WandBConfig(Section):
    """Weights & Biases."""

    mode: Literal["disabled", "online", "offline"] = key(
        "disabled", "Whether metrics go to Weights & Biases", first=True
    )
    entity: str | None = key(None, "Account or team", needs=_ONLINE)
    project: str | None = key(None, "Project. null: experiment_name", needs=_ONLINE)
    name: str | None = key(None, "Name of the run. null: trial_name", needs=_ONLINE)
    group: str | None = key(None, "Group of the run", needs=_ONLINE)
    tags: list[str] | None = key(None, "Tags of the run", needs=_ONLINE)

    @property
    def is_on(self) -> bool:
        """True if metrics go to Weights & Biases, now or later."""
        return self.mode != "disabled"

    @property
    def logs_in(self) -> bool:
        """True if the run needs an API key."""
        return self.mode == "online"


class MonitorConfig(Section):
    """Metrics and logs."""

    tensorboard: bool = key(True, "Write TensorBoard files into the log folder")
    mlflow_uri: str | None = key(None, "MLflow tracking server or folder. null: none")
    save_batches: int = key(
        0,
        "Save the batch of every this many steps for python -m tools.loss --from-run. 0: none",
        ge=0,
        needs=fact("ppo-math"),
    )
    questions: bool = key(
        False,
        "Answer questions of the studio with the current weights. They are counted as evaluation",
        needs=fact("ppo-math"),
    )
    timeline_mib: float = key(
        8.0, "Spans that each process keeps for python -m tools.timeline, in MiB; the oldest are dropped. 0: none",
        ge=0,
    )  # fmt: skip
    style: Literal["compact", "areal"] = key(
        "compact",
        "What the terminal shows: a row for each step, or the lines that the log file has, as in the AReaL tutorial",
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info",
        "Minimum log level on the terminal. Log files contain info and above; with debug also requests, admissions, "
        "weight updates and microbatches",
    )

    @property
    def uses_mlflow(self) -> bool:
        """True if metrics go to MLflow."""
        return self.mlflow_uri is not None

    def masked(self) -> Self:
        """Return the same without the password of an address."""
        return self.model_copy(update={"mlflow_uri": self.mlflow_uri and masked_urls(self.mlflow_uri)})


class ClusterConfig(Section):
    """Where output goes."""

    fileroot: OutputPath = key(
        "~/.cache/slipstream",
        "Root folder of all output; shared by all nodes",
        min_length=1,
        max_length=2000,
        first=True,
    )


class ExternalConfigs(Section):
    """The cluster around the run."""

    cluster_config: ClusterConfig = section(ClusterConfig, "Output folder")
    envs: dict[str, str] = key({}, "Environment variables of all processes; variables already set take precedence")

    def environment(self) -> dict[str, str]:
        """Return the variables of the processes: those of this one take precedence."""
        return {**self.envs, **os.environ}

    def variable(self, name: str) -> str | None:
        """Return a variable that is set here."""
        return self.envs.get(name)

    def masked(self) -> ExternalConfigs:
        """Return the same, to be shown: *** for secrets."""
        envs = {name: MASK if is_secret(name) else masked_urls(value) for name, value in self.envs.items()}
        return self.model_copy(update={"envs": envs})


APART = ("explore", "train")
"""Modes of jobs that share a store."""
_APART = equals("mode", *APART) & unlike("experience.store", "file")
_SERVES = equals("mode", "serve")
_SEES_WEIGHTS = _APART | _SERVES & equals("serve.follow", True)
_AUXILIARY = given("auxiliary.path")


_REPLAYS = above("experience.replay.share", 0)


class ReplayConfig(Section):
    """Episodes that later steps train on again."""

    share: float = key(
        0.0, "Share of replayed prompts among those of a step, beside train_bs_n_seqs new ones. 0: none", ge=0, lt=1
    )
    priority: str = key(
        "linear_decay",
        "Which are replayed first. linear_decay: by version - decay * uses, highest first. use_count: those with the "
        "fewest uses. Or a function as package.module:name. Groups with equal rewards never are",
        needs=_REPLAYS,
    )
    decay: float = key(
        2.0, "Versions that each use counts", ge=0,
        needs=_REPLAYS & equals("experience.replay.priority", "linear_decay"),
    )  # fmt: skip
    cooldown: int = key(1, "Fewest steps between two uses of an episode", ge=1, needs=_REPLAYS)
    max_uses: int | None = key(
        None, "Most steps that train on an episode, the first included. null: no limit", ge=2, needs=_REPLAYS
    )
    max_age: int | None = key(
        None,
        "Largest age of replayed tokens in steps. null: staleness.max_staleness. More needs importance weights: "
        "algorithm.correction other than none",
        ge=1,
        needs=_REPLAYS,
    )

    def make_priority(self) -> Priority:
        """Return what orders the episodes. Raises PluginError."""
        from rollout.experience import make_priority  # imports numpy

        return make_priority(self.priority, decay=self.decay)


class OverRolloutConfig(Section):
    """When a step trains without the slowest of its prompts. Those are trained later, within the staleness bound."""

    ratio: float = key(0.0, "Share of its prompts that a step may miss. 0: none", ge=0, lt=1)
    wait_seconds: float = key(
        30.0, "Wait for them so long after the others are ready", ge=0, needs=above("experience.over_rollout.ratio", 0)
    )

    @property
    def is_on(self) -> bool:
        """True if steps may train without some of their prompts."""
        return self.ratio > 0


class ExperienceConfig(Section):
    """Where episodes are kept."""

    store: str = key(
        "memory",
        "Where episodes are kept until they are trained. memory: in the rollout process, and in recover checkpoints. "
        "sqlite: in a file, which jobs of one host can share. postgres: in a database, for jobs of several hosts. "
        "file: in jsonl files, to look at what an explore job samples without a trainer. Or a custom class as "
        "package.module:Class",
    )
    path: OutputPath = key(
        "",
        "File of a sqlite store, address of a postgres one (postgresql://user@host/database), folder of a file one, or "
        "what a custom store opens",
        needs=unlike("experience.store", "memory"),
    )
    keep_steps: int = key(
        0,
        "Keep the tokens of the last N trained steps, for `slipstream experience export`. Tags stay in any case",
        ge=0,
        needs=unlike("experience.store", "memory"),
    )
    train_batch_size: int | None = key(
        None,
        "Answers that a training step trains on, in whole groups, however many prompts are explored per step "
        "(dataset.train_bs_n_seqs). null: those of these prompts",
        ge=1,
    )
    max_read_timeout: float | None = key(
        None,
        "Train what is ready of a batch, at least one prompt, after waiting so many seconds for the rest. What cannot "
        "be trained within the staleness bound then is dropped as late. null: wait for whole batches",
        gt=0,
    )
    over_rollout: OverRolloutConfig = section(OverRolloutConfig, "Steps that do not wait for their slowest prompts")
    processors: list[str] = key(
        [],
        "Functions package.module:name that get every finished episode before it is stored, in this order: they change "
        "rewards, remove trajectories, or drop the episode",
    )
    replay: ReplayConfig = section(ReplayConfig, "Episodes that later steps train on again")

    @property
    def replays(self) -> bool:
        """True if steps train on episodes again."""
        return self.replay.share > 0

    @property
    def needs_checks(self) -> bool:
        """True if something is to be found by its name or import path."""
        return self.is_durable or self.replays or bool(self.processors)

    def load_processors(self) -> list[Processor]:
        """Return the functions of `processors`. Raises PluginError."""
        from rollout.experience.episode import load_processors  # imports numpy

        return load_processors(self.processors)

    def oldest_replayed(self, default: int) -> int:
        """Return the largest age of replayed tokens in steps."""
        return default if self.replay.max_age is None else self.replay.max_age

    @property
    def is_durable(self) -> bool:
        """True if the store survives the processes that open it. Its state is not part of recover checkpoints then."""
        return self.store != "memory"

    @property
    def is_read_by_people(self) -> bool:
        """True if the store is for looking at episodes: no trainer leases them."""
        return self.store == "file"

    def job_rules(self, mode: str, sync: SynchronizerConfig) -> Iterator[Violation]:
        """Yield what keeps a job of this mode from using the store."""
        apart = mode in APART
        if apart and not self.is_durable:
            yield Violation(("experience.store", "mode"), f"mode={mode} shares a store with other jobs; write sqlite")
        elif self.is_durable and not self.path:
            yield Violation(("experience.path",), f"required with experience.store={self.store}")
        elif self.store == "postgres" and apart and not sync.folder:
            message = "required with experience.store=postgres: a folder for the weights that every job sees"
            yield Violation(("synchronizer.folder", "experience.store"), message)
        elif self.is_read_by_people and mode != "explore":
            yield Violation(
                ("experience.store", "mode"), f"file is for looking at explore jobs, mode={mode}; write sqlite"
            )


class SynchronizerConfig(Section):
    """Weights between a train job and explore jobs."""

    method: Method = key(
        "folder",
        "folder: the train job writes published weights to `folder`. nccl: it broadcasts them (gloo on the CPU) to the "
        "generators of the jobs that are up, and writes the folder for others: the first and the last version, those "
        "of recover checkpoints, and all of them while a job follows the folder. Of jobs of one host",
        needs=_SEES_WEIGHTS,
    )
    folder: OutputPath = key(
        "",
        "Folder that every job sees, with the published weights and LATEST. Default: the folder `weights` beside "
        "experience.path",
        needs=_SEES_WEIGHTS,
    )
    interval: int = key(
        1,
        "Publish weights every N steps, and after the last one; at most staleness.max_staleness + 1. With "
        "experience.train_batch_size, a step of interval and offset is dataset.train_bs_n_seqs sampled prompts",
        ge=1,
        needs=_APART,
    )
    style: Literal["dynamic_by_trainer", "dynamic_by_explorer", "fixed"] = key(
        "dynamic_by_trainer",
        "dynamic_by_trainer: publish every `interval` steps. dynamic_by_explorer: when an explore job has finished the "
        "prompts of `interval` steps since its last weights, or has nothing to sample. fixed: as dynamic_by_trainer, "
        "and each version samples the prompts of `interval` steps, `offset` steps ahead",
        needs=_APART,
    )
    offset: int = key(
        0,
        "Steps by which explore jobs are ahead; interval + offset is at most staleness.max_staleness + 1",
        ge=0,
        needs=_APART & equals("synchronizer.style", "fixed"),
    )

    @property
    def broadcasts(self) -> bool:
        """True if the train job sends weights to the jobs that are connected."""
        return self.method == "nccl"

    @property
    def steps_ahead(self) -> int | None:
        """How many steps after the version that samples it a prompt is due. None: as the staleness bound allows."""
        return self.interval + self.offset - 1 if self.style == "fixed" else None

    def rules_within(self, longest: int) -> Iterator[Violation]:
        """Yield what makes weights older than `longest` steps, max_staleness + 1."""
        if self.interval > longest:
            yield Violation(
                ("synchronizer.interval", "staleness.max_staleness"),
                f"interval={self.interval} must be at most max_staleness + 1 = {longest}: older weights "
                "could not sample for the next step",
            )
        elif self.style == "fixed" and self.interval + self.offset > longest:
            yield Violation(
                ("synchronizer.offset", "synchronizer.interval", "staleness.max_staleness"),
                f"interval + offset = {self.interval + self.offset} must be at most max_staleness + 1 = {longest}",
            )

    @property
    def on_request(self) -> bool:
        """True if weights are published when an explore job asks for them."""
        return self.style == "dynamic_by_explorer"


class ServeConfig(Section):
    """What a serve job answers with, in the dialects of OpenAI and Anthropic."""

    host: str = key("127.0.0.1", "Address to listen on; 0.0.0.0: all", needs=_SERVES)
    port: int = key(0, "Port to listen on; 0: any free one, see the log", ge=0, le=65535, needs=_SERVES)
    api_key: str = key("", "Key that clients must send, as ${oc.env:NAME}; empty: any", needs=_SERVES)
    model: str = key(
        "",
        "Hugging Face folder of the weights. Empty: actor.path",
        needs=_SERVES & equals("serve.follow", False),
    )
    follow: bool = key(
        False, "Answer with the newest weights of synchronizer.folder, which a train job publishes", needs=_SERVES
    )


class AuxiliaryConfig(Section):
    """A frozen model beside the policy: a judge, an opponent, a simulated user."""

    path: ModelPath = key("", "Hugging Face folder of the model. Empty: there is none", needs=unlike("mode", "train"))
    num_servers: int = key(
        1, "Generators of allocation_mode that serve it in place of the policy", ge=1, needs=_AUXILIARY
    )
    temperature: float = key(0.0, "Temperature of its answers; 0: the most likely tokens", ge=0, needs=_AUXILIARY)


class BenchConfig(Section):
    """What a bench job evaluates, on every set of evaluation.path."""

    models: list[str] = key(
        [],
        "Hugging Face folders of models of the architecture of actor.path, such as the saved models of a run",
        needs=equals("mode", "bench"),
    )

    @property
    def is_empty(self) -> bool:
        """True if there is no model to evaluate."""
        return not self.models
