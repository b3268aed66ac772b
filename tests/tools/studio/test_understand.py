"""Spans, tokens and losses of a run, as the studio reads them from its files."""

import json
import os
from pathlib import Path

import psutil
import pytest
import yaml

from helpers.studio_runs import make_run
from rollout.experience import SQLiteExperience
from tests.tools.test_ledger import fill
from tests.tools.test_timeline import write
from tools.demo.data import make_tokenizer
from tools.studio.answers import answer_tokens, pairs
from tools.studio.folders import Folders, NotFound, Run
from tools.studio.processes import processes, timeline
from tools.studio.sampled import SampleIndex


def run_of(root: Path, **changes: object) -> tuple[Folders, Run]:
    logs = make_run(root, steps=2).logs
    (logs / "config.yaml").write_text(yaml.safe_dump(changes))
    folders = Folders([root])
    (run,) = folders.runs()
    return folders, run


def test_a_step_has_lanes_in_which_requests_lie_beside_each_other(tmp_path: Path) -> None:
    _, run = run_of(tmp_path)
    second = 1_000_000
    steps = [("step", "steps", i * second, (i + 1) * second, {"step": i}) for i in (1, 2)]
    write(run.logs, "driver", *steps, ("update", "", second, second + 1000, {}))
    requests = [("request", "generator-0", 2 * second + i, 2 * second + 500_000 + i, {"tokens": 3}) for i in range(3)]
    write(run.logs, "rollout", *requests)
    last = timeline(run, {})
    assert (last["steps"], last["known"]) == ([[2, 0.0, 1.0]], [1, 2])
    (lane,) = last["lanes"]
    assert (lane["process"], lane["lane"], lane["rows"]) == ("rollout", "generator-0", 3)
    assert [span[3] for span in lane["spans"]] == [0, 1, 2]
    assert [lane["process"] for lane in timeline(run, {"first": "1"})["lanes"]] == ["driver"]
    outside = tmp_path.parent / f"{tmp_path.name}.jsonl"
    outside.write_text("")
    (run.logs / "spans" / "evil.jsonl").symlink_to(outside)
    with pytest.raises(NotFound, match="is no file of the run"):
        timeline(run, {})


def test_an_answer_has_its_tokens_where_store_and_tokenizer_lie_in_the_folders(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    store, model = root / "experience.db", root / "model"
    folders, run = run_of(root, experience={"store": "sqlite", "path": str(store)}, actor={"path": str(model)})
    fill(store)
    make_tokenizer().save_pretrained(model)
    ready = next(tags for tags in SQLiteExperience(store).tags() if tags.fate == "ready")
    found = answer_tokens(run, {"step": "2", "episode": ready.id, "index": "1"}, folders.holds)
    (episode,) = SQLiteExperience(store).values([ready.id])
    assert found["ids"] == episode.trajectories[1].token_ids.tolist()
    assert found["has_texts"]
    assert {len(values) for values in found["figures"].values()} == {len(found["ids"])} == {len(found["texts"])}
    for index, episode_id in (("9", ready.id), ("0", "nothing")):
        with pytest.raises(NotFound):
            answer_tokens(run, {"step": "2", "episode": episode_id, "index": index}, folders.holds)
    with pytest.raises(NotFound, match="not in the given folders"):
        answer_tokens(run, {"step": "2", "episode": ready.id, "index": "0"}, Folders([run.logs]).holds)


def test_gpus_are_shown_with_their_use_while_a_process_of_the_run_is_on_this_host(tmp_path, monkeypatch) -> None:
    _, run = run_of(tmp_path)
    (run.logs / "stacks").mkdir()
    me = {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": os.uname().nodename}
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    card = "0, GPU-aa, NVIDIA H, 2048, 81920"
    shown = (
        f'case "$1" in *query-gpu*utilization.gpu*) echo "{card}, 93";; *) echo "GPU-aa, {os.getpid()}, x, 1024";; esac'
    )
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    for output, who, cards in (
        (shown, me, [{"index": 0, "name": "NVIDIA H", "use": 0.93, "gib": 2.0, "of_gib": 80.0}]),
        (shown, me | {"host": "elsewhere"}, []),
        (shown, me | {"started": 0.0}, []),
        ("exit 9", me, []),
    ):
        script.write_text(f"#!/bin/sh\n{output}\n")
        script.chmod(0o755)
        (run.logs / "stacks" / "driver.txt").write_text(json.dumps(who) + "\n")
        found = processes(run, {})
        assert found["gpus"] == cards, (output, who)
        assert found["processes"][0]["gpu_gib"] == (1.0 if cards else None)


def test_two_steps_stand_side_by_side_by_prompt_and_answer(tmp_path: Path) -> None:
    make_run(tmp_path, "sums/one", steps=6, answer=lambda step, index: f"{step}/{index}")
    make_run(tmp_path, "sums/two", steps=3)
    one, two = (SampleIndex(run) for run in sorted(Folders([tmp_path]).runs(), key=lambda run: run.name))
    one.refresh()
    two.refresh()
    found = pairs(one, one, {"left": "2", "right": "99"})
    assert (found["left"]["before"], found["left"]["after"]) == (1, 3)
    assert (found["right"]["step"], found["right"]["after"]) == (6, None)
    texts = [tuple(side["answer"] for side in row["sides"]) for row in found["rows"]]
    assert sorted(texts)[:2] == [("2/0", "6/0"), ("2/0", "6/0")] and len(texts) == 8
    assert pairs(one, two, {})["right"]["step"] == 3
    with pytest.raises(NotFound, match="no answers of held_out"):
        pairs(one, two, {"of": "held_out"})
