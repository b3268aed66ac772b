"""Evaluation during training, on one held-out set and on several."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from core.checks.recipe import recipe_problems
from core.config.experiments import PPOMATHConfig
from core.data.rollout_batch import RolloutBatch
from core.explore.data import RunData
from core.explore.service import RolloutService
from core.monitoring.metrics import read_rows
from core.monitoring.samples import read_samples
from helpers.chat_tokenizer import chat_tokenizer
from helpers.sglang_environment import Models
from rollout.data.encoder import Encoder
from rollout.data.source import DatasetError
from rollout.errors import GeneratorGone, OnError, WorkflowFailureError
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.inference.mock import MockGenerator
from rollout.inference.router import NoGeneratorError
from rollout.types import Completion, GenerateRequest, Generator, Prompt, SamplingParams, Trajectory
from rollout.workflows import SingleTurnMathWorkflow

ZERO = "helpers.rewards:zero"
"""A reward whose worker starts fast."""


def config_of(
    assets,
    eval_paths: list[str],
    workflow: str = "math",
    reward: str = "math",
    samples: float = 0.0,
    max_staleness: int = 0,
    on_error: OnError = "skip",
    sets: dict[str, dict[str, Any]] | None = None,
    replay: float = 0.0,
) -> PPOMATHConfig:
    return PPOMATHConfig.model_validate({
        "experiment_name": "service", "trial_name": "one",
        "actor": {"path": str(assets.model)},
        "dataset": {"path": str(assets.prompts), "max_prompt_len": 8, "train_bs_n_seqs": 4},
        "evaluation": {"path": eval_paths, "num_prompts": 6, "sets": sets or {}},
        "ppo": {"gen": {"max_new_tokens": 3}},
        "group_size": 2,
        "staleness": {"max_staleness": max_staleness},
        "workflow": {"type": workflow, "on_error": on_error},
        "samples": {"share": samples},
        "experience": {"replay": {"share": replay, "max_age": 2}} if replay else {},
        "reward": {"function": reward, "right_at": 0.2, "num_workers": 1},
        "generator": {"max_running": 3, "patience_seconds": 0.0},
    })  # fmt: skip


def service(
    assets, generator: Any, eval_paths: list[str], *, logs: str | Path = "", reward: str = ZERO, **options: Any
) -> RolloutService:
    config = config_of(assets, eval_paths, reward=reward, **options)
    return RolloutService({"generator-0": generator}, config, Path(logs), put=lambda arrays: arrays, fetch=list)


@asynccontextmanager
async def started(
    assets, generator: Any, eval_paths: Sequence[str] = (), *, begins: bool = False, **options: Any
) -> AsyncIterator[RolloutService]:
    """A service that has started, and with `begins` admits prompts."""
    made = service(assets, generator, list(eval_paths), **options)
    try:
        await made.start()
        if begins:
            await made.begin(0, None, ignore_changes=False)
        yield made
    finally:
        await made.close()


def evaluated(assets, generator: Any, **options: Any) -> dict[str, float]:
    """The figures of an evaluation on the prompts of `assets`."""

    async def evaluate() -> dict[str, float]:
        async with started(assets, generator, [str(assets.prompts)], **options) as made:
            return await made.evaluate(0)

    return asyncio.run(evaluate())


def test_several_sets_are_evaluated_each_under_its_name(assets, tmp_path: Path) -> None:
    (tmp_path / "hard").mkdir()
    other = tmp_path / "hard" / "test.jsonl"
    # Every answer of at most three digits to this one is wrong.
    other.write_text(json.dumps({"prompt": "9+9=", "solutions": ["\\boxed{123456}"]}) + "\n")

    async def evaluate(paths: list[str]) -> dict[str, float]:
        generator = EmbeddedGenerator(assets.model, threads=1)
        made = service(assets, generator, paths, reward="math")
        try:
            facts = await made.start()
            assert facts.num_eval_prompts == (7 if len(paths) == 2 else 6)
            return await made.evaluate(0)
        finally:
            await made.close()
            await generator.close()

    alone = asyncio.run(evaluate([str(assets.prompts)]))
    both = asyncio.run(evaluate([str(assets.prompts), str(other)]))
    assert {f"prompts/{figure}" for figure in alone} < both.keys() and both["hard/accuracy"] == 0.0
    assert {k: both[f"prompts/{k}"] for k in alone} == pytest.approx(alone)


def test_a_run_needs_the_solutions_that_a_check_asks_for(assets, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "9+9="}) + "\n")
    config = config_of(assets, [str(held_out)], reward="math + helpers.rewards:zero")
    found = list(recipe_problems(config, lengths=False))
    (problem,) = (problem for problem in found if problem.key == "evaluation.path")
    with pytest.raises(DatasetError, match="no solution among the columns") as refused:
        RunData(config)
    assert problem.message == str(refused.value)


def test_the_driver_gets_what_every_data_set_leaves_out(assets, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"prompt": "9+9=", "solutions": ["18"]}, {"prompt": "9" * 30, "solutions": ["9"]}]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained, evaluated = RunData(config_of(assets, [str(held_out)])).facts().left_out
    assert (trained.path, trained.num_left_out) == (str(assets.prompts), 0)
    assert (evaluated.path, evaluated.num_rows, evaluated.num_too_long) == (str(held_out), 2, 1)


class Recording:
    """Answers with one token; every second answer is cut off."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        return Completion(
            token_ids=np.array([2], np.int32), logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32),
            finish_reason="stop" if len(self.requests) % 2 else "length",
        )  # fmt: skip

    async def close(self) -> None: ...


