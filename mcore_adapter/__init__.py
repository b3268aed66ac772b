"""Megatron-core behind a small engine; Hugging Face weights in and out.

Megatron decorates its fused functions with torch.compile while it is imported. That loads torch's compiler, a third of
the import time of a trainer rank, also where none of these functions is ever called. Here the compiler is loaded at
the first call of such a function on a GPU; on the CPU they run as they are. The same holds for the optimizers of torch.
"""

import functools
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NOT_USED = ("wandb", "torch.utils.tensorboard")
"""Optional libraries that megatron imports for its own trackers; they load for seconds."""


class _MegatronFinder:
    """Find megatron.core as usual, and execute it with a torch.compile that waits for the first call.

    A hook of the import system, because any module of this package may be the first that imports megatron.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of megatron.core with a wrapped loader, None for any other module."""
        if name != "megatron.core":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _with_late_compiler(execute, module)  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Wrap the next import of megatron.core. Has no effect where megatron.core is imported already."""
    if "megatron.core" not in sys.modules and not any(isinstance(f, _MegatronFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, _MegatronFinder())


def _leave_optimizers_to_python() -> None:
    """Let methods of torch's optimizers run without the compiler, which they would import to exclude themselves from
    compilation. Nothing here compiles an optimizer."""
    import torch

    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            method.__dict__.setdefault("__dynamo_disable", method)


def _with_late_compiler(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    import torch

    compiler = torch.compile
    torch.compile = functools.partial(_compiled_when_called, compiler)
    absent = [name for name in _NOT_USED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: ImportError
    try:
        execute(module)
    finally:
        torch.compile = compiler
        for name in absent:
            del sys.modules[name]
    _leave_optimizers_to_python()


def _compiled_when_called(compiler: Callable[..., Any], function: Any = None, **options: Any) -> Any:
    if function is None:
        return functools.partial(_compiled_when_called, compiler, **options)
    import torch

    compiled = functools.cache(lambda: compiler(function, **options))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # On the CPU compiling takes longer than what it saves, and needs a C++ compiler. The compiler of an outer
        # function must not trace this one, only what it calls.
        on_gpu = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in (*args, *kwargs.values()))
        inner = torch.compiler.is_dynamo_compiling()
        return compiled()(*args, **kwargs) if on_gpu and not inner else function(*args, **kwargs)

    return call


install()

# Megatron logs at import, once per file, what is not installed without a GPU; and it warns of its own defaults and of
# torch functions that it still uses. None of it is for the user to act on.
for _message in (
    r".*(Transformer Engine|Apex)\b.* not installed",
    r"full scope is deprecated",
    r"`load_state_dict` is deprecated",
    r"Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=_message)


def _is_wanted(record: logging.LogRecord) -> bool:
    # Megatron passes arguments to the MLP classes that it knows. The layers here have their own, which need none.
    return not record.getMessage().startswith("Unknown MLP type: ")


logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_wanted)
