"""Where the tests find a SGLang: an interpreter named by the environment; and a tiny model to serve.

SLIPSTREAM_SGLANG_PYTHON is an interpreter that imports sglang. SLIPSTREAM_SGLANG_ENV is the prefix of an environment
without a GPU: PREFIX/venv/bin/python, PREFIX/site for PYTHONPATH and PREFIX/lib for LD_LIBRARY_PATH.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from rollout.inference.backend import BackendSettings, GeneratorConfig, Interrupt
from rollout.inference.sglang.server import BATCHED_PREFILLS, SGLangServer

PREFIX = os.environ.get("SLIPSTREAM_SGLANG_ENV")
PYTHON = os.environ.get("SLIPSTREAM_SGLANG_PYTHON") or (PREFIX and f"{PREFIX}/venv/bin/python")
WHY_NOT = "no SGLang here: set SLIPSTREAM_SGLANG_PYTHON to an interpreter that has it, or SLIPSTREAM_SGLANG_ENV"

TWO_RANKS = {"SGLANG_NCCL_SO_PATH": "none", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Environment variables of a server with two tensor-parallel ranks: no NCCL, and a core for each."""
TWO_STAGES = {"SGLANG_NCCL_SO_PATH": "none"}

VOCAB = 512
END = VOCAB - 1


def environment() -> dict[str, str]:
    """Environment variables of a server process."""
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if PREFIX is None:
        return common
    return common | {
        "PYTHONPATH": f"{PREFIX}/site",
        "LD_LIBRARY_PATH": f"{PREFIX}/lib",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PATH": f"{PREFIX}/venv/bin{os.pathsep}{os.environ['PATH']}",
    }


def write_interpreter(path: Path) -> Path:
    """Write a program that starts the interpreter under PREFIX with PREFIX/site and PREFIX/lib on its paths."""
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={PREFIX}/site LD_LIBRARY_PATH={PREFIX}/lib SGLANG_USE_CPU_ENGINE=1 "
        f'OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PATH={PREFIX}/venv/bin:$PATH\nexec {PREFIX}/venv/bin/python "$@"\n'
    )
    path.chmod(0o755)
    return path


KEYS = ("max_running", "interrupt", "weight_format", "flags", "python")
"""Keys of a generator's section that a server uses."""


def replica(**values: Any) -> BackendSettings:
    """Settings of a server; keys of the generators' section may be among them."""
    config = GeneratorConfig(**{name: values.pop(name) for name in KEYS if name in values})
    return BackendSettings(config=config, **values)


def set_interrupt(server: SGLangServer, interrupt: Interrupt) -> None:
    """What pauses of the generators on this server do from now on."""
    config = server.settings.config.model_copy(update={"interrupt": interrupt})
    server.settings = replace(server.settings, config=config)


def settings_for(model: Path, log_file: Path, **changes: Any) -> BackendSettings:
    """A server on the CPU, which admits prompts as one on a GPU does."""
    values: dict[str, Any] = {
        "name": "generator-0",
        "model_path": str(model),
        "log_file": log_file,
        "gpus": (),
        "dtype": "float32",
        "max_running": 32,
        "flags": {"max_total_tokens": 16384, "sleep_on_idle": True, **BATCHED_PREFILLS},
        "python": PYTHON,
        "env": environment(),
        "startup_timeout_seconds": 1800.0,  # on a busy host
    }
    return replica(**values | changes)


@contextmanager
def running_server(settings: BackendSettings) -> Iterator[SGLangServer]:
    """A server, which leaves no process behind."""
    server = SGLangServer(settings)
    others = set(psutil.Process().children(recursive=True))
    asyncio.run(server.start())
    family = set(psutil.Process().children(recursive=True)) - others
    yield server
    server.stop()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, "the server left processes behind"


class Models:
    """One architecture, a version of random weights for every number; version 0 is in `folder`."""

    def __init__(self, folder: Path, *, num_heads: int = 4, head_dim: int = 32, positions: int = 2048) -> None:
        from transformers import Qwen2Config

        torch.set_num_threads(1)
        self.folder = folder
        self._config = Qwen2Config(
            vocab_size=VOCAB, hidden_size=num_heads * head_dim, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=num_heads, num_key_value_heads=num_heads // 2, max_position_embeddings=positions,
            tie_word_embeddings=True, eos_token_id=END, bos_token_id=None,
        )  # fmt: skip
        self._models: dict[tuple[int, torch.dtype], Any] = {}
        self[0].save_pretrained(folder)

    def __getitem__(self, version: int) -> Any:
        return self.model(version, torch.float32)

    def model(self, version: int, dtype: torch.dtype) -> Any:
        """The same numbers in every format."""
        from transformers import Qwen2ForCausalLM

        if (version, dtype) not in self._models:
            torch.manual_seed(version)
            model = Qwen2ForCausalLM(self._config).float().eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
                parameter.data = parameter.data.bfloat16().to(dtype)
            self._models[version, dtype] = model
        return self._models[version, dtype]

    def weights(self, version: int) -> dict[str, Tensor]:
        """Hugging Face names to tensors, tied ones once."""
        return {name: p.detach() for name, p in self[version].named_parameters()}

    def buckets(self, version: int, tensors_per_bucket: int = 7) -> Iterator[dict[str, Tensor]]:
        items = list(self.weights(version).items())
        for i in range(0, len(items), tensors_per_bucket):
            yield dict(items[i : i + tensors_per_bucket])

    @torch.no_grad()
    def logits(
        self, version: int, prompt: list[int], tokens: np.ndarray, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """float32[len(tokens), vocabulary] before each token, everything computed by one version in `dtype`."""
        ids = torch.tensor([[*prompt, *tokens.tolist()]])
        return self.model(version, dtype)(ids).logits[0, len(prompt) - 1 : -1].float()

    def logprobs(
        self,
        version: int,
        prompt: list[int],
        tokens: np.ndarray,
        *,
        forbidden: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> np.ndarray:
        """Log-probability of each token, everything computed by one version in `dtype`."""
        return chosen(self.logits(version, prompt, tokens, dtype=dtype), tokens, forbidden)

    @torch.no_grad()
    def logprobs_on_old_cache(
        self,
        versions: np.ndarray,
        prompt: list[int],
        tokens: np.ndarray,
        *,
        forbidden: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> np.ndarray:
        """The same when token i comes from a forward pass of versions[i], over the keys and values that the passes
        before it left in the cache."""
        from transformers import DynamicCache

        cache, fed, rows = DynamicCache(), prompt, []
        for version, token in zip(versions.tolist(), tokens.tolist(), strict=True):
            model = self.model(version, dtype)
            rows.append(model(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1].float())
            fed = [token]
        return chosen(torch.stack(rows), tokens, forbidden)


def chosen(logits: Tensor, tokens: np.ndarray, forbidden: tuple[int, ...] = ()) -> np.ndarray:
    logits[:, list(forbidden)] = -torch.inf
    return logits.log_softmax(-1)[range(len(tokens)), tokens.tolist()].numpy()
