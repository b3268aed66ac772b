"""Types that users of rollout/ see: prompts, trajectories, requests, and the protocols of workflow and generator.

Invariant: every per-token array of a `Completion` or a `Trajectory` has the same length, and entry t always refers to
token t itself (the log-probability *of* token t, the version that *sampled* token t), never about its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # a --dry-run and the reward workers read this file, and need none of them
    import numpy as np

    from rollout.bucket import FlatBucket

FinishReason = Literal["stop", "length", "abort"]

PROMPT_VERSION = -1
"""Entry of `Trajectory.versions` for tokens that no policy sampled."""

REWARD_PART = "reward/"
"""What the names of metrics of a trajectory begin with that are parts of its reward."""

_BOX = "\\boxed{"


class AddedToken(Protocol):
    """A token that a tokenizer has besides those of its model."""

    @property
    def content(self) -> str: ...


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def model_max_length(self) -> int: ...
    @property
    def chat_template(self) -> object: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Mapping[str, list[list[int]]]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, object]], **options: object) -> str: ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters that one completion is sampled with. `temperature == 0` is greedy decoding."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens cannot be sampled before this many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    pause_token_ids: tuple[int, ...] = ()
    """A generator aborts the request after one of these tokens: it may complete a stop text (StopTexts)."""

    def at_most(self, num_tokens: int) -> SamplingParams:
        """Return the parameters for an answer of at most so many tokens."""
        most = min(num_tokens, self.max_new_tokens)
        return replace(self, max_new_tokens=most, min_new_tokens=min(most, self.min_new_tokens))


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One completion to sample. `output` is what earlier, aborted attempts sampled: it is continued, not redone."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int = 0
    """Token i of the completion is a function of (weights, prompt, seed, i), whatever else is in the batch."""
    group_id: str = ""
    """Requests of one group share their prompt; a router keeps them together."""
    is_turn: bool = False
    """The next request may begin with this prompt and its answer: a generator that caches prefixes keeps both."""
    began_at: int | None = None
    """Of a turn: version of the weights that sampled the first answer in its prompt; None: there is none."""
    output: Completion | None = None

    def named(self, name: str) -> GenerateRequest:
        """Return the request with ids that begin with a name. One without a group stays without: a router would send
        those of a shared group to one generator."""
        group_id = self.group_id and f"{name}/{self.group_id}"
        return replace(self, request_id=f"{name}/{self.request_id}", group_id=group_id)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Sampled tokens, `output` of the request included. `logprobs` are of the distribution actually sampled from
    (after temperature, top_p, top_k and the min_new_tokens mask), in nats."""

    token_ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    versions: np.ndarray  # [n] int32: version of the weights that sampled each token
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    """[m, layers, k] int16: the experts of the first m tokens of prompt and completion end to end, all but the last of
    which no forward pass was made; negative: not known. None: the generator does not report experts."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """A generator's answer to health(): its weight version and load."""

    version: int
    num_running: int
    num_waiting: int
    num_old_prefix_tokens: int = 0
    """Prompt tokens since its start whose keys and values are of older weights (interrupt in_place)."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data set, tokenised. `index` is its row number in the data set after filtering; `epoch` is the
    pass over the data set that it is drawn in."""

    query_id: str
    index: int
    task: str
    text: str
    token_ids: np.ndarray  # [n] int32
    solutions: tuple[str, ...]
    epoch: int = 0
    question: str = ""
    """The text of the row, where `text` is what a template made of it."""
    meta: Mapping[str, object] = field(default_factory=dict)
    task_set: str = ""
    """Name of the set that it is a row of."""

    @property
    def answers(self) -> tuple[str, ...]:
        r"""The solutions without the \boxed{...} around them, to compare the text of a completion with."""
        return tuple(
            s[len(_BOX) : -1] if s.startswith(_BOX) and s.endswith("}") and s.count(_BOX) == 1 else s
            for s in self.solutions
        )


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Prompt and completion with everything the trainer needs, per token."""

    query_id: str
    token_ids: np.ndarray  # [n] int32, prompt then completion
    loss_mask: np.ndarray  # [n] bool, True where a policy sampled the token
    rollout_logprobs: np.ndarray  # [n] float32, 0 on the prompt
    versions: np.ndarray  # [n] int32, PROMPT_VERSION on the prompt
    reward: float
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the workflow reports, as {"num_turns": 3}: workflow/{name}/mean, min and max of the step's metrics."""
    routed_experts: np.ndarray | None = None
    """[n, layers, k] int16: the experts that each token went through; negative: not known. None: of no token."""
    turn_rewards: Sequence[float] | None = None
    """What each turn, a run of trained tokens, has earned by itself; part of `reward`. None: nothing is known."""
    turn_states: Sequence[str | None] | None = None
    """Names of the states that turns began in, equal for equal states: algorithm.credit=step_groups compares them."""
    rollout: int | None = None
    """Number of the rollout in its group that this is a branch of; None: it is a rollout by itself."""

    @property
    def oldest_version(self) -> int:
        """Version that sampled the first token of the completion: what the staleness bound is about."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else PROMPT_VERSION


class Sampler(Protocol):
    """What a workflow needs of the generators."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample until a stop token, max_new_tokens, or an abort (finish_reason "abort", with what there is so far)."""
        ...


class ReportingSampler(Sampler, Protocol):
    """A sampler whose requests in flight can be saved: a generator, or the router over several."""

    async def partial(self) -> Mapping[str, Completion]:
        """Return the tokens so far of requests in flight, by request id; those without a token may be omitted."""
        ...


class Generator(ReportingSampler, Protocol):
    """Samples completions, under weights that change: the embedded engine, or a SGLang server."""

    async def pause(self) -> None:
        """Return when no further token of the current version can appear."""
        ...

    async def update_weights(self, bucket: FlatBucket) -> None:
        """Copy a bucket in place. Call between pause() and resume()."""
        ...

    async def resume(self, version: int) -> None:
        """Continue sampling; tokens from now on carry `version`."""
        ...

    async def health(self) -> Health: ...
    async def close(self) -> None: ...


class Workflow(Protocol):
    """Turns one prompt into its group of trajectories; custom ones are loaded from an import path."""

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]: ...


class Score(float):
    """A reward with the figures that it is made of, by name; a number in every other respect."""

    parts: Mapping[str, float]

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Score:
        score = super().__new__(cls, value)
        score.parts = parts or {}
        return score


def lowest_right(right_at: float) -> float:
    """Return the lowest reward that counts as `right_at`: rewards are rounded to float32, and so are their means."""
    return right_at - 1e-6 * max(abs(right_at), 1.0)


Reward = Callable[[Prompt, str], float]
"""(prompt, completion text) -> score. Runs in a worker process under a time limit."""
