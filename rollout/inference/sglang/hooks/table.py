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
from typing import Any, Literal

from rollout.inference.sglang.buckets.received_buckets import ReceivedBuckets
from rollout.inference.sglang.buckets.recorded_copies import RecordedCopies
from rollout.inference.sglang.hooks import checksums, experts, latent_attention, precision, prefills
from rollout.inference.sglang.hooks.folders import PushedFolders
from rollout.inference.sglang.hooks.in_flight import InFlight
from rollout.inference.sglang.hooks.sampling import Sampling
from rollout.inference.sglang.hooks.versions import VERSION_KEY, TokenVersions, drop_answer

SGLANG = "0.5.17"
"""The SGLang that this project is written for: its symbols, its HTTP interface, and the pin in setup.py."""
SOURCE = ("slipstream", None)
"""Of these hooks, by which SGLang distinguishes several plug-ins."""


@dataclass(frozen=True)
class Hook:
    """One symbol of SGLang that is changed."""

    symbol: str
    """Below `sglang.srt.`."""
    kind: Literal["before", "after", "around"]
    function: Callable[..., Any]
    reason: str
    versions: str = SGLANG
    """Of SGLang, in which the symbol was seen to have this form."""

    @property
    def target(self) -> str:
        return f"sglang.srt.{self.symbol}"

    @property
    def link(self) -> str:
        """Where SGLang's source of the symbol is."""
        path = "/".join(itertools.takewhile(lambda part: not part[0].isupper(), self.target.split(".")))
        return f"https://github.com/sgl-project/sglang/blob/v{SGLANG}/python/{path}.py"


def hooks() -> Sequence[Hook]:
    """Return the table, with the state that the hooks of one process share."""
    tokens, sampling, folders = TokenVersions(), Sampling(), PushedFolders()
    deepseek = "models.deepseek_common."
    buckets = ReceivedBuckets(RecordedCopies(experts.moves_experts))
    scheduler, runner = "managers.scheduler.Scheduler.", "model_executor.model_runner_components.weight_updater."
    manager = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    delayer = "managers.prefill_delayer.PrefillDelayer."
    fails = "an update that fails on any tensor-parallel rank is answered as a failure"
    other_weights = "changes apply only to the weights of the last folder"
    return (
        Hook(scheduler + "run_batch", "after", tokens.tag_tokens, "every token carries the version that sampled it"),
        Hook(
            scheduler + "_add_request_to_queue", "before", tokens.name_prefix, "prefixes are shared within one version"
        ),
        Hook(scheduler + "continue_generation", "before", tokens.before_continue, "the request id carries the version"),
        Hook(scheduler + "pause_generation", "after", tokens.wait_for_device, "in_place leaves a forward pass running"),
        Hook(scheduler + "get_internal_state", "around", InFlight(VERSION_KEY).answer, "tokens so far, on request"),
        Hook(
            deepseek + "deepseek_weight_loader.DeepseekV2WeightLoaderMixin.do_load_weights",
            "before",
            latent_attention.copy_fused_parts,
            "a fused projection that comes alone would be dropped",
        ),
        Hook(
            deepseek + "attention_backend_handler.AttentionBackendRegistry.get_handler",
            "around",
            latent_attention.compressed_on_cpu,
            "prefills of latent attention without a GPU",
        ),
        Hook(
            runner + "WeightUpdater.update_weights_from_disk",
            "around",
            folders.load,
            "changes to the weights of the push before",
        ),
        Hook(
            runner + "WeightUpdater._update_bucketed_weights_from_distributed",
            "around",
            buckets.receive,
            "a bucket is received while the one before is copied",
        ),
        Hook(
            runner + "WeightUpdater._update_weights_from_flattened_bucket",
            "around",
            buckets.copy_shared,
            "an update is answered when the copies of all ranks are complete",
        ),
        Hook(manager + "release_memory_occupation", "after", folders.forget, other_weights),
        Hook(manager + "update_weights_from_tensor", "after", folders.forget, other_weights),
        Hook(manager + "update_weights_from_distributed", "after", folders.forget, other_weights),
        Hook(manager + "update_weights_from_disk", "after", folders.report_any_failure, fails),
        Hook(manager + "update_weights_from_tensor", "after", folders.report_any_failure, fails),
        Hook(manager + "update_weights_from_distributed", "after", folders.report_any_failure, fails),
        Hook(
            "mem_cache.radix_cache.RadixCache.cache_finished_req",
            "before",
            drop_answer,
            "a cache full of answers is searched at every step",
        ),
        Hook(
            "layers.quantization.fp8.Fp8Config.get_quant_method",
            "around",
            precision.no_cache_scales,
            "FP8 weights come without scales of a cache",
        ),
        Hook(
            "layers.logits_processor.LogitsProcessor._compute_lm_head",
            "around",
            precision.fp32_logits,
            "logits in float32, as in the trainer: bfloat16 would round one of 20 by up to 0.06",
        ),
        Hook(
            "state_capturer.base.BaseHostCache.__init__",
            "around",
            experts.kept_experts,
            "experts of tokens without a GPU",
        ),
        Hook(
            "state_capturer.base.BaseTopkCapturer.on_forward_end",
            "after",
            experts.copy_experts,
            "experts of tokens without a GPU",
        ),
        Hook(
            "utils.weight_checker.WeightChecker.handle",
            "around",
            checksums.answer_check,
            "a checksum on any device that the sender can compute",
        ),
        Hook(
            "layers.sampler.Sampler._sample_from_probs",
            "around",
            sampling.sample,
            "no sort of the vocabulary, and no second check of probabilities",
        ),
        Hook(
            "layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
            "around",
            sampling.renormalise,
            "log-probabilities are of what top_k and top_p leave",
        ),
        Hook(
            "managers.schedule_batch.ScheduleBatch.filter_batch",
            "after",
            sampling.forget,
            "one greedy request slows down its own steps alone",
        ),
        Hook(delayer + "_gather_info", "around", prefills.gather_of_one, "no collective of one rank in every step"),
        Hook(
            delayer + "_negotiate_should_allow_prefill",
            "before",
            prefills.many_at_once,
            "prompts wait until there are places for many",
        ),
    )


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
