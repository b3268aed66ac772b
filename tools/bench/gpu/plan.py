"""The measurement `plan` of `python -m tools.bench gpu`: peak memory of updates against the planner's prediction.

    python -m tools.bench.gpu.plan --predict benchmarks/predictions/memory.json    # before the measurement, no torch
    python -m tools.bench.gpu.plan --against benchmarks/predictions/memory.json    # on a host with GPUs: minutes

Every case is a model with random weights, a layout, a level of recomputation and sequences of given lengths. Cases of
more GPUs than the host has are left out. Prints a row for each stage of each case: peak and what is held between
updates in GB, predicted and measured, the error of the peak, what the allocator reserves, and trained tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from allocation import ParallelLayout
from core.planning.memory import engine_peak, states_of
from core.planning.scene import Engine
from mcore_adapter.settings import EngineConfig, EngineModel, Level, OptimizerConfig
from model_specs.hf_config import parse_config
from tools.bench import Figure
from tools.bench.gpu.shapes import PLANNED

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of an engine, and the sequences of an update."""

    model: str
    recompute: Level
    length: int
    tokens: int
    """Of a microbatch."""
    microbatches: int = 1
    """On each data-parallel rank."""
    layout: ParallelLayout = ParallelLayout()
    is_critic: bool = False
    offload: bool = False
    fp32_gradients: bool = True

    def __str__(self) -> str:
        words = [self.model, self.recompute, f"{self.tokens // self.length}x{self.length}", str(self.layout)]
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


CASES = (
    Case(model="0.5B", recompute="none", length=512, tokens=16384),
    Case(model="0.5B", recompute="selective", length=2048, tokens=32768),
    Case(model="0.5B", recompute="qkv", length=8192, tokens=32768),
    Case(model="0.5B", recompute="linear", length=65536, tokens=65536),
    Case(model="0.5B", recompute="full", length=65536, tokens=65536),
    Case(model="0.5B", recompute="offload", length=32768, tokens=32768),
    Case(model="0.5B", recompute="selective", length=2048, tokens=16384, is_critic=True),
    Case(model="0.6B", recompute="none", length=4096, tokens=16384),
    Case(model="0.6B", recompute="linear", length=32768, tokens=32768),
    Case(model="1.5B", recompute="none", length=1024, tokens=8192),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, microbatches=2),
    Case(model="1.5B", recompute="linear", length=16384, tokens=32768),
    Case(model="1.5B", recompute="full", length=32768, tokens=65536),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, offload=True),
    Case(model="1.5B", recompute="selective", length=4096, tokens=16384, fp32_gradients=False),
    Case(model="experts", recompute="selective", length=4096, tokens=16384),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, layout=ParallelLayout(tp=2)),
    Case(model="1.5B", recompute="linear", length=16384, tokens=32768, layout=ParallelLayout(tp=2)),
    Case(model="1.5B", recompute="selective", length=2048, tokens=8192, microbatches=6, layout=ParallelLayout(pp=2)),
    Case(model="1.5B", recompute="selective", length=2048, tokens=16384, layout=ParallelLayout(dp=2)),
    Case(model="1.5B", recompute="linear", length=65536, tokens=65536, layout=ParallelLayout(cp=2)),
    Case(model="experts", recompute="selective", length=4096, tokens=16384, layout=ParallelLayout(dp=2, ep=2)),
)
TRIAL = (
    Case(model="tiny", recompute="selective", length=64, tokens=128),
    Case(model="tiny", recompute="linear", length=64, tokens=128, layout=ParallelLayout(pp=2), microbatches=3),
)
"""In place of CASES without GPUs."""


def predictions(cases: tuple[Case, ...]) -> dict[str, list[dict[str, float]]]:
    """Return for each case and pipeline stage the bytes at the peak and between two updates."""
    return {str(case): [_predicted(case, stage) for stage in range(case.layout.pp)] for case in cases}


def _predicted(case: Case, stage: int) -> dict[str, float]:
    state = states_of(case.engine, stage)
    held = state.weights + state.gradients + (0 if case.offload else state.masters + state.moments)
    return {"peak": round(engine_peak(case.engine, stage, longest=case.length)), "held": held}


def plan(scene: Any) -> Iterator[Figure]:
    """Yield the peak of every case against its prediction."""
    from rollout.inference.gpus import query_gpus

    for case, found in measured(CASES if query_gpus() else TRIAL):
        for stage, row in enumerate(found):
            baseline = _predicted(case, stage)["peak"] / GB
            name = f"plan.{case} stage {stage}".replace(" ", "_")
            yield Figure(name=name, value=row["peak"] / GB, unit="GB", baseline=baseline, target="<= 1.02x")


