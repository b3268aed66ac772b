"""The policy behind one address, for programs of any kind: each request is answered by itself, and nothing is kept."""

from __future__ import annotations

import itertools

import numpy as np
from aiohttp import web

from rollout.sessions.bridge import Bridge
from rollout.sessions.calls import CallError
from rollout.sessions.server import SessionServer, key_of
from rollout.sessions.session import Limits, Session
from rollout.types import Prompt, Sampler


class PolicyServer(SessionServer):
    """Answers every request that has the key. Equal requests get different samples."""

    def __init__(
        self, bridge: Bridge, sampler: Sampler, *, limits: Limits, host: str, port: int, api_key: str, seed: int
    ) -> None:
        """`api_key`: the key that clients must send; empty: none is needed."""
        super().__init__(host=host, port=port)
        self._bridge, self._sampler, self._limits, self._api_key = bridge, sampler, limits, api_key
        self._seed, self._numbers = seed, itertools.count()

    def _session_of(self, request: web.Request) -> Session:
        if self._api_key and self._api_key != key_of(request):
            raise CallError("Incorrect API key; it is serve.api_key.", code="invalid_api_key", status=401)
        empty, number = np.empty(0, np.int32), next(self._numbers)
        prompt = Prompt(query_id="served", index=number, task="", text="", token_ids=empty, solutions=())
        return Session(self._bridge, self._sampler, prompt, number=number, seed=self._seed, limits=self._limits)
