"""What users do with answers: stars and notes on them, two checkpoints side by side, one answer token by token, and the
loss of one step.

The tokens of an answer are in the batch of its step (monitor.save_batches) or in the store of episodes
(experience.store=sqlite), which must lie in the given folders; the loss of a step is computed from its batch.

`notes.jsonl` in the log folder of the run has the stars and notes; the last row of an answer counts:

{"step": 7, "evaluation": "", "query_id": "prompts-1", "episode": "prompts/prompts-1/0", "index": 2,
 "star": true, "note": "gives up", "time": "2026-11-27T12:00:00+00:00"}
"""

import gzip
import heapq
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from tokenizers import Tokenizer

from core.runs.paths import step_file
from rollout.experience.serial import loads, records_from_plain
from rollout.types import Trajectory
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


_BATCH = re.compile(r"step-(\d+)\.json\.gz")
_MOST_TOKENS = 8192
_MOST_SEQUENCES = 64
_MOST_MOVED, _AROUND = 30, 8
"""Tokens in the list of those with the largest gradients, and tokens shown before and after each."""
_SECONDS = 300
Allowed = Callable[[Path], bool]
"""(path) -> whether it lies in the given folders."""


def answer_tokens(run: Run, query: Mapping[str, str], allowed: Allowed) -> dict[str, Any]:
    """Return the tokens of an answer with their figures, of the saved batch of its step or of the store of episodes.
    `allowed`: (path) -> whether it lies in the given folders. Raises NotFound."""
    figures = _saved_tokens(run, query) or _stored_tokens(run, query, allowed)
    ids = figures.pop("ids")
    return {
        **_texts(run, ids[:_MOST_TOKENS], allowed),
        "figures": {name: values[:_MOST_TOKENS] for name, values in figures.items()},
        "left_out": max(0, len(ids) - _MOST_TOKENS),
    }


def _texts(run: Run, ids: Sequence[int], allowed: Allowed) -> dict[str, Any]:
    tokenizer = _tokenizer(run.settings, allowed)
    texts = [tokenizer.decode([id], skip_special_tokens=False) if tokenizer else str(id) for id in ids]
    return {"ids": ids, "texts": texts, "has_texts": tokenizer is not None}


