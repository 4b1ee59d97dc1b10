"""Timers that take turns."""

from __future__ import annotations

import random

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
