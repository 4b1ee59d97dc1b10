"""Launchers of the short family: allocate results, turn shapes into grids and constexprs, launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads, unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.short.backward import _bwd_chunked_kernel, _bwd_kernel
from saccade.exact.short.bias_gradient import BiasSharing
from saccade.exact.short.config import Config, is_plain, pick, takes_sm90, tile_size
from saccade.exact.short.forward import _fwd_chunked_kernel, _fwd_kernel
from saccade.exact.short.launch import Launch, aligned, launches_of, metadata, strides2, strides4, takes_tma
from saccade.exact.short.pooling import _pool_bwd_kernel, _pool_fwd_kernel
from saccade.exact.short.sm90 import Sm90Launch, kernel_name, plan_backward, plan_forward
from saccade.exact.short.tiles import ABSENT, ROW, SHARED, TILE
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.aside import FAILURES, failure_of, set_aside

_LOG2E = 1.4426950408889634


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out `[B, H, Tq, D]` laid out like query, lse float32 `[B, H, Tq]`."""
    query, key, value, mask, bias, lengths, seed, *_ = args
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:  # nothing to compute, or no key to see
        return out.zero_(), lse.fill_(float("-inf"))
    launches, signed = launches_of(args), ("forward", aligned(args), config)
    launch = launches.get(signed) or launches.remember(signed, _plan_forward(args, out, config))
    q = query  # stands in where an optional tensor is absent: the kernel never reads it
    tensors = (
        q, key, value, q if bias is None else bias, q if mask is None else mask, q if lengths is None else lengths,
        q if seed is None else seed, out, lse,
    )  # fmt: skip
    try:
        launch(*tensors)
    except FAILURES as error:
        launches.pop(signed)
        if config is not None or not isinstance(launch, Sm90Launch):
            raise
        set_aside(launch.built.name, "the Triton kernel of this call", error)
        return forward(args)
    return out, lse


