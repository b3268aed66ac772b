"""What the studio answers, and what it refuses."""

import json
import os
import time
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import numpy as np
import pytest

from helpers.studio_runs import make_run, without_signal
from tools.studio.folders import Folders
from tools.studio.guard import same_user
from tools.studio.sampled import Query, SampleIndex
from tools.studio.series import Series, downsampled, smoothed
from tools.studio.server import rendered


def get(base: str, path: str, **headers: str) -> Any:
    with urlopen(Request(base + path, headers=headers)) as answer:
        return json.load(answer)


def samples(base: str, path: str) -> Any:
    """The answer once the files of the run are read: a request waits for them for a few seconds only."""
    while (answer := get(base, path))["samples"] == 0 or answer["read"] < 1.0:
        time.sleep(0.05)
    return answer


def status(base: str, path: str, **headers: str) -> int:
    try:
        with urlopen(Request(base + path, headers=headers)) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "sums/good")
    make_run(root, "sums/other", steps=20)
    secret = root.parent / "secret.jsonl"
    secret.write_text('{"step": 1, "secret": 1}\n')
    linked = make_run(root, "sums/linked", steps=1).logs
    (linked / "metrics.jsonl").unlink()
    (linked / "metrics.jsonl").symlink_to(secret)
    (root / "logs" / "outside").symlink_to(root.parent)
    return root


@pytest.fixture(scope="module")
def base(start: Callable[..., str], root: Path) -> str:
    return start(root)


def ids(base: str) -> dict[str, str]:
    return {run["name"]: run["id"] for run in get(base, "api/runs")["runs"]}


def test_runs_have_their_last_step_and_curves_of_several_lie_over_each_other(base: str) -> None:
    runs = {run["name"]: run for run in get(base, "api/runs")["runs"]}
    assert runs.keys() == {"sums/good", "sums/other", "sums/linked"}
    assert (runs["sums/good"]["step"], runs["sums/good"]["state"]) == (40, "complete")
    assert runs["sums/good"]["tokens_per_second"] == 6400
    good, other = (runs[f"sums/{name}"]["id"] for name in ("good", "other"))
    answer = get(base, f"api/series?run={good}&run={other}&metric=reward/mean&metric=eval/accuracy&x=tokens")
    first, second = answer["curves"]["reward/mean"]
    assert first["x"] == [12800.0 * (i + 1) for i in range(40)]
    assert len(second["x"]) == 20
    assert [len(one["x"]) for one in answer["curves"]["eval/accuracy"]] == [4, 2]


def test_the_longest_answer_of_a_step_is_found_and_stands_with_its_group(base: str) -> None:
    run = ids(base)["sums/good"]
    found = samples(base, f"api/run/{run}/samples?first_step=7&last_step=7&sort=answer_tokens")
    assert (found["matched"], found["rows"][0]["answer_tokens"]) == (8, 512)
    sample = get(base, f"api/run/{run}/sample?at={found['rows'][0]['at']}")
    assert len(sample["answer"]) > 500
    assert [one["index"] for one in sample["group"]] == [0, 1, 2, 3]
    text = get(base, f"api/run/{run}/samples?text=AGAIN&count=5")
    assert [row["step"] for row in text["rows"]] == [7]
    assert get(base, f"api/run/{run}/samples?least_reward=1&finish=stop&notable=best")["matched"] == 40
    assert get(base, f"api/run/{run}/samples?task=prompts&least_version=38")["matched"] == 8
    assert get(base, f"api/run/{run}/samples?task=other")["matched"] == 0


def test_files_outside_the_given_folders_are_not_read(base: str, root: Path) -> None:
    linked = ids(base)["sums/linked"]
    assert get(base, f"api/run/{linked}")["metrics"] == []
    assert "secret" not in json.dumps(get(base, "api/runs"))
    for path in (
        "static/../server.py",
        "static/%2e%2e%2fserver.py",
        "static/index.html%00",
        "api/run/..",
        "api/run/%2e%2e/row",
    ):
        assert status(base, path) in (400, 404), path
    assert status(base, f"api/run/{linked}/sample?at=1:0") == 404


