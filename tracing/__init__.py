"""Records what each process of a run did and when, for `python -m tools.timeline`. Standard library only.

Offers: `record_spans` and `record_worker` (once per process), `span` (around what takes time), `frequent_span` (the
same, sampled where there are many a second), `add_span` (for what has ended), `spanned` (around every method of a
class), `worker_environment` (of a worker process), `write_pending` (at an end).
"""

from tracing.spans import (
    add_span,
    frequent_span,
    record_spans,
    record_worker,
    span,
    spanned,
    worker_environment,
    write_pending,
)

__all__ = [
    "add_span",
    "frequent_span",
    "record_spans",
    "record_worker",
    "span",
    "spanned",
    "worker_environment",
    "write_pending",
]
