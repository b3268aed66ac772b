"""Memory that a host has left. Neither torch nor Megatron is imported."""

from pathlib import Path

import psutil

_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_on_host() -> float:
    """Return the bytes of memory that this host, or the control group of this process, has left."""
    available = float(psutil.virtual_memory().available)
    for limit, used in _CONTROL_GROUPS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such version of control groups; "max"
            continue
        available = min(available, left)
    return available
