"""The measurement `plan`: memory and time of updates against the planner's prediction.

    python -m tools.bench.gpu.plan > benchmarks/predictions/memory.json    # predictions of all cases, before
    python -m tools.bench gpu --only plan                                  # minutes; the baseline is the prediction

A case is a model with random weights, a layout, a level of recomputation and sequences of given lengths. Each of its
ranks is a process of its own, `python -m tools.bench.gpu.plan NUMBER RANK FOLDER`. Cases of one GPU run side by side,
those of several after them. Cases that need more GPUs or more memory than this host has are left out.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from allocation import ParallelLayout
from core.planning.gpus import GPUS, gpu_of_machine
from core.planning.memory import CONTEXT_BYTES, engine_held, engine_peak
from core.planning.rates import calibration_of, update_seconds
from core.planning.scene import Engine
from core.planning.scene import Scene as PlannedScene
from mcore_adapter.data.batch import ModelOutput
from mcore_adapter.device import get_device
from mcore_adapter.engine import MegatronEngine
from mcore_adapter.parallel import destroy_parallel, initialize_parallel
from mcore_adapter.settings import EngineConfig, EngineModel, Level, OptimizerConfig
from model_specs.families import parse_config
from rollout.inference.gpus import device_names, query_gpus
from tools.bench import Figure, Scene
from tools.bench.gpu.shapes import PLANNED
from tools.bench.gpu.trainer import GB, become_rank, ppo_update, random_batch, seconds_of

_CASE_SECONDS = 150.0
_WARM_UP, _ROUNDS = 1, 3
_SHORTEST = 16  # sequence of a mix, in tokens
_SPREAD = 0.8  # of the logarithm of the lengths of a mix


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of an engine, and the sequences of an update."""

    model: str
    recompute: Level
    length: int
    """Of each sequence; in a mix their median, with a lognormal distribution."""
    tokens: int
    """Of a microbatch."""
    microbatches: int = 1
    """On each data-parallel rank."""
    layout: ParallelLayout = ParallelLayout()
    is_mix: bool = False
    is_critic: bool = False
    offload: bool = False
    fp32_gradients: bool = True

    def __str__(self) -> str:
        sequences = f"mix{self.length}in{self.tokens}" if self.is_mix else f"{self.tokens // self.length}x{self.length}"
        words = [self.model, self.recompute, sequences, str(self.layout)]
        marks = {"critic": self.is_critic, "offload": self.offload, "bf16-gradients": not self.fp32_gradients}
        return " ".join([*words, *(word for word, holds in marks.items() if holds)])

    @property
    def engine(self) -> Engine:
        """The engine as the planner describes it."""
        return Engine(
            name="actor", config=parse_config(PLANNED[self.model]), layout=self.layout, trains=True,
            is_critic=self.is_critic, itemsize=2, gradient_itemsize=4 if self.fp32_gradients else 2,
            recompute=self.recompute, fp8=False, offload=self.offload, tokens=self.tokens, limit_gib=None,
            host_gib=None,
        )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        """The sequences of an update. Those of a mix fill one microbatch for each data-parallel rank."""
        if not self.is_mix:
            return [self.length] * (self.tokens // self.length * self.microbatches * self.layout.dp)
        draw, lengths = random.Random(0), list[int]()
        while (left := self.tokens - sum(lengths)) > 0:
            drawn = max(_SHORTEST, round(self.length * draw.lognormvariate(0.0, _SPREAD)))
            lengths.append(left if left < drawn + _SHORTEST else drawn)
        return lengths * self.layout.dp


CASES = (
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, layout=ParallelLayout(tp=2)),
    Case(model="1.5B", recompute="selective", length=2048, tokens=8192, microbatches=6, layout=ParallelLayout(pp=2)),
    Case(model="1.5B", recompute="linear", length=65536, tokens=65536, layout=ParallelLayout(cp=2)),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, layout=ParallelLayout(dp=2)),
    Case(model="experts", recompute="selective", length=4096, tokens=16384, layout=ParallelLayout(dp=2, ep=2)),
    Case(model="1.5B", recompute="linear", length=16384, tokens=32768),
    Case(model="experts", recompute="selective", length=4096, tokens=16384),
    Case(model="0.5B", recompute="linear", length=65536, tokens=65536),
    Case(model="1.5B", recompute="selective", length=1024, tokens=16384, is_mix=True),
    Case(model="6 layers of 7B", recompute="selective", length=4096, tokens=8192),
    Case(model="1.5B", recompute="none", length=1024, tokens=8192),
    Case(model="0.6B", recompute="none", length=4096, tokens=16384),
    Case(model="4B", recompute="linear", length=16384, tokens=16384),
    Case(model="0.5B", recompute="full", length=65536, tokens=65536),
    Case(model="0.6B", recompute="linear", length=32768, tokens=32768),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, microbatches=2),
    Case(model="0.5B", recompute="offload", length=32768, tokens=32768),
    Case(model="8 layers of 8B", recompute="full", length=8192, tokens=16384),
    Case(model="0.5B", recompute="selective", length=2048, tokens=16384, is_critic=True),
    Case(model="1.5B", recompute="full", length=32768, tokens=65536),
    Case(model="experts", recompute="linear", length=2048, tokens=32768, is_mix=True),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, offload=True),
    Case(model="1.5B", recompute="selective", length=4096, tokens=16384, fp32_gradients=False),
    Case(model="0.5B", recompute="none", length=512, tokens=16384),
    Case(model="0.5B", recompute="selective", length=2048, tokens=32768),
    Case(model="0.5B", recompute="qkv", length=8192, tokens=32768),
    Case(model="1.5B", recompute="linear", length=16384, tokens=32768, layout=ParallelLayout(tp=2)),
    Case(model="4B", recompute="selective", length=8192, tokens=8192, microbatches=4, layout=ParallelLayout(pp=2)),
)
"""The most informative first: time may run out."""
TRIAL = (
    Case(model="tiny", recompute="linear", length=64, tokens=128, layout=ParallelLayout(pp=2), microbatches=3),
    Case(model="tiny", recompute="selective", length=64, tokens=128),
    Case(model="tiny", recompute="full", length=32, tokens=256, is_mix=True),
)
"""In place of CASES without GPUs."""


