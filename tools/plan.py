"""Compute memory, time and layout of a run before it starts.

    python -m tools.plan --config examples/configs/ppo-gsm8k.yaml --gpu H100
    python -m tools.plan sft --config X.yaml model.gradient_checkpointing=auto --json
    python -m tools.plan --config X.yaml --gpu H100 --gpus 16 --search --mean-tokens 4000

Memory is that of each rank of the trainer by phase, of each server and of each node. A phase fits where what torch
allocates, 14 % for its allocator and the context of the GPU are below the memory of the GPU. Only config.json of the
models is read. Times need a calibration of the GPU (core/planning/calibrations). --search ranks the allocations of a
number of GPUs by trained tokens per second, and proposes none that a dry run would refuse.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocation import GPU, AllocationError
from core.checks.rules import load_config
from core.config.experiments import EXPERIMENTS
from core.config.parsing.problems import ConfigError
from core.planning.advice import advice, verdict
from core.planning.gpus import PlanError, chosen_gpu
from core.planning.memory import GIB, MemoryPlan, Phase, plan_memory
from core.planning.rates import StepTime, calibration_of, step_time
from core.planning.scene import Scene, scene_of
from core.planning.search import Proposal, search
from tools.arguments import integer, program

_COLUMNS = {
    "weights": ("weights", "FP8 copies"),
    "grads": ("gradients", "gradients in fp32"),
    "Adam": ("masters", "moments"),
    "kept": ("residual stream", "attention", "MLP", "from the host"),
    "passing": ("backward pass", "gradient of the embedding", "logits and loss", "activations", "buckets"),
    "other": ("workspaces", "context"),
}
"""Column of the table -> the parts of a phase that it sums."""
_BAD_INPUT, _DOES_NOT_FIT = 2, 1
_WIDTH = 96


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return 0 where the run fits, 1 where it does not, 2 for bad input."""
    given = _parser().parse_intermixed_args(argv)
    words = list(given.words)
    experiment = words.pop(0) if words and words[0] in EXPERIMENTS else "ppo-math"
    try:
        gpu = chosen_gpu(given.gpu)
        if EXPERIMENTS[experiment].TRAINER_ONLY and not any(w.startswith("launch.trainer_device=") for w in words):
            words.append(f"launch.trainer_device={GPU}")  # auto would look for the GPUs of this machine
        scene = scene_of(load_config(experiment, given.config, words).config, gpu)
    except (ConfigError, PlanError, AllocationError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_INPUT
    width = max(_WIDTH, Console().width)
    console = Console(width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)
    mean = given.mean_tokens or max(1, scene.answer_tokens // 3)
    if given.search:
        return _search(scene, given, experiment, words, mean, console)
    plan, time = plan_memory(scene), timed(scene, mean)
    if given.json:
        print(json.dumps(as_json(scene, plan, time), indent=1))
    else:
        show(scene, plan, console)
        console.print(time_line(scene, time, mean))
    return 0 if plan.fits or plan.is_tight else _DOES_NOT_FIT


def _search(
    scene: Scene, given: argparse.Namespace, experiment: str, words: list[str], mean: int, console: Console
) -> int:
    """Print the fastest allocations; return the exit code."""
    calibration = calibration_of(scene.gpu.name)
    if calibration is None or scene.servers is None or not scene.servers.on_gpu:
        why = f"no calibration for {scene.gpu.name}" if calibration is None else "the run has no servers on GPUs"
        sys.stderr.write(f"error: --search: {why}; without --search the plan has memory alone\n")
        return _BAD_INPUT

    def accepts(proposal: Proposal) -> bool:
        try:
            load_config(experiment, given.config, [*words, *proposal.overrides])
        except ConfigError:
            return False
        return True

    num_gpus = given.gpus or scene.n_nodes * scene.n_gpus_per_node
    try:
        found = search(scene, calibration, num_gpus=num_gpus, mean_answer=mean, accepts=accepts)
    except PlanError as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_INPUT
    if given.json:
        print(json.dumps([_proposal_json(proposal) for proposal in found], indent=1))
        return 0 if found else _DOES_NOT_FIT
    if not found:
        console.print(f"Nothing fits on {num_gpus} {scene.gpu.name}. {_verdict(scene)}")
        return _DOES_NOT_FIT
    console.print(f"Fastest on {num_gpus} {scene.gpu.name}, answers of {mean:,} tokens on average:")
    for number, proposal in enumerate(found, start=1):
        console.print(f"{number}. {proposal.time.tokens_per_second:,.0f} trained tokens/s: {proposal.why}")
        console.print(f"   {' '.join(proposal.overrides)}")
    return 0


def _verdict(scene: Scene) -> str:
    plan = plan_memory(scene)
    return verdict(scene, plan, advice(scene, plan))


def timed(scene: Scene, mean: int) -> StepTime | None:
    """Return the time of a step; None without a calibration of the GPU."""
    calibration = calibration_of(scene.gpu.name)
    return None if calibration is None else step_time(scene, calibration, mean_answer=mean)


def time_line(scene: Scene, time: StepTime | None, mean: int) -> str:
    """Return the time of a step in words."""
    if time is None:
        if calibration_of(scene.gpu.name) is None:
            return f"No calibration for {scene.gpu.name}: memory only."
        return "No time: that of runs without servers on GPUs is not computed."
    parts = (
        f"update {time.update:.1f}, log-probabilities {time.passes:.1f}, generation {time.rollout:.1f}, "
        f"weight update {time.push:.2f} s"
    )
    return (
        f"A step with answers of {mean:,} tokens on average (--mean-tokens) takes {time.step:.1f} s: {parts}. "
        f"{time.tokens_per_second:,.0f} trained tokens/s, limited by the {time.limited_by}."
    )


def _proposal_json(proposal: Proposal) -> dict[str, Any]:
    return {
        "overrides": list(proposal.overrides),
        "tokens_per_second": proposal.time.tokens_per_second,
        "seconds": vars(proposal.time),
        "peak_bytes": int(proposal.memory.peak.total),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("tools.plan"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="EXPERIMENT or a.b.c=value", help="ppo-math (default), sft or dpo, and keys to set"
    )
    parser.add_argument("--config", metavar="X.yaml", help="configuration file")
    parser.add_argument("--gpu", help="H100, H200, A100, or NAME:GIB; default: that of this machine, else H100")
    parser.add_argument("--search", action="store_true", help="propose the fastest allocations")
    parser.add_argument("--gpus", type=integer(least=2, most=4096), help="--search: how many; default: the recipe's")
    parser.add_argument(
        "--mean-tokens", type=integer(least=1), help="mean tokens of an answer; default: a third of the longest"
    )
    parser.add_argument("--json", action="store_true", help="print the plan for programs")
    return parser


def show(scene: Scene, plan: MemoryPlan, console: Console) -> None:
    """Print the tables, the verdict and what to change."""
    where = f"{scene.gpu.name}, {scene.gpu.gib:.1f} GiB" if scene.on_gpu else "CPU"
    console.print(memory_table(plan, f"Memory of a trainer rank in GiB ({where})"))
    for rank in plan.ranks:
        if rank.peak.detail and (rank is plan.ranks[0] or rank.peak.detail != plan.ranks[0].peak.detail):
            console.print(f"Stage {rank.stage}: peak in the {rank.peak.name}, {rank.peak.detail}.")
    if plan.servers is not None and scene.servers is not None:
        s, one = plan.servers, scene.servers
        console.print(
            f"Server ({one.layout}), each GPU: weights {s.weights / GIB:.1f}, cache {max(0.0, s.cache) / GIB:.1f}, "
            f"graphs and activations up to {s.rest / GIB:.1f} GiB. The cache holds {s.tokens:,} tokens: "
            f"{s.longest:,} sequences of {scene.longest:,}, generator.max_running={one.max_running}."
        )
    total = sum(plan.host.values())
    parts = ", ".join(f"{name} {size / GIB:.0f}" for name, size in plan.host.items())
    console.print(f"Host memory of a node, about: {total / GIB:.0f} GiB ({parts}).")
    changes = advice(scene, plan)
    console.print(verdict(scene, plan, changes))
    for change in changes:
        fits = "fits" if change.fits else "does not fit"
        console.print(f"  {change.keys}: needs {change.peak_gib:.1f} GiB, {fits}")


def memory_table(plan: MemoryPlan, title: str) -> Table:
    """Return a row for each phase of each stage."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("phase", *_COLUMNS, "peak", "needed"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for rank in plan.ranks:
        for phase in rank.phases:
            stage = f"stage {rank.stage}: " if len(plan.ranks) > 1 else ""
            table.add_row(stage + phase.name, *_cells(phase))
        table.add_section()
    return table


def _cells(phase: Phase) -> list[str]:
    sums = [sum(phase.parts.get(part, 0.0) for part in parts) for parts in _COLUMNS.values()]
    return [f"{size / GIB:.1f}" if size else "" for size in (*sums, phase.allocated, phase.total)]


def as_json(scene: Scene, plan: MemoryPlan, time: StepTime | None) -> dict[str, Any]:
    """Return the plan as plain values; sizes are bytes."""
    changes = advice(scene, plan)
    return {
        "gpu": {"name": scene.gpu.name, "bytes": int(scene.gpu.gib * GIB)},
        "fits": plan.fits,
        "verdict": verdict(scene, plan, changes),
        "ranks": [
            {
                "stage": rank.stage,
                "num_ranks": rank.num_ranks,
                "layers": rank.layers,
                "peak": rank.peak.name,
                "phases": [_phase_json(phase) for phase in rank.phases],
            }
            for rank in plan.ranks
        ],
        "servers": None if plan.servers is None else vars(plan.servers),
        "host": dict(plan.host),
        "seconds": None if time is None else vars(time),
        "advice": [{"keys": c.keys, "peak_bytes": int(c.plan.peak.total), "fits": c.plan.fits} for c in changes],
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "detail": phase.detail,
        "parts": {name: int(size) for name, size in phase.parts.items()},
        "allocated": int(phase.allocated),
        "total": int(phase.total),
    }


if __name__ == "__main__":
    sys.exit(main())
