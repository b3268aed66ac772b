"""Rates of a server: the fit to waves that the planner computes, and a real server's waves."""

import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allocation import ParallelLayout
from core.planning.rates import calibration_of, wave_seconds
from core.planning.scene import Servers
from core.planning.server_rates import LOAD, MODEL, Load, server_times, with_server_rates
from helpers.sglang_environment import PREFIX, write_interpreter
from model_specs.families import parse_config
from rollout.inference.sglang.arguments import is_installed

H100 = calibration_of("H100")
assert H100 is not None
SMALL = Load(few=2, many=8, prompt=16, answers=(8, 24))
RATES = ("decode_token_seconds", "request_seconds")
KEPT = ("decode_layer_seconds", "decode_layer_link_seconds")
"""Those of H200."""
WHY_NOT = "no SGLang for the CPU here: set SLIPSTREAM_SGLANG_ENV to the prefix of such an environment"


@pytest.mark.parametrize(("load", "token_seconds"), [(LOAD, 3e-5), (SMALL, 4e-4)])
def test_the_fit_to_waves_that_the_planner_computes_finds_their_rates(load: Load, token_seconds: float) -> None:
    """With so slow a process, a step waits for it with many requests and for kernels of layers with few. For products,
    memory and attention the GPU takes no time."""
    free = dict.fromkeys(("memory", "products", "attention_forward"), math.inf)
    host = replace(H100, **free, decode_token_seconds=token_seconds, request_seconds=0.0019)
    server = Servers(
        backend="sglang", config=parse_config(MODEL), layout=ParallelLayout(), itemsize=2, fp8=False, max_running=1,
        share=None, colocated_share=1.0, on_gpu=True,
    )  # fmt: skip
    times = {
        (requests, answer): wave_seconds(server, host, running=requests, prompt=load.prompt, answer=answer)
        for requests, answer in load.waves()
    }
    unknown = replace(host, **dict.fromkeys(RATES, 9.0))
    found = with_server_rates(unknown, times, load)
    for name in RATES:
        assert getattr(found, name) == pytest.approx(getattr(host, name), rel=1e-6), name
    source = f"{host.source}; decode_layer_seconds and decode_layer_link_seconds are those of H200"
    assert replace(found, **{name: getattr(host, name) for name in RATES}) == replace(host, source=source)


def test_waves_faster_than_the_planner_thinks_give_no_negative_seconds() -> None:
    times = {wave: 1e-3 - 1e-9 * wave[1] for wave in LOAD.waves()}
    found = with_server_rates(H100, times)
    assert all(getattr(found, name) >= 0 for name in RATES)


@pytest.mark.skipif(is_installed(), reason="this interpreter has SGLang")
def test_without_sglang_a_calibration_has_the_server_rates_of_h200_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        times = server_times(gpu=None, python=sys.executable, load=SMALL)
    assert times is None and "No module named 'sglang'" in caplog.text and "those of H200 are kept" in caplog.text
    rates, known = (*RATES, *KEPT), calibration_of("H200")
    found = with_server_rates(replace(H100, **dict.fromkeys(rates, 0.0)), times)
    assert found.products == H100.products
    assert [getattr(found, name) for name in rates] == [getattr(known, name) for name in rates]
    assert found.source.endswith("; rates of servers (decode_*, request_seconds) are those of H200")


@pytest.mark.skipif(PREFIX is None, reason=WHY_NOT)
@pytest.mark.timeout(600)
def test_the_waves_of_a_real_server_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    python = str(write_interpreter(tmp_path / "python"))
    times = server_times(gpu=None, python=python, load=SMALL, begin=said.append, patience_seconds=500.0)
    assert times is not None, caplog.text
    assert said == ["start of a server", "waves of requests"]
    assert set(times) == {(requests, answer) for requests in (2, 8) for answer in (8, 24)}
    for requests in (2, 8):
        assert 0 < times[requests, 8] < times[requests, 24], "more tokens take longer"
    found = with_server_rates(H100, times, SMALL)
    assert math.isfinite(found.decode_token_seconds) and found.decode_token_seconds > 0
    assert math.isfinite(found.request_seconds) and found.request_seconds >= 0


@pytest.mark.skipif(PREFIX is None, reason=WHY_NOT)
@pytest.mark.timeout(600)
def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    python = str(write_interpreter(tmp_path / "python"))
    assert server_times(gpu=None, python=python, load=SMALL, patience_seconds=2.0) is None
    assert "not done in 2 s" in caplog.text