def plan(scene: Scene) -> Iterator[Figure]:
    """Yield for each case and stage of its pipeline the peak, what is held between updates, and the seconds of an
    update, beside their predictions. A case that fails is logged."""
    gpus, gpu = query_gpus(), gpu_of_machine()
    limit = gpus[0].total_mib * 2**20 if gpus else float("inf")
    cases = CASES if gpus else TRIAL
    for size in sorted({case.layout.world_size for case in cases}):
        fitting = [case for case in cases if case.layout.world_size == size and _need(case) <= limit]
        groups: SimpleQueue[str] = SimpleQueue()
        for first in range(0, len(gpus) - size + 1, size) if gpus else [0]:
            groups.put(device_names([one.index for one in gpus[first : first + size]]))

        def measured(case: Case, groups: SimpleQueue[str] = groups) -> list[dict[str, float]]:
            devices = groups.get()
            try:
                return _run(cases.index(case), case, devices)
            finally:
                groups.put(devices)

        if groups.empty():
            print(f"left out, for GPUs that this host lacks: {', '.join(map(str, fitting))}", flush=True)
            continue
        with ThreadPoolExecutor(groups.qsize()) as pool:
            for case, stages in zip(fitting, pool.map(measured, fitting), strict=True):
                for stage, row in enumerate(stages):
                    yield from _figures(case, stage, row, None if gpu is None else gpu.name)


def _need(case: Case) -> float:
    stages = range(case.layout.pp)
    return max(engine_peak(case.engine, stage, longest=max(case.lengths)) for stage in stages) + CONTEXT_BYTES


def _figures(case: Case, stage: int, row: Mapping[str, float], gpu: str | None) -> Iterator[Figure]:
    guess, name = predicted(case, stage), f"plan.{case}" + f", stage {stage}" * (case.layout.pp > 1)
    yield Figure(f"{name}, peak", row["peak"] / GB, "GB", guess["peak"] / GB, "within 2 %")
    yield Figure(f"{name}, held", row["held"] / GB, "GB", guess["held"] / GB)
    yield Figure(f"{name}, reserved", row["reserved"] / GB, "GB")
    yield Figure(f"{name}, host", row["host"] / GB, "GB")
    yield Figure(f"{name}, update", row["seconds"], "s", guess.get(f"seconds on {gpu}"), "within 8 %")


