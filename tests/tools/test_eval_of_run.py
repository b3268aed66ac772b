"""A model is evaluated as the run that saved it sampled and judged."""

import argparse
import shutil
from pathlib import Path

import pytest

from config_schema.section import fields_by_key
from core.config.experiments import EXPERIMENTS
from core.runs.record import remember
from helpers.eval_cases import arguments, write_rows
from rollout.data.encoder import BOXED_INSTRUCTION
from rollout.evaluation import read_answers
from tools.arguments import BAD_INPUT
from tools.eval.__main__ import _parser, main
from tools.eval.data import EvalError
from tools.eval.settings import Judging, _experiment_of, config_of, judging_from, newest_of_run

PLUGINS = """
from rollout.workflows import SingleTurnMathWorkflow

def half(prompt, text):
    return 0.5 if prompt.text.startswith("2") else -1.0

class Own(SingleTurnMathWorkflow):
    pass
"""
CONFIG = """
experiment_name: e
trial_name: t
actor: {path: model}
dataset: {path: train.jsonl, prompt_field: ask}
ppo: {kl_ctl: 0.0, disable_value: true}
workflow: {type: "eval_plugins:Own"}
reward: {function: "eval_plugins:half"}
prompt: {template: "{prompt}"}
"""


def noted(text: str) -> str:
    """Return a configuration that a run of this user wrote."""
    remember(text)
    return text


