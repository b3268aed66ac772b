"""Measure memory and time of updates against the planner's prediction.

    python -m tools.bench.gpu.plan --predict benchmarks/predictions/memory.json    # before the measurement, no torch
    python -m tools.bench.gpu.plan --against benchmarks/predictions/memory.json    # on a host with GPUs: minutes

Every case is a model with random weights, a layout, a level of recomputation and sequences of given lengths. Cases of
one GPU run side by side, those of several after them; a case that fails is a row. Those that need more GPUs or more
memory than this host has are left out. Prints for each stage of a case: peak and what is held between updates in GB,
predicted and measured, the error of the peak, what the allocator reserves, seconds of an update and host memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.planning.gpus import GPUS, gpu_of_machine
from core.planning.memory import CONTEXT_BYTES, engine_held, engine_peak
from core.planning.rates import calibration_of, update_seconds
from core.planning.scene import Scene
from rollout.inference.gpus import device_names, query_gpus
from tools.bench.gpu.cases import CASES, TRIAL, Case
from tools.bench.gpu.lanes import Task, outcomes
from tools.bench.gpu.shapes import PLANNED

GB = 1e9
_PLACE = "tools.bench.gpu.update_rank:measure"


def predictions(cases: tuple[Case, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return for each case and pipeline stage the bytes at the peak and between two updates, and the seconds of an
    update on the GPUs that have a calibration."""
    return {str(case): [_predicted(case, stage) for stage in range(case.layout.pp)] for case in cases}


def _predicted(case: Case, stage: int) -> dict[str, Any]:
    lengths = case.lengths
    return {
        "peak": round(engine_peak(case.engine, stage, longest=max(lengths))),
        "held": round(engine_held(case.engine, stage, longest=max(lengths))),
        "seconds": {name: seconds for name in GPUS if (seconds := predicted_seconds(case, name)) is not None},
    }


def predicted_seconds(case: Case, gpu: str) -> float | None:
    """Return the seconds of an update; None without a calibration of the GPU."""
    calibration, lengths = calibration_of(gpu), case.lengths
    if calibration is None:
        return None
    scene = Scene(
        gpu=GPUS[gpu], on_gpu=True, engines=(case.engine,), servers=None, shares_gpus=False, n_nodes=1,
        n_gpus_per_node=8, bucket_bytes=0, sequences=len(lengths), prompts=len(lengths), group_size=1, minibatches=1,
        prompt_tokens=max(lengths), answer_tokens=0, max_staleness=0, writes_checkpoints=False,
    )  # fmt: skip
    length = sum(n * n for n in lengths) / sum(lengths)  # attention grows with the square
    seconds = update_seconds(scene, case.engine, calibration, tokens=sum(lengths), length=length, level=case.recompute)
    return round(seconds, 5)


def measured(
    cases: tuple[Case, ...], *, case_seconds: float = 150.0, seconds: float = float("inf")
) -> Iterator[tuple[Case, list[dict[str, float]] | str]]:
    """Yield each case that this host can hold, with what was measured on the stages of its pipeline or why nothing
    was. `case_seconds`: most of one; `seconds`: most of all."""
    gpus = query_gpus()
    limit = gpus[0].total_mib * 2**20 if gpus else float("inf")
    chosen = [c for c in cases if _need(c) <= limit and (not gpus or c.layout.world_size <= len(gpus))]
    if left_out := [str(case) for case in cases if case not in chosen]:
        print(f"left out, for GPUs or memory that this host lacks: {', '.join(left_out)}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        tasks = []
        for number, case in enumerate(chosen):
            folder = Path(root) / str(number)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(PLANNED[case.model]))
            arguments = (case, str(folder), bool(gpus))
            tasks.append(Task(place=_PLACE, arguments=arguments, num_ranks=case.layout.world_size))
        names = [device_names([gpu.index]) for gpu in gpus]
        for outcome in outcomes(tasks, names, task_seconds=case_seconds, end=time.monotonic() + seconds):
            case = outcome.task.arguments[0]
            if outcome.failure:
                yield case, outcome.failure
                continue
            per_stage = case.layout.world_size // case.layout.pp
            stages = [outcome.values[i * per_stage : (i + 1) * per_stage] for i in range(case.layout.pp)]
            yield case, [{key: max(row[key] for row in stage) for key in stage[0]} for stage in stages]


