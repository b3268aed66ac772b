"""The measurements `plan`, `plan_later`, `plan_runs` and `plan_search`: updates and whole runs against the planner's
prediction.

    python -m tools.bench.gpu.plan plan_later > benchmarks/predictions/later.json    # before; plan, plan_runs, waves
    python -m tools.bench.gpu.plan waves h200.json > waves.json    # by rates of slipstream plan --calibrate
    python -m tools.bench gpu --only plan_later                # minutes; the baseline is the prediction

A case is a model with random weights, a layout, a level of recomputation and sequences of given lengths. Each of its
ranks is a process of its own, `python -m tools.bench.gpu.plan CASE RANK FOLDER`. Cases of one GPU run side by side,
those of several after them. Cases that need more GPUs or more memory than this host has are left out.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from allocation import GPU, ParallelLayout
from core.checks.rules import load_config
from core.planning.memory import engine_held, engine_peak
from core.planning.rates import Calibration, Lengths, calibration_of, read_calibration, update_seconds
from core.planning.scene import GPUS, Engine, Gpu, gpu_of_machine, scene_of
from core.planning.scene import Scene as PlannedScene
from core.planning.search import Loader, proposals
from core.planning.server_memory import CONTEXT_BYTES
from core.planning.simulation import forecast, mean_of, simulate, world_of
from mcore_adapter.data.batch import ModelOutput
from mcore_adapter.device import get_device
from mcore_adapter.engine import MegatronEngine
from mcore_adapter.parallel import destroy_parallel, initialize_parallel
from mcore_adapter.settings import EngineConfig, EngineModel, Level, OptimizerConfig
from model_specs.families import parse_config
from rollout.data.prompts import shuffled
from rollout.inference.gpus import device_names, query_gpus
from rollout.trajectories import sample_seed
from tools.bench import MODELS, PLANNED, Figure, Scene
from tools.bench.cpu import metrics_of, run_ppo
from tools.bench.gpu.runs import async_config
from tools.bench.gpu.servers import predicted_waves
from tools.bench.gpu.trainer import GB, become_rank, ppo_update, random_batch, seconds_of
from tools.bench.workload import NUM_ADDITIONS, SIGMA, length_of

RATES = {name: found for name in GPUS if (found := calibration_of(name)) is not None}
"""Those that ship with the project."""
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
LATER = (
    Case(model="1.7B", recompute="selective", length=4096, tokens=16384),
    Case(model="3B", recompute="linear", length=16384, tokens=16384),
    Case(model="1.2B", recompute="linear", length=8192, tokens=32768),
    Case(model="3 layers of 32B", recompute="selective", length=2048, tokens=8192),
    Case(model="4 layers with experts", recompute="linear", length=8192, tokens=16384),
    Case(model="1.7B", recompute="full", length=65536, tokens=65536),
    Case(model="1.2B", recompute="none", length=1024, tokens=8192, microbatches=4),
    Case(model="3B", recompute="selective", length=512, tokens=8192, is_mix=True),
    Case(model="1.7B", recompute="qkv", length=2048, tokens=16384, is_critic=True),
    Case(model="1.7B", recompute="linear", length=8192, tokens=32768, layout=ParallelLayout(tp=2)),
    Case(model="3B", recompute="linear", length=4096, tokens=8192, microbatches=8, layout=ParallelLayout(pp=2)),
)
"""Other models and sizes, on which no rate was fitted."""
TRIAL = (
    Case(model="tiny", recompute="linear", length=64, tokens=128, layout=ParallelLayout(pp=2), microbatches=3),
    Case(model="tiny", recompute="selective", length=64, tokens=128),
    Case(model="tiny", recompute="full", length=32, tokens=256, is_mix=True),
)
"""In place of CASES without GPUs."""


def plan(scene: Scene) -> Iterator[Figure]:
    """Yield for each case and stage of its pipeline the peak, what is held between updates, and the seconds of an
    update, beside their predictions. A case that fails is logged."""
    return _updates(CASES)


def plan_later(scene: Scene) -> Iterator[Figure]:
    """Yield the same for other models and sizes."""
    return _updates(LATER)


def _updates(cases: Sequence[Case]) -> Iterator[Figure]:
    gpus, gpu = query_gpus(), gpu_of_machine()
    limit = gpus[0].total_mib * 2**20 if gpus else float("inf")
    cases = cases if gpus else TRIAL
    for size in sorted({case.layout.world_size for case in cases}):
        fitting = [case for case in cases if case.layout.world_size == size and _need(case) <= limit]
        groups: SimpleQueue[str] = SimpleQueue()
        for first in range(0, len(gpus) - size + 1, size) if gpus else [0]:
            groups.put(device_names([one.index for one in gpus[first : first + size]]))

        def measured(case: Case, groups: SimpleQueue[str] = groups) -> list[dict[str, float]]:
            devices = groups.get()
            try:
                return _run(case, devices)
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


def predicted(case: Case, stage: int, rates: Mapping[str, Calibration] = RATES) -> dict[str, float]:
    """Return the bytes at the peak and between two updates, and the seconds of an update on each GPU of `rates`."""
    lengths = case.lengths
    found = {
        "peak": engine_peak(case.engine, stage, longest=max(lengths)),
        "held": engine_held(case.engine, stage, longest=max(lengths)),
    }
    for name, calibration in rates.items():
        scene = PlannedScene(
            gpu=GPUS[name], on_gpu=True, engines=(case.engine,), servers=None, shares_gpus=False, n_nodes=1,
            n_gpus_per_node=8, bucket_bytes=0, sequences=len(lengths), prompts=len(lengths), group_size=1,
            minibatches=1, prompt_tokens=max(lengths), answer_tokens=0, max_staleness=0, writes_checkpoints=False,
        )  # fmt: skip
        length = sum(n * n for n in lengths) / sum(lengths)  # attention grows with the square
        found[f"seconds on {name}"] = update_seconds(
            scene, case.engine, calibration, tokens=sum(lengths), length=length, level=case.recompute
        )
    return found


def _run(case: Case, devices: str) -> list[dict[str, float]]:
    """Return the largest values of the ranks of each pipeline stage; nothing if a rank failed or took too long."""
    world = case.layout.world_size
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PLANNED[case.model]))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.bench.gpu.plan", str(case), str(rank), folder],
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run with answers of lognormal lengths. Trainer and server share a GPU, or have one each."""

    model: str
    apart: bool
    max_staleness: int
    max_running: int
    prompts: int
    """Of a step, with eight answers each."""
    most_tokens: int
    """Of an answer."""
    warm_up: int
    """Steps that do not count."""
    steps: int
    keys: tuple[str, ...] = ()
    """Overrides that a search has proposed."""

    def __str__(self) -> str:
        if self.keys:
            return f"{self.model}, {' '.join(key.split('.')[-1] for key in self.keys)}"
        where = "1 + 1 GPUs" if self.apart else "1 GPU in turns"
        if self.max_staleness:
            where += f", max_staleness={self.max_staleness}"
        return f"{self.model}, {where}, {self.max_running} requests, {self.prompts} prompts"

    def config(self, scene: Scene) -> dict[str, object]:
        """Return the keys of the run."""
        return {
            **async_config(scene, self.max_staleness if self.apart else 0, num_gpus=1 + self.apart),
            "staleness.max_staleness": self.max_staleness,
            "dataset.train_bs_n_seqs": self.prompts,
            "generator.max_running": self.max_running,
            "ppo.gen.max_new_tokens": self.most_tokens,
            "exp_ctrl.benchmark_steps": self.warm_up + self.steps,
            **dict(key.split("=", 1) for key in self.keys),
        }

    def planned(self, scene: Scene, gpu: Gpu) -> PlannedScene:
        """Return the run as the planner describes it."""
        return scene_of(self.loader(scene)([]).config, gpu)

    def loader(self, scene: Scene) -> Loader:
        """Return what loads the configuration with more overrides."""
        path = scene.folder / "empty.yaml"
        path.write_text("{}\n")
        config = {key: value for key, value in self.config(scene).items() if "sglang" not in key}  # a server on the CPU
        words = [f"{key}={value}" for key, value in config.items()]
        words += ["trial_name=planned", f"launch.trainer_device={GPU}"]
        return lambda overrides: load_config("ppo-math", str(path), [*words, *overrides])

    @property
    def answers(self) -> Lengths:
        drawn = [length_of(seed, self.most_tokens) for seed in range(_DRAWN)]
        return Lengths(mean=statistics.fmean(drawn), longest=self.most_tokens, spread=SIGMA)

    def predicted(self, scene: Scene, gpu: Gpu, calibration: Calibration) -> dict[str, float]:
        """Return trained tokens of answers per second by the plan, and those of the steps that are measured if their
        answers have the lengths that the seed of the run gives; by the plan the shares of the time in which the trainer
        computes and of the slots that servers use, the mean staleness, and the shares of samples by age."""
        config = self.loader(scene)([]).config
        planned, answers = scene_of(config, gpu), self.answers
        time, world = forecast(planned, calibration, answers), world_of(planned, calibration, answers)
        assert time is not None and world is not None, "both sides are on GPUs"
        order = shuffled(NUM_ADDITIONS, seed=config.seed, epoch=0)

        def drawn(number: int) -> list[float]:
            seeds = (sample_seed(config.seed, 0, int(order[number]), sample) for sample in range(planned.group_size))
            return [float(length_of(one, self.most_tokens)) for one in seeds]

        steps = simulate(world, self.warm_up + self.steps, drawn=drawn).steps[self.warm_up :]
        trained = sum(step.tokens - planned.sequences * world.prompt_tokens for step in steps)
        return {
            "tokens/s": planned.sequences * answers.mean / time.step,
            "tokens/s of its lengths": trained / (steps[-1].end - steps[0].begin),
            "trainer computes, %": 100 * time.trainer_share,
            "slots used, %": 100 * time.slots_share,
            "mean staleness": mean_of(time.staleness),
            **{_AGE.format(age): 100 * share for age, share in _shares(time.staleness).items()},
        }


