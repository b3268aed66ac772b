"""One answer token by token, and the loss of one step.

The tokens of an answer are in the store of episodes (experience.store=sqlite), which must lie in the given folders; the
loss of a step is computed from a batch that was saved (monitor.save_batches).
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from core.runs.paths import step_file
from rollout.experience.serial import loads, records_from_plain
from rollout.types import Trajectory
from tools.studio.folders import NotFound, Run

_BATCH = re.compile(r"step-(\d+)\.json\.gz")
_MOST_TOKENS = 8192
_MOST_SEQUENCES = 64
_SECONDS = 300


def answer_tokens(run: Run, query: Mapping[str, str], allowed: Any) -> dict[str, Any]:
    """Return the tokens of an answer with their figures. `allowed`: (path) -> whether it lies in the given folders.
    Raises NotFound."""
    settings = run.settings
    if settings.get("experience.store") != "sqlite":
        raise NotFound("tokens are kept with experience.store=sqlite; this run keeps its episodes in memory")
    path = _inside(str(settings.get("experience.path") or ""), allowed, "the store of episodes")
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            found = db.execute("SELECT value FROM episodes WHERE id = ?", (query["episode"],)).fetchone()
    except sqlite3.Error as error:
        raise NotFound(f"{path}: cannot be read: {error}") from None
    if found is None or found[0] is None:
        raise NotFound("the store has no tokens of this answer any more (experience.keep_steps)")
    group: Sequence[Trajectory] = records_from_plain(Trajectory, loads(found[0]))
    index = int(query["index"])
    if not 0 <= index < len(group):
        raise NotFound(f"the group of this prompt has {len(group)} answers")
    one = group[index]
    ids = one.token_ids[:_MOST_TOKENS].tolist()
    tokenizer = _tokenizer(settings, allowed)
    return {
        "texts": [tokenizer.decode([id], skip_special_tokens=False) if tokenizer else str(id) for id in ids],
        "ids": ids,
        "logprobs": one.rollout_logprobs[:_MOST_TOKENS].tolist(),
        "versions": one.versions[:_MOST_TOKENS].tolist(),
        "mask": one.loss_mask[:_MOST_TOKENS].astype(int).tolist(),
        "left_out": len(one.token_ids) - len(ids),
        "has_texts": tokenizer is not None,
    }


def _inside(name: str, allowed: Any, what: str) -> Path:
    path = Path(name).expanduser()
    if not name or not path.is_absolute() or not path.is_file() or not allowed(path):
        raise NotFound(
            f"{what} is not in the given folders: {name or 'no path'}; start the studio with its folder, too"
        )
    return path.resolve()


def _tokenizer(settings: Mapping[str, object], allowed: Any) -> Tokenizer | None:
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


def explain(run: Run, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return loss, metrics and gradients of a saved step, computed by `python -m tools.loss` in a process of its own.
    Raises NotFound and ValueError."""
    step = int(body["step"])
    with run.open(step_file(Path("batches"), step).as_posix()) as file:
        case = json.loads(gzip.decompress(file.read()))
    command = ["nice", sys.executable, "-m", "tools.loss", "--from-run", str(run.logs), "--step", str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip() or f"tools.loss ended with {done.returncode}")
    result = json.loads(done.stdout)
    sequences = [
        {
            "reward": sequence.get("reward"),
            "group": sequence.get("group"),
            "advantage": advantage,
            "grads": grads,
            **{name: sequence.get(name) for name in ("logprobs", "rollout_logprobs", "versions", "mask")},
        }
        for sequence, advantage, grads in zip(case["sequences"], result["advantages"], result["grads"], strict=False)
    ]
    sequences.sort(key=lambda one: -sum(map(abs, one["grads"])))
    return {
        "loss": result["loss"],
        "metrics": result["metrics"],
        "algorithm": case.get("algorithm"),
        "sequences": sequences[:_MOST_SEQUENCES],
        "left_out": max(0, len(sequences) - _MOST_SEQUENCES),
    }
