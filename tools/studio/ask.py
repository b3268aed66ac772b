"""Ask the current weights of a run that answers questions (monitor.questions)."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from core.runs.paths import QUESTIONS
from tools.studio.folders import NotFound, Run

_SECONDS = 300


def answers_questions(run: Run) -> bool:
    """Return whether a run that is under way was started with monitor.questions."""
    with suppress(NotFound):
        return bool(run.path(QUESTIONS)) and run.state == "running"
    return False


def ask(run: Run, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of the current weights to `messages`. Raises NotFound and ValueError."""
    with run.open(QUESTIONS) as file:
        where = json.loads(file.read())
    if where["host"] != socket.gethostname():
        raise NotFound(f"{run.name} answers on {where['host']}; start the studio there")
    url = f"http://127.0.0.1:{int(where['port'])}/"
    headers = {"Authorization": f"Bearer {where['key']}", "Content-Type": "application/json"}
    request = Request(url, json.dumps({"messages": body["messages"]}).encode(), headers)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        raise ValueError(json.load(error)["error"]) from None
    except (URLError, TimeoutError) as error:
        raise NotFound(
            f"{run.name} does not answer: {getattr(error, 'reason', error)}; it has ended or is busy"
        ) from None
