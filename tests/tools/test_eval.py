"""`python -m tools.eval`: real model, real generator, real files, a real kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eval_cases import arguments, write_rows

from rollout.evaluation import Answer, read_answers
from tools.eval import BAD_INPUT, main
from tools.eval_report import COLUMNS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def evaluated(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("evaluated") / "output"
    assert main(arguments(model, data, output)) == 0
    return output


def test_every_answer_is_a_row_and_the_table_says_what_the_rows_say(evaluated: Path) -> None:
    answers = read_answers(evaluated / "sums.jsonl")
    assert len({a.name for a in answers}) == len(answers) == 10 * (1 + 16)
    assert all(0 < a.tokens <= 6 and a.prompt.endswith("+1=") for a in answers)
    (row,) = json.loads((evaluated / "results.json").read_text())["results"]
    assert tuple(row) == COLUMNS
    sampled = [a for a in answers if a.mode == "sample"]
    assert row["num_questions"] == 10
    assert row["sample_pass@1"] == pytest.approx(100 * sum(a.score for a in sampled) / 160)
    assert row["sample_length"] == pytest.approx(sum(a.tokens for a in sampled) / 160)
    right = {a.query_id for a in sampled if a.score}
    assert right, "16 tries at sums of one digit: some question is answered"
    assert row["pass@16"] == pytest.approx(100 * len(right) / 10)
    assert row["pass@8"] < row["pass@16"]
    assert (evaluated / "results.png").read_bytes().startswith(b"\x89PNG")
    assert (evaluated / "results.md").read_text().startswith("| dataset | num_questions | greedy_length |")


def test_a_finished_evaluation_is_not_done_again(evaluated: Path, model: Path, data: Path) -> None:
    before = (evaluated / "sums.jsonl").read_bytes()
    assert main(arguments(model, data, evaluated)) == 0
    assert (evaluated / "sums.jsonl").read_bytes() == before


def test_more_samples_add_to_those_that_are_there(evaluated: Path, model: Path, data: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    assert main(arguments(model, data, few, "--n_sampling", "2")) == 0
    first = read_answers(few / "sums.jsonl")
    assert main(arguments(model, data, few)) == 0
    assert read_answers(few / "sums.jsonl")[: len(first)] == first
    assert by_name(few / "sums.jsonl") == by_name(evaluated / "sums.jsonl")


def by_name(path: Path) -> dict[object, Answer]:
    return {a.name: a for a in read_answers(path)}


def test_a_killed_evaluation_goes_on_where_it_stopped(evaluated: Path, model: Path, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.eval", *arguments(model, data, tmp_path / "out", "--max_running", "1")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    answers = tmp_path / "out" / "sums.jsonl"
    while process.poll() is None and (not answers.exists() or answers.read_bytes().count(b"\n") < 20):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = answers.read_bytes().count(b"\n")
    assert 20 <= kept < 170, "killed in the middle"
    with answers.open("ab") as file:
        file.write(b'{"query_id": "cut o')  # what a kill in the middle of a write leaves
    assert main(arguments(model, data, tmp_path / "out")) == 0
    assert by_name(answers) == by_name(evaluated / "sums.jsonl"), "the same answers as without the kill"
    assert answers.read_bytes().count(b"\n") == 170


def test_fields_are_detected_or_given_and_a_file_is_a_benchmark(
    model: Path, data: Path, tmp_path: Path, caplog
) -> None:
    own = ("--prompt_field", "ask", "--answer_field", "gold", "--n_sampling", "0")
    caplog.set_level("INFO")
    assert main(arguments(model, data, tmp_path, *own, names=str(data / "own.jsonl"))) == 0
    assert "question 'ask', answer 'gold'" in caplog.text
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert row["dataset"] == "own" and row["sample_pass@1"] is None and row["pass@8"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--data_names", "nowhere"], "looked for {data}/nowhere/test.jsonl, {data}/nowhere.jsonl"),
        (["--data_names", "own"], "no prompt among the keys ['ask', 'gold']"),
        (["--answer_field", "target"], "its rows have answer, id, problem"),
        (["--model_path", "/nowhere"], "--model_path /nowhere: no such folder"),
        (["--model_path", "{data}"], "neither a Hugging Face folder"),
        (["--temperature", "0"], "must be greater than 0"),
        (["--prompt_template", "Q:"], "has no {prompt}"),
        (["--data_names", "sums,sums"], "sums twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(
    change: list[str], says: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = [word.replace("{data}", str(data)) for word in change]
    assert main(arguments(model, data, tmp_path / "out") + changed) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says.replace("{data}", str(data)) in error
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_answers_of_other_settings_are_not_mixed_in(
    evaluated: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, data, evaluated, "--temperature", "1.0")) == BAD_INPUT
    assert "temperature=1.0: the answers in" in capsys.readouterr().err
    assert main(arguments(model, data, evaluated)) == 0, "refused, not spoiled"


def test_a_prompt_longer_than_the_context_is_named(model: Path, tmp_path: Path, capsys) -> None:
    write_rows(tmp_path / "long.jsonl", [{"prompt": "1+" * 40, "answer": "40"}])
    assert main(arguments(model, tmp_path, tmp_path / "out", names="long")) == BAD_INPUT
    assert "its prompt has 80 tokens and the model's context 64" in capsys.readouterr().err


def test_a_checkpoint_of_the_trainer_is_evaluated_as_the_folder_it_came_from(
    evaluated: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    convert = [sys.executable, "-m", "tools.convert", "--checkpoint_path", str(model), "--to-megatron"]
    subprocess.run([*convert, "--output_path", str(tmp_path / "run" / "actor")], cwd=ROOT, check=True)
    assert main(arguments(tmp_path / "run", data, tmp_path / "out")) == 0
    assert by_name(tmp_path / "out" / "sums.jsonl") == by_name(evaluated / "sums.jsonl")
