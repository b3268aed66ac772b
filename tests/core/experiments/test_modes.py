"""Explore and train as jobs of their own, which share a SQLite store and a folder of weights."""

import json
import re
import signal
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoConfig

from core.weight_sync.folder import VersionFolder
from helpers.commands import Command
from helpers.postgres import PostgresServer
from helpers.runs import metrics_of, rows
from tools.demo.__main__ import WARM_UP_TARGET, accuracy, first_at_least, ppo_changes, run_quickstart, saved_models
from tools.demo.data import make_demo_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, BATCH_SIZE, GROUP_SIZE, MAX_STALENESS = 6, 4, 2, 1


@pytest.fixture
def start(assets, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """(mode, name) -> a job in a folder of that name."""
    started: list[Command] = []

    def run(mode: str, name: str, **changes: object) -> Command:
        config = {
            "mode": mode,
            "experience": {"store": "sqlite", "path": str(tmp_path / "shared" / "experience.db")},
            "allocation_mode": "embedded.d1m1p1+d1m1p1",
            "recover_mode": "auto",
            "group_size": GROUP_SIZE,
            "group_adv_norm": True,
            "monitor": {"tensorboard": False},
            "actor": {"path": str(assets.model), "optimizer": {"lr": 1e-3}},
            "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": BATCH_SIZE, "max_prompt_len": 8},
            "ppo": {"gen": {"max_new_tokens": 3}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
            "staleness": {"max_staleness": MAX_STALENESS},
            "reward": {"num_workers": 1},
            "samples": {"share": 0.0},
            "exp_ctrl": {"total_train_steps": NUM_STEPS, "ckpt_freq_steps": 1},
            **changes,
        }
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        started.append(Command("ppo-math", config, folder))
        return started[-1]

    yield run
    for command in started:
        command.stop()


def kill(command: Command) -> None:
    command.remember_family()
    command.process.send_signal(signal.SIGKILL)
    command.process.wait()
    assert not command.survivors()


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_jobs_start_end_and_are_killed_apart_and_every_prompt_is_trained_once(
    assets, start, tmp_path, killed: bool
) -> None:
    """A step of the train job has fewer prompts than one of the explore jobs, which evaluate beside their sampling. A
    serve job answers behind one address with the weights that the train job publishes."""
    store = {"store": "sqlite", "path": str(tmp_path / "shared" / "experience.db")}
    changes = {
        "dataset": {"path": str(assets.prompts), "train_bs_n_seqs": BATCH_SIZE + 2, "max_prompt_len": 8},
        "experience": {**store, "train_batch_size": BATCH_SIZE * GROUP_SIZE},
        "evaluation": {"path": str(assets.prompts), "num_prompts": 4},
        "exp_ctrl": {"total_train_steps": NUM_STEPS, "ckpt_freq_steps": 1, "eval_freq_steps": 2},
    }
    beside = {**changes, "allocation_mode": "embedded.d2m1p1+d1m1p1", "n_gpus_per_node": 3}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    train, explore = start("train", "train", **changes), start("explore", "explore", **beside)
    serve = start(
        "serve", "serve", serve={"api_key": "secret", "follow": True}, prompt={"chat_template": template},
        experience=store,
    )  # fmt: skip
    explorers = [explore]
    if killed:
        train.wait_for("step 2/")
        kill(explore)
        explorers = [start("explore", "explore", **beside), start("explore", "other", **changes)]
    serve.wait_for("at http://")
    url = re.search(r"Serving version \d at (http://\S+)", serve.output())[1]  # type: ignore[index]
    answers = [ask(url, "secret") for _ in range(3)]
    assert all(answer["choices"][0]["message"]["role"] == "assistant" for answer in answers)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(url, "other")
    if killed:
        train.wait_for("step 4/")
        kill(train)
        train = start("train", "train", **changes)
    for job in (train, *explorers):
        assert job.finish() == 0, job.output()[-4000:]
    check_all_trained_once(train, tmp_path / "shared" / "experience.db")
    assert {row["n_seqs"] for row in rows(train, "metrics.jsonl")} == {float(BATCH_SIZE * GROUP_SIZE)}
    assert VersionFolder(tmp_path / "shared" / "weights").latest().version == NUM_STEPS
    serve.wait_for(f"Serving version {NUM_STEPS}.")
    assert ask(url, "secret")["choices"]
    assert NUM_STEPS in {row["step"] for row in metrics_of(explorers[0]) if "eval/accuracy" in row}
    assert not [row for row in metrics_of(train) if "eval/accuracy" in row]
    assert "beside training" in explorers[0].output()


def ask(url: str, key: str) -> dict:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 3})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", body.encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))


