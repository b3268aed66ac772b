"""Published benchmarks are read as they are: rows of our own in the schema of each."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.data.rows import read_examples, scan_rows
from rollout.data.source import DatasetError

OPTIONS = "\n\nA. 3\nB. 5\nC. 7\nD. 9\n\nAnswer with the letter of the right option."
TOLD = "A tank holds 9 litres. We pour out 4. How many litres stay?"

SCHEMAS: dict[str, tuple[dict[str, Any], str, str]] = {
    "svamp": (
        {"ID": "chal-0", "Body": "A tank holds 9 litres. We pour out 4", "Question": "How many litres stay?",
         "Equation": "( 9.0 - 4.0 )", "Answer": 5.0, "Type": "Subtraction"},
        TOLD, "5",
    ),
    "minerva_math": (
        {"problem": "Find the period of $\\sin 2x$.", "type": "Signals (6.003)", "idx": 0,
         "solution": "It is $2\\pi/2$, so \\boxed{\\pi}."},
        "Find the period of $\\sin 2x$.", "It is $2\\pi/2$, so \\boxed{\\pi}.",
    ),
    "olympiadbench": (
        {"id": 7, "subfield": "Algebra", "context": None, "question": "Solve $x^2=16$, $x>0$.",
         "solution": ["As $x>0$, $x=4$."], "final_answer": ["$4$"], "is_multiple_answer": False, "unit": None,
         "answer_type": "Numerical", "error": None},
        "Solve $x^2=16$, $x>0$.", "$4$",
    ),
    "gaokao2023en": (
        {"id": 0, "question": "What is $\\frac{1}{2}+\\frac{1}{4}$?", "answer": "$\\frac{3}{4}$"},
        "What is $\\frac{1}{2}+\\frac{1}{4}$?", "$\\frac{3}{4}$",
    ),
    "college_math": (
        {"data_source": "college_math.Calculus", "question_number": "exercise.1.2.3",
         "question": "Differentiate $x^3$.", "answer": "$3x^2$", "data_topic": "calculus"},
        "Differentiate $x^3$.", "$3x^2$",
    ),
    "asdiv": (
        {"body": "A tank holds 9 litres. We pour out 4.", "question": "How many litres stay?",
         "solution_type": "Subtraction", "answer": "5 (litres)", "formula": "9-4=5"},
        TOLD, "5",
    ),
    "aqua": (
        {"question": "What is 2 + 3?", "options": ["A)3", "B)5", "C)7", "D)9"], "rationale": "a sum", "correct": "B"},
        "What is 2 + 3?" + OPTIONS, "B",
    ),
    "sat_math": (
        {"question": "What is 2 + 3?", "options": "A) 3 B) 5 C) 7 D) 9", "Answer": "B"},
        "What is 2 + 3?" + OPTIONS, "B",
    ),
    "mmlu_stem": (
        {"question": "What is 2 + 3?", "subject": "arithmetic", "choices": ["3", "5", "7", "9"], "answer": 1},
        "What is 2 + 3?" + OPTIONS, "B",
    ),
    "cmath": (
        {"grade": 1, "reasoning_step": 1, "num_digits": 1,
         "question": "小明有9个苹果，吃了4个，还剩几个？", "golden": "5"},
        "小明有9个苹果，吃了4个，还剩几个？", "5",
    ),
    "aime25": (
        {"problem": "How many primes are below 1000?", "answer": "168", "id": "0"},
        "How many primes are below 1000?", "168",
    ),
}  # fmt: skip
"""Name -> (row, prompt, solution)."""


def write(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_benchmark_is_read_as_it_is_published(tmp_path: Path, name: str) -> None:
    record, prompt, solution = SCHEMAS[name]
    (row,) = scan_rows(write(tmp_path, record))
    assert row.prompt == prompt
    assert row.solutions == (solution if "\\boxed" in solution else f"\\boxed{{{solution}}}",)


def test_gpqa_hides_the_right_answer_among_the_options(tmp_path: Path) -> None:
    rows = [
        {"Pre-Revision Question": "x", "Question": f"What is {i} + {i}?", "Correct Answer": f"right {i}",
         "Incorrect Answer 1": f"wrong {i}", "Incorrect Answer 2": "less", "Incorrect Answer 3": "more\n",
         "Explanation": "sum", "Record ID": f"rec{i}"}
        for i in range(20)
    ]  # fmt: skip
    read = scan_rows(write(tmp_path, *rows))
    letters = set()
    for i, row in enumerate(read):
        options = dict(line.split(". ", 1) for line in row.prompt.splitlines() if line[1:3] == ". ")
        assert list(options) == ["A", "B", "C", "D"] and options["B"] != "more\n"
        (letter,) = (letter for letter, option in options.items() if option == f"right {i}")
        assert row.solutions == (f"\\boxed{{{letter}}}",)
        letters.add(letter)
    assert letters == {"A", "B", "C", "D"}
    assert [row.prompt for row in scan_rows(write(tmp_path, *rows[::-1]))] == [row.prompt for row in read[::-1]]


@pytest.mark.parametrize(
    "columns",
    [
        {"choices": {"text": ["3", "5", "7", "9"], "label": ["1", "2", "3", "4"]}, "answerKey": "2"},
        {"options": {"A": "3", "B": "5", "C": "7", "D": "9"}, "answer": "B"},
        {
            "choices": [{"label": "A", "text": "3"}, {"label": "B", "text": "5"}, {"text": "7"}, {"text": "9"}],
            "answer": "b",
        },
        {"options": '["3", "5", "7", "9"]', "answer": "(B)"},
        {"options": "(A) 3\n(B) 5\n(C) 7\n(D) 9", "answer": "B."},
        {"options": ["3", "5", "7", "9"], "answer": "5", "answer_index": 1},
        {"A": "3", "B": "5", "C": "7", "D": "9", "Answer": "B"},
        {"option_a": "3", "option_b": "5", "option_c": "7", "option_d": "9", "target": "B"},
        {"opa": "3", "opb": "5", "opc": "7", "opd": "9", "answer": 1},
    ],
    ids=lambda columns: ", ".join(columns),
)
def test_options_come_in_any_form(tmp_path: Path, columns: dict[str, Any]) -> None:
    (row,) = scan_rows(write(tmp_path, {"question": "What is 2 + 3?", **columns}))
    assert (row.prompt, row.solutions) == ("What is 2 + 3?" + OPTIONS, ("\\boxed{B}",))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"choices": ["3", "5"], "answer": 2}, "the answer 2 is no index of 2 options, counted from 0"),
        ({"choices": ["3", "5"], "answer": "E"}, "the answer 'E' is none of the options A, B: 3 | 5"),
        ({"choices": ["3"], "answer": "A"}, "options must be a list of 2 to 10"),
        ({"choices": "3 or 5", "answer": "A"}, "options must be a list, or a text such as 'A) 12 B) 24'"),
        ({"choices": ["3", "5"], "answer": None}, "must be a letter or an index"),
    ],
)
def test_a_multiple_choice_without_its_answer_is_named(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(DatasetError) as error:
        scan_rows(write(tmp_path, {"question": "What is 2 + 3?", **columns}))
    assert ":1: " in str(error.value) and said in str(error.value)


def test_options_that_the_question_has_already_are_not_repeated(tmp_path: Path) -> None:
    asked = "What is 2 + 3?\n(A) 3\n(B) 5"
    rows = [
        {"question": asked, "choices": ["3", "5"], "answer": "B"},
        {"question": "Is 3 or 5 the sum of 2 and 3?", "choices": ["3", "5"], "answer": "B"},
    ]
    with_options, without = scan_rows(write(tmp_path, *rows))
    assert with_options.prompt == f"{asked}\n\nAnswer with the letter of the right option."
    assert "\n\nA. 3\nB. 5\n\nAnswer" in without.prompt
    assert with_options.solutions == without.solutions == ("\\boxed{B}",)


def test_gsm8k_is_told_from_other_answers_by_its_mark_and_a_lost_mark_is_an_error(tmp_path: Path) -> None:
    marked = {"question": "q", "answer": "1 + 1 = 2\n#### 2"}
    (row,) = scan_rows(write(tmp_path, marked))
    assert row.solutions == ("\\boxed{2}",)
    with pytest.raises(DatasetError, match=r"test\.jsonl:2: \"answer\" must end in '#### <number>', as other rows do"):
        scan_rows(write(tmp_path, marked, {"question": "q", "answer": "so it is 2"}))


def test_rows_of_verl_are_read_as_they_are(tmp_path: Path) -> None:
    record = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0},
    }
    (row,) = scan_rows(write(tmp_path, record))
    assert row.messages == ({"role": "user", "content": "What is 2 + 3?"},)
    assert row.solutions == ("\\boxed{5}",)


def test_a_conversation_is_a_prompt_up_to_its_last_answer_which_is_the_solution(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is 2 + 3?"}, {"from": "gpt", "value": "It is \\boxed{5}."}]
    (row,) = scan_rows(write(tmp_path, {"conversations": turns}))
    assert row.messages == ({"role": "user", "content": "What is 2 + 3?"},)
    assert row.solutions == ("It is \\boxed{5}.",)


def test_an_own_reward_takes_prompts_without_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "Write a poem."}, {"prompt": "Another.", "answer": "two\nlines"})
    with pytest.raises(DatasetError, match="write your own reward.function"):
        scan_rows(path)
    assert [row.solutions for row in scan_rows(path, solved=False)] == [(), ()]


def test_fine_tuning_prefers_the_answer_in_full_and_reads_instructions_with_an_input(tmp_path: Path) -> None:
    alpaca = {"instruction": "Add the numbers.", "input": "2, 3", "output": "5"}
    without = {"instruction": "Say hello.", "input": "", "output": "hello"}
    openr1 = {"problem": "2+3?", "solution": "2 + 3 = 5, so \\boxed{5}", "answer": "5"}
    choice = {"question": "What is 2 + 3?", "choices": ["3", "5", "7", "9"], "answer": 1}
    read = read_examples(write(tmp_path, alpaca, without, openr1, choice))
    assert [(row.prompt, row.answer) for row in read] == [
        ("Add the numbers.\n\n2, 3", "5"), ("Say hello.", "hello"), ("2+3?", "2 + 3 = 5, so \\boxed{5}"),
        ("What is 2 + 3?" + OPTIONS, "B"),
    ]  # fmt: skip
