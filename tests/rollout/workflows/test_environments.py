"""Environments run in processes with time limits; the policy and they answer each other until an episode is over."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from helpers.both_sides import BothSides
from helpers.chat_tokenizer import OneVersion, Scripted, chat_tokenizer
from helpers.commands import PATIENCE_SECONDS
from helpers.simulated_sampling import make_dataset
from helpers.stores import begin
from rollout.environments.pool import EnvironmentFailure, EnvironmentPool
from rollout.environments.protocol import LIBRARIES, make_environment
from rollout.environments.shell import Shell
from rollout.experience import SQLiteExperience
from rollout.journal import JournaledSampler
from rollout.plugins import PluginError
from rollout.types import Prompt, SamplingParams
from rollout.workflows import TrajectoryBuilder, WorkflowChoice, close_workflow, make_workflow
from rollout.workflows.environment import EnvironmentWorkflow

TOKENIZER = chat_tokenizer()
PROMPT = Prompt(query_id="q", index=1, task="t", text="7", token_ids=np.array([5], np.int32), solutions=("2",))
MODULE = """
import os, pathlib, time

class Guess:
    "The number of the row is to be guessed."
    def reset(self, row, seed):
        self.number, self.seed = int(row["prompt"]), seed
        return "Guess."
    def step(self, action):
        if action == "hang":
            time.sleep(600)
        if action == "exit":
            os._exit(3)
        if action == "raise":
            raise KeyError("no such move")
        guess = int(action)
        return ("low" if guess < self.number else "high"), float(guess == self.number), guess == self.number
    def close(self):
        pass

class Counted:
    "Adds what is written; each step leaves a line in a file."
    def reset(self, row, seed):
        self.total = seed / 3
        return f"Begin at {self.total}."
    def step(self, action):
        if action == "exit":
            os._exit(3)
        with open(os.environ["STEPS"], "a") as file:
            file.write(action + chr(10))
        self.total = (self.total + int(action)) / 7
        return f"{self.total}", self.total, False
    def close(self):
        pass

class Kept(Counted):
    def snapshot(self):
        return {"total": self.total}
    def restore(self, state):
        self.total = state["total"]

class Dying(Kept):
    "Fails in the second step as often as there are files that tell it to."
    def step(self, action):
        deaths = sorted(pathlib.Path(os.environ["STEPS"]).parent.glob("death-*"))
        if action == "2" and deaths:
            deaths[0].unlink()
            if "raise" in deaths[0].name:
                raise KeyError("no such move")
            os._exit(3)
        return super().step(action)

class Large(Kept):
    def snapshot(self):
        return bytes(2**20)

class Half(Counted):
    def snapshot(self):
        return b""

class NoStep:
    def reset(self, row, seed):
        return ""
    def close(self):
        pass
