"""One model on one set of ranks: training steps, log-probabilities, values, weights and checkpoints.

Every method is collective: all ranks call it, in the same order, with the same arguments. Several engines (actor,
critic, reference) share the process and its groups. Invariant: what a method returns does not depend on the layout,
nor on how the minibatch was cut into microbatches, beyond summation order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_adapter.checkpoint.checkpoint import copied_sizes, copy_checkpoint, load_checkpoint
from mcore_adapter.checkpoint.writing import HostCopy
from mcore_adapter.data.batch import BatchShape, Divisors, ModelOutput, PackedBatch, Sequences, TokenWeights, token_mean
from mcore_adapter.data.packing import PackedMicrobatch, PackingLayout, check_routed_experts, pack_sequences
from mcore_adapter.data.planner import BatchShard, Microbatch, PassLimits, Planner, attention_cost, weighed, whole
from mcore_adapter.device import Device
from mcore_adapter.hf.weights import (
    ExportPlan,
    Receivers,
    init_from_scratch,
    load_hf_weights,
    plan_export,
    run_export,
    save_hf,
)
from mcore_adapter.memory.auto import AutoRecompute, Peak
from mcore_adapter.memory.host import HostWeights
from mcore_adapter.memory.out_of_memory import MemoryGuard, PassSizes, StepOutOfMemory
from mcore_adapter.memory.recompute import warn_of_kept_products
from mcore_adapter.models.forward import lm_output, run_schedule, value_output
from mcore_adapter.models.gpt import FP8_ROWS, build_model, lm_head_weight
from mcore_adapter.models.kernels import computed_by
from mcore_adapter.models.router import Balance, finish_update, forget_counts
from mcore_adapter.optimizer.training import TrainOptimizer, wrap_for_training
from mcore_adapter.parallel import ParallelState
from mcore_adapter.settings import EngineModel
from model_specs.config import ModelConfig
from model_specs.families import read_config
from tracing import span

T = TypeVar("T")
WARM_UP_TOKENS = 32
"""Tokens of each sequence of a warm-up, which has one sequence for each data-parallel rank."""
LossFn = Callable[[ModelOutput, Mapping[str, Tensor], Sequences], tuple[Tensor, dict[str, Tensor]]]
"""(output, per-token fields with "loss_mask" and "token_weights", sequences) -> (loss, metrics), all of them weighted
sums over the trained tokens of a microbatch; train_step() divides them."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Per-token results of some sequences of a batch, laid end to end in the order of `sequences`."""

    sequences: list[int]
    values: Tensor  # [sum of their lengths] float32


