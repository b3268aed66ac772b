"""What runs inside the rollout actor: data set, rewards, workflow, router, producer, and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np

from core.data.answers import AnswerDataset, Demonstrations
from core.data.leased_batches import LeasedBatches
from core.data.rollout_batch import RolloutBatch
from core.monitoring.memory import ROLLOUT, peak_gib
from core.monitoring.sample_file import SampleWriter
from core.monitoring.samples import Sample
from core.rollout_settings import DataFacts, RolloutSettings
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset, first_prompt
from rollout.data.source import DatasetError, DataSource
from rollout.data.tokenizer import load_tokenizer
from rollout.errors import ErrorPolicy, GeneratorCallError, GeneratorGone, evaluation_failure
from rollout.evaluation import Episode, EvaluationSampler, RecordedRewards, run_episodes
from rollout.experience import Experience, Lessee, MemoryExperience, Rules, make_rules
from rollout.inference.router import NoGeneratorError, Routed, Router
from rollout.producer import RolloutProducer
from rollout.rewards.failures import FailedScores
from rollout.rewards.pool import RewardPool, RewardWorkerError
from rollout.trajectory_checks import GroupLimits
from rollout.types import Prompt, Workflow
from rollout.workflows import make_workflow

logger = logging.getLogger(__name__)

_NOT_OF_A_PROMPT = (NoGeneratorError, GeneratorCallError, GeneratorGone, RewardWorkerError)
"""Errors of generators and reward workers, which the next prompt would meet as well."""


class RolloutService:
    """Owns the sampling side of a run. `begin` starts it; `take` hands out batches; `close` ends every task it made."""

    def __init__(
        self,
        generators: Sequence[Routed] | Mapping[str, Routed],
        settings: RolloutSettings,
        experience: Experience | None = None,
    ) -> None:
        """`experience`: a store that the trainer of another process leases from. None: one in memory."""
        self._tokenizer = load_tokenizer(settings.tokenizer_path)
        self._encoder = Encoder(self._tokenizer, settings.prompt_format, folder=settings.tokenizer_path)
        stop = self._encoder.end_token_ids
        self._reward, self._right_at = settings.reward, settings.right_at
        self._load_data(settings)
        self._rewards = RewardPool(
            settings.reward, num_workers=settings.reward_workers, timeout_seconds=settings.reward_timeout_seconds
        )
        self.router = Router(
            generators,
            health_interval_seconds=settings.health_interval_seconds,
            health_timeout_seconds=settings.health_timeout_seconds,
            patience_seconds=settings.generator_patience_seconds,
        )
        self._failed_scores = FailedScores(max_share=settings.max_failed_share, max_batches=settings.max_failed_batches)
        self._group_size = settings.group_size
        make = partial(
            make_workflow, settings.workflow, tokenizer=self._tokenizer, encoder=self._encoder, seed=settings.seed
        )
        workflow = make(
            reward_pool=self._rewards,
            sampling=replace(settings.sampling, stop_token_ids=stop),
            group_size=settings.group_size,
        )
        self._on_error = settings.on_error
        self._timeout_seconds = settings.workflow_timeout_seconds
        self._eval_rewards = RecordedRewards(self._rewards)
        self._eval_workflow = make(
            reward_pool=self._eval_rewards,
            sampling=replace(settings.eval_sampling, stop_token_ids=stop),
            group_size=1,
        )
        self._experience = experience or MemoryExperience()
        rules = make_rules(
            num_prompts=len(self._dataset),
            batch_size=settings.batch_size,
            max_staleness=settings.max_staleness,
            over_age=settings.over_age,
            in_order=settings.in_order,
            dynamic_sampling_limit=settings.dynamic_sampling_limit,
            num_epochs=settings.num_epochs,
            num_steps=settings.num_steps,
        )
        self._producer = self._make_producer(settings, workflow, rules)
        self._version = 0
        self._samples = SampleWriter(
            settings.samples,
            lambda tokens: str(self._tokenizer.decode(tokens)),
            {prompt.query_id: " or ".join(prompt.answers) for prompt in self._dataset.prompts},
        )
        demonstrations = _demonstrations(settings, self._encoder) if settings.demonstrations_path else None
        self._batches = LeasedBatches(Lessee(self._experience, rules), self._samples, demonstrations)

    def _load_data(self, settings: RolloutSettings) -> None:
        load = partial(
            PromptDataset.load,
            encoder=self._encoder,
            max_prompt_len=settings.max_prompt_len,
            seed=settings.seed,
            solved=settings.reward == "math",
        )
        self._dataset = load(settings.dataset, shuffle=settings.shuffle)
        eval_sets = {name: load(source) for name, source in named(settings.eval_sets).items()}
        self._eval_prompts = {name: read.prompts[: settings.num_eval_prompts] for name, read in eval_sets.items()}
        self._left_out = [read.left_out for read in (self._dataset, *eval_sets.values()) if read.left_out is not None]

    def _make_producer(self, settings: RolloutSettings, workflow: Workflow, rules: Rules) -> RolloutProducer:
        return RolloutProducer(
            self._dataset,
            workflow,
            self.router,
            self._experience,
            rules,
            run=settings.run,
            task_set=settings.dataset.name,
            max_in_flight=settings.max_in_flight,
            group_size=settings.group_size,
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
        prompts = self._dataset.prompts
        return DataFacts(
            num_prompts=len(prompts),
            mean_prompt_tokens=float(np.mean([len(p.token_ids) for p in prompts])),
            first_prompt=first_prompt(prompts[0], self._reward),
            num_eval_prompts=sum(len(prompts) for prompts in self._eval_prompts.values()),
            left_out=self._left_out,
        )

    async def begin(self, version: int, state: Any, *, ignore_changes: bool) -> None:
        """Start sampling at this version, from the beginning or from a recover checkpoint's state. Raises ValueError
        where that does not fit the configuration, unless recover_ignore_changes is set: then nothing sampled is
        kept."""
        if state is not None:
            self._load(version, state, ignore_changes=ignore_changes)
        self._samples.begin(version)
        self.set_version(version)
        await self._producer.__aenter__()

    def _load(self, version: int, state: Any, *, ignore_changes: bool) -> None:
        try:
            self._batches.load_state_dict(state.get("batches", {}))
        except DatasetError as change:
            if not ignore_changes:
                raise
            logger.warning("%s. Ignored: the run continues with these demonstrations.", change)
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
        batch = await self._batches.take(version)
        self._failed_scores.check(self._rewards.stats(), step=version + 1, last_error=self._rewards.last_error)
        figures = self._producer.stats() | self._batches.stats() | batch.workflow_figures() | {ROLLOUT: peak_gib()}
        return batch, figures | batch.reward_figures(self._right_at)

    async def write_samples(self) -> None:
        """Start writing the samples of the batch that was taken last. Call once after each take()."""
        await self._batches.write_samples()

    def set_version(self, version: int) -> None:
        """Count the steps before `version` as trained, and start the prompts that its weights allow."""
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
        generators = {
            name: EvaluationSampler(self.router, f"eval-{name}", context_tokens=2**31) for name in self._eval_prompts
        }
        questions = [
            ((name, i), prompt, self._eval_workflow, generators[name])
            for name, of in self._eval_prompts.items()
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
        for name, prompts in self._eval_prompts.items():
            answers = [ended[name, i] for i in range(len(prompts))]
            results[name] = _figures([episode for _, episode in answers], self._right_at)
            await self._samples.write_evaluation(name, answers, step=self._version)
        if len(results) == 1:
            return next(iter(results.values()))
        return {f"{name}/{figure}": value for name, result in results.items() for figure, value in result.items()}

    async def close(self) -> None:
        """Cancel what runs and end the reward workers."""
        await self._producer.__aexit__(None, None, None)
        await self._samples.close()
        await self.router.close()
        await self._rewards.close()


def _demonstrations(settings: RolloutSettings, encoder: Encoder) -> Demonstrations:
    """Read the demonstrations of a run; they are as long as a prompt with its completion, at most."""
    rows = AnswerDataset(
        settings.demonstrations_path, encoder, seed=settings.seed, shuffle=settings.shuffle,
        max_seqlen=settings.max_prompt_len + settings.sampling.max_new_tokens,
    )  # fmt: skip
    return Demonstrations(rows, settings.demonstrations_per_step)


def _figures(episodes: Sequence[Episode], right_at: float | None) -> dict[str, float]:
    right = {} if right_at is None else {"accuracy": float(np.mean([e.is_right(right_at) for e in episodes]))}
    return right | {
        "reward": float(np.mean([e.score for e in episodes])),
        "mean_length_tokens": float(np.mean([e.tokens for e in episodes])),
        "no_eos_ratio": float(np.mean([e.finish_reason == "length" for e in episodes])),
    }


def named(sets: Sequence[DataSource]) -> dict[str, DataSource]:
    """Return the evaluation sets by the names of their metrics; numbered where two are the same."""
    by_name: dict[str, DataSource] = {}
    for source in sets:
        numbers = (f"{source.name}-{number}" for number in count(len(by_name)))
        by_name[next(name for name in chain([source.name], numbers) if name not in by_name)] = source
    return by_name
