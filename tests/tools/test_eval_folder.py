"""What an evaluation's folder holds beside the answers: the settings that determine them, and the model's identity."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tools.eval.data import EvalError
from tools.eval.folder import check_same
from tools.eval.model import SETTINGS, weights_identity


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