def test_other_origins_other_names_and_other_users_are_refused(base: str, tmp_path: Path) -> None:
    assert status(base, "api/runs") == 200
    assert status(base, "api/runs", Origin="http://elsewhere.example") == 403
    assert status(base, "api/runs", Host="rebound.example") == 403
    assert status(base, "api/runs", **{"Sec-Fetch-Site": "cross-site"}) == 403
    row = "   1: {address}:1234 0100007F:1F90 01 00000000:00000000 00:00000000 00000000 {uid} 0 1 1\n"

    class Connection:
        host = ""

        def get_extra_info(self, name: str) -> tuple[str, int]:
            return (self.host, 0x1234)

    written = {"127.0.0.1": ("tcp", "0100007F"), "::1": ("tcp6", "00000000000000000000000001000000")}
    for host, (table, address) in written.items():
        Connection.host = host
        for uid, mine in ((os.getuid(), True), (0, True), (os.getuid() + 4711, False)):
            (tmp_path / table).write_text("header\n" + row.format(address=address, uid=uid))
            assert same_user(Connection(), tmp_path) is mine


def test_a_token_is_asked_for_and_leaves_the_address(start: Callable[..., str], root: Path) -> None:
    address = start(root, "--host", "0.0.0.0")
    base, _, token = address.partition("?token=")
    assert len(token) > 20
    assert status(base, "api/runs") == 403
    assert status(base, "api/runs?token=wrong") == 403
    port = base.rpartition(":")[2].strip("/")
    assert status(base, "api/runs", Cookie=f"slipstream_studio_{port}=\xff") == 403
    opener = build_opener(HTTPCookieProcessor(CookieJar()))
    with opener.open(address.replace("0.0.0.0", "127.0.0.1")) as answer:
        assert "token" not in answer.url
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    with opener.open(base.replace("0.0.0.0", "127.0.0.1") + "api/runs") as answer:
        assert json.load(answer)["runs"]


def test_damaged_lines_are_left_out_and_counted_and_a_half_line_waits(tmp_path: Path) -> None:
    logs = make_run(tmp_path, steps=6).logs
    file = logs / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + "\0\0{half\n" + "".join(lines[2:5]) + lines[5][:100])
    (run,) = Folders([tmp_path]).runs()
    series = Series(run)
    series.refresh()
    found = series.status()
    assert (found["rows"], found["last_step"]) == (5, 5)
    assert found["notes"] == ["metrics.jsonl: 1 line of 6 cannot be read, the first is line 3; the others are shown"]
    with open(file, "a") as end:
        end.write(lines[5][100:])
    series.refresh()
    assert series.status()["last_step"] == 6
    file.rename(logs / "old")
    file.write_text("".join(lines[:3]))  # a recovery writes the file anew
    series.refresh()
    assert series.status()["last_step"] == 3


def test_a_pipe_in_the_place_of_a_file_stops_no_answer(start: Callable[..., str], tmp_path: Path) -> None:
    names = (".running", "config.yaml", "starts.jsonl", "metrics.jsonl", "samples.jsonl", "notes.jsonl", "driver.log")
    for i, name in enumerate(names):
        file = make_run(tmp_path, f"pipe/{i}", steps=2).logs / name
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    base = start(tmp_path)
    assert len(ids(base)) == len(names)
    for run in ids(base).values():
        for page in ("", "/health", "/samples", "/config", "/processes", "/notes", "/log?name=driver.log"):
            assert status(base, f"api/run/{run}{page}") in (200, 400, 404)


