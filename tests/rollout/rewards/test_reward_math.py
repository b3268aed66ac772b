"""Right and wrong as math-verify sees them, and what holds nothing to score."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.data.rows import scan_rows
from rollout.rewards.math import (
    RIGHT,
    UnparsableAnswerError,
    extracted_answer,
    marked_answer,
    math_reward,
    quick_math_reward,
)
from rollout.types import Prompt

DATA = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


def prompt(*solutions: str) -> Prompt:
    token_ids = np.arange(3, dtype=np.int32)
    return Prompt(query_id="q", index=0, task="math", text="?", token_ids=token_ids, solutions=solutions)


@pytest.mark.parametrize(
    ("solution", "text"),
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{42}", " 042\n"),
        ("\\boxed{42}", "so x = 42."),
        ("\\boxed{15}", "7 + 8 = 15"),
        ("\\boxed{42}", "it is 41, no: \\boxed{42}"),
        ("\\boxed{42}", "first \\boxed{41}, then after some thought \\boxed{42}"),
        ("\\boxed{42}", "Thus $x=\\boxed{42}$. Half of that is 21."),
        ("\\boxed{42}", "\\boxed{\\boxed{42}}"),
        ("\\boxed{7}", "The answer to the first part is 5.\n#### 7"),
        ("\\boxed{1080}", "#### 1,080"),
        ("\\boxed{18}", "#### $18"),
        ("\\boxed{42}", "#### Step 2\nadd them\nThe answer is 42."),
        ("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}"),
        ("\\boxed{0.6666666667}", "\\boxed{\\frac{2}{3}}"),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "$\\boxed{(3, \\pi/2)}$"),
        ("\\boxed{\\{1, 2\\}}", "\\boxed{\\{2, 1\\}}"),
        ("so the sum is \\boxed{8}", "\\boxed{8}"),
        ("8", "\\boxed{8}"),
    ],
)
def test_right_answers_are_right(solution: str, text: str) -> None:
    assert math_reward(prompt(solution), text) == 1.0


@pytest.mark.parametrize(
    ("solution", "text"),
    [
        ("\\boxed{42}", "41"),
        ("\\boxed{42}", "\\boxed{42} is wrong, it is \\boxed{41}"),
        ("\\boxed{42}", "\\boxed{41, 42}"),
        ("\\boxed{42}", "\\boxed{-42}"),
        ("\\boxed{7}", "7 apples and\n#### 8"),
        ("\\boxed{x+1}", "\\boxed{x+2}"),
    ],
)
def test_wrong_answers_are_wrong(solution: str, text: str) -> None:
    assert math_reward(prompt(solution), text) == -1.0


def table(name: str) -> list[list[str]]:
    """Return (gold, answer, verdict, kind) of each row."""
    header, *lines = Path(__file__).with_name(name).read_text().splitlines()
    assert header.split("\t") == ["gold", "answer", "verdict", "kind"]
    return [line.split("\t") for line in lines]


PAIRS = table("math_pairs.tsv")
"""Written by hand: a solution, a completion ("⏎" is a line break), the verdict of a careful grader of MATH, its kind.

