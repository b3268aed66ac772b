"""Slipstream in Jupyter: cells run in a kernel, which has an event loop and no file that defines the functions."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from helpers.config_inputs import write_run
from helpers.source import ROOT
from rollout.rewards.pool import RewardPool
from rollout.types import Prompt

nbformat = pytest.importorskip("nbformat", reason="of the extra dev: pip install nbclient nbformat ipykernel")
nbclient = pytest.importorskip("nbclient", reason="of the extra dev: pip install nbclient nbformat ipykernel")
pytest.importorskip("ipykernel", reason="of the extra dev: pip install nbclient nbformat ipykernel")

REWARD = """
import slipstream
bonus = 0.25

def graded(prompt, text):
    return bonus + (text in prompt.answers)
"""
TRAINING = """
files = slipstream.make_demo_data("demo", seed=1)
steps = []
run = slipstream.train({
    "experiment_name": "notebook", "actor.path": str(files.model), "dataset.path": str(files.train),
    "dataset.max_prompt_len": 8, "dataset.train_bs_n_seqs": 4, "group_size": 2, "ppo.gen.max_new_tokens": 4,
    "ppo.ppo_n_minibatches": 1, "exp_ctrl.total_train_steps": 2, "algorithm": "grpo", "reward.function": graded,
    "external_configs.cluster_config.fileroot": "runs",
}, on_step=steps.append)
print("ROWS", len(run.metrics()), len(steps), "SAMPLE", run.samples()[-1].reward >= 0.25, "MODEL", run.model.is_dir())
"""


def run_cells(folder: Path, monkeypatch: pytest.MonkeyPatch, *cells: str, timeout: int) -> str:
    """Run a notebook in `folder`; return what its last cell prints."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    context = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=context).execute()
    return "".join(output.get("text", "") for output in notebook.cells[-1].outputs)


def test_a_reward_of_a_cell_reaches_the_processes_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = f"""config = slipstream.load_config({str(write_run(tmp_path))!r}, **{{"reward.function": graded}})
print(config.reward.function)"""
    spec = run_cells(tmp_path, monkeypatch, REWARD, check, timeout=60).strip()

    async def score() -> list[float]:
        prompt = Prompt(
            query_id="q", index=0, task="t", text="2+2=", token_ids=np.array([1], np.int32), solutions=("4",)
        )
        async with RewardPool(spec, num_workers=1) as pool:
            return await pool.score_many(prompt, ["4", "5"])

    assert asyncio.run(score()) == [1.25, 0.25]


@pytest.mark.nightly
def test_a_notebook_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run_cells(tmp_path, monkeypatch, REWARD, TRAINING, timeout=600)
    assert "ROWS 2 2 SAMPLE True MODEL True" in told
