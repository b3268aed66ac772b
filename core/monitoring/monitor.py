"""The one place that reports: components return dict[str, float], only the monitor writes.

Log lines and metric names are those of the AReaL tutorial; the same figures go to TensorBoard, and to Weights & Biases
or MLflow when configured (core/monitoring/trackers.py). `StepTimer` measures each phase once, for log line and
metrics alike.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import Protocol, Self, runtime_checkable

import numpy as np

from core.errors import could_not_write
from core.monitoring.health import NoSignal
from core.monitoring.metrics import Histogram, Journal, Row
from core.monitoring.samples import Sample, headline, log_text
from core.monitoring.screen import Screen
from rollout.experience.selection import Schedule
from tracing import add_span, span

logger = logging.getLogger(__name__)


class StepTimer:
    """Seconds of each phase of the current step. `tell_phase` is called with the name of each that begins."""

    def __init__(self, tell_phase: Callable[[str], None]) -> None:
        self._tell_phase = tell_phase
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._tell_phase(phase)
        start = time.perf_counter()
        try:
            with span(phase):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def finish(self) -> tuple[float, dict[str, float]]:
        """Return (seconds since the last finish, seconds by phase) and start the next step."""
        now = time.perf_counter()
        total, phases = now - self._began, self._seconds
        self._began, self._seconds = now, {}
        return total, phases


class MetricSink(Protocol):
    """Somewhere metrics go."""

    def write(self, step: int, metrics: Row) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class SampleSink(Protocol):
    """A sink that takes text too."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None: ...


class TensorBoardSink:
    """Event files under {logs}/tensorboard."""

    def __init__(self, folder: Path, *, continue_after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), max_queue=50, purge_step=continue_after + 1)

    def write(self, step: int, metrics: Row) -> None:
        try:
            for name, value in metrics.items():
                if isinstance(value, Histogram):
                    self._writer.add_histogram(name, value.values, step, bins=value.bins()[1])
                else:
                    self._writer.add_scalar(name, value, step)
        except OSError as error:  # of an earlier step: its thread writes later
            raise could_not_write(f"TensorBoard metrics of step {step}", self._folder, error) from error

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            # Four spaces: the page shows Markdown, and the text stays as it is.
            parts = (headline(sample), sample.prompt, sample.answer)
            text = "\n\n".join(indent(part, " " * 4, lambda line: True) for part in parts)
            for name in sample.notable:
                self._writer.add_text(f"samples/{name}", text, step)

    def close(self) -> None:
        self._writer.close()


class Monitor:
    """Terminal, log lines and metric sinks of one run."""

    def __init__(
        self,
        *,
        screen: Screen,
        sinks: list[MetricSink],
        consumed: Journal | None,
        schedule: Schedule,
        done_steps: int,
        elapsed: float,
        sample_steps: int | None = None,
    ) -> None:
        """`sample_steps`: samples() reports after the first step and every this many steps. None: never."""
        self._sinks, self._sample_steps = sinks, sample_steps
        self._consumed = consumed
        self._elapsed = elapsed
        self._finished_here = 0
        self._spent_here = 0.0
        self._schedule = schedule
        self._screen, self._no_signal = screen, NoSignal()
        screen.open(total_steps=schedule.total_steps, done_steps=done_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        self._screen.close()
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as e:
                if error_type is None:
                    raise
                logger.error("Could not close %s after another error: %s", type(sink).__name__, e)
        if self._consumed is not None:
            self._consumed.close()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of training, earlier attempts included."""
        return self._elapsed

    def rpc(self, name: str, metrics: Mapping[str, float]) -> None:
        """Log `RPC name actor_train returns {...}`."""
        logger.info("RPC name %s returns %s", name, {k: float(v) for k, v in metrics.items()})

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Report an evaluation after `step` steps: name of the figure -> value."""
        result = {f"eval/{name}": value for name, value in figures.items()}
        self.rpc("evaluate", result)
        self._screen.evaluation(step, result)
        self.write(step, result)

    def consumed(self, step: int, episodes: Sequence[str]) -> None:
        """Write the ids of the episodes that step `step` (counting from 1) trained on."""
        if self._consumed is not None:
            self._consumed.write(step, {"prompts": list(episodes)})

    def samples(self, step: int, read: Callable[[], Sequence[Sample]]) -> None:
        """Report the answers that `read` returns, if they are due after step `step` (counting from 1)."""
        no_signal = self._no_signal.is_due
        due = self._sample_steps is not None and (step == 1 or step % self._sample_steps == 0)
        samples = read() if no_signal or due else []
        if no_signal:
            logger.warning("%s", self._no_signal.message(samples))
        if not due:
            return
        for sample in samples:
            logger.info("%s", log_text(sample))
        self._screen.samples(samples)
        for sink in self._sinks:
            if isinstance(sink, SampleSink):
                sink.write_samples(step, samples)

    def staleness(self, ages: np.ndarray) -> None:
        """Log the age of the batch: trajectories by age in steps."""
        counts = ", ".join(f"{age}: {count}" for age, count in Histogram(ages).as_json().items())
        logger.info("Staleness of the batch (age in steps: trajectories): {%s}", counts)

    def step(
        self,
        *,
        step: int,
        mean_batch_tokens: float,
        seconds: float,
        phases: Mapping[str, float],
        metrics: Row,
        headline: str,
    ) -> None:
        """Report everything at the end of step `step` (counting from 1). `mean_batch_tokens`: mean tokens of a batch of
        the data set before sampling, the same in each step."""
        schedule = self._schedule
        epoch, epoch_step = schedule.position(step)
        self._elapsed += seconds
        add_span("step", seconds, lane="steps", step=step)
        self._finished_here += 1
        self._spent_here += seconds
        eta = ""
        # The first two steps of every attempt carry warm-up: an estimate from them would mislead.
        if self._finished_here > 2:
            left = self._spent_here / self._finished_here * (schedule.total_steps - step)
            eta = f" Estimated remaining time: {left:.3f}s."
        logger.info(
            "Epoch %d/%d step %d/%d (global step %d) finishes. Average #tokens per batch is %d. "
            "#End to end# execution time: *%.3f*s. Total time consumption: %.3fs.%s",
            epoch, schedule.num_epochs, epoch_step, schedule.steps_of_epoch(epoch), step, round(mean_batch_tokens),
            seconds, self._elapsed, eta,
        )  # fmt: skip
        spent = ", ".join(f"{name} {value:.3f}s" for name, value in phases.items())
        logger.info("Step time: %s, other %.3fs.", spent, seconds - sum(phases.values()))
        times = {f"time/{name.replace(' ', '_')}": value for name, value in phases.items()}
        row = {**metrics, **times, "time/step": seconds}
        self.write(step, row)
        self._screen.step(step, row, headline)
        self._no_signal.count(row)

    def write(self, step: int, metrics: Row) -> None:
        """Write metrics to every sink, without a log line."""
        for sink in self._sinks:
            sink.write(step, metrics)
