"""The real command line in a process of its own, with everything that it starts."""

import os
import signal
from pathlib import Path

import psutil
import yaml

from helpers.forks import programs

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 600.0
"""For what must happen: on a machine with other work the start of a run takes minutes."""


class Command:
    """`python -m core.quickstart` in a process of its own; everything it started is known by its process group tree."""

    def __init__(self, experiment: str, config: dict, folder: Path, *, fresh: bool = False) -> None:
        """`fresh`: in new interpreters, instead of forks of one that has imported the libraries."""
        self.root = folder / "root"
        config = {
            "experiment_name": "test",
            "trial_name": "trial",
            "external_configs": {"cluster_config": {"fileroot": str(self.root)}},
            "launch": {"threads_per_process": 1},
            "recover_mode": "disabled",  # a failure ends the run; tests of recovery set their own
            **config,
            "monitor": {"style": "areal", **config.get("monitor", {})},
        }
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self._output = open(folder / "output.log", "a+")  # noqa: SIM115 (closed in stop())
        words = ["-m", "core.quickstart", experiment, "--config", str(path)]
        self.process = programs.start(words, env=environment, output=self._output, fresh=fresh)
        self._family: dict[int, psutil.Process] = {}

    @property
    def logs(self) -> Path:
        return next((self.root / "logs").glob("*/test/trial"))

    @property
    def checkpoints(self) -> Path:
        return next((self.root / "checkpoints").glob("*/test/trial"))

    def output(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def remember_family(self) -> set[int]:
        """Process ids of everything that descends from the command now; kept for `survivors`."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._family |= {p.pid: p for p in found}
        return set(self._family)

    def scripts(self) -> set[str]:
        """Names of the Python files that the remembered processes run."""
        lines = [p.cmdline() for p in self._family.values() if p.is_running()]
        return {Path(word).name for line in lines for word in line if word.endswith(".py")}

    def survivors(self, timeout: float = PATIENCE_SECONDS) -> list[psutil.Process]:
        """What of the family is still there after at most `timeout` seconds."""
        _, alive = psutil.wait_procs(list(self._family.values()), timeout=timeout)
        return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def wait_for(self, text: str, timeout: float = PATIENCE_SECONDS) -> None:
        """Return when the output holds `text`; fails with the output if the command ends or the time is over."""
        import time

        deadline = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.output()[-4000:]}"
            time.sleep(0.05)

    def finish(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Exit code."""
        return self.process.wait(timeout)

    def stop(self) -> None:
        """Leave nothing behind, whatever the test did."""
        self.remember_family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for p in self._family.values():
            if p.is_running():
                p.kill()
        self._output.close()
