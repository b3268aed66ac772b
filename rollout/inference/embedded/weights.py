"""Parameters in the layout of the decoding kernels, addressable by their Hugging Face names.

Query, key and value projections lie in one matrix, gate and up projections in another, so that each is one product.
Dimensions that are rotated together stand side by side, so that a rotation is one multiplication of complex numbers.
Most families rotate dimension i together with i + head_dim / 2: the rows of their query and key heads are interleaved
(scores do not change: queries and keys are permuted alike).
Invariant: `names` maps each Hugging Face name to a view into that storage, so that loading a tensor is one copy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from config_schema import did_you_mean
from model_specs.config import ModelConfig
from model_specs.families import read_config
from model_specs.weight_files import check_tensors, stored_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. H, G: query and key/value heads, D: head_dim, E: hidden_size, I: intermediate_size."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2 G) D, E]
    qkv_bias: Tensor | None  # [(H + 2 G) D]
    qk_norm: Tensor | None  # [H + G, D]: the q norm for every query head, the k norm for every key head
    out: Tensor  # [E, H D]
    out_norm: Tensor | None  # [E]: of what is added to the residual
    post_norm: Tensor  # [E]
    gate_up: Tensor  # [2 I, E]
    down: Tensor  # [E, I]
    down_norm: Tensor | None  # [E]: of what is added to the residual


class ModelWeights:
    """All parameters of a model. `update` copies tensors in; `missing` contains the names that no update has set."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        """Raises ValueError for a model with experts or latent attention."""
        if config.moe is not None or config.mla is not None:
            raise ValueError(
                f"model_type={config.model_type!r} has experts or latent attention, and the embedded generator samples "
                "dense models with plain attention; use sglang"
            )
        halves = not config.rope_interleaved and config.rotary_dim == config.head_dim
        assert halves or (config.rope_interleaved and not config.qk_norm), "what _register_attention() lays out"
        self._config = config
        self._empty = lambda *shape: torch.zeros(*shape, dtype=dtype)
        self.names: dict[str, tuple[Tensor, torch.Size]] = {}
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.norm = self._empty(config.hidden_size)
        self._register("model.embed_tokens.weight", self.embedding)
        self._register("model.norm.weight", self.norm)
        if config.tied:
            self.head = self.embedding
        else:
            self.head = torch.zeros_like(self.embedding)
            self._register("lm_head.weight", self.head)
        self.layers = [self._make_layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        self.missing = set(self.names)

    def _register(self, name: str, view: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Make `view` hold parameter `name`; where their shapes differ, the parameter is reshaped to the view's."""
        self.names[name] = (view, torch.Size(shape if shape is not None else view.shape))

    def _make_layer(self, prefix: str) -> LayerWeights:
        c = self._config
        width = c.intermediate_size
        layer = LayerWeights(
            input_norm=self._empty(c.hidden_size),
            qkv=self._empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
            qkv_bias=self._empty((c.num_heads + 2 * c.num_kv_heads) * c.head_dim) if c.qkv_bias else None,
            qk_norm=self._empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None,
            out=self._empty(c.hidden_size, c.num_heads * c.head_dim),
            out_norm=self._empty(c.hidden_size) if c.post_norms else None,
            post_norm=self._empty(c.hidden_size),
            gate_up=self._empty(2 * width, c.hidden_size),
            down=self._empty(c.hidden_size, width),
            down_norm=self._empty(c.hidden_size) if c.post_norms else None,
        )
        self._register(prefix + "input_layernorm.weight", layer.input_norm)
        self._register(prefix + "post_attention_layernorm.weight", layer.post_norm)
        self._register(prefix + "self_attn.o_proj.weight", layer.out)
        if layer.out_norm is not None and layer.down_norm is not None:
            self._register(prefix + "post_self_attn_layernorm.weight", layer.out_norm)
            self._register(prefix + "post_mlp_layernorm.weight", layer.down_norm)
        if c.fused_gate_up:
            self._register(prefix + "mlp.gate_up_proj.weight", layer.gate_up)
        else:
            self._register(prefix + "mlp.gate_proj.weight", layer.gate_up[:width])
            self._register(prefix + "mlp.up_proj.weight", layer.gate_up[width:])
        self._register(prefix + "mlp.down_proj.weight", layer.down)
        self._register_attention(prefix + "self_attn.", layer)
        return layer

    def _register_attention(self, prefix: str, layer: LayerWeights) -> None:
        c = self._config
        heads = torch.tensor([0, c.num_heads, c.num_kv_heads, c.num_kv_heads]).cumsum(0).tolist()
        for i, part in enumerate("qkv"):
            rows = slice(heads[i] * c.head_dim, heads[i + 1] * c.head_dim)
            interleaved = (heads[i + 1] - heads[i], c.head_dim // 2, 2)
            for kind, storage in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
                if storage is None:
                    continue
                view = storage[rows]
                if part != "v" and not c.rope_interleaved:
                    view = view.view(*interleaved, *view.shape[1:]).transpose(1, 2)
                self._register(f"{prefix}{part}_proj.{kind}", view, storage[rows].shape)
        if layer.qk_norm is not None:
            pairs = layer.qk_norm.view(-1, c.head_dim // 2, 2).transpose(1, 2)  # [H + G, 2, D / 2]
            self._register(prefix + "q_norm.weight", pairs[: c.num_heads], (c.head_dim,))
            self._register(prefix + "k_norm.weight", pairs[c.num_heads :], (c.head_dim,))

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors under their Hugging Face names, converting the dtype. Raises ValueError on an unknown name or a
        wrong shape, before anything is copied."""
        known = {name: tensor for name, tensor in tensors.items() if not self._is_derived(name)}
        for name, tensor in known.items():
            if name not in self.names:
                raise ValueError(f"no parameter {name!r} in this model{did_you_mean(name, self.names)}")
            if tensor.shape != self.names[name][1]:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(self.names[name][1])}")
        with torch.inference_mode():
            for name, tensor in known.items():
                view, _ = self.names[name]
                per_head = name.endswith(("q_norm.weight", "k_norm.weight"))
                view.copy_(tensor.reshape(view.shape[1:] if per_head else view.shape))
        self.missing -= known.keys()

    def _is_derived(self, name: str) -> bool:
        """Return whether a tensor that some checkpoints contain is determined by other parameters."""
        return name.endswith("rotary_emb.inv_freq") or (self._config.tied and name == "lm_head.weight")

    def load_folder(self, path: str | Path) -> None:
        """Read the weights of a Hugging Face folder. Raises ValueError where a file is missing, truncated or does not
        hold this model."""
        stored = stored_tensors(path)
        check_tensors(path, stored, read_config(path), value_head=False)
        for file in sorted({tensor.file for tensor in stored.values()}):
            try:
                for name, tensor in _read(file):
                    self.update({name: tensor})
            except (SafetensorError, OSError) as e:
                raise ValueError(f"{file} cannot be read: {e}; it may be truncated, fetch or export it again") from e
            except ValueError as e:
                raise ValueError(f"{file}: {e}") from e


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict: the handle itself cannot be iterated)
            yield name, tensors.get_tensor(name)
