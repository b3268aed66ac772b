"""The seam between a run and what samples for it: what a backend can do, how it starts, how weights reach it.

A backend is a package beside this file, with its class in `__init__.py`, and a line in registry.py. A --dry-run reads
capabilities, so neither torch nor a backend's own library is imported here; a backend imports its heavy modules in
`start`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from allocation import Device, DeviceChoice
from config_schema.needs import fact, refused_without
from config_schema.section import Section, key
from rollout.types import Completion, GenerateRequest, Generator

if TYPE_CHECKING:
    from torch import Tensor

    from model_specs.config import ModelConfig
    from rollout.bucket import FlatBucket

TransportName = Literal["local", "nccl", "ipc", "disk"]
"""The transport of weights; see core/weight_sync. local: update_weights(), in the process of the generator."""
Interrupt = Literal["abort", "retract", "in_place"]
"""Effect of pause() on running requests: end them with what they have; keep them and recompute their keys and values
under the new weights; keep their keys and values."""
WeightFormat = Literal["float32", "bfloat16"]
Quantization = Literal["auto", "fp8_block"]
"""Format of the weights of linear layers. auto: that of all weights. fp8_block: see model_specs/tensors.py."""
FlagValue = bool | int | float | str | list[int] | list[str] | None
_SERVERS = fact("servers")
ALL_INTERRUPTS: tuple[Interrupt, ...] = get_args(Interrupt)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features that a backend supports; the checks of a configuration and the choice of a weight transport read it."""

    devices: tuple[Device, ...]
    """Devices that it can use; generator.device=auto means the first."""
    transports: tuple[TransportName, ...]
    """Transports that can reach a replica."""
    staged_transports: tuple[TransportName, ...] = ()
    """The same for a replica of several pipeline stages; empty: a replica has one stage."""
    staged_interrupts: tuple[Interrupt, ...] = ()
    """Interrupt modes in which a replica of several pipeline stages reports the right version of every token. With
    one stage every backend does, in every mode."""
    weight_formats: tuple[WeightFormat, ...] = ("float32", "bfloat16")
    quantizations: tuple[Quantization, ...] = ("auto",)
    """Formats of linear layers on GPUs; on the CPU there is none but auto."""
    routed_experts: bool = False
    """Whether completions report the experts of each token (replicas of one pipeline stage)."""
    colocates: bool = False
    """Whether a replica can leave the memory of its GPUs to a trainer and take it back."""
    restarts: bool = True
    """Whether one replica can be started again while the others continue."""
    holds_weights: bool = True
    """Whether a replica has a model. Without one it gets no tensors, and its process does not import torch."""


@dataclass(frozen=True, kw_only=True)
class MemoryFlag:
    """The flag of a backend that sets the share of a GPU's memory that a replica takes."""

    name: str
    default: float
    """About what a replica takes where the flag is not given."""
    colocated: float
    """The same of one that shares its GPU with the trainer."""


