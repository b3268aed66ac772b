"""The same rows come out of every format and every place that a data set may have."""

import bz2
import csv
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.data import files
from rollout.data.files import data_files
from rollout.data.rows import read_examples, read_records, scan_rows
from rollout.data.source import DatasetError, DataSource, Fields

ROWS: list[dict[str, Any]] = [
    {"question": "What is 1 + 1?", "answer": "2", "level": "easy"},
    {"question": 'Say "x",\ntwice', "answer": "x^2", "level": None},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Write rows in the format that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".jsonl":
        path.write_text(text)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    else:
        write_arrow(path, rows)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        arrow.parquet.write_table(table, path, row_group_size=1)
    else:
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.json", "d.csv", "d.tsv", "d.parquet", "d.arrow"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = scan_rows(write(tmp_path / name))
    assert [(row.prompt, row.solutions) for row in rows] == [
        ("What is 1 + 1?", ("\\boxed{2}",)), ('Say "x",\ntwice', ("\\boxed{x^2}",)),
    ]  # fmt: skip
    assert [row.meta for row in rows] == [{"level": "easy"}, {"level": None}]


def test_a_json_file_may_hold_lines_a_list_under_a_key_or_one_row(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for content in ("\n".join(map(json.dumps, ROWS)), json.dumps({"version": 1, "data": ROWS})):
        path.write_text(content)
        assert [record.values for record in read_records(DataSource(path=str(path)))] == ROWS
    path.write_text(json.dumps(ROWS[0]))
    assert [record.values for record in read_records(DataSource(path=str(path)))] == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.json", b'[{"question": 1,]', "d.json:1: not json"),
        ("d.json", b"[1]", "d.json: row 1: expected a json object, found int"),
        ("d.json", b'"x"', "d.json: expected a list of json objects, found str"),
        ("d.json", b"[\xff]", "d.json: not UTF-8 at byte 1"),
        ("d.json", b"[" * 100_000, "nested more than 100 deep"),
        ("d.csv", b"question,answer\n1,2,3\n", "d.csv:2: 3 cells, and the first line names 2 columns"),
        ("d.csv", b"question,question\n1,2\n", "d.csv:1: column 'question' twice"),
        ("d.csv", b"question,answer\n\xff,2\n", "not UTF-8"),
        ("d.csv", b'question,answer\n"a,2\n', "d.csv:2: unexpected end of data"),
        ("d.csv", b"", "d.csv: no rows"),
        ("d.csv", b"question,answer\n", "d.csv: no rows"),
        ("d.jsonl.gz", b"no gzip", "d.jsonl.gz:1: not a json object"),
        ("d.jsonl.gz", gzip.compress(b"{}" * 9, mtime=0)[:-9], "the compressed file ends early or is damaged"),
        (
            "d.csv.gz",
            gzip.compress(b"a,b\n" * 99, mtime=0)[:20] + b"\xff" * 9,
            "the compressed file ends early or is damaged",
        ),
        ("d.json.xz", lzma.compress(b"{}" * 9)[:40], "the compressed file ends early or is damaged"),
        ("d.jsonl.bz2", bz2.compress(b"{}" * 9)[:30], "the compressed file ends early or is damaged"),
        ("d.jsonl.zst", b"\x28\xb5\x2f\xfd0", "compressed with zstd, which is not read"),
        ("d.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a git-lfs pointer"),
        ("d.json", b"[]", "d.json: no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError) as error:
        scan_rows(tmp_path / name)
    assert said in str(error.value) and str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_damaged_binary_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DatasetError, match=rf"{name}: "):
        scan_rows(path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d", "d.json", "d.jsonl.xz"])
def test_compression_is_found_whatever_the_name(tmp_path: Path, name: str, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / name).write_bytes(compress(b'{"question": "1+1", "answer": 2}\n{"question": "1+2", "answer": 3}\n'))
    assert [row.prompt for row in scan_rows(tmp_path / name)] == ["1+1", "1+2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"question": "%s', ":1: a line of more than 1 MiB; write one row a line"),
        ("d.csv", "question,answer\n%s,2", ":2: a line of more than 1 MiB; write one row a line"),
        ("d.csv", "%s", ":1: a line of more than 1 MiB; write one row a line"),
        ("d.tsv", 'question\tanswer\n"%s', r":\d+: field larger than field limit \(1048576\)"),
        ("d.json", '[{"question": "%s"}]', ": more than 1 MiB in one list; write jsonl, one row a line"),
    ],
)
def test_a_small_file_of_a_large_row_is_refused(tmp_path, monkeypatch, name: str, content: str, message: str) -> None:
    monkeypatch.setattr(files, "_LONGEST_LINE", 2**20)
    monkeypatch.setattr(files, "_LONGEST_LIST", 2**20)
    filling = "1\n" * 2**20 if name.endswith(".tsv") else "1" * 2**21
    (tmp_path / name).write_bytes(gzip.compress((content % filling).encode()))
    with pytest.raises(DatasetError, match=rf"{name}{message}"):
        scan_rows(tmp_path / name)


def test_names_of_columns_are_logged_without_control_codes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    row = {"question": "1+1", "answer": 2, "\x1b[31m": 1, "\ud800": 2}
    scan_rows(write(tmp_path / "d.jsonl", [row]))
    assert "not used: \\x1b[31m, \\ud800" in caplog.text and "\x1b" not in caplog.text
    with pytest.raises(DatasetError, match=r':1: "\\x1b\[31m" must be a non-empty string'):
        scan_rows(DataSource(path=str(tmp_path / "d.jsonl"), fields=Fields(prompt="\x1b[31m")))


def test_conversations_of_other_forms_are_read(tmp_path: Path) -> None:
    turns = [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "yo"}]
    ask, answer = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"conversations": turns, "system": "Be brief."},
        {"conversations": turns, "system": ""},
        {"conversations": [{"from": "System", "value": "Be brief."}, *turns], "system": "not this"},
        {"prompt": [ask], "completion": [answer]},
        {"prompt": "hi", "completion": [answer]},
        {"prompt": [ask, answer, ask], "completion": json.dumps([answer])},
    ]
    read = [read_examples(write(tmp_path / "d.jsonl", [row]))[0] for row in rows]
    assert [(example.messages, example.num_untrained) for example in read] == [
        ((system, ask, answer), 0), ((ask, answer), 0), ((system, ask, answer), 0), ((ask, answer), 1),
        ((ask, answer), 1), ((ask, answer, ask, answer), 3),
    ]  # fmt: skip
    with pytest.raises(DatasetError, match=r"no turn of the assistant to train on, only \['Oracle', 'user'\]"):
        read_examples(write(tmp_path / "d.jsonl", [{"messages": [ask, {"role": "Oracle", "content": "42"}]}]))


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(DatasetError, match="a pipe or a device; expected a file"):
        scan_rows(tmp_path / "d.jsonl")


