"""What an evaluation's folder holds beside the answers: the settings that determine them, and the model's identity."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tools.eval.data import EvalError
from tools.eval.folder import check_same
from tools.eval.model import SETTINGS, find_model, weights_identity


def settings(**questions: str) -> dict[str, Any]:
    return {"model_path": "model", "questions": questions}


def test_the_questions_of_other_sets_are_kept_and_checked_again(tmp_path: Path) -> None:
    path = tmp_path / SETTINGS
    path.write_text(json.dumps(settings(first="1f")))
    second = settings(second="2e")
    check_same(path, second)
    assert second["questions"] == {"first": "1f", "second": "2e"}
    path.write_text(json.dumps(second))
    check_same(path, settings(first="1f"))
    with pytest.raises(EvalError, match=r"^first: .* has answers to other questions of that name"):
        check_same(path, settings(first="3d", second="2e"))


def test_weights_that_were_trained_on_are_other_weights_though_their_files_are_as_large(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    before = weights_identity(tmp_path)
    (tmp_path / "notes.txt").write_text("none of the weights")
    assert weights_identity(tmp_path) == before
    os.utime(tmp_path / "model.safetensors", ns=(10**18, 10**18 + 1))
    assert weights_identity(tmp_path) != before


@pytest.mark.parametrize(
    ("engines", "found"), [(["actor"], "actor"), (["default"], "default"), (["critic", "actor"], "actor")]
)
def test_of_a_recover_checkpoint_the_only_engine_or_the_actor_is_evaluated(tmp_path, engines, found) -> None:
    write_engines(tmp_path / "globalstep7", engines)
    assert find_model(tmp_path / "globalstep7") == (tmp_path / "globalstep7" / found, False)
    for engine in engines:
        assert find_model(tmp_path / "globalstep7" / engine) == (tmp_path / "globalstep7" / engine, False)


def test_a_folder_that_is_no_checkpoint_is_refused_with_what_it_contains(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="actor or critic of a PPO run, default of an SFT or DPO run.; it is empty$"):
        find_model(tmp_path)
    write_engines(tmp_path / "globalstep7", ["critic", "default"])
    with pytest.raises(EvalError, match="several engines and no actor: critic, default; give the folder of one"):
        find_model(tmp_path / "globalstep7")
    write_engines(tmp_path / "other", ["critic"])
    with pytest.raises(EvalError, match="a critic alone, which generates nothing: critic; give the folder of one"):
        find_model(tmp_path / "other")
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(EvalError, match="it contains globalstep7: give one of these folders"):
        find_model(tmp_path)


def write_engines(checkpoint: Path, engines: list[str]) -> None:
    for engine in engines:
        (checkpoint / engine).mkdir(parents=True)
        (checkpoint / engine / "metadata.json").write_text("{}")
