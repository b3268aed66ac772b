"""`slipstream runs` and `slipstream watch` read what a run writes."""

import json
from pathlib import Path

import pytest

from core.config.runtime import ClusterConfig
from core.runs.paths import RunPaths, sole_run
from core.runs.record import write_complete, write_record
from tools import runs, watch


def make_run(root: Path, name: str, rewards: list[float], *, complete: bool) -> RunPaths:
    paths = RunPaths.for_trial(str(root), "sums", name)
    paths.logs.mkdir(parents=True)
    write_record("ppo-math", {"seed": 1}, paths, ["python"])
    rows = [
        {"step": i, "reward/mean": reward, "reward/std": 0.1, "time/step": 0.5, "n_tokens": 10.0}
        for i, reward in enumerate(rewards, start=1)
    ]
    rows.append({"step": len(rewards), "eval/reward": 0.5})
    (paths.logs / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if complete:
        write_complete(paths, {})
    return paths


def test_runs_are_listed_with_state_step_and_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, complete in (("first", True), ("second", False), ("third", False)):
        made = make_run(tmp_path, name, [0.1, 0.25], complete=complete)
    (made.logs / "metrics.jsonl").unlink()
    with sole_run(RunPaths.for_trial(str(tmp_path), "sums", "second").logs):
        assert runs.main([str(tmp_path)]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}
    shown = {name: (words[1], words[4], words[5]) for name, words in lines.items()}
    assert shown == {
        "sums/first": ("complete", "2", "0.250"),
        "sums/second": ("running", "2", "0.250"),
        "sums/third": ("stopped", "0", "-"),
    }


def test_without_a_folder_the_runs_of_the_working_folder_and_of_the_default_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert runs.main([]) == 2
    assert f"no run in runs/logs and {tmp_path}/home/.cache/slipstream/logs" in capsys.readouterr().err
    make_run(tmp_path / "runs", "here", [0.1], complete=True)
    make_run(Path(ClusterConfig().fileroot).expanduser(), "elsewhere", [0.1], complete=True)
    assert runs.main([]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows} == {"sums/here", "sums/elsewhere"}


def test_the_loss_of_fine_tuning_stands_under_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path, "sft", [], complete=True)
    (made.logs / "metrics.jsonl").write_text('{"step": 3, "loss": 1.5, "time/step": 0.5}\n')
    assert runs.main([str(tmp_path)]) == 0
    header, row = (line.split() for line in capsys.readouterr().out.splitlines())
    shown = dict(zip(header, [row[0], row[1], " ".join(row[2:4]), *row[4:]], strict=True))
    assert (shown["step"], shown["reward"], shown["loss"]) == ("3", "-", "1.500")


def test_a_folder_without_runs_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main([str(tmp_path)]) == watch.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no run in" in said and "`slipstream runs` lists them" in said


def test_a_run_is_watched_by_the_folder_of_its_logs_or_models(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks do: a pipe is no terminal that could be watched
    paths = make_run(tmp_path, "first", [i / 20 for i in range(20)], complete=True)
    for folder in (paths.logs, paths.checkpoints):
        assert watch.main([str(folder)]) == 0
        said = capsys.readouterr().out
        assert "sums/first · complete" in said and "reward/mean 0.000 → 0.950" in said and "▁" in said
        assert [line.split()[0] for line in said.splitlines() if "±" in line] == [str(step) for step in range(9, 21)]


def test_a_sparkline_fits_and_rises() -> None:
    line = watch.sparkline([float(i) for i in range(100)], 10)
    assert len(line) == 10 and line == "".join(sorted(line)) and line[0] == "▁" and line[-1] == "█"
    assert watch.sparkline([1.0, 1.0], 10) == "▁▁"
