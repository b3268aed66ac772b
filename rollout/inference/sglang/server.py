"""One SGLang server process a data-parallel replica: its arguments, its start, its log, its end.

The replica's tensor and pipeline ranks are the server's own child processes; all of them form one process group, which
ends with this object or with the process that made it, whatever happens first. Nothing else is ever killed.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from model_specs.config import ModelConfig
from model_specs.families import FAMILIES, read_config
from model_specs.weight_files import QUANTIZATION_CONFIG, serving_problems
from rollout.errors import GeneratorStartError
from rollout.inference.backend import BackendSettings, FlagValue
from rollout.inference.gpus import check_gpus, device_names
from rollout.inference.sglang.arguments import COLOCATED_MEM_FRACTION, EXIT_USAGE, USAGE_ERRORS, decided_elsewhere
from rollout.inference.sglang.client import SGLangEndpoint
from rollout.processes import end_group

logger = logging.getLogger(__name__)

FA3_HEAD_DIMS = (64, 96, 128, 256)
"""Head dimensions that the FlashAttention 3 kernels have in bfloat16."""
BATCHED_PREFILLS: dict[str, FlagValue] = {"enable_prefill_delayer": True, "prefill_delayer_max_delay_passes": 128}
"""In a run answers end one by one, and each makes room for a prompt: a prefill, which has no CUDA graph and takes as
long as two or three decode steps, after every few of these. While a server is nearly full, new prompts wait until a
tenth of its places is free (hooks/scheduler.py), but for 128 steps at most. SGLang's own trigger, by the number that
waits, stays off (prefill_delayer_queue_min_ratio): it also ends by the clock, each rank's own, and
tensor-parallel ranks that disagree about a prefill hang."""
LOOPBACK = "127.0.0.1"
LAST_LINES = 20
"""Lines of the log in the error of a server that has exited."""
_UNIFIED_TREE = "SGLANG_ENABLE_UNIFIED_RADIX_TREE"


def server_flags(settings: BackendSettings, model: ModelConfig, *, port: int, nccl_port: int) -> dict[str, FlagValue]:
    """Return every server argument by name."""
    flags: dict[str, FlagValue] = {
        "model_path": settings.model_path,
        "host": settings.host or LOOPBACK,
        "port": port,
        "nccl_port": nccl_port,
        "tp_size": settings.tp,
        "pp_size": settings.pp,
        "dtype": settings.dtype,
        "max_running_requests": settings.max_running,
        "random_seed": 0,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        # Nothing is left for FlashInfer's kernels to do (see hooks/sampling.py), and servers of small
        # models stopped answering for ever where greedy and sampled requests met in a batch.
        "sampling_backend": "pytorch",
        "log_level_http": "warning",
    }
    if settings.key:
        flags["api_key"] = settings.key
    if settings.reports_experts:
        flags["enable_return_routed_experts"] = True
    if settings.gpus:
        # Throughput more than halves beyond the largest decode graph (256 by default). Every size costs start-up time,
        # and capturing prefill graphs takes a minute of it, although prompts are a small part of the work.
        flags |= {"cuda_graph_max_bs_decode": settings.max_running, "disable_prefill_cuda_graph": True}
        if not settings.flags.keys() & {"cuda_graph_bs_decode", "cuda_graph_max_bs_decode"}:
            flags["cuda_graph_bs_decode"] = decode_graph_sizes(settings.max_running)
        # A small model would otherwise get a cache that nothing can fill, and run out of memory on its index.
        flags["max_total_tokens"] = 2 * settings.max_running * model.max_position_embeddings
        given = {name.replace("-", "_"): value for name, value in settings.flags.items()}
        if settings.pp == 1 and not given.get("disable_overlap_schedule"):
            flags |= BATCHED_PREFILLS
        if settings.colocated:
            flags |= {"enable_memory_saver": True, "mem_fraction_static": COLOCATED_MEM_FRACTION}
        head_dim = model.head_dim
        latent = model.mla is not None  # multi-head latent attention has backends of its own
        if head_dim not in FA3_HEAD_DIMS and not latent and "attention_backend" not in settings.flags:
            logger.warning(
                "%s: head dimension %d is not one of FlashAttention 3's %s: attention_backend=triton, which is slower",
                settings.name, head_dim, FA3_HEAD_DIMS,
            )  # fmt: skip
            flags["attention_backend"] = "triton"
    else:
        flags |= {"device": "cpu", "attention_backend": "torch_native"}
        flags |= {"disable_cuda_graph": True}
    if not settings.load_weights:
        flags["load_format"] = "dummy"
    return flags | dict(settings.flags) | _model_flags(settings, model)


def _model_flags(settings: BackendSettings, model: ModelConfig) -> dict[str, FlagValue]:
    """Return the arguments that determine what config.json means, and where and in which format the weights lie. Raises
    ValueError for a model that does not fit the format."""
    flags: dict[str, FlagValue] = {}
    if model.moe is not None and model.moe.shared_intermediate_size:
        flags["disable_shared_experts_fusion"] = True  # else the server holds them as an additional routed expert
    override = dict(FAMILIES[model.model_type].server_keys(model))
    if settings.config.quantizes:
        for problem in serving_problems(model, settings.tp):
            raise ValueError(f"{settings.name}: {problem}; write generator.weight_format=auto")
        override["quantization_config"] = dict(QUANTIZATION_CONFIG)
        # The folder's own weights are not FP8; SGLang would copy their values and leave the scales as they are.
        flags["load_format"] = "dummy"
    if override:
        given = {name.replace("-", "_"): value for name, value in settings.flags.items()}
        named = json.loads(str(given.get("json_model_override_args") or "{}"))
        flags["json_model_override_args"] = json.dumps({**named, **override})
    return flags


def server_environment(settings: BackendSettings) -> dict[str, str]:
    """Return the environment of the server's processes. Raises ValueError for a variable that cannot be set."""
    env = os.environ | settings.env
    if env.get(_UNIFIED_TREE, "").lower() not in ("", "0", "false", "no"):
        raise ValueError(
            f"{settings.name}: {_UNIFIED_TREE}={env[_UNIFIED_TREE]}: its cache cannot tell which prefixes a weight "
            "update made old; remove the variable"
        )
    # This project's packages have names (core, tools) that the server's libraries may look for.
    root = Path(__file__).resolve().parents[3]
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != root]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    if settings.gpus:
        # Both ends of a weight push must agree on this; the server's own default is 0.
        env |= {"CUDA_VISIBLE_DEVICES": device_names(settings.gpus), "NCCL_CUMEM_ENABLE": "0"}
        # DeepGEMM, where it is installed, would otherwise compile kernels for every number of rows at the first start,
        # for 10 minutes and more. Each is compiled at its first use and kept in a folder of the user.
        env.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    return env


