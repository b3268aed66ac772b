"""What a rank reads of the optimizer's state in a checkpoint.

Megatron gives each data-parallel rank memory for the state of all of them. Only rows of which this rank has a part are
read; the pages of the others are never written, and so take no memory.
"""

from collections.abc import Iterable, Sequence

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from torch import Tensor

Interval = tuple[int, int]
"""First element, and the one behind the last."""


class OwnedRows:
    """The parts of flat tensors that this rank has, and the rows of their views that these lie in."""

    def __init__(self) -> None:
        self._parts: dict[int, Sequence[Interval]] = {}  # by the address of the storage

    def add(self, flat: Tensor, parts: Iterable[Interval]) -> None:
        """Note the `parts` of a flat tensor that this rank has."""
        self._parts[flat.untyped_storage().data_ptr()] = [*parts]

    def of(self, view: Tensor) -> Interval | None:
        """Return the rows of a view into a flat tensor that are to be read; None for any other tensor."""
        parts = self._parts.get(view.untyped_storage().data_ptr())
        if parts is None or not view.is_contiguous():
            return None
        begin, size = view.storage_offset(), view.numel()
        own = [(max(first - begin, 0), min(end - begin, size)) for first, end in parts]
        own = [(first, end) for first, end in own if first < end]
        if not own:
            return 0, 0
        row = size // len(view)
        return min(first for first, _ in own) // row, -(-max(end for _, end in own) // row)

    def join_in_place(self, state: ShardedStateDict) -> None:
        """Let what is read in several pieces stay where it is, in place of a copy of the whole."""
        for factory in nested_values(state):
            if isinstance(factory, ShardedTensorFactory) and all(
                self.of(piece.data) is not None for piece in nested_values(factory.build())
            ):
                factory.merge_fn = lambda _, whole=factory.data: whole
