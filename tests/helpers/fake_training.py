"""Run the PPO loop on hand-made batches and model outputs, without processes, and record what it trains on.

This module alone constructs the trainer and imitates what it drives: trainer ranks, rollout client, weight push. The
loss functions that the loop passes to the ranks are evaluated here on the given outputs, with autograd. Tests use
`Answer`, `Step`, `train` and the `Run` that it returns; values are one list for each answer, one number for each of its
sampled tokens.
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from core.algorithms.build import build_algorithm
from core.config.algorithm import AlgorithmConfig
from core.config.experiments import PPOMATHConfig
from core.config.ppo import GenerationHyperparameters, PPOHyperparameters, StalenessConfig
from core.config.runtime import ExperimentSaveEvalControl
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from core.data.stored_batch import InferencePass, RankBatch, StoredBatch, StoredFields, UpdatePass
from core.launch.rollout_client import Taken
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.samples import Sample
from core.monitoring.screen import Screen
from core.runs.checkpoints import RunIdentity
from core.train.periodic import PeriodicActions
from core.train.recover import MemoryLimits, RecoverStore, RunState
from core.train.step_batch import BatchRequest, SavedSteps, Scored, Scoring, StepBatch
from core.trainer import EngineRef, PPOTrainer
from core.weight_sync.push import PushReport
from mcore_adapter.data.batch import ROUTED_EXPERTS, TOKEN_WEIGHTS, Divisors, ModelOutput, PackedBatch, Sequences
from mcore_adapter.data.planner import Planner
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from rollout.experience import Schedule
from rollout.types import PROMPT_VERSION, Trajectory

PerAnswer = Sequence[Sequence[float]]

PLAIN: Mapping[str, Any] = {
    "adv_norm": False,
    "behave_imp_weight_cap": None,
    "correction": "bypass",
    "disable_value": True,
    "discount": 1.0,
    "entropy_coeff": 0.0,
    "eps_clip": 0.2,
    "gae_lambda": 1.0,
    "group_adv_norm": False,
    "kl_ctl": 0.0,
    "kl_estimator": None,
    "kl_in": "reward",
    "mask_no_eos_with_zero": False,
    "ppo_n_minibatches": 1,
    "reward_output_bias": 0.0,
    "reward_output_scaling": 1.0,
    "temperature": 1.0,
    "value_eps_clip": 0.2,
    "value_norm": False,
}
"""Every setting of the algorithm, switched off where possible: the advantage of a token is the reward of its answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One trajectory: `prompt_tokens` tokens of a prompt, then one sampled token for each log-probability."""

    sampled: Sequence[float]
    """Log-probabilities that the generator reports."""
    reward: float
    cut_off: bool = False
    prompt_tokens: int = 2
    versions: Sequence[int] | None = None
    """Weight version of each sampled token; None: 0."""
    untrained: frozenset[int] = frozenset()
    """Sampled tokens that the loss mask leaves out."""
    experts: int | None = None
    """The expert that every token used; None: the generator does not report experts."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The batch of one step and the outputs of the models for it."""

    groups: Sequence[Sequence[Answer]]
    old: PerAnswer | None = None
    """The actor's log-probabilities before the update; None: those of the generator."""
    current: PerAnswer | None = None
    """The actor's log-probabilities during the update; None: `old`."""
    reference: PerAnswer | None = None
    entropy: PerAnswer | None = None
    values: PerAnswer | None = None
    """The critic's output before the update."""
    current_values: PerAnswer | None = None
    """The critic's output during the update; None: `values`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics that come with the batch."""

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self.groups for answer in group]

    @property
    def sampled(self) -> PerAnswer:
        return [answer.sampled for answer in self.answers]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One request for per-token outputs of a model."""

    step: int
    engine: str
    method: str
    temperature: float
    fields: frozenset[str]
    max_tokens_per_mb: int


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer update; per-token values by sequence of the batch."""

    step: int
    engine: str
    sequences: tuple[int, ...]
    temperature: float
    with_entropy: bool
    max_tokens_per_mb: int
    loss: float
    fields: Mapping[str, Mapping[int, list[float]]]
    gradient: Mapping[int, list[float]]
    """With respect to the log-probabilities of the actor, or to the values of the critic."""
    entropy_gradient: Mapping[int, list[float]]
    routed_experts: Mapping[int, list[int]]


