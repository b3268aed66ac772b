"""Notes and stars on answers: `notes.jsonl` in the log folder of the run. The last row of an answer counts.

{"step": 7, "evaluation": "", "query_id": "prompts-1", "episode": "prompts/prompts-1/0", "index": 2,
 "star": true, "note": "gives up", "time": "2026-11-27T12:00:00+00:00"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from tools.studio.folders import NotFound, Run

NOTES = "notes.jsonl"
_KEY = ("step", "evaluation", "query_id", "episode", "index")
"""Fields that identify an answer."""
_MOST_CHARS = 10_000


def notes(run: Run, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the newest row of each answer that has a star or a note."""
    rows: dict[str, dict[str, Any]] = {}
    with suppress(NotFound), run.open(NOTES) as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                rows[json.dumps([row[name] for name in _KEY])] = row
    return {"notes": [row for row in rows.values() if row.get("star") or row.get("note")]}


def add_note(run: Run, body: Mapping[str, Any]) -> dict[str, Any]:
    """Append a row. Raises OSError, KeyError and ValueError."""
    row = {name: body[name] for name in _KEY}
    note = str(body.get("note", ""))
    if len(note) > _MOST_CHARS:
        raise ValueError(f"a note has at most {_MOST_CHARS} characters, got {len(note)}")
    row |= {"star": bool(body.get("star")), "note": note}
    row["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(run.logs / NOTES, flags, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return row