"""

OPENENV_PYTHON = os.environ.get("SLIPSTREAM_OPENENV_PYTHON")
"""An interpreter that imports openenv, whose dependencies are not those of this project."""
OPENENV = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    message: str

class Two(Action):
    message: str
    code: str = ""

class Seen(Observation):
    text: str

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **ignored):
        self.number = seed % 10
        return Seen(text=f"Guess, seed {seed}.")
    def step(self, action, timeout_s=None, **ignored):
        guess = int(action.message)
        return Seen(text="low" if guess < self.number else "high", done=guess == self.number,
                    reward=float(guess == self.number))
    @property
    def state(self):
        return State()

action = {"one": Said, "two": Two}[sys.argv[2]]
uvicorn.run(create_fastapi_app(Guess, action, Seen, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_games.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def pool(num_workers: int = 1, step_seconds: float = 60.0) -> EnvironmentPool:
    return EnvironmentPool("own_games:Guess", num_workers=num_workers, setup_seconds=60.0, step_seconds=step_seconds)


async def test_the_first_line_of_an_error_in_an_environment_has_its_reason() -> None:
    games = pool()
    try:
        async with games.open() as game:
            await game.reset({"prompt": "7"}, 1)
            with pytest.raises(EnvironmentFailure, match=r"^environment own_games:Guess: step\(\) failed: ValueE"):
                await game.step("seven")
    finally:
        games.close()


@pytest.mark.parametrize(
    ("action", "step_seconds", "said"),
    [
        ("hang", 1.0, "environment own_games:Guess: step() took more than 1 s; its process is replaced"),
        ("exit", 60.0, "environment own_games:Guess: its process ended in step(), exit code 3; it is replaced"),
    ],
)
async def test_an_environment_that_hangs_or_exits_is_named_and_its_worker_replaced(action, step_seconds, said) -> None:
    games = pool(step_seconds=step_seconds)
    try:
        async with games.open() as game, games.open() as neighbour:
            assert await game.reset({"prompt": "7"}, 1) == await neighbour.reset({"prompt": "7"}, 1) == "Guess."
            with pytest.raises(EnvironmentFailure, match=re.escape(said)):
                await game.step(action)
            with pytest.raises(EnvironmentFailure, match="lost, as another one ended or blocked its worker"):
                await neighbour.step("7")
        async with games.open() as game:
            await game.reset({"prompt": "7"}, 1)
            assert await game.step("7") == ("high", 1.0, True)
    finally:
        games.close()


async def test_an_error_of_an_environment_is_its_own_and_a_cancelled_caller_disturbs_no_other() -> None:
    games = pool()
    try:
        async with games.open() as game, games.open() as neighbour:
            await game.reset({"prompt": "7"}, 1)
            await neighbour.reset({"prompt": "9"}, 1)
            with pytest.raises(EnvironmentFailure, match="no such move"):
                await game.step("raise")
            caller = asyncio.ensure_future(game.step("3"))
            await asyncio.sleep(0)
            caller.cancel()
            assert await neighbour.step("9") == ("high", 1.0, True)
            assert await game.step("7") == ("high", 1.0, True)
    finally:
        games.close()


RUN = """
import asyncio, os, pickle, signal, sys
from rollout.environments.pool import EnvironmentPool
from rollout.experience import Schedule, StalenessAdmission, Tags
from rollout.experience.stores import open_store
from rollout.journal import JournaledSampler

async def main(kind, spec, saved, actions, kill):
    store, tags = open_store(kind, saved), Tags(id="e", group_id="e", task="t", row="q", epoch=0, version=0)
    if kind == "memory" and os.path.exists(saved):
        store.load_state_dict(pickle.load(open(saved, "rb")))
    else:
        store.open(tags, StalenessAdmission(Schedule(num_prompts=1, batch_size=1), 0))
    JournaledSampler(None, store, "e").enter()
    games = EnvironmentPool(spec, num_workers=1, setup_seconds=60.0, step_seconds=60.0)
    async with games.open("sample 0") as game:
        seen = [await game.reset({"prompt": "7"}, 1)]
        for action in actions:
            seen.append(await game.step(action))
        if kill:
            if kind == "memory":
                pickle.dump(store.state_dict(), open(saved, "wb"))
            os.kill(os.getpid(), signal.SIGKILL)
    games.close()
    print(repr(seen))

asyncio.run(main(*sys.argv[1:4], sys.argv[4].split(), "kill" in sys.argv))
"""


def run_killed(
    spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *lives: str, store: str = "memory"
) -> tuple[str, str]:
    """Take these actions in one process after the other, all but the last killed; return what the last saw, and the
    steps that were made."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("STEPS", str(folder / "steps"))
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{folder.parent}")
    for life in lives:
        kill = [] if life is lives[-1] else ["kill"]
        command = [sys.executable, "-c", RUN, store, spec, str(folder / "saved"), life, *kill]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == (-9 if kill else 0), done.stderr
    return done.stdout, (folder / "steps").read_text().replace("\n", "")


