"""What a user adds is one file: its keys are declared in it, and are checked and reported like built-in ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.algorithms.build import build_algorithm
from core.checks import run_checks
from core.checks.facts import unused_keys
from core.checks.rules import load_config
from core.config.experiments import PPOMATHConfig
from helpers.config_inputs import SMALLEST_PPO, write_run

ALGORITHM = '''
from config_schema.needs import above
from slipstream import PolicyGradient, Section, key


class Tempered(PolicyGradient):
    """Divide the scores by a temperature that falls with the batch."""

    class Config(Section):
        """Two keys."""

        temperature: float = key(1.0, "Divisor of the scores", gt=0)
        decay: float = key(0.0, "Fall of the temperature in a step", ge=0, lt=1)
        floor: float = key(0.1, "Lowest temperature", gt=0, needs=above(".decay", 0))

    def __init__(self, settings, options):
        super().__init__(settings)
        self.options = options

    def baseline(self, scores, group_ids):
        return scores / self.options.temperature
'''
RUN = f"""{SMALLEST_PPO}algorithm:
  name: own_tempered:Tempered
  options:
    OPTIONS
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tempered.py").write_text(ALGORITHM)
    monkeypatch.syspath_prepend(tmp_path)


def found(folder: Path, options: str) -> tuple[PPOMATHConfig, list[str]]:
    """A run with these options, and what is wrong with it, without the path of its file."""
    path = write_run(folder, RUN.replace("OPTIONS", options))
    loaded = load_config("ppo-math", path)
    assert isinstance(loaded.config, PPOMATHConfig)
    return loaded.config, [str(p).replace(f"{folder}/", "") for p in run_checks(loaded)]


def test_an_algorithm_with_keys_of_its_own_is_one_file(tmp_path: Path) -> None:
    config, wrong = found(tmp_path, "{temperature: 2, decay: 1e-3, floor: 0.5}")
    assert wrong == [] and list(unused_keys(config)) == []
    algorithm = build_algorithm(config)
    assert algorithm.options.model_dump() == {"temperature": 2.0, "decay": 1e-3, "floor": 0.5}  # type: ignore[attr-defined]


def test_its_keys_are_checked_all_at_once_with_their_lines(tmp_path: Path) -> None:
    _, wrong = found(tmp_path, "temperatur: 2\n    decay: 1\n    floor: low")
    assert wrong == [
        "run.yaml:12: algorithm.options.temperatur: unknown key; did you mean 'algorithm.options.temperature'?",
        "run.yaml:14: algorithm.options.floor: must be a number, got 'low'",
        "run.yaml:13: algorithm.options.decay: must be less than 1, got 1.0",
    ]


def test_its_keys_without_effect_are_reported(tmp_path: Path) -> None:
    config, wrong = found(tmp_path, "floor: 0.5")
    assert wrong == []
    assert dict(unused_keys(config)) == {"algorithm.options.floor": "algorithm.options.decay=0.0"}
