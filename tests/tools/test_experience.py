"""A store as text: what is exported comes back, and trained episodes lose their tokens alone."""

import argparse
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.chat_tokenizer import chat_tokenizer
from rollout.data.rows import read_examples
from rollout.experience import Episode, EveryEpisode, SQLiteExperience, Tags
from rollout.experience.episode import summary
from rollout.types import Trajectory
from tests.tools.test_ledger import fill, trajectory
from tools.experience.__main__ import export, main
from tools.experience.ledger import main as ledger


def test_what_is_exported_is_imported_with_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, file = (tmp_path / name for name in ("old.db", "new.db", "episodes.jsonl"))
    fill(old)
    assert main(["export", "--path", str(old), str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["tags"]["fate"] for row in rows] == [
        "trained",
        "trained",
        "dropped",
        "skipped",
        "ready",
        "open",
        "late",
    ]
    assert [len(row["trajectories"]) for row in rows] == [0, 0, 0, 0, 2, 0, 0]
    assert main(["import", "--path", str(new), str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 episodes imported",
        "6 left out, as the export has no tokens of them: not finished, dropped, or trained before the last "
        "experience.keep_steps steps",
    ]
    assert main(["import", "--path", str(new), str(file)]) == 0
    assert "0 episodes imported\n6 left" in (said := capsys.readouterr().out)
    assert said.endswith("1 left out, as the store has episodes of the same ids\n")
    (before,), (after,) = (SQLiteExperience(path).values(["q4"]) for path in (old, new))
    for one, other in zip(before.trajectories, after.trajectories, strict=True):
        for name, value in vars(one).items():
            assert np.array_equal(value, getattr(other, name)), name
            assert getattr(value, "dtype", None) == getattr(getattr(other, name), "dtype", None), name
    assert main(["stats", "--path", str(new)]) == 0
    assert "ready" in capsys.readouterr().out


class Busy(SQLiteExperience):
    """A store in which a job finishes an episode as soon as the tags of all have been read."""

    def tags(self) -> list[Tags]:
        found = super().tags()
        for tags in found:
            if tags.fate == "open":
                group = [trajectory(reward=1.0)]
                self.put(Episode(tags=replace(tags, **summary(group)), trajectories=group))
        return found


def test_an_episode_that_a_job_finishes_meanwhile_is_exported_with_its_rewards(tmp_path: Path, capsys) -> None:
    store, file = Busy(tmp_path / "old.db"), tmp_path / "episodes.jsonl"
    store.open(Tags(id="q", group_id="q", task="math", row="q", epoch=0, version=0), EveryEpisode())
    export(store, argparse.Namespace(file=file))
    assert main(["import", "--path", str(tmp_path / "new.db"), str(file)]) == 0
    assert [tags.rewards for tags in SQLiteExperience(tmp_path / "new.db").tags()] == [[1.0]]


def test_pruning_keeps_the_tokens_of_the_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experience.db"
    fill(path, keep_steps=1)
    assert len(SQLiteExperience(path).values(["q0", "q1"])) == 2
    for keep, dropped in ((1, 0), (0, 2), (0, 0)):
        assert main(["prune", "--path", str(path), "--keep", str(keep)]) == 0
        assert capsys.readouterr().out == f"{dropped} values dropped\n"
    assert {t.fate for t in SQLiteExperience(path).tags()} == {"trained", "dropped", "skipped", "ready", "open", "late"}


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    assert main(["import", "--path", str(tmp_path / "e.db"), str(tmp_path / "rows.jsonl")]) == 2
    assert "rows.jsonl, line 1: not a row of export" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_line_and_makes_no_store(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["import", "--path", str(tmp_path / "new.db"), str(tmp_path / "none.jsonl")])
    assert "none.jsonl: no such file" in capsys.readouterr().err and not list(tmp_path.iterdir())
    fill(tmp_path / "old.db")
    assert main(["export", "--path", str(tmp_path / "old.db"), str(tmp_path / "none" / "e.jsonl")]) == 2
    assert "none/e.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("command", [main, ledger])
def test_a_store_of_another_release_is_one_line(tmp_path: Path, capsys, command) -> None:
    SQLiteExperience(tmp_path / "e.db").close()
    with sqlite3.connect(tmp_path / "e.db") as db:
        db.execute("UPDATE meta SET value = 1 WHERE key = 'layout'")
    words = ["--path", str(tmp_path / "e.db")]
    assert command(words if command is ledger else ["stats", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/e.db has tables of version 1, this release") and said.count("\n") == 1


def test_right_answers_become_rows_of_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, store = chat_tokenizer(), SQLiteExperience(tmp_path / "e.db")
    tokenizer.save_pretrained(tmp_path / "model")
    question, right, wrong = (tokenizer.encode(text) for text in ("1+1=", "2", "three"))

    def group(*answers: tuple[list[int], float]) -> list[Trajectory]:
        made = [(np.array([*question, *answer], np.int32), reward) for answer, reward in answers]
        return [
            replace(
                trajectory(reward), token_ids=ids, loss_mask=np.arange(len(ids)) >= len(question),
                rollout_logprobs=np.zeros(len(ids), np.float32),
                versions=np.where(np.arange(len(ids)) < len(question), -1, 0).astype(np.int32),
            )
            for ids, reward in made
        ]  # fmt: skip

    for number, trajectories in enumerate((group((wrong, 0.0), (right, 1.0), (right, 1.0)), group((wrong, 0.0)))):
        tags = Tags(id=f"q{number}", group_id="g", task="math", row=f"q{number}", epoch=0, version=0)
        store.open(tags, EveryEpisode())
        store.put(Episode(tags=replace(tags, **summary(trajectories)), trajectories=trajectories))
    store.close()
    out = tmp_path / "sft.jsonl"
    words = ["to-sft", "--path", str(tmp_path / "e.db"), str(out), "--tokenizer", str(tmp_path / "model")]
    assert main(words) == 0
    assert capsys.readouterr().out == "1 answers written, 0 of several turns left out\n"
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"id": "q0", "prompt": "1+1=", "answer": "2", "reward": 1.0}
    ]
    assert main([*words, "--min-reward", "0", "--best", "2"]) == 0
    assert [example.answer for example in read_examples(out)] == ["2", "2", "three"]
