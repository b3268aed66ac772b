"""Formulas of docs/algorithms.md that have no golden number, and errors of `python -m tools.loss`."""

import gzip
import io
import json
import math
from typing import Any

import pytest
import torch

from core.algorithms.build import build_algorithm
from core.config.experiments import PPOMATHConfig
from core.train.step_batch import SavedSteps
from helpers.batches import batch_of, by_answer
from helpers.golden_cases import one_token
from tools.loss.__main__ import main
from tools.loss.compute import compute


def test_cispo_clips_ratios_at_one_plus_the_upper_and_one_minus_the_lower_bound() -> None:
    assert one_token("cispo", 1, 3.0, {"clip_high": 1.5})[1] == pytest.approx(-2.5)
    assert one_token("cispo", 1, 0.2, {"clip_low": 0.4})[1] == pytest.approx(-0.6)


def test_opmd_divides_by_one_plus_tau_and_kimi_adds_the_square_of_each_sequence_to_the_sum() -> None:
    assert one_token("opmd", 1, 1.4, {"opmd_tau": 3.0})[1] == pytest.approx(-0.25)
    rows = [{"logprobs": [-1.0, -2.0], "old_logprobs": [-1.3, -2.1]}, {"logprobs": [-3.0], "old_logprobs": [-2.5]}]
    sequences = [{**row, "advantage": a, "group": 0} for row, a in zip(rows, (1.0, -2.0), strict=True)]
    out = compute({"algorithm": "opmd_kimi", "settings": {"opmd_tau": 2.0}, "sequences": sequences})
    assert out["loss"] == pytest.approx((3.0 - 6.0 + 1.0 * (0.4**2 + 0.5**2)) / 3 / 2)
    small = compute({"algorithm": "opmd_kimi", "settings": {"opmd_tau": 0.5}, "sequences": sequences})
    assert small["loss"] == pytest.approx((3.0 - 6.0 + 0.25 * (0.4**2 + 0.5**2)) / 3)


def group(*rewards: float, **fields: Any) -> list[dict[str, Any]]:
    """One group of answers of one token each."""
    return [{"logprobs": [-1.0], "reward": reward, "group": "g", **fields} for reward in rewards]


def test_kl_in_reward_and_loss_at_once_have_coefficients_of_their_own() -> None:
    settings = {"ppo.kl_ctl": 0.25, "kl_in": "both", "kl_loss_coeff": 2.0, "correction": "none"}
    out = compute({"algorithm": "reinforce_pp", "settings": {**settings, "ppo.adv_norm": False},
                   "sequences": group(1, 1, ref_logprobs=[-2.0])})  # fmt: skip
    assert out["advantages"] == pytest.approx([0.75, 0.75])
    assert out["loss"] == pytest.approx(-0.75 + 2.0 * 0.36788, abs=1e-4)


# ---- corrections


def corrected(settings: dict[str, Any], sequences: list[dict[str, Any]], **case: Any) -> list[list[float]]:
    """The weights of tokens under these settings."""
    return compute({"algorithm": "rloo", "settings": settings, "sequences": sequences, **case})["weights"]


def stale(*weights: list[float], advantage: float = 1.0) -> list[dict[str, Any]]:
    """Sequences whose tokens have these ratios of proximal to behaviour policy."""
    return [
        {
            "logprobs": [-1.0] * len(row), "old_logprobs": [-1.0] * len(row), "group": 0, "advantage": advantage,
            "rollout_logprobs": [-1.0 - math.log(w) for w in row],
        }
        for row in weights
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"correction": "none"}, [[1, 1], [1, 1]]),
        ({"correction": "bypass"}, [[1, 1], [1, 1]]),
        ({"correction": "decoupled"}, [[0.4, 3.0], [1.1, 0]]),
        ({"correction": "decoupled", "behave_imp_weight_cap": None}, [[0.4, 3.0], [1.1, 6.0]]),
        ({"correction": "tis"}, [[0.4, 2.0], [1.1, 2.0]]),
        ({"correction": "tis", "correction_min": 0.5, "correction_max": 4}, [[0.5, 3.0], [1.1, 4.0]]),
        ({"correction": "tis", "correction_level": "sequence"}, [[1.2, 1.2], [2.0, 2.0]]),
        ({"correction": "mis", "correction_level": "token"}, [[0, 0], [1.1, 0]]),
        ({"correction": "mis"}, [[1.2, 1.2], [0, 0]]),
        ({"correction": "mis", "correction_level": "geometric", "correction_min": 0.9, "correction_max": 1.2},
         [[0.4, 3.0], [0, 0]]),
        ({"correction": "icepop"}, [[0, 3.0], [1.1, 0]]),
        ({"correction": "tis", "correction_veto": 0.5}, [[0, 0], [1.1, 2.0]]),
        ({"correction": "none", "m2po_threshold": 0.5}, [[1, 0], [1, 0]]),  # squares: 0.84, 1.21, 0.01, 3.21
        ({"correction": "none", "m2po_threshold": 0.7}, [[1, 1], [1, 0]]),
    ],
)  # fmt: skip
def test_corrections_weigh_tokens_by_their_formula(settings: dict[str, Any], expected: list[list[float]]) -> None:
    found = corrected(settings, stale([0.4, 3.0], [1.1, 6.0]))
    assert [w for row in found for w in row] == pytest.approx([w for row in expected for w in row])