def measured(cases: tuple[Case, ...]) -> Iterator[tuple[Case, list[dict[str, float]]]]:
    """Yield each case that this host has the GPUs for, with what was measured on the stages of its pipeline. Each has
    processes of its own, as memory begins at zero there; those of the next case import torch meanwhile."""
    from torch.multiprocessing import get_context

    from rollout.inference.gpus import query_gpus

    num_gpus, context = len(query_gpus()), get_context("spawn")
    chosen = [case for case in cases if not 0 < num_gpus < case.layout.world_size]
    if left_out := [str(case) for case in cases if case not in chosen]:
        print(f"left out for want of GPUs: {', '.join(left_out)}", flush=True)
    ahead = None
    for number, case in enumerate(chosen):
        world = case.layout.world_size
        pool = ahead or context.Pool(world, initializer=_import_all)
        following = chosen[number + 1 : number + 2]
        ahead = context.Pool(following[0].layout.world_size, initializer=_import_all) if following else None
        with pool, tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(PLANNED[case.model]))
            arguments = [(case, rank, folder, bool(num_gpus)) for rank in range(world)]
            rows = pool.starmap(_measure, arguments, chunksize=1)
        per_stage = world // case.layout.pp
        stages = [rows[i * per_stage : (i + 1) * per_stage] for i in range(case.layout.pp)]
        yield case, [{key: max(row[key] for row in stage) for key in stage[0]} for stage in stages]


def _import_all() -> None:
    """Import what a rank needs, which takes longer than most measurements."""
    import_module("mcore_adapter.engine")
    import_module("tools.bench.gpu.trainer")


def _measure(case: Case, rank: int, folder: str, on_gpu: bool) -> dict[str, float]:
    """Run updates on a rank; return bytes at the peak of the last one, before it and reserved, and tokens/s."""
    os.environ["LOCAL_RANK"] = str(rank)
    import torch

    from mcore_adapter.device import get_device
    from mcore_adapter.engine import MegatronEngine
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel
    from tools.bench.gpu.trainer import become_rank, seconds_of

    world = case.layout.world_size
    if on_gpu:
        become_rank(num_ranks=world)
    device = get_device("auto" if on_gpu else "cpu")
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
        batch, step = _update(case, engine)
        seconds = [seconds_of(device, step)]  # kernels, moments
        for _ in range(3):
            device.forget_peak()
            held = device.memory_stats()["allocated_gib"] * 2**30
            seconds.append(seconds_of(device, step))
        module: Any = torch.get_device_module(device.torch_device)
        reserved = float(module.max_memory_reserved()) if on_gpu else 0.0
        row = {
            "peak": device.memory_stats()["peak_gib"] * 2**30,
            "held": held,
            "reserved": reserved,
            "tokens_per_second": batch.num_tokens / statistics.median(seconds[1:]),
        }
        destroy_parallel()
    return row


def _update(case: Case, engine: Any) -> tuple[Any, Callable[[], object]]:
    """Return the sequences of an update, and what runs one."""
    import numpy as np
    import torch

    from mcore_adapter.data.batch import PackedBatch
    from tools.bench.gpu.trainer import ppo_update

    count = case.tokens // case.length * case.microbatches * case.layout.dp
    vocab_size, total = PLANNED[case.model]["vocab_size"], count * case.length
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(total, dtype=torch.bool)
    mask[:: case.length] = False
    old = torch.full((total,), -float(np.log(vocab_size)))
    batch = PackedBatch(
        token_ids=torch.randint(vocab_size, (total,), generator=generator),
        cu_seqlens=case.length * torch.arange(count + 1),
        loss_mask=mask,
        fields={
            "advantages": torch.randn(total, generator=generator),
            "old_logprobs": old,
            "rollout_logprobs": old,
        },
    )

    def of_values(output: Any, fields: Any, sequences: Any) -> Any:
        return (output.values.square() * fields["token_weights"]).sum(), {}

    if case.is_critic:
        return batch, lambda: engine.train_step(batch, of_values, max_tokens_per_mb=case.tokens)
    return batch, lambda: ppo_update(engine, batch, case.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write what is computed, measure nothing")
    parser.add_argument("--against", type=Path, metavar="FILE", help="predictions to compare with; default: today's")
    parser.add_argument("--only", metavar="WORDS", default="", help="only cases whose name has these words")
    parser.add_argument("--trial", action="store_true", help="two tiny cases on the CPU, to try the program out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what was measured as JSON, too")
    given = parser.parse_args()
    cases = tuple(case for case in (TRIAL if given.trial else CASES) if given.only in str(case))
    if given.predict is not None:
        given.predict.parent.mkdir(parents=True, exist_ok=True)
        given.predict.write_text(json.dumps(predictions(cases), indent=1) + "\n")
        return
    expected = json.loads(given.against.read_text()) if given.against else predictions(cases)
    print("| case | stage | predicted | measured | error | held, predicted | held | reserved | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    found: dict[str, list[dict[str, float]]] = {}
    errors = []
    for case, rows in measured(cases):
        found[str(case)] = rows
        for stage, (guess, row) in enumerate(zip(expected[str(case)], rows, strict=True)):
            errors.append(abs(guess["peak"] / row["peak"] - 1))
            sizes = [f"{guess['peak'] / GB:.2f}", f"{row['peak'] / GB:.2f}", f"{guess['peak'] / row['peak'] - 1:+.1%}"]
            more = [f"{guess['held'] / GB:.2f}", *(f"{row[key] / GB:.2f}" for key in ("held", "reserved"))]
            print("|", " | ".join([str(case), str(stage), *sizes, *more, f"{row['tokens_per_second']:,.0f}"]), "|")
            sys.stdout.flush()
        if given.output is not None:
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    if errors:
        print(f"\nerror of the peak: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
