"""A tiny model, tokenizer and data set, and a way to run the real command line on them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Assets:
    model: Path
    prompts: Path
    pairs: Path

    def with_model(self, config: Any, folder: Path) -> Path:
        """A new folder with the tokenizer of `model`, and random weights as `config` says."""
        import torch
        from transformers import AutoModelForCausalLM

        shutil.copytree(self.model, folder)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """Model of two layers over single characters; sums of two digits as prompts, and the same with answers."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("assets")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    sums = [(a, b) for a in range(8) for b in range(5)]
    rows = [
        {"prompt": f"{a}+{b}=", "task": "math", "query_id": f"{a}{b}", "solutions": [f"\\boxed{{{a + b}}}"]}
        for a, b in sums
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return Assets(model=folder / "model", prompts=folder / "prompts.jsonl", pairs=folder / "pairs.jsonl")


class Command:
    """`python -m core.quickstart` in a process of its own; everything it started is known by its process group tree."""

    def __init__(self, experiment: str, config: dict, folder: Path) -> None:
        self.root = folder / "root"
        config = {
            "experiment_name": "test",
            "trial_name": "trial",
            "external_configs": {"cluster_config": {"fileroot": str(self.root)}},
            "launch": {"threads_per_process": 1},
            **config,
        }
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self._output = open(folder / "output.log", "a+")  # noqa: SIM115 (closed in stop())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "core.quickstart", experiment, "--config", str(path)],
            cwd=ROOT, env=environment, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._family: dict[int, psutil.Process] = {}

    @property
    def logs(self) -> Path:
        return next((self.root / "logs").glob("*/test/trial"))

    @property
    def checkpoints(self) -> Path:
        return next((self.root / "checkpoints").glob("*/test/trial"))

    def output(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def remember_family(self) -> set[int]:
        """Process ids of everything that descends from the command now; kept for `survivors`."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._family |= {p.pid: p for p in found}
        return set(self._family)

    def survivors(self, timeout: float) -> list[psutil.Process]:
        """What of the family is still there after at most `timeout` seconds."""
        _, alive = psutil.wait_procs(list(self._family.values()), timeout=timeout)
        return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Return when the output holds `text`; fails with the output if the command ends or the time is over."""
        import time

        deadline = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.output()[-4000:]}"
            time.sleep(0.05)

    def finish(self, timeout: float = 180) -> int:
        """Exit code."""
        return self.process.wait(timeout)

    def stop(self) -> None:
        """Leave nothing behind, whatever the test did."""
        self.remember_family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for p in self._family.values():
            if p.is_running():
                p.kill()
        self._output.close()


@pytest.fixture
def run_command(tmp_path: Path) -> Iterator:
    """start(experiment, config) -> Command; several share one fileroot, as restarts of one trial do."""
    started: list[Command] = []

    def start(experiment: str, config: dict) -> Command:
        started.append(Command(experiment, config, tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.stop()
