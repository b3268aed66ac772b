"""Record the training curves of small runs as exact numbers, and compare a checkout with such a recording bit for bit.

    python -m tools.curves record before.json [--cases 'grpo-*' sft-tp2] [--root DIR] [--steps 20]
    python -m tools.curves compare before.json [--cases ...] [--root DIR]

Each case runs `python -m core.quickstart` in the checkout DIR, on the CPU: PPO with a critic, GRPO, SFT or DPO, with
the trainer on one rank or with tensor, pipeline or data parallelism of 2. Nothing of DIR is imported here. The exit
code is 1 if a case fails or any number differs. A recording holds for one machine: another CPU rounds differently.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, cast

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from core.monitoring.metrics import read_rows
from tools import arguments as cli
from tools.demo.data import save_model, write_jsonl

Curve = list[dict[str, str]]
"""One dict for each step: metric -> float.hex()."""


class Recording(TypedDict):
    """What a recording file holds."""

    environment: dict[str, str]
    """What the numbers depend on beside the code."""
    steps: int
    curves: dict[str, Curve]
    """Case -> its curve."""


LAYOUTS = {"1": "d1m1p1", "tp2": "d1m2p1", "pp2": "d1m1p2", "dp2": "d2m1p1"}
MODEL = {"path": "${oc.env:CURVES}/model", "optimizer": {"lr": 2e-4, "lr_scheduler_type": "cosine"}}
PAIRS = {"train_path": "${oc.env:CURVES}/pairs.jsonl", "train_bs_n_seqs": 8, "max_seqlen": 16}
MICROBATCHES = {"mb_spec": {"max_tokens_per_mb": 48}}
GENERATION = {"max_new_tokens": 8}
POLICY: dict[str, object] = {
    "actor": MODEL,
    "actor_train": MICROBATCHES,
    "dataset": {"path": "${oc.env:CURVES}/prompts.jsonl", "train_bs_n_seqs": 8, "max_prompt_len": 8},
    "staleness": {"max_staleness": 0, "in_order": True},
    # Answers that are sampled together round differently from those that are not.
    "generator": {"max_running": 1},
    "reward": {"function": "curve_reward:even", "num_workers": 1, "timeout_seconds": 600},
}
REWARD = '''"""Reward of the recorded runs: a part of the recording, so that no change of the judge changes a curve."""


def even(prompt, text):
    """Return 1 if the sum of the characters is even, else -1."""
    return 1.0 - 2.0 * (sum(map(ord, text)) % 2)
'''
EXPERIMENTS: dict[str, dict[str, object]] = {
    "ppo": POLICY
    | {
        "group_size": 2,
        "critic": {**MODEL, "init_critic_from_actor": True},
        "critic_train": MICROBATCHES,
        "ppo": {
            "gen": GENERATION,
            "ppo_n_minibatches": 4,
            "kl_ctl": 0.1,
            "discount": 0.99,
            "gae_lambda": 0.95,
            "value_norm": True,
            "reward_output_scaling": 2.0,
            "mask_no_eos_with_zero": True,
        },
    },
    "grpo": POLICY
    | {
        "group_size": 4,
        "group_adv_norm": True,
        "algorithm": {"kl_in": "loss", "decoupled": True, "entropy_coeff": 0.01},
        "ppo": {"gen": GENERATION | {"temperature": 0.8}, "ppo_n_minibatches": 2, "kl_ctl": 0.1, "disable_value": True},
    },
    "sft": {"model": MODEL, "allocation": MICROBATCHES, "dataset": PAIRS},
    "dpo": {
        "model": MODEL,
        "allocation": MICROBATCHES,
        "dataset": PAIRS | {"train_path": "${oc.env:CURVES}/preferences.jsonl"},
    },
}
CASES = [f"{experiment}-{layout}" for experiment in EXPERIMENTS for layout in LAYOUTS]
METRICS: dict[str, tuple[str, ...]] = {"sft": ("loss", "grad_norm")}
METRICS["dpo"] = METRICS["sft"]
METRICS["grpo"] = (*METRICS["sft"], "actor_loss", "ppo_approx_kl", "task_reward", "advantage")
METRICS["ppo"] = (*METRICS["grpo"], "kl_reward", "critic_loss", "critic_grad_norm")
ATTEMPTS, BAD_INPUT = 3, 2
"""A run without one step is started again unless its input is bad: Ray fails to start on a busy machine."""


class CaseFailed(RuntimeError):
    """A case did not run to its end, or did not report a metric."""


def read_recording(file: Path) -> Recording:
    """Return what `record` wrote. Raises OSError, and ValueError for anything else."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not (isinstance(content, dict) and {"curves", "steps", "environment"} <= content.keys() and content["curves"]):
        raise ValueError("it holds no curves")
    return cast(Recording, content)


