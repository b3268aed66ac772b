"""Golden numbers of the literature and of other projects, and gradients by finite differences."""

from dataclasses import replace

import pytest

from core.config.presets import PRESETS
from tools.conformance import CASES
from tools.conformance.__main__ import GOLDEN, GRADIENT_CASES, PEERS, gradients, main


@pytest.mark.parametrize("family", GOLDEN)
def test_the_code_gives_the_golden_numbers(family: str) -> None:
    numbers = list(GOLDEN[family]())
    assert len(numbers) >= 19
    assert [number for number in numbers if not number.holds] == []


def test_gradients_of_every_preset_and_of_preferences_are_checked() -> None:
    assert GRADIENT_CASES.keys() == PRESETS.keys() | {"dpo", "ipo"}


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    (found,) = gradients([name], num_directions=2)
    assert found.holds, found


def test_a_peer_deviates_by_more_than_the_tolerance() -> None:
    assert all(abs(row["peer_value"] - row["own_value"]) > 1e-6 for row in PEERS["deviations"])


def test_cases_and_their_golden_numbers_belong_together() -> None:
    assert [case.name for case in CASES] == list(PEERS["rows"])


def test_the_command_fails_with_what_is_wrong(monkeypatch, capsys) -> None:
    right, *_ = next(iter(GOLDEN.values()))()
    monkeypatch.setattr("tools.conformance.__main__.gradients", lambda: iter(()))
    for number, code in ((right, 0), (replace(right, found=right.found + 1), 1)):
        monkeypatch.setattr("tools.conformance.__main__.GOLDEN", {"one": lambda number=number: [number]})
        assert main([]) == code
        shown = capsys.readouterr()
        assert shown.out == f"1 golden numbers, gradients of 0 presets: {code} wrong\n"
        assert (right.name in shown.err) == (code == 1)
