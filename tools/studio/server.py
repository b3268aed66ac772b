"""The web server: what the pages ask for, as JSON. Reading and parsing happen in threads, at a low priority.

Invariant: a request changes nothing in a run; notes and stars go to a file of their own beside the samples.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from aiohttp import web

from tools.studio.folders import Folders, NotFound, Run, last_row, log_figures
from tools.studio.guard import guard
from tools.studio.sampled import Query, SampleIndex
from tools.studio.series import Series, downsampled, smoothed

logger = logging.getLogger(__name__)
T = TypeVar("T")
PAGE = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_MOST_POINTS = 2000
_FRESH_SECONDS = 1.0
_NICE = 10


class Missing(RuntimeError):
    """A package that the studio needs is not installed."""


def static_files() -> dict[str, Path]:
    """Return the files of the page by name, charts included. Raises Missing."""
    found = importlib.util.find_spec("uplot")
    if found is None or not found.submodule_search_locations:
        raise Missing("the studio needs the package uplot-python: pip install 'slipstream[studio]'")
    charts = Path(found.submodule_search_locations[0]) / "static"
    files = {path.name: path for path in PAGE.iterdir() if path.suffix in _TYPES}
    return {**files, "uplot.js": charts / "uPlot.iife.js", "uplot.css": charts / "uPlot.min.css"}


class Indices:
    """The index of each run that was looked at; a thread of low priority reads what is new."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._samples: dict[str, SampleIndex] = {}
        self._stopped = threading.Event()
        self._reader = ThreadPoolExecutor(1, "studio-reader", initializer=_be_nice)
        self._reading: dict[int, asyncio.Future[None]] = {}

    def series(self, run: Run) -> Series:
        """Return the metrics of a run."""
        return self._series.setdefault(run.id, Series(run))

    def samples(self, run: Run) -> SampleIndex:
        """Return the samples of a run."""
        return self._samples.setdefault(run.id, SampleIndex(run))

    async def fresh(self, index: Series | SampleIndex) -> None:
        """Wait until an index is up to date, but not longer than it takes to read a small file."""
        loop = asyncio.get_running_loop()
        reading = self._reading.get(id(index))
        if reading is None or reading.done():
            reading = loop.run_in_executor(self._reader, lambda: index.refresh(stop=self._stopped.is_set))
            self._reading[id(index)] = reading
        await asyncio.wait([reading], timeout=_FRESH_SECONDS / 4)
        if reading.done() and (error := reading.exception()) is not None:
            logger.warning("Reading failed: %s", error)

    def close(self) -> None:
        """End the reading."""
        self._stopped.set()
        self._reader.shutdown(wait=True, cancel_futures=True)


def _be_nice() -> None:
    with suppress(OSError, AttributeError):  # of this thread alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Studio:
    """The handlers of one server."""

    def __init__(self, folders: Folders) -> None:
        self.folders, self.indices = folders, Indices()
        self._files = static_files()

    def routes(self) -> list[web.RouteDef]:
        """Return every route."""
        get = {
            "/api/runs": self.runs,
            "/api/series": self.curves,
            "/api/run/{run}": self.run,
            "/api/run/{run}/row": self.row,
            "/api/run/{run}/heat": self.heat,
            "/api/run/{run}/samples": self.samples,
            "/api/run/{run}/sample": self.sample,
        }
        return [
            web.get("/", self.page),
            web.get("/static/{name}", self.static),
            *(web.get(path, answered(handler)) for path, handler in get.items()),
        ]

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Send the page."""
        return self._file("index.html")

    async def static(self, request: web.Request) -> web.StreamResponse:
        """Send one of the files of the page."""
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.StreamResponse:
        path = self._files.get(name)
        if path is None:
            raise web.HTTPNotFound(text="no such file")
        return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")

    def _run(self, request: web.Request) -> Run:
        return self.folders.run(request.match_info["run"])

    async def runs(self, request: web.Request) -> Any:
        """Return the runs of the folders."""
        return {"runs": await asyncio.to_thread(lambda: [overview(run) for run in self.folders.runs()])}

    async def run(self, request: web.Request) -> Any:
        """Return what there is of a run."""
        run = self._run(request)
        series, samples = self.indices.series(run), self.indices.samples(run)
        await self.indices.fresh(series)
        await self.indices.fresh(samples)
        return {**await asyncio.to_thread(overview, run), **series.status(), "sampled": samples.status()}

    async def curves(self, request: web.Request) -> Any:
        """Return curves of one or several metrics of one or several runs."""
        query = request.query
        axis = query.get("x", "step")
        points = min(_MOST_POINTS, int(query.get("points", 600)))
        low, high = (float(query.get(name, default)) for name, default in (("from", "-inf"), ("to", "inf")))
        smooth = float(query.get("smooth", 0))
        runs = [self.folders.run(id) for id in query.getall("run", [])][:12]
        series = [self.indices.series(run) for run in runs]
        for one in series:
            await self.indices.fresh(one)

        def curves() -> dict[str, list[dict[str, Any]]]:
            return {
                name: [curve(one, name, axis, low, high, points, smooth) for one in series]
                for name in query.getall("metric", [])
            }

        return {"curves": await asyncio.to_thread(curves), "runs": [run.id for run in runs]}

    async def row(self, request: web.Request) -> Any:
        """Return the metrics of one step."""
        return self.indices.series(self._run(request)).row(int(request.query["step"]))

    async def heat(self, request: web.Request) -> Any:
        """Return a histogram over the steps."""
        series = self.indices.series(self._run(request))
        return await asyncio.to_thread(series.heat, request.query["metric"])

    async def samples(self, request: web.Request) -> Any:
        """Return the samples that a query keeps."""
        index = self.indices.samples(self._run(request))
        await self.indices.fresh(index)
        return {**await asyncio.to_thread(index.find, query_of(request)), **index.status()}

    async def sample(self, request: web.Request) -> Any:
        """Return one sample with its group."""
        index = self.indices.samples(self._run(request))
        return await asyncio.to_thread(index.sample, request.query["at"])


def answered(handler: Callable[[web.Request], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that sends what `handler` returns as JSON, and errors of the request as one sentence."""

    async def answer(request: web.Request) -> web.Response:
        try:
            value, status = await handler(request), 200
        except NotFound as error:
            value, status = {"error": str(error)}, 404
        except KeyError as error:
            value, status = {"error": f"the request lacks {error}"}, 400
        except ValueError as error:
            value, status = {"error": str(error)}, 400
        except OSError as error:
            value, status = {"error": f"cannot be read: {error.strerror}"}, 404
        body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        return web.Response(body=body, status=status, content_type="application/json")

    return answer


