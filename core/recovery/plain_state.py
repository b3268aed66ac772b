"""Files of a nested state: JSON for its structure, a .npz for its arrays. Reading them cannot run code.

    {name}.json   the state; {"$array": [dtype, offset, shape]} in place of an array
    {name}.npz    one flat array a dtype, in which the arrays lie end to end

Tuples, bytes and dicts with keys other than text are marked likewise. Invariant: `read_state` returns what
`write_state` got, types and bits included, except that numpy scalars become Python numbers.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from core.runs.checkpoints import MAX_STATE_BYTES, MAX_STATE_DEPTH
from model_specs.untrusted import open_regular, read_json

_KINDS = "biuf"
"""Of arrays that can be stored: bool, int, unsigned int, float."""


class StateError(ValueError):
    """A file does not hold a state that `write_state` wrote."""


def write_state(folder: Path, name: str, state: object) -> None:
    """Write `{name}.json` and `{name}.npz`. Raises OSError, and TypeError, with the place in the state, for a type that
    has no plain form."""
    arrays = _Arrays()
    text = json.dumps(_encode(state, arrays, name))
    with open(folder / f"{name}.npz", "wb") as f:
        flat: dict[str, Any] = dict(arrays.flat())
        np.savez(f, **flat)
    (folder / f"{name}.json").write_text(text)


def read_state(folder: Path, name: str) -> Any:
    """Return the state that was written. Raises OSError, and StateError where the files do not hold one."""
    try:
        tree = read_json(folder / f"{name}.json", max_bytes=MAX_STATE_BYTES, max_depth=MAX_STATE_DEPTH)
        with open_regular(folder / f"{name}.npz") as file, np.load(file, allow_pickle=False) as stored:
            if any(member.compress_type != zipfile.ZIP_STORED for member in stored.zip.infolist()):
                raise ValueError("its arrays are compressed, so that a small file could take all memory")
            return _decode(tree, {key: stored[key] for key in stored.files})
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 (damaged zip, JSON and numpy headers raise a dozen types)
        raise StateError(f"{folder / name}.json and .npz do not hold a saved state: {error!r}") from error


class _Arrays:
    """Collects arrays by dtype; `add` returns where one will lie."""

    def __init__(self) -> None:
        self._of: dict[str, list[np.ndarray]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, array: np.ndarray) -> list[Any]:
        dtype = array.dtype.str
        offset = self._sizes.get(dtype, 0)
        self._of.setdefault(dtype, []).append(array.reshape(-1))
        self._sizes[dtype] = offset + array.size
        return [dtype, offset, list(array.shape)]

    def flat(self) -> dict[str, np.ndarray]:
        return {dtype: np.concatenate(arrays) for dtype, arrays in self._of.items()}


def _encode(value: Any, arrays: _Arrays, place: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {"$array": arrays.add(value)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, list | tuple):
        items = [_encode(item, arrays, f"{place}[{i}]") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        encoded = [(key, _encode(item, arrays, f"{place}.{key}")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(encoded)
        return {"$dict": [[_encode(key, arrays, place), item] for key, item in encoded]}
    raise TypeError(
        f"{place}: {type(value).__name__} cannot be saved in a recover checkpoint; use numbers, text, lists, dicts and "
        "numeric numpy arrays"
    )


def _decode(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith("$"):
        return {key: _decode(item, arrays) for key, item in tree.items()}
    return _MARKED[mark](tree[mark], arrays)


def _array(place: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    dtype, offset, shape = place
    end = offset + math.prod(shape)
    if not 0 <= offset <= end <= arrays[dtype].size:
        raise ValueError(f"array {place} lies outside the stored {arrays[dtype].size} elements")
    return arrays[dtype][offset:end].reshape(shape).copy()  # a view would keep all arrays in memory


_MARKED: dict[str, Callable[[Any, Mapping[str, np.ndarray]], Any]] = {
    "$array": _array,
    "$bytes": lambda text, _: bytes.fromhex(text),
    "$tuple": lambda items, arrays: tuple(_decode(item, arrays) for item in items),
    "$dict": lambda items, arrays: {_decode(key, arrays): _decode(item, arrays) for key, item in items},
}
