"""`python -m tools.eval`: real model, real generator, real files, a real kill."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from helpers.eval_cases import arguments, write_rows
from helpers.forks import programs
from rollout.errors import GeneratorCallError, GeneratorGone, GeneratorStartError
from rollout.evaluation import Answer, read_answers
from rollout.inference.embedded.generator import GeneratorError
from rollout.inference.router import NoGeneratorError
from rollout.inference.sglang.arguments import is_installed
from rollout.rewards.pool import RewardPool, RewardWorkerError
from tools.arguments import BAD_INPUT
from tools.eval.__main__ import FAILED, main
from tools.eval.data import EvalError
from tools.eval.report import COLUMNS

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
    assert tuple(row)[: len(COLUMNS)] == COLUMNS
    rewards = [a.reward for a in answers if a.mode == "sample"]
    assert row["sample_reward"] == pytest.approx(sum(rewards) / 160), "10 questions with 16 samples each"
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
    words = ["-m", "tools.eval", *arguments(model, data, tmp_path / "out", "--max_running", "1")]
    with (tmp_path / "output.log").open("w") as output:
        process = programs.start(words, output=output)
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


def test_sets_that_are_answered_together_get_the_answers_that_they_get_alone(
    evaluated: Path, model: Path, data: Path, tmp_path: Path, caplog
) -> None:
    write_rows(tmp_path / "more.jsonl", [{"id": i, "problem": f"{i}+2=", "answer": str(i + 2)} for i in range(3)])
    more = str(tmp_path / "more.jsonl")
    assert main(arguments(model, data, tmp_path / "alone", names=more)) == 0
    caplog.set_level("INFO")
    caplog.clear()
    both = tmp_path / "both"
    assert main(arguments(model, data, both, "--n_sampling", "1", names=more)) == 0
    assert main(arguments(model, data, both, names=f"sums,{more}")) == 0
    assert by_name(both / "sums.jsonl") == by_name(evaluated / "sums.jsonl")
    assert by_name(both / "more.jsonl") == by_name(tmp_path / "alone" / "more.jsonl")
    assert [row["dataset"] for row in json.loads((both / "results.json").read_text())["results"]] == ["sums", "more"]
    lines = [record.getMessage() for record in caplog.records if record.name == "tools.eval.run"]
    assert lines[-1].startswith(f"all sets: {17 * 13}/{17 * 13} answers, ") and " tokens/s, " in lines[-1]
    assert any(line.startswith("more: 51/51 answers, ") for line in lines)


def test_fields_are_detected_or_given_and_a_file_is_a_benchmark(model: Path, data: Path, tmp_path, caplog) -> None:
    own = ("--prompt_field", "ask", "--answer_field", "gold", "--n_sampling", "0")
    caplog.set_level("INFO")
    assert main(arguments(model, data, tmp_path, *own, names=str(data / "own.jsonl"))) == 0
    assert "prompt from 'ask'; answer from 'gold'" in caplog.text
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert row["dataset"] == "own" and row["sample_pass@1"] is None and row["pass@8"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--data_names", "nowhere"], "looked for {data}/nowhere/test.*, {data}/nowhere.*"),
        (["--data_names", "own"], "no prompt among the columns ['ask', 'gold']"),
        (["--answer_field", "target"], "answer_field='target' is not among the columns ['answer', 'id', 'problem']"),
        (["--model_path", "/nowhere"], "--model_path /nowhere: no such folder"),
        pytest.param(
            ["--generator", "sglang"],
            "--generator sglang: SGLang is not installed here; run pip install",
            marks=pytest.mark.skipif(is_installed(), reason="SGLang is installed here"),
        ),
        (["--generator", "sglang", "--sglang_python", "/no/python"], "--sglang_python /no/python: no such interpreter"),
        (
            ["--generator", "sglang", "--sglang_python", sys.executable, "--sglang", "tp_size=2"],
            "--sglang tp_size: cannot be set: set by allocation_mode; leave it out",
        ),
        (["--model_path", "{data}"], "neither a Hugging Face folder"),
        (["--model_path", "{data}"], "it contains own.jsonl, sums"),
        (["--temperature", "0"], "must be greater than 0"),
        (["--prompt_template", "Q:"], "has no {prompt}"),
        (["--data_names", "sums,sums"], "sums twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(change: list[str], says: str, model: Path, data: Path, tmp_path, capsys) -> None:
    changed = [word.replace("{data}", str(data)) for word in change]
    assert main(arguments(model, data, tmp_path / "out") + changed) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says.replace("{data}", str(data)) in error
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_a_reward_of_trl_whose_column_is_missing_is_refused_before_sampling(
    model: Path, data: Path, tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "levels.py").write_text("def reward(completions, answer, level):\n    return [0.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main([*arguments(model, data, tmp_path / "out"), "--reward", "levels:reward"]) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith("error: --data_names sums: levels:reward: the reward asks for level; the data set has ")
    assert said.endswith("name the column so, or give the argument a default\n")
    assert not (tmp_path / "out").exists()


def test_answers_of_other_settings_are_not_mixed_in(evaluated: Path, model: Path, data: Path, capsys) -> None:
    assert main(arguments(model, data, evaluated, "--temperature", "1.0")) == BAD_INPUT
    assert "temperature=1.0: the answers in" in capsys.readouterr().err
    assert main(arguments(model, data, evaluated)) == 0, "refused, not spoiled"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--data_names", "nowhere"], "no such benchmark"),
        (["--model_path", "/nowhere"], "no such folder"),
        (["--prompt_template", "Q:"], "has no {prompt}"),
        (["--data_names", "{long}"], "its prompt has 80 tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_overwriting_deletes_nothing_before_everything_is_checked(
    change: list[str], says: str, evaluated: Path, model: Path, data: Path, tmp_path: Path, capsys
) -> None:
    output = shutil.copytree(evaluated, tmp_path / "out")
    write_rows(tmp_path / "long.jsonl", [{"prompt": "1+" * 40, "answer": "40"}])
    changed = [word.replace("{long}", str(tmp_path / "long.jsonl")) for word in change]
    assert main(arguments(model, data, output, "--overwrite") + changed) == BAD_INPUT
    assert says in capsys.readouterr().err
    assert (output / "sums.jsonl").read_bytes() == (evaluated / "sums.jsonl").read_bytes()


def test_overwriting_starts_anew_in_an_evaluations_folder_only(evaluated, model, data, tmp_path, capsys) -> None:
    output = shutil.copytree(evaluated, tmp_path / "out")
    (output / "sums.jsonl").write_text("damaged\n")
    assert main(arguments(model, data, output, "--overwrite", "--n_sampling", "0", "--temperature", "1.0")) == 0
    assert len(read_answers(output / "sums.jsonl")) == 10
    (tmp_path / "mine").mkdir()
    for content in ("{}", "[]", "no json"):
        (tmp_path / "mine" / "settings.json").write_text(content)
        assert main(arguments(model, data, tmp_path / "mine", "--overwrite")) == BAD_INPUT
        assert "holds no evaluation" in capsys.readouterr().err
    (tmp_path / "mine" / "notes.jsonl").write_text('{"mine": 1}\n')
    assert main(arguments(model, data, tmp_path / "mine", "--overwrite")) == BAD_INPUT
    own = shutil.copytree(model, output / "model")
    assert main(arguments(own, data, output, "--overwrite")) == BAD_INPUT
    assert "which is needed" in capsys.readouterr().err and own.exists()


def test_an_answer_that_could_not_be_judged_is_marked_and_counted(model, data, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "dying_reward.py").write_text("import os\ndef score(prompt, text):\n    os._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tools.eval.run.RewardPool", lambda _, **options: RewardPool("dying_reward:score", **options))
    few = ("--n_sampling", "0", "--num_questions", "2")
    assert main(arguments(model, data, tmp_path / "out", *few)) == 0
    assert [(a.score, a.unjudged) for a in read_answers(tmp_path / "out" / "sums.jsonl")] == [(0.0, "crash")] * 2
    assert "2 answers count as wrong because judging them failed (2 crash)" in capsys.readouterr().out


@pytest.fixture
def runs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two checkpoints; a conversion of one copies `model` and the checkpoint's metadata.json."""
    found = (tmp_path / "one", tmp_path / "two")
    for run in found:
        (run / "actor").mkdir(parents=True)
        (run / "actor" / "metadata.json").write_text(json.dumps({"of": run.name}))
    converter = tmp_path / "python"
    copies = f'cp -r {model} "$6" && exec cp "$4/metadata.json" "$6"'
    converter.write_text(f'#!/bin/sh\n[ "$2" != tools.convert ] || {{ {copies}; }}\nexec {sys.executable} "$@"\n')
    converter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(converter))
    return found


