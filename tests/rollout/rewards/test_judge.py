"""A model at a URL judges answers: equal ones once, up to a limit, with its cost in the metrics."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.rewards.judge import Judge, JudgeError
from rollout.rewards.pool import RewardPool
from rollout.types import Prompt

PROMPT = Prompt(
    query_id="q", index=0, task="t", text="<|user|>2+2?", token_ids=np.zeros(1, np.int32), solutions=("\\boxed{4}",),
    question="2+2?",
)  # fmt: skip


class Server(ThreadingHTTPServer):
    """A judge: right answers have 10 points; others what they ask for."""

    seen: list[dict[str, Any]]
    damaged = b""
    """Sent in place of a reply."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append({**body, "authorization": self.headers.get("Authorization"), "path": self.path})
        answer = body["messages"][0]["content"].partition("Answer to judge:\n")[2].partition("\n")[0]
        text = {"4": "Right.\nPoints: 10", "five": "Points: 2.5", "rude": "I refuse."}.get(answer, "Points: 0")
        reply = {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 100}}
        self.send_response(503 if answer == "down" else 200)
        self.end_headers()
        self.wfile.write(server.damaged or json.dumps(reply).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.seen = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def judge(server: Server, **options: Any) -> Judge:
    return Judge(f"http://127.0.0.1:{server.server_port}/v1", "m", **options)


def test_points_become_the_score_and_the_cost_a_figure(server: Server) -> None:
    grade = judge(server, price_per_million_tokens=2.0, api_key="secret")
    assert grade(PROMPT, "4") == {
        "score": 1.0, "judge_calls": 1.0, "judge_cached": 0.0, "judge_tokens": 100.0, "judge_cost": 2e-4,
    }  # fmt: skip
    assert grade(PROMPT, "five")["score"] == 0.25
    [first, _] = server.seen
    assert (first["path"], first["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert "2+2?" in first["messages"][0]["content"] and "<|user|>" not in first["messages"][0]["content"]


def test_equal_answers_are_judged_once_up_to_the_limit_also_by_another_worker(server: Server, tmp_path: Path) -> None:
    first, second = (judge(server, cache=tmp_path / "judge.db", max_calls=2) for _ in range(2))
    assert first(PROMPT, "4")["judge_cached"] == 0.0
    assert second(PROMPT, "4") == {"score": 1.0, "judge_calls": 0.0, "judge_cached": 1.0}
    second(PROMPT, "five")
    with pytest.raises(JudgeError, match="max_calls=2 of the judge is reached"):
        first(PROMPT, "six")
    assert len(server.seen) == 2
    with pytest.raises(ValueError, match="calls are counted in the cache"):
        judge(server, max_calls=2)


def test_replies_without_points_count_towards_the_limit(server: Server, tmp_path: Path) -> None:
    grade = judge(server, cache=tmp_path / "judge.db", max_calls=2)
    for text in ("down", "rude", "rude"):
        with pytest.raises(JudgeError, match="503" if text == "down" else "no line"):
            grade(PROMPT, text)
    with pytest.raises(JudgeError, match="max_calls=2 of the judge is reached"):
        grade(PROMPT, "4")
    assert len(server.seen) == 3, "a judge that is down gives no reply"


@pytest.mark.parametrize(
    "damaged",
    [
        b"[" * 100_000,
        b"[]",
        b"7",
        b'{"choices": {}}',
        b'{"choices": [{"message": "Points: 7"}]}',
        b'{"choices": [{"message": {"content": "Points: 7"}}], "usage": [3]}',
    ],
)
def test_a_reply_of_another_form_is_an_error_of_the_judge(server: Server, damaged: bytes) -> None:
    server.damaged = damaged
    with pytest.raises(JudgeError, match="/v1: "):
        judge(server)(PROMPT, "4")


def test_a_judge_is_a_reward_function_of_a_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"import slipstream\ngrade = slipstream.Judge('http://127.0.0.1:{server.server_port}/v1', 'm')\n"
    (tmp_path / "own_judge.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)

    async def scores() -> list[float]:
        async with RewardPool("own_judge:grade", num_workers=1) as pool:
            return await pool.score_many(PROMPT, ["4", "five", "rude"])

    found: Any = asyncio.run(scores())
    assert [float(score) for score in found] == [1.0, 0.25, -1.0]
    assert found[0].parts["judge_calls"] == 1.0