A grader accepts any form of the same value (unreduced, rearranged, another bracket of a matrix), an answer without the
solution's unit, base or half of the day, a percentage as its number or its fraction, words in any case; not a value
rounded to what 6 places tell apart, another unit, another order in a tuple, or one of several answers.
"""

DISAGREEMENTS = {
    ("\\text{isosceles}", "\\boxed{\\text{isosceles triangle}}"),
}
"""Synonyms are beyond it."""

KINDS = table("math_kinds.tsv")
"""Of the kinds that a judge gets wrong who reads a part of an answer, or one spelling of it: the columns of PAIRS."""


def test_verdicts_agree_with_a_careful_grader_on_99_of_100_answers() -> None:
    verdicts = [verdict for _, _, verdict, _ in PAIRS]
    assert len(PAIRS) >= 800
    assert set(verdicts) == {"equal", "different"}
    assert verdicts.count("different") > 0.4 * len(PAIRS)
    differing = {(gold, text) for gold, text, verdict, _ in PAIRS if is_right(gold, text) != (verdict == "equal")}
    assert differing == DISAGREEMENTS
    assert len(differing) <= 0.01 * len(PAIRS)


@pytest.mark.parametrize("kind", sorted({kind for _, _, _, kind in KINDS}))
def test_what_is_not_understood_as_a_whole_is_not_right_and_every_spelling_is(kind: str) -> None:
    rows = [(gold, text, verdict) for gold, text, verdict, of in KINDS if of == kind]
    assert [row for row in rows if is_right(row[0], row[1]) != (row[2] == "equal")] == []


@pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_solution_of_any_kind_and_an_answer_of_any_other_are_compared(stride: int) -> None:
    """By day every solution with some of the answers, and every answer with some of the solutions."""
    of_kinds = list({kind: (gold, text) for gold, text, _, kind in PAIRS + KINDS}.values())
    pairs = [(gold, text) for i, (gold, _) in enumerate(of_kinds) for _, text in of_kinds[i % stride :: stride]]
    rights = sum(is_right(gold, text) for gold, text in pairs)
    assert 0 < rights < 0.1 * len(pairs)


def test_a_completion_goes_on_with_the_thought_that_its_prompt_has_opened() -> None:
    opened = replace(prompt("3"), text="<|assistant|><think>\n")
    assert math_reward(opened, "so \\boxed{2}</think>It is \\boxed{3}.") == RIGHT
    with pytest.raises(UnparsableAnswerError):
        math_reward(opened, "so it is \\boxed{3}")
    assert quick_math_reward(opened, "so it is \\boxed{3}") is None


def is_right(gold: str, text: str) -> bool:
    try:
        return math_reward(prompt(gold.replace("⏎", "\n")), text.replace("⏎", "\n")) == RIGHT
    except UnparsableAnswerError:
        return False


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{1} or $x = \\boxed{2}$", "1, 2"),
        ("\\fbox{ 7 }", "7"),
        ("\\boxed{7}, in \\boxed as asked", "7"),
        ("as said\n#### 1,080", "1,080"),
        ("**The answer is (B).**", "(B)"),
        ("The final answer is $13$. I hope it is correct.", "13"),
        ("First 3.\nThen it is 4, so 7 in all.", "7 in all"),
        ("\\boxed{42", ""),
        ("", ""),
    ],
)
def test_what_was_judged_can_be_read(text: str, answer: str) -> None:
    assert extracted_answer(text) == answer


@pytest.mark.parametrize("text", ["", "  \n", "I do not know", "\\boxed{42", "\\boxed{}", "####"])
def test_a_text_without_an_answer_is_unparsable(text: str) -> None:
    with pytest.raises(UnparsableAnswerError):
        math_reward(prompt("\\boxed{42}"), text)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{5\\text{" + "a" * 1_500 + ";}}",
        "\\boxed{5\\text{" + "a b  " * 300 + ";}}",
        "\\boxed{5" + "b " * 500 + "!}",
        "\\boxed{" + "]a,b[" * 300 + "}",
        "`" * 5_000,
        "<answer>" * 5_000,
        "1, " + "1 +1 " * 200 + "x",
        "1,1" * 300 + "x",
        "(1 " * 300 + "x",
    ],
)
def test_a_text_on_which_a_pattern_could_try_every_split_is_judged(text: str) -> None:
    assert not is_right("5\\text{ m}", text)


def test_any_of_several_solutions_will_do() -> None:
    assert math_reward(prompt("\\boxed{1}", "\\boxed{2}"), "\\boxed{2}") == 1.0
    assert math_reward(prompt("\\boxed{1}", "\\boxed{\\frac{1}{2}}"), "\\boxed{0.5}") == 1.0
    assert quick_math_reward(prompt("\\boxed{1}", "\\boxed{\\frac{1}{2}}"), "\\boxed{3}") is None


digits = st.text("0123456789", min_size=1, max_size=12)
integers = st.builds(
    lambda sign, zeros, body: sign + zeros + body, st.sampled_from(["", "-"]), st.sampled_from(["", "00"]), digits
)


@settings(max_examples=150, deadline=None)
@given(answer=integers, other=integers, same=st.booleans())
def test_the_short_cut_for_integers_never_differs_from_math_verify(answer: str, other: str, same: bool) -> None:
    from math_verify import parse, verify  # here: every test process would load it

    solution = f"\\boxed{{{answer if same else other}}}"
    text = f"so \\boxed{{ {answer} }}."
    expected = verify(
        parse(solution, parsing_timeout=None),
        parse(f"\\boxed{{{marked_answer(text)}}}", parsing_timeout=None),
        timeout_seconds=None,
    )
    assert quick_math_reward(prompt(solution), text) == (RIGHT if expected else -1.0)


@pytest.mark.parametrize(
    "text", ["\\boxed{1e3}", "\\boxed{٤٢}", "\\boxed{4_2}", "\\boxed{+42}", "\\boxed{42.0}", "\\boxed{4 2}"]
)
def test_the_short_cut_leaves_everything_but_plain_integers_to_math_verify(text: str) -> None:
    assert quick_math_reward(prompt("\\boxed{42}"), text) is None


def test_the_short_cut_calls_no_answer_wrong_while_a_solution_may_equal_it_in_another_form() -> None:
    text = "\\boxed{42}"
    assert quick_math_reward(prompt("7", "\\frac{84}{2}"), text) is None
    assert quick_math_reward(prompt("42", "\\frac{84}{2}"), text) == RIGHT
    assert quick_math_reward(prompt("7", "8"), text) == -1.0


@pytest.mark.skipif(not DATA.is_dir(), reason="no data sets: set SLIPSTREAM_DATA to their folder")
def test_the_solutions_of_public_data_sets_are_right_answers_to_themselves() -> None:
    for name, step in (("math_500/test", 5), ("gsm8k/test", 20), ("mawps/singleop", 5)):
        rows = scan_rows(DATA / f"{name}.jsonl")[::step]
        wrong = [
            row.query_id for row in rows if math_reward(prompt(*row.solutions), f"It is ${row.solutions[0]}$.") != RIGHT
        ]
        assert not wrong, name


@pytest.mark.skipif(not DATA.is_dir(), reason="no data sets: set SLIPSTREAM_DATA to their folder")
def test_the_rationales_of_gsm8k_are_right_answers() -> None:
    lines = (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()[::10]
    rows = scan_rows(DATA / "gsm8k" / "test.jsonl")[::10]
    assert all(
        math_reward(prompt(*row.solutions), json.loads(line)["answer"]) == RIGHT
        for row, line in zip(rows, lines, strict=True)
    )


@pytest.mark.skipif(not DATA.is_dir(), reason="no data sets: set SLIPSTREAM_DATA to their folder")
def test_most_rationales_of_gsm8k_are_right_without_their_mark() -> None:
    rows = scan_rows(DATA / "gsm8k" / "test.jsonl")[::3]
    lines = (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()[::3]
    bodies = [re.sub(r"<<.*?>>", "", json.loads(line)["answer"]).partition("####")[0] for line in lines]
    num_right = sum(is_right(row.solutions[0], body) for row, body in zip(rows, bodies, strict=True))
    print(f"{num_right} of {len(rows)}")
    assert num_right >= 400
