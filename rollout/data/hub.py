"""Whether the Hugging Face hub can be reached: its client tries for most of a minute before it gives up."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_SECONDS = 10.0
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


@contextmanager
def offline_without_network() -> Iterator[None]:
    """Let `datasets` use its cache alone inside this block if the hub cannot be reached. Needs that library."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not _is_reachable(config.HF_ENDPOINT)
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _is_reachable(endpoint: str) -> bool:
    """Return whether something listens at a URL; True behind a proxy, which may still reach it."""
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return True
    url = urlsplit(endpoint)
    try:
        with socket.create_connection(
            (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), timeout=_SECONDS
        ):
            return True
    except OSError:
        return False
