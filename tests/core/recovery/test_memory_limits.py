"""What generators are started with again after memory ran out."""

from __future__ import annotations

from core.recovery.memory import MemoryLimits
from rollout.inference.backend import BackendSettings, MemoryFlag

FLAG = MemoryFlag(name="share", default=0.85)
ON_GPU = BackendSettings(model_path="m", dtype="float32", device="cuda", max_running=64, flags={"other": 1})


def test_a_generator_on_a_gpu_takes_fewer_sequences_and_a_smaller_share_of_it() -> None:
    memory = MemoryLimits()
    assert memory.fit_generator(ON_GPU, FLAG) == ON_GPU
    memory.lower_generator(ON_GPU, FLAG)
    fitted = memory.fit_generator(ON_GPU, FLAG)
    assert (fitted.max_running, fitted.flags) == (32, {"other": 1, "share": 0.75})
    for _ in range(9):
        memory.lower_generator(ON_GPU, FLAG)
    fitted = memory.fit_generator(ON_GPU, FLAG)
    assert (fitted.max_running, fitted.flags["share"]) == (1, 0.3)


def test_the_share_that_the_user_gave_is_what_is_lowered() -> None:
    memory = MemoryLimits()
    given = BackendSettings(model_path="m", dtype="float32", device="cuda", max_running=64, flags={"share": 0.5})
    memory.lower_generator(given, FLAG)
    assert memory.state_dict() == {"max_running": 32, "share": 0.4}


def test_without_a_gpu_or_a_flag_only_the_number_of_sequences_shrinks() -> None:
    on_cpu = BackendSettings(model_path="m", dtype="float32", device="cpu", max_running=64)
    for settings, flag in ((on_cpu, FLAG), (ON_GPU, None)):
        memory = MemoryLimits()
        memory.lower_generator(settings, flag)
        assert memory.state_dict() == {"max_running": 32}
        assert memory.fit_generator(settings, flag).flags == settings.flags
