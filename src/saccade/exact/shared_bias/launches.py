"""The launches of the family: of each kernel its programs, and its arguments as the call has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.exact.shared_bias.backward import keys_kernel, queries_kernel, rows_kernel
from saccade.exact.shared_bias.bias_gradient import bias_kernel
from saccade.exact.shared_bias.call import Given, SharedBiasCall
from saccade.exact.shared_bias.config import Shape
from saccade.exact.shared_bias.forward import forward_kernel
from saccade.launch.triton import launch
from saccade.native.recording import scratch


def _tiles(extent: int, tile: int) -> int:
    return -(-extent // tile)


def _options(shape: Shape) -> dict[str, Any]:
    return {"num_warps": shape.warps, "num_stages": shape.stages}


def _sizes(call: SharedBiasCall) -> tuple:
    return call.q_len, call.kv_len, call.head_dim, call.scale, call.dropout_p


def _strides(*tensors: Tensor) -> tuple:
    """(batch, head, row) of each."""
    return tuple([x.stride()[:3] for x in tensors])


def _shape(call: SharedBiasCall, shape: Shape) -> tuple:
    return call.group, shape.tile_q, shape.tile_k, call.block_d, *call.has


def forward(call: SharedBiasCall, given: Given, out: Tensor, lse: Tensor) -> None:
    """out and lse."""
    shape, strides = call.config.forward, _strides(out)

    def plan() -> tuple[int, tuple]:
        rows = (*call.inputs, *strides)
        numbers = (*rows, *call.numbers, *_sizes(call), *_shape(call, shape), *call.last(rows))
        return call.batch * call.heads * _tiles(call.q_len, shape.tile_q), numbers

    launch(forward_kernel, *_with(call.once("forward", strides, plan), (*given, out, lse)), **_options(shape))


def _with(plan: tuple[int, tuple], tensors: tuple[Tensor, ...]) -> tuple[int, tuple[Tensor, ...], tuple]:
    """Programs, tensors and numbers of a launch."""
    programs, numbers = plan
    return programs, tensors, numbers


def rows(call: SharedBiasCall, given: Given, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """The numbers of each query, float32 `[3, B, H, Tq]`."""
    numbers = scratch((3, *lse.shape), torch.float32, lse.device)
    shape, strides = call.config.queries, _strides(dout, out)

    def plan() -> tuple[int, tuple]:
        read = (*call.inputs[:2], *strides)
        constants = (*_shape(call, shape)[:-1], dlse is not None, call.exact, *call.last(read))
        counted = call.batch * call.heads * _tiles(call.q_len, shape.tile_q)
        return counted, (*read, *call.numbers, *_sizes(call)[:-1], numbers.stride(0), *constants)

    found = call.once("rows" if dlse is None else "rows with dlse", strides, plan)
    tensors = (given.query, given.key, *given[3:6], dout, out, lse, lse if dlse is None else dlse.contiguous(), numbers)
    launch(rows_kernel, *_with(found, tensors), **_options(shape))
    return numbers


def keys(call: SharedBiasCall, given: Given, dout: Tensor, numbers: Tensor, dk: Tensor, dv: Tensor) -> None:
    """dK and dV."""
    shape, strides, beside = call.config.keys, _strides(dout, dk, dv), call.numbers
    if call.turns:
        copy, beside = call.turned(given)
        given = given._replace(bias=copy)

    def plan() -> tuple[int, tuple]:
        used, even = (*call.inputs, *strides), call.q_len % shape.tile_q == 0
        padded, unit, *last = call.last(used)
        bias_constants = (False, 1) if call.turns else (padded, unit)
        constants = (*_shape(call, shape), even, call.turns, *bias_constants, *last)
        counted = call.batch * call.owners * _tiles(call.kv_len, shape.tile_k)
        return counted, (*used, *beside, *_sizes(call), numbers.stride(0), *constants)

    tensors = (*given, dout, numbers, dk, dv)
    launch(keys_kernel, *_with(call.once("keys", strides, plan), tensors), **_options(shape))


def queries(call: SharedBiasCall, given: Given, dout: Tensor, numbers: Tensor, dq: Tensor) -> None:
    """dQ."""
    shape, strides = call.config.queries, _strides(dout, dq)

    def plan() -> tuple[int, tuple]:
        used = (*call.inputs, *strides)
        counted = call.batch * call.heads * _tiles(call.q_len, shape.tile_q)
        return counted, (*used, *call.numbers, *_sizes(call), numbers.stride(0), *_shape(call, shape), *call.last(used))

    tensors = (*given, dout, numbers, dq)
    launch(queries_kernel, *_with(call.once("queries", strides, plan), tensors), **_options(shape))


def _bias_programs(call: SharedBiasCall) -> int:
    shape = call.config.bias
    return call.windows * call.bias_owners * _tiles(call.q_len, shape.tile_q) * _tiles(call.kv_len, shape.tile_k)


def bias_chunks(call: SharedBiasCall) -> int:
    """Chunks into which `bias` divides the rows that share a bias."""
    return call.chunks(_bias_programs(call))[1]


def bias(call: SharedBiasCall, given: Given, dout: Tensor, numbers: Tensor, dbias: Tensor) -> None:
    """The gradient of the bias, float32 `[Z, W, Hb, Tq, Tk]`."""
    shape, strides = call.config.bias, _strides(dout)

    def plan() -> tuple[int, tuple]:
        used, (chunk, chunks) = (*call.inputs, *strides), call.chunks(_bias_programs(call))
        even = call.q_len % shape.tile_q == 0 and call.kv_len % shape.tile_k == 0
        counts = (numbers.stride(0), call.members, chunk)
        constants = (*_shape(call, shape), even, *call.last(used))
        return chunks * _bias_programs(call), (*used, *call.numbers, call.bias_owners, *_sizes(call), *counts, *constants)

    tensors = (*given, dout, numbers, dbias)
    launch(bias_kernel, *_with(call.once("bias", strides, plan), tensors), **_options(shape))
