"""`python -m tools.bench cpu --only studio`: the studio on a run of 100,000 steps, 200 metrics and 1,000,000 samples.

Needs `playwright` and the Chromium of the distribution.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench import Figure

_STEPS, _METRICS, _SAMPLES, _FILES = 100_000, 200, 1_000_000, 8
_BODIES = 500
"""Rows that differ in more than their step."""
_PAINT = "<= 1.5 s"
_PORT = 18431
_FRAMES = """() => new Promise((done) => {
  const times = []; let last = performance.now(), left = 120;
  const next = (now) => { times.push(now - last); last = now; scrollBy(0, 40);
    if (left--) requestAnimationFrame(next); else done(times.sort((a, b) => a - b)); };
  requestAnimationFrame(next);
})"""


def large(scene: Any) -> Iterator[Figure]:
    """Yield the seconds to the first curve without and with an index, of the index, of searches, and of frames."""
    logs = scene.folder / "logs" / "user" / "large" / "run"
    write_run(logs)
    env = {**os.environ, "XDG_CACHE_HOME": str(scene.folder / "cache")}
    with _studio(scene.folder, env) as base, _page() as page:
        yield _figure("first_paint_without_index", _to_paint(page, base, "metrics", ".chart canvas"), target=_PAINT)
        begin = time.perf_counter()
        run = _get(base, "api/runs")["runs"][0]["id"]
        _until(lambda: _get(base, f"api/run/{run}")["read"] >= 1)
        yield _figure("index_of_metrics", time.perf_counter() - begin)
        _until(lambda: _get(base, f"api/run/{run}")["sampled"]["read"] >= 1)
        yield _figure("index_of_both", time.perf_counter() - begin)
    with _studio(scene.folder, env) as base, _page() as page:
        yield _figure("first_paint", _to_paint(page, base, "metrics", ".chart canvas"), target=_PAINT)
        times = page.evaluate(_FRAMES)
        yield Figure(
            name="studio.frame_95_percentile", value=times[int(0.95 * len(times))], unit="ms", baseline=1000 / 60,
            target="<= 33 ms while scrolling",
        )  # fmt: skip
        yield _figure("first_answers", _to_paint(page, base, "samples", ".samples tbody tr"), target=_PAINT)
        begin = time.perf_counter()
        found = _get(base, f"api/run/{run}/samples?sort=answer_tokens&first_step=7&last_step=7")
        assert found["matched"] == _SAMPLES // _STEPS
        yield _figure("longest_answer_of_a_step", time.perf_counter() - begin, target="<= 0.5 s")


def write_run(logs: Path) -> None:
    """Write metrics and samples in the formats of runs."""
    logs.mkdir(parents=True)
    (logs / "starts.jsonl").write_text("{}\n")
    source = random.Random(0)
    names = ["reward/mean", "n_tokens", "time/step", *(f"group{i % 20}/metric{i}" for i in range(_METRICS - 3))]
    bodies = [json.dumps({name: source.random() for name in names})[1:] for _ in range(_BODIES)]
    with open(logs / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"step": {step}, {bodies[step % _BODIES]}\n' for step in range(1, _STEPS + 1))
    texts = [json.dumps(_answer(source, i))[1:] for i in range(_BODIES)]
    per_step, per_file = _SAMPLES // _STEPS, _STEPS // _FILES
    for number in range(_FILES):
        name = "samples.jsonl" if number == _FILES - 1 else f"samples-{number + 1:06d}.jsonl"
        with open(logs / name, "w") as file:
            for step in range(number * per_file + 1, (number + 1) * per_file + 1):
                file.writelines(f'{{"step": {step}, {texts[(7 * step + i) % _BODIES]}\n' for i in range(per_step))


def _answer(source: random.Random, i: int) -> dict[str, object]:
    words = " ".join(source.choice(("the", "sum", "of", "both", "is", "twelve")) for _ in range(30))
    return {
        "query_id": f"prompts-{i}", "episode": f"prompts/prompts-{i}/0", "index": i % 8, "prompt": words[:60],
        "answer": words, "reward": source.random(), "finish_reason": "stop", "prompt_tokens": 12,
        "answer_tokens": 20 + i, "oldest_version": 1, "newest_version": 1, "notable": [], "turns": [], "metrics": {},
        "reference": "12", "evaluation": "",
    }  # fmt: skip


@contextmanager
def _studio(folder: Path, env: dict[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", "tools.studio", str(folder), "--port", str(_PORT)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield f"http://127.0.0.1:{_PORT}/"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextmanager
def _page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium.new_page(viewport={"width": 1280, "height": 800})
        chromium.close()


def _to_paint(page: Any, base: str, name: str, selector: str) -> float:
    """Return the seconds from the request of a page of the run to what it shows."""
    run = _get(base, "api/runs")["runs"][0]["id"]
    page.goto("about:blank")
    begin = time.perf_counter()
    page.goto(f"{base}#/run/{run}/{name}")
    page.locator(selector).first.wait_for()
    return time.perf_counter() - begin


def _figure(name: str, seconds: float, target: str = "") -> Figure:
    return Figure(name=f"studio.{name}_seconds", value=seconds, unit="s", baseline=None, target=target)


def _get(base: str, path: str) -> Any:
    with urllib.request.urlopen(base + path) as answer:
        return json.load(answer)


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.2)
