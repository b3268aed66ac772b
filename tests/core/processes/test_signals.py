"""A signal that arrives where exceptions are lost."""

import os
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from core.processes import signals
from core.processes.signals import SIGNALS, EndNow, Interrupts, postponed, raise_if_interrupted


class SignalledInItsDestructor:
    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self._number)
        for _ in range(100):  # the handler runs between two of these
            pass


class FailsInItsDestructor:
    def __del__(self) -> None:
        raise ValueError


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_whose_exception_is_lost_still_ends_the_next_wait(number: int, monkeypatch) -> None:
    before, printed = signal.getsignal(number), []
    monkeypatch.setattr(sys, "unraisablehook", hook := lambda lost: printed.append(lost.exc_type))
    with Interrupts():
        raise_if_interrupted()
        SignalledInItsDestructor(number)  # gone at once
        with pytest.raises(KeyboardInterrupt, match=f"signal {int(number)}"):
            raise_if_interrupted()
        FailsInItsDestructor()
    raise_if_interrupted()
    FailsInItsDestructor()
    assert signal.getsignal(number) is before and sys.unraisablehook is hook
    assert printed == [ValueError, ValueError]


def test_what_begins_after_a_signal_has_its_own_time_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with Interrupts():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        now = 100.0  # the step that was under way took so long to finish
        with pytest.raises(KeyboardInterrupt) as end, postponed(30.0):  # the save
            now = 129.0
            raise_if_interrupted()
            now = 131.0
            with pytest.raises(EndNow, match="not finished 30 s later"):
                raise_if_interrupted()
    assert end.type is KeyboardInterrupt, "it finished all the same"


def test_of_repeated_signals_the_first_raises_and_later_ones_do_not_interrupt_what_saves(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with Interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) * 20:
            now += 7.0
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt), postponed(1000.0):
            signal.raise_signal(signal.SIGTERM)
            now += 0.1
            signal.raise_signal(signal.SIGINT)  # with the one before, as from `timeout`
            now += 2.0
            with pytest.raises(EndNow, match="the second"):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_nohup_ignores_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(number)
            raise_if_interrupted()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
