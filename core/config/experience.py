"""Sections `experience`, `synchronizer` and `bench`: what jobs of other modes than `both` share and do."""

from __future__ import annotations

from config_schema.needs import equals, unlike
from config_schema.section import Section, key

APART = ("explore", "train")
"""Modes of jobs that share a store."""
_APART = equals("mode", *APART)


class ExperienceConfig(Section):
    """Where episodes are kept."""

    store: str = key(
        "memory",
        "Where episodes are kept until they are trained. memory: in the rollout process, and in recover checkpoints. "
        "sqlite: in a file, which jobs of one host can share. Or a custom class as package.module:Class",
    )
    path: str = key(
        "",
        "File of a sqlite store, or what a custom store opens",
        needs=unlike("experience.store", "memory"),
    )
    keep_steps: int = key(
        0,
        "Keep the tokens of the last N trained steps, for `slipstream experience export`. Tags stay in any case",
        ge=0,
        needs=unlike("experience.store", "memory"),
    )
    max_read_timeout: float | None = key(
        None,
        "Train what is ready of a batch, at least one prompt, after waiting so many seconds for the rest. What cannot "
        "be trained within the staleness bound then is dropped as late. null: wait for whole batches",
        gt=0,
    )

    @property
    def is_durable(self) -> bool:
        """True if the store survives the processes that open it. Its state is not part of recover checkpoints then."""
        return self.store != "memory"


class SynchronizerConfig(Section):
    """Weights between a train job and explore jobs."""

    folder: str = key(
        "",
        "Folder that every job sees, with the published weights and LATEST. Default: the folder `weights` beside "
        "experience.path",
        needs=_APART,
    )
    interval: int = key(
        1,
        "Publish weights every N steps, and after the last one; at most staleness.max_staleness + 1",
        ge=1,
        needs=equals("mode", "train"),
    )


class BenchConfig(Section):
    """What a bench job evaluates, on every set of evaluation.path."""

    models: list[str] = key(
        [],
        "Hugging Face folders of models of the architecture of actor.path, such as the saved models of a run",
        needs=equals("mode", "bench"),
    )
