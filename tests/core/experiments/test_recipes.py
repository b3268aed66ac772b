"""The recipes of examples/configs for one machine without a GPU train as they are written, but for their sizes; some of
them on two GPUs as well."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.inference.gpus import query_gpus

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"
SMALL: dict[str, Any] = {
    "exp_ctrl": {"total_train_steps": 2, "eval_freq_steps": 1},
    "dataset": {"train_bs_n_seqs": 8},
    "reward": {"function": "helpers.rewards:even", "num_workers": 1},
    "evaluation": {"num_prompts": 4},
    "ppo": {"gen": {"max_new_tokens": 6}},
}
"""Fewer steps and tokens; and a reward that groups of random answers differ in, without which dapo draws for ever."""
PAIRS: dict[str, Any] = {
    "exp_ctrl": {"total_train_steps": 2, "eval_freq_steps": 1},
    "dataset": {"train_bs_n_seqs": 8, "max_seqlen": 256},
}
CASES = {
    "grpo-gsm8k": ("ppo-math", SMALL),
    "dapo-gsm8k": ("ppo-math", SMALL),
    "gspo-gsm8k": ("ppo-math", SMALL),
    "mix-gsm8k": ("ppo-math", SMALL),
    "dpo-preferences": ("dpo", PAIRS),
    "sft-gsm8k": ("sft", PAIRS),
}


@pytest.fixture
def environment(assets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recipes read of the environment: a small model with room for their prompts, and data of their form."""
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(assets.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    sums = [(a, b) for a in range(8) for b in range(5)]
    questions = [{"question": f"{a}+{b}=", "answer": f"{a}+{b}\n#### {a + b}"} for a, b in sums]
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums]
    for name, rows in (("gsm8k", questions), ("preferences", pairs)):
        (data / name).mkdir(parents=True)
        for split in ("train", "test"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (data / name / f"{split}.jsonl").write_text(text)
    monkeypatch.setenv("SLIPSTREAM_MODEL", str(model))
    monkeypatch.setenv("SLIPSTREAM_DATA", str(data))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]), prepend=":")


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`config` with the changes, section by section."""
    both = {key: changed(config[key], new) for key, new in changes.items() if isinstance(config.get(key), dict)}
    return {**config, **changes, **both}


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", CASES)
def test_a_recipe_trains_evaluates_and_saves(recipe: str, environment: None, run_command: Any) -> None:
    assert_trains(recipe, {}, run_command)


ON_TWO_GPUS = {"gspo-gsm8k": "sglang.d1m1p1+d1m1p1", "dapo-gsm8k": "sglang.d1m1p1+d1m1p1", "dpo-preferences": "d2m1p1"}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ON_TWO_GPUS)
def test_a_recipe_trains_on_two_gpus(recipe, environment, wide_heads, run_command, monkeypatch) -> None:
    if len(query_gpus()) < 2:
        pytest.skip("needs 2 GPUs")
    monkeypatch.setenv("SLIPSTREAM_MODEL", str(wide_heads))
    output = assert_trains(recipe, {"allocation_mode": ON_TWO_GPUS[recipe], "n_gpus_per_node": 2}, run_command)
    assert "megatron on cuda" in output


def assert_trains(recipe: str, more: dict[str, Any], run_command: Any) -> str:
    """Run a recipe with small sizes and `more` changes; return its output."""
    experiment, changes = CASES[recipe]
    config = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text())
    names = {"experiment_name": "test", "trial_name": "trial"}
    command = run_command(experiment, {**changed(config, changes), **more, **names})
    assert command.finish(600) == 0, command.output()[-4000:]
    rows = [json.loads(line) for line in (command.logs / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2] and all(row["grad_norm"] > 0 for row in steps)
    assert any(key.startswith("eval/") for row in rows for key in row)
    assert list(command.checkpoints.glob("*/*/model.safetensors")), "the model of the last step"
    output: str = command.output()
    return output
