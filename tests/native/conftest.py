"""Fixtures of tests of replayed calls."""

from __future__ import annotations

import sys

import pytest
import recorded_cuda
from recorded_triton import recording

from saccade import native
from saccade.engine import dispatch, prepare
from saccade.launch import cuda as launch_cuda
from saccade.launch.cache import LaunchCache
from saccade.launch.cuda import CudaLaunch
from saccade.native.build import Build
from saccade.nm_sparse.backward_sm90 import launchers as of_backward
from saccade.nm_sparse.fused import launchers as of_forward
from saccade.nvrtc import tensor_map
from saccade.recorder import ACTIVE


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


@pytest.fixture
def nm_launches(monkeypatch):
    """Launches of N:M attention so far, on a CPU: (kernel, blocks, threads, shared memory, maps, arguments). Its kernels are written down and not run."""
    made = recording(monkeypatch, with_cuda=True)
    found = next(made)
    monkeypatch.setattr("saccade.engine.op_replay.may_record", lambda *given: ACTIVE.recorder is None)
    monkeypatch.setattr(dispatch, "why_not", lambda backend, problem: [])
    monkeypatch.setattr(of_backward, "takes", lambda args: True)
    monkeypatch.setattr(of_forward, "arch_of", lambda device: 90)
    monkeypatch.setattr(of_forward, "multiprocessors", lambda device: 132)
    for module in (of_forward, of_backward):
        monkeypatch.setattr(
            module, "load", lambda source, name, options, device, *_: recorded_cuda.Named(found, source, name, options)
        )
    monkeypatch.setattr(launch_cuda, "_READY", LaunchCache())
    monkeypatch.setattr(CudaLaunch, "ready", recorded_cuda.ready_of(found, "combine", "shown_values", "key_bits"))
    monkeypatch.setattr(sys.modules["saccade.nvrtc.tensor_map"], "_encode", lambda *about: bytes(128))
    tensor_map.cache_clear()
    yield found
    next(made, None)
    tensor_map.cache_clear()
