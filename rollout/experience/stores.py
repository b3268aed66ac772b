"""The stores by name, and how a process opens one: by its name, or a user's class by its import path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.experience.base import Experience
from rollout.experience.memory import MemoryExperience
from rollout.experience.sqlite import SQLiteExperience
from rollout.plugins import PluginError, build_plugin, check_factory, unknown_name

STORES: dict[str, Callable[[str], Experience]] = {
    "memory": lambda path: MemoryExperience(),
    "sqlite": SQLiteExperience,
}
"""By name: called with experience.path."""
_METHODS = {"lease": ("selection", "step", "lessee")}


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """A store, for each process that opens it."""

    store: str = "memory"
    """Name in STORES, or package.module:Class; the class is called with `path=`."""
    path: str = ""

    @property
    def is_durable(self) -> bool:
        """True if the store survives the processes that open it. Its state is not part of recover checkpoints then."""
        return self.store != "memory"

    def open(self) -> Experience:
        """Return the store; the first process makes it. Raises PluginError, SchemaError, and what its library raises
        where it cannot be opened."""
        if self.store in STORES:
            return STORES[self.store](self.path)
        built: Experience = build_plugin(self.store, kind="store", methods=_METHODS, path=self.path)
        return built


def check_store(spec: str) -> None:
    """Check the name or import path of a store, without opening it. Raises PluginError."""
    if ":" in spec:
        check_factory(spec, kind="store", methods=_METHODS, settings=("path",))
    elif spec not in STORES:
        raise PluginError(unknown_name(spec, kind="store", known=sorted(STORES), own="Class"))
