"""What of Qwen3-30B-A3B these GPUs train, the configuration of such a run, and the memory that a rank needs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from allocation import Allocation, ParallelLayout, parse
from model_specs.config import ModelConfig
from rollout.inference.gpus import query_gpus
from rollout.inference.sglang.arguments import is_installed
from tools.bench.gpu import Scene
from tools.bench.gpu_experts import SLICE, TRIED
from tools.bench.gpu_memory import WidthsScene
from tools.bench.gpu_runs import common_config
from tools.demo.data import make_tokenizer

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "ppo-qwen3-30b-a3b-8gpu.yaml"
HOST_BYTES = 450e9
"""Memory of the host that a run with all layers takes. Masters and moments have 12 bytes for each of the 30.5e9
parameters, 366.4 GB or 91.6 GB a rank, in 22 slabs of 4 GiB (mcore_adapter.optimizer_state): 378 GB of all four ranks.
About 70 GB are for processes."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")
_RUNNING_PER_RANK, _PROMPTS_PER_RANK = 192, 32


@dataclass(frozen=True, kw_only=True)
class Size:
    """Layout and depth of a run."""

    allocation: str
    num_gpus: int
    layers: int
    offload: bool = False
    """Masters and moments of the optimizer are in host memory."""

    @property
    def placed(self) -> Allocation:
        return parse(self.allocation, n_nodes=1, n_gpus_per_node=self.num_gpus)

    @property
    def num_generator_gpus(self) -> int:
        """They come first."""
        return self.placed.generator.layout.world_size


WHOLE = Size(allocation="sglang.d2m2p1+(attn:d4m1p1|ffn:d1m1p1e4)", num_gpus=8, layers=48, offload=True)
WITHOUT_OFFLOAD = Size(allocation=WHOLE.allocation, num_gpus=8, layers=36)
FOUR = Size(allocation="sglang.d2m1p1+(attn:d2m1p1|ffn:d1m1p1e2)", num_gpus=4, layers=12)
TWO = Size(allocation="sglang.d1m1p1+d1m1p1", num_gpus=2, layers=6)
SHARED = Size(allocation="sglang.d2m1p1|(attn:d2m1p1|ffn:d1m1p1e2)", num_gpus=2, layers=6)
"""Servers and expert-parallel ranks in turns on the same GPUs."""
SHARED_FOUR = Size(allocation="sglang.d2m2p1|(attn:d4m1p1|ffn:d1m1p1e4)", num_gpus=4, layers=48, offload=True)
"""The same on four GPUs: all layers."""
TRIAL = Size(allocation=FOUR.allocation, num_gpus=4, layers=2)
"""Without GPUs."""


def size_for(num_gpus: int, host_bytes: float) -> Size:
    """Return the largest size for so many GPUs and so much host memory; TRIAL without GPUs."""
    if num_gpus == 0:
        return TRIAL
    if num_gpus >= WHOLE.num_gpus:
        return WHOLE if host_bytes >= HOST_BYTES else WITHOUT_OFFLOAD
    return FOUR if num_gpus >= FOUR.num_gpus else TWO


def shared_size_for(num_gpus: int, host_bytes: float) -> Size:
    """Return the same of servers and trainer in turns; TRIAL's layers without GPUs."""
    if num_gpus < SHARED_FOUR.num_gpus:
        return SHARED if num_gpus else replace(SHARED, layers=TRIAL.layers)
    fits = host_bytes >= HOST_BYTES
    return SHARED_FOUR if fits else replace(SHARED_FOUR, layers=WITHOUT_OFFLOAD.layers, offload=False)


def size_of_host(choose: Callable[[int, float], Size] = size_for) -> Size:
    """Return the largest size for this host."""
    host = float(psutil.virtual_memory().total)
    if _LIMIT.exists() and (text := _LIMIT.read_text().strip()).isdigit():
        host = min(host, float(text))
    return choose(len(query_gpus()), host)


def scene_of(scene: Scene, size: Size, trial: str) -> WidthsScene:
    """Return the scene of one run: a folder with the model's config.json and a tokenizer."""
    folder = scene.folder / trial
    folder.mkdir(exist_ok=True)
    widths = {**(SLICE if query_gpus() else TRIED), "num_hidden_layers": size.layers}
    own = WidthsScene(folder=folder, sglang_python=scene.sglang_python, raw=widths)
    make_tokenizer().save_pretrained(own.model)
    return own


def has_servers(scene: Scene) -> bool:
    """Return whether SGLang samples; without it, a trial has mock generators, which report no experts."""
    return bool(query_gpus() or scene.sglang_python or is_installed())


def configuration(scene: WidthsScene, size: Size) -> dict[str, Any]:
    """Return what differs from RECIPE: random weights, lognormal lengths, and the size."""
    ranks, servers = size.placed.trainer.layout.world_size, size.placed.generator.layout.dp
    config = {
        **common_config(scene),
        "allocation_mode": size.allocation,
        "n_gpus_per_node": size.num_gpus,
        "actor.optimizer.offload": size.offload,
        "ppo.ppo_n_minibatches": 2,  # with one, log-probabilities of the policy before the update are not computed
        "workflow.type": "tools.bench.workflow:LognormalLengths",
        "dataset.train_bs_n_seqs": _PROMPTS_PER_RANK * ranks,
        "generator.max_running": _RUNNING_PER_RANK * ranks // servers,
        "push.bucket_mib": 4096,  # as in the recipe
    }
    if query_gpus():
        # Of servers with tensor parallelism: FlashInfer compiles it at the first start on a host, for 200 s of H200s'.
        return {**config, "actor.sglang": "{enforce_disable_flashinfer_allreduce_fusion: true}"}
    config |= {"ppo.gen.max_new_tokens": 64, "generator.max_running": 32, "dataset.train_bs_n_seqs": 4}
    config |= {"actor.gradient_checkpointing": False, "launch.threads_per_process": 1}
    if has_servers(scene):
        flags = "{device: cpu, max_total_tokens: 8192, sleep_on_idle: true, decode_log_interval: 8}"
        return {**config, "actor.sglang": flags}
    mock = size.allocation.replace("sglang.", "mock.")
    config |= {"allocation_mode": mock, "actor.moe_routing_replay": False, "generator.mock_seconds_per_token": 0.002}
    return {k: v for k, v in config.items() if k not in ("actor.sglang", "generator.sglang_python")}


def held_bytes(config: ModelConfig, layout: ParallelLayout, *, offload: bool) -> dict[str, float]:
    """Return the bytes that a trainer rank holds on its GPU in an update, without activations: bfloat16 weights, fp32
    gradients, fp32 masters and moments. All layers have experts; attention is split over data-parallel ranks alone."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None and layout.tp == layout.pp == 1, "of Qwen3-30B-A3B, as in size_for()"
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    norms = 2 * hidden + 2 * config.head_dim
    tables = (1 if config.tied else 2) * config.vocab_size * hidden
    dense = config.num_layers * (attention + norms + moe.num_experts * hidden) + tables + hidden
    experts = config.num_layers * moe.num_experts * 3 * hidden * moe.intermediate_size / layout.ep
    sharded = experts / layout.expert_dp + dense / (layout.dp * layout.cp)
    return {
        "weights": 2 * (experts + dense),
        "gradients": 4 * (experts + dense),
        "optimizer": 0.0 if offload else 12 * sharded,
    }
