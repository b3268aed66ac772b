"""What an environment is, and those of other libraries by name."""

from collections.abc import Callable, Mapping
from typing import Protocol

from rollout.plugins import PluginError, find_plugin


class Environment(Protocol):
    """One episode of a game or task. Plain code, not async: it runs in a worker process. Equal seeds and actions lead
    to equal observations, so that an episode can be run again after a restart.

    With two more methods its earlier steps are not made again then: `snapshot()` returns bytes or plain values
    (numbers, text, lists, dicts, numpy arrays), and `restore(state)` takes them in place of reset(), in another
    process."""

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        """Begin, and return what the policy reads first. `row`: columns of the data set, `prompt`, `solutions`."""
        ...

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take what the policy wrote; return what it reads next, a reward, and whether the episode is over."""
        ...

    def close(self) -> None:
        """Release what the environment holds."""
        ...


class TextArena:
    """A game of textarena for one player, by its id."""

    def __init__(self, name: str) -> None:
        self._env = find_plugin("textarena:make", kind="environment")(env_id=name)

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        self._env.reset(num_players=1, seed=seed % 2**31)
        return str(self._env.get_observation()[1])

    def step(self, action: str) -> tuple[str, float, bool]:
        done, _ = self._env.step(action=action)
        if done:
            rewards, _ = self._env.close()
            return "", float(rewards.get(0, 0.0)), True
        return str(self._env.get_observation()[1]), 0.0, False

    def close(self) -> None:
        pass


class ReasoningGym:
    """A generator of reasoning-gym, by its name: one question, whose answer is scored."""

    def __init__(self, name: str) -> None:
        self._create = find_plugin("reasoning_gym:create_dataset", kind="environment")
        self._name = name

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        self._data = self._create(self._name, size=1, seed=seed % 2**31)
        self._entry = self._data[0]
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", float(self._data.score_answer(action.strip(), self._entry)), True

    def close(self) -> None:
        pass


class Gymnasium:
    """An environment of gymnasium whose observations are written as text and whose actions are numbers, by its id."""

    def __init__(self, name: str) -> None:
        self._env = find_plugin("gymnasium:make", kind="environment")(name)

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        observation, _ = self._env.reset(seed=seed % 2**31)
        return str(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        words = [word for word in action.split() if word.lstrip("-").isdigit()]
        if not words or not self._env.action_space.contains(int(words[-1])):
            return f"Write one action of {self._env.action_space}.", 0.0, False
        observation, reward, ended, truncated, _ = self._env.step(int(words[-1]))
        return str(observation), float(reward), bool(ended or truncated)

    def close(self) -> None:
        self._env.close()


def open_env(url: str) -> Environment:
    """Return an environment of the OpenEnv server at `url`."""
    from rollout.environments.openenv import OpenEnv

    return OpenEnv(url)


LIBRARIES: Mapping[str, Callable[[str], Environment]] = {
    "textarena": TextArena, "reasoning_gym": ReasoningGym, "gymnasium": Gymnasium,
}  # fmt: skip
"""By library; an environment is named as library:id."""
ADAPTERS: Mapping[str, Callable[[str], Environment]] = {**LIBRARIES, "openenv": open_env}
"""Those of libraries, and openenv:URL, which needs no library here."""


def make_environment(spec: str) -> Environment:
    """Return an environment: "name:id" with a name in ADAPTERS, or "package.module:Class". Raises PluginError."""
    library, _, name = spec.partition(":")
    if library in ADAPTERS:
        try:
            return ADAPTERS[library](name)
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"environment {spec}: {type(error).__name__}: {error}") from error
    environment: Environment = find_plugin(spec, kind="environment")()
    check_methods(spec, environment)
    return environment


def check_methods(spec: str, environment: object) -> None:
    """Raise PluginError where an environment, or a class of environments, lacks a method."""
    pair = [method for method in ("snapshot", "restore") if callable(getattr(environment, method, None))]
    if len(pair) == 1:
        raise PluginError(f"environment {spec}: has {pair[0]}() alone; write both snapshot() and restore(), or neither")
    if lacking := [method for method in ("reset", "step", "close") if not callable(getattr(environment, method, None))]:
        raise PluginError(f"environment {spec}: has no method {', '.join(lacking)}")
