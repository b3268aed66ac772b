"""Inputs of the configuration tests: files as users of the tutorial write them, and the smallest model folder."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from core.checks import run_checks
from core.checks.rules import load_config
from model_specs.families import parse_config
from model_specs.tensors import hf_shapes
from model_specs.untrusted import ModelConfigError

PPO_7B_128_GPUS = """\
experiment_name: ppo-7B-distill-gpus-128
trial_name: 512x16
mode: ray
wandb:
  mode: disabled
recover_mode: auto
recover_retries: 10
allocation_mode: 'sglang.d64p1m1+d32p2m1'
n_nodes: 16
n_gpus_per_node: 8
cache_clear_freq: 1
torch_cache_mysophobia: true
exp_ctrl:
  total_train_epochs: 5
  save_freq_epochs: 1
  ckpt_freq_secs: 600
actor:
  type:
    _class: qwen2
  path: '/storage/models/DeepSeek-R1-Distill-Qwen-7B'
  optimizer:
    lr: 2e-05
    lr_scheduler_type: constant
    eps: 1e-5
    warmup_steps_proportion: 0.001
    hysteresis: 2
  sglang:
    mem_fraction_static: 0.8
    triton_attention_num_kv_splits: 16
  vllm:
    swap_space: 64
critic:
  type:
    _class: qwen2
    is_critic: true
  path: '/storage/models/DeepSeek-R1-Distill-Qwen-7B'
  init_critic_from_actor: true
ref:
  type:
    _class: qwen2
  path: '/storage/models/DeepSeek-R1-Distill-Qwen-7B'
actor_train: {mb_spec: {max_tokens_per_mb: 30720}}
critic_train: {mb_spec: {max_tokens_per_mb: 30720}}
actor_gen: {mb_spec: {max_tokens_per_mb: 30720}}
critic_inf: {mb_spec: {max_tokens_per_mb: 30720}}
actor_inf: {mb_spec: {max_tokens_per_mb: 30720}}
ref_inf: {mb_spec: {max_tokens_per_mb: 30720}}
dataset:
  path: '/storage/datasets/boba_106k_0319.jsonl'
  max_prompt_len: 1024
  train_bs_n_seqs: 512
ppo:
  gen:
    max_new_tokens: 27648
    min_new_tokens: 0
    top_p: 1.0
    top_k: 1000000
    temperature: 1.0
    force_no_logits_mask: True
    use_cuda_graph: True
  ppo_n_minibatches: 4
  kl_ctl: 0.0
  discount: 1.0
  value_eps_clip: 0.2
  disable_value: true
  reward_output_scaling: 5
  reward_output_bias: 0.0
  adv_norm: true
  value_norm: true
group_size: 16
group_adv_norm: false
external_configs:
  cluster_config:
    fileroot: "/storage/ray/experiments"
  envs:
    REAL_GPU_MEMORY_KILL_THRESHOLD: "1"
"""

PPO_1_5B_8_GPUS = """\
experiment_name: areal-1.5B-distill-gpus-8
trial_name: 1024x8
mode: ray
recover_mode: auto
recover_retries: 10
allocation_mode: sglang.d4p1m1+d2p2m1
n_nodes: 1
n_gpus_per_node: 8
exp_ctrl: {total_train_epochs: 10, save_freq_epochs: 1, ckpt_freq_secs: 600}
actor:
  type: {_class: qwen2}
  path: /storage/models/DeepSeek-R1-Distill-Qwen-1.5B
  optimizer: {type: adam, lr: 1.0e-05, initial_loss_scale: 262144.0, loss_scale_window: 5.0, hysteresis: 2}
  sglang: {disable_radix_cache: true, context_length: 18432, max_running_requests: 96}
ref:
  type: {_class: qwen2}
  path: /storage/models/DeepSeek-R1-Distill-Qwen-1.5B
actor_train: {mb_spec: {max_tokens_per_mb: 19456}}
dataset: {path: /storage/datasets/prompts.jsonl, max_prompt_len: 2048, train_bs_n_seqs: 1024}
ppo:
  gen: {max_new_tokens: 16384, top_k: 1000000}
  kl_ctl: 0.001
  disable_value: true
  reward_output_scaling: 5.0
