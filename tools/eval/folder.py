"""The folder of an evaluation: what it may delete, and whether its answers belong to these settings."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rollout.evaluation import Answer, read_answers
from rollout.types import Prompt
from tools.eval.data import EvalError
from tools.eval.model import CONVERTED, CONVERTING, SETTINGS, TEMPORARY, is_conversion, read_json

_IDENTITY_KEYS = {"model_path", "weights", "max_gen_tokens", "questions"}
"""Keys by which that file is known as an evaluation's."""
_WRITTEN_BESIDE = {SETTINGS, SETTINGS + TEMPORARY, "logs", "results.json", "results.md", "results.png"}
"""What an evaluation writes beside the answers; none of it shows that a folder is one."""


def check_may_be_emptied(folder: Path, *, needed: Sequence[Path]) -> None:
    """Raise EvalError unless the folder is an evaluation's, or empty, and holds nothing that this one reads."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise EvalError(f"--overwrite: --output_path {folder} is no folder")
    if any(folder.iterdir()) and not _is_evaluation(folder):
        raise EvalError(
            f"--overwrite: {folder} is not empty and holds no evaluation ({SETTINGS} of one): nothing is deleted; "
            "give another --output_path, or empty it yourself"
        )
    for path in needed:
        if path.resolve().is_relative_to(folder.resolve()):
            raise EvalError(f"--overwrite would delete {path}, which is needed; give another --output_path")


def _is_evaluation(folder: Path) -> bool:
    """Return whether a folder is an evaluation's, by its settings; where these are missing or damaged, by containing
    only files of an evaluation."""
    try:
        found = read_json(folder / SETTINGS)
    except EvalError:
        found = {}
    if found:
        return found.keys() >= _IDENTITY_KEYS
    full = [path for path in folder.iterdir() if path.is_dir() or path.lstat().st_size > 0]
    others = [path for path in full if path.name not in _WRITTEN_BESIDE]
    return not full or (bool(others) and all(_is_result(path) for path in others))


def _is_result(path: Path) -> bool:
    """Return whether a file belongs to answers or a conversion, complete or not."""
    if path.is_dir():
        return CONVERTING in path.name or (path.name == CONVERTED and is_conversion(path))
    try:
        return path.suffix == ".jsonl" and path.is_file() and bool(read_answers(path))
    except ValueError:
        return False


def empty(folder: Path, *, keep: Path) -> None:
    for path in folder.iterdir():
        if path == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def check_same_prompts(name: str, answers: Iterable[Answer], prompts: Iterable[Prompt]) -> None:
    """Raise EvalError where a question was answered that is now another prompt, as with a chat template that has the
    date in it."""
    now = {prompt.query_id: prompt.text for prompt in prompts}
    for answer in answers:
        text = now.get(answer.query_id, answer.prompt)
        if text != answer.prompt:
            start = next(i for i, pair in enumerate(zip_longest(text, answer.prompt)) if pair[0] != pair[1])
            raise EvalError(
                f"{name}: {answer.query_id} was answered as another prompt, which had {_near(answer.prompt, start)} "
                f"for {_near(text, start)}, as with a chat template that writes the date; give another "
                "--output_path, or --overwrite"
            )


def _near(text: str, position: int) -> str:
    return repr(text[max(0, position - 20) : position + 20])


def check_same(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Hold settings against those of the answers that are there, which are returned; questions of other sets are kept.
    Raises EvalError where they differ."""
    try:
        before = read_json(path)
    except EvalError as error:
        raise EvalError(
            f"{error}; the settings of the completions in {path.parent} are unknown: give another --output_path, or "
            "--overwrite"
        ) from error
    for key, now in identity.items():
        then = before.get(key, now)
        if key == "questions":
            changed = sorted(name for name in now if name in then and then[name] != now[name])
            if changed:
                raise EvalError(
                    f"{', '.join(changed)}: {path.parent} has answers to other questions of that name; give another "
                    "--output_path, or --overwrite"
                )
            now.update({name: value for name, value in then.items() if name not in now})
        elif then != now:
            raise EvalError(
                f"{key}={now!r}: the answers in {path.parent} were made with {then!r}; give the same, another "
                "--output_path, or --overwrite"
            )
    return before
