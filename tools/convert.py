"""Megatron checkpoint <-> Hugging Face folder, tensor by tensor, in one process on the CPU.

    python -m tools.convert --checkpoint_path CHECKPOINT --output_path HF_FOLDER [--dtype bf16] [--check]
    python -m tools.convert --checkpoint_path HF_FOLDER --output_path CHECKPOINT --to-megatron [--layout d1m2p2]

CHECKPOINT is an engine's folder (any layout may have written it) or a recover checkpoint, of which the only engine or
the actor is taken (--engine: another one). It carries its config.json and tokenizer, so nothing else is needed. A
recover checkpoint that differs from its checksums is refused. The output folder appears only when complete. With
--check it is read again before, and appears only if every tensor is equal byte for byte.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from allocation import ParallelLayout
from allocation.resolve import parse_layout
from core.runs.checkpoints import MANIFEST, MARKER, DamagedError, verify
from model_specs.families import read_config
from model_specs.model_folder import tokenizer_files
from model_specs.tensors import CORRECTION_BIAS
from tools.arguments import model, parser_of, refused

if TYPE_CHECKING:
    from mcore_adapter.parallel import ParallelState

ENGINE_NAMES = "actor or critic of a PPO run, default of an SFT or DPO run"
"""What users can choose from, for help texts."""
CRITIC = "critic"
_PREFERRED = "actor"


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_METADATA_BYTES = 1 << 20
_METADATA_BYTES_PER_CHUNK = 2 << 10
"""What there is beside tensors and tokenizer, roughly."""


def engine_folders(checkpoint: Path) -> dict[str, Path]:
    """Return name -> folder of the engines of a recover checkpoint; empty for any other folder."""
    return {path.parent.name: path.parent for path in sorted(checkpoint.glob("*/metadata.json"))}


def default_engine(engines: Mapping[str, Path]) -> str | None:
    """Return the only engine, or the actor of several. None: there is no engine, or no actor among several."""
    if len(engines) == 1:
        return next(iter(engines))
    return _PREFERRED if _PREFERRED in engines else None


class _DifferentError(Exception):
    """What was written reads back differently."""


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; return 0: converted, and equal if checked; 1: a check found differences; 2: another error. The reason is
    on stderr, and nothing is written or replaced then."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    try:
        source = _source(args.checkpoint_path, args.engine, to_megatron=args.to_megatron)
        _check_target(args.output_path, (args.checkpoint_path, source), overwrite=args.overwrite)
        if not args.to_megatron:
            _check_seal(source)
        _convert(args, source)
    except _DifferentError as error:
        return refused(error, code=1)
    except (OSError, ValueError) as error:
        return refused(error)
    print(f"wrote {args.output_path}")
    if args.check:
        print("checked: converting back is byte-equal")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.convert", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--checkpoint_path", type=model(), required=True, help="folder to convert")
    parser.add_argument("--output_path", type=Path, required=True, help="folder to write")
    parser.add_argument("--to-megatron", action="store_true", help="from Hugging Face to Megatron")
    parser.add_argument("--layout", help="with --to-megatron: cut as ranks of this layout would, as in d1m2p2e2")
    parser.add_argument("--dtype", choices=[*_DTYPES, *_DTYPES.values()], help="of the output; default: as the input")
    parser.add_argument("--engine", help=f"of a recover checkpoint: {ENGINE_NAMES}; default: its only engine, or actor")
    parser.add_argument("--check", action="store_true", help="compare the output byte for byte before it appears")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder of an earlier conversion")
    return parser


def _source(path: Path, engine: str | None, *, to_megatron: bool) -> Path:
    """Return the folder to read: of a recover checkpoint (or a folder of several, then the newest) that of one engine,
    by default the only one or the actor."""
    if not path.is_dir():
        raise FileNotFoundError(f"--checkpoint_path={path}: no such folder")
    is_checkpoint = (path / "metadata.json").is_file()
    if to_megatron:
        if is_checkpoint:
            raise ValueError(f"--checkpoint_path={path} is a Megatron checkpoint already; leave out --to-megatron")
        return path
    if is_checkpoint:
        return path
    steps = [p for p in path.glob("globalstep*") if p.is_dir() and p.name.removeprefix("globalstep").isdecimal()]
    newest = max(steps, key=lambda p: int(p.name.removeprefix("globalstep")), default=path)
    engines = engine_folders(newest)
    name = default_engine(engines) if engine is None else engine
    if name in engines:
        return engines[name]
    if engines:
        given = "several engines and no actor" if engine is None else f"no engine {engine}"
        raise ValueError(f"{newest} has {given}: {', '.join(engines)}; give --engine {' or '.join(engines)}")
    if any(path.glob("iter_*/mp_rank_*")) or any(path.glob("mp_rank_*")):
        raise ValueError(
            f"--checkpoint_path={path} is a checkpoint of Megatron-LM (mp_rank_*), which this command does not read; "
            "convert it to a Hugging Face folder with the project that wrote it"
        )
    raise ValueError(
        f"--checkpoint_path={path} is not a complete Megatron checkpoint (no metadata.json); "
        "for a Hugging Face folder add --to-megatron"
    )


def _check_seal(source: Path) -> None:
    """Raise ValueError unless the engine's files are those with which its recover checkpoint was sealed. A checkpoint
    outside of one has no seal."""
    step = source.absolute().parent
    if not any((step / name).exists() for name in (MANIFEST, MARKER)):
        return
    try:
        verify(step, inside=source.absolute().name)
    except DamagedError as error:
        raise ValueError(f"{step} is damaged: {error}; take another step's checkpoint") from error


def _check_target(target: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    """Raise OSError unless the folder may be written, and everything in it deleted without losing what cannot be
    recreated: sources, a user's files, a trainer's checkpoint."""
    if target.is_file() or target.is_symlink():
        raise FileExistsError(f"--output_path={target} exists and is no folder; name a new folder")
    place = target.resolve()
    for source in (source.resolve() for source in sources):
        if place.is_relative_to(source) or source.is_relative_to(place):
            raise FileExistsError(
                f"--output_path={target} must not be, hold or lie in the folder that is converted, {source}; "
                "name a folder next to it"
            )
    if not target.exists():
        return
    if any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"--output_path={target} exists and is not empty; name a new folder or add --overwrite")

    from mcore_adapter.hf.safetensors_folder import check_replaceable

    try:
        check_replaceable(place)
    except OSError as error:
        raise OSError(f"--output_path={target}: {error}") from error
    if not any(target.iterdir()):
        return

    from mcore_adapter.checkpoint.streaming import why_no_conversion

    reason = why_no_conversion(target)
    if reason is not None:
        raise FileExistsError(
            f"--overwrite replaces only what an earlier conversion wrote, and --output_path={target} is not that: "
            f"{reason}; name a new folder, or move what is in it"
        )


def _check_space(target: Path, num_bytes: int) -> None:
    place = next(p for p in target.resolve().parents if p.exists())  # it is written beside the target
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise OSError(
            f"--output_path={target} needs {num_bytes / 2**30:.2f} GiB, and {place} has {free / 2**30:.2f} GiB free"
        )


def _convert(args: argparse.Namespace, source: Path) -> None:
    """Write the output. Raises _DifferentError if a check finds that it differs."""
    from mcore_adapter.checkpoint.streaming import (
        ModelFile,
        checkpoint_to_hf,
        different_tensors,
        hf_to_checkpoint,
        model_dtype,
        num_chunks,
        open_checkpoint,
        open_folder,
    )
    from mcore_adapter.hf.safetensors_folder import SafetensorsFolder, replacing_folder

    if args.layout and not args.to_megatron:
        raise ValueError(f"--layout={args.layout} goes with --to-megatron; a checkpoint of any layout can be read")
    layout = parse_layout(args.layout) if args.layout else ParallelLayout()
    config = read_config(source)
    if args.to_megatron:
        with SafetensorsFolder(source) as folder:
            stored = folder.dtype(without=CORRECTION_BIAS)
        dtype = model_dtype(config, _DTYPES.get(args.dtype, args.dtype)) if args.dtype else stored
    else:
        dtype = model_dtype(config, _DTYPES.get(args.dtype, args.dtype))
    with _one_rank() as parallel:
        model = ModelFile(config, dtype, parallel=parallel)
    chunks = num_chunks(model, layout) if args.to_megatron else len(model.specs)
    small = (
        _METADATA_BYTES
        + chunks * _METADATA_BYTES_PER_CHUNK
        + sum(path.stat().st_size for path in tokenizer_files(source))
    )
    _check_space(args.output_path, model.num_bytes + small)
    with replacing_folder(args.output_path) as target:
        with _progress("converting", model.num_bytes) as progress:
            if args.to_megatron:
                hf_to_checkpoint(source, target, model, layout, progress)
            else:
                checkpoint_to_hf(source, target, model, progress)
        if not args.check:
            return
        checkpoint, hf = (target, source) if args.to_megatron else (source, target)
        with _progress("checking", model.num_bytes) as progress, open_folder(hf, model) as folder:
            different = different_tensors(open_checkpoint(checkpoint, model), folder, model, dtype, progress)
        if different:
            raise _DifferentError(
                f"{len(different)} tensors differ after converting back, output deleted: {', '.join(different[:5])}"
            )


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda written: bar.advance(task, written)


@contextmanager
def _one_rank() -> Iterator[ParallelState]:
    """Open a world of one rank, in which Megatron computes where tensors lie."""
    from mcore_adapter.device import get_device
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel

    device = get_device("cpu")
    with tempfile.TemporaryDirectory() as store:
        parallel = initialize_parallel(
            ParallelLayout(),
            rank=0,
            world_size=1,
            init_method=f"file://{os.path.join(store, 'store')}",
            device=device,
            seed=0,
        )
        try:
            with device.activate():
                yield parallel
        finally:
            destroy_parallel()


if __name__ == "__main__":
    sys.exit(main())
