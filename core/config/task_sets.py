"""Section `task_sets`: several data sets to train on, each with settings of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from config_schema.needs import equals, refused_without
from config_schema.section import Violation, key
from core.config.ppo import PATH, SetConfig


class TaskSetConfig(SetConfig):
    """A set of prompts. Keys that are null have the value that the run has for prompts of `dataset.path`."""

    path: str = key(description=f"Prompts: {PATH}")
    weight: float | None = key(
        None, "Share among the prompts of an epoch, relative to the other sets. null: the number of its rows", gt=0
    )
    order: Literal["sequential", "shuffled", "curriculum"] | None = key(
        None,
        "sequential: as in the file. shuffled: a new order in every epoch. curriculum: that of `curriculum`. null: "
        "shuffled, with shuffle_dataset=false sequential",
    )
    curriculum: str = key(
        "",
        "Column whose values order the rows, lowest first; or a function package.module:name, which scores the rows "
        "that are left, with their success rates: highest first",
        needs=equals(".order", "curriculum") & refused_without("order: curriculum"),
    )
    group_size: int | None = key(None, "Completions sampled per prompt. null: group_size", ge=1)
    temperature: float | None = key(None, "Sampling temperature. null: ppo.gen.temperature", gt=0)
    top_p: float | None = key(None, "As ppo.gen.top_p", gt=0, le=1)
    top_k: int | None = key(None, "As ppo.gen.top_k", ge=-1)
    max_new_tokens: int | None = key(
        None, "Maximum tokens per completion, at most ppo.gen.max_new_tokens. null: that", ge=1
    )

    def rules(self, at: str) -> Iterator[Violation]:
        """Yield an order without what it needs, and options without a workflow."""
        yield from super().rules(at)
        if (self.order == "curriculum") != bool(self.curriculum):
            yield Violation(
                (f"{at}curriculum", f"{at}order"),
                f"order={self.order} with curriculum={self.curriculum!r}; write order: curriculum with a column or a "
                "function, or neither",
            )

    @property
    def by_function(self) -> bool:
        """True if a function of the user orders the rows."""
        return ":" in self.curriculum

    @property
    def column(self) -> str:
        """The column that orders the rows; empty: none."""
        return "" if self.by_function else self.curriculum
