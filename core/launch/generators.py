"""All generator replicas as the driver sees them: where weights go, and which are restarted. The rollout side decides
which replicas are lost (rollout/inference/router.py); a lost one is killed and started again on its own slots, while
the others and the trainer continue. Invariant: a replica takes part in a push only once it has started, and gets
requests only after a push has reached it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Concatenate, Literal

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from allocation import RoleAllocation, Slot
from core.data.stored_batch import Ref
from core.errors import LaunchError
from core.launch.cluster import Cluster
from core.launch.generator_actor import GeneratorActor
from core.launch.remote import P, Pending, R, Remote
from core.processes.stacks import collect_stacks, kill_process
from core.train.recover import MemoryLimits, reports_out_of_memory
from core.weight_sync.push import with_colocated_ranks
from rollout.inference.backend import BackendSettings, WeightEndpoint
from rollout.inference.registry import BACKENDS
from rollout.inference.router import NO_ANSWER

if TYPE_CHECKING:
    from core.launch.rollout_client import RolloutClient

logger = logging.getLogger(__name__)

_END_SECONDS = 60.0
"""For whatever is closed at the end; then it is killed."""
_MAX_RESTARTS = 3
"""Of one replica, without a second push that reached it; then the run continues without it."""

State = Literal["starting", "waiting for weights", "serving", "pinned", "unpinned", "gone"]
"""pinned: it keeps its weights for an evaluation. unpinned: it takes part from the next push on."""


@dataclass(eq=False)
class _Replica:
    """One generator, through all its restarts."""

    name: str
    slots: Sequence[Slot]
    actor: Remote[GeneratorActor]
    starting: ObjectRef[None]
    """The call that ends when it is ready for weights."""
    state: State = "starting"
    started_at: float = 0.0
    """Of a replica that is started anew."""
    in_use: bool = False
    """The rollout side sends requests to this process."""
    num_restarts: int = 0
    failure: str = ""


class GeneratorPool:
    """See the file. Requests reach the replicas from the rollout actor."""

    def __init__(
        self,
        cluster: Cluster,
        placed: RoleAllocation,
        settings: BackendSettings,
        *,
        threads: int,
        restarts: bool,
        memory: MemoryLimits,
        name: str = "generator",
        auxiliary: GeneratorPool | None = None,
    ):
        """`settings` are those of every replica; its layout, GPUs, name and host are filled in. `restarts`: whether a
        lost replica is started again. One that shares its GPUs with the trainer is not: then the attempt ends. `name`:
        of the replicas, before their number. `auxiliary`: replicas of a frozen model, which start and end with these
        and get no weights."""
        self._cluster, self._placed, self._threads = cluster, placed, threads
        self._restarts, self._memory, self._auxiliary = restarts, memory, auxiliary
        self.judge: RolloutClient | None = None
        """Decides which replicas are lost."""
        self._report: ObjectRef[dict[str, str]] | None = None
        self._key = secrets.token_hex(32)
        self._ending = False
        self._settings = replace(
            settings, tp=placed.layout.tp, pp=placed.layout.pp, startup_timeout_seconds=cluster.startup_seconds
        )
        self._memory_flag = BACKENDS[placed.backend].memory_flag
        self._new: list[_Replica] = []
        self._membership_changed = False
        self._replicas: list[_Replica] = []
        for index, slots in enumerate(placed.replicas):
            actor = self._start_actor(name_of := f"{name}-{index}", slots)
            starting = actor.send(GeneratorActor.start)
            self._replicas.append(_Replica(name=name_of, slots=slots, actor=actor, starting=starting))

    def _start_actor(self, name: str, slots: Sequence[Slot]) -> Remote[GeneratorActor]:
        settings = self._memory.fit_generator(self._settings, self._memory_flag)
        actor = self._cluster.start_actor(
            ray.remote(GeneratorActor),
            name,
            self._placed.backend,
            self._threads,
            replace(
                settings,
                gpus=tuple(s.gpu for s in slots) if self._placed.on_gpu else (),
                host=self._cluster.host,
                key=self._key,
            ),
            node=slots[0].node,
            env={"OMP_NUM_THREADS": str(self._threads)},
        )
        return Remote(actor)

    @property
    def actors(self) -> dict[str, ActorHandle]:
        """Ray's handles of all replicas, by name."""
        return {replica.name: replica.actor.handle for replica in self._replicas}

    def wait_started(self) -> None:
        """Return when every replica is ready for weights; from now on they are looked after."""
        refs, names = [r.starting for r in self._replicas], [r.name for r in self._replicas]
        self._cluster.gather_started(refs, names=names)
        for replica in self._replicas:
            replica.state, replica.in_use = "serving", True
        self._cluster.waiter.every_second(self.look)
        if self._auxiliary is not None:
            self._auxiliary.wait_started()
            self._auxiliary.pause(self._cluster.startup_seconds)
            self._auxiliary.resume(0, self._cluster.startup_seconds)

    def receive(self, buckets: Sequence[Ref], version: int, timeout_seconds: float) -> list[float]:
        """Give every replica the buckets; returns how long each one stopped sampling, in seconds."""
        handles = list(buckets)
        return self._everywhere(timeout_seconds, GeneratorActor.receive, handles, version)

    def endpoints(self, trainer: RoleAllocation) -> list[WeightEndpoint]:
        """Return the servers that take part, each with the trainer's ranks on its GPUs."""
        return with_colocated_ranks(
            self._everywhere(_END_SECONDS, GeneratorActor.endpoint), [r.slots for r in self._participants()], trainer
        )

    def pause(self, timeout_seconds: float) -> None:
        """Return when no replica samples."""
        self._everywhere(timeout_seconds, GeneratorActor.pause)

    def resume(self, version: int, timeout_seconds: float) -> list[float]:
        """Resume with this version; return how long each replica stopped sampling, in seconds."""
        return self._everywhere(timeout_seconds, GeneratorActor.resume, version)

    def release_memory(self, tags: Sequence[str], timeout_seconds: float) -> None:
        """Give device memory back, while paused: weights, kv_cache."""
        self._everywhere(timeout_seconds, GeneratorActor.release_memory, list(tags))

    def resume_memory(self, tags: Sequence[str], timeout_seconds: float) -> None:
        """Take it again."""
        self._everywhere(timeout_seconds, GeneratorActor.resume_memory, list(tags))

    def close(self) -> None:
        """End every replica; one that cannot be closed is killed with the cluster."""
        self._ending = True  # a replica that ends from now on is not lost
        if self._auxiliary is not None:
            self._auxiliary.close()
        for replica in self._replicas:
            if replica.state in ("pinned", "unpinned"):
                replica.state = "serving"
        if not self._participants():
            return
        try:
            self._everywhere(_END_SECONDS, GeneratorActor.close)
        except LaunchError as e:
            logger.warning("a generator was not closed: %s", e)

    def look(self) -> None:
        """Restart the replicas that are lost, and look at those that start. Neither waits nor raises."""
        if self._ending:
            return
        for name, why in self._newly_lost().items():
            self.lose(name, why)
        for replica in self._replicas:
            if replica.state == "starting":
                self._check_started(replica)

    def _newly_lost(self) -> dict[str, str]:
        """Return what the rollout side has reported since the last call."""
        if self.judge is None:
            return {}
        if self._report is None:
            self._report = self.judge.wait_lost([r.name for r in self._replicas if not r.in_use])
        if not ray.wait([self._report], timeout=0)[0]:
            return {}
        report, self._report = self._report, None
        try:
            return ray.get(report)
        except RayError:  # the driver's own calls have the error
            return {}

    def pin(self) -> str | None:
        """Let a replica keep its weights until unpin(); return its name. None where no other one would be left, or
        where they share GPUs with the trainer."""
        free = [replica for replica in self._participants() if replica.in_use]
        if not self._restarts or len(free) < 2:
            return None
        free[-1].state = "pinned"
        self._membership_changed = True
        return free[-1].name

    def unpin(self, name: str) -> None:
        """Let a replica take part in pushes again, unless it was lost meanwhile."""
        for replica in self._replicas:
            if replica.name == name and replica.state == "pinned":
                replica.state = "unpinned"

    def has_current_weights(self, name: str) -> bool:
        """Return whether a replica takes part in pushes."""
        return any(replica.name == name and replica.state == "serving" for replica in self._replicas)

    def admit(self) -> int:
        """Include the replicas that have started from now on; return the number of participating replicas."""
        for replica in self._replicas:
            if replica.state == "unpinned":
                replica.state, self._membership_changed = "serving", True
            if replica.state == "waiting for weights":
                replica.state = "serving"
                self._membership_changed = True
                self._new.append(replica)
        return len(self._participants())

    def mark_dead_generators(self) -> bool:
        """Check every participating replica, after a push has failed. Returns whether one was lost, now or since
        membership_changed() was called before the push: look() continues meanwhile."""
        if not self._restarts or self.judge is None:
            return False
        # The rollout side does not know these yet.
        checks = [(replica, replica.actor.send(GeneratorActor.health)) for replica in self._new]
        for name, why in self.judge.check_generators().items():
            self.lose(name, why)
        timeout = self._settings.health_timeout_seconds
        if checks:
            ray.wait([ref for _, ref in checks], num_returns=len(checks), timeout=timeout)
        for replica, ref in checks:
            if (answer := _answer(ref)) != "":
                self._lose(replica, answer or f"did not answer within {timeout:g} s")
        return self._membership_changed

    def lose(self, name: str, why: str) -> None:
        """Restart a replica that the rollout side has lost."""
        for replica in self._replicas:
            if replica.name == name and replica.in_use:
                self._lose(replica, why + self._state_of(replica, why))

    def _state_of(self, replica: _Replica, why: str) -> str:
        """Return the state of a process that may still run, after its stacks are written."""
        if not why.startswith(NO_ANSWER):
            return ""
        states = collect_stacks(self._cluster.log_folder, [replica.name], why=NO_ANSWER)
        return f" ({states.get(replica.name, 'on another machine')})"

    def lose_named(self, names: Collection[str], why: str) -> bool:
        """Mark the replicas of these names as lost, while others take part; returns whether one was."""
        named = [replica for replica in self._participants() if replica.name in names]
        if not self._restarts or len(named) == len(self._participants()):
            return False
        for replica in named:
            self._lose(replica, why)
        return bool(named)

    def participated(self) -> list[tuple[str, ActorHandle]]:
        """Return (name, actor) of the replicas that got their first weights by the push that has just succeeded, for
        the rollout side to use."""
        new, self._new = self._new, []
        for replica in self._participants():
            if replica.in_use:
                replica.num_restarts = 0
        return [(replica.name, replica.actor.handle) for replica in new]

    def joined(self, name: str) -> None:
        """Note that the rollout side uses this replica from now on."""
        self._report = None  # it waits for others than this one
        for replica in self._replicas:
            replica.in_use |= replica.name == name and replica.state == "serving"

    def membership_changed(self) -> bool:
        """Return whether replicas have come or gone since the last call."""
        changed, self._membership_changed = self._membership_changed, False
        return changed

    @property
    def waiting(self) -> bool:
        """True if a replica has started and waits for weights."""
        return any(replica.state == "waiting for weights" for replica in self._replicas)

    def raise_if_all_gone(self) -> None:
        """Raise LaunchError when no replica is left and none will be restarted, or one is lost that cannot be."""
        gone = [replica for replica in self._replicas if replica.state == "gone"]
        if gone and not self._restarts:
            raise LaunchError(f"{gone[0].name} failed: {gone[0].failure}")
        if len(gone) == len(self._replicas):
            raise LaunchError(f"no generator is left: {self.failures()}")

    def failures(self) -> str:
        """Return the reasons why replicas are missing."""
        return "; ".join(f"{r.name}: {r.failure}" for r in self._replicas if r.failure)

    def _participants(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica.state == "serving"]

    def _everywhere(
        self,
        timeout_seconds: float,
        method: Callable[Concatenate[GeneratorActor, P], Pending[R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Make a call on every replica that takes part; return the results."""
        members, what = self._participants(), f"{method.__name__} of the generators"
        if not members:
            raise LaunchError(f"{what}: no generator is left; {self.failures()}")
        return self._cluster.waiter.gather(
            [r.actor.send(method, *args, **kwargs) for r in members],
            names=[r.name for r in members],
            phase=what,
            timeout_seconds=timeout_seconds,
            key="push.timeout_seconds",
        )

    def _check_started(self, replica: _Replica) -> None:
        answer, limit = _answer(replica.starting), self._cluster.startup_seconds
        if answer == "":
            replica.state = "waiting for weights"
            logger.info("%s has restarted and waits for a weight update", replica.name)
        elif answer is not None:
            self._lose(replica, answer)
        elif time.monotonic() - replica.started_at > limit:
            self._lose(replica, f"it was not ready within launch.startup_timeout_seconds={limit:g}")

    def _lose(self, replica: _Replica, why: str) -> None:
        """Make sure that it is dead, and start it again unless it keeps dying."""
        replica.failure, replica.in_use = why.partition("\n")[0][:500], False
        self._membership_changed |= replica.state == "serving"
        self._new = [other for other in self._new if other is not replica]
        ray.kill(replica.actor.handle, no_restart=True)
        kill_process(self._cluster.log_folder, replica.name)
        if reports_out_of_memory(why):
            self._memory.lower_generator(self._settings, self._memory_flag)
        if not self._restarts:
            replica.state = "gone"
            return
        if replica.num_restarts == _MAX_RESTARTS:
            replica.state = "gone"
            logger.error("%s is marked dead: %s; continuing with the other generators", replica.name, replica.failure)
            return
        replica.num_restarts += 1
        logger.error(
            "%s failed: %s. Restarting it (%d of %d); continuing with the other generators",
            replica.name, replica.failure, replica.num_restarts, _MAX_RESTARTS,
        )  # fmt: skip
        replica.actor, replica.state = self._start_actor(replica.name, replica.slots), "starting"
        replica.starting, replica.started_at = replica.actor.send(GeneratorActor.start), time.monotonic()


def _answer(ref: ObjectRef[R]) -> str | None:
    """Return None while there is no answer, "" for a healthy replica, otherwise the error."""
    if not ray.wait([ref], timeout=0)[0]:
        return None
    try:
        ray.get(ref)
    except RayError as e:
        cause = getattr(e, "cause", None)
        return str(cause or e).strip() or type(cause or e).__name__
    return ""
