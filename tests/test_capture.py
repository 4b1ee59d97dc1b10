"""Calls under CUDA graphs: host time does not count there, so our kernels are preferred even for the smallest calls, and they can
be loaded during capture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import saccade
from saccade.exact.problem import describe_attention
from saccade.exact.short.backend import FEWEST, FEWEST_FORWARD, SHORT


def described(problems: int, length: int, dim: int, needs_grad: bool, **changes):
    query = torch.empty(problems, 1, length, dim, dtype=torch.bfloat16, device="meta")
    problem = describe_attention(query, query, query, None, 0.0, False, None, False, None, False, False, needs_grad)
    return replace(problem, device_type="cuda", arch=90, **changes)


@pytest.mark.parametrize(("length", "dim", "needs_grad"), [(32, 64, False), (64, 64, True), (128, 64, True), (128, 32, False)])
def test_the_host_decides_small_calls_alone_where_it_counts(length, dim, needs_grad):
    few, many = (described(n, length, dim, needs_grad) for n in (96, 16_384))
    assert SHORT.prefers(many)
    assert not SHORT.prefers(few)
    assert SHORT.prefers(replace(few, host_counts=False))
    fewest = FEWEST if needs_grad or (length > 64 and dim > 32) else FEWEST_FORWARD
    assert "96 problems" in SHORT.rule(few).said
    assert f"below {fewest:,}" in SHORT.rule(few).said


def test_captured_forward_alone_of_few_long_problems_stays_with_torch():
    """Captured, a kernel's time alone counts; in an eager call it is hidden."""
    eager = described(768, 128, 64, False, host_counts=False)
    problem = replace(eager, python_counts=False)
    assert "0.76 to 0.99" in SHORT.rule(replace(problem, is_causal=True)).said
    assert not SHORT.prefers(problem)
    assert SHORT.prefers(eager)
    assert SHORT.prefers(replace(problem, needs_grad=True))


def test_explain_names_the_rule(monkeypatch):
    from saccade.engine import dispatch
    from saccade.exact.backends import BACKENDS as ATTENTION

    text = dispatch.explain(ATTENTION, described(96, 32, 64, False))
    if "short: cannot" not in text:  # without Triton
        assert "short: could, but the time of a forward call of 96 problems is host time" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 3, 37, 48), (4096, 2, 128, 64)], ids=["Triton", "CUDA C++"])
def test_captured_without_warming_up(shape):
    batch, heads, length, dim = shape
    query, key, value = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = saccade.attention(query, key, value, backend="short")
        chosen = saccade.attention(query, key, value)
    for x in (query, key, value):
        x.normal_()
    graph.replay()
    expected = saccade.attention(query.float(), key.float(), value.float(), backend="reference")
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(out, chosen)