def test_a_path_may_begin_at_home_and_may_be_a_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b-1.jsonl", "b-0.jsonl", "c.jsonl"):
        write(tmp_path / name, [{"prompt": name, "answer": 1}])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [row.prompt for row in scan_rows("~/b-*.jsonl")] == ["b-0.jsonl", "b-1.jsonl"]
    with pytest.raises(DatasetError, match="no file matches"):
        scan_rows("~/d-*.jsonl")
    with pytest.raises(DatasetError, match="no such home folder"):
        scan_rows("~nobody-here/d.jsonl")


def names_of(folder: Path, **options: Any) -> list[str]:
    return [str(path.relative_to(folder)) for path in data_files(DataSource(path=str(folder), **options))]


def test_a_folder_has_splits_by_the_names_of_its_files(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "dev.jsonl", "README.md"):
        write(tmp_path / name) if name.endswith("jsonl") else (tmp_path / name).write_text("trains")
    assert names_of(tmp_path) == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert names_of(tmp_path, prefer="test") == ["test.jsonl"]
    assert names_of(tmp_path, prefer="validation") == ["dev.jsonl"]
    with pytest.raises(DatasetError, match="no split 'rest'; it has validation, test, train: set split to one"):
        names_of(tmp_path, split="rest")


def test_a_folder_without_splits_is_read_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "one.jsonl"), write(tmp_path / "two.jsonl")
    assert names_of(tmp_path) == names_of(tmp_path, prefer="test") == ["one.jsonl", "two.jsonl"]
    (tmp_path / "one.jsonl").rename(tmp_path / "one.csv")
    with pytest.raises(DatasetError, match="csv and jsonl files of one split"):
        names_of(tmp_path)


