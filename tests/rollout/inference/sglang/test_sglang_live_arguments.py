"""The list of server arguments that configurations are checked with, against the SGLang that is installed."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from helpers.sglang_environment import PYTHON, WHY_NOT, environment
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


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
def test_the_list_of_server_arguments_is_complete() -> None:
    done = subprocess.run([str(PYTHON), "-c", LIST], env=os.environ | environment(), capture_output=True, check=True)
    version, kinds, choices = json.loads(done.stdout.splitlines()[-1])
    assert (version, kinds) == (VERSION, KINDS)
    assert {name: set(values) for name, values in choices.items()} == {name: set(CHOICES[name]) for name in CHOICES}
