"""The start of a SGLang server with hooks, run by path with the server's interpreter.

`python -P .../hooks/main.py`, settings as JSON on stdin. The interpreter need not have this project installed: main.py
makes the folders that hold the hooks importable under their own names, and nothing beside them. The server's processes
import what their model needs: each would spend seconds on the rest, at every start.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

SKIPPED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable of SGLang: modules of models that it does not import, separated by commas."""
_OTHER_MODELS = ("speculative_", "model_impl")
"""Beginnings of server arguments that bring classes which config.json does not name."""
Flags = Mapping[str, object]


def make_importable() -> None:
    """Let this process import rollout.inference.sglang.hooks and its neighbours from this file's own folders."""
    folder = Path(__file__).resolve().parent
    for name in ("rollout.inference.sglang", "rollout.inference", "rollout"):
        folder = folder.parent
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def compile_ahead(flags: Flags) -> None:
    """Start to compile kernels in a process of the server's group, which logs with it."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("compile_ahead.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None, "stdin is a pipe"
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(flags))


def end_with(parent: int) -> None:
    """Kill the server's process group when `parent` is gone. (The kernel's own parent-death signal follows the thread
    that started the process, not the process.)"""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def hide_trainer() -> None:
    """Let `import megatron` fail in this process: SGLang's dumper of tensors imports the trainer's library, where it is
    installed, to name ranks in dump files, which are not used here."""
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]


def skip_other_models(flags: Flags, models: Path) -> None:
    """Let this process and its children import of SGLang's folder `models` only the modules that define the
    architectures of the model in flags, arguments of the server by name. Does nothing where the user has set
    SKIPPED_MODELS, or where not every architecture is found."""
    if SKIPPED_MODELS not in os.environ and not any(_key(flag).startswith(_OTHER_MODELS) for flag in flags):
        files = {path.stem: path for path in models.glob("*.py")}
        used = [_defining(name, files) for name in _architectures(flags)]
        if used and all(used):
            os.environ[SKIPPED_MODELS] = ",".join(sorted(files.keys() - set().union(*used)))


def _architectures(flags: Flags) -> list[str]:
    """Return the architectures of config.json, or what replaces them; none where it cannot be read, which the server
    reports."""
    given = {_key(flag): value for flag, value in flags.items()}
    try:
        config = json.loads(Path(str(given["model_path"]), "config.json").read_text())
        config |= json.loads(str(given.get("json_model_override_args") or "{}"))
    except (KeyError, OSError, ValueError):
        return []
    return list(config.get("architectures") or [])


def _defining(architecture: str, files: Mapping[str, Path]) -> set[str]:
    """Return the modules that define a class of this name."""
    pattern = re.compile(rf"^class {re.escape(architecture)}\b".encode(), re.MULTILINE)
    return {module for module, path in files.items() if pattern.search(path.read_bytes())}


def _key(flag: str) -> str:
    return flag.replace("-", "_")


def main() -> None:
    """Start the server that stdin describes."""
    from rollout.inference.sglang.arguments import EXIT_USAGE, command_line, sglang_version
    from rollout.inference.sglang.hooks import table
    from rollout.inference.sglang.hooks.in_flight import InFlight
    from rollout.inference.sglang.hooks.scheduler import VERSION_KEY

    settings = json.load(sys.stdin)
    end_with(settings["parent"])
    if settings["flags"].get("device") != "cpu":
        compile_ahead(settings["flags"])
    argv = command_line(settings["flags"])
    models = importlib.util.find_spec("sglang.srt.models")
    assert models is not None and models.submodule_search_locations, "every SGLang has this package"
    skip_other_models(settings["flags"], Path(models.submodule_search_locations[0]))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if missing := table.not_applied():
        sys.stderr.write(f"SGLang {sglang_version()} {table.reason_for(missing)}\n")
        raise SystemExit(EXIT_USAGE)
    try:
        server_args = prepare_server_args(argv)
        InFlight(VERSION_KEY).add_routes()
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def prepare() -> None:
    """Do what each process of the server does before it imports SGLang."""
    from rollout.inference.sglang.hooks import table

    # The stacks of a server that hangs get into its log, with the signal of core/processes/stacks.py.
    faulthandler.register(signal.SIGRTMIN, all_threads=True)
    hide_trainer()
    table.install()


if __name__ in ("__main__", "__mp_main__"):  # the second is how the server's spawned processes see this file
    make_importable()
    prepare()
if __name__ == "__main__":
    main()
