"""Files and commands under the names that the tutorial of AReaL uses, and the images."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from core.checks.rules import load_config
from core.placement import resolve_allocation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("size", "gpus", "nodes"), [("1.5B", 8, 1), ("1.5B", 32, 4), ("1.5B", 128, 16), ("7B", 32, 4), ("7B", 128, 16)]
)
def test_the_five_recipes_of_the_tutorial_use_all_their_gpus(size: str, gpus: int, nodes: int, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    path = ROOT / "examples" / "configs" / f"{size}-distill" / f"ppo-{size}-distill-gpus-{gpus}.yaml"
    config = load_config("ppo-math", path).config
    allocation = resolve_allocation(config)
    assert (config.experiment_name, config.n_nodes) == (path.stem, nodes)
    assert len(allocation.gpu_slots) == gpus == nodes * config.n_gpus_per_node
    assert config.actor.path.endswith(f"DeepSeek-R1-Distill-Qwen-{size}")
    assert (config.dataset.train_bs_n_seqs, config.group_size) == (512, 16)


def test_the_evaluation_script_has_the_options_of_the_tutorial(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p).resolve() != ROOT])
    options = ["--model_path", str(tmp_path / "no-model"), "--output_path", "out", "--data_names", "math_500,aime24"]
    monkeypatch.setattr(sys, "argv", ["eval_and_aggregate.py", *options, "--max_gen_tokens", "32768"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "evaluation" / "eval_and_aggregate.py"), run_name="__main__")
    assert end.value.code == 2 and f"--model_path {tmp_path}/no-model: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_an_image_installs_what_the_project_pins(name: str) -> None:
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.partition(" ")[2] for line in text.splitlines() if line.startswith("RUN ")]
    project = (ROOT / "pyproject.toml").read_text()
    pins = [word for step in steps for word in shlex.split(step) if re.fullmatch(r"torch[<>=].*", word)]
    assert pins and all(f'"{pin}"' in project for pin in pins)
    (extras,) = re.findall(r"-e '\.\[([\w,]+)\]'", text)
    assert all(f"\n{extra} = [" in project for extra in extras.split(","))
    copied = [line.split()[1] for line in text.splitlines() if line.startswith("COPY ")]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert "python -m core.quickstart --help" in steps[-1]