class GeneratorConfig(Section):
    """The generators. What a backend has no use for it ignores."""

    max_running: int = key(128, "Maximum concurrent sequences per replica", ge=1, first=True)
    interrupt: Interrupt = key(
        "retract",
        "Running requests in a weight update. abort: return them and continue them as new requests. "
        "retract: continue after recomputing the key/value cache. in_place: continue with the old cache",
        needs=fact("generators that keep their requests"),
    )
    device: DeviceChoice = key(
        "auto", "Where generators compute. auto: on GPUs if the backend can, else on the CPU; see the start-up table"
    )
    dtype: WeightFormat | None = key(None, "Data type of the weights. null: that of the actor")
    weight_format: Quantization = key(
        "auto",
        "Format of the weights of linear layers. auto: dtype. fp8_block: FP8 with a factor for each 128 x 128 values, "
        "quantized by the trainer and sent as FP8; use it with algorithm.correction=tis",
        needs=refused_without("servers on GPUs"),
    )
    mock_seconds_per_token: float = key(0.0, "Seconds per token; 0: no delay", ge=0, needs=fact("mock generator"))
    python: str | None = key(
        None,
        "Interpreter that has the backend's library, if that has an environment of its own. null: the run's",
        needs=_SERVERS,
    )
    flags: dict[str, FlagValue] = key({}, "Flags of the backend by name; added to actor.sglang", needs=_SERVERS)
    health_interval_seconds: float = key(5.0, "Interval between health checks of a replica", gt=0)
    health_timeout_seconds: float = key(
        120.0,
        "Timeout of a health check. A replica that exceeds it is restarted on its own GPUs, and its requests go to "
        "the others. After half of the timeout it is logged as slow",
        gt=0,
    )
    patience_seconds: float = key(
        600.0, "Time to wait for a restart if no replica is left; then the attempt ends", ge=0
    )

    @property
    def format_setting(self) -> str:
        """The setting of weight_format, as messages write it."""
        return f"generator.weight_format={self.weight_format}"

    @property
    def quantizes(self) -> bool:
        """True if the trainer sends linear layers in FP8."""
        return self.weight_format != "auto"

    @property
    def unquantized(self) -> GeneratorConfig:
        """The same with all weights in `dtype`."""
        return self.model_copy(update={"weight_format": "auto"})


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """One replica, for any backend: the keys of all of them, and its place in the run."""

    config: GeneratorConfig = GeneratorConfig()
    """`flags`: those of actor.sglang too."""
    model_path: str
    dtype: WeightFormat = "bfloat16"
    device: Device = "cuda"
    tp: int = 1
    pp: int = 1
    gpus: tuple[int, ...] = ()
    """Indices on this node, tp x pp of them; empty on the CPU."""
    colocated: bool = False
    """The GPUs are shared with the trainer: memory can be released and resumed."""
    load_weights: bool = True
    """False: the first push brings the weights, as with weight_format=fp8_block; of `model_path` only config.json and
    the tokenizer are read."""
    reports_experts: bool = False
    """Completions report the experts of each token."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of processes that the replica starts, besides this one's own."""
    startup_timeout_seconds: float = 300.0
    push_timeout_seconds: float = 120.0
    """Time limit of a weight update, for a replica that receives broadcasts itself."""
    name: str = "generator-0"
    """Name of the replica in messages."""
    log_file: Path = Path("generator.server.log")
    """Log of the processes that the replica starts."""
    host: str | None = "127.0.0.1"
    """Address at which the trainer's ranks reach servers; None: that of their node."""
    key: str = field(default="", repr=False)
    """Servers answer only calls that carry it; empty: all."""

    @property
    def max_running(self) -> int:
        """Most sequences that the replica samples at once."""
        return self.config.max_running

    @property
    def flags(self) -> Mapping[str, FlagValue]:
        """Flags of the backend, by name."""
        return self.config.flags

    @property
    def health_timeout_seconds(self) -> float:
        """Time in which a replica answers a health check."""
        return self.config.health_timeout_seconds

    @property
    def interpreter(self) -> str:
        """The Python that has the library of the backend."""
        return self.config.python or sys.executable

    def lowered(self, *, max_running: int, flags: Mapping[str, FlagValue]) -> BackendSettings:
        """Return the settings of a replica that takes less memory."""
        lowered: dict[str, object] = {"max_running": max_running, "flags": dict(flags)}
        return replace(self, config=self.config.model_copy(update=lowered))

    @property
    def interrupt(self) -> Interrupt:
        """What pause() does: generators that leave their memory to the trainer cannot keep requests meanwhile."""
        return "abort" if self.colocated else self.config.interrupt


@dataclass(frozen=True, kw_only=True)
class GroupMembership:
    """A process group of one trainer rank and all ranks of all replicas, and the place of one replica in it."""

    name: str
    host: str
    port: int
    """Port of the group's store, on that trainer rank."""
    first_rank: int
    """First rank of the replica, which has [first_rank, first_rank + tp)."""
    world_size: int
    backend: str
    """Backend of torch.distributed."""


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """Format of one tensor on both sides of a push; names of torch's dtypes."""

    name: str
    """Name in the checkpoint."""
    sent: str
    parameter: str
    """Parameter of the replica, which may hold several tensors."""
    held: str | None
    """None: the replica has no such parameter. Where its ranks differ, a format other than `sent`."""


