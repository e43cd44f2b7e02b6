"""Phases of the clock: each moment is in one of them, and they add up."""

import time

import pytest

from rein.runtime.clock import OTHER, Clock


def test_phases_add_up_to_what_went_by() -> None:
    began = time.perf_counter()
    clock = Clock()
    for phase in ("one", "two", "one"):
        with clock(phase):
            time.sleep(0.01)
        time.sleep(0.005)
    spent, whole = clock.lap(), time.perf_counter() - began
    assert set(spent.seconds) == {"one", "two", OTHER}
    assert sum(spent.seconds.values()) == pytest.approx(whole, abs=2e-3)
    assert spent.seconds["one"] > spent.seconds["two"] >= 0.01
    assert spent.seconds[OTHER] >= 0.015


def test_a_phase_inside_another_is_taken_out_of_it() -> None:
    clock = Clock()
    with clock("outer"), clock("inner"):
        time.sleep(0.03)
    spent = clock.lap().seconds
    assert spent["inner"] >= 0.03
    assert spent["outer"] < 0.01


def test_cpu_seconds_are_the_process_s() -> None:
    clock = Clock()
    with clock("sleep"):
        time.sleep(0.05)
    began = time.process_time()
    with clock("work"):
        while time.process_time() - began < 0.05:
            pass
    spent = clock.lap().cpu
    assert spent["work"] >= 0.04
    assert spent["sleep"] < 0.02


def test_work_counts_where_the_block_ends_well_and_time_always() -> None:
    clock = Clock()
    with clock("update", 3.0):
        pass
    with pytest.raises(ValueError, match="no"), clock("update", 5.0):
        raise ValueError("no")
    with clock("after"):
        pass
    spent = clock.lap()
    assert spent.work["update"] == 3
    assert "after" in spent.seconds


def test_a_lap_begins_anew_and_the_whole_holds_all() -> None:
    clock = Clock()
    with clock("one", 1.0):
        time.sleep(0.01)
    first = clock.lap()
    with clock("one", 2.0):
        pass
    whole, second = clock.whole(), clock.lap()
    assert second.seconds["one"] < 0.01 <= first.seconds["one"]
    assert whole.seconds["one"] == pytest.approx(first.seconds["one"] + second.seconds["one"])
    assert whole.work["one"] == 3


def test_a_function_may_be_a_phase() -> None:
    clock = Clock()
    slow = clock("read")(lambda x: time.sleep(0.01) or x)
    assert slow(1) + slow(2) == 3
    assert clock.lap().seconds["read"] >= 0.02