def predicted(case: Case, stage: int) -> dict[str, float]:
    """Return the bytes at the peak and between two updates, and the seconds of an update on each GPU that has a
    calibration."""
    lengths = case.lengths
    found = {
        "peak": engine_peak(case.engine, stage, longest=max(lengths)),
        "held": engine_held(case.engine, stage, longest=max(lengths)),
    }
    for name, gpu in GPUS.items():
        if (calibration := calibration_of(name)) is None:
            continue
        scene = PlannedScene(
            gpu=gpu, on_gpu=True, engines=(case.engine,), servers=None, shares_gpus=False, n_nodes=1,
            n_gpus_per_node=8, bucket_bytes=0, sequences=len(lengths), prompts=len(lengths), group_size=1,
            minibatches=1, prompt_tokens=max(lengths), answer_tokens=0, max_staleness=0, writes_checkpoints=False,
        )  # fmt: skip
        length = sum(n * n for n in lengths) / sum(lengths)  # attention grows with the square
        found[f"seconds on {name}"] = update_seconds(
            scene, case.engine, calibration, tokens=sum(lengths), length=length, level=case.recompute
        )
    return found


def _run(number: int, case: Case, devices: str) -> list[dict[str, float]]:
    """Return the largest values of the ranks of each pipeline stage; nothing if a rank failed or took too long."""
    world = case.layout.world_size
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PLANNED[case.model]))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.bench.gpu.plan", str(number), str(rank), folder],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, device in zip(range(world), devices.split(",") if devices else [""] * world, strict=True)
        ]
        try:
            rows = [json.loads(rank.communicate(timeout=_CASE_SECONDS)[0].splitlines()[-1]) for rank in ranks]
        except (subprocess.TimeoutExpired, IndexError, ValueError) as error:  # a rank that failed printed no row
            print(f"{case} failed: {error}", flush=True)
            return []
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    each = world // case.layout.pp
    stages = [rows[first : first + each] for first in range(0, world, each)]
    return [{key: max(row[key] for row in stage) for key in stage[0]} for stage in stages]


def measure(case: Case, rank: int, folder: str) -> dict[str, float]:
    """Run updates on a rank, whose GPU is the first that this process sees. Return bytes at the peak of the last one,
    before it, reserved and of this process in host memory, and the seconds of an update."""
    os.environ["LOCAL_RANK"] = "0"
    world = case.layout.world_size
    become_rank(num_ranks=world)
    device = get_device("auto")
    with device.activate():
        parallel = initialize_parallel(
            case.layout, rank=rank, world_size=world, init_method=f"file://{folder}/store", device=device, seed=1
        )
        adam = OptimizerConfig(lr=1e-6, warmup_steps_proportion=0.0, offload=case.offload)
        config = EngineConfig(
            init_from_scratch=True, bf16=True, optimizer=adam, grad_reduce_in_fp32=case.fp32_gradients
        )
        config = config.model_copy(update={"gradient_checkpointing": case.recompute})  # also those of "auto" alone
        model = EngineModel(config=config, path=folder, is_critic=case.is_critic, total_updates=100)
        engine = MegatronEngine(model, parallel=parallel, device=device)
        batch = random_batch(parse_config(PLANNED[case.model]).vocab_size, case.lengths)

        def step() -> object:
            if case.is_critic:
                return engine.train_step(batch, _of_values, max_tokens_per_mb=case.tokens)
            return ppo_update(engine, batch, case.tokens)

        seconds = [seconds_of(device, step) for _ in range(_WARM_UP)]  # kernels, moments
        for _ in range(_ROUNDS):
            device.forget_peak()
            held = device.memory_stats()["allocated_gib"] * 2**30
            seconds.append(seconds_of(device, step))
        row = {
            "peak": device.memory_stats()["peak_gib"] * 2**30,
            "held": held,
            "reserved": float(torch.accelerator.max_memory_reserved()) if query_gpus() else 0.0,
            "seconds": statistics.median(seconds[_WARM_UP:]),
            "host": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        destroy_parallel()
    return row


def _of_values(output: ModelOutput, fields: Mapping[str, Tensor], _: object) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.values is not None, "a critic"
    return (output.values.square() * fields["token_weights"]).sum(), {}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure((CASES if query_gpus() else TRIAL)[int(sys.argv[1])], int(sys.argv[2]), sys.argv[3])))
    else:
        print(
            json.dumps(
                {str(case): [predicted(case, stage) for stage in range(case.layout.pp)] for case in CASES}, indent=1
            )
        )
