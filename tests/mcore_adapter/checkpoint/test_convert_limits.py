"""tools/convert.py on a model much larger than what it may hold: memory, and what an interruption leaves."""

import errno
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers.saved_models import assert_same_bytes, tensors_of
from mcore_adapter.hf.safetensors_folder import ShardWriter, replacing_folder
from mcore_adapter.hf.weights import tensor_specs, write_config
from model_specs.families import parse_config
from model_specs.tensors import hf_shapes

ROOT = Path(__file__).resolve().parents[3]
LARGEST = 4096 * 1024 * 4
BUFFER = 32 << 20
SHAPE = dict(
    model_type="llama",
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=6,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
# Everything is imported and has run once before the first measurement, which is of memory that is there on purpose.
# Each step waits to be asked for.
CHILD = """
import contextlib
import sys
from tools import convert
small, source, there, back = sys.argv[1:]
def run(*arguments):
    with contextlib.redirect_stdout(sys.stderr):
        assert convert.main(arguments) == 0, arguments
def step():
    print("ready", flush=True)
    sys.stdin.readline()
run("--checkpoint_path", small, "--output_path", there + "-small", "--to-megatron")
run("--checkpoint_path", there + "-small", "--output_path", back + "-small", "--check")
step()
held = bytearray(b"x") * (64 << 20)
step()
del held
step()
run("--checkpoint_path", source, "--output_path", there, "--to-megatron", "--check")
step()
run("--checkpoint_path", there, "--output_path", back, "--check")
step()
run("--checkpoint_path", source, "--output_path", there + "-bf16", "--to-megatron", "--layout=d1m2p1", "--dtype=bf16")
step()
run("--checkpoint_path", there + "-bf16", "--output_path", back + "-fp32", "--dtype=fp32")
step()
"""
STEPS = (None, None, ".there.*", ".back.*", ".there-bf16.*", ".back-fp32.*")
"""Of each step of the child the folder in which it writes."""


def own_memory(pid: int) -> int:
    """Bytes that a process holds itself, without the pages of files that it has mapped for reading; 0: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.split("RssAnon:")[1].split()[0]) * 1024 if "RssAnon:" in status else 0


def write_random(folder: Path, shape: dict[str, object]) -> Path:
    config = parse_config(shape)
    folder.mkdir()
    write_config(folder, config, dtype=torch.float32, is_critic=False)
    specs = tensor_specs(hf_shapes(config, is_critic=False), torch.float32)
    writer = ShardWriter(folder, specs, max_shard_bytes=100_000_000)
    for name, spec in specs.items():
        writer.add(name, torch.rand(spec.shape))
    writer.finish()
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("large") / "hf", SHAPE)


@pytest.mark.nightly
def test_memory_is_at_most_twice_the_largest_tensor_and_a_buffer(large: Path, tmp_path: Path) -> None:
    allowance = 2 * LARGEST + BUFFER
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > 4 * allowance
    small = write_random(tmp_path / "small", {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64})
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, small, large, tmp_path / "there", tmp_path / "back"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        before, grown = own_memory(process.pid), []
        for folder in STEPS:
            process.stdin.write("go\n")
            process.stdin.flush()
            peak = at_work = 0
            while not select.select([process.stdout], [], [], 0.001)[0]:
                peak = max(peak, own_memory(process.pid))
                at_work += folder is not None and any(tmp_path.glob(folder))
            assert process.stdout.readline() == "ready\n", f"{folder}: the child has ended"
            peak = max(peak, own_memory(process.pid))
            assert at_work or folder is None, f"{folder}: never seen while it was written"
            grown.append(peak - before)
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert grown[0] > 60 << 20, "memory that is held is seen"
    for folder, growth in zip(STEPS[2:], grown[2:], strict=True):
        assert growth <= allowance, f"{folder}: {growth / 2**20:.0f} MiB"
    tensors = tensors_of(large)
    assert_same_bytes(tensors, tensors_of(tmp_path / "back"))
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    assert_same_bytes(rounded, tensors_of(tmp_path / "back-fp32"))


@pytest.mark.parametrize("failing", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()], ids=["busy", "Ctrl-C"])
@pytest.mark.parametrize(("rename", "is_done"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_folder_is_replaced_or_stays_whatever_happens_between_the_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: BaseException, rename: int, is_done: bool
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    real, calls = Path.rename, []

    def fails_once(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) != rename:
            return real(self, target)
        if is_done:
            real(self, target)
        raise failing

    monkeypatch.setattr(Path, "rename", fails_once)
    with pytest.raises(type(failing)), replacing_folder(tmp_path / "out") as folder:
        (folder / "new").touch()
    expected = "out/new" if (rename, is_done) == (2, True) else "out/old"
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["out", expected]


@pytest.mark.nightly
def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(large: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools/convert.py", "--checkpoint_path", large, "--output_path", tmp_path / "out"]
    process = subprocess.Popen([*command, "--to-megatron"], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".out.*/*.distcp")):
            assert process.poll() is None and time.monotonic() < deadline, "it should be writing by now"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("**/metadata.json"))
