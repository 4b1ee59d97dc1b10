"""The launches of the family: of each kernel its programs, and its arguments as the call has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.exact.shared_bias.backward import keys_kernel, queries_kernel, rows_kernel
from saccade.exact.shared_bias.bias_gradient import bias_kernel, joined_kernel
from saccade.exact.shared_bias.call import Call, strides_of
from saccade.exact.shared_bias.config import Joined, Shape
from saccade.exact.shared_bias.forward import forward_kernel
from saccade.launch.triton import launch


def _tiles(extent: int, tile: int) -> int:
    return -(-extent // tile)


def _options(shape: Shape | Joined) -> dict[str, Any]:
    return {"num_warps": shape.warps, "num_stages": shape.stages}


def _sizes(call: Call) -> tuple:
    return call.q_len, call.kv_len, call.head_dim, call.scale


def forward(call: Call, out: Tensor, lse: Tensor) -> None:
    """out and lse."""
    shape, rows = call.config.forward, (call.query, call.key, call.value, out)
    constants = (call.group, shape.tile_q, shape.tile_k, call.block_d, *call.has, *call.last(*rows))
    arguments = (*map(strides_of, rows), *call.numbers, *_sizes(call), *constants)
    programs = call.batch * call.heads * _tiles(call.q_len, shape.tile_q)
    launch(forward_kernel, programs, (*rows[:3], *call.beside, out, lse), arguments, **_options(shape))


def rows(call: Call, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """The numbers of each query, float32 `[3, B, H, Tq]`."""
    numbers = torch.empty((3, *lse.shape), dtype=torch.float32, device=lse.device)
    shape, given = call.config.queries, (call.query, call.key, dout, out)
    exact = call.query.dtype == torch.float32
    constants = (call.group, shape.tile_q, shape.tile_k, call.block_d, *call.has, dlse is not None, exact, *call.last(*given))
    arguments = (*map(strides_of, given), *call.numbers, *_sizes(call), numbers.stride(0), *constants)
    tensors = (call.query, call.key, *call.beside, dout, out, lse, lse if dlse is None else dlse.contiguous(), numbers)
    programs = call.batch * call.heads * _tiles(call.q_len, shape.tile_q)
    launch(rows_kernel, programs, tensors, arguments, **_options(shape))
    return numbers


def keys(call: Call, dout: Tensor, numbers: Tensor, dk: Tensor, dv: Tensor) -> None:
    """dK and dV."""
    shape, rows = call.config.keys, (call.query, call.key, call.value, dout, dk, dv)
    even = call.q_len % shape.tile_q == 0
    constants = (call.group, shape.tile_q, shape.tile_k, call.block_d, *call.has, even, *call.last(*rows))
    arguments = (*map(strides_of, rows), *call.numbers, *_sizes(call), numbers.stride(0), *constants)
    programs = call.batch * call.owners * _tiles(call.kv_len, shape.tile_k)
    launch(keys_kernel, programs, (*rows[:3], *call.beside, dout, numbers, dk, dv), arguments, **_options(shape))


def queries(call: Call, dout: Tensor, numbers: Tensor, dq: Tensor) -> None:
    """dQ."""
    shape, rows = call.config.queries, (call.query, call.key, call.value, dout, dq)
    constants = (call.group, shape.tile_q, shape.tile_k, call.block_d, *call.has, *call.last(*rows))
    arguments = (*map(strides_of, rows), *call.numbers, *_sizes(call), numbers.stride(0), *constants)
    programs = call.batch * call.heads * _tiles(call.q_len, shape.tile_q)
    launch(queries_kernel, programs, (*rows[:3], *call.beside, dout, numbers, dq), arguments, **_options(shape))


def _bias_programs(call: Call) -> int:
    shape = call.config.bias
    return call.windows * call.bias_owners * _tiles(call.q_len, shape.tile_q) * _tiles(call.kv_len, shape.tile_k)


def bias_chunks(call: Call) -> int:
    """Chunks into which `bias` divides the rows that share a bias."""
    return call.chunks(_bias_programs(call))[1]


def bias(call: Call, dout: Tensor, numbers: Tensor, dbias: Tensor) -> None:
    """The gradient of the bias, float32 `[Z, W, Hb, Tq, Tk]`."""
    shape, rows = call.config.bias, (call.query, call.key, call.value, dout)
    even = call.q_len % shape.tile_q == 0 and call.kv_len % shape.tile_k == 0
    chunk, chunks = call.chunks(_bias_programs(call))
    constants = (call.group, shape.tile_q, shape.tile_k, call.block_d, *call.has, even, *call.last(*rows))
    counts = (numbers.stride(0), call.members, chunk)
    arguments = (*map(strides_of, rows), *call.numbers, call.bias_owners, *_sizes(call), *counts, *constants)
    tensors = (*rows[:3], *call.beside, dout, numbers, dbias)
    launch(bias_kernel, chunks * _bias_programs(call), tensors, arguments, **_options(shape))


def _joined_shape(call: Call) -> Joined:
    assert call.config.joined is not None, "the configuration has a joined kernel"
    return call.config.joined


def sections(call: Call) -> int:
    """Sections of keys of the joined kernel."""
    return _joined_shape(call).tiles(call.kv_len)[1]


def _joined_programs(call: Call) -> int:
    return call.windows * call.bias_owners * sections(call) * _tiles(call.q_len, _joined_shape(call).tile_q)


def joined_chunks(call: Call) -> int:
    """Chunks into which `joined` divides the rows that share a bias."""
    return call.chunks(_joined_programs(call))[1]


def joined(call: Call, dout: Tensor, numbers: Tensor, dq: Tensor, section_stride: int, dbias: Tensor) -> None:
    """dQ, or the part of each section, and the gradient of the bias, float32 `[Z, W, Hb, Tq, Tk]`."""
    shape, rows = _joined_shape(call), (call.query, call.key, call.value, dout, dq)
    tiles, count = shape.tiles(call.kv_len)
    even = call.kv_len == tiles * count * shape.tile_k
    chunk, chunks = call.chunks(_joined_programs(call))
    padded, *last = call.last(*rows)
    # a section may reach beyond the columns of a bias that has some for whole tiles
    padded = padded and tiles * count * shape.tile_k <= call.bias.shape[3]
    constants = (
        call.group, shape.tile_q, shape.tile_k, tiles, call.block_d, *call.has, even, shape.holds_bias, padded, *last
    )  # fmt: skip
    arguments = (
        *map(strides_of, rows), section_stride, *call.numbers, call.bias_owners, *_sizes(call), numbers.stride(0), call.members, chunk, count,
        *constants,
    )  # fmt: skip
    tensors = (*rows[:3], *call.beside, dout, numbers, dq, dbias)
    launch(joined_kernel, chunks * _joined_programs(call), tensors, arguments, **_options(shape))
