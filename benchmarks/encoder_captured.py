"""Stock encoders from CUDA graphs, padded: the peer of whoever captures by shape. Widths are padded to steps of 16, so that few shapes occur."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Padded = dict[str, Tensor]  # ids and mask, `[B, T]`, of the host
_STEP = 16


def _widened(batch: Padded) -> Padded:
    columns = -batch["input_ids"].shape[1] % _STEP
    return {name: F.pad(x, (0, columns)) for name, x in batch.items()}


class Captured:
    """A function of a batch of one shape on the device, replayed. Its output is the graph's memory."""

    def __init__(self, function: Callable[[Padded], Tensor], batch: Padded, device: str, warm: int):
        self.inputs = {name: x.to(device) for name, x in batch.items()}
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm):
                function(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, stream=stream):
            self.output = function(self.inputs)

    def __call__(self, batch: Padded) -> Tensor:
        for name, x in batch.items():
            self.inputs[name].copy_(x, non_blocking=True)
        self.graph.replay()
        return self.output


def captured_forward(function: Callable[[Padded], Tensor], device: str) -> Callable[[Padded], Tensor]:
    """`function` from a graph for each shape, made at first use; its output is copied."""
    graphs: dict[tuple[int, ...], Captured] = {}

    def call(batch: Padded) -> Tensor:
        batch = _widened(batch)
        shape = tuple(batch["input_ids"].shape)
        if shape not in graphs:
            graphs[shape] = Captured(function, batch, device, 2)
        return graphs[shape](batch).clone()

    return call


def captured_step(step: Callable[[Padded], Tensor], batch: Padded, device: str) -> Callable[[Padded], Tensor]:
    """A training step from one graph, for batches of one shape."""
    return Captured(step, batch, device, 3)
