"""Compute memory, time and layout of a run before any GPU is touched.

    python -m tools.plan --config examples/configs/ppo-gsm8k.yaml --gpu H100
    python -m tools.plan sft --config X.yaml model.gradient_checkpointing=auto --json
    python -m tools.plan --config X.yaml --gpu H100 --gpus 16 --search --mean-tokens 4000
    python -m tools.plan --config X.yaml --gpu H100 --simulate 100 --output FOLDER
    python -m tools.plan --calibrate b200.json

Memory is that of each rank of the trainer by phase, of each server and of each node. A phase fits if the GPU has room
for what torch allocates, 14 % for its allocator, and the CUDA context. Host memory is compared with --host-gib. Only
config.json of the models is read. Times need a calibration: H100 and H200 have one, and --calibrate measures this host
in one to three minutes, on GPUs a SGLang server too. --search ranks the allocations of a number of GPUs, and proposes
none that a dry run would refuse. --simulate runs steps on a virtual clock with the rules of a run, as planned and with
faults.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from allocation import GPU, AllocationError
from core.checks.rules import load_config, searches, written
from core.config.experiments import EXPERIMENTS
from core.config.load import LoadedConfig, taken_config
from core.config.parsing.problems import ConfigError
from core.planning.advice import advice, verdict, with_worst_routing
from core.planning.memory import MemoryPlan, Phase, plan_memory
from core.planning.rates import (
    SPREAD,
    Calibration,
    Lengths,
    read_calibration,
    usual_calibration,
    write_calibration,
)
from core.planning.scene import Gpu, PlanError, Scene, chosen_gpu, scene_of
from core.planning.search import (
    METRICS,
    Loader,
    Metric,
    Proposal,
    nothing_fits,
    parse_fixed,
    proposals,
    unplaced,
    usual_lengths,
)
from core.planning.server_memory import GIB
from core.planning.simulation import (
    LAST_STEPS,
    LONGEST_ANSWERS,
    Forecast,
    Outcome,
    forecast,
    simulate_with_faults,
    world_of,
)
from tools.arguments import integer, new_folder, number, parser_of, refused

_COLUMNS = {
    "weights": ("weights", "FP8 copies"),
    "grads": ("gradients", "gradients in fp32"),
    "Adam": ("masters", "moments"),
    "kept": ("residual stream", "attention", "MLP", "from the host"),
    "temp": ("backward pass", "gradient of the embedding", "logits and loss", "activations", "buckets", "workspaces"),
    "slack": ("allocator slack",),
    "CUDA": ("context", "NCCL"),
    "others": ("server", "other roles"),
}
"""Column of the table -> the parts of a phase that it sums. The first ones are of torch, and add up to the peak."""
_OF_TORCH = 5
_BEST = {"tokens": "Fastest", "cost": "Cheapest for each token", "latency": "Shortest way from answer to update"}
_DOES_NOT_FIT = 1
_WIDTH = 96
_DRAWN_SERVERS = 8
_TIMES_NEED = "it needs servers that hold the model, and both sides on GPUs or both on the CPU"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; return 0 where the run fits, 1 where it does not, 2 for bad input."""
    given = _parser().parse_intermixed_args(argv)
    try:
        if given.calibrate is None:
            return _plan(given)
        _check_alone(given)
        return _calibrate(given.calibrate, given.sglang_python)
    except (ConfigError, PlanError, AllocationError) as error:
        return refused(error)


def _calibrate(path: Path, sglang_python: str | None) -> int:
    from core.monitoring.screen import Screen
    from core.planning.calibrate import calibrate

    if path.is_dir() or not path.absolute().parent.is_dir():
        raise PlanError(f"--calibrate {path}: cannot be written; name a file in a folder that exists")
    screen = Screen(Console(highlight=False, markup=False, force_terminal=sys.stdout.isatty()), compact=True)
    try:
        found = calibrate(screen.begin, server_python=sglang_python)
    finally:
        screen.end_phase()
    write_calibration(found, path)
    print(f"{path}: rates of {found.gpu} ({found.source}); give it to later plans as --calibration {path}")
    return 0


