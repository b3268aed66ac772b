"""Settings of the rollout side of a run, and the facts about its data. Loads no heavy library: the driver makes these
settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Literal

from core.monitoring.samples import SampleSettings
from rollout.data.encoder import PromptFormat
from rollout.data.left_out import LeftOut
from rollout.data.source import DataSource
from rollout.data.task_sets import Order
from rollout.errors import OnError
from rollout.experience import OverAge, StoreSettings
from rollout.types import SamplingParams
from rollout.workflows import WorkflowChoice

Side = Literal["both", "explore", "train"]


@dataclass(frozen=True, kw_only=True)
class TaskSetSettings:
    """A set of prompts to train on, and how they are sampled and judged."""

    source: DataSource
    weight: float | None = None
    """Share of the prompts of an epoch, relative to other sets. None: the number of its rows."""
    order: Order = "shuffled"
    curriculum: str = ""
    """Column, or package.module:function."""
    prompt_format: PromptFormat
    group_size: int
    sampling: SamplingParams
    """The tokenizer's end tokens are added."""
    workflow: str | WorkflowChoice
    reward: str
    right_at: float | None


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Data, sampling, experience, rewards and supervision of the generators."""

    store: StoreSettings = field(default_factory=StoreSettings)
    """Where episodes are."""
    side: Side = "both"
    """What the rollout process does: sample into the store, lease from it, or both."""
    lessee: str = "trainer"
    """Name of the trainer in the store."""
    acknowledges_saved: bool = False
    """Keep leases until a recover checkpoint holds their steps, for a store that survives its processes."""
    keep_steps: int = 0
    """Steps whose episodes keep their tokens in the store when they are trained."""
    run: str = ""
    """Part of the ids of episodes, for runs that share a store; empty: the store has one run."""
    tokenizer_path: str
    """Folder of the model that is trained."""
    dataset: DataSource
    """Prompts to train on, unless there are task sets."""
    task_sets: Mapping[str, TaskSetSettings] = field(default_factory=dict)
    """Sets of prompts to train on, by name."""
    eval_sets: Sequence[DataSource]
    """Evaluation sets; empty: there is no evaluation."""
    num_eval_prompts: int | None
    """Evaluation uses this many prompts of each set, from its start. None: all."""
    max_prompt_len: int
    """In tokens; longer prompts are left out."""
    prompt_format: PromptFormat
    """What surrounds a prompt."""
    seed: int
    """Of the order of the prompts and of every sample."""
    shuffle: bool
    """Draw a new order of the prompts every epoch."""

    batch_size: int
    """Prompts of one step."""
    group_size: int
    """Completions of one prompt."""
    num_epochs: int
    num_steps: int | None
    """Prompts of later steps are not started. None: the epochs end the run."""
    max_staleness: int
    """Steps by which the weights that sampled a token may be behind those that train on it."""
    over_age: OverAge
    """Either "wait" for the oldest prompts, or "mask" tokens that are too old."""
    in_order: bool
    """A step trains on exactly the prompts of its place in the stream."""
    demonstrations_path: str = ""
    """jsonl file of prompts with answers to train on beside the samples; empty: none."""
    demonstrations_per_step: int = 0
    dynamic_sampling_limit: int | None = None
    """Drop groups without spread, up to so many batches of prompts a step. None: keep all."""
    max_in_flight: int
    """Requests that the generators have at once, about."""

    sampling: SamplingParams
    """Of training; the tokenizer's end tokens are added."""
    eval_sampling: SamplingParams
    """Of evaluation; the tokenizer's end tokens are added."""
    workflow: str | WorkflowChoice
    """The workflow of each task, or of all: a name in WORKFLOWS, or package.module:Class."""
    workflow_timeout_seconds: float | None = None
    """Limit of a rollout beside generation and scoring. None: there is none."""
    max_retries: int = 3
    """Further runs of a workflow that failed."""
    reward: str
    """Name in REWARDS, or package.module:function."""
    right_at: float | None = None
    """The reward from which an answer is right. None: not known."""
    on_error: OnError = "skip"
    """What a workflow costs that keeps failing for a prompt."""
    max_error_share: float = 0.1
    """Of the last 100 prompts, that may be skipped."""
    vocab_size: int | None = None
    """Token ids are below it. None: not checked."""
    max_tokens: int | None = None
    """Of one trajectory. None: not checked."""
    samples: SampleSettings
    """Answers that are written as text."""
    reward_workers: int
    """Processes that judge completions."""
    reward_timeout_seconds: float
    """Limit for one completion."""
    max_failed_share: float = 0.5
    """Completions of a batch that may fail to be scored."""
    max_failed_batches: int = 3
    """Batches in a row above that share which end the run."""

    health_interval_seconds: float
    """Time between two health checks of a generator."""
    health_timeout_seconds: float
    """A generator without an answer for this long is given up."""
    generator_patience_seconds: float
    """Requests wait this long for a generator when there is none."""

    @property
    def sets(self) -> Mapping[str, TaskSetSettings]:
        """Every set of prompts to train on."""
        return self.task_sets or {
            self.dataset.name: TaskSetSettings(
                source=self.dataset, order="shuffled" if self.shuffle else "sequential",
                prompt_format=self.prompt_format, group_size=self.group_size, sampling=self.sampling,
                workflow=self.workflow, reward=self.reward, right_at=self.right_at,
            )
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the driver needs of the data sets."""

    num_prompts: int
    mean_prompt_tokens: float
    first_prompt: str
    """The first prompt to train on, in words, and how its answers are scored."""
    num_eval_prompts: int
    left_out: Sequence[LeftOut]
    """Of the data set and of each evaluation set."""


def named(sets: Sequence[DataSource]) -> dict[str, DataSource]:
    """Return the evaluation sets by the names of their metrics; numbered where two are the same."""
    by_name: dict[str, DataSource] = {}
    for source in sets:
        numbers = (f"{source.name}-{number}" for number in count(len(by_name)))
        by_name[next(name for name in chain([source.name], numbers) if name not in by_name)] = source
    return by_name
