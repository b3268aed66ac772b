"""The balance of a run's prompts, from its store."""

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.experience import Episode, EveryEpisode, Lessee, SQLiteExperience, Tags, make_rules
from rollout.experience.episode import summary
from rollout.types import Trajectory
from tools.experience.ledger import main


def trajectory(reward: float) -> Trajectory:
    return Trajectory(
        query_id="q", token_ids=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]),
        rollout_logprobs=np.zeros(3, np.float32), versions=np.array([-1, 0, 0], np.int32), reward=reward,
        finish_reason="stop",
    )  # fmt: skip


def fill(path: Path, *, keep_steps: int = 0) -> None:
    """Draw seven prompts: two are trained, one is dropped, one is skipped, one is ready, one in flight and one late."""
    rules = make_rules(num_prompts=7, batch_size=2, max_staleness=9, dynamic_sampling_limit=9)
    store = SQLiteExperience(path)
    for number in range(7):
        tags = Tags(id=f"q{number}", group_id=f"q{number}", task="math", row=f"q{number}", epoch=0, version=0)
        assert store.open(tags, rules.admission) == "open"
        group = [trajectory(1.0), trajectory(1.0 if number == 2 else 0.0)]
        if number == 3:
            store.drop(tags.id)
        elif number == 6:
            store.drop(tags.id, reason="slow")
        elif number < 5:
            store.put(Episode(tags=replace(tags, **summary(group)), trajectories=group), rules.spread.drops)

    async def train() -> None:
        lessee = Lessee(store, rules, keep_steps=keep_steps)
        await lessee.take(0)
        lessee.trained(1)

    asyncio.run(train())
    store.close()


def test_every_prompt_is_accounted_for_and_a_missing_one_is_an_error(tmp_path, capsys) -> None:
    path = tmp_path / "experience.db"
    fill(path)
    assert main(["--path", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for line in ("7 prompts drawn", "trained │ 2", "ready │ 1", "in flight │ 1", "every answer right │ 1"):
        assert line in shown, shown
    assert "dropped: slow │ 1" in shown and "of what is trained is 1.000 times that of all, or less" in shown
    assert "the workflow kept failing │ 1" in shown and "The balance adds up." in shown
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM episodes WHERE id = 'q0'")
    assert main(["--path", str(path)]) == 1
    assert "does not add up: 1 are missing" in capsys.readouterr().out


def test_a_run_without_a_store_of_its_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("experience: {store: memory}\n")
    assert main([str(tmp_path)]) == 2
    assert "keeps its episodes in memory" in capsys.readouterr().err


@pytest.mark.parametrize(("made", "said"), [(True, "has finished episodes alone"), (False, "there is no such store")])
def test_a_store_of_files_has_no_balance(tmp_path: Path, capsys, made: bool, said: str) -> None:
    path = tmp_path / "episodes"
    if made:
        path.mkdir()
    assert main(["--store", "file", "--path", str(path)]) == 2
    assert said in capsys.readouterr().err and path.exists() == made


def test_what_a_job_draws_meanwhile_is_not_missing(tmp_path: Path, monkeypatch, capsys) -> None:
    fill(tmp_path / "e.db")
    tags_of = SQLiteExperience.tags

    def drawn_before(store: SQLiteExperience) -> list[Tags]:
        store.open(Tags(id="new", group_id="new", task="math", row="new", epoch=0, version=0), EveryEpisode())
        return tags_of(store)

    monkeypatch.setattr(SQLiteExperience, "tags", drawn_before)
    assert main(["--path", str(tmp_path / "e.db")]) == 0
    assert "7 prompts drawn" in capsys.readouterr().out


def test_the_picture_compares_what_was_trained_with_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "experience.db"
    fill(path)
    assert main(["--path", str(path), "--picture", str(tmp_path / "bias.svg")]) == 0
    text = (tmp_path / "bias.svg").read_text()
    assert text.count(">finished<") == text.count(">trained<") == 3, "of three figures"
    # Dropped: a prompt whose answers are all right, difficulty 0; the others have 0.5.
    assert "difficulty, KS 0.250" in text and "lengths, KS 0.000" in text


def test_uses_that_replay_adds_are_counted_beside_the_balance(tmp_path, capsys) -> None:
    path = tmp_path / "experience.db"
    fill(path, keep_steps=1)
    store = SQLiteExperience(path)
    for step in (1, 2):
        assert len(store.replay(step, lambda candidates: ["q0"])) == 1
    store.close()
    assert main(["--path", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 replayed uses. Episodes by uses: 1 of 1, 1 of 3 " in shown and "The balance adds up." in shown
