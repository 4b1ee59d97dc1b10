"""A launch of a Triton kernel is remembered by all that its binary and its grid depend on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from saccade.launch import triton as launching
from saccade.launch.triton import launch, launch_any


@pytest.fixture
def compiled(monkeypatch):
    """The calls that compile a kernel, (its name, grid, arguments, options), and the launches that repeat one of them: (its number, grid, arguments)."""
    seen = SimpleNamespace(first=[], again=[])

    class Compiled:
        def __init__(self, number):
            self.number = number

        def __getitem__(self, grid):
            return lambda *given: seen.again.append((self.number, grid, given))

    def first_launch(kernel, grid, arguments, options):
        seen.first.append((kernel.__name__, grid, arguments, dict(options)))
        return Compiled(len(seen.first) - 1)

    monkeypatch.setattr(launching, "first_launch", first_launch)
    monkeypatch.setattr(launching, "interpreting_triton", lambda: False)
    monkeypatch.setattr(launching, "_check_free", lambda *given: None)
    monkeypatch.setattr(launching, "_runners", {})
    return seen


def kernels():
    return SimpleNamespace(__name__="first"), SimpleNamespace(__name__="second")


def aligned_and_not() -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.zeros(64)
    start = -memory.data_ptr() % 16 // 4
    return memory[start : start + 16], memory[start + 1 : start + 17]


def test_a_launch_is_remembered_by_all_it_depends_on(compiled):
    (first, second), (x, shifted) = kernels(), aligned_and_not()
    calls = [
        (first, 8, (x, x), (1, 2.0), {"num_warps": 4}),
        (second, 8, (x, x), (1, 2.0), {"num_warps": 4}),
        (first, (8, 2), (x, x), (1, 2.0), {"num_warps": 4}),
        (first, 8, (x, shifted), (1, 2.0), {"num_warps": 4}),
        (first, 8, (shifted, x), (1, 2.0), {"num_warps": 4}),
        (first, 8, (x, x.double()), (1, 2.0), {"num_warps": 4}),
        (first, 8, (x, x), (1, 3.0), {"num_warps": 4}),
        (first, 8, (x, x), (1, 2.0), {"num_warps": 8}),
        (first, 8, (x, x), (1, 2.0), {"num_warps": 4, "enable_fp_fusion": False}),
    ]
    for kernel, programs, tensors, numbers, options in 2 * calls:
        launch(kernel, programs, tensors, numbers, **options)
    assert len(compiled.first) == len(calls)
    for number, (kernel, programs, tensors, numbers, options) in enumerate(calls):
        grid = (8, 1, 1) if programs == 8 else (8, 2, 1)
        assert compiled.first[number] == (kernel.__name__, grid, (*tensors, *numbers), {"enable_fp_fusion": True, **options})
        assert compiled.again[number] == (number, grid, (*[t.data_ptr() for t in tensors], *numbers))


def test_numbers_of_each_call_and_the_grid_are_not_part_of_it(compiled):
    (first, second), (x, shifted) = kernels(), aligned_and_not()
    calls = [
        (first, (x,), (1,), {}),
        (second, (x,), (1,), {}),
        (first, (shifted,), (1,), {}),
        (first, (x.double(),), (1,), {}),
        (first, (x,), (2,), {}),
        (first, (x,), (1,), {"num_warps": 8}),
    ]
    for varying in (5, 6):
        for kernel, tensors, numbers, options in calls:
            launch_any(kernel, varying, tensors, (varying,), numbers, **options)
    assert len(compiled.first) == len(calls)
    for number, (_, tensors, numbers, _) in enumerate(calls):
        assert compiled.first[number][1:3] == ((5, 1, 1), (*tensors, 5, *numbers))
        assert compiled.again[number] == (number, (6, 1, 1), (*[t.data_ptr() for t in tensors], 6, *numbers))


def test_another_kernel_never_gets_the_number_of_one_that_is_remembered(compiled):
    x = torch.zeros(4)
    for _ in range(50):
        launch(SimpleNamespace(__name__="made for one call"), 1, (x,), ())
    assert len(compiled.first) == 50


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (64, 64), (65, 128)])
def test_powers_of_two(n, power):
    assert launching.pow2(n) == power
