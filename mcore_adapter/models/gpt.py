"""Megatron's GPTModel for a ModelConfig, with a head that leaves the hidden states to the caller.

Invariant: a chunk returns hidden states (language model) or values (critic), never logits: the engine turns hidden
states into log-probabilities in chunks, so full logits exist nowhere. Weights are uninitialised until hf/weights.py
fills them; every parameter has the dimension that tensor parallelism splits as an attribute, as gradient norms need it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from allocation import ParallelLayout, layers_of_chunks
from mcore_adapter.autograd import mark
from mcore_adapter.data.packing import SharedPromptParams
from mcore_adapter.device import Device
from mcore_adapter.memory.recompute import install_recomputation, recompute_layers
from mcore_adapter.models.conversions import (
    EMBEDDING,
    OUTPUT,
    Conversion,
    OfExpert,
    canonical_name,
    layer_table,
    outer_table,
    unstacked,
)
from mcore_adapter.models.experts import stack_experts
from mcore_adapter.models.router import Balance, RoutedLayer, Router
from mcore_adapter.parallel import ParallelState
from mcore_adapter.settings import Fp8Recipe, Level
from model_specs.config import Llama3RopeScaling, MLAConfig, ModelConfig, MoEConfig, YarnRopeScaling
from model_specs.untrusted import ModelConfigError

AddToResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""(output and bias, residual, dropout) -> their sum."""


