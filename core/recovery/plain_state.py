"""Files of a nested state: JSON for its structure, a .npz for its arrays. Reading them cannot run code.

    {name}.json   the state, as rollout/experience/serial.py encodes it
    {name}.npz    one flat array a dtype, in which its arrays lie end to end

Invariant: `read_state` returns what `write_state` got, types and bits included, except that numpy scalars become Python
numbers.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from core.runs.checkpoints import MAX_STATE_BYTES, MAX_STATE_DEPTH
from model_specs.untrusted import open_regular, read_json
from rollout.experience.serial import Arrays, decode, encode


class StateError(ValueError):
    """A file does not hold a state that `write_state` wrote."""


def write_state(folder: Path, name: str, state: object) -> None:
    """Write `{name}.json` and `{name}.npz`. Raises OSError, and TypeError, with the place in the state, for a type that
    has no plain form."""
    arrays = Arrays()
    text = json.dumps(encode(state, arrays, name))
    with open(folder / f"{name}.npz", "wb") as f:
        flat: dict[str, Any] = dict(arrays.flat())
        np.savez(f, **flat)
    (folder / f"{name}.json").write_text(text)


def read_state(folder: Path, name: str) -> object:
    """Return the state that was written. Raises OSError, and StateError where the files do not hold one."""
    try:
        tree = read_json(folder / f"{name}.json", max_bytes=MAX_STATE_BYTES, max_depth=MAX_STATE_DEPTH)
        with open_regular(folder / f"{name}.npz") as file, np.load(file, allow_pickle=False) as stored:
            if any(member.compress_type != zipfile.ZIP_STORED for member in stored.zip.infolist()):
                raise ValueError("its arrays are compressed, so that a small file could take all memory")
            return decode(tree, {key: stored[key] for key in stored.files})
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 (damaged zip, JSON and numpy headers raise a dozen types)
        raise StateError(f"{folder / name}.json and .npz do not hold a saved state: {error!r}") from error
