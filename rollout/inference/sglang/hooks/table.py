"""The hooks: symbols of SGLang that this project changes, each with its reason.

They give the trainer what the HTTP interface lacks. SGLang applies them, through its own plug-in interface, at the
start of each of its processes. A server whose SGLang lacks a symbol is refused at start: versions or log-probabilities
would be wrong without the hook.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rollout.inference.sglang.arguments import SGLANG
from rollout.inference.sglang.hooks import checksums, models
from rollout.inference.sglang.hooks.in_flight import InFlight
from rollout.inference.sglang.hooks.recorded_copies import RecordedCopies
from rollout.inference.sglang.hooks.sampling import Sampling, fp32_logits
from rollout.inference.sglang.hooks.scheduler import VERSION_KEY, TokenVersions, gather_of_one, many_at_once
from rollout.inference.sglang.receivers import BroadcastBuckets, PushedFolders, SharedBuckets

Kind = Literal["before", "after", "around"]
SOURCE = ("slipstream", None)
"""Name of these hooks among SGLang's plug-ins."""


@dataclass(frozen=True)
class Hook:
    """One symbol of SGLang that is changed."""

    symbol: str
    """Below `sglang.srt.`."""
    kind: Kind
    function: Callable[..., object]
    reason: str
    versions: str = SGLANG
    """Versions of SGLang whose symbol has this form."""

    @property
    def target(self) -> str:
        return f"sglang.srt.{self.symbol}"

    @property
    def link(self) -> str:
        """Address of the symbol in SGLang's source."""
        path = "/".join(itertools.takewhile(lambda part: not part[0].isupper(), self.target.split(".")))
        return f"https://github.com/sgl-project/sglang/blob/v{SGLANG}/python/{path}.py"


def hooks() -> Sequence[Hook]:
    """Return the table, with the state that the hooks of one process share."""
    tokens, sampling, folders = TokenVersions(), Sampling(), PushedFolders()
    copies = RecordedCopies(models.moves_experts)
    broadcast, shared, in_flight = BroadcastBuckets(copies), SharedBuckets(copies), InFlight(VERSION_KEY)
    scheduler = "managers.scheduler.Scheduler."
    delayer = "managers.prefill_delayer.PrefillDelayer."
    manager = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    updater = "model_executor.model_runner_components.weight_updater.WeightUpdater."
    loader = "models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin."
    attention = "models.deepseek_common.attention_backend_handler.AttentionBackendRegistry."
    fails = "an update that fails on any tensor-parallel rank is answered as a failure"
    other = "changes apply only to the weights of the last folder"
    rows: list[tuple[str, Kind, Callable[..., object], str]] = [
        (scheduler + "run_batch", "after", tokens.tag_tokens, "every token carries the version that sampled it"),
        (scheduler + "_add_request_to_queue", "before", tokens.name_prefix, "prefixes are shared within one version"),
        (scheduler + "continue_generation", "before", tokens.before_continue, "the request id carries the version"),
        (scheduler + "pause_generation", "after", tokens.wait_for_device, "in_place leaves a forward pass running"),
        (scheduler + "get_internal_state", "around", in_flight.answer, "tokens so far, on request"),
        (delayer + "_gather_info", "around", gather_of_one, "no collective of one rank in every step"),
        (delayer + "_negotiate_should_allow_prefill", "before", many_at_once, "prompts wait for places for many"),
        (updater + "update_weights_from_disk", "around", folders.load, "changes to the weights of the push before"),
        (updater + "_update_bucketed_weights_from_distributed", "around", broadcast.receive, "receive while copying"),
        (updater + "_update_weights_from_flattened_bucket", "around", shared.copy, "answered when copies are complete"),
        (manager + "release_memory_occupation", "after", folders.forget, other),
        (manager + "update_weights_from_tensor", "after", folders.forget, other),
        (manager + "update_weights_from_distributed", "after", folders.forget, other),
        (manager + "update_weights_from_disk", "after", folders.report_any_failure, fails),
        (manager + "update_weights_from_tensor", "after", folders.report_any_failure, fails),
        (manager + "update_weights_from_distributed", "after", folders.report_any_failure, fails),
        (loader + "do_load_weights", "before", models.copy_fused_parts, "a part that comes alone would be dropped"),
        (attention + "get_handler", "around", models.compressed_on_cpu, "prefills of latent attention without a GPU"),
    ]
    layers, cache = "layers.", "state_capturer.base."
    quantized, logits = layers + "quantization.fp8.Fp8Config.", layers + "logits_processor.LogitsProcessor."
    logprobs = layers + "logprob_processor.OutputLogprobProcessor."
    radix, checker = "mem_cache.radix_cache.RadixCache.", "utils.weight_checker.WeightChecker."
    batch, without_gpu = "managers.schedule_batch.ScheduleBatch.", "experts of tokens without a GPU"
    rows += [
        (radix + "cache_finished_req", "before", tokens.keep_or_drop_answer, "answers are kept for a next turn alone"),
        (quantized + "get_quant_method", "around", models.no_cache_scales, "FP8 weights have no scales of a cache"),
        (logits + "_compute_lm_head", "around", fp32_logits, "bfloat16 would round a logit of 20 by up to 0.06"),
        (layers + "sampler.Sampler._sample_from_probs", "around", sampling.sample, "no sort of the vocabulary"),
        (logprobs + "compute_logprobs", "around", sampling.renormalise, "log-probabilities of what top_k, top_p leave"),
        (batch + "filter_batch", "after", sampling.forget, "one greedy request slows down its own steps alone"),
        (cache + "BaseHostCache.__init__", "around", models.kept_experts, without_gpu),
        (cache + "BaseTopkCapturer.on_forward_end", "after", models.copy_experts, without_gpu),
        (checker + "handle", "around", checksums.answer_check, "a checksum that the sender can compute"),
    ]
    return [Hook(*row) for row in rows]


def install() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    kinds = {"before": HookType.BEFORE, "after": HookType.AFTER, "around": HookType.AROUND}
    for hook in hooks():
        HookRegistry.register(hook.target, hook.function, kinds[hook.kind], source=HookSource(*SOURCE))


def not_applied() -> list[str]:
    """Return the targets that this SGLang lacks."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    mine = {target for target, found in HookRegistry._hooks.items() if any(source == SOURCE for *_, source in found)}
    return sorted(mine - HookRegistry._patched)


def reason_for(missing: list[str]) -> str:
    """Return on one line why hooks did not find these targets: SGLang cannot import a module of its own, as where
    another package has a version that it cannot use, or it has no such targets."""
    for target in missing:
        module = ".".join(itertools.takewhile(lambda part: not part[0].isupper(), target.split(".")))
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 (an import runs any code)
            if not (isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")):
                return f"cannot import {module}: {type(error).__name__}: {' '.join(str(error).split())}"
    return f"lacks what this server's hooks change: {', '.join(missing)}"
