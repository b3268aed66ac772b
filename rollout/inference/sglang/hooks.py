"""What runs inside a SGLang server's processes: the start, and hooks through SGLang's own plug-in interface.

The file is run by path with the server's interpreter (`python -P .../hooks.py`, settings as JSON on stdin), so it
stands alone: of this project only files that stand alone too are read, by their paths. The hooks give the trainer what
the HTTP interface lacks:

- every token carries the version of the weights that its forward pass ran with (`weight_version` of a response is
  that of the moment of output, one for the whole response);
- cached prefixes of older weights are never used for requests that start or restart under newer ones, and do not stay;
- an update begins when no forward pass is running any more; one from the trainer's memory is answered when the copies
  of all ranks are complete;
- an update that fails on any tensor-parallel rank is answered as a failure;
- a checksum of every parameter that the sender can compute too, whatever the device;
- logits leave the LM head in fp32, as in the trainer: bfloat16 would round a logit of 20 by up to 0.06;
- the experts of tokens are reported without a GPU too, for tests;
- FP8 weights come without scales of an FP8 cache;
- log-probabilities are of what top_k and top_p leave, without a list of it, and without sorting the vocabulary;
- no step waits for a gathering of one rank's own figures;
- prompts wait until there are places for many of them at once;
- one greedy request makes the steps that it takes part in slower, not all that come after it;
- projections of latent attention are loaded one by one too, and it runs without a GPU (latent_attention.py);
- a folder of changes is applied to the weights of the push before (changes.py);
- a bucket of weights is received while the one before it is copied into the model (buckets/received_buckets.py), and
  from the second time by copies alone (buckets/recorded_copies.py);
- what running and waiting requests have sampled so far is returned on request (in_flight.py);
- whether the scheduler works is reported without waiting for a second;
- modules that the model does not need are not imported (start/unused_imports.py), and kernels are compiled in parallel
  with the imports (start/compile_ahead.py).
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION_KEY = "slipstream_version"
"""Name of the per-token versions in a response's meta_info."""
SOURCE = ("slipstream", None)
"""Of this file's hooks, by which SGLang distinguishes several plug-ins."""
PREFILL_SHARE = 0.1
"""Of a server's places: so many are free before prompts are admitted (BATCHED_PREFILLS in server.py)."""

_LOG_KEPT = "slipstream_log_kept"
"""Attribute of sampled tokens: logarithm of what top_k and top_p left of their distributions."""
_DELAYER_INFO = (
    "local_prefillable", "local_token_watermark_force_allow", "running_batch", "max_prefill_bs", "waiting_queue_len",
)  # fmt: skip
"""What a rank sends to the others about its prompts, in this order."""
_MULTIPLIER = -7046029254386353131  # an odd 64-bit constant (the golden ratio's), as a signed number
CHECKSUM_CHUNK = 1 << 24
"""Elements whose checksum is computed at a time."""


def position_checksum(tensor: Tensor, start: int = 0) -> Tensor:
    """Sum bits x weight(position) over the elements, modulo 2^64: [] int64. Positions count from `start`.

    Additive, so the checksum of a fused tensor is the sum over its parts; zeros (padding) add nothing. Exact on any
    device: integers only."""
    bits = as_bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHECKSUM_CHUNK):
        part = bits[begin : begin + CHECKSUM_CHUNK].to(torch.int64)
        positions = torch.arange(start + begin, start + begin + part.numel(), device=part.device)
        total += (part * position_weights(positions)).sum()
    return total


