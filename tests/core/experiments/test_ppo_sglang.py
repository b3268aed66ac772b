"""Whole runs with real SGLang servers, weights pushed into them by every transport. On the CPU unless marked gpu."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import came_back, metrics_of, ppo, server_of
from helpers.sglang_environment import PREFIX, TWO_RANKS, write_interpreter
from rollout.inference.gpus import query_gpus

WHY_NOT = "no SGLang for the CPU here: set SLIPSTREAM_SGLANG_ENV to the prefix of such an environment"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if PREFIX is None:
        pytest.skip(WHY_NOT)
    return write_interpreter(tmp_path_factory.mktemp("bin") / "python")


@pytest.mark.timeout(600)  # a server of two ranks takes two minutes to start beside other work on two cores
@pytest.mark.parametrize(
    ("allocation", "num_slots", "interrupt", "push"),
    [
        ("sglang.d1m1p1+d1m1p1", 2, "in_place", {"verify": "always"}),
        ("sglang.d1m1p1", 1, "retract", {"verify": "always"}),
        ("sglang.d1m1p1+d1m2p1", 3, "abort", {"type": "disk"}),
        ("sglang.d1m2p1+d1m1p1", 3, "retract", {"verify": "always"}),
        ("sglang.d1m2p1", 2, "in_place", {"verify": "always"}),
    ],
    ids=["broadcast", "shared", "disk", "broadcast to two ranks", "shared by two ranks"],
)
def test_a_run_trains_on_what_servers_sample(
    assets: Any,
    run_command: Any,
    interpreter: Path,
    allocation: str,
    num_slots: int,
    interrupt: str,
    push: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TWO_RANKS.items() if "m2" in allocation.partition("+")[0] else ():
        monkeypatch.setenv(name, value)
    flags = {"device": "cpu", "max_total_tokens": 8192, "sleep_on_idle": True}
    command = run_command(
        "ppo-math",
        ppo(
            assets,
            allocation_mode=allocation,
            n_gpus_per_node=num_slots,
            actor={"path": str(assets.model), "optimizer": {"lr": 1e-3}, "sglang": flags},
            generator={"interrupt": interrupt, "sglang_python": str(interpreter), "max_running": 32},
            exp_ctrl={"total_train_steps": 4},
            push=push,
        ),
    )
    command.wait_for("global step 1", timeout=400)
    assert "actor_gen: sglang on cpu (generator.device=cpu)" in command.output()
    command.remember_family()
    assert command.finish() == 0, command.output()[-4000:]
    assert command.survivors(timeout=20) == []
    rows = [m for m in metrics_of(command) if "task_reward" in m]
    assert [m["n_seqs"] for m in rows] == [32.0] * 4
    assert abs(rows[0]["behave_approx_kl"]) < 1e-4, "servers and trainer must agree on the first batch"
    # Later ones are sampled by the weights that were pushed: at most as many updates apart as they are old.
    assert all(abs(m["behave_approx_kl"]) < 0.5 for m in rows)
    assert all(m["push/gigabytes"] > 0 for m in rows)


OTHER_EXPERTS = """
from dataclasses import replace
import numpy as np
from rollout.workflows import SingleTurnMathWorkflow

class OtherExperts(SingleTurnMathWorkflow):
    async def run(self, prompt, generator):
        group = await super().run(prompt, generator)
        e = [t.routed_experts for t in group]
        return [replace(t, routed_experts=np.where(x < 0, x, (x + 2) % 8)) for t, x in zip(group, e)]
