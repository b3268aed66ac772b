"""Files written for the tutorial load unchanged; what has no meaning here is said once, with the reason."""

from pathlib import Path

import pytest

from core.checks.rules import LoadedConfig, config_warnings, load_config
from core.config.parsing.problems import ConfigError
from core.config.reference import difference_line, ignored_lines
from core.placement import resolve_allocation
from helpers.config_inputs import (
    ASYNC_PPO_EVERY_KEY,
    PPO_1_5B_8_GPUS,
    PPO_7B_128_GPUS,
    SFT_32B_128_GPUS,
    TUTORIAL_FILES,
)

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"


def load(tmp_path: Path, text: str, *overrides: str, experiment: str = "ppo-math") -> LoadedConfig:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return load_config(experiment, path, overrides)


@pytest.mark.parametrize("name", TUTORIAL_FILES)
def test_a_tutorial_file_loads_unchanged(tmp_path: Path, name: str) -> None:
    experiment, text = TUTORIAL_FILES[name]
    loaded = load(tmp_path, text, experiment=experiment)
    allocation = resolve_allocation(loaded.config)
    assert allocation.n_nodes * allocation.n_gpus_per_node == loaded.config.n_nodes * loaded.config.n_gpus_per_node


def test_a_top_k_of_all_tokens_is_no_reason_for_a_warning(tmp_path: Path) -> None:
    texts = [text for experiment, text in TUTORIAL_FILES.values() if experiment == "ppo-math"]
    assert any("top_k: 1000000" in text for text in texts)
    for text in texts:
        assert not [w for w in config_warnings(load(tmp_path, text, "ppo.gen.top_p=1").config) if "top_k" in w]
    found = config_warnings(load(tmp_path, texts[0], "ppo.gen.top_p=1", "ppo.gen.top_k=50").config)
    assert len([w for w in found if "top_k" in w]) == 1


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("ppo.disable_value=false ppo.kl_ctl=0.1 critic.sglang.a=1 ref.sglang.a=1", "critic.sglang, ref.sglang"),
        ("ppo.kl_ctl=0.1 ref.optimizer.lr=0.5 ref.optimizer.eps=0.9", "ref.optimizer"),
        ("actor.init_critic_from_actor=true ref.init_critic_from_actor=false", "actor.init_critic_from_actor"),
        ("actor_gen.layout=d64", "actor_gen.layout"),
        ("ppo.kl_ctl=0.1 ref.optimizer.type=empty", ""),
    ],
)
def test_keys_that_nothing_reads_are_named_in_one_warning(tmp_path: Path, overrides: str, keys: str) -> None:
    warnings = list(config_warnings(load(tmp_path, PPO_7B_128_GPUS, *overrides.split()).config))
    named = [line.partition(": not used by this run")[0] for line in warnings]
    assert [n for n in named if not n.startswith(("critic, ", "ref, "))] == [keys] * bool(keys)


def test_the_sections_of_models_that_a_tutorials_run_does_not_have_are_named_as_a_whole(tmp_path: Path) -> None:
    assert list(config_warnings(load(tmp_path, PPO_7B_128_GPUS).config)) == [
        "critic, critic_train, critic_inf: not used by this run (ppo.disable_value=true: it has no critic); "
        "remove them",
        "ref, ref_inf: not used by this run (ppo.kl_ctl=0.0, algorithm.demonstration_weight=0.0: it has no reference "
        "model); remove them",
    ]


def test_what_sft_does_not_read_is_named_too(tmp_path: Path) -> None:
    assert list(config_warnings(load(tmp_path, SFT_32B_128_GPUS, experiment="sft").config)) == []
    (warning,) = config_warnings(load(tmp_path, SFT_32B_128_GPUS, "model.sglang.a=1", experiment="sft").config)
    assert warning == "model.sglang: not used by this run (sft has no servers); remove it"


def test_its_values_arrive(tmp_path: Path) -> None:
    config = load(tmp_path, PPO_7B_128_GPUS).config
    assert config.actor.type.family == "qwen2"
    assert config.actor.optimizer.lr == 2e-5
    assert config.actor.optimizer.eps == 1e-5
    assert config.actor.sglang == {"mem_fraction_static": 0.8, "triton_attention_num_kv_splits": 16}
    assert config.critic.init_critic_from_actor
    assert config.recover_retries == 10
    assert config.max_tokens_per_mb("actor_inf") == 30720
    assert config.ppo.reward_output_scaling == 5.0
    assert not config.uses_critic
    assert not config.uses_reference
    assert config.external_configs.cluster_config.fileroot == "/storage/ray/experiments"
    assert config.external_configs.envs == {}

    config = load(tmp_path, SFT_32B_128_GPUS, experiment="sft").config
    assert config.model.optimizer.warmup_steps_proportion == 0.03
    assert config.model.dtype(on_gpu=False) == "bfloat16"
    assert config.max_tokens_per_mb() == 32768
    assert config.dataset.valid_bs_n_seqs == 64


