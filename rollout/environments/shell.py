"""A shell without access to the host: a machine that the package `shellsim` simulates."""

from collections.abc import Mapping
from importlib import import_module

_FUEL = 20_000_000
"""What the commands of an episode may compute, in units of shellsim: about two seconds."""


class Shell:
    """An environment whose actions are commands. Equal commands have equal results, so its state is those so far."""

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        """Begin with no files. `row`: `memory_mib` of the machine."""
        self.restore([row["memory_mib"]])
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Run a command; return what it prints, and 1.0 where a limit ended it, which leaves files as they were."""
        result = self._machine.run(action)
        text = (result.stdout + result.stderr).decode(errors="replace")
        if result.stop_reason or self._machine.terminated:
            self.restore(self.snapshot())
            return f"{text}\nended ({result.stop_reason or 'killed'}); files are as before this command", 1.0, False
        self._commands.append(action)
        return (f"{text}\nexit code {result.returncode}" if result.returncode else text), 0.0, False

    def snapshot(self) -> list[object]:
        """Return memory and commands."""
        return [self._memory_mib, *self._commands]

    def restore(self, state: list[object]) -> None:
        """Run the commands of a snapshot in a fresh machine."""
        self._memory_mib, self._commands = int(str(state[0])), [str(command) for command in state[1:]]
        self._machine = (
            import_module("shellsim")
            .Context()
            .Environment(cpu=_FUEL, memory=self._memory_mib * 2**20, disk=self._memory_mib * 2**20)
        )
        for command in self._commands:
            self._machine.run(command)

    def close(self) -> None:
        """Do nothing: the machine is memory."""
