"""Sections `experience`, `synchronizer`, `serve` and `bench`: what jobs of other modes than `both` share and do."""

from __future__ import annotations

from typing import Literal

from config_schema.needs import equals, unlike
from config_schema.section import Section, key

APART = ("explore", "train")
"""Modes of jobs that share a store."""
_APART = equals("mode", *APART)
_SERVES = equals("mode", "serve")


class ExperienceConfig(Section):
    """Where episodes are kept."""

    store: str = key(
        "memory",
        "Where episodes are kept until they are trained. memory: in the rollout process, and in recover checkpoints. "
        "sqlite: in a file, which jobs of one host can share. postgres: in a database, for jobs of several hosts. "
        "file: in jsonl files, to look at what an explore job samples without a trainer. Or a custom class as "
        "package.module:Class",
    )
    path: str = key(
        "",
        "File of a sqlite store, address of a postgres one (postgresql://user@host/database), folder of a file one, or "
        "what a custom store opens",
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
        needs=_APART,
    )
    style: Literal["dynamic_by_trainer", "dynamic_by_explorer", "fixed"] = key(
        "dynamic_by_trainer",
        "dynamic_by_trainer: publish every `interval` steps. dynamic_by_explorer: when an explore job has finished the "
        "prompts of `interval` steps since its last weights, or has nothing to sample. fixed: as dynamic_by_trainer, "
        "and each version samples the prompts of `interval` steps, `offset` steps ahead",
        needs=_APART,
    )
    offset: int = key(
        0,
        "Steps by which explore jobs are ahead; interval + offset is at most staleness.max_staleness + 1",
        ge=0,
        needs=_APART & equals("synchronizer.style", "fixed"),
    )


class ServeConfig(Section):
    """What a serve job answers with, in the dialects of OpenAI and Anthropic."""

    host: str = key("127.0.0.1", "Address to listen on; 0.0.0.0: all", needs=_SERVES)
    port: int = key(0, "Port to listen on; 0: any free one, see the log", ge=0, le=65535, needs=_SERVES)
    api_key: str = key("", "Key that clients must send, as ${oc.env:NAME}; empty: any", needs=_SERVES)
    model: str = key("", "Hugging Face folder of the weights. Empty: actor.path", needs=_SERVES)
    follow: bool = key(
        False, "Answer with the newest weights of synchronizer.folder, which a train job publishes", needs=_SERVES
    )


class BenchConfig(Section):
    """What a bench job evaluates, on every set of evaluation.path."""

    models: list[str] = key(
        [],
        "Hugging Face folders of models of the architecture of actor.path, such as the saved models of a run",
        needs=equals("mode", "bench"),
    )
