"""The rules of an experience, put together from the settings of a run, and replay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rollout.experience.base import Admission, OverAge, Selection, Used
from rollout.experience.episode import Tags
from rollout.experience.selection import ENDLESS, SELECTIONS, Schedule, SpreadFilter, StalenessAdmission, no_spread
from rollout.plugins import PluginError, load_plugin, unknown_name
from rollout.types import PROMPT_VERSION

Priority = Callable[[Sequence[Used], int], Sequence[float]]
"""Scores candidates for a step: the highest scores are replayed first, and what scores -inf never."""


def linear_decay(candidates: Sequence[Used], step: int, *, decay: float) -> list[float]:
    """Prefer new episodes; each use counts like `decay` versions."""
    return [(one.version or 0) - decay * one.tags.uses for one in candidates]


def use_count(candidates: Sequence[Used], step: int) -> list[float]:
    """Prefer episodes that few steps have trained on."""
    return [-float(one.tags.uses) for one in candidates]


def make_priority(spec: str, *, decay: float) -> Priority:
    """Return a priority by its name, or a user's function by its import path. Raises PluginError."""
    named: Mapping[str, Priority] = {"linear_decay": partial(linear_decay, decay=decay), "use_count": use_count}
    if spec in named:
        return named[spec]
    if ":" not in spec:
        raise PluginError(unknown_name(spec, kind="priority", known=named, own="function"))
    found: Priority = load_plugin(spec, kind="priority", arguments=("candidates", "step"))
    return found


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Replay: a step trains again on episodes of earlier steps, beside its new ones.

    New episodes, their admission and their selection stay as they are, and so does the proof of their staleness bound.
    What is replayed has a bound of its own, `max_age`.
    Invariant: the leases and replays of earlier steps determine those of a step, so a run that continues repeats them.
    """

    share: float
    """Of the prompts of a step, in (0, 1)."""
    priority: Priority
    max_age: int
    """Most steps between the weights that sampled the oldest token to train on, and the step that replays it."""
    cooldown: int = 1
    """Fewest steps between two uses."""
    max_uses: int | None = None
    """Most steps that train on an episode, the first included. None: no limit."""

    def choose(self, candidates: Sequence[Used], *, step: int, num_new: int) -> list[str]:
        """Return the ids of what `step` replays beside `num_new` new episodes; of equal scores the newest.

        Raises ValueError where the priority returns another number of scores."""
        able = [one for one in reversed(candidates) if self._may_use(one, step)]
        scores = self.priority(able, step)
        if len(scores) != len(able):
            raise ValueError(f"experience.replay.priority returned {len(scores)} scores for {len(able)} candidates")
        ranked = sorted(zip(scores, able, strict=True), key=lambda scored: -scored[0])
        ids = [one.tags.id for score, one in ranked if score > float("-inf")]
        return ids[: round(self.share / (1.0 - self.share) * num_new)]

    def _may_use(self, one: Used, step: int) -> bool:
        is_rested = step - one.last_step >= self.cooldown
        is_fresh = one.version is not None and step - one.version <= self.max_age
        has_uses = self.max_uses is None or one.tags.uses < self.max_uses
        brings_nothing = len(one.tags.rewards) > 1 and no_spread(one.tags) is not None
        return is_rested and is_fresh and has_uses and not brings_nothing

    def metrics(self, replayed: Sequence[Tags], *, step: int, num_new: int) -> dict[str, float]:
        """Return the share of replayed episodes in a step, their ages in steps, and their uses, this one included."""
        ages = [step - v for tags in replayed for v in tags.oldest if v != PROMPT_VERSION]
        uses = [tags.uses for tags in replayed]
        return {
            "replay/share": len(replayed) / (num_new + len(replayed)),
            "replay/age_mean": sum(ages) / max(len(ages), 1),
            "replay/age_max": float(max(ages, default=0)),
            "replay/uses_mean": sum(uses) / max(len(uses), 1),
            "replay/uses_max": float(max(uses, default=0)),
        }


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which episodes may begin, which a step leases, and how old they may be."""

    schedule: Schedule
    admission: Admission
    selection: Selection
    spread: SpreadFilter | None
    """Drops episodes. None: all are kept."""
    max_staleness: int
    over_age: OverAge
    in_order: bool
    replay: Replay | None = None
    """What steps replay beside their new episodes. None: nothing."""

    @property
    def settings(self) -> dict[str, object]:
        """What a recover checkpoint must have been written with, by the names of the configuration."""
        return {
            "batch_size": self.schedule.batch_size, "max_staleness": self.max_staleness, "over_age": self.over_age,
            "in_order": self.in_order, "dynamic_sampling": self.spread is not None,
        }  # fmt: skip


def make_rules(
    *,
    num_prompts: int,
    batch_size: int,
    max_staleness: int,
    over_age: OverAge = "wait",
    in_order: bool = False,
    dynamic_sampling_limit: int | None = None,
    steps_ahead: int | None = None,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    replay: Replay | None = None,
) -> Rules:
    """Make the rules for a stream of `num_prompts` prompts an epoch, `batch_size` a step.

    `over_age`: "wait" selects oldest first; "mask" selects what is finished and masks tokens above the bound.
    `in_order`: a step trains on the prompts of its place in the stream. `dynamic_sampling_limit`: drop groups without
    spread, up to so many batches of prompts a step; None: keep all. `steps_ahead`: begin prompts of so many steps after
    the version that samples them; None: as many as `max_staleness` allows. `num_epochs`, `num_steps`: the stream ends
    at the first of the two; None: no end. Raises ValueError for a value that makes no sense."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if over_age not in ("wait", "mask"):
        raise ValueError(f"over_age={over_age!r} must be 'wait' or 'mask'")
    schedule = Schedule(
        num_prompts=num_prompts,
        batch_size=batch_size,
        total_epochs=ENDLESS if num_epochs is None else num_epochs,
        total_steps_limit=num_steps,
    )
    spread = None
    if dynamic_sampling_limit is not None:
        spread = SpreadFilter(schedule, max_staleness, dynamic_sampling_limit)
    selection = "in_order" if in_order else "first_finished" if over_age == "mask" else "oldest_first"
    return Rules(
        schedule=schedule,
        admission=StalenessAdmission(schedule, max_staleness if steps_ahead is None else steps_ahead),
        selection=SELECTIONS[selection](schedule, max_staleness),
        spread=spread,
        max_staleness=max_staleness,
        over_age=over_age,
        in_order=in_order,
        replay=replay,
    )
