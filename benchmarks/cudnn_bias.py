"""cuDNN's attention with a bias and its gradient, through its graph interface (`nvidia-cudnn-frontend`): what TransformerEngine calls for one.

cuDNN writes the gradient of a bias `[1, H, T, T]` that all rows share, summed over rows, where T is a multiple of 64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from cudnn_graph import plan
from torch import Tensor

MULTIPLE = 64  # of tokens, for which cuDNN has a gradient of the bias


class Graph:
    """A cuDNN graph of tensors by their names, with the memory that it works in.

    Raises:
        RuntimeError: cuDNN refuses the graph.
    """

    def __init__(self, device: torch.device):
        import cudnn

        kinds = cudnn.data_type
        self.types = {torch.bfloat16: kinds.BFLOAT16, torch.float16: kinds.HALF, torch.float32: kinds.FLOAT}
        self.handle, self.device = cudnn.create_handle(), device
        self.graph = cudnn.pygraph(intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=self.handle)
        self.known: dict[str, Any] = {}

    def tensor(self, name: str, like: Tensor) -> Any:
        """A tensor of the graph, of the shape, strides and dtype of another."""
        found = self.graph.tensor(name=name, dim=list(like.shape), stride=list(like.stride()), data_type=self.types[like.dtype])
        self.known[name] = found
        return found

    def output(self, name: str, made: Any, like: Tensor) -> None:
        """A result of the graph, which lies in memory as another tensor does."""
        made.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride())).set_data_type(self.types[like.dtype])
        self.known[name] = made

    def build(self) -> None:
        """Choose a plan, once every tensor is known."""
        self.workspace = plan(self.graph, self.device)

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Launch it on the current stream."""
        import cudnn

        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        addresses = {self.known[name]: x.data_ptr() for name, x in tensors.items()}
        self.graph.execute(addresses, self.workspace.data_ptr(), handle=self.handle)


class Shape:
    """Forward and backward of one shape and layout."""

    def __init__(self, query: Tensor, bias: Tensor):
        self.lse = torch.empty(*query.shape[:-1], 1, device=query.device)
        scale = query.shape[-1] ** -0.5
        self.forward = Graph(query.device)
        given = {name: self.forward.tensor(name, query) for name in "qkv"}
        given["bias"] = self.forward.tensor("bias", bias)
        out, lse = self.forward.graph.sdpa(**given, attn_scale=scale, is_inference=False, name="attention")
        self.forward.output("o", out, query)
        self.forward.output("stats", lse, self.lse)
        self.forward.build()
        self.backward = Graph(query.device)
        given = {name: self.backward.tensor(name, query) for name in ("q", "k", "v", "o", "dO")}
        given |= {"stats": self.backward.tensor("stats", self.lse)}
        given |= {name: self.backward.tensor(name, bias) for name in ("bias", "dBias")}
        found = self.backward.graph.sdpa_backward(**given, attn_scale=scale, name="gradients")
        for name, made in zip(("dQ", "dK", "dV"), found, strict=True):
            self.backward.output(name, made, query)
        self.backward.build()


@functools.lru_cache(maxsize=1)  # a graph holds memory to work in
def _shape(
    device: torch.device, dtype: torch.dtype, sizes: torch.Size, strides: tuple[int, ...], heads: int, tokens: int
) -> Shape:
    query = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    return Shape(query, torch.empty(1, heads, tokens, tokens, dtype=dtype, device=device))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        shape = _shape(query.device, query.dtype, query.shape, query.stride(), *bias.shape[1:3])
        out, lse = torch.empty_like(query), torch.empty_like(shape.lse)
        shape.forward.run({"q": query, "k": key, "v": value, "bias": bias, "o": out, "stats": lse})
        ctx.save_for_backward(query, key, value, bias, out, lse)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        query, key, value, bias, out, lse = ctx.saved_tensors
        if dout.stride() != out.stride():
            dout = torch.empty_like(out).copy_(dout)
        found = {name: torch.empty_like(query) for name in ("dQ", "dK", "dV")} | {"dBias": torch.empty_like(bias)}
        given = {"q": query, "k": key, "v": value, "bias": bias, "o": out, "stats": lse, "dO": dout}
        ctx.shape.backward.run(given | found)
        return found["dQ"], found["dK"], found["dV"], found["dBias"]


def cudnn_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention of `[B, H, T, D]` with a bias `[1, H, T, T]`, differentiable in all of them. The strides of the three are the same.

        O = softmax(D^-1/2 Q K^T + bias) V

    Raises:
        RuntimeError: cuDNN refuses the shape.
        ValueError: query, key and value lie in memory in different ways.
    """
    if len({x.stride() for x in (query, key, value)}) > 1:
        raise ValueError(f"the strides are {query.stride()}, {key.stride()} and {value.stride()}; they must be the same")
    return _Attend.apply(query, key, value, bias.contiguous())  # type: ignore[no-any-return,no-untyped-call]
