"""The auxiliary model of a run, frozen beside the policy: its servers behind an address in the dialects of OpenAI and
Anthropic.

The rollout process has the address, and so has what it starts: reward workers, environments, tools and programs. Equal
requests get equal answers where the servers compute alike whatever runs beside a request, so that an episode which is
run again after a restart meets the same opponent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from model_specs.families import read_config
from rollout.data.encoder import Encoder
from rollout.data.source import DatasetError
from rollout.inference.router import NoGeneratorError, Routed, Router
from rollout.programs import Endpoint, announce_auxiliary
from rollout.sessions.bridge import Bridge
from rollout.sessions.server import PolicyServer
from rollout.sessions.session import Limits
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from core.config.experiments import PPOMATHConfig

logger = logging.getLogger(__name__)


class AuxiliaryModel:
    """The auxiliary model of a run behind an address of this host: make it, start() it, and close() it at the end."""

    def __init__(self, config: PPOMATHConfig, servers: Mapping[str, Routed]) -> None:
        """Raises DatasetError for a tokenizer without a chat template."""
        from rollout.data.tokenizer import load_tokenizer  # imports transformers, which a driver does without

        self._router = Router(servers, config.generator)
        folder = config.auxiliary.path
        encoder = Encoder(load_tokenizer(folder), folder=folder)
        if encoder.chat is None:
            raise DatasetError(f"auxiliary.path={folder}: its tokenizer has no chat template; choose a chat model")
        given = config.merged_flags.get("context_length")
        positions = int(str(given)) if given else read_config(folder).max_position_embeddings
        sampling = SamplingParams(
            max_new_tokens=positions, temperature=config.auxiliary.temperature, stop_token_ids=encoder.end_token_ids
        )
        self._key = secrets.token_urlsafe(16)
        self._server = PolicyServer(
            Bridge(encoder),
            self._router,
            limits=Limits(sampling=sampling, context_tokens=positions),
            host="127.0.0.1",
            port=0,
            api_key=self._key,
            key_hint="that of rollout.programs.auxiliary()",
            seed=config.seed,
            varies=False,
        )
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and announce the address. Requests wait until the servers are up."""
        await self._server.start()
        announce_auxiliary(Endpoint(self._server.url, self._key))
        logger.info("The auxiliary model answers at %s/v1", self._server.url)

    def watch(self, fail: Callable[[Exception], None]) -> None:
        """Call `fail` when a server is lost: they are started again with the attempt only."""

        async def watch() -> None:
            lost = await self._router.wait_lost(())
            names = ", ".join(f"{name}: {why}" for name, why in lost.items())
            fail(NoGeneratorError(f"a server of the auxiliary model (auxiliary.path) is lost: {names}"))

        self._watcher = asyncio.create_task(watch())

    async def close(self) -> None:
        """Stop listening."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._server.close()
        await self._router.close()
