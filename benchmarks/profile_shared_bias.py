"""Times each kernel of `shared_bias` at candidate shapes: `python benchmarks/profile_shared_bias.py [--tokens 384] [--rows 384] [--heads 4] [--dim 32]`.

The best of each kernel is printed with its shape, and last backward as a whole. A shape that
does not compile, or asks for too much shared memory, is left out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from saccade.errors import CompileError
from saccade.exact.args import AttentionArgs
from saccade.exact.shared_bias import launchers, launches
from saccade.exact.shared_bias.call import SharedBiasCall
from saccade.exact.shared_bias.config import Config, Shape, config_of
from saccade.hardware import arch_of
from saccade.launch.triton import pow2
from saccade.testing.timing import measure

DEVICE, DTYPE = "cuda", torch.bfloat16


def shapes() -> list[Shape]:
    """Candidates: 28, which compile in about a minute."""
    tiles = ((64, 64), (128, 64), (64, 128), (128, 128), (64, 32), (32, 64), (32, 128))
    return [Shape(*tile, warps, stages) for tile in tiles for warps in (4, 8) for stages in (2, 3)]


def best(name: str, candidates: list, run: Callable[[object], Callable[[], object]]) -> tuple[float, object]:
    """The fastest candidate, printed."""
    found = []
    for candidate in candidates:
        try:
            call = run(candidate)
            call()
            found.append((measure(call, DEVICE, 3, 15).p50, candidate))
        except (CompileError, RuntimeError):
            continue
    found.sort(key=lambda one: one[0])
    for milliseconds, candidate in found[:4]:
        print(f"{name}: {milliseconds:.4f} ms {candidate}", flush=True)
    return found[0]


def _of(function: Callable[..., object], *given: object) -> Callable[[], object]:
    return lambda: function(*given)


def asked(about: str | None, arguments: list[str] | None) -> tuple[AttentionArgs, torch.Tensor]:
    """The call that a command line asks for, and the gradient of its output."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("tokens", 384), ("rows", 384), ("heads", 4), ("dim", 32)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--mask", action="store_true", help="a mask of keys for each row")
    given = parser.parse_args(arguments)
    sizes = (given.rows, given.tokens, given.heads, given.dim)
    query, key, value, dout = (torch.randn(sizes, device=DEVICE, dtype=DTYPE).transpose(1, 2) for _ in range(4))
    bias = torch.randn(1, given.heads, given.tokens, given.tokens, device=DEVICE, dtype=DTYPE)
    mask = torch.rand(given.rows, 1, 1, given.tokens, device=DEVICE) < 0.8 if given.mask else None
    return AttentionArgs(query, key, value, mask, bias, None, None, 0.0, False, given.dim**-0.5), dout


def main(arguments: list[str] | None = None) -> None:
    """Search each kernel by itself, then time backward as a whole."""
    args, dout = asked(__doc__, arguments)
    query = args.query
    config = config_of(pow2(max(16, query.shape[-1])), 2, arch_of(query.device))
    out, lse = launchers.forward(args)
    dq, dk, dv = (torch.empty_like(x) for x in args[:3])

    def with_(**changes: object) -> SharedBiasCall:
        return SharedBiasCall(args, replace(config, **changes), True)

    given_ = with_().given(args)
    numbers = launches.rows(with_(), given_, dout, None, out, lse)
    forward = best("forward", shapes(), lambda s: _of(launches.forward, with_(forward=s), given_, out, lse))
    keys = best("dK and dV", shapes(), lambda s: _of(launches.keys, with_(keys=s), given_, dout, numbers, dk, dv))
    best("dK and dV, turned", shapes(), lambda s: _of(launches.keys, with_(keys=s, turns=True), given_, dout, numbers, dk, dv))
    queries = best("dQ", shapes(), lambda s: _of(launches.queries, with_(queries=s), given_, dout, numbers, dq))
    rows = best(
        "delta", [queries[1], config.queries], lambda s: _of(launches.rows, with_(queries=s), given_, dout, None, out, lse)
    )
    apart = best(
        "dbias", list(itertools.product(shapes(), (1, 2, 4))),
        lambda one: _of(launchers.bias_gradient, with_(bias=one[0], programs=one[1]), given_, dout, numbers),
    )  # fmt: skip
    chosen = Config(forward[1], keys[1], queries[1], apart[1][0], programs=apart[1][1])
    whole = measure(lambda: launchers.backward(args, dout, None, out, lse, bias_grad=True, packed=None, config=chosen), DEVICE)
    print(f"delta {rows[0]:.4f} ms; backward as a whole {whole.p50:.4f} ms: {chosen}")


if __name__ == "__main__":
    main()
