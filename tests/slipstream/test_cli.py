"""The console script and the package's import, as a user's folder sees them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from rollout.plugins import ROOT
from slipstream.cli import COMMANDS, main
from tools.eval.report import Result, write_report

MAIN = "import sys; sys.path[0] = sys.argv.pop(1); from slipstream.cli import main; sys.exit(main())"
"""As the installed script starts: the working folder is not on the path."""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, str(ROOT), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_importing_the_package_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = "import slipstream, sys; print({'torch', 'ray', 'megatron'} & sys.modules.keys(), slipstream.__version__)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == f"set() {slipstream.__version__}\n", done.stderr


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(slipstream, name) is not None for name in slipstream.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = slipstream.trian


def test_help_lists_every_command_and_an_unknown_one_is_bad_input(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0 and all(f"  {name}" in done.stdout for name in COMMANDS)
    assert run(cwd=tmp_path).returncode == 2
    wrong = run("trian", cwd=tmp_path)
    assert wrong.returncode == 2 and "unknown command 'trian'; one of train, sft" in wrong.stderr
    assert run("--version", cwd=tmp_path).stdout == f"slipstream {slipstream.__version__}\n"


def test_ctrl_c_ends_a_command_with_one_line(monkeypatch, capsys) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runpy.run_module", interrupted)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["convert"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"dry-run"}))
def test_every_command_has_a_help_text_that_begins_with_it(command: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: slipstream {command}") or COMMANDS[command][0] in shown


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    script = f"import os, sys; os.rmdir(os.getcwd()); {MAIN}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT), "runs"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "error: the working folder was removed; change to one that exists\n")


def test_options_from_python_are_the_flags_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[str]]] = []

    def run(module: str, words: list[str]) -> int:
        called.append((module, words))
        return 0

    monkeypatch.setattr("slipstream.api._run", run)
    slipstream.convert("from", tmp_path, to_megatron=True, dtype="bfloat16", overwrite=False)
    folders = ["--checkpoint_path", "from", "--output_path", str(tmp_path)]
    assert called == [("tools.convert", [*folders, "--to-megatron", "--dtype", "bfloat16"])]
    result = Result(
        dataset="a", num_questions=1, greedy_length=1.0, sample_length=None, greedy_acc=100.0, pass_at={},
        greedy_reward=None, sample_reward=None,
    )  # fmt: skip
    write_report(tmp_path, [result], {"model_path": "model"})
    [row] = slipstream.evaluate("model", tmp_path, data=["a", "b"], n_sampling=8, greedy=None)
    assert row["dataset"] == "a"
    folders = ["--model_path", "model", "--output_path", str(tmp_path)]
    assert called[1] == ("tools.eval", [*folders, "--data_names", "a,b", "--n_sampling", "8"])
