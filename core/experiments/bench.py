"""A bench job: it evaluates models on every evaluation set, and trains nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from core.experiments.common import wait_facts
from core.experiments.workers import make_push, start_generators
from core.launch.published import PublishedWeights, transport_of
from core.monitoring.journal import Journal
from core.placement.allocation import resolve_allocation
from rollout.inference.versions import Published

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig
    from core.experiments.context import RunContext

logger = logging.getLogger(__name__)


def bench(config: PPOMATHConfig, context: RunContext) -> None:
    """Evaluate each model of bench.models, and write a row for each into metrics.jsonl."""
    allocation, screen = resolve_allocation(config), context.screen
    placed, folder = allocation.generator, context.paths.checkpoints / "push"
    screen.begin("starting Ray")
    with context.cluster(num_actors=len(placed.slots) + 1) as cluster:
        screen.begin("starting the processes")
        cluster.reserve(allocation.only(placed.role))
        generators, rollout = start_generators(config, allocation, cluster, context.memory)
        wait_facts(config, rollout)
        generators.wait_started(config.launch.startup_timeout_seconds)
        weights = PublishedWeights()
        requested = transport_of(placed.backend)
        push = make_push(config, allocation, weights, generators, rollout, requested=requested, folder=folder)
        push.connect()
        rows, journal = [], Journal(context.paths.logs / "metrics.jsonl", continue_after=-1)
        for number, model in enumerate(config.bench.models):
            screen.begin(f"evaluating {model}")
            weights.current = Published(version=number, where=str(Path(model).expanduser()))
            push.push(number)
            figures = {f"eval/{name}": value for name, value in rollout.evaluate(push.sync_rejoined).items()}
            journal.write(number, {"model": model, **figures})
            rows.append((model, figures))
        journal.close()
        screen.end_phase()
        screen.console.print(_table(rows))
        rollout.close()
        push.close()
        generators.close()


def _table(rows: list[tuple[str, dict[str, float]]]) -> Table:
    table = Table(title="Evaluation", title_justify="left")
    table.add_column("model")
    for name in rows[0][1]:
        table.add_column(name.removeprefix("eval/"), justify="right")
    for model, figures in rows:
        table.add_row(model, *(f"{value:.4g}" for value in figures.values()))
    return table
