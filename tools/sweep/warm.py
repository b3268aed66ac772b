"""The start that all runs of a sweep share: the demo's data, and a model after a supervised warm-up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.demo.data import make_ingredients
from tools.demo.run import ROOT, accuracy, first_at_least, saved_models


def warm_up(folder: Path, *, seed: int = 1, target: float = 0.4) -> Path:
    """Return the Hugging Face folder that every run starts from; make data, model and warm-up where `folder` has
    none. The warm-up ends at the first saved model that answers the share `target` of the held-out problems."""
    chosen = folder / "warm.txt"
    if not chosen.exists():
        files = make_ingredients(folder, seed=seed)
        command = ["sft", "--config", "examples/configs/demo-sft.yaml", f"seed={seed}"]
        quickstart(command, folder, log=folder / "sft.log")
        path, share = first_at_least(
            saved_models(folder, "demo-sft"), target, lambda model: accuracy(model, files.held_out)
        )
        print(f"warm-up: {path}, {share:.1%} of the held-out problems", flush=True)
        chosen.write_text(str(path.relative_to(folder)))
    return folder / chosen.read_text()


def quickstart(arguments: Sequence[str], warm: Path, *, log: Path, share_of_memory: float = 0.05) -> None:
    """Run `python -m core.quickstart` on the data in `warm`. `share_of_memory`: of the machine, for Ray's object store.
    Raises RuntimeError, with the end of the log, where it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "SLIPSTREAM_DEMO": str(warm), "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": str(share_of_memory),
    }  # fmt: skip
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "core.quickstart", *arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{log} ended with {code}:\n{log.read_text(encoding='utf-8')[-1500:]}")
