"""Launchers of the ragged family: allocate results, pick tiles, run a kernel for each bucket of lengths.

They take packed tensors `[T, H, D]` with cu_seqlens, or dense ones `[B, H, T, D]` with the lengths of their keys in both places of cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads
from saccade.exact.ragged import sm80, sm90
from saccade.exact.ragged.backward import backward_keys_kernel, backward_queries_kernel, backward_tile_kernel, delta_kernel
from saccade.exact.ragged.config import (
    TILES,
    LongConfig,
    TileConfig,
    fits,
    forward_by_triton,
    long_config,
    small_tile,
    tile_config,
)
from saccade.exact.ragged.forward import forward_long_kernel, forward_tile_kernel
from saccade.exact.ragged.plan import every_sequence, plan_of
from saccade.exact.ragged.sm80 import Sm80Config
from saccade.exact.ragged.sm90 import Sm90Config
from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.aside import FAILURES, failure_of, set_aside
from saccade.launch.triton import launch_any, pow2


class Configs(NamedTuple):
    """Shapes of launches in place of the measured ones, for measuring: by (direction, tile), by direction and
    by tile. sm80, sm90: None for Triton alone; sm90 by direction."""

    tiles: dict[tuple[str, int], TileConfig]
    long: dict[str, LongConfig]
    sm80: dict[int, Sm80Config] | None
    sm90: dict[str, Sm90Config] | None


_MEASURED = Configs({}, {}, {}, {})

# Numbers (sequences x heads x longest x D, D a power of two) up to which a call is one launch, padded to its longest sequence, and not one for
# each bucket of lengths behind those that make the lists: a model spends more host time on five launches than the device on the padding
# (MiniLM, batches of 32 sentences: 0.72 of the speed of stock's padded attention with all of them; predicted 30 us a forward at most)
ONE_LAUNCH = 2**23
# The same where a tile holds the longest and host time counts: the launch has a second, smaller tile for short sequences.
ONE_TILE = 2**26


@dataclass(frozen=True)
class _Bucket:
    """The sequences of one launch. tile: 0 for the long form. small: a second, smaller tile for those that it holds, or 0.
    dense: there is no list, and tensors that nobody reads stand in."""

    tile: int
    members: Tensor
    count: Tensor
    dense: bool = False
    small: int = 0

    @property
    def listed(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.dense else (self.members, self.count)


class TileLaunch(NamedTuple):
    """A launch of whole sequences: `most` programs, or `per_sequence` for each of them if that is fewer."""

    kernel: Any
    most: int
    per_sequence: int
    tensors: tuple[Tensor, ...]
    numbers: tuple
    warps: int

    def run(self, call: _Call) -> None:
        programs = max(1, min(self.most, self.per_sequence * call.sequences))
        launch_any(self.kernel, programs, self.tensors, call.varying, self.numbers, num_warps=self.warps)


class _Call:
    """What the launches of a call share."""

    def __init__(self, args: VarlenArgs, configs: Configs):
        query, key = args.query, args.key
        self.args, self.configs = args, configs
        self.dense = query.dim() == 4
        self.heads, self.head_dim = query.shape[1], query.shape[-1]
        self.group = self.heads // key.shape[1]
        self.block_d = pow2(max(16, self.head_dim))
        self.size, self.arch = query.element_size(), arch_of(query.device)
        self.sequences = query.shape[0] if self.dense else args.cu_seqlens_q.shape[0] - 1
        self.total_q = self.sequences * args.max_q if self.dense else query.shape[0]
        self.total_k = self.sequences * args.max_k if self.dense else key.shape[0]
        # of lse: `[B, H, Tq]`, or `[H, T]`
        self.lse_batch_stride = self.heads * args.max_q if self.dense else 0
        self.lse_stride = args.max_q if self.dense else self.total_q
        self.precision = "ieee" if query.dtype == torch.float32 else "tf32"
        self.masks_dims = self.block_d != self.head_dim
        self.featured = args.bias is not None or args.seed is not None

    @property
    def varying(self) -> tuple[int, ...]:
        return self.total_q, self.total_k, self.sequences, self.lse_stride, self.args.max_q, self.args.max_k

    def buckets(self) -> list[_Bucket]:
        """The launches that the lengths may ask for, the longest first: it takes the longest time, and may begin before others end."""
        args = self.args
        if self.dense:
            return [_Bucket(0, args.query, args.query, True)]
        longest = max(args.max_q, args.max_k)
        at_once = self.at_once()
        if at_once is not None:
            return [at_once]
        plan, found = plan_of(args.cu_seqlens_q, args.cu_seqlens_k), []
        for i, below in enumerate((0, *TILES)):
            if i == 0 or longest > below:
                whole = i < len(TILES) and fits(TILES[i], self.block_d, self.size, self.arch)
                found.append(_Bucket(TILES[i] if whole else 0, plan.members[i], plan.counts[i : i + 1]))
        return found[::-1]

    def at_once(self) -> _Bucket | None:
        """All sequences of a small packed batch, in the smallest tile that holds the longest or in the long form."""
        longest = max(self.args.max_q, self.args.max_k)
        tile = next((t for t in TILES if t >= longest and fits(t, self.block_d, self.size, self.arch)), 0)
        if self.sequences * self.heads * longest * self.block_d > self.one_launch(tile):
            return None
        every = every_sequence(self.args.cu_seqlens_q, self.sequences)
        # a gradient of the bias is summed in tiles of one size
        small = small_tile(tile) if self.args.bias is None else 0
        return None if every is None else _Bucket(tile, *every, small=small)

    def one_launch(self, tile: int) -> int:
        """The most numbers of a call that is one launch."""
        captured = self.args.query.is_cuda and torch.cuda.is_current_stream_capturing()
        return ONE_TILE if tile and not captured else ONE_LAUNCH

    def any_long(self) -> bool:
        """Whether a launch may be of the long form, whose backward reads out."""
        longest = max(self.args.max_q, self.args.max_k)
        whole = [tile for tile in TILES if fits(tile, self.block_d, self.size, self.arch)]
        return self.dense or not whole or longest > max(whole)

    def most(self, each: int) -> int:
        """Programs that the processors hold."""
        return each * multiprocessors(self.args.query.device)

    def programs(self, each: int, work: int) -> int:
        """Of a launch: as many as the processors hold, and no more than there can be work for."""
        return max(1, min(work, self.most(each)))


def call_of(args: VarlenArgs) -> _Call:
    """What the launches of a call with dense last dimensions share, for those who describe them."""
    return _Call(args, _MEASURED)


def _strides(tensor: Tensor) -> tuple[int, int]:
    """(batch, head)."""
    return tensor.stride()[:2] if tensor.dim() == 4 else (0, tensor.stride(1))  # type: ignore[return-value]


def _rows(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([t.stride(-3 if t.dim() == 3 else -2) for t in tensors])


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def saves_output(args: VarlenArgs) -> bool:
    """Whether backward reads out."""
    return _Call(args, _MEASURED).any_long()


def forward(args: VarlenArgs, configs: Configs = _MEASURED) -> tuple[Tensor, Tensor]:
    """out laid out like query, lse float32 `[H, Tq]`, or `[B, H, Tq]` if dense."""
    args = args._replace(query=_dense_last(args.query), key=_dense_last(args.key), value=_dense_last(args.value))
    call, query = _Call(args, configs), args.query
    out = _like(query)
    shape = query.shape[:3] if call.dense else (call.heads, query.shape[0])
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    if out.numel() == 0 or args.key.numel() == 0 or call.sequences == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    buckets = call.buckets()
    for i, bucket in enumerate(buckets):
        clears = i == len(buckets) - 1 and not call.dense
        if bucket.tile:
            forward_tile(call, bucket, out, lse, clears).run(call)
        else:
            _forward_long(call, bucket, out, lse, clears)
    return out, lse


def forward_tile(call: _Call, bucket: _Bucket, out: Tensor, lse: Tensor, clears: bool) -> TileLaunch:
    """The forward launch of a bucket of sequences that a tile holds."""
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
        _rows(query, key, value, out), call.group, tile, bucket.small, call.block_d, args.causal, bias is not None, args.seed is not None,
        call.masks_dims, clears, config.stages, call.precision,
    )  # fmt: skip
    return TileLaunch(forward_tile_kernel, call.most(config.programs), call.heads, tensors, numbers, config.warps)


def _forward_long(call: _Call, bucket: _Bucket, out: Tensor, lse: Tensor, clears: bool) -> None:
    args, wanted = call.args, call.configs.sm90
    by_triton = not call.dense and forward_by_triton(call.head_dim, args.causal, args.max_q)
    # Triton's kernel alone clears what lies behind the last token of packed sequences
    if not (clears or by_triton) and wanted is not None and sm90.takes(args, out):
        chosen = wanted.get("forward")
        if _compiles("forward", args, lambda: sm90.forward(args, *bucket.listed, out, lse, chosen)):
            return
    query, key, value = args.query, args.key, args.value
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
    programs = call.programs(config.programs, call.sequences * call.heads * -(-args.max_q // config.tile_q))
    launch_any(forward_long_kernel, programs, tensors, call.varying, numbers, num_warps=config.warps, num_stages=config.stages)


def backward(
    args: VarlenArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None = None,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
    configs: Configs = _MEASURED,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (those of `into`, or views of a `packed` `[T, 3, H, D]`, if given) and dbias."""
    args = args._replace(query=_dense_last(args.query), key=_dense_last(args.key), value=_dense_last(args.value))
    call = _Call(args, configs)
    dq, dk, dv = into or ([_like(x) for x in args[:3]] if packed is None else packed.unbind(1))
    bias = args.bias if bias_grad else None
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    if args.query.numel() == 0 or args.key.numel() == 0 or call.sequences == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), _in_dtype_of(dbias, bias)
    dout = _dense_last(dout)
    dlse = None if dlse is None else dlse.contiguous()
    delta = None
    buckets = call.buckets()
    for i, bucket in enumerate(buckets):
        clears = i == len(buckets) - 1 and not call.dense
        if bucket.tile and _backward_sm80(call, bucket, dout, dlse, out, lse, (dq, dk, dv), clears):
            continue
        if bucket.tile:
            _backward_tile(call, bucket, dout, dlse, lse, (dq, dk, dv), dbias, clears)
        else:
            assert out is not None, "the long form reads out"
            delta = torch.empty_like(lse) if delta is None else delta
            _backward_long(call, bucket, dout, dlse, out, lse, delta, (dq, dk, dv), clears)
    return dq, dk, dv, _in_dtype_of(dbias, bias)


