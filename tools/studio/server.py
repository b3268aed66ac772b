"""The web server: answers requests of the pages with JSON. Threads of low priority read and parse files.

Invariant: a request changes nothing in a run; notes and stars go to a file of their own beside the samples.
"""

import asyncio
import importlib.util
import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web
from markdown_it import MarkdownIt

from core.monitoring.health import RULES, Rule, judge
from core.runs.record import CONFIG
from rollout.plugins import ROOT
from tools.studio import configure
from tools.studio.answers import add_note, answer_tokens, explain, notes, pairs, saved_steps
from tools.studio.folders import Folders, NotFound, Run, last_row, log_figures
from tools.studio.guard import guard
from tools.studio.processes import answers_questions, ask, log_lines, processes, stacks, timeline
from tools.studio.sampled import Query, SampleIndex
from tools.studio.series import Series, downsampled, smoothed

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_DOCUMENT = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><link rel="stylesheet" href="/static/style.css"></head>
<body><main class="document">{body}</main></body></html>
"""
_MOST_POINTS = 2000
_FIRST_SECONDS, _FRESH_SECONDS, _LOOK_SECONDS = 5.0, 0.25, 0.01
"""How long a request waits for the first rows of a file and for new ones, and the interval of its checks."""
_NICE = 10
_MOST_RUNS, _JUDGED_RUNS = 12, 50
"""Runs of one chart, and runs whose rules the list applies at once."""
_EXPORTED = 200
"""Rows of an export that are read at once."""


def static_files() -> dict[str, Path]:
    """Return the files of the page by name, charts included. Raises ModuleNotFoundError without the extra."""
    found = importlib.util.find_spec("uplot")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'uplot'")
    charts = Path(found.submodule_search_locations[0]) / "static"
    files = {path.name: path for path in PAGE.iterdir() if path.suffix in _TYPES}
    return {**files, "uplot.js": charts / "uPlot.iife.js", "uplot.css": charts / "uPlot.min.css"}


class NotAllowed(PermissionError):
    """A request needs an option that the studio was started without."""


class Indices:
    """The indices of the runs that were opened; threads of low priority keep them up to date."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._samples: dict[str, SampleIndex] = {}
        self._stopped = threading.Event()
        self._reader = ThreadPoolExecutor(2, "studio-reader", initializer=_be_nice)
        self._reading: dict[int, asyncio.Future[None]] = {}

    def series(self, run: Run) -> Series:
        """Return the metrics of a run."""
        return self._series.setdefault(run.id, Series(run))

    def known(self, run: Run) -> Series | None:
        """Return the metrics of a run if they were read."""
        series = self._series.get(run.id)
        return series if series is not None and series.has_rows else None

    def samples(self, run: Run) -> SampleIndex:
        """Return the samples of a run."""
        return self._samples.setdefault(run.id, SampleIndex(run))

    async def fresh(self, *indices: Series | SampleIndex) -> None:
        """Wait until indices are up to date; for one that has much to read, until it has something to show."""
        loop = asyncio.get_running_loop()
        for index in indices:
            reading = self._reading.get(id(index))
            if reading is None or reading.done():
                if reading is not None and (error := reading.exception()) is not None:
                    logger.warning("Reading failed: %s", error)
                refresh = partial(index.refresh, stop=self._stopped.is_set)
                self._reading[id(index)] = loop.run_in_executor(self._reader, refresh)
        began, waiting = loop.time(), list(indices)
        while waiting:
            limit = _FRESH_SECONDS if all(index.has_rows for index in waiting) else _FIRST_SECONDS
            if loop.time() > began + limit:
                break
            await asyncio.wait([self._reading[id(index)] for index in waiting], timeout=_LOOK_SECONDS)
            waiting = [i for i in waiting if not self._reading[id(i)].done() and not (i.is_long and i.has_rows)]

    def close(self) -> None:
        """End the reading."""
        self._stopped.set()
        self._reader.shutdown(wait=True, cancel_futures=True)


