"""A bench job: it evaluates models on every evaluation set, and trains nothing."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from rich.table import Table

from core.experiments.explore import sampling
from core.launch.published import PublishedWeights, load
from core.monitoring.metrics import Journal

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.experiments.context import RunContext


def bench(config: PPOMATHConfig, context: RunContext) -> None:
    """Evaluate each model of bench.models, and write a row for each into metrics.jsonl."""
    screen, weights, rows = context.screen, PublishedWeights(), []
    journal = Journal(context.paths.logs / "metrics.jsonl", continue_after=-1)
    with closing(journal), sampling(config, context, weights, context.paths.checkpoints / "push") as (push, rollout, _):
        for number, model in enumerate(config.bench.models):
            screen.begin(f"evaluating {model}")
            load(model, number, weights, push)
            figures = {f"eval/{name}": value for name, value in rollout.evaluate(number, push.sync_rejoined).items()}
            journal.write(number, {"model": model, **figures})
            rows.append((model, figures))
        screen.end_phase()
        screen.show(_table(rows))


def _table(rows: list[tuple[str, dict[str, float]]]) -> Table:
    table = Table(title="Evaluation", title_justify="left")
    table.add_column("model")
    for name in rows[0][1]:
        table.add_column(name.removeprefix("eval/"), justify="right")
    for model, figures in rows:
        table.add_row(model, *(f"{value:.4g}" for value in figures.values()))
    return table