def overview(run: Run) -> dict[str, Any]:
    """Return the row of a run in the list of runs."""
    row = last_row(run)
    warning, left = log_figures(run)
    state = run.state
    seconds = row.get("time/step")
    tokens = row.get("n_tokens")
    rate = (
        tokens / seconds if isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds else None
    )
    return {
        "id": run.id,
        "name": run.name,
        "logs": str(run.logs),
        "state": state,
        "step": row.get("step", 0),
        "reward": row.get("reward/mean", row.get("loss")),
        "reward_name": "reward/mean" if "reward/mean" in row else "loss",
        "tokens_per_second": rate,
        "staleness": row.get("staleness/mean"),
        "step_seconds": seconds,
        "warning": warning,
        "seconds_left": left if state == "running" else None,
    }


def curve(series: Series, name: str, axis: str, low: float, high: float, points: int, smooth: float) -> dict[str, Any]:
    """Return one curve between two values of x: {x, y, smooth, total}. `smooth`: share of the points whose mean each
    point becomes, 0: none."""
    x, y = series.curve(name, axis)
    mean = smoothed(y, int(smooth * len(y)))
    inside = slice(*np.searchsorted(x, (low, high), side="left")) if np.isfinite([low, high]).any() else slice(None)
    x, y, mean = x[inside], y[inside], mean[inside]
    shown_x, shown_y = downsampled(x, y, points)
    result = {"x": shown_x, "y": shown_y, "total": len(x)}
    if smooth > 0:
        result["smooth"] = np.interp(shown_x, x, mean) if len(x) else mean
    return result


def query_of(request: web.Request) -> Query:
    """Return the query of an address. Raises ValueError."""
    given = request.query
    whole = {name: int(given[name]) for name in ("first_step", "last_step", "start", "count") if given.get(name)}
    numbers = {name: float(given[name]) for name in ("least_reward", "most_reward") if given.get(name)}
    texts = {
        name: given[name]
        for name in ("finish", "notable", "of", "query_id", "episode", "text", "sort")
        if given.get(name)
    }
    whole["count"] = min(200, whole.get("count", 50))
    return Query(**whole, **numbers, **texts, descending=given.get("order", "down") == "down")  # type: ignore[arg-type]


def application(folders: Folders, *, host: str, port: int, token: str | None) -> web.Application:
    """Return the application of a server. Raises Missing."""
    studio = Studio(folders)
    app = web.Application(middlewares=[guard(host=host, port=port, token=token)], client_max_size=4 << 20)
    app.add_routes(studio.routes())

    async def close(_: web.Application) -> None:
        await asyncio.to_thread(studio.indices.close)

    app.on_cleanup.append(close)
    return app
