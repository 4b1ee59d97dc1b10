"""A new cache folder for each test, with nothing remembered from the previous test."""

from __future__ import annotations

import pytest

from saccade.nvrtc import Source, compiler, store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path / "cache"))
    compiler.forget()
    store.forget()
    yield tmp_path / "cache" / "nvrtc"
    compiler.forget()
    store.forget()


FILL = """
#include "value.cuh"
extern "C" __global__ void fill(float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = VALUE * FACTOR;
}
"""


@pytest.fixture
def fill(tmp_path) -> Source:
    """A kernel with a header in another folder; it needs the macro FACTOR."""
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "value.cuh").write_text("#define VALUE 3.0f\n")
    (tmp_path / "fill.cu").write_text(FILL)
    return Source(tmp_path / "fill.cu", (headers,))