@dataclass
class Run:
    """What the loop did."""

    passes: list[Pass] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """By step, counted from 1 as users see it."""
    consumed: dict[int, list[str]] = field(default_factory=dict)
    state: dict[str, object] = field(default_factory=dict)

    def of(self, engine: str, step: int = 0) -> list[Update]:
        return [u for u in self.updates if u.engine == engine and u.step == step]

    def trained_on(self, name: str, *, engine: str = "actor", step: int = 0) -> list[list[float]]:
        """A field that an engine trained on, by answer, over its trained tokens."""
        return self._by_answer(engine, step, lambda update: update.fields[name])

    def field_names(self, *, engine: str = "actor", step: int = 0) -> set[str]:
        """Names of the fields that an engine trained on."""
        return {name for update in self.of(engine, step) for name in update.fields}

    def gradient(self, *, engine: str = "actor", step: int = 0) -> list[list[float]]:
        return self._by_answer(engine, step, lambda update: update.gradient)

    def entropy_gradient(self) -> list[list[float]]:
        return self._by_answer("actor", 0, lambda update: update.entropy_gradient)

    def _by_answer(
        self, engine: str, step: int, pick: Callable[[Update], Mapping[int, list[float]]]
    ) -> list[list[float]]:
        merged: dict[int, list[float]] = {}
        for update in self.of(engine, step):
            merged |= pick(update)
        return [merged[i] for i in sorted(merged)]


def train(
    *steps: Step,
    start: RunState | None = None,
    checkpoints: RecoverStore | None = None,
    tokens_per_mb: int = 16384,
    fits: Mapping[str, int] | None = None,
    sample_steps: int | None = None,
    steps_of_an_epoch: int | None = None,
    saved_steps: SavedSteps | None = None,
    **settings: Any,
) -> Run:
    """Run the loop over `steps`; `settings` replace those of PLAIN under the names of the configuration.

    `checkpoints`: where a recover checkpoint is saved after every step but the first. `fits`: most tokens a microbatch
    of "logprobs actor", "train actor" ... that do not run out of memory. `steps_of_an_epoch`: of a run that ends within
    its first epoch."""
    start = start or RunState(step=0, version=0, elapsed_seconds=0.0, extra={})
    config, run = _config({**PLAIN, **settings}), Run()
    last = start.step + len(steps)
    schedule = Schedule(num_prompts=steps_of_an_epoch or last, batch_size=1, total_epochs=1, total_steps_limit=last)
    ranks = _Ranks(run, steps, start.step, fits or {})

    def engine(name: str) -> EngineRef:
        return EngineRef(
            group=ranks, name=name, train_role=f"{name}_train", inference_role=f"{name}_inf",
            train_tokens_per_mb=tokens_per_mb, inference_tokens_per_mb=tokens_per_mb,
        )  # type: ignore[arg-type]  # fmt: skip

    with ExitStack() as stack:
        monitor = stack.enter_context(
            Monitor(
                screen=Screen(Console(file=io.StringIO()), compact=False),
                sinks=[_Sink(run)],
                consumed=_Consumed(run),  # type: ignore[arg-type]
                schedule=schedule,
                done_steps=start.step,
                elapsed=start.elapsed_seconds,
                sample_steps=sample_steps,
            )  # fmt: skip
        )
        trainer = PPOTrainer(
            actor=engine("actor"),
            critic=engine("critic") if config.uses_critic else None,
            reference=engine("ref") if config.uses_reference else None,
            rollout=_Rollout(run, steps, start.step),  # type: ignore[arg-type]
            weights=_Push(run),
            memory=MemoryLimits(),
            algorithm=build_algorithm(config),
            sample_reuse=config.ppo.sample_reuse,
            num_minibatches=config.ppo.ppo_n_minibatches,
            temperature=config.ppo.gen.temperature,
            schedule=schedule,
            saved_steps=saved_steps,
            monitor=monitor,
            timer=StepTimer(run.phases.append),
            mean_batch_tokens=96.0,
        )
        periodic: Any = _Periodic(run)
        if checkpoints is not None:
            periodic = _saving(schedule, checkpoints, start, lambda: (monitor.elapsed_seconds, trainer.state))
            stack.enter_context(checkpoints)
        trainer.run(start, periodic)
        run.state = trainer.state
    return run


