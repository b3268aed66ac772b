"""Converting a checkpoint both ways, against reading and writing the same bytes with safetensors on the same disk.

Both sides run in one process in which everything is imported, read files that lie in the page cache because they were
written a moment ago, write a new folder that is not there yet, and leave it to the kernel when that reaches the disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mcore_adapter.hf.safetensors_folder import ShardWriter
from model_specs.hf_config import parse_config
from model_specs.tensors import hf_shapes
from tools import convert
from tools.bench import Figure
from tools.bench.cpu import ROUNDS, Scene, alternate

_SHAPE = dict(
    model_type="llama",
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=1024,
)


def both_ways(scene: Scene) -> Iterator[Figure]:
    """Yield MiB/s of converting a model of 0.9 GB in float32, without checks; each side writes a new folder every
    time."""
    yield from compare(scene.folder, _SHAPE, torch.float32, name="convert")


def compare(
    folder: Path, shape: Mapping[str, object], dtype: torch.dtype, *, name: str, rounds: int = ROUNDS
) -> Iterator[Figure]:
    """Convert random weights of config.json `shape` into a checkpoint, and that one into a Hugging Face folder; leave
    the weights in `folder`/convert-hf and the checkpoint in `folder`/convert-megatron."""
    source, checkpoint, target = (folder / f"convert-{part}" for part in ("hf", "megatron", "target"))
    num_bytes = write_random(source, shape, dtype)
    run("--checkpoint_path", source, "--output_path", checkpoint, "--to-megatron")

    def rate_of(*arguments: object) -> float:
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        run(*arguments, "--output_path", target)
        return num_bytes / 2**20 / (time.perf_counter() - start)

    def plain() -> float:
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        target.mkdir()
        for file in source.glob("*.safetensors"):
            save_file(load_file(file), target / file.name, metadata={"format": "pt"})
        return num_bytes / 2**20 / (time.perf_counter() - start)

    for way, arguments in (
        ("to_hugging_face", ("--checkpoint_path", checkpoint)),
        ("to_megatron", ("--checkpoint_path", source, "--to-megatron")),
    ):
        value, baseline = alternate(partial(rate_of, *arguments), plain, rounds)
        yield Figure(name=f"{name}.{way}", value=value, unit="MiB/s", baseline=baseline, target=">= 0.7x")
    shutil.rmtree(target)


def run(*arguments: object) -> None:
    status = convert.main([str(argument) for argument in arguments])
    assert status == 0, f"convert {arguments} ended with {status}"


def write_random(folder: Path, shape: Mapping[str, object], dtype: torch.dtype) -> int:
    """Return a folder of random weights; its size in bytes."""
    from mcore_adapter.hf.exporting import tensor_specs, write_config

    config = parse_config(shape)
    folder.mkdir()
    write_config(folder, config, dtype=dtype, is_critic=False)
    specs = tensor_specs(hf_shapes(config, is_critic=False), dtype)
    writer = ShardWriter(folder, specs)
    for name, spec in specs.items():
        writer.add(name, (torch.randn(spec.shape) / 50).to(dtype))
    writer.finish()
    return sum(spec.nbytes for spec in specs.values())
