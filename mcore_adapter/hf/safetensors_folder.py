"""Reading a folder of safetensors slice by slice, and writing one; every error names its file.

Invariant: reading touches only the bytes of the requested slices; a folder written inside replacing_folder() is
complete or not there.

Bytes that stay as they are go from file to file inside the kernel: no page of the source is mapped or read for them,
which makes it cheaper than load_file() and save_file(). Others are converted a slab at a time.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_specs.model_folder import ModelFolderError, tokenizer_files
from model_specs.tensors import CORRECTION_BIAS
from model_specs.weight_files import INDEX_FILE, SINGLE_FILE, WeightsError, stored_tensors

_SLAB_ELEMENTS = 4 << 20  # converted and written at a time
_COPIED_AT_ONCE = 64 << 20  # between two looks for Ctrl-C
_BUFFER_BYTES = 4 << 20  # where the kernel does not copy between two file systems
_KERNEL_DOES_NOT = {
    errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF, errno.ETXTBSY,
}  # fmt: skip
"""Errors of file systems, older kernels and sandboxes that cannot copy; where it is an error all the same, reading and
writing meet it again."""


@dataclass(frozen=True)
class FileRows:
    """Elements of a file, mapped, not read."""

    tensor: Tensor
    path: Path
    begin: int | None
    """Byte of the file at which the first element lies and all others follow, row by row; None: they lie apart."""

    def part(self, view: Tensor) -> FileRows:
        """Return a view of these elements."""
        if self.begin is None or not view.is_contiguous():
            return FileRows(view, self.path, None)
        return FileRows(view, self.path, self.begin + view.data_ptr() - self.tensor.data_ptr())


def write_rows(file: int, offset: int, rows: FileRows | Tensor, dtype: torch.dtype) -> int:
    """Write the elements, row by row and as `dtype`, at byte `offset` of the descriptor `file`, whose position stays as
    it is; returns how many bytes these are. Raises OSError, also where the file that holds them has become shorter."""
    if isinstance(rows, FileRows) and rows.begin is not None and rows.tensor.dtype == dtype:
        with open(rows.path, "rb", buffering=0) as source:
            _copy(source.fileno(), rows.begin, file, offset, rows.tensor.nbytes, rows.path)
        return rows.tensor.nbytes
    tensor = rows.tensor if isinstance(rows, FileRows) else rows
    at = offset
    for part in tensor.contiguous().view(-1).split(_SLAB_ELEMENTS):
        at += write_all(file, at, memoryview(part.to(dtype).view(torch.uint8).numpy()))
    return at - offset


def write_all(file: int, offset: int, content: memoryview | bytes) -> int:
    """Call os.pwrite(), which may write less, until everything is written; return the number of bytes."""
    written = 0
    while written < len(content):
        written += os.pwrite(file, memoryview(content)[written:], offset + written)
    return written


def _copy(source: int, begin: int, target: int, offset: int, count: int, path: Path) -> None:
    done = 0
    while done < count:
        at, left = begin + done, count - done
        copied = _copied_by_kernel(source, at, target, offset + done, min(left, _COPIED_AT_ONCE))
        copied = copied or write_all(target, offset + done, os.pread(source, min(left, _BUFFER_BYTES), at))
        if not copied:
            raise OSError(f"{path}: ends at byte {at}, in the middle of a tensor; it has been truncated")
        done += copied


def _copied_by_kernel(source: int, begin: int, target: int, offset: int, count: int) -> int:
    """Return the number of bytes that the kernel copied. 0 means that it cannot copy here, or the end of the file,
    which some file systems also report where there is none. Raises OSError where copying failed."""
    try:
        return os.copy_file_range(source, target, count, begin, offset)
    except OSError as error:
        if error.errno not in _KERNEL_DOES_NOT:
            raise
        return 0


MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, by name; files are opened on first use and closed by close()."""

    def __init__(self, folder: str | Path) -> None:
        """Read the headers. Raises OSError, WeightsError."""
        self.folder = Path(folder)
        self.stored = stored_tensors(self.folder)
        self._files: dict[Path, safe_open] = {}

    def file_of(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self.stored[name].file

    def dtype(self, *, without: str) -> torch.dtype:
        """Return the one dtype of all tensors, those whose name ends in `without` left out. Raises WeightsError, with
        an example of each, where there are several."""
        found: dict[str, str] = {}
        for name, tensor in self.stored.items():
            if not name.endswith(without):
                found.setdefault(tensor.dtype, name)
        if len(found) != 1 or next(iter(found)) not in _DTYPES:
            listed = ", ".join(f"{dtype} ({self.file_of(name).name}: {name})" for dtype, name in found.items())
            raise WeightsError(
                f"{self.folder}: all tensors must be of one dtype out of {', '.join(_DTYPES)}; are {listed}"
            )
        return _DTYPES[next(iter(found))]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.stored[name].shape

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return rows (dim 0) or columns (dim 1) [start, stop) of tensor `name`. Raises WeightsError naming the
        file."""
        return self._whole(name).narrow(dim, start, stop - start)

    def rows(self, name: str, dim: int, start: int, stop: int) -> FileRows:
        """Return the same with their place in the file."""
        whole, stored = self._whole(name), self.stored[name]
        return FileRows(whole, stored.file, stored.begin).part(whole.narrow(dim, start, stop - start))

    def _whole(self, name: str) -> Tensor:
        path = self.file_of(name)
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            whole: Tensor = self._files[path].get_tensor(name)  # mapped, not copied
            return whole
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: cannot read {name}: {error}") from None

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()


def check_replaceable(target: str | Path) -> None:
    """Raise OSError where no other folder can take the place of `target`, or should not."""
    target = Path(target).resolve()
    if os.path.ismount(target):
        raise OSError(f"{target} is a mount point, which cannot be replaced; name a folder inside it")
    if Path.cwd().is_relative_to(target):
        raise OSError(f"{target} is or contains the current folder, which would be deleted; name a folder inside it")


@contextmanager
def replacing_folder(target: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that replaces it when the block ends without an error and is deleted
    otherwise: `target` is either unchanged or complete. Raises OSError at once where it cannot be replaced."""
    check_replaceable(target)
    target = Path(target).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")  # mkdtemp would make it private
    temporary.mkdir()
    try:
        yield temporary
        _take_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    old = aside / target.name
    try:
        target.rename(old)
        temporary.rename(target)
    finally:  # also after Ctrl-C between the two
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(aside)


@dataclass(frozen=True)
class TensorSpec:
    """Format and shape of a tensor that will be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """Writes tensors, in any order and each at once, into files of at most max_shard_bytes; several get an index.

    It keeps none of them: a header contains the location of each before the first one comes.
    """

    def __init__(
        self, folder: Path, specs: Mapping[str, TensorSpec], *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """specs: every tensor that will come, in the order in which files are filled."""
        self._folder, self._specs = folder, specs
        self._shards: list[list[str]] = [[]]
        filled = 0
        for name, spec in specs.items():
            if self._shards[-1] and filled + spec.nbytes > max_shard_bytes:
                self._shards.append([])
                filled = 0
            self._shards[-1].append(name)
            filled += spec.nbytes
        self._files: list[IO[bytes]] = []
        self._place: dict[str, tuple[IO[bytes], int]] = {}
        for shard in range(len(self._shards)):
            self._open(shard)

    def _open(self, shard: int) -> None:
        # Wide formats first: every tensor lies at a multiple of its element's size.
        names = sorted(self._shards[shard], key=lambda name: -self._specs[name].dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, offset = dict[str, int](), 0
        for name in names:
            spec = self._specs[name]
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            begins[name] = offset
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = open(self._folder / self._file_name(shard), "wb", buffering=0)  # noqa: SIM115  closed by close()
        self._files.append(file)
        write_all(file.fileno(), 0, len(text).to_bytes(8, "little") + text)
        for name in names:
            self._place[name] = file, 8 + len(text) + begins[name]

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, converted to the format announced for it."""
        assert tuple(tensor.shape) == self._specs[name].shape, f"{name} is {tuple(tensor.shape)}"
        self.add_rows(name, [tensor])

    def add_rows(self, name: str, pieces: Iterable[FileRows | Tensor]) -> None:
        """Add a tensor in consecutive pieces."""
        spec, written = self._specs[name], 0
        file, offset = self._place.pop(name)
        for piece in pieces:
            written += write_rows(file.fileno(), offset + written, piece, spec.dtype)
        assert written == spec.nbytes, f"{name} has {written} bytes, announced as {spec.shape} {spec.dtype}"

    def finish(self) -> None:
        assert not self._place, f"never written: {sorted(self._place)[:3]}"
        self.close()
        if len(self._shards) == 1:
            return
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in self._specs.values())},
            "weight_map": {name: self._file_name(i) for i, shard in enumerate(self._shards) for name in shard},
        }
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file_name(self, shard: int) -> str:
        if len(self._shards) == 1:
            return SINGLE_FILE
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy the tokenizer and generation settings that `source` has. Raises OSError."""
    try:
        found = tokenizer_files(source)
    except ModelFolderError as error:
        raise OSError(str(error)) from None
    for path in found:
        shutil.copyfile(path, target / path.name)


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the format in which a tensor of a model of `dtype` is written and sent."""
    return torch.float32 if name.endswith(CORRECTION_BIAS) else dtype
