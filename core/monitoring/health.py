"""Rules that find faults of a run in its metrics, and the warning about a run that learns nothing (`NoSignal`).

A rule compares the last steps with a limit or with the first steps, and returns a reason and a figure. Users add rules:
a list of `Rule` in a module, `slipstream studio --rules my_package.my_module:RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from config_schema.needs import as_yaml
from core.monitoring.samples import Sample, shortened
from rollout.data.source import printable

Light = Literal["good", "warning", "bad", "unknown"]
RECENT = 10
"""Steps in the mean of History.now() and first(), at most a quarter of the run."""
_FEW = 4
"""Values of a metric that a rule needs at least."""
_LEAST_FLAT = 30
"""Steps of a run of which it can be said that its reward does not rise."""
_LEAST_EVALUATIONS = 12
"""Evaluations of a run of which it can be said that they rise."""
_BATCH_KEYS = ("dataset.train_bs_n_seqs", "experience.train_batch_size", "group_size")
LEAST = {"ppo.ppo_n_minibatches": 1, "staleness.max_staleness": 0}
"""The least values of keys that actions lower; those of other keys have none that a run comes near to."""


class Metrics(Protocol):
    """The metrics of a run."""

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps [N], values [N]) of the steps that have a metric; both empty where none has it."""


class Found(NamedTuple):
    """What is wrong."""

    light: Light
    reason: str
    """One sentence, with the figure."""
    figure: float


class History:
    """The metrics, the settings and the limits of a run, which rules read."""

    def __init__(
        self, metrics: Metrics, settings: Mapping[str, object] | None = None, limits: Mapping[str, float] | None = None
    ) -> None:
        """`settings`: values by dotted key; `limits`: available GiB, by metric of memory/."""
        self._metrics, self.settings, self.limits = metrics, settings or {}, limits or {}

    def values(self, name: str) -> np.ndarray:
        """Return the values of a metric [N], oldest first."""
        return self._metrics.column(name)[1]

    def steps(self, name: str) -> np.ndarray:
        """Return the steps that have a metric [N]."""
        return self._metrics.column(name)[0]

    def until(self, step: float) -> History:
        """Return the history as it was after a step."""
        return History(_Until(self._metrics, step), self.settings, self.limits)

    def has(self, name: str) -> bool:
        """Return whether enough steps have a metric for a judgement."""
        return len(self.values(name)) >= _FEW

    def now(self, name: str) -> float:
        """Return the mean of the last steps."""
        values = self.values(name)
        return float(np.mean(values[-_some(values) :]))

    def first(self, name: str) -> float:
        """Return the mean of the first steps."""
        values = self.values(name)
        return float(np.mean(values[: _some(values)]))

    def added(self, name: str) -> float:
        """Return by how much a counter has grown in the last steps."""
        values = self.values(name)
        return float(values[-1] - values[-_some(values) - 1])


class _Until(NamedTuple):
    """Metrics up to a step."""

    metrics: Metrics
    last_step: float

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps [N], values [N])."""
        steps, values = self.metrics.column(name)
        number = int(np.searchsorted(steps, self.last_step, side="right"))
        return steps[:number], values[:number]


def _some(values: np.ndarray) -> int:
    return max(1, min(RECENT, len(values) // 4))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One check of a run."""

    name: str
    title: str
    docs: str
    """Page and section of docs/ that explain what to do."""
    needs: Sequence[str]
    """Metrics that the check reads; the answer is unknown where one has too few values."""
    check: Callable[[History], Found | None]
    """None: healthy."""
    problem: str = ""
    """What is wrong where the rule found something, in a few words."""
    healthy: str = ""
    """What was checked where the rule found nothing, in one sentence."""
    actions: Sequence[str] = ()
    """What to do. Keys of the configuration are shown with their present value."""
    is_share: bool = False
    """Whether the figure is a share of 1, shown in percent."""


