"""Waiting for the C++ that replays known calls."""

from __future__ import annotations

import pytest

from saccade import native
from saccade.engine import prepare


class Compiled:
    def __init__(self, module):
        self.module, self.waited = module, []

    def wait(self, seconds):
        self.waited.append(seconds)
        return self.module


class Module:
    class Memory:
        def forget(self):
            pass

    @staticmethod
    def has_driver():
        return True


@pytest.mark.parametrize("module", [None, Module], ids=["too long", "compiled"])
def test_known_calls_are_waited_for(module, monkeypatch):
    build = Compiled(module)
    monkeypatch.setattr(native, "calls", None)
    monkeypatch.setattr(
        native, "module", None
    )  # `_use` sets both, and a stranger left behind serves every encoder of later tests
    monkeypatch.setattr(native, "_build", build)
    assert not prepare.wait_for_known_calls("cpu")
    assert build.waited == []
    assert prepare.wait_for_known_calls("cuda:0", 3.0) == (module is not None)
    assert build.waited == [3.0]
    assert (native.calls is not None) == (module is not None)
    assert prepare.wait_for_known_calls("cuda:0", 3.0) == (module is not None)
    assert len(build.waited) == (1 if module else 2)
