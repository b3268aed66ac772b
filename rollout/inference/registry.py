"""Every inference backend by its name in allocation_mode."""

from __future__ import annotations

from collections.abc import Mapping

from allocation import CPU, GPU, Device
from rollout.inference.backend import Backend
from rollout.inference.embedded.backend import EmbeddedBackend
from rollout.inference.mock.backend import MockBackend
from rollout.inference.sglang.backend import SGLangBackend

BACKENDS: dict[str, Backend] = {
    "sglang": SGLangBackend(),
    "embedded": EmbeddedBackend(),
    "mock": MockBackend(),
}

DEFAULT_BACKEND: Mapping[Device, str] = {GPU: "sglang", CPU: "embedded"}
"""The backend of a run that names none, by the device that it samples on."""
