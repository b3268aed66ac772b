"""Megatron checkpoint <-> Hugging Face folder, in one process on the CPU.

    python -m tools.convert --checkpoint_path CHECKPOINT --output_path HF_FOLDER [--check]
    python -m tools.convert --checkpoint_path HF_FOLDER --output_path CHECKPOINT --to-megatron [--check]

A checkpoint carries its config.json and tokenizer, so nothing else is needed; any layout may have written it. The
output folder appears only when complete. --check converts back and compares every tensor byte for byte.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mcore_adapter.device import Device
    from mcore_adapter.model import ModelChunk
    from mcore_adapter.parallel import ParallelState


def main(argv: Sequence[str] | None = None) -> int:
    """0: converted, and equal if checked; 1: a check found differences; 2: nothing written, the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.convert", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint_path", type=Path, required=True, help="folder to convert")
    parser.add_argument("--output_path", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--to-megatron", action="store_true", help="from Hugging Face to Megatron")
    parser.add_argument("--check", action="store_true", help="convert back and compare byte for byte")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        _check_paths(args.checkpoint_path, args.output_path, to_megatron=args.to_megatron)
        with _one_rank() as rank:
            convert = rank.to_megatron if args.to_megatron else rank.to_hugging_face
            different = convert(args.checkpoint_path, args.output_path, check=args.check)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output_path}")
    if different:
        print(f"error: {len(different)} tensors differ after the way back: {', '.join(different[:5])}", file=sys.stderr)
        return 1
    if args.check:
        print("checked: the way back is byte-equal")
    return 0


def _check_paths(source: Path, target: Path, *, to_megatron: bool) -> None:
    if not source.is_dir():
        raise FileNotFoundError(f"--checkpoint_path={source}: no such folder")
    is_checkpoint = (source / "metadata.json").is_file()
    if to_megatron and is_checkpoint:
        raise ValueError(f"--checkpoint_path={source} is a Megatron checkpoint already; leave out --to-megatron")
    if not to_megatron and not is_checkpoint:
        raise ValueError(
            f"--checkpoint_path={source} is not a complete Megatron checkpoint (no metadata.json); "
            "for a Hugging Face folder add --to-megatron"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"--output_path={target} exists and is not empty; name a new folder")


class _Rank:
    """The world of one trainer rank that holds whole models."""

    def __init__(self, parallel: ParallelState, device: Device) -> None:
        self._parallel, self._device = parallel, device

    def to_hugging_face(self, source: Path, target: Path, *, check: bool) -> list[str]:
        """Write `target`; with `check`, the names of parameters that read back differently."""
        from mcore_adapter.weights import load_hf_weights, save_hf

        model = self._from_checkpoint(source)
        save_hf(model, target, parallel=self._parallel, tokenizer_from=source)
        if not check:
            return []
        again = self._build(target, model[0].config.params_dtype)
        load_hf_weights(again, target, parallel=self._parallel)
        return [
            name
            for (name, first), (_, second) in zip(model[0].named_parameters(), again[0].named_parameters(), strict=True)
            if not _same_bytes(first, second)
        ]

    def to_megatron(self, source: Path, target: Path, *, check: bool) -> list[str]:
        """Write `target`; with `check`, the names of tensors that come back differently."""
        from mcore_adapter.checkpoint import save_checkpoint
        from mcore_adapter.safetensors_folder import SafetensorsFolder, replacing_folder
        from mcore_adapter.weights import iter_hf_weights, load_hf_weights

        with SafetensorsFolder(source) as original:
            dtype = original.dtype()
        model = self._build(source, dtype)
        load_hf_weights(model, source, parallel=self._parallel)
        with replacing_folder(target) as folder:
            save_checkpoint(folder, model, None, parallel=self._parallel, tokenizer_from=source)
        if not check:
            return []
        again = self._from_checkpoint(target)
        with SafetensorsFolder(source) as original:
            return [
                name
                for bucket in iter_hf_weights(again, parallel=self._parallel)
                for name, tensor in bucket.items()
                if not _same_bytes(original.read(name, 0, 0, tensor.size(0)), tensor)
            ]

    def _from_checkpoint(self, folder: Path) -> list[ModelChunk]:
        import torch

        from mcore_adapter.checkpoint import load_checkpoint
        from mcore_adapter.hf_config import read_config

        model = self._build(folder, getattr(torch, read_config(folder).dtype or "float32"))
        load_checkpoint(folder, model, None, parallel=self._parallel)
        return model

    def _build(self, folder: Path, dtype: torch.dtype) -> list[ModelChunk]:
        """The model that `folder` describes, its weights not filled in."""
        from mcore_adapter.hf_config import read_config
        from mcore_adapter.model import build_model

        config = read_config(folder)
        return build_model(
            config, parallel=self._parallel, device=self._device, dtype=dtype, is_critic=config.is_critic
        )


@contextmanager
def _one_rank() -> Iterator[_Rank]:
    from allocation import ParallelLayout
    from mcore_adapter.device import get_device
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel

    device = get_device("cpu")
    with tempfile.TemporaryDirectory() as store:
        parallel = initialize_parallel(
            ParallelLayout(), rank=0, world_size=1, init_method=f"file://{store}/store", device=device, seed=0
        )
        try:
            with device.activate():
                yield _Rank(parallel, device)
        finally:
            destroy_parallel()


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(t.detach().contiguous().view(torch.uint8) for t in (first, second)))


if __name__ == "__main__":
    sys.exit(main())