group_size: 8
mask_no_eos_with_zero: true
"""

PPO_32B_128_GPUS = """\
experiment_name: ppo-32B-distill-gpus-128
trial_name: 512x32
allocation_mode: 'sglang.d8m8p1+d4p4m4'
n_nodes: 16
n_gpus_per_node: 8
actor: {type: {_class: qwen2}, path: /storage/models/32B}
rew: {type: {_class: qwen2, is_critic: true}, init_critic_from_actor: true, path: /storage/models/32B}
rew_inf: {mb_spec: {max_tokens_per_mb: 30720}}
dataset: {path: /storage/datasets/boba_106k_0319.jsonl, max_prompt_len: 1024, train_bs_n_seqs: 512}
ppo:
  gen: {max_new_tokens: 27648}
  disable_value: true
group_size: 32
"""

ASYNC_PPO_EVERY_KEY = """\
experiment_name: async-ppo
trial_name: my-trial
seed: 1
mode: ray
metric_discovery_port: 17997
wandb: {mode: disabled, entity: null, project: null, name: null, job_type: null, notes: null, tags: null, config: null}
tensorboard: {path: null}
recover_mode: auto
recover_retries: 10
recover_after: 10
exp_ctrl:
  total_train_epochs: 5
  save_freq_steps: null
  ckpt_freq_secs: 600
  eval_freq_epochs: null
  benchmark_steps: null
  benchmark_n_seqs: null
max_head_offpolicyness: 4
n_rollout_workers: null
max_concurrent_rollouts: null
flush_request_timeout: 300
cpus_per_generation_server: 4
allocation_mode: sglang.d4p1m1+d2p2m1
n_nodes: 1
n_gpus_per_node: 8
ray_temp_path: /tmp/ray
cluster: {fileroot: /storage/ray/experiments, n_nodes: 32, n_gpus_per_node: 8}
actor:
  type: {_class: qwen3}
  path: /storage/models/Qwen3-1.7B/
  init_from_scratch: false
  gradient_checkpointing: true
  bf16: false
  backend: megatron
  optimizer:
    {type: adam, lr: 2.0e-05, weight_decay: 0.05, beta1: 0.9, beta2: 0.95, eps: 1.0e-05, min_lr_ratio: 0.0,
     lr_scheduler_type: constant, warmup_steps_proportion: 0.001, initial_loss_scale: 4294967296.0,
     min_loss_scale: 1.0, loss_scale_window: 5.0, hysteresis: 2, gradient_clipping: 1.0}
  megatron: {ddp: {grad_reduce_in_fp32: true, overlap_grad_reduce: true}}
  sglang: {cuda_graph_bs: null, torchao_config: '', attention_backend: flashinfer, context_length: 32768}
ref: {type: {_class: qwen3}, path: /storage/models/Qwen3-1.7B/}
actor_train: {mb_spec: {max_tokens_per_mb: 30720}}
shuffle_dataset: true
dataset: {path: /storage/datasets/boba_106k_0319.jsonl, max_prompt_len: 1024, train_bs_n_seqs: 512}
group_size: 16
mask_too_long: false
group_adv_norm: false
rw_type: sparse
success_rate_ub: 1.0
success_rate_lb: 0.0
ppo:
  gen: {n: 1, max_new_tokens: 27648, min_new_tokens: 0, greedy: false, top_p: 1.0, top_k: 1000000, temperature: 1.0}
  ppo_n_minibatches: 4
  eps_clip: 0.2
  c_clip: null
  early_stop_imp_ratio: 5.0
  actor_sample_reuse: 1
  max_reward_clip: 20.0
  fuse_rew_ref: true
  kl_ctl: 0.0
  use_adaptive_kl_ctl: false
  disable_value: true
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: null
cpus_per_master_worker: 4
mem_per_model_worker: 90000
"""

SFT_32B_128_GPUS = """\
experiment_name: sft-32B-distill-gpus-128
trial_name: 512x32
mode: ray
wandb:
  mode: disabled