def _plan(given: argparse.Namespace) -> int:
    """Print what was asked for; return the exit code."""
    words = list(given.words)
    given.config = taken_config(given.config, words)
    experiment = words.pop(0) if words and words[0] in EXPERIMENTS else "ppo-math"
    for word in words:
        if "=" not in word:
            raise PlanError(
                f"{word}: must be an experiment, as the first word ({', '.join(EXPERIMENTS)}), the only configuration "
                "file (X.yaml), or a key to set (a.b.c=value)"
            )
    calibration = None if given.calibration is None else read_calibration(given.calibration)
    if calibration is not None and given.gpu is None:
        gpu = Gpu(name=calibration.gpu, gib=calibration.gib)
    else:
        gpu = chosen_gpu(given.gpu)
    if given.host_gib is not None:
        gpu = replace(gpu, host_bytes=given.host_gib * GIB)
    device, mode = (written(given.config, words, key) for key in ("launch.trainer_device", "allocation_mode"))
    looks = EXPERIMENTS[experiment].TRAINER_ONLY or (given.gpu is not None and "." not in mode)
    if looks and device in ("", "auto"):
        words.append(f"launch.trainer_device={GPU}")  # auto would look for the GPUs of this machine

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(experiment, given.config, [*words, *more])

    if searches(given.config, words):
        given.search = True
        words.append(unplaced(load))
    _check_together(given)
    try:
        config = load([]).config
    except ConfigError:
        if not given.search:
            raise
        words.append(unplaced(load))  # a search replaces an allocation_mode of another number of GPUs, say
        config = load([]).config
    scene = scene_of(config, gpu)
    if scene.on_gpu and not gpu.gib:
        raise PlanError(f"--calibration {given.calibration}: rates of a {gpu.name}, but the trainer computes on GPUs")
    if calibration is not None and calibration.gib and not scene.on_gpu:
        raise PlanError(
            f"--calibration {given.calibration}: rates of a {gpu.name}, but the trainer computes on the CPU"
        )
    calibration = calibration or usual_calibration(scene)
    width = max(_WIDTH, Console().width)
    console = Console(width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)
    usual = usual_lengths(scene)
    if (given.mean_tokens or 0) > usual.longest:
        what, key = (
            ("sequence", "dataset.max_seqlen") if scene.servers is None else ("answer", "ppo.gen.max_new_tokens")
        )
        raise PlanError(
            f"--mean-tokens {given.mean_tokens}: the longest {what} has {usual.longest} tokens; write at most that, or "
            f"set {key}"
        )
    answers = replace(usual, mean=given.mean_tokens or usual.mean, spread=given.spread)
    if given.search or given.simulate:
        what = "--search" if given.search else "--simulate"
        if calibration is None:
            raise PlanError(
                f"{what}: no calibration for {gpu.name}; slipstream plan --calibrate FILE measures one, and without "
                f"{what} the plan has memory alone"
            )
        if scene.servers is None:
            raise PlanError(f"{what}: {experiment} has no servers; plan it without {what}")
        if given.search and not scene.servers.on_gpu:
            raise PlanError(
                f"--search: {scene.servers.backend} generates on the CPU; write allocation_mode=search for layouts on "
                "GPUs"
            )
        if not given.json and (notes := rate_notes(scene, calibration)):
            _say(console, notes)
        if given.search:
            return _search(scene, calibration, answers, load, given, console)
        return _simulate(scene, calibration, answers, given, console)
    plan = plan_memory(scene)
    time = None if calibration is None else forecast(scene, calibration, answers)
    if given.json:
        rates = None if calibration is None else calibration.gpu
        print(json.dumps({**as_json(scene, plan, time), "rates": rates}, indent=1))
    else:
        show(scene, plan, console)
        _say(console, time_lines(scene, calibration, time, answers))
    return 0 if plan.fits or plan.is_tight else _DOES_NOT_FIT


def _check_together(given: argparse.Namespace) -> None:
    """Raise PlanError for an option without the one that it belongs to."""
    if given.search and given.simulate:
        raise PlanError("--simulate: not with a search; simulate one of its proposals")
    of_search = {"--gpus": given.gpus, "--fix": given.fix, "--metric": given.metric}
    for options, main_option, is_given in (
        (of_search, "--search", given.search),
        ({"--output": given.output}, "--simulate STEPS", given.simulate),
        ({"--sglang-python": given.sglang_python}, "--calibrate FILE", given.calibrate is not None),
    ):
        for name, value in options.items():
            if value is not None and not is_given:
                raise PlanError(f"{name} {value}: has no effect without {main_option}")


