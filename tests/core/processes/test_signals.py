"""A signal that arrives where exceptions are lost."""

from __future__ import annotations

import os
import signal

import pytest

from core.processes.signals import Interrupts, raise_if_interrupted


class SignalledInItsDestructor:
    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self._number)
        for _ in range(100):  # the handler runs between two of these
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_exception_is_lost_still_ends_the_next_wait(number: int) -> None:
    before = signal.getsignal(number)
    with Interrupts():
        raise_if_interrupted()
        SignalledInItsDestructor(number)  # gone at once
        with pytest.raises(KeyboardInterrupt, match=f"signal {int(number)}"):
            raise_if_interrupted()
    raise_if_interrupted()
    assert signal.getsignal(number) is before
