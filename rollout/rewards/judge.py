"""A reward by a model that judges answers: the auxiliary model of the run, or one at the URL of an OpenAI-compatible
server.

    grade = slipstream.Judge("http://127.0.0.1:8000/v1", "judge", cache="runs/judge.db", max_calls=100_000)

in a module of the user is a reward function: reward.function=my_rewards:grade.
"""

import hashlib
import json
import os
import re
import sqlite3
import urllib.error
import urllib.request
import uuid
from contextlib import closing
from http.client import HTTPException
from pathlib import Path

from model_specs.untrusted import parse_json
from rollout.programs import auxiliary
from rollout.types import Prompt

AUXILIARY = "auxiliary"
"""In place of a URL."""

INSTRUCTION = """Judge an answer to a question.

Question:
{question}

Right answer, if it is known: {solution}

Answer to judge:
{answer}

Give points from 0 (wrong) to 10 (right and complete). End with a line "Points: N"."""
_POINTS = re.compile(r"Points:\s*\**\s*(\d+(?:\.\d+)?)")
_MOST_POINTS = 10.0
_MAX_REPLY_BYTES = 10_000_000
_SCHEMA = "CREATE TABLE IF NOT EXISTS judged (key TEXT PRIMARY KEY, points REAL, tokens INTEGER, cost REAL)"


class JudgeError(RuntimeError):
    """The judge gave no points, or its limit is reached. The answer counts as one that could not be scored."""


class Judge:
    """Returns points / 10, with the figures judge_calls and judge_cached (0 or 1), judge_tokens and judge_cost."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        instruction: str = INSTRUCTION,
        api_key: str | None = None,
        cache: str | Path | None = None,
        max_calls: int | None = None,
        price_per_million_tokens: float = 0.0,
        max_tokens: int = 512,
        seconds: float = 30.0,
    ) -> None:
        """`url`: up to and with /v1, or AUXILIARY: the model of auxiliary.path. `model`: its name at the server and
        in the cache; the auxiliary model takes any. `instruction` has {question}, {solution} and {answer}. `api_key`:
        None is that of the environment variable JUDGE_API_KEY. `cache`: SQLite file of all workers, in which equal
        answers are asked for once. `max_calls`: replies of the judge to all workers, also after restarts, as the cache
        counts them; those without points count, too. `seconds`: of a call; less than reward.timeout_seconds. Raises
        ValueError for a limit without a cache."""
        if max_calls is not None and cache is None:
            raise ValueError(f"max_calls={max_calls}: calls are counted in the cache; name a file")
        self._url, self._model, self._instruction = url.rstrip("/"), model, instruction
        self._key, self._cache, self._max_calls = api_key, cache, max_calls
        self._price, self._max_tokens, self._seconds = price_per_million_tokens, max_tokens, seconds

    def __call__(self, prompt: Prompt, text: str) -> dict[str, float]:
        """Return the score of an answer. Raises JudgeError."""
        asked = self._instruction.format(
            question=prompt.question or prompt.text, solution=" or ".join(prompt.answers) or "not known", answer=text
        )
        key = hashlib.blake2b(f"{self._model}\0{asked}".encode(errors="replace"), digest_size=16).hexdigest()
        if (known := self._known(key)) is not None:
            return {"score": known / _MOST_POINTS, "judge_calls": 0.0, "judge_cached": 1.0}
        text, tokens = self._ask(asked)
        points, cost = _points(text), tokens * self._price / 1e6
        self._keep(key if points is not None else uuid.uuid4().hex, points, tokens, cost)
        if points is None:
            raise JudgeError(f"the judge wrote no line 'Points: N' with N up to 10: {text[-200:]!r}")
        return {
            "score": points / _MOST_POINTS,
            "judge_calls": 1.0, "judge_cached": 0.0, "judge_tokens": float(tokens), "judge_cost": cost,
        }  # fmt: skip

    def _known(self, key: str) -> float | None:
        """Return the points of an answer that was judged before. Raises JudgeError at the limit."""
        if self._cache is None:
            return None
        with closing(self._open()) as database:
            found = database.execute("SELECT points FROM judged WHERE key = ?", (key,)).fetchone()
            if found is not None:
                return float(found[0])
            [calls] = database.execute("SELECT COUNT(*) FROM judged").fetchone()
        if self._max_calls is not None and calls >= self._max_calls:
            raise JudgeError(f"max_calls={self._max_calls} of the judge is reached; raise it, or remove {self._cache}")
        return None

    def _keep(self, key: str, points: float | None, tokens: int, cost: float) -> None:
        if self._cache is not None:
            with closing(self._open()) as database, database:
                database.execute("INSERT OR IGNORE INTO judged VALUES (?, ?, ?, ?)", (key, points, tokens, cost))

    def _open(self) -> sqlite3.Connection:
        assert self._cache is not None, "there is a cache"
        Path(self._cache).parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._cache, timeout=self._seconds)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(_SCHEMA)
        return database

    def _ask(self, asked: str) -> tuple[str, int]:
        """Return the reply, and the tokens of question and reply. Raises JudgeError."""
        body = {
            "model": self._model, "messages": [{"role": "user", "content": asked}], "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }  # fmt: skip
        url, key = self._url, self._key or os.environ.get("JUDGE_API_KEY")
        if url == AUXILIARY:
            endpoint = auxiliary()
            url, key = f"{endpoint.url}/v1", endpoint.api_key
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                reply = parse_json(response.read(_MAX_REPLY_BYTES))
            if not isinstance(reply, dict):
                raise TypeError(f"a JSON object is expected, not {type(reply).__name__}")
            text = str(reply["choices"][0]["message"]["content"] or "")
            return text, int((reply.get("usage") or {}).get("total_tokens", 0))
        except urllib.error.HTTPError as error:
            raise JudgeError(f"{url}: {error.code} {error.read(300).decode(errors='replace')}") from error
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise JudgeError(f"{url}: {error!r}") from error


def _points(text: str) -> float | None:
    """Return the points that a reply ends with; None where it has none."""
    found = _POINTS.findall(text)
    return float(found[-1]) if found and float(found[-1]) <= _MOST_POINTS else None