def as_bits(tensor: Tensor) -> Tensor:
    """Return the elements as integers: [n]."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def position_weights(positions: Tensor) -> Tensor:
    """Return the odd number by which position_checksum() multiplies the bits at each position; int64, as they are."""
    weight = positions * _MULTIPLIER
    return (weight ^ (weight >> 29)) | 1


def beside(name: str) -> ModuleType:
    """Return the file `name`, a path from this one's folder, as a module: a server cannot import the project itself."""
    path = (Path(__file__).parent / name).resolve()
    spec = importlib.util.spec_from_file_location(f"slipstream_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


class Hooks:
    """State of one scheduler process: the version of its weights, as received by continue_generation."""

    def __init__(self) -> None:
        self.version = 0

    def tag_tokens(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Record one version for the next token of each request, after Scheduler.run_batch."""
        output = getattr(result, "logits_output", None)
        if output is not None:
            output.customized_info = {VERSION_KEY: [self.version] * len(batch.reqs)}

    def name_prefix(self, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        """Restrict shared prefixes to requests of one version, before Scheduler._add_request_to_queue."""
        req.extra_key = str(self.version)

    def before_continue(self, scheduler: Any, request: Any) -> None:
        """Set the version to the request id, before Scheduler.continue_generation."""
        if request.rid is not None:
            if self.version != int(request.rid):
                empty_prefix_cache(scheduler)
            self.version = int(request.rid)
            for req in scheduler.waiting_queue:
                req.extra_key = request.rid

    def wait_for_device(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Wait for the device after a pause: in_place leaves a forward pass running."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def checksum(self, original: Any, checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
        """Compute the checksum in place of WeightChecker.handle, whose hash needs a GPU, on the sender's side too; or
        return the formats of the parameters in its place."""
        if action not in ("checksum", "formats"):
            return original(checker, action, *args, **kwargs)
        named = dict(checker._get_model().named_parameters())
        if action == "formats":
            checksums = {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()}
        else:
            sums = torch.stack([position_checksum(p) for p in named.values()]).tolist()
            checksums = {name: str(value) for name, value in zip(named, sums, strict=True)}
        return {
            "checksums": checksums,
            "per_gpu_checksum": hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest(),
            "parallelism_info": checker._parallelism_info().model_dump(),
        }


class InFlight:
    """Tokens that requests have sampled, returned between two steps of the scheduler; without a request it costs
    nothing."""

    def __init__(self) -> None:
        self._module = beside("in_flight.py")

    def add_routes(self) -> None:
        """Add paths that query the scheduler to the process that answers HTTP."""
        from sglang.srt.entrypoints import http_server
        from sglang.srt.managers.io_struct import GetInternalStateReq
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        async def query(name: str) -> list[Any]:
            manager = http_server.get_global_state().tokenizer_manager
            manager.auto_create_handle_loop()
            # Never to be cancelled: the next query would get the answer to this.
            answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=name))
            return [answer.internal_state for answer in answers]

        async def report() -> dict[str, Any]:
            return {"answers": [self._module.to_json(answer) for answer in await query(self._module.QUERY)]}

        async def respond() -> Any:
            manager = http_server.get_global_state().tokenizer_manager
            if manager.gracefully_exit or manager.server_status == ServerStatus.Starting:
                return http_server.Response(status_code=503)
            await query(self._module.PING)
            return http_server.Response()

        http_server.app.add_api_route(self._module.PATH, report, methods=["POST"])
        http_server.app.add_api_route(self._module.ALIVE, respond, methods=["GET"], response_model=None)

    def answer(self, original: Any, scheduler: Any, request: Any) -> Any:
        """Answer queries around Scheduler.get_internal_state, which all ranks run and one answers."""
        if request.rid not in (self._module.QUERY, self._module.PING):
            return original(scheduler, request)
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        reports = request.rid == self._module.QUERY and scheduler.ipc_channels.send_to_tokenizer.socket is not None
        packed = self._module.pack(known_requests(scheduler), VERSION_KEY) if reports else {}
        return GetInternalStateReqOutput(internal_state=packed)


def known_requests(scheduler: Any) -> list[Any]:
    """Return every request that the scheduler has, once. Those that have just ended are among them until the next
    step."""
    batches = [batch.reqs for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return list({req.rid: req for reqs in (*batches, scheduler.waiting_queue, chunked) for req in reqs}.values())


def drop_answer(cache: Any, req: Any, is_insert: bool = True, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keep prompts but no answers in the cache, before RadixCache.cache_finished_req. A cache full of answers would
    search for the oldest of tens of thousands at every step."""
    return (cache, req), {**kwargs, "is_insert": False}


def empty_prefix_cache(scheduler: Any) -> None:
    """Give back what no running request uses: prefixes of weights that are gone."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache, memory = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    try:
        size = cache.evictable_size()
    except NotImplementedError:  # several kinds of memory; such a cache makes room by itself
        return
    memory.free_group_begin()
    cache.evict(EvictParams(num_tokens=size))
    memory.free_group_end()


class Sampling:
    """Drawing in place of SGLang's, which checks the probabilities anew in every step; and top_k and top_p in place of
    its own, which sort the vocabulary, and twice where log-probabilities of what is left are requested."""

    def __init__(self) -> None:
        module = beside("top_k_top_p.py")
        self._keep_most_likely, self._draw = module.keep_most_likely, module.draw

    def sample(self, original: Any, sampler: Any, probs: Tensor, info: Any, positions: Any, is_simple: bool) -> Tensor:
        """Sample around Sampler._sample_from_probs. The remaining probability of each row is kept with its token;
        greedy rows (top_k = 1) keep the log-probability under temperature 1."""
        if is_simple:
            return self._drawn(original, sampler, probs, info, positions)
        if info.need_min_p_sampling:
            return original(sampler, probs, info, positions, is_simple)
        kept = self._keep_most_likely(probs, info.top_ks, info.top_ps)
        greedy, whole = info.top_ks == 1, (info.top_ks >= probs.shape[1]) & (info.top_ps >= 1)
        tokens = self._drawn(original, sampler, probs, info, positions)
        tokens = torch.where(greedy, probs.argmax(-1).to(tokens.dtype), tokens)  # of equals, always the first
        setattr(tokens, _LOG_KEPT, torch.where(greedy | whole, 0.0, kept.log()))
        return tokens

    def _drawn(self, original: Any, sampler: Any, probs: Tensor, info: Any, positions: Any) -> Tensor:
        if info.sampling_seed is not None:  # drawn by it, in the server's own way
            return original(sampler, probs, info, positions, True)
        return self._draw(probs)

    def renormalise(
        self, original: Any, processor: Any, logprobs: Tensor, top: Any, requested: Any, tokens: Tensor
    ) -> Any:
        """Renormalize log-probabilities around OutputLogprobProcessor.compute_logprobs."""
        result = original(processor, logprobs, top, requested, tokens)
        log_kept = getattr(tokens, _LOG_KEPT, None)
        if log_kept is not None:
            result.token_logprobs = result.token_logprobs - log_kept
        return result

    def forget(self, result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Recompute, after ScheduleBatch.filter_batch, whether a batch has a request with top_k or top_p. SGLang
        otherwise keeps the flag until the batch is empty, which does not happen in a run, so one evaluation would slow
        down all later steps."""
        info = batch.sampling_info
        if batch.reqs and (info.need_top_k_sampling or info.need_top_p_sampling):
            from sglang.srt.sampling.sampling_params import TOP_K_ALL

            info.need_top_k_sampling = any(req.sampling_params.top_k != TOP_K_ALL for req in batch.reqs)
            info.need_top_p_sampling = any(req.sampling_params.top_p != 1.0 for req in batch.reqs)
            info.is_all_greedy = all(req.sampling_params.top_k <= 1 for req in batch.reqs)


def fp32_logits(original: Any, processor: Any, hidden: Tensor, lm_head: Any, bias: Tensor | None = None) -> Tensor:
    """Compute float32 logits around LogitsProcessor._compute_lm_head, for plain heads on GPUs. The server's own
    enable_fp32_lm_head converts the whole weight at every step."""
    weight = getattr(lm_head, "weight", None)
    if (
        isinstance(weight, Tensor)
        and weight.is_cuda
        and weight.dtype == hidden.dtype == torch.bfloat16
        and hidden.dim() == 2
        and bias is None
        and not hasattr(lm_head, "apply_lora")
    ):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return original(processor, hidden, lm_head, bias)


def gather_of_one(original: Any, delayer: Any, **info: int) -> Tensor:
    """Skip the collective of PrefillDelayer._gather_info, called in every step, where there is a single rank."""
    if delayer._global_info_buffer.numel() != len(_DELAYER_INFO):
        return original(delayer, **info)
    return torch.tensor([[int(info[name]) for name in _DELAYER_INFO]])


def many_at_once(delayer: Any, *args: Any, **info: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set the number of free slots from which a prefill is worthwhile, before
    PrefillDelayer._negotiate_should_allow_prefill. SGLang's own value, the maximum of recent waiting prompts, decays to
    one where slots become free one at a time."""
    return (delayer, *args), {**info, "max_prefill_bs": math.ceil(PREFILL_SHARE * info["max_running_requests"])}


def no_cache_scales(original: Any, config: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Give attention no scales for an FP8 cache, around Fp8Config.get_quant_method, where weights are FP8 in blocks:
    such checkpoints have none. Without weights of its own a server would start with random ones, and attention in
    Triton multiplies with them whatever the format of the cache."""
    if config.weight_block_size is not None and type(layer).__name__ == "RadixAttention":
        return None
    return original(config, layer, *args, **kwargs)


def kept_experts(original: Any, cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """Allocate page-locked memory around BaseHostCache.__init__."""
    if torch.cuda.is_available():
        original(cache, num_tokens, num_layers, topk_size, name)
        return
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def copy_experts(output: Any, *args: Any, **kwargs: Any) -> None:
    """Copy the experts to the host after BaseTopkCapturer.on_forward_end. Without a GPU they would be a view of the
    buffer that the next forward pass overwrites."""
    if output is not None and output.topk.device.type == "cpu":
        output.topk = output.topk.clone()


def moves_experts() -> bool:
    """Return whether the server balances experts between its ranks."""
    from sglang.srt.server_args import get_global_server_args

    return bool(get_global_server_args().enable_eplb)


def install_hooks() -> None:
    """Register the hooks; SGLang applies them at the start of each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    hooks, sampling, in_flight, folders = (
        Hooks(),
        Sampling(),
        InFlight(),
        beside("pushed_folders.py").PushedFolders(beside("../changes.py"), beside("../changed.py")),
    )
    scheduler = "sglang.srt.managers.scheduler.Scheduler."
    deepseek, latent = "sglang.srt.models.deepseek_common.", beside("latent_attention.py")
    copies = beside("buckets/recorded_copies.py").RecordedCopies(moves_experts)
    buckets = beside("buckets/received_buckets.py").ReceivedBuckets(copies)
    delayer = "sglang.srt.managers.prefill_delayer.PrefillDelayer."
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    for target, hook, kind in (
        (scheduler + "run_batch", hooks.tag_tokens, HookType.AFTER),
        (scheduler + "_add_request_to_queue", hooks.name_prefix, HookType.BEFORE),
        (scheduler + "continue_generation", hooks.before_continue, HookType.BEFORE),
        (scheduler + "get_internal_state", in_flight.answer, HookType.AROUND),
        (
            deepseek + "deepseek_weight_loader.DeepseekV2WeightLoaderMixin.do_load_weights",
            latent.copy_fused_parts,
            HookType.BEFORE,
        ),
        (
            deepseek + "attention_backend_handler.AttentionBackendRegistry.get_handler",
            latent.compressed_on_cpu,
            HookType.AROUND,
        ),
        (scheduler + "pause_generation", hooks.wait_for_device, HookType.AFTER),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk",
            folders.load,
            HookType.AROUND,
        ),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
            "_update_bucketed_weights_from_distributed",
            buckets.receive,
            HookType.AROUND,
        ),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
            "_update_weights_from_flattened_bucket",
            buckets.copy_shared,
            HookType.AROUND,
        ),
        (updater + "update_weights_from_disk", folders.report_any_failure, HookType.AFTER),
        (updater + "release_memory_occupation", folders.forget, HookType.AFTER),
        (updater + "update_weights_from_tensor", folders.forget, HookType.AFTER),
        (updater + "update_weights_from_distributed", folders.forget, HookType.AFTER),
        (updater + "update_weights_from_tensor", folders.report_any_failure, HookType.AFTER),
        (updater + "update_weights_from_distributed", folders.report_any_failure, HookType.AFTER),
        ("sglang.srt.mem_cache.radix_cache.RadixCache.cache_finished_req", drop_answer, HookType.BEFORE),
        ("sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method", no_cache_scales, HookType.AROUND),
        ("sglang.srt.state_capturer.base.BaseHostCache.__init__", kept_experts, HookType.AROUND),
        ("sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end", copy_experts, HookType.AFTER),
        ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", fp32_logits, HookType.AROUND),
        ("sglang.srt.utils.weight_checker.WeightChecker.handle", hooks.checksum, HookType.AROUND),
        ("sglang.srt.layers.sampler.Sampler._sample_from_probs", sampling.sample, HookType.AROUND),
        (
            "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
            sampling.renormalise,
            HookType.AROUND,
        ),
        ("sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch", sampling.forget, HookType.AFTER),
        (delayer + "_gather_info", gather_of_one, HookType.AROUND),
        (delayer + "_negotiate_should_allow_prefill", many_at_once, HookType.BEFORE),
    ):
        HookRegistry.register(target, hook, kind, source=HookSource(*SOURCE))


def hooks_not_applied() -> list[str]:
    """Return the targets that this SGLang lacks; without one of them versions or log-probabilities would be wrong."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    mine = {target for target, hooks in HookRegistry._hooks.items() if any(source == SOURCE for *_, source in hooks)}
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


def sglang_version() -> str:
    import sglang

    return sglang.__version__


def compile_ahead(flags: dict[str, Any]) -> None:
    """Start to compile kernels in a process of the server's group, which logs with it."""
    command = [sys.executable, "-P", str(Path(__file__).parent / "start/compile_ahead.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None, "stdin is a pipe"
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(flags))


def end_with(parent: int) -> None:
    """Kill the server's process group when `parent` is gone. (The kernel's own parent-death signal follows the thread
    that started the process, not the process.)"""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    settings = json.load(sys.stdin)
    end_with(settings["parent"])
    if settings["flags"].get("device") != "cpu":
        compile_ahead(settings["flags"])
    usage = beside("start/command_line.py")
    argv = usage.command_line(settings["flags"])
    models = importlib.util.find_spec("sglang.srt.models")
    assert models is not None and models.submodule_search_locations, "every SGLang has this package"
    beside("start/unused_imports.py").skip_other_models(settings["flags"], Path(models.submodule_search_locations[0]))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    missing = hooks_not_applied()
    if missing:
        sys.stderr.write(f"SGLang {sglang_version()} {reason_for(missing)}\n")
        raise SystemExit(usage.EXIT_USAGE)
    try:
        server_args = prepare_server_args(argv)
        InFlight().add_routes()
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # the second is how the server's spawned processes see this file
    # The stacks of a server that hangs get into its log, with the signal of core/processes/stacks.py.
    faulthandler.register(signal.SIGRTMIN, all_threads=True)
    beside("start/unused_imports.py").hide_trainer()
    install_hooks()
if __name__ == "__main__":
    main()
