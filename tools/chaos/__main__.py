"""Kill a small run again and again, and compare it with the same run left alone.

    python -m tools.chaos --kills 12 --seed 1
    python -m tools.chaos --kills 3 --algorithm dapo      # a preset of algorithm.name (ppo: with a critic), sft or dpo
    python -m tools.chaos --kills 12 --mode split         # a train job and an explore job, which share a SQLite store
    python -m tools.chaos --kills 12 --mode split --postgres    # on a PostgreSQL server, which is killed as well
    python -m tools.chaos --kills 12 --mode split --method nccl  # weights by broadcast
    python -m tools.chaos --kills 12 --workflow agent     # turns of an environment, a tool with effects

SIGKILL hits the command itself, its driver, a trainer rank, a generator, the producer, Ray's raylet, the server of the
store or a process of environments at random moments, a part of them while a recover checkpoint is being written. The
command is started again when it was killed itself, and the server at once; from everything else the command recovers
(recover_mode=auto). Exit code 0: every prompt was trained exactly once, in the same order, with the same losses, and
the last checkpoint holds the same weights and optimizer moments, bit for bit; every call of a tool and every step of an
environment had its effect once (kills hit these calls, too; one that is made again has the same id; half of the
environments have snapshots); and no process and no file in /dev/shm was left.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from core.config.presets import PRESETS
from core.config.runtime import Method
from tools import arguments
from tools.chaos.agent import is_under_way
from tools.chaos.postgres import NoServerError, PostgresServer
from tools.chaos.run import (
    DATABASE,
    ENVIRONMENT,
    Leftovers,
    Trial,
    Verdict,
    compare,
    family,
    find_target,
    make_assets,
    targets_of,
    targets_of_jobs,
    wait_gone,
    wait_until,
)

KILLS_PER_RUN = 20
RUNS_AT_ONCE = max(2, (os.cpu_count() or 1) // 2)  # starting a run keeps a core or two busy
STEPS_PER_KILL = 3
STEPS_BEFORE = 2
"""More before the first kill, so that there is a checkpoint to continue from."""
_PATIENCE_SECONDS = 600.0
_SERVER = threading.Lock()
"""Of the run that kills the server of all runs."""
_GONE_SECONDS = 60.0
"""Time for the watchdog of a killed command to end the remaining processes."""

Moment = Literal[
    "in a step",
    "while a checkpoint is written",
    "while starting again",
    "in a tool call",
    "in a model call",
    "in an environment",
]
LONGEST_DELAY_SECONDS: dict[Moment, float] = {
    "in a step": 0.1,
    "while a checkpoint is written": 0.03,
    "while starting again": 4.0,
    "in a tool call": 0.04,
    "in a model call": 0.02,
    "in an environment": 0.02,
}
SHARES: dict[Moment, float] = {"in a step": 0.35, "while a checkpoint is written": 0.35, "while starting again": 0.3}
_SHARES_OF_AGENTS: dict[Moment, float] = {
    "in a step": 0.05,
    "in a tool call": 0.2,
    "in a model call": 0.2,
    "in an environment": 0.2,
    "while a checkpoint is written": 0.2,
    "while starting again": 0.15,
}
_MARKS: dict[Moment, str] = {"in a tool call": "called", "in a model call": "sampled", "in an environment": "stepped"}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Kill `target` once `after_step` steps are done: `delay` seconds later, or so long after the next recover
    checkpoint begins to be written; while starting again, so long after the last kill."""

    target: str
    moment: Moment
    after_step: int
    delay: float

    def __str__(self) -> str:
        when = "" if self.moment == "while starting again" else f" of step {self.after_step + 1} or later"
        return f"{self.target} {self.moment}{when}, after {self.delay:.3f} s"


class RunFailed(Exception):
    """A run did not come to its end; the message contains its phase."""


class Report:
    """Progress on a terminal, plain lines elsewhere."""

    def __init__(self, kills: int) -> None:
        self.console = Console(highlight=False)
        columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.description}"), console=self.console, disable=not self.console.is_terminal
        )
        self._task = self._progress.add_task("", total=kills)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def log(self, text: str) -> None:
        if self.console.is_terminal:
            self._progress.update(self._task, description=text)
        else:
            self.console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True)

    def killed(self) -> None:
        self._progress.advance(self._task)