def recover_store(folder: Path) -> RecoverStore:
    """An empty store of recover checkpoints."""
    return RecoverStore(folder, RunIdentity(train_bs_n_seqs=1, group_size=1, n_nodes=1))


def newest_state(store: RecoverStore) -> RunState:
    """The state from which a run continues."""
    newest = store.newest()
    assert newest is not None, "the run has saved no recover checkpoint"
    return store.load(newest).state


def _saving(
    schedule: Schedule, store: RecoverStore, start: RunState, driver_state: Callable[[], tuple[float, dict]]
) -> PeriodicActions:
    def begin_save(folder: Path) -> Callable[..., None]:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_bytes(b"weights")
        return lambda stop: None

    return PeriodicActions(
        schedule=schedule,
        control=ExperimentSaveEvalControl(ckpt_freq_steps=1),
        report_step=lambda step: None, evaluations=None, save_model=lambda name: None, has_model=lambda name: True,
        begin_save=begin_save, rollout_state=lambda: None, driver_state=driver_state,
        recover=store,
        start=start,
    )  # fmt: skip


def _config(settings: Mapping[str, Any]) -> PPOMATHConfig:
    """A configuration with each setting in the section that has a key of this name."""
    tree: dict[str, Any] = {
        "experiment_name": "fake", "trial_name": "fake", "actor": {"path": "none"}, "dataset": {"path": "none"},
        "ppo": {"gen": {}}, "algorithm": {}, "staleness": {},
    }  # fmt: skip
    sections = [
        (PPOHyperparameters, tree["ppo"]),
        (GenerationHyperparameters, tree["ppo"]["gen"]),
        (AlgorithmConfig, tree["algorithm"]),
        (StalenessConfig, tree["staleness"]),
        (PPOMATHConfig, tree),
    ]
    for name, value in settings.items():
        place = next(values for section, values in sections if name in section.model_fields)
        place[name] = value
    return PPOMATHConfig(**tree)


def _batch(step: Step, index: int) -> RolloutBatch:
    """The rollout batch of a step; the episode of group i is 100 * index + i."""
    episodes = [str(100 * index + i) for i in range(len(step.groups))]
    return pack_trajectories([[_trajectory(answer) for answer in group] for group in step.groups], episodes)


def _trajectory(answer: Answer) -> Trajectory:
    prompt, sampled = answer.prompt_tokens, len(answer.sampled)
    experts = None
    if answer.experts is not None:
        experts = np.full((prompt + sampled, 1, 1), answer.experts, np.int16)
    return Trajectory(
        query_id="q",
        token_ids=np.arange(1, prompt + sampled + 1, dtype=np.int32),
        loss_mask=np.array([False] * prompt + [i not in answer.untrained for i in range(sampled)]),
        rollout_logprobs=np.array([0.0] * prompt + list(answer.sampled), np.float32),
        versions=np.array([PROMPT_VERSION] * prompt + list(answer.versions or [0] * sampled), np.int32),
        reward=answer.reward,
        finish_reason="length" if answer.cut_off else "stop",
        routed_experts=experts,
    )


