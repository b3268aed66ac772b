"""The data sets of a run in the process that samples or cuts batches, and what the driver needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from core.data.answers import AnswerDataset, Demonstrations
from core.explore.settings import DataFacts, RolloutSettings, TaskSetSettings, named
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset, first_prompt
from rollout.data.task_sets import TaskSet, TaskSets, load_curriculum
from rollout.data.tokenizer import load_tokenizer
from rollout.experience import Rules, make_rules


class RunData:
    """Tokenizer, prompts to train on, and prompts of the evaluation sets by name."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer_path)
        self.encoder = Encoder(self.tokenizer, settings.prompt_format, folder=settings.tokenizer_path)
        load = partial(PromptDataset.load, max_prompt_len=settings.max_prompt_len, seed=settings.seed)
        sets = {name: self._task_set(name, one, load) for name, one in settings.sets.items()}
        self.prompts = TaskSets(
            [*sets.values()],
            weights={name: one.weight for name, one in settings.sets.items() if one.weight is not None},
            batch_size=settings.batch_size,
        )
        load = partial(load, encoder=self.encoder, solved=settings.reward == "math")
        eval_sets = {name: load(source) for name, source in named(settings.eval_sets).items()}
        self.eval_prompts = {name: read.prompts[: settings.num_eval_prompts] for name, read in eval_sets.items()}
        read = [*(one.dataset for one in sets.values()), *eval_sets.values()]
        self._left_out = [one.left_out for one in read if one.left_out is not None]

    def _task_set(self, name: str, one: TaskSetSettings, load: Callable[..., PromptDataset]) -> TaskSet:
        """Read a set of prompts to train on."""
        by_function = ":" in one.curriculum
        encoder = Encoder(self.tokenizer, one.prompt_format, folder=self._settings.tokenizer_path)
        dataset = load(
            one.source,
            encoder=encoder,
            shuffle=one.order == "shuffled",
            solved=one.reward == "math",
            column="" if by_function else one.curriculum,
        )
        return TaskSet(name, dataset, curriculum=load_curriculum(one.curriculum) if by_function else None)

    def facts(self) -> DataFacts:
        """Return what the driver needs."""
        prompts = self.prompts.prompts
        return DataFacts(
            num_prompts=len(self.prompts),
            mean_prompt_tokens=float(np.mean([len(p.token_ids) for p in prompts])),
            first_prompt=first_prompt(prompts[0], next(iter(self._settings.sets.values())).reward),
            num_eval_prompts=sum(len(prompts) for prompts in self.eval_prompts.values()),
            left_out=self._left_out,
        )

    def rules(self) -> Rules:
        """Return the rules of the experience, over these prompts."""
        settings = self._settings
        return make_rules(
            num_prompts=len(self.prompts),
            batch_size=settings.batch_size,
            max_staleness=settings.max_staleness,
            over_age=settings.over_age,
            in_order=settings.in_order,
            dynamic_sampling_limit=settings.dynamic_sampling_limit,
            num_epochs=settings.num_epochs,
            num_steps=settings.num_steps,
        )

    def demonstrations(self) -> Demonstrations | None:
        """Return the demonstrations of a run, if it has some. They are as long as a prompt with its completion, at
        most."""
        settings = self._settings
        if not settings.demonstrations_path:
            return None
        rows = AnswerDataset(
            settings.demonstrations_path,
            self.encoder,
            seed=settings.seed,
            shuffle=settings.shuffle,
            max_seqlen=settings.max_prompt_len + settings.sampling.max_new_tokens,
        )
        return Demonstrations(rows, settings.demonstrations_per_step)