@pytest.mark.nightly
def test_one_job_that_keeps_its_episodes_in_a_file_continues_after_a_kill(start, tmp_path) -> None:
    both = start("both", "both")
    both.wait_for("Dumped recover info to file.")
    kill(both)
    both = start("both", "both")
    assert both.finish() == 0, both.output()[-4000:]
    assert "steps are done" in both.output()
    check_all_trained_once(both, tmp_path / "shared" / "experience.db")


def check_all_trained_once(train: Command, store: Path) -> None:
    """Check that every step has its prompts within the bound, none of them twice, and that the store agrees."""
    consumed = rows(train, "consumed.jsonl")
    episodes = [id for row in consumed for id in row["prompts"]]
    assert [row["step"] for row in consumed] == list(range(1, NUM_STEPS + 1))
    assert len(set(episodes)) == len(episodes) == NUM_STEPS * BATCH_SIZE
    assert max(row["staleness/max"] for row in rows(train, "metrics.jsonl")) <= MAX_STALENESS
    with sqlite3.connect(store) as db:
        trained = [id for (id,) in db.execute("SELECT id FROM episodes WHERE fate = 'trained'")]
    assert sorted(trained) == sorted(episodes)


def test_a_bench_job_evaluates_each_model_on_each_set(assets, start: Callable[..., Command], tmp_path: Path) -> None:
    trained = assets.with_model(AutoConfig.from_pretrained(assets.model), tmp_path / "trained")
    sets = [str(assets.prompts), str(tmp_path / "few.jsonl")]
    (tmp_path / "few.jsonl").write_text("".join(assets.prompts.read_text().splitlines(keepends=True)[:3]))
    models = [str(assets.model), str(trained)]
    bench = start(
        "bench", "bench", experience={}, bench={"models": models}, evaluation={"path": sets}, exp_ctrl={}
    )  # fmt: skip
    assert bench.finish() == 0, bench.output()[-4000:]
    found = rows(bench, "metrics.jsonl")
    assert [row["model"] for row in found] == models
    assert {"eval/prompts/accuracy", "eval/few/accuracy", "eval/few/mean_length_tokens"} <= found[0].keys()


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["folder", "nccl"])
@pytest.mark.parametrize(
    ("style", "versions"), [("fixed", {0, 2, 4, 6}), ("dynamic_by_explorer", {0, 1, 2, 3, 4, 5, 6})]
)
def test_weights_are_published_as_the_style_says_and_the_bound_holds(start, tmp_path, style, versions, method) -> None:
    sync = {"interval": 2, "style": style, "method": method, **({"offset": 1} if style == "fixed" else {})}
    changes = {"synchronizer": sync, "staleness": {"max_staleness": 2}}
    train, explore = start("train", "train", **changes), start("explore", "explore", **changes)
    assert train.finish() == 0, train.output()[-4000:]
    assert explore.finish() == 0, explore.output()[-4000:]
    published = {int(v) for v in re.findall(r"(?:Published|Pushed) version (\d+)", train.output())}
    assert {0, NUM_STEPS} <= published <= versions and (style != "fixed" or published == versions)
    with sqlite3.connect(tmp_path / "shared" / "experience.db") as db:
        ages = list(db.execute("SELECT step - version FROM episodes WHERE fate = 'trained'"))
    assert len(ages) == NUM_STEPS * BATCH_SIZE and max(age for (age,) in ages) <= 2