def _need(case: Case) -> float:
    stages = range(case.layout.pp)
    return max(engine_peak(case.engine, stage, longest=max(case.lengths)) for stage in stages) + CONTEXT_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write what is computed, measure nothing")
    parser.add_argument("--against", type=Path, metavar="FILE", help="predictions to compare with; default: today's")
    parser.add_argument("--only", metavar="WORDS", default="", help="only cases whose name has these words")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many seconds")
    parser.add_argument("--trial", action="store_true", help="tiny cases on the CPU, to try the program out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write what was measured as JSON, too")
    given = parser.parse_args()
    cases = tuple(case for case in (TRIAL if given.trial else CASES) if given.only in str(case))
    if given.predict is not None:
        given.predict.parent.mkdir(parents=True, exist_ok=True)
        given.predict.write_text(json.dumps(predictions(cases), indent=1) + "\n")
        return
    expected = predictions(cases) | (json.loads(given.against.read_text()) if given.against else {})
    gpu = gpu_name()
    print(f"{_HEADINGS}\n|{'---|' * _HEADINGS.count(' | ')}---|", flush=True)
    found: dict[str, Any] = {}
    for case, rows in measured(cases, seconds=given.seconds):
        found[str(case)] = {"gpu": gpu, **({"failure": rows} if isinstance(rows, str) else {"stages": rows})}
        print("\n".join(_lines(case, expected[str(case)], rows, gpu)), flush=True)
        if given.output is not None:
            given.output.write_text(json.dumps(found, indent=1) + "\n")
    _print_errors(expected, found)


_HEADINGS = (
    "| case | stage | predicted | measured | error | held, predicted | held | reserved | seconds, predicted | seconds "
    "| error | host |"
)


def _lines(case: Case, guesses: list[dict[str, Any]], rows: list[dict[str, float]] | str, gpu: str) -> Iterator[str]:
    """Yield a row of the table for each stage."""
    if isinstance(rows, str):
        yield f"| {case} | {rows[:300]} |"
        return
    for stage, (guess, row) in enumerate(zip(guesses, rows, strict=True)):
        seconds = guess["seconds"].get(gpu)
        yield " | ".join(
            [
                f"| {case}",
                str(stage),
                *(f"{size / GB:.2f}" for size in (guess["peak"], row["peak"])),
                f"{guess['peak'] / row['peak'] - 1:+.1%}",
                *(f"{size / GB:.2f}" for size in (guess["held"], row["held"], row["reserved"])),
                f"{seconds:.3f}" if seconds else "",
                f"{row['seconds']:.3f}",
                f"{seconds / row['seconds'] - 1:+.1%}" if seconds else "",
                f"{row['host'] / GB:.1f} |",
            ]
        )


def _print_errors(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for what in ("peak", "seconds"):
        errors = []
        for name, one in found.items():
            for guess, row in zip(expected.get(name, []), one.get("stages", []), strict=False):
                guessed = guess["seconds"].get(one["gpu"]) if what == "seconds" else guess["peak"]
                errors += [abs(guessed / row[what] - 1)] if guessed else []
        if errors:
            median, worst = statistics.median(errors), max(errors)
            print(f"\nerror of the {what}, {len(errors)} rows: median {median:.1%}, worst {worst:.1%}")


def gpu_name() -> str:
    """Return the name of this host's GPUs as the planner has it, or the driver; "CPU" without one."""
    gpu = gpu_of_machine()
    return "CPU" if gpu is None else gpu.name


if __name__ == "__main__":
    main()
