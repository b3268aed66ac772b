"""The inference transformer: prompts in one padded pass, then one token per slot and step against the cache.

Invariant: a row's result does not depend on the other rows. Products of a single row take another kernel with another
summation order: a padded prompt has several, and the rows of a decoding step are padded to multiples of ROWS. Fewer
numbers of rows also mean fewer kernels, as one is made for each. In float32 products are computed by oneDNN:
torch calls MKL for them, which uses AVX-512 on Intel's processors only; oneDNN does on all that have it, and takes half
the time on an AMD EPYC.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model_specs.config import ModelConfig
from model_specs.rope import Llama3RopeScaling
from rollout.inference.embedded.kv_cache import KVCache
from rollout.inference.embedded.sampler import padded_size
from rollout.inference.embedded.weights import LayerWeights, ModelWeights

ROWS = 8
_HAS_ONEDNN = torch.backends.mkldnn.is_available()

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [t, (H + 2 G) D], rotated) -> [t, H D]. H, G: query and key/value heads, D: head_dim."""
Store = Callable[[int, Tensor, Tensor], None]
"""(layer, keys [n, G, l, D], values [n, G, l, D]): takes what a prompt pass computed into a cache."""


class Transformer:
    """Forward passes over `weights`. Every method requires torch.inference_mode()."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._weights = weights
        self._query_columns = config.num_heads * config.head_dim
        self._rotary_columns = self._query_columns + config.num_kv_heads * config.head_dim
        self._scale = 1.0 / math.sqrt(config.head_dim)
        self._frequencies = inverse_frequencies(config)
        self._rotations = self._frequencies.new_empty(0, config.rotary_dim // 2, dtype=torch.complex64)
        self._logits = torch.empty(0)

    def prefill(self, tokens: Tensor, lengths: Tensor, store: Store) -> Tensor:
        """Run prompts [n, l] (right-padded; true lengths [n]) and return the hidden state of each one's last token,
        [n, hidden_size]."""
        n, length = tokens.shape
        c = self.config

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(n, length, -1, c.head_dim).transpose(1, 2)
            q, k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            store(layer, k, v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(n * length, -1)

        positions = torch.arange(length).repeat(n)
        x = self._layers(tokens.flatten(), positions, length, attend)
        last = x.view(n, length, -1)[torch.arange(n), lengths - 1]
        return self._final_norm(last)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """Run one token [n] of every slot of the cache, at `positions` [n] (the largest is longest - 1), and return
        the hidden states [n, hidden_size]."""
        n, c = tokens.shape[0], self.config
        tokens, positions = _padded(tokens), _padded(positions)
        cache.begin_step(positions[:n])
        out = torch.zeros(tokens.shape[0], self._query_columns, dtype=self._weights.norm.dtype)
        attended = out[:n].view(n * c.num_kv_heads, -1, c.head_dim)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q = (qkv[:n, : self._query_columns] * self._scale).view(attended.shape)
            cache.attend(layer, q, qkv[:n, self._query_columns :].reshape(-1, c.head_dim), attended)
            return out

        return self._final_norm(self._layers(tokens, positions, longest, attend)[:n])

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of [n, hidden_size]: [n, padded_size(vocab_size)] float32, -inf beyond the vocabulary. The
        next call overwrites the result."""
        n, vocab_size = hidden.shape[0], self.config.vocab_size
        hidden, head = _padded(hidden), self._weights.head
        if self._logits.shape[0] < hidden.shape[0]:
            shape = max(hidden.shape[0], 2 * self._logits.shape[0]), padded_size(vocab_size)
            self._logits = torch.full(shape, -torch.inf, dtype=torch.float32)
        out = self._logits[: hidden.shape[0], :vocab_size]
        out.copy_(linear(hidden, head))
        return self._logits[:n]

    def _layers(self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend) -> Tensor:
        """Run all decoder layers over t tokens."""
        x = F.embedding(tokens, self._weights.embedding)
        rotation = self._rotation_table(longest)[positions][:, None]  # [t, 1, R / 2]
        width, eps = self.config.intermediate_size, self.config.rms_norm_eps
        for i, layer in enumerate(self._weights.layers):
            qkv = linear(F.rms_norm(x, x.shape[1:], layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            self._rotate(qkv, layer, rotation)
            x = self._add_product(x, attend(i, qkv), layer.out, layer.out_norm)
            gate_up = linear(F.rms_norm(x, x.shape[1:], layer.post_norm, eps), layer.gate_up)
            gated = F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])
            x = self._add_product(x, gated, layer.down, layer.down_norm)
        return x

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
        """Return the residual x plus y weight^T [t, E], normed first where the family has a norm there."""
        if norm is None:
            return add_linear(x, y, weight)
        return x.add_(F.rms_norm(linear(y, weight), x.shape[1:], norm, self.config.rms_norm_eps))

    def _rotate(self, qkv: Tensor, layer: LayerWeights, rotation: Tensor) -> None:
        """Normalize (Qwen3) and rotate queries and keys [t, (H + G) D] in place."""
        c = self.config
        qk = qkv[:, : self._rotary_columns].view(qkv.shape[0], -1, c.head_dim)
        if layer.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (c.head_dim,), None, c.rms_norm_eps).mul_(layer.qk_norm))
        pairs = qk[..., : c.rotary_dim].unflatten(-1, (-1, 2))
        if qk.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotation)))

    def _final_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], self._weights.norm, self.config.rms_norm_eps)

    def _rotation_table(self, length: int) -> Tensor:
        """Return e^(i * position * frequency): [at least length, rotary_dim / 2] complex64."""
        if self._rotations.shape[0] < length:
            positions = torch.arange(2 * length, dtype=torch.float32)
            angles = positions[:, None] * self._frequencies
            self._rotations = torch.polar(torch.ones_like(angles), angles)
        return self._rotations


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias for x [t, k], weight [n, k] and bias [n]: [t, n]."""
    if _HAS_ONEDNN and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute total + x weight^T for total [t, n]: [t, n], which may be `total`, changed."""
    if _HAS_ONEDNN and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise.binary(x, total, weight, None, "add")
    return total.addmm_(x, weight.t())


def _padded(rows: Tensor) -> Tensor:
    """Return `rows` with zero rows appended up to a multiple of ROWS."""
    short = -rows.shape[0] % ROWS
    return rows if short == 0 else torch.cat((rows, rows.new_zeros(short, *rows.shape[1:])))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the radians per position of each rotated pair of dimensions: [rotary_dim / 2] float32."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    assert isinstance(config.rope_scaling, Llama3RopeScaling), "Yarn belongs to latent attention"
    return _stretched(frequencies, config.rope_scaling)


def _stretched(frequencies: Tensor, rope: Llama3RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths  # within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)