def test_opsm_drops_sequences_with_negative_advantages_that_the_policy_has_left() -> None:
    far, near = [0.5, 0.9], [1.1, 0.8]  # means of -log w: 0.399 and 0.064
    assert corrected({"correction": "none", "opsm_threshold": 0.1}, stale(far, near, advantage=-1.0)) == [
        [0, 0],
        [1, 1],
    ]
    assert corrected({"correction": "none", "opsm_threshold": 0.1}, stale(far, near)) == [[1, 1], [1, 1]]


def test_the_loglinear_proximal_policy_is_as_near_to_the_current_one_as_the_age_of_the_token() -> None:
    rows = [{"logprobs": [-1.0] * 3, "rollout_logprobs": [-1.6] * 3, "versions": [5, 4, 2], "group": 0}] * 2
    settings = {"correction": "decoupled", "proximal": "loglinear"}
    found = corrected(settings, rows, version=5)
    assert found[0] == pytest.approx([1.0, math.exp(0.3), math.exp(0.45)])  # alpha: 0, 1/2, 3/4
    settings = {"correction": "decoupled", "proximal": "reused", "ppo.ppo_n_minibatches": 1, "ppo.kl_ctl": 0.1}
    with_old = [{**row, "old_logprobs": [-1.2] * 3, "ref_logprobs": [-1.0] * 3} for row in rows]
    reused = corrected(settings, with_old)  # the KL penalty needs the recomputed policy, the ratio does not
    assert reused[0] == pytest.approx([math.exp(0.6)] * 3)


# ---- rewards, aggregation, adaptive KL


def test_dapo_penalises_answers_in_the_last_fifth_of_the_limit() -> None:
    sequences = [{"logprobs": [-1.0] * n, "reward": 1.0, "group": 0} for n in (8, 9, 10)]
    settings = {"ppo.gen.max_new_tokens": 10, "advantage_std": "none"}
    out = compute({"algorithm": "dapo", "settings": settings, "sequences": sequences})
    assert out["advantages"] == pytest.approx([0.5, 0.0, -0.5])
    assert out["metrics"]["overlong_penalty"] == pytest.approx(-0.5) and out["metrics"]["task_reward"] == 1.0


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 3, 1 / 3]),
        ("sequence_mean", [1 / 4, 1 / 2]),
        ("sequence_sum", [1 / 2, 1 / 2]),
        ("constant", [1 / 20, 1 / 20]),
    ],
)
def test_aggregations_divide_by_global_counts_without_sequences_that_are_not_trained(aggregation, weights) -> None:
    sequences = [
        {"logprobs": [-1.0, -1.0], "reward": 1, "group": 0},
        {"logprobs": [-1.0], "reward": 0, "group": 0},
        {"logprobs": [-1.0], "mask": [0], "reward": 0, "group": 0},
    ]
    settings = {"aggregation": aggregation, "ppo.gen.max_new_tokens": 10, "correction": "none"}
    out = compute({"algorithm": "rloo", "settings": settings, "sequences": sequences})
    rows = out["token_weights"]
    assert [rows[0][0], rows[1][0]] == pytest.approx(weights) and rows[2] == [0.0]
    assert [out["grads"][0][0], out["grads"][1][0]] == pytest.approx(
        [-a * w for a, w in zip(out["advantages"], weights, strict=False)]
    )


