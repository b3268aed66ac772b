"""Rows of tensors that files hold, on their way into other files.

Bytes that stay as they are go from file to file inside the kernel: no page of the source is mapped or read for them,
which makes it cheaper than load_file() and save_file(). Others are converted a slab at a time.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
    by_kernel, buffer = True, memoryview(b"")
    while done < count:
        if by_kernel:
            copied = _copied_by_kernel(source, begin + done, target, offset + done, min(count - done, _COPIED_AT_ONCE))
            if not copied:
                by_kernel, buffer = False, memoryview(bytearray(min(count - done, _BUFFER_BYTES)))
                continue
        else:
            copied = os.preadv(source, [buffer[: count - done]], begin + done)
            write_all(target, offset + done, buffer[:copied])
        if not copied:
            raise OSError(f"{path}: ends at byte {begin + done}, in the middle of a tensor; it has been truncated")
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