def backward(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    bias_grad: bool,
    packed: Tensor | None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv (views of `packed`, if given) and dbias."""
    query, key, value, mask, bias, lengths, seed, *_ = args
    dq, dk, dv = (empty_like_heads(x) for x in args[:3]) if packed is None else unpack(packed)
    if query.numel() == 0 or key.numel() == 0:
        dbias = torch.zeros_like(bias) if bias is not None and bias_grad else None
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias
    dout = dout if dout.stride(3) == 1 else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dlse_aligned = None if dlse is None else dlse.data_ptr() % 16 == 0
    launches, signed = launches_of(args), (aligned(args), metadata(dout), dlse_aligned, bias_grad, packed is None, config)
    plan = launches.get(signed) or launches.remember(signed, BackwardPlan.of(args, dout, dlse, (dq, dk, dv), bias_grad, config))

    dk_heads, dv_heads = (plan.per_query_head(x) for x in (dk, dv))
    q = query
    tensors = [
        q, key, value, q if bias is None else bias, q if mask is None else mask, q if lengths is None else lengths,
        q if seed is None else seed, dout, lse, q if dlse is None else dlse, dq, dk_heads, dv_heads,
    ]  # fmt: skip
    partial = None if plan.sharing is None else plan.sharing.workspace(query.device)
    try:
        plan.launch(*tensors, q if partial is None else partial)
    except FAILURES as error:
        launches.pop(signed)
        if config is not None or not isinstance(plan.launch, Sm90Launch):
            raise
        set_aside(plan.launch.built.name, "the Triton kernel of this call", error)
        return backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=packed)
    if plan.kv_share > 1:
        for heads, total in ((dk_heads, dk), (dv_heads, dv)):
            total.copy_(heads.unflatten(1, (-1, plan.kv_share)).sum(dim=2))
    dbias = None if plan.sharing is None else plan.sharing.reduce(partial, bias)
    return dq, dk, dv, dbias


@dataclass
class BackwardPlan:
    """What backward works out once a signature.

    kv_share: 1 if a program adds up dK and dV over the query heads of a group; else the group size, and each query head writes
    its own float32 dK and dV, added up afterwards (bias gradients, pooling and the chunked kernel keep no sum over heads).
    """

    launch: Launch | Sm90Launch
    kv_share: int
    sharing: BiasSharing | None
    heads: int

    def per_query_head(self, gradient: Tensor) -> Tensor:
        """Where the kernel writes dK or dV: the gradient itself, or float32 `[B, H, Tk, D]`."""
        if self.kv_share == 1:
            return gradient
        batch, _, kv_len, dim = gradient.shape
        return gradient.new_empty((batch, self.heads, kv_len, dim), dtype=torch.float32)

    @classmethod
    def of(
        cls,
        args: AttentionArgs,
        dout: Tensor,
        dlse: Tensor | None,
        gradients: tuple[Tensor, Tensor, Tensor],
        bias_grad: bool,
        config: Config | None,
    ) -> BackwardPlan:
        """Choose kernel, configuration and grid."""
        query, key = args.query, args.key
        batch, heads, q_len, head_dim = query.shape
        kv_len = key.shape[2]
        group = heads // key.shape[1]
        config = config or _pick("bwd", args, featured=bias_grad or dlse is not None, others=(dout,))
        if config.sm90:
            return cls(plan_backward(args, dout, dlse, gradients, config), 1, None, heads)
        pooling = q_len == 1 and not config.matrix
        if bias_grad and max(q_len, kv_len) > 64 and not pooling:  # the sum of dbias takes 128 registers a thread of 4 warps
            config = replace(config, warps=max(config.warps, 8), max_registers=0)
        chunked = config.chunk > 0 and not pooling
        kv_share = group if bias_grad or chunked or pooling else 1
        group //= kv_share
        config_heads = config.heads if heads == key.shape[1] and not bias_grad and heads % config.heads == 0 else 1
        owners = batch * heads // group // config_heads
        sharing = None
        if bias_grad:
            assert args.bias is not None
            target = 2 * multiprocessors(query.device)
            sharing = BiasSharing.of(args.bias, batch, heads, q_len, kv_len, target)
        programs = sharing.programs if sharing else _programs(config, owners, query.device)
        persistent = programs < owners
        num_sms = multiprocessors(query.device)
        prefetch = config.prefetch if heads == key.shape[1] and not bias_grad else 0
        full = (batch, heads, q_len, kv_len)
        dk_strides, dv_strides = (
            strides2(g) if kv_share == 1 else (heads * kv_len * head_dim, kv_len * head_dim) for g in gradients[1:]
        )
        rows = tuple(t.stride(2) for t in (query, key, args.value, dout, gradients[0]))
        rows += tuple(g.stride(2) if kv_share == 1 else head_dim for g in gradients[1:])
        strides = (
            strides2(query), strides2(key), strides2(args.value), strides4(args.bias, full), strides4(args.mask, full),
            strides2(dout), strides2(gradients[0]), dk_strides, dv_strides,
        )  # fmt: skip
        flags = _flags(args, bias_grad and not pooling)  # a program that sums dbias meets one bias alone
        gradient_flags = (dlse is not None, bias_grad, bool(sharing and sharing.batch_inner))
        block_kv, block_d = _tile(kv_len, args), tile_size(head_dim)
        masks = (block_kv != kv_len or args.lengths is not None, block_d != head_dim)
        tma = config.tma and not pooling and config_heads == 1 and _tma(args, dout, *gradients)
        if pooling:
            kernel: Any = _pool_bwd_kernel
            numbers: tuple = (batch, heads, kv_len, head_dim, args.scale, args.dropout_p)
            constants: tuple = (
                rows, kv_share, config_heads, block_kv, block_d, min(config.chunk or block_d, block_d),
                *flags, *gradient_flags, *masks, persistent, config.stages,
            )  # fmt: skip
        elif chunked:
            kernel = _bwd_chunked_kernel
            numbers = (batch, heads, q_len, kv_len, head_dim, args.scale, args.dropout_p)
            block_q = _tile(q_len, args)
            constants = (
                rows, kv_share, block_q, block_kv, block_d, min(config.chunk, block_d), *flags, *gradient_flags,
                block_q != q_len, *masks, persistent, config.stages, tma, _precision(query),
            )  # fmt: skip
        else:
            kernel = _bwd_kernel
            block_q, q_blocks = _query_blocks(args, 1 if bias_grad else config.q_blocks)
            numbers = (batch, heads, q_len, kv_len, head_dim, args.scale, args.dropout_p, num_sms)
            constants = (
                rows, group, kv_share, config_heads, block_q, q_blocks, block_kv, block_d, *flags, *gradient_flags,
                block_q * q_blocks != q_len, *masks, 0 if tma else prefetch, persistent,
                _bias_stages(config, block_kv * block_d * query.element_size()) if bias_grad else config.stages,
                tma, _precision(query),
            )  # fmt: skip
        strides += ((q_len * kv_len, kv_len, 1),)
        descriptors = {}
        if tma:
            cols = min(config.chunk, block_d) if chunked else block_d
            query_tile, kv_tile = (block_q, cols), (block_kv, cols)
            descriptors = {0: query_tile, 1: kv_tile, 2: kv_tile, 7: query_tile, 10: query_tile, 11: kv_tile, 12: kv_tile}
        launch = Launch(kernel, programs, (*strides, *numbers, *constants), _options(config), descriptors)
        return cls(launch, kv_share, sharing, heads)


def _plan_forward(args: AttentionArgs, out: Tensor, config: Config | None) -> Launch | Sm90Launch:
    query, key = args.query, args.key
    batch, heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    group = heads // key.shape[1]
    config = config or _pick("fwd", args, featured=False, others=())
    if config.sm90:
        return plan_forward(args, out, config)
    pooling = q_len == 1 and not config.matrix
    config_heads = config.heads if group == 1 and heads % config.heads == 0 and (pooling or config.chunk == 0) else 1
    programs = _programs(config, batch * heads // config_heads, query.device)
    shared = 0
    if not pooling and config.chunk == 0 and config.q_blocks == 1 and group == 1:
        shared = _shared_bias_programs(args, config.programs_per_sm)
    if shared:
        programs, config_heads = shared, 1
    persistent = programs < batch * heads // config_heads
    full = (batch, heads, q_len, kv_len)
    strides = (
        strides2(query), strides2(key), strides2(args.value), strides2(out), strides4(args.bias, full), strides4(args.mask, full),
    )  # fmt: skip
    rows = tuple(t.stride(2) for t in (query, key, args.value, out))
    flags = _flags(args, shared > 0)
    block_kv, block_d = _tile(kv_len, args), tile_size(head_dim)
    masks = (block_kv != kv_len or args.lengths is not None, block_d != head_dim)
    sizes: tuple = (batch, heads, q_len, kv_len, head_dim, args.scale * _LOG2E, args.dropout_p, multiprocessors(query.device))
    prefetch = config.prefetch if group == 1 else 0
    tma = config.tma and not pooling and config_heads == 1 and _tma(args, out)
    if pooling:
        kernel: Any = _pool_fwd_kernel
        sizes = (batch, heads, kv_len, head_dim, args.scale * _LOG2E, args.dropout_p)
        constants: tuple = (
            rows, group, config_heads, block_kv, block_d, min(config.chunk or block_d, block_d),
            *flags, *masks, persistent, config.stages,
        )  # fmt: skip
    elif config.chunk:
        sizes = sizes[:-1]
        kernel = _fwd_chunked_kernel
        block_q = _tile(q_len, args)
        constants = (
            rows, group, block_q, block_kv, block_d, min(config.chunk, block_d), *flags, block_q != q_len, *masks,
            0 if tma else prefetch, config.stages, tma, _precision(query),
        )  # fmt: skip
    else:
        kernel = _fwd_kernel
        block_q, q_blocks = _query_blocks(args, config.q_blocks)
        constants = (
            rows, group, config_heads, block_q, q_blocks, block_kv, block_d, *flags, block_q * q_blocks != q_len, *masks,
            0 if tma else prefetch, persistent, config.stages, tma, _precision(query),
        )  # fmt: skip
    descriptors = {}
    if tma:
        cols = min(config.chunk, block_d) if config.chunk else block_d
        query_tile, kv_tile = (block_q, cols), (block_kv, cols)
        descriptors = {0: query_tile, 1: kv_tile, 2: kv_tile, 7: query_tile}
    return Launch(kernel, programs, (*strides, *sizes, *constants), _options(config), descriptors)


def _pick(direction: str, args: AttentionArgs, featured: bool, others: tuple[Tensor, ...]) -> Config:
    query, key = args.query, args.key
    problems = query.shape[0] * query.shape[1]
    grouped = query.shape[1] != key.shape[1]
    masked = any(t is not None for t in (args.mask, args.bias, args.lengths, args.seed))
    rows, dim = tile_size(max(query.shape[2], key.shape[2])), tile_size(query.shape[3])
    arch = arch_of(query.device)
    lengths = query.shape[2], key.shape[2]
    sm90 = takes_sm90(arch, problems, *lengths, query.shape[3], query.element_size(), grouped, masked, args.is_causal)
    sm90 = sm90 and takes_tma(query, key, args.value, *others)
    if query.shape[2] == 1:
        direction = "pool_" + direction
    plain = is_plain(problems, grouped, featured or args.is_causal or masked)
    shared_bias = args.bias is not None and not grouped and _shared_bias_programs(args, 4) > 0
    chosen = pick(direction, rows, dim, query.element_size(), arch, plain, sm90, shared_bias, args.mask is not None)
    if chosen.sm90 and failure_of(kernel_name(chosen.sm90)):
        chosen = pick(direction, rows, dim, query.element_size(), arch, plain, False, shared_bias, args.mask is not None)
    return chosen


def _tma(args: AttentionArgs, *others: Tensor) -> bool:
    # lengths: the copy engine zero-fills past the tensor, not past a row's length, and padding may hold NaN
    return args.lengths is None and takes_tma(args.query, args.key, args.value, *others)


def _flags(args: AttentionArgs, bias_shared: bool = False) -> tuple[bool | int, ...]:
    """CAUSAL, HAS_BIAS, HAS_MASK, HAS_LENGTHS, HAS_DROPOUT; how bias and mask are read is told by their query stride."""
    bias, mask = ((ABSENT if t is None else ROW if _is_row(t) else TILE).value for t in (args.bias, args.mask))
    return args.is_causal, SHARED.value if bias_shared else bias, mask, args.lengths is not None, args.seed is not None


def _is_row(tensor: Tensor) -> bool:
    return tensor.dim() < 2 or tensor.shape[-2] == 1 or tensor.stride(-2) == 0


def _shared_bias_programs(args: AttentionArgs, programs_per_sm: int) -> int:
    """Persistent programs that each meet one head alone, for a bias that the batch shares; 0 where there is none."""
    bias, query = args.bias, args.query
    batch, heads = query.shape[:2]
    if bias is None or (bias.dim() == 4 and bias.shape[0] > 1 and bias.stride(0) != 0):
        return 0
    chunks = programs_per_sm * multiprocessors(query.device) // heads
    return heads * chunks if 0 < chunks < batch else 0


def _tile(extent: int, args: AttentionArgs) -> int:
    """Rows of a tile that a product sums over. At least 32 under a boolean mask: there Triton 3.6 packs 8 elements of the inner
    dimension a lane, after the mask's bytes, and with 16 rows lanes repeat one another: wrong sums (small-mask-lengths-dropout)."""
    return max(tile_size(extent), 16 if args.mask is None else 32)


def _query_blocks(args: AttentionArgs, blocks: int) -> tuple[int, int]:
    """(BLOCK_Q, Q_BLOCKS): the queries in `blocks` equal blocks."""
    q_len = args.query.shape[2]
    block_q = max(_tile(1, args), _tile(q_len, args) // blocks)
    return block_q, -(-q_len // block_q)


def _bias_stages(config: Config, tile_bytes: int) -> int:
    # a bias gradient makes programs persistent, and then stages hold whole problems ahead: 410 KB for three at D = 256
    return config.stages if 4 * tile_bytes * config.stages <= 64 * 1024 else 1


def _programs(config: Config, problems: int, device: torch.device) -> int:
    if config.programs_per_sm == 0:
        return problems
    return min(problems, config.programs_per_sm * multiprocessors(device))


def _precision(query: Tensor) -> str:
    # tf32 would lose 13 bits of a float32 product; low-precision inputs are exact either way
    return "ieee" if query.dtype == torch.float32 else "tf32"


def _options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    return options