# ---- the command


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": []}, "sequences: must be a list of at least one sequence"),
        ({"sequences": [{"logprobs": [-1], "old": [-1]}]}, "sequences[0].old: unknown key; use one of logprobs, "),
        ({"sequences": [{"logprobs": [-1, -2], "mask": [1]}]}, "sequences[0].mask: has 1 values, logprobs has 2; "),
        ({"settings": {"clip_lo": 1}}, "settings: algorithm.clip_lo: Extra inputs are not permitted"),
        ({"settings": {"correction": "tis", "correction_level": "geometric"}}, "algorithm.correction_level: geome"),
        ({"settings": {"ppo.kl_ctl": 0.1}}, "sequences[0].ref_logprobs: required by the algorithm with these settings"),
        ({"settings": {"entropy_coeff": 0.1}}, "sequences[0].entropy: required by the algorithm with these settings"),
        ({"algorithm": "grpoo"}, "algorithm.name: unknown algorithm 'grpoo'; use one of ppo, "),
        ({"sequences": [{"logprobs": [-1], "reward": 1}]}, "group_size: algorithm.name=rloo compares the answers to "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_case_is_one_clear_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        compute({"algorithm": "rloo", "sequences": group(1, 0), **change})
    assert str(caught.value).startswith(message)


def test_the_command_reads_a_file_or_standard_input(tmp_path, capsys, monkeypatch) -> None:
    text = json.dumps({"algorithm": "rloo", "sequences": group(1, 0)})
    (tmp_path / "case.json").write_text(text)
    assert main([str(tmp_path / "case.json")]) == 0
    from_file = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == from_file
    assert from_file["advantages"] == [1.0, -1.0] and from_file["grads"] == [[-0.5], [0.5]]
    (tmp_path / "case.json").write_text("[1]")
    assert main([str(tmp_path / "case.json")]) == 2
    assert "must be a JSON object" in capsys.readouterr().err


def test_a_step_that_a_run_saved_has_the_advantages_of_that_run(tmp_path, capsys) -> None:
    config = PPOMATHConfig.model_validate({
        "experiment_name": "e", "trial_name": "t", "dataset": {"path": "p"}, "group_size": 2,
        "algorithm": {"name": "grpo", "kl_target": 0.1, "entropy_coeff": 0.1}, "ppo": {"kl_ctl": 0.5},
    })  # fmt: skip
    chosen = build_algorithm(config)
    folder = tmp_path / "logs" / "batches"
    saved = SavedSteps(folder=folder, every=2, name="grpo", settings=config.algorithm_case[1])
    batch, fields = batch_of([1.0, 0.0], [0.5, 0.25], lens=[2, 3, 1, 2])
    noise = torch.sin(torch.arange(12.0))
    fields |= {"old_logprobs": fields["rollout_logprobs"] + 0.1 * noise, "ages": torch.zeros(12, dtype=torch.int64)}
    fields["ref_logprobs"] = fields["rollout_logprobs"] - 0.3 * noise.square()
    state = chosen.state_dict()
    saved.save(5, state, batch, fields, chosen.advantages(batch, fields)[0]["advantages"])
    state = chosen.state_dict()
    expected = chosen.advantages(batch, fields)[0]["advantages"]  # with the coefficient that the first step adapted
    saved.save(6, state, batch, {**fields, "entropy": torch.ones(12)}, expected)
    (file,) = tmp_path.rglob("step-*")
    assert file.name == "step-6.json.gz"
    tokens = json.loads(gzip.decompress(file.read_bytes()))["tokens"]
    assert [(one["episode"], one["index"]) for one in tokens] == [(e, i) for e in batch.episodes for i in range(2)]
    assert [a for one in tokens for a in one["advantages"]] == pytest.approx(expected.tolist())
    assert main(["--from-run", str(tmp_path), "--step", "6"]) == 0
    out = json.loads(capsys.readouterr().out)
    rows = [row[1:] if isinstance(row, list) else [row] for row in out["advantages"]]  # without the prompt
    assert [a for row in rows for a in row] == pytest.approx(
        [a for r in by_answer(batch, expected) for a in r], abs=1e-6
    )
    assert main(["--from-run", str(tmp_path), "--step", "5"]) == 2
    assert "0 files of step 5 below this folder, expected 1" in capsys.readouterr().err


# ---- pairs and demonstrations
