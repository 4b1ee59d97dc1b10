"""Plans the Triton kernels of the short family: one planner for each kernel turns a call and a configuration into a launch.

A planner lists the arguments in the order of the kernel's parameters: strides, numbers, then constants of the compiled kernel. It
runs once per signature, and its result is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.problem import is_row, problem_of
from saccade.exact.short.backward import _bwd_chunked_kernel, _bwd_kernel
from saccade.exact.short.bias_gradient import BiasSharing
from saccade.exact.short.choice import shared_bias_programs
from saccade.exact.short.config import Config, tile_size
from saccade.exact.short.forward import _fwd_chunked_kernel, _fwd_kernel
from saccade.exact.short.launch import (
    BACKWARD_TENSORS,
    FORWARD_TENSORS,
    BackwardPlan,
    Launch,
    bias_strides,
    row_strides,
    strides4,
    takes_tma,
)
from saccade.exact.short.pooling import _pool_bwd_kernel, _pool_fwd_kernel
from saccade.exact.short.tiles import ABSENT, ROW, SHARED, TILE
from saccade.hardware import multiprocessors
from saccade.launch.constants import LOG2E


class BackwardCall(NamedTuple):
    """The facts on which a launch of backward depends: the forward call, the incoming gradient and the requested gradients."""

    args: AttentionArgs
    dout: Tensor
    has_dlse: bool
    gradients: tuple[Tensor, Tensor, Tensor]  # dq, dk and dv, to be written
    bias_grad: bool


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call and of the tiles that hold its keys and columns. group: query heads per key head."""

    batch: int
    heads: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    block_q: int
    block_kv: int
    block_d: int
    num_sms: int

    @classmethod
    def of(cls, args: AttentionArgs) -> Sizes:
        """The sizes of a call."""
        batch, heads, q_len, head_dim = args.query.shape
        _, kv_heads, kv_len, _ = args.key.shape
        return cls(
            batch, heads, heads // kv_heads, q_len, kv_len, head_dim,
            _tile(q_len, args), _tile(kv_len, args), tile_size(head_dim), multiprocessors(args.query.device),
        )  # fmt: skip

    @property
    def problems(self) -> int:
        """Batch rows times query heads."""
        return self.batch * self.heads

    @property
    def full(self) -> tuple[int, int, int, int]:
        """The shape of the scores."""
        return self.batch, self.heads, self.q_len, self.kv_len

    def programs(self, config: Config, owners: int) -> int:
        """The number of programs among which `owners` independent pieces of work are divided, each small enough for one
        program."""
        return min(owners, config.programs_per_sm * self.num_sms) if config.programs_per_sm else owners

    def adjacent_heads(self, config: Config) -> int:
        """Heads per program: as configured if each query head has its own key head and the heads divide evenly."""
        return config.heads if self.group == 1 and self.heads % config.heads == 0 else 1

    def key_masks(self, args: AttentionArgs) -> tuple[bool, bool]:
        """MASK_KEYS and MASK_D: whether tiles reach beyond the keys and beyond the columns."""
        return self.block_kv != self.kv_len or args.lengths is not None, self.block_d != self.head_dim


def is_pooling(args: AttentionArgs, config: Config) -> bool:
    """Whether the call runs on the pooling kernels, which take a single query and use no matrix units."""
    return args.query.shape[2] == 1 and not config.matrix


# --- forward


def plan_forward(args: AttentionArgs, out: Tensor, config: Config) -> Launch:
    """The launch of a forward call."""
    plan = _pooling_forward if is_pooling(args, config) else _chunked_forward if config.chunk else _whole_forward
    return plan(args, out, config, Sizes.of(args))


