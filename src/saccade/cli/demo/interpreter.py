"""The real Triton kernels without a GPU: Triton's interpreter runs them in a child process, against the float64 oracle.

A child, because Triton reads its switch when it is imported, and because ordinary calls must not meet interpreted kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from saccade.env import interpreting_environment
from saccade.hardware import has_package

_TIMEOUT_S = 120


def sentence() -> str:
    """Run the child and say what it found."""
    if not has_package("triton"):
        return "Triton is not installed here, so its interpreter cannot show the GPU kernels"
    command = [sys.executable, "-m", "saccade.cli.demo.interpreter"]
    try:
        child = subprocess.run(
            command, env=interpreting_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"[yellow]Triton's interpreter did not finish in {_TIMEOUT_S} s[/]"
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return f"[yellow]Triton's interpreter could not run the kernels here: {reason[0]}[/]"
    found = json.loads(child.stdout.strip().splitlines()[-1])
    parts = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
    return (
        f"The short-sequence Triton kernels, run line by line in Triton's interpreter on {found['problem']}: "
        f"largest difference from float64: {parts}"
    )


def _errors() -> dict[str, object]:
    import saccade

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 33, 32, generator=generator).requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dout = torch.randn(2, 2, 33, 32, generator=generator)
    lengths = torch.tensor([33, 20])
    out = saccade.attention(*inputs, lengths=lengths, backend="short")
    oracle = saccade.attention(*exact, lengths=lengths, backend="reference")
    gradients = torch.autograd.grad(out, inputs, dout)  # type: ignore[arg-type]
    exact_gradients = torch.autograd.grad(oracle, exact, dout.double())  # type: ignore[arg-type]
    pairs = zip(("out", "dq", "dk", "dv"), (out, *gradients), (oracle, *exact_gradients), strict=True)
    return {
        "problem": "B=2 H=2 S=33 D=32 with lengths, float32",
        "errors": {name: float((got.double() - want).abs().max()) for name, got, want in pairs},  # type: ignore[union-attr,operator]
    }


if __name__ == "__main__":
    print(json.dumps(_errors()))
