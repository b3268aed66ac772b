"""Imports megatron-core without torch's compiler.

Megatron decorates its fused functions with torch.compile while it is imported, which takes two seconds of processor
time in every rank, also where none of them is ever called. Here the compiler is loaded at a function's first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def import_megatron() -> None:
    """Call before anything else imports megatron; afterwards it changes nothing."""
    compiler = torch.compile
    torch.compile = functools.partial(_compiled_when_called, compiler)
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler


def _compiled_when_called(compiler: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    if function is None:
        return functools.partial(_compiled_when_called, compiler, **options)
    compiled = functools.cache(lambda: compiler(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
