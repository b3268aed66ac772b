"""SGLang servers as a backend: one server process, with its tensor and pipeline ranks, a replica."""

from collections.abc import Iterator, Mapping

from model_specs.config import ModelConfig
from model_specs.families import FAMILIES
from rollout.inference.backend import Backend, BackendSettings, Capabilities, FlagValue, MemoryFlag, Replica
from rollout.inference.sglang.arguments import COLOCATED_MEM_FRACTION, decided_elsewhere, host_problems


class SGLangBackend(Backend):
    """Samples on servers, which receive weights over NCCL, CUDA IPC or files."""

    label = "SGLang server"
    capabilities = Capabilities(
        devices=("cuda", "cpu"),
        transports=("nccl", "ipc", "disk"),
        staged_transports=("disk",),
        staged_interrupts=("abort",),
        quantizations=("auto", "fp8_block"),
        routed_experts=True,
        colocates=True,
    )
    memory_flag = MemoryFlag(name="mem_fraction_static", default=0.85, colocated=COLOCATED_MEM_FRACTION)
    shared_memory_names = ("sglang",)

    def refused_flags(self, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        for flag in flags:
            if why := decided_elsewhere(flag):
                yield flag, f"cannot be set: {why}; leave it out"

    def model_problems(self, model: ModelConfig, path: str) -> Iterator[tuple[str, str]]:
        """Yield the keys of config.json that SGLang's own model of the family ignores, so that it samples from another
        model."""
        for key in FAMILIES[model.model_type].ignored_by_servers(model):
            yield (
                "actor.path",
                f"{path} is a {model.model_type} whose config.json uses {key}, which SGLang servers ignore; take "
                "a model with experts in every layer and an output layer of its own",
            )

    def host_problems(self, python: str | None, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Yield whether SGLang is missing, and otherwise the first argument that its parser refuses."""
        return host_problems(python, flags)

    async def start(self, settings: BackendSettings) -> Replica:
        """Start a server. Raises ValueError where GPUs are missing or in use, GeneratorStartError with the server's
        last log lines."""
        from rollout.inference.sglang.generator import SGLangGenerator

        return await SGLangGenerator.start(settings)
