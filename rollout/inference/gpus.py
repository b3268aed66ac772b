"""The GPUs of this machine that a run may use, and the processes that use them: read from nvidia-smi before anything
is started.

CUDA_VISIBLE_DEVICES selects the GPUs and their order (numbers as nvidia-smi gives them, or UUIDs). The processes of a
run, in which that variable means their own share, read it from ALLOWED instead.
"""

import itertools
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

logger = logging.getLogger(__name__)

ALLOWED = "SLIPSTREAM_GPUS"
"""Environment variable of a run's processes: the CUDA_VISIBLE_DEVICES that the run was started with, or "all"."""
BUSY_MIB = 2048
"""More memory than this in the hands of others, and a server would come up with a fraction of its cache or fail."""

_PATIENCE_SECONDS = 10.0
"""Time limit for the memory of processes that have ended; the 3 GB of a trainer rank took 0.3 s."""


@dataclass(frozen=True, kw_only=True)
class GpuUser:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    mib: int


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of this node."""

    index: int
    name: str
    used_mib: int
    total_mib: int
    use: float | None = None
    """Share of the last sample period in which a kernel ran. None: the driver does not report it."""
    users: tuple[GpuUser, ...]


def allowed_gpus() -> str:
    """Return the value of ALLOWED for the processes of a run."""
    return os.environ.get(ALLOWED) or os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def _names(allowed: str) -> list[str]:
    """Return the names that CUDA uses: it ignores the first invalid one, such as -1, and all after it."""
    names = [name.strip() for name in allowed.split(",")]
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def device_names(indices: Sequence[int], *, allowed: str | None = None) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a process on these GPUs of the run. Raises ValueError for one that it has not.
    `allowed`: instead of allowed_gpus()."""
    allowed = allowed_gpus() if allowed is None else allowed
    if allowed == "all":
        return ",".join(map(str, indices))
    names = _names(allowed)
    if max(indices) >= len(names):
        raise ValueError(
            f"allocation_mode requires GPU {max(indices)}, CUDA_VISIBLE_DEVICES={allowed} contains {len(names)} (from "
            "0); reduce n_gpus_per_node and the layout, or add GPUs to it"
        )
    return ",".join(names[index] for index in indices)


def query_gpus(nvidia_smi: str = "nvidia-smi") -> list[Gpu]:
    """Return the GPUs that this program may use; none when there is no driver."""
    found, allowed = _query_all(nvidia_smi), allowed_gpus()
    if allowed == "all":
        return [gpu for gpu, _ in found]
    chosen: list[Gpu] = []
    for name in _names(allowed) if found else ():
        gpu = next((gpu for gpu, uuid in found if name == str(gpu.index) or uuid.startswith(name)), None)
        if gpu is None:  # CUDA, too, sees nothing from the first unknown one on
            uuids = ", ".join(uuid for _, uuid in found)
            logger.warning("CUDA_VISIBLE_DEVICES=%s: %s is no number or UUID of a whole GPU (%s)", allowed, name, uuids)
            break
        chosen.append(replace(gpu, index=len(chosen)))
    return chosen


def _query_all(nvidia_smi: str) -> list[tuple[Gpu, str]]:
    """Return every GPU of this node with its UUID."""
    cards = _query(nvidia_smi, "--query-gpu=index,uuid,name,memory.used,memory.total,utilization.gpu")
    users: dict[str, list[GpuUser]] = {uuid: [] for _, uuid, *_ in cards}
    for uuid, pid, name, mib in _query(nvidia_smi, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if uuid in users and pid.isdigit():
            users[uuid].append(GpuUser(pid=int(pid), name=name, mib=_mib(mib)))
    found = []
    for index, uuid, name, used, total, *use in cards:
        sizes = {"used_mib": _mib(used), "total_mib": _mib(total)}
        found.append((Gpu(index=int(index), name=name, use=_share(*use), users=tuple(users[uuid]), **sizes), uuid))
    return found


def _share(percent: str = "") -> float | None:
    return int(percent) / 100 if percent.isdigit() else None  # [N/A] for a GPU in MIG mode


def _mib(text: str) -> int:
    return int(text) if text.isdigit() else 0  # [N/A] where a GPU does not report it


def _query(nvidia_smi: str, query: str) -> list[list[str]]:
    try:
        answer = subprocess.run(
            [nvidia_smi, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split(", ") for line in answer.stdout.splitlines() if line] if answer.returncode == 0 else []


def check_gpus(indices: Sequence[int]) -> None:
    """Raise ValueError when a GPU is missing, or other processes hold memory of it, with their names and sizes. Waits
    for the memory of processes that have just ended."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while busy := _busy(indices, query_gpus()):
        gpu, held, others = busy
        if time.monotonic() > deadline or not any(_has_ended(user.pid) for user in others):
            who = ", ".join(f"process {u.pid} ({u.name}) holds {u.mib} MiB" for u in others)
            raise ValueError(
                f"GPU {gpu.index}: {held} of its {gpu.total_mib} MiB are in use by other processes: "
                f"{who or 'processes outside this container'}; end them, or choose other GPUs with "
                "device_mapping"
            )
        time.sleep(0.1)


def _busy(indices: Sequence[int], gpus: Sequence[Gpu]) -> tuple[Gpu, int, list[GpuUser]] | None:
    """Return the first GPU of which other processes hold more than BUSY_MIB, how much, and those of them that
    nvidia-smi lists. Raises ValueError when a GPU is missing."""
    if not gpus:
        raise ValueError(
            "allocation_mode requires GPUs, and nvidia-smi shows none on this machine; to sample on the CPU write "
            "embedded. instead of sglang., as in allocation_mode=embedded.d1m1p1+d1m1p1; to train on it, "
            "launch.trainer_device=cpu"
        )
    by_index = {gpu.index: gpu for gpu in gpus}
    missing = [index for index in indices if index not in by_index]
    if missing:
        raise ValueError(
            f"allocation_mode requires GPU {missing[0]}, this machine has {len(gpus)} (0 to {max(by_index)}"
            f"{'' if allowed_gpus() == 'all' else f', given CUDA_VISIBLE_DEVICES={allowed_gpus()}'}); "
            "reduce n_gpus_per_node and the layout"
        )
    for gpu in (by_index[index] for index in indices):
        # In a container the processes of others are not listed, their memory is.
        held = gpu.used_mib - sum(user.mib for user in gpu.users if user.pid == os.getpid())
        if held > BUSY_MIB:
            return gpu, held, [user for user in gpu.users if user.pid != os.getpid()]
    return None


def _has_ended(pid: int) -> bool:
    """Return whether there is no such process, or a zombie, whose last threads may still be freeing its memory."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
