"""Experience between generators and trainer: episodes, the stores that hold them, and the rules of staleness."""

from rollout.experience.base import (
    Admission,
    Choose,
    Experience,
    ExploreError,
    Lease,
    LesseeError,
    OverAge,
    Patience,
    Selection,
    StalenessError,
    Status,
    StoreError,
    Used,
)
from rollout.experience.episode import Episode, Event, Tags, episode_id, without_epoch
from rollout.experience.lessee import Lessee
from rollout.experience.rules import Replay, Rules, make_priority, make_rules
from rollout.experience.selection import (
    ENDLESS,
    SELECTIONS,
    FirstFinished,
    InOrder,
    OldestFirst,
    Schedule,
    SpreadFilter,
    StalenessAdmission,
)
from rollout.experience.stores import check_store, open_store
from rollout.experience.stores.memory import MemoryExperience
from rollout.experience.stores.sqlite import SQLiteExperience

__all__ = [
    "ENDLESS",
    "SELECTIONS",
    "Admission",
    "Choose",
    "Episode",
    "Event",
    "Experience",
    "ExploreError",
    "FirstFinished",
    "InOrder",
    "Lease",
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
    "Selection",
    "SpreadFilter",
    "StalenessAdmission",
    "StalenessError",
    "Status",
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