def _be_nice() -> None:
    with suppress(OSError, AttributeError):  # of this thread alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


Handler = Callable[[web.Request], Awaitable[object]]
Read = Callable[[Run, Mapping[str, str]], object]
Change = Callable[[Run, Mapping[str, object]], object]


class Studio:
    """The handlers of one server."""

    def __init__(self, folders: Folders, *, configs: Path, rules: Sequence[Rule], may_run: bool) -> None:
        """`configs`: folder of configuration files; `may_run`: requests may start processes."""
        self._configs = configure.Files(configs)
        self.folders, self.indices = folders, Indices()
        self._rules, self._may_run = rules, may_run
        self._files = static_files()
        self._lights: dict[str, tuple[str, dict[str, object]]] = {}
        """Revision of the metrics and the worst answer of the rules, by run."""

    def routes(self) -> list[web.RouteDef]:
        """Return every route."""
        get = {
            "/api/studio": self.studio,
            "/api/runs": self.runs,
            "/api/series": self.curves,
            "/api/run/{run}": self.run,
            "/api/run/{run}/heat": self.heat,
            "/api/run/{run}/health": self.health,
            "/api/run/{run}/samples": self.samples,
            "/api/run/{run}/sample": self.sample,
            "/api/run/{run}/config": self.config,
            "/api/run/{run}/pairs": self.pairs,
            "/api/run/{run}/timeline": self._reading(timeline),
            "/api/run/{run}/processes": self._reading(processes),
            "/api/run/{run}/log": self._reading(log_lines),
            "/api/run/{run}/notes": self._reading(notes),
            "/api/run/{run}/saved": self._reading(saved_steps),
            "/api/run/{run}/tokens": self._reading(partial(answer_tokens, allowed=self.folders.holds)),
            "/api/configure/schema": _asked(configure.schema),
            "/api/configure/sources": _asked(self._configs.sources),
            "/api/configure/text": _asked(self._configs.text),
        }
        explained = partial(explain, allowed=self.folders.holds)
        post = {
            "/api/run/{run}/note": self._changing(add_note),
            "/api/run/{run}/explain": self._allowed(self._changing(explained)),
            "/api/run/{run}/stacks": self._allowed(self._changing(stacks)),
            "/api/run/{run}/ask": self._allowed(self._changing(ask)),
            "/api/configure/check": _told(configure.check),
            "/api/configure/set": _told(configure.set_key),
            "/api/configure/compare": _told(configure.compare),
            "/api/configure/migrate": _told(configure.migrate),
            "/api/configure/save": _told(self._configs.save),
            "/api/configure/dry-run": self._allowed(_told(self._configs.dry_run)),
            "/api/configure/start": self._allowed(_told(self._configs.start)),
        }
        return [
            web.get("/", self.page),
            web.get("/static/{name}", self.static),
            web.get("/docs/{name}", self.docs),
            web.get("/api/run/{run}/export", self.export),
            *(web.get(path, answered(handler)) for path, handler in get.items()),
            *(web.post(path, answered(handler)) for path, handler in post.items()),
        ]

    def _reading(self, read: Read) -> Handler:
        async def reading(request: web.Request) -> object:
            return await asyncio.to_thread(read, await self._run(request), request.query)

        return reading

    def _changing(self, change: Change) -> Handler:
        async def changing(request: web.Request) -> object:
            return await asyncio.to_thread(change, await self._run(request), await body_of(request))

        return changing

    def _allowed(self, handler: Handler) -> Handler:
        async def allowed(request: web.Request) -> object:
            if not self._may_run:
                raise NotAllowed("the studio starts nothing; start it with --allow-run, or run the command yourself")
            return await handler(request)

        return allowed

    async def config(self, request: web.Request) -> object:
        """Return the configuration that a run was started with."""
        run = await self._run(request)
        text = (await asyncio.to_thread(run.path(CONFIG).read_bytes)).decode("utf-8", "replace")
        return {"text": text, "experiment": configure.experiment_of(text), "name": f"{run.logs.name}.yaml"}

    async def studio(self, request: web.Request) -> object:
        """Return whether requests may start processes."""
        return {"may_run": self._may_run}

    async def health(self, request: web.Request) -> object:
        """Return the answer of every rule."""
        run = await self._run(request)
        series = self.indices.series(run)
        await self.indices.fresh(series)
        return {"answers": await asyncio.to_thread(health, run, series, self._rules)}

    async def export(self, request: web.Request) -> web.StreamResponse:
        """Send the samples that a query keeps as jsonl."""
        try:
            index = self.indices.samples(await self._run(request))
            await self.indices.fresh(index)
            rows = await asyncio.to_thread(index.all, query_of(request))
        except (NotFound, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)
        response = web.StreamResponse(
            headers={"Content-Type": "application/jsonl", "Content-Disposition": 'attachment; filename="samples.jsonl"'}
        )
        await response.prepare(request)
        while piece := await asyncio.to_thread(lambda: list(islice(rows, _EXPORTED))):
            await response.write(b"".join(as_json(row) + b"\n" for row in piece))
        await response.write_eof()
        return response

    async def page(self, request: web.Request) -> web.StreamResponse:
        """Send the page."""
        return self._file("index.html")

    async def static(self, request: web.Request) -> web.StreamResponse:
        """Send one of the files of the page."""
        return self._file(request.match_info["name"])

    async def docs(self, request: web.Request) -> web.StreamResponse:
        """Send a page of the documentation, where the installation is a checkout."""
        pages = {path.name: path for path in (ROOT / "docs").glob("*.md")}
        path = pages.get(request.match_info["name"])
        if path is None:
            raise web.HTTPNotFound(
                text="the documentation is not in this installation; see the folder docs/ of the source"
            )
        html = await asyncio.to_thread(rendered, path.read_text(encoding="utf-8"), title=path.name)
        return web.Response(text=html, content_type="text/html")

    def _file(self, name: str) -> web.StreamResponse:
        path = self._files.get(name)
        if path is None:
            raise web.HTTPNotFound(text="no such file")
        return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")

    async def _run(self, request: web.Request) -> Run:
        return await asyncio.to_thread(self.folders.run, request.match_info["run"])

    async def runs(self, request: web.Request) -> object:
        """Return the runs of the folders."""
        runs = await asyncio.to_thread(self.folders.runs)
        await self.indices.fresh(*[self.indices.series(run) for run in runs[:_JUDGED_RUNS] if run.small])

        def rows() -> list[dict[str, object]]:
            return [{**overview(run), "light": self._light(run)} for run in runs]

        return {"runs": await asyncio.to_thread(rows)}

    def _light(self, run: Run) -> dict[str, object] | None:
        """Return the worst answer of the rules; None where the metrics were not read yet."""
        series = self.indices.known(run)
        if series is None:
            return None
        revision = series.revision
        if self._lights.get(run.id, ("",))[0] != revision:
            self._lights[run.id] = revision, health(run, series, self._rules)[0]
        first = self._lights[run.id][1]
        return {name: first[name] for name in ("light", "title", "reason")}

    async def run(self, request: web.Request) -> object:
        """Return the row of a run in the list, its metrics, and the state of its index."""
        run = await self._run(request)
        series, samples = self.indices.series(run), self.indices.samples(run)
        await self.indices.fresh(series, samples)
        return {
            **await asyncio.to_thread(overview, run),
            **series.status(),
            "sampled": samples.status(),
            "questions": answers_questions(run),
            "saved": bool(saved_steps(run, {})["steps"]),
        }

    async def curves(self, request: web.Request) -> object:
        """Return curves of one or several metrics of one or several runs."""
        query = request.query
        axis = query.get("x", "step")
        points = min(_MOST_POINTS, int(query.get("points", 600)))
        low, high = (float(query.get(name, default)) for name, default in (("from", "-inf"), ("to", "inf")))
        smooth = min(1.0, float(query.get("smooth", 0)))
        runs = [await asyncio.to_thread(self.folders.run, id) for id in query.getall("run", [])[:_MOST_RUNS]]
        series = [self.indices.series(run) for run in runs]
        await self.indices.fresh(*series)

        def curves() -> dict[str, list[dict[str, object]]]:
            return {
                name: [curve(one, name, axis, low, high, points, smooth) for one in series]
                for name in query.getall("metric", [])
            }

        return {"curves": await asyncio.to_thread(curves), "runs": [run.id for run in runs]}

    async def heat(self, request: web.Request) -> object:
        """Return a histogram over the steps."""
        series = self.indices.series(await self._run(request))
        return await asyncio.to_thread(series.heat, request.query["metric"])

    async def samples(self, request: web.Request) -> object:
        """Return the samples that a query keeps."""
        index = self.indices.samples(await self._run(request))
        await self.indices.fresh(index)
        return {**await asyncio.to_thread(index.find, query_of(request)), **index.status()}

    async def sample(self, request: web.Request) -> object:
        """Return one sample with its group."""
        index = self.indices.samples(await self._run(request))
        return await asyncio.to_thread(index.sample, request.query["at"])

    async def pairs(self, request: web.Request) -> object:
        """Return the answers of two steps, of this run or of it and another one, to the same prompts."""
        run = await self._run(request)
        other = await asyncio.to_thread(self.folders.run, request.query.get("other") or run.id)
        left, right = self.indices.samples(run), self.indices.samples(other)
        await self.indices.fresh(left, right)
        return await asyncio.to_thread(pairs, left, right, request.query)


