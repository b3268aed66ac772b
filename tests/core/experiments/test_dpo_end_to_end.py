"""Direct preference optimization through the real command line: on two data-parallel ranks, and beside rollouts."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.runs import metrics_of, mock_ppo


def margins(policy, reference, tokenizer, rows) -> list[float]:
    """The difference of the sums of log-ratios of each pair, by the Hugging Face models."""

    def total(model, prompt: str, answer: str) -> float:
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([*tokenizer(prompt)["input_ids"], *tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
        return float(logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum())

    def ratio(prompt: str, answer: str) -> float:
        return total(policy, prompt, answer) - total(reference, prompt, answer)

    return [ratio(row["prompt"], row["chosen"]) - ratio(row["prompt"], row["rejected"]) for row in rows]


@pytest.mark.nightly
def test_two_ranks_learn_the_preferences_and_a_recovered_run_is_the_same(assets, run_command, tmp_path) -> None:
    rows = [json.loads(line) for line in assets.pairs.read_text().splitlines()]
    rows = [{"question": r["prompt"], "chosen": r["answer"], "rejected": r["answer"] + "=0"} for r in rows]
    path = tmp_path / "preferences.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(trial: str, steps: int) -> dict:
        return {
            "trial_name": trial,
            "allocation_mode": "d2m1p1",
            "n_gpus_per_node": 2,
            "recover_mode": "auto",
            "exp_ctrl": {
                "total_train_epochs": 3, "total_train_steps": steps, "ckpt_freq_steps": 1, "save_freq_steps": 15,
                "eval_freq_steps": 5,
            },
            "model": {"path": str(assets.model), "optimizer": {"lr": 5e-3, "warmup_steps_proportion": 0.0}},
            "dataset": {
                "train_path": str(path), "valid_path": str(path), "prompt_field": "question", "max_seqlen": 16,
                "train_bs_n_seqs": 8,
            },
        }  # fmt: skip

    def run(trial: str, steps: int) -> list[dict[str, float]]:
        command = run_command("dpo", config(trial, steps))
        assert command.finish(600) == 0, command.output()[-4000:]
        (path,) = (command.root / "logs").glob(f"*/test/{trial}/metrics.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    metrics = run("straight", 15)
    steps = [m for m in metrics if "margin" in m]
    assert len(steps) == 15 and steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["margin"] == pytest.approx(0.0, abs=1e-6) and steps[-1]["accuracy"] > 0.9
    evaluated = [m for m in metrics if "eval/loss" in m]
    (saved,) = tmp_path.glob("root/checkpoints/*/test/straight/default/epoch3epochstep5globalstep15")
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (saved, assets.model))
    found = margins(
        policy, reference, AutoTokenizer.from_pretrained(saved), [{**r, "prompt": r["question"]} for r in rows]
    )
    losses = [math.log1p(math.exp(-0.1 * margin)) for margin in found]
    assert [m["step"] for m in evaluated] == [5, 10, 15]
    assert evaluated[-1]["eval/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert evaluated[-1]["eval/accuracy"] == pytest.approx(sum(m > 0 for m in found) / len(found))

    run("recovered", 7)
    again = run("recovered", 15)
    names = ("step", "loss", "margin", "accuracy", "chosen_reward", "rejected_reward", "grad_norm")
    assert [{n: m[n] for n in names} for m in again if "margin" in m] == [{n: m[n] for n in names} for m in steps]


@pytest.mark.nightly
def test_preferences_are_learnt_beside_rollouts(assets, run_command, tmp_path) -> None:
    rows = [json.loads(line) for line in assets.pairs.read_text().splitlines()]
    path = tmp_path / "preferences.jsonl"
    pairs = [{"prompt": r["prompt"], "good": r["answer"], "bad": r["answer"] + "=0"} for r in rows]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = mock_ppo(
        assets,
        algorithm={"name": "mix", "demonstration_loss": "dpo", "demonstration_weight": 0.5},
        demonstrations={"path": str(path), "chosen_field": "good", "rejected_field": "bad"},
        group_size=2,
        actor={"path": str(assets.model), "optimizer": {"lr": 5e-3, "warmup_steps_proportion": 0.0}},
        exp_ctrl={"total_train_steps": 12, "total_train_epochs": 9},
    )
    command = run_command("ppo-math", config)
    assert command.finish(600) == 0, command.output()[-4000:]
    steps = [row for row in metrics_of(command) if "demonstration_margin" in row]
    assert len(steps) == 12 and steps[0]["demonstration_preference_loss"] == pytest.approx(math.log(2), abs=0.05)
    assert steps[-1]["demonstration_margin"] > steps[0]["demonstration_margin"] + 0.5
    assert steps[-1]["demonstration_accuracy"] > 0.9 and all("actor_loss" in row for row in steps)
