"""Whether a run can continue from a recover checkpoint. Checks before the start and the start itself ask here.

What only the run can compare, the prompts that fit after tokenising, is compared where they are (rollout/data).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from core.config.experiments import DPOConfig, ExperimentConfig, PPOMATHConfig, SFTConfig
from core.config.parsing.problems import Problem
from core.runs.checkpoints import (
    CONFIG_KEYS,
    State,
    cannot_continue,
    has_checkpoint,
    is_checkpoint,
    near_trials,
    read_run,
    read_stream,
    recover_checkpoints,
    too_few_steps,
)
from core.runs.paths import RunPaths
from rollout.data.rows import Row, identify
from rollout.data.source import DatasetError

if TYPE_CHECKING:
    from core.data.datasets import Rows

ReadStream = Callable[[Path], tuple[State, State]]
"""core.runs.checkpoints.read_stream, or what remembers its results."""
_OF_THE_STREAM: Mapping[str, str] = {
    "seed": "seed",
    "shuffle_dataset": "shuffle",
    "staleness.max_staleness": "max_staleness",
    "staleness.over_age": "over_age",
    "staleness.in_order": "in_order",
    "algorithm.dynamic_sampling": "dynamic_sampling",
}
"""Keys that must be as in the recover checkpoint, and their names in it. sft and dpo save the first two."""
NOT_OF_A_RUN = (OSError, RuntimeError, ValueError, LookupError, TypeError)
"""What reading a checkpoint raises that no run wrote: the start verifies checkpoints, and takes the one before."""


def checkpoint_to_continue(config: ExperimentConfig) -> Path | None:
    """Return the recover checkpoint that a start would continue with exactly; None: there is none, or it may differ."""
    if not config.continues_exactly:
        return None
    try:
        found = recover_checkpoints(RunPaths.of(config).recover)
        if found:
            return found[-1]
        return config.earlier_checkpoint
    except (OSError, RuntimeError, ValueError):
        return None


def check_checkpoint(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield a checkpoint that must be there to begin with, and is not. A start verifies what its files hold."""
    if not config.recovers:
        return
    try:
        recover = RunPaths.of(config).recover
        if has_checkpoint(recover):
            return
    except OSError:
        return  # a folder that cannot be used, which is reported with fileroot
    if config.resume_from is not None:
        if message := _not_resumable(config.resume_from):
            yield Problem(key="resume_from", message=message)
    elif config.must_recover:
        found = f"{recover} has none" if recover.is_dir() else f"{recover}: no such folder"
        found += near_trials(recover)
        message = f"resume needs a recover checkpoint of this trial; {found}; check experiment_name and "
        yield Problem(key="recover_mode", message=message + "trial_name, or write recover_mode=auto to begin at step 0")


def _not_resumable(path: str) -> str | None:
    """Return why there is nothing to continue from at resume_from=`path`; None: there is a recover checkpoint."""
    way_out = "write a folder globalstepN of another trial, or null to begin at step 0"
    try:
        given = Path(path).expanduser()
        if not given.is_dir():
            return f"{path}: no such folder; {way_out}"
        if is_checkpoint(given):
            return None
        inside = [found for found in recover_checkpoints(given) if is_checkpoint(found)]
    except (OSError, RuntimeError) as error:
        return f"{path}: {error}; {way_out}"
    return f"{path} is no recover checkpoint; {f'did you mean {inside[-1]}?' if inside else way_out}"


def check_settings(config: ExperimentConfig, read: ReadStream) -> Iterator[Problem]:
    """Yield settings that the newest recover checkpoint of the trial, or that of resume_from, cannot follow."""
    newest = checkpoint_to_continue(config)
    if newest is not None:
        yield from changed_settings(config, newest, read)


def changed_settings(config: ExperimentConfig, checkpoint: Path, read: ReadStream = read_stream) -> Iterator[Problem]:
    """Yield settings that a checkpoint cannot follow; none for a file that no run wrote, which reading it reports."""
    try:
        identity, state = read_run(checkpoint)
        step = int(str(state.get("step", 0)))
    except NOT_OF_A_RUN:
        return
    changes = config.identity.changes_since(identity)
    for field, change in changes.items():
        yield Problem(key=CONFIG_KEYS.get(field, config.batch_key), message=f"{change}: {cannot_continue(checkpoint)}")
    _, limit = config.exp_ctrl.length
    if limit is not None and step > limit and "train_bs_n_seqs" not in changes:
        yield Problem(key="exp_ctrl.total_train_steps", message=too_few_steps(limit, step, checkpoint))
    try:
        data, settings = read(checkpoint)
    except NOT_OF_A_RUN:
        return
    before = {**data, **settings}
    for key, field in _OF_THE_STREAM.items():
        if field == "shuffle" and getattr(config, "task_sets", None):  # each has its own order
            continue
        if field in before and before[field] != (now := attrgetter(key)(config)):
            shown, had = str(now).lower(), str(before[field]).lower()
            yield Problem(key=key, message=f"{shown} (the checkpoint has {had}): {cannot_continue(checkpoint)}")


def check_prompts(
    config: PPOMATHConfig, rows: Sequence[Row], read: ReadStream, count_fitting: Callable[[], int]
) -> Iterator[Problem]:
    """Yield a data set that is certainly another one than that of the newest checkpoint. A run compares the prompts
    that it does not leave out, once they are tokenised. `count_fitting`: of those that it certainly keeps."""
    newest = checkpoint_to_continue(config)
    if newest is None:
        return
    try:
        before, _ = read(newest)
        now, num_prompts = identify(rows), int(before["num_prompts"])
        left_none_out = before.get("num_rows") == num_prompts == now["num_rows"]
        changed = before.get("rows_checksum", now["rows_checksum"]) != now["rows_checksum"]
    except NOT_OF_A_RUN:
        return
    at_least = count_fitting()
    if not at_least <= num_prompts <= len(rows):
        count = at_least if num_prompts < at_least else len(rows)
        bound = "at least " if num_prompts < at_least < len(rows) else ""
        what = f"the data set of the checkpoint has num_prompts={num_prompts}, this one {bound}{count}"
    elif left_none_out and changed:
        what = "its rows are not those of the checkpoint's data set"
    else:
        return
    yield Problem(key="dataset.path", message=f"{what}: {cannot_continue(newest)}")


def check_rows(config: SFTConfig | DPOConfig, data: Rows, read: ReadStream) -> Iterator[Problem]:
    """Yield rows that are not those of the newest checkpoint, unless they are a sample of a large data set."""
    newest = checkpoint_to_continue(config)
    if newest is None or data.share < 1:
        return
    try:
        data.check_same_items(read(newest)[0])
    except DatasetError as change:
        yield Problem(key="dataset.train_path", message=str(change))
    except NOT_OF_A_RUN:
        return