"""


@pytest.mark.timeout(900)
def test_training_goes_through_the_experts_that_the_servers_tell(
    assets: Any, run_command: Any, interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other experts put into the trajectories, trainer and servers disagree."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    model = assets.with_model(config, tmp_path / "model")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "other_experts.py").write_text(OTHER_EXPERTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "plugins"), os.environ.get("PYTHONPATH", "")]))
    flags = {"device": "cpu", "max_total_tokens": 8192, "sleep_on_idle": True}
    differences = []
    for workflow in ("math", "other_experts:OtherExperts"):
        command = run_command(
            "ppo-math",
            ppo(
                assets,
                allocation_mode="sglang.d1m1p1+d1m1p1",
                actor={"path": str(model), "moe_routing_replay": True, "sglang": flags, "optimizer": {"lr": 1e-3}},
                generator={"sglang_python": str(interpreter), "max_running": 32},
                workflow={"type": workflow},
                push={"verify": "always"},
                ppo={"ppo_n_minibatches": 2, "kl_ctl": 0.1},
                exp_ctrl={"total_train_steps": 2},
            ),
        )
        assert command.finish(timeout=400) == 0, command.output()[-4000:]
        first, _ = [m for m in metrics_of(command) if "task_reward" in m][-2:]  # of this run: the second one appends
        differences.append(abs(first["behave_approx_kl"]))
    replayed, tampered = differences
    assert replayed < 1e-4 and tampered > 0.01, differences


@pytest.mark.timeout(600)
@pytest.mark.parametrize("push", ["nccl", "disk"])
def test_a_killed_server_comes_back_alone_and_no_prompt_is_lost(assets, run_command, interpreter, push) -> None:
    flags = {"device": "cpu", "max_total_tokens": 8192, "sleep_on_idle": True}
    command = run_command(
        "ppo-math",
        ppo(
            assets,
            allocation_mode="sglang.d2m1p1+d1m1p1",
            n_gpus_per_node=3,
            recover_mode="auto",
            actor={"path": str(assets.model), "optimizer": {"lr": 1e-3}, "sglang": flags},
            generator={"sglang_python": str(interpreter), "max_running": 32, "health_interval_seconds": 1.0},
            exp_ctrl={"total_train_epochs": 1000},
            push={"type": push, "verify": "always"},
        ),
    )
    command.wait_for("global step 3)", timeout=240)
    server_of(command, "generator-1").kill()
    came_back(command, 1, timeout=240)
    command.remember_family()
    command.process.send_signal(signal.SIGTERM)
    assert command.finish() == 130
    assert command.survivors(timeout=20) == []
    assert "Attempt 1 failed" not in command.output()
    rows = [m for m in metrics_of(command) if "task_reward" in m]
    assert [m["step"] for m in rows] == list(range(1, len(rows) + 1))
    assert all(m["staleness/max"] <= 2 and m["n_seqs"] == 32 and m["rollout/num_failures"] == 0 for m in rows)
    assert {m["router/num_generators"] for m in rows} >= {1.0, 2.0}


@pytest.mark.nightly
def test_a_server_that_dies_at_start_ends_the_run_with_its_last_words(assets, run_command, tmp_path) -> None:
    broken, enough = tmp_path / "python", tmp_path / "enough"
    broken.write_text(
        f"#!/bin/sh\nfor i in $(seq 1200); do [ -e {enough} ] && break; sleep 0.1; done\n"
        "echo 'no such kernel on this machine'\nexit 3\n"
    )
    broken.chmod(0o755)
    actor = {"path": str(assets.model), "sglang": {"device": "cpu"}}
    generator = {"sglang_python": str(broken)}
    command = run_command(
        "ppo-math", ppo(assets, allocation_mode="sglang.d1m1p1+d1m1p1", actor=actor, generator=generator)
    )
    command.wait_for("initialisation: waiting for generator-0, ")
    enough.touch()
    assert command.finish() == 1
    last = command.output()[-1500:]
    assert "generator-0: the SGLang server exited at start (exit code 3)" in last
    assert "no such kernel on this machine" in last and "Traceback" not in last


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("allocation", "num_gpus"),
    [
        ("d1m1p1", 1),
        ("d1m2p1", 2),
        ("sglang.d1m1p1+d1m1p1", 2),
        ("sglang.d2m1p1+d1m2p1", 4),
        ("sglang.d1m2p1+d2m1p1", 4),
    ],
)
def test_a_run_on_gpus_trains_and_recovers(assets, run_command, wide_heads, allocation, num_gpus) -> None:
    _trains_and_recovers(assets, run_command, allocation, num_gpus, {"path": str(wide_heads)})


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_glm4_model_trains_on_a_gpu_and_recovers(assets: Any, run_command: Any, tmp_path: Path) -> None:
    from transformers import Glm4Config

    config = Glm4Config(
        vocab_size=16, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = assets.with_model(config, tmp_path / "glm4")
    _trains_and_recovers(assets, run_command, "d1m1p1", 1, {"path": str(model)})


@pytest.fixture(scope="module")
def experts(assets: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `assets` with experts, of sizes that GPU kernels have."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=128, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=False,
        initializer_range=0.1,  # wrong experts: log-probabilities 1 nat away on average
    )  # fmt: skip
    return assets.with_model(config, tmp_path_factory.mktemp("experts") / "model")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("allocation", "num_gpus", "replay"),
    [("d1m1p1", 1, False), ("sglang.d1m1p1+d1m1p1", 2, True), ("sglang.d1m2p1+(attn:d2m1p1|ffn:d1m1p1e2)", 4, True)],
)
def test_experts_on_gpus_train_and_recover(assets, run_command, experts, allocation, num_gpus, replay) -> None:
    # FlashInfer compiles this kernel for minutes at the first start on a host (docs/models.md).
    flags = {"enforce_disable_flashinfer_allreduce_fusion": True}
    actor = {"path": str(experts), "moe_routing_replay": replay, "sglang": flags}
    _trains_and_recovers(assets, run_command, allocation, num_gpus, actor)


def _trains_and_recovers(assets: Any, run_command: Any, allocation: str, num_gpus: int, actor: dict[str, Any]) -> None:
    if len(query_gpus()) < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    config = ppo(
        assets,
        allocation_mode=allocation,
        n_gpus_per_node=num_gpus,
        actor={**actor, "optimizer": {"lr": 1e-4}},
        generator={"max_running": 32},
        exp_ctrl={"total_train_steps": 2, "ckpt_freq_steps": 2},
        push={"verify": "always"},
        recover_mode="auto",
    )
    first = run_command("ppo-math", config)
    assert first.finish(280) == 0, first.output()[-4000:]
    second = run_command("ppo-math", {**config, "exp_ctrl": {"total_train_steps": 4}})
    assert second.finish(280) == 0, second.output()[-4000:]
    rows = [m for m in metrics_of(second) if "task_reward" in m]
    assert [m["step"] for m in rows] == [1, 2, 3, 4]
    assert all(abs(m["behave_approx_kl"]) < 0.05 for m in rows[::2]), "each attempt's first batch is on policy"
