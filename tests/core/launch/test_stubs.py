"""Clients of actors call methods that exist, with the parameters that they have: Ray finds out only when it runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from core.launch.generator_actor import GeneratorActor
from core.launch.generator_stub import GeneratorStub
from core.launch.remote import Remote
from core.launch.rollout_actor import RolloutActor
from core.launch.rollout_client import RolloutClient
from core.launch.trainer_rank import TrainerRank
from core.launch.trainer_stub import TrainerStub

GENERATOR: type = GeneratorActor.__ray_metadata__.modified_class.__ray_actor_class__
PAIRS: dict[type, type] = {TrainerStub: TrainerRank, GeneratorStub: GENERATOR, RolloutClient: RolloutActor}
"""Client -> class of its actor."""
OTHER_METHODS = {(RolloutClient, "wait_started"): "start"}
OTHER_NAMES = {(GeneratorStub, "receive", "buckets"): "handles"}
"""Names that differ on the actor's side; Ray passes the values by position."""
OF_AN_EARLIER_CALL = {"wait_taken"}
"""Methods of a client that wait for what another one has sent."""
OF_THE_CLIENT = {"meanwhile", "timeout_seconds"}
"""Parameters that are not sent."""


def methods(kind: type) -> dict[str, Any]:
    found = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}
    return {name: value for name, value in found.items() if name not in OF_AN_EARLIER_CALL}


CALLS = [(client, name) for client in PAIRS for name in methods(client)]


def sent_names(client: type, name: str) -> list[str]:
    """Parameters of a client's method that its actor gets, by the actor's names."""
    _, *own = inspect.signature(methods(client)[name]).parameters
    return [OTHER_NAMES.get((client, name, p), p) for p in own if p not in OF_THE_CLIENT]


class Handle:
    """Ray's handle of an actor, and of a method of it: keeps the calls."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], method: str = "") -> None:
        self._calls, self._method = calls, method

    def __getattr__(self, method: str) -> Handle:
        return Handle(self._calls, method)

    def options(self, *, num_returns: int) -> Handle:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> tuple[str, str]:
        self._calls.append((self._method, args, kwargs))
        return ("first", "second")


def make(client: type, handle: Handle) -> Any:
    if client is not RolloutClient:
        return client(handle)

    def gather(calls: Sequence[Any], **options: Any) -> list[Any]:
        return [("facts", "figures")] * len(calls)

    made = object.__new__(client)
    made._actor, made._starting, made._announced = Remote(handle), handle.start.remote(), []
    deadlines = SimpleNamespace(call_seconds=1.0, batch_seconds=1.0)
    started = {"gather_started": lambda refs, **options: refs}
    made._cluster = SimpleNamespace(waiter=SimpleNamespace(gather=gather), deadlines=deadlines, **started)
    return made


@pytest.mark.parametrize("client", PAIRS)
def test_a_client_has_every_method_of_its_actor_and_no_other(client: type) -> None:
    named = {OTHER_METHODS.get((client, name), name) for name in methods(client)}
    assert named == methods(PAIRS[client]).keys()


@pytest.mark.parametrize(("client", "name"), CALLS)
def test_a_method_of_a_client_has_the_parameters_of_the_actors(client: type, name: str) -> None:
    method = methods(PAIRS[client])[OTHER_METHODS.get((client, name), name)]
    _, *theirs = inspect.signature(method).parameters
    assert sent_names(client, name) == [p for p in theirs if not p.startswith("_ray_")]  # Ray adds some for tracing


@pytest.mark.parametrize(("client", "name"), CALLS)
def test_a_call_of_a_client_reaches_the_parameters_of_the_same_name(client: type, name: str) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    given: dict[str, Any] = {p: [p] for p in list(inspect.signature(methods(client)[name]).parameters)[1:]}
    getattr(make(client, Handle(calls)), name)(**given)
    method, args, kwargs = calls[-1]
    assert method == OTHER_METHODS.get((client, name), name)
    bound = inspect.signature(methods(PAIRS[client])[method]).bind(None, *args, **kwargs)
    values = {p: value for p, value in bound.arguments.items() if p != "self"}
    names = {p: OTHER_NAMES.get((client, name, p), p) for p in given if p not in OF_THE_CLIENT}
    assert values == {theirs: [ours] for ours, theirs in names.items()}
