"""The evaluation on a real SGLang server, where its environment is present."""

import json

import pytest

from helpers.eval_cases import arguments
from helpers.sglang_environment import PYTHON, WHY_NOT, environment
from rollout.evaluation import read_answers
from tools.eval.__main__ import main


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
def test_a_sglang_server_answers_a_benchmark(model, data, tmp_path, monkeypatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    server = ["--generator", "sglang", "--sglang_python", str(PYTHON), "--dtype", "float32", "--max_running", "16"]
    server += ["--sglang", "max_total_tokens=4096", "--sglang", "sleep_on_idle=true"]
    assert main(arguments(model, data, tmp_path, *server)) == 0
    assert len(read_answers(tmp_path / "sums.jsonl")) == 170
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert row["num_questions"] == 10 and row["pass@16"] >= row["pass@8"] >= row["sample_pass@1"]
