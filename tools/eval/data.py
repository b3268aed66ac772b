"""Benchmarks by name: where their files are, and the prompts in them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.data.encoder import Encoder
from rollout.data.files import is_hub_id, known_formats, suffix_of
from rollout.data.prompts import make_prompt
from rollout.data.rows import Row, scan_rows
from rollout.data.source import DatasetError, DataSource
from rollout.types import Prompt

FORMAT = 'one json object per line with a question and its answer, as {"problem": "1+1?", "answer": "2"}'


class EvalError(ValueError):
    """Something the user can mend; the message contains the reason."""


class EvalFailure(RuntimeError):
    """Something failed while running; the message contains the reason."""


@dataclass(frozen=True)
class Benchmark:
    """A data set that was found."""

    name: str
    source: DataSource
    rows: Sequence[Row]


def data_folders(given: Path | None) -> list[Path]:
    """Return the folders to search for benchmarks: the given one, or $SLIPSTREAM_DATA and ./data."""
    if given is not None:
        return [given]
    from_environment = os.environ.get("SLIPSTREAM_DATA")
    return [*([Path(from_environment)] if from_environment else []), Path("data")]


def find_benchmark(name: str, folders: Sequence[Path], like: DataSource, *, solved: bool = True) -> Benchmark:
    """Return the benchmark `name`: a path; or {folder}/{name}/test.* or {folder}/{name}.* of the first folder that has
    it; or the id of a Hugging Face data set. `like` has the split, the subset and the columns.

    Raises EvalError when there is none, DatasetError when a row cannot be used."""
    source = replace(like, path=_place(name, folders), prefer="test")
    try:
        rows = scan_rows(source, solved=solved)
    except DatasetError as error:
        raise EvalError(f"--data_names {name}: {error}") from error
    short = source.name if source.path == name else name.replace("/", "-")
    return Benchmark(short, source, rows)


def _place(name: str, folders: Sequence[Path]) -> str:
    if Path(name).expanduser().is_file() or suffix_of(Path(name)) is not None:
        return name
    for folder in folders:
        stems = (folder / name / "test", folder / name)
        found = [path for stem in stems for path in sorted(stem.parent.glob(f"{stem.name}.*")) if suffix_of(path)]
        if found or (folder / name).is_dir():
            return str(found[0] if found else folder / name)
    if Path(name).expanduser().is_dir() or is_hub_id(DataSource(path=name)):
        return name
    looked = ", ".join(f"{folder / name}/test.*, {folder / name}.*" for folder in folders)
    raise EvalError(
        f"--data_names {name}: no such benchmark; looked for {looked} ({known_formats()}). Put a file there ({FORMAT}),"
        " name the folder with --data_dir, or give the path of a file or the id of a Hugging Face data set"
    )


def make_prompts(benchmark: Benchmark, encoder: Encoder) -> list[Prompt]:
    """Return every question of a benchmark, tokenised; none is left out."""
    encoded = encoder.encode(benchmark.rows)
    return [
        make_prompt(row, text, token_ids, index=index)
        for index, (row, (text, token_ids)) in enumerate(zip(benchmark.rows, encoded, strict=True))
    ]