def _check_alone(given: argparse.Namespace) -> None:
    """Raise PlanError for anything that --calibrate does not read."""
    unused = _parser().parse_args([])
    for name, value in vars(given).items():
        if name not in ("calibrate", "sglang_python") and value != getattr(unused, name):
            shown = " ".join(value) if name == "words" else f"--{name.replace('_', '-')}"
            raise PlanError(
                f"{shown}: has no effect with --calibrate FILE, which measures this host alone; leave it out"
            )


def _search(
    scene: Scene, calibration: Calibration, answers: Lengths, load: Loader, given: argparse.Namespace, console: Console
) -> int:
    """Print the best allocations; return the exit code."""
    num_gpus = given.gpus or scene.n_nodes * scene.n_gpus_per_node
    fixed = None if given.fix is None else parse_fixed(given.fix)
    metric: Metric = given.metric or "tokens"
    find = partial(proposals, load, calibration=calibration, answers=answers, num_gpus=num_gpus, metric=metric)
    found = find(scene, fixed=fixed)
    if given.json:
        print(json.dumps([_proposal_json(proposal) for proposal in found.best], indent=1))
        return 0 if found.best else _DOES_NOT_FIT
    if not found.best:
        again = partial(find, most=1, num_others=0)
        why = nothing_fits(scene, num_gpus, again, num_considered=found.num_considered, fixed=fixed)
        _say(console, f"Nothing fits on {num_gpus} {scene.gpu.name}. {why}")
        return _DOES_NOT_FIT
    _say(
        console,
        f"{_BEST[metric]} on {'at most ' if metric == 'cost' else ''}{num_gpus} {scene.gpu.name}, of "
        f"{found.num_considered:,} allocations; answers of {_tokens(answers)} on average:",
    )
    for place, proposal in enumerate(found.best, start=1):
        speed, memory = proposal.lines
        _say(console, f"{place}. {_ranked_by(proposal, metric)}{speed}\n   {memory}")
        console.print(f"   {' '.join(proposal.overrides)}")  # whole, to copy
    for proposal in found.others:
        _say(console, f"Next: {proposal.mode} on {proposal.num_gpus} GPUs: {proposal.why_not(found.best[0], metric)}")
    return 0


def _simulate(
    scene: Scene, calibration: Calibration, answers: Lengths, given: argparse.Namespace, console: Console
) -> int:
    """Print what a simulated run comes to, as planned and with each fault, and write pictures; return the exit code."""
    world = world_of(scene, calibration, answers)
    if world is None:
        raise PlanError(f"--simulate: {_TIMES_NEED}; plan it without --simulate")
    runs = simulate_with_faults(world, given.simulate)
    first = next(iter(runs.values()))
    if given.json:
        print(json.dumps({name: run.as_json() for name, run in runs.items()}, indent=1))
    else:
        table = Table(title=f"{given.simulate} simulated steps", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("run", "tokens/s", "", "s/step", "trainer computes", "requests a server", "mean staleness"):
            table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=heading == "run")
        for name, run in runs.items():
            change = "" if run is first else f"{run.tokens_per_second / first.tokens_per_second - 1:+.0%}"
            cells = [f"{run.tokens_per_second:,.0f}", change, f"{run.seconds:.1f}", f"{run.trainer_share:.0%}"]
            table.add_row(name, *cells, f"{run.mean_running:.0f}", f"{run.mean_staleness:.2f}")
        console.print(table)
        console.print(f"Answers by staleness, as planned: {shares(first.staleness)}.")
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        paths = (given.output / "timeline.png", given.output / "simulation.png")
        _draw_timeline(first, paths[0])
        _draw_runs(runs, paths[1])
        print(*paths, sep="\n", file=sys.stderr if given.json else sys.stdout)
    return 0


def _draw_timeline(run: Outcome, path: Path) -> None:
    """Draw the last steps of a run: the trainer, and the requests of the first servers."""
    from tools.timeline import Span, draw

    steps = run.steps[-LAST_STEPS:]
    begin, end = steps[0].begin, steps[-1].end
    spans: list[Span] = []

    def add(process: str, lane: str, name: str, first: float, last: float) -> None:
        first, last = max(first, begin), min(last, end)
        if last > first:
            spans.append(Span(process=process, lane=lane, name=name, begin=int(1e6 * first), end=int(1e6 * last)))

    for step in steps:
        add("driver", "steps", "step", step.begin, step.end)
        add("driver", "", "wait for rollout", step.begin, step.taken)
        add("driver", "", "update", step.taken, step.trained)
        add("driver", "", "push", step.trained, step.end)
    for group in run.groups:
        if group.server < _DRAWN_SERVERS:
            add("servers", f"server {group.server}", "prompt", group.begin, group.end)
    draw(spans, (int(1e6 * begin), int(1e6 * end)), path)


