"""The data sets of sft and dpo: opened in one way by a run, and by a dry run, which measures them.

Loads no heavy library before a data set is opened.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rollout.data.encoder import Encoder
from rollout.data.left_out import SAMPLE
from rollout.data.source import DataSource, NoneLeftError

if TYPE_CHECKING:
    from core.config.experiments import DPOConfig, SFTConfig
    from core.data.datasets import Rows

logger = logging.getLogger(__name__)


class OpenData(Protocol):
    """Opens a data set; with `sample` tokenises only so many rows of it. Raises DatasetError."""

    def __call__(self, source: DataSource, *, sample: int | None = None) -> Rows: ...


def opener(config: SFTConfig | DPOConfig) -> OpenData:
    """Return what opens the data sets of a run. Raises DatasetError where the tokenizer or the chat template cannot be
    read."""
    from core.data.datasets import AnswerDataset, PreferenceDataset
    from rollout.data.tokenizer import load_tokenizer

    folder, columns = config.model.path, config.dataset.pair_columns
    encoder = Encoder(load_tokenizer(folder), config.prompt.prompt_format(boxed=False), folder=folder)
    load = AnswerDataset if columns is None else partial(PreferenceDataset, fields=columns)

    def open_one(source: DataSource, *, sample: int | None = None) -> Rows:
        return load(
            source,
            encoder,
            max_seqlen=config.dataset.max_seqlen,
            seed=config.seed,
            shuffle=config.shuffle_dataset,
            sample=sample,
        )

    return open_one


def open_sample(open_one: OpenData, source: DataSource) -> Rows:
    """Open a data set without a run: a sample of a large one. Raises DatasetError as a run does."""
    try:
        return open_one(source, sample=SAMPLE)
    except NoneLeftError as error:
        logger.info("%s; reading every row: one that fits may not be in the sample of at most %d", error, SAMPLE)
        return open_one(source)


def report_steps(data: Rows, config: SFTConfig | DPOConfig) -> None:
    """Log how many steps a run makes of the data set that it trains on."""
    from rollout.experience.schedule import Schedule

    count = round(len(data) / data.share)
    control, batch_size = config.exp_ctrl, config.dataset.train_bs_n_seqs
    schedule = Schedule(
        num_prompts=count, batch_size=batch_size, total_epochs=control.total_train_epochs,
        total_steps_limit=control.steps_limit,
    )  # fmt: skip
    logger.info(
        "%s: %s%d %s of %.1f tokens on average: %d steps per epoch with dataset.train_bs_n_seqs=%d, %d steps in all",
        config.dataset.train_path, "" if data.share == 1 else "about ", count, data.ITEMS, data.mean_tokens,
        schedule.steps_per_epoch, batch_size, schedule.total_steps,
    )  # fmt: skip