def decode_graph_sizes(max_running: int) -> list[int]:
    """Return the batch sizes to capture: small powers of two, then about ten even steps up to `max_running`; a batch
    runs in the next larger one."""
    step = max(8, -(-max_running // 80) * 8)
    small = [2**i for i in range(step.bit_length()) if 2**i < step]
    return sorted({*(size for size in small if size < max_running), *range(step, max_running, step), max_running})


def free_ports(count: int) -> list[int]:
    """Return free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("", 0))  # free on every address
        return [s.getsockname()[1] for s in sockets]


class SGLangServer:
    """A server process. `await start()`, then `endpoint`; `stop()` when done."""

    def __init__(self, settings: BackendSettings) -> None:
        """Raises ValueError for arguments that users must not set, and for FP8 without GPUs."""
        for key in settings.flags:
            if why := decided_elsewhere(key):
                raise ValueError(f"actor.sglang.{key} cannot be set: {why}")
        if settings.config.quantizes and not settings.gpus:
            raise ValueError(f"{settings.name}: generator.weight_format=fp8_block needs GPUs; write auto")
        self.settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    @property
    def endpoint(self) -> SGLangEndpoint:
        s = self.settings
        return SGLangEndpoint(name=s.name, url=self._url, key=s.key, tp=s.tp, pp=s.pp, model_path=s.model_path)

    async def start(self) -> None:
        """Return when the server answers. Raises ValueError for arguments that SGLang does not have and for GPUs that
        are missing or in use, GeneratorStartError when the server exits or is not ready in time."""
        settings = self.settings
        if settings.gpus and not settings.colocated:  # else the trainer may be there already
            await asyncio.to_thread(check_gpus, settings.gpus)
        model = read_config(settings.model_path)
        port, nccl_port = free_ports(2)
        self._url = f"http://{settings.host or LOOPBACK}:{port}"
        self._launch(server_flags(settings, model, port=port, nccl_port=nccl_port))
        begin = time.monotonic()
        try:
            while not await asyncio.to_thread(self.endpoint.is_healthy, timeout_seconds=5.0):
                self._check_alive()
                if time.monotonic() - begin > settings.startup_timeout_seconds:
                    raise GeneratorStartError(
                        f"{settings.name}: not ready within launch.startup_timeout_seconds="
                        f"{settings.startup_timeout_seconds:g}; {self.last_lines()}"
                    )
                await asyncio.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        logger.info("%s is ready at %s after %.1f s", settings.name, self._url, time.monotonic() - begin)

    def _launch(self, flags: Mapping[str, FlagValue]) -> None:
        settings = self.settings
        settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        if settings.log_file.exists():  # of a server that this one takes the place of
            settings.log_file.replace(settings.log_file.with_suffix(".previous.log"))
        with settings.log_file.open("wb") as log:
            # -P: this folder must not be where the server's processes import `types` and the like from.
            self._process = subprocess.Popen(
                [settings.interpreter, "-P", str(Path(__file__).parent / "hooks" / "main.py")],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=server_environment(settings),
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None, "stdin is a pipe"
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # a process that has exited is found by start()
            stdin.write(json.dumps({"parent": os.getpid(), "flags": dict(flags)}).encode())

    def _check_alive(self) -> None:
        """Raise GeneratorStartError, or ValueError for wrong arguments, when the process has ended."""
        assert self._process is not None, "start() launches it"
        code = self._process.poll()
        if code == EXIT_USAGE:
            lines = self.settings.log_file.read_text(errors="replace").strip().split("\n")
            raise ValueError(next((line for line in reversed(lines) if line.startswith(USAGE_ERRORS)), lines[-1]))
        if code is not None:
            raise GeneratorStartError(
                f"{self.settings.name}: the SGLang server exited at start (exit code {code}); {self.last_lines()}"
            )

    def last_lines(self) -> str:
        """Return the end of the log, for error messages."""
        with suppress(OSError):
            lines = self.settings.log_file.read_text(errors="replace").splitlines()
            # The server logs all its arguments on one line of many thousand characters.
            tail = "\n".join(line[:500] for line in lines[-LAST_LINES:])
            return f"its last lines in {self.settings.log_file}:\n{tail}"
        return f"no log in {self.settings.log_file}"

    def explain(self) -> str:
        """Return the state of the process, for the message of a call that failed."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"the server process ended with code {code}; {self.last_lines()}"

    def stop(self) -> None:
        """End the server's process group. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, grace_seconds=10.0)
