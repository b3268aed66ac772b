"""Measurements of weight updates, with real SGLang servers on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allocation import ParallelLayout
from helpers.sglang_environment import PREFIX, write_interpreter
from model_specs.hf_config import parse_config
from tools.bench.gpu_experts import TRIED
from tools.bench.whole.size import TRIAL, held_bytes

FIGURES = ("rate", "send", "pause")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(PREFIX is None, reason="no SGLang for the CPU here: set SLIPSTREAM_SGLANG_ENV to its prefix")
def test_updates_of_experts_into_servers_beside_the_trainer_have_a_row_for_each_size_of_bucket(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench", "gpu", "--trial", "--only", "whole_push"]
    command += ["--sglang-python", str(write_interpreter(tmp_path / "python"))]
    command += ["--output", str(tmp_path / "rows"), "--profile", str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    (path,) = (tmp_path / "rows").iterdir()
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    layers = {**TRIED, "num_hidden_layers": TRIAL.layers}
    weights = held_bytes(parse_config(layers), ParallelLayout(), offload=False)["weights"]
    for size in ("1024mib", "4096mib"):
        rate, send, pause = (rows[f"push.30B_A3B_2_layers_ep2_colocated_{size}_{what}"] for what in FIGURES)
        assert pause["value"] > send["value"] > 0
        assert rate["value"] * send["value"] * 1e6 == pytest.approx(weights, rel=1e-3)
    spans = [path for path in (tmp_path / "spans").iterdir() if path.name.startswith("push")]
    assert len(spans) == ParallelLayout(dp=2).world_size, "of every rank"