def _pooling_forward(args: AttentionArgs, out: Tensor, config: Config, sizes: Sizes) -> Launch:
    heads = sizes.adjacent_heads(config)
    programs = sizes.programs(config, sizes.problems // heads)
    strides, rows = _forward_strides(args, out, sizes)
    numbers = (sizes.batch, sizes.heads, sizes.kv_len, sizes.head_dim, args.scale * LOG2E, args.dropout_p)
    constants = (
        rows, sizes.group, heads, sizes.block_kv, sizes.block_d, min(config.chunk or sizes.block_d, sizes.block_d),
        *_features(args), *sizes.key_masks(args), programs < sizes.problems // heads, config.stages,
    )  # fmt: skip
    return Launch(_pool_fwd_kernel, programs, (*strides, *numbers, *constants), _options(config))


def _chunked_forward(args: AttentionArgs, out: Tensor, config: Config, sizes: Sizes) -> Launch:
    tma = config.tma and _copy_engine(args, out)
    chunk = min(config.chunk, sizes.block_d)
    strides, rows = _forward_strides(args, out, sizes)
    numbers = (*sizes.full, sizes.head_dim, args.scale * LOG2E, args.dropout_p)
    constants = (
        rows, sizes.group, sizes.block_q, sizes.block_kv, sizes.block_d, chunk, *_features(args), sizes.block_q != sizes.q_len,
        *sizes.key_masks(args), 0 if tma or sizes.group > 1 else config.prefetch, config.stages, tma, _precision(args.query),
    )  # fmt: skip
    descriptors = _forward_descriptors(sizes.block_q, sizes.block_kv, chunk) if tma else {}
    # one program per problem: this kernel neither iterates over problems nor takes several heads
    static = (*strides, *numbers, *constants)
    return Launch(_fwd_chunked_kernel, sizes.problems, static, _options(config), descriptors, FORWARD_TENSORS)


def _whole_forward(args: AttentionArgs, out: Tensor, config: Config, sizes: Sizes) -> Launch:
    shared = shared_bias_programs(problem_of(args), config.programs_per_sm) if config.q_blocks == 1 and sizes.group == 1 else 0
    heads = 1 if shared else sizes.adjacent_heads(config)
    programs = shared or sizes.programs(config, sizes.problems // heads)
    tma = config.tma and heads == 1 and _copy_engine(args, out)
    block_q, q_blocks = _query_blocks(args, sizes, config.q_blocks)
    strides, rows = _forward_strides(args, out, sizes)
    numbers = (*sizes.full, sizes.head_dim, args.scale * LOG2E, args.dropout_p, sizes.num_sms)
    constants = (
        rows, sizes.group, heads, block_q, q_blocks, sizes.block_kv, sizes.block_d, *_features(args, shared > 0),
        block_q * q_blocks != sizes.q_len, *sizes.key_masks(args), 0 if tma or sizes.group > 1 else config.prefetch,
        programs < sizes.problems // heads, config.stages, tma, _precision(args.query),
    )  # fmt: skip
    descriptors = _forward_descriptors(block_q, sizes.block_kv, sizes.block_d) if tma else {}
    return Launch(_fwd_kernel, programs, (*strides, *numbers, *constants), _options(config), descriptors, FORWARD_TENSORS)


def _forward_strides(args: AttentionArgs, out: Tensor, sizes: Sizes) -> tuple[tuple, tuple[int, ...]]:
    """The strides passed as arguments, and ROW_STRIDES: the row strides of query, key, value and out."""
    own, rows = row_strides((args.query, args.key, args.value, out))
    return (*own, bias_strides(args.bias, sizes.full), strides4(args.mask, sizes.full)), rows


def _forward_descriptors(block_q: int, block_kv: int, columns: int) -> dict[str, tuple[int, int]]:
    queries, keys = (block_q, columns), (block_kv, columns)
    return {"query": queries, "key": keys, "value": keys, "out": queries}


# --- backward


def plan_backward(call: BackwardCall, config: Config) -> BackwardPlan:
    """The launch of a backward call, and what has to be summed after it."""
    sizes = Sizes.of(call.args)
    if is_pooling(call.args, config):
        return _pooling_backward(call, config, sizes)
    # the sum of dbias takes 128 registers per thread with 4 warps
    if call.bias_grad and max(sizes.q_len, sizes.kv_len) > 64:
        config = replace(config, warps=max(config.warps, 8), max_registers=0)
    return _chunked_backward(call, config, sizes) if config.chunk else _whole_backward(call, config, sizes)


def _pooling_backward(call: BackwardCall, config: Config, sizes: Sizes) -> BackwardPlan:
    args, kv_share = call.args, sizes.group
    heads = 1 if call.bias_grad else sizes.adjacent_heads(config)
    owners, sharing = sizes.problems // heads, _sharing(call, sizes)
    programs = sharing.programs if sharing else sizes.programs(config, owners)
    strides, rows = _backward_strides(call, sizes, kv_share)
    numbers = (sizes.batch, sizes.heads, sizes.kv_len, sizes.head_dim, args.scale, args.dropout_p)
    constants = (
        rows, kv_share, heads, sizes.block_kv, sizes.block_d, min(config.chunk or sizes.block_d, sizes.block_d),
        *_features(args), *_gradient_features(call, sharing), *sizes.key_masks(args), programs < owners, config.stages,
    )  # fmt: skip
    launch = Launch(_pool_bwd_kernel, programs, (*strides, *numbers, *constants), _options(config))
    return BackwardPlan(launch, kv_share, sharing, sizes.heads)


def _chunked_backward(call: BackwardCall, config: Config, sizes: Sizes) -> BackwardPlan:
    args, kv_share = call.args, sizes.group
    sharing = _sharing(call, sizes)
    programs = sharing.programs if sharing else sizes.programs(config, sizes.problems)
    tma = config.tma and _copy_engine(args, call.dout, *call.gradients)
    chunk = min(config.chunk, sizes.block_d)
    strides, rows = _backward_strides(call, sizes, kv_share)
    numbers = (*sizes.full, sizes.head_dim, args.scale, args.dropout_p)
    constants = (
        rows, kv_share, sizes.block_q, sizes.block_kv, sizes.block_d, chunk,
        *_features(args, call.bias_grad), *_gradient_features(call, sharing), sizes.block_q != sizes.q_len, *sizes.key_masks(args),
        programs < sizes.problems, config.stages, tma, _precision(args.query),
    )  # fmt: skip
    static = (*strides, *numbers, *constants)
    descriptors = _backward_descriptors(sizes.block_q, sizes.block_kv, chunk) if tma else {}
    launch = Launch(_bwd_chunked_kernel, programs, static, _options(config), descriptors, BACKWARD_TENSORS)
    return BackwardPlan(launch, kv_share, sharing, sizes.heads)


def _whole_backward(call: BackwardCall, config: Config, sizes: Sizes) -> BackwardPlan:
    args = call.args
    group, kv_share = (1, sizes.group) if call.bias_grad else (sizes.group, 1)
    heads = 1 if call.bias_grad else sizes.adjacent_heads(config)
    owners, sharing = sizes.problems // group // heads, _sharing(call, sizes)
    programs = sharing.programs if sharing else sizes.programs(config, owners)
    tma = config.tma and heads == 1 and _copy_engine(args, call.dout, *call.gradients)
    prefetch = config.prefetch if sizes.group == 1 and not call.bias_grad and not tma else 0
    tile_bytes = sizes.block_kv * sizes.block_d * args.query.element_size()
    block_q, q_blocks = _query_blocks(args, sizes, 1 if call.bias_grad else config.q_blocks)
    strides, rows = _backward_strides(call, sizes, kv_share)
    numbers = (*sizes.full, sizes.head_dim, args.scale, args.dropout_p, sizes.num_sms)
    constants = (
        rows, group, kv_share, heads, block_q, q_blocks, sizes.block_kv, sizes.block_d,
        *_features(args, call.bias_grad), *_gradient_features(call, sharing),
        block_q * q_blocks != sizes.q_len, *sizes.key_masks(args), prefetch, programs < owners,
        _bias_stages(config, tile_bytes) if call.bias_grad else config.stages, tma, _precision(args.query),
    )  # fmt: skip
    static = (*strides, *numbers, *constants)
    descriptors = _backward_descriptors(block_q, sizes.block_kv, sizes.block_d) if tma else {}
    launch = Launch(_bwd_kernel, programs, static, _options(config), descriptors, BACKWARD_TENSORS)
    return BackwardPlan(launch, kv_share, sharing, sizes.heads)


def _sharing(call: BackwardCall, sizes: Sizes) -> BiasSharing | None:
    """How programs share the sum of dbias, if it is requested: about two programs per multiprocessor."""
    if not call.bias_grad:
        return None
    assert call.args.bias is not None
    return BiasSharing.of(call.args.bias, sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len, 2 * sizes.num_sms)


def _backward_strides(call: BackwardCall, sizes: Sizes, kv_share: int) -> tuple[tuple, tuple[int, ...]]:
    """The strides passed as arguments, and ROW_STRIDES: the row strides of query, key, value, dout, dquery, dkey and dvalue."""
    args, (dq, dk, dv) = call.args, call.gradients
    if kv_share > 1:  # dK and dV of each query head, dense
        dk = dv = torch.empty((sizes.batch, sizes.heads, sizes.kv_len, sizes.head_dim), device="meta")
    own, rows = row_strides((args.query, args.key, args.value, call.dout, dq, dk, dv))
    query, key, value, dout, *gradients = own
    strides = (
        query, key, value, bias_strides(args.bias, sizes.full), strides4(args.mask, sizes.full), dout, *gradients,
        (sizes.q_len * sizes.kv_len, sizes.kv_len, 1),
    )  # fmt: skip
    return strides, rows


def _gradient_features(call: BackwardCall, sharing: BiasSharing | None) -> tuple[bool, bool, bool]:
    """HAS_DLSE, BIAS_GRAD and BATCH_INNER."""
    return call.has_dlse, call.bias_grad, bool(sharing and sharing.batch_inner)


def _backward_descriptors(block_q: int, block_kv: int, columns: int) -> dict[str, tuple[int, int]]:
    query_rows = dict.fromkeys(("query", "dout", "dquery"), (block_q, columns))
    return query_rows | dict.fromkeys(("key", "value", "dkey", "dvalue"), (block_kv, columns))


def _bias_stages(config: Config, tile_bytes: int) -> int:
    # a bias gradient makes programs persistent, and stages then hold whole problems ahead: 410 KB for three stages at D = 256
    return config.stages if 4 * tile_bytes * config.stages <= 64 * 1024 else 1


# --- both directions


def _copy_engine(args: AttentionArgs, *others: Tensor) -> bool:
    """Whether the copy engine can move the tiles. It cannot with lengths: it fills with zeros only beyond the tensor, not beyond
    a row's length, where the padding may hold NaN."""
    return args.lengths is None and takes_tma(args.query, args.key, args.value, *others)


def _features(args: AttentionArgs, bias_shared: bool = False) -> tuple[bool | int, ...]:
    """CAUSAL, HAS_BIAS, HAS_MASK, HAS_LENGTHS, HAS_DROPOUT; their query strides tell how bias and mask are read.

    bias_shared: each program needs only one matrix of the bias and holds it on chip.
    """
    bias, mask = ((ABSENT if t is None else ROW if is_row(t) else TILE).value for t in (args.bias, args.mask))
    return args.is_causal, SHARED.value if bias_shared else bias, mask, args.lengths is not None, args.seed is not None


def _tile(extent: int, args: AttentionArgs) -> int:
    """Rows of a tile that a product sums over. At least 32 under a boolean mask: its bytes make Triton 3.6 pack 8 elements of the
    inner dimension per lane. With 16 rows lanes then repeat one another, and sums are wrong (case small-mask-lengths-dropout)."""
    return max(tile_size(extent), 16 if args.mask is None else 32)


def _query_blocks(args: AttentionArgs, sizes: Sizes, blocks: int) -> tuple[int, int]:
    """(BLOCK_Q, Q_BLOCKS): the queries split into `blocks` equal blocks."""
    block_q = max(_tile(1, args), sizes.block_q // blocks)
    return block_q, -(-sizes.q_len // block_q)


def _precision(query: Tensor) -> str:
    # tf32 would lose 13 bits of a float32 product; low-precision inputs are exact either way
    return "ieee" if query.dtype == torch.float32 else "tf32"


def _options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    return options