RUNS = (
    Run(model="1.5B", apart=False, max_staleness=2, max_running=256, prompts=60, most_tokens=4096, warm_up=4, steps=5),
    Run(model="1.5B", apart=False, max_staleness=0, max_running=256, prompts=60, most_tokens=4096, warm_up=2, steps=2),
    Run(model="0.6B", apart=False, max_staleness=0, max_running=320, prompts=80, most_tokens=4096, warm_up=2, steps=2),
    Run(model="3B", apart=True, max_staleness=2, max_running=192, prompts=40, most_tokens=4096, warm_up=4, steps=5),
    Run(model="0.6B", apart=True, max_staleness=1, max_running=384, prompts=60, most_tokens=4096, warm_up=4, steps=6),
)
TRIAL_RUNS = (
    Run(model="tiny", apart=True, max_staleness=2, max_running=16, prompts=4, most_tokens=64, warm_up=2, steps=2),
)
"""In place of RUNS without GPUs."""
_DRAWN = 20_000
_AGE = "samples of age {}, %"


def _shares(counts: Mapping[Any, float]) -> dict[Any, float]:
    return {value: count / sum(counts.values()) for value, count in counts.items()}


def plan_runs(scene: Scene) -> Iterator[Figure]:
    """Yield for whole runs of a model tokens/s, what the trainer computes of the time and the staleness, beside their
    predictions. Runs of one GPU go side by side; one that fails is logged."""
    gpus, gpu = query_gpus(), gpu_of_machine()
    runs = [run for run in RUNS if run.model == scene.shape and run.apart < len(gpus)] if gpus else TRIAL_RUNS
    for apart in (False, True):
        kind = [run for run in runs if run.apart == apart]
        devices: SimpleQueue[str] = SimpleQueue()
        for name in [device_names([one.index for one in gpus])] if apart else [device_names([o.index]) for o in gpus]:
            devices.put(name)

        def measured(run: Run, devices: SimpleQueue[str] = devices) -> list[dict[str, float]]:
            device = devices.get()
            try:
                run_ppo(scene.folder, _trial(run), run.config(_of(scene, run)), devices=device)
                return metrics_of(scene.folder, _trial(run))
            except RuntimeError as error:
                print(f"{run} failed: {error}", flush=True)
                return []
            finally:
                devices.put(device)

        with ThreadPoolExecutor(max(1, devices.qsize())) as pool:
            for run, rows in zip(kind, pool.map(measured, kind), strict=True):
                guess = {} if gpu is None else run.predicted(_of(scene, run), gpu, RATES[gpu.name])
                yield from _run_figures(run, [row for row in rows if "task_reward" in row][run.warm_up :], guess)


