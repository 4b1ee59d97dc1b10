"""The Triton launches of the ragged family: of each kernel its arguments, as the call and the bucket of lengths have them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.exact.ragged.backward import backward_keys_kernel, backward_queries_kernel, backward_tile_kernel, delta_kernel
from saccade.exact.ragged.call import Bucket, Call
from saccade.exact.ragged.config import LongConfig, TileConfig, long_config, tile_config
from saccade.exact.ragged.forward import forward_long_kernel, forward_tile_kernel
from saccade.exact.ragged.tiles import clear_kernel
from saccade.launch.triton import launch_any

Gradients = tuple[Tensor, Tensor, Tensor]
_ROW_SUMS = 32  # queries of a program of `delta_kernel`
_CLEARING = 8  # programs that zero a tail


class Launch(NamedTuple):
    """A launch of `most` programs, or `per_sequence` for each sequence if that is fewer. Behind the tensors come `Call.varying` and the numbers."""

    kernel: Any
    most: int
    per_sequence: int
    tensors: tuple[Tensor, ...]
    numbers: tuple
    options: dict[str, int]

    def run(self, call: Call) -> None:
        programs = max(1, min(self.most, self.per_sequence * call.sequences))
        launch_any(self.kernel, programs, self.tensors, call.varying, self.numbers, **self.options)


def _strides(tensor: Tensor) -> tuple[int, int]:
    """(batch, head)."""
    return tensor.stride()[:2] if tensor.dim() == 4 else (0, tensor.stride(1))  # type: ignore[return-value]


def _rows(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([t.stride(-3 if t.dim() == 3 else -2) for t in tensors])


def _tiles(longest: int, tile: int) -> int:
    return -(-longest // tile)


def forward_tile(call: Call, bucket: Bucket, out: Tensor, lse: Tensor, clears: bool) -> Launch:
    """Forward of sequences that a tile holds."""
    args, tile = call.args, bucket.tile
    query, key, value, bias = args.query, args.key, args.value, args.bias
    config = call.configs.tiles.get(("fwd", tile)) or tile_config("fwd", tile, call.block_d, call.size, call.featured, call.arch)
    q = query  # stands in where an optional tensor is absent: the kernel never reads it
    tensors = (
        query, key, value, q if bias is None else bias, q if args.seed is None else args.seed, args.cu_seqlens_q, args.cu_seqlens_k,
        bucket.members, bucket.count, out, lse,
    )  # fmt: skip
    numbers = (
        _strides(query), _strides(key), _strides(value), _strides(out), (0, 0, 0) if bias is None else bias.stride(),
        call.heads, call.head_dim, args.scale, args.dropout_p,
        _rows(query, key, value, out), call.group, tile, bucket.small, call.block_d, args.causal, bias is not None,
        args.seed is not None, call.masks_dims, clears, config.stages, call.precision,
    )  # fmt: skip
    most = call.most(config.programs)
    return Launch(forward_tile_kernel, most, call.heads, tensors, numbers, {"num_warps": config.warps})


def forward_long(call: Call, bucket: Bucket, out: Tensor, lse: Tensor, clears: bool) -> Launch:
    """Forward of sequences of any length."""
    args, (query, key, value) = call.args, call.args[:3]
    config = call.configs.long.get("fwd") or long_config("fwd", call.block_d, call.size, call.arch)
    tensors = (
        query, key, value, query if args.seed is None else args.seed, args.cu_seqlens_q, args.cu_seqlens_k, bucket.members,
        bucket.count, out, lse,
    )  # fmt: skip
    numbers = (
        _strides(query), _strides(key), _strides(value), _strides(out), call.lse_batch_stride, call.heads,
        call.head_dim, args.scale, args.dropout_p, _rows(query, key, value, out), call.group, config.tile_q, config.tile_k,
        call.block_d, args.causal, args.seed is not None, call.masks_dims, call.dense, clears, config.stages, call.precision,
    )  # fmt: skip
    programs = call.most(config.programs), call.heads * _tiles(args.max_q, config.tile_q)
    return Launch(forward_long_kernel, *programs, tensors, numbers, _options(config))


def _options(config: LongConfig) -> dict[str, int]:
    return {"num_warps": config.warps, "num_stages": config.stages}


def backward_config(call: Call, tile: int) -> TileConfig:
    """The shape of the backward launch of a bucket."""
    return call.configs.tiles.get(("bwd", tile)) or tile_config("bwd", tile, call.block_d, call.size, call.featured, call.arch)


def backward_tile(
    call: Call, bucket: Bucket, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: Gradients, shares: Tensor | None, clears: bool
) -> Launch:  # fmt: skip
    """Backward of sequences that a tile holds. shares: for the gradient of a bias, float32 `[programs // H, H, tile, tile]`."""
    args, tile = call.args, bucket.tile
    (q, key, value), bias = args[:3], args.bias  # q stands in where an optional tensor is absent: the kernel never reads it
    config = backward_config(call, tile)
    tensors = (
        q, key, value, q if bias is None else bias, q if args.seed is None else args.seed, args.cu_seqlens_q, args.cu_seqlens_k,
        bucket.members, bucket.count, dout, lse, lse if dlse is None else dlse, *gradients, q if shares is None else shares,
    )  # fmt: skip
    numbers = (
        _strides(q), _strides(key), _strides(value), _strides(dout), *map(_strides, gradients),
        (0, 0, 0) if bias is None else bias.stride(), call.heads, call.head_dim, args.scale, args.dropout_p,
        _rows(q, key, value, dout, *gradients), call.group, tile, bucket.small, call.block_d, args.causal, bias is not None,
        shares is not None, args.seed is not None, dlse is not None, call.masks_dims, clears, config.stages, call.precision,
    )  # fmt: skip
    most = call.most(config.programs) if shares is None else shares.shape[0] * shares.shape[1]
    return Launch(backward_tile_kernel, most, call.heads // call.group, tensors, numbers, {"num_warps": config.warps})


def row_sums(call: Call, bucket: Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, delta: Tensor) -> Launch:
    """delta of sequences of any length."""
    args = call.args
    cu_q = args.query if args.cu_seqlens_q is None else args.cu_seqlens_q  # dense rows have none
    tensors = (dout, out, lse if dlse is None else dlse, cu_q, bucket.members, bucket.count, delta)
    numbers = (
        _strides(dout), _strides(out), call.lse_batch_stride, call.heads, call.head_dim, _rows(dout, out), _ROW_SUMS, call.block_d,
        dlse is not None, call.masks_dims, call.dense,
    )  # fmt: skip
    per_sequence = call.heads * _tiles(args.max_q, _ROW_SUMS)
    return Launch(delta_kernel, call.most(16), per_sequence, tensors, numbers, {"num_warps": 2})


def backward_long(
    call: Call, bucket: Bucket, dout: Tensor, lse: Tensor, delta: Tensor, gradients: Gradients, clears: bool
) -> tuple[Launch, Launch]:
    """Backward of sequences of any length: dK and dV, then dQ."""
    args, (dq, dk, dv) = call.args, gradients
    query, key, value = args[:3]
    # dense rows without lengths have none to be read
    cu_q, cu_k = [query if x is None else x for x in args[3:5]]
    seed = query if args.seed is None else args.seed
    read = (query, key, value, seed, cu_q, cu_k, bucket.members, bucket.count, dout, lse, delta)
    rows, inputs = _rows(query, key, value, dout, dq, dk, dv), tuple(map(_strides, (query, key, value, dout)))

    def launch(kernel: Any, direction: str, per_sequence: int, longest: int, *written: Tensor) -> Launch:
        config = call.configs.long.get(direction) or long_config(direction, call.block_d, call.size, call.arch)
        tile = config.tile_k if direction == "keys" else config.tile_q
        numbers = (
            *inputs, *map(_strides, written), call.lse_batch_stride, call.heads, call.head_dim, args.scale, args.dropout_p, rows,
            call.group, config.tile_q, config.tile_k, call.block_d, args.causal, args.seed is not None, call.masks_dims, call.dense,
            clears, config.stages, call.precision,
        )  # fmt: skip
        programs = call.most(config.programs), per_sequence * _tiles(longest, tile)
        return Launch(kernel, *programs, (*read, *written), numbers, _options(config))

    return (
        launch(backward_keys_kernel, "keys", call.heads // call.group, args.max_k, dk, dv),
        launch(backward_queries_kernel, "queries", call.heads, args.max_q, dq),
    )


def clearing(call: Call, *written: Tensor) -> Launch:
    """Zeros behind the last sequence of packed tensors: out, or all three gradients. For kernels that do not do it themselves."""
    args, (first, second, third) = call.args, written if len(written) == 3 else written * 3
    tensors = (first, second, third, args.cu_seqlens_q, args.cu_seqlens_k)
    numbers = (
        *map(_strides, (first, second, third)), call.heads, call.heads // call.group, call.head_dim, _rows(first, second, third),
        call.block_d, len(written) == 3,
    )  # fmt: skip
    return Launch(clear_kernel, _CLEARING, _CLEARING, tensors, numbers, {"num_warps": 1})