def block_spec(device: Device, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage (of its virtual stage `vp_stage`)."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds: dict[bool, ModuleSpec] = {}
    for layer in layers:
        if (sparse := _has_experts(config, layer)) not in kinds:
            kinds[sparse] = device.layer_spec(config, config.num_moe_experts if sparse else None)
    specs = [kinds[_has_experts(config, layer)] for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=device.final_norm)


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    if config.num_moe_experts is None:
        return False
    return config.moe_layer_freq == 1 or bool(cast(Any, config.moe_layer_freq)[layer])


def install_post_norms(spec: TransformerBlockSubmodules) -> None:
    """Make every layer of `spec` a SandwichLayer."""
    for layer in spec.layer_specs or ():
        layer.module, layer.params = SandwichLayer, {**layer.params, "norm": spec.layer_norm}


class SandwichLayer(TransformerLayer):
    """Megatron's layer with two more norms. `norm`: their class, that of the final norm."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *, norm: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, **kwargs)
        settings = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm = build_module(norm, **settings)
        self.post_mlp_layernorm = build_module(norm, **settings)
        adders: Any = self  # Megatron's attributes have no types
        self.self_attn_bda = partial(_norm_then_add, self.post_self_attn_layernorm, adders.self_attn_bda)
        self.mlp_bda = partial(_norm_then_add, self.post_mlp_layernorm, adders.mlp_bda)


def _norm_then_add(
    norm: nn.Module, adder: Callable[[bool, bool], AddToResidual], training: bool, fused: bool
) -> AddToResidual:
    """Take the place of Megatron's get_bias_dropout_add(training, fused)."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        assert output[1] is None, "no supported family has a bias here"
        return adder(training, fused)((norm(output[0]), None), residual, dropout)

    return add


def transformer_config(
    config: ModelConfig,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype,
    sequence_parallel: bool,
    fp8: Fp8Recipe | None = None,
) -> TransformerConfig:
    """Return Megatron's own configuration of this model on this device."""
    layout = parallel.layout
    interleaved = layout.vpp > 1
    fields = _fields(config)
    if config.num_layers % (layout.pp * layout.vpp):
        fields["pipeline_model_parallel_layout"] = _uneven(config.num_layers, layout)
    make = MLATransformerConfig if config.mla else TransformerConfig
    return make(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        qk_layernorm=config.qk_norm or config.mla is not None,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required by variable_seq_lengths, dense models included
        calculate_per_token_loss=True,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Scaled by present maxima: no history that a checkpoint would have to hold. Gradients of whole tensors need the
        # range of e5m2; blocks of 128 values do not.
        fp8={None: None, "tensorwise": "hybrid", "blockwise": "e4m3"}[fp8],
        fp8_recipe=fp8 or "tensorwise",
        **{**device.config_overrides(), **fields},
    )


def _uneven(num_layers: int, layout: ParallelLayout) -> list[list[str]]:
    stages = [["decoder"] * len(layers) for layers in layers_of_chunks(num_layers, layout)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _fields(config: ModelConfig) -> dict[str, object]:
    """Return the fields that a dense decoder with plain rotary embeddings does not set."""
    fields: dict[str, object] = {}
    if config.rope_interleaved:
        # Megatron's fused kernel for packed sequences takes no rotary_interleaved.
        fields |= dict(rotary_interleaved=True, apply_rope_fusion=False)
    if config.mla is not None:
        fields |= _latent_attention_fields(config, config.mla)
    return fields if config.moe is None else fields | _expert_fields(config.moe)


def _expert_fields(moe: MoEConfig) -> dict[str, object]:
    """Return the fields of mixtures of experts. Which experts a token goes to is decided in router.py."""
    return dict(
        num_moe_experts=moe.num_experts,
        moe_ffn_hidden_size=moe.intermediate_size,
        moe_shared_expert_intermediate_size=moe.shared_intermediate_size or None,
        moe_layer_freq=1 if all(moe.sparse_layers) else [int(sparse) for sparse in moe.sparse_layers],
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
    )


def _latent_attention_fields(config: ModelConfig, mla: MLAConfig) -> dict[str, object]:
    """Return the fields of latent attention and of its rotary embedding."""
    rope: dict[str, object] = dict(rope_type="rope", rotary_base=config.rope_theta, apply_rope_fusion=False)
    scaling = config.rope_scaling
    if isinstance(scaling, YarnRopeScaling):
        rope |= dict(
            rope_type="yarn",
            rotary_scaling_factor=scaling.factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
            mscale=scaling.mscale,
            mscale_all_dim=scaling.mscale_all_dim,
        )
    return rope | dict(
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
    )


FP8_ROWS: Mapping[Fp8Recipe | None, int] = {None: 1, "tensorwise": 16, "blockwise": 128}
"""8-bit matrix products require every dimension, the number of tokens included, to be a multiple of this."""


class LMHead(tensor_parallel.ColumnParallelLinear):
    """The output layer's weight [v / tp, h] without its product: hidden states pass through. `weight` is None where the
    embedding of the same chunk serves; see lm_head_weight()."""

    def __init__(
        self,
        layer: tensor_parallel.ColumnParallelLinear,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
    ) -> None:
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=tp_group,
        )
        self.weight = layer.weight

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        return input_, None


class ValueHead(nn.Module):
    """hidden [s, b, h] -> value [s, b, 1] fp32; the weight [1, h] is replicated over tensor parallel ranks."""

    def __init__(
        self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # Each rank sees its share of the tokens: Megatron adds up the gradients of parameters marked so.
        mark(self.weight, sequence_parallel=config.sequence_parallel)
        self._sequence_parallel, self._tp_group = config.sequence_parallel, tp_group

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        values = F.linear(input_.float(), self.weight.float())
        if self._sequence_parallel:
            # Every rank computes the same loss from the gathered values: its own part of the gradient is complete.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return values, None


class ModelChunk(GPTModel):
    """GPTModel of one virtual pipeline stage of this rank, with a reference to the model that it is a part of."""

    output_layer: LMHead | ValueHead
    """On the last stage."""

    def __init__(
        self,
        model_config: ModelConfig,
        megatron: TransformerConfig,
        *,
        parallel: ParallelState,
        device: Device,
        is_critic: bool,
        stage: int,
        balance: Balance,
    ) -> None:
        num_stages = parallel.layout.vpp
        vp_stage = stage if num_stages > 1 else None
        spec = block_spec(device, megatron, vp_stage)
        install_recomputation(spec)
        if model_config.moe is not None:
            _install_router(spec, model_config.moe, balance, device.torch_device)
            if device.has_grouped_products:
                stack_experts(spec, megatron, device.torch_device)
        if model_config.post_norms:
            install_post_norms(spec)
        super().__init__(
            megatron,
            spec,
            model_config.vocab_size,
            model_config.max_position_embeddings,
            pre_process=parallel.is_first_stage and stage == 0,
            post_process=parallel.is_last_stage and stage == num_stages - 1,
            share_embeddings_and_output_weights=model_config.tied and not is_critic,
            position_embedding_type="rope",
            rotary_percent=model_config.rotary_dim / model_config.head_dim,
            rotary_base=model_config.rope_theta,
            vp_stage=vp_stage,
        )
        if not megatron.multi_latent_attention:
            rotary = self.rotary_pos_emb
            rotary.get_rotary_seq_len = partial(_table_length, rotary.get_rotary_seq_len)
        self.model_config, self.is_critic, self.expert_rank = model_config, is_critic, parallel.ep_rank
        if isinstance(model_config.rope_scaling, Llama3RopeScaling):
            inverse = self.rotary_pos_emb.inv_freq
            self.rotary_pos_emb.inv_freq = llama3_frequencies(inverse, model_config.rope_scaling)
        if self.post_process:
            self.output_layer = (
                ValueHead(megatron, parallel.tp_group, device.torch_device)
                if is_critic
                else LMHead(self.output_layer, megatron, parallel.tp_group)
            )

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, *args: object, packed_seq_params: object = None, **kwargs: object
    ) -> tuple[object, ...]:
        """Run Megatron's preprocessing, with an angle for each row where sequences share rows."""
        embedded, angles, *rest = super()._preprocess(
            input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        if isinstance(packed_seq_params, SharedPromptParams):
            angles = angles.index_select(0, position_ids[0])
        return embedded, angles, *rest


def _table_length(longest: Callable[..., int], *args: object, **kwargs: object) -> int:
    """Return the number of angles for a microbatch: a power of two, as Megatron keeps the tables of 32 lengths, which
    for every other longest sequence would be gigabytes."""
    return 1 << (longest(*args, **kwargs) - 1).bit_length()


def build_model(
    config: ModelConfig,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype,
    is_critic: bool = False,
    recompute: Level = "none",
    fp8: Fp8Recipe | None = None,
    balance: Balance | None = None,
) -> list[ModelChunk]:
    """Return the chunks of this rank, one per virtual pipeline stage, not wrapped, weights not yet filled in.

    A chunk is called as Megatron calls it, chunk(tokens [1, t], positions, None, packed_seq_params=thd). The last one
    returns hidden states [1, t, h], where with sequence parallelism t is this rank's contiguous share of the tokens
    (the language model's caller gathers), or values [1, t, 1] fp32 of all tokens (critic). With sequence parallelism,
    where tp > 1, the number of tokens must be a multiple of tp. Call inside device.activate().

    Raises ModelConfigError where the model cannot be cut by the layout, or with `fp8` computed in that format.
    """
    layout = parallel.layout
    check_layout(config, layout)
    if fp8:
        _check_fp8(fp8, config, parallel, device)
    megatron = transformer_config(
        config, parallel=parallel, device=device, dtype=dtype, fp8=fp8, sequence_parallel=layout.tp > 1
    )
    chunks = [
        ModelChunk(
            config, megatron, parallel=parallel, device=device, is_critic=is_critic, stage=stage,
            balance=balance or Balance(),
        )
        for stage in range(layout.vpp)
    ]  # fmt: skip
    recompute_layers(chunks, [recompute] * config.num_layers)
    for param, conversion in named_conversions(chunks):
        if isinstance(conversion, OfExpert):
            # Other replicas of an expert are other ranks than those of what is around it: reduced and counted apart.
            mark(param, allreduce=False, tensor_model_parallel=True)
        elif conversion.tp_dim is not None and not getattr(param, "tensor_model_parallel", False):
            tensor_parallel.set_tensor_model_parallel_attributes(param, True, conversion.tp_dim, 1)
    return chunks


def _install_router(spec: TransformerBlockSubmodules, moe: MoEConfig, balance: Balance, device: torch.device) -> None:
    """Put our router into the layers of `spec` that have experts."""
    for layer in spec.layer_specs or ():
        if layer.submodules.mlp.module is MoELayer:
            layer.module = RoutedLayer
            layer.submodules.mlp.submodules.router = partial(Router, moe=moe, balance=balance, device=device)


def llama3_frequencies(inverse: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Scale inverse frequencies [d / 2]: wavelengths longer than the original context divided by lambda_low are slowed
    down by `factor`, those shorter than it divided by lambda_high are kept, between them the two are blended."""
    wavelength = 2 * math.pi / inverse
    context = scaling.original_max_position_embeddings
    blend = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def lm_head_weight(chunk: ModelChunk) -> Tensor:
    """Return the output weight of the last stage's chunk, or the embedding if the two are tied: [v / tp, h]."""
    assert chunk.post_process, "only the last chunk of the last stage has a head"
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight


def named_conversions(chunks: Sequence[ModelChunk]) -> Iterator[tuple[Tensor, Conversion]]:
    """Yield every parameter (and correction bias) that this rank holds, with the Hugging Face tensors that it is made
    of.

    A tied model's last stage holds a second copy of the embedding: it comes with the embedding's conversion. Experts
    whose weights are stacked come one by one, as views.
    """
    config = chunks[0].model_config
    outer = outer_table(config, is_critic=chunks[0].is_critic)
    outer.setdefault(OUTPUT, outer[EMBEDDING])
    for chunk in chunks:
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        tables: dict[int, Mapping[str, Conversion]] = {}
        first_expert = 0
        if config.moe is not None:
            held = config.moe.num_experts // chunk.config.expert_model_parallel_size
            first_expert = held * chunk.expert_rank
        biases = ((name, b) for name, b in chunk.named_buffers() if name.endswith("router.expert_bias"))
        for name, param in itertools.chain(chunk.named_parameters(), biases):
            if not name.startswith("decoder.layers."):
                yield param, outer[name]
                continue
            local, rest = name.removeprefix("decoder.layers.").split(".", 1)
            layer = offset + int(local)
            if layer not in tables:
                tables[layer] = layer_table(config, layer)
            for part_name, part in unstacked(rest, param):
                yield part, tables[layer][canonical_name(part_name, first_expert)]


def check_layout(config: ModelConfig, layout: ParallelLayout) -> None:
    """Raise ModelConfigError where the model cannot be cut by the layout."""
    stages, moe = layout.pp * layout.vpp, config.moe
    if config.num_layers < stages:
        raise ModelConfigError(
            f"num_hidden_layers={config.num_layers} must be at least the pipeline stages (pp x vpp), {stages} "
            f"(layout {layout})"
        )
    if moe is None and layout.ep > 1:
        raise ModelConfigError(f"expert parallelism ep={layout.ep} needs a mixture-of-experts model; use ep=1")
    rules = [
        ("num_attention_heads", config.num_heads, "tensor parallel size", layout.tp),
        ("num_key_value_heads", config.num_kv_heads, "tensor parallel size", layout.tp),
        ("intermediate_size", config.intermediate_size, "tensor parallel size", layout.tp),
        ("vocab_size", config.vocab_size, "tensor parallel size", layout.tp),
    ]
    if moe is not None:
        rules.append(("num_experts", moe.num_experts, "expert parallel size", layout.ep))
        rules.append(("width of the shared experts", moe.shared_intermediate_size, "tensor parallel size", layout.tp))
    for key, value, what, parts in rules:
        if value % parts:
            raise ModelConfigError(f"{key}={value} must be divisible by the {what}, {parts} (layout {layout})")


def _check_fp8(recipe: Fp8Recipe, config: ModelConfig, parallel: ParallelState, device: Device) -> None:
    if recipe not in device.fp8_recipes:
        needs = {
            "tensorwise": "a GPU of compute capability 8.9 or more (H100, H200)",
            "blockwise": "a GPU of compute capability 9.0 or more (H100, H200) and CUDA 12.9 or newer",
        }[recipe]
        way_out = " or ".join([*device.fp8_recipes, "false"])
        raise ModelConfigError(f"fp8={recipe} needs {needs}; write fp8={way_out}")
    tp, multiple = parallel.layout.tp, FP8_ROWS[recipe]
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads x head_dim / tp": config.num_heads * config.head_dim // tp,
        "num_key_value_heads x head_dim / tp": config.num_kv_heads * config.head_dim // tp,
        "intermediate_size / tp": config.intermediate_size // tp,
    }
    if config.moe is not None:
        sizes["moe_intermediate_size"] = config.moe.intermediate_size
    for name, value in sizes.items():
        if value % multiple:
            raise ModelConfigError(
                f"fp8={recipe} needs multiples of {multiple}, {name} is {value} (tp={tp}); lower tp, or write fp8=false"
            )
