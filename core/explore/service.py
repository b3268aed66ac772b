"""What the rollout process of a run that samples does: data set, rewards, workflow, router, producer, evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from core.config.experiments import PPOMATHConfig
from core.config.ppo import TaskSetConfig
from core.config.runtime import EvaluationSetConfig
from core.explore.batches import BatchService, Fetch, Put
from core.explore.data import DataFacts
from core.explore.servers import AuxiliaryModel, Questions
from core.explore.workflow import task_set_workflow
from model_specs.families import read_config
from rollout.data.source import DatasetError
from rollout.errors import ErrorPolicy, GeneratorCallError, GeneratorGone, evaluation_failure
from rollout.evaluation import Episode, EvaluationSampler, RecordedRewards, run_episodes
from rollout.inference.router import NoGeneratorError, Routed, Router, StopTexts, requests_at_once
from rollout.producer import RolloutProducer
from rollout.rewards.pool import FailedScores, RewardPools, RewardWorkerError
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import PolicyServer
from rollout.sessions.session import Limits
from rollout.types import Workflow
from rollout.workflow_calls import GroupLimits
from rollout.workflows import by_task_set, close_workflow, make_workflow

logger = logging.getLogger(__name__)

_NOT_OF_A_PROMPT = (NoGeneratorError, GeneratorCallError, GeneratorGone, RewardWorkerError)
"""Errors of generators and reward workers, which the next prompt would meet as well."""


class RolloutService(BatchService):
    """Samples into the store, and leases from it. `begin` starts the sampling; `close` ends every task it made."""

    def __init__(
        self,
        generators: Mapping[str, Routed],
        config: PPOMATHConfig,
        logs: Path,
        *,
        put: Put,
        fetch: Fetch,
        auxiliary: Mapping[str, Routed] | None = None,
    ) -> None:
        """`auxiliary`: servers of the auxiliary model."""
        super().__init__(config, logs, put=put, fetch=fetch)
        self._generators = generators
        self._answers: dict[tuple[str, int, int], Episode] = {}  # of the evaluation of step _answers_of
        self._answers_of: int | None = None
        self._server: PolicyServer | None = None
        self._frozen = auxiliary
        self._auxiliary: AuxiliaryModel | None = None
        self._questions: Questions | None = None

    async def start(self) -> DataFacts:
        """Read the data sets, open the store and start the reward workers; return facts about the prompts."""
        config, reward = self._config, self._config.reward
        if self._frozen:
            self._auxiliary = AuxiliaryModel(config, self._frozen)
            await self._auxiliary.start()  # first: processes that start from now on know its address
        facts = await super().start()
        self._failed_scores = FailedScores(reward)
        specs = {name: config.set_reward(one) for name, one in config.sets.items()}
        held_out = {name: config.set_reward(one) for name, one in config.evaluation_sets.items()}
        self._rewards = RewardPools({*specs.values(), *held_out.values()}, reward)
        stop = StopTexts(self._data.tokenizer, config.judged_by.stop)
        self._ends = self._data.encoder.end_token_ids, stop.token_ids
        self.router = Router(self._generators, config.generator, stop=stop)
        self._workflow = by_task_set({
            name: self._make_workflow(
                f"task_sets.{name}", one, reward_pool=self._rewards.of(specs[name]), group_size=one.group_size
            )
            for name, one in config.sets.items()
        })  # fmt: skip
        self._eval_workflows = {
            name: self._make_workflow(
                f"evaluation.sets.{name}",
                one,
                reward_pool=RecordedRewards(self._rewards.of(held_out[name])),
                group_size=1,
            )
            for name, one in config.evaluation_sets.items()
        }
        if config.monitor.questions:
            self._questions = Questions(
                self.router,
                self._data.encoder,
                sampling=config.set_sampling(next(iter(config.sets.values())), *self._ends),
                context_tokens=config.max_seqlen,
                seed=config.seed,
                logs=self._logs,
            )
        self._producer = self._make_producer()
        if self._auxiliary is not None and config.job in ("bench", "serve"):  # which never begin
            self._auxiliary.watch(self._producer.fail)
        await self._rewards.start()
        return facts

    def _make_workflow(self, at: str, one: TaskSetConfig | EvaluationSetConfig, **options: Any) -> Workflow:
        """Return the workflow of a set whose section is `at`."""
        config = self._config
        return make_workflow(
            task_set_workflow(config.workflow, at, one),
            tokenizer=self._data.tokenizer,
            encoder=self._data.encoder_of(one),
            seed=config.seed,
            sampling=config.set_sampling(one, *self._ends),
            **options,
        )

    def _make_producer(self) -> RolloutProducer:
        config, workflow = self._config, self._config.workflow
        return RolloutProducer(
            self._data.prompts,
            self._workflow,
            self.router,
            self._experience,
            self._rules,
            max_in_flight=requests_at_once(
                max_running=config.generator.max_running,
                num_generators=len(self._generators),
                group_size=config.group_size,
            ),
            group_size={name: one.group_size or config.group_size for name, one in config.sets.items()},
            max_retries=workflow.max_retries,
            timeout_seconds=workflow.timeout_seconds,
            dynamic_timeout=workflow.dynamic_timeout,
            limits=GroupLimits(
                vocab_size=read_config(Path(config.model_folder)).vocab_size,
                max_tokens=min(config.max_tokens_per_mb(role) for role in config.roles),
            ),
            errors=ErrorPolicy(
                on_error=workflow.on_error, max_share=workflow.max_error_share, always_fatal=_NOT_OF_A_PROMPT
            ),
            processors=config.experience.load_processors(),
            stats_sources=(
                self._rewards.stats,
                self.router.stats,
                *([self._questions.stats] if self._questions else []),
            ),
        )

    async def begin(self, version: int, state: Any, ignore_changes: bool) -> None:
        """Start sampling at this version, from the beginning or from a recover checkpoint's state. Raises ValueError
        where that does not fit the configuration, unless `ignore_changes`: then nothing sampled is kept."""
        await super().begin(version, state, ignore_changes)
        await self._producer.__aenter__()
        if self._auxiliary is not None:
            self._auxiliary.watch(self._producer.fail)
        if self._questions is not None:
            await self._questions.start()

    def _load(self, version: int, state: Any, ignore_changes: bool) -> None:
        super()._load(version, state, ignore_changes)
        evaluation = state["evaluation"]
        self._answers_of = evaluation["step"]
        self._answers = {(name, i, n): Episode(**episode) for name, i, n, episode in evaluation["answers"]}
        if state["producer"]["version"] != version:
            self._producer.begin_at(version, reason="Batches are cut in another way")
            return
        try:
            self._producer.load_state_dict(state["producer"])
            self._experience.load_state_dict(state["experience"])
        except (ValueError, DatasetError) as change:
            if not ignore_changes:
                raise
            self._producer.begin_at(version, reason=str(change))
        if state["group_size"] != self._config.group_size:  # whether that is allowed was decided before
            logger.warning("group_size was %d: untrained completions are sampled again", state["group_size"])
            self._experience.resample(version)

    def _figures(self, version: int) -> dict[str, float]:
        """Return the figures of the producer. Raises RewardFailureError where most completions could not be scored for
        some batches."""
        self._check_scores(version + 1)
        return self._producer.stats()

    def _check_scores(self, step: int) -> None:
        self._failed_scores.check(self._rewards.stats(), step=step, last_error=self._rewards.last_error)

    async def set_version(self, version: int) -> None:
        """Count the steps before `version` as trained, and start the prompts that its weights allow. Raises as take(),
        where only another job takes batches."""
        if self._config.job == "explore":
            self._check_scores(version)
        await super().set_version(version)
        self._producer.set_version(version)

    async def state_dict(self) -> dict[str, object]:
        """Return the state that `begin` needs: finished groups, prompts in flight with their tokens, the data set's
        cursor. See BatchService."""
        batches = await self._batches_state()
        await self._producer.record_partial()
        # From here on nothing is awaited: the store and the rest are of one moment.
        answers = [(*key, asdict(replace(episode, outcomes=()))) for key, episode in self._answers.items()]
        return {
            "group_size": self._config.group_size,
            "producer": self._producer.state_dict(),
            "experience": self._experience.state_dict(),
            "batches": batches,
            "evaluation": {"step": self._answers_of, "answers": answers},
        }

    async def evaluate(self, step: int, on: str | None = None) -> dict[str, float]:
        """Run the workflow of each evaluation set on its prompts: mean reward and length in tokens, share of
        completions cut off by the limit, and where the reward of a right answer is known, the share of right ones and
        of prompts with one. Of several sets: {set}/{figure}. Samples of the answers are written.

        `step`: of the version that is measured. `on`: the generator that was reserved for it. None: all. Answers of the
        same step that a recover checkpoint has are not sampled again."""
        if self._answers_of != step:
            self._answers_of, self._answers = step, {}
        ended, sets, of_run = self._answers, self._config.evaluation_sets, self._config.workflow
        sampler = self.router if on is None else self.router.reserved(on)
        generators = {name: EvaluationSampler(sampler, f"eval-{name}", context_tokens=2**31) for name in sets}
        asked = {
            (name, i, number): replace(prompt, epoch=number)  # another number is another seed
            for name, one in sets.items()
            for i, prompt in enumerate(self._data.eval_prompts[name])
            for number in range(one.repeat or 1)
        }
        questions = [
            (key, prompt, self._eval_workflows[key[0]], generators[key[0]])
            for key, prompt in asked.items()
            if key not in ended
        ]
        try:
            await run_episodes(
                questions,
                self._data.tokenizer,
                max_in_flight=len(questions),
                timeout_seconds=of_run.timeout_seconds,
                fatal=_NOT_OF_A_PROMPT if of_run.on_error == "skip" else (Exception,),
                on_done=lambda key, prompt, episode: ended.update({key: episode}),
            )
        except NoGeneratorError as lost:
            if on is None:
                raise
            logger.warning("The evaluation of step %d ends without a result: %s", step, lost)
            return {}
        except Exception as error:
            if of_run.on_error == "skip" or isinstance(error, _NOT_OF_A_PROMPT):
                raise
            raise evaluation_failure(error, _NOT_OF_A_PROMPT) from None
        if self._config.job == "bench":  # others look after each step
            self._producer.check()
            self._check_scores(step)
        results = {}
        for name, one in sets.items():
            answers = [(prompt, ended[key]) for key, prompt in asked.items() if key[0] == name]
            results[name] = _figures([episode for _, episode in answers], one.right_at, repeat=one.repeat or 1)
            await self._samples.write_evaluation(name, answers, step=step)
        self._answers_of, self._answers = None, {}
        if len(results) == 1:
            return next(iter(results.values()))
        return {f"{name}/{figure}": value for name, result in results.items() for figure, value in result.items()}

    async def release_generator(self, name: str) -> None:
        """Let a generator that evaluated, and has the current weights again, sample for training."""
        self.router.release(name)

    async def check(self) -> None:
        """Raise what ended the sampling, if anything has."""
        self._producer.check()

    async def has_explored(self, count: int) -> bool:
        """Return whether `count` prompts have finished since the last version, or there is nothing left to sample."""
        return self._producer.num_finished >= count or self._producer.is_idle

    async def serve(self) -> str:
        """Answer requests to the policy until close(); return the address."""
        config = self._config
        one = next(iter(config.sets.values()))
        self._server = PolicyServer(
            Bridge(self._data.encoder),
            self.router,
            limits=Limits(sampling=config.set_sampling(one, *self._ends), context_tokens=config.max_seqlen),
            host=config.serve.host,
            port=config.serve.port,
            api_key=config.serve.api_key,
            key_hint="serve.api_key",
            seed=config.seed,
        )
        await self._server.start()
        return self._server.url

    async def wait_lost(self, known: list[str]) -> dict[str, str]:
        """Return the lost generators with the reasons, when one is lost that is not `known`."""
        return await self.router.wait_lost(known)

    async def check_generators(self) -> dict[str, str]:
        """Check the health of every generator now; return the lost ones with the reasons."""
        return await self.router.check()

    async def close(self) -> None:
        """Cancel what runs, and end what workflows have started and the reward workers."""
        if self._server is not None:
            await self._server.close()
        if self._questions is not None:
            await self._questions.close()
        await self._producer.__aexit__(None, None, None)
        for workflow in (self._workflow, *self._eval_workflows.values()):
            await close_workflow(workflow)
        await super().close()
        await self.router.close()
        await self._rewards.close()
        if self._auxiliary is not None:
            await self._auxiliary.close()


def _figures(episodes: Sequence[Episode], right_at: float | None, *, repeat: int) -> dict[str, float]:
    """Return the figures of the answers to a set, `repeat` for each prompt in a row."""
    figures = {
        "reward": float(np.mean([e.score for e in episodes])),
        "mean_length_tokens": float(np.mean([e.tokens for e in episodes])),
        "no_eos_ratio": float(np.mean([e.finish_reason == "length" for e in episodes])),
    }
    if right_at is None:
        return figures
    right = np.array([e.is_right(right_at) for e in episodes], np.float64).reshape(-1, repeat)
    best = {} if repeat == 1 else {f"pass@{repeat}": float(right.max(axis=1).mean())}
    return {"accuracy": float(right.mean()), **best, **figures}