def test_an_evaluation_samples_the_first_prompts_as_configured_and_counts_positive_rewards(assets) -> None:
    generator = Recording()
    figures = {"accuracy": 0.0, "reward": 0.0, "mean_length_tokens": 1.0, "no_eos_ratio": 0.5}
    assert evaluated(assets, generator) == figures
    ends = (0, 1)  # padding and end of sequence
    expected = SamplingParams(max_new_tokens=3, temperature=0.0, stop_token_ids=ends)
    assert all(request.sampling == expected for request in generator.requests)
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    asked = [tokenizer.decode(request.prompt_ids) for request in generator.requests]
    lines = assets.prompts.read_text().splitlines()[:6]
    assert [text.replace(" ", "") for text in asked] == [json.loads(line)["prompt"] for line in lines]


class Praising(SingleTurnMathWorkflow):
    """Rewards every completion with a quarter, whatever the reward function scores."""

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        return [replace(t, reward=0.25) for t in await super().run(prompt, generator)]


def test_an_evaluation_uses_the_workflow_of_the_run_and_request_ids_of_its_own(assets) -> None:
    generator = Recording()
    figures = evaluated(assets, generator, workflow=f"{__name__}:Praising")
    assert (figures["accuracy"], figures["reward"]) == (1.0, 0.25)
    ids = [request.request_id for request in generator.requests]
    assert len(set(ids)) == 6 and all(name.startswith("eval-prompts/") for name in ids)


class Rendering(SingleTurnMathWorkflow):
    """Records what it renders messages with."""

    encoders: ClassVar[list[Encoder]] = []

    def __init__(self, *, encoder: Encoder, **settings: Any) -> None:
        super().__init__(**settings)
        self.encoders.append(encoder)


def test_a_workflow_renders_its_messages_as_the_prompts_of_its_set(assets) -> None:
    Rendering.encoders.clear()
    sets = {"own": {"path": str(assets.prompts), "system": "Be brief."}}

    async def start() -> list[int]:
        workflow = f"{__name__}:Rendering"
        async with started(assets, Recording(), [str(assets.prompts)], workflow=workflow, sets=sets) as made:
            config = made._config
        wanted = [*config.sets.values(), *config.evaluation_sets.values()]
        return [Encoder(made._data.tokenizer, config.set_format(one)).checksum for one in wanted]

    train, prompts, own = asyncio.run(start())
    assert [encoder.checksum for encoder in Rendering.encoders] == [train, prompts, own]
    assert train == prompts != own


def test_a_bench_job_says_that_answers_could_not_be_scored(assets, caplog: pytest.LogCaptureFixture) -> None:
    async def evaluate() -> dict[str, float]:
        reward = "helpers.rewards:length_of_auxiliary"  # this run has none
        made = service(assets, Recording(), [str(assets.prompts)], reward=reward)
        made._config = made._config.model_copy(update={"mode": "bench"})
        try:
            await made.start()
            return await made.evaluate(0)
        finally:
            await made.close()

    asyncio.run(evaluate())
    assert "completions could not be scored" in caplog.text and "set auxiliary.path" in caplog.text


