"""allocation_mode=search, where a configuration is loaded."""

from pathlib import Path

import pytest

from core.checks.rules import load_config
from core.config.parsing.problems import ConfigError
from core.planning.scene import find_gpu
from helpers.plan_recipe import write_recipe
from tools.bench import SHAPES


def test_a_configuration_is_loaded_with_the_best_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not every host of tests has a GPU.
    monkeypatch.setattr("core.planning.search.gpu_of_machine", lambda: find_gpu("H100"))
    path = write_recipe(tmp_path, SHAPES["7B"])
    chosen = load_config("ppo-math", path, ["allocation_mode=search"]).config
    assert chosen.allocation_mode.startswith("sglang.d") and chosen.n_nodes * chosen.n_gpus_per_node == 16
    written = path.read_text().replace("sglang.d8m1p1+d4m2p1", "search")
    path.write_text(written)
    assert load_config("ppo-math", path).config == chosen


def test_without_a_gpu_there_is_nothing_to_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.planning.search.gpu_of_machine", lambda: None)
    path = write_recipe(tmp_path, SHAPES["7B"])
    with pytest.raises(
        ConfigError, match=r"allocation_mode: search: this machine has no GPU; slipstream plan --search"
    ):
        load_config("ppo-math", path, ["allocation_mode=search"])