def test_roles_without_a_limit_take_that_of_the_actor(tmp_path: Path) -> None:
    config = load(tmp_path, PPO_1_5B_8_GPUS).config
    assert config.roles.keys() == {"actor_train", "actor_inf", "ref_inf"}
    assert config.max_tokens_per_mb("ref_inf") == 19456


def test_ignored_keys_are_listed_once_with_their_reason(tmp_path: Path) -> None:
    loaded = load(tmp_path, PPO_7B_128_GPUS)
    assert {p.key for p in loaded.ignored} == {
        "cache_clear_freq",
        "torch_cache_mysophobia",
        "actor.optimizer.hysteresis",
        "actor.vllm",
        "actor_gen.mb_spec",
        "ppo.gen.force_no_logits_mask",
        "ppo.gen.use_cuda_graph",
        "external_configs.envs.REAL_GPU_MEMORY_KILL_THRESHOLD",
    }
    text = ignored_lines(loaded.ignored)
    assert text.startswith("8 keys have no effect here and are ignored:\n")
    words = [line.split(maxsplit=1) for line in text.splitlines()]
    assert ["actor_gen.mb_spec", "generators batch continuously: see generator.max_running"] in words


def test_other_spellings_of_a_key_mean_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, PPO_1_5B_8_GPUS).config
    assert config.ppo.mask_no_eos_with_zero
    assert config.generator.max_running == 96
    assert config.actor.sglang == {"disable_radix_cache": True, "context_length": 18432}
    config = load(tmp_path, ASYNC_PPO_EVERY_KEY).config
    assert config.staleness.max_staleness == 4
    assert config.algorithm.correction == "decoupled"
    assert config.algorithm.behave_imp_weight_cap is None
    assert config.external_configs.cluster_config.fileroot == "/storage/ray/experiments"


def test_the_sections_of_a_device_mapping_configuration_are_the_roles_here(tmp_path: Path) -> None:
    text = """\
actor_train: {device_mapping: "list(range(0,4))"}
actor_infer: {device_mapping: "list(range(4,8))", layout: sglang.d2m2p1}
reference: {device_mapping: "list(range(0,4))", layout: d2m2p1}
critic: {device_mapping: "list(range(0,4))", layout: d1m4p1, init_critic_from_actor: true}
"""
    head = "experiment_name: e\ntrial_name: t\nn_gpus_per_node: 8\nactor: {path: m}\ndataset: {path: d}\n"
    allocation = resolve_allocation(load(tmp_path, head + text).config)
    layouts = {role: str(placed.layout) for role, placed in allocation.roles.items()}
    assert (layouts["actor_gen"], layouts["ref_inf"], layouts["critic_train"]) == ("d2m2p1", "d2m2p1", "d1m4p1")
    with pytest.raises(ConfigError, match="actor_infer: is another name of actor_gen, which is given too"):
        load(tmp_path, head + text, "actor_gen.layout=d4m1p1")


def test_two_spellings_of_one_key_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, ASYNC_PPO_EVERY_KEY, "staleness.max_staleness=1")
    (problem,) = caught.value.problems
    assert str(problem).endswith(
        "max_head_offpolicyness: is another name of staleness.max_staleness, which is given too; keep one of them"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.gen.n=4", "ppo.gen.n: must be 1, got '4': set group_size for the completions per prompt"),
        ("ppo.gen.greedy=True", "ppo.gen.greedy: must be false, got 'True'"),
        ("actor.backend=deepspeed", "actor.backend: must be megatron, got 'deepspeed'"),
        ("mask_too_long=true", "mask_too_long: must be false"),
        ("success_rate_ub=0.9", "success_rate_ub: must be 1 or 1.0, got '0.9'"),
        ("exp_ctrl.benchmark_n_seqs=100", "exp_ctrl.benchmark_n_seqs: must be null, got '100'"),
        ("recover_mode=fault", "recover_mode: must be one of auto, resume, disabled, got 'fault'"),
        ("mode=slurm", "mode: must be one of ray, local, both, explore, train, bench, serve, got 'slurm'"),
    ],
)
def test_what_would_change_the_training_is_never_ignored(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, PPO_7B_128_GPUS, override)
    assert message in str(caught.value)