def main() -> int:
    parser = cli.parser_of("tools.curves", __doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the recording")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="CASE", help=f"patterns of: {' '.join(CASES)}")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="checkout to run (default: the current folder)")
    parser.add_argument("--steps", type=cli.integer(least=1), default=20, help="record: steps of a case (default: 20)")
    given = parser.parse_args()
    before = None
    try:
        if given.action == "compare":
            before = read_recording(given.file)
    except (OSError, ValueError) as error:
        parser.error(f"{given.file}: no recording ({error}); write one with `python -m tools.curves record`")
    if before is None and not given.file.absolute().parent.is_dir():
        parser.error(f"{given.file}: no such folder; make it first")
    cases = [case for case in (before["curves"] if before else CASES) if any(fnmatch(case, p) for p in given.cases)]
    if not cases:
        parser.error(f"--cases {' '.join(given.cases)} matches none of {' '.join(CASES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a running case is stopped
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    after = measure(cases, given.root.resolve(), before["steps"] if before else given.steps, console)
    if before is None:
        given.file.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
        return int(len(after["curves"]) < len(cases))
    for name, value in before["environment"].items():
        if value != (now := after["environment"].get(name)):
            console.print(f"Equality is not promised, {name} differs: {value} -> {now}", soft_wrap=True)
    table = Table("case", "steps equal", "first that differs", "metric", "recorded", "now")
    for case in cases:
        table.add_row(case, *table_row(before["curves"][case], after["curves"].get(case)))
    console.print(table)
    return int(any(before["curves"][case] != after["curves"].get(case) for case in cases))


def table_row(before: Curve, after: Curve | None) -> tuple[str, ...]:
    """Return how many steps are equal; step (from 1), metric and both values of the first difference. None: failed."""
    if after is None:
        return (f"0 of {len(before)}", "", "the run failed")
    pairs = list(zip(before, after, strict=True))
    equal = f"{sum(old == new for old, new in pairs)} of {len(pairs)}"
    for step, (old, new) in enumerate(pairs, start=1):
        for metric in (name for name in old if old[name] != new[name]):
            return (equal, f"step {step}", metric, *(repr(float.fromhex(curve[metric])) for curve in (old, new)))
    return (equal,)


def measure(cases: Sequence[str], root: Path, steps: int, console: Console) -> Recording:
    """Run the cases in `root`, one after the other. Return the recording; it lacks cases that failed."""
    curves, bar = {}, Progress(console=console, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory(prefix="curves-") as name, bar:
        environment = make_inputs(folder := Path(name))
        task = bar.add_task("", total=len(cases) * steps)
        for i, case in enumerate(cases):
            bar.update(task, description=case)
            began, show = time.monotonic(), partial(lambda done, n: bar.update(task, completed=done + n), i * steps)
            try:
                curves[case] = run_case(case, folder, root, steps, show)
                outcome = f"{steps} steps in {time.monotonic() - began:.0f} s"
            except CaseFailed as error:
                outcome = str(error)
            console.print(f"{i + 1}/{len(cases)} {case}: {outcome}", markup=False, soft_wrap=True)
    return {"environment": environment, "steps": steps, "curves": curves}


def make_inputs(folder: Path) -> dict[str, str]:
    """Write a random model, prompts and pairs to `folder`. Return what the numbers depend on beside the code."""
    import torch

    save_model(folder / "model", seed=1)
    sums = [(a, b) for a in range(10, 18) for b in range(20, 25)]
    (folder / "curve_reward.py").write_text(REWARD)
    prompts = [{"prompt": f"{a}+{b}=", "solutions": [str(a + b)]} for a, b in sums]
    write_jsonl(folder / "prompts.jsonl", prompts)
    write_jsonl(folder / "pairs.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums])
    preferences = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a - b)} for a, b in sums]
    write_jsonl(folder / "preferences.jsonl", preferences)
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.py"), *folder.glob("model/*.safetensors")])
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return {
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "cpu": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": "launch.threads_per_process=1, OMP_NUM_THREADS=1",
        "inputs": sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
    }


def run_case(case: str, folder: Path, root: Path, steps: int, show: Callable[[int], object]) -> Curve:
    """Run a case in the checkout `root` and read its curve. Raises CaseFailed."""
    experiment, layout = case.split("-")
    generator = "" if experiment in ("sft", "dpo") else "embedded.d1m1p1+"
    config = EXPERIMENTS[experiment] | {
        "experiment_name": "curves",
        "trial_name": case,
        "seed": 1,
        "monitor": {"tensorboard": False},
        "allocation_mode": generator + LAYOUTS[layout],
        "n_gpus_per_node": (layout != "1") + 1 + bool(generator),
        "launch": {"threads_per_process": 1, "startup_timeout_seconds": 1800},
        "exp_ctrl": {"total_train_epochs": steps, "total_train_steps": steps},
        "external_configs": {"cluster_config": {"fileroot": str(folder / case)}},
    }
    path, log = folder / f"{case}.yaml", folder / f"{case}.log"
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "core.quickstart", "ppo-math" if generator else experiment, "--config", str(path)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([_path(root), str(folder)])}
    environment |= {"CURVES": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(ATTEMPTS):
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                while process.poll() is None:
                    show(len(trained_rows(folder / case)))
                    time.sleep(0.2)
            finally:
                process.terminate()
        rows = trained_rows(folder / case)
        if rows or process.returncode == BAD_INPUT:
            break
    if process.returncode or len(rows) != steps:
        end = log.read_text(errors="replace")[-1500:]
        raise CaseFailed(f"exit code {process.returncode}, {len(rows)} steps; the output ends:\n{end}")
    if lacking := {metric for row in rows for metric in METRICS[experiment] if metric not in row}:
        raise CaseFailed(f"metrics.jsonl lacks {', '.join(sorted(lacking))}")
    return [{metric: float(row[metric]).hex() for metric in METRICS[experiment]} for row in rows]


def _path(root: Path) -> str:
    """Return a PYTHONPATH on which the packages of `root` come first."""
    return os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))


def trained_rows(folder: Path) -> list[dict[str, float]]:
    """Return a dict for each trained step of the run that writes below `folder`."""
    return [row for path in folder.rglob("metrics.jsonl") for row in read_rows(path) if "grad_norm" in row]


if __name__ == "__main__":
    sys.exit(main())
