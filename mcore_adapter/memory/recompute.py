"""What a layer computes again in the backward pass instead of keeping it, chosen for each layer while the model runs.

Invariant: the choice changes no loss and no gradient, but for rounding where an MLP is computed in chunks. Every
tensor-, context- and expert-parallel rank of a pipeline stage has the same one, as the second computation communicates
like the first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Literal, cast

import megatron.core.transformer.mlp as megatron_mlp
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as yarn_concentration,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mcore_adapter.autograd import Context
from mcore_adapter.memory.host import HostActivations, Pages
from mcore_adapter.settings import MLP_TOKENS, Level, chunks

logger = logging.getLogger(__name__)

Recomputed = Literal["nothing", "product", "halves", "layer"]
"""What a dense MLP recomputes; layer: Megatron recomputes the whole layer."""
CHUNK_ROWS = 8192
"""Tokens whose gradient with respect to the MLP's inner activations exists beside these."""


class _Checkpoint(CheckpointWithoutOutput):
    """Megatron's, which after the second computation holds its outputs twice."""

    def _recompute(self, grad: Tensor) -> None:
        ctx = self.ctx
        super()._recompute(grad)  # type: ignore[no-untyped-call]
        if ctx is not None:
            for output in ctx.outputs:  # only their graph is used, and no operation in it keeps its own output
                output.untyped_storage().resize_(0)


