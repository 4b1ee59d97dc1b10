"""Runs the real Triton kernels without a GPU, by Triton's interpreter in a child process.

A child is needed because Triton reads its interpreter switch at import, and because ordinary calls must not use interpreted
kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from saccade.env import interpreting_environment
from saccade.hardware import has_package

_TIMEOUT_S = 120
_SENTENCES = ["Both eyes turn quickly.", "Attention turns."]


def sentences() -> list[str]:
    """Run the child and report its result."""
    if not has_package("triton"):
        return ["Triton is not installed here, so its interpreter cannot show the GPU kernels."]
    command = [sys.executable, "-m", "saccade.cli.demo.interpreter"]
    try:
        child = subprocess.run(
            command, env=interpreting_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"[yellow]Triton's interpreter did not finish in {_TIMEOUT_S} s.[/]"]
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return [f"[yellow]Triton's interpreter could not run the kernels here: {reason[0]}[/]"]
    found = json.loads(child.stdout.strip().splitlines()[-1])
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
    return [
        "The short-sequence Triton kernels run here in Triton's interpreter, to show that they are right, not how fast they are:",
        f"  forward and backward on {found['problem']}: largest difference from float64: {errors}",
        f"  all-MiniLM-L6-v2 on {len(_SENTENCES)} sentences: largest difference of the embeddings from torch's: {found['model']:.1e}",
    ]


def _kernel_errors() -> dict[str, float]:
    import saccade

    generator = torch.Generator().manual_seed(0)
    query, key, value, dout = (torch.randn(2, 2, 33, 32, generator=generator).requires_grad_() for _ in range(4))
    lengths = torch.tensor([33, 20])

    def results(dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        q, k, v = inputs = tuple(x.detach().to(dtype).requires_grad_() for x in (query, key, value))
        out = saccade.attention(q, k, v, lengths=lengths, backend=backend)
        gradients = torch.autograd.grad(out, inputs, dout.detach().to(dtype))
        return [x.detach().double() for x in (out, *gradients) if isinstance(x, torch.Tensor)]

    pairs = zip(("out", "dq", "dk", "dv"), results(torch.float32, "short"), results(torch.float64, "reference"), strict=True)
    return {name: float((got - want).abs().max()) for name, got, want in pairs}


def _model_difference() -> float:
    from saccade.cli.demo.encoder import Encoder
    from saccade.integrations.transformers import register

    register("saccade_short", backend="short")
    encoder = Encoder(torch.device("cpu"), torch.float32)
    batches = encoder.batches(_SENTENCES)
    theirs = encoder.embed(batches)
    encoder.use("saccade_short")
    return float((encoder.embed(batches) - theirs).abs().max())


def main() -> None:
    """The child's part: run the kernels and print one line of JSON."""
    problem = "B=2 H=2 S=33 D=32 with lengths, float32"
    print(json.dumps({"problem": problem, "errors": _kernel_errors(), "model": _model_difference()}))


if __name__ == "__main__":
    main()
