"""Timers: calls in turns, and long calls."""

from __future__ import annotations

import random

import pytest

from saccade.testing import timing
from saccade.testing.timing import Timing


def test_turns_change_their_order_and_the_middle_round_counts(monkeypatch):
    seen = []

    def measure(call, device, warmup_ms, repeat_ms):
        assert (device, warmup_ms, repeat_ms) == ("cpu", 1, 7)
        seen.append(call)
        times = sum(c is call for c in seen)
        # a round that was disturbed, and one that was not
        return Timing(1.0, 0.5, 2.0) if times == 1 else Timing(100.0, 50.0, 200.0) if times == 2 else Timing(3.0, 2.5, 4.0)

    monkeypatch.setattr(timing, "measure", measure)
    random.seed(0)
    calls = {name: object() for name in "abcdef"}
    found = timing.measure_in_turns(calls, 3, "cpu", 1, 7)
    assert found == {name: Timing(3.0, 2.5, 4.0) for name in calls}
    rounds = [seen[i : i + 6] for i in (0, 6, 12)]
    assert all(set(r) == set(calls.values()) for r in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_long_calls_are_timed_three_times(monkeypatch):
    calls, times = [], iter([600.0, 610.0, 590.0, 605.0])
    monkeypatch.setattr(timing, "_event_times", lambda call, count: [next(times) for _ in range(count)])
    assert timing.measure(lambda: calls.append(1), "cuda", 10, 50) == Timing(605.0, 590.0, 610.0)
    assert len(calls) == 1  # it may compile


def test_shorter_calls_are_left_to_triton(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    given = []
    monkeypatch.setattr(timing, "_event_times", lambda call, count: [9.0] * count)
    monkeypatch.setattr(testing, "do_bench", lambda call, **options: given.append(options) or [3.0, 2.0, 4.0])
    assert timing.measure(lambda: None, "cuda", 10, 50) == Timing(3.0, 2.0, 4.0)
    assert given == [{"warmup": 10, "rep": 50, "quantiles": [0.5, 0.2, 0.8]}]
