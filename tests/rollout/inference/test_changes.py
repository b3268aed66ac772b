"""Changed values of weights: their format, and copies of tensors of which only some values are there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollout.inference.changes import (
    INDEX,
    NOT_THE_BASE,
    Changed,
    ChangesError,
    ChangesReader,
    ChangesWriter,
    changed_positions,
    changes_of,
    decode_gaps,
    encode_gaps,
)

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 1100), max_size=40), st.sampled_from([0, 253, 254, 255, 509, 510]))
def test_gaps_decode_to_the_positions_that_were_encoded(gaps: list[int], first: int) -> None:
    positions = torch.cumsum(torch.tensor([first, *(gap + 1 for gap in gaps)]), 0)
    assert decode_gaps(encode_gaps(positions), 1 << 20).tolist() == positions.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_has_changed_where_its_bits_have(dtype: torch.dtype) -> None:
    old = torch.tensor([[0.0, 1.0, torch.nan], [2.0, torch.inf, 3.0]], dtype=dtype)
    new = torch.tensor([[-0.0, 1.0, torch.nan], [2.0, -torch.inf, torch.nan]], dtype=dtype)
    assert changed_positions(new, old).tolist() == [0, 4, 5]


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.narrow(0, 2, 4)


CUTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: t,
    "data": lambda t: t.data,
    "rows": rows_of,
    "columns of the second rank": lambda t: t.chunk(2, dim=1)[1],
    "split": lambda t: t.split([2, 6])[1],
    "index": lambda t: t[3:5, ::2],
    "transposed": lambda t: t.t().contiguous(),
    "view of a transposed copy": lambda t: t.t().contiguous().view(3, 16),
    "view of copied columns": lambda t: t[:, 1:4].contiguous().view(-1),
    "reshaped": lambda t: t.view(2, 4, 6).permute(1, 0, 2).reshape(4, 12),
    "columns from the middle, every second": lambda t: t[1:, 1::2],
    "one row": lambda t: t[3],
    "row of a view": lambda t: t.view(4, 2, 6)[:, 1].t(),
    "cut after a copy": lambda t: t.t().reshape(3, 16)[1:, 5:],
    "repeated": lambda t: t[2:3].expand(3, 6),
    "torch function": lambda t: torch.flatten(torch.narrow(t, 1, 0, 3)),
    "moved and cast": lambda t: t.to(CPU).to(torch.float64),
    "cast by keyword": lambda t: t.to(dtype=torch.float16),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_copy_of_any_cut_is_that_of_the_whole_tensor_and_leaves_the_rest(cut: Callable[[Any], Any]) -> None:
    old = torch.arange(48.0).view(8, 6)
    new = old.clone()
    positions = torch.tensor([0, 7, 13, 14, 15, 20, 24, 31, 47])
    new.view(-1)[positions] = -1.0 - torch.arange(9.0)
    new.view(-1)[13] = 0.0
    changed = Changed.of([8, 6], positions, new.view(-1)[positions])
    for put in (
        lambda target, source: target.data.copy_(source),
        lambda target, source: target.__setitem__(..., source),
    ):
        target = nn.Parameter(cut(old).clone().float())
        with torch.no_grad():
            put(target, cut(changed))
        assert torch.equal(target, cut(new).float())
        assert type(target.data) is Tensor
    assert changed.shape == (8, 6) and changed.numel() == 48 and changed.dim() == 2


@pytest.mark.parametrize("place", [(slice(1, 5), slice(2, 5)), (slice(None), torch.tensor([4, 0, 7]))])
def test_a_part_of_a_larger_tensor_takes_values_at_its_places_alone(place: Any) -> None:
    old, new = torch.arange(60.0).view(6, 10), -torch.arange(60.0).view(6, 10) - 1
    part = old[place]
    positions = torch.arange(0, part.numel(), 4)
    changed = Changed.of(list(part.shape), positions, new[place].reshape(-1)[positions])
    expected, target = old.clone(), old.t().contiguous().t()
    merged = part.clone().reshape(-1)
    merged[positions] = new[place].reshape(-1)[positions]
    expected[place] = merged.view(part.shape)
    target[place] = changed
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: torch.cat([t, t]),
        lambda t: t.view(torch.int32),
        lambda t: t.mul_(2.0),
        lambda t: t.copy_(torch.zeros(2, 3)),
        lambda t: torch.stack([t, t]),
        lambda t: t.tolist(),
        lambda t: t.equal(torch.zeros(2, 3)),
        lambda t: t.unsqueeze(0)[0, 0, 0].item(),
        lambda t: t.__setitem__(0, torch.zeros(3)),
        lambda t: torch.zeros(6).view_as(t),
        lambda t: np.asarray(t),
        lambda t: 7.0 in t,
        lambda t: torch.add(t, 1, out=torch.zeros(2, 3)),
        lambda t: torch._foreach_copy_([torch.zeros(2, 3)], [t]),
        lambda t: t.data_ptr(),
    ],
)
def test_nothing_computes_with_values_that_are_not_there(compute: Callable[[Tensor], Any]) -> None:
    changed = Changed.of([2, 3], torch.tensor([1]), torch.tensor([5.0]))
    with pytest.raises(NotImplementedError, match="a tensor of which only some values are there"):
        compute(changed)
    assert changed[0, 1].item() == 5.0
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.data = changed
    assert parameter.isnan().all(), "torch lets no tensor refuse this"


def test_a_tensor_whose_positions_would_cost_more_is_written_whole() -> None:
    old = torch.zeros(100, dtype=torch.bfloat16)
    few, most = old.clone(), old + 1
    few[[3, 70]] = 1
    content, count = changes_of({"same": old, "few": few, "most": most}, {"same": old, "few": old, "most": old})
    assert count == 102 and content.keys() == {"few:gaps", "few:values", "most"}
    assert content["few:gaps"].tolist() == [3, 66] and torch.equal(content["most"], most)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A folder of changes from base "a" to "b" in two files, the old weights and the new ones."""
    torch.manual_seed(0)
    old = {name: torch.randn(40, 30).bfloat16() for name in ("x.weight", "y.weight", "z.weight")}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["x.weight"].view(-1)[torch.randperm(1200)[:50]] += 1
    new["z.weight"] += 1
    writer = ChangesWriter(tmp_path)
    writer.add({name: new[name] for name in ("x.weight", "y.weight")}, old)
    writer.add({"y.weight": new["y.weight"]}, old)
    writer.add({"z.weight": new["z.weight"]}, old)
    assert writer.num_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    writer.finish(base="a", identity="b")
    return tmp_path, old, new


def test_a_folder_of_changes_makes_new_weights_of_old_ones_bit_for_bit(written: Any) -> None:
    folder, old, new = written
    reader = ChangesReader(folder, "a")
    assert reader.identity == "b"
    found = dict(reader.tensors(CPU))
    assert found.keys() == {"x.weight", "z.weight"}, "nothing of it has changed"
    for name, tensor in found.items():
        old[name].copy_(tensor)
    assert all(torch.equal(old[name], new[name]) for name in new)


@pytest.mark.parametrize("base", [None, "b", ""])
def test_other_weights_take_no_changes(written: Any, base: str | None) -> None:
    with pytest.raises(ChangesError, match=NOT_THE_BASE):
        ChangesReader(written[0], base)


def test_one_flipped_bit_in_any_file_is_found_before_anything_is_read(written: Any) -> None:
    for file in written[0].glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(ChangesError, match=rf"{file.name}: its SHA-256 is not the one in {INDEX}"):
            ChangesReader(written[0], "a")
        content[-1] ^= 1
        file.write_bytes(content)
    ChangesReader(written[0], "a")
