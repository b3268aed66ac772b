"""Converting a checkpoint both ways, against reading and writing the same bytes with safetensors on the same disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools import convert
from tools.bench_cpu import Scene, alternate
from tools.bench_figure import Figure

_SHAPE = dict(
    model_type="llama", vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=1024,
)  # fmt: skip


def both_ways(scene: Scene) -> Iterator[Figure]:
    """MiB/s of a model of 0.9 GB in float32, checks left out; each side writes a new folder every time."""
    source, checkpoint = scene.folder / "convert-hf", scene.folder / "convert-megatron"
    num_bytes = write_random(source)
    run("--checkpoint_path", source, "--output_path", checkpoint, "--to-megatron")
    target = scene.folder / "convert-target"

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

    for name, arguments in (
        ("to_hugging_face", ("--checkpoint_path", checkpoint)),
        ("to_megatron", ("--checkpoint_path", source, "--to-megatron")),
    ):
        value, baseline = alternate(lambda arguments=arguments: rate_of(*arguments), plain)  # type: ignore[misc]
        yield Figure(name=f"convert.{name}", value=value, unit="MiB/s", baseline=baseline, target=">= 0.7x")


def run(*arguments: object) -> None:
    status = convert.main([str(argument) for argument in arguments])
    assert status == 0, f"convert {arguments} ended with {status}"


def write_random(folder: Path) -> int:
    """A folder of random weights of _SHAPE; its size in bytes."""
    from mcore_adapter.families import hf_shapes
    from mcore_adapter.hf_config import parse_config
    from mcore_adapter.safetensors_folder import ShardWriter
    from mcore_adapter.weights import tensor_specs, write_config

    config = parse_config(_SHAPE)
    folder.mkdir()
    write_config(folder, config, dtype=torch.float32, is_critic=False)
    specs = tensor_specs(hf_shapes(config, is_critic=False), torch.float32)
    writer = ShardWriter(folder, specs)
    for name, spec in specs.items():
        writer.add(name, torch.rand(spec.shape))
    writer.finish()
    return sum(spec.nbytes for spec in specs.values())