def test_device_mappings_place_the_roles_instead_of_the_string(tmp_path: Path) -> None:
    text = """\
experiment_name: mapped
trial_name: one
n_gpus_per_node: 8
n_nodes: 2
allocation_mode: manual
actor: {path: m}
dataset: {path: d}
ppo: {disable_value: true}
actor_train: {device_mapping: "list(range(0,8))", layout: d4m2p1}
actor_inf: {device_mapping: "list(range(0,8))", layout: d4m2p1}
actor_gen: {device_mapping: "list(range(8,16))", layout: sglang.d4m2p1}
ref_inf: {device_mapping: [0, 1, 2, 3, 4, 5, 6, 7]}
"""
    allocation = resolve_allocation(load(tmp_path, text).config)
    assert str(allocation.roles["ref_inf"].layout) == "d8m1p1"
    assert str(allocation.trainer.layout) == "d4m2p1"
    assert allocation.generator.backend == "sglang"
    assert {slot.node for slot in allocation.generator.slots} == {1}
    assert not allocation.colocated


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_DATA", "/data")
    monkeypatch.setenv("SLIPSTREAM_MODEL", "/model")
    assert "../" not in path.read_text(), "no folder beside the clone"
    loaded = load_config(next((name for name in ("sft", "dpo") if name in path.name), "ppo-math"), path)
    assert not loaded.ignored
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 40, "a recipe states only what differs from the defaults"


def test_a_file_of_the_tutorials_system_is_met_with_what_trains_otherwise_here(tmp_path: Path) -> None:
    def line(text: str, *overrides: str, experiment: str = "ppo-math") -> str:
        loaded = load(tmp_path, text, *overrides, experiment=experiment)
        return difference_line(loaded.config, loaded.ignored)

    found = line(PPO_7B_128_GPUS)
    assert "staleness.max_staleness=1 (there: synchronous, 0)" in found
    assert "algorithm.correction=decoupled with behave_imp_weight_cap=5.0 (there: none)" in found
    assert line(PPO_7B_128_GPUS, "staleness.max_staleness=0") == ""
    assert line(PPO_7B_128_GPUS, "staleness.max_staleness=1") == "", "the user decided it"
    assert "decoupled" not in line(PPO_7B_128_GPUS, "algorithm.decoupled=false")
    assert line(SFT_32B_128_GPUS, "cache_clear_freq=1", experiment="sft") == ""
    own = "experiment_name: e\ntrial_name: t\nactor: {path: /m}\ndataset: {path: /d}\nppo: {disable_value: true}\n"
    assert line(own) == "", "a file of one's own has no such keys"


AREAL_03_SERVERS = """\
actor:
  path: MODEL
  sglang: {max_running_requests: null, enable_memory_saver: false, dtype: float16, enable_nan_detection: false}
"""


def test_the_servers_of_an_areal_03_file_are_read_with_what_changes_nothing_named(tmp_path: Path) -> None:
    head = "experiment_name: e\ntrial_name: t\ndataset: {path: d}\nppo: {disable_value: true}\n"
    loaded = load(tmp_path, head + AREAL_03_SERVERS)
    assert loaded.config.actor.sglang == {} and loaded.config.generator.max_running == 128
    assert [p.key for p in loaded.ignored] == ["actor.sglang.max_running_requests"]
    with pytest.raises(ConfigError, match=r"x.yaml:7: actor.sglang.enable_memory_saver: must be false, got 'true'"):
        load(tmp_path, head + AREAL_03_SERVERS.replace("memory_saver: false", "memory_saver: true"))


def test_another_trainers_nodes_are_answered_with_our_keys(tmp_path: Path) -> None:
    head = "experiment_name: e\ntrial_name: t\nactor: {path: m}\ndataset: {path: d}\nppo: {disable_value: true}\n"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"{head}cluster: {{node_num: 2, gpu_per_node: 8}}\n")
    assert [p.message for p in caught.value.problems] == [
        "unknown key; write n_nodes at the top level", "unknown key; write n_gpus_per_node at the top level"
    ]  # fmt: skip
