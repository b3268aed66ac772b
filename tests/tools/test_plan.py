"""`slipstream plan`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.plan import main

RECIPE = """\
experiment_name: planned
trial_name: one
allocation_mode: sglang.d8m1p1+d4m2p1
n_nodes: 2
n_gpus_per_node: 8
actor: {path: MODEL}
dataset: {path: prompts.jsonl, train_bs_n_seqs: 64}
group_size: 8
ppo:
  gen: {max_new_tokens: 8192}
  kl_ctl: 0.0
  disable_value: true
"""
MODEL: dict[str, Any] = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", max_position_embeddings=32768,
    rms_norm_eps=1e-6, rope_theta=1e6, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(tmp_path / "model")))
    return path


def test_the_plan_needs_neither_torch_nor_ray(recipe: Path) -> None:
    program = (
        "import sys; from tools.plan import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'ray', 'megatron', 'transformers', 'numpy'} & set(sys.modules); "
        "print(heavy or 'light', file=sys.stderr); sys.exit(code)"
    )
    words = [sys.executable, "-c", program, "--config", str(recipe), "--gpu", "H100"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr.strip()) == (0, "light"), done.stderr
    assert "actor update" in done.stdout and "It fits" in done.stdout


def test_json_has_what_the_table_has(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    phase = plan["ranks"][0]["phases"][0]
    assert plan["fits"] and phase["name"] == "actor update"
    assert phase["allocated"] == pytest.approx(sum(v for k, v in phase["parts"].items() if k != "context"), abs=99)
    assert main(["--config", str(recipe), "--gpu", "H100"]) == 0
    assert f"{phase['allocated'] / 2**30:.1f}" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_ends_with_1(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", "allocation_mode=sglang.d15m1p1+d1m1p1"]) == 1
    shown = capsys.readouterr().out
    assert "It does not fit" in shown and "actor.optimizer.offload=true" in shown


def test_bad_input_ends_with_2(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        (["--gpu", "B300"], "--gpu B300: unknown"),
        (["--gpu", "H100", "actor.path=/nowhere"], "actor.path: /nowhere: no such folder"),
        (["--gpu", "H100", "ppo.gen.max_new_tokenz=3"], "did you mean"),
        (["--gpu", "H100", "ppo.gen.max_new_tokens=40000"], "max_position_embeddings=32768"),
    ):
        assert main(["--config", str(recipe), *words]) == 2
        assert error in capsys.readouterr().err


def test_a_number_of_gpus_that_equal_nodes_cannot_have_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", "--search", "--gpus", "17"]) == 2
    assert capsys.readouterr().err == "error: --gpus 17: 2 nodes cannot have as many GPUs each; write 16\n"
