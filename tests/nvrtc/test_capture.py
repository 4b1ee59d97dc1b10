"""The facts of a capture that decide what is remembered."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from saccade.nvrtc.capture import in_compilers_graph

CUDA = torch.device("cuda", 1)


@pytest.mark.parametrize(("manager", "expected"), [("its stream", True), ("another", False), (None, False)])
def test_a_graph_of_the_compiler(manager, expected, monkeypatch):
    """It records, and warms up, on a stream of its own."""
    asked = []

    def get_manager(device_index, create_if_none_exists):
        asked.append((device_index, create_if_none_exists))
        return manager and SimpleNamespace(stream=manager)

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "its stream")
    assert in_compilers_graph(CUDA) == expected
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
    made, warm_up = (inspect.getsource(x) for x in (trees.CUDAGraphTreeManager.__init__, trees._use_cuda_memory_pool_manager))
    record = inspect.getsource(trees.CUDAGraphNode._record)
    assert "self.stream = torch.cuda.Stream()" in made
    assert "torch.cuda.stream(stream)" in warm_up
    assert "stream=self.stream" in record
