"""Small runs of the command line, their metrics, and their processes."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from helpers.commands import PATIENCE_SECONDS

WITHOUT_GOODBYE = "error: the driver ended without a message"


def ppo(assets, **changes) -> dict:
    """A configuration of 5 steps an epoch, 8 prompts x 4 answers a step."""
    config = {
        "allocation_mode": "embedded.d1m1p1+d1m1p1",
        "n_gpus_per_node": 2,
        "group_size": 4,
        "group_adv_norm": True,
        "actor": {"path": str(assets.model), "optimizer": {"lr": 1e-3}},
        "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": 8, "max_prompt_len": 8},
        "ppo": {"gen": {"max_new_tokens": 6}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "exp_ctrl": {"total_train_epochs": 1, "save_freq_epochs": 1},
        "staleness": {"max_staleness": 2},
        "reward": {"num_workers": 1},
        "monitor": {"tensorboard": False},
    }
    return changed(config, changes)


def mock_ppo(assets, **changes) -> dict:
    """Ten steps an epoch, 4 prompts x 2 answers a step on mock generators, and the same batches in every run."""
    config = {
        "allocation_mode": "mock.d1m1p1+d1m1p1",
        "n_gpus_per_node": 2,
        "recover_mode": "auto",
        "group_size": 2,
        "group_adv_norm": True,
        "monitor": {"tensorboard": False},
        "actor": {"path": str(assets.model), "optimizer": {"lr": 1e-3}},
        "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": 4, "max_prompt_len": 8},
        "ppo": {"gen": {"max_new_tokens": 24}, "ppo_n_minibatches": 2, "kl_ctl": 0.0, "disable_value": True},
        "staleness": {"max_staleness": 2, "in_order": True},
        "generator": {"mock_seconds_per_token": 0.002},
        "reward": {"function": "tools.bench.workload:coin_reward", "num_workers": 1},
        "exp_ctrl": {"ckpt_freq_steps": 1},
    }
    return changed(config, changes)


def changed(config: dict, changes: Mapping[str, object]) -> dict:
    """The configuration with these keys; those of a section come over its other keys."""
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config


def rows(command, name: str) -> list[dict]:
    return [json.loads(line) for line in (command.logs / name).read_text().splitlines()]


def metrics_of(command) -> list[dict]:
    return rows(command, "metrics.jsonl")


def lost(command, number: int) -> str:
    """What ended attempt `number`, once it is over and the next one has begun to train."""
    match = wait_for_match(command, rf"Attempt {number} failed after step (\d+): (.*)\. Restarting")
    wait_for_match(command, rf"global step {int(match[1]) + 1}\) finishes", start=match.end())
    return match[2]


def wait_for_match(command, pattern: str, start: int = 0, timeout: float = PATIENCE_SECONDS) -> re.Match[str]:
    deadline = time.monotonic() + timeout
    while (match := re.compile(pattern).search(command.output(), start)) is None:
        assert command.process.poll() is None, f"ended before {pattern!r}:\n{command.output()[-4000:]}"
        assert time.monotonic() < deadline, f"no {pattern!r}:\n{command.output()[-4000:]}"
        time.sleep(0.1)
    return match


def process_of(command, name: str) -> psutil.Process:
    """The worker of this name in the attempt that runs now."""
    command.remember_family()
    said = json.loads((command.logs / "stacks" / f"{name}.txt").read_text().partition("\n")[0])
    return psutil.Process(said["pid"])


def server_of(command, name: str) -> psutil.Process:
    """The SGLang server of a generator: the first of its processes that run hooks/main.py."""
    children = process_of(command, name).children(recursive=True)
    return min((p for p in children if "hooks/main.py" in _command_line(p)), key=lambda p: p.create_time())


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # such as the server's that compiled kernels
        return " ".join(process.cmdline())
    return ""


def came_back(command, index: int, start: int = 0, timeout: float = PATIENCE_SECONDS) -> int:
    """Return when generator `index` has its weights and the run has made another step; how far the output is then."""
    wait_for_match(command, rf"generator-{index} has restarted", start, timeout)
    deadline = time.monotonic() + timeout
    while f"generator-{index} has rejoined" not in (command.logs / "rollout.log").read_text():
        assert time.monotonic() < deadline, command.output()[-4000:]
        time.sleep(0.1)
    return wait_for_match(command, r"global step \d+\) finishes", len(command.output())).end()
