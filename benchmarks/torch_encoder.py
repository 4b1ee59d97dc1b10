"""Steps of torch's own `nn.TransformerEncoder` for the table of models, as it is and inside `saccade.replace_sdpa()`.

Its layers keep tokens outside the batch: query, key and value are views of `[T, B, H, D]`, and so are the gradients that come in. A kernel whose
results lie otherwise is paid for by copies of each of them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
from encoders import compared
from rows import Row, Writer
from torch import Tensor, nn

import saccade
from saccade.testing.timing import kernel_time, throughput_in_turns

NAME = "nn.TransformerEncoder"
WIDTH, HEADS, LAYERS = 768, 12, 4
# (tokens, batch): around the limits of kernels; in two of them the host is waited for
SIZES = ((32, 512), (49, 64), (49, 512), (77, 256), (128, 128), (197, 16), (197, 64), (577, 32), (1024, 16))
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "stock": contextlib.nullcontext,
    "saccade": saccade.replace_sdpa,
}
# of the errors of the stock module, by root mean square, that of ours may be so much larger
_FACTOR = 1.5


def measure_torch_encoder(
    writer: Writer,
    repeat_ms: int,
    rounds: int,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    width: int = WIDTH,
) -> None:
    """Check, time and write forward, and forward with backward. Forward is that of training, without gradients: in eval mode the module calls its own
    C++, which nothing replaces."""
    for tokens, batch in sizes:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device, dtype)
        x = torch.randn(batch, tokens, width, device=device, dtype=dtype, requires_grad=True)
        ratio = _error_ratio(model, x)
        for direction in ("fwd", "fwd+bwd"):
            calls = {name: _call(model, x, name, direction) for name in WAYS if writer.part.has(name)}
            times = throughput_in_turns(calls, device, rounds, repeat_ms)
            busy = {name: kernel_time(call, device) for name, call in calls.items()}
            for name, timing in times.items():
                note = f"{1e3 * batch / timing.p50:.0f} items/s" + (f"; kernels {busy[name]:.4g} ms" if busy[name] else "")
                problem = f"{NAME} B={batch} S={tokens}"
                row = Row("models", problem, name, direction, str(dtype).removeprefix("torch."), *timing, note=note)
                row.error_ratio = "" if name == "stock" else ratio
                writer.add(row)
            print(f"{NAME} B={batch} S={tokens} {direction}: {compared(times)}", flush=True)


def _call(model: nn.Module, x: Tensor, name: str, direction: str) -> Callable[[], object]:
    def forward() -> Tensor:
        with WAYS[name](), torch.no_grad():
            return model(x)

    def step() -> None:
        with WAYS[name]():
            model.zero_grad()
            model(x).sum().backward()

    return forward if direction == "fwd" else step


def _error_ratio(model: nn.Module, x: Tensor) -> float:
    """The larger of two ratios, for out and the gradient of x inside `replace_sdpa`: the error of four sequences over what is allowed, by that of
    the stock module against float64; and for the whole batch, on which other kernels may run, the distance of the two over the sum of both errors.

    Raises:
        SystemExit: one is above 1, so that no time of a wrong result is written.
    """
    dout = torch.randn(x.shape, device=x.device, dtype=torch.float64)
    few, of_few = x.detach()[:4], dout[:4]
    exact = _results(copy.deepcopy(model).double(), few.double(), of_few, "stock")
    stock, ours = ([_apart(a, b) for a, b in zip(_results(model, few, of_few, name), exact, strict=True)] for name in WAYS)
    whole, expected = (_results(model, x.detach(), dout, name) for name in ("saccade", "stock"))
    apart = [_apart(a, b.double()) for a, b in zip(whole, expected, strict=True)]
    ratios = [max(a / (_FACTOR * b), c / ((1 + _FACTOR) * b)) for a, b, c in zip(ours, stock, apart, strict=True)]
    if not max(ratios) <= 1:
        raise SystemExit(
            f"{NAME} of {x.shape[1]} tokens is wrong by {max(ratios):.2f} of what is allowed beside float64; nothing is timed"
        )
    return max(ratios)


def _results(model: nn.Module, x: Tensor, dout: Tensor, name: str) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    with WAYS[name]():
        out = model(leaf)
        return [out.detach(), *torch.autograd.grad(out, leaf, dout.to(out.dtype))]


def _apart(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