def _draw_runs(runs: Mapping[str, Outcome], path: Path) -> None:
    """Draw throughput, queues and staleness of each step against the time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    labels = ("tokens/s", "requests that wait at servers", "finished prompts that wait", "mean staleness")
    for name, run in runs.items():
        hours = [step.end / 3600 for step in run.steps]
        series = (
            [s.tokens / (s.end - s.begin) for s in run.steps],
            [s.waiting for s in run.steps],
            [s.ready for s in run.steps],
            [s.mean_staleness for s in run.steps],
        )
        for ax, values in zip(axes, series, strict=True):
            ax.plot(hours, values, label=name, linewidth=1)
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
    axes[-1].set_xlabel("hours")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def time_lines(scene: Scene, calibration: Calibration | None, time: Forecast | None, answers: Lengths) -> str:
    """Return the time of a step in words."""
    if calibration is None:
        name = scene.gpu.name if scene.on_gpu else "a CPU"
        return f"No calibration for {name}: memory only. slipstream plan --calibrate FILE measures a host."
    if time is None:
        return f"No time: {_TIMES_NEED}."
    stop = f" A recover checkpoint stops the trainer for {time.checkpoint:.1f} s." if time.checkpoint else ""
    if notes := rate_notes(scene, calibration):
        stop += f" {notes}"
    if scene.servers is None:
        passes = f", log-probabilities {time.passes:.1f} s" if time.passes else ""
        return (
            f"A step with sequences of {_tokens(answers)} on average (--mean-tokens) takes {time.step:.1f} s: "
            f"update {time.update:.1f} s{passes}. {time.tokens_per_second:,.0f} trained tokens/s.{stop}"
        )
    more = " (a larger staleness.max_staleness hides them)" if time.limited_by == LONGEST_ANSWERS else ""
    return (
        f"A step with answers of {_tokens(answers)} on average (--mean-tokens) takes {time.step:.1f} s: "
        f"update {time.update:.1f}, log-probabilities {time.passes:.1f}, weight update {time.push:.2f}, wait for "
        f"answers {time.wait:.1f} s; the servers take {time.rollout:.1f} s for its answers. "
        f"{time.tokens_per_second:,.0f} trained tokens/s, limited by the {time.limited_by}{more}.\n"
        f"The trainer computes {time.trainer_share:.0%} of the time, servers decode {time.slots_share:.0%} of "
        f"generator.max_running. Answers by staleness: {shares(time.staleness)}.{stop}"
    )


def _tokens(lengths: Lengths) -> str:
    """Return the mean length in words."""
    return f"{lengths.mean:,.0f} token{'' if lengths.mean == 1 else 's'}"


def rate_notes(scene: Scene, calibration: Calibration) -> str:
    """Return in words which rates stand in for those of the run; empty where none do."""
    notes = []
    if scene.on_gpu and calibration.gpu != scene.gpu.name:
        notes.append(f"Times use rates of {calibration.gpu}, not of {scene.gpu.name}.")
    if any(engine.fp8 for engine in scene.engines):
        notes.append("No rates of FP8 are known: times use those of bfloat16.")
    return " ".join(notes)


def shares(ages: Mapping[int, float]) -> str:
    """Return shares by age in words."""
    return ", ".join(f"{age}: {share:.0%}" for age, share in ages.items())


def _ranked_by(proposal: Proposal, metric: Metric) -> str:
    """Return the figure of a metric that is not in the line of a proposal, as the begin of the line."""
    if metric == "cost":
        return f"{proposal.time.tokens_per_second / proposal.num_gpus:,.0f} tokens/s of a GPU, "
    return f"{proposal.latency:.0f} s from answer to update, " if metric == "latency" else ""


def _proposal_json(proposal: Proposal) -> dict[str, object]:
    return {
        "overrides": list(proposal.overrides),
        "tokens_per_second": proposal.time.tokens_per_second,
        "tokens_per_second_per_gpu": proposal.time.tokens_per_second / proposal.num_gpus,
        "latency_seconds": proposal.latency,
        "seconds": vars(proposal.time),
        "peak_bytes": int(proposal.memory.peak.total),
        "worst_routing": _worst_routing_json(proposal.scene),
        "host_bytes": int(proposal.memory.host_total),
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.plan", __doc__)
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="EXPERIMENT, X.yaml or a.b.c=value",
        help="ppo-math (default), sft or dpo, a configuration file, and keys to set",
    )
    add("--config", metavar="X.yaml", help="configuration file")
    add("--gpu", help="H100, H200, A100, or NAME:GIB; default: that of this machine, else H100")
    add(
        "--host-gib",
        type=number(least=0.0, most=1e6),
        help="host memory of a node that a run may use; default: what this machine has left, if the run is to be on it",
    )
    add("--search", action="store_true", help="propose allocations")
    add("--gpus", type=integer(least=1, most=4096), help="--search: how many; default: the recipe's")
    add(
        "--metric",
        choices=METRICS,
        help="--search: rank by tokens/s (default), tokens/s of a GPU, or time from an answer to its last update",
    )
    add("--fix", metavar="LAYOUT", help="--search: only with these servers or this trainer, as sglang.d4m2p1 or d8m1p2")
    add(
        "--mean-tokens",
        type=integer(least=1),
        help="mean length of answers, or of sequences of sft and dpo; default: a third of the longest",
    )
    add(
        "--spread",
        type=number(least=0.0, most=3.0),
        default=SPREAD,
        help="standard deviation of the logarithm of lengths",
    )
    add("--simulate", type=integer(least=8, most=100_000), metavar="STEPS", help="run steps on a virtual clock")
    add("--output", type=new_folder, metavar="FOLDER", help="--simulate: where to write pictures")
    add("--calibrate", type=Path, metavar="FILE", help="measure this host, write its rates")
    add("--sglang-python", metavar="PATH", help="--calibrate: Python interpreter with SGLang, if this one has none")
    add("--calibration", type=Path, metavar="FILE", help="rates that --calibrate has written")
    add("--json", action="store_true", help="print the plan for programs")
    return parser


def _say(console: Console, text: str) -> None:
    """Print lines: wrapped at the width of a terminal, with an indent, and whole elsewhere."""
    for line in text.split("\n"):
        if sys.stdout.isatty():
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            width = Console().width
            line = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        console.print(line)


def show(scene: Scene, plan: MemoryPlan, console: Console) -> None:
    """Print the tables, the verdict and what to change."""
    where = f"{scene.gpu.name}, {scene.gpu.gib:.1f} GiB" if scene.on_gpu else "CPU"
    console.print(memory_table(plan, f"Memory of a trainer rank in GiB ({where})"))
    _say(console, "peak, their sum: max_memory_allocated; kept: until backward; temp: of one layer")
    if scene.on_gpu:
        _say(console, "total: what the GPU must have, with slack of the allocator and CUDA's context")
    for rank in plan.ranks:
        if rank.peak.detail and (rank is plan.ranks[0] or rank.peak.detail != plan.ranks[0].peak.detail):
            _say(console, f"{plan.name_of(rank).capitalize()}: peak in the {rank.peak.name}, {rank.peak.detail}.")
    if len(models := plan.ranks[0].models) > 1:
        each = ", ".join(f"{name} {sum(held.values()) / GIB:.1f}" for name, held in models.items())
        _say(console, f"Weights, gradients and Adam of each model on {plan.name_of(plan.ranks[0])}: {each} GiB.")
    others = scene.servers and scene.servers.of_auxiliary
    for name, s, one in (("Server", plan.servers, scene.servers), ("Auxiliary server", plan.auxiliary, others)):
        if s is None or one is None:
            continue
        trainer = f"; the trainer keeps {s.trainer / GIB:.1f}" if s.trainer else ""
        _say(
            console,
            f"{name} ({one.layout}), each GPU: weights {s.weights / GIB:.1f}, cache {max(0.0, s.cache) / GIB:.1f}, "
            f"graphs and activations up to {max(0.0, s.rest) / GIB:.1f} GiB, of which the server reserves "
            f"{s.graphs / GIB:.1f} for graphs{trainer}. The cache holds {s.tokens:,} tokens: "
            f"{s.longest:,} sequences of {scene.longest:,}, generator.max_running={one.max_running}.",
        )
    sizes = _rounded(plan.host.values(), 1)
    parts = ", ".join(f"{name} {size:.1f}" for name, size in zip(plan.host, sizes, strict=True))
    left = "" if plan.host_limit is None else f" of {plan.host_limit / GIB:.1f}"
    _say(console, f"Host memory of a node, about: {sum(sizes):.1f}{left} GiB ({parts}).")
    changes = advice(scene, plan)
    _say(console, verdict(scene, plan, changes))
    for change in changes:
        _say(console, f"  {change.keys}: {change.words}")


def memory_table(plan: MemoryPlan, title: str) -> Table:
    """Return a row for each phase of each stage, whose columns add up; at most 80 columns wide."""
    sums = [[_sums(phase) for phase in rank.phases] for rank in plan.ranks]
    beside = [name for name in list(_COLUMNS)[_OF_TORCH:] if any(one[name] for rows in sums for one in rows)]
    shown = [*list(_COLUMNS)[:_OF_TORCH], *beside]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    headings = [*shown[:_OF_TORCH], "peak", *beside, *(["total"] if beside else [])]
    for name in ("phase", *headings):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for rank, rows in zip(plan.ranks, sums, strict=True):
        if len(plan.ranks) > 1:
            table.add_row(plan.name_of(rank))
        for phase, one in zip(rank.phases, rows, strict=True):
            digits = 0 if phase.total >= 1000 * GIB else 1
            sizes = _rounded([one[name] for name in shown], digits)
            cells = [*sizes[:_OF_TORCH], sum(sizes[:_OF_TORCH]), *sizes[_OF_TORCH:], *([sum(sizes)] if beside else [])]
            indent = "  " if len(plan.ranks) > 1 else ""
            table.add_row(indent + phase.name, *(f"{size:.{digits}f}" if size else "" for size in cells))
        table.add_section()
    return table


def _sums(phase: Phase) -> dict[str, float]:
    """Return the bytes of each column."""
    parts = _parts(phase)
    return {name: sum(parts.get(part, 0.0) for part in of) for name, of in _COLUMNS.items()}


def _parts(phase: Phase) -> dict[str, float]:
    """Return the bytes of a phase by purpose, which add up to its total."""
    return {**phase.parts, "allocator slack": phase.slack}


def _rounded(sizes: Iterable[float], digits: int) -> list[float]:
    """Return bytes in GiB, rounded so that they add up to their rounded sum."""
    edges = [0.0, *(round(edge / GIB, digits) for edge in accumulate(sizes))]
    return [round(end - begin, digits) for begin, end in pairwise(edges)]


def as_json(scene: Scene, plan: MemoryPlan, time: Forecast | None) -> dict[str, object]:
    """Return the plan as plain values; sizes are bytes."""
    changes = advice(scene, plan)
    return {
        "gpu": {"name": scene.gpu.name, "bytes": int(scene.gpu.gib * GIB)},
        "fits": plan.fits,
        "verdict": verdict(scene, plan, changes),
        "ranks": [
            {
                "name": plan.name_of(rank),
                "stage": rank.stage,
                "num_ranks": len(rank.ranks),
                "layers": rank.layers,
                "models": {name: dict(parts) for name, parts in rank.models.items()},
                "peak": rank.peak.name,
                "phases": [_phase_json(phase) for phase in rank.phases],
            }
            for rank in plan.ranks
        ],
        "servers": None if plan.servers is None else vars(plan.servers),
        "auxiliary": None if plan.auxiliary is None else vars(plan.auxiliary),
        "host": {"parts": dict(plan.host), "bytes": plan.host_total, "limit": plan.host_limit},
        "worst_routing": _worst_routing_json(scene),
        "seconds": None if time is None else vars(time),
        "advice": [
            {
                "keys": c.keys,
                "words": c.words,
                "peak_bytes": int(c.plan.peak.total),
                "host_bytes": int(c.plan.host_total),
                "fits": c.plan.fits,
            }
            for c in changes
        ],
    }


def _worst_routing_json(scene: Scene) -> dict[str, int] | None:
    worst = with_worst_routing(scene)
    return None if worst is None else {"peak_bytes": int(plan_memory(worst).peak.total)}


def _phase_json(phase: Phase) -> dict[str, object]:
    return {
        "name": phase.name,
        "detail": phase.detail,
        "parts": {name: int(size) for name, size in _parts(phase).items()},
        "allocated": int(phase.allocated),
        "total": int(phase.total),
    }


if __name__ == "__main__":
    sys.exit(main())
