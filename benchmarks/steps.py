"""From a call to what a timer is given: one direction of it, the calls that run at all, calls captured in a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _errors_of_peers() -> tuple[type[Exception], ...]:
    """The error of FlashAttention-4 for a grid that CUDA refuses, if it is installed."""
    try:
        from cutlass.cutlass_dsl.tvm_ffi_provider import CUDADialectError
    except ImportError:
        return ()
    return (CUDADialectError,)


# what an implementation raises for a problem that it does not take
NOT_RUN = (RuntimeError, AssertionError, TypeError, ValueError, *_errors_of_peers())
_MOST_NUMBERS = (
    2**27
)  # of all the queries in a graph: some 0.3 ms of forward on an H200, beside which the launch of a graph is small


def step(call: Callable[[], Tensor], direction: str, leaves: Sequence[Tensor], dout: Tensor) -> Callable[[], object]:
    """One direction of `call`: "fwd" without gradient, "bwd" alone, on a graph that is made now and kept, or "fwd+bwd"."""

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(call(), leaves, dout)

    if direction == "bwd":
        return functools.partial(torch.autograd.grad, call(), leaves, dout, retain_graph=True)
    return {"fwd": forward, "fwd+bwd": both}[direction]


def those_that_run(
    calls: dict[str, Callable[[], Tensor]], leaves: Sequence[Tensor], dout: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """The calls of which forward and backward run; for each other the reason is printed."""
    found = {}
    for name, call in calls.items():
        try:
            step(call, "fwd", leaves, dout)()
            step(call, "fwd+bwd", leaves, dout)()
        except NOT_RUN as error:
            print(f"  {name} does not run this row: {first_line(error)}")
            continue
        found[name] = call
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short; the error's name if the message is empty."""
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    """`count` calls, one after another."""

    def calls() -> None:
        for _ in range(count):
            call()

    return calls


def calls_in_a_graph(numbers: int) -> int:
    """How many calls whose query holds so many numbers are captured together, so that the graph's launch is little of its time."""
    return max(1, min(16, _MOST_NUMBERS // numbers))


def capture(calls: Callable[[], object]) -> Callable[[], object]:
    """`calls` as a CUDA graph, captured after three runs on another stream; what is returned replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            calls()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay
