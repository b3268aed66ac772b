"""What a rank of the measurement `plan` runs: updates of an engine, their memory and their time.

Everything is imported at the top: a process does so while the case before its own is measured.
"""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch

from mcore_adapter.device import get_device
from mcore_adapter.engine import MegatronEngine
from mcore_adapter.parallel import destroy_parallel, initialize_parallel
from mcore_adapter.settings import EngineConfig, EngineModel, OptimizerConfig
from tools.bench.gpu.cases import Case
from tools.bench.gpu.shapes import PLANNED
from tools.bench.gpu.trainer import become_rank, ppo_update, random_batch, seconds_of

_WARM_UP, _ROUNDS = 1, 3


def measure(rank: int, case: Case, folder: str, on_gpu: bool) -> dict[str, float]:
    """Run updates on a rank, whose GPU is the first that this process sees. Return bytes at the peak of the last one,
    before it, reserved and of this process in host memory, and the seconds of an update."""
    os.environ["LOCAL_RANK"] = "0"
    world = case.layout.world_size
    if on_gpu:
        become_rank(num_ranks=world)
    device = get_device("auto" if on_gpu else "cpu")
    with device.activate():
        parallel = initialize_parallel(
            case.layout, rank=rank, world_size=world, init_method=f"file://{folder}/store", device=device, seed=1
        )
        adam = OptimizerConfig(lr=1e-6, warmup_steps_proportion=0.0, offload=case.offload)
        config = EngineConfig(
            init_from_scratch=True, bf16=True, optimizer=adam, grad_reduce_in_fp32=case.fp32_gradients
        )
        config = config.model_copy(update={"gradient_checkpointing": case.recompute})  # also those of "auto" alone
        model = EngineModel(config=config, path=folder, is_critic=case.is_critic, total_updates=100)
        engine = MegatronEngine(model, parallel=parallel, device=device)
        step = _update(case, engine)
        seconds = [seconds_of(device, step) for _ in range(_WARM_UP)]  # kernels, moments
        for _ in range(_ROUNDS):
            device.forget_peak()
            held = device.memory_stats()["allocated_gib"] * 2**30
            seconds.append(seconds_of(device, step))
        module: Any = torch.get_device_module(device.torch_device)
        row = {
            "peak": device.memory_stats()["peak_gib"] * 2**30,
            "held": held,
            "reserved": float(module.max_memory_reserved()) if on_gpu else 0.0,
            "seconds": statistics.median(seconds[_WARM_UP:]),
            "host": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        destroy_parallel()
    return row


def _update(case: Case, engine: MegatronEngine) -> Callable[[], object]:
    """Return what runs an update on the sequences of a case."""
    batch = random_batch(PLANNED[case.model]["vocab_size"], case.lengths)

    def of_values(output: Any, fields: Any, sequences: Any) -> Any:
        return (output.values.square() * fields["token_weights"]).sum(), {}

    if case.is_critic:
        return lambda: engine.train_step(batch, of_values, max_tokens_per_mb=case.tokens)
    return lambda: ppo_update(engine, batch, case.tokens)
