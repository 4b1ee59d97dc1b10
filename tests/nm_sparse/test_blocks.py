"""The contexts that change how every thread runs `nm_sparse_attention`."""

import contextlib

import pytest
import torch

import saccade
from saccade.nm_sparse.bits import keeps_selection
from saccade.nm_sparse.order import adds_in_order

SETTINGS = [(saccade.nm_sparse.recompute_selection, keeps_selection), (saccade.nm_sparse.unordered_gradients, adds_in_order)]


@pytest.mark.parametrize(("block", "usual"), SETTINGS)
def test_blocks_of_threads_that_overlap_leave_nothing_behind(block, usual):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(block())
    second.enter_context(block())
    first.close()
    assert not usual()
    second.close()
    assert usual()


@pytest.mark.parametrize(("block", "usual"), SETTINGS)
def test_the_newest_block_counts(block, usual):
    with block():
        with block(False):
            assert usual()
        assert not usual()
    assert usual()


@pytest.mark.parametrize(("block", "usual"), SETTINGS)
def test_of_several_blocks_the_newest_that_runs_counts(block, usual):
    with block(False):
        with block():
            with block(False):
                assert usual()
            assert not usual()
        assert usual()


def test_torch_s_deterministic_algorithms_outweigh_a_block(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with saccade.nm_sparse.unordered_gradients():
        assert adds_in_order()


def test_a_graph_may_hold_a_block():
    inputs = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in "qkv"]

    def call(*inputs):
        with saccade.nm_sparse.recompute_selection():
            return saccade.nm_sparse_attention(*inputs)

    found = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(found, call(*inputs))
    assert keeps_selection()
