"""Limits that were lowered when memory ran out: they only get lower, and not below what can work."""

from dataclasses import replace

import pytest

from core.errors import LaunchError
from core.train.recover import MemoryLimits
from mcore_adapter.data.planner import PassLimits
from mcore_adapter.memory.out_of_memory import StepOutOfMemory
from rollout.inference.backend import BackendSettings, GeneratorConfig, MemoryFlag

FLAG = MemoryFlag(name="share", default=0.85, colocated=0.6)


def on_gpu(**flags: float | None) -> BackendSettings:
    config = GeneratorConfig(max_running=24, flags=flags)
    return BackendSettings(model_path="m", dtype="float32", device="cuda", config=config)


def test_of_two_limits_the_lower_one_holds_after_a_restart() -> None:
    memory = MemoryLimits({"actor_train": 64, "ref_inf": 512})
    memory.load_state_dict({"actor_train": 128, "ref_inf": 256, "critic_train": 32})
    assert memory.state_dict() == {"actor_train": 64, "ref_inf": 256, "critic_train": 32}


def test_an_update_that_failed_half_way_is_not_applied_again_and_the_next_attempt_gets_its_limit() -> None:
    told: list[dict[str, float]] = []
    memory, tried = MemoryLimits(on_lowered=told.append), []

    def update(limits: PassLimits) -> None:
        tried.append(limits.max_tokens_per_mb)
        raise StepOutOfMemory("out of memory in the update", limits.max_tokens_per_mb, 31, False)

    with pytest.raises(LaunchError, match="actor_train continues with 50 tokens per microbatch"):
        memory.fitting("actor_train", 100, update)
    assert tried == [100] and told == [{"actor_train": 50}]


def test_a_generator_keeps_its_settings_until_it_runs_out_of_memory() -> None:
    assert MemoryLimits().fit_generator(on_gpu(share=0.5), FLAG) == on_gpu(share=0.5)


@pytest.mark.parametrize("given", [{}, {"share": None}, {"share": 0.8}])
def test_a_server_that_runs_out_of_memory_again_and_again_keeps_a_share_of_its_gpu(given: dict) -> None:
    memory, settings = MemoryLimits(), on_gpu(**given, page_size=16)
    taken = []
    for _ in range(8):
        memory.lower_generator(settings, FLAG)
        fitted = memory.fit_generator(settings, FLAG)
        assert fitted.config.flags["page_size"] == 16
        taken.append((fitted.config.max_running, fitted.config.flags["share"]))
    fractions = [0.7, 0.6, 0.5, 0.4, 0.3] if given.get("share") else [0.75, 0.65, 0.55, 0.45, 0.35]
    assert taken == list(zip([12, 6, 3, 1, 1, 1, 1, 1], [*fractions, 0.3, 0.3, 0.3], strict=True))
    assert memory.state_dict() == {"max_running": 1, "share": 0.3}


def test_without_a_gpu_or_a_flag_only_the_number_of_sequences_shrinks() -> None:
    for settings, flag in ((replace(on_gpu(), device="cpu"), FLAG), (on_gpu(other=1), None)):
        memory = MemoryLimits()
        memory.lower_generator(settings, flag)
        assert memory.state_dict() == {"max_running": 12}
        assert memory.fit_generator(settings, flag).config.flags == settings.config.flags
