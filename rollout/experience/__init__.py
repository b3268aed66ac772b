"""Experience between the generators and the trainer: admission, store and selection of prompt slots."""

from rollout.experience.admission import StalenessAdmission
from rollout.experience.base import Admission, Group, OverAge, Selection, StalenessInvariantError, Store
from rollout.experience.build import Experience, make_experience
from rollout.experience.filters import SpreadFilter, no_spread
from rollout.experience.schedule import ENDLESS, Schedule
from rollout.experience.selection import SELECTIONS, FirstFinished, InOrder, OldestFirst
from rollout.experience.slots import PromptSlots
from rollout.experience.store import MemoryStore

__all__ = [
    "ENDLESS",
    "SELECTIONS",
    "Admission",
    "Experience",
    "FirstFinished",
    "Group",
    "InOrder",
    "MemoryStore",
    "OldestFirst",
    "OverAge",
    "PromptSlots",
    "Schedule",
    "Selection",
    "SpreadFilter",
    "StalenessAdmission",
    "StalenessInvariantError",
    "Store",
    "make_experience",
    "no_spread",
]
