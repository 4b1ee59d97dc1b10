"""The fixtures that tests of tables share."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.testing.timing import Timing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# stays from test to test: it takes five seconds to read its sentences, and no test changes it
KEPT = {"encoder_text"}


@pytest.fixture
def timed_once() -> Callable[..., Timing]:
    """Stands for a benchmark's timing where the subject is the form of its table: one call, by the wall clock."""

    def once(call: Callable[[], object], *options: object, **named: object) -> Timing:
        start = time.perf_counter()
        call()
        return Timing(*[1e3 * (time.perf_counter() - start)] * 3)

    return once


@pytest.fixture
def load(monkeypatch):
    """Name -> module of the benchmarks, loaded for this test alone, but for those of `KEPT`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before - KEPT:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
