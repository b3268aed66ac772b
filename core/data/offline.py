"""The data sets of sft and dpo: opened in one way by a run, and by a dry run, which measures them.

Loads no heavy library before a data set is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.data.encoder import Encoder, PromptFormat
from rollout.data.left_out import SAMPLE
from rollout.data.preferences import PreferenceFields
from rollout.data.source import DatasetError, DataSource, NoneLeftError

if TYPE_CHECKING:
    from core.config.experiments import DPOConfig, SFTConfig
    from core.data.epochs import EpochBatches

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OfflineData:
    """What decides which rows of a data set are trained on, and in which order."""

    model: str
    """Folder of the tokenizer."""
    prompt_format: PromptFormat
    max_seqlen: int
    seed: int
    shuffle: bool
    pair_columns: PreferenceFields | None
    """Columns of preference pairs; None: rows are prompts with answers."""

    def opener(self) -> Callable[..., EpochBatches[Any]]:
        """Return what opens a data set: called with its source, and `sample` to tokenise only so many rows of it.

        Raises DatasetError where the tokenizer or the chat template cannot be read."""
        from core.data.answers import AnswerDataset
        from core.data.preferences import PreferenceDataset
        from rollout.data.tokenizer import load_tokenizer

        try:
            tokenizer = load_tokenizer(self.model)
        except Exception as error:  # noqa: BLE001 (of the tokenizers library, whatever the files hold)
            raise DatasetError(f"rows cannot be tokenised; the tokenizer of {self.model}: {error}") from error
        encoder = Encoder(tokenizer, self.prompt_format, folder=self.model)

        def open_one(source: DataSource, *, sample: int | None = None) -> EpochBatches[Any]:
            limits: dict[str, Any] = {"max_seqlen": self.max_seqlen, "sample": sample}
            order: dict[str, Any] = {"seed": self.seed, "shuffle": self.shuffle}
            if self.pair_columns is None:
                return AnswerDataset(source, encoder, **limits, **order)
            return PreferenceDataset(source, encoder, fields=self.pair_columns, **limits, **order)

        return open_one


def offline_data(config: SFTConfig | DPOConfig) -> OfflineData:
    """Return what decides which rows of a data set the run trains on."""
    return OfflineData(
        model=config.model.path,
        prompt_format=config.prompt.prompt_format(boxed=False),
        max_seqlen=config.dataset.max_seqlen,
        seed=config.seed,
        shuffle=config.shuffle_dataset,
        pair_columns=config.dataset.pair_columns,
    )


def open_sample(open_one: Callable[..., EpochBatches[Any]], source: DataSource) -> EpochBatches[Any]:
    """Open a data set without a run: a sample of a large one. Raises DatasetError as a run does."""
    try:
        return open_one(source, sample=SAMPLE)
    except NoneLeftError as error:
        logger.info("%s; reading every row: one that fits may not be in the sample of at most %d", error, SAMPLE)
        return open_one(source)


def report_steps(data: EpochBatches[Any], path: str, *, batch_size: int, epochs: int, steps_limit: int | None) -> None:
    """Log how many steps a run makes of a data set. `steps_limit` ends it before its epochs do."""
    from rollout.experience.schedule import Schedule

    count = round(len(data) / data.share)
    schedule = Schedule(num_prompts=count, batch_size=batch_size, total_epochs=epochs, total_steps_limit=steps_limit)
    logger.info(
        "%s: %s%d %s of %.1f tokens on average: %d steps per epoch with dataset.train_bs_n_seqs=%d, %d steps in all",
        path, "" if data.share == 1 else "about ", count, data.ITEMS, data.mean_tokens, schedule.steps_per_epoch,
        batch_size, schedule.total_steps,
    )  # fmt: skip