def _saved_tokens(run: Run, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the figures of an answer from the batch of its step; None where that was not saved."""
    try:
        case = _case(run, int(query["step"]))
    except NotFound:
        return None
    wanted = query["episode"], int(query["index"])
    for tokens, sequence in zip(case.get("tokens", ()), case["sequences"], strict=False):
        if (tokens["episode"], tokens["index"]) == wanted:
            return _figures(tokens, sequence)
    return None


def _figures(tokens: Mapping[str, Any], sequence: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of each token. The ratio is that of the trainer's policy at the start of the step to the
    policy that sampled the token."""
    sampled, trainer = sequence["rollout_logprobs"], sequence.get("old_logprobs")
    found = {
        "ids": tokens["ids"],
        "logprobs": sampled,
        "advantages": tokens["advantages"],
        "versions": sequence["versions"],
        "mask": sequence["mask"],
    }
    if trainer is not None:
        found["ratios"] = np.exp(np.subtract(trainer, sampled)).tolist()
    if "entropy" in sequence:
        found["entropy"] = sequence["entropy"]
    return found


def _stored_tokens(run: Run, query: Mapping[str, str], allowed: Allowed) -> dict[str, Any]:
    settings = run.settings
    if settings.get("experience.store") != "sqlite":
        raise NotFound(
            "tokens are kept with monitor.save_batches=N, of every N-th step, or with experience.store=sqlite; "
            "this run has none of this answer"
        )
    path = _inside(str(settings.get("experience.path") or ""), allowed, "the store of episodes")
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            select = "SELECT value FROM trajectories JOIN episodes USING (number) WHERE id = ?"
            found = db.execute(select, (query["episode"],)).fetchone()
    except sqlite3.Error as error:
        raise NotFound(f"{path}: cannot be read: {error}") from None
    if found is None:
        raise NotFound("the store has no tokens of this answer any more (experience.keep_steps)")
    group: Sequence[Trajectory] = records_from_plain(Trajectory, loads(found[0]))
    index = int(query["index"])
    if not 0 <= index < len(group):
        raise NotFound(f"the group of this prompt has {len(group)} answers")
    one = group[index]
    return {
        "ids": one.token_ids.tolist(),
        "logprobs": one.rollout_logprobs.tolist(),
        "versions": one.versions.tolist(),
        "mask": one.loss_mask.astype(int).tolist(),
    }


def _inside(name: str, allowed: Allowed, what: str) -> Path:
    path = Path(name).expanduser()
    if not name or not path.is_absolute() or not path.is_file() or not allowed(path):
        raise NotFound(
            f"{what} is not in the given folders: {name or 'no path'}; start the studio with its folder, too"
        )
    return path.resolve()


def _tokenizer(settings: Mapping[str, object], allowed: Allowed) -> Tokenizer | None:
    for key in ("actor.path", "model.path"):
        folder = settings.get(key)
        if isinstance(folder, str):
            try:
                return _read_tokenizer(_inside(f"{folder}/tokenizer.json", allowed, "the tokenizer"))
            except NotFound:
                continue
    return None


@lru_cache(maxsize=4)
def _read_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def saved_steps(run: Run, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the steps of which the batch was saved."""
    names = [found for path in run.files("batches/step-*.json.gz") if (found := _BATCH.fullmatch(path.name))]
    return {"steps": sorted(int(name[1]) for name in names)}


def _case(run: Run, step: int) -> dict[str, Any]:
    """Return the batch of a step. Raises NotFound."""
    path = run.path(step_file(Path("batches"), step).as_posix())
    return _read_case(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)
def _read_case(path: Path, written: int) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return case


def explain(run: Run, body: Mapping[str, Any], allowed: Allowed) -> dict[str, Any]:
    """Return loss, metrics and gradients of a saved step, computed by `python -m tools.loss` in a process of its own,
    and the tokens that move the loss most. Raises NotFound and ValueError."""
    step = int(body["step"])
    case = _case(run, step)
    command = ["nice", sys.executable, "-m", "tools.loss", "--from-run", str(run.logs), "--step", str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"tools.loss ended with {done.returncode}")
    result = json.loads(done.stdout)
    tokens = case.get("tokens") or [{}] * len(case["sequences"])
    sequences = [
        {
            **{name: of.get(name) for name in ("episode", "index", "ids")},
            "reward": sequence.get("reward"),
            "group": sequence.get("group"),
            "advantage": advantage,
            "grads": grads,
            "logprobs": sequence["logprobs"],
        }
        for of, sequence, advantage, grads in zip(
            tokens, case["sequences"], result["advantages"], result["grads"], strict=False
        )
    ]
    sequences.sort(key=lambda one: -sum(map(abs, one["grads"])))
    return {
        "loss": result["loss"],
        "metrics": result["metrics"],
        "algorithm": case.get("algorithm"),
        "moved": _moved(run, sequences, allowed),
        "total": sum(sum(map(abs, one["grads"])) for one in sequences),
        "sequences": [{k: v for k, v in one.items() if k != "ids"} for one in sequences[:_MOST_SEQUENCES]],
        "left_out": max(0, len(sequences) - _MOST_SEQUENCES),
    }


def _moved(run: Run, sequences: Sequence[Mapping[str, Any]], allowed: Allowed) -> list[dict[str, Any]]:
    """Return the tokens with the largest gradients, with the text around them."""
    grads = [(abs(grad), number, i) for number, one in enumerate(sequences) for i, grad in enumerate(one["grads"])]
    places = [place for place in grads if place[0]]
    found = []
    for _, number, i in heapq.nlargest(_MOST_MOVED, places):
        one = sequences[number]
        begin = max(0, i - _AROUND)
        texts = _texts(run, (one["ids"] or [])[begin : i + _AROUND], allowed)["texts"]
        advantage = one["advantage"]
        found.append(
            {
                **{name: one[name] for name in ("episode", "index", "reward")},
                "grad": one["grads"][i],
                "logprob": one["logprobs"][i],
                "advantage": advantage[i] if isinstance(advantage, list) else advantage,
                "place": i,
                "before": "".join(texts[: i - begin]),
                "text": texts[i - begin] if texts else "",
                "after": "".join(texts[i - begin + 1 :]),
            }
        )
    return found
