"""The command line as a user runs it: a real process, its output, its exit code."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from core import quickstart
from core.checks.rules import load_config
from core.config.reference import recorded
from core.processes.signals import SIGNALS, end_at_signals
from core.runs.paths import RunPaths
from core.runs.record import write_complete, write_record
from helpers.config_inputs import PPO_7B_128_GPUS, SMALLEST_PPO, write_model, write_run
from helpers.forks import programs

ROOT = Path(__file__).parents[2]
LINE = r"\d{8}-\d\d:\d\d:\d\d\.\d{3} quickstart "


def run(*arguments: str, module: str = "core.quickstart") -> subprocess.CompletedProcess[str]:
    """Run a module, or with `module` = "" what follows `python`, for which nothing is imported before."""
    words = ["-m", module, *arguments] if module else arguments
    forced = {"FORCE_COLOR": "1"}  # by notebooks and continuous integration; a pipe is no terminal for that
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **forced}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = programs.start(words, output=output, errors=errors, env=environment, fresh=not module).wait()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, output.read(), errors.read())


def snapshot(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_dry_run_says_what_would_happen_and_touches_nothing(tmp_path: Path) -> None:
    path = write_run(tmp_path, f"{SMALLEST_PPO}cache_clear_freq: 1\n")
    before = snapshot(tmp_path)
    done = run(
        "ppo-math", "--config", str(path), "n_gpus_per_node=3", "--dry-run", "allocation_mode=embedded.d1m1p1+d1m2p1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert snapshot(tmp_path) == before
    lines = done.stdout.splitlines()
    title = next(number for number, line in enumerate(lines) if line.startswith("run     slipstream "))
    assert [line.split()[0] for line in lines[title : title + 5]] == ["run", "model", "data", "layout", "keys"]
    assert "actor (ModelTrainEvalConfig)" not in lines, "--verbose lists every key"
    assert re.search(rf"^{LINE}INFO: Running ppo-math experiment\.$", done.stdout, re.MULTILINE)
    assert re.search(
        rf"^{LINE}INFO: Logs will be dumped to {tmp_path}/out/logs/\w+/small/one$", done.stdout, re.MULTILINE
    )
    assert re.search(
        rf"^{LINE}INFO: Model checkpoints will be saved to {tmp_path}/out/checkpoints/\w+/small/one$",
        done.stdout,
        re.MULTILINE,
    )
    assert len(re.findall("1 key has no effect here and is ignored:", done.stdout)) == 1
    table = [re.split(r"\s*│\s*", line.strip("│ "))[:3] for line in lines if line.startswith("│ actor_")]
    assert table == [
        ["actor_gen", "embedded", "d1m1p1"],
        ["actor_train", "megatron", "d1m2p1"],
        ["actor_inf", "megatron", "d1m2p1"],
    ]
    assert re.search(rf"^{LINE}INFO: Dry run: every check passed", lines[-1])


def test_sampling_from_a_part_of_the_distribution_is_allowed_with_a_warning(tmp_path, capsys) -> None:
    command = ["ppo-math", "--config", str(write_run(tmp_path)), "--dry-run"]
    assert quickstart.main([*command, "ppo.gen.top_p=0.9", "ppo.gen.min_new_tokens=2"]) == 0
    said = capsys.readouterr().out
    assert "WARNING: ppo.gen.top_p=0.9, top_k=-1: completions come from a truncated" in said
    assert "WARNING: ppo.gen.min_new_tokens=2: until then stop tokens are excluded" in said
    assert quickstart.main(command) == 0 and "WARNING" not in capsys.readouterr().out


def test_a_prompt_template_without_a_place_for_the_prompt_is_an_error(tmp_path, capsys) -> None:
    words = ["--dry-run", "workflow.prompt_template=Solve"]
    assert quickstart.main(["ppo-math", "--config", str(write_run(tmp_path)), *words]) == 2
    said = capsys.readouterr().err
    assert "workflow.prompt_template" in said and "write it where the prompt belongs" in said


def test_a_dry_run_imports_nothing_that_loads_for_long(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    script = (
        "import sys; from core.quickstart import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'ray', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = run("-c", script, "ppo-math", "--config", str(path), "--dry-run", module="")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    paths = RunPaths.for_trial(str(tmp_path / "out"), "small", "one")
    paths.logs.mkdir(parents=True)
    write_complete(paths, {"total_train_epochs": 1, "total_train_steps": None})
    done = run("train", str(write_run(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run     slipstream ") and "Training is complete already" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("changes", "code"), [([], 0), (["actor.optimizer.lr=1e-5"], 2)])
def test_a_complete_trial_is_said_before_a_process_or_a_heavy_import(tmp_path, changes: list[str], code: int) -> None:
    path = write_run(tmp_path)
    config = load_config("ppo-math", path, []).config
    paths = RunPaths.of(config)
    paths.logs.mkdir(parents=True)
    write_record("ppo-math", recorded(config), paths, ["slipstream", "train"])
    write_complete(paths, config.exp_ctrl.length_keys)
    before = (paths.logs / "config.yaml").read_bytes()
    script = (
        "import sys\n"
        "starts = {'subprocess.Popen', 'os.fork', 'os.forkpty', 'os.posix_spawn', 'os.exec', 'os.system'}\n"
        "found = set()\n"
        "sys.addaudithook(lambda event, _: found.add(event) if event in starts else None)\n"
        "from core.quickstart import main\n"
        "code = main(sys.argv[1:])\n"
        "found |= {'torch', 'ray', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{found}' if found else code)"
    )
    done = run("-c", script, "train", "--config", str(path), *changes, module="")
    assert (done.returncode, done.stderr) == (code, "")
    assert "Training is complete already: to train on, raise exp_ctrl.total_train_epochs=1; to train anew" in (
        " ".join(done.stdout.split())
    )
    assert ("lr: 2e-05 -> 1e-05" in done.stdout) == bool(changes)
    assert (paths.logs / "config.yaml").read_bytes() == before


def test_a_file_without_a_flag_and_an_underscore_are_what_they_look_like(tmp_path: Path) -> None:
    done = run("train", str(write_run(tmp_path)), "--dry_run", module="slipstream.cli")
    assert (done.returncode, done.stderr) == (0, "")
    assert "every check passed; nothing was started" in done.stdout


def test_bad_input_is_one_message_on_stderr_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    before = snapshot(tmp_path)
    done = run("ppo-math", "--config", str(path), "ppo.eps_clp=1", "group_size=many", "seed=-1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: 3 problems",
        "override 'ppo.eps_clp=1': ppo.eps_clp: unknown key; did you mean 'ppo.eps_clip'?",
        "override 'group_size=many': group_size: must be an integer, got 'many'",
        "override 'seed=-1': seed: must be at least 0, got -1",
    ]
    assert quickstart.main(["ppo-math", "--config", str(path), "actor.path=/no/model", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: override 'actor.path=/no/model': actor.path: /no/model: no such folder")
    assert len(said.splitlines()) == 1
    assert snapshot(tmp_path) == before


def test_what_ends_a_run_is_one_line_on_the_terminal_and_a_traceback_in_the_log(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    damaged = RunPaths.for_trial(str(tmp_path / "out"), "small", "one").recover / "globalstep1"
    damaged.mkdir(parents=True)
    (damaged / "COMMITTED").touch()
    done = run("ppo-math", "--config", str(path), "recover_mode=resume")
    assert done.returncode == 1
    assert "\nerror: recover_mode=resume: there is no valid recover checkpoint in" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    (log,) = tmp_path.glob("out/logs/*/small/one/master_worker.log")
    assert "Traceback (most recent call last):" in log.read_text()


@pytest.mark.parametrize(("mode", "retries"), [("auto", 7), ("resume", 0), ("disabled", 0)])
def test_only_recover_mode_auto_makes_further_attempts(tmp_path, monkeypatch, mode: str, retries: int) -> None:
    made: list[int] = []
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def run_attempts(run: object, *, retries: int, **options: object) -> int:
        assert {signal.getsignal(number) for number in handlers} == {signal.default_int_handler}
        made.append(retries)
        return 0

    end_at_signals()

    monkeypatch.setattr(quickstart, "run_attempts", run_attempts)
    monkeypatch.setattr(quickstart, "log_to_terminal", lambda *_, **__: None)
    own = RunPaths.for_trial(str(tmp_path / "out"), "small", "one").recover / "globalstep1"
    own.mkdir(parents=True)
    (own / "COMMITTED").touch()  # recover_mode=resume needs one
    arguments = ["ppo-math", "--config", str(write_run(tmp_path)), f"recover_mode={mode}", "recover_retries=7"]
    try:
        assert quickstart.main(arguments) == 0 and made == [retries]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_an_earlier_run_of_the_trial_is_set_aside_before_the_log_begins_and_not_by_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "run_attempts", lambda *_, **__: 0)
    logs = RunPaths.for_trial(str(tmp_path / "out"), "small", "one").logs
    logs.mkdir(parents=True)
    (logs / "metrics.jsonl").write_text("rows")
    (logs / "master_worker.log").write_text("earlier\n")
    arguments = ["ppo-math", "--config", str(write_run(tmp_path)), "recover_mode=disabled"]
    assert quickstart.main([*arguments, "--dry-run"]) == 0
    assert [p.name for p in logs.parent.iterdir()] == ["one"]
    assert "a start gives it a dated trial name and begins anew" in capsys.readouterr().out
    assert quickstart.main(arguments) == 0
    (aside,) = logs.parent.glob("one.*")
    assert (aside / "metrics.jsonl").read_text() == "rows" and not (logs / "metrics.jsonl").exists()
    assert (aside / "master_worker.log").read_text() == "earlier\n"
    log = (logs / "master_worker.log").read_text()
    assert f"WARNING: An earlier run of this trial is there; it is trial_name={aside.name} from now on" in log


def test_the_columns_of_the_data_are_in_the_log_also_of_a_dry_run(tmp_path, capsys) -> None:
    path = write_run(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"question": "1 + 1", "answer": "2", "level": "easy"}\n' * 8)
    assert quickstart.main(["ppo-math", "--config", str(path), "--dry-run"]) == 0
    said = "prompts.jsonl: 8 rows; prompt from 'question'; answer from 'answer'; not used: level\n"
    assert capsys.readouterr().out.count(said) == 1


def test_a_log_that_cannot_be_opened_is_one_message(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    logs = RunPaths.for_trial(str(tmp_path / "out"), "small", "one").logs
    (logs / "master_worker.log").mkdir(parents=True)
    done = run("ppo-math", "--config", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: external_configs.cluster_config.fileroot: cannot write {logs}/master_worker")
    assert len(done.stderr.splitlines()) == 1


def test_help_shows_the_keys_that_most_runs_set_and_with_verbose_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main(["ppo-math", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  ppo.kl_ctl=0.1  " in out and "ppo.eps_clip" not in out and len(out.splitlines()) < 80
    assert "`--help --verbose` shows all keys" in out
    assert quickstart.main(["sft", "-h"]) == 0
    assert "\n  dataset.train_path=  " in capsys.readouterr().out
    assert quickstart.main(["ppo-math", "--help", "--verbose"]) == 0
    assert "  ppo.eps_clip (float; default 0.2)\n" in capsys.readouterr().out
    assert quickstart.main(["--help"]) == 0
    assert "{ppo-math,sft,dpo}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which experiment? One of ppo-math, sft"),
        (["run.yaml"], "which experiment? Write one of ppo-math, sft, dpo before run.yaml"),
        (["ppo"], "unknown experiment 'ppo'; did you mean 'ppo-math'?"),
        (["sft", "--config", "/no/file.yaml"], "--config: /no/file.yaml: No such file or directory"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_right(capsys, arguments: list[str], message: str) -> None:
    assert quickstart.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_the_tutorials_file_needs_only_its_folders(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = write_run(tmp_path)
    model = write_model(tmp_path / "7B", num_hidden_layers=4, max_position_embeddings=131072)
    path.write_text(PPO_7B_128_GPUS)
    overrides = [f"{name}.path={model}" for name in ("actor", "ref", "critic")]
    overrides += [f"dataset.path={tmp_path / 'prompts.jsonl'}", f"external_configs.cluster_config.fileroot={tmp_path}"]
    overrides.append("launch.ray_address=head:6379")  # of 16 machines
    assert quickstart.main(["ppo-math", "--config", str(path), "--dry-run", "--verbose", *overrides]) == 0
    out = capsys.readouterr().out
    assert "actor.type._class (str) - qwen2\n" in out
    assert "nodes 0-7: 0-7" in out


def test_a_folder_for_temporary_files_that_does_not_exist_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    done = run("ppo-math", "--config", str(write_run(tmp_path)), "--preflight")
    assert done.returncode == 2 and "RAY_TMPDIR: no folder for temporary files: " in done.stderr


def test_limits_of_the_shell_that_end_ray_are_named(tmp_path: Path) -> None:
    command = f"{sys.executable} -m core.quickstart ppo-math --config {write_run(tmp_path)} --preflight"

    def refused(words: str = "") -> str:
        limited = ["bash", "-c", f"ulimit -n 64; ulimit -f 1000; {command} {words}"]
        done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        return done.stderr

    assert "run `ulimit -n 65536`" in (own := refused()) and "run `ulimit -f unlimited`" in own
    assert "ulimit" not in refused("launch.ray_address=127.0.0.1:9"), "a cluster that runs has limits of its own"


def test_the_driver_of_a_run_imports_torch_and_ray_but_not_megatron() -> None:
    script = (
        "import sys, core.experiments.ppo, core.experiments.sft\n"
        "heavy = {'megatron', 'transformers', 'torch.distributed.checkpoint', 'sympy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = run("-c", script, module="")
    assert (done.returncode, done.stderr) == (0, "")
