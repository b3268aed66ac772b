"""Check what an algorithm returns, where a mistake would otherwise show later or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor

from core.algorithms.base import Algorithm


def check_fields(fields: Mapping[str, Tensor], num_tokens: int) -> None:
    """Raise ValueError unless `fields`, returned by `advantages`, has "advantages" and one value per token in each."""
    if "advantages" not in fields:
        got = ", ".join(map(repr, fields)) or "nothing"
        raise ValueError(f"advantages() must return the field 'advantages', got {got}")
    for name, values in fields.items():
        if not _is_vector(values, num_tokens):
            raise ValueError(
                f"advantages() must return tensors with one value per token, [T] = [{num_tokens}], got {_kind(values)} "
                f"for {name!r}; values per sequence [N] become [T] with repeat_interleave"
            )


def check_baseline(values: Tensor, num_sequences: int) -> None:
    """Raise ValueError unless `values`, returned by `baseline`, has one value per sequence."""
    if not _is_vector(values, num_sequences):
        raise ValueError(
            f"baseline() must return a tensor with one value per sequence, [N] = [{num_sequences}], got {_kind(values)}"
        )


def _is_vector(values: object, length: int) -> bool:
    return isinstance(values, Tensor) and tuple(values.shape) == (length,)


def _kind(values: object) -> str:
    return f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__


def plain_state(algorithm: Algorithm) -> dict[str, object]:
    """Return algorithm.state_dict(). Raises ValueError for values that a recover checkpoint cannot store."""
    state = algorithm.state_dict()
    for name, value in state.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"state_dict()[{name!r}] must consist of the types of JSON, got {value!r}; convert tensors and arrays "
                "with .tolist()"
            ) from error
    return state
