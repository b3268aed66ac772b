"""Warnings of workers on the terminal of the driver."""

import logging
from pathlib import Path

from core.monitoring.logs import LineFormatter, WorkerWarnings


def line(name: str, level: int, message: str) -> str:
    record = logging.LogRecord("rollout.producer", level, __file__, 1, message, None, None)
    return LineFormatter(name).format(record) + "\n"


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_warnings_of_all_workers_are_shown_once_with_the_process_and_the_level(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    append(tmp_path / "rollout.log", line("rollout", logging.WARNING, "of an earlier run"))
    show = WorkerWarnings(tmp_path)
    append(tmp_path / "rollout.log", line("rollout", logging.WARNING, "q7: skipped") + "a library's own line\n")
    append(tmp_path / "trainer-rank0.log", line("trainer-rank0", logging.ERROR, "out of memory"))
    append(tmp_path / "trainer-rank0.log", line("trainer-rank0", logging.INFO, "all is well"))
    append(tmp_path / "master_worker.log", line("master worker", logging.WARNING, "the driver's own"))
    show()
    show()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "rollout: q7: skipped"), ("ERROR", "trainer-rank0: out of memory")
    ]  # fmt: skip


def test_a_line_that_is_being_written_is_shown_when_it_is_whole(tmp_path, caplog) -> None:
    show, path, text = WorkerWarnings(tmp_path), tmp_path / "rollout.log", line("rollout", logging.WARNING, "first")
    append(path, text[:-4])
    show()
    assert caplog.messages == []
    append(path, text[-4:])
    show()
    assert caplog.messages == ["rollout: first"]


def test_of_many_alike_the_first_three_are_shown_and_none_hides_others(tmp_path, caplog) -> None:
    show, path = WorkerWarnings(tmp_path), tmp_path / "rollout.log"
    append(path, "".join(line("rollout", logging.WARNING, f"q{i}: skipped") for i in range(100)))
    append(path, line("rollout", logging.WARNING, "another"))
    show()
    assert caplog.messages == [
        "rollout: q0: skipped", "rollout: q1: skipped", f"rollout: q2: skipped (more of these: see {tmp_path})",
        "rollout: another",
    ]  # fmt: skip
