"""The Triton launches of the ragged family: each kernel's arguments, from the call and the bucket of lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from saccade.exact.ragged.backward import backward_keys_kernel, backward_queries_kernel, backward_tile_kernel, delta_kernel
from saccade.exact.ragged.bias import backward_bias_kernel, weights_kernel
from saccade.exact.ragged.call import Bucket, RaggedCall
from saccade.exact.ragged.config import LongConfig, TileConfig, long_config, tile_config
from saccade.exact.ragged.forward import forward_long_kernel, forward_tile_kernel
from saccade.exact.ragged.tiles import clear_kernel
from saccade.launch.triton import launch_any

Gradients = tuple[Tensor, Tensor, Tensor]
_ROW_SUMS = 32  # queries of a program of `delta_kernel`
_CLEARING = 8  # programs that zero a tail


class Launch(NamedTuple):
    """A launch of `most` programs, or `per_sequence` for each sequence if that is fewer. Behind the tensors come `RaggedCall.varying` and the numbers."""

    kernel: Any
    most: int
    per_sequence: int
    tensors: tuple[Tensor, ...]
    numbers: tuple
    options: dict[str, int]

    def run(self, call: RaggedCall) -> None:
        programs = max(1, min(self.most, self.per_sequence * call.sequences))
        follows = self.most, self.per_sequence, 0
        launch_any(self.kernel, programs, self.tensors, call.varying, self.numbers, follows, **self.options)


def _strides(tensor: Tensor) -> tuple[int, int]:
    """(batch, head)."""
    return tensor.stride()[:2] if tensor.dim() == 4 else (0, tensor.stride(1))  # type: ignore[return-value]


def _rows(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([t.stride(-3 if t.dim() == 3 else -2) for t in tensors])


def _tiles(longest: int, tile: int) -> int:
    return -(-longest // tile)


def forward_tile(call: RaggedCall, bucket: Bucket, out: Tensor, lse: Tensor, clears: bool) -> Launch:
    """Forward of sequences that a tile holds."""
    args, tile = call.args, bucket.tile
    query, key, value, bias = args.query, args.key, args.value, args.bias
    config = call.configs.tiles.get(("fwd", tile)) or tile_config("fwd", tile, call.block_d, call.size, call.featured, call.arch)
    q = query  # takes the place of an absent optional tensor, which the kernel never reads
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


class _Beside(NamedTuple):
    """Mask and bias of sequences beyond a tile; an absent one is replaced by a tensor that the kernels never read."""

    tensors: tuple[Tensor, Tensor]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    windows: int
    flags: tuple[bool, bool, bool]  # is there a mask, is there a bias, and does a tile of them span 2^31 numbers


_WIDEST = 128  # queries or keys of a tile, at most
_NONE: tuple[int, ...] = (0, 0, 0, 0)


def _beside(call: RaggedCall) -> _Beside:
    args = call.args
    mask, bias = args.mask, args.bias
    windows, strides = 1, _NONE
    if bias is not None:
        # of packed sequences one bias serves all
        strides = (0, *bias.stride()) if bias.dim() == 3 else bias.stride()
        windows = 1 if bias.dim() == 3 else bias.shape[0]
    mask_strides = _NONE if mask is None else mask.stride()
    wide = max(_WIDEST * (x[2] + x[3]) for x in (mask_strides, strides)) >= 2**31
    return _Beside(
        (args.query if mask is None else mask, args.query if bias is None else bias),
        (mask_strides, strides), windows, (mask is not None, bias is not None, wide),
    )  # fmt: skip


def _lengths(call: RaggedCall) -> tuple[Tensor, Tensor]:
    """cu_q and cu_k, of dense rows their lengths; whole rows have none to be read."""
    query = call.args.query
    cu_q, cu_k = (query if x is None else x for x in call.args[3:5])
    return cu_q, cu_k


def _density(call: RaggedCall) -> int:
    """How the kernels find rows: 0 packed, 1 dense with lengths, 2 dense and whole."""
    if not call.dense:
        return 0
    return 2 if call.args.cu_seqlens_k is None else 1


def forward_long(call: RaggedCall, bucket: Bucket, out: Tensor, lse: Tensor, clears: bool) -> Launch:
    """Forward of sequences of any length."""
    args, (query, key, value), beside = call.args, call.args[:3], _beside(call)
    config = call.configs.long.get("fwd") or long_config("fwd", call.block_d, call.size, call.arch)
    seed = query if args.seed is None else args.seed
    tensors = (query, key, value, seed, *beside.tensors, *_lengths(call), bucket.members, bucket.count, out, lse)
    numbers = (
        _strides(query), _strides(key), _strides(value), _strides(out), beside.strides, call.lse_batch_stride, call.heads,
        call.head_dim, beside.windows, args.scale, args.dropout_p, _rows(query, key, value, out), call.group, config.tile_q, config.tile_k,
        call.block_d, args.causal, *beside.flags, args.seed is not None, call.masks_dims, _density(call), clears, config.stages, call.precision,
    )  # fmt: skip
    programs = call.most(config.programs), call.heads * _tiles(bucket.any_size or args.max_q, config.tile_q)
    return Launch(forward_long_kernel, *programs, tensors, numbers, _options(config))


def _options(config: LongConfig) -> dict[str, int]:
    return {"num_warps": config.warps, "num_stages": config.stages}


def backward_config(call: RaggedCall, tile: int) -> TileConfig:
    """The shape of the backward launch of a bucket."""
    return call.configs.tiles.get(("bwd", tile)) or tile_config("bwd", tile, call.block_d, call.size, call.featured, call.arch)


def backward_tile(
    call: RaggedCall, bucket: Bucket, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: Gradients, shares: Tensor | None, clears: bool
) -> Launch:  # fmt: skip
    """Backward of sequences that a tile holds. shares: for the gradient of a bias, float32 `[programs // H, H, tile, tile]`."""
    args, tile = call.args, bucket.tile
    (q, key, value), bias = args[:3], args.bias  # q takes the place of an absent optional tensor, which the kernel never reads
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


def row_sums(
    call: RaggedCall, bucket: Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, delta: Tensor
) -> Launch:
    """delta of sequences of any length."""
    args = call.args
    tensors = (dout, out, lse if dlse is None else dlse, _lengths(call)[0], bucket.members, bucket.count, delta)
    numbers = (
        _strides(dout), _strides(out), call.lse_batch_stride, call.heads, call.head_dim, _rows(dout, out), _ROW_SUMS, call.block_d,
        dlse is not None, call.masks_dims, _density(call),
    )  # fmt: skip
    per_sequence = call.heads * _tiles(bucket.any_size or args.max_q, _ROW_SUMS)
    return Launch(delta_kernel, call.most(16), per_sequence, tensors, numbers, {"num_warps": 2})


class Weights(NamedTuple):
    """The two numbers from which backward takes the weights of a row. With a bias: the largest score, and one over the sum. Without: lse, and an unread one."""

    shift: Tensor
    inverse: Tensor


def weights(call: RaggedCall, bucket: Bucket, found: Weights) -> Launch:
    """The weights of rows with a bias."""
    args, (query, key), beside = call.args, call.args[:2], _beside(call)
    config = call.configs.long.get("queries") or long_config("queries", call.block_d, call.size, call.arch)
    tensors = (query, key, *beside.tensors, *_lengths(call), bucket.members, bucket.count, *found)
    numbers = (
        _strides(query), _strides(key), beside.strides, call.lse_batch_stride, call.heads, call.head_dim, beside.windows, args.scale,
        _rows(query, key), call.group, config.tile_q, config.tile_k, call.block_d, args.causal, beside.flags[0], beside.flags[2], call.masks_dims,
        _density(call), call.precision,
    )  # fmt: skip
    programs = call.most(config.programs), call.heads * _tiles(args.max_q, config.tile_q)
    return Launch(weights_kernel, *programs, tensors, numbers, _options(config))


def backward_bias(call: RaggedCall, bucket: Bucket, dout: Tensor, found: Weights, delta: Tensor, dbias: Tensor) -> Launch:
    """The gradient of a bias. dbias: float32 `[rows, owners, max_q, max_k]`, to which it is added."""
    args, (query, key, value), beside = call.args, call.args[:3], _beside(call)
    config = call.configs.long.get("queries") or long_config("queries", call.block_d, call.size, call.arch)
    # it also holds a tile of the gradient: with 64 queries 4 KB of registers spill on sm_80
    config = replace(config, tile_q=min(32, config.tile_q))
    seed = query if args.seed is None else args.seed
    tensors = (
        query, key, value, seed, *beside.tensors, *_lengths(call), bucket.members, bucket.count, dout, *found, delta, dbias
    )  # fmt: skip
    rows, owners = dbias.shape[:2]
    numbers = (
        *map(_strides, (query, key, value, dout)), beside.strides, call.lse_batch_stride, call.heads, call.head_dim, beside.windows, args.scale,
        args.dropout_p, rows, owners, _rows(query, key, value, dout), call.group, config.tile_q, config.tile_k, call.block_d, args.causal,
        beside.flags[0], beside.flags[2], args.seed is not None, call.masks_dims, _density(call), call.precision,
    )  # fmt: skip
    most = rows * owners * _tiles(dbias.shape[2], config.tile_q) * _tiles(dbias.shape[3], config.tile_k)
    return Launch(backward_bias_kernel, min(most, call.most(config.programs)), most, tensors, numbers, _options(config))


def backward_long(
    call: RaggedCall, bucket: Bucket, dout: Tensor, found: Weights, delta: Tensor, gradients: Gradients, clears: bool
) -> tuple[Launch, Launch]:
    """Backward of sequences of any length: dK and dV, then dQ."""
    args, (dq, dk, dv), beside = call.args, gradients, _beside(call)
    query, key, value = args[:3]
    seed = query if args.seed is None else args.seed
    read = (
        query, key, value, seed, *beside.tensors, *_lengths(call), bucket.members, bucket.count, dout, *found, delta
    )  # fmt: skip
    rows, inputs = _rows(query, key, value, dout, dq, dk, dv), tuple(map(_strides, (query, key, value, dout)))

    def launch(kernel: Any, direction: str, per_sequence: int, longest: int, *written: Tensor) -> Launch:
        config = call.configs.long.get(direction) or long_config(direction, call.block_d, call.size, call.arch)
        tile = config.tile_k if direction == "keys" else config.tile_q
        numbers = (
            *inputs, *map(_strides, written), beside.strides, call.lse_batch_stride, call.heads, call.head_dim, beside.windows, args.scale,
            args.dropout_p, rows, call.group, config.tile_q, config.tile_k, call.block_d, args.causal, *beside.flags, args.seed is not None,
            call.masks_dims, _density(call), clears, config.stages, call.precision,
        )  # fmt: skip
        programs = call.most(config.programs), per_sequence * _tiles(longest, tile)
        return Launch(kernel, *programs, (*read, *written), numbers, _options(config))

    return (
        launch(backward_keys_kernel, "keys", call.heads // call.group, bucket.any_size or args.max_k, dk, dv),
        launch(backward_queries_kernel, "queries", call.heads, bucket.any_size or args.max_q, dq),
    )


def clearing(call: RaggedCall, *written: Tensor) -> Launch:
    """Zeros behind the last sequence of packed tensors: out, or all three gradients. For kernels that do not do it themselves."""
    args, (first, second, third) = call.args, written if len(written) == 3 else written * 3
    tensors = (first, second, third, args.cu_seqlens_q, args.cu_seqlens_k)
    numbers = (
        *map(_strides, (first, second, third)), call.heads, call.heads // call.group, call.head_dim, _rows(first, second, third),
        call.block_d, len(written) == 3,
    )  # fmt: skip
    return Launch(clear_kernel, _CLEARING, _CLEARING, tensors, numbers, {"num_warps": 1})