@pytest.fixture
def saved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that a run has saved."""
    (tmp_path / "eval_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = shutil.copytree(model, tmp_path / "root/checkpoints/user/e/t/actor/epoch1epochstep1globalstep1")
    (tmp_path / "root/logs/user/e/t").mkdir(parents=True)
    (tmp_path / "root/logs/user/e/t/config.yaml").write_text(noted(CONFIG))
    return folder


def given(model: Path, *more: str) -> argparse.Namespace:
    return _parser().parse_args(["--model_path", str(model), "--output_path", "out", *more])


def test_the_configuration_of_a_run_is_found_from_its_models_and_checkpoints(saved: Path, tmp_path: Path) -> None:
    config = tmp_path / "root/logs/user/e/t/config.yaml"
    assert config_of(saved) == config_of(tmp_path / "root/recover/user/e/t/step-7") == config
    assert config_of(tmp_path / "root/checkpoints/user/e/other/actor/step") is None
    assert config_of(tmp_path / "model") is None


def test_workflow_reward_and_prompt_of_the_run_are_used_and_the_command_line_wins(saved: Path) -> None:
    judging = judging_from(given(saved))
    assert (judging.workflow.type, judging.reward) == ("eval_plugins:Own", "eval_plugins:half")
    assert (judging.prompt_format.template, judging.prompt_format.instruction) == ("{prompt}", "")
    assert judging.hints.prompt == "ask"
    changed = judging_from(given(saved, "--reward", "math", "--prompt_template", "Q: {prompt}"))
    assert (changed.workflow.type, changed.reward) == ("eval_plugins:Own", "math")
    assert (changed.prompt_format.template, changed.prompt_format.instruction) == ("Q: {prompt}", BOXED_INSTRUCTION)
    assert judging_from(given(saved, "--ignore_run")) == Judging()


def test_threshold_and_length_of_the_run_are_used_and_the_command_line_wins(saved: Path, tmp_path: Path) -> None:
    judging = judging_from(given(saved))
    assert (judging.right_at, judging.max_new_tokens) == (None, 16384), "of the run: graded, ppo.gen.max_new_tokens"
    config = tmp_path / "root/logs/user/e/t/config.yaml"
    lengths = CONFIG.replace("kl_ctl: 0.0", "kl_ctl: 0.0, gen: {max_new_tokens: 9}")
    config.write_text(noted(lengths.replace('half"', 'half", right_at: 0.5')))
    judging = judging_from(given(saved))
    assert (judging.right_at, judging.max_new_tokens) == (0.5, 9)
    assert judging_from(given(saved, "--reward", "math")).right_at == 1.0
    changed = judging_from(given(saved, "--right_at", "0.7", "--max_gen_tokens", "5"))
    assert (changed.right_at, changed.max_new_tokens) == (0.7, 5)
    assert judging_from(given(saved, "--ignore_run")).max_new_tokens == 32768


def test_the_folder_of_a_run_is_its_newest_model(saved: Path, tmp_path: Path) -> None:
    newest = shutil.copytree(saved, saved.with_name("epoch1epochstep10globalstep10"))
    for folder in (tmp_path / "root/logs/user/e/t", tmp_path / "root/checkpoints/user/e/t"):
        assert newest_of_run(folder) == newest
    assert newest_of_run(saved) == saved and newest_of_run(tmp_path) == tmp_path
    with pytest.raises(EvalError, match="the run has saved no model below"):
        newest_of_run(tmp_path / "root/logs/user/e/other")


@pytest.mark.parametrize("change", ["unknown", "edited", "of another user"])
def test_a_configuration_that_came_with_the_model_is_used_on_request_only(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    module = f"from_elsewhere_{len(change)}"  # imported anew in each case
    (tmp_path / f"{module}.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    config = tmp_path / "root/logs/user/e/t/config.yaml"
    text = CONFIG.replace("eval_plugins:half", f"{module}:score")
    if change == "of another user":
        config.write_text(noted(text))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    else:
        config.write_text(text if change == "unknown" else noted(CONFIG).replace("eval_plugins", module))
    assert judging_from(given(saved)) == Judging()
    assert f"{config} was not written by a run of this user: the defaults are used" in caplog.text
    assert not (tmp_path / "ran").exists()
    with pytest.raises(EvalError, match=f"module {module} has no '(score|half)'"):
        judging_from(given(saved, "--config", str(config), "--workflow", "math"))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_experiment_of_a_configuration_is_recognized_by_its_keys(experiment: str) -> None:
    keys = fields_by_key(EXPERIMENTS[experiment])
    assert _experiment_of(keys) == experiment
    assert _experiment_of([*keys, "no_key_of_any"]) == experiment


def test_answers_are_judged_by_the_reward_of_the_run(saved: Path, data: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "own.jsonl", [{"ask": "2+2=", "level": 1}, {"ask": "3+3="}])
    for right_at, expected in ((None, (None, None)), ("0.5", (1.0, 0.0)), ("1", (0.0, 0.0))):
        out = tmp_path / f"out-{right_at}"
        few = ("--n_sampling", "0", *(("--right_at", right_at) if right_at else ()))
        assert main(arguments(saved, data, out, *few, names=str(tmp_path / "own.jsonl"))) == 0
        answers = {a.prompt: (a.score, a.reward) for a in read_answers(out / "own.jsonl")}
        assert answers == {"2+2=": (expected[0], 0.5), "3+3=": (expected[1], -1.0)}


@pytest.mark.parametrize(("option", "name"), [("reward", "half"), ("workflow", "Own")])
def test_a_reward_or_workflow_of_the_run_that_is_not_here_is_reported_with_the_ways_out(
    saved: Path, data: Path, tmp_path: Path, capsys, option: str, name: str
) -> None:
    config = tmp_path / "root/logs/user/e/t/config.yaml"
    config.write_text(noted(CONFIG.replace(f"eval_plugins:{name}", f"elsewhere:{name}")))
    assert main(arguments(saved, data, tmp_path / "out")) == BAD_INPUT
    *_, error = capsys.readouterr().err.splitlines()
    assert f"elsewhere:{name}: there is no module 'elsewhere'" in error and f"of the run ({config}): run this" in error
    for way_out in ("contains elsewhere.py or elsewhere/", "PYTHONPATH", f"--{option} math", "(--ignore_run)"):
        assert way_out in error
    for words in ((f"--{option}", "math"), ("--ignore_run",)):
        judging_from(given(saved, *words))
    assert main(arguments(saved, data, tmp_path / "out", "--config", str(config))) == BAD_INPUT
    *_, error = capsys.readouterr().err.splitlines()
    assert "--ignore_run" not in error and error.endswith("or give another --config")
    assert main(arguments(saved, data, tmp_path / "out", f"--{option}", f"elsewhere:{name}")) == BAD_INPUT
    *_, error = capsys.readouterr().err.splitlines()
    assert "there is no module 'elsewhere'" in error and "of the run" not in error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--workflow", "nowhere:Own"], "there is no module 'nowhere'"),
        (["--reward", "eval_plugins:none"], "module eval_plugins has no 'none'"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: the configuration of the run cannot be read"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_workflow_reward_or_configuration_is_one_clear_error(
    saved: Path, data: Path, tmp_path: Path, change: list[str], says: str, capsys
) -> None:
    assert main(arguments(saved, data, tmp_path / "out", *change)) == BAD_INPUT
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and says in error


def test_an_evaluation_is_not_continued_with_a_chat_template_of_other_content(saved, data, tmp_path, capsys) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}=")
    config = tmp_path / "root/logs/user/e/t/config.yaml"
    config.write_text(noted(CONFIG.replace('template: "{prompt}"', f"chat_template: {template}")))
    asked = arguments(saved, data, tmp_path / "out")
    assert main(asked) == main(asked) == 0
    template.write_text("{{ messages[0].content }}?")
    assert main(asked) == BAD_INPUT
    assert "chat_template_hash=" in capsys.readouterr().err
