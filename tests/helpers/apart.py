"""The two halves of a run as two processes of one host: they share a SQLite file and a folder of weights.

    python -m helpers.apart explore FOLDER      data set, workflow, rewards, producer and an embedded generator
    python -m helpers.apart train FOLDER        leases, passes, updates with Megatron on one rank, weights

FOLDER has `model` and `prompts.jsonl`. Both can be killed and started again at any time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from allocation import ParallelLayout
from core.algorithms.policy_gradient import PolicyGradient
from core.config.algorithm import AlgorithmSettings
from core.data.leased_batches import LeasedBatches
from core.data.rank_batch import RankBatch
from core.data.stored_batch import Use
from core.monitoring.sample_file import SampleWriter
from core.monitoring.samples import SampleSettings
from core.rollout_service import RolloutService
from core.rollout_settings import RolloutSettings
from core.step_batch import BatchRequest, Scoring, StepBatch
from core.weight_sync.folder import VersionFolder, follow
from helpers.engine_cases import make_engine
from helpers.mcore_ranks import Rank
from rollout.data.encoder import PromptFormat
from rollout.data.source import DataSource
from rollout.experience import Lessee, SQLiteExperience, make_rules
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.types import SamplingParams

NUM_STEPS, BATCH_SIZE, GROUP_SIZE, MAX_STALENESS, NUM_PROMPTS = 6, 4, 2, 1, 40
MAX_TOKENS = 256
NO_SAMPLES = SampleSettings(folder="", share=0.0, max_file_bytes=1, keep_files=1)


async def explore(folder: Path) -> None:
    """Sample until the last version is published."""
    experience = SQLiteExperience(folder / "experience.db")
    generator = EmbeddedGenerator(folder / "model", threads=1)
    sampling = SamplingParams(max_new_tokens=3)
    settings = RolloutSettings(
        run="apart", tokenizer_path=str(folder / "model"), dataset=DataSource(path=str(folder / "prompts.jsonl")),
        eval_sets=[], num_eval_prompts=None, max_prompt_len=8, batch_size=BATCH_SIZE, group_size=GROUP_SIZE,
        max_staleness=MAX_STALENESS, over_age="wait", in_order=False, num_epochs=1, num_steps=NUM_STEPS,
        sampling=sampling, eval_sampling=replace(sampling, temperature=0.0), max_in_flight=4, workflow="math",
        on_error="skip", prompt_format=PromptFormat(), samples=NO_SAMPLES, reward="math", reward_workers=1,
        reward_timeout_seconds=10.0, seed=1, shuffle=True, health_interval_seconds=5.0, health_timeout_seconds=60.0,
        generator_patience_seconds=0.0,
    )  # fmt: skip
    service = RolloutService([generator], settings, experience)
    with VersionFolder(folder / "weights", lease_seconds=3.0).subscribe("explore") as subscription:
        while (version := await follow(subscription, generator)) is None:
            await asyncio.sleep(0.05)
        await service.start()
        await service.begin(version, None, ignore_changes=False)
        while version < NUM_STEPS:
            await asyncio.sleep(0.05)
            if (newer := await follow(subscription, generator)) is not None:
                version = newer
                service.set_version(version)
        await service.close()
        await generator.close()


async def train(folder: Path) -> None:
    """Train the steps that are not in `trained.jsonl`; a row is written when the weights of its step are published."""
    rows = folder / "trained.jsonl"
    done = len(rows.read_text().splitlines()) if rows.exists() else 0
    versions = VersionFolder(folder / "weights", lease_seconds=3.0)
    rules = make_rules(
        num_prompts=NUM_PROMPTS, batch_size=BATCH_SIZE, max_staleness=MAX_STALENESS, num_epochs=1, num_steps=NUM_STEPS
    )
    lessee = Lessee(SQLiteExperience(folder / "experience.db"), rules, name="train")
    batches = LeasedBatches(lessee, SampleWriter(NO_SAMPLES, str))
    algorithm = PolicyGradient(AlgorithmSettings(disable_value=True))
    published = versions.latest()
    start = folder / "model" if published is None else Path(published.where)
    with Rank(0, 1, f"file://{folder}/meeting-{os.getpid()}").joined(ParallelLayout()) as (parallel, device):
        engine = make_engine(parallel, device, str(start), optimizer={"lr": 1e-2})
        if published is None:
            versions.write(0, engine.iter_hf_weights(2**20), model_path=folder / "model")
        for step in range(done, NUM_STEPS):
            rollout = await batches.take(step)
            await batches.write_samples()
            use = Use(
                group="actor", planner=engine.planner, trains=True, max_tokens_per_mb=MAX_TOKENS,
                max_sequence_tokens=MAX_TOKENS,
            )  # fmt: skip
            request = BatchRequest(unit="sequence", num_minibatches=1, seed=step, version=step, uses=[use])
            batch = StepBatch(rollout, request, put=lambda arrays: arrays)
            fields, _ = batch.score(Scoring(algorithm=algorithm, objectives={"actor": algorithm}), {})
            rank = RankBatch(batch.stored, ("actor", 0), fetch=list)
            rank.add_fields(fields)
            metrics = engine.train_step(
                rank.minibatch(0, "actor", replay_routing=False), algorithm.loss, max_tokens_per_mb=MAX_TOKENS
            )
            latest = versions.latest()
            if latest is None or latest.version <= step:
                versions.write(step + 1, engine.iter_hf_weights(2**20), model_path=folder / "model")
            row = {"episodes": list(rollout.episodes), "ages": rollout.ages(step).tolist(), "loss": metrics["loss"]}
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            batches.trained(step + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    half, path = sys.argv[1:]
    asyncio.run({"explore": explore, "train": train}[half](Path(path)))
