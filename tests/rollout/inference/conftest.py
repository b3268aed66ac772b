"""A small dense model as a folder, and the same with its first and with other weights."""

from pathlib import Path
from typing import Any

import pytest

from helpers.embedded_models import make_model, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    write_model("qwen2", path)
    return path


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen2")


@pytest.fixture(scope="module")
def new_model() -> Any:
    return make_model("qwen2", seed=1)
