"""The stores by name, and how a process opens one: by its name, or a user's class by its import path."""

from collections.abc import Callable

from rollout.experience.base import Experience
from rollout.experience.stores.files import FileExperience
from rollout.experience.stores.memory import MemoryExperience
from rollout.experience.stores.postgres import PostgresExperience
from rollout.experience.stores.sqlite import SQLiteExperience, check_file
from rollout.plugins import PluginError, build_plugin, check_factory, unknown_name

STORES: dict[str, Callable[[str], Experience]] = {
    "memory": lambda path: MemoryExperience(),
    "sqlite": SQLiteExperience,
    "postgres": PostgresExperience,
    "file": FileExperience,
}
"""By name: called with experience.path."""
_METHODS = {"lease": ("selection", "step", "lessee")}


def open_store(store: str, path: str = "") -> Experience:
    """Return a store, by its name in STORES or as package.module:Class, which is called with `path=`; the first process
    makes it. Raises PluginError, SchemaError, and what its library raises where it cannot be opened."""
    if store in STORES:
        return STORES[store](path)
    built: Experience = build_plugin(store, kind="store", methods=_METHODS, path=path)
    return built


def check_store(spec: str, path: str = "") -> None:
    """Check the name or import path of a store, and whether this release can continue a SQLite file, without opening
    it. Raises PluginError, SchemaError and StoreError."""
    if ":" in spec:
        check_factory(spec, kind="store", methods=_METHODS, settings=("path",))
    elif spec not in STORES:
        raise PluginError(unknown_name(spec, kind="store", known=sorted(STORES), own="Class"))
    elif spec == "sqlite":
        check_file(path)