def plan_search(scene: Scene) -> Iterator[Figure]:
    """Yield tokens/s of what a search proposes for the GPUs of this host, beside the predictions; then how far the
    first proposal is from the fastest of them. One that fails is logged and has no speed."""
    gpu, by_hand = gpu_of_machine() or GPUS["H200"], replace(BY_HAND, model=scene.shape)
    runs = alternatives(
        by_hand if query_gpus() else TRIAL_RUNS[0], scene, gpu, RATES[gpu.name], max(2, len(query_gpus()))
    )
    rates = []
    for number, run in enumerate(runs):
        try:
            run_ppo(scene.folder, f"search-{number}", run.config(_of(scene, run)))
        except RuntimeError as error:
            print(f"{run} failed: {error}", flush=True)
            rates.append(0.0)
            continue
        rows = [row for row in metrics_of(scene.folder, f"search-{number}") if "task_reward" in row][run.warm_up :]
        figures = list(_run_figures(run, rows, run.predicted(_of(scene, run), gpu, RATES[gpu.name])))
        yield from figures
        rates.append(figures[0].value if figures else 0.0)
    if any(rates):
        yield Figure(f"search.{scene.shape}, of the fastest", 100 * rates[0] / max(rates), "%", target=">= 97 %")


BY_HAND = Run(
    model="1.5B", apart=True, max_staleness=4, max_running=384, prompts=60, most_tokens=4096, warm_up=7, steps=8
)


