"""Fixtures that several tests of encoders share."""

from __future__ import annotations

import pytest

from saccade import native
from saccade.native.build import Build


@pytest.fixture(params=["python", "c++"])
def by(request, monkeypatch):
    """Both ways to read the state of a model."""
    module = None
    if request.param == "c++":
        monkeypatch.setenv("SACCADE_NATIVE", "1")
        module = Build().wait()
        if module is None:
            pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(native, "module", module)
    return request.param