class Judgement(NamedTuple):
    """The answer of a rule."""

    rule: Rule
    light: Light
    reason: str
    figure: float | None
    since: int | None = None
    """Step since which the rule finds something without a break, as far as it was asked."""
    actions: Sequence[str] = ()
    """Actions of the rule, with the values of the run."""

    @property
    def is_problem(self) -> bool:
        """Whether the rule found something."""
        return self.light in ("bad", "warning")

    @property
    def title(self) -> str:
        """The problem; the name of the check where there is none."""
        return (self.is_problem and self.rule.problem) or self.rule.title


def judge(history: History, rules: Iterable[Rule] | None = None) -> list[Judgement]:
    """Return the answer of every rule, what is wrong first. A rule that raises is unknown, with its error."""
    answers = [_asked(rule, history) for rule in (RULES if rules is None else rules)]
    order = ("bad", "warning", "good", "unknown")
    return sorted(answers, key=lambda answer: order.index(answer.light))


def _asked(rule: Rule, history: History) -> Judgement:
    for name in rule.needs:
        if not history.has(name):
            number = len(history.values(name))
            reason = f"fewer than {_FEW} steps have {name}" if number else f"no step has {name}"
            return Judgement(rule, "unknown", reason, None)
    try:
        found = rule.check(history)
    except Exception as error:  # noqa: BLE001 (the rule of a user)
        return Judgement(rule, "unknown", f"the rule failed: {type(error).__name__}: {error}", None)
    if found is None:
        return Judgement(rule, "good", rule.healthy, None)
    if found.light not in ("bad", "warning"):
        return Judgement(rule, *found)
    actions = [text for action in rule.actions if (text := _with_values(action, history.settings))]
    return Judgement(rule, *found, since=_since(rule, history), actions=actions)


def _with_values(action: str, settings: Mapping[str, object]) -> str:
    """Return an action with the present values of its keys; empty where it changes nothing: it sets a key to the value
    that it has, or lowers one that has its least value."""
    words: list[str] = []
    for word in action.split():
        name = word.rstrip(",:;")
        key, _, wanted = name.partition("=")
        if key in settings:
            shown = as_yaml(settings[key])
            if shown == wanted or (words[-1:] == ["lower"] and settings[key] == LEAST.get(key)):
                return ""
            word = f"{name} (now {shown}){word[len(name) :]}"
        words.append(word)
    return " ".join(words)


def _since(rule: Rule, history: History) -> int | None:
    """Return the step since which a rule finds something: double the distance to the last step until it finds
    nothing, then halve it."""
    if not rule.needs:
        return None
    steps = history.steps(rule.needs[0])

    def finds(index: int) -> bool:
        before = history.until(steps[index])
        if not all(before.has(name) for name in rule.needs):
            return False
        try:
            found = rule.check(before)
        except Exception:  # noqa: BLE001 (the rule of a user)
            return False
        return found is not None and found.light in ("bad", "warning")

    last = len(steps) - 1
    high, low, distance = last, last - 1, 1
    while low >= _FEW - 1 and finds(low):
        distance *= 2
        high, low = low, last - distance
    if low < _FEW - 1:
        low = _FEW - 2
    while high - low > 1:
        middle = (low + high) // 2
        if finds(middle):
            high = middle
        else:
            low = middle
    return int(steps[0 if high < _FEW else high])


def _above(name: str, warning: float, bad: float, reason: str) -> Callable[[History], Found | None]:
    """Return a check of the mean of the last steps. `reason` may show it as {value}."""

    def check(history: History) -> Found | None:
        value = history.now(name)
        if not value > warning:
            return None
        return Found("bad" if value > bad else "warning", reason.format(value=value), value)

    return check


def _entropy(history: History) -> Found | None:
    """Return a finding where the entropy has fallen and the reward does not rise: one that learns falls, too."""
    first, now = history.first("sampled_entropy"), history.now("sampled_entropy")
    if first <= 0 or now >= 0.25 * first:
        return None
    if _learns(history):
        return None
    flat = _flat(history)
    if flat is not None and flat.light == "unknown":
        return flat
    reason = (
        f"The entropy fell from {first:.3g} to {now:.3g}, and the reward does not rise: answers become alike, and "
        "exploration ends."
    )
    return Found("bad" if now < 0.1 * first else "warning", reason, now)


