"""The list of server arguments that configurations are checked with, against the SGLang that is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from helpers.sglang_environment import PYTHON, WHY_NOT, environment
from rollout.inference.sglang import hooks
from rollout.inference.sglang.server_arguments import KINDS, VERSION
from rollout.inference.sglang.server_choices import CHOICES

LIST = """
import argparse, json, sglang
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
kinds, choices = {}, {}
for action in parser._actions:
    kind = "flag" if action.nargs == 0 else "list" if action.nargs in ("+", "*") else None
    kind = kind or {int: "integer", float: "number"}.get(action.type, "other")
    names = [option.lstrip("-").replace("-", "_") for option in action.option_strings]
    kinds |= dict.fromkeys(names, kind)
    choices |= dict.fromkeys(names, [str(choice) for choice in action.choices]) if action.choices is not None else {}
print(json.dumps([sglang.__version__, kinds, choices]))
"""

BROKEN = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.layers.sampler":
            raise OSError("a kernel of another version")
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
def test_the_list_of_server_arguments_is_complete() -> None:
    done = subprocess.run([str(PYTHON), "-c", LIST], env=os.environ | environment(), capture_output=True, check=True)
    version, kinds, choices = json.loads(done.stdout.splitlines()[-1])
    assert (version, kinds) == (VERSION, KINDS)
    assert {name: set(values) for name, values in choices.items()} == {name: set(CHOICES[name]) for name in CHOICES}


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
def test_a_server_names_the_module_that_sglang_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    env = os.environ | environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [str(PYTHON), "-P", str(hooks.__file__)],
        input=json.dumps({"parent": os.getpid(), "flags": {}}), env=env, capture_output=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == hooks.EXIT_USAGE
    last = done.stderr.strip().rpartition("\n")[2]
    assert last.startswith(f"SGLang {VERSION} cannot import sglang.")
    assert last.endswith("OSError: a kernel of another version")
