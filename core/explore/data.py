"""The data sets of a run in the process that samples or cuts batches, and what the driver needs to know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from core.config.ppo import SetConfig, TaskSetConfig
from core.data.datasets import AnswerDataset, Demonstrations, PreferenceDataset, Rows
from rollout.data.encoder import Encoder
from rollout.data.prompts import LeftOut, PromptDataset, first_prompt
from rollout.data.source import DataSource
from rollout.data.task_sets import TaskSet, TaskSets, load_curriculum
from rollout.experience import Replay, Rules, make_rules

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the driver needs of the data sets."""

    num_prompts: int
    mean_prompt_tokens: float
    first_prompt: str
    """The first prompt to train on, in words, and how its answers are scored."""
    num_eval_prompts: int
    left_out: Sequence[LeftOut]
    """Of the data set and of each evaluation set."""


class RunData:
    """Tokenizer, prompts to train on, and prompts of the evaluation sets by name."""

    def __init__(self, config: PPOMATHConfig) -> None:
        from rollout.data.tokenizer import load_tokenizer

        self._config = config
        self.tokenizer = load_tokenizer(config.model_folder)
        self.encoder = Encoder(self.tokenizer, config.prompt_format, folder=config.model_folder)
        sets = [self._task_set(name, one) for name, one in config.sets.items()]
        self.prompts = TaskSets(
            sets,
            weights={name: one.weight for name, one in config.task_sets.items() if one.weight is not None},
            batch_size=config.batch_size,
        )
        held_out = config.evaluation_sets
        eval_sets = {name: self._read(config.held_out(one), one) for name, one in held_out.items()}
        self.eval_prompts = {name: eval_sets[name].prompts[: one.num_prompts] for name, one in held_out.items()}
        read = [*(one.dataset for one in sets), *eval_sets.values()]
        self._left_out = [one.left_out for one in read if one.left_out is not None]

    def _read(self, source: DataSource, one: SetConfig, **options: Any) -> PromptDataset:
        """Read a set. `options`: of PromptDataset.load."""
        config = self._config
        return PromptDataset.load(
            source,
            self.encoder_of(one),
            max_prompt_len=config.trained_tokens[0],
            seed=config.seed,
            solved=config.judged_by_math(one),
            **options,
        )

    def encoder_of(self, one: SetConfig) -> Encoder:
        """Return what renders the prompts of a set."""
        written = self._config.set_format(one)
        if written == self._config.prompt_format:
            return self.encoder
        return Encoder(self.tokenizer, written, folder=self._config.model_folder)

    def _task_set(self, name: str, one: TaskSetConfig) -> TaskSet:
        """Read a set of prompts to train on."""
        dataset = self._read(one.place, one, shuffle=one.order == "shuffled", column=one.column)
        return TaskSet(name, dataset, curriculum=load_curriculum(one.scored_by) if one.scored_by else None)

    def facts(self) -> DataFacts:
        """Return what the driver needs."""
        prompts = self.prompts.prompts
        return DataFacts(
            num_prompts=len(self.prompts),
            mean_prompt_tokens=float(np.mean([len(p.token_ids) for p in prompts])),
            first_prompt=first_prompt(prompts[0], self._config.set_reward(next(iter(self._config.sets.values())))),
            num_eval_prompts=sum(len(prompts) for prompts in self.eval_prompts.values()),
            left_out=self._left_out,
        )

    def rules(self) -> Rules:
        """Return the rules of the experience, over these prompts."""
        config, algorithm = self._config, self._config.algorithm
        epochs, steps = config.exp_ctrl.length
        return make_rules(
            num_prompts=len(self.prompts),
            batch_size=config.batch_size,
            **config.staleness.model_dump(),
            dynamic_sampling_limit=algorithm.most_resampled,
            steps_ahead=config.steps_ahead,
            num_epochs=epochs,
            num_steps=steps,  # benchmark_steps end in full flight
            replay=self._replay(),
        )

    def _replay(self) -> Replay | None:
        config, given = self._config, self._config.experience.replay
        if not config.experience.replays:
            return None
        return Replay(
            share=given.share,
            priority=given.make_priority(),
            max_age=config.replay_max_age,
            cooldown=given.cooldown,
            max_uses=given.max_uses,
        )

    def demonstrations(self) -> Demonstrations | None:
        """Return the demonstrations of a run, if it has some. They are as long as a prompt with its completion, at
        most."""
        config = self._config
        if not config.demonstrations_per_step:
            return None
        load: Callable[..., Rows] = AnswerDataset
        if (columns := config.demonstration_pairs) is not None:
            load = partial(PreferenceDataset, fields=columns)
        rows = load(config.demonstrations.path, self.encoder, max_seqlen=config.max_seqlen, **config.row_order)
        return Demonstrations(rows, config.demonstrations_per_step)
