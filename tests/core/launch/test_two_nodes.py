"""Two nodes on one machine, in network namespaces of their own: Ray with its token, a run over both, one node lost."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
STEPS = 6
START_SECONDS = 300
RUN_SECONDS = 900


class Nodes:
    """Two network namespaces joined by a cable, each with an address; the file system is what they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"slip{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.213.77.1", "10.213.77.2"]
        (folder / "home" / ".ray").mkdir(parents=True)
        (folder / "home" / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.environment = kept | {
            "HOME": str(folder / "home"),
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
        }

    def connect(self) -> None:
        """Raises subprocess.CalledProcessError where namespaces are not allowed."""
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"ve{os.getpid()}{side}" for side in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")

    def command(self, node: int, *words: str, **environment: str) -> dict[str, Any]:
        """What subprocess needs to run `words` on a node."""
        args = ["ip", "netns", "exec", self.names[node], *words]
        return {"args": args, "env": self.environment | environment, "cwd": ROOT}

    def start_ray(self, node: int) -> None:
        """As docs/cluster.md has it."""
        ray = [str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={self.addresses[node]}"]
        ray += ["--num-cpus=1", "--object-store-memory=200000000", "--disable-usage-stats"]
        if node == 0:
            command = self.command(node, *ray, "--head", "--port=6379", "--include-dashboard=false")
        else:
            command = self.command(node, *ray, f"--address={self.addresses[0]}:6379", RAY_AUTH_MODE="token")
        for _ in range(3):  # on a busy machine Ray gives up after 30 s
            done = subprocess.run(**command, capture_output=True, text=True, timeout=START_SECONDS)
            if done.returncode == 0:
                return
        raise AssertionError(done.stdout + done.stderr)

    def processes(self, node: int) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.names[node]], capture_output=True, text=True).stdout
        return [psutil.Process(int(pid)) for pid in listed.split() if psutil.pid_exists(int(pid))]

    def lose(self, node: int) -> None:
        """Kill everything that runs on a node."""
        for process in self.processes(node):
            process.kill()

    def close(self) -> None:
        for node, name in enumerate(self.names):
            self.lose(node)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command `ip` (iproute2)")
    # Not tmp_path: sockets of Ray must have short paths.
    folder = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))
    two = Nodes(folder)
    try:
        try:
            two.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield two
    finally:
        two.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(what: Callable[[], object], seconds: float, failure: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, failure()
        time.sleep(0.2)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_over_two_nodes_survives_the_loss_of_one(nodes: Nodes, assets: Any, tmp_path: Path) -> None:
    config = {
        "experiment_name": "test", "trial_name": "trial", "n_nodes": 2, "n_gpus_per_node": 2,
        "allocation_mode": "embedded.d1m1p1+d3m1p1", "recover_mode": "auto", "group_size": 2,
        "external_configs": {"cluster_config": {"fileroot": str(tmp_path / "root")}, "envs": {"FOO": "bar"}},
        "launch": {"threads_per_process": 1, "startup_timeout_seconds": START_SECONDS},
        "monitor": {"tensorboard": False},
        "actor": {"path": str(assets.model), "optimizer": {"lr": 1e-3}},
        "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": 6, "max_prompt_len": 8},
        "ppo": {"gen": {"max_new_tokens": 24}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "reward": {"function": "tools.bench.workload:coin_reward", "num_workers": 1},
        "exp_ctrl": {"total_train_steps": STEPS, "ckpt_freq_steps": 1},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    nodes.start_ray(0)
    nodes.start_ray(1)
    output = tmp_path / "output.log"
    words = [
        sys.executable,
        "-m",
        "core.quickstart",
        "ppo-math",
        "--config",
        str(tmp_path / "config.yaml"),
        "monitor.style=areal",
    ]
    servers = nodes.command(0, *words, "--preflight", "allocation_mode=sglang.d2m1p1+d2m1p1")
    refused = subprocess.run(**servers, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "its nodes have 0 + 0 GPUs, the run needs 2 + 2" in refused.stderr
    with output.open("w") as log:
        run = subprocess.Popen(**nodes.command(0, *words), stdout=log, stderr=subprocess.STDOUT)

    def steps() -> list[int]:
        found = list((tmp_path / "root").glob("logs/*/test/trial/metrics.jsonl"))
        return [json.loads(line)["step"] for line in found[0].read_text().splitlines()] if found else []

    def said() -> str:
        return output.read_text()[-6000:]

    wait_until(lambda: len(steps()) >= 3 or run.poll() is not None, RUN_SECONDS, said)
    assert run.poll() is None, said()
    ranks = [p for p in nodes.processes(1) if p.name().startswith("ray::TrainerRan")]
    assert ranks, "the second node has one or two of the three ranks, as Ray places them"
    assert all(p.environ().get("FOO") == "bar" for p in ranks), "external_configs.envs reach a joined cluster"
    nodes.lose(1)
    wait_until(lambda: "Attempt 1 failed" in output.read_text() or run.poll() is not None, RUN_SECONDS, said)
    nodes.start_ray(1)
    run.wait(RUN_SECONDS)
    assert run.returncode == 0, said()
    assert steps() == list(range(1, STEPS + 1))
    assert f"Joining the Ray cluster at {nodes.addresses[0]}:6379" in output.read_text()
