"""What a server's processes need not import: each of them would spend seconds on it, at every start.

Read by the server's processes, so nothing else of this project is imported. Invariant: a server finds the class of its
model exactly where it would without this file.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SKIPPED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable of SGLang: modules of models that it does not import, separated by commas."""
_OTHER_MODELS = ("speculative_", "model_impl")
"""Beginnings of server arguments that bring classes which config.json does not name."""


def hide_trainer() -> None:
    """Let `import megatron` fail in this process: SGLang's dumper of tensors imports the trainer's library, where it is
    installed, to name ranks in dump files, which are not used here."""
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]


def skip_other_models(flags: Mapping[str, Any], models: Path) -> None:
    """Let this process and its children import of SGLang's folder `models` only the modules that define the
    architectures of the model in flags, arguments of the server by name. Does nothing where the user has set
    SKIPPED_MODELS, or where not every architecture is found."""
    if SKIPPED_MODELS not in os.environ and not any(_name(flag).startswith(_OTHER_MODELS) for flag in flags):
        files = {path.stem: path for path in models.glob("*.py")}
        used = [_defining(name, files) for name in _architectures(flags)]
        if used and all(used):
            os.environ[SKIPPED_MODELS] = ",".join(sorted(files.keys() - set().union(*used)))


def _architectures(flags: Mapping[str, Any]) -> list[str]:
    """Return the architectures of config.json, or what replaces them; none where it cannot be read, which the server
    reports."""
    given = {_name(flag): value for flag, value in flags.items()}
    try:
        config = json.loads(Path(given["model_path"], "config.json").read_text())
        config |= json.loads(given.get("json_model_override_args") or "{}")
    except (KeyError, OSError, ValueError):
        return []
    return list(config.get("architectures") or [])


def _defining(architecture: str, files: Mapping[str, Path]) -> set[str]:
    """Return the modules that define a class of this name."""
    pattern = re.compile(rf"^class {re.escape(architecture)}\b".encode(), re.MULTILINE)
    return {module for module, path in files.items() if pattern.search(path.read_bytes())}


def _name(flag: str) -> str:
    return flag.replace("-", "_")
