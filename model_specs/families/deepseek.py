"""DeepSeek-V2 and V2-Lite (latent attention, scores by softmax, shared experts), V3 and R1 (scores by sigmoid)."""

from typing import Literal

from model_specs.config import ModelConfig, MoEConfig, parse_decoder, parse_experts, parse_groups, parse_mla
from model_specs.family import Family
from model_specs.tensors import DECODER, Rows, ServerParts, WholeRows
from model_specs.untrusted import ModelConfigError, RawConfig, boolean, num_layers, number, positive, require


def _parse_v2(raw: RawConfig) -> ModelConfig:
    require(raw, {"scoring_func": "softmax", "norm_topk_prob": False})
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelConfigError(f"topk_method={method!r} is not supported; supported: greedy, group_limited_greedy")
    groups = parse_groups(raw) if method == "group_limited_greedy" else (1, 1)
    return _parse(raw, groups, score_function="softmax", num_dense=0, normalize=False, scaling=1.0)


def _parse_v3(raw: RawConfig) -> ModelConfig:
    require(raw, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    groups = parse_groups({"n_group": 8, "topk_group": 4, **raw})
    return _parse(raw, groups, score_function="sigmoid", num_dense=3, normalize=True, scaling=2.5)


def _parse(
    raw: RawConfig,
    groups: tuple[int, int],
    *,
    score_function: Literal["softmax", "sigmoid"],
    num_dense: int,
    normalize: bool,
    scaling: float,
) -> ModelConfig:
    """Parse what both versions share. `num_dense`, `normalize` and `scaling` stand for keys that are absent."""
    require(raw, {"moe_layer_freq": 1, "ep_size": 1})
    num_experts, top_k = parse_experts(raw)
    num_dense = positive(raw, "first_k_dense_replace", num_dense, least=0)
    width = positive(raw, "moe_intermediate_size")
    moe = MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=width * positive(raw, "n_shared_experts"),
        sparse_layers=tuple(i >= num_dense for i in range(num_layers(raw))),
        score_function=score_function,
        normalize=boolean(raw, "norm_topk_prob", normalize),
        scaling=number(raw, "routed_scaling_factor", scaling),
        num_groups=groups[0],
        top_k_groups=groups[1],
        group_score="top2" if score_function == "sigmoid" else "max",
        correction_bias=score_function == "sigmoid",
    )
    return parse_decoder(raw, rope_types=("default", "yarn"), moe=moe, mla=parse_mla(raw))


def latent_server_parts(config: ModelConfig) -> ServerParts:
    """Return where servers hold latent attention: projections up are cut by heads, those down are whole on every rank,
    and one parameter where queries are compressed too."""
    assert config.mla is not None, "the parsers of DeepSeek set it"
    up = {module: Rows(module) for module in ("q_proj", "q_b_proj", "kv_b_proj")}
    parts = {module: place for module, place in DECODER.items() if module not in ("k_proj", "v_proj")} | up
    if config.mla.q_lora_rank is None:
        return parts
    into = "fused_qkv_a_proj_with_mqa"
    return {**parts, "q_a_proj": WholeRows(into), "kv_a_proj_with_mqa": WholeRows(into, config.mla.q_lora_rank)}


def latent_server_keys(config: ModelConfig) -> RawConfig:
    """Return what SGLang's model reads of config.json without a default, or with another one than here. It routes by
    groups whatever topk_method is."""
    assert config.moe is not None and config.mla is not None, "the parsers of DeepSeek set them"
    moe = config.moe
    keys = {
        "q_lora_rank": config.mla.q_lora_rank,
        "scoring_func": moe.score_function,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scaling,
        "n_group": moe.num_groups,
        "topk_group": moe.top_k_groups,
        "topk_method": "noaux_tc" if moe.correction_bias else config.raw.get("topk_method") or "greedy",
        "moe_layer_freq": 1,
        "first_k_dense_replace": moe.sparse_layers.index(True) if any(moe.sparse_layers) else config.num_layers,
    }
    return {key: value for key, value in keys.items() if config.raw.get(key, _ABSENT) != value}


_ABSENT = object()
DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    parse=_parse_v2,
    server_parts=latent_server_parts,
    server_keys=latent_server_keys,
)


def _ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Return the prefixes of the layers after the last one, which predict further tokens and are not trained here."""
    return (f"model.layers.{config.num_layers}.",)


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    parse=_parse_v3,
    server_parts=latent_server_parts,
    server_keys=latent_server_keys,
    ignored_tensors=_ignored_tensors,
)