def alternatives(by_hand: Run, scene: Scene, gpu: Gpu, calibration: Calibration, num_gpus: int) -> list[Run]:
    """Return a run in the layouts that a search proposes for so many GPUs, the best first, then the best one with fewer
    and with more requests at once. Those in turns without staleness need fewer steps before they count."""
    of = _of(scene, by_hand)
    load = by_hand.loader(of)
    found = proposals(load, by_hand.planned(of, gpu), calibration, by_hand.answers, num_gpus=num_gpus).best
    at_once = replace(by_hand, warm_up=2, steps=3)
    searched = [replace(by_hand if one.scene.max_staleness else at_once, keys=one.overrides) for one in found]
    servers = found[0].scene.servers
    assert servers is not None, "a search has generators"
    kept = tuple(key for key in found[0].overrides if not key.startswith(_REQUESTS))
    others = (servers.max_running * 2 // 3, servers.max_running * 4 // 3)
    return searched + [replace(searched[0], keys=(*kept, f"{_REQUESTS}={number}")) for number in others]


_REQUESTS = "generator.max_running"


def _trial(run: Run) -> str:
    return f"{run.model}-{'apart' if run.apart else 'turns'}-{run.max_staleness}"


def _of(scene: Scene, run: Run) -> Scene:
    return replace(scene, shape=run.model, raw=MODELS[run.model])


def _run_figures(run: Run, rows: Sequence[Mapping[str, Any]], guess: Mapping[str, float]) -> Iterator[Figure]:
    if not rows:
        return
    seconds = sum(row["time/step"] for row in rows)
    rate = sum(row["n_valid_tokens"] for row in rows) / seconds
    computes = 100 * sum(row["time/update"] + row.get("time/old_log-probs", 0.0) for row in rows) / seconds
    slots = 100 * statistics.fmean(row["rollout/generators_busy"] for row in rows)
    staleness = statistics.fmean(row["staleness/mean"] for row in rows)
    ages = _shares(sum((Counter(row["staleness/ages"]) for row in rows), Counter[str]()))
    yield Figure(f"run.{run}, tokens", rate, "tokens/s", guess.get("tokens/s"), "within 10 %")
    its_lengths = guess.get("tokens/s of its lengths")
    yield Figure(f"run.{run}, tokens, lengths known", rate, "tokens/s", its_lengths, "within 10 %")
    yield Figure(f"run.{run}, trainer computes", computes, "%", guess.get("trainer computes, %"), "within 10 %")
    if run.apart:  # in turns the metric counts requests that are held while the trainer computes
        yield Figure(f"run.{run}, slots used", slots, "%", guess.get("slots used, %"), "within 10 %")
    yield Figure(f"run.{run}, staleness", staleness, "steps", guess.get("mean staleness"))
    as_planned = sum(min(100 * share, guess.get(_AGE.format(age), 0.0)) for age, share in ages.items())
    yield Figure(f"run.{run}, samples of the planned age", as_planned, "%", target=">= 90 %")
    for age, share in sorted(ages.items()):
        yield Figure(f"run.{run}, samples of age {age}", 100 * share, "%", guess.get(_AGE.format(age), 0.0))


_SEARCHED = (("1.5B", 2), ("0.6B", 2), ("1.7B", 2), ("3B", 2), ("1.5B", 4))
_WAVES_OF = ("1.5B", "7B", "0.6B", "3B", "4B", "1.7B")
"""Models whose servers get waves of requests."""


def _predictions(name: str, rates: Mapping[str, Calibration]) -> dict[str, object]:
    """Return what is predicted of a measurement, by case."""
    if name == "waves":
        return {shape: {gpu: predicted_waves(shape, GPUS[gpu], rates[gpu]) for gpu in rates} for shape in _WAVES_OF}
    if name in ("plan", "plan_later"):
        cases = LATER if name == "plan_later" else CASES
        return {str(case): [predicted(case, stage, rates) for stage in range(case.layout.pp)] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(folder=Path(folder), trl_python=None, sglang_python=None, shape="", raw={})
        if name == "plan_runs":
            return {str(run): {on: run.predicted(_of(scene, run), GPUS[on], rates[on]) for on in rates} for run in RUNS}
        return {
            on: {
                str(run): run.predicted(_of(scene, run), GPUS[on], rates[on])
                for model, num_gpus in _SEARCHED
                for run in alternatives(replace(BY_HAND, model=model), scene, GPUS[on], rates[on], num_gpus)
            }
            for on in rates
        }


if __name__ == "__main__":
    if len(sys.argv) < 4:
        read = [read_calibration(Path(file)) for file in sys.argv[2:]]
        print(json.dumps(_predictions(sys.argv[1], {one.gpu: one for one in read} or RATES), indent=1))
    else:
        (chosen,) = (case for case in (*CASES, *LATER, *TRIAL) if str(case) == sys.argv[1])
        print(json.dumps(measure(chosen, int(sys.argv[2]), sys.argv[3])))
