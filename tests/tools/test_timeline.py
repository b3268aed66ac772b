"""The trace, the picture and the table of a run's last steps."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tools.timeline import Span, clipped, covered, main, read_spans, table


def write(run: Path, process: str, *spans: tuple[str, str, int, int, dict[str, Any]], suffix: str = ".jsonl") -> None:
    (run / "spans").mkdir(exist_ok=True)
    lines = [json.dumps({"process": process, "host": "h", "pid": 1})]
    lines += [json.dumps([name, lane, begin, end - begin, details]) for name, lane, begin, end, details in spans]
    (run / "spans" / f"{process}{suffix}").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 4 of a second each, from second 10 on; step 3 was trained twice."""
    second = 1_000_000
    steps = [
        ("step", "steps", begin * second, (begin + 1) * second, {"step": step})
        for begin, step in ((10, 1), (11, 2), (12, 3), (13, 3), (14, 4))
    ]
    updates = [("update", "", step[2] + 400_000, step[3], {}) for step in steps]
    write(tmp_path, "driver", *steps[:2], *updates[:2], suffix=".earlier")
    write(tmp_path, "driver", *steps[2:], *updates[2:])
    write(tmp_path, "trainer-rank0", ("train step", "", 13_500_000, 14_000_000, {}))
    requests = [("request", "generator-0", 13_000_000 + i * 100_000, 13_350_000 + i * 100_000, {}) for i in range(4)]
    write(tmp_path, "rollout", *requests)
    with open(tmp_path / "spans" / "rollout.jsonl", "a") as file:
        file.write('["request","gener')  # killed here
    return tmp_path


def test_trace_and_picture_are_of_the_last_steps_each_at_its_last_time(run: Path, capsys) -> None:
    assert main([str(run), "--steps", "2", "--output", str(run / "new" / "folder")]) == 0
    trace = json.loads((run / "new" / "folder" / "timeline.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in events if event["name"] == "step"} == {3, 4}
    assert min(event["ts"] for event in events) == 13_000_000
    assert (run / "new" / "folder" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {1: "driver", 2: "trainer-rank0", 3: "rollout"}
    assert "2 steps, 1.000 s each" in capsys.readouterr().out


def test_steps_are_chosen_by_number_and_a_wrong_one_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--step", "1..2"]) == 0
    trace = json.loads((run / "timeline.json").read_text())
    assert max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X") == 12_000_000
    capsys.readouterr()
    assert main([str(run), "--step", "7"]) == 2
    assert capsys.readouterr().err == "error: --step: there are spans of the steps 1..4; name some of these\n"
    assert main([str(run / "spans")]) == 2
    assert "monitor.timeline_mib > 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), "--step", "4..2"])


def span(begin: int, end: int, *, lane: str = "", name: str = "x", process: str = "p") -> Span:
    return Span(process=process, lane=lane, name=name, begin=begin, end=end)


def test_busy_is_the_share_of_the_time_in_which_one_or_more_run(run: Path) -> None:
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    spans = clipped(read_spans(run), (13_000_000, 15_000_000))
    console = Console(width=100, record=True, quiet=True)
    shown = table(spans, (13_000_000, 15_000_000), 2)
    console.print(shown)
    cells = list(zip(*(column.cells for column in shown.columns), strict=True))
    assert ("rollout", "generator-0: request", "4", "0.700", "32%") in cells  # 0.65 s of 2 s
    assert ("trainer-rank0", "train step", "1", "0.250", "25%") in cells
