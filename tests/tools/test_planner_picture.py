"""The picture of the planner's predictions has what the tables of its log-book have."""

from collections import Counter

from tools.bench.gpu.planner_picture import BEFORE, LOG_BOOK, SINCE, draw, points

TABLES = """\
| case | peak in GB, predicted | measured | error | seconds, predicted | measured | error | with causes found |
|---|---|---|---|---|---|---|---|
| one | 30.0 | 29.0 | +3% | 0.18 | 0.20 | -10% | +5% |

| run | measured | plan | error |
|---|---|---|---|
| two | 41,200 | 42,468 | +3% |

| model | published | plan | error |
|---|---|---|---|
| of others | 97.7 s | 55.6 s | -43% |
"""


def test_each_prediction_is_beside_its_measurement() -> None:
    found = [(point.kind, round(point.predicted, 6), point.measured) for point in points(TABLES)]
    assert found == [(BEFORE, 30.0, 29.0), (BEFORE, 0.18, 0.2), (SINCE, 0.21, 0.2), (SINCE, 42468.0, 41200.0)]


def test_every_panel_has_points_of_the_log_book(tmp_path) -> None:
    found = [*points(LOG_BOOK.read_text(encoding="utf-8"))]
    counts = Counter(point.panel for point in found)
    assert len(counts) == 6 and min(counts.values()) >= 6
    assert all(0.5 < point.predicted / point.measured < 2 for point in found), "in the same unit"
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
