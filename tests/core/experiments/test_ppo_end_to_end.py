"""The real command line, real Ray, real megatron ranks and generators, on a model of a few thousand parameters."""

import ast
import fcntl
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from core.monitoring.health import RULES
from core.monitoring.samples import read_samples
from helpers.commands import PATIENCE_SECONDS
from helpers.runs import WITHOUT_GOODBYE, came_back, changed, metrics_of, ppo, process_of, wait_for_match
from tools.timeline import read_spans

TUTORIAL_METRICS = [
    "ppo_approx_kl", "actor_loss", "actor_clip_ratio", "importance_weight", "task_reward", "kl_reward", "final_reward",
    "advantage", "avg_seq_len", "avg_prompt_len", "n_tokens", "n_valid_tokens", "n_seqs", "no_eos_ratio",
    "disable_value", "mask_no_eos_with_zero",
]  # fmt: skip
STAMP = r"\d{8}-\d\d:\d\d:\d\d\.\d{3} "
STEP_LINE = re.compile(
    STAMP + r"master worker INFO: Epoch (\d+)/(\d+) step (\d+)/(\d+) \(global step (\d+)\) finishes\. "
    r"Average #tokens per batch is \d+\. #End to end# execution time: \*\d+\.\d{3}\*s\. "
    r"Total time consumption: \d+\.\d{3}s\.( Estimated remaining time: \d+\.\d{3}s\.)?$",
    re.MULTILINE,
)


def trained_steps(command) -> list[int]:
    return [m["step"] for m in metrics_of(command) if "task_reward" in m]


