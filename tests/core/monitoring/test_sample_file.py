"""Files of samples: rotated by size, continued after a recovery without a gap or a repetition."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.monitoring.samples import Sample, SampleFile, closed_files, last_samples, read_samples


def sample(step: int) -> Sample:
    return Sample(
        step=step, query_id="q", episode=f"s/q/{step}", index=0, prompt="p", answer="a" * 100, reward=0.0,
        finish_reason="stop", prompt_tokens=1, answer_tokens=100, oldest_version=0, newest_version=0,
    )  # fmt: skip


def write(folder: Path, *steps: int, after: int = 0, keep: int = 3) -> None:
    """Two rows fit into a file."""
    file = SampleFile(folder, continue_after=after, max_bytes=500, keep=keep)
    for step in steps:
        file.write([sample(step)])
    file.close()


def steps(folder: Path) -> list[int]:
    return [s.step for s in read_samples(folder)]


def test_a_full_file_is_closed_and_the_oldest_beyond_the_limit_is_deleted(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    assert [p.name for p in closed_files(tmp_path)] == ["samples-000001.jsonl", "samples-000002.jsonl"]
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    write(tmp_path, 6, 7, after=5)
    assert [p.name for p in closed_files(tmp_path)] == ["samples-000002.jsonl", "samples-000003.jsonl"]
    assert steps(tmp_path) == [3, 4, 5, 6, 7]
    write(tmp_path, 8, 9, after=7, keep=1)
    assert closed_files(tmp_path) == [] and steps(tmp_path) == [9]


@pytest.mark.parametrize("after", range(6))
def test_a_recovered_run_writes_later_steps_anew_whatever_file_they_are_in(tmp_path: Path, after: int) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 6, "que')
    write(tmp_path, *range(after + 1, 6), after=after, keep=10)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_files_of_something_else_are_not_read_as_samples(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl: not a file of samples: .*loss"):
        steps(tmp_path)


def test_the_last_samples_of_training_are_found_behind_those_of_an_evaluation(tmp_path: Path) -> None:
    assert last_samples(tmp_path) == []
    file = SampleFile(tmp_path, continue_after=0, max_bytes=500, keep=3)
    for batch in ([sample(1)], [sample(2), sample(2)], [replace(sample(2), evaluation="hard")]):
        file.write(batch)
    file.close()
    assert last_samples(tmp_path) == [sample(2), sample(2)] and closed_files(tmp_path)
