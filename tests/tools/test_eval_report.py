"""The numbers of an evaluation's table, and two evaluations side by side."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.evaluation import Answer
from tools.arguments import BAD_INPUT
from tools.eval.__main__ import main
from tools.eval.compare import compare, setting_differences
from tools.eval.report import pass_at_k, summarise, text_table, write_report


def answer(query_id: str, score: float, *, number: int | None = None, tokens: int = 10) -> Answer:
    mode = "greedy" if number is None else "sample"
    return Answer(
        query_id=query_id, mode=mode, number=number or 0, prompt="?", completion="!", answer=f"\\boxed{{{score}}}",
        score=score, tokens=tokens, finish_reason="stop",
    )  # fmt: skip


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 1, 6), (7, 3, 1), (8, 5, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_a_row_of_the_table_averages_over_questions() -> None:
    answers = [answer("a", 1.0), answer("b", 0.0, tokens=30)]
    answers += [answer("a", float(i < 4), number=i) for i in range(8)]
    answers += [answer("b", 0.0, number=i, tokens=20) for i in range(8)]
    result = summarise("d", answers)
    assert (result.num_questions, result.greedy_acc, result.greedy_length) == (2, 50.0, 20.0)
    assert result.sample_length == 15.0
    assert result.pass_at == {1: 25.0, 8: 50.0}
    assert list(result.values().values())[:8] == ["d", 2, 20.0, 15.0, 50.0, 25.0, 50.0, None]


def graded(query_id: str, reward: float, *, number: int | None = None) -> Answer:
    """An answer of a reward without a threshold."""
    return replace(answer(query_id, 0.0, number=number), score=None, reward=reward)


def test_a_graded_reward_is_reported_by_its_mean_and_calls_no_answer_right(tmp_path: Path) -> None:
    answers = [graded(f"q{i}", reward) for i, reward in enumerate((0.3, 0.3, 0.3, 1.0, 0.3))]
    result = summarise("d", [*answers, *(graded(f"q{i}", 0.5, number=0) for i in range(5))])
    row = result.values()
    assert (row["greedy_acc"], row["sample_pass@1"], result.pass_at) == (None, None, {})
    half = 1.96 * float(np.std([0.3, 0.3, 0.3, 1.0, 0.3], ddof=1)) / 5**0.5
    assert (row["greedy_reward"], row["greedy_reward_interval"]) == pytest.approx((0.44, half))
    assert (row["sample_reward"], row["sample_reward_interval"]) == pytest.approx((0.5, 0.0))
    table = write_report(tmp_path, [result], {"model_path": "m"}, reward="own:graded")
    assert [cell.strip() for cell in table.splitlines()[3].split("|")[1:5]] == [
        "d",
        "5",
        "0.440 ± 0.274",
        "0.500 ± 0.000",
    ]
    assert "acc" not in table and "pass@" not in table and (tmp_path / "results.png").stat().st_size > 1000


def test_graded_rewards_are_compared_by_their_means(tmp_path: Path, capsys) -> None:
    a = write(tmp_path / "a", [graded(f"q{i}", 0.3) for i in range(20)])
    b = write(tmp_path / "b", [graded(f"q{i}", 0.3 + 0.1 * (i % 2)) for i in range(20)])
    reward, length = compare(a, b).differences
    assert (reward.measure, reward.a, reward.b) == ("greedy_reward", pytest.approx(0.3), pytest.approx(0.35))
    assert 0.02 < reward.low < 0.05 < reward.high < 0.08 and length.measure == "greedy_length"
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "+0.050" in printed and "answered right" not in printed


@pytest.mark.parametrize(
    ("samples", "columns"), [((7, 7), {1}), ((8, 7), {1}), ((8, 8), {1, 8}), ((15, 16), {1, 8}), ((16, 16), {1, 8, 16})]
)
def test_pass_at_k_is_in_the_table_when_every_question_has_k_samples(samples, columns) -> None:
    answers = [answer(f"q{i}", 1.0) for i in range(len(samples))]
    answers += [answer(f"q{i}", 1.0, number=j) for i, n in enumerate(samples) for j in range(n)]
    assert summarise("d", answers).pass_at == dict.fromkeys(columns, 100.0)


def test_the_table_looks_as_the_tutorials() -> None:
    assert text_table(("dataset", "greedy_acc"), [("aime24", 50.0), ("amc23", None)]) == "\n".join(
        (
            "+---------+------------+",
            "| dataset | greedy_acc |",
            "+---------+------------+",
            "|  aime24 |    50.0    |",
            "|  amc23  |     -      |",
            "+---------+------------+",
        )
    )


def write(folder: Path, answers: list[Answer], *, name: str = "d") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(asdict(a)) + "\n" for a in answers))
    return folder


def test_two_evaluations_are_compared_question_by_question(tmp_path: Path, capsys) -> None:
    right_in_a, right_in_b = {"q1", "q2"}, {"q2", "q3", "q4", "q5"}
    questions = [f"q{i}" for i in range(20)]
    a = write(tmp_path / "a", [answer(q, float(q in right_in_a)) for q in questions])
    b = write(tmp_path / "b", [answer(q, float(q in right_in_b), tokens=12) for q in questions])
    found = compare(a, b)
    assert not found.left_out
    accuracy, length = found.differences
    assert (accuracy.measure, accuracy.a, accuracy.b, accuracy.num_questions) == ("greedy_acc", 10.0, 20.0, 20)
    assert accuracy.low < 10.0 < accuracy.high and -10 <= accuracy.low <= 0 and 20 <= accuracy.high <= 35
    assert (length.b - length.a, length.low, length.high) == (2.0, 2.0, 2.0), "every question is 2 tokens longer"
    assert {(f.query_id, f.now_right) for f in found.flips} == {("q1", False), ("q3", True), ("q4", True), ("q5", True)}
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "3 questions answered right in B only" in printed and "1 questions answered right in A only" in printed


def test_the_interval_holds_95_of_100_resamples(tmp_path: Path) -> None:
    """By the binomial distribution the mean of 400 coins is below 45 % in 2.5 of 100 cases, and below 46 % in 5."""
    a = write(tmp_path / "a", [answer(f"q{i}", 0.0) for i in range(400)])
    b = write(tmp_path / "b", [answer(f"q{i}", float(i % 2)) for i in range(400)])
    accuracy = compare(a, b).differences[0]
    assert accuracy.low == pytest.approx(45.0, abs=0.4)
    assert accuracy.high == pytest.approx(55.0, abs=0.4)


def test_two_files_of_one_name_are_not_compared(tmp_path: Path, capsys) -> None:
    folders = []
    for name, questions, prompt in (("a", "1f", "1+1="), ("b", "2e", "2*3="), ("c", "1f", "say: 1+1=")):
        folders.append(write(tmp_path / name, [replace(answer("d-1", 1.0), prompt=prompt)]))
        (tmp_path / name / "settings.json").write_text(json.dumps({"questions": {"d": questions}}))
    a, b, c = map(str, folders)
    assert main(["compare", a, b]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "used different files with that name: d-1 is '1+1=' in A and '2*3=' in B" in said
    assert main(["compare", a, c]) == 0, "the same questions in another template"


SETTINGS: dict[str, Any] = {
    "reward": "math", "right_at": 1.0, "workflow": "math",
    "max_gen_tokens": 6, "temperature": 0.6, "top_p": 0.95, "seed": 1,
    "prompt_format": {
        "template": None, "system": None, "instruction": "", "chat_template": None, "chat_options": {},
    },
    "generator": "embedded", "dtype": None, "sglang": {}, "stop_token_ids": [1], "questions": {"d": "1f"},
}  # fmt: skip


def two_evaluations(tmp_path: Path, changed: dict[str, Any], *, samples: int) -> list[str]:
    """Return the folders of two evaluations, the second with changed settings."""
    folders = []
    for name, settings in (("a", SETTINGS), ("b", SETTINGS | changed)):
        answers = [answer("q", 1.0), *(answer("q", 1.0, number=i) for i in range(samples))]
        folders.append(str(write(tmp_path / name, answers)))
        (tmp_path / name / "settings.json").write_text(json.dumps(settings))
    return folders


@pytest.mark.parametrize(
    ("changed", "both_values", "option"),
    [
        ({"reward": "own:half"}, "reward='math' in A and 'own:half' in B", "--reward"),
        ({"workflow": "own:W"}, "workflow='math' in A and 'own:W' in B", "--workflow"),
        ({"max_gen_tokens": 8}, "max_gen_tokens=6 in A and 8 in B", "--max_gen_tokens"),
        ({"temperature": 1.0}, "temperature=0.6 in A and 1.0 in B", "--temperature"),
        ({"top_p": 1.0}, "top_p=0.95 in A and 1.0 in B", "--top_p"),
        (
            {"prompt_format": {**SETTINGS["prompt_format"], "template": "Q: {prompt}"}},
            "prompt_format.template=None in A and 'Q: {prompt}' in B", "--prompt_template",
        ),
        (
            {"prompt_format": {**SETTINGS["prompt_format"], "chat_options": {"think": True}}},
            "prompt_format.chat_options={} in A and {'think': True} in B", "--config",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_evaluations_with_settings_that_change_the_measures_are_compared_only_on_request(
    changed: dict[str, Any], both_values: str, option: str, tmp_path: Path, capsys
) -> None:
    folders = two_evaluations(tmp_path, changed, samples=1)
    assert main(["compare", *folders]) == BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f": {both_values}. Evaluate one of the models again with the settings of the other ({option};" in printed.err
    assert "add --allow_different" in printed.err
    assert main(["compare", *folders, "--allow_different"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"warning: the results are not comparable: {both_values}" and shown[1].startswith("+-")


@pytest.mark.parametrize(
    ("changed", "samples", "warnings"),
    [
        ({}, 1, []),
        ({"seed": 2}, 1, []),
        ({"temperature": 1.0, "top_p": 1.0}, 0, []),
        ({"dtype": "float32"}, 1, []),
        ({"dtype": "bfloat16"}, 1, ["dtype='float32' in A and 'bfloat16' in B"]),
        ({"stop_token_ids": [1, 5]}, 1, ["stop_token_ids=[1] in A and [1, 5] in B"]),
        (
            {"generator": "sglang"}, 1,
            ["generator='embedded' in A and 'sglang' in B", "dtype='float32' in A and 'bfloat16' in B"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_leave_the_measures_as_they_are_are_compared_with_a_warning_or_none(
    changed: dict[str, Any], samples: int, warnings: list[str], tmp_path: Path
) -> None:
    assert compare(*map(Path, two_evaluations(tmp_path, changed, samples=samples))).warnings == warnings


def test_sets_that_one_side_did_not_answer_are_left_out_and_named(tmp_path: Path, capsys) -> None:
    a = write(tmp_path / "a", [answer("q", 0.0)])
    b = write(tmp_path / "b", [answer("q", 1.0), answer("q", 1.0, number=0)])
    write(a, [answer("q", 1.0)], name="begun")
    write(b, [], name="begun")
    write(b, [answer("q", 1.0)], name="more")
    write(a, [answer("1", 1.0)], name="other")
    write(b, [answer("2", 1.0)], name="other")
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split()[1::2][:2] for line in printed.splitlines() if line.startswith("|")]
    assert rows == [["dataset", "measure"], ["d", "greedy_acc"], ["d", "greedy_length"]], "only B was sampled"
    assert "begun is left out: no answers in B" in printed and "more is left out: no answers in A" in printed
    assert "other is left out: no question in common" in printed
    for folder in (a, b):
        (folder / "d.jsonl").unlink()
    assert main(["compare", str(a), str(b)]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "no dataset in common" in said and "; begun: no answers in B; more: no answers in A; other: no q" in said


@pytest.mark.parametrize(
    ("paths", "hashes", "refused"),
    [
        (("a.jinja", "a.jinja"), ("1f", "2e"), "prompt_format.chat_template='hash 1f' in A and 'hash 2e' in B"),
        (("a.jinja", "b.jinja"), ("1f", "1f"), None),
        ((None, None), (None, None), None),
        (("a.jinja", "b.jinja"), (), "prompt_format.chat_template='a.jinja' in A and 'b.jinja' in B"),
    ],
    ids=["changed", "moved", "none", "before hashes were kept"],
)
def test_chat_templates_are_compared_by_their_content(paths, hashes, refused) -> None:
    a, b = (
        SETTINGS
        | {"prompt_format": {**SETTINGS["prompt_format"], "chat_template": path}}
        | ({"chat_template_hash": hashes[i]} if hashes else {})
        for i, path in enumerate(paths)
    )
    assert list(setting_differences(a, b, sampled=True).refused) == ([refused] if refused else [])