def test_a_run_logs_trains_saves_and_leaves_no_process_behind(assets, run_command, tmp_path: Path) -> None:
    """With critic, reference and two minibatches."""
    evaluation, data = {"path": str(assets.prompts), "num_prompts": 5}, tmp_path / "prompts.jsonl"
    long = [json.dumps({"prompt": "9" * length, "solutions": ["9"]}) for length in (9, 10, 11, 12, 13)]
    data.write_text("\n".join([assets.prompts.read_text().strip(), *long]))
    config = ppo(
        assets,
        dataset={"path": str(data)},
        critic={"init_critic_from_actor": True, "optimizer": {"lr": 1e-3}},
        ppo={"ppo_n_minibatches": 2, "kl_ctl": 0.1, "disable_value": False},
        evaluation=evaluation,
        monitor={"tensorboard": True},
        exp_ctrl={"eval_freq_epochs": 1},
    )
    command = run_command("ppo-math", config, fresh=True)
    command.wait_for("global step 1")
    family = command.remember_family()
    unused = ("monitor.py", "log_monitor.py", "dashboard.py")
    assert command.scripts().isdisjoint(unused), "parts of Ray that no run needs"
    assert command.finish() == 0, command.output()[-4000:]
    assert len(family) > 3 and command.survivors() == []
    output = command.output()

    steps = STEP_LINE.findall(output)
    assert [tuple(map(int, s[:5])) for s in steps] == [(1, 1, i, 5, i) for i in range(1, 6)]
    assert [bool(s[5]) for s in steps] == [False, False, True, True, True]
    num_rows = len(data.read_text().splitlines())
    long_ones = rf"{data}: 5 of {num_rows} prompts are left out: 5 with more than dataset.max_prompt_len=8 tokens "
    assert re.findall(rf"(\w+): {long_ones}\(the longest has 13\)", output) == ["WARNING"]
    line = re.search(STAMP + r"master worker INFO: RPC name actor_train returns (\{.*\})$", output, re.MULTILINE)
    assert line is not None and list(ast.literal_eval(line[1]))[: len(TUTORIAL_METRICS)] == TUTORIAL_METRICS
    phases = re.findall(r"Step time: (.*)", output)
    assert ["wait for rollout" in line for line in phases] == [True] * 5
    assert ["evaluate" in line for line in phases] == [True, False, False, False, True]
    assert len(re.findall(r"Staleness of the batch", output)) == 5

    rows = [m for m in metrics_of(command) if "task_reward" in m]
    assert [m["n_seqs"] for m in rows] == [32.0] * 5
    assert max(m["staleness/max"] for m in rows) <= 2
    # The first batch is on policy: generator and trainer must agree on the log-probability of every token.
    assert abs(rows[0]["behave_approx_kl"]) < 1e-4 and rows[0]["behave_imp_weight"] == pytest.approx(1.0, abs=1e-4)
    assert rows[0]["kl_reward"] == pytest.approx(0.0, abs=1e-6), "the actor starts as its reference"
    assert rows[-1]["kl_reward"] != 0.0
    assert all(m["critic_value_loss"] > 0 and m["critic_grad_norm"] > 0 for m in rows)
    assert rows[0]["disable_value"] == 0.0
    computed = {"old_log-probs", "ref_log-probs", "values", "critic_update", "update", "push"}
    assert {f"time/{phase}" for phase in computed} <= rows[0].keys()
    kinds = [(sample.step, bool(sample.evaluation)) for sample in read_samples(command.logs)]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [*((step, False) for step in range(1, 6)), (5, True)]
    evaluated = [m for m in metrics_of(command) if "eval/accuracy" in m]
    assert [m["step"] for m in evaluated] == [0, 5] and all(0 <= m["eval/accuracy"] <= 1 for m in evaluated)
    assert [m["step"] for m in rows if "time/evaluate" in m] == [1, 5], "step 1 contains the evaluation before it"

    for name in ("master_worker", "trainer-rank0", "generator-0", "rollout"):
        assert (command.logs / f"{name}.log").is_file()
    assert list((command.logs / "tensorboard").glob("events.*"))
    recorded = {(span.process, span.name) for span in read_spans(command.logs)}
    assert {name for rule in RULES for name in rule.needs} <= {name for row in rows for name in row}
    assert recorded > {
        ("driver", "step"), ("driver", "push"), ("rollout", "take"), ("rollout", "request"), ("rollout", "judge"),
        ("generator-0", "receive"), ("trainer-rank0", "warm-up"), ("trainer-rank0", "train step"),
        ("trainer-rank0", "optimizer"),
    }  # fmt: skip
    saved = command.checkpoints / "actor" / "epoch1epochstep5globalstep5"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    import torch

    generated = model.generate(torch.tensor([tokenizer("1+1=")["input_ids"]]), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > 4
    before = AutoModelForCausalLM.from_pretrained(assets.model)
    assert not torch.equal(before.model.norm.weight, model.model.norm.weight)


def ended_by_signal(command) -> int:
    """Check that a run that got a signal has ended in order, and saved the last step that it finished; return it."""
    assert command.finish() == 130, command.output()[-4000:]
    assert command.survivors() == []
    steps = trained_steps(command)
    assert steps == list(range(1, len(steps) + 1))
    assert "Traceback" not in command.output() and WITHOUT_GOODBYE not in command.output()
    (model,) = (command.checkpoints / "actor").iterdir()
    assert model.name.endswith(f"globalstep{steps[-1]}") and (model / "model.safetensors").is_file()
    return steps[-1]


def recover_checkpoints(command) -> list[str]:
    return sorted(path.name for path in command.root.glob("recover/*/test/trial/globalstep*"))


def test_ctrl_c_and_further_ones_save_once_and_the_same_command_continues_where_it_was(assets, run_command) -> None:
    """In a run whose trainer was given the CPU, and shares its slot with a mock generator."""
    config = ppo(
        assets,
        allocation_mode="mock.d1m1p1",
        n_gpus_per_node=1,
        launch={"trainer_device": "cpu", "threads_per_process": 1},
        recover_mode="auto",
        actor={"optimizer": {"lr": 1e-3, "lr_scheduler_type": "linear"}},
        exp_ctrl={"total_train_epochs": 10000, "save_freq_epochs": None},
    )
    starting = run_command("ppo-math", config)
    starting.wait_for("Launching experiments with RAY")
    starting.process.send_signal(signal.SIGINT)
    assert starting.finish() == 130 and "Interrupted. " in starting.output(), starting.output()[-4000:]
    assert "Traceback" not in starting.output() and WITHOUT_GOODBYE not in starting.output()

    before = len(starting.output())
    first = run_command("ppo-math", config)
    first.wait_for("global step 3)")
    first.remember_family()
    os.killpg(first.process.pid, signal.SIGINT)
    first.wait_for("Dumped recover info to file.")
    with suppress(ProcessLookupError):  # further ones change nothing
        while first.process.poll() is None:
            os.killpg(first.process.pid, signal.SIGINT)
            time.sleep(0.05)
    last = ended_by_signal(first)
    assert f"globalstep{last}" in recover_checkpoints(first)
    said = first.output()[before:]
    assert "actor_gen: mock on cpu (mock generators run on the CPU)" in said
    assert "actor_train, actor_inf: megatron on cpu (launch.trainer_device=cpu)" in said
    assert "INFO: actor_gen: mock on cpu" in (first.logs / "master_worker.log").read_text()
    assert said.count("Interrupted. ") == said.count("Interrupted. Continue with: ") == 1
    assert "KeyboardInterrupt" not in said

    end = last + 3
    second = run_command("ppo-math", changed(config, {"exp_ctrl": {"ckpt_freq_steps": 1, "total_train_steps": end}}))
    assert second.finish() == 0, second.output()[-4000:]
    recovered = re.search(r"Recovered from .*: (\d+) steps are done", second.output())
    assert recovered is not None and int(recovered[1]) == last
    assert trained_steps(second) == list(range(1, end + 1))
    # The optimizer came back with its count of updates: the schedule goes on where it was.
    rows = [m for m in metrics_of(second) if "lr" in m]
    assert all(m["n_seqs"] == 32.0 and m["push/gigabytes"] > 0 for m in rows)
    assert [m["lr"] for m in rows[last:]] == pytest.approx([1e-3 * (1 - step / end) for step in range(last, end)])
    assert recover_checkpoints(second) == [f"globalstep{end - 1}", f"globalstep{end}"]


@pytest.mark.nightly
def test_a_storm_of_sigterm_saves_like_one(assets, run_command) -> None:
    """As of process managers that repeat theirs until the process is gone."""
    command = run_command(
        "ppo-math",
        ppo(
            assets,
            allocation_mode="mock.d1m1p1+d1m1p1",
            recover_mode="auto",
            exp_ctrl={"total_train_epochs": 10000, "save_freq_epochs": None},
        ),
    )
    command.wait_for("global step 3)")
    command.remember_family()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM) * 20:
        with suppress(ProcessLookupError):
            command.process.send_signal(number)
        time.sleep(0.1)
    last = ended_by_signal(command)
    assert f"globalstep{last}" in recover_checkpoints(command)
    assert command.output().count("Interrupted. Continue with: ") == 1