def _backward_sm80(
    call: _Call, bucket: _Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], clears: bool,
) -> bool:  # fmt: skip
    wanted = call.configs.sm80
    if clears or out is None or wanted is None or not sm80.takes(bucket.tile, call.args, dout, out, *gradients):
        return False
    config = wanted.get(bucket.tile)
    return sm80.backward(call.args, bucket.tile, bucket.members, bucket.count, dout, dlse, out, lse, gradients, config)


def backward_tile(
    call: _Call, bucket: _Bucket, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    shares: Tensor | None, clears: bool,
) -> TileLaunch:  # fmt: skip
    """The backward launch of such a bucket. shares: for the gradient of a bias, float32 `[programs // H, H, tile, tile]`."""
    args, tile = call.args, bucket.tile
    (q, key, value), bias = args[:3], args.bias  # q stands in where an optional tensor is absent: the kernel never reads it
    config = _backward_config(call, tile)
    tensors = (
        q, key, value, q if bias is None else bias, q if args.seed is None else args.seed, args.cu_seqlens_q, args.cu_seqlens_k,
        bucket.members, bucket.count, dout, lse, lse if dlse is None else dlse, *gradients, q if shares is None else shares,
    )  # fmt: skip
    numbers = (
        _strides(q), _strides(key), _strides(value), _strides(dout), *map(_strides, gradients),
        (0, 0, 0) if bias is None else bias.stride(), call.heads, call.head_dim, args.scale, args.dropout_p,
        _rows(q, key, value, dout, *gradients), call.group, tile, bucket.small, call.block_d, args.causal, bias is not None, shares is not None,
        args.seed is not None, dlse is not None, call.masks_dims, clears, config.stages, call.precision,
    )  # fmt: skip
    most = call.most(config.programs) if shares is None else shares.shape[0] * shares.shape[1]
    return TileLaunch(backward_tile_kernel, most, call.heads // call.group, tensors, numbers, config.warps)


def _backward_config(call: _Call, tile: int) -> TileConfig:
    return call.configs.tiles.get(("bwd", tile)) or tile_config("bwd", tile, call.block_d, call.size, call.featured, call.arch)


def _backward_tile(
    call: _Call, bucket: _Bucket, dout: Tensor, dlse: Tensor | None, lse: Tensor, gradients: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None, clears: bool,
) -> None:  # fmt: skip
    if dbias is None:
        backward_tile(call, bucket, dout, dlse, lse, gradients, None, clears).run(call)
        return
    # each program meets one head alone where their number is a multiple of the heads; few, as each writes a tile of its own
    programs = call.programs(_backward_config(call, bucket.tile).programs, call.sequences * (call.heads // call.group))
    rows = max(1, min(programs, 2 * multiprocessors(dout.device)) // call.heads)
    shares = torch.empty((rows, call.heads, bucket.tile, bucket.tile), dtype=torch.float32, device=dout.device)
    backward_tile(call, bucket, dout, dlse, lse, gradients, shares, clears).run(call)
    part = dbias[:, : bucket.tile, : bucket.tile]
    part += shares.sum(0)[:, : part.shape[1], : part.shape[2]]


def _compiles(direction: str, args: VarlenArgs, launch: Callable[[], None]) -> bool:
    """Run a kernel of sm90; False where it does not compile here, so that Triton's takes its place."""
    if failure_of(sm90.named(direction, args)) is not None:
        return False
    try:
        launch()
    except FAILURES as error:
        set_aside(sm90.named(direction, args), "the Triton kernel", error)
        return False
    return True


def _row_sums(
    call: _Call, bucket: _Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, delta: Tensor
) -> None:  # fmt: skip
    """delta of the sequences of the long form."""
    args, tile = call.args, 32
    work = call.sequences * call.heads * -(-args.max_q // tile)
    cu_q = args.query if args.cu_seqlens_q is None else args.cu_seqlens_q  # dense rows have none
    launch_any(
        delta_kernel, call.programs(16, work),
        (dout, out, lse if dlse is None else dlse, cu_q, bucket.members, bucket.count, delta), call.varying,
        (_strides(dout), _strides(out), call.lse_batch_stride, call.heads, call.head_dim, _rows(dout, out), tile,
         call.block_d, dlse is not None, call.masks_dims, call.dense),
        num_warps=2,
    )  # fmt: skip


def _backward_long(
    call: _Call, bucket: _Bucket, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, delta: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], clears: bool,
) -> None:  # fmt: skip
    args, (dq, dk, dv) = call.args, gradients
    query, key, value = args[:3]
    # dense rows without lengths have none to be read
    cu_q, cu_k = [query if x is None else x for x in args[3:5]]
    which = (cu_q, cu_k, bucket.members, bucket.count)
    work = call.sequences * call.heads
    wanted = call.configs.sm90
    if not clears and wanted is not None and sm90.takes(args, dout, out, dq, dk, dv):
        if not sm90.owns_delta(call.head_dim):
            _row_sums(call, bucket, dout, dlse, out, lse, delta)
        chosen = wanted.get("backward")
        if _compiles(
            "backward", args, lambda: sm90.backward(args, *bucket.listed, dout, dlse, out, lse, delta, gradients, chosen)
        ):
            return
    _row_sums(call, bucket, dout, dlse, out, lse, delta)
    seed = query if args.seed is None else args.seed
    sizes = (call.lse_batch_stride, call.heads, call.head_dim, args.scale, args.dropout_p)
    rows = _rows(query, key, value, dout, dq, dk, dv)
    inputs = tuple(map(_strides, (query, key, value, dout)))

    def numbers(config: LongConfig, *written: Tensor) -> tuple:
        shape = (rows, call.group, config.tile_q, config.tile_k, call.block_d, args.causal, args.seed is not None)
        return (
            *inputs, *map(_strides, written), *sizes, *shape, call.masks_dims, call.dense, clears, config.stages, call.precision
        )  # fmt: skip

    config = call.configs.long.get("keys") or long_config("keys", call.block_d, call.size, call.arch)
    programs = call.programs(config.programs, work // call.group * -(-args.max_k // config.tile_k))
    read = (query, key, value, seed, *which, dout, lse, delta)
    launch_any(
        backward_keys_kernel, programs, (*read, dk, dv), call.varying, numbers(config, dk, dv), num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    config = call.configs.long.get("queries") or long_config("queries", call.block_d, call.size, call.arch)
    programs = call.programs(config.programs, work * -(-args.max_q // config.tile_q))
    launch_any(
        backward_queries_kernel, programs, (*read, dq), call.varying, numbers(config, dq), num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


def _in_dtype_of(dbias: Tensor | None, bias: Tensor | None) -> Tensor | None:
    return None if dbias is None or bias is None else dbias.to(bias.dtype)


def _like(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return empty_like_heads(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
