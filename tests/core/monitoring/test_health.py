"""Each rule of health on a run with its fault, and all of them on a healthy one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from config_schema.section import Section, all_keys, fields_by_key, sub_section
from core.config.experiments import EXPERIMENTS
from core.monitoring.health import LEAST, RULES, Found, History, Judgement, Light, Rows, Rule, judge
from core.monitoring.metrics import read_rows
from helpers.source import ROOT
from tools.runs import history_of

RECORDED = read_rows(Path(__file__).with_name("demo.jsonl"))
"""Of the run of `slipstream demo --seed 1` with ppo.kl_ctl=0.01 (45.5 -> 93.8 % of the held-out problems right): the
first and the last ten steps, every 30th between them, and the evaluations, of the metrics that rules read, in four
digits. Its entropy falls from 0.66 to 0.05, its divergence grows to 0.45, its tokens are as old as max_staleness
allows, and in the end four fifths of its groups have equal rewards."""
STEPS = 900
SETTINGS = {"dataset.train_bs_n_seqs": 64}
LIMITS = {"memory/trainer_gib": 24.0}
CURVES = (
    "2x-nvidia-h200-2026-11-27",
    "seed2-2x-nvidia-h200-2026-11-28",
    "seed3-2x-nvidia-h200-2026-11-28",
    "trl-1x-nvidia-h200-2026-11-28",
)

Fault = Mapping[str, tuple[float, float]]
"""Metric -> its first value, and the one that it keeps in the last third."""

STALLED: Fault = {
    "reward/mean": (-0.5, 0.2),
    "eval/reward": (0.2, 0.2),
    "sampled_entropy": (0.66, 0.5),
    "ref_kl": (0.01, 0.05),
    "groups/equal": (0.3, 0.5),
}
"""The reward does not rise, and nothing says why."""
WAITS_LITTLE: Fault = {"time/wait_for_rollout": (0.0, 0.3), "time/step": (1.0, 1.0)}
SCORED = 460_000
"""Rewards of the recorded run."""

FAULTS: Sequence[tuple[str, Light, Fault]] = [
    ("entropy flat", "warning", {**STALLED, "sampled_entropy": (0.66, 0.12)}),
    ("entropy flat", "bad", {**STALLED, "sampled_entropy": (0.66, 0.03)}),
    ("kl flat", "warning", {**STALLED, "ref_kl": (0.01, 0.4)}),
    ("kl flat", "bad", {**STALLED, "ref_kl": (0.01, 0.8)}),
    ("ratio", "warning", {"importance_weight": (1.0, 1.3)}),
    ("ratio", "bad", {"importance_weight": (1.0, 0.4)}),
    ("clipped", "warning", {"actor_clip_ratio": (0.05, 0.45)}),
    ("clipped", "bad", {"actor_clip_ratio": (0.05, 0.7)}),
    ("spread flat", "warning", {**STALLED, "groups/equal": (0.3, 0.9)}),
    ("spread flat", "bad", {**STALLED, "groups/equal": (0.3, 0.97)}),
    ("spread", "bad", {**STALLED, "reward/mean": (0, 0), "reward/max": (0, 0), "groups/equal": (1, 1)}),
    ("length", "warning", {"answer_length/mean": (200, 600)}),
    ("length", "bad", {"answer_length/mean": (200, 3000)}),
    ("cut_off", "warning", {"no_eos_ratio": (0.0, 0.4)}),
    ("cut_off", "bad", {"no_eos_ratio": (0.0, 0.6)}),
    ("flat", "warning", STALLED),
    ("flat", "warning", {**STALLED, "reward/mean": (0, 0.01), "reward/max": (0.04, 0.04), "eval/reward": (0.01, 0.01)}),
    ("evaluation", "warning", {"eval/accuracy": (0.6, 0.52), "ref_kl": (0.01, 0.05)}),
    ("evaluation", "bad", {"eval/accuracy": (0.6, 0.3), "ref_kl": (0.01, 0.05)}),
    ("mismatch", "warning", {"behave_approx_kl": (-0.01, -0.1)}),
    ("mismatch", "bad", {"behave_approx_kl": (-0.01, -0.3)}),
    ("staleness", "warning", {"rollout/wait_for_oldest_seconds": (0.0, 0.3), **WAITS_LITTLE}),
    ("staleness", "warning", {"rollout/num_masked_tokens": (0, 1e5)}),
    ("staleness", "warning", {"rollout/num_late": (0.0, 6.4)}),
    ("waiting", "warning", {"time/wait_for_rollout": (0.0, 0.7), "time/step": (1.0, 1.0)}),
    ("waiting", "bad", {"time/wait_for_rollout": (0.0, 0.9), "time/step": (1.0, 1.0)}),
    ("waiting", "warning", {"rollout/generators_busy": (0.9, 0.2)}),
    ("memory", "warning", {"memory/trainer_gib": (3.0, 22.5)}),
    ("memory", "bad", {"memory/trainer_gib": (3.0, 23.9)}),
    ("rewards", "warning", {"reward/num_timeout": (0, SCORED / 8)}),
    ("rewards", "bad", {"reward/num_crash": (0, SCORED / 4)}),
    ("generators", "warning", {"router/slowest_share": (0.9, 0.4), "router/num_generators": (2, 2)}),
    ("generators", "bad", {"router/slowest_share": (0.9, 0.1), "router/num_generators": (2, 2)}),
    ("gradients", "warning", {"update_skipped": (0.0, 0.2)}),
    ("gradients", "bad", {"update_skipped": (0.0, 0.4)}),
]


def rows(fault: Fault) -> Rows:
    """Return the recorded run with a fault."""
    found: list[dict[str, object]] = []
    for row in RECORDED:
        is_evaluation = "eval/reward" in row
        for name, (first, last) in fault.items():
            if name.startswith("eval/") == is_evaluation:
                end = STEPS if "/num_" in name else 0.7 * STEPS  # counters grow on
                row = {**row, name: first + (last - first) * min(1.0, float(row["step"]) / end)}
        found.append(row)
    return Rows(found)


def wrong(answers: list[Judgement]) -> list[str]:
    return [one.rule.name for one in answers if one.light in ("warning", "bad")]


def test_every_rule_is_silent_on_a_healthy_run() -> None:
    answers = judge(History(rows({}), SETTINGS, LIMITS))
    assert {one.light for one in answers} == {"good"}, [one for one in answers if one.light != "good"]


def test_a_collapse_is_a_fault_although_the_reward_rises_a_little_after_it() -> None:
    found = []
    for row in RECORDED:
        early, last = row["step"] < 300, row["step"] > 892
        wrong = {
            "reward/mean": 0.6 if early else 0.15 if last else 0.1, "sampled_entropy": 0.66 if early else 0.03,
            "ref_kl": 0.01 if early else 3.0, "groups/equal": 0.3 if early else 0.97,
        }  # fmt: skip
        found.append({**row, "eval/reward": 0.2} if "eval/reward" in row else {**row, **wrong})
    assert {one.rule.name for one in judge(History(Rows(found))) if one.light == "bad"} == {"entropy", "kl", "spread"}


@pytest.mark.parametrize(("mean", "light"), [(0.0, "unknown"), (0.98, "good")])
def test_a_run_without_a_right_answer_is_not_called_near_the_best_reward(mean: float, light: Light) -> None:
    best = 1.0 if mean else 0.0
    found = rows({**STALLED, "reward/mean": (mean, mean), "reward/max": (best, best)})
    (answer,) = judge(History(found), [rule for rule in RULES if rule.name == "flat"])
    assert answer.light == light and ("every answer has got the reward 0" in answer.reason) == (mean == 0.0)


def test_a_divergence_is_a_fault_where_no_evaluation_shows_that_the_model_learns() -> None:
    trained = Rows([row for row in RECORDED if "eval/reward" not in row])
    assert wrong(judge(History(trained))) == ["kl"]


@pytest.mark.parametrize("name", CURVES)
def test_the_rules_are_silent_on_runs_of_a_real_model(name: str) -> None:
    curve = read_rows(ROOT / "benchmarks" / f"real-model-{name}.jsonl")
    own = [row for row in curve if row.get("side", "Slipstream") == "Slipstream"]
    right = {"reward/max": 1.0}  # a right answer has 1, another -1
    named = [{**row, **right, "reward/mean": row["task_reward"]} if "task_reward" in row else row for row in own]
    lights = {one.rule.name: one.light for one in judge(History(Rows(named)))}
    assert lights["evaluation"] == "good"
    assert lights["flat"] == ("good" if len(own) > 30 else "unknown")
    assert set(lights.values()) == {"good", "unknown"}


@pytest.mark.parametrize(("names", "light", "fault"), FAULTS)
def test_a_fault_is_found_by_its_rule_alone_with_a_figure(names: str, light: Light, fault: Fault) -> None:
    answers = judge(History(rows(fault), SETTINGS, LIMITS))
    assert (wrong(answers), answers[0].light) == (names.split(), light)
    assert answers[0].figure is not None
    assert any(character.isdigit() for character in answers[0].reason)


def test_a_problem_has_the_step_since_which_it_is_found_without_a_break() -> None:
    values = [1.0] * 10 + [0.0] * 20 + [1.0] * 30
    found = [{"step": step, "actor_clip_ratio": value} for step, value in enumerate(values, 1)]
    (clipped,) = (rule for rule in RULES if rule.name == "clipped")
    (late,) = judge(History(Rows(found)), [clipped])
    (always,) = judge(History(Rows(found[:9])), [clipped])
    (healthy_run,) = judge(History(Rows(found[:30])), [clipped])
    assert late.since is not None and 30 < late.since <= 40
    assert (always.since, healthy_run.since) == (1, None)


def test_actions_name_keys_with_their_present_values_and_leave_out_what_is_set() -> None:
    settings = {"algorithm.dynamic_sampling": False, "group_size": 8}
    (answer, *_) = judge(History(rows({**STALLED, "groups/equal": (0.3, 0.97)}), settings))
    assert answer.actions == ["set algorithm.dynamic_sampling=true (now false)", "raise group_size (now 8)"]
    (answer, *_) = judge(
        History(rows({**STALLED, "groups/equal": (0.3, 0.97)}), {**settings, "algorithm.dynamic_sampling": True})
    )
    assert answer.actions == ["raise group_size (now 8)"]
    for now, lower in ((2, ["lower ppo.ppo_n_minibatches (now 2)"]), (1, [])):
        (answer, *_) = judge(History(rows({"importance_weight": (1.0, 1.3)}), {"ppo.ppo_n_minibatches": now}))
        assert answer.actions == ["lower actor.optimizer.lr", *lower]


def test_every_rule_says_what_is_wrong_what_was_checked_and_which_keys_to_change() -> None:
    keys = set(all_keys(EXPERIMENTS["ppo-math"]))
    for rule in RULES:
        assert rule.problem and rule.healthy and 1 <= len(rule.actions) <= 2, rule.name
        named = {name for action in rule.actions for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)+|\w+_\w+", action)}
        assert named <= keys, rule.name
    for path, least in LEAST.items():
        model: type[Section] = EXPERIMENTS["ppo-math"]
        *sections, name = path.split(".")
        for section in sections:
            model = sub_section(fields_by_key(model)[section][1]) or model
        bounds = [getattr(one, "ge", None) for one in fields_by_key(model)[name][1].metadata]
        assert least in bounds, path


def test_each_rule_has_a_fault() -> None:
    assert {name for names, *_ in FAULTS for name in names.split()} == {rule.name for rule in RULES}


def test_a_run_that_has_begun_is_not_judged_and_a_metric_that_is_missing_is_named() -> None:
    assert {one.light for one in judge(History(Rows(RECORDED[:4])))} == {"unknown"}
    (answer,) = judge(History(rows({})), [replace(RULES[0], needs=("own/metric",))])
    assert (answer.light, "own/metric" in answer.reason) == ("unknown", True)


def test_a_rule_of_a_user_is_asked_and_one_that_raises_does_not_hide_the_others() -> None:
    def check(history: History) -> Found:
        return Found("bad", f"{history.now('reward/max'):.1f} is much", history.now("reward/max"))

    def broken(history: History) -> None:
        raise ZeroDivisionError("no")

    own = Rule(name="own", title="Own", docs="", needs=("reward/max",), check=check)
    first, last = judge(History(rows({})), [replace(own, check=broken), own])
    assert (first.light, first.reason) == ("bad", "1.0 is much")
    assert (last.light, last.reason) == ("unknown", "the rule failed: ZeroDivisionError: no")


def test_the_pages_that_rules_refer_to_have_their_sections() -> None:
    for rule in RULES:
        page, _, section = rule.docs.partition("#")
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
        assert section in slugs, rule.docs


def test_settings_come_from_the_configuration_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dataset: {train_bs_n_seqs: 64}\n")
    history = history_of(tmp_path, rows({"rollout/num_late": (0.0, 6.4)}))
    assert wrong(judge(history)) == ["staleness"]
