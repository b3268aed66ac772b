"""Runs on several task sets, each with its own sampling, reward and order, and what continues from their recover
checkpoints: the same run, evaluations beside it, other layouts, changed settings, damaged files."""

import json
import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from core.runs.checkpoints import RunIdentity
from core.train.recover import RecoverStore
from helpers.commands import Command
from helpers.runs import changed, metrics_of, mock_ppo, rows
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset
from rollout.data.tokenizer import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, BATCH_SIZE = 6, 6
IDENTITY = RunIdentity(train_bs_n_seqs=BATCH_SIZE, group_size=2, n_nodes=1)


@pytest.fixture(scope="module")
def config(assets, tmp_path_factory) -> Iterator[dict]:
    folder = tmp_path_factory.mktemp("sets")
    lines = assets.prompts.read_text().splitlines()
    for name, part in (("easy", lines[:8]), ("hard", lines[8:24])):
        leveled = [json.dumps({**json.loads(row), "level": -number}) for number, row in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("\n".join(leveled) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # of helpers
        yield mock_ppo(
            assets,
            recover_keep=5,
            dataset={"path": "", "train_bs_n_seqs": BATCH_SIZE},
            task_sets={
                "easy": {
                    "path": str(folder / "easy.jsonl"), "weight": 2, "order": "curriculum", "curriculum": "level",
                    "group_size": 3, "max_new_tokens": 4,
                },
                "hard": {
                    "path": str(folder / "hard.jsonl"), "weight": 1, "order": "curriculum",
                    "curriculum": "helpers.rewards:rarest_first", "reward": "helpers.rewards:length", "right_at": 5.0,
                },
            },
            staleness={"max_staleness": 0},
            reward={"right_at": 1.0},
            samples={"share": 0.0},
            exp_ctrl={"total_train_steps": NUM_STEPS, "total_train_epochs": 9},
        )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(config: dict, tmp_path_factory) -> Iterator[Command]:
    """A run of six steps that has ended."""
    command = Command("ppo-math", config, tmp_path_factory.mktemp("undisturbed"))
    try:
        assert command.finish() == 0, command.output()[-4000:]
        yield command
    finally:
        command.stop()


@pytest.fixture(scope="module")
def cut(undisturbed: Command, tmp_path_factory) -> Path:
    """What that run would have left, had it been killed in its fourth step: globalstep2 and globalstep3 to recover
    from, and logs."""
    root = tmp_path_factory.mktemp("cut") / "root"
    shutil.copytree(undisturbed.root, root)
    shutil.rmtree(root / "checkpoints")
    for step in (4, 5, 6):
        shutil.rmtree(next(root.glob(f"recover/*/test/trial/globalstep{step}")))
    return root


@pytest.fixture
def continue_with(cut: Path, run_command, tmp_path: Path) -> Callable:
    """(config) -> Command: a run of the same trial after that one."""
    shutil.copytree(cut, tmp_path / "root")
    return partial(run_command, "ppo-math")


def test_a_checkpoint_with_any_file_cut_flipped_or_missing_is_never_loaded(cut: Path, tmp_path: Path, caplog) -> None:
    two_checkpoints = next((cut / "recover").glob("*/test/trial"))
    caplog.set_level(logging.WARNING)
    assert sorted(p.name for p in two_checkpoints.iterdir()) == ["globalstep2", "globalstep3"]
    files = [p.relative_to(two_checkpoints) for p in two_checkpoints.glob("globalstep3/**/*") if p.is_file()]
    named = {p.name for p in files}
    assert {"manifest.json", "COMMITTED", "run.json", "rollout.json", "rollout.npz"} <= named
    assert {"metadata.json", ".metadata", "common.pt"} <= named
    rng = random.Random(1)
    for number, name in enumerate(files):
        for damage in ("cut", "empty", "flip first", "flip", "flip last", "longer", "missing"):
            folder = tmp_path / f"{number} {damage}"
            shutil.copytree(two_checkpoints, folder, copy_function=os.link)
            harm(folder / name, damage, rng)
            caplog.clear()
            found = RecoverStore(folder, IDENTITY).newest()
            assert found is not None and found.name == "globalstep2", (name, damage)
            said = name.name in caplog.text or name.name == "COMMITTED"  # which may accuse the manifest
            assert "globalstep3 is not used: " in caplog.text and said
            shutil.rmtree(folder)
    assert RecoverStore(two_checkpoints, IDENTITY).newest() == two_checkpoints / "globalstep3"


def harm(path: Path, damage: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    assert content, f"{path} is empty: nothing to damage"
    path.unlink()  # a link
    if damage == "missing":
        return
    if damage.startswith("flip"):
        place = {"flip first": 0, "flip last": len(content) - 1}.get(damage, rng.randrange(len(content)))
        content[place] ^= 1 << rng.randrange(8)
    new = {"cut": content[: rng.randrange(1, len(content))] if len(content) > 1 else b"", "empty": b""}
    new["longer"] = content + b"x"
    path.write_bytes(new.get(damage, content))


def test_each_set_has_its_settings(undisturbed: Command) -> None:
    steps = [[id.split("/") for id in row["prompts"]] for row in rows(undisturbed, "consumed.jsonl")]
    assert [Counter(name for name, *_ in step) for step in steps] == [{"easy": 4, "hard": 2}] * NUM_STEPS
    easy = [row for step in steps[:2] for name, row, _ in step if name == "easy"]
    assert len(set(easy)) == 8 and easy == sorted(easy, key=easy.index), "each row once an epoch"
    metrics = rows(undisturbed, "metrics.jsonl")
    assert {row["n_seqs"] for row in metrics} == {4 * 3 + 2 * 2}
    assert all(row["task_set/easy/prompts"] == 4 and row["task_set/hard/prompts"] == 2 for row in metrics)
    assert max(row["task_set/hard/reward"] for row in metrics) > 1.0, "its own reward is a length"
    state = undisturbed.root.glob("recover/*/test/trial/globalstep6/rollout.json")
    sets = json.loads(next(state).read_text())["producer"]["dataset"]["sets"]
    assert {name: one["position"] for name, one in sets.items()} == {"easy": 24, "hard": 12}


def test_a_run_continues_bit_for_bit_beside_evaluations(assets, config, continue_with, undisturbed, tmp_path) -> None:
    """One of two generators keeps its weights for an evaluation on two sets after every step."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(assets.prompts.read_text().splitlines(keepends=True)[:3]))
    sets = {"few": {"path": str(few), "repeat": 3, "temperature": 1.0, "max_new_tokens": 90}}
    evaluating = {
        "allocation_mode": "mock.d2m1p1+d1m1p1",
        "n_gpus_per_node": 3,
        "evaluation": {"path": str(assets.prompts), "num_prompts": 4, "max_new_tokens": 60, "sets": sets},
        "exp_ctrl": {"eval_freq_steps": 1},
    }
    continued = continue_with(changed(dict(config), evaluating))
    assert continued.finish() == 0, continued.output()[-4000:]
    assert "globalstep3: 3 steps are done." in continued.output()
    assert "on generator-1 beside training" in continued.output()
    assert rows(continued, "consumed.jsonl") == rows(undisturbed, "consumed.jsonl")
    evaluated = {row["step"]: row for row in metrics_of(continued) if "eval/few/accuracy" in row}
    assert NUM_STEPS in evaluated, "the last version"
    assert all({"eval/prompts/accuracy", "eval/few/pass@3"} <= row.keys() for row in evaluated.values())
    for name in ("loss", "grad_norm", "task_reward", "task_set/easy/reward", "task_set/hard/right"):
        values = [[row[name] for row in metrics_of(run) if "loss" in row] for run in (continued, undisturbed)]
        assert values[0] == values[1] and len(values[0]) == NUM_STEPS, name


@pytest.mark.nightly  # the checkpoint of an engine is loaded under other layouts every day
def test_a_run_goes_on_under_another_layout_with_more_generators(config, continue_with, undisturbed) -> None:
    consumed, metrics = (rows(undisturbed, name) for name in ("consumed.jsonl", "metrics.jsonl"))
    moved = continue_with({**config, "allocation_mode": "mock.d2m1p1+d1m2p1", "n_gpus_per_node": 4})
    assert moved.finish() == 0, moved.output()[-4000:]
    assert "globalstep3: 3 steps are done." in moved.output()
    assert rows(moved, "consumed.jsonl") == consumed
    got = rows(moved, "metrics.jsonl")
    assert [row["step"] for row in got] == [1, 2, 3, 4, 5, 6]
    assert [row["task_reward"] for row in got] == [row["task_reward"] for row in metrics]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in got] == pytest.approx([row[name] for row in metrics], rel=1e-3, abs=1e-6)
        assert len({row[name] for row in got}) == 6, "the figures tell the steps apart"


@pytest.mark.nightly
def test_changed_sizes_are_refused_and_skip_no_prompt_on_request(assets, run_command) -> None:
    """12 prompts are a batch of 10 and two prompts, which are trained once more."""
    first = run_command("ppo-math", mock_ppo(assets, exp_ctrl={"total_train_steps": 3}))
    assert first.finish() == 0, first.output()[-4000:]
    changed = mock_ppo(assets, group_size=3, dataset={"train_bs_n_seqs": 10}, exp_ctrl={"total_train_steps": 3})
    refused = run_command("ppo-math", changed)
    assert refused.finish() == 2 and "Traceback" not in refused.output()
    for change in ("group_size=3 (the checkpoint has 2)", "train_bs_n_seqs=10 (the checkpoint has 4)"):
        assert change in refused.output()
    allowed = run_command("ppo-math", {**changed, "recover_ignore_changes": True})
    assert allowed.finish() == 0, allowed.output()[-4000:]
    assert "12 prompts were trained in 3 steps, which is step 1 now" in allowed.output()
    assert [(row["step"], row["n_seqs"]) for row in rows(allowed, "metrics.jsonl")][-2:] == [(2, 30), (3, 30)]
    trained = [row["prompts"] for row in rows(allowed, "consumed.jsonl")]
    dataset = PromptDataset.load(assets.prompts, Encoder(load_tokenizer(str(assets.model))), max_prompt_len=8, seed=1)
    stream = [f"prompts/{dataset.at(k).query_id}/0" for k in range(30)]
    assert trained[-2:] == [stream[10:20], stream[20:30]]
