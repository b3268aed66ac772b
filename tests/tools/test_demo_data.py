"""What `make demo` is made of: data, tokenizer, model, configurations, the choice of a checkpoint, the picture."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from core import quickstart
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset
from rollout.rewards.math import RIGHT, WRONG, math_reward
from tools.demo.__main__ import MARKER, DemoError, empty, first_at_least, make_parser, ppo_changes
from tools.demo.data import NUM_HELD_OUT, DemoFiles, answer_of, make_demo_data, save_model
from tools.demo.plot import draw_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    return make_demo_data(tmp_path_factory.mktemp("demo"), seed=1)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_held_out_problem_is_trained_on(files: DemoFiles) -> None:
    held_out = {row["prompt"] for row in rows_of(files.held_out)}
    assert len(held_out) == NUM_HELD_OUT
    assert not held_out & {row["prompt"] for row in rows_of(files.train)}
    assert not held_out & {row["prompt"] for row in rows_of(files.sft)}


def test_every_answer_is_the_sum_and_the_reward_says_so(files: DemoFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    rows = rows_of(files.held_out)
    prompts = PromptDataset.load(files.held_out, Encoder(tokenizer), max_prompt_len=8, seed=0, shuffle=False).prompts
    assert len(prompts) == len(rows)
    for row, prompt in zip(rows, prompts, strict=True):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(answer_of(row)) == int(a) + int(b)
        assert math_reward(prompt, answer_of(row)) == RIGHT
        assert math_reward(prompt, str(int(a) + int(b) + 1)) == WRONG


def test_the_model_is_small_and_a_function_of_the_seed(files: DemoFiles, tmp_path: Path, capfd) -> None:
    model = AutoModelForCausalLM.from_pretrained(files.model)
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    for seed, same in ((1, True), (2, False)):
        capfd.readouterr()
        save_model(tmp_path / str(seed), seed=seed)
        assert capfd.readouterr().err == "", "no progress bar"
        assert logging.is_progress_bar_enabled()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(seed))
        assert torch.equal(model.model.embed_tokens.weight, again.model.embed_tokens.weight) == same


def test_the_demo_as_it_comes_runs_its_configuration_and_not_a_part_of_it() -> None:
    given = make_parser().parse_args([])
    changes = ppo_changes(Path("model"), seed=given.seed, gpus=given.gpus, steps=given.steps)
    assert [change.partition("=")[0] for change in changes] == ["seed", "actor.path"]
    assert "exp_ctrl.total_train_steps=7" in ppo_changes(Path("model"), seed=1, gpus=1, steps=7)


def test_the_demo_empties_only_a_folder_that_it_made(tmp_path: Path) -> None:
    mine = tmp_path / "project" / "data" / "mine.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    with pytest.raises(DemoError, match="is not empty and was not made by the demo"):
        empty(tmp_path / "project")
    assert mine.read_text() == "years of work"
    output = tmp_path / "runs" / "demo"
    for _ in range(2):
        empty(output)
        assert [path.name for path in output.iterdir()] == [MARKER], "the second time what the first left is gone"
        (output / "data").mkdir()
    (tmp_path / "bare").mkdir()
    empty(tmp_path / "bare")


@pytest.mark.parametrize(("experiment", "name"), [("sft", "demo-sft"), ("ppo-math", "demo-ppo")])
def test_the_demos_configurations_pass_every_check(files: DemoFiles, experiment: str, name: str, monkeypatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_DEMO", str(files.model.parent))
    config = ROOT / "examples" / "configs" / f"{name}.yaml"
    assert quickstart.main([experiment, "--config", str(config), "--dry-run"]) == 0


@pytest.mark.parametrize("first", range(7))
def test_the_warm_up_ends_at_the_first_checkpoint_that_reaches_the_target(first: int) -> None:
    folders = [Path(str(i)) for i in range(7)]
    values = [0.1 + 0.01 * i if i < first else 0.4 + 0.01 * i for i in range(7)]
    assert first_at_least(folders, 0.35, lambda f: values[int(f.name)]) == (folders[first], values[first])


def plot_command(tmp_path: Path, *rows: dict[str, float]) -> subprocess.CompletedProcess[str]:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "tools.demo.plot", str(metrics), "--output", str(tmp_path / "curve.png")]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_curve_of_any_run_is_drawn_from_its_metrics(tmp_path: Path) -> None:
    evaluated = [{"step": 0, "eval/accuracy": 0.4}, {"step": 2, "eval/accuracy": 0.95}]
    done = plot_command(tmp_path, *evaluated, {"step": 1, "task_reward": -0.2}, {"step": 2, "task_reward": 0.9})
    assert done.returncode == 0, done.stderr
    alone = (tmp_path / "curve.png").read_bytes()
    assert alone.startswith(b"\x89PNG")
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "metrics.jsonl").read_text().replace("0.95", "0.7"))
    draw_run(tmp_path / "both.png", tmp_path / "metrics.jsonl", title="", others=[other])
    assert (tmp_path / "both.png").read_bytes() != alone


def test_a_run_that_was_never_evaluated_is_no_picture(tmp_path: Path) -> None:
    done = plot_command(tmp_path, {"step": 1, "task_reward": -0.2})
    assert done.returncode == 2
    assert "1 steps and 0 evaluations; one of each is needed" in done.stderr
    assert not (tmp_path / "curve.png").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c_ends_the_demo_and_its_run(tmp_path: Path, to_all: bool) -> None:
    command = [sys.executable, "-m", "tools.demo", "--output", str(tmp_path / "demo")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as demo:
        try:
            next(line for line in demo.stdout if line.startswith("$ python -m core.quickstart sft"))
            while not any(tmp_path.glob("demo/logs/*/demo-sft/*/.running")):
                assert demo.poll() is None, demo.stderr.read()
                time.sleep(0.05)
            (os.killpg if to_all else os.kill)(demo.pid, signal.SIGINT)
            shown = demo.communicate()[1]
            assert (demo.returncode, shown.splitlines()[-1]) == (130, "Interrupted.")
            assert "Traceback" not in shown
            with pytest.raises(ProcessLookupError):
                os.killpg(demo.pid, 0)
        finally:
            demo.kill()
