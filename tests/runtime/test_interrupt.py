"""Signals become a flag between two updates; what handled them before handles them after."""

import os
import signal
import threading

import pytest

from rein.runtime.interrupt import Interrupt, deferred


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_flag_and_stops_nothing(number: signal.Signals) -> None:
    with deferred() as interrupt:
        assert not interrupt
        os.kill(os.getpid(), number)
        assert interrupt
        assert interrupt.signal_number == number


def test_a_second_ctrl_c_ends_at_once() -> None:
    with deferred():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_still_waits_for_the_save() -> None:
    with deferred() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.signal_number == signal.SIGTERM


def test_the_former_handlers_come_back_even_after_an_error() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def fail() -> None:
        with deferred():
            assert signal.getsignal(signal.SIGINT) != before[0]
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_nothing_is_deferred() -> None:
    found: list[Interrupt] = []

    def work() -> None:
        with deferred() as interrupt:
            found.append(interrupt)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not found[0]
