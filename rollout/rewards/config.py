"""The keys of `reward`. Apart from load.py: a worker, which reads none of them, starts without their library."""

from collections.abc import Iterator

from config_schema.section import Section, Violation, key
from rollout.rewards.load import add_tasks, join_spec


class RewardConfig(Section):
    """Scoring of answers, in worker processes."""

    function: str | list[str] = key(
        "math",
        "math, a custom function as package.module:function, or a list of them, whose rewards are added",
        first=True,
    )
    weights: list[float] | None = key(None, "Factor of each function of a list. null: 1 each")
    by_task: dict[str, str] = key(
        {}, "Functions by the task of a row, as {task: function}; rows of other tasks use reward.function"
    )
    right_at: float | None = key(
        None, "Reward from which an answer counts as right, in accuracies and groups/solved. null: 1 for math, and no "
        "accuracy for another function",
    )  # fmt: skip
    num_workers: int = key(2, "Worker processes", ge=1)
    timeout_seconds: float = key(10.0, "Timeout per completion; one that exceeds it counts as wrong", gt=0)
    max_failed_share: float = key(
        0.5, "Share of the completions of a batch that may fail to be scored (exception, crash, timeout, memory); "
        "above it the terminal shows a warning", ge=0, le=1,
    )  # fmt: skip
    max_failed_batches: int = key(3, "End the run after this many batches in a row above max_failed_share", ge=1)

    def rules(self, at: str) -> Iterator[Violation]:
        """Yield a list of weights that is not as long as that of the functions."""
        count = len(self.functions)
        for task in self.by_task:
            if not task or set(task) & set("=;"):
                yield Violation((f"{at}by_task",), f"has the task {task!r}; a task is a text without = and ;")
        if not count:
            yield Violation((f"{at}function",), "is an empty list; write at least one function")
        elif self.weights is not None and len(self.weights) != count:
            yield Violation(
                (f"{at}weights",), f"has {len(self.weights)} numbers for {count} functions; write one for each"
            )

    @property
    def functions(self) -> list[str]:
        """All functions."""
        return [self.function] if isinstance(self.function, str) else list(self.function)

    @property
    def spec(self) -> str:
        """The functions with their weights as one text (rollout/rewards/load.py)."""
        return add_tasks(join_spec(self.functions, self.weights), self.by_task)

    @property
    def threshold(self) -> float | None:
        """The reward from which an answer is right; None where that is not known."""
        return 1.0 if self.right_at is None and self.spec == "math" else self.right_at