class _Ranks:
    """In place of the group of trainer ranks."""

    def __init__(self, run: Run, steps: Sequence[Step], first: int, fits: Mapping[str, int]) -> None:
        self._run, self._steps, self._first, self._fits = run, steps, first, fits
        self._batch: Any = None

    @property
    def _index(self) -> int:
        """The current step, as an index of `steps`."""
        return sum(event.startswith("batch") for event in self._run.events) - 1

    name = "trainer"
    memory: ClassVar = {"memory/trainer_gib": 1.5}

    def planner(self, engine: str) -> Planner:
        return Planner(dp=1)

    def open_batch(self, stored: StoredBatch) -> None:
        assert self._batch is None, "the batch of the step before is still held"
        self._batch = RankBatch(stored, (self.name, 0), fetch=lambda refs: refs)

    def add_fields(self, fields: StoredFields) -> None:
        self._batch.add_fields(fields)

    def close_batch(self) -> None:
        self._batch = None

    def infer(self, inference: InferencePass) -> list[Any]:
        method = inference.kind
        assert (inference.engine == "critic") == (method == "values"), "only the critic has values"
        shard, engine = self._batch.whole(replay_routing=inference.replay_routing), inference.engine
        batch = shard.select(range(shard.shape.num_sequences))
        self._raise_if_too_large(f"{method} {engine}", batch, inference.limits.max_tokens_per_mb)
        self._run.events.append(f"{method} {engine}")
        self._run.passes.append(
            Pass(
                step=self._first + self._index, engine=engine, method=method, temperature=inference.temperature,
                fields=frozenset(batch.fields), max_tokens_per_mb=inference.limits.max_tokens_per_mb,
            )
        )  # fmt: skip
        step = self._steps[self._index]
        outputs = {"actor": step.old or step.sampled, "ref": step.reference, "critic": step.values}
        output = step.entropy if method == "entropy" else outputs[engine]
        return [(np.arange(batch.num_sequences), self._spread(output, batch).numpy())]

    def train_step(self, update: UpdatePass) -> dict[str, float]:
        """As MegatronEngine.train_step: the sums of the loss are divided by the sum of the token weights."""
        engine, whole = update.engine, self._batch.whole(replay_routing=False)
        batch = whole.select(range(whole.shape.num_sequences))
        self._raise_if_too_large(f"train {engine}", batch, update.limits.max_tokens_per_mb)
        self._run.events.append(f"train {engine}")
        sequences = self._batch.minibatches[update.minibatch]
        shard = self._batch.minibatch(update.minibatch, engine, replay_routing=update.replay_routing)
        step, chosen = self._steps[self._index], shard.select(range(len(sequences)))
        index = batch.token_index(sequences)
        if engine == "critic":
            leaf = self._spread(step.current_values or step.values, batch)[index].requires_grad_()
            output, entropy = ModelOutput(values=leaf), None
        else:
            leaf = self._spread(step.current or step.old or step.sampled, batch)[index].requires_grad_()
            entropy = self._spread(step.entropy, batch)[index].requires_grad_() if update.with_entropy else None
            output = ModelOutput(logprobs=leaf, entropy=entropy)
        given = {name: value for name, value in chosen.fields.items() if name != ROUTED_EXPERTS}
        count = chosen.num_sequences
        of_token = torch.arange(count).repeat_interleave(chosen.seq_lens)
        loss, metrics = update.loss(
            output, {**given, "loss_mask": chosen.loss_mask}, Sequences(of_token=of_token, count=count)
        )  # type: ignore[arg-type]
        num_trained = float(given[TOKEN_WEIGHTS].sum())
        assert shard.divisors == Divisors(num_trained, num_trained), "these algorithms weigh trained tokens alone"
        (loss / shard.divisors.loss).backward()
        fields = {name: value for name, value in given.items() if name != TOKEN_WEIGHTS}

        def split(values: Tensor | None) -> dict[int, list]:
            flat = torch.zeros_like(leaf) if values is None else values
            parts = torch.split(flat, chosen.seq_lens.tolist())
            masks = torch.split(chosen.loss_mask, chosen.seq_lens.tolist())
            return {i: part[mask].tolist() for i, part, mask in zip(sequences, parts, masks, strict=True)}

        experts = chosen.fields.get(ROUTED_EXPERTS)
        self._run.updates.append(
            Update(
                step=self._first + self._index, engine=engine, sequences=tuple(sequences),
                temperature=update.temperature, with_entropy=update.with_entropy,
                max_tokens_per_mb=update.limits.max_tokens_per_mb, loss=loss.item() / num_trained,
                fields={name: split(value) for name, value in fields.items()}, gradient=split(leaf.grad),
                entropy_gradient=split(None if entropy is None else entropy.grad),
                routed_experts={} if experts is None else split(experts.flatten()),
            )
        )  # fmt: skip
        return {
            "loss": loss.item() / num_trained,
            **{name: float(value) / num_trained for name, value in metrics.items()},
            "grad_norm": 1.5,
            "lr": 0.001 * len(self._run.updates),
        }

    def _spread(self, per_answer: PerAnswer | None, batch: PackedBatch) -> Tensor:
        """[T], 0 outside the loss mask, as the ranks return it."""
        assert per_answer is not None, "this model was given no outputs"
        out = torch.zeros(batch.num_tokens)
        answers = self._steps[self._index].answers
        for i, (answer, values) in enumerate(zip(answers, per_answer, strict=True)):
            begin, end = int(batch.cu_seqlens[i]) + answer.prompt_tokens, int(batch.cu_seqlens[i + 1])
            out[begin:end] = torch.tensor(values)
        return out * batch.loss_mask

    def _raise_if_too_large(self, what: str, batch: PackedBatch, max_tokens_per_mb: int) -> None:
        if max_tokens_per_mb > self._fits.get(what, max_tokens_per_mb):
            longest = int(batch.seq_lens.max())
            raise StepOutOfMemory(f"{what}: out of memory", max_tokens_per_mb, longest, repeatable=True)


