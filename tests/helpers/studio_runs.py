"""Runs as files, made by the product's own writers, for the tests of the studio."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import psutil
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from core.data.rollout_batch import pack_trajectories
from core.monitoring.metrics import Histogram, Journal
from core.monitoring.samples import Sample, SampleFile, Turn
from core.runs.paths import RunPaths
from core.runs.record import write_complete, write_record
from core.train.step_batch import SavedSteps
from rollout.types import Trajectory

Change = Callable[[int, int], Mapping[str, float]]
"""(step, steps) -> the metrics of a step that differ from those of a healthy run."""


def healthy(step: int, steps: int) -> dict[str, float]:
    """Return the metrics of a step of a run without a fault."""
    at = step / steps
    noise = math.sin(12.9898 * step) * 0.01
    return {
        "reward/mean": 0.2 + 0.5 * at + noise, "reward/std": 0.4, "reward/min": 0.0, "reward/max": 1.0,
        "groups/equal": 0.2 + noise, "groups/solved": 0.1, "groups/unsolved": 0.1,
        "sampled_entropy": 1.2 - 0.3 * at + noise, "ppo_approx_kl": 0.002 + noise / 100,
        "ref_kl": 0.01 + 0.01 * at, "importance_weight": 1.0 + noise / 100,
        "actor_clip_ratio": 0.02, "behave_imp_weight": 1.001, "behave_approx_kl": 0.001,
        "answer_length/mean": 200 + 20 * at + 100 * noise, "answer_length/max": 400, "no_eos_ratio": 0.02,
        "loss": 0.01 + noise, "grad_norm": 0.5 + noise, "n_tokens": 12800.0, "n_seqs": 64.0,
        "staleness/mean": 0.8, "staleness/max": 1.0, "rollout/generators_busy": 0.9, "rollout/wait_seconds": 0.2,
        "reward/num_scored": 64.0 * step, "reward/num_error": 0.0, "reward/num_timeout": 0.0, "reward/num_crash": 0.0,
        "router/num_generators": 2.0, "router/slowest_share": 0.95, "rollout/num_skipped": 0.0, "update_skipped": 0.0,
        "memory/driver_gib": 0.5, "memory/trainer_gib": 3.0, "memory/rollout_gib": 0.6, "tokens_per_second": 6400.0,
        "time/wait_for_rollout": 0.1, "time/update": 1.4, "time/push": 0.2, "time/step": 2.0,
    }  # fmt: skip


def without_signal(step: int, steps: int) -> dict[str, float]:
    """Return what differs in a run whose groups come to have equal rewards, and whose reward then does not rise."""
    return {"groups/equal": min(1.0, 0.3 + step / steps), "reward/mean": 0.2 + 0.3 * min(1.0, 2 * step / steps)}


def make_run(
    root: Path,
    name: str = "sums/good",
    *,
    steps: int = 40,
    change: Change = lambda step, steps: {},
    config: Mapping[str, object] | None = None,
    answer: Callable[[int, int], str] = lambda step, index: f"The sum is {step + index}.",
    complete: bool = True,
) -> RunPaths:
    """Write the files of a run: metrics, evaluations, two groups of four samples a step, its record."""
    experiment, _, trial = name.partition("/")
    paths = RunPaths.for_trial(str(root), experiment, trial)
    paths.logs.mkdir(parents=True)
    write_record("ppo-math", config or {"seed": 1, "staleness": {"max_staleness": 2}}, paths, ["python"])
    metrics = Journal(paths.logs / "metrics.jsonl", continue_after=None)
    samples = SampleFile(paths.logs, continue_after=-1, max_bytes=20_000, keep=50)
    for step in range(1, steps + 1):
        row: dict[str, object] = {**healthy(step, steps), **change(step, steps)}
        metrics.write(step, {**row, "staleness/ages": Histogram(np.array([0] * 40 + [1] * 20 + [2] * 4))})
        if step % 10 == 0:
            evaluation = {"eval/accuracy": 0.3 + 0.4 * step / steps, "eval/reward": 0.3 + 0.4 * step / steps}
            metrics.write(
                step, {**evaluation, **{k: v for k, v in change(step, steps).items() if k.startswith("eval/")}}
            )
        samples.write(_sample(step, row, answer, row_of, index) for row_of in range(2) for index in range(4))
    metrics.close()
    samples.close()
    if complete:
        write_complete(paths, {})
    return paths


def _sample(step: int, row: Mapping[str, object], answer: Callable[[int, int], str], prompt: int, index: int) -> Sample:
    text = answer(step, index)
    longest = step == 7 and prompt == 1 and index == 2
    return Sample(
        step=step, query_id=f"prompts-{prompt}", episode=f"prompts/prompts-{prompt}/{step}", index=index,
        prompt=f"{step}+{prompt}=", answer=text + " again" * 90 if longest else text,
        reward=float(index % 2), finish_reason="length" if longest else "stop", prompt_tokens=5,
        answer_tokens=512 if longest else 20 + index, oldest_version=max(0, step - 2), newest_version=step - 1,
        notable=("best",) if index == 1 and prompt == 0 else (), reference=str(step + prompt),
        turns=(Turn(by="model", text=text), Turn(by="environment", text="wrong")) if index == 3 else (),
        metrics={"reward/format": 1.0},
    )  # fmt: skip


CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz<>/_"


def make_agent_run(root: Path, name: str = "sums/agent") -> RunPaths:
    """Write a run of an agent with one rollout of two branches, and what the pages of one step read: the saved batch
    with a tokenizer, spans of every lane, a log and a process."""
    paths = make_run(root, name, steps=4, config={"seed": 1, "actor": {"path": str(root / "model")}})
    _write_tokenizer(root / "model")
    samples = SampleFile(paths.logs, continue_after=4, max_bytes=1 << 20, keep=50)
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    asked = (Turn(by="model", text=call), Turn(by="environment", text="<tool_response>3</tool_response>"))
    samples.write(
        Sample(
            step=4, query_id="agent", episode="agent/0", index=index, prompt="1+2=", answer=call + "3" + last,
            reward=float(index), finish_reason="stop", prompt_tokens=4, answer_tokens=40, oldest_version=3,
            newest_version=3, turns=(*asked, Turn(by="model", text=last)), rollout=0,
        )
        for index, last in enumerate(("it is 4", "it is 3"))
    )  # fmt: skip
    samples.close()
    _save_batch(paths.logs / "batches")
    _write_spans(paths.logs / "spans")
    (paths.logs / "master_worker.log").write_text("1 INFO: step 4\n2 WARNING: <b>slow</b>\n")
    (paths.logs / "stacks").mkdir()
    me = {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": os.uname().nodename}
    (paths.logs / "stacks" / "driver.txt").write_text(json.dumps(me) + "\n")
    return paths


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def _save_batch(folder: Path) -> None:
    """Save step 4: one group of two answers, of which the second is right and has an unlikely last token."""
    group = [_trajectory("1+2=", last, float(index)) for index, last in enumerate(("it is 4", "it is 3"))]
    batch = pack_trajectories([group], ["agent/0"])
    num_tokens = len(batch.token_ids)
    logprobs = torch.from_numpy(batch.rollout_logprobs)
    fields = {
        "rollout_logprobs": logprobs,
        "old_logprobs": logprobs * torch.linspace(0.8, 1.2, num_tokens),
        "loss_mask": torch.from_numpy(batch.loss_mask),
        "ages": torch.zeros(num_tokens, dtype=torch.int64),
        "entropy": torch.linspace(0, 2, num_tokens),
    }
    lens = np.diff(batch.cu_seqlens)
    advantages = torch.from_numpy(np.repeat([-1.0, 1.0], lens) * batch.loss_mask)
    SavedSteps(folder=folder, every=4, name="grpo", settings={}).save(4, {}, batch, fields, advantages)


def _trajectory(prompt: str, answer: str, reward: float) -> Trajectory:
    ids = np.array([CHARACTERS.index(c) for c in prompt + answer], np.int32)
    sampled = np.arange(len(ids)) >= len(prompt)
    logprobs = np.where(sampled, -0.1, 0).astype(np.float32)
    logprobs[-1] = -3.0
    return Trajectory(
        query_id="agent", token_ids=ids, loss_mask=sampled, rollout_logprobs=logprobs,
        versions=np.where(sampled, 3, -1).astype(np.int32), reward=reward, finish_reason="stop", rollout=0,
    )  # fmt: skip


def _write_spans(folder: Path) -> None:
    """Write steps 3 and 4 of the driver, an update of the trainer, and six requests to one generator, three at once."""
    folder.mkdir()
    second = 1_000_000
    lanes = {
        "driver": [["step", "steps", i * second, second, {"step": i}] for i in (3, 4)]
        + [["wait for rollout", "", i * second, 600_000, {}] for i in (3, 4)],
        "trainer-rank0": [["train step", "", 4_700_000, 250_000, {}]],
        "rollout": [
            ["request", "generator-0", 4_000_000 + i * 100_000, 280_000, {"tokens": 40 + i, "end": "stop"}]
            for i in range(6)
        ],
    }
    for name, spans in lanes.items():
        head = {"process": name, "host": "h", "pid": 1}
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [head, *spans]))
