"""The typed client of a trainer rank's Ray actor: a method for each remote call, so that mypy checks names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import ObjectRef

    from allocation import ParallelLayout
    from core.data.passes import InferencePass, UpdatePass
    from core.data.stored_batch import Ref, StoredBatch, StoredFields
    from core.processes.meeting import MeetingPoint
    from core.weight_sync.buckets import SendReport
    from core.weight_sync.servers import SenderPlan
    from mcore_adapter.data.planner import Planner
    from mcore_adapter.settings import EngineSettings, OptimizerSettings
    from rollout.inference.backend import WeightEndpoint


class TrainerStub:
    """Every method starts the call of the same name (core/launch/trainer_rank.py) and returns its reference."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def rendezvous(self, host: str | None, port: int) -> ObjectRef[MeetingPoint]:
        return self._actor.rendezvous.remote(host, port)

    def start(self, layout: ParallelLayout, point: MeetingPoint, collective_seconds: float) -> ObjectRef[None]:
        return self._actor.start.remote(layout, point, collective_seconds)

    def build(self, engine: str, settings: EngineSettings, optimizer: OptimizerSettings | None) -> ObjectRef[Planner]:
        return self._actor.build.remote(engine, settings, optimizer)

    def open_batch(self, batch: ObjectRef[StoredBatch], group: str) -> ObjectRef[None]:
        return self._actor.open_batch.remote(batch, group)

    def add_fields(self, fields: ObjectRef[StoredFields]) -> ObjectRef[None]:
        return self._actor.add_fields.remote(fields)

    def close_batch(self) -> ObjectRef[None]:
        return self._actor.close_batch.remote()

    def train_step(self, update: UpdatePass) -> ObjectRef[dict[str, float]]:
        return self._actor.train_step.remote(update)

    def logprobs(self, inference: InferencePass) -> ObjectRef[Ref | None]:
        return self._actor.logprobs.remote(inference)

    def values(self, inference: InferencePass) -> ObjectRef[Ref | None]:
        return self._actor.values.remote(inference)

    def export_weights(self, engine: str, bucket_bytes: int) -> ObjectRef[tuple[list[Ref], int]]:
        return self._actor.export_weights.remote(engine, bucket_bytes)

    def push_connect(self, plan: SenderPlan, servers: Sequence[WeightEndpoint], host: str | None) -> ObjectRef[None]:
        return self._actor.push_connect.remote(plan, servers, host)

    def push_prepare(self, engine: str, bucket_bytes: int, *, verify: bool) -> ObjectRef[None]:
        return self._actor.push_prepare.remote(engine, bucket_bytes, verify=verify)

    def push_send(self) -> ObjectRef[SendReport | None]:
        return self._actor.push_send.remote()

    def push_close(self) -> ObjectRef[None]:
        return self._actor.push_close.remote()

    def offload(self, keep: str) -> ObjectRef[None]:
        return self._actor.offload.remote(keep)

    def reload(self) -> ObjectRef[None]:
        return self._actor.reload.remote()

    def save_hf(self, engine: str, path: str, tokenizer_from: str) -> ObjectRef[None]:
        return self._actor.save_hf.remote(engine, path, tokenizer_from)

    def ping(self) -> ObjectRef[None]:
        return self._actor.ping.remote()

    def prepare_saves(self, engine: str) -> ObjectRef[None]:
        return self._actor.prepare_saves.remote(engine)

    def begin_save(self, engine: str, path: str) -> ObjectRef[None]:
        return self._actor.begin_save.remote(engine, path)

    def load(self, engine: str, path: str) -> ObjectRef[None]:
        return self._actor.load.remote(engine, path)