def test_after_a_kill_the_steps_before_a_snapshot_are_not_made_again_and_results_are_equal(
    tmp_path, monkeypatch
) -> None:
    total = 1 / 3
    seen: list[Any] = [f"Begin at {total}."]
    for number in range(1, 5):
        total = (total + number) / 7
        seen.append((f"{total}", total, False))
    for store, spec, steps in (("memory", "Kept", "1234"), ("sqlite", "Kept", "1234"), ("memory", "Counted", "121234")):
        folder = tmp_path / f"{store} {spec}"
        found = run_killed(f"own_games:{spec}", folder, monkeypatch, "1 2", "1 2 3 4", store=store)
        assert found == (f"{seen!r}\n", steps)
    _, steps = run_killed("own_games:Kept", tmp_path / "sqlite Kept", monkeypatch, "1 5", store="sqlite")
    assert steps == "123415", "another action than before: run again from the seed"


class Written(SQLiteExperience):
    """Counts the bytes of the values that the file gets."""

    num_bytes = 0

    def _run(self, statement: str, values: Any) -> Any:
        self.num_bytes += sum(len(value) for value in values if isinstance(value, bytes))
        return super()._run(statement, values)


async def test_what_an_environment_with_snapshots_writes_grows_with_its_steps(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    games = EnvironmentPool("own_games:Kept", num_workers=1, setup_seconds=60.0, step_seconds=60.0)

    async def written(num_steps: int) -> int:
        store = Written(tmp_path / f"{num_steps}.db")
        begin(store, 0, 0)
        JournaledSampler(None, store, "q0").enter()
        async with games.open() as game:
            await game.reset({}, 1)
            for _ in range(num_steps):
                await game.step("1")
        store.close()
        return store.num_bytes

    try:
        assert await written(40) < 5 * await written(10)
    finally:
        games.close()


class Playing:
    """Asks for three tokens, and makes a step after each."""

    def __init__(self) -> None:
        self.games = EnvironmentPool("own_games:Dying", num_workers=1, setup_seconds=60.0, step_seconds=60.0)

    async def run(self, prompt: Prompt, generator: Any) -> list[Any]:
        sample, reward = TrajectoryBuilder(prompt, number=0), 0.0
        async with self.games.open("sample 0") as game:
            await game.reset({}, 1)
            for action in "123":
                sample.sampled(await generator.generate(sample.request(SamplingParams(max_new_tokens=1), seed=1)))
                _, reward, _ = await game.step(action)
                sample.observed([1])
        return [sample.build(reward)]


@pytest.mark.parametrize(
    ("deaths", "steps", "num_requests"),
    [(["exit"], "123", 3), (["exit", "exit"], "1123", 5), (["raise"], "1123", 5)],
    ids=["the worker ends", "it ends twice", "the step raises"],
)
async def test_the_first_retry_after_the_end_of_a_worker_goes_on_with_tokens_and_snapshot(
    tmp_path, monkeypatch, deaths, steps, num_requests
) -> None:
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    for number, death in enumerate(deaths):
        (tmp_path / f"death-{number}-{death}").touch()
    workflow, generator = Playing(), OneVersion(TOKENIZER, lambda _: "1")
    try:
        async with BothSides(make_dataset(1), workflow, generator, batch_size=1, max_staleness=0) as producer:
            [[t]] = await producer.take(0)
            assert producer.stats()["rollout/num_failures"] == len(deaths)
    finally:
        workflow.games.close()
    assert (tmp_path / "steps").read_text().replace("\n", "") == steps
    assert len(generator.requests) == num_requests
    assert t.reward == (((1 / 3 + 1) / 7 + 2) / 7 + 3) / 7


async def test_an_environment_with_snapshots_survives_the_loss_of_its_worker(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    games = EnvironmentPool("own_games:Kept", num_workers=1, setup_seconds=60.0, step_seconds=60.0)
    try:
        async with games.open() as game, games.open() as neighbour:
            await game.reset({}, 1)
            await neighbour.reset({}, 1)
            await game.step("1")
            with pytest.raises(EnvironmentFailure, match="exit code 3"):
                await neighbour.step("exit")
            total = ((1 / 3 + 1) / 7 + 2) / 7
            assert await game.step("2") == (str(total), total, False)
    finally:
        games.close()
    assert (tmp_path / "steps").read_text().split() == ["1", "2"]


async def test_a_snapshot_that_is_too_large_is_named() -> None:
    games = EnvironmentPool("own_games:Large", num_workers=1, setup_seconds=60.0, step_seconds=60.0)
    try:
        async with games.open() as game:
            with pytest.raises(
                EnvironmentFailure, match=r"reset\(\) failed: ValueError: snapshot\(\) has \d+ bytes, at"
            ):
                await game.reset({}, 1)
    finally:
        games.close()


def play(context_tokens: int = 4096) -> Any:
    """Run one episode with these guesses, and return its trajectory."""
    guesses = iter(["3<|im_end|>", "<think>\nhigher\n</think>\n\n9<|im_end|>", "7<|im_end|>"] * 2)
    options = {"environment": {"environment": "own_games:Guess", "context_tokens": context_tokens}}
    workflow: Any = make_workflow(
        WorkflowChoice(type="environment", options=options),
        tokenizer=TOKENIZER, reward_pool=None, sampling=SamplingParams(max_new_tokens=50), group_size=1, seed=1,
    )  # fmt: skip
    generator = Scripted(TOKENIZER, lambda _: next(guesses))
    before = {*psutil.Process().children()}

    async def main() -> list[Any]:
        try:
            return await workflow.run(PROMPT, generator)
        finally:
            await close_workflow(workflow)
            assert {*psutil.Process().children()} <= before, "its worker has ended"

    [t] = asyncio.run(main())
    return t


def test_an_episode_becomes_one_trajectory_with_the_sum_of_the_rewards() -> None:
    t = play()
    assert (t.reward, t.metrics) == (1.0, {"num_turns": 3.0, "finished": 1.0, "context_full": 0.0})
    assert t.turn_rewards == [0.0, 0.0, 1.0] and len(set(t.turn_states)) == 3
    assert TOKENIZER.decode(t.token_ids) == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nlow<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhigher\n</think>\n\n9<|im_end|>\n<|im_start|>user\nhigh<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>"
    )
    assert TOKENIZER.decode(t.token_ids[t.loss_mask]) == (
        "3<|im_end|><think>\nhigher\n</think>\n\n9<|im_end|>7<|im_end|>"
    )


@pytest.mark.parametrize("context_tokens", [26, 31, 60, 66, 100])
def test_an_episode_that_fills_its_context_ends_with_a_turn_and_is_counted(context_tokens: int) -> None:
    t = play(context_tokens)
    assert len(t.token_ids) <= context_tokens and t.loss_mask[-1] and t.reward == 0.0
    assert (t.metrics["context_full"], t.metrics["finished"]) == (1.0, 0.0)


def test_an_episode_without_room_for_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first observation of own_games:Guess has 25 tokens, context_tokens=25"):
        play(25)


def test_what_is_no_environment_is_refused() -> None:
    for make in (make_environment, lambda spec: EnvironmentWorkflow.Config(environment=spec)):
        with pytest.raises((PluginError, ValueError), match="environment own_games:NoStep: has no method step"):
            make("own_games:NoStep")
        with pytest.raises((PluginError, ValueError), match=r"own_games:Half: has snapshot\(\) alone; write both"):
            make("own_games:Half")
    with pytest.raises(PluginError, match="there is no module 'no_games'"):
        make_environment("no_games:Guess")


def test_a_library_that_is_not_installed_is_named_before_the_start() -> None:
    lacking = [library for library in LIBRARIES if find_spec(library) is None]
    if not lacking:
        pytest.skip("all libraries are installed")
    with pytest.raises(ValueError, match=f"{lacking[0]} is not installed; pip install"):
        EnvironmentWorkflow.Config(environment=f"{lacking[0]}:Any")


def test_a_game_that_textarena_does_not_have_is_named() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    with pytest.raises(PluginError, match="environment textarena:NoSuchGame"):
        make_environment("textarena:NoSuchGame")


@pytest.mark.parametrize("spec", ["textarena:FrozenLake-v0", "reasoning_gym:chain_sum", "gymnasium:FrozenLake-v1"])
def test_libraries_are_environments_whose_episodes_follow_from_the_seed(spec: str) -> None:
    pytest.importorskip(spec.partition(":")[0])

    def play(seed: int) -> list[Any]:
        game = make_environment(spec)
        seen: list[Any] = [game.reset({}, seed)]
        for action in ("[down] 1", "[right] 2", "0"):
            seen.append(game.step(action))
            if seen[-1][2]:
                break
        game.close()
        return seen

    assert play(3) == play(3)
    assert all(isinstance(s[0], str) and isinstance(s[1], float) for s in play(3)[1:])


@contextmanager
def openenv_server(folder: Path, actions: str) -> Iterator[str]:
    """A server of OpenEnv; yields its address when it answers."""
    assert OPENENV_PYTHON is not None
    (folder / "server.py").write_text(OPENENV)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([OPENENV_PYTHON, str(folder / "server.py"), str(port), actions])
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_SECONDS
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
@pytest.mark.skipif(OPENENV_PYTHON is None, reason="no openenv here: set SLIPSTREAM_OPENENV_PYTHON to its interpreter")
def test_an_environment_of_an_openenv_server_is_played_over_its_address(tmp_path: Path) -> None:
    async def play(url: str) -> list[Any]:
        games = EnvironmentPool(f"openenv:{url}", num_workers=1, setup_seconds=120.0, step_seconds=60.0)
        try:
            async with games.open() as game, games.open() as other:
                seen: list[Any] = [await game.reset({}, 27), await other.reset({}, 4)]
                return seen + [await game.step("3"), await other.step("4"), await game.step("7")]
        finally:
            games.close()

    with openenv_server(tmp_path, "one") as url:
        assert asyncio.run(play(url)) == [
            "Guess, seed 27.", "Guess, seed 4.", ("low", 0.0, False), ("high", 1.0, True), ("high", 1.0, True),
        ]  # fmt: skip
        assert asyncio.run(play(f"{url}#message"))[-1] == ("high", 1.0, True)
    with pytest.raises(PluginError, match=f"environment openenv:{url}: .*Cannot connect"):
        make_environment(f"openenv:{url}")
    with openenv_server(tmp_path, "two") as url:
        message = r"its actions have 2 texts \(message, code\); name one, as in .*#FIELD"
        with pytest.raises(PluginError, match=message):
            make_environment(f"openenv:{url}")


async def test_commands_of_a_shell_reach_nothing_of_the_host_and_end() -> None:
    pytest.importorskip("shellsim", reason="shellsim is not installed")
    shells = EnvironmentPool("rollout.environments.shell:Shell", num_workers=1, setup_seconds=60.0, step_seconds=60.0)
    try:
        for command, said in (
            ("cat /etc/passwd", "No such file"),
            ("ls /home /root", "cannot access"),
            ("cat /proc/1/environ", "No such file"),
            ("curl http://127.0.0.1:1", "no matching virtual"),
            ("cat < /dev/tcp/127.0.0.1/22", "exit code"),
            ("while true; do :; done", "ended (cpu_exhausted)"),
            ("x=a; while true; do x=$x$x; done", "ended (memory_exhausted)"),
            ("f() { f | f & }; f; while true; do f; done", "ended ("),
        ):
            async with shells.open() as shell:
                await shell.reset({"memory_mib": 64}, 0)
                await shell.step("echo kept > f")
                assert said in (await shell.step(command))[0], command
                assert (await shell.step("cat f"))[0] == "kept\n", "what ends a command ends no other"
    finally:
        shells.close()


def test_a_restored_shell_has_the_files_and_results_of_before() -> None:
    pytest.importorskip("shellsim", reason="shellsim is not installed")
    one, other = Shell(), Shell()
    one.reset({"memory_mib": 64}, 0)
    one.step("echo $RANDOM > f; date >> f; sleep 100")
    other.restore(one.snapshot())
    assert one.step("cat f; date; echo $RANDOM") == other.step("cat f; date; echo $RANDOM")