@pytest.mark.nightly
def test_jobs_share_a_database_and_continue_after_its_server_was_killed(start, tmp_path) -> None:
    server = PostgresServer()
    import psycopg

    try:
        address = server.database()
        changes = {
            "experience": {"store": "postgres", "path": address},
            "synchronizer": {"folder": str(tmp_path / "weights")},
            "recover_retries": 3,
        }
        train, explore = start("train", "train", **changes), start("explore", "explore", **changes)
        train.wait_for("step 2/")
        server.kill()
        server.start()
        assert train.finish() == 0, train.output()[-4000:]
        assert explore.finish() == 0, explore.output()[-4000:]
        consumed = [id for row in rows(train, "consumed.jsonl") for id in row["prompts"]]
        with psycopg.connect(address) as db:
            trained = [id for (id,) in db.execute("SELECT id FROM episodes WHERE fate = 'trained'")]
        assert len(set(consumed)) == len(consumed) == NUM_STEPS * BATCH_SIZE and sorted(trained) == sorted(consumed)
    finally:
        server.close()


@pytest.mark.nightly
def test_an_explore_job_alone_writes_files(start: Callable[..., Command], tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    changes = {"experience": {"store": "file", "path": str(folder)}, "exp_ctrl": {"total_train_steps": 2}}
    explore = start("explore", "explore", **changes)
    assert explore.finish() == 0, explore.output()[-4000:]
    found = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len({row["tags"]["id"] for row in found}) == len(found) == 2 * BATCH_SIZE
    assert all(len(row["trajectories"]) == GROUP_SIZE for row in found)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_train_and_an_explore_job_learn_what_one_job_learns(tmp_path: Path) -> None:
    """Two-digit additions from the warm-up of the demo on, in 200 steps: held-out accuracy of the last weights."""
    files = make_demo_data(tmp_path, seed=1)
    run = partial(run_quickstart, environment={"SLIPSTREAM_DEMO": str(tmp_path)})
    run("sft", "seed=1", log=tmp_path / "sft.log")
    measured = partial(accuracy, data=files.held_out)
    warm, before = first_at_least(saved_models(tmp_path, "demo-sft"), WARM_UP_TARGET, measured)

    def learn(mode: str, *changes: str) -> None:
        log = tmp_path / f"{mode}.log"
        common = ppo_changes(warm, seed=1, gpus=0, steps=200)
        run("ppo-math", *common, f"mode={mode}", f"trial_name={mode}", "recover_mode=auto", *changes, log=log)

    def last(mode: str) -> float:
        (folder,) = tmp_path.glob(f"checkpoints/*/demo-ppo/{mode}/actor/*globalstep200")
        return measured(folder)

    learn("both")
    shared = ("experience.store=sqlite", f"experience.path={tmp_path}/shared/experience.db")
    with ThreadPoolExecutor() as pool:
        for job in [pool.submit(learn, mode, *shared) for mode in ("train", "explore")]:
            job.result()
    both, apart = last("both"), last("train")
    print(f"held-out accuracy: {before:.1%} before, {both:.1%} by one job, {apart:.1%} by two")
    assert both > before + 0.1 and apart > before + 0.1 and apart > both - 0.1


@pytest.mark.nightly
def test_jobs_in_one_group_are_killed_and_join_again_and_every_prompt_is_trained_once(start, tmp_path) -> None:
    """Weights by broadcast, into two generators of which one is started again, too."""
    changes = {
        "synchronizer": {"method": "nccl"},
        "exp_ctrl": {"total_train_steps": NUM_STEPS, "ckpt_freq_steps": 3},
        "allocation_mode": "embedded.d2m1p1+d1m1p1",
        "n_gpus_per_node": 3,
    }
    train, announcement = start("train", "train", **changes), tmp_path / "shared" / "weights" / "TRAINER"
    train.wait_for("Published version 0")
    announced = announcement.read_text()
    second = start("train", "second", **changes)
    assert second.finish() != 0 and "cannot lease" in second.output(), second.output()[-4000:]
    assert announcement.read_text() == announced
    explore = start("explore", "explore", **changes)
    train.wait_for("step 1/")
    explore.remember_family()
    generator = next(p for p in explore._family.values() if "GeneratorActor" in " ".join(p.cmdline()))
    generator.kill()
    train.wait_for("step 2/")
    kill(explore)
    explore = start("explore", "explore", **changes)
    train.wait_for("step 4/")
    kill(train)
    train = start("train", "train", **changes)
    assert train.finish() == 0, train.output()[-4000:]
    assert explore.finish() == 0, explore.output()[-4000:]
    check_all_trained_once(train, tmp_path / "shared" / "experience.db")
    assert explore.output().count("Joined the group of the weights") >= 2
    assert "Pushed version 1:" in train.output()
