"""Benchmarks by name: where their files are, which fields they use, and what text a question becomes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.data.rows import Fields, Row, detect_fields, read_records, scan_rows
from rollout.types import Prompt

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What the chat template's question ends with."""
FORMAT = 'one json object per line with a question and its answer, as {"problem": "1+1?", "answer": "2"}'


class EvalError(ValueError):
    """Something the user can mend; the message contains the reason."""


class EvalFailure(RuntimeError):
    """Something failed while running; the message contains the reason."""


@dataclass(frozen=True)
class Benchmark:
    """A dataset that was found."""

    name: str
    path: Path
    fields: Fields
    rows: Sequence[Row]


def data_folders(given: Path | None) -> list[Path]:
    """Return the folders to search for benchmarks: the given one, or $SLIPSTREAM_DATA and ./data."""
    if given is not None:
        return [given]
    from_environment = os.environ.get("SLIPSTREAM_DATA")
    return [*([Path(from_environment)] if from_environment else []), Path("data")]


def find_benchmark(
    name: str, folders: Sequence[Path], *, prompt_field: str | None = None, answer_field: str | None = None
) -> Benchmark:
    """Return the benchmark `name`: {folder}/{name}/test.jsonl or {folder}/{name}.jsonl of the first folder that has it,
    or the path of a jsonl file. Raises EvalError when there is none, DatasetError when a row cannot be used."""
    places = [Path(name)] if name.endswith(".jsonl") else []
    places += [place for folder in folders for place in (folder / name / "test.jsonl", folder / f"{name}.jsonl")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = ", ".join(str(place) for place in places)
        raise EvalError(
            f"--data_names {name}: no such benchmark; looked for {looked}. Put a file there ({FORMAT}), name the "
            "folder with --data_dir, or give the path of a jsonl file"
        )
    first = next((record for _, record in read_records(path)), None)
    if first is None:
        raise EvalError(f"--data_names {name}: {path} is empty; it needs {FORMAT}")
    given = None
    if prompt_field is not None or answer_field is not None:
        found = None if prompt_field is not None and answer_field is not None else _detected(first, path)
        given = Fields(prompt_field or (found.prompt if found else ""), answer_field or (found.answer if found else ""))
        for option, key in (("--prompt_field", given.prompt), ("--answer_field", given.answer)):
            if key not in first:
                raise EvalError(f"{option} {key}: {path} has no such key; its rows have {', '.join(sorted(first))}")
    short = Path(name).stem if name.endswith(".jsonl") else name.replace("/", "-")
    return Benchmark(short, path, given or _detected(first, path), scan_rows(path, given))


def _detected(record: dict[str, object], path: Path) -> Fields:
    try:
        return detect_fields(record)
    except ValueError as error:
        raise EvalError(f"{path}: {error}; name them with --prompt_field and --answer_field") from error


def check_template(given: str) -> str:
    """Return the template. Raises EvalError where it has no place for the question."""
    if "{prompt}" not in given:
        raise EvalError(f"--prompt_template {given!r} has no {{prompt}}; write it where the question belongs")
    return given


def question_template(given: str | None, tokenizer: Any) -> str:
    """Return the text around a question, with {prompt} in its place. Without --prompt_template: the tokenizer's chat
    template with the request for a boxed answer, where there is one, else the question alone, as training has it by
    default."""
    if given is not None:
        return check_template(given)
    if not tokenizer.chat_template:
        return "{prompt}"
    turn = [{"role": "user", "content": "{prompt}" + INSTRUCTION}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def make_prompts(benchmark: Benchmark, tokenizer: Any, template: str) -> list[Prompt]:
    """Return every question of a benchmark, tokenised; none is left out."""
    texts = [template.replace("{prompt}", row.prompt) for row in benchmark.rows]
    # A chat template writes its special tokens out; the tokenizer would put a second one before them.
    starts_itself = bool(tokenizer.bos_token) and template.startswith(tokenizer.bos_token)
    encoded = tokenizer(texts, add_special_tokens=not starts_itself)["input_ids"]
    return [
        Prompt(
            query_id=row.query_id, index=index, task=row.task, text=text,
            token_ids=np.asarray(token_ids, dtype=np.int32), solutions=row.solutions, meta=row.meta,
        )
        for index, (row, text, token_ids) in enumerate(zip(benchmark.rows, texts, encoded, strict=True))
    ]  # fmt: skip