async def test_a_bench_job_ends_with_the_loss_of_a_server_of_the_auxiliary_model(assets, tmp_path, monkeypatch) -> None:
    Models(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    given = config_of(assets, [str(assets.prompts)], reward="helpers.rewards:length_of_auxiliary")
    config = given.model_copy(
        update={
            "mode": "bench",
            "auxiliary": given.auxiliary.model_copy(update={"path": str(tmp_path)}),
            "generator": given.generator.model_copy(update={"health_interval_seconds": 0.1}),
        }
    )

    for name in ("SLIPSTREAM_AUXILIARY_URL", "SLIPSTREAM_AUXILIARY_KEY"):
        monkeypatch.setenv(name, "")  # restored after the test
    with pytest.raises(NoGeneratorError, match="auxiliary-0"):
        server = EmbeddedGenerator(tmp_path, threads=1)
        generators, frozen = {"generator-0": EmbeddedGenerator(assets.model, threads=1)}, {"auxiliary-0": server}
        job = RolloutService(
            generators, config, tmp_path / "logs", put=lambda arrays: arrays, fetch=list, auxiliary=frozen
        )
        try:
            await job.start()
            await job.evaluate(0)
            await server.close()
            with pytest.raises(NoGeneratorError):
                async with asyncio.timeout(60):
                    while True:
                        await job.check()
                        await asyncio.sleep(0.05)
            await job.evaluate(1)
        finally:
            await job.close()


class Failing(SingleTurnMathWorkflow):
    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        raise KeyError("no such tool")


@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_workflow_that_fails_in_an_evaluation_counts_as_wrong_or_ends_the_run(assets, on_error: OnError) -> None:
    options = {"workflow": f"{__name__}:Failing", "on_error": on_error}
    if on_error == "skip":
        assert evaluated(assets, Recording(), **options)["accuracy"] == 0.0
        return
    with pytest.raises(WorkflowFailureError, match=r"evaluation \(workflow.on_error=fail\).* KeyError: 'no such tool'"):
        evaluated(assets, Recording(), **options)


@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_generator_that_is_lost_in_an_evaluation_is_no_failure_of_the_workflow(assets, on_error: OnError) -> None:
    class Gone(Recording):
        async def generate(self, request: GenerateRequest) -> Completion:
            raise GeneratorGone("generator-0 exited")

    with pytest.raises(NoGeneratorError):
        evaluated(assets, Gone(), on_error=on_error)


def test_the_first_prompt_and_how_it_is_judged_are_described(assets) -> None:
    row = json.loads(assets.prompts.read_text().splitlines()[0])
    (solution,) = row["solutions"]
    said = RunData(config_of(assets, [])).facts().first_prompt
    assert said.startswith(
        f"First prompt ({len(row['prompt'])} tokens): {row['prompt']!r}; judged by reward.function=math"
    )
    assert said.endswith(f": right is {solution}")


class Watched:
    """How many requests the generator has at once, at most."""

    def __init__(self, generator: MockGenerator) -> None:
        self._generator = generator
        self._running = self.most = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            return await self._generator.generate(request)
        finally:
            self._running -= 1

    def __getattr__(self, name: str) -> object:
        return getattr(self._generator, name)


def test_prompts_start_by_the_requests_that_run_and_the_debug_log_shows_both(assets, caplog) -> None:
    """Below 4 a group of two begins: 5 at most, and never the eight of the step."""

    async def main() -> tuple[int, int]:
        generator = Watched(MockGenerator(str(assets.model), seconds_per_token=0.1))
        async with started(assets, generator, [str(assets.prompts)], begins=True) as made:
            batch, figures = await made.lease(0)
            assert not [name for name in figures if name.startswith("workflow/")], "this workflow reports nothing"
            return generator.most, batch.num_sequences

    with caplog.at_level(logging.DEBUG, logger="rollout"):
        assert asyncio.run(main()) == (5, 8)
    assert re.search(r"prompt 3 \(.+\) is admitted at version 0\n", caplog.text)
    assert re.search(r"request .+/0: \d+ prompt tokens and 0 sampled ones to generator-0, which has 0 ", caplog.text)
    assert re.search(r"request .+/1: (stop|length) after \d tokens\n", caplog.text)


class Counting(SingleTurnMathWorkflow):
    """Reports the number of the trajectory in its group."""

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        group = await super().run(prompt, generator)
        return [replace(t, metrics={"number": float(i), "length": len(t.token_ids)}) for i, t in enumerate(group)]


def test_what_a_workflow_reports_is_among_the_figures_of_its_batch(assets) -> None:
    async def main() -> tuple[RolloutBatch, dict[str, float]]:
        generator = MockGenerator(str(assets.model), seconds_per_token=0.0)
        async with started(assets, generator, workflow=f"{__name__}:Counting", begins=True) as made:
            return await made.lease(0)

    batch, figures = asyncio.run(main())
    lens = np.diff(batch.cu_seqlens)
    reported = {name.removeprefix("workflow/"): v for name, v in figures.items() if name.startswith("workflow/")}
    assert reported == {
        "number/mean": 0.5, "number/min": 0.0, "number/max": 1.0,
        "length/mean": lens.mean(), "length/min": lens.min(), "length/max": lens.max(),
    }  # fmt: skip
    assert "rollout/num_ready" in figures


def slow_down(made: RolloutService) -> None:
    """Let no row be written before others wait."""
    decode = made._samples._decode
    made._samples._decode = lambda tokens: (time.sleep(0.02), decode(tokens))[1]


def test_a_batch_is_in_the_file_of_samples_before_a_checkpoint_of_its_step(assets, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    async def main() -> tuple[RolloutBatch, list[str]]:
        generator = MockGenerator(str(assets.model), seconds_per_token=0.0)
        options: dict[str, Any] = {"samples": 1.0, "logs": tmp_path, "max_staleness": 1, "begins": True}
        async with started(assets, generator, [str(assets.prompts)], **options) as made:
            slow_down(made)
            batch, _ = await made.lease(0)
            await made.write_samples()
            await made.state_dict()
            assert len(read_rows(tmp_path / "samples.jsonl")) == 8, "and none of an earlier run"
            await made.lease(1)  # before the evaluation after step 1, whose samples come first
            notable = await made.samples()
            await made.set_version(1)
            await made.evaluate(1)
            await made.write_samples()
            return batch, [name for sample in notable for name in sample.notable]

    batch, notable = asyncio.run(main())
    assert sorted(notable) == ["best", "longest", "worst"]
    samples = list(read_samples(tmp_path))
    assert [s.step for s in samples] == [1] * (8 + 6) + [2] * 8
    evaluated, samples = samples[8:14], samples[:8]
    assert [s.evaluation for s in evaluated] == ["prompts"] * 6
    assert [s.episode for s in evaluated] == [f"prompts/{s.query_id}" for s in evaluated]
    assert all(s.prompt and s.answer_tokens and s.newest_version == 1 for s in evaluated)
    assert not any(s.evaluation for s in samples)
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    for i, sample in enumerate(samples):
        begin, end = batch.cu_seqlens[i : i + 2]
        split = begin + batch.prompt_lens[i]
        assert sample.prompt == tokenizer.decode(batch.token_ids[begin:split])
        assert sample.answer == tokenizer.decode(batch.token_ids[split:end])
        assert (sample.episode, sample.index) == (batch.episodes[i // 2], i % 2)
        assert sample.reward == batch.rewards[i]
        assert sample.finish_reason == ("length" if batch.no_eos[i] else "stop")


async def test_the_next_batch_waits_for_the_samples_of_the_last_one(assets, tmp_path: Path) -> None:
    generator = MockGenerator(str(assets.model), seconds_per_token=0.0)
    options: dict[str, Any] = {"samples": 1.0, "logs": tmp_path, "max_staleness": 1, "begins": True}
    async with started(assets, generator, [str(assets.prompts)], **options) as made:
        slow_down(made)
        await made.lease(0)
        await made.write_samples()
        await made.lease(1)
        assert len(read_rows(tmp_path / "samples.jsonl")) == 8


class Ranking(SingleTurnMathWorkflow):
    """Rewards the answers of a group with their numbers: a group without spread is not replayed."""

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        group = await super().run(prompt, generator)
        return [replace(t, reward=float(i)) for i, t in enumerate(group)]


def test_answers_that_a_step_replays_are_not_written_as_samples_once_more(assets, tmp_path: Path) -> None:
    async def main() -> list[RolloutBatch]:
        generator = MockGenerator(str(assets.model), seconds_per_token=0.0)
        options: dict[str, Any] = {"samples": 1.0, "logs": tmp_path, "max_staleness": 1, "replay": 0.5}
        batches = []
        async with started(assets, generator, workflow=f"{__name__}:Ranking", begins=True, **options) as made:
            for step in range(2):
                batch, _ = await made.lease(step)
                batches.append(batch)
                await made.write_samples()
                await made.set_version(step + 1)
            await made.state_dict()
            return batches

    first, second = asyncio.run(main())
    assert set(first.episodes) < set(second.episodes), "the second step replays the first one"
    new = [id for id in second.episodes if id not in first.episodes]
    written = [(sample.step, sample.episode, sample.index) for sample in read_samples(tmp_path)]
    assert written == [(step, id, i) for step, ids in ((1, first.episodes), (2, new)) for id in ids for i in range(2)]
