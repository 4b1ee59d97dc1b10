"""Functions shared by the tables of the staged N:M pipeline: the two pipelines stage by stage, and device time by CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import saccade
from saccade.testing.timing import Timing, measure

DEVICE, BACKEND = "cuda", "mma_sp"
Call = Callable[[], object]
STAGES = ("scores", "softmax", "matmul")
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Setting:
    """The paper's Fig. 5: 4 heads of 64, a batch large enough to fill the GPU. float32 is multiplied as TF32 by both."""

    length: int
    batch: int
    dtype: torch.dtype = torch.bfloat16
    pattern: str = "2:4"
    heads: int = 4
    dim: int = 64

    def __str__(self) -> str:
        sizes = f"B={self.batch} H={self.heads} Tq={self.length} Tk={self.length} D={self.dim}"
        return f"nm_staged({self.pattern} {sizes} {SHORT[self.dtype]})"

    @property
    def dense_bytes(self) -> int:
        """The size of one dense matrix of scores in bytes."""
        return self.batch * self.heads * self.length**2 * self.dtype.itemsize

    def tensors(self) -> list[Tensor]:
        """query, key, value."""
        shape = (self.batch, self.heads, self.length, self.dim)
        return [torch.randn(shape, device=DEVICE, dtype=self.dtype) for _ in "qkv"]


def dense_scores(query: Tensor, key: Tensor) -> Tensor:
    """`Q K^T / sqrt(D)` in one matrix product: the scale is its alpha and needs no pass of its own."""
    batch = query.shape[:2]
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    none = query.new_empty(1, 1, 1)
    return torch.baddbmm(none, query, key.mT, beta=0, alpha=query.shape[-1] ** -0.5).unflatten(0, batch)


def unfused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense attention in three kernels of torch."""
    return torch.matmul(torch.softmax(dense_scores(query, key), -1), value)


def staged(query: Tensor, key: Tensor, value: Tensor, pattern: str, blocks: Tensor | None = None) -> Tensor:
    """Pruned attention in three kernels of ours, under a block mask if there is one."""
    scores = saccade.nm_sparse.scores(query, key, pattern=pattern, block_mask=blocks, backend=BACKEND)
    return scores.softmax().matmul(value)


def dense_stages(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Call]:
    """Each stage of `unfused` alone, on its real input."""
    scores = dense_scores(query, key)
    weights = torch.softmax(scores, -1)
    return {
        "scores": lambda: dense_scores(query, key),
        "softmax": lambda: torch.softmax(scores, -1),
        "matmul": lambda: torch.matmul(weights, value),
    }


def staged_stages(query: Tensor, key: Tensor, value: Tensor, pattern: str, blocks: Tensor | None = None) -> dict[str, Call]:
    """Each stage of `staged` alone."""

    def prune() -> saccade.nm_sparse.NMWeights:
        return saccade.nm_sparse.scores(query, key, pattern=pattern, block_mask=blocks, backend=BACKEND)

    scores = prune()
    weights = scores.softmax()
    return {
        "scores": prune,
        "softmax": scores.softmax,
        "matmul": lambda: weights.matmul(value),
    }


def device_time(call: Call, repeat_ms: int) -> Timing:
    """Milliseconds on the device, without the host: the call is recorded in a CUDA graph and replayed, L2 flushed between."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.synchronize()
    timing = measure(graph.replay, repeat_ms=repeat_ms)
    graph.reset()
    return timing


def peak_bytes(call: Call) -> int:
    """The bytes that a call allocates at its peak, in addition to what was allocated before."""
    call()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
