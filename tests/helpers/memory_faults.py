"""Fault injection: run out of memory in chosen places of a run, by trying an allocation that no machine can serve.

Faults are items PHASE:key=value:..., separated by commas. PHASE is one of init, generate, logprobs, train, save; the
keys restrict them: rank=0 (on that rank), over=512 (in a microbatch of more tokens), once=/a/file (only while the file
does not exist; the fault creates it). The packages have no code for this: `injected()` patches the functions of this
process, and with the variables of `environment()` every Ray worker of a run patches its own when it starts.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
FAULTS = "TEST_MEMORY_FAULTS"
TRAINER, GENERATOR = "mcore_adapter.engine", "rollout.inference.embedded.engine"


def run_out(faults: str, phase: str, *, rank: int = 0, tokens: int = 0) -> None:
    """Raise MemoryError if one of `faults` applies here."""
    for item in filter(None, faults.split(",")):
        name, *given = item.split(":")
        when = dict(part.split("=", 1) for part in given)
        if name != phase or rank != int(when.get("rank", rank)) or tokens <= int(when.get("over", tokens - 1)):
            continue
        if "once" in when:
            marker = Path(when["once"])
            if marker.exists():
                continue
            marker.touch()
        bytearray(1 << 62)


@contextlib.contextmanager
def injected(faults: str) -> Iterator[None]:
    """Inject `faults` into the trainer engine of this process until the context ends."""
    with contextlib.ExitStack() as patches:
        for patch in _trainer(importlib.import_module(TRAINER), faults):
            patches.enter_context(patch)
        yield


def environment(faults: str) -> dict[str, str]:
    """Return the environment variables of a command whose Ray workers are to have `faults`."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {FAULTS: faults, "RAY_RUNTIME_ENV_HOOK": f"{__name__}.add_setup_hook", "PYTHONPATH": path}


def add_setup_hook(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Have Ray call install() in every worker that it starts."""
    return {**(runtime_env or {}), "worker_process_setup_hook": f"{__name__}.install"}


def install() -> None:
    """Patch the engines of this process when they are imported."""
    sys.meta_path.insert(0, _PatchOnImport({TRAINER: _trainer, GENERATOR: _generator}))


Patches = Callable[[ModuleType, str], list[Any]]


class _PatchOnImport(MetaPathFinder):
    def __init__(self, waiting: dict[str, Patches]) -> None:
        self._waiting = waiting

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        patches = self._waiting.pop(fullname, None)
        if patches is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            for patch in patches(module, os.environ[FAULTS]):
                patch.start()

        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _before(owner: Any, name: str, check: Callable[[], None]) -> Any:
    """A patch of owner.name that calls `check` first."""
    original = getattr(owner, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, checked)


def _generator(module: ModuleType, faults: str) -> list[Any]:
    return [_before(module.Engine, "step", lambda: run_out(faults, "generate"))]


def _trainer(module: ModuleType, faults: str) -> list[Any]:
    import torch.distributed as dist

    run_schedule = module.run_schedule

    def scheduled(chunks: Any, microbatches: Any, postprocess: Any, *, forward_only: bool) -> Any:
        if forward_only:
            tokens = max(m.token_ids.shape[1] for m in microbatches)
            run_out(faults, "logprobs", rank=dist.get_rank(), tokens=tokens)

        def postprocessed(microbatch: Any, output: Any) -> Any:
            if not forward_only:
                run_out(faults, "train", rank=dist.get_rank(), tokens=microbatch.token_ids.shape[1])
            return postprocess(microbatch, output)

        return run_schedule(chunks, microbatches, postprocessed, forward_only=forward_only)

    engine = module.MegatronEngine
    return [
        mock.patch.object(module, "run_schedule", scheduled),
        _before(engine, "__init__", lambda: run_out(faults, "init", rank=dist.get_rank())),
        _before(engine, "begin_save", lambda: run_out(faults, "save", rank=dist.get_rank())),
    ]
