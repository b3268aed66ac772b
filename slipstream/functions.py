"""Functions and classes as import paths: what a configuration names and every process of the user can import.

A top-level object of a module is named where it is. All others (of the script or notebook that runs, lambdas, closures,
partial and callable objects) are written by value as a module of their own below the user's state folder. Invariant:
the name of such a module is a hash of its content, so a run that continues, or an evaluation, finds the same object.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import cloudpickle

from rollout.plugins import functions_folder, make_state_folder

_MODULE = '''"""{name}, by value, as slipstream was given it in Python {version}."""

import base64
import pickle

{name} = pickle.loads(base64.b85decode({data!r}))
'''


def import_path(found: Callable[..., object]) -> str:
    """Return "module:name" of a function, class or callable object, as configuration keys take it.

    Raises ValueError for an object that holds what cannot be passed to another process, such as a lock or an open file.
    """
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    is_named = (
        isinstance(name, str) and name.isidentifier() and getattr(sys.modules.get(module or ""), name, 0) is found
    )
    return f"{module}:{name}" if is_named and module != "__main__" else _by_value(found)


def _by_value(found: Callable[..., object]) -> str:
    """Write an object as a module and return its import path."""
    name = _name(found)
    try:
        data = cloudpickle.dumps(found)
    except Exception as error:  # noqa: BLE001 - pickling raises anything
        raise ValueError(
            f"{name}: cannot be passed to the processes of a run ({type(error).__name__}: {error}); it uses an object "
            "that belongs to this process: create that in the function, or import the function from a module"
        ) from None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = _MODULE.format(name=name, version=version, data=base64.b85encode(data).decode())
    module = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = functions_folder()
    make_state_folder(folder)
    descriptor, new = tempfile.mkstemp(dir=folder)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(new, folder / f"{module}.py")
    return f"{module}:{name}"


def _name(found: object) -> str:
    """Return an identifier for an object: its own name, that of what it wraps, or that of its class."""
    while isinstance(found, functools.partial):
        found = found.func
    name = getattr(found, "__name__", type(found).__name__)
    return name if name.isidentifier() else f"{name.strip('<>')}_function"


def script_folder() -> list[str]:
    """Return the folder of the script that runs, from which it imports its own modules; empty in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return [str(Path(file).resolve().parent)] if file else []
