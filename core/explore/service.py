"""What runs inside the rollout actor: data set, rewards, workflow, router, producer, and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from core.data.rollout_batch import RolloutBatch
from core.explore.batches import Batches
from core.explore.data import RunData
from core.explore.settings import DataFacts, RolloutSettings
from core.monitoring.samples import Sample
from rollout.data.source import DatasetError
from rollout.errors import ErrorPolicy, GeneratorCallError, GeneratorGone, evaluation_failure
from rollout.evaluation import Episode, EvaluationSampler, RecordedRewards, run_episodes
from rollout.experience import Rules
from rollout.inference.router import NoGeneratorError, Routed, Router
from rollout.producer import RolloutProducer
from rollout.rewards.failures import FailedScores
from rollout.rewards.pool import RewardWorkerError
from rollout.rewards.pools import RewardPools
from rollout.trajectory_checks import GroupLimits
from rollout.types import Prompt, Workflow
from rollout.workflows import by_task_set, close_workflow, make_workflow

logger = logging.getLogger(__name__)

_NOT_OF_A_PROMPT = (NoGeneratorError, GeneratorCallError, GeneratorGone, RewardWorkerError)
"""Errors of generators and reward workers, which the next prompt would meet as well."""


class RolloutService:
    """Owns the sampling side of a run. `begin` starts it; `take` hands out batches; `close` ends every task it made."""

    def __init__(
        self,
        generators: Sequence[Routed] | Mapping[str, Routed],
        settings: RolloutSettings,
    ) -> None:
        self._right_at = settings.right_at
        self._data = RunData(settings)
        self._tokenizer = self._data.tokenizer
        stop = self._data.encoder.end_token_ids
        self._rewards = RewardPools(
            {settings.reward, *(one.reward for one in settings.sets.values())},
            num_workers=settings.reward_workers,
            timeout_seconds=settings.reward_timeout_seconds,
        )
        self.router = Router(
            generators,
            health_interval_seconds=settings.health_interval_seconds,
            health_timeout_seconds=settings.health_timeout_seconds,
            patience_seconds=settings.generator_patience_seconds,
        )
        self._failed_scores = FailedScores(max_share=settings.max_failed_share, max_batches=settings.max_failed_batches)
        self._group_size = settings.group_size
        make = partial(make_workflow, tokenizer=self._tokenizer, encoder=self._data.encoder, seed=settings.seed)
        workflow = by_task_set(
            {
                name: make(
                    one.workflow,
                    reward_pool=self._rewards.of(one.reward),
                    sampling=replace(one.sampling, stop_token_ids=stop),
                    group_size=one.group_size,
                )
                for name, one in settings.sets.items()
            }
        )
        self._on_error = settings.on_error
        self._timeout_seconds = settings.workflow_timeout_seconds
        self._eval_rewards = RecordedRewards(self._rewards.of(settings.reward))
        self._eval_workflow = make(
            settings.workflow,
            reward_pool=self._eval_rewards,
            sampling=replace(settings.eval_sampling, stop_token_ids=stop),
            group_size=1,
        )
        self._explores_only = settings.side == "explore"
        self._experience = settings.store.open()
        if settings.side == "both":
            self._experience.enroll(settings.lessee)
        rules = self._data.rules()
        self._workflow = workflow
        self._producer = self._make_producer(settings, workflow, rules)
        self._version = 0
        self._batches = Batches(settings, self._data, self._experience, rules)

    def _make_producer(self, settings: RolloutSettings, workflow: Workflow, rules: Rules) -> RolloutProducer:
        return RolloutProducer(
            self._data.prompts,
            workflow,
            self.router,
            self._experience,
            rules,
            run=settings.run,
            max_in_flight=settings.max_in_flight,
            group_size={name: one.group_size for name, one in settings.sets.items()},
            max_retries=settings.max_retries,
            timeout_seconds=settings.workflow_timeout_seconds,
            limits=GroupLimits(vocab_size=settings.vocab_size, max_tokens=settings.max_tokens),
            errors=ErrorPolicy(
                on_error=settings.on_error, max_share=settings.max_error_share, always_fatal=_NOT_OF_A_PROMPT
            ),
            stats_sources=(self._rewards.stats, self.router.stats),
        )

    async def start(self) -> None:
        """Start the reward workers."""
        await self._rewards.start()

    def describe(self) -> DataFacts:
        """Return facts about the prompts."""
        return self._data.facts()

    async def begin(self, version: int, state: Any, *, ignore_changes: bool) -> None:
        """Start sampling at this version, from the beginning or from a recover checkpoint's state. Raises ValueError
        where that does not fit the configuration, unless recover_ignore_changes is set: then nothing sampled is
        kept."""
        if state is not None:
            self._load(version, state, ignore_changes=ignore_changes)
        self._batches.samples.begin(version)
        self.set_version(version)
        await self._producer.__aenter__()

    def _load(self, version: int, state: Any, *, ignore_changes: bool) -> None:
        self._batches.load_state_dict(state.get("batches", {}), ignore_changes=ignore_changes)
        if state["producer"]["version"] != version:
            self._producer.begin_at(version, reason="Batches are cut in another way")
            return
        try:
            self._producer.load_state_dict(state["producer"])
            self._experience.load_state_dict(state.get("experience", {}))  # an earlier release has none
        except (ValueError, DatasetError) as change:
            if not ignore_changes:
                raise
            self._producer.begin_at(version, reason=str(change))
        if state["group_size"] != self._group_size:  # whether that is allowed was decided before
            logger.warning("group_size was %d: untrained completions are sampled again", state["group_size"])
            self._experience.resample()

    async def take(self, version: int) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the next batch, packed, and the figures of the producer, the workflow and the rewards, when the
        samples of the last one are in their file. Raises RewardFailureError where most completions could not be scored
        for some batches, OSError where samples could not be written, and what ended the producer."""
        batch, figures = await self._batches.take(version)
        self._check_scores(version + 1)
        return batch, self._producer.stats() | figures

    def _check_scores(self, step: int) -> None:
        self._failed_scores.check(self._rewards.stats(), step=step, last_error=self._rewards.last_error)

    async def write_samples(self) -> None:
        """Start writing the samples of the batch that was taken last. Call once after each take()."""
        await self._batches.write_samples()

    def set_version(self, version: int) -> None:
        """Count the steps before `version` as trained, and start the prompts that its weights allow. Raises as take(),
        where only another job takes batches."""
        if self._explores_only:
            self._check_scores(version)
        self._version = version
        self.router.set_version(version)
        self._batches.trained(version)
        self._producer.set_version(version)

    async def samples(self) -> list[Sample]:
        """Return the best, worst and longest answer of the last batch that was written."""
        return await self._batches.notable()

    async def state_dict(self) -> Any:
        """Return the state that `begin` needs: finished groups, prompts in flight with their tokens, the data set's
        cursor. The samples that write_samples() was called for are in their file then. Not to be called between
        take(i + 1) and set_version(i + 1)."""
        batches = await self._batches.state_dict()
        await self._producer.record_partial()
        # From here on nothing is awaited: the store and the rest are of one moment.
        return {
            "group_size": self._group_size,
            "producer": self._producer.state_dict(),
            "experience": self._experience.state_dict(),
            "batches": batches,
        }

    async def evaluate(self) -> dict[str, float]:
        """Run the workflow once on each evaluation prompt: mean reward and length in tokens, share of completions cut
        off by the limit, and the share of right ones where the reward of a right answer is known. Of several sets:
        {set}/{figure}. Samples of the answers are written."""
        ended: dict[tuple[str, int], tuple[Prompt, Episode]] = {}
        prompts_of = self._data.eval_prompts
        generators = {name: EvaluationSampler(self.router, f"eval-{name}", context_tokens=2**31) for name in prompts_of}
        questions = [
            ((name, i), prompt, self._eval_workflow, generators[name])
            for name, of in prompts_of.items()
            for i, prompt in enumerate(of)
        ]
        try:
            await run_episodes(
                questions,
                self._eval_rewards,
                self._tokenizer,
                max_in_flight=len(questions),
                timeout_seconds=self._timeout_seconds,
                fatal=_NOT_OF_A_PROMPT if self._on_error == "skip" else (Exception,),
                on_done=lambda key, prompt, episode: ended.update({key: (prompt, episode)}),
            )
        except Exception as error:
            if self._on_error == "skip" or isinstance(error, _NOT_OF_A_PROMPT):
                raise
            raise evaluation_failure(error, _NOT_OF_A_PROMPT) from None
        results = {}
        for name, prompts in prompts_of.items():
            answers = [ended[name, i] for i in range(len(prompts))]
            results[name] = _figures([episode for _, episode in answers], self._right_at)
            await self._batches.samples.write_evaluation(name, answers, step=self._version)
        if len(results) == 1:
            return next(iter(results.values()))
        return {f"{name}/{figure}": value for name, result in results.items() for figure, value in result.items()}

    def check(self) -> None:
        """Raise what ended the sampling, if anything has."""
        self._producer.check()

    async def close(self) -> None:
        """Cancel what runs, and end what workflows have started and the reward workers."""
        await self._producer.__aexit__(None, None, None)
        for workflow in (self._workflow, self._eval_workflow):
            await close_workflow(workflow)
        await self._batches.close()
        await self.router.close()
        await self._rewards.close()
        self._experience.close()


def _figures(episodes: Sequence[Episode], right_at: float | None) -> dict[str, float]:
    right = {} if right_at is None else {"accuracy": float(np.mean([e.is_right(right_at) for e in episodes]))}
    return right | {
        "reward": float(np.mean([e.score for e in episodes])),
        "mean_length_tokens": float(np.mean([e.tokens for e in episodes])),
        "no_eos_ratio": float(np.mean([e.finish_reason == "length" for e in episodes])),
    }
