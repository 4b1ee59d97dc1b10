"""Fixtures of tests of replayed calls."""

from __future__ import annotations

import pytest

from saccade import native
from saccade.engine import prepare
from saccade.native.build import Build


@pytest.fixture
def calls(monkeypatch):
    """The memory of calls on a GPU, emptied before and after the test."""
    monkeypatch.setenv("SACCADE_NATIVE", "1")
    build = Build()
    module = build.wait()
    assert module is not None, build.refusal
    assert module.has_driver()
    memory = module.Memory()
    monkeypatch.setattr(native, "calls", memory)
    prepare.forget()
    yield memory
    prepare.forget()
