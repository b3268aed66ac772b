"""The workflow of agent programs: they talk to an endpoint, which records what they ask and get."""

import asyncio
import contextvars
import json
import secrets

from pydantic import ValidationInfo, field_validator

from config_schema.section import Section, key
from rollout.data.encoder import Encoder
from rollout.plugins import find_plugin, load_coroutine
from rollout.programs import Endpoint, row_of, run_command
from rollout.rewards.pool import RewardPool
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import SessionServer
from rollout.sessions.session import Limits, Session
from rollout.trajectories import all_of
from rollout.types import Prompt, Sampler, SamplingParams, Tokenizer, Trajectory

_NO_LIMIT = 10**9
"""model_max_length of tokenizers that state none is larger."""


class EndpointWorkflow:
    """Runs a program for each sample of a prompt and trains on the answers that the policy gave it.

    The program is a coroutine function or a command. A number that it returns is the reward. The reward function scores
    a text that it returns or prints, and the last answer of the policy if there is none."""

    class Config(Section):
        """What workflow.options may contain."""

        program: str = key("", description="package.module:function of `async def function(row, endpoint)`")
        command: str = key(
            "", validate_default=True, description="Command, run by the shell for each sample, if there is no program"
        )
        context_tokens: int | None = key(
            None, ge=1, description="Tokens of a conversation. None: the tokenizer's limit"
        )

        @field_validator("program")
        @classmethod
        def _check_program(cls, program: str) -> str:
            if program:
                load_coroutine(program, kind="program", arguments=("row", "endpoint"))
            return program

        @field_validator("command")
        @classmethod
        def _check_command(cls, command: str, info: ValidationInfo) -> str:
            if "program" in info.data and bool(command) == bool(info.data["program"]):
                raise ValueError("workflow.type=endpoint needs a program or a command, and not both")
            return command

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        reward_pool: RewardPool,
        sampling: SamplingParams,
        group_size: int,
        seed: int,
        options: Config,
        encoder: Encoder | None = None,
    ) -> None:
        self._program = find_plugin(options.program, kind="program") if options.program else None
        self._command = options.command
        self._bridge = Bridge(encoder or Encoder(tokenizer))
        self._reward_pool, self._group_size, self._seed = reward_pool, group_size, seed
        context = options.context_tokens or min(tokenizer.model_max_length, _NO_LIMIT)
        self._limits = Limits(sampling=sampling, context_tokens=context)
        self._server: asyncio.Task[SessionServer] | None = None

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return the trajectories of a group, those of a program's branches one after the other."""
        groups = await all_of(self._sample(prompt, generator, number) for number in range(self._group_size))
        return [trajectory for group in groups for trajectory in group]

    async def close(self) -> None:
        """End the sessions and stop listening."""
        if self._server is not None:
            await (await self._server).close()

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> list[Trajectory]:
        server = await self._started()
        token = secrets.token_urlsafe(16)
        session = Session(self._bridge, generator, prompt, number=number, seed=self._seed, limits=self._limits)
        server.open(token, session)
        try:
            outcome = await self._run_program(prompt, Endpoint(server.url, token))
        except Exception:
            if session.error is not None:
                raise session.error from None
            raise
        finally:
            await server.end(token)
        if session.error is not None:
            raise session.error
        reward = await self._score(prompt, session, outcome)
        return session.trajectories(reward, {"num_turns": float(session.num_turns)})

    async def _run_program(self, prompt: Prompt, endpoint: Endpoint) -> object:
        row = row_of(prompt)
        if self._program is not None:
            return await self._program(row, endpoint)
        return await run_command(self._command, input=json.dumps(row, default=str), environment=endpoint.environment)

    async def _score(self, prompt: Prompt, session: Session, outcome: object) -> float:
        if isinstance(outcome, int | float):
            return float(outcome)
        if outcome is not None and not isinstance(outcome, str):
            raise TypeError(
                f"{prompt.query_id}: a program returns a number, a text or None, not {type(outcome).__name__}"
            )
        text = outcome or session.last_text
        [reward] = await self._reward_pool.score_many(prompt, [text])
        return reward

    async def _started(self) -> SessionServer:
        if self._server is None:
            # In a context of its own: its requests belong to other prompts, too.
            self._server = asyncio.create_task(_start(), context=contextvars.Context())
        return await asyncio.shield(self._server)


async def _start() -> SessionServer:
    server = SessionServer()
    await server.start()
    return server
