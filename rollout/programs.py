"""Programs of users: what they are given, and commands as processes that end with the sample."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from rollout.types import Prompt

_SHOWN_CHARS = 1000
_AUXILIARY = ("SLIPSTREAM_AUXILIARY_URL", "SLIPSTREAM_AUXILIARY_KEY")
"""Variables of the environment in which the rollout process and those that it starts find the auxiliary model."""


class ProgramError(RuntimeError):
    """A command ended with an exit code other than 0."""


@dataclass(frozen=True)
class Endpoint:
    """Where a program finds the policy."""

    url: str
    api_key: str

    @property
    def openai(self) -> dict[str, str]:
        """Arguments of openai.AsyncOpenAI."""
        return {"base_url": f"{self.url}/v1", "api_key": self.api_key}

    @property
    def anthropic(self) -> dict[str, str]:
        """Arguments of anthropic.AsyncAnthropic."""
        return {"base_url": self.url, "api_key": self.api_key}

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the clients of both vendors read."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


def auxiliary() -> Endpoint:
    """Return where the auxiliary model of the run (auxiliary.path) answers, for rewards, tools, environments, workflows
    and programs. Raises RuntimeError in a run without one."""
    url, key = map(os.environ.get, _AUXILIARY)
    if url is None or key is None:
        raise RuntimeError("this run has no auxiliary model; set auxiliary.path to the folder of one")
    return Endpoint(url, key)


def announce_auxiliary(endpoint: Endpoint) -> None:
    """Let auxiliary() return this in this process and those that it starts from now on."""
    os.environ.update(zip(_AUXILIARY, (endpoint.url, endpoint.api_key), strict=True))


def row_of(prompt: Prompt) -> dict[str, object]:
    """Return what a program gets of a prompt: its text or messages, its task, and the other columns of the row. The
    solutions are for the reward function."""
    return {**prompt.meta, "query_id": prompt.query_id, "task": prompt.task, "prompt": prompt.question or prompt.text}


async def run_command(command: str, *, input: str, environment: Mapping[str, str]) -> str:
    """Run a command with the shell and return what it printed. It is killed with its children when the caller is
    cancelled. Raises ProgramError."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment}, start_new_session=True,
        )
    )  # fmt: skip
    try:
        process = await asyncio.shield(starting)
        output, errors = await process.communicate(input.encode())
    finally:
        await _end(await starting)  # also where the caller is cancelled while the process starts
    if process.returncode:
        shown = errors.decode(errors="replace").strip()[-_SHOWN_CHARS:]
        raise ProgramError(f"{command!r} ended with exit code {process.returncode}: {shown}")
    return output.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # children that outlive the leader keep its group
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