recover_mode: auto
recover_retries: 10
allocation_mode: 'd32p1m4'
n_nodes: 16
n_gpus_per_node: 8
exp_ctrl:
  total_train_epochs: 200
  save_freq_epochs: 1
  ckpt_freq_secs: 600
torch_cache_mysophobia: true
dataset:
  train_path: /storage/datasets/boba-sft_200_0319.jsonl
  valid_path: /storage/datasets/boba-sft_200_0319.jsonl
  max_seqlen: 32768
  train_bs_n_seqs: 64
  valid_bs_n_seqs: 64
model:
    type:
      _class: qwen2
    path: /storage/models/DeepSeek-R1-Distill-Qwen-32B
    optimizer:
      type: adam
      lr_scheduler_type: constant
      lr: 1e-5
      warmup_steps_proportion: 0.03
      initial_loss_scale: 262144.0
      loss_scale_window: 10
      hysteresis: 2
      weight_decay: 0.1
      eps: 1e-5
    bf16: true
allocation:
  mb_spec:
    max_tokens_per_mb: 32768
external_configs:
  cluster_config:
    fileroot: "/storage/ray/experiments"
  envs:
    REAL_GPU_MEMORY_KILL_THRESHOLD: "1"
"""

TUTORIAL_FILES = {
    "7B, 128 GPUs": ("ppo-math", PPO_7B_128_GPUS),
    "1.5B, 8 GPUs": ("ppo-math", PPO_1_5B_8_GPUS),
    "32B, 128 GPUs": ("ppo-math", PPO_32B_128_GPUS),
    "async, every key": ("ppo-math", ASYNC_PPO_EVERY_KEY),
    "SFT, 32B, 128 GPUs": ("sft", SFT_32B_128_GPUS),
}

SMALLEST_PPO = """\
experiment_name: small
trial_name: one
actor: {path: MODEL}
dataset: {path: DATA, max_prompt_len: 16, train_bs_n_seqs: 4}
ppo:
  gen: {max_new_tokens: 16}
  kl_ctl: 0.0
  disable_value: true
"""

TINY_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


END = {"id": 63, "content": "<eos>", "special": True}
TOKENIZER = {
    "added_tokens": [{**END, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}],
    "model": {"type": "WordLevel", "vocab": {"1": 0}, "unk_token": "1"},
}


def write_model(folder: Path, **changes: object) -> Path:
    """A folder that looks like a model from outside: config, tokenizer, one weight file of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **changes}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_safetensors(folder / "model.safetensors", tensors_of({**TINY_CONFIG, **changes}))
    return folder


def tensors_of(config: dict[str, Any], *, is_critic: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a config.json by name, none where it is not supported."""
    try:
        return hf_shapes(parse_config(config), is_critic=is_critic)
    except ModelConfigError:
        return {}


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """float32 zeros under these names."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, path.stat().st_size + end)


def write_prompts(path: Path, num_rows: int = 4) -> Path:
    rows = [
        {"prompt": f"{i} + 1 = ", "task": "math", "query_id": str(i), "solutions": [f"\\boxed{{{i + 1}}}"]}
        for i in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(folder: Path, text: str = SMALLEST_PPO) -> Path:
    """A configuration with its model and data set beside it, writing below `folder`."""
    model, data = write_model(folder / "model"), write_prompts(folder / "prompts.jsonl")
    text = text.replace("MODEL", str(model)).replace("DATA", str(data))
    path = folder / "run.yaml"
    path.write_text(text + f"external_configs: {{cluster_config: {{fileroot: {folder / 'out'}}}}}\n")
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    loaded = load_config("ppo-math", path, overrides)
    return [str(p).replace(f"{path.parent}/", "") for p in run_checks(loaded)]


def fake_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *cards: str, apps: str = "") -> None:
    """An nvidia-smi that shows these."""
    script = folder / "bin" / "nvidia-smi"
    script.parent.mkdir()
    shown = "; ".join(f"echo '{card}'" for card in cards)
    script.write_text(f"#!/bin/sh\ncase $1 in *query-gpu*) {shown};; *) echo '{apps}';; esac\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
