"""A bucket that a model has loaded once is copied after that, to the same places or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout.bucket import FlatBucket
from rollout.inference.sglang.hooks.recorded_copies import RecordedCopies

ROWS, PADDED, HIDDEN, EXPERTS, WIDTH = 5, 8, 6, 3, 4
SIZES: dict[str, tuple[int, ...]] = {
    "embedding": (ROWS, HIDDEN),
    "norm": (HIDDEN,),
    **{f"{e}.{part}": (2 * WIDTH, HIDDEN) for e in range(EXPERTS) for part in ("gate", "up")},
    **{f"{e}.down": (HIDDEN, 2 * WIDTH) for e in range(EXPERTS)},
}


ELSEWHERE = torch.zeros(HIDDEN)


class Model(nn.Module):
    """The second of two tensor-parallel ranks; loads as SGLang's models do."""

    def __init__(self, before_norm: Callable[[Model, Tensor], Tensor] = lambda _, norm: norm) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.full((PADDED, HIDDEN), torch.nan))
        self.tied = self.norm = nn.Parameter(torch.zeros(2 * HIDDEN)[:HIDDEN])
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16))
        self.register_buffer("down", torch.zeros(EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16))
        self.loads, self._before_norm = 0, before_norm

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.loads += 1
        for name, tensor in tensors:
            expert, _, part = name.partition(".")
            if name == "embedding":
                self.embedding[:ROWS].data.copy_(tensor)
                self.embedding[ROWS:].data.fill_(0)
            elif name == "norm":
                self.norm.data.copy_(self._before_norm(self, tensor))
            elif part == "down":
                self.down[int(expert)].copy_(tensor[:, WIDTH:])
            else:
                begin = WIDTH if part == "up" else 0
                self.gate_up.data[int(expert)].narrow(0, begin, WIDTH).copy_(tensor[WIDTH:])

    def values(self) -> list[Tensor]:
        return [self.embedding.data, self.norm.data, self.gate_up.data.float(), self.down.float()]


def as_bucket(flat: Tensor, names: Any, dtypes: Any, shapes: Any) -> FlatBucket:
    return FlatBucket(names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(map(tuple, shapes)), flat=flat)


class Bucket:
    """Tensors end to end, and `before` bytes of something else in front of them."""

    def __init__(self, seed: int, names: Sequence[str] = tuple(SIZES), *, before: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.names, self.shapes = names, [SIZES[name] for name in names]
        self.dtypes = [torch.bfloat16 if "." in name else torch.float32 for name in names]
        self.made = [
            torch.randn(shape, generator=generator).to(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        self.flat = torch.cat(
            [torch.zeros(before, dtype=torch.uint8), *(tensor.flatten().view(torch.uint8) for tensor in self.made)]
        )[before:]

    def load(self, copies: RecordedCopies, model: nn.Module) -> None:
        copies.load(model, as_bucket(self.flat, self.names, self.dtypes, self.shapes))

    def tensors(self) -> list[tuple[str, Tensor]]:
        return list(zip(self.names, self.made, strict=True))


def load(copies: RecordedCopies, model: Model, seed: int, **options: Any) -> None:
    """Load a bucket; every value must be what the model itself would load."""
    bucket = Bucket(seed, **options)
    bucket.load(copies, model)
    alone = Model()
    alone.load_weights(Bucket(seed).tensors())
    for own, expected in zip(model.values(), alone.values(), strict=True):
        assert own.equal(expected)


def test_a_bucket_is_loaded_by_the_model_once_and_copied_after_that() -> None:
    copies, model = RecordedCopies(), Model()
    for seed in range(4):
        load(copies, model, seed)
    assert model.loads == 1


def test_memory_that_was_released_gets_its_padding_again() -> None:
    copies, model = RecordedCopies(), Model()
    load(copies, model, 0)
    model.embedding.data.fill_(torch.nan)
    load(copies, model, 1)
    assert model.loads == 1


@pytest.mark.parametrize(
    ("dtypes", "shapes"),
    [([torch.float32], [(3, 2)]), ([torch.float64], [(HIDDEN,)]), ([torch.int32], [(HIDDEN,)])],
    ids=["shape", "width", "format"],
)
def test_a_bucket_of_other_shapes_or_formats_is_loaded_by_the_model(dtypes: Any, shapes: Any) -> None:
    class Flattening(Model):
        def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
            super().load_weights([(name, tensor.view(HIDDEN)) for name, tensor in tensors])

    copies, model = RecordedCopies(), Flattening()
    Bucket(0, ["norm"]).load(copies, model)
    numbers = torch.arange(HIDDEN, dtype=dtypes[0])
    copies.load(model, as_bucket(numbers.view(torch.uint8), ["norm"], dtypes, shapes))
    assert model.loads == 2
    assert model.norm.equal(torch.arange(HIDDEN, dtype=torch.float32))


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: setattr(model, "norm", nn.Parameter(torch.zeros(HIDDEN))),
        lambda model: setattr(model.norm, "data", torch.zeros(HIDDEN)),
        lambda model: setattr(model.norm, "data", model.norm.data.as_strided((HIDDEN,), (1,), HIDDEN)),
        lambda model: setattr(model, "tied", nn.Parameter(torch.zeros(HIDDEN))),
    ],
    ids=["parameter", "memory", "place in its memory", "one of two tied ones"],
)
def test_a_parameter_that_was_replaced_is_found(replace: Callable[[Model], None]) -> None:
    copies, model = RecordedCopies(), Model()
    load(copies, model, 0)
    replace(model)
    load(copies, model, 1)
    load(copies, model, 2)
    assert model.loads == 2


def twice(model: Model, norm: Tensor) -> Tensor:
    model.norm.data[1:].copy_(norm[:-1])
    return norm


def elsewhere(model: Model, norm: Tensor) -> Tensor:
    ELSEWHERE.copy_(norm)
    return norm


def converts(model: Model, norm: Tensor) -> Tensor:
    """What is called a view and is a copy, where operations are not taken apart."""
    with torch.inference_mode():
        model.__dict__["converted"] = norm.to(torch.float64)
    return norm


@pytest.mark.parametrize(
    "before_norm",
    [lambda _, norm: norm * 1, lambda _, norm: norm if norm.sum() else norm[:], twice, elsewhere, converts],
    ids=["computes", "decides by values", "writes one place twice", "writes elsewhere", "converts"],
)
def test_what_is_more_than_copies_is_loaded_by_the_model_every_time(before_norm) -> None:
    copies, model = RecordedCopies(), Model(before_norm)
    for seed in range(3):
        load(copies, model, seed)
    assert model.loads == 3


def test_nothing_is_recorded_while_the_server_moves_parts_of_the_model() -> None:
    moves = True
    copies, model = RecordedCopies(lambda: moves), Model()
    load(copies, model, 0)
    load(copies, model, 1)
    moves = False
    load(copies, model, 2)
    load(copies, model, 3)
    assert model.loads == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_copies_on_a_gpu_are_those_of_the_model() -> None:
    copies, model, alone = RecordedCopies(), Model().cuda(), Model().cuda()
    for seed in range(3):
        bucket = Bucket(seed)
        bucket.flat = bucket.flat.cuda()
        bucket.load(copies, model)
        alone.load_weights([(name, tensor.cuda()) for name, tensor in bucket.tensors()])
        assert all(map(torch.equal, model.values(), alone.values()))
    assert model.loads == 1
