"""Keys of AReaL 0.2 and 0.3, whose files load unchanged: our name of each, or why it has no effect.

`translate` rewrites a tree to our keys before it is compared with the schema; no section has these names. Sections of
one kind are written `a/b`. A row with accepted values refuses all others, as they would change the training.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from config_schema.section import Section, fields_by_key, sub_section
from core.config.parsing.problems import Problem
from core.config.parsing.values import describe
from core.config.parsing.yaml_tree import Node, Scalar, Table, find, move, remove, replace

RENAMED: Mapping[str, str] = {
    "cluster.fileroot": "external_configs.cluster_config.fileroot",
    "workflow.prompt_template": "prompt.template",
    "actor_infer": "actor_gen",
    "reference": "ref_inf",
    "critic.device_mapping": "critic_train.device_mapping",
    "critic.layout": "critic_train.layout",
    "mask_no_eos_with_zero": "ppo.mask_no_eos_with_zero",
    "max_head_offpolicyness": "staleness.max_staleness",
    "ppo.use_decoupled_loss": "algorithm.correction",
    "algorithm.decoupled": "algorithm.correction",
    "ppo.behav_imp_weight_cap": "algorithm.behave_imp_weight_cap",
    "actor.sglang.device": "generator.device",
    "actor.sglang.max_running_requests": "generator.max_running",
    "generator.sglang_python": "generator.python",
    # ppo-math, sft and dpo take each other's names of the model and of the data
    "actor": "model",
    "actor_train": "allocation",
    "dataset.path": "dataset.train_path",
    "evaluation.path": "dataset.valid_path",
    "model": "actor",
    "allocation": "actor_train",
    "dataset.train_path": "dataset.path",
    "dataset.valid_path": "evaluation.path",
}
"""Other spellings of our keys, with the same meaning."""
_DECOUPLED = {"true": "decoupled", "false": "bypass"}
"""Values of the two keys that switch one correction on and off."""


class Row(NamedTuple):
    """Keys of one section, separated by blanks, and why they have no effect."""

    section: str
    keys: str
    why: str
    accepted: tuple[str, ...] = ()
    """Values as text; empty: every value is accepted, without effect."""

    @property
    def shown(self) -> list[str]:
        """The keys as documentation writes them."""
        return [f"{self.section}.{name}".lstrip(".") for name in self.keys.split()]

    @property
    def paths(self) -> list[str]:
        """The dotted keys, each section by itself."""
        sections, dot, rest = self.section.partition(".")
        prefixes = [f"{name}{dot}{rest}." if name else "" for name in sections.split("/")]
        return [prefix + name for prefix in prefixes for name in self.keys.split()]


_MODELS = "actor/critic/ref/model"
_ROLES = "actor_train/critic_train/actor_inf/critic_inf/ref_inf/allocation"
_LIMITS = "Ray places the processes without resource limits"
_FACTS = (
    "cluster_type cluster_name config_path node_type_from_node_name gpu_type_from_node_name gpu_type mount "
    "default_mount gpu_image cpu_image gpu_infer_image node_name_prefix"
)

ROWS = (
    Row("", "debug", "assertions are always on"),
    Row("", "metric_discovery_port", "metrics go to the log folder and to monitor.*"),
    Row("", "tensorboard", "TensorBoard files go to the log folder: see monitor.tensorboard"),
    Row("", "swanlab", "see monitor.* and wandb.*"),
    Row("", "recover_after", "a restart begins when all processes of the previous attempt have exited"),
    Row("", "cache_clear_freq", "Ray deletes batches that are no longer referenced"),
    Row("", "torch_cache_mysophobia", "device memory is managed by the engine"),
    Row("", "allocation_use_cache", "there is no allocation search"),
    Row(
        "", "partition schedule_strategy image_name nodelist exclude",
        "there is no SLURM mode; Ray places the processes",
    ),
    Row("", "cpus_per_master_worker mem_per_master_worker cpus_per_model_worker mem_per_model_worker", _LIMITS),
    Row("", "ray_temp_path", "Ray uses its default folder"),
    Row("cluster", "n_nodes n_gpus_per_node", "n_nodes and n_gpus_per_node at the top level are those of the run"),
    Row("cluster", _FACTS, "determined by the Ray cluster"),
    Row("external_configs.cluster_config", f"{_FACTS} n_nodes n_gpus_per_node", "determined by the Ray cluster"),
    Row(
        "external_configs.envs", "REAL_GPU_MEMORY_KILL_THRESHOLD RAY_DEDUP_LOGS",
        "no process of the run reads this variable",
    ),
    Row("", "auto_eval_config", "see evaluation.*"),
    Row("", "auto_eval", "set exp_ctrl.eval_freq_* and evaluation.path", ("false",)),
    Row(
        "", "ignore_worker_error", "a failed worker ends the attempt; recover_mode=auto starts another one", ("false",)
    ),
    Row("exp_ctrl", "benchmark_n_seqs", "use exp_ctrl.benchmark_steps", ("null",)),
    Row("wandb", "job_type notes", "not forwarded to Weights & Biases"),
    Row("wandb", "config", "the whole configuration is uploaded"),
    Row(f"{_MODELS}.type", "size", "the size is read from config.json"),
    Row(
        f"{_MODELS}.optimizer", "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "training runs in bfloat16 or float32, which need no loss scaling",
    ),
    Row(_MODELS, "vllm", "see generator.* and actor.sglang.*"),
    Row(_MODELS, "megatron", "Megatron options are derived from the device and the layout"),
    Row(_MODELS, "parallel", "the layout is part of allocation_mode"),
    Row(_MODELS, "offload",
        "critic and reference on GPUs of the servers leave them while these sample; see optimizer.offload"),
    Row(_MODELS, "zero_stage", "the distributed optimizer is always on"),
    Row(_MODELS, "enable_fp16 fp16", "float16 is not supported; see bf16"),
    Row(_MODELS, "enable_bf16", "the key is bf16"),
    Row(_MODELS, "backend", "Megatron is the training backend", ("megatron",)),
    Row(f"{_ROLES}.mb_spec", "n_mbs", "determined by max_tokens_per_mb"),
    Row("actor_gen", "mb_spec", "generators batch continuously: see generator.max_running"),
    Row(
        f"{_ROLES}/actor_gen", "parallel",
        "the layout is part of allocation_mode, or the key layout next to device_mapping",
    ),
    Row(f"{_ROLES}/actor_gen", "device_mesh", "write device_mapping, or a per-role allocation_mode"),
    Row("dataset", "fill_to_max_length", "batches are packed without padding"),
)  # fmt: skip

PPO_ROWS = (
    Row("", "rew rew_inf", "reward models are not supported; see reward.function"),
    Row("", "use_dense_reward reward_delta", "each completion has one reward"),
    Row("", "n_rollout_workers", "generators and rollout service are Ray actors of the run"),
    Row("", "max_concurrent_rollouts", "see staleness.max_staleness and generator.max_running"),
    Row("", "flush_request_timeout", "see push.timeout_seconds"),
    Row("", "new_tokens_per_chunk", "generation can be interrupted after every token"),
    Row("", "schedule_policy", "the router sends requests to the least loaded generator"),
    Row(
        "",
        "cpus_per_generation_server mem_per_generation_server cpus_per_gserver_manager mem_per_gserver_manager "
        "cpus_per_rollout_worker mem_per_rollout_worker",
        _LIMITS,
    ),
    Row("", "generation_size", "all sampled completions are trained on; set group_size", ("null",)),
    Row("", "mask_too_long", "see ppo.mask_no_eos_with_zero", ("false",)),
    Row("", "check_verifier_status", "failures of the reward are counted in the metrics", ("false",)),
    Row("", "check_xml_format", "use a custom reward.function", ("false",)),
    Row("", "ref_ema_eta", "the reference model is not updated", ("null",)),
    Row("", "rw_type", "each completion has one reward", ("sparse",)),
    Row("", "dataset_filter_threshold", "prompts are not filtered", ("100", "100.0")),
    Row("", "dataset_max_filter_percentage", "prompts are not filtered", ("0", "0.0")),
    Row("", "success_rate_ub", "prompts are not filtered", ("1", "1.0")),
    Row("", "success_rate_lb", "prompts are not filtered", ("0", "0.0")),
    Row("", "no_training", "use exp_ctrl.benchmark_steps", ("false",)),
    Row("ppo", "fuse_rew_ref", "rewards are functions that run during generation"),
    Row("ppo", "value_norm_type value_norm_beta value_norm_eps", "value_norm uses a running mean and variance"),
    Row("ppo", "early_stop_imp_ratio", "algorithm.behave_imp_weight_cap bounds the weights instead"),
    Row("ppo", "max_reward_clip", "rewards are not clipped"),
    Row(
        "ppo", "recompute_logprob",
        "decided by algorithm.correction: bypass (the default with max_staleness=0) takes the generators' "
        "log-probabilities as the old ones, all others those of the trainer",
    ),
    Row("ppo", "c_clip", "see algorithm.dual_clip", ("null",)),
    Row("ppo", "use_adaptive_kl_ctl", "see algorithm.kl_target", ("false",)),
    Row("ppo.gen", "use_cuda_graph force_cudagraph_recapture", "determined by the inference backend"),
    Row("ppo.gen", "force_no_logits_mask", "log-probabilities always refer to the sampled distribution"),
    Row("ppo.gen", "n", "set group_size for the completions per prompt", ("1",)),
    Row("ppo.gen", "greedy", "training requires sampling; evaluation.temperature=0 is greedy", ("false",)),
    Row("actor.sglang", "enable_memory_saver", "allocation_mode decides it", ("false",)),
    Row("actor.sglang", "enable_nan_detection", "SGLang has this argument no longer", ("false",)),
    Row("actor.sglang", "dtype", "generator.dtype decides it", ("auto", "float16")),
)  # fmt: skip
"""Keys that only `ppo-math` has."""


def rows_of(model: type[Section]) -> tuple[Row, ...]:
    """Return the rows about keys of an experiment."""
    return ROWS + (PPO_ROWS if "ppo" in model.model_fields else ())


def renamed_of(model: type[Section]) -> Mapping[str, str]:
    """Return the other spellings of keys that an experiment has."""
    return {old: new for old, new in RENAMED.items() if _has(model, new)}


class Translated(NamedTuple):
    """What translate() found."""

    ignored: list[Problem]
    """Keys that have no effect."""
    problems: list[Problem]
    renamed: dict[str, str]
    """Our key -> the other spelling that was given."""

    def spelled(self, key: str) -> str:
        """Return one of our keys as the user wrote it."""
        for new, old in self.renamed.items():
            if f"{key}.".startswith(f"{new}."):
                return old + key.removeprefix(new)
        return key


def translate(tree: Table, model: type[Section]) -> Translated:
    """Rewrite the tree to our keys."""
    ignored: list[Problem] = []
    renamed = {new: old for old, new in renamed_of(model).items() if find(tree, old) is not None}
    problems = [p for old, new in renamed_of(model).items() if (p := _rename(tree, old, new, ignored))]
    for path, row in _given(tree, model):
        node = remove(tree, path)
        assert node is not None, "it was found"
        if not row.accepted:
            ignored.append(Problem(key=path, message=row.why, where=node.where))
        elif not _is_one_of(node, row.accepted):
            message = f"must be {' or '.join(row.accepted)}, got {describe(node)}: {row.why}"
            problems.append(Problem(key=path, message=message, where=node.where))
    return Translated(ignored, problems, renamed)


def _given(tree: Table, model: type[Section]) -> Iterator[tuple[str, Row]]:
    for row in rows_of(model):
        yield from ((path, row) for path in row.paths if find(tree, path) is not None)


def _rename(tree: Table, old: str, new: str, ignored: list[Problem]) -> Problem | None:
    node = find(tree, old)
    if old.startswith("actor.sglang.") and isinstance(node, Scalar) and node.is_null:
        remove(tree, old)
        ignored.append(Problem(key=old, message=f"null: the default of {new} holds", where=node.where))
        return None
    problem = move(tree, old, new)
    if new == "algorithm.correction" and problem is None and isinstance(node, Scalar):
        replace(tree, new, Scalar(_DECOUPLED.get(node.text.lower(), node.text), node.where, node.quoted))
    return problem


def _is_one_of(node: Node, accepted: tuple[str, ...]) -> bool:
    if not isinstance(node, Scalar):
        return False
    return node.text.lower() in accepted or (node.is_null and "null" in accepted)


def _has(model: type[Section], path: str) -> bool:
    """Return whether an experiment has the section, or the key, at a dotted path."""
    name, _, rest = path.partition(".")
    found = fields_by_key(model).get(name)
    if found is None:
        return False
    below = sub_section(found[1])
    return not rest or (below is not None and _has(below, rest))
