"""Megatron's GPTModel for a ModelConfig, with a head that leaves the hidden states to the caller.

Invariant: a chunk returns hidden states (language model) or values (critic), never logits: the engine turns hidden
states into log-probabilities in chunks, so full logits exist nowhere. Weights are uninitialised until weights.py fills
them; every parameter knows the dimension that tensor parallelism splits, as gradient norms need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mcore_adapter.device import Device
from mcore_adapter.families import EMBEDDING, OUTPUT, Conversion, canonical_name, layer_table, outer_table
from mcore_adapter.hf_config import Llama3RopeScaling, ModelConfig, ModelConfigError
from mcore_adapter.parallel import ParallelState
from mcore_adapter.shared_prompts import SharedPromptParams

Recompute = Literal["none", "selective", "full"]

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": dict(recompute_granularity="selective"),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


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

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        return input_, None


class ValueHead(nn.Module):
    """hidden [s, b, h] -> value [s, b, 1] fp32; the weight [1, h] is replicated over tensor parallel ranks."""

    def __init__(
        self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=device))
        # Each rank sees its share of the tokens: Megatron adds up the gradients of parameters marked so.
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel
        self._sequence_parallel, self._tp_group = config.sequence_parallel, tp_group

    def forward(self, input_: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        values = F.linear(input_.float(), self.weight.float())
        if self._sequence_parallel:
            # Every rank computes the same loss from the gathered values: its own part of the gradient is complete.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return values, None


class ModelChunk(GPTModel):
    """GPTModel of one virtual pipeline stage of this rank, which knows the model that it is a part of."""

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
    ) -> None:
        num_stages = parallel.layout.vpp
        vp_stage = stage if num_stages > 1 else None
        super().__init__(
            megatron,
            device.block_spec(megatron, vp_stage),
            model_config.vocab_size,
            model_config.max_position_embeddings,
            pre_process=parallel.is_first_stage and stage == 0,
            post_process=parallel.is_last_stage and stage == num_stages - 1,
            share_embeddings_and_output_weights=model_config.tied and not is_critic,
            position_embedding_type="rope",
            rotary_base=model_config.rope_theta,
            vp_stage=vp_stage,
        )
        self.model_config, self.is_critic = model_config, is_critic
        if model_config.rope_scaling is not None:
            inverse = self.rotary_pos_emb.inv_freq
            self.rotary_pos_emb.inv_freq = llama3_frequencies(inverse, model_config.rope_scaling)
        if self.post_process:
            self.output_layer = (
                ValueHead(megatron, parallel.tp_group, device.torch_device)
                if is_critic
                else LMHead(self.output_layer, megatron, parallel.tp_group)
            )

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Megatron's, with an angle for each row of its own where sequences share rows."""
        embedded, angles, *rest = super()._preprocess(
            input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        if isinstance(packed_seq_params, SharedPromptParams):
            angles = angles.index_select(0, position_ids[0])
        return embedded, angles, *rest


def build_model(
    config: ModelConfig,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype,
    is_critic: bool = False,
    recompute: Recompute = "none",
    sequence_parallel: bool | None = None,
) -> list[ModelChunk]:
    """The chunks of this rank, one per virtual pipeline stage, not wrapped, weights not yet filled in.

    A chunk is called as Megatron calls it, chunk(tokens [1, t], positions, None, packed_seq_params=thd). The last one
    returns hidden states [1, t, h], where with sequence parallelism t is this rank's contiguous share of the tokens
    (the language model's caller gathers), or values [1, t, 1] fp32 of all tokens (critic). With sequence parallelism
    (default: where tp > 1) the number of tokens must be a multiple of tp. Call inside device.activate().

    Raises ModelConfigError where the model cannot be cut by the layout.
    """
    layout = parallel.layout
    _check_divisible(config, parallel)
    megatron = transformer_config(
        config,
        parallel=parallel,
        device=device,
        dtype=dtype,
        recompute=recompute,
        sequence_parallel=layout.tp > 1 if sequence_parallel is None else sequence_parallel,
    )
    chunks = [
        ModelChunk(config, megatron, parallel=parallel, device=device, is_critic=is_critic, stage=stage)
        for stage in range(layout.vpp)
    ]
    for param, conversion in named_conversions(chunks):
        if conversion.tp_dim is not None and not getattr(param, "tensor_model_parallel", False):
            tensor_parallel.set_tensor_model_parallel_attributes(param, True, conversion.tp_dim, 1)
    return chunks


def transformer_config(
    config: ModelConfig,
    *,
    parallel: ParallelState,
    device: Device,
    dtype: torch.dtype,
    recompute: Recompute,
    sequence_parallel: bool,
) -> TransformerConfig:
    """Megatron's own configuration of this model on this device."""
    layout = parallel.layout
    interleaved = layout.vpp > 1
    return TransformerConfig(
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
        qk_layernorm=config.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        context_parallel_size=layout.cp,
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
        **_RECOMPUTE[recompute],
        **device.config_overrides(),
    )


def llama3_frequencies(inverse: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """inverse [d / 2] -> [d / 2]: wavelengths longer than the original context divided by lambda_low are slowed down by
    `factor`, those shorter than it divided by lambda_high are kept, between them the two are blended."""
    wavelength = 2 * math.pi / inverse
    context = scaling.original_max_position_embeddings
    blend = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def lm_head_weight(chunk: ModelChunk) -> Tensor:
    """[v / tp, h]: output weight of the last stage's chunk, the embedding itself where the two are tied."""
    assert chunk.post_process, "only the last chunk of the last stage has a head"
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight


def named_conversions(chunks: Sequence[ModelChunk]) -> Iterator[tuple[nn.Parameter, Conversion]]:
    """Every parameter that this rank holds, with the Hugging Face tensors that it is made of.

    A tied model's last stage holds a second copy of the embedding: it comes with the embedding's conversion.
    """
    config = chunks[0].model_config
    outer = outer_table(config, is_critic=chunks[0].is_critic)
    outer.setdefault(OUTPUT, outer[EMBEDDING])
    for chunk in chunks:
        offset = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        tables: dict[int, dict[str, Conversion]] = {}
        for name, param in chunk.named_parameters():
            if not name.startswith("decoder.layers."):
                yield param, outer[name]
                continue
            local, rest = name.removeprefix("decoder.layers.").split(".", 1)
            layer = offset + int(local)
            if layer not in tables:
                tables[layer] = layer_table(config, layer)
            yield param, tables[layer][canonical_name(rest)]


def _check_divisible(config: ModelConfig, parallel: ParallelState) -> None:
    layout = parallel.layout
    stages = layout.pp * layout.vpp
    rules = (
        ("num_hidden_layers", config.num_layers, "pipeline stages (pp x vpp)", stages),
        ("num_attention_heads", config.num_heads, "tensor parallel size", layout.tp),
        ("num_key_value_heads", config.num_kv_heads, "tensor parallel size", layout.tp),
        ("intermediate_size", config.intermediate_size, "tensor parallel size", layout.tp),
        ("vocab_size", config.vocab_size, "tensor parallel size", layout.tp),
    )
    for key, value, what, parts in rules:
        if value % parts:
            raise ModelConfigError(f"{key}={value} must be divisible by the {what}, {parts} (layout {layout})")
