"""Rows of tensors from file to file: inside the kernel, and where it does not copy."""

import os
from pathlib import Path

import pytest
import torch

from mcore_adapter.hf.safetensors_folder import FileRows, write_rows

CONTENT = torch.arange(5 << 20, dtype=torch.float32).view(-1, 1024)
BEGIN = 4097


@pytest.fixture
def stored(tmp_path: Path) -> FileRows:
    """20 MiB, more than a buffer holds, at an odd place of a file."""
    path = tmp_path / "source"
    path.write_bytes(b"x" * BEGIN + CONTENT.numpy().tobytes())
    return FileRows(CONTENT, path, BEGIN)


@pytest.fixture(params=["same file system", "another one"])
def target(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "same file system":
        folder = tmp_path
    else:
        folder = Path("/dev/shm")
        if not folder.is_dir() or os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("needs /dev/shm beside another file system")
    path = folder / f"file-rows-{os.getpid()}"
    with open(path, "w+b", buffering=0) as file:
        yield file
    path.unlink()


@pytest.mark.parametrize(
    ("view", "dtype"),
    [
        (CONTENT, torch.float32),
        (CONTENT[7:4000], torch.float32),
        (CONTENT[:, 3:5], torch.float32),
        (CONTENT[7:4000], torch.bfloat16),
    ],
    ids=["all", "rows", "columns", "converted"],
)
def test_any_part_arrives_where_it_should_and_nothing_else_is_touched(stored, target, view, dtype) -> None:
    target.write(b"header")
    assert write_rows(target.fileno(), 13, stored.part(view), dtype) == view.numel() * dtype.itemsize
    assert target.tell() == 6, "the position stays"
    written = os.pread(target.fileno(), 1 << 30, 0)
    assert written[:13] == b"header" + bytes(7)
    assert written[13:] == view.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def test_a_source_that_has_become_shorter_is_named(stored: FileRows, target) -> None:
    os.truncate(stored.path, 10 << 20)
    with pytest.raises(OSError, match=f"{stored.path}: ends at byte {10 << 20}"):
        write_rows(target.fileno(), 0, stored, torch.float32)
