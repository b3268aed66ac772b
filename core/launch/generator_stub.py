"""The typed client of a generator's Ray actor: a method for each remote call, so that a wrong name is a type error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import ObjectRef

    from rollout.inference.backend import WeightEndpoint
    from rollout.types import Completion, GenerateRequest, Health


class GeneratorStub:
    """Every method starts the call of the same name (core/launch/generator_actor.py) and returns its reference."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        """Ray's handle, which may be sent to another process."""

    def start(self) -> ObjectRef[None]:
        return self.actor.start.remote()

    def submit(self, requests: list[GenerateRequest]) -> ObjectRef[None]:
        return self.actor.submit.remote(requests)

    def drain(self) -> ObjectRef[dict[str, Any]]:
        return self.actor.drain.remote()

    def receive(self, buckets: list[Any], version: int) -> ObjectRef[float]:
        return self.actor.receive.remote(buckets, version)

    def endpoint(self) -> ObjectRef[WeightEndpoint]:
        return self.actor.endpoint.remote()

    def pause(self) -> ObjectRef[None]:
        return self.actor.pause.remote()

    def update_weights(self, wire: dict[str, Any]) -> ObjectRef[None]:
        return self.actor.update_weights.remote(wire)

    def resume(self, version: int) -> ObjectRef[float]:
        return self.actor.resume.remote(version)

    def release_memory(self, tags: Sequence[str]) -> ObjectRef[None]:
        return self.actor.release_memory.remote(list(tags))

    def resume_memory(self, tags: Sequence[str]) -> ObjectRef[None]:
        return self.actor.resume_memory.remote(list(tags))

    def health(self) -> ObjectRef[Health]:
        return self.actor.health.remote()

    def partial(self) -> ObjectRef[dict[str, Completion]]:
        return self.actor.partial.remote()

    def close(self) -> ObjectRef[None]:
        return self.actor.close.remote()
