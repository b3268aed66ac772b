"""Failures on real GPUs: memory that really runs out, a killed server, a killed trainer. `pytest -m gpu -s` prints what
was measured. The interpreter needs SGLang (or SLIPSTREAM_SGLANG_PYTHON names one that has it)."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from helpers.runs import came_back, lost, metrics_of, ppo, process_of, server_of
from rollout.inference.gpus import device_names, query_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
PYTHON = os.environ.get("SLIPSTREAM_SGLANG_PYTHON")
TOKENS = 512
"""Of a sequence of the supervised run."""


@pytest.fixture(scope="module")
def models(assets: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "small" for servers, with heads that their kernels have; "wide": 28 layers of 1536, to be made from scratch."""
    from transformers import Qwen2Config

    root = tmp_path_factory.mktemp("models")
    shapes = {
        "small": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
        "wide": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    }
    found = {}
    for name, shape in shapes.items():
        folder = root / name
        config = Qwen2Config(
            vocab_size=16, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, **shape
        )
        if name == "small":
            assets.with_model(config, folder)
        else:
            shutil.copytree(assets.model, folder)
            config.save_pretrained(folder)
        found[name] = folder
    return found


def need(num_gpus: int) -> None:
    if len(query_gpus()) < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")


def supervised(models: dict[str, Path], data: Path, limit: int, trial: str) -> dict[str, Any]:
    return {
        "trial_name": trial,
        "allocation_mode": "d1m1p1",
        "n_gpus_per_node": 1,
        "allocation": {"mb_spec": {"max_tokens_per_mb": limit}},
        "exp_ctrl": {"total_train_epochs": 4},
        "model": {"path": str(models["wide"]), "init_from_scratch": True, "gradient_checkpointing": False},
        "dataset": {"train_path": str(data), "max_seqlen": TOKENS, "train_bs_n_seqs": 256},
    }


def test_a_microbatch_far_too_large_costs_a_few_tries_and_no_speed(models, run_command, tmp_path: Path) -> None:
    need(1)
    data = tmp_path / "long.jsonl"
    answer = "1+2=3" * ((TOKENS - 8) // 5)
    data.write_text("".join(json.dumps({"prompt": f"{i % 10}=", "answer": answer}) + "\n" for i in range(512)))
    too_large = run_command("sft", supervised(models, data, 1 << 20, "too-large"))
    assert too_large.finish(400) == 0, too_large.output()[-4000:]
    limits = [m for m in too_large.output().split("for the rest of the run allocation is ")[1:]]
    assert limits, "memory did not run out: this GPU has more of it than the test counts on"
    fitting = int(limits[-1].split()[0])
    right = run_command("sft", supervised(models, data, fitting, "right"))
    assert right.finish(400) == 0, right.output()[-4000:]
    seconds = {}
    for trial in ("too-large", "right"):
        (path,) = too_large.root.glob(f"logs/*/test/{trial}/metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        seconds[trial] = median(m["time/update"] for m in rows[2:])
    print(f"max_tokens_per_mb fell to {fitting} in {len(limits)} tries; median update {seconds}")
    assert seconds["right"] >= 0.9 * seconds["too-large"]


def asynchronous(assets: Any, models: dict[str, Path], allocation: str, num_gpus: int, **changes: Any) -> dict:
    sglang = changes.pop("sglang", {})
    return ppo(
        assets,
        allocation_mode=allocation,
        n_gpus_per_node=num_gpus,
        recover_mode="auto",
        recover_retries=2,
        actor={"path": str(models["small"]), "optimizer": {"lr": 1e-4}, "sglang": sglang},
        ppo={"gen": {"max_new_tokens": 64}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        generator={"max_running": 32, "health_interval_seconds": 2.0, "sglang_python": PYTHON},
        exp_ctrl={"total_train_epochs": 100000, "ckpt_freq_steps": 5},
        **changes,
    )


def test_a_killed_server_comes_back_alone(assets, models, run_command, monkeypatch) -> None:
    """On two GPUs the trainer is on that of the server that lives; NCCL does not take two of its ranks on one GPU."""
    need(2)
    changes: dict[str, Any] = {}
    if len(query_gpus()) == 2:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device_names([1, 0, 1]))
        changes = {"push": {"type": "disk"}, "sglang": {"mem_fraction_static": 0.3}}
    command = run_command("ppo-math", asynchronous(assets, models, "sglang.d2m1p1+d1m1p1", 3, **changes))
    command.wait_for("global step 10)", timeout=400)
    server = server_of(command, "generator-1")
    begin = time.monotonic()
    server.kill()
    came_back(command, 1, timeout=240)
    seconds = time.monotonic() - begin
    print(f"killed server to full rate: {seconds:.1f} s")
    rows = [m for m in metrics_of(command) if "task_reward" in m]
    assert [m["step"] for m in rows] == list(range(1, len(rows) + 1))
    assert all(m["staleness/max"] <= 2 and m["n_seqs"] == 32 and m["rollout/num_failures"] == 0 for m in rows)
    _, failed, why = command.output().partition("Attempt 1 failed")
    assert not failed, why[:4000]
    end(command)


def test_a_killed_trainer_rank_costs_an_attempt(assets, models, run_command) -> None:
    need(2)
    command = run_command("ppo-math", asynchronous(assets, models, "sglang.d1m1p1+d1m1p1", 2))
    command.wait_for("global step 10)", timeout=400)
    begin = time.monotonic()
    process_of(command, "trainer-rank0").kill()
    lost(command, 1)
    print(f"kill -9 of the trainer to the first step after: {time.monotonic() - begin:.1f} s")
    end(command)


def end(command: Any) -> None:
    """Ctrl-C; afterwards no process of the run is left and its GPUs are free."""
    family = command.remember_family()
    command.process.send_signal(signal.SIGTERM)
    assert command.finish(120) == 130
    assert command.survivors(timeout=30) == []
    holders = {user.pid for gpu in query_gpus() for user in gpu.users}
    assert not holders & family and not any(psutil.pid_exists(pid) and pid in holders for pid in family)