class MegatronEngine:
    """See the methods. A model that is not trained (`loaded.total_updates` is None) holds nothing but weights."""

    def __init__(self, loaded: EngineModel, *, parallel: ParallelState, device: Device) -> None:
        self._parallel, self._device, self._loaded = parallel, device, loaded
        config, on_gpu = loaded.config, device.torch_device.type != "cpu"
        dtype: torch.dtype = getattr(torch, config.dtype(on_gpu=on_gpu))
        recompute, fp8 = config.recompute(on_gpu=on_gpu), config.fp8_recipe
        self.model_config: ModelConfig = read_config(loaded.path)
        self._balance = Balance(aux_loss_coeff=config.moe_aux_loss_coeff, bias_update_rate=config.moe_bias_update_rate)
        self._model = build_model(
            self.model_config,
            parallel=parallel,
            device=device,
            dtype=dtype,
            is_critic=loaded.is_critic,
            recompute="none" if recompute == "auto" else recompute,
            balance=self._balance,
            fp8=fp8,
        )
        self._fill()
        self._chunks: Sequence[nn.Module] = self._model
        self._plans: dict[tuple[int, Receivers], ExportPlan] = {}  # by the arguments of iter_hf_weights()
        self._optimizer: TrainOptimizer | None = None
        self._recompute: AutoRecompute | None = None
        overlap = loaded.total_updates is not None and device.overlaps_communication and parallel.dp_cp_group.size() > 1
        self._memory = MemoryGuard(parallel, device, overlap=overlap)
        if loaded.total_updates is None:
            for chunk in self._model:
                chunk.requires_grad_(False).eval()
        else:
            if parallel.rank == 0:
                stacks = device.has_grouped_products and not fp8
                warn_of_kept_products(recompute, has_experts=self.model_config.moe is not None, stacks_experts=stacks)
            ddp = wrap_for_training(
                self._model,
                overlap=overlap,
                grad_reduce_in_fp32=config.grad_reduce_in_fp32,
                before_reduction=self._memory.all_have_gradients,
            )
            self._chunks = ddp
            self._optimizer = TrainOptimizer(ddp, config.optimizer, dtype, total_updates=loaded.total_updates)
            if recompute == "auto":
                self._recompute = AutoRecompute(
                    self._model,
                    self.model_config,
                    parallel=parallel,
                    device=device,
                    itemsize=dtype.itemsize,
                    is_critic=loaded.is_critic,
                    fp8=fp8 is not None,
                    limits=config.auto_limits,
                    optimizer=self._optimizer,
                )
        self._host_copy = HostCopy()
        self._host_weights = HostWeights(self._model)
        self._sequence_parallel: bool = self._model[0].config.sequence_parallel
        self._packing = PackingLayout(
            cp_size=parallel.layout.cp,
            cp_rank=parallel.cp_rank,
            sequence_parallel_size=parallel.layout.tp if self._sequence_parallel else 1,
            sequence_parallel_rank=parallel.tp_rank if self._sequence_parallel else 0,
            row_multiple=FP8_ROWS[fp8],
            # Latent attention rotates inside: there is no place to give each shared row its own angle.
            share_prompts=device.shares_prompts and parallel.layout.cp == 1 and self.model_config.mla is None,
            routes=self.model_config.moe is not None,
        )
        self.planner = Planner(
            dp=parallel.layout.dp,
            pp=parallel.layout.pp,
            interleaved=parallel.layout.vpp > 1,
            sequence_multiple=self._packing.sequence_multiple,
            share_prompts=self._packing.share_prompts,
            attention_cost=attention_cost(self.model_config),
        )
        """How this engine cuts a batch."""

    def _fill(self) -> None:
        """Draw the weights, or read them from the Hugging Face folder."""
        loaded = self._loaded
        if not loaded.config.loads_weights:
            init_from_scratch(self._model, parallel=self._parallel, seed=loaded.seed)
            return
        load_hf_weights(
            self._model,
            loaded.path,
            parallel=self._parallel,
            seed=loaded.seed,
            needs_value_head=loaded.config.needs_value_head,
        )

    @property
    def num_updates(self) -> int:
        """Optimizer steps applied so far."""
        return self._optimizer.num_updates if self._optimizer else 0

    def train_step(
        self,
        batch: PackedBatch | BatchShard,
        loss_fn: LossFn,
        *,
        max_tokens_per_mb: int,
        max_sequence_tokens: int = 0,
        token_weights: TokenWeights = token_mean,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """Run one optimizer update on the whole of `batch`, in microbatches of max_tokens_per_mb; where a sequence is
        longer, but not beyond max_sequence_tokens, of as many as that one has.

        `batch` is the same PackedBatch on every rank, or each rank's shard of it, which has its token weights.
        `token_weights(batch)` gives each token of the whole batch a weight [T]. The loss is divided by the sum of all
        weights, its metrics by that of the trained tokens; `loss_fn` finds the weights of its tokens in the field
        "token_weights" [t] float32. Returns, on every rank, "loss", the metrics of `loss_fn`, "grad_norm" (before
        clipping), "lr", "num_microbatches" and "update_skipped" (1.0 when the gradient norm was not finite and nothing
        was changed). Raises StepOutOfMemory.
        """
        if self._optimizer is None:
            raise ValueError("this engine has no optimizer: it was built for inference (total_updates=None)")
        shard = weighed(batch, token_weights)
        limit = self.planner.limit(shard.shape, PassLimits(max_tokens_per_mb, max_sequence_tokens))
        plan, divisors = shard.plan(self.planner, limit), shard.divisors
        no_tokens = torch.zeros((), dtype=torch.int32)  # Megatron's count; the division happens here

        def postprocess(microbatch: PackedMicrobatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            result = self._head(microbatch, output, temperature, with_entropy)
            loss, metrics = loss_fn(result, microbatch.fields, self._sequences(microbatch))
            return loss / divisors.loss, no_tokens, {"loss": loss.detach(), **metrics}

        gradients = partial(self._forward_backward, shard, plan, postprocess)
        sizes = partial(self._sizes, shard.shape, plan, limit)
        with span("forward and backward"):
            sums, num_microbatches = self._fitting(gradients, sizes, max(map(len, plan)))
        with span("optimizer"):
            update = self._memory.update(self._optimizer.step, sizes)
        return {
            **self._reduce_metrics(sums, divisors),
            **self._finish_routers(applied=update.applied),
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "num_microbatches": float(num_microbatches),
            "update_skipped": float(not update.applied),
        }

    def warm_up(self) -> None:
        """Run forward and backward on a few tokens, so that kernels are loaded or compiled, and groups connected,
        before the first update. The next train_step() drops the gradients; nothing else changes. Without an optimizer,
        do nothing. Raises StepOutOfMemory."""
        if self._optimizer is None:
            return
        num_tokens, count = WARM_UP_TOKENS, self._parallel.layout.dp
        batch = PackedBatch(
            token_ids=torch.arange(num_tokens).remainder(self.model_config.vocab_size).repeat(count),
            cu_seqlens=num_tokens * torch.arange(count + 1),
            loss_mask=(torch.arange(num_tokens) >= num_tokens // 2).repeat(count),
        )
        shard = weighed(batch, token_mean)
        limit = int(self.planner.padded_lens(shard.shape).max())
        plan = self.planner.plan(shard.shape, limit)

        def postprocess(microbatch: PackedMicrobatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
            result = self._head(microbatch, output, temperature=1.0, with_entropy=False)
            loss = result.values if result.logprobs is None else result.logprobs
            assert loss is not None, "an output has one of them"
            return loss.sum(), torch.zeros((), dtype=torch.int32), None

        gradients = partial(self._forward_backward, shard, plan, postprocess)
        with span("warm-up"):
            self._memory.gradients(gradients, partial(self._sizes, shard.shape, plan, limit))

    def _forward_backward(
        self, shard: BatchShard, plan: Sequence[Sequence[Microbatch]], postprocess: Callable[..., object]
    ) -> tuple[list[Any], int]:
        """Add the gradients of this rank's part of the plan; return what run_schedule() does, and the number of its
        microbatches."""
        microbatches = self._pack(shard, plan[self._parallel.dp_rank])
        return run_schedule(self._chunks, microbatches, postprocess, forward_only=False), len(microbatches)

    def _fitting(self, gradients: Callable[[], T], sizes: Callable[[], PassSizes], num_microbatches: int) -> T:
        """Compute gradients from zero, again with more recomputation where memory ran out and that can be chosen."""
        assert self._optimizer is not None, "train_step() checks it"
        if self._recompute is not None:
            self._recompute.prepare(sizes().largest, num_microbatches)
        while True:
            self._optimizer.zero_grad()
            if self.model_config.moe is not None:
                forget_counts(self._model)  # of a pass that ran out of memory
            try:
                result = self._memory.gradients(gradients, sizes)
            except StepOutOfMemory as e:
                if self._recompute is None or not e.repeatable or not self._recompute.retreat():
                    raise
                continue
            if self._recompute is not None:
                self._recompute.observe()
            return result

    def logprobs(
        self,
        batch: PackedBatch | BatchShard,
        *,
        max_tokens_per_mb: int,
        max_sequence_tokens: int = 0,
        temperature: float = 1.0,
    ) -> Shard | None:
        """Return the log-probabilities of the loss_mask tokens (0 elsewhere). A Shard on the ranks that own the result
        (tensor and context parallel rank 0 of the last stage), one for each data-parallel rank; None on the others.
        Limits as in train_step(). Raises StepOutOfMemory."""
        if self._loaded.is_critic:
            raise ValueError("this engine holds a critic: it has values, no log-probabilities")
        return self._infer(
            whole(batch),
            PassLimits(max_tokens_per_mb, max_sequence_tokens),
            lambda mb, out: self._head(mb, out, temperature, with_entropy=False).logprobs,
        )

    def entropy(
        self,
        batch: PackedBatch | BatchShard,
        *,
        max_tokens_per_mb: int,
        max_sequence_tokens: int = 0,
        temperature: float = 1.0,
    ) -> Shard | None:
        """Return the entropy, in nats, of the distributions that the loss_mask tokens were chosen from (0 elsewhere);
        see logprobs()."""
        return self._infer(
            whole(batch),
            PassLimits(max_tokens_per_mb, max_sequence_tokens),
            lambda mb, out: self._head(mb, out, temperature, with_entropy=True).entropy,
        )

    def values(
        self, batch: PackedBatch | BatchShard, *, max_tokens_per_mb: int, max_sequence_tokens: int = 0
    ) -> Shard | None:
        """Return the critic's values of the states in which the loss_mask tokens were chosen (0 elsewhere); see
        logprobs()."""
        if not self._loaded.is_critic:
            raise ValueError("this engine holds a language model: it has log-probabilities, no values")
        return self._infer(
            whole(batch),
            PassLimits(max_tokens_per_mb, max_sequence_tokens),
            lambda mb, out: self._head(mb, out, 1.0, False).values,
        )

    def iter_hf_weights(self, bucket_bytes: int, *, to: Receivers = "first") -> Iterator[dict[str, Tensor]]:
        """Yield buckets of full tensors under their Hugging Face names on the ranks `to`, empty ones elsewhere; see
        run_export()."""
        self._finish_param_gather()
        plan = self._plans.get((bucket_bytes, to))
        if plan is None:
            plan = plan_export(self._model, parallel=self._parallel, bucket_bytes=bucket_bytes, to=to)
            self._plans[bucket_bytes, to] = plan
        return run_export(plan, parallel=self._parallel)

    def save_hf(self, path: str | Path, *, tokenizer_from: str | Path | None = None) -> None:
        """Write a Hugging Face folder."""
        self._finish_param_gather()
        device = self._device.torch_device
        save_hf(self._model, path, parallel=self._parallel, tokenizer_from=tokenizer_from, device=device)

    def computed_by(self) -> dict[str, str]:
        """Return which library computes each part of the model and of the update."""
        return computed_by(self._model, self._optimizer)

    def held_bytes(self) -> dict[str, float]:
        """Return the bytes of weights, gradients and optimizer state on the device; nothing without an optimizer."""
        return {} if self._optimizer is None else self._optimizer.held_bytes()

    @property
    def recompute_peak(self) -> Peak | None:
        """What recompute="auto" measured last, and of which choice; None before the first update."""
        return None if self._recompute is None else self._recompute.peak

    def offload(self, *, weights: bool = False) -> None:
        """Drop the gradients and move masters and moments to the host, and with `weights` the weights too: then nothing
        computes until reload(), but weights can be saved."""
        self._finish_param_gather()
        if self._optimizer is not None:
            self._optimizer.offload()
        if weights:
            self._host_weights.to_host()

    def reload(self) -> None:
        """Reverse offload()."""
        self._host_weights.to_device()
        if self._optimizer is not None:
            self._optimizer.reload()

    def prepare_saves(self) -> None:
        """Begin to take the host memory of begin_save(), for which the first one would otherwise wait."""
        rooms = copied_sizes(self._model, self._optimizer, parallel=self._parallel)
        self._host_copy.reserve(rooms, on=self._device.torch_device)

    def begin_save(self, path: str | Path) -> None:
        """Save model, optimizer, schedule and random states to a new folder, which any layout can load. Return when
        everything is copied to host memory, and write it in the background; outcome.wait_for_outcome(path) waits for
        the end, which must precede the next save."""
        self._finish_param_gather()
        copy_checkpoint(
            path, self._model, self._optimizer, self._host_copy,
            parallel=self._parallel, tokenizer_from=Path(self._loaded.path),
        ).write_in_background()  # fmt: skip

    def load(self, path: str | Path) -> None:
        """Continue from a folder of begin_save(). Random states come back where the layout is the one that saved."""
        self._finish_param_gather()
        load_checkpoint(path, self._model, self._optimizer, parallel=self._parallel)

    def _finish_routers(self, *, applied: bool) -> dict[str, float]:
        moe, balance = self.model_config.moe, self._balance
        if moe is None or not (balance.aux_loss_coeff or balance.bias_update_rate):
            return {}
        return finish_update(self._model, moe, balance, applied=applied, device=self._device.torch_device)

    def _finish_param_gather(self) -> None:
        """Wait until every weight of this rank is the current one."""
        if self._optimizer is not None:
            self._optimizer.finish_param_gather()

    def _pack(self, shard: BatchShard, plan: Sequence[Microbatch]) -> list[PackedMicrobatch]:
        return [self._pack_microbatch(shard, sequences) for sequences in plan]

    def _pack_microbatch(self, shard: BatchShard, sequences: Microbatch) -> PackedMicrobatch:
        own, shape = shard.select(sequences), shard.shape
        check_routed_experts(own, self.model_config)
        if bool(own.loss_mask[own.cu_seqlens[:-1]].any()):
            raise ValueError("loss_mask is True on the first token of a sequence, which has no log-probability")
        batch_tokens = shape.num_tokens - shape.num_sequences
        return pack_sequences(own, self._packing, batch_tokens=batch_tokens, device=self._device.torch_device)

    def _sizes(self, shape: BatchShape, plan: list[list[Microbatch]], max_tokens_per_mb: int) -> PassSizes:
        padded = self.planner.padded_lens(shape)
        largest = max(int(padded[microbatch].sum()) for rank in plan for microbatch in rank if microbatch)
        return PassSizes(largest=min(largest, max_tokens_per_mb), longest=int(padded.max()))

    def _sequences(self, microbatch: PackedMicrobatch) -> Sequences:
        return Sequences(
            of_token=microbatch.sequence_of_token,
            count=microbatch.num_sequences,
            group=self._parallel.cp_group if self._parallel.layout.cp > 1 else None,
        )

    def _head(
        self, microbatch: PackedMicrobatch, output: Tensor, temperature: float, with_entropy: bool
    ) -> ModelOutput:
        if self._loaded.is_critic:
            return value_output(output, microbatch)
        return lm_output(
            output,
            lm_head_weight(self._model[-1]),
            microbatch,
            tp_group=self._parallel.tp_group,
            sequence_parallel=self._sequence_parallel,
            temperature=temperature,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def _infer(
        self, shard: BatchShard, limits: PassLimits, head: Callable[[PackedMicrobatch, Tensor], Tensor | None]
    ) -> Shard | None:
        self._finish_param_gather()
        limit = self.planner.limit(shard.shape, limits)
        whole_plan = shard.plan(self.planner, limit)
        plan = whole_plan[self._parallel.dp_rank]

        def run() -> tuple[list[PackedMicrobatch], list[Any]]:
            microbatches = self._pack(shard, plan)
            return microbatches, run_schedule(self._model, microbatches, head, forward_only=True)

        microbatches, results = self._memory.inference(run, partial(self._sizes, shard.shape, whole_plan, limit))
        if not (self._parallel.is_last_stage and self._parallel.tp_rank == 0):
            return None
        own = [self._whole(mb, r) for mb, r, ids in zip(microbatches, results, plan, strict=True) if ids]
        per_token = torch.cat(own) if own else torch.empty(0, device=self._device.torch_device)
        if self._parallel.layout.cp > 1:
            dist.all_reduce(per_token, group=self._parallel.cp_group)
        if self._parallel.cp_rank != 0:
            return None
        return Shard(sequences=[i for mb in plan for i in mb], values=per_token)

    @staticmethod
    def _whole(microbatch: PackedMicrobatch, result: Tensor) -> Tensor:
        """Return all tokens of the microbatch, given this context-parallel rank's tokens; 0 where another rank has the
        result."""
        if microbatch.token_index is None:
            return result
        return result.new_zeros(microbatch.num_tokens).index_copy(0, microbatch.token_index.to(result.device), result)

    def _reduce_metrics(self, sums: Sequence[Mapping[str, Tensor]], divisors: Divisors) -> dict[str, float]:
        """Convert the sums of each microbatch on the last stage to means over the batch's trained tokens, on every
        rank."""
        parallel = self._parallel
        names: list[str] = list(sums[0]) if sums else []
        values: list[float] = []
        if parallel.is_last_stage:
            total = torch.stack([torch.stack([s[name].detach().float() for name in names]) for s in sums]).sum(0)
            if parallel.dp_cp_group.size() > 1:
                dist.all_reduce(total, group=parallel.dp_cp_group)
            values = (total / divisors.metrics).tolist()
            values[names.index("loss")] = (total[names.index("loss")] / divisors.loss).item()
        if parallel.layout.pp > 1:  # only the last stage has the names
            packed = [dict(zip(names, values, strict=True))]
            source = dist.get_process_group_ranks(parallel.pp_group)[-1]
            dist.broadcast_object_list(packed, src=source, group=parallel.pp_group, device=self._device.torch_device)
            return packed[0]
        return dict(zip(names, values, strict=True))