def test_a_downsampled_curve_keeps_its_extremes_and_a_smoothed_one_its_mean() -> None:
    y = np.random.default_rng(0).normal(size=100_003)
    y[777], y[99_000] = 50, -50
    x = np.arange(len(y))
    shown_x, shown_y = downsampled(x, y, 500)
    assert len(shown_x) <= 500
    assert (shown_y.max(), shown_y.min()) == (50, -50)
    assert (np.diff(shown_x) > 0).all()
    assert np.array_equal(y[shown_x], shown_y)
    assert smoothed(np.full(20, 3.0), 5).tolist() == [3.0] * 20
    assert smoothed(np.array([0.0, 3.0, 6.0]), 3)[1] == 3.0


def test_a_text_is_searched_page_by_page_without_losing_an_answer(tmp_path: Path) -> None:
    make_run(tmp_path, answer=lambda step, index: "Needle." if index == 0 else "hay")
    (run,) = Folders([tmp_path]).runs()
    index = SampleIndex(run)
    index.refresh()
    found, start = [], 0
    while start is not None:
        answer = index.find(Query(text="needle", start=start, count=7))
        found += [(row["step"], row["query_id"]) for row in answer["rows"]]
        start = answer["next"]
    assert sorted(found) == sorted({(step, f"prompts-{row}") for step in range(1, 41) for row in range(2)})


def post(base: str, path: str, body: object, **headers: str) -> Any:
    headers.setdefault("Content-Type", "application/json")
    with urlopen(Request(base + path, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def test_health_of_a_bad_run_is_in_the_list_and_in_words(start: Callable[..., str], tmp_path: Path) -> None:
    make_run(tmp_path, "sums/bad", change=without_signal)
    (tmp_path / "my_rules.py").write_text(
        "from core.monitoring.health import Found, Rule\n"
        "def check(history): return Found('warning', '<b>', 1.0)\n"
        "RULES = [Rule(name='own', title='Own', docs='', needs=(), check=check)]\n"
    )
    base = start(tmp_path, "--rules", "my_rules:RULES", folder=tmp_path)
    (run,) = get(base, "api/runs")["runs"]
    assert (run["light"]["light"], "equal rewards" in run["light"]["reason"]) == ("bad", True)
    answers = get(base, f"api/run/{run['id']}/health")["answers"]
    assert [one["name"] for one in answers if one["light"] in ("bad", "warning")] == ["spread", "flat", "own"]
    assert answers[0]["actions"] == ["set algorithm.dynamic_sampling=true", "raise group_size"]
    with urlopen(base + "docs/" + answers[0]["docs"].partition("#")[0]) as page:
        assert '<h2 id="dynamic-sampling">' in page.read().decode()


def test_markup_in_a_document_is_text() -> None:
    html = rendered("# A <b>\n\n<script>alert(1)</script> [x](javascript:alert(1))\n\n| a |\n|---|\n| 1 |", title="<i>")
    assert "<title>&lt;i&gt;</title>" in html
    assert ("<table>" in html, "<script" in html, "<b>" in html, 'href="javascript' in html) == (True, *[False] * 3)


def test_the_list_follows_new_rows_and_queries_the_gpus_of_the_host_once(start, tmp_path, monkeypatch) -> None:
    command = tmp_path / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    logs = {name: make_run(tmp_path / "runs", f"sums/{name}").logs for name in ("one", "two")}
    base = start(tmp_path / "runs")

    def lights() -> dict[str, str]:
        return {run["name"]: run["light"]["light"] for run in get(base, "api/runs")["runs"]}

    assert lights() == lights() == {"sums/one": "good", "sums/two": "good"}
    once = (tmp_path / "calls").read_text()
    with open(logs["one"] / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step, **without_signal(step, 60)}) + "\n" for step in range(41, 61))
    assert lights() == {"sums/one": "bad", "sums/two": "good"}
    assert (tmp_path / "calls").read_text() == once
    assert once.count("called") <= 2  # the cards and their processes


