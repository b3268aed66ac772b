"""A run from a folder whose packages have the names of Slipstream's, through the installed console script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers.commands import PATIENCE_SECONDS
from helpers.runs import ppo

MARK = "from pathlib import Path\nPath({marker!r}).touch()\nraise RuntimeError('the package of the working folder')\n"


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--dry-run"], "Dry run: every check passed"),
        pytest.param([], "global step 1) finishes", marks=[pytest.mark.nightly, pytest.mark.slow]),
    ],
    ids=["dry run", "run"],
)
def test_no_process_of_a_run_imports_packages_of_the_working_folder(assets, tmp_path, words, end) -> None:
    for name in ("core", "tools", "rollout", "mcore_adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(MARK.format(marker=str(tmp_path / f"{name} was imported")))
    (tmp_path / "judge.py").write_text("def score(prompt, text):\n    return float(len(text))\n")
    config = {
        **ppo(assets, reward={"function": "judge:score", "num_workers": 1}, exp_ctrl={"total_train_steps": 1}),
        "experiment_name": "test",
        "trial_name": "trial",
        "external_configs": {"cluster_config": {"fileroot": str(tmp_path / "root")}},
        "launch": {"threads_per_process": 1},
        "monitor": {"style": "areal"},
        "recover_mode": "disabled",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    script = Path(sys.executable).with_name("slipstream")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    done = subprocess.run(
        [script, "train", "--config", "config.yaml", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert not list(tmp_path.glob("* was imported")), done.stdout[-3000:]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert end in done.stdout
