"""What torch and Megatron leave untyped: the context of an autograd.Function, and attributes of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


def mark(parameter: Tensor, **attributes: object) -> None:
    """Set attributes by which Megatron distinguishes parameters."""
    vars(parameter).update(attributes)


class Context(Protocol):
    """What torch passes to forward and backward as their first argument."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the forward pass has kept."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Declare outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Declare whether missing gradients come as zeros."""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...