def _asked(read: Callable[[Mapping[str, str]], object]) -> Handler:
    return lambda request: asyncio.to_thread(read, request.query)


def _told(change: Callable[[Mapping[str, object]], object]) -> Handler:
    async def told(request: web.Request) -> object:
        return await asyncio.to_thread(change, await body_of(request))

    return told


def answered(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that sends what `handler` returns as JSON, and errors of the request as one sentence."""

    async def answer(request: web.Request) -> web.Response:
        try:
            value, status = await handler(request), 200
        except NotFound as error:
            value, status = {"error": str(error)}, 404
        except NotAllowed as error:
            value, status = {"error": str(error)}, 403
        except KeyError as error:
            value, status = {"error": f"the request lacks {error}"}, 400
        except ValueError as error:
            value, status = {"error": str(error)}, 400
        except subprocess.TimeoutExpired as error:
            value, status = {"error": f"stopped after {error.timeout:.0f} s; run the command yourself"}, 400
        except OSError as error:
            value, status = {"error": f"cannot be read: {error.strerror}"}, 404
        return web.Response(body=as_json(value), status=status, content_type="application/json")

    return answer


def as_json(value: object) -> bytes:
    """Return a value as JSON, with null for NaN. Names of files that are not UTF-8 and integers of more than 64 bits,
    which orjson refuses, are written inexactly."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        text = json.dumps(value, ensure_ascii=False, default=lambda array: array.tolist())
        return orjson.dumps(json.loads(text.encode(errors="replace"), parse_int=float))


def overview(run: Run) -> dict[str, object]:
    """Return the row of a run in the list of runs."""
    row = last_row(run)
    warning, left = log_figures(run)
    state = run.state
    return {
        "id": run.id,
        "name": run.name,
        "logs": str(run.logs),
        "state": state,
        "step": row.get("step", 0),
        "reward": row.get("reward/mean", row.get("loss")),
        "measure": "reward" if "reward/mean" in row else "loss",
        "tokens_per_second": _tokens_per_second(row),
        "staleness": row.get("staleness/mean"),
        "warning": warning,
        "seconds_left": left if state == "running" else None,
    }


def _tokens_per_second(row: Mapping[str, object]) -> float | None:
    tokens, seconds = row.get("n_tokens"), row.get("time/step")
    if isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds:
        return tokens / seconds
    return None


def curve(
    series: Series, name: str, axis: str, low: float, high: float, points: int, smooth: float
) -> dict[str, object]:
    """Return one curve between two values of x: {x, y, smooth}. `smooth`: share of the points whose mean each point
    becomes, 0: none."""
    x, y = series.curve(name, axis)
    mean = smoothed(y, int(smooth * len(y)))
    inside = slice(*np.searchsorted(x, (low, high), side="left")) if np.isfinite([low, high]).any() else slice(None)
    x, y, mean = x[inside], y[inside], mean[inside]
    shown_x, shown_y = downsampled(x, y, points)
    result: dict[str, object] = {"x": shown_x, "y": shown_y}
    if smooth > 0:
        result["smooth"] = np.interp(shown_x, x, mean) if len(x) else mean
    return result


def query_of(request: web.Request) -> Query:
    """Return the query of an address. Raises ValueError."""
    given = request.query
    names = ("first_step", "last_step", "least_version", "most_version", "start", "count")
    whole = {name: int(given[name]) for name in names if given.get(name)}
    numbers = {name: float(given[name]) for name in ("least_reward", "most_reward") if given.get(name)}
    texts = {
        name: given[name]
        for name in ("finish", "notable", "of", "task", "query_id", "episode", "text", "sort")
        if given.get(name)
    }
    whole["count"] = min(200, whole.get("count", 50))
    whole["start"] = max(0, whole.get("start", 0))
    return Query(**whole, **numbers, **texts, descending=given.get("order", "down") == "down")  # type: ignore[arg-type]


def health(run: Run, series: Series, rules: Sequence[Rule]) -> list[dict[str, object]]:
    """Return the answer of every rule, what is wrong first, with the metrics that it reads: [name, mean of the last
    steps]."""
    history = run.history(series)

    def now(name: str) -> float | None:
        return history.now(name) if history.has(name) else None

    return [
        {
            "name": one.rule.name,
            "title": one.title,
            "docs": one.rule.docs,
            "actions": one.actions,
            "since": one.since,
            "is_share": one.rule.is_share,
            "metrics": [(name, now(name)) for name in one.rule.needs],
            "light": one.light,
            "reason": one.reason,
            "figure": one.figure,
        }
        for one in judge(history, rules)
    ]


def rendered(text: str, *, title: str) -> str:
    """Return a page in Markdown as HTML. Headings have ids as on GitHub; HTML in the text is shown as text, and
    pictures as links."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    tokens = parser.parse(text)
    for token, inline in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            token.attrSet("id", re.sub(r"[^\w -]", "", inline.content.lower()).strip().replace(" ", "-"))
    return _DOCUMENT.format(title=escape(title), body=parser.renderer.render(tokens, parser.options, {}))


async def body_of(request: web.Request) -> dict[str, object]:
    """Return the JSON object of a request. Raises ValueError."""
    if request.content_type != "application/json":  # a form of another page cannot send this type
        raise ValueError("the body must be application/json")
    body = orjson.loads(await request.read())
    if not isinstance(body, dict):
        raise ValueError("the body must be an object")
    return body


def application(
    folders: Folders,
    *,
    host: str,
    port: int,
    token: str | None,
    configs: Path,
    rules: Sequence[Rule] = RULES,
    may_run: bool = False,
) -> web.Application:
    """Return the application of a server. Raises ModuleNotFoundError without the extra."""
    studio = Studio(folders, configs=configs, rules=rules, may_run=may_run)
    app = web.Application(middlewares=[guard(host=host, port=port, token=token)], client_max_size=4 << 20)
    app.add_routes(studio.routes())

    async def close(_: web.Application) -> None:
        await asyncio.to_thread(studio.indices.close)

    app.on_cleanup.append(close)
    return app
