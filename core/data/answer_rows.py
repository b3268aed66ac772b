"""jsonl rows for supervised fine-tuning, read into pairs. Without torch: a --dry-run checks a data set with it."""

from __future__ import annotations

from pathlib import Path

from rollout.data.rows import DatasetError, read_records

_ANSWER_KEYS = (
    ("prompt", ("answer", "solutions")),
    ("problem", ("solution", "answer")),
    ("question", ("answer",)),
    ("input", ("target",)),
)


def read_pairs(path: str | Path) -> list[tuple[str, str]]:
    """(prompt, answer) of every row: {"prompt", "answer"}, or GSM8K, MATH and MAWPS rows as they are.

    Raises DatasetError, with file and line, for a row that has no prompt or no answer, and for an empty file."""
    pairs = []
    for number, record in read_records(Path(path)):
        prompt_key, answer_keys = next(
            ((p, answers) for p, answers in _ANSWER_KEYS if p in record), ("prompt", ("answer",))
        )
        answer = next((record[k] for k in answer_keys if record.get(k) is not None), None)
        if isinstance(answer, list) and answer:
            answer = answer[0]
        if isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        prompt = record.get(prompt_key)
        if not isinstance(prompt, str) or not prompt or not isinstance(answer, str | int | float) or answer == "":
            raise DatasetError(f"{path}:{number}: needs a text {prompt_key!r} and one of {list(answer_keys)}")
        pairs.append((prompt, str(answer)))
    if not pairs:
        raise DatasetError(f"{path}: no rows; a data set needs at least one json object per line")
    return pairs
