"""How servers in bfloat16 and in FP8 are measured; FP8 itself needs GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.inference.sglang.server import ServerSettings
from tools.bench.fp8 import loop, picture, servers
from tools.bench.gpu import Scene


def steady(rates: Sequence[float]) -> tuple[float, list[int]]:
    """Return the rate of rounds that have these rates, and the numbers of the rounds."""
    asked: list[int] = []

    async def ask(number: int) -> float:
        asked.append(number)
        return rates[number - 1]

    return asyncio.run(servers.steady_rate(ask, "some")), asked


def test_rounds_count_once_two_successive_ones_have_about_the_same_rate() -> None:
    rate, asked = steady([10.0, 100.0, 50.0, 96.0, 100.0, 7.0, 9.0, 8.0])
    assert asked == list(range(1, 9)), "each round has prompts of its own"
    assert rate == 8.0, "the median of the three after the warm-up"


def test_a_warm_up_whose_rounds_never_agree_ends() -> None:
    rate, asked = steady([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 70.0, 60.0, 90.0])
    assert (rate, len(asked)) == (70.0, servers.WARM_UP_ROUNDS + servers.ROUNDS)


def test_no_two_rounds_have_a_prompt_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where another number of requests begins at once: a server keeps what it has computed of a prompt."""
    given: list[bytes] = []

    async def ask(url: str, bodies: Sequence[dict[str, Any]], *, at_once: int) -> list[int]:
        given.extend(body["input_ids"].tobytes() for body in bodies)
        return [1] * len(bodies)

    monkeypatch.setattr(servers, "ask_plainly", ask)
    rounds = range(servers.WARM_UP_ROUNDS + servers.ROUNDS + 1)
    for at_once in servers.AT_ONCE:
        for number in rounds:
            asyncio.run(servers._rate(Scene(folder=tmp_path), "", at_once, number))
    assert len(given) == len(set(given)) == len(rounds) * sum(servers.AT_ONCE)


def test_a_server_on_a_gpu_runs_all_requests_of_a_round_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ServerSettings] = []

    @asynccontextmanager
    async def generator(settings: ServerSettings, interrupt: str) -> AsyncIterator[Any]:
        started.append(settings)
        yield SimpleNamespace(endpoint=settings)

    async def serve() -> None:
        async with servers.serving(Scene(folder=tmp_path, shape="tiny"), None):
            pass

    monkeypatch.setattr(servers, "require_deep_gemm", lambda scene: None)
    monkeypatch.setattr(servers, "query_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(servers, "generator", generator)
    monkeypatch.setattr(servers, "sender", lambda *args, **kwargs: SimpleNamespace(connect=lambda endpoints: None))
    monkeypatch.setattr(servers, "replace", lambda one, **changes: SimpleNamespace(**{**vars(one), **changes}))
    asyncio.run(serve())
    assert [settings.weight_format for settings in started] == ["auto", "fp8_block"]
    for settings in started:
        free = settings.max_running - max(servers.AT_ONCE)
        assert free >= 0.1 * settings.max_running, "while fewer places are free, the server lets prompts wait"


@pytest.mark.parametrize("measured", [servers.servers, loop.loop])
def test_fp8_servers_are_not_measured_without_deep_gemm(
    measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    servers.require_deep_gemm(Scene(folder=tmp_path))  # without a GPU there is no FP8
    monkeypatch.setattr(servers, "query_gpus", lambda: ["a GPU"])
    servers.require_deep_gemm(Scene(folder=tmp_path, sglang_python=tmp_path))  # not to be seen from here
    with pytest.raises(RuntimeError, match="sgl-deep-gemm==0.1.5.post1"):
        next(measured(Scene(folder=tmp_path)))
    monkeypatch.setattr(servers, "find_spec", lambda name: name == "deep_gemm" or None)
    servers.require_deep_gemm(Scene(folder=tmp_path))


def test_the_loop_counts_with_the_median_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"loop-auto": [4.0, 4.0, 4.0, 5.0, 4.0, 5.0], "loop-fp8_block": [2.0, 2.0, 40.0, 2.0, 2.0, 40.0]}

    def run(scene: Scene, trial: str, config: dict[str, Any]) -> list[dict[str, float]]:
        steps = [100.0] * loop.WARM_UP_STEPS + seconds[trial]
        assert config["exp_ctrl.benchmark_steps"] == len(steps)
        parts = [{f"time/{part}": step / 2 for part in loop.PARTS} for step in steps]
        return [{"n_valid_tokens": 80.0, "time/step": step, **of} for step, of in zip(steps, parts, strict=True)]

    monkeypatch.setattr(loop, "run", run)
    monkeypatch.setattr(loop, "formats", lambda: ("auto", "fp8_block"))
    monkeypatch.setattr(loop, "query_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(loop, "configuration", lambda *args: {})
    rows = {figure.name: (figure.value, figure.baseline) for figure in loop.loop(Scene(folder=tmp_path))}
    assert rows["fp8.1.5B_loop_tokens_per_second"] == (40.0, 20.0), "two slow steps change nothing"
    assert rows["fp8.1.5B_loop_update_seconds"] == (1.0, 2.0)


def test_the_picture_has_a_curve_for_each_side(tmp_path: Path) -> None:
    named = {"fp8.sums": 0.4, "fp8.sums_both_ends": 0.5}
    rows = [
        {"name": f"{name}_accuracy_after_{step}_steps", "value": value + step / 1000, "baseline": 0.3}
        for name, value in named.items() for step in (100, 0)
    ]  # fmt: skip
    others = [{"name": "fp8.7B_push_accuracy_after_0_steps", "value": 0.9, "baseline": 0.9}]
    found = {label: points for (label, _), points in picture.curves(rows + others).items()}
    assert found == {
        "FP8 server": [(0, 0.4), (100, 0.5)],
        "FP8 at both ends": [(0, 0.5), (100, 0.6)],
        "bfloat16": [(0, 0.3), (100, 0.3)],
    }
    picture.draw(tmp_path / "curve.png", rows)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rows of fp8_learning"):
        picture.draw(tmp_path / "none.png", others)
    of_rounded = [{**row, "name": row["name"].replace("both_ends", "rounded")} for row in rows[2:]]
    assert [label for label, _ in picture.curves(of_rounded)] == ["weights rounded to FP8", "bfloat16"]
    with pytest.raises(ValueError, match="keep those of one"):
        picture.curves(rows + of_rounded)
