"""What users do with answers: stars and notes on them, and two checkpoints side by side.

`notes.jsonl` in the log folder of the run has the stars and notes; the last row of an answer counts:

{"step": 7, "evaluation": "", "query_id": "prompts-1", "episode": "prompts/prompts-1/0", "index": 2,
 "star": true, "note": "gives up", "time": "2026-11-27T12:00:00+00:00"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import NotRequired, TypedDict

import numpy as np

from tools.studio.folders import NotFound, Run
from tools.studio.sampled import Query, SampleIndex

NOTES = "notes.jsonl"
_KEY = ("step", "evaluation", "query_id", "episode", "index")
"""Fields that identify an answer."""
_MOST_NOTE_CHARS = 10_000
_MOST_ANSWERS = 400
_MOST_CHARS = 4000
_SAME = ("query_id", "index")


class Side(TypedDict):
    """The step that one side shows, and its neighbours that have answers."""

    step: int
    before: int | None
    after: int | None
    alone: NotRequired[int]
    """Answers that the other side has none for."""
    reward: NotRequired[float | None]
    """The mean of the others."""


def notes(run: Run, query: Mapping[str, str]) -> dict[str, object]:
    """Return the newest row of each answer that has a star or a note."""
    rows: dict[str, dict[str, object]] = {}
    with suppress(NotFound), run.open(NOTES) as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                rows[json.dumps([row[name] for name in _KEY])] = row
    return {"notes": [row for row in rows.values() if row.get("star") or row.get("note")]}


def add_note(run: Run, body: Mapping[str, object]) -> dict[str, object]:
    """Append a row. Raises OSError, KeyError and ValueError."""
    row = {name: body[name] for name in _KEY}
    note = str(body.get("note", ""))
    if len(note) > _MOST_NOTE_CHARS:
        raise ValueError(f"a note has at most {_MOST_NOTE_CHARS} characters, got {len(note)}")
    row |= {"star": bool(body.get("star")), "note": note}
    row["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(run.logs / NOTES, flags, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return row


def pairs(left: SampleIndex, right: SampleIndex, query: Mapping[str, str]) -> dict[str, object]:
    """Return {of, left, right, rows}: the answers of both sides to each prompt, those with different rewards first.
    `query`: of (a set; training by default), left and right (steps; the nearest one that has answers). Raises
    NotFound."""
    of = query.get("of") or "training"
    sides = [_side(left, of, query.get("left"), last=False), _side(right, of, query.get("right"), last=True)]
    answers = [_answers(index, of, side["step"]) for index, side in zip((left, right), sides, strict=True)]
    both = [key for key in answers[0] if key in answers[1]]
    both.sort(key=lambda key: -abs(_reward(answers[0][key]) - _reward(answers[1][key])))
    rows = [{"prompt": answers[0][key]["prompt"], "sides": [one[key] for one in answers]} for key in both]
    for side, own in zip(sides, answers, strict=True):
        side["alone"] = len(own) - len(both)
        side["reward"] = sum(_reward(own[key]) for key in both) / len(both) if both else None
    return {"of": of, "left": sides[0], "right": sides[1], "rows": rows}


def _side(index: SampleIndex, of: str, wanted: str | None, *, last: bool) -> Side:
    """Return the step that is shown, and its neighbours. Raises NotFound and ValueError."""
    steps = index.steps(of)
    if not steps.size:
        raise NotFound(f"there are no answers of {of}")
    at = int(np.abs(steps - int(wanted)).argmin()) if wanted else (len(steps) - 1 if last else 0)
    return {
        "step": int(steps[at]),
        "before": int(steps[at - 1]) if at else None,
        "after": int(steps[at + 1]) if at + 1 < len(steps) else None,
    }


def _answers(index: SampleIndex, of: str, step: int) -> dict[tuple[str, ...], dict[str, object]]:
    query = Query(first_step=step, last_step=step, of=of, descending=False)
    found: dict[tuple[str, ...], dict[str, object]] = {}
    for row in islice(index.all(query), _MOST_ANSWERS):
        short = {name: row.get(name) for name in ("at", "reward", "answer_tokens", "finish_reason", "step")}
        short |= {name: str(row.get(name) or "")[:_MOST_CHARS] for name in ("prompt", "answer", "reference")}
        found.setdefault(tuple(str(row.get(name)) for name in _SAME), short)
    return found


def _reward(row: Mapping[str, object]) -> float:
    value = row["reward"]
    return value if isinstance(value, int | float) else 0.0
