"""A server imports its model's modules and not all; it finds the same class."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.sglang_environment import PYTHON, WHY_NOT, Models, environment, running_server, settings_for
from rollout.inference.sglang.hooks.main import SKIPPED_MODELS, hide_trainer, skip_other_models

live = pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
SERVED = (
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "MistralForCausalLM",
    "Glm4ForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
)  # fmt: skip
CLASSES = """
import json, pkgutil, sys
import sglang.srt.models as package
import sglang.srt.models.registry  # imports them all
entries = {}
for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    entry = getattr(sys.modules.get(info.name), "EntryClass", [])
    for cls in entry if isinstance(entry, list) else [entry]:
        entries[cls.__name__] = info.name
print(json.dumps(entries))
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules as SGLang has one."""
    monkeypatch.setenv(SKIPPED_MODELS, "")
    monkeypatch.delenv(SKIPPED_MODELS)
    folder = tmp_path / "models"
    folder.mkdir()
    for name, text in {
        "small": "class SmallForCausalLM(Module):\n    pass\n",
        "smaller": "from small import SmallForCausalLM\n\n\nclass SmallForCausalLMNextN(SmallForCausalLM):\n    pass\n",
        "twice": "def f():\n    pass\n\n\nclass OtherForCausalLM:\n    pass\n",
        "again": "class OtherForCausalLM:\n    pass\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def flags(tmp_path: Path, config: Any, **others: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {"model_path": str(tmp_path), **others}


@pytest.mark.parametrize(
    ("architectures", "skipped"),
    [
        (["SmallForCausalLM"], "again,smaller,twice"),
        (["OtherForCausalLM"], "small,smaller"),
        (["SmallForCausalLM", "SmallForCausalLMNextN"], "again,twice"),
        (["SmallForCausalLM", "Unknown"], None),
        ([], None),
        (None, None),
    ],
)
def test_all_but_the_modules_of_the_models_classes_are_skipped(models, tmp_path, architectures, skipped) -> None:
    skip_other_models(flags(tmp_path, {"architectures": architectures}), models)
    assert os.environ.get(SKIPPED_MODELS) == skipped


@pytest.mark.parametrize("key", ["speculative_algorithm", "speculative-draft-model-path", "model_impl"])
def test_nothing_is_skipped_where_arguments_bring_other_classes_or_no_model_is_found(models, tmp_path, key) -> None:
    of_model = flags(tmp_path, {"architectures": ["SmallForCausalLM"]})
    for given in (of_model | {key: "x"}, {}, {"model_path": "nowhere"}):
        skip_other_models(given, models)
        assert SKIPPED_MODELS not in os.environ


def test_the_trainers_library_is_hidden_once_it_is_not_in_use() -> None:
    program = (
        "import sys, importlib; sys.path[:0] = sys.argv[1:]; m = importlib.import_module('main');"
        "m.hide_trainer()\ntry: import megatron.core\nexcept ImportError: print('hidden')"
    )
    folder = str(Path(sys.modules[hide_trainer.__module__].__file__ or "").parent)
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "hidden\n"


@live
def test_sglang_defines_the_architectures_where_they_are_looked_for(tmp_path, monkeypatch) -> None:
    env = os.environ | environment()
    program = "import sglang.srt.models as m; print(m.__path__[0])"
    done = subprocess.run([str(PYTHON), "-c", program], env=env, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.split("\n")[-2])
    done = subprocess.run([str(PYTHON), "-c", CLASSES], env=env, capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    for architecture in SERVED:
        monkeypatch.setenv(SKIPPED_MODELS, "")
        monkeypatch.delenv(SKIPPED_MODELS)
        skip_other_models(flags(tmp_path, {"architectures": [architecture]}), folder)
        kept = {path.stem for path in folder.glob("*.py")} - set(os.environ[SKIPPED_MODELS].split(","))
        assert f"sglang.srt.models.{kept.pop()}" == modules[architecture]
        assert not kept


@live
def test_a_server_imports_one_model_and_not_the_trainer(tmp_path: Path) -> None:
    Models(tmp_path / "model")
    settings = settings_for(tmp_path / "model", tmp_path / "log", env=environment() | {"PYTHONPROFILEIMPORTTIME": "1"})
    with running_server(settings):
        log = (tmp_path / "log").read_text()
    imported = re.findall(r"^import time:.*\| +(\S+)$", log, re.MULTILINE)
    assert "sglang.srt.models.registry" in imported
    assert "sglang.srt.models.qwen2" in imported
    assert not {"sglang.srt.models.llama4", "sglang.srt.models.gemma3_causal"} & set(imported)
    assert not any(name.startswith("megatron.core.") for name in imported)  # an attempt is listed as megatron.core
