"""The facts of a capture that decide what is remembered."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from saccade.nvrtc.capture import in_compilers_graph

CUDA = torch.device("cuda", 1)


@pytest.mark.parametrize("state", ["in_recording", "in_warmup", "", None])
def test_a_graph_of_the_compiler(state, monkeypatch):
    manager = None if state is None else SimpleNamespace(**{name: name == state for name in ("in_recording", "in_warmup")})
    asked = []

    def get_manager(device_index, create_if_none_exists):
        asked.append((device_index, create_if_none_exists))
        return manager

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    assert in_compilers_graph(CUDA) == bool(state)
    assert asked == [(1, False)]
    assert not in_compilers_graph(torch.device("cpu"))


def test_a_thread_that_the_compiler_does_not_know(monkeypatch):
    def get_manager(device_index, create_if_none_exists):
        raise AssertionError

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    assert not in_compilers_graph(CUDA)


def test_torch_has_what_is_asked():
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    assert trees.get_manager(0, create_if_none_exists=False) is None
    assert isinstance(trees.CUDAGraphTreeManager.in_recording, property)
    assert isinstance(trees.CUDAGraphTreeManager.in_warmup, property)
