"""What is placed in Ray's object store and what travels in messages."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from core.launch.remote import SMALL_BYTES, fetch, place

SMALL, LARGE = np.zeros(SMALL_BYTES, np.uint8), np.zeros(SMALL_BYTES + 1, np.uint8)


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Maker:
    async def take(self) -> tuple[list[Any], str]:
        return [place({"values": array}, [array]) for array in (LARGE, SMALL, LARGE + 1)], "facts"


@ray.remote(num_cpus=0)
class Reader:
    def read(self, placed: list[Any]) -> list[tuple[bool, int, int]]:
        """Return of every piece whether it was a reference, its length and its first value."""
        values = [arrays["values"] for arrays in fetch(placed)]
        return [(isinstance(p, ray.ObjectRef), len(v), int(v[0])) for p, v in zip(placed, values, strict=True)]


@pytest.mark.nightly
def test_a_reader_gets_small_arrays_in_the_message_and_large_ones_from_the_store_in_order(cluster: None) -> None:
    maker, reader = Maker.remote(), Reader.remote()
    batch, facts = maker.take.options(num_returns=2).remote()
    assert ray.get(facts) == "facts"
    assert ray.get(reader.read.remote(batch)) == [
        (True, SMALL_BYTES + 1, 0), (False, SMALL_BYTES, 0), (True, SMALL_BYTES + 1, 1)
    ]  # fmt: skip


def test_the_limit_is_of_all_arrays_of_a_value_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: (value, "placed"))
    half = SMALL[: SMALL_BYTES // 2]
    assert place("value", [half, half]) == "value"
    assert place("value", [half, half, SMALL[:1]]) == ("value", "placed")
