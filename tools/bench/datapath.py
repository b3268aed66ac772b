"""The way of a batch from the rollout process to the trainer ranks, with answers made up and engines that compute
nothing.

The processes are those of a run: driver, rollout process, one process a rank, Ray's object store. Memory is the peak of
resident memory, which includes the pages of the store that a process has read or written.
"""

import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from rich.console import Console

from allocation import Device, parse
from core.algorithms.policy_gradient import PolicyGradient
from core.config.algorithm import AlgorithmSettings
from core.config.runtime import DeadlineConfig
from core.data.rollout_batch import RolloutBatch, pack_trajectories
from core.data.stored_batch import Arrays, Ref
from core.explore.data import DataFacts
from core.launch.cluster import Cluster
from core.launch.rollout_client import BatchActor, RolloutClient
from core.launch.trainer_group import TrainerGroup
from core.launch.trainer_rank import TrainerRank
from core.monitoring.metrics import peak_gib
from core.monitoring.monitor import Monitor, StepTimer
from core.monitoring.screen import Screen
from core.train.recover import MemoryLimits, RunState
from core.trainer import EngineRef, PPOTrainer
from core.weight_sync.push import PushReport
from mcore_adapter.data.planner import BatchShard, Planner
from mcore_adapter.device import get_device
from mcore_adapter.engine import Shard
from mcore_adapter.settings import EngineConfig, EngineModel
from rollout.experience import Schedule
from rollout.types import PROMPT_VERSION, Trajectory
from tools.bench import Figure, Scene

