"""Sections about what ppo-math trains on and how: data sets, sampling, PPO, and how far off policy it may be."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from config_schema.needs import above, equals, fact, given, refused_without
from config_schema.section import Section, Violation, key, section
from rollout.data.encoder import BOXED_INSTRUCTION, PromptFormat
from rollout.data.rows import PreferenceFields
from rollout.data.source import DataSource, Fields
from rollout.inference.backend import FlagValue

PATH = "file (jsonl, json, csv, tsv, parquet, arrow), glob, folder, or id of a Hugging Face data set"


VALID_SPLIT = "Split of dataset.valid_path. null: validation, test or the only one"
_FOLDER = refused_without("folder or Hugging Face id")
_VALIDATES = given("dataset.valid_path")
_CHAT_TEMPLATE = fact("chat template")
CLIPPED = equals("algorithm.loss", "clip", "cispo", "tv")
REFERENCE = above("ppo.kl_ctl", 0)
SHOWN = above("algorithm.demonstration_weight", 0)
"""Demonstrations beside rollouts."""
PAIRS = SHOWN & equals("algorithm.demonstration_loss", "dpo")
"""Pairs of answers as demonstrations."""
CRITIC = (equals("algorithm.advantage", "gae") & equals("ppo.disable_value", False)).else_("it has no critic")


class PlaceSection(Section):
    """Where rows come from: docs/data.md."""

    split: str | None = key(
        None,
        "Split of a folder or Hugging Face data set. null: train, for evaluation test or validation; or the only one",
        needs=_FOLDER,
    )
    subset: str | None = key(None, "Subset (configuration) of a folder or Hugging Face data set", needs=_FOLDER)

    processors: list[str] = key(
        [],
        "Functions package.module:name, or files FILE.yaml with operators of Data-Juicer, that filter, change or add "
        "rows before anything reads them, in this order",
    )

    @property
    def columns(self) -> Fields:
        """Names of the columns that are given."""
        return Fields()

    def source(self, path: str) -> DataSource:
        """Return the data set to train on."""
        return DataSource(
            path=path, split=self.split, subset=self.subset, fields=self.columns, processors=tuple(self.processors)
        )

    def held_out(self, path: str, split: str | None) -> DataSource | None:
        """Return the data set to validate on; None for an empty path."""
        return replace(self.source(path), split=split, prefer="validation") if path else None


class DataSection(PlaceSection):
    """Where rows come from, and which columns hold what."""

    prompt_field: str | None = key(None, "Column of the prompt. null: detected")
    answer_field: str | None = key(None, "Column of the answer; a.b: key b of a dictionary. null: detected")
    messages_field: str | None = key(None, "Column of a conversation (role, content). null: detected")
    choices_field: str | None = key(None, "Column of the options of multiple choice. null: detected")
    tools_field: str | None = key(None, "Column of functions for the chat template. null: detected")

    @property
    def columns(self) -> Fields:
        """Names of the columns that are given."""
        return Fields(
            prompt=self.prompt_field,
            answer=self.answer_field,
            messages=self.messages_field,
            choices=self.choices_field,
            tools=self.tools_field,
        )


class SetConfig(DataSection):
    """What every set may have of its own, to train on or held out."""

    system: str | None = key(None, "System message of conversations that have none. null: prompt.system")
    workflow: str | None = key(None, "As workflow.type. null: workflow.type and workflow.by_task")
    workflow_options: dict[str, FlagValue] = key({}, "As workflow.options, for `workflow`")
    reward: str | None = key(None, "As reward.function, with weights as in 0.5*package.module:name + math")
    right_at: float | None = key(None, "As reward.right_at")

    def rules(self, at: str) -> Iterator[Violation]:
        """Yield options without a workflow."""
        if self.workflow_options and self.workflow is None:
            message = "are options of a workflow of this set, which has none; write `workflow`, or workflow.options"
            yield Violation((f"{at}workflow_options", f"{at}workflow"), message)


class PromptConfig(Section):
    """What surrounds a prompt: the same in training, fine-tuning and evaluation."""

    template: str | None = key(
        None,
        "Text around each prompt; must contain {prompt}. null: the chat template of the tokenizer; without one, the "
        "prompt alone",
        first=True,
    )
    system: str | None = key(None, "System message of conversations that have none", needs=_CHAT_TEMPLATE)
    instruction: str | None = key(
        None,
        "Text after each prompt in the chat template. null: with reward.function=math a request for a boxed answer, "
        "unless the prompt mentions \\boxed; else nothing",
        needs=equals("prompt.template", None) & _CHAT_TEMPLATE,
    )
    chat_template: str | None = key(
        None, "Jinja file of a chat template, or its text. null: that of the tokenizer", needs=_CHAT_TEMPLATE
    )
    chat_options: dict[str, FlagValue] = key(
        {}, "Variables of the chat template, such as enable_thinking: false", needs=_CHAT_TEMPLATE
    )

    def rules(self, at: str) -> Iterator[Violation]:
        if self.template is not None and "{prompt}" not in self.template:
            message = f"template={self.template!r} has no {{prompt}}; write it where the prompt belongs"
            yield Violation((f"{at}template",), message)

    def prompt_format(self, *, boxed: bool) -> PromptFormat:
        """Return the format; boxed: answers are judged by their box."""
        instruction = self.instruction
        if instruction is None:
            instruction = BOXED_INSTRUCTION if boxed else ""
        return PromptFormat(
            template=self.template, system=self.system, instruction=instruction, chat_template=self.chat_template,
            chat_options=self.chat_options,
        )  # fmt: skip


class PromptOnlyDatasetConfig(DataSection):
    """Prompts to train on."""

    path: str = key("", f"Prompts: {PATH}. Required without task_sets", first=True)
    max_prompt_len: int = key(
        256, "Maximum tokens per prompt; longer prompts are skipped and counted", ge=1, first=True
    )
    train_bs_n_seqs: int = key(
        256,
        "Prompts per training step, with group_size completions each. With experience.train_batch_size: prompts per "
        "step of explore jobs, which synchronizer.interval counts",
        ge=1,
        le=10**9,
        needs=equals("experience.train_batch_size", None) | equals("mode", "explore", "train"),
        first=True,
    )


class TrainAndValidSection(PlaceSection):
    """Rows to train on, and rows for the validation loss."""

    train_path: str = key(description=f"Rows to train on: {PATH}", first=True)
    valid_path: str = key("", "The same for the validation loss; empty: none", first=True)
    valid_split: str | None = key(None, VALID_SPLIT, needs=_VALIDATES & _FOLDER)

    @property
    def train_source(self) -> DataSource:
        """The training set."""
        return self.source(self.train_path)

    @property
    def valid_source(self) -> DataSource | None:
        """The validation set."""
        return self.held_out(self.valid_path, self.valid_split)


class PromptAnswerDatasetConfig(TrainAndValidSection, DataSection):
    """Prompts with answers, for supervised fine-tuning."""

    max_seqlen: int = key(
        1024, "Maximum tokens of prompt and answer; longer rows are skipped and counted", ge=2, first=True
    )
    train_bs_n_seqs: int = key(256, "Sequences per training step", ge=1, le=10**9, first=True)
    valid_bs_n_seqs: int = key(256, "Sequences per validation batch", ge=1, needs=_VALIDATES)

    @property
    def pair_columns(self) -> PreferenceFields | None:
        """Names of the columns of pairs. None: the rows are prompts with answers."""
        return None


class PreferenceDatasetConfig(TrainAndValidSection):
    """Preference pairs, for direct preference optimization."""

    train_path: str = key(description=f"Pairs to train on: {PATH}", first=True)
    valid_path: str = key("", "The same to evaluate on; empty: none", first=True)
    prompt_field: str = key("prompt", "Column of the prompt")
    chosen_field: str = key("chosen", "Column of the preferred answer: a text, or a conversation")
    rejected_field: str = key("rejected", "Column of the other answer")
    max_seqlen: int = key(
        1024,
        "Maximum tokens of prompt and one answer; pairs with a longer one are skipped and counted",
        ge=2,
        first=True,
    )
    train_bs_n_seqs: int = key(64, "Pairs per training step", ge=1, le=10**9, first=True)
    valid_bs_n_seqs: int = key(64, "Pairs per validation batch", ge=1, needs=_VALIDATES)

    @property
    def pair_columns(self) -> PreferenceFields:
        """Names of the columns for the reader of the files."""
        return PreferenceFields(prompt=self.prompt_field, chosen=self.chosen_field, rejected=self.rejected_field)


class DPOHyperparameters(Section):
    """Direct preference optimization."""

    beta: float = key(0.1, "Strength of the KL divergence from the reference", gt=0, first=True)
    loss: Literal["sigmoid", "ipo"] = key(
        "sigmoid", "sigmoid: DPO. ipo: squared distance of the margin from 1 / 2 beta"
    )
    label_smoothing: float = key(
        0.0,
        "Probability that the two answers of a pair are exchanged",
        ge=0,
        lt=0.5,
        needs=equals("dpo.loss", "sigmoid"),
    )


class DemonstrationConfig(Section):
    """Expert data or preferences that are trained on beside rollouts (mix, chord)."""

    path: str = key(
        "", "Prompts with answers, as for sft; with algorithm.demonstration_loss=dpo pairs, as for dpo; empty: none"
    )
    prompt_field: str = key("prompt", "Column of the prompt of a pair", needs=PAIRS)
    chosen_field: str = key("chosen", "Column of its preferred answer", needs=PAIRS)
    rejected_field: str = key("rejected", "Column of its other answer", needs=PAIRS)
    share: float = key(
        0.5,
        "Share of demonstrations among the sequences of a step",
        gt=0,
        lt=1,
        needs=refused_without("demonstrations.path"),
    )

    @property
    def pair_columns(self) -> PreferenceFields:
        """Names of the columns of pairs."""
        return PreferenceFields(prompt=self.prompt_field, chosen=self.chosen_field, rejected=self.rejected_field)

    @property
    def are_given(self) -> bool:
        """True if there are demonstrations."""
        return bool(self.path)

    def problems(self, per_step: int, *, num_minibatches: int, wanted_by: str) -> Iterator[Violation]:
        """Yield why an algorithm that trains on demonstrations cannot. `wanted_by`: what asks for them."""
        if not self.are_given:
            message = f"required: {wanted_by} trains on prompts with answers beside rollouts; or write "
            yield Violation(("demonstrations.path",), f"{message}algorithm.demonstration_weight=0")
        elif per_step < num_minibatches:
            message = f"{self.share}: {per_step} demonstrations of a step are fewer than "
            message += f"ppo_n_minibatches={num_minibatches}; raise one or lower the other"
            yield Violation(("demonstrations.share",), message)

    def beside(self, completions: float) -> int:
        """Return how many demonstrations a step has beside so many completions."""
        return max(1, round(self.share / (1.0 - self.share) * completions))


_MORE_THAN_ALL_TOKENS = 1_000_000
"""No vocabulary is so large: as a top_k it cuts nothing off."""


class GenerationHyperparameters(Section):
    """How answers are sampled during training."""

    max_new_tokens: int = key(16384, "Maximum tokens per completion", ge=1, first=True)
    min_new_tokens: int = key(0, "Minimum tokens per completion", ge=0)
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this total probability", gt=0, le=1)
    top_k: int = key(-1, "Sample from the k most probable tokens; -1: all", ge=-1)
    temperature: float = key(1.0, "Sampling temperature", gt=0, first=True)
    stop: list[str] = key([], "Texts that end a completion, of which each is kept as it was sampled")

    @property
    def of_sets(self) -> dict[str, float | int]:
        """The settings that a set of prompts may have of its own."""
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
        }  # fmt: skip

    def rules(self, at: str) -> Iterator[Violation]:
        if not all(self.stop):
            yield Violation((f"{at}stop",), "an empty text would end every completion; remove it")
        if self.stop and self.min_new_tokens:
            yield Violation(
                (f"{at}stop", f"{at}min_new_tokens"),
                f"texts of stop end a completion also before min_new_tokens={self.min_new_tokens}; write 0",
            )
        if self.min_new_tokens > self.max_new_tokens:
            yield Violation(
                (f"{at}min_new_tokens", f"{at}max_new_tokens"),
                f"min_new_tokens={self.min_new_tokens} must be at most max_new_tokens={self.max_new_tokens}",
            )
        if self.top_k == 0:
            yield Violation((f"{at}top_k",), "top_k=0 leaves no token to sample; write -1 for all")

    def warnings(self) -> Iterator[str]:
        if self.top_p < 1.0 or 0 < self.top_k < _MORE_THAN_ALL_TOKENS:
            yield (
                f"ppo.gen.top_p={self.top_p}, top_k={self.top_k}: completions come from a truncated distribution; the "
                "trainer's log-probabilities refer to the full one, which biases importance weights; "
                "top_p=1, top_k=-1 are exact"
            )
        if self.min_new_tokens:
            yield (
                f"ppo.gen.min_new_tokens={self.min_new_tokens}: until then stop tokens are excluded from sampling, "
                "but included in the trainer's log-probabilities; min_new_tokens=0 is exact"
            )


class PPOKeys(Section):
    """The keys of `ppo` that an algorithm reads."""

    ppo_n_minibatches: int = key(4, "Minibatches per batch, with one optimizer step each", ge=1, first=True)
    actor_sample_reuse: int = key(1, "Passes of the actor over the minibatches of each batch", ge=1)
    critic_sample_reuse: int = key(1, "Passes of the critic over the minibatches of each batch", ge=1, needs=CRITIC)
    eps_clip: float = key(
        0.2,
        "Clip the policy ratio to the range 1 - eps_clip to 1 + eps_clip",
        gt=0,
        lt=1,
        needs=CLIPPED & (equals("algorithm.clip_low", None) | equals("algorithm.clip_high", None)),
    )
    value_eps_clip: float = key(
        0.2, "Clip the change of value predictions in one step to this value", gt=0, needs=CRITIC
    )
    kl_ctl: float = key(
        0.1, "Coefficient of the KL divergence from the reference; 0: no reference model", ge=0, first=True
    )
    discount: float = key(
        1.0,
        "Discount factor of rewards, per token",
        ge=0,
        le=1,
        needs=equals("algorithm.advantage", "gae", "returns", "group"),
    )
    gae_lambda: float = key(
        1.0,
        "Lambda of generalized advantage estimation (GAE)",
        ge=0,
        le=1,
        needs=equals("algorithm.advantage", "gae", "group"),
    )
    adv_norm: bool = key(True, "Normalize advantages over the batch")
    value_norm: bool = key(True, "Normalize the targets of the critic by their running mean and variance", needs=CRITIC)
    disable_value: bool = key(
        False,
        "Train without a critic: the advantage is the (normalized) reward",
        needs=equals("algorithm.advantage", "gae").else_("it has no critic"),
    )
    reward_output_scaling: float = key(1.0, "Rewards become (reward - reward_output_bias) * reward_output_scaling")
    reward_output_bias: float = key(0.0, "Subtracted from rewards before they are scaled")
    mask_no_eos_with_zero: bool = key(False, "Set the reward of completions truncated at max_new_tokens to 0")

    @property
    def has_values(self) -> bool:
        """True unless a critic is ruled out."""
        return not self.disable_value

    @property
    def sample_reuse(self) -> tuple[int, int]:
        """Passes of actor and critic over the minibatches of a batch."""
        return self.actor_sample_reuse, self.critic_sample_reuse


class _Sampling(Section):
    """The rest of `ppo`."""

    gen: GenerationHyperparameters = section(GenerationHyperparameters, "Sampling of answers")


class PPOHyperparameters(PPOKeys, _Sampling):
    """Proximal policy optimisation."""


class StalenessConfig(Section):
    """How old the weights that sampled a batch may be."""

    max_staleness: int = key(
        1, "Maximum age of sampled tokens in training steps; 0: synchronous, on policy", ge=0, first=True
    )
    over_age: Literal["wait", "mask"] = key(
        "wait",
        "wait: wait for the oldest completions. mask: exclude tokens beyond the bound from training",
        needs=above("staleness.max_staleness", 0),
    )
    in_order: bool = key(
        False, "Train prompts in the order of the data set instead of as they finish: reproducible batches"
    )


class TaskSetConfig(SetConfig):
    """A set of prompts. Keys that are null have the value that the run has for prompts of `dataset.path`."""

    path: str = key(description=f"Prompts: {PATH}")
    weight: float | None = key(
        None, "Share among the prompts of an epoch, relative to the other sets. null: the number of its rows", gt=0
    )
    order: Literal["sequential", "shuffled", "curriculum"] | None = key(
        None,
        "sequential: as in the file. shuffled: a new order in every epoch. curriculum: that of `curriculum`. null: "
        "shuffled, with shuffle_dataset=false sequential",
    )
    curriculum: str = key(
        "",
        "Column whose values order the rows, lowest first; or a function package.module:name, which scores the rows "
        "that are left, with their success rates: highest first",
        needs=equals(".order", "curriculum") & refused_without("order: curriculum"),
    )
    group_size: int | None = key(None, "Completions sampled per prompt. null: group_size", ge=1)
    temperature: float | None = key(None, "Sampling temperature. null: ppo.gen.temperature", gt=0)
    top_p: float | None = key(None, "As ppo.gen.top_p", gt=0, le=1)
    top_k: int | None = key(None, "As ppo.gen.top_k", ge=-1)
    max_new_tokens: int | None = key(
        None, "Maximum tokens per completion, at most ppo.gen.max_new_tokens. null: that", ge=1
    )

    def rules(self, at: str) -> Iterator[Violation]:
        """Yield an order without what it needs, and options without a workflow."""
        yield from super().rules(at)
        if (self.order == "curriculum") != bool(self.curriculum):
            yield Violation(
                (f"{at}curriculum", f"{at}order"),
                f"order={self.order} with curriculum={self.curriculum!r}; write order: curriculum with a column or a "
                "function, or neither",
            )

    @property
    def place(self) -> DataSource:
        """Where its rows come from."""
        return self.source(self.path)

    @property
    def scored_by(self) -> str | None:
        """Import path of the function of the user that orders the rows. None: there is none."""
        return self.curriculum if ":" in self.curriculum else None

    @property
    def column(self) -> str:
        """The column that orders the rows; empty: none."""
        return "" if self.scored_by else self.curriculum
