"""The names under which profilers and `grad_fn` show the operations."""

from __future__ import annotations

import pytest
import torch

import saccade

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaves(*shape, count=3):
    return [torch.randn(*shape, device=DEVICE, requires_grad=True) for _ in range(count)]


def varlen():
    ends = torch.tensor([0, 7, 16], dtype=torch.int32, device=DEVICE)
    return saccade.attention_varlen(*leaves(16, 2, 16), ends, ends, 9, 9, backend="ragged")


CALLS = {
    "Attention": lambda: saccade.attention(*leaves(1, 2, 16, 16), backend="short"),
    "AttentionPacked": lambda: saccade.attention_qkvpacked(*leaves(1, 16, 3, 2, 16, count=1), backend="short"),
    "Varlen": varlen,
    "DynamicMask": lambda: saccade.dynamic_mask_attention(
        *leaves(1, 2, 16, 16), torch.randn(1, 2, 16, device=DEVICE), keep=4, backend="gather_torch"
    ),
    "NMSparse": lambda: saccade.nm_sparse_attention(*leaves(1, 2, 16, 16), backend="masked"),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_are_ranges_of_ours(name):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = CALLS[name]()
        out.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {f"saccade::{name}", f"saccade::{name}Backward"} <= names
    nodes, pending = set(), [out.grad_fn]
    while pending:
        node = pending.pop()
        nodes.add(node.name())
        pending += [following for following, _ in node.next_functions if following is not None]
    assert f"saccade::{name}Backward" in nodes


def test_compiled_calls_are_ranges_too():
    query, key, value = (x.detach() for x in leaves(1, 2, 16, 16))
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.compile(lambda q, k, v: saccade.attention(q, k, v, backend="short"), backend="aot_eager")(query, key, value)
    assert "saccade::attention_forward" in {event.key for event in profile.key_averages()}