def test_a_star_and_a_note_are_kept_in_a_file_and_the_last_one_counts(base: str, root: Path) -> None:
    run = ids(base)["sums/other"]
    sample = samples(base, f"api/run/{run}/samples?count=1")["rows"][0]
    key = {name: sample[name] for name in ("step", "evaluation", "query_id", "episode", "index")}
    assert get(base, f"api/run/{run}/notes") == {"notes": []}
    post(base, f"api/run/{run}/note", {**key, "star": True, "note": "first"})
    post(base, f"api/run/{run}/note", {**key, "star": True, "note": "gives up"})
    (note,) = get(base, f"api/run/{run}/notes")["notes"]
    assert (note["star"], note["note"]) == (True, "gives up")
    (file,) = root.glob("logs/*/sums/other/notes.jsonl")
    assert len(file.read_text().splitlines()) == 2
    for headers in ({"Content-Type": "text/plain"}, {"Origin": "http://elsewhere.example"}):
        with pytest.raises(HTTPError):
            post(base, f"api/run/{run}/note", {**key, "star": False}, **headers)


def test_nothing_is_started_unless_it_was_allowed(base: str) -> None:
    run = ids(base)["sums/good"]
    assert get(base, "api/studio") == {"may_run": False}
    for name in ("explain", "stacks", "ask"):
        with pytest.raises(HTTPError) as refused:
            post(base, f"api/run/{run}/{name}", {"name": "driver", "step": 1})
        assert refused.value.code == 403


def test_an_export_has_every_answer_that_the_filters_keep(base: str) -> None:
    run = ids(base)["sums/good"]
    with urlopen(f"{base}api/run/{run}/export?last_step=7&least_reward=1") as answer:
        rows = [json.loads(line) for line in answer]
    assert len(rows) == 28
    for choice in ("sort=none", "finish=none", "notable=none"):
        assert status(base, f"api/run/{run}/export?{choice}") == status(base, f"api/run/{run}/samples?{choice}") == 400
    assert {row["reward"] for row in rows} == {1.0}


def test_a_log_is_filtered_and_no_other_file_is_read_as_one(base: str, root: Path) -> None:
    (logs,) = root.glob("logs/*/sums/good")
    (logs / "master_worker.log").write_text("one INFO: a\ntwo WARNING: b\n")
    (logs / "evil.log").symlink_to(root.parent / "secret.jsonl")
    run = ids(base)["sums/good"]
    assert get(base, f"api/run/{run}/log?name=master_worker.log&text=warn")["lines"] == ["two WARNING: b"]
    assert get(base, f"api/run/{run}/processes")["logs"] == ["master_worker.log"]
    for name in ("evil.log", "../other/master_worker.log", "/etc/passwd", "config.yaml"):
        assert status(base, f"api/run/{run}/log?name={name}") == 404, name
    assert {r["name"]: r["warning"] for r in get(base, "api/runs")["runs"]}["sums/good"] == "b"


def test_one_run_that_is_damaged_does_not_hide_the_others(start: Callable[..., str], tmp_path: Path) -> None:
    make_run(tmp_path, "sums/good", steps=4)
    logs = make_run(tmp_path, "sums/odd", steps=4).logs
    with open(logs / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 5, "time/step": NaN, "reward/mean": {10**30}}}\n{{"step": "six", "time/step": 1}}\n')
    with open(logs / "samples.jsonl", "a") as file:
        file.write('{"step": 5, "reward": NaN, "answer": "half \\ud800"}\n')
    os.rename(logs, os.fsencode(logs) + b"\xff")  # not UTF-8
    base = start(tmp_path)
    runs = {run["name"]: run for run in get(base, "api/runs")["runs"]}
    assert (runs["sums/good"]["step"], runs["sums/odd?"]["step"], runs["sums/odd?"]["reward"]) == (4, 5, 1e30)
    (row,) = samples(base, f"api/run/{runs['sums/odd?']['id']}/samples?first_step=5")["rows"]
    assert (row["reward"], row["answer"]) == (None, "half ?")