class ExpectedChecksums(Protocol):
    """Checksums that a replica must report after a push. Add every tensor, then compare."""

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors in full, under their Hugging Face names, in the formats of the replica."""
        ...

    def mismatches(self, received: Sequence[Mapping[str, int]]) -> list[str]:
        """Return the parameters that differ, are missing, or were not expected, as "name (rank r)"; `received` is the
        result of checksums()."""
        ...

    def formats(self, held: Sequence[Mapping[str, str]]) -> list[TensorFormat]:
        """Return the formats of every tensor that was added; `held` is the result of formats() of the endpoint."""
        ...


class WeightEndpoint(Protocol):
    """One replica as the trainer's ranks reach it with weights. Picklable: it is made beside the replica.

    Every call returns when the replica has answered. Raises GeneratorCallError where the replica refuses and
    GeneratorGone where it does not answer in time. The replica is paused while weights change: that is the part of
    Generator.pause() and resume(), of the process that holds the requests.
    """

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str:
        """Address of its node."""
        ...

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks of each pipeline stage."""
        ...

    @property
    def pp(self) -> int: ...

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        """Shared slots: the trainer's rank in the place of each tensor-parallel rank."""
        ...

    def beside(self, trainer_ranks: tuple[int, ...]) -> WeightEndpoint:
        """Return the same endpoint with these `trainer_ranks`."""
        ...

    def named(self, name: str) -> WeightEndpoint:
        """Return the same endpoint under another name."""
        ...

    def join_group(self, group: GroupMembership, *, timeout_seconds: float) -> None: ...

    def receive_bucket(self, bucket: FlatBucket, *, group: str, timeout_seconds: float) -> None:
        """Receive the bytes of this bucket as one broadcast from rank 0 of the group."""
        ...

    def leave_group(self, group: str, *, timeout_seconds: float) -> None: ...

    def share(self, bucket: FlatBucket, memory: Tensor | None, *, number: int) -> str:
        """Return a bucket for receive_shared(). Sends nothing.

        A replica opens `memory` [bytes] of this process, which begins with the bucket's bytes, and keeps it as `number`
        until release_shared(). None: it has the memory already. Memory that it cannot open, such as that of the CPU, is
        sent itself."""
        ...

    def receive_shared(self, shared: Sequence[str], *, timeout_seconds: float) -> None:
        """Copy a bucket, shared for each tensor-parallel rank; the copies are complete at return."""
        ...

    def release_shared(self, *, timeout_seconds: float) -> None:
        """Close the memory that was opened."""
        ...

    def load_folder(self, path: str, *, timeout_seconds: float) -> None:
        """Load a Hugging Face folder of the same architecture, or a folder of changes to the weights that the last
        folder left (changes.py)."""
        ...

    def expected_checksums(self) -> ExpectedChecksums: ...

    def checksums(self, *, timeout_seconds: float) -> Sequence[Mapping[str, int]]:
        """Return parameter name -> checksum of each tensor-parallel rank. Replicas of one pipeline stage only."""
        ...

    def formats(self, *, timeout_seconds: float) -> Sequence[Mapping[str, str]]:
        """Return parameter name -> format, a name of torch's dtypes, of each tensor-parallel rank. Replicas of one
        pipeline stage only."""
        ...


class Replica(Generator, Protocol):
    """A generator as its actor drives it: requests and completions travel in batches."""

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take many requests at once; drain() returns their completions."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests from submit() whose completions are not needed. Unknown ids are passed over."""
        ...

    async def drain(self) -> Sequence[tuple[str, Completion | Exception]]:
        """Return (request_id, completion or the request's error) of requests that have ended since the last call; waits
        for one."""
        ...


class ServedReplica(Replica, Protocol):
    """A replica that receives weights by a transport other than local."""

    @property
    def endpoint(self) -> WeightEndpoint: ...


class ColocatedReplica(Replica, Protocol):
    """A replica that can leave its GPUs to the trainer (Capabilities.colocates), while paused."""

    async def release_memory(self, tags: Sequence[str]) -> None: ...
    async def resume_memory(self, tags: Sequence[str]) -> None: ...


def check_request(request: GenerateRequest, *, vocab_size: int, max_length: int) -> None:
    """Raise ValueError if a request cannot be served: with its prompt, lengths or sampling parameters."""
    sampling, name, prompt = request.sampling, f"request {request.request_id!r}", request.prompt_ids
    done = 0 if request.output is None else len(request.output.token_ids)
    if not len(prompt) or min(prompt) < 0 or max(prompt) >= vocab_size:
        given = f"they reach from {min(prompt)} to {max(prompt)}" if len(prompt) else "there is none"
        raise ValueError(
            f"{name}: prompt_ids must be one or more numbers in [0, {vocab_size}), the vocabulary; {given}"
        )
    if len(prompt) + sampling.max_new_tokens > max_length:
        raise ValueError(
            f"{name}: {len(prompt)} prompt tokens + max_new_tokens={sampling.max_new_tokens} exceed the {max_length} "
            "positions of the model; shorten one of them"
        )
    if not done < sampling.max_new_tokens:
        raise ValueError(f"{name}: max_new_tokens={sampling.max_new_tokens} must exceed the {done} tokens given")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"{name}: temperature={sampling.temperature} must be >= 0 and top_p={sampling.top_p} in (0, 1]"
        )


class Backend(Protocol):
    """One way to sample. An implementation inherits the defaults: no flags, no library or GPU memory of its own."""

    label: str
    """Name of a replica in messages, as in "SGLang server"."""
    capabilities: Capabilities
    memory_flag: MemoryFlag | None = None
    shared_memory_names: tuple[str, ...] = ()
    """Prefixes of the names in /dev/shm that its processes create."""

    def refused_flags(self, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Yield (flag, message) of flags that users must not set, or not to this value."""
        return iter(())

    def model_problems(self, model: ModelConfig, path: str) -> Iterator[tuple[str, str]]:
        """Yield (configuration key, message) of each reason why this backend cannot sample with the model at `path`."""
        return iter(())

    def host_problems(self, python: str | None, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Yield (configuration key, message) of each reason why no replica can start on this host with these flags.
        `python`: the interpreter that runs it; None: this one."""
        return iter(())

    async def start(self, settings: BackendSettings) -> Replica:
        """Return when the replica is ready for weights. Raises ValueError for settings that cannot work and
        GeneratorStartError where it does not come up."""
        ...
