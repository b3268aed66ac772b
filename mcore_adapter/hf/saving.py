"""A model written as a Hugging Face folder: weights, config.json and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from mcore_adapter.hf.exporting import iter_hf_weights
from mcore_adapter.hf.loading import Shapes, unwrap
from mcore_adapter.hf.safetensors_folder import ShardWriter, TensorSpec, copy_tokenizer, dtype_of, replacing_folder
from mcore_adapter.models.gpt import ModelChunk
from mcore_adapter.parallel import ParallelState
from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from model_specs.tensors import hf_shapes
from model_specs.weight_files import WeightsError


def save_hf(
    chunks: Sequence[nn.Module],
    path: str | Path,
    *,
    parallel: ParallelState,
    tokenizer_from: str | Path | None = None,
    device: torch.device | None = None,
) -> None:
    """Write the model as a Hugging Face folder that transformers loads; collective, global rank 0 writes.

    `path` appears, or is replaced, only when complete. tokenizer_from: folder whose tokenizer files and
    generation_config.json are copied. `device`: see run_export(). Raises WeightsError on every rank if writing fails.
    """
    model = unwrap(chunks)[0]
    buckets = iter_hf_weights(chunks, parallel=parallel, device=device)
    error: Exception | None = None
    if parallel.rank == 0:
        try:
            _write(buckets, model, Path(path), tokenizer_from)
        except (OSError, SafetensorError) as caught:
            error = caught
    for _ in buckets:  # the other ranks' part; after an error, what rank 0 has not received yet
        pass
    outcome = [str(error) if error else None]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise WeightsError(f"{path}: the model could not be written: {outcome[0]}") from error


def _write(
    buckets: Iterator[dict[str, Tensor]], model: ModelChunk, path: Path, tokenizer_from: str | Path | None
) -> None:
    dtype = model.config.params_dtype
    shapes = hf_shapes(model.model_config, is_critic=model.is_critic)
    with replacing_folder(path) as folder:
        write_config(folder, model.model_config, dtype=dtype, is_critic=model.is_critic)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, folder)
        writer = ShardWriter(folder, tensor_specs(shapes, dtype))
        try:
            for bucket in buckets:
                for name, tensor in bucket.items():
                    writer.add(name, tensor.cpu())
            writer.finish()
        finally:
            writer.close()


def tensor_specs(shapes: Shapes, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Return the shape and dtype in which each tensor of a model of this dtype is written."""
    return {name: TensorSpec(dtype_of(name, dtype), shape) for name, shape in shapes.items()}


def write_config(folder: Path, config: ModelConfig, *, dtype: torch.dtype, is_critic: bool) -> None:
    """Write the config.json of weights of this dtype."""
    content = hf_config_json(config, dtype=dtype, is_critic=is_critic)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def hf_config_json(config: ModelConfig, *, dtype: torch.dtype, is_critic: bool) -> dict[str, object]:
    """Return the content of config.json for these weights: the one that was read, with the architecture and dtype of
    now."""
    content = dict(config.raw)
    content["dtype" if "dtype" in content else "torch_dtype"] = str(dtype).removeprefix("torch.")
    architecture = FAMILIES[config.model_type].architecture
    if is_critic:
        architecture = architecture.replace("ForCausalLM", "ForSequenceClassification")
        content.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    content["architectures"] = [architecture]
    return content
