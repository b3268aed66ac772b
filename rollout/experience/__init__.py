"""Experience between generators and trainer: episodes, the stores that hold them, and the rules of staleness."""

from rollout.experience.base import (
    Experience,
    ExploreError,
    LesseeError,
    OverAge,
    Patience,
    StalenessError,
    StoreError,
    Used,
)
from rollout.experience.episode import Episode, Event, Tags, episode_id, without_epoch
from rollout.experience.lessee import Lessee
from rollout.experience.rules import Replay, Rules, make_priority, make_rules
from rollout.experience.selection import ENDLESS, EveryEpisode, OldestFirst, Schedule, StalenessAdmission
from rollout.experience.stores import check_store, open_store
from rollout.experience.stores.memory import MemoryExperience
from rollout.experience.stores.sqlite import SQLiteExperience

__all__ = [
    "ENDLESS",
    "Episode",
    "Event",
    "EveryEpisode",
    "Experience",
    "ExploreError",
    "Lessee",
    "LesseeError",
    "MemoryExperience",
    "OldestFirst",
    "OverAge",
    "Patience",
    "Replay",
    "Rules",
    "SQLiteExperience",
    "Schedule",
    "StalenessAdmission",
    "StalenessError",
    "StoreError",
    "Tags",
    "Used",
    "check_store",
    "episode_id",
    "make_priority",
    "make_rules",
    "open_store",
    "without_epoch",
]
