"""Memory runs out in every phase of a run, which goes on by itself to the result that it would have had."""

import json
import os
from pathlib import Path

import pytest
import torch

from core.errors import LaunchError
from core.train.recover import MemoryLimits, reports_out_of_memory
from helpers import memory_faults
from helpers.memory_faults import run_out
from helpers.runs import ppo
from mcore_adapter.data.planner import PassLimits
from mcore_adapter.engine import WARM_UP_TOKENS
from mcore_adapter.memory.out_of_memory import StepOutOfMemory, is_out_of_memory


def test_every_way_in_which_memory_runs_out_is_known() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60)
    assert is_out_of_memory(of_torch.value) and reports_out_of_memory(str(of_torch.value))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(ValueError("out of memory"))


def test_memory_runs_out_where_a_fault_is_injected(tmp_path: Path) -> None:
    marker = tmp_path / "once"
    faults = f"train:rank=1:over=64,save:once={marker}"
    run_out(faults, "train", rank=0, tokens=100)
    run_out(faults, "train", rank=1, tokens=64)
    run_out(faults, "logprobs", rank=1, tokens=100)
    with pytest.raises(MemoryError):
        run_out(faults, "train", rank=1, tokens=65)
    with pytest.raises(MemoryError):
        run_out(faults, "save")
    run_out(faults, "save")


def test_a_limit_is_halved_down_to_the_longest_sequence_and_no_further() -> None:
    told: list[dict[str, float]] = []
    memory = MemoryLimits({"ref_inf": 64}, on_lowered=told.append)
    tried: list[int] = []

    def call(limits: PassLimits) -> int:
        limit = limits.max_tokens_per_mb
        tried.append(limit)
        largest = min(limit, 300)  # the batch has no more
        if largest > 40:
            raise StepOutOfMemory("full", largest, 31, True)
        return limit

    assert memory.fitting("actor_train", 16384, call) == 37
    assert tried == [16384, 150, 75, 37]
    assert told[-1] == {"ref_inf": 64, "actor_train": 37}
    assert memory.tokens("actor_train", 16384) == 37 and memory.tokens("ref_inf", 16384) == 64

    def never(limits: PassLimits) -> int:
        raise StepOutOfMemory("full", limits.max_tokens_per_mb, 31, True)

    with pytest.raises(LaunchError, match="longest sequence 31. Use more tensor or pipeline parallelism"):
        memory.fitting("actor_train", 16384, never)


def inject(monkeypatch: pytest.MonkeyPatch, faults: str) -> None:
    """Have commands run out of memory that start in new interpreters (`fresh`): the faults come with imports."""
    for name, value in memory_faults.environment(faults).items():
        monkeypatch.setenv(name, value)


def losses(root: Path, trial: str) -> list[tuple[float, ...]]:
    (path,) = root.glob(f"logs/*/test/{trial}/metrics.jsonl")
    rows = [m for m in map(json.loads, path.read_text().splitlines()) if "task_reward" in m]
    assert [m["step"] for m in rows] == list(range(1, 6))
    names = ("actor_loss", "grad_norm", "task_reward", "kl_reward", "avg_seq_len")
    return [tuple(m[name] for name in names) for m in rows]


@pytest.mark.nightly
def test_a_run_that_runs_out_of_memory_everywhere_ends_as_one_that_does_not(
    assets, run_command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ppo(
        assets,
        recover_mode="auto",
        staleness={"max_staleness": 0},
        ppo={"kl_ctl": 0.1, "gen": {"max_new_tokens": 6}, "disable_value": True, "ppo_n_minibatches": 1},
        exp_ctrl={"total_train_epochs": 1, "ckpt_freq_steps": 2, "save_freq_epochs": None},
    )
    quiet = run_command("ppo-math", {**config, "trial_name": "quiet"})
    assert quiet.finish() == 0, quiet.output()[-4000:]

    once = {phase: f"{phase}:once={tmp_path / phase}" for phase in ("generate", "save")}
    inject(monkeypatch, ",".join([*once.values(), "train:over=60", "logprobs:over=50"]))
    command = run_command("ppo-math", {**config, "trial_name": "disturbed"}, fresh=True)
    assert command.finish() == 0, command.output()[-6000:]
    said = command.output()
    assert "failed after step" not in said
    assert "generator-0 failed: the engine failed: MemoryError" in said
    assert "a generator ran out of memory: for the rest of the run max_running is 64" in said
    assert "out of memory in training on rank" in said and "for the rest of the run actor_train is" in said
    assert "for the rest of the run ref_inf is" in said
    assert all(os.path.exists(tmp_path / phase) for phase in once)
    for disturbed, undisturbed in zip(losses(command.root, "disturbed"), losses(quiet.root, "quiet"), strict=True):
        assert disturbed == pytest.approx(undisturbed, rel=1e-4, abs=1e-6)


@pytest.mark.nightly
def test_what_cannot_be_repeated_in_place_goes_on_in_another_attempt_with_what_was_learnt(
    assets, run_command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = f"train:rank=1:over={WARM_UP_TOKENS}:once={tmp_path / 'train'}"  # in an update, not in the warm-up
    inject(monkeypatch, f"init:once={tmp_path / 'init'},{train}")
    command = run_command(
        "sft",
        {
            "allocation_mode": "d1m2p1",
            "n_gpus_per_node": 2,
            "recover_mode": "auto",
            "recover_retries": 2,
            "exp_ctrl": {"total_train_epochs": 1},
            "model": {"path": str(assets.model)},
            "dataset": {"train_path": str(assets.pairs), "max_seqlen": 16, "train_bs_n_seqs": 8},
        },
        fresh=True,
    )
    assert command.finish() == 0, command.output()[-4000:]
    said = command.output()
    assert "Attempt 1 failed after step 0: out of memory in the initialisation of default" in said
    assert "holds" in said.partition("out of memory in the initialisation")[2].partition("\n")[0]
    assert "Attempt 2 failed after step 0: out of memory in training on rank 1" in said
    rows = [json.loads(line) for line in (command.logs / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and all(m["num_microbatches"] > 1 for m in rows)