def _kl(history: History) -> Found | None:
    """Return a finding where the divergence has grown, unless a held-out evaluation shows that the model learns."""
    first, now = history.first("ref_kl"), history.now("ref_kl")
    if now <= max(0.1, 5 * abs(first)) or (_evaluation(history) is None and _learns(history)):
        return None
    reason = f"The divergence from the reference model grew from {first:.3g} to {now:.3g} nats a token."
    return Found("bad" if now > 0.5 else "warning", reason, now)


def _ratio(history: History) -> Found | None:
    now = history.now("importance_weight")
    away = abs(now - 1)
    if away <= 0.1:
        return None
    reason = f"The mean importance ratio is {now:.3g}, expected 1: the policy moves far within a step."
    return Found("bad" if away > 0.5 else "warning", reason, now)


def _spread(history: History) -> Found | None:
    """Return a finding where groups have equal rewards and the reward does not rise: those that a model has learned to
    solve are equal, too."""
    share = history.now("groups/equal")
    if share <= 0.8 or _learns(history):
        return None
    reason = f"{share:.0%} of the groups have equal rewards: they have no advantage, and nothing is learned from them."
    return Found("bad" if share > 0.95 else "warning", reason, share)


def _length(history: History) -> Found | None:
    first, now = history.first("answer_length/mean"), history.now("answer_length/mean")
    if now <= 2 * first:
        return None
    reason = f"Answers have {now:,.1f} tokens, {now / first:.1f} times as many as at the start ({first:,.1f})."
    return Found("bad" if now > 4 * first else "warning", reason, now)


def _flat(history: History) -> Found | None:
    """Return a finding where better answers exist, but in the last third of a run neither the mean reward nor that of
    the evaluation rises: prompts may become harder while a model learns."""
    rewards, evaluations = history.values("reward/mean"), history.values("eval/reward")
    if len(rewards) < _LEAST_FLAT:
        return Found("unknown", f"fewer than {_LEAST_FLAT} steps", float(len(rewards)))
    best = float(history.values("reward/max").max())
    before, now = _last_third(rewards)
    if best <= rewards.min():
        return Found("unknown", f"every answer has got the reward {best:.3g}", now)
    near = 0.05 * max(best - history.first("reward/mean"), abs(best))  # a run may begin with nearly all answers right
    if best - now <= near or _rises(rewards, best):
        return None
    if len(evaluations) >= _LEAST_EVALUATIONS and _rises(evaluations, best):
        return None
    reason = (
        f"The mean reward went from {before:.3g} to {now:.3g} in the last third of the run; the best answers get "
        f"{best:.3g}."
    )
    return Found("warning", reason, now)


def _learns(history: History) -> bool:
    """Return whether the mean reward or that of the evaluation is above its first values, and _flat() finds nothing."""
    names = [name for name in ("reward/mean", "eval/reward") if history.has(name)]
    return any(history.now(name) > history.first(name) for name in names) and _flat(history) is None


def _rises(values: np.ndarray, best: float) -> bool:
    """Return whether values rose in the last third of a run by 2 % of what is left to the best."""
    before, now = _last_third(values)
    return now - before > 0.02 * (best - now)


