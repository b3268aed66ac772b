"""The keys of an engine and its optimizer, and the model that an engine loads. The driver names them without importing
megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from config_schema.needs import equals, fact, refused_without, unlike
from config_schema.section import Section, Violation, key, section

Level = Literal["none", "selective", "qkv", "linear", "offload", "full"]
"""What a layer computes again in the backward pass. none: nothing. selective: the activation function. qkv: also what
is before the core attention: norm, projection, rotary embedding. linear: also the norm before the MLP and its first
linear layer, or the first products of experts; not the core attention, nor the products that follow it and the
activation function. offload: the same, and what is kept is in host memory. full: the whole layer."""
LEVELS: tuple[Level, ...] = get_args(Level)

Fp8Recipe = Literal["tensorwise", "blockwise"]
"""What shares a factor in a matrix product in FP8. tensorwise: all of a tensor. blockwise: 128 values of a row of
activations and gradients, 128 x 128 of weights."""


_GPUS = refused_without("trainer on GPUs")
_TRAINED = fact("trained model")
_AUTO = _TRAINED & equals(".gradient_checkpointing", "auto")
EXPERTS = fact("model with experts")


class OptimizerConfig(Section):
    """Adam and its learning-rate schedule."""

    type: Literal["adam", "empty"] = key("adam", "Optimizer; empty is for models that are not trained")
    lr: float = key(2e-5, "Learning rate after the warm-up", gt=0, first=True)
    weight_decay: float = key(0.05, "Decoupled weight decay", ge=0)
    beta1: float = key(0.9, "Adam's decay rate of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "Adam's decay rate of the second moment", ge=0, lt=1)
    eps: float = key(1e-5, "Adam's epsilon", gt=0)
    min_lr_ratio: float = key(
        0.0,
        "Learning rate at the end of a decay, as a fraction of lr",
        ge=0,
        le=1,
        needs=unlike(".lr_scheduler_type", "constant"),
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key("constant", "Decay after the warm-up")
    warmup_steps_proportion: float = key(
        0.001, "Fraction of all updates spent on the linear warm-up", ge=0, le=1, first=True
    )
    gradient_clipping: float = key(1.0, "Maximum global gradient norm; 0 disables clipping", ge=0)
    offload: bool = key(
        False, "Keep fp32 master weights and moments in host memory; copy them to the GPU for each update", needs=_GPUS
    )

    @property
    def about(self) -> str:
        """What the lines at the start of a run show."""
        return f"lr {self.lr:g}"

    @property
    def trains(self) -> bool:
        """True if there is an optimizer."""
        return self.type != "empty"


class Held(NamedTuple):
    """How a rank holds a model between updates."""

    itemsize: int
    """Bytes of a weight."""
    gradient_itemsize: int
    offload: bool
    """Masters and moments are in host memory."""


class EngineConfig(Section):
    """How a model is initialised, held and trained."""

    init_from_scratch: bool = key(False, "Start from random weights; read only config.json and the tokenizer from path")
    init_critic_from_actor: bool = key(
        False, "The path is a language model; initialize a new value head", needs=fact("critic")
    )
    gradient_checkpointing: bool | Literal["auto", "selective", "linear"] | None = key(
        None,
        "Recompute activations in the backward pass. true: full layers. linear: layers without the core attention. "
        "selective: activation functions. auto: for each layer the least that fits in memory; on GPUs activations move "
        "to host memory before full layers are recomputed. null: selective with GPUs, none without GPUs",
        needs=_TRAINED & fact("layers that it reaches"),
        first=True,
    )
    gradient_checkpointing_limit_gib: float | None = key(
        None,
        "Memory that the model may use on a device during an update. null: what is free, less 14 %",
        gt=0,
        needs=_AUTO,
    )
    gradient_checkpointing_host_gib: float | None = key(
        None,
        "Host memory that activations of a trainer rank may take. 0: they stay on the GPU. null: 60 % of what is "
        "available, shared by the ranks of a host",
        ge=0,
        needs=_AUTO & fact("trainer on GPUs"),
    )
    bf16: bool | None = key(
        None, "True: bfloat16, False: float32. null: bfloat16 where the trainer computes on GPUs, else float32"
    )
    fp8: bool | Fp8Recipe = key(
        False,
        "Compute matrix products of the layers in FP8; the weights stay in bfloat16. tensorwise (or true): one factor "
        "for each tensor. blockwise: one for 128 values of a row, for 128 x 128 of a weight",
        needs=_GPUS,
    )
    grad_reduce_in_fp32: bool = key(
        True, "false: accumulate and reduce gradients in bfloat16", needs=_TRAINED & refused_without("bf16")
    )
    optimizer: OptimizerConfig = section(
        OptimizerConfig, "Optimizer and learning-rate schedule", needs=fact("trained model, or type=empty")
    )
    moe_aux_loss_coeff: float = key(
        0.0, "Coefficient of the load-balancing loss (mean over sequences; 1 if even)", ge=0, needs=_TRAINED & EXPERTS
    )
    moe_bias_update_rate: float = key(
        0.0,
        "Update rate of the correction biases of experts after an optimizer step",
        ge=0,
        needs=_TRAINED & EXPERTS & fact("correction biases (DeepSeek-V3)"),
    )

    @property
    def loads_weights(self) -> bool:
        """True if training starts from the weights of the folder, not from random ones."""
        return not self.init_from_scratch

    @property
    def needs_value_head(self) -> bool:
        """True if the weights of a critic must end in a value head."""
        return not self.init_critic_from_actor

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """How matrix products are scaled in FP8. None: they are not in FP8."""
        return ("tensorwise" if self.fp8 else None) if isinstance(self.fp8, bool) else self.fp8

    def dtype(self, *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
        """Return the format of the weights of a trainer on GPUs or on the CPU."""
        bf16 = on_gpu if self.bf16 is None else self.bf16
        return "bfloat16" if bf16 else "float32"

    def recompute(self, *, on_gpu: bool) -> Level | Literal["auto"]:
        """Return what a trainer on GPUs or on the CPU recomputes in the backward pass."""
        if self.gradient_checkpointing is None:
            return "selective" if on_gpu else "none"
        if isinstance(self.gradient_checkpointing, str):
            return self.gradient_checkpointing
        return "full" if self.gradient_checkpointing else "none"

    @property
    def auto_limits(self) -> tuple[float | None, float | None]:
        """GiB that recomputation may count on, on a device and on its host. None: what is free."""
        return self.gradient_checkpointing_limit_gib, self.gradient_checkpointing_host_gib

    def held(self, *, on_gpu: bool) -> Held:
        """Return how a trainer on GPUs or on the CPU holds the model between updates."""
        itemsize = 2 if self.dtype(on_gpu=on_gpu) == "bfloat16" else 4
        return Held(itemsize, 4 if self.grad_reduce_in_fp32 else itemsize, self.optimizer.offload)

    def numeric_rules(self, at: str, *, on_gpu: bool) -> Iterator[Violation]:
        """Yield what a trainer on GPUs or on the CPU, or its format, does not support. `at`: the prefix of the keys."""
        dtype, name = self.dtype(on_gpu=on_gpu), at.removesuffix(".")
        if not on_gpu:
            for key, value in {"fp8": self.fp8, "optimizer.offload": self.optimizer.offload}.items():
                if value:
                    option = f"{key.rpartition('.')[2]}={'true' if value is True else value}"
                    message = f"{option} requires GPUs, but this run trains on CPU; write false"
                    yield Violation((f"{at}{key}", "allocation_mode"), message)
        elif self.fp8 and dtype != "bfloat16":
            yield Violation((f"{at}fp8", f"{at}bf16"), "fp8 requires bfloat16; write bf16=true")
        if not self.grad_reduce_in_fp32 and dtype != "bfloat16":
            message = f"grad_reduce_in_fp32=false is for bfloat16, {name} is {dtype}; write {at}bf16=true, or true"
            yield Violation((f"{at}grad_reduce_in_fp32", f"{at}bf16"), message)


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A model that an engine loads, and its part in the run."""

    config: EngineConfig
    path: str
    """Folder with config.json and safetensors (not needed with init_from_scratch)."""
    is_critic: bool = False
    """A value head instead of the language-model head."""
    seed: int = 1
    """Of random weights, which are the same in every layout."""
    total_updates: int | None = None
    """Optimizer updates of the whole run. None: the model is not trained and has no optimizer."""


LOGITS_BYTES = 5 << 30
"""Most of a buffer of the logits of all tokens."""
SEVERAL_LOGITS_BYTES = 2 << 30
"""Size of the buffer where there are several. A larger one means fewer passes over the gradient of the weight."""
DRAWN_AHEAD = 32
"""Parameters whose random weights are drawn while one is copied to the model."""
DRAWING_THREADS = 16
"""Threads that draw them, at most."""
FP32_ROWS = 512
"""Rows of logits in float32 at a time."""
MLP_TOKENS = 16384
"""Most tokens of a rank that pass through a dense MLP at once where its inner activations are recomputed. A chunk adds
its gradient to that of each weight, 8 bytes of traffic: computed for an H100, 5 % of the time of the product with
16,384 tokens, 10 % with 8,192. With the widths of Qwen3-4B a chunk takes 1.4 GB."""


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Yield slices of at most `chunk_tokens` tokens; at least one, so that zero tokens still give a zero gradient."""
    for start in range(0, max(num_tokens, 1), chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))