class _Rollout:
    """In place of the rollout service's client."""

    def __init__(self, run: Run, steps: Sequence[Step], first: int) -> None:
        self._run, self._steps, self._first = run, steps, first
        self._taken = 0

    def take(self, request: BatchRequest, scoring: Scoring | None) -> None:
        self._run.events.append(f"take {request.version}")
        self._request = request
        self._scoring = None if scoring is None else pickle.dumps(scoring)
        if scoring is not None:
            self._run.events.append(f"advantages {request.version}")

    def wait_taken(self, meanwhile: Callable[[], None]) -> Taken:
        request = self._request
        self._run.events.append(f"batch {request.version}")
        meanwhile()
        index = self._taken
        self._taken += 1
        rollout = _batch(self._steps[index], self._first + index)
        self._batch = StepBatch(rollout, request, put=lambda arrays: arrays)
        scored = None if self._scoring is None else self._batch.score(pickle.loads(self._scoring), {})
        return Taken(
            batch=self._batch.stored, facts=self._batch.facts(), figures=dict(self._steps[index].figures), scored=scored
        )  # fmt: skip

    def write_samples(self) -> None:
        self._run.events.append(f"samples {self._request.version}")

    def score(self, scoring: Scoring, results: Mapping[str, Sequence[Any]]) -> tuple[StoredFields, Scored]:
        self._run.events.append(f"advantages {self._request.version}")
        self.write_samples()
        return self._batch.score(pickle.loads(pickle.dumps(scoring)), results)

    def samples(self) -> list[Sample]:
        step = self._first + self._taken
        sample = Sample(
            step=step, query_id="q", episode="s/q/0", index=0, prompt="1+1=", answer=f"answer of step {step}",
            reward=1.0, finish_reason="stop", prompt_tokens=2, answer_tokens=3, oldest_version=0, newest_version=0,
            notable=("best",),
        )  # fmt: skip
        return [sample]

    def set_version(self, version: int) -> None:
        self._run.events.append(f"set_version {version}")


class _Push:
    """In place of the weight push."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def sync_rejoined(self) -> None:
        self._run.events.append("sync_rejoined")

    def offload_generators(self) -> None:
        self._run.events.append("offload_generators")

    def push(self, version: int) -> PushReport:
        self._run.events.append(f"push {version}")
        return PushReport(
            seconds=4.0, longest_pause_seconds=3.0, gather_seconds=2.0, send_seconds=1.0, num_bytes=5 * 10**9
        )


class _Periodic:
    """In place of the actions after a step, of which none is due."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def after_step(self, step: int, timer: StepTimer) -> None:
        self._run.events.append(f"after_step {step}")

    def after_report(self, step: int, timer: StepTimer) -> None:
        self._run.events.append(f"after_report {step}")

    def whole_step(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Sink:
    """Keeps what the monitor writes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.events.append(f"report {step}")
        self._run.metrics[step] = dict(metrics)

    def close(self) -> None:
        pass


class _Consumed:
    """Keeps which prompts each step trained on."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.consumed[step] = row["prompts"]

    def close(self) -> None:
        pass
