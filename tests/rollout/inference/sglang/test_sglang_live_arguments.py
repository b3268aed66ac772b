"""What the installed SGLang says of server arguments, and of modules of its own that it cannot import."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from helpers.sglang_environment import PYTHON, WHY_NOT, environment
from rollout.inference.sglang.arguments import EXIT_USAGE, host_problems
from rollout.inference.sglang.hooks import main
from rollout.inference.sglang.hooks.table import SGLANG as VERSION

BROKEN = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.layers.sampler":
            raise OSError("a kernel of another version")
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("mem_fracton_static", 0.8, f"SGLang {VERSION} has no such server argument; did you mean 'mem_fraction"),
        ("mem-fraction-static", "a lot", "invalid float value: 'a lot'"),
        ("disable_radix_cache", 1, "must be true or false, got 1"),
        ("lora_target_modules", ["q_proj", "q_prj"], "invalid choice: 'q_prj'"),
        ("cuda_graph_bs", [1, 2, 4], None),
    ],
)
def test_sglang_checks_the_names_and_values_of_its_arguments(monkeypatch, flag, value, message) -> None:
    for name, setting in environment().items():
        monkeypatch.setenv(name, setting)
    found = list(
        host_problems(PYTHON, {"context_length": "32k", "enable-metrics": True, "torchao_config": "", flag: value})
    )
    assert [key for key, _ in found] == ([] if message is None else [f"actor.sglang.{flag}"])
    assert message is None or found[0][1].startswith(message)


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
def test_a_server_names_the_module_that_sglang_cannot_import(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    env = os.environ | environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [str(PYTHON), "-P", str(main.__file__)],
        input=json.dumps({"parent": os.getpid(), "flags": {}}), env=env, capture_output=True, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == EXIT_USAGE
    last = done.stderr.strip().rpartition("\n")[2]
    assert last.startswith(f"SGLang {VERSION} cannot import sglang.")
    assert last.endswith("OSError: a kernel of another version")
