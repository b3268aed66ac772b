import json
import os
from pathlib import Path

import pytest

from model_specs.untrusted import MAX_DEPTH, UntrustedFileError, open_regular, parse_json, read_json, read_json_object


@pytest.mark.parametrize("value", [{}, [], None, 0, "[[[{{{" * 100, {"a": [{"b": 1.5}] * 200}, "\ufeff"])
def test_what_json_writes_is_read_as_it_was(value: object, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(value))
    assert read_json(file) == value == parse_json(file.read_text())


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize("open_, close", ["[]", ('{"a":', "}")])
@pytest.mark.parametrize("deep", [MAX_DEPTH + 1, 100_000])
def test_only_as_deep_as_allowed(open_: str, close: str, deep: int) -> None:
    parse_json(open_ * MAX_DEPTH + "1" + close * MAX_DEPTH)
    with pytest.raises(json.JSONDecodeError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_json(open_ * deep + "1" + close * deep)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"{", "not valid JSON: Expecting property name"),
        (b"", "not valid JSON: Expecting value"),
        (b"\xff\xfe", "not valid JSON: 'utf-8' codec"),
        (b"9" * 10_000, "not valid JSON: Exceeds the limit"),
        (b" " * 1001, "larger than 0 MB"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
)
def test_what_is_no_json_is_refused_with_path_and_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(UntrustedFileError, match=reason) as error:
        read_json(file, max_bytes=1000 if content.startswith(b" ") else 100_000)
    assert str(error.value).startswith(f"{file}: ")


def test_a_list_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UntrustedFileError, match="expected a json object, found list"):
        read_json_object(tmp_path / "list.json")


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UntrustedFileError, match="a pipe or a device"):
            read_json(path)


def test_a_missing_file_and_a_folder_are_errors_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
