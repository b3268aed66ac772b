"""The one serial form of what is sampled: completions and episodes as a few arrays and plain values, and as bytes.

Records of one type lie end to end: one array for each per-token field, one list for each other field. The same form
crosses the object store, is in recover checkpoints, and as bytes in the rows of a SQL store.

    bytes = length of the head [8 bytes, little-endian], head (JSON), one flat array a dtype

Invariant: reading returns what was written, types and bits included, except that numpy scalars become Python numbers
and the arrays of one field share a dtype. Reading cannot run code.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np

from rollout.experience.episode import Episode, Event, Tags
from rollout.types import Completion, Trajectory

SCHEMA = 1
"""Version of the form. A reader refuses another one."""

T = TypeVar("T", Completion, Trajectory)

_PER_TOKEN: dict[type[Any], tuple[str, ...]] = {
    Completion: ("token_ids", "logprobs", "versions"),
    Trajectory: ("token_ids", "loss_mask", "rollout_logprobs", "versions"),
}
_OTHERS = {kind: tuple(f.name for f in fields(kind) if f.name not in names) for kind, names in _PER_TOKEN.items()}
_PLAIN = frozenset({type(None), bool, int, float, str})
_KINDS = "biuf"
"""Of arrays that can be stored: bool, int, unsigned int, float."""


class SchemaError(ValueError):
    """Something was written by another release."""


def records_to_plain(records: Sequence[T]) -> dict[str, Any]:
    """Lay records of one type end to end. Arrays are copies."""
    if not records:
        return {"lens": []}
    kind = type(records[0])
    plain: dict[str, Any] = {"lens": [len(r.token_ids) for r in records]}
    for name in _PER_TOKEN[kind]:
        plain[name] = np.concatenate([getattr(r, name) for r in records])
    for name in _OTHERS[kind]:
        plain[name] = [getattr(r, name) for r in records]
    return plain


def records_from_plain(kind: type[T], plain: Mapping[str, Any]) -> list[T]:
    """Return the inverse of records_to_plain(); arrays are views."""
    per_token, others = _PER_TOKEN[kind], _OTHERS[kind]
    records, start = [], 0
    for i, num_tokens in enumerate(plain["lens"]):
        own = {name: plain[name][start : start + num_tokens] for name in per_token}
        records.append(kind(**own, **{name: plain[name][i] for name in others if name in plain}))
        start += num_tokens
    return records


def event_to_plain(event: Event) -> dict[str, Any]:
    """Convert an event of a journal to plain values and arrays."""
    sampled = isinstance(event.value, Completion)
    value = records_to_plain([event.value]) if isinstance(event.value, Completion) else event.value
    return {"key": event.key, "asked": event.asked, "sampled": sampled, "value": value}


def event_from_plain(plain: Mapping[str, Any]) -> Event:
    """Return the inverse of event_to_plain()."""
    value = plain["value"]
    if plain["sampled"]:
        (value,) = records_from_plain(Completion, value)
    return Event(key=plain["key"], asked=plain["asked"], value=value)


def episode_to_plain(episode: Episode) -> dict[str, Any]:
    """Convert an episode to plain values and arrays."""
    return {"schema": SCHEMA, "tags": asdict(episode.tags), "trajectories": records_to_plain(episode.trajectories)}


def episode_from_plain(plain: Mapping[str, Any]) -> Episode:
    """Return the inverse of episode_to_plain(). Raises SchemaError."""
    check_schema(plain.get("schema"))
    return Episode(tags=Tags(**plain["tags"]), trajectories=records_from_plain(Trajectory, plain["trajectories"]))


def check_schema(found: object) -> None:
    """Raise SchemaError where `found` is not the version that this release writes."""
    if found != SCHEMA:
        raise SchemaError(
            f"its experience has the serial form {found}, this release reads {SCHEMA}: continue with the release that "
            "wrote it, or begin at the same step with recover_ignore_changes=true"
        )


def dumps(value: object) -> bytes:
    """Convert plain values and arrays to bytes. Raises TypeError for a type that has no plain form."""
    arrays = Arrays()
    tree = encode(value, arrays, "value")
    flat = {dtype: array.tobytes() for dtype, array in arrays.flat().items()}
    head = json.dumps([tree, {dtype: len(data) for dtype, data in flat.items()}]).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *flat.values()))


def loads(data: bytes) -> Any:
    """Return the inverse of dumps(). Raises ValueError for other bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    tree, sizes = json.loads(data[8:end])
    flat = {}
    for dtype, size in sizes.items():
        kind = np.dtype(dtype)
        flat[dtype] = np.frombuffer(data, kind, size // kind.itemsize, end)
        end += size
    return decode(tree, flat)


class Arrays:
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


def encode(value: Any, arrays: Arrays, place: str) -> Any:
    """Return what json.dumps writes for `value`: {"$array": [dtype, offset, shape]} in place of an array; tuples, bytes
    and dicts with keys other than text are marked likewise. Raises TypeError, with the place in the value."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {"$array": arrays.add(value)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, list | tuple):
        items = [
            item if type(item) in _PLAIN else encode(item, arrays, f"{place}[{i}]") for i, item in enumerate(value)
        ]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        encoded = [
            (key, item if type(item) in _PLAIN else encode(item, arrays, f"{place}.{key}"))
            for key, item in value.items()
        ]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(encoded)
        return {"$dict": [[encode(key, arrays, place), item] for key, item in encoded]}
    raise TypeError(
        f"{place}: {type(value).__name__} cannot be saved in a recover checkpoint; use numbers, text, lists, dicts and "
        "numeric numpy arrays"
    )


def decode(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the inverse of encode(); `arrays` are those that it collected, by dtype."""
    if isinstance(tree, list):
        return [item if type(item) in _PLAIN else decode(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith("$"):
        return {key: decode(item, arrays) for key, item in tree.items()}
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
    "$tuple": lambda items, arrays: tuple(decode(item, arrays) for item in items),
    "$dict": lambda items, arrays: {decode(key, arrays): decode(item, arrays) for key, item in items},
}