def test_a_folder_has_subsets_by_the_names_of_its_folders(tmp_path: Path) -> None:
    for subset in ("main", "socratic"):
        write(tmp_path / subset / "train" / "0.jsonl"), write(tmp_path / subset / "test.jsonl")
    assert names_of(tmp_path, subset="main") == ["main/train/0.jsonl"]
    with pytest.raises(DatasetError, match=r"several folders \(main/train, socratic/train\); set subset"):
        names_of(tmp_path)
    with pytest.raises(DatasetError, match="no subset 'easy'; folders in it: main, socratic"):
        names_of(tmp_path, subset="easy")


def test_data_sets_saved_to_disk_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, test=saved.select([1])).save_to_disk(tmp_path / "both")
    assert [row.prompt for row in scan_rows(tmp_path / "one")] == [row["question"] for row in ROWS]
    both = DataSource(path=str(tmp_path / "both"), prefer="test")
    assert [row.prompt for row in scan_rows(both)] == [ROWS[1]["question"]]
    with pytest.raises(DatasetError, match="no split 'dev'; it has train, test"):
        scan_rows(DataSource(path=str(tmp_path / "both"), split="dev"))


def test_a_split_of_one_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(DatasetError, match="split='test', but this is one file"):
        scan_rows(DataSource(path=str(path), split="test"))


def test_a_hub_id_without_network_says_how_to_get_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError) as error:
        scan_rows("slipstream-tests/nothing")
    assert "hf download slipstream-tests/nothing --repo-type dataset --local-dir FOLDER" in str(error.value)
    assert "\n" not in str(error.value)


def test_columns_are_named_and_those_that_have_no_use_are_reported(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    row = {"ask": "1+1?", "reward_model": {"ground_truth": "2", "style": "rule"}, "prompt": "x", "why": "sum", "id": 7}
    path = write(tmp_path / "d.jsonl", [row])
    fields = Fields(prompt="ask", answer="reward_model.ground_truth")
    (read,) = scan_rows(DataSource(path=str(path), fields=fields))
    assert (read.prompt, read.solutions, read.query_id) == ("1+1?", ("\\boxed{2}",), "7")
    assert read.meta == {"prompt": "x", "why": "sum"}
    assert (
        "prompt from 'ask'; answer from 'reward_model.ground_truth'; id from 'id'; not used: prompt, why" in caplog.text
    )
    answered = write(tmp_path / "sft.jsonl", [{"prompt": "1+1=", "answer": "2", "source": "book"}])
    assert len(read_examples(DataSource(path=str(answered)))) == 1
    assert "sft.jsonl: 1 rows; prompt from 'prompt'; answer from 'answer'; not used: source" in caplog.text
    with pytest.raises(DatasetError, match=r"d\.jsonl:1: prompt_field='asked' is not among the columns"):
        scan_rows(DataSource(path=str(path), fields=Fields(prompt="asked")))


def test_hints_are_used_where_the_columns_exist_and_do_not_matter_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"ask": "q", "question": "other", "answer": 1}])
    for hint, prompt in (("ask", "q"), ("asked", "other")):
        (read,) = scan_rows(DataSource(path=str(path), hints=Fields(prompt=hint)))
        assert read.prompt == prompt


@pytest.mark.parametrize("other", ["rows.bin", "rows.jsonl", "rows.json"])
@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_binary_file_under_another_name_is_recognised(tmp_path: Path, name: str, other: str) -> None:
    write(tmp_path / name).rename(tmp_path / other)
    assert len(scan_rows(tmp_path / other)) == 2


@pytest.mark.parametrize(
    "state",
    ["{}", "[]", '{"_data_files": 5}']
    + [f'{{"_data_files": [{entry}]}}' for entry in ("", "{}", '"."', '"../a"', '"/a"', '"a\\u0000"', '"\\ud800"')],
)
def test_a_damaged_saved_data_set_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DatasetError, match=r"state.json: (_data_files must list files of this folder|not readable)"):
        scan_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(state.replace("_data_files", "splits"))
    with pytest.raises(DatasetError, match=r"dataset_dict.json: (splits must list files of this folder|not readable)"):
        scan_rows(tmp_path)