@pytest.mark.nightly
def test_a_run_whose_terminal_is_closed_saves_and_ends(assets, tmp_path: Path) -> None:
    config = {
        "experiment_name": "test",
        "trial_name": "trial",
        "allocation_mode": "d1m1p1",
        "external_configs": {"cluster_config": {"fileroot": str(tmp_path)}},
        "exp_ctrl": {"total_train_epochs": 10000},
        "model": {"path": str(assets.model)},
        "dataset": {"train_path": str(assets.pairs), "max_seqlen": 16, "train_bs_n_seqs": 8},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    ours, terminal = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-m", "core.quickstart", "sft", "--config", str(tmp_path / "run.yaml")],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    try:
        os.close(terminal)
        while not any(
            "global step 3)" in log.read_text() for log in tmp_path.glob("logs/*/test/trial/master_worker.log")
        ):
            os.read(ours, 65536)  # the terminal is read until the run is under way
        os.close(ours)
        assert command.wait(PATIENCE_SECONDS) == 130
    finally:
        command.kill()
    (log,) = tmp_path.glob("logs/*/test/trial/master_worker.log")
    steps = [int(step) for step in re.findall(r"global step (\d+)\)", log.read_text())]
    assert "Interrupted. Continue with: " in log.read_text()
    assert list(tmp_path.glob(f"recover/*/test/trial/globalstep{steps[-1]}/COMMITTED"))


def test_the_only_generator_comes_back_after_it_died_or_hung_while_the_run_waits(assets, run_command, tmp_path) -> None:
    """In a run from random weights, of which none are on the disk; SIGTERM to its process group, as from `timeout` and
    batch systems, ends it."""
    folder = tmp_path / "empty"
    shutil.copytree(assets.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = ppo(
        assets,
        actor={"path": str(folder), "init_from_scratch": True},
        recover_mode="disabled",
        generator={"health_interval_seconds": 0.5, "health_timeout_seconds": 10.0},
        exp_ctrl={"total_train_epochs": 10000, "save_freq_epochs": None},
    )
    command = run_command("ppo-math", config)
    command.wait_for("global step 3)")
    process_of(command, "generator-0").kill()
    command.wait_for("Restarting it (1 of 3)")
    assert "generator-0 failed: " in command.output()
    back = came_back(command, 0)
    process_of(command, "generator-0").send_signal(signal.SIGSTOP)
    gone = wait_for_match(command, r"generator-0 failed: no answer to a health check within (.*) \(stopped\)", back)
    assert gone[1] == "generator.health_timeout_seconds=10"
    stacks = (command.logs / "stacks" / "generator-0.txt").read_text()
    assert "(stopped): no answer to a health check" in stacks and "Thread 0x" in stacks and "File " in stacks
    came_back(command, 0, start=gone.end())
    command.wait_for(f"global step {trained_steps(command)[-1] + 5})")  # more than was on its way
    command.remember_family()
    os.killpg(command.process.pid, signal.SIGTERM)
    ended_by_signal(command)
    assert recover_checkpoints(command) == []
    assert "Interrupted. recover_mode=disabled: there is no checkpoint to continue" in command.output()


FAILING_WORKFLOW = """import asyncio

from rollout.workflows import SingleTurnMathWorkflow


class Failing(SingleTurnMathWorkflow):
    async def run(self, prompt, generator):
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ask())

    async def ask(self):
        raise RuntimeError("env down")
"""


@pytest.mark.nightly
def test_a_workflow_that_always_fails_ends_the_run_without_another_attempt(
    assets, run_command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_workflow.py").write_text(FAILING_WORKFLOW)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{tmp_path}")
    workflow = {"type": "my_workflow:Failing", "on_error": "skip"}
    config = ppo(assets, allocation_mode="mock.d1m1p1+d1m1p1", recover_mode="auto", workflow=workflow)
    command = run_command("ppo-math", config)
    assert command.finish() == 1
    failed = r"for 11 of the last 11 prompts, more than workflow\.max_error_share=0\.1 of 100 may"
    place = r"my_workflow\.py, line 12, in ask; traceback: \S+/master_worker\.log"
    message = rf"workflow\.type: the workflow failed {failed}; correct the cause, .* RuntimeError: env down \({place}\)"
    assert len(re.findall(rf"ERROR: {message}$", command.output(), re.MULTILINE)) == 1
    assert "Restarting" not in command.output() and "Traceback" not in command.output()


def test_a_dead_ray_cluster_is_one_clear_error(assets, run_command) -> None:
    command = run_command("ppo-math", ppo(assets, launch={"ray_address": "127.0.0.1:1", "threads_per_process": 1}))
    assert command.finish() == 1
    assert "launch.ray_address=127.0.0.1:1" in command.output() and "Traceback" not in command.output()


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_ray_that_is_killed_or_stopped_under_a_run_ends_it_with_one_clear_error(assets, run_command, number) -> None:
    long = {"total_train_epochs": 10000}
    command = run_command("ppo-math", ppo(assets, allocation_mode="mock.d1m1p1", n_gpus_per_node=1, exp_ctrl=long))
    command.wait_for("global step 1)")
    family = [psutil.Process(pid) for pid in command.remember_family()]
    next(p for p in family if p.is_running() and p.name() == "raylet").send_signal(number)
    assert command.finish() != 0
    assert command.survivors() == []
    assert "Traceback" not in command.output()
    # Ray ends the driver without a word, unless the driver has noticed before that a worker does not answer.
    killed = rf"{WITHOUT_GOODBYE}|ERROR: .* exited: "
    stopped = r"had not run for 1\d s: raylet \(process \d+\) is stopped \(SIGSTOP\)"
    assert re.search(killed if number == signal.SIGKILL else stopped, command.output())
