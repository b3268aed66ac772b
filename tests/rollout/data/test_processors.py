"""Functions of the user between a data set and its first reader."""

import json
import logging
from pathlib import Path

import pytest

from helpers.config_inputs import problems, write_run
from rollout.data.rows import read_records, scan_rows
from rollout.data.source import DatasetError, DataSource

CODE = """
from pathlib import Path

calls = Path(__file__).with_name("calls")

def short(rows):
    calls.write_text(calls.read_text() + "s" if calls.exists() else "s")
    return [row for row in rows if len(row["prompt"]) < 6]

def scored(rows):
    seen = set()
    for row in rows:
        if row["prompt"] not in seen:  # without duplicates
            seen.add(row["prompt"])
            yield {**row, "level": int(row["solutions"][0])}

def more(rows):
    rows = list(rows)
    return rows + [{"prompt": "2*2=", "solutions": ["4"]}]

def objects(rows):
    return [{**row, "solutions": row["solutions"], "seen": {1}} for row in rows]

def breaks(rows):
    return [row["no such column"] for row in rows]

def texts(rows):
    return "ab"

def nothing(rows):
    return []
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rows, two of them equal, and a module `made_rows` of processors."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "made_rows", raising=False)
    (tmp_path / "made_rows.py").write_text(CODE)
    rows = [("1+1=", "2"), ("1+2=", "3"), ("10000+1=", "10001"), ("1+1=", "2")]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "solutions": [s]}) + "\n" for p, s in rows))
    return path


def source(data: Path, *names: str) -> DataSource:
    return DataSource(path=str(data), processors=tuple(f"made_rows:{name}" for name in names))


def calls(data: Path) -> str:
    return (data.parent / "calls").read_text()


def test_processors_filter_score_and_add_rows_in_their_order(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = scan_rows(source(data, "short", "scored", "more"))
    assert [(row.prompt, row.meta.get("level")) for row in rows] == [("1+1=", 2), ("1+2=", 3), ("2*2=", None)]
    assert "made_rows:short made 3 of 4 rows" in caplog.text and "made_rows:more made 3 of 2 rows" in caplog.text


def test_what_processors_made_is_read_until_rows_or_code_change(data: Path) -> None:
    first = [record.values for record in read_records(source(data, "short"))]
    assert [record.values for record in read_records(source(data, "short"))] == first and calls(data) == "s"
    assert len(list(read_records(source(data, "scored", "short")))) == 2 and calls(data) == "ss", "in another order"
    data.write_text(data.read_text() + json.dumps({"prompt": "5+1=", "solutions": ["6"]}) + "\n")
    assert len(list(read_records(source(data, "short")))) == len(first) + 1 and calls(data) == "sss"
    module = data.parent / "made_rows.py"
    module.write_text(CODE.replace("< 6", "< 60"))
    import importlib
    import sys

    importlib.invalidate_caches()
    importlib.reload(sys.modules["made_rows"])
    assert len(list(read_records(source(data, "short")))) == 5 and calls(data) == "ssss"


def test_rows_that_are_no_plain_values_are_used_and_not_kept(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert next(iter(read_records(source(data, "objects")))).values["seen"] == {1}
    assert "are not kept" in caplog.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("breaks", "processor made_rows:breaks failed with KeyError: 'no such column' (made_rows.py, line 25, in "),
        ("texts", "processor made_rows:texts failed with TypeError: it returned 'a', which is no row"),
        ("nothing", "no row is left by made_rows:nothing"),
        ("missing", "module made_rows has no 'missing'"),
    ],
)
def test_a_processor_that_cannot_be_used_is_one_problem_of_its_key(name: str, said: str, data: Path) -> None:
    with pytest.raises(DatasetError):
        list(read_records(source(data, name)))
    run = write_run(data.parent / "run")
    (problem,) = problems(run, f"dataset.path={data}", f"dataset.processors=[made_rows:{name}]")
    assert "dataset.processors: " in problem and said in problem


@pytest.mark.slow
def test_a_recipe_of_data_juicer_filters_deduplicates_and_scores_rows(data: Path) -> None:
    pytest.importorskip("data_juicer", reason="the extra data-juicer is not installed")
    recipe = data.parent / "rows.yaml"
    operators = [{"text_length_filter": {"min_len": 1, "max_len": 6}}, {"document_deduplicator": {}}]
    recipe.write_text(json.dumps({"text_keys": ["prompt"], "process": operators}))
    both = DataSource(path=str(data), processors=(str(recipe), "made_rows:scored"))
    assert [record.values for record in read_records(both)] == [
        {"prompt": "1+1=", "solutions": ["2"], "text_len": 4, "level": 2},
        {"prompt": "1+2=", "solutions": ["3"], "text_len": 4, "level": 3},
    ]
    data.write_text(json.dumps({"prompt": "1+1=", "solutions": ["2"], "text_len": "short"}) + "\n")
    with pytest.raises(DatasetError, match=rf"{data}: .*text_len=4, but the rows have a column text_len with 'short'"):
        [*read_records(both)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("process: {}", "has no list `process` of operators"),
        ("process: [{a: {}, b: {}}]", "has no list"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_problem_of_its_key(text: str | None, said: str, data: Path) -> None:
    if text is not None:
        (data.parent / "rows.yaml").write_text(text)
    (problem,) = problems(
        write_run(data.parent / "run"), f"dataset.path={data}", f"dataset.processors=[{data.parent}/rows.yaml]"
    )
    assert "dataset.processors: " in problem and said in problem
