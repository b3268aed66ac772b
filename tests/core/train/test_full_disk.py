"""A disk that fills up while a recover checkpoint is written: a real, small file system in a mount namespace."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]

IN_A_SMALL_FILE_SYSTEM = """
mount -t tmpfs -o size=1300k none "$1"
"$2" -m core.quickstart ppo-math --config "$3" monitor.style=areal
echo "exit code $?"
find "$1/recover" -name '*globalstep*' -printf 'left %f\\n'
umount -l "$1"
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not can_mount(), reason="this machine lets no user mount a file system of his own (unshare -Urm)")
def test_a_full_disk_is_one_clear_error_and_older_checkpoints_stay_valid(assets, tmp_path: Path) -> None:
    fileroot = tmp_path / "small"
    fileroot.mkdir()
    config = {
        "experiment_name": "test",
        "trial_name": "full",
        "allocation_mode": "mock.d1m1p1+d1m1p1",
        "n_gpus_per_node": 2,
        "external_configs": {"cluster_config": {"fileroot": str(fileroot)}},
        "launch": {"threads_per_process": 1},
        "monitor": {"tensorboard": False},
        "recover_mode": "auto",
        "recover_retries": 0,
        "group_size": 2,
        "actor": {"path": str(assets.model), "optimizer": {"lr": 1e-3}},
        "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": 8, "max_prompt_len": 8},
        "ppo": {"gen": {"max_new_tokens": 4}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "exp_ctrl": {"total_train_epochs": 20, "ckpt_freq_steps": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    result = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", IN_A_SMALL_FILE_SYSTEM, "sh", str(fileroot), sys.executable, str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert "exit code 1" in output, output[-4000:]
    # The rows of finished steps are written while a checkpoint is: either of the two finds no room first.
    full = r"the (recover checkpoint|row) of step \d+ could not be written to .*\(0\.\d MiB left"
    assert re.search(full, output), output[-4000:]
    assert "Traceback" not in output
    left = re.findall(r"^left (\S+)$", output, re.MULTILINE)
    assert left and all(re.fullmatch(r"globalstep\d+", name) for name in left), "no half-written checkpoint"
    dumped = output.count("Dumped recover info to file.")
    assert max(int(name.removeprefix("globalstep")) for name in left) == 1 + dumped
