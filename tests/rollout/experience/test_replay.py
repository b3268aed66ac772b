"""Replay: which episodes of earlier steps a step trains on again, and that a run which continues repeats the choice."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from core.config.parsing.problems import ConfigError
from helpers.config_inputs import problems, write_run
from helpers.stores import Stores, episode, names
from helpers.stores import tags as opened
from helpers.virtual_clock import run_virtual
from rollout.experience import Experience, Lessee, Replay, Rules, Tags, Used, make_priority, make_rules
from rollout.plugins import PluginError

pytestmark = pytest.mark.virtual_clock

STEPS = 7


def hardest(candidates: Sequence[Used], step: int) -> list[float]:
    """Prefer what earned little, and never what earned most."""
    means = [sum(one.tags.rewards) / len(one.tags.rewards) for one in candidates]
    return [float("-inf") if mean > 0.6 else -mean for mean in means]


def too_few(candidates: Sequence[Used], step: int) -> list[float]:
    return [0.0]


def used(number: int, *, version: int = 0, uses: int = 1, last_step: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)):
    made = {**vars(opened(number)), "uses": uses, "oldest": [version], "rewards": rewards}
    return Used(tags=Tags(**made), last_step=last_step)


def replay(priority: str = "linear_decay", **settings: float | None) -> Replay:
    given = {"share": 0.5, "max_age": 3, **settings}
    return Replay(priority=make_priority(priority, decay=2.0), **given)


def rules_with(of_replay: Replay | None) -> Rules:
    return make_rules(num_prompts=100, batch_size=2, max_staleness=0, num_epochs=1, replay=of_replay)


async def train(store: Experience, lessee: Lessee, rules: Rules, first: int, last: int) -> list[list[str]]:
    """Sample what admission allows, and train steps `first` to `last` - 1; return the episodes of each."""
    batches = []
    for step in range(first, last):
        number = store.status().num_opened
        while store.open(opened(number, step), rules.admission) == "open":
            store.put(episode(number, step, rewards=(0.1 * (number % 9), 1.0)))
            number += 1
        batches.append(names(await lessee.take(step)))
        lessee.trained(step + 1)
    return batches


def test_a_run_that_continues_replays_what_it_would_have_replayed(stores: Stores) -> None:
    rules = rules_with(replay("use_count", share=0.75, max_uses=3))

    async def undisturbed() -> list[list[str]]:
        store = stores.new()
        return await train(store, Lessee(store, rules), rules, 0, STEPS)

    async def continued() -> list[list[str]]:
        store = stores.new()
        lessee = Lessee(store, rules, until_saved=stores.are_durable)
        before = await train(store, lessee, rules, 0, 3)
        lessee.state_dict()
        state = stores.state_of(store)
        await train(store, lessee, rules, 3, 5)  # which no checkpoint has
        again = stores.continued(store, state)
        return before + await train(again, Lessee(again, rules, until_saved=stores.are_durable), rules, 3, STEPS)

    batches = run_virtual(undisturbed())
    assert [batch[:2] for batch in batches] == [[f"q{2 * i}", f"q{2 * i + 1}"] for i in range(STEPS)], "the new ones"
    assert [len(batch) for batch in batches] == [2, 4, 6, 6, 6, 6, 6]
    assert max(Counter(id for batch in batches for id in batch).values()) == 3
    assert batches == run_virtual(continued())


async def test_every_store_replays_the_same_episodes_with_their_values_and_uses(stores: Stores) -> None:
    rules = rules_with(replay())

    store = stores.new()
    lessee = Lessee(store, rules)
    assert await train(store, lessee, rules, 0, 2) == [["q0", "q1"], ["q2", "q3", "q1", "q0"]]
    assert await train(store, lessee, rules, 2, 3) == [["q4", "q5", "q3", "q2"]], "a use is worth two versions"
    figures = lessee.stats()
    assert (figures["replay/share"], figures["replay/age_max"], figures["replay/uses_max"]) == (0.5, 1.0, 2.0)
    again = store.replay(2, lambda candidates: ["q0"])
    assert [(tags.id, tags.uses) for tags in again] == [("q3", 2), ("q2", 2)], "as the first call for the step"
    assert [e.trajectories[0].versions.tolist() for e in store.values(["q3"])] == [[-1, -1, 1]]


async def test_without_replay_no_store_keeps_what_is_trained(stores: Stores) -> None:
    store, rules = stores.new(), rules_with(None)
    lessee = Lessee(store, rules)
    assert await train(store, lessee, rules, 0, 2) == [["q0", "q1"], ["q2", "q3"]]
    with pytest.raises(KeyError):
        store.values(["q0"])


def test_age_cooldown_uses_and_equal_rewards_keep_an_episode_out() -> None:
    given = replay(cooldown=2, max_uses=3)

    def is_able(**of: object) -> bool:
        return given.choose([used(0, **of)], step=5, num_new=1) == ["q0"]

    assert is_able(version=2, uses=2, last_step=3)
    assert not is_able(version=1, uses=2, last_step=3), "4 steps old"
    assert not is_able(version=2, uses=2, last_step=4)
    assert not is_able(version=2, uses=3, last_step=3)
    assert not is_able(version=2, last_step=3, rewards=(1.0, 1.0)), "its advantages are 0"
    assert is_able(version=2, last_step=3, rewards=(1.0,)), "no group"


def test_priorities_order_what_is_replayed() -> None:
    old, worn, new = used(0, version=3), used(1, version=5, uses=3), used(2, version=4, uses=2)
    given = {"max_age": 9, "share": 0.75}
    assert replay(**given).choose([old, worn, new], step=6, num_new=1) == ["q0", "q2", "q1"]
    assert replay("use_count", **given).choose([worn, new, old], step=6, num_new=1) == ["q0", "q2", "q1"]
    easy, hard, middle = (used(i, version=5, rewards=(0.0, reward)) for i, reward in enumerate((1.4, 0.2, 0.8)))
    own = replay(f"{__name__}:hardest", **given)
    assert own.choose([easy, hard, middle], step=6, num_new=1) == ["q1", "q2"]
    assert own.choose([easy, hard, middle], step=6, num_new=0) == []


def test_a_priority_that_cannot_be_used_is_named() -> None:
    with pytest.raises(PluginError, match="unknown priority 'linear'; use one of linear_decay, use_count"):
        make_priority("linear", decay=1.0)
    with pytest.raises(ValueError, match="returned 1 scores for 2 candidates"):
        replay(f"{__name__}:too_few").choose([used(0, version=5), used(1, version=5)], step=6, num_new=1)


def test_settings_of_replay_that_cannot_work_are_refused(tmp_path: Path) -> None:
    run, share = write_run(tmp_path), "experience.replay.share=0.5"
    (said,) = problems(run, share, "experience.replay.priority=linear")
    assert "experience.replay.priority: unknown priority 'linear'" in said
    uncorrected = "algorithm.correction=none"
    assert problems(run, share, uncorrected) == [], "within the bound of new tokens"
    with pytest.raises(ConfigError, match="9 is above staleness.max_staleness=1, and algorithm.correction=none weighs"):
        problems(run, share, "experience.replay.max_age=9", uncorrected)
    assert problems(run, share, "experience.replay.max_age=9") == []
    with pytest.raises(ConfigError, match="replayed tokens are at least one step old; write a number"):
        problems(run, share, "staleness.max_staleness=0")
