"""Fixtures of the trainer's tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.mcore_ranks import RankPool
from helpers.tiny_models import write_model

torch.set_num_threads(1)  # beside the ranks, which run one each


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real processes to run trainer ranks on; see mcore_ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    """As ranks, but they leave the GPUs when the file is through; CUDA does not survive a fork."""
    pool = RankPool(fresh=True)
    yield pool
    pool.close()


class ModelFolders(dict[str, tuple[Path, Any]]):
    """name of tiny_models.MODELS -> (its Hugging Face folder, the transformers model), written where it is used."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> tuple[Path, Any]:
        self[name] = self._root / name, write_model(name, self._root / name)
        return self[name]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    return ModelFolders(tmp_path_factory.mktemp("models"))