def main() -> int:
    parser = arguments.parser_of("tools.chaos", __doc__)
    add = parser.add_argument
    add("--kills", type=arguments.integer(least=1), default=12, help="how many")
    add("--seed", type=arguments.seed, default=1, help="of targets and moments")
    names = ("sft", "dpo", *PRESETS)
    add("--algorithm", choices=names, metavar="NAME", help=f"{', '.join(names)} (default: PPO without a critic)")
    add("--mode", choices=("both", "split"), default="both", help="one job, or a train job and an explore job")
    add(
        "--postgres",
        action="store_true",
        help="keep the stores of --mode split on a PostgreSQL server of the distribution, and kill it, too",
    )
    add("--method", choices=get_args(Method), default="folder", help="synchronizer.method of --mode split")
    add("--workflow", choices=("math", "agent"), default="math", help="single turns, or with tools")
    add("--folder", type=arguments.new_folder, help="keep everything here (default: a temporary folder)")
    given = parser.parse_args()
    if (given.mode == "split" or given.workflow == "agent") and given.algorithm in ("sft", "dpo"):
        option = "--mode split" if given.mode == "split" else "--workflow agent"
        parser.error(f"{option} does not work with --algorithm {given.algorithm}, which samples nothing")
    if given.postgres and given.mode != "split":
        parser.error("--postgres needs --mode split: one job has its store in memory")
    if given.method != "folder" and given.mode != "split":
        parser.error("--method needs --mode split: weights of one job go by push.type")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left running
    try:
        server = PostgresServer() if given.postgres else None
    except NoServerError as error:
        parser.error(f"--postgres: {error}")
    with ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        if server is not None:
            stack.enter_context(closing(server))
        report = stack.enter_context(Report(given.kills))
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        verdict = chaos(
            folder, given.kills, given.seed, report, given.algorithm, split=given.mode == "split",
            agent=given.workflow == "agent", server=server, method=given.method,
        )  # fmt: skip
    for problem in verdict.problems:
        print(problem)
    print(f"{given.kills} kills: {verdict.summary}")
    return 0 if verdict.holds else 1


def chaos(
    folder: Path,
    kills: int,
    seed: int,
    report: Report,
    algorithm: str | None = None,
    *,
    split: bool = False,
    agent: bool = False,
    server: PostgresServer | None = None,
    method: Method = "folder",
) -> Verdict:
    """Run as many killed runs as necessary, some at once, each compared with an undisturbed one of the same length.
    `server`: has the stores, and is killed as well. `method`: of the weights of two jobs."""
    make_assets(folder)
    rng = random.Random(seed)
    counts = shares(kills)
    targets = targets_of_jobs(agent=agent) if split else targets_of(algorithm, agent=agent)
    targets += [DATABASE] if server is not None else []
    plans = [plan(count, rng, targets, first=sum(counts[:i]), agent=agent) for i, count in enumerate(counts)]
    steps = STEPS_BEFORE + STEPS_PER_KILL * max(map(len, plans)) + 5
    undisturbed = Trial(folder=folder, name="undisturbed", steps=steps, algorithm=algorithm, agent=agent)
    killed = replace(undisturbed, mode="train", method=method) if split else undisturbed
    trials = [replace(killed, name=f"killed{number}") for number in range(len(plans))]
    if server is not None:
        for trial in trials:
            trial.postgres = server.make_schema(trial.name)
    stop, verdict = threading.Event(), Verdict(problems=[])
    with Leftovers(folder) as leftovers, ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        try:
            jobs = [(undisturbed, []), *zip(trials, plans, strict=True)]
            for run in as_completed([pool.submit(run_killed, *job, report, stop, server) for job in jobs]):
                try:
                    run.result()
                except RunFailed as failure:
                    verdict.problems.append(str(failure))
        except BaseException:
            stop.set()  # the others end what they started
            raise
    for trial in trials if verdict.holds else ():  # a run that failed has its reason, and may have nothing to compare
        compare(undisturbed, trial, verdict)
    if not wait_until(lambda: not leftovers.found(), _GONE_SECONDS, stop):
        verdict.problems += leftovers.found()
    return verdict