class _SwiGLUInPlace(torch.autograd.Function):
    """_swiglu() of halves that nothing else uses: their gradient takes their place."""

    @staticmethod
    def forward(ctx: Context, halves: Tensor) -> Tensor:
        ctx.save_for_backward(halves)
        return _swiglu(halves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (halves,) = ctx.saved_tensors
        for rows in chunks(len(halves), CHUNK_ROWS):
            part = halves[rows].detach().requires_grad_()
            with torch.enable_grad():
                product = _swiglu(part)
            (grad_part,) = torch.autograd.grad(product, part, grad[rows])
            halves[rows].copy_(grad_part)
        return halves.detach()


class _ChunkedMLP(torch.autograd.Function):
    """A dense MLP, one chunk of tokens after the other in both passes. Keeps its input [t, 1, h] alone.

    Weights are arguments, so that their hooks see one gradient, that of all chunks.
    """

    @staticmethod
    def forward(ctx: Context, mlp: RecomputingMLP, computes: bool, hidden: Tensor, *weights: Tensor) -> Tensor:
        """Return zeros where the output will not be read: not `computes`."""
        seconds: list[tuple[Tensor, Tensor]] = []
        ctx.mlp, ctx.seconds = mlp, seconds
        ctx.save_for_backward(hidden)
        if not computes:
            return torch.zeros_like(hidden)
        output = torch.empty_like(hidden)
        for rows in chunks(len(hidden), MLP_TOKENS):
            product, part = mlp._second_of(mlp._product(hidden[rows]))
            output[rows] = part
            for tensor in (product, part):  # the graph between them remains: nothing is multiplied a third time
                tensor.untyped_storage().resize_(0)
            seconds.append((product, part))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        mlp: RecomputingMLP = ctx.mlp
        first, second = (list(layer.parameters()) for layer in (mlp.linear_fc1, mlp.linear_fc2))
        sums: list[Any] = [None] * len(first + second)
        grad_hidden = torch.empty_like(hidden)
        # In the order of the forward pass: TransformerEngine overwrites the gradient's buffer with that of the first
        # pass ever through a layer, and adds those of later ones.
        for rows in chunks(len(hidden), MLP_TOKENS):
            part = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                again = mlp._product(part)
            if ctx.seconds:
                product, output = ctx.seconds.pop(0)
                _move(again, product)
            else:
                product, output = mlp._second_of(again)
            grad_product, *of_second = torch.autograd.grad(output, (product, *second), grad[rows])
            del product, output
            grad_hidden[rows], *of_first = torch.autograd.grad(again, (part, *first), grad_product)
            del again, grad_product
            sums = list(map(_add_gradient, sums, of_first + of_second, first + second))
        return None, None, grad_hidden, *(total.to(w.dtype) for total, w in zip(sums, first + second, strict=True))


def _move(source: Tensor, target: Tensor) -> None:
    """Move the elements to a tensor whose memory was released, without changing the version that autograd checks."""
    memory = source.untyped_storage()
    target.untyped_storage().resize_(memory.nbytes())
    target.untyped_storage().copy_(memory)
    memory.resize_(0)


def _add_gradient(total: Tensor | None, grad: Tensor, weight: nn.Parameter) -> Tensor:
    """Add in float32. Where the layer has added the gradient to its buffer itself, return its placeholder gradient."""
    if getattr(weight, "grad_added_to_main_grad", False):
        return grad
    return grad.float() if total is None else total.add_(grad)


class RecomputingAttention(SelfAttention):
    """Self-attention that can drop queries, keys and values after the core attention, and make them again."""

    recompute_inputs = False
    _inputs: tuple[Tensor, Tensor, Tensor] | None = None
    """Of the pass under way, where they will be dropped: rotated queries [t, n, d] and keys, and values."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: object,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        given: dict[str, Any] = dict(rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs)
        if not (self.recompute_inputs and torch.is_grad_enabled()):
            return super().forward(hidden_states, attention_mask, *args, **given)
        assert rotary_pos_emb is not None and packed_seq_params is not None, "as every family and packing has"
        assert packed_seq_params.qkv_format == "thd", "as every family and packing has"
        angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        checkpoint = _Checkpoint(fp8=self.config.fp8)

        def inputs(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._rotated(hidden, angles, packed_seq_params)

        self._inputs = checkpoint.checkpoint(inputs, hidden_states)
        try:
            output, bias = super().forward(hidden_states, attention_mask, *args, **{**given, "rotary_pos_emb": None})
        finally:
            self._inputs = None
        checkpoint.discard_output_and_register_recompute(output)
        return output, bias

    def get_query_key_value_tensors(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        if self._inputs is None:
            return super().get_query_key_value_tensors(*args, **kwargs)
        return tuple(x.unsqueeze(1) for x in self._inputs)  # the caller squeezes

    def _rotated(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: PackedSeqParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (x.squeeze(1) for x in super().get_query_key_value_tensors(hidden))
        padded = packing.cu_seqlens_q_padded
        settings: dict[str, Any] = dict(
            config=self.config,
            cu_seqlens=packing.cu_seqlens_q if padded is None else padded,
            mscale=yarn_concentration(self.config),
            cp_group=self.pg_collection.cp,
        )
        query, key = (apply_rotary_pos_emb(x, a, **settings) for x, a in zip((query, key), angles, strict=True))
        return query, key, value.contiguous()  # a view would hold all three until the core attention is done


class RecomputingMLP(MLP):
    """A dense MLP that need not keep the input of its second linear layer, or that and the output of the first.

    With a long sequence the inner activations exist for one chunk of tokens at a time, also where Megatron recomputes
    the whole layer.
    """

    recompute: Recomputed = "nothing"

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        if self.config.fp8:  # otherwise it keeps its input in 8 bits, beside the one that is dropped
            self.linear_fc2.save_original_input = self.recompute == "halves"
        elif self.recompute in ("halves", "layer") and len(hidden_states) > MLP_TOKENS:
            return self._in_chunks(hidden_states), None
        if self.recompute in ("nothing", "layer") or not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **kwargs)
        if self.recompute == "product":
            return self._without_product(hidden_states)
        checkpoint = _Checkpoint(fp8=self.config.fp8)
        output, bias = self.linear_fc2(checkpoint.checkpoint(self._product, hidden_states))
        checkpoint.discard_output_and_register_recompute(output)
        return output, bias

    def _in_chunks(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            # Inside a backward pass the layer is recomputed for its graph: its output is a sum that nothing reads.
            is_again = self.recompute == "layer" and torch._C._current_graph_task_id() != -1
            weights = (*self.linear_fc1.parameters(), *self.linear_fc2.parameters())
            return cast(Tensor, _ChunkedMLP.apply(self, not is_again, hidden, *weights))
        output = torch.empty_like(hidden)
        for rows in chunks(len(hidden), MLP_TOKENS):
            output[rows], _ = self.linear_fc2(self._product(hidden[rows]))
        return output

    def _second_of(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Return a leaf that is the product, and the output of the second linear layer, whose graph begins there."""
        leaf = product.detach().requires_grad_()
        with torch.enable_grad():
            output, bias = self.linear_fc2(leaf)
        assert bias is None, "no supported family has a bias here"
        return leaf, output

    def _product(self, hidden_states: Tensor) -> Tensor:
        halves, bias = self.linear_fc1(hidden_states)
        assert bias is None, "no supported family has a bias here"
        return cast(Tensor, _SwiGLUInPlace.apply(halves)) if torch.is_grad_enabled() else _swiglu(halves)

    def _without_product(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        halves, _ = self.linear_fc1(hidden_states)
        product = _swiglu(halves)
        address = product.data_ptr()

        def pack(tensor: Tensor) -> Tensor | torch.Size:
            return tensor.shape if tensor.data_ptr() == address else tensor

        weight: Any = self.linear_fc2.weight

        def unpack(kept: Tensor | torch.Size) -> Tensor:
            if self.config.gradient_accumulation_fusion and hasattr(weight, "main_grad"):
                # Through these hooks TransformerEngine gets a copy of the weight's object: it adds the gradient to the
                # buffer, but cannot report it, which the wrapper that reduces gradients waits for.
                weight.grad_added_to_main_grad = True
                weight.grad = weight.detach().new_empty(()).expand(weight.shape)
            return kept if isinstance(kept, Tensor) else _swiglu(halves.detach()).view(kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.linear_fc2(product)


def _swiglu(halves: Tensor) -> Tensor:
    """Compute silu(first) * second of halves [..., 2 * f]: [..., f]. Megatron's, or what the device put there."""
    product: Tensor = megatron_mlp.bias_swiglu_impl(halves, None)  # type: ignore[no-untyped-call]
    return product


def install_recomputation(spec: TransformerBlockSubmodules) -> None:
    """Let the layers of `spec` be able to recompute, where the parts of this file stand for theirs."""
    for layer in spec.layer_specs or ():
        parts = layer.submodules
        if parts.self_attention.module is SelfAttention:
            parts.self_attention.module = RecomputingAttention
        if parts.mlp.module is MLP:
            parts.mlp.module = RecomputingMLP


def recompute_layers(chunks: Iterable[nn.Module], levels: Sequence[Level]) -> None:
    """Set what the layers of each chunk recompute from the next forward pass on: the i-th of every chunk levels[i].
    Those that are recomputed as a whole come first. Below that level, latent attention and experts
    that are not stacked keep all."""
    num_full = sum(1 for _ in takewhile(lambda level: level == "full", levels))
    assert "full" not in levels[num_full:], "Megatron checkpoints the first layers of a chunk"
    for chunk in chunks:
        of_block: Any = chunk
        checkpoint_first_layers(of_block.config, num_full)
        _keep_on_host(of_block, [i for i, level in enumerate(levels) if level == "offload"])
        for layer, level in zip(of_block.decoder.layers, levels, strict=False):
            _recompute_parts(layer, level)


def warn_of_kept_products(level: str, *, has_experts: bool, stacks_experts: bool) -> None:
    """Log that linear does not reach the experts of a model, where they are not stacked: that depends on the GPU."""
    if level == "linear" and has_experts and not stacks_experts:
        logger.warning(
            "gradient_checkpointing=linear: experts are not stacked on this device, so their first products are kept; "
            "write true or auto to recompute whole layers"
        )


def checkpoint_first_layers(config: TransformerConfig, num_layers: int) -> None:
    """Let Megatron checkpoint the first layers of each chunk, 0 for none."""
    config.recompute_granularity = "full" if num_layers else None
    config.recompute_method = "block" if num_layers else None
    config.recompute_num_layers = num_layers or None


def _keep_on_host(chunk: Any, layers: Sequence[int]) -> None:
    if layers and not hasattr(chunk, "host_activations"):
        chunk.host_activations = HostActivations(chunk.decoder.layers, _PAGES)
    if hasattr(chunk, "host_activations"):
        chunk.host_activations.moved = frozenset(layers)


_PAGES = Pages()
_OF_MLP: dict[Level, Recomputed] = {
    "none": "nothing",
    "selective": "product",
    "qkv": "product",
    "linear": "halves",
    "offload": "halves",
    "full": "layer",
}


def _recompute_parts(layer: Any, level: Level) -> None:
    attention, mlp = layer.self_attention, layer.mlp
    if isinstance(attention, RecomputingAttention):
        attention.recompute_inputs = level in ("qkv", "linear", "offload")
    if isinstance(mlp, RecomputingMLP):
        reads_output = hasattr(layer, "post_mlp_layernorm")  # the output of the MLP, when it is recomputed
        mlp.recompute = "nothing" if level == "full" and reads_output else _OF_MLP[level]
    experts: Any = getattr(mlp, "experts", None)
    if hasattr(experts, "keep_halves"):
        experts.keep_halves = level not in ("linear", "offload")