def _last_third(values: np.ndarray) -> tuple[float, float]:
    """Return the means of both halves of the last third of values [N], N >= 6."""
    third = values[-(len(values) // 3) :]
    half = len(third) // 2
    return float(third[:half].mean()), float(third[half:].mean())


def _evaluation(history: History) -> Found | None:
    """Return a finding where the reward of training rises and that of an evaluation has fallen below its best."""
    name = max(("eval/accuracy", "eval/reward"), key=lambda name: len(history.values(name)))
    values = history.values(name)
    if len(values) < 3:
        return Found("unknown", "fewer than 3 evaluations", float(len(values)))
    best, last = float(values[:-1].max()), float(values[-2:].mean())
    spread = max(float(values.max() - values.min()), 1e-9)
    first, now = history.first("reward/mean"), history.now("reward/mean")
    if now <= first or best - last < 0.4 * spread or best - last < 0.03 * max(1.0, abs(best)):
        return None
    reason = (
        f"The reward of training rose from {first:.3g} to {now:.3g}, and {name} fell from {best:.3g} to {last:.3g}: "
        "the reward may be gamed, or the prompts learned by heart."
    )
    return Found("bad" if best - last > 0.1 * max(1.0, abs(best)) else "warning", reason, last)


def _mismatch(history: History) -> Found | None:
    now = history.now("behave_approx_kl")
    if abs(now) <= 0.05:
        return None
    reason = (
        f"Log-probabilities of trainer and servers differ by {abs(now):.3g} nats a token in the mean; up to 0.05 is "
        "usual for precision and staleness together."
    )
    return Found("bad" if abs(now) > 0.2 else "warning", reason, now)


def _staleness(history: History) -> Found | None:
    """Return a finding where the bound costs something; tokens as old as it allows are no fault."""
    waits = min(history.now("rollout/wait_for_oldest_seconds"), history.now("time/wait_for_rollout"))
    share = waits / max(history.now("time/step"), 1e-9)
    if share > 0.1:
        reason = f"The trainer waits {share:.0%} of a step for the oldest answers, while enough others are ready."
        return Found("warning", reason, share)
    masked = history.added("rollout/num_masked_tokens") / max(history.added("rollout/num_tokens"), 1.0)
    if masked > 0.02:
        return Found("warning", f"{masked:.0%} of the sampled tokens are over the bound and not trained.", masked)
    prompts, answers, size = map(history.settings.get, _BATCH_KEYS)
    if isinstance(answers, int) and isinstance(size, int):
        prompts = answers // size
    if history.has("rollout/num_late") and isinstance(prompts, int):
        late = history.now("rollout/num_late") / prompts
        if late > 0.02:
            return Found("warning", f"{late:.0%} of the prompts of a step are dropped as late.", late)
    return None


def _waiting(history: History) -> Found | None:
    share = history.now("time/wait_for_rollout") / max(history.now("time/step"), 1e-9)
    busy = history.now("rollout/generators_busy") if history.has("rollout/generators_busy") else 0.0
    if share > 0.5:
        reason = f"The trainer waits for answers {share:.0%} of a step: generation is the slower side."
        return Found("bad" if share > 0.8 else "warning", reason, share)
    if 0 < busy < 0.3:
        return Found("warning", f"The generators use {busy:.0%} of their slots: training is the slower side.", busy)
    return None


def _memory(history: History) -> Found | None:
    shares = {name: history.now(name) / limit for name, limit in history.limits.items() if history.has(name) and limit}
    name = max(shares, key=lambda name: shares[name], default="")
    if not name or shares[name] < 0.9:
        return None
    reason = f"{name} is {history.now(name):.1f} of {history.limits[name]:.1f} GiB."
    return Found("bad" if shares[name] > 0.97 else "warning", reason, shares[name])


def _failing(history: History) -> Found | None:
    kinds = [kind for kind in ("error", "timeout", "crash", "memory") if history.has(f"reward/num_{kind}")]
    failed = {kind: history.added(f"reward/num_{kind}") for kind in kinds}
    share = sum(failed.values()) / max(history.added("reward/num_scored"), 1.0)
    if share <= 0.02:
        return None
    parts = ", ".join(f"{kind}: {count:.0f}" for kind, count in failed.items() if count)
    return Found(
        "bad" if share > 0.2 else "warning", f"{share:.0%} of the rewards of the last steps failed ({parts}).", share
    )


def _slow(history: History) -> Found | None:
    share = history.now("router/slowest_share")
    if history.now("router/num_generators") < 2 or share >= 0.5:
        return None
    reason = f"The slowest generator samples {share:.0%} of the tokens per second of the fastest."
    return Found("bad" if share < 0.2 else "warning", reason, share)


RULES: tuple[Rule, ...] = (
    Rule(
        name="entropy", title="Entropy", problem="Answers become alike",
        healthy="The entropy is at least a quarter of that of the first steps, or the reward rises.",
        actions=("raise algorithm.entropy_coeff", "set algorithm.clip_high=0.28"),
        docs="algorithms.md#kl-divergence-and-entropy", needs=("sampled_entropy", "reward/mean", "reward/max"),
        check=_entropy,
    ),
    Rule(
        name="kl", title="Divergence from the reference", problem="The policy is far from the reference model",
        healthy="The divergence has not grown above 0.1 nats a token, or the evaluation shows that the model learns.",
        actions=("raise ppo.kl_ctl", "lower actor.optimizer.lr"),
        docs="algorithms.md#kl-divergence-and-entropy", needs=("ref_kl", "reward/mean", "reward/max"), check=_kl,
    ),
    Rule(
        name="ratio", title="Importance ratio", problem="The policy moves far within a step",
        healthy="The mean importance ratio is within 0.1 of 1.",
        actions=("lower actor.optimizer.lr", "lower ppo.ppo_n_minibatches"),
        docs="algorithms.md#off-policy-corrections", needs=("importance_weight",), check=_ratio,
    ),
    Rule(
        name="clipped", title="Clipped tokens", problem="Many tokens are clipped", is_share=True,
        healthy="At most 30% of the tokens are clipped.",
        actions=("lower actor.optimizer.lr", "lower ppo.ppo_n_minibatches"),
        docs="monitoring.md#terminal", needs=("actor_clip_ratio",),
        check=_above("actor_clip_ratio", 0.3, 0.6, "{value:.0%} of the tokens are clipped: they train nothing."),
    ),
    Rule(
        name="spread", title="Groups with different rewards", problem="Nearly all groups have equal rewards",
        is_share=True, healthy="At most 80% of the groups have equal rewards, or the reward rises all the same.",
        actions=("set algorithm.dynamic_sampling=true", "raise group_size"),
        docs="algorithms.md#dynamic-sampling", needs=("groups/equal", "reward/mean", "reward/max"),
        check=_spread,
    ),
    Rule(
        name="length", title="Length of answers", problem="Answers have become much longer",
        healthy="Answers are at most twice as long as in the first steps.",
        actions=("set algorithm.overlong_share=0.2", "lower ppo.gen.max_new_tokens"),
        docs="monitoring.md#metrics-to-watch", needs=("answer_length/mean",), check=_length,
    ),
    Rule(
        name="cut_off", title="Answers that end", problem="Answers are cut off", is_share=True,
        healthy="At most 20% of the answers are cut off.",
        actions=("raise ppo.gen.max_new_tokens", "set algorithm.overlong_share=0.2"),
        docs="data.md#length", needs=("no_eos_ratio",),
        check=_above("no_eos_ratio", 0.2, 0.5, "{value:.0%} of the answers are cut off at max_new_tokens."),
    ),
    Rule(
        name="flat", title="Rise of the reward", problem="The reward does not rise",
        healthy="The mean reward or the evaluation rises in the last third of the run, or is near the best reward.",
        actions=("solve the other problems on this page first", "raise actor.optimizer.lr"),
        docs="monitoring.md#metrics-to-watch", needs=("reward/mean", "reward/max"), check=_flat,
    ),
    Rule(
        name="evaluation", title="Reward against evaluation", problem="The reward rises, the evaluation falls",
        healthy="No evaluation fell while the reward of training rose.",
        actions=("read the answers with the best rewards on the page Samples", "raise ppo.kl_ctl"),
        docs="evaluation.md#evaluation-during-training", needs=("reward/mean",), check=_evaluation,
    ),
    Rule(
        name="mismatch", title="Trainer and servers", problem="Trainer and servers compute different probabilities",
        healthy="Their log-probabilities differ by at most 0.05 nats a token in the mean.",
        actions=("lower staleness.max_staleness", "set algorithm.correction=tis"),
        docs="algorithms.md#off-policy-corrections", needs=("behave_approx_kl",), check=_mismatch,
    ),
    Rule(
        name="staleness", title="Staleness", problem="The staleness bound costs time or tokens", is_share=True,
        healthy="At most 10% of a step are spent on waiting for the oldest answers, and 2% of tokens and prompts lost.",
        actions=("raise staleness.max_staleness", "lower ppo.gen.max_new_tokens"),
        docs="algorithms.md#staleness",
        needs=(
            "rollout/wait_for_oldest_seconds", "rollout/num_masked_tokens", "rollout/num_tokens",
            "time/wait_for_rollout", "time/step",
        ),
        check=_staleness,
    ),
    Rule(
        name="waiting", title="Balance of the two sides", problem="One side waits for the other", is_share=True,
        healthy="The trainer waits for answers at most half of a step, and generators use at least 30% of their slots.",
        actions=("give the slower side more GPUs in allocation_mode", "raise staleness.max_staleness"),
        docs="monitoring.md#metrics-to-watch", needs=("time/wait_for_rollout", "time/step"), check=_waiting,
    ),
    Rule(
        name="memory", title="Memory", problem="Memory is nearly full", is_share=True,
        healthy="Less than 90% of the memory is used, where its size is known.",
        actions=("trainer: lower actor_train.mb_spec.max_tokens_per_mb", "rollout: lower staleness.max_staleness"),
        docs="reliability.md#out-of-memory", needs=("memory/driver_gib",), check=_memory,
    ),
    Rule(
        name="rewards", title="Rewards", problem="Rewards cannot be computed", is_share=True,
        healthy="At most 2% of the rewards of the last steps failed.",
        actions=("read the errors in the log on the page Processes", "after timeouts raise reward.timeout_seconds"),
        docs="customization.md#reward", needs=("reward/num_scored",), check=_failing,
    ),
    Rule(
        name="generators", title="Generators", problem="One generator is slow", is_share=True,
        healthy="The slowest generator samples at least half as fast as the fastest.",
        actions=("look for other programs on the host and the GPU of the slowest generator",),
        docs="reliability.md#generator-failures",
        needs=("router/slowest_share", "router/num_generators"), check=_slow,
    ),
    Rule(
        name="gradients", title="Gradients", problem="Updates have no finite gradient", is_share=True,
        healthy="All updates of the last steps had finite gradients.",
        actions=("lower actor.optimizer.lr",),
        docs="monitoring.md#metrics-to-watch", needs=("update_skipped",),
        check=_above("update_skipped", 0.0, 0.2, "{value:.0%} of the updates had no finite gradient."),
    ),
)  # fmt: skip


class Rows:
    """Metrics read from rows of metrics.jsonl."""

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        self._rows = rows

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps [N], values [N]) of the rows that have a metric."""
        found = [(row["step"], row[name]) for row in self._rows if isinstance(row.get(name), int | float)]
        steps, values = np.array(found, dtype=np.float64).reshape(-1, 2).T
        finite = np.isfinite(values)
        return steps[finite], values[finite]


_NO_SIGNAL_STEPS = 8
"""Steps of equal rewards after which a warning is due; the next one after twice as many."""


class NoSignal:
    """Counts steps in a row in which rewards say nothing about which answer is better."""

    def __init__(self) -> None:
        self._in_a_row, self._answers = 0, 0.0

    def count(self, row: Mapping[str, object]) -> None:
        """Count a step by its metrics. With a critic, answers of different prompts are compared; without, those of one
        prompt."""
        is_equal = row.get("reward/std") == 0.0 or (row.get("groups/equal") == 1.0 and bool(row.get("disable_value")))
        self._in_a_row = self._in_a_row + 1 if is_equal else 0
        number = row.get("n_seqs", 0.0)
        self._answers = (self._answers if self._in_a_row > 1 else 0.0) + (number if isinstance(number, float) else 0.0)

    @property
    def is_due(self) -> bool:
        """Whether a warning is due: after _NO_SIGNAL_STEPS, twice as many, four times as many, ..."""
        doubled, rest = divmod(self._in_a_row, _NO_SIGNAL_STEPS)
        return self._in_a_row > 0 and rest == 0 and doubled & (doubled - 1) == 0

    def message(self, samples: Sequence[Sample]) -> str:
        """Return one line with the first of the step's `samples`."""
        said = ""
        if samples:
            said = f"; for example {printable(shortened(samples[0].answer, 100))!r}: {samples[0].reward:g}"
        return (
            f"No signal: the {self._answers:.0f} answers of the last {self._in_a_row} steps have equal rewards within "
            f"their group, so nothing is learned{said}. Look at the answers with `slipstream samples`"
        )
