"""Recover checkpoints of real runs: damage to any file, other layouts, changed settings."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from core.recovery.recover import RecoverStore
from core.runs.checkpoints import RunIdentity
from helpers.commands import Command
from helpers.runs import mock_ppo, rows
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset
from rollout.data.tokenizer import load_tokenizer

IDENTITY = RunIdentity(train_bs_n_seqs=4, group_size=2, n_nodes=1)


@pytest.fixture(scope="module")
def undisturbed(assets, tmp_path_factory) -> Iterator[Command]:
    """A run of six steps that has ended."""
    config = mock_ppo(assets, recover_keep=5, exp_ctrl={"total_train_steps": 6})
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


def test_a_run_goes_on_under_another_layout_with_more_generators(assets, continue_with, undisturbed: Command) -> None:
    consumed, metrics = (rows(undisturbed, name) for name in ("consumed.jsonl", "metrics.jsonl"))
    moved = continue_with(
        mock_ppo(
            assets,
            allocation_mode="mock.d2m1p1+d1m2p1",
            n_gpus_per_node=4,
            exp_ctrl={"total_train_steps": 6},
        )
    )
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
def test_changed_sizes_are_refused_and_skip_no_prompt_on_request(assets, continue_with) -> None:
    """12 prompts are a batch of 10 and two prompts, which are trained once more."""
    changed = mock_ppo(assets, group_size=3, dataset={"train_bs_n_seqs": 10}, exp_ctrl={"total_train_steps": 3})
    refused = continue_with(changed)
    assert refused.finish() == 2 and "Traceback" not in refused.output()
    for change in ("group_size=3 (the checkpoint has 2)", "train_bs_n_seqs=10 (the checkpoint has 4)"):
        assert change in refused.output()
    allowed = continue_with({**changed, "recover_ignore_changes": True})
    assert allowed.finish() == 0, allowed.output()[-4000:]
    assert "12 prompts were trained in 3 steps, which is step 1 now" in allowed.output()
    assert [(row["step"], row["n_seqs"]) for row in rows(allowed, "metrics.jsonl")][-2:] == [(2, 30), (3, 30)]
    trained = [row["prompts"] for row in rows(allowed, "consumed.jsonl")]
    dataset = PromptDataset.load(assets.prompts, Encoder(load_tokenizer(str(assets.model))), max_prompt_len=8, seed=1)
    stream = [f"prompts/{dataset.at(k).query_id}/0" for k in range(30)]
    assert trained[-2:] == [stream[10:20], stream[20:30]]
