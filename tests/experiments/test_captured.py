"""Training steps that are compiled in parts and replayed from CUDA graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import captured


@pytest.mark.parametrize("function", [captured.normed, captured.added_normed, captured.turned, captured.gated, captured.loss_of])
def test_compiled_parts_are_functions_of_their_own(function):
    assert function.__wrapped__.__doc__


def test_a_step_on_a_cpu_is_the_function():
    step = captured.Step(lambda x: x + 1, "cpu")
    assert not step.graphed
    assert step(torch.ones(())).item() == 2


@pytest.mark.gpu
def test_a_captured_step_trains_as_an_eager_one():
    def trained(eager: int) -> list[float]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8, device="cuda")
        optimizer = captured.adam(torch.optim.AdamW, layer.parameters(), 1e-2, "cuda")

        def update(x: torch.Tensor) -> torch.Tensor:
            loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, found = captured.Step(update, "cuda"), []
        step.graphed = not eager
        for number in range(12):
            captured.set_rate(optimizer, 1e-2 / (1 + number))
            x = torch.randn(6 if number < 7 else 3, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
            found.append(step(x).item())
        return found

    torch.testing.assert_close(trained(0), trained(1))