RANKS, MINIBATCHES, STEPS, PROMPT_TOKENS = 8, 4, 3, 256
USAGE = ".usage.jsonl"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a step's batch. `passes`: answers have half to all of the tokens, and log-probabilities are computed
    before the update; passes over the whole batch and over minibatches then give ranks different sequences."""

    prompts: int = 512
    answers: int = 16
    tokens: int = 8192
    passes: bool = False


def append(path: str, **row: float) -> None:
    with open(path + USAGE, "a") as f:
        f.write(json.dumps(row) + "\n")


class MockRollout(BatchActor):
    """The rollout process, with answers of the right size that are made at once."""

    def __init__(self, name: str, log_file: str, size: Size) -> None:
        super().__init__(name, log_file, size)  # type: ignore[arg-type]
        self._log_file, self._size, self._rng = log_file, size, np.random.default_rng(0)

    async def start(self) -> DataFacts:
        return DataFacts(num_prompts=0, mean_prompt_tokens=0.0, first_prompt="", num_eval_prompts=0, left_out=())

    async def lease(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        groups = [[self._trajectory(version) for _ in range(self._size.answers)] for _ in range(self._size.prompts)]
        return pack_trajectories(groups, [str(i) for i in range(len(groups))]), {}

    async def write_samples(self) -> None: ...

    async def set_version(self, version: int) -> None:
        append(self._log_file, gib=peak_gib())

    def _trajectory(self, version: int) -> Trajectory:
        full = self._size.tokens
        total = int(self._rng.integers(full // 2, full + 1)) if self._size.passes else full
        mask = np.arange(total) >= PROMPT_TOKENS
        return Trajectory(
            query_id="",
            token_ids=self._rng.integers(0, 32_000, total, np.int32),
            loss_mask=mask,
            rollout_logprobs=-self._rng.random(total, np.float32),
            versions=np.where(mask, version, PROMPT_VERSION),
            reward=float(self._rng.integers(2)),
            finish_reason="stop",
        )


class NullEngine:
    """Reads its microbatches and computes nothing."""

    def __init__(self, planner: Planner, dp_rank: int) -> None:
        self.planner, self._dp_rank = planner, dp_rank
        self.trained_bytes = 0

    def train_step(
        self, shard: BatchShard, loss_fn: object, *, max_tokens_per_mb: int, **_: object
    ) -> dict[str, float]:
        for sequences in self.planner.plan(shard.shape, max_tokens_per_mb)[self._dp_rank]:
            own = shard.select(sequences)
            fields = [value for name, value in own.fields.items() if name != "token_weights"]
            per_token = 4 + own.loss_mask.element_size() + sum(value.element_size() for value in fields)
            self.trained_bytes += own.num_tokens * per_token
        return {"loss": 0.0}

    def logprobs(self, shard: BatchShard, *, max_tokens_per_mb: int, **_: object) -> Shard:
        plan = self.planner.plan(shard.shape, max_tokens_per_mb, shard.owners)[self._dp_rank]
        lens = [shard.select(sequences).num_tokens for sequences in plan]
        return Shard(sequences=[i for part in plan for i in part], values=torch.zeros(sum(lens)))


class NullRank(TrainerRank):
    """A rank without a process group, which counts what it fetches."""

    def __init__(self, name: str, log_file: str, rank: int, world: int, device: Device, threads: int, seed: int):
        super().__init__(name, log_file, rank, world, device, threads, seed)
        self._log_file, self._fetched_bytes = log_file, 0

    def start(self, *args: object) -> None:
        self._parallel = SimpleNamespace(dp_rank=self._rank)  # type: ignore[assignment]
        self._device = get_device(self._kind)

    def build(self, engine: str, loaded: EngineModel) -> Planner:
        self._engines[engine] = NullEngine(Planner(dp=self._world), self._rank)  # type: ignore[assignment]
        return self._engines[engine].planner

    def _fetch(self, refs: list[Ref]) -> list[Arrays]:
        fetched = super()._fetch(refs)
        self._fetched_bytes += sum(value.nbytes for arrays in fetched for value in arrays.values())
        return fetched

    def close_batch(self) -> None:
        super().close_batch()
        engine = cast("NullEngine", self._engines["actor"])
        append(self._log_file, gib=peak_gib(), fetched=self._fetched_bytes, trained=engine.trained_bytes)
        self._fetched_bytes = engine.trained_bytes = 0


class NullGroup(TrainerGroup):
    rank_class = NullRank


class NullPush:
    """No weights travel."""

    def sync_rejoined(self) -> None: ...

    def offload_generators(self) -> None: ...

    def push(self, version: int) -> PushReport:
        return PushReport(seconds=0.0, longest_pause_seconds=0.0, gather_seconds=0.0, send_seconds=0.0, num_bytes=0)


class Clock:
    """Processor time of the main thread, which runs the loop, and time at the end of each step."""

    def __init__(self) -> None:
        self.marks = [(time.thread_time(), time.perf_counter())]

    def whole_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_step(self, step: int, timer: StepTimer) -> None: ...

    def after_report(self, step: int, timer: StepTimer) -> None:
        self.marks.append((time.thread_time(), time.perf_counter()))


def run(size: Size, folder: Path) -> dict[str, float]:
    """Drive some steps from this process; return the figures by name."""
    torch.set_num_threads(1)
    allocation = parse(f"mock.d1m1p1+d{RANKS}m1p1", n_nodes=1, n_gpus_per_node=RANKS + 1)
    deadlines = DeadlineConfig(call_seconds=3600.0, batch_seconds=3600.0)
    clock = Clock()
    with Cluster(
        joined=None,
        envs={},
        num_actors=RANKS + 2,
        startup_timeout_seconds=600.0,
        deadlines=deadlines,
        log_folder=folder,
    ) as cluster:
        cluster.reserve(allocation)
        rollout = RolloutClient(cluster, MockRollout, size)
        group = NullGroup(cluster, allocation.trainer, name="trainer", port=0, threads=1, seed=1)
        group.wait_started()
        rollout.wait_started()
        group.build("actor", EngineModel(config=EngineConfig(), path=""))
        engine = EngineRef(
            group=group,
            name="actor",
            train_role="actor_train",
            inference_role="actor_inf",
            train_tokens_per_mb=2 * size.tokens,
            inference_tokens_per_mb=2 * size.tokens,
        )
        schedule = Schedule(num_prompts=STEPS, batch_size=1, total_epochs=1)
        screen = Screen(Console(file=io.StringIO()), compact=False)
        with Monitor(screen=screen, sinks=[], consumed=None, schedule=schedule, done_steps=0, elapsed=0.0) as monitor:
            trainer = PPOTrainer(
                actor=engine,
                critic=None,
                reference=None,
                rollout=rollout,
                weights=NullPush(),
                memory=MemoryLimits(),
                algorithm=PolicyGradient(settings(decoupled=size.passes)),
                num_minibatches=MINIBATCHES,
                temperature=1.0,
                schedule=schedule,
                monitor=monitor,
                timer=StepTimer(lambda phase: None),
                mean_batch_tokens=0.0,
            )
            clock.marks = [(time.thread_time(), time.perf_counter())]
            start = RunState(step=0, version=0, elapsed_seconds=0.0, extra={})
            trainer.run(start, clock)  # type: ignore[arg-type]
    rows = {path.name: [json.loads(line) for line in path.open()] for path in folder.glob(f"*{USAGE}")}
    ranks = [row for name, of in rows.items() if name.startswith("trainer") for row in of]
    rollouts = [row for name, of in rows.items() if name.startswith("rollout") for row in of]
    spent = np.diff(np.array(clock.marks), axis=0)
    return {
        "bytes_copied_per_byte_trained": max(row["fetched"] / row["trained"] for row in ranks),
        "driver_seconds_per_step": float(np.median(spent[:, 0])),
        "seconds_per_step": float(np.median(spent[:, 1])),
        "peak_memory_driver": peak_gib(),
        "peak_memory_rollout": max(row["gib"] for row in rollouts),
        "peak_memory_rank": max(row["gib"] for row in ranks),
    }


def settings(*, decoupled: bool) -> AlgorithmSettings:
    return AlgorithmSettings(
        ppo_n_minibatches=MINIBATCHES,
        kl_in="loss",
        advantage="group",
        adv_norm=True,
        disable_value=True,
        correction="decoupled" if decoupled else "bypass",
    )


def measure(size: Size) -> dict[str, float]:
    """Return what run() returns, measured in a process of its own, whose memory is then that of a driver."""
    command = [sys.executable, "-m", "tools.bench.datapath", json.dumps(asdict(size))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


TARGETS = {"bytes_copied_per_byte_trained": "<= 1.1", "driver_seconds_per_step": "<= 0.1"}


def datapath(scene: Scene) -> Iterator[Figure]:
    """Measure a step of 512 prompts with 16 answers of 8192 tokens each, on 8 ranks of this host."""
    for name, value in measure(Size()).items():
        unit = "GiB" if "memory" in name else "s" if "seconds" in name else "x"
        yield Figure(f"datapath.{name}", value, unit, target=TARGETS.get(name, ""))
    name = "bytes_copied_per_byte_trained"
    yield Figure(f"datapath.{name}_with_old_logprobs", measure(Size(passes=True))[name], "x", target=TARGETS[name])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Size(**json.loads(sys.argv[1])), Path(folder))))
