"""What a run shows on the terminal: rows that fit, phases that are never silent, and the end."""

import io
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from core.monitoring.health import NoSignal
from core.monitoring.samples import Sample
from core.monitoring.screen import Screen, StepTable

ROW: dict[str, Any] = {
    "reward/mean": 0.361, "reward/std": 0.21, "reward/right": 0.05, "groups/equal": 0.44, "answer_length/mean": 2.4,
    "ref_kl": 0.02, "actor_clip_ratio": 0.03, "staleness/mean": 1.0, "grad_norm": 0.5, "n_tokens": 388.0,
    "time/step": 2.0, "time/wait_for_rollout": 0.1, "time/update": 1.1, "time/push": 0.2, "loss": 0.3,
}  # fmt: skip


def screen(*, width: int = 120, terminal: bool = False, compact: bool = True) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    return Screen(console, compact=compact), file


@pytest.mark.parametrize("width", [80, 120])
def test_rows_fit_the_terminal_and_their_columns_are_aligned(width: int) -> None:
    table = StepTable(ROW, total_steps=10, width=width)
    lines = [table.header().plain, table.line(1, ROW).plain, table.line(10, ROW | {"reward/mean": -1.0}).plain]
    assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= width
    assert "0.361 ±0.21" in lines[1] and "-1.000 ±0.21" in lines[2] and "10/10" in lines[2]
    shown = lines[0].split()
    assert shown[:5] == ["step", "reward", "right", "equal", "length"] and ("wait" in shown) == (width == 120)


def test_a_figure_that_a_later_row_lacks_is_a_dash_and_columns_without_figures_are_left_out() -> None:
    sft = {"loss": 1.25, "grad_norm": 0.5, "n_tokens": 100.0, "time/step": 0.5, "time/update": 0.4}
    table = StepTable(sft, total_steps=3, width=120)
    assert table.header().plain.split() == ["step", "loss", "grad", "tok/s", "step", "s", "update", "s"]
    assert table.line(2, {"loss": 1.0}).plain.split() == ["2/3", "1.0000", "-", "-", "-", "-"]


def test_titles_come_again_and_each_step_is_one_line() -> None:
    shown, file = screen()
    shown.open(total_steps=30, done_steps=0)
    for step in range(1, 31):
        shown.step(step, ROW, "")
    shown.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 32 and [i for i, line in enumerate(lines) if "reward" in line] == [0, 21]


def test_the_best_and_the_worst_answer_have_the_right_one_beside_them() -> None:
    def sample(name: str, reward: float) -> Sample:
        return Sample(
            step=1, query_id="q", episode="s/q/0", index=0, prompt="12+34=", answer=f"{name}!", reward=reward,
            finish_reason="stop", prompt_tokens=1, answer_tokens=1, oldest_version=0, newest_version=0,
            notable=(name,), reference="46",
        )  # fmt: skip

    shown, file = screen()
    shown.samples([sample("best", 1.0), sample("worst", -1.0), sample("longest", 0.0)])
    best, worst = file.getvalue().splitlines()
    assert best.split() == ["best", "1.000", "12+34=", "→", "best!", "(right:", "46)"] and "worst!" in worst
    shown, file = screen()
    shown.samples([sample("best", 0.0), sample("worst", 0.0)])
    assert len(file.getvalue().splitlines()) == 1, "both are the same"


def test_a_phase_is_named_when_it_begins_and_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.monitoring.screen._TICK_SECONDS", 0.05)
    shown, file = screen()
    shown.begin("loading")
    assert file.getvalue() == "loading ...\n"
    while file.getvalue().count("\n") < 3:
        time.sleep(0.01)
    shown.begin("sampling")
    shown.close()
    said = file.getvalue().splitlines()
    assert re.fullmatch(r"loading \.\.\. \d+ s", said[1]) and "sampling ..." in said
    assert re.fullmatch(r"sampling: \d+\.\d s", said[-1])


def test_the_end_has_the_rewards_the_model_and_commands_that_no_terminal_cuts(tmp_path: Path) -> None:
    shown, file = screen(width=80, terminal=True)
    shown.open(total_steps=9, done_steps=6)
    shown.step(7, ROW, "")
    shown.step(8, ROW | {"reward/mean": 0.5}, "")
    shown.step(9, ROW | {"reward/mean": 0.9}, "")
    shown.close()
    shown.finish(model=tmp_path / "m", logs=tmp_path / ("long" * 20), experiment="ppo-math")
    text = file.getvalue()
    assert "reward  0.361 → 0.900 (steps 7 and 9)" in text and f"model   {tmp_path / 'm'}" in text
    assert f"slipstream samples {tmp_path / ('long' * 20)}\n" in text


def test_in_the_style_of_the_tutorial_nothing_but_log_lines_is_shown(tmp_path: Path) -> None:
    shown, file = screen(compact=False)
    shown.begin("loading")
    shown.open(total_steps=1, done_steps=0)
    shown.step(1, ROW, "")
    shown.evaluation(1, {"eval/reward": 1.0})
    shown.close()
    shown.finish(model=None, logs=tmp_path, experiment="sft")
    assert file.getvalue() == ""


def test_equal_rewards_for_8_steps_are_one_message_and_again_after_16() -> None:
    watch = NoSignal()
    due = []
    for step in range(1, 33):
        watch.count({"reward/std": 0.0, "groups/equal": 1.0, "disable_value": 1.0, "n_seqs": 16.0})
        due += [step] if watch.is_due else []
    assert due == [8, 16, 32] and "the 512 answers of the last 32 steps have equal rewards" in watch.message([])
    watch.count({"reward/std": 0.3, "groups/equal": 0.9, "disable_value": 1.0, "n_seqs": 16.0})
    assert not watch.is_due


@pytest.mark.parametrize(("disable_value", "is_due"), [(1.0, True), (0.0, False)])
def test_equal_rewards_within_groups_are_no_signal_without_a_critic(disable_value: float, is_due: bool) -> None:
    watch = NoSignal()
    for _ in range(8):
        watch.count({"reward/std": 0.5, "groups/equal": 1.0, "disable_value": disable_value, "n_seqs": 16.0})
    assert watch.is_due == is_due


def test_a_run_goes_on_when_the_reader_of_its_output_has_gone(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from rich.console import Console; from core.monitoring.screen import Screen\n"
        "screen = Screen(Console(), compact=True)\n"
        "for number in range(20000): screen.print(f'line {number}')\n"
        "screen.finish(model=None, logs=pathlib.Path('logs'), experiment='sft')\n"
        "pathlib.Path(sys.argv[1]).touch()"
    )
    ended = tmp_path / "ended"
    command = f"{shlex.join([sys.executable, '-c', script, str(ended)])} | head -1"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout == "line 0\n" and ended.exists(), shown.stderr


def test_an_evaluation_is_below_the_row_of_its_step() -> None:
    shown, file = screen()
    shown.open(total_steps=2, done_steps=0)
    shown.evaluation(0, {"eval/accuracy": 0.5})
    shown.evaluation(1, {"eval/accuracy": 0.75})
    shown.step(1, ROW, "")
    shown.evaluation(2, {"eval/accuracy": 1.0})
    shown.close()
    lines = [line.split()[:3] for line in file.getvalue().splitlines()]
    assert [line for line in lines if line[0] != "step"] == [
        ["eval", "accuracy", "0.5"],
        ["1/2", "0.361", "±0.21"],
        ["eval", "accuracy", "0.75"],
        ["eval", "accuracy", "1"],
    ]
