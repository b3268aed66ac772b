"""Supervised fine-tuning through the real command line, on two data-parallel ranks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.data.datasets import AnswerDataset
from core.experiments.context import Start
from core.experiments.sft import _check_same_rows
from core.train.recover import RunState
from rollout.data.encoder import Encoder
from rollout.data.rows import read_examples
from rollout.data.source import DatasetError


def test_two_ranks_learn_the_pairs_and_a_run_that_is_complete_is_not_trained_again(assets, run_command) -> None:
    """It saves its model if there is none, and refuses another seed, other settings and an earlier end."""
    config = {
        "allocation_mode": "d2m1p1",
        "n_gpus_per_node": 2,
        "recover_mode": "auto",
        "seed": 1,
        "exp_ctrl": {"total_train_epochs": 8, "total_train_steps": 36, "eval_freq_epochs": 4, "ckpt_freq_steps": 36},
        "model": {
            "path": str(assets.model),
            "gradient_checkpointing": "auto",
            "optimizer": {"lr": 1e-2, "lr_scheduler_type": "cosine"},
        },
        "dataset": {
            "train_path": str(assets.pairs),
            "valid_path": str(assets.pairs),
            "max_seqlen": 16,
            "train_bs_n_seqs": 8,
        },
    }
    command = run_command("sft", config)
    assert command.finish() == 0, command.output()[-4000:]
    rows = [json.loads(line) for line in (command.logs / "metrics.jsonl").read_text().splitlines()]
    losses = [m["loss"] for m in rows if "loss" in m]
    assert len(losses) == 36 and np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    ranks = "".join(path.read_text() for path in command.logs.rglob("*.log"))
    assert "gradient checkpointing: auto, estimated for microbatches of" in ranks
    evaluated = [(m["step"], m["eval/loss"]) for m in rows if "eval/loss" in m]
    assert [step for step, _ in evaluated] == [20, 36]
    saved = command.checkpoints / "default" / "epoch8epochstep1globalstep36"
    assert mean_loss(saved, assets.pairs) == pytest.approx(evaluated[-1][1], abs=1e-4)

    def run_again(**changes) -> tuple[int, str]:
        """The exit code of another start, and what it says after its configuration."""
        again = run_command("sft", {**config, **changes})
        code = again.finish()
        return code, again.output().rpartition("Current Configuration End")[2]

    weights = (saved / "model.safetensors").read_bytes()
    shutil.rmtree(command.checkpoints)
    code, said = run_again()
    assert code == 0 and f"Training is complete. The model is in {saved}" in said
    assert (saved / "model.safetensors").read_bytes() == weights

    recorded = (command.logs / "config.yaml").read_bytes()
    complete = "Training is complete already: to train on, raise exp_ctrl.total_train_epochs=8 and exp_ctrl.total_tra"
    code, said = run_again()
    assert code == 0 and complete in said and f"The model is in {saved}" in said
    assert "Launching" not in said, "no process is started"
    code, said = run_again(model={**config["model"], "optimizer": {"lr": 1e-3, "lr_scheduler_type": "cosine"}})
    assert code == 2 and complete in said and "Launching" not in said
    assert "have no effect on a trial that is complete: model.optimizer.lr: 0.01 -> 0.001." in said
    assert (command.logs / "config.yaml").read_bytes() == recorded
    code, said = run_again(seed=2)
    assert code == 2 and "seed: 2 (the checkpoint has 1)" in said

    code, said = run_again(exp_ctrl={**config["exp_ctrl"], "total_train_steps": 35})
    assert code == 2
    assert "exp_ctrl.total_train_steps: 35 must be at least 36, the step that the run continues from" in said


def mean_loss(model: Path, pairs: Path) -> float:
    """The loss of a saved model over all answer tokens, by the Hugging Face model."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    total, count = 0.0, 0
    for row in read_examples(pairs):
        start = len(tokenizer(row.prompt)["input_ids"])
        answer = tokenizer(row.answer)["input_ids"]
        ids = torch.tensor([*tokenizer(row.prompt)["input_ids"], *answer, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = loaded(ids[None]).logits[0].float().log_softmax(-1)
        total -= float(logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]].sum())
        count += len(ids) - start
    return total / count


def test_only_answers_are_trained_and_an_epoch_is_a_function_of_its_number(assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    data = AnswerDataset(assets.pairs, Encoder(tokenizer), max_seqlen=16, seed=3, shuffle=True)
    batch = data.batch(epoch=2, epoch_step=1, batch_size=8)
    for i in range(8):
        row = batch.select([i])
        text = tokenizer.decode(row.token_ids[row.loss_mask].tolist())
        prompt = tokenizer.decode(row.token_ids[~row.loss_mask].tolist())
        assert prompt.endswith("=") and text.endswith("<eos>")
        assert sum(map(int, prompt[:-1].split("+"))) == int(text.removesuffix("<eos>"))
    again = AnswerDataset(assets.pairs, Encoder(tokenizer), max_seqlen=16, seed=3, shuffle=True)
    assert torch.equal(again.batch(2, 1, 8).token_ids, batch.token_ids)
    assert not torch.equal(data.batch(1, 1, len(data)).token_ids, data.batch(2, 1, len(data)).token_ids)
    seen = sorted(
        tuple(b.select([i]).token_ids.tolist())
        for b in (data.batch(1, s, 16) for s in (1, 2, 3))
        for i in range(b.num_sequences)
    )
    assert len(seen) == len(data) == 40 and len(set(seen)) == 40


def state_of(path, tokenizer, *, max_seqlen: int = 16, seed: int = 3, shuffle: bool = True) -> dict[str, int]:
    return AnswerDataset(path, Encoder(tokenizer), max_seqlen=max_seqlen, seed=seed, shuffle=shuffle).state_dict()


def test_other_rows_or_another_order_do_not_continue_a_run(assets, tmp_path, caplog) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    data = AnswerDataset(assets.pairs, Encoder(tokenizer), max_seqlen=16, seed=3, shuffle=True)
    data.check_continues(state_of(assets.pairs, tokenizer))
    lines = assets.pairs.read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[1:]))
    (tmp_path / "other.jsonl").write_text("".join([*lines[1:], lines[0]]))
    for state, says in (
        (state_of(tmp_path / "fewer.jsonl", tokenizer), "has num_rows=39, this one 40: restore dataset.train_path"),
        (state_of(tmp_path / "other.jsonl", tokenizer), "has checksum="),
        (state_of(assets.pairs, tokenizer, seed=4), "has seed=4, this one 3: restore seed"),
        (state_of(assets.pairs, tokenizer, shuffle=False), "has shuffle=False, this one True: restore shuffle_dataset"),
    ):
        state_of_run = RunState(step=5, version=5, elapsed_seconds=0.0, extra={})
        start = Start(state=state_of_run, rollout_state=state, checkpoint=tmp_path)
        with pytest.raises(DatasetError, match=says):
            _check_same_rows(data, start, ignore_changes=False)
        _check_same_rows(data, start, ignore_changes=True)
        assert says in caplog.text and "step 5 continues with these rows" in caplog.text
        caplog.clear()
