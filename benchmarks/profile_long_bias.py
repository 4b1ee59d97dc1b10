"""Times the kernels of `long` with a bias, each in a CUDA graph: `python benchmarks/profile_long_bias.py [--tokens 384] [--rows 384] [--heads 4] [--dim 32]`.

Forward as it is compiled with maxima late and early, what backward consists of, and beside each what `shared_bias` takes for it. Results of both are
compared first, so that no time is printed for wrong ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from profile_shared_bias import DEVICE, asked
from torch import Tensor

from saccade.exact.long import bias_gradient, config, launchers
from saccade.exact.shared_bias import launchers as of_bias
from saccade.exact.shared_bias import launches
from saccade.testing.timing import measure


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call, replayed from a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def say(name: str, call: Callable[[], object]) -> None:
    """Time a call."""
    timing = measure(captured(call), DEVICE, 5, 30)
    print(f"{name:34} {timing.p50:.4f} ms ({timing.p20:.4f} to {timing.p80:.4f})", flush=True)


def compare(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], names: str) -> None:
    """Refuse results that differ by more than roundings of 16 bits do."""
    for name, x, y in zip(names.split(), ours, theirs, strict=True):
        off, most = (x.float() - y.float()).abs().amax().item(), y.float().abs().amax().item()
        if not off <= 0.03 * max(1.0, most):
            raise SystemExit(f"{name} is off by {off:.3g}, of numbers up to {most:.3g}")


def main(arguments: list[str] | None = None) -> None:
    """Compare, then time."""
    args, dout = asked(__doc__, arguments)
    out, lse = of_bias.forward(args)
    wanted = of_bias.backward(args, dout, None, out, lse, bias_grad=True, packed=None)
    usual = config.LATE_MAXIMA
    for late in (usual, ()):
        config.LATE_MAXIMA = late
        compare(launchers.forward(args), (out, lse), "out lse")
        say(f"forward, maxima {'late' if late else 'early'}", lambda: launchers.forward(args))
    config.LATE_MAXIMA = usual
    say("forward, shared_bias", lambda: of_bias.forward(args))
    compare(launchers.backward(args, dout, None, out, lse, bias_grad=True, packed=None), wanted, "dq dk dv dbias")
    rows = of_bias.rows_of(args, dout, None, out, lse, bias_grad=True)
    say("numbers of the rows", lambda: launches.rows(rows.call, rows.given, dout, None, out, lse))
    for grad in (False, True):
        beside = "with" if grad else "without"
        say(f"backward {beside} dbias", lambda: launchers.backward(args, dout, None, out, lse, bias_grad=grad, packed=None))  # noqa: B023
        say(
            f"backward {beside} dbias, shared_bias",
            functools.partial(of_bias.backward, args, dout, None, out, lse, bias_grad=grad, packed=None),
        )
    say("dbias, shared_bias", lambda: of_bias.bias_gradient(*rows))
    chosen = bias_gradient.parts_of
    for parts in (1, 2, 3, 4, 8):
        if parts <= args.query.shape[0]:
            each = -(-args.query.shape[0] // parts)
            bias_gradient.parts_of = lambda *_: (each, -(-args.query.shape[0] // each))  # noqa: B023
            say(
                f"dbias with {parts} parts, and the rest",
                lambda: launchers.backward(args, dout, None, out, lse, bias_grad=True, packed=None),
            )
    bias_gradient.parts_of = chosen


if __name__ == "__main__":
    main()
