"""What a user adds is one file: its keys are declared in it, and are checked and reported like built-in ones."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.algorithms.build import build_algorithm
from core.checks import run_checks
from core.checks.rules import load_config, unused_keys
from core.config.experiments import PPOMATHConfig
from core.config.reference import help_text
from core.explore.batches import open_experience
from helpers.config_inputs import SMALLEST_PPO, write_run
from helpers.simulated_sampling import make_prompts, trajectory
from rollout.experience import Episode, Lessee, Tags, make_rules
from rollout.experience.episode import summary

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
STORE = '''
from pathlib import Path

from rollout.experience import SQLiteExperience


class Logged(SQLiteExperience):
    """Write a line for each leased step beside the file."""

    def __init__(self, path):
        super().__init__(path)
        self.log = Path(f"{path}.log")

    async def lease(self, selection, step, lessee):
        leased = await super().lease(selection, step, lessee)
        with self.log.open("a") as log:
            log.write(f"{step}: {leased.ids}\\n")
        return leased


class Pathless(SQLiteExperience):
    def __init__(self):
        super().__init__("store.db")
'''
RUN = f"""{SMALLEST_PPO}algorithm:
  name: own_tempered:Tempered
  options:
    OPTIONS
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tempered.py").write_text(ALGORITHM)
    (tmp_path / "own_store.py").write_text(STORE)
    monkeypatch.syspath_prepend(tmp_path)


def found(folder: Path, options: str) -> tuple[PPOMATHConfig, list[str]]:
    """A run of the algorithm with these options, and what is wrong with it."""
    return checked(folder, RUN.replace("OPTIONS", options))


def checked(folder: Path, text: str) -> tuple[PPOMATHConfig, list[str]]:
    """A run, and what is wrong with it, without the path of its file."""
    folder.mkdir(exist_ok=True)
    path = write_run(folder, text)
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


def with_store(folder: Path, name: str) -> tuple[PPOMATHConfig, list[str]]:
    return checked(folder, f"{SMALLEST_PPO}experience: {{store: 'own_store:{name}', path: {folder / 'store.db'}}}\n")


def test_a_store_is_one_file(tmp_path: Path) -> None:
    config, wrong = with_store(tmp_path, "Logged")
    assert wrong == [] and list(unused_keys(config)) == []
    rules = make_rules(num_prompts=2, batch_size=2, max_staleness=1)
    group = [trajectory(make_prompts(1)[0], np.zeros(2, np.int32))]
    for _ in range(2):  # as the processes of two attempts
        with closing(open_experience(config)) as store:
            for row in "ab":
                tags = Tags(id=row, group_id=row, task="math", row=row, epoch=0, version=0)
                if store.open(tags, rules.admission) == "open":
                    store.put(Episode(tags=replace(tags, **summary(group)), trajectories=group))
            episodes = asyncio.run(Lessee(store, rules, until_saved=True).take(0))
            assert [episode.tags.id for episode in episodes] == ["a", "b"]
    assert (tmp_path / "store.db.log").read_text() == "0: ['a', 'b']\n" * 2
    assert "package.module:Class" in help_text("ppo-math", PPOMATHConfig).partition("experience.store")[2][:400]


def test_a_store_that_cannot_be_opened_is_an_error_before_the_start(tmp_path: Path) -> None:
    for name, reason in (("Missing", "has no 'Missing'"), ("Pathless", "path")):
        _, (wrong,) = with_store(tmp_path / name, name)
        assert wrong.startswith("run.yaml:9: experience.store: store own_store:") and reason in wrong