def converted_from(output: Path) -> object:
    return json.loads((output / "model" / "metadata.json").read_text())["of"]


FEW = ("--n_sampling", "0", "--num_questions", "2")


def test_a_checkpoint_is_converted_anew_where_what_is_there_was_made_from_another(runs, data, tmp_path) -> None:
    (one, two), output = runs, tmp_path / "out"
    write_rows(tmp_path / "long.jsonl", [{"prompt": "1+" * 40, "answer": "40"}])
    too_long = arguments(one, data, output, *FEW, names=str(tmp_path / "long.jsonl"))
    assert main(too_long) == BAD_INPUT
    assert [p.name for p in output.iterdir()] == ["model"], "stopped when it was converted"
    first = (output / "model").stat().st_ino
    assert main(too_long) == BAD_INPUT
    assert (output / "model").stat().st_ino == first, "not converted twice"
    (one / "actor" / "metadata.json").write_text(json.dumps({"of": "replaced"}))
    assert main(too_long) == BAD_INPUT
    assert converted_from(output) == "replaced"
    (output / "..model.converting.killed").mkdir()
    assert main(arguments(two, data, output, *FEW)) == 0
    assert converted_from(output) == "two"
    assert not list(output.glob("*converting*"))


@pytest.mark.nightly
def test_a_checkpoint_of_the_trainer_is_evaluated_as_the_folder_it_came_from(evaluated, model, data, tmp_path) -> None:
    convert = [sys.executable, "-m", "tools.convert", "--checkpoint_path", str(model), "--to-megatron"]
    subprocess.run([*convert, "--output_path", str(tmp_path / "run" / "actor")], cwd=ROOT, check=True)
    assert main(arguments(tmp_path / "run", data, tmp_path / "out")) == 0
    made_from = json.loads((tmp_path / "out" / "model" / "made_from.json").read_text())
    assert made_from["checkpoint"] == str(tmp_path / "run" / "actor")
    assert by_name(tmp_path / "out" / "sums.jsonl") == by_name(evaluated / "sums.jsonl")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GeneratorStartError("the server died"), FAILED),
        (GeneratorCallError("HTTP 500"), FAILED),
        (GeneratorGone("generator-0 is gone"), FAILED),
        (NoGeneratorError("no generator is left"), FAILED),
        (GeneratorError("the engine died"), FAILED),
        (RewardWorkerError("did not start"), FAILED),
        (OSError(errno.ENOSPC, "No space left on device"), FAILED),
        (PermissionError(errno.EACCES, "Permission denied"), BAD_INPUT),
        (EvalError("bad"), BAD_INPUT),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_fails_while_running_is_one_line_and_not_called_bad_input(
    error: Exception, code: int, model: Path, data: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("tools.eval.run.start_generators", fail)
    monkeypatch.setattr("tools.eval.run.RewardPool", lambda *args, **options: AsyncExitStack())
    assert main(arguments(model, data, tmp_path)) == code
    assert capsys.readouterr().err == f"error: {error}\n"
