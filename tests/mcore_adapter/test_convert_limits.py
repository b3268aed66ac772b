"""tools/convert.py on a model much larger than what it may hold: memory, and what an interruption leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_weights import assert_same_bytes, tensors_of

from mcore_adapter.families import hf_shapes
from mcore_adapter.hf_config import parse_config
from mcore_adapter.safetensors_folder import ShardWriter
from mcore_adapter.weights import tensor_specs, write_config

ROOT = Path(__file__).resolve().parents[2]
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
# Says when everything is imported and has run once; then converts both ways.
CHILD = """
import sys
from tools import convert
small, source, there, back = sys.argv[1:]
def run(*arguments):
    assert convert.main(arguments) == 0, arguments
run("--checkpoint_path", small, "--output_path", there + "-small", "--to-megatron")
run("--checkpoint_path", there + "-small", "--output_path", back + "-small", "--check")
print("ready", flush=True)
sys.stdin.readline()
run("--checkpoint_path", source, "--output_path", there, "--to-megatron", "--check")
run("--checkpoint_path", there, "--output_path", back, "--check")
"""


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
        before = peak = own_memory(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, own_memory(process.pid))
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert LARGEST < peak - before <= allowance, f"{(peak - before) / 2**20:.0f} MiB"
    assert_same_bytes(tensors_of(large), tensors_of(tmp_path / "back"))


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(large: Path, tmp_path: Path) -> None:
    command = [sys.executable, "tools/convert.py", "--checkpoint_path", large, "--output_path", tmp_path / "out"]
    process = subprocess.Popen([*command, "--to-megatron"], cwd=ROOT)
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
