"""One file, overrides and the environment become one typed tree, or a list of everything that is wrong."""

import contextlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.checks.rules import load_config
from core.config.experiments import PPOMATHConfig
from core.config.parsing.problems import ConfigError
from core.placement import resolve_allocation
from helpers.config_inputs import SMALLEST_PPO


def load(tmp_path: Path, text: str = SMALLEST_PPO, *overrides: str, experiment: str = "ppo-math") -> PPOMATHConfig:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return load_config(experiment, path, overrides).config  # type: ignore[return-value]


def errors(tmp_path: Path, text: str = SMALLEST_PPO, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_all_mistakes_of_a_file_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
experiment_name: small
trial_name: a/b
recover_mode: sometimes
actor: {path: MODEL, optimizer: {lr: fast}}
dataset:
  path: DATA
  train_bs_n_seqs: 512
  max_prompt_length: 16
ppo:
  eps_clip: 0
  kl_ctl: null
  ppo_n_minibatches: 3
  disable_value: ture
  gen: 16
gruop_size: 8
"""
    assert errors(tmp_path, text) == [
        "x.yaml:2: trial_name: must be letters, digits and . _ + = -, a letter or digit first, got 'a/b'",
        "x.yaml:3: recover_mode: must be one of auto, resume, disabled, got 'sometimes'",
        "x.yaml:4: actor.optimizer.lr: must be a number, got 'fast'",
        "x.yaml:8: dataset.max_prompt_length: unknown key; write dataset.max_prompt_len",
        "x.yaml:10: ppo.eps_clip: must be greater than 0, got 0.0",
        "x.yaml:11: ppo.kl_ctl: must be a number, got null",
        "x.yaml:12: ppo.ppo_n_minibatches: ppo_n_minibatches=3 must divide train_bs_n_seqs=512; nearest: 2 or 4",
        "x.yaml:13: ppo.disable_value: must be true or false, got 'ture'",
        "x.yaml:14: ppo.gen: is a section with keys of its own, got '16'",
        "x.yaml:15: gruop_size: unknown key; did you mean 'group_size'?",
    ]


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("max_new_tokens: 5", "did you mean 'ppo.gen.max_new_tokens' or 'evaluation.max_new_tokens'?"),
        ("eps_clip: 0.1", "write ppo.eps_clip"),
        (
            "temperature: 1",
            "did you mean 'ppo.gen.temperature' or 'auxiliary.temperature' or 'evaluation.temperature'?",
        ),
        ("ppo.eps_clip: 0.1", "write ppo.eps_clip as nested sections"),
        ("disable_valu: true", "did you mean 'ppo.disable_value'?"),
        ("stalenes: {max_staleness: 1}", "did you mean 'staleness'?"),
        ("xyzzy: 1", "--help --verbose lists all keys"),
        ("stages: [a]", "slipstream train runs the stages of a file, [{sft: {...}}, {grpo: {...}}]"),
        ("log: {level: debug}", "write monitor.log_level"),
        ("rollout_batch_size: 4", "write dataset.train_bs_n_seqs"),
        ("num_return_sequences_in_group: 4", "write group_size"),
        ("system_envs: {A: b}", "write external_configs.envs"),
        ("algorithm: {clip_ratio_high: 0.28}", "write algorithm.clip_high"),
        ("algorithm: {ppo_epochs: 2}", "write ppo.actor_sample_reuse"),
        ("profiler_output_dir: /tmp", "write monitor.timeline_mib, and see python -m tools.timeline"),
        ("push: {xyzzy: 1}", "keys here are type, verify, changes, bucket_mib, timeout_seconds"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(tmp_path: Path, line: str, suggestion: str) -> None:
    (message,) = errors(tmp_path, f"{SMALLEST_PPO}{line}\n")
    assert message.startswith("x.yaml:9: ")
    assert message.endswith(f"unknown key; {suggestion}")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("actor.optimizer.lr=1e-6", 1e-6),
        ("actor.optimizer.lr=3", 3.0),
        ("actor.optimizer.lr='1e-6'", 1e-6),
        ("actor.optimizer.lr=.5", 0.5),
    ],
)
def test_numbers_are_numbers_however_yaml_reads_them(tmp_path: Path, override: str, value: float) -> None:
    lr = load(tmp_path, SMALLEST_PPO, override).actor.optimizer.lr
    assert lr == value
    assert isinstance(lr, float)


@pytest.mark.parametrize(("text", "value"), [("1e4", 10_000), ("16_384", 16_384), ("100.0", 100)])
def test_whole_numbers_may_be_written_in_any_notation(tmp_path: Path, text: str, value: int) -> None:
    max_tokens = load(tmp_path, SMALLEST_PPO, f"actor_train.mb_spec.max_tokens_per_mb={text}").max_tokens_per_mb(
        "actor_train"
    )
    assert max_tokens == value
    assert isinstance(max_tokens, int)


def test_null_switches_off_what_is_optional(tmp_path: Path) -> None:
    config = load(tmp_path, SMALLEST_PPO, "exp_ctrl.ckpt_freq_secs=null", "algorithm.behave_imp_weight_cap=None")
    assert config.exp_ctrl.ckpt_freq_secs is None
    assert config.algorithm.behave_imp_weight_cap is None


def test_free_mappings_keep_the_types_that_were_written(tmp_path: Path) -> None:
    flags = (
        "actor.sglang={mem_fraction_static: 0.8, disable_radix_cache: true, tp: 2, backend: fa3, bs: [1, 2], x: null}"
    )
    config = load(tmp_path, SMALLEST_PPO, flags, "external_configs.envs={A: 1, B: 'true'}")
    assert config.actor.sglang == {
        "mem_fraction_static": 0.8, "disable_radix_cache": True, "tp": 2, "backend": "fa3", "bs": [1, 2], "x": None,
    }  # fmt: skip
    assert config.external_configs.envs == {"A": "1", "B": "true"}


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path: Path) -> None:
    config = load(
        tmp_path, SMALLEST_PPO, "ppo.gen.max_new_tokens=8", "ppo.gen.max_new_tokens=9", "ppo.gen={top_p: 0.9}"
    )
    assert config.ppo.gen.max_new_tokens == 9
    assert config.ppo.gen.top_p == 0.9


def test_a_run_can_be_described_by_overrides_alone() -> None:
    overrides = ["experiment_name=e", "trial_name=t", "actor.path=m", "dataset.path=d", "ppo.disable_value=true"]
    loaded = load_config("ppo-math", None, overrides)
    assert loaded.config.trial_name == "t"
    assert loaded.where("actor.path") == "override 'actor.path=m'"


NUMBERS = ("1.5", "true", "abc", "inf", "nan", "[1]", "{a: 1}", "null", "1_", "1__0", "9" * 5000)
NUL = ('dataset.path="a\\0b"', 'external_configs.envs={A: "\\0"}', 'prompt.chat_options={a: "\\0"}')


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed': must look like a.b.c=value"),
        ("=3", "override '=3': must look like a.b.c=value"),
        ("ppo..eps_clip=1", "override 'ppo..eps_clip=1': must look like a.b.c=value"),
        ("a." * 200 + "b=1", f"override '{'a.' * 200}b=1': must look like a.b.c=value"),
        ("trial_name=\udce4", r"override 'trial_name=\udce4': not UTF-8 text; in a shell, export LC_ALL=C.UTF-8"),
        ("seed.x=3", "override 'seed.x=3': seed: must be an integer, got a section (x)"),
        ("trial_name.x=3", "override 'trial_name.x=3': trial_name: is a value (x.yaml:2), not a section"),
        ("seed=[1", "override 'seed=[1': not valid YAML"),
        ("ppo.eps_clp=1", "override 'ppo.eps_clp=1': ppo.eps_clp: unknown key; did you mean 'ppo.eps_clip'?"),
        ("ppo=3", "override 'ppo=3': ppo: is a section with keys of its own, got '3'"),
        ("ppo.eps_clip=2", "override 'ppo.eps_clip=2': ppo.eps_clip: must be less than 1, got 2.0"),
        ("seed=4294967296", "seed: must be at most 4294967295, got 4294967296"),
        ("ppo.discount=1.5", "ppo.discount: must be at most 1, got 1.5"),
        ("n_nodes=0", "n_nodes: must be at least 1, got 0"),
        *((f"group_size={text}", f"'group_size={text}': group_size: must be an integer, got ") for text in NUMBERS),
        *((f"ppo.kl_ctl={text}", f"must be a number, got '{text}'") for text in ("nan", "inf", "-inf", "much", "1,5")),
        *((f"group_adv_norm={text}", "must be true or false") for text in ("1", "ja", "''")),
        *((override, "must not hold a NUL character; remove it") for override in NUL),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    (found,) = errors(tmp_path, SMALLEST_PPO, override)
    assert message in found


def test_values_may_come_from_the_environment_and_from_other_keys(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STORAGE", "/mnt")
    monkeypatch.setenv("GROUP", "8")
    monkeypatch.delenv("NOTHING", raising=False)
    config = load(
        tmp_path,
        SMALLEST_PPO,
        "dataset.path=${oc.env:STORAGE}/data/${trial_name}.jsonl",
        "group_size=${oc.env:GROUP}",
        "seed=${oc.env:NOTHING,7}",
        "actor.path=${oc.env:NOTHING,${oc.env:STORAGE}/models}",
        "wandb.project=${experiment_name}-${seed}",
        "evaluation.max_new_tokens=${ppo.gen.max_new_tokens}",
        "generator.max_running=${push.bucket_mib}",
        "critic.optimizer=${actor.optimizer}",
        "actor.optimizer.lr=0.5",
        "wandb.tags=['${trial_name}', b]",
        "wandb.name='\\${x}'",
    )
    assert config.dataset.path == "/mnt/data/one.jsonl"
    assert config.group_size == 8
    assert config.seed == 7
    assert config.actor.path == "/mnt/models"
    assert config.wandb.project == "small-7"
    assert config.evaluation.max_new_tokens == 16
    assert config.generator.max_running == 1024, "the default of a key that is not given"
    assert config.critic.optimizer.lr == 0.5
    assert config.wandb.tags == ["one", "b"]
    assert config.wandb.name == "${x}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "${oc.env:NOTHING}",
            "the environment variable NOTHING is not set; set it, or give a default: ${oc.env:NOTHING,...}",
        ),
        ("${trial_nam}", "${trial_nam} is not a key; did you mean 'trial_name'?"),
        ("${now:%Y}", "${now:%Y} is not understood; write ${a.b.c} for another key or ${oc.env:VAR,default}"),
        ("x${trial_name", "${trial_name has no closing brace"),
        ("${wandb.name}", "refers to itself: wandb.name -> wandb.name"),
        ("${wandb.group}", "refers to itself: wandb.group -> wandb.name -> wandb.group"),
        ("a-${ppo.gen}", "${ppo.gen} is not a single value and cannot be part of a text"),
    ],
)
def test_an_interpolation_without_value_says_why(tmp_path, monkeypatch, value: str, message: str) -> None:
    monkeypatch.delenv("NOTHING", raising=False)
    found = errors(tmp_path, SMALLEST_PPO, f"wandb.name='{value}'", "wandb.group='${wandb.name}'")
    assert f"override \"wandb.name='{value}'\": wandb.name: {message}" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "x.yaml:2: not valid YAML"),
        ("a: 1\n\tb: 2\n", "x.yaml:2: not valid YAML"),
        ("- 1\n", "x.yaml: must be a mapping of keys to values"),
        ("seed: 1\nseed: 2\n", "x.yaml:2: seed: given twice (first at x.yaml:1)"),
        (
            "seed: !!python/object:os.system 1\n",
            "x.yaml:1: tag tag:yaml.org,2002:python/object:os.system is not supported",
        ),
        ("seed: !mine 1\n", "x.yaml:1: tag !mine is not supported"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in pairwise("abcdefghi")),
            "x.yaml:1: not valid YAML: more than 100000 values, anchors followed",
        ),
        ("a: &x [*x]\n", "x.yaml: nested too deeply to read"),
        ("? [a]\n: 1\n", "x.yaml:1: a key must be plain text"),
        ("a: *b\n", "x.yaml:1: not valid YAML: found undefined alias"),
        ("a: 1\n---\nb: 1\n", "x.yaml:2: not valid YAML: expected a single document in the stream"),
    ],
)
def test_a_file_that_is_no_configuration_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    assert any(line.startswith(message) for line in errors(tmp_path, text)), errors(tmp_path, text)


LONG = "wandb: {name: aaaaaaaaaaaaaaaaaaaa, project: '" + "${wandb.name}" * 20 + "', entity: '"
LONG += (
    "${wandb.project}" * 20 + "', group: '" + "${wandb.entity}" * 20 + "', tags: ['" + "${wandb.group}" * 20 + "']}\n"
)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = f"{SMALLEST_PPO}critic: {{optimizer: &o {{lr: 0.5, eps: 0.25}}}}\nref: {{optimizer: {{<<: *o, lr: 0.1}}}}\n"
    optimizer = load(tmp_path, text).ref.optimizer
    assert (optimizer.lr, optimizer.eps) == (0.1, 0.25)


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"a: \xe9\n")
    for path, reason in [
        (tmp_path / "no.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin1.yaml", "not UTF-8"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            load_config("ppo-math", path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "ppo.kl_ctl=0.1 ref_inf.mb_spec.max_tokens_per_mb=31",
            "max_tokens_per_mb=31 cannot hold the longest sequence",
        ),
        (
            "dataset.train_bs_n_seqs=6 group_size=2 ppo.ppo_n_minibatches=4",
            "ppo_n_minibatches=4 must divide train_bs_n_seqs=6; nearest: 3 or 6",
        ),
        ("exp_ctrl.eval_freq_steps=5", "evaluation.path: exp_ctrl.eval_freq_* enables evaluation"),
        ("ppo.disable_value=false", "critic.path: required with a critic"),
        ("actor.type.is_critic=true", "actor.type.is_critic: actor is a language model"),
        ("actor.optimizer.type=empty", "actor.optimizer.type: actor is trained"),
        (
            "ppo.disable_value=false critic.path=c critic.optimizer.type=empty",
            "critic.optimizer.type: the critic is trained; write adam",
        ),
        ("mode=local n_nodes=2", "mode: mode=local is for one node"),
        ("mode=local launch.ray_address=head:6379", "mode: mode=local is for this machine"),
        ("n_gpus_per_node=8", "allocation_mode: 'embedded.d1m1p1+d1m1p1': needs 1 + 1 = 2 GPUs"),
        ("allocation_mode=vllm.d1m1p1+d1m1p1", "allocation_mode: 'vllm.d1m1p1+d1m1p1': "),
        (
            "allocation_mode=embedded.d1m1p1+d1m1p1 actor_train.device_mapping=[0,1]",
            "allocation_mode: 'embedded.d1m1p1+d1m1p1': and actor_train.device_mapping both define where roles run",
        ),
        ("actor_train.device_mapping=[0,1] actor_train.layout=q4", "actor_train.layout: 'q4': no dimension"),
        (
            "n_gpus_per_node=5 allocation_mode=embedded.d1+actor_train:d4m1p1,actor_inf:d2m2p1",
            "allocation_mode: actor_inf has d2m2p1 on node 0: 1-4, actor_train has d4m1p1 on node 0: 1-4: both run on",
        ),
        (
            "actor_gen.device_mapping=[0] actor_train.device_mapping=[1] actor_inf.device_mapping=[0]",
            "actor_inf.device_mapping: actor_inf has d1m1p1 on node 0: 0, actor_train has d1m1p1 on node 0: 1: both",
        ),
        (
            "n_gpus_per_node=4 allocation_mode=sglang.d1m1p2+d2m1p1",
            "generator.interrupt: interrupt=retract needs p1 on the generator's side, got d1m1p2: a SGLang server",
        ),
        (
            "actor.moe_routing_replay=true",
            "actor.moe_routing_replay: moe_routing_replay=true needs SGLang servers, which return the experts of each "
            "token; the generator is embedded; write sglang in allocation_mode, or false",
        ),
        (
            "n_gpus_per_node=1 allocation_mode=sglang.d1m1p1 staleness.max_staleness=1 workflow.dynamic_timeout=3",
            "workflow.dynamic_timeout: dynamic_timeout=3 with max_staleness=1 would end prompts as slow that an update",
        ),
        (
            "n_gpus_per_node=4 allocation_mode=sglang.d1m1p2+d2m1p1 actor.moe_routing_replay=true",
            "actor.moe_routing_replay: moe_routing_replay=true needs p1 on the generator's side, got d1m1p2",
        ),
        (
            "allocation_mode=sglang.d1m1p1+d1m1p1 actor.sglang.tp-size=2 actor.sglang.disable_radix_cache=true",
            "actor.sglang.tp-size: cannot be set: set by allocation_mode; leave it out",
        ),
        ("actor.fp8=true", "actor.fp8: fp8=true requires GPUs, but this run trains on CPU; write false"),
        ("actor.fp8=rowwise", "actor.fp8: must be true, false or one of tensorwise, blockwise, got 'rowwise'"),
        ("actor.optimizer.offload=true", "actor.optimizer.offload: offload=true requires GPUs"),
        (
            "ref.fp8=true ppo.kl_ctl=0.1 allocation_mode=sglang.d1m1p1+d1m1p1 actor.sglang.device=cpu",
            "ref.fp8: fp8=true requires GPUs",
        ),
        ("actor.fp8=true actor.bf16=false allocation_mode=sglang.d1m1p1+d1m1p1", "write bf16=true"),
        ("actor.grad_reduce_in_fp32=false", "actor.grad_reduce_in_fp32: grad_reduce_in_fp32=false is for bfloat16"),
        (
            "n_gpus_per_node=9 allocation_mode=embedded.d1m1p1+d8m1p1",
            "4 prompts x group_size=1 = 4 sequences are fewer than the 8 data-parallel ranks",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_told_apart(tmp_path: Path, overrides: str, message: str) -> None:
    found = errors(tmp_path, SMALLEST_PPO, *overrides.split())
    assert any(message in line for line in found), found


def test_a_critic_that_does_not_run_may_stand_anywhere(tmp_path: Path) -> None:
    placed = ["n_gpus_per_node=5", "allocation_mode=embedded.d1+*:d4m1p1,critic_inf:d2m2p1"]
    placed.append("dataset.train_bs_n_seqs=16")
    load(tmp_path, SMALLEST_PPO, *placed)
    found = errors(tmp_path, SMALLEST_PPO, *placed, "ppo.disable_value=false", "critic.path=c")
    assert "allocation_mode: critic_inf has d2m2p1 on node 0: 1-4" in "".join(found)


@pytest.mark.parametrize("override", ["generator.interrupt=abort", "allocation_mode=sglang.d1m1p4|d4m1p1"])
def test_servers_of_several_pipeline_stages_abort(tmp_path: Path, override: str) -> None:
    placed = ["n_gpus_per_node=4", "allocation_mode=sglang.d1m1p2+d2m1p1", "dataset.train_bs_n_seqs=16"]
    load(tmp_path, SMALLEST_PPO, *placed, override)


def test_sft_has_one_section_for_its_place_and_no_generator(tmp_path: Path) -> None:
    text = "experiment_name: s\ntrial_name: t\nmodel: {path: m}\ndataset: {train_path: d, train_bs_n_seqs: 8}\n"
    options = {"experiment": "sft"}
    config = load(tmp_path, text, "n_gpus_per_node=4", "allocation_mode=heuristic", **options)
    assert len(resolve_allocation(config).trainer.slots) == 4
    for override, message in [
        ("allocation_mode=embedded.d1m1p1+d1m1p1", "this experiment has no generators"),
        ("allocation.device_mapping=[0,5]", "allocation.device_mapping: [0, 5]: slot 5 does not exist"),
        ("allocation={device_mapping: '[0,1]', layout: q4}", "allocation.layout: 'q4': no dimension"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, text, "n_gpus_per_node=2", override, **options)
        assert message in str(caught.value)


def test_what_null_stands_for_is_said_by_the_config(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.max_tokens_per_mb("actor_inf") == 16384
    assert config.correction == "decoupled"
    assert config.ref_path == config.actor.path
    assert config.actor.dtype(on_gpu=False) == "float32"
    assert config.actor.dtype(on_gpu=True) == "bfloat16"
    assert config.actor.recompute(on_gpu=False) == "none"
    assert config.actor.recompute(on_gpu=True) == "selective"

    config = load(
        tmp_path, SMALLEST_PPO, "staleness.max_staleness=0", "algorithm.kl_in=loss", "ppo.kl_ctl=0.1",
        "actor_train.mb_spec.max_tokens_per_mb=64", "ref.path=other", "actor.bf16=true",
        "actor.gradient_checkpointing=true",
    )  # fmt: skip
    assert config.max_tokens_per_mb("ref_inf") == 64
    assert config.correction == "bypass"
    assert config.ref_path == "other"
    assert config.actor.dtype(on_gpu=False) == "bfloat16"
    assert config.actor.recompute(on_gpu=False) == "full"
    for level in ("auto", "selective", "linear"):
        config = load(tmp_path, SMALLEST_PPO, f"actor.gradient_checkpointing={level}")
        assert config.actor.recompute(on_gpu=True) == level
    (message,) = errors(tmp_path, SMALLEST_PPO, "actor.gradient_checkpointing=fully")
    assert "auto" in message and "selective" in message
    assert load(tmp_path, SMALLEST_PPO, "ppo.gen.max_new_tokens=27648").max_tokens_per_mb("actor_train") == 27664


GPUS = "allocation_mode=sglang.d1m1p1+d1m1p1"


def test_numeric_options_are_taken_where_there_are_gpus(tmp_path: Path) -> None:
    overrides = ["actor.fp8=true", "actor.optimizer.offload=true", "actor.grad_reduce_in_fp32=false"]
    config = load(tmp_path, SMALLEST_PPO, GPUS, *overrides)
    assert config.actor.fp8 and config.actor.optimizer.offload and not config.actor.grad_reduce_in_fp32
    for text, recipe in (
        ("true", "tensorwise"),
        ("tensorwise", "tensorwise"),
        ("blockwise", "blockwise"),
        ("false", None),
    ):
        assert load(tmp_path, SMALLEST_PPO, overrides[0], f"actor.fp8={text}", GPUS).actor.fp8_recipe == recipe
    # What no part of the run uses is not looked at.
    assert not load(tmp_path, SMALLEST_PPO, "critic.fp8=true", "ref.optimizer.offload=true").uses_critic


WORDS = ["ppo", "gen", "actor", "path", "seed", "${seed}", "${oc.env:", "1e9", "null", "<<", "*a", "&a", "!x"]
MARKS = [":", ": ", ",", "{", "}", "[", "]", ".", "=", "- ", "'", '"', "\\", "\n", "  "]
TEXT = st.lists(st.sampled_from(WORDS + MARKS) | st.characters(), max_size=30).map("".join)


@settings(max_examples=150, deadline=None)
@given(file=TEXT, override=TEXT)
def test_whatever_the_text_the_answer_is_a_configuration_or_a_list_of_problems(
    tmp_path_factory: pytest.TempPathFactory, file: str, override: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.yaml"
    path.write_bytes(SMALLEST_PPO.encode() + file.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        load_config("ppo-math", path, [override, f"seed={override}", f"actor.sglang={override}"])


@pytest.mark.parametrize("word", ["algorithm=grpo", "algorithm.name=GRPO", "algorithm.name=Grpo"])
def test_the_name_of_a_preset_may_be_the_section_and_in_any_case(word: str, tmp_path: Path) -> None:
    assert load(tmp_path, SMALLEST_PPO, word).algorithm_name == "grpo"
    assert load(tmp_path, f"{SMALLEST_PPO}algorithm: Dr.GRPO\n").algorithm_name == "dr_grpo"
    assert load(tmp_path, f"{SMALLEST_PPO}algorithm: rloo\n", word).algorithm_name == "grpo"


def test_overrides_write_into_a_section_that_a_file_gives_as_its_name(tmp_path: Path) -> None:
    config = load(tmp_path, f"{SMALLEST_PPO}algorithm: grpo\n", "algorithm.entropy_coeff=0.5")
    assert (config.algorithm_name, config.algorithm.entropy_coeff) == ("grpo", 0.5)


def test_a_wrong_entry_of_a_list_that_may_be_null_is_named(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, SMALLEST_PPO, "reward.weights=[1,a]")
    assert found.endswith("reward.weights: must be a number, got 'a'")


def test_missing_keys_are_named_all(tmp_path: Path) -> None:
    found = errors(tmp_path, "mode: ray\n")
    for key in ("experiment_name", "dataset.path", "actor.path"):
        assert any(f"{key}: required" in line for line in found), (key, found)


def test_the_place_of_a_default_is_not_the_override_of_another_key(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(SMALLEST_PPO)
    loaded = load_config("ppo-math", tmp_path / "x.yaml", ["staleness.over_age=mask", "actor.sglang={a: 1}"])
    assert loaded.where("staleness.over_age") == "override 'staleness.over_age=mask'"
    assert loaded.where("staleness.max_staleness") == ""
    assert loaded.where("actor.sglang.a") == "override 'actor.sglang={a: 1}'"
    assert loaded.where("ppo.gen.top_p").endswith("x.yaml:6"), "a section of a file has a line"


def test_a_name_may_look_like_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, SMALLEST_PPO, "trial_name=20250222").trial_name == "20250222"
    assert load(tmp_path, SMALLEST_PPO, "trial_name=1e-6").trial_name == "1e-6"


EMPTY_MERGES = "x0: &a0 {}\n" + "".join(
    f"x{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        (EMPTY_MERGES, 1, "more than 100000 values"),
        (LONG, 2, "stands for more than 100000 characters"),
        ("".join(f"k{i}: 1\n" for i in range(100_001)), 1, "more than 100000 values"),
    ],
)
def test_a_text_that_stands_for_too_much_ends_with_few_errors(tmp_path, text: str, count: int, message: str) -> None:
    found = errors(tmp_path, SMALLEST_PPO + text)
    assert len(found) == count and message in found[-1]


def test_a_training_step_has_answers_of_its_own_number_and_jobs_synchronize_by_explored_prompts(tmp_path: Path) -> None:
    """Six prompts of two answers are explored per step; a step trains on eight answers, four prompts."""
    batches = (
        "group_size=2",
        "dataset.train_bs_n_seqs=6",
        "experience.train_batch_size=8",
        "staleness.max_staleness=5",
    )
    apart = ("mode=train", "recover_mode=auto", "experience.store=sqlite", "experience.path=a.db")
    fixed = ("synchronizer.style=fixed", "synchronizer.interval=2", "synchronizer.offset=1")
    config = load(tmp_path, SMALLEST_PPO, *batches, *apart, *fixed)
    assert config.batch_size == 4
    assert (config.synchronized.interval, config.synchronized.offset, config.steps_ahead) == (3, 2, 4)
    with pytest.raises(ConfigError, match=r"interval \+ offset = 5 must be at most max_staleness \+ 1 = 4"):
        load(tmp_path, SMALLEST_PPO, *batches, *apart, *fixed, "staleness.max_staleness=3")
    with pytest.raises(
        ConfigError, match="train_batch_size.*9 answers are no multiple of group_size=2; nearest: 8 or 10"
    ):
        load(tmp_path, SMALLEST_PPO, *batches, "experience.train_batch_size=9")
    with pytest.raises(ConfigError, match="must divide the 4 prompts of experience.train_batch_size; nearest: 2 or 4"):
        load(tmp_path, SMALLEST_PPO, *batches, "ppo.ppo_n_minibatches=3")
    sets = ("dataset.path=''", "task_sets.a.path=a.jsonl", "task_sets.a.group_size=3")
    with pytest.raises(ConfigError, match="group_size=2, and task_sets.a has groups of 3"):
        load(tmp_path, SMALLEST_PPO, *batches, *sets)


def test_a_step_cannot_leave_out_its_slowest_prompts_where_they_are_trained_in_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="over_rollout.ratio.*in_order trains prompts in their order"):
        load(tmp_path, SMALLEST_PPO, "staleness.in_order=true", "experience.over_rollout.ratio=0.1")
