"""Attention in 8 bits as others have it: cuDNN's FP8 forward through its graph interface, and SageAttention's INT8 scores in Triton.

A user who accepts an approximation chooses between these and pruning, so `nm_fp8` times them with their errors. Both are optional packages
(`nvidia-cudnn-frontend`, `sageattention`); a peer that is not installed is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from cudnn_graph import plan
from torch import Tensor

from saccade.hardware import has_package

E4M3_MAX = 448.0
# of the weights, which are at most 1: their largest is 256 then, well inside of the type
_WEIGHTS_SCALE = 256.0


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers of the same strides, and the float32 factor `[1, 1, 1, 1]` that makes them the tensor again."""
    factor = tensor.abs().amax().float() / E4M3_MAX
    return (tensor.float() / factor).to(torch.float8_e4m3fn), factor.view(1, 1, 1, 1)


class CudnnFp8:
    """cuDNN's forward for one shape and layout, e4m3 in and out on Hopper, one factor a tensor.

        O = softmax(scale Q K^T) V      of `[B, H, T, D]` views

    Raises:
        RuntimeError: cuDNN refuses the graph.
    """

    def __init__(self, query: Tensor, is_causal: bool) -> None:
        import cudnn

        shape, strides = list(query.shape), list(query.stride())
        self.handle = cudnn.create_handle()
        kinds = cudnn.data_type
        self.graph = cudnn.pygraph(
            io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=self.handle
        )
        given = {name: self.graph.tensor(name=name, dim=shape, stride=strides, data_type=kinds.FP8_E4M3) for name in "qkv"}
        factors = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        given |= {name: self.graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=kinds.FLOAT) for name in factors}
        out, _, *largest = self.graph.sdpa_fp8(
            **given, attn_scale=shape[-1] ** -0.5, use_causal_mask=is_causal, is_inference=True, name="attention"
        )
        out.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kinds.FP8_E4M3)
        for one in largest:
            one.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kinds.FLOAT)
        device = query.device
        self.workspace = plan(self.graph, device)
        self.given, self.results = given, (out, *largest)
        self.out = torch.empty_strided(shape, strides, dtype=torch.float8_e4m3fn, device=device)
        self.largest = [torch.empty(1, 1, 1, 1, device=device) for _ in largest]

    def prepare(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        """(a call of the kernel alone, the factor of its result). The result is as large as a value at most."""
        made = [quantised(x) for x in (query, key, value)]
        numbers, factors = zip(*made, strict=True)
        one = torch.ones(1, 1, 1, 1, device=query.device)
        told = (*factors, one / _WEIGHTS_SCALE, one * _WEIGHTS_SCALE, 1.0 / factors[2])
        tensors: dict[Any, int] = {tensor: x.data_ptr() for tensor, x in zip(self.given.values(), (*numbers, *told), strict=True)}
        tensors |= {tensor: x.data_ptr() for tensor, x in zip(self.results, (self.out, *self.largest), strict=True)}

        def run(kept: tuple = (numbers, told)) -> Tensor:  # the graph knows addresses alone
            self.graph.execute(tensors, self.workspace.data_ptr(), handle=self.handle)
            return self.out

        return run, factors[2]


def cudnn_fp8(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """By note: (call, factor of its result): the kernel on numbers of 8 bits, and with their making."""
    import cudnn

    made = CudnnFp8(query, is_causal)
    cudnn.set_stream(handle=made.handle, stream=torch.cuda.current_stream().cuda_stream)
    call, factor = made.prepare(query, key, value)
    return {"kernel": (call, factor), "with quantisation": (lambda: made.prepare(query, key, value)[0](), factor)}


def sage(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """SageAttention 1: scores of INT8 numbers, values in float16; it quantises in each call."""
    from sageattention import sageattn

    call = functools.partial(sageattn, query, key, value, tensor_layout="HND", is_causal=is_causal)
    return {"with quantisation": (call, torch.ones((), device=query.device))}


def eight_bits() -> dict[str, Callable[..., dict[str, tuple[Callable[[], Tensor], Tensor]]]]:
    """The peers that are installed."""
    found = {"cudnn_fp8": (cudnn_fp8, "cudnn"), "sage_int8": (sage, "sageattention")}
    return {name: make for name, (make, package) in found.items() if has_package(package)}
