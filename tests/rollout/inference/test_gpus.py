"""The GPUs of a run, and other processes that use them, with a double of nvidia-smi."""

import os
import stat
import subprocess
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from rollout.inference.gpus import Gpu, GpuUser, check_gpus, device_names, query_gpus

CARD = Gpu(index=0, name="H", used_mib=30_000, total_mib=141_000, users=(GpuUser(pid=77, name="python3", mib=29_000),))


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put an nvidia-smi first on the path: one shell command prints the GPUs, one the processes that use them."""

    def show(cards: str, users: str) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f'#!/bin/sh\ncase "$1" in *query-gpu*) {cards};; *) {users};; esac\n')
        script.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return show


def test_memory_in_the_hands_of_others_is_an_error_with_names(show: Callable[[str, str], None]) -> None:
    living = os.getppid()
    show('echo "0, GPU-aa, H, 30000, 141000"', f'echo "GPU-aa, {living}, python3, 29000"')
    with pytest.raises(
        ValueError, match=rf"GPU 0: 30000 of its 141000 MiB .* process {living} \(python3\) holds 29000 MiB"
    ):
        check_gpus([0])
    show('echo "0, GPU-aa, H, 9000, 141000"', ":")
    with pytest.raises(ValueError, match="processes outside this container"):
        check_gpus([0])


def test_memory_that_stays_in_use_is_an_error_in_the_end(show, tmp_path, monkeypatch) -> None:
    """Of a living process at once; of one that has ended when the patience is over. Other GPUs do not matter."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    cards = (f"{i}, GPU-{i}{i}, H, {mib}, 141000" for i, mib in enumerate((4, 3000, 3000)))
    show(
        "; ".join((f"echo >> {tmp_path}/looks", *(f'echo "{card}"' for card in cards))),
        f'echo "GPU-11, {ended.pid}, [Not Found], 2996"; echo "GPU-22, {os.getppid()}, sh, 2996"',
    )

    def looks(*indices: int) -> int:
        (tmp_path / "looks").write_text("")
        with pytest.raises(ValueError, match="are in use by other processes") if any(indices) else nullcontext():
            check_gpus(indices)
        return len((tmp_path / "looks").read_text())

    assert (looks(0), looks(2)) == (1, 1)
    monkeypatch.setattr("rollout.inference.gpus._PATIENCE_SECONDS", 0.3)
    assert looks(1) > 1


@pytest.mark.parametrize("reaped", [True, False])
def test_memory_of_a_process_that_has_ended_is_waited_for(show, tmp_path, reaped) -> None:
    """A GPU whose memory is held by a zombie, or by a process that is gone; free at the third look."""
    ended = subprocess.Popen(["true"])
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    if reaped:
        ended.wait()
    looks = tmp_path / "looks"
    free = f"[ $(wc -l < {looks}) -ge 3 ]"
    show(
        f'echo >> {looks}; held=4; {free} || held=3000; echo "0, GPU-aa, NVIDIA H, $held, 141000"',
        f'{free} || echo "GPU-aa, {ended.pid}, [No data], 2996"',
    )
    check_gpus([0])
    ended.wait()


def test_missing_gpus_are_an_error_with_a_way_out(show: Callable[[str, str], None]) -> None:
    show(":", ":")
    with pytest.raises(ValueError, match=r"write embedded\. instead of sglang\."):
        check_gpus([0])
    show('echo "0, GPU-aa, H, 4, 141000"', ":")
    with pytest.raises(ValueError, match="requires GPU 3, this machine has 1"):
        check_gpus([0, 3])


def test_nvidia_smi_is_read_as_it_prints(tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        textwrap.dedent("""\
            #!/bin/sh
            case "$1" in
              *query-gpu*) echo "0, GPU-aa, NVIDIA H, 30000, 141000, 93"; echo "1, GPU-bb, NVIDIA H, 4, 141000, [N/A]";;
              *) echo "GPU-aa, 77, python3, 29000"; echo "GPU-aa, 78, [Not Found], [N/A]";;
            esac
            """)
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    first, second = query_gpus(str(script))
    assert (first.used_mib, first.users) == (30_000, (CARD.users[0], GpuUser(pid=78, name="[Not Found]", mib=0)))
    assert (second.index, second.name, second.users) == (1, "NVIDIA H", ())
    assert (first.use, second.use) == (0.93, None)
    assert query_gpus(str(tmp_path / "absent")) == []


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("3,1", ["card3", "card1"]),
        ("GPU-c2", ["card2"]),
        ("0, 7,1", ["card0"]),
        ("", []),
        ("-1,0", []),
        ("1,GPU-c0", ["card1", "card0"]),
    ],
)
def test_the_gpus_of_a_run_are_those_that_cuda_shows_it(tmp_path, monkeypatch, caplog, visible, names) -> None:
    script = tmp_path / "nvidia-smi"
    cards = "\n".join(f"{i}, GPU-c{i}-0, card{i}, 4, 141000" for i in range(4))
    script.write_text(f"#!/bin/sh\ncase \"$1\" in *query-gpu*) printf '{cards}\\n';; esac\n")
    script.chmod(0o755)
    monkeypatch.delenv("SLIPSTREAM_GPUS", raising=False)
    assert device_names([0, 2]) == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = query_gpus(str(script))
    assert [(gpu.index, gpu.name) for gpu in found] == list(enumerate(names))
    for unusable in ("MIG-aa", "9"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", unusable)
        assert query_gpus(str(script)) == []
        assert f"CUDA_VISIBLE_DEVICES={unusable}: {unusable} is no number or UUID of a whole GPU" in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=f"requires GPU 5, CUDA_VISIBLE_DEVICES={visible} contains"):
        device_names([5])
    if found:
        assert device_names([len(found) - 1]) == visible.split(",")[len(found) - 1].strip()
        monkeypatch.setenv("SLIPSTREAM_GPUS", visible)  # a process of the run, which sees one of them itself
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        assert [gpu.name for gpu in query_gpus(str(script))] == names
