"""Keys without effect are reported, case by case."""

from pathlib import Path
from typing import Any

import pytest

from core.checks.rules import config_warnings, load_config, unused_keys
from core.config.experiments import ExperimentConfig, PPOMATHConfig
from core.experiments import workers
from core.placement import resolve_allocation, transport_of
from helpers.config_inputs import SMALLEST_PPO, write_model, write_run

SMALLEST_SFT = """\
experiment_name: small
trial_name: one
model: {path: MODEL}
dataset: {train_path: DATA, train_bs_n_seqs: 4}
"""


def load(folder: Path, overrides: str) -> PPOMATHConfig:
    path = write_run(folder, SMALLEST_PPO)
    config = load_config("ppo-math", path, overrides.format(data=folder / "prompts.jsonl").split()).config
    assert isinstance(config, PPOMATHConfig)
    return config


def reported(config: ExperimentConfig) -> dict[str, str]:
    return dict(unused_keys(config))


@pytest.mark.parametrize(
    ("overrides", "keys", "reason", "otherwise"),
    [
        (
            "recover_mode=disabled exp_ctrl.ckpt_freq_steps=1 recover_keep=9",
            {"exp_ctrl.ckpt_freq_steps", "recover_keep"}, "recover_mode=disabled", "recover_mode=auto",
        ),
        ("recover_mode=resume recover_retries=5", {"recover_retries"}, "recover_mode=resume", "recover_mode=auto"),
        (
            "exp_ctrl.benchmark_steps=3 exp_ctrl.save_freq_steps=1", {"exp_ctrl.save_freq_steps"}, "benchmarks save",
            "exp_ctrl.benchmark_steps=null",
        ),
        ("actor.sglang.x=1 generator.python=/nope", {"actor.sglang", "generator.python"}, "no servers", None),
        ("push.verify=always", {"push.verify"}, "embedded generators are no servers", None),
        ("push.changes=always", {"push.changes"}, "push.type=local", None),
        (
            "synchronizer.method=nccl synchronizer.folder=/w", {"synchronizer.method", "synchronizer.folder"},
            "mode=ray", "mode=serve serve.follow=true",
        ),
        (
            "mode=serve synchronizer.method=nccl", {"synchronizer.method"}, "mode=serve, serve.follow=false",
            "serve.follow=true",
        ),
        ("mode=serve serve.follow=true serve.model=/m", {"serve.model"}, "serve.follow=true", "serve.follow=false"),
        (
            "mode=explore experience.store=file experience.path=/e synchronizer.method=nccl",
            {"synchronizer.method"}, "experience.store=file", "experience.store=sqlite",
        ),
        (
            "generator.mock_seconds_per_token=1", {"generator.mock_seconds_per_token"}, "own speed",
            "allocation_mode=mock.d1m1p1+d1m1p1",
        ),
        ("ppo.kl_ctl=0 ref.path=/none", {"ref"}, "ppo.kl_ctl=0", "ppo.kl_ctl=0.1"),
        ("ppo.disable_value=true critic.path=/none", {"critic"}, "no critic", "ppo.disable_value=false"),
        ("actor.moe_aux_loss_coeff=0.1", {"actor.moe_aux_loss_coeff"}, "of type qwen2, without experts", None),
        ("evaluation.temperature=1", {"evaluation"}, "evaluation.path=null", "evaluation.path=/x.jsonl"),
        (
            "staleness.max_staleness=0 staleness.over_age=mask", {"staleness.over_age"}, "staleness.max_staleness=0",
            "staleness.max_staleness=1",
        ),
        (
            "workflow.on_error=fail workflow.max_error_share=0.5", {"workflow.max_error_share"},
            "workflow.on_error=fail", "workflow.on_error=skip",
        ),
        (
            "evaluation.path={data} exp_ctrl.eval_at_start=false evaluation.temperature=1",
            {"evaluation"},
            "exp_ctrl.eval_at_start=false, and exp_ctrl.eval_freq_*=null: no step is evaluated",
            "exp_ctrl.eval_freq_steps=5",
        ),
        (
            "evaluation.path={data} exp_ctrl.eval_freq_steps=5 exp_ctrl.benchmark_steps=3",
            {"exp_ctrl.eval_freq_steps"}, "benchmarks do not evaluate after steps",
            "exp_ctrl.benchmark_steps=null",
        ),
        (
            "evaluation.path={data} exp_ctrl.eval_at_start=false exp_ctrl.eval_freq_steps=5 exp_ctrl.benchmark_steps=3",
            {"evaluation", "exp_ctrl.eval_freq_steps"}, "benchmarks do not evaluate",
            "exp_ctrl.benchmark_steps=null",
        ),
        (
            "experience.train_batch_size=8 group_size=1", {"dataset.train_bs_n_seqs"},
            "experience.train_batch_size=8, mode=ray", "experience.train_batch_size=null",
        ),
        ("wandb.group=g", {"wandb.group"}, "wandb.mode=disabled", "wandb.mode=offline"),
        ("samples.share=0 samples.keep_files=2", {"samples.keep_files"}, "samples.share=0", "samples.share=1"),
        (
            "actor.optimizer.min_lr_ratio=0.5", {"actor.optimizer.min_lr_ratio"}, "constant",
            "actor.optimizer.lr_scheduler_type=cosine",
        ),
        (
            "actor.gradient_checkpointing_limit_gib=80", {"actor.gradient_checkpointing_limit_gib"}, "ing=null",
            "actor.gradient_checkpointing=auto",
        ),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_reported_with_the_reason(tmp_path, overrides, keys, reason, otherwise) -> None:
    found = reported(load(tmp_path, overrides))
    assert found.keys() == keys and all(reason in why for why in found.values())
    if otherwise is not None:
        assert not keys & reported(load(tmp_path, f"{overrides} {otherwise}")).keys()


@pytest.mark.parametrize(
    ("overrides", "chat_template", "found"),
    [
        ("prompt.system=s prompt.instruction=i prompt.chat_options.a=1", False, {
            "prompt.system": "the model has no chat template", "prompt.instruction": "the model has no chat template",
            "prompt.chat_options": "the model has no chat template",
        }),
        ("prompt.system=s prompt.instruction=i prompt.chat_options.a=1", True, {}),
        ("prompt.system=s prompt.instruction=i prompt.chat_template=/x.jinja", False, {}),
        ("prompt.template=Q{prompt} prompt.system=s prompt.instruction=i", False, {
            "prompt.system": "the model has no chat template", "prompt.instruction": "prompt.template is set",
        }),
        ("prompt.template=Q{prompt} prompt.system=s prompt.instruction=i", True,
         {"prompt.instruction": "prompt.template is set"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("experiment", ["ppo-math", "sft", "dpo"])
def test_the_keys_of_a_prompt_that_have_no_effect_whatever_the_rows_are(
    tmp_path: Path, experiment: str, overrides: str, chat_template: bool, found: dict[str, str]
) -> None:
    path = write_run(tmp_path, SMALLEST_PPO if experiment == "ppo-math" else SMALLEST_SFT)
    if chat_template:
        (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert reported(load_config(experiment, path, overrides.split()).config) == found


V3 = {
    "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "num_key_value_heads": 4, "n_shared_experts": 1, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("model", "given", "kept"),
    [
        (V3 | {"first_k_dense_replace": 1}, "linear", "latent attention and the first products of its experts, which"),
        (V3 | {"first_k_dense_replace": 1}, "selective", None),
        (V3 | {"first_k_dense_replace": 1}, "auto", None),
        (V3 | {"first_k_dense_replace": 1}, "true", None),
        (MOE, "linear", "which keeps the first products of its experts, which are not stacked; write true or auto"),
    ],
)
def test_activations_that_linear_keeps_are_named(tmp_path, model, given, kept) -> None:
    path = write_run(tmp_path, SMALLEST_SFT)
    write_model(tmp_path / "model", **model)
    config = load_config("sft", path, [f"model.gradient_checkpointing={given}"]).config
    warnings = [text for text in config_warnings(config) if "gradient_checkpointing" in text]
    assert not reported(config)
    assert len(warnings) == (kept is not None) and all(str(kept) in text for text in warnings)


def test_host_memory_is_for_activations_that_were_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    key = "actor.gradient_checkpointing_host_gib"
    words = f"actor.gradient_checkpointing=auto {key}=0"
    assert reported(load(tmp_path, words)) == {key: "the trainer computes in host memory"}
    assert not reported(load(tmp_path, f"{words} allocation_mode=sglang.d1m1p1+d1m1p1"))
    linear = load(tmp_path, f"{words} allocation_mode=sglang.d1m1p1+d1m1p1 actor.gradient_checkpointing=linear")
    assert reported(linear) == {key: "actor.gradient_checkpointing=linear"}


def test_generators_on_the_trainers_gpus_abort_whatever_the_key_says(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    config = load(tmp_path, "allocation_mode=sglang.d2m1p1 ppo.ppo_n_minibatches=1 generator.interrupt=in_place")
    assert reported(config).keys() == {"generator.interrupt"}
    assert "aborted and continued (interrupt=abort)" in reported(config)["generator.interrupt"]
    assert not reported(load(tmp_path, "allocation_mode=sglang.d1m1p1+d1m1p1 generator.interrupt=in_place"))


def test_servers_on_the_trainers_gpus_get_all_weights_whatever_the_key_says(tmp_path, monkeypatch) -> None:
    """They release theirs at every step, so there is nothing that changes could be applied to."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    through_files = "push.type=disk push.changes=always ppo.ppo_n_minibatches=1"
    colocated = load(tmp_path, f"allocation_mode=sglang.d2m1p1 {through_files}")
    assert "all are sent" in reported(colocated)["push.changes"]
    apart = load(tmp_path, f"allocation_mode=sglang.d1m1p1+d1m1p1 {through_files}")
    assert "push.changes" not in reported(apart)
    for config, changes in ((colocated, "never"), (apart, "always")):
        allocation = resolve_allocation(config)
        sides: Any = (None, None, None)
        transport = transport_of(config, allocation)
        push = workers.make_push(config, allocation, *sides, transport=transport, folder=tmp_path)
        assert push._plan.changes == changes


def test_ipo_smooths_no_labels(tmp_path: Path) -> None:
    path = write_run(tmp_path, SMALLEST_SFT)
    config = load_config("dpo", path, ["dpo.label_smoothing=0.1"]).config
    assert not reported(config)
    config = load_config("dpo", path, ["dpo.label_smoothing=0.1", "dpo.loss=ipo"]).config
    assert reported(config) == {"dpo.label_smoothing": "dpo.loss=ipo"}


def test_a_model_without_a_tokenizer_may_have_a_chat_template(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    assert reported(load_config("ppo-math", path, ["prompt.system=s"]).config) == {}