def shares(kills: int) -> list[int]:
    """Return the kills of each run, at most KILLS_PER_RUN, in as many runs as go at once or more."""
    runs = max(-(-kills // KILLS_PER_RUN), min(RUNS_AT_ONCE, kills))
    return [kills // runs + (i < kills % runs) for i in range(runs)]


def plan(count: int, rng: random.Random, targets: Sequence[str], *, first: int = 0, agent: bool = False) -> list[Kill]:
    """Return the kills of one run after `first` kills of other runs; over all of them every kind of process is killed
    as often as any other."""
    chosen = [targets[i % len(targets)] for i in range(first, first + count)]
    rng.shuffle(chosen)
    kills = []
    of_moments = _SHARES_OF_AGENTS if agent else SHARES
    for i, target in enumerate(chosen):
        # The first kill cannot hit a run that starts again.
        moments = [moment for moment in of_moments if i or moment != "while starting again"]
        moment = rng.choices(moments, [of_moments[m] for m in moments])[0]
        after_step = STEPS_BEFORE + STEPS_PER_KILL * i + rng.randrange(1, STEPS_PER_KILL)
        delay = rng.uniform(0.0, LONGEST_DELAY_SECONDS[moment])
        kills.append(Kill(target=target, moment=moment, after_step=after_step, delay=delay))
    return kills


def run_killed(
    trial: Trial, kills: list[Kill], report: Report, stop: threading.Event, server: PostgresServer | None = None
) -> None:
    """Start, kill, start again where the command itself was killed, and let it finish."""
    trials = [trial] if trial.mode == "both" else [trial, trial.explorer()]
    jobs = [Job(trial=of_job, process=of_job.start()) for of_job in trials]
    try:
        for kill in kills:
            _kill(jobs, kill, stop, server)
            report.killed()
            report.log(f"{trial.name}: killed {kill}; {trial.finished_steps} of {trial.steps} steps done")
        for job in jobs:
            while job.process.poll() != 0:
                _keep_running(jobs)
                if not wait_until(lambda: _any_ended(jobs), _PATIENCE_SECONDS, stop, every_seconds=0.05):
                    raise RunFailed(f"{job.trial.name} did not finish:\n{job.trial.log_tail()}")
        recovered = f"; recoveries: {trial.recoveries}" if kills else ""
        report.log(f"{trial.name}: finished all {trial.steps} steps{recovered}")
        if any(not kill.target.startswith(("explore ", ENVIRONMENT)) for kill in kills) and not trial.recoveries:
            raise RunFailed(f"{trial.name}: no attempt continued from a checkpoint")
    finally:
        for job in jobs:
            _end(job.process)


@dataclass(kw_only=True)
class Job:
    """A command that runs, of a trial."""

    trial: Trial
    process: subprocess.Popen[bytes]

    def keep_running(self) -> None:
        """Start the same command once more where it was killed. Raises RunFailed where the job ended otherwise: there
        is nothing left to kill, or it should have continued by itself."""
        code = self.process.poll()
        if code is None:
            return
        if not self.trial.may_end:
            raise RunFailed(f"{self.trial.name} ended with exit code {code} by itself:\n{self.trial.log_tail()}")
        self.trial.may_end = False
        self.process = self.trial.start()


def _keep_running(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.process.poll() != 0:
            job.keep_running()


def _any_ended(jobs: Sequence[Job]) -> bool:
    """Return whether a job failed, or all are complete."""
    codes = [job.process.poll() for job in jobs]
    return any(codes) or None not in codes


def _kill(jobs: Sequence[Job], kill: Kill, stop: threading.Event, server: PostgresServer | None) -> None:
    """Wait for the moment, and kill."""
    name, _, target = kill.target.partition(" ") if len(jobs) > 1 else ("", "", kill.target)
    victims = jobs[1] if name == "explore" else jobs[0]
    while True:
        for job in jobs:
            job.keep_running()
        _wait_for_moment(jobs[0].trial, jobs[0].process, kill, stop)
        if kill.target == DATABASE:
            assert server is not None, "it is killed only where there is one"
            with _SERVER:
                server.kill()
                server.start()
            return
        victim = find_target(victims.process, target)
        if victim is not None:
            victim.kill()
            if target == "command":
                victims.process.wait()
                victims.trial.may_end = True
            return


def _wait_for_moment(trial: Trial, process: subprocess.Popen[bytes], kill: Kill, stop: threading.Event) -> None:
    """Wait for the moment of a kill; return early when the run ends meanwhile, with what was killed before."""

    def ended() -> bool:
        return process.poll() is not None

    if kill.moment != "while starting again" and not wait_until(
        lambda: trial.finished_steps >= kill.after_step or ended(), _PATIENCE_SECONDS, stop, every_seconds=0.05
    ):
        raise RunFailed(f"{trial.name} made no progress:\n{trial.log_tail()}")
    if kill.moment == "while a checkpoint is written":
        wait_until(lambda: trial.is_writing() or ended(), 5.0, stop)
    if mark := _MARKS.get(kill.moment):
        wait_until(lambda: is_under_way(mark, trial.effects) or ended(), 5.0, stop)
    wait_until(ended, kill.delay, stop)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End everything that is left of the run."""
    if process.poll() is None:
        below = family(psutil.Process(process.pid))
        process.kill()
        process.wait()
        for left in wait_gone(below, 10.0):
            left.kill()


if __name__ == "__main__":
    sys.exit(main())
