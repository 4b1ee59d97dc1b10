"""Launchers of the backward pass for sm_90a: which calls it supports, tensor maps and grids."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from saccade.engine.layout import on_16_bytes
from saccade.hardware import arch_of
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS
from saccade.launch.dropout import drop_threshold
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.fused.config import DkvConfig, DqConfig, padded_dim, pick_backward
from saccade.nm_sparse.fused.launchers import block_mask_of, present, rows_map, visible_keys
from saccade.nvrtc import Options, Source, load, obstacles

DKV = Source(Path(__file__).parent / "cuda" / "backward_dkv_sm90.cu", (HEADERS,))
DQ = Source(Path(__file__).parent / "cuda" / "backward_dq_sm90.cu", (HEADERS,))
MAX_HEAD_DIM = 128
_GIVEN = (
    *["tensor_map"] * 4,  # query, keys, values, dout
    *["pointer"] * 5,  # kept, lse, delta, block mask, seed
)
# heads, group, q_len, kv_len, seen, words, counters, head_dim, present, vectors
_SIZES = ["int32"] * 10
_CHANCES = (*["float32"] * 3, "uint32")  # exponent, scale, spared, threshold
_DKV_KINDS = (*_GIVEN, *["pointer"] * 2, *_SIZES, *["int64"] * 9, *_CHANCES)
_DQ_KINDS = (*_GIVEN, "pointer", *_SIZES, *["int64"] * 6, *_CHANCES)


def takes(args: NMSparseArgs) -> bool:
    """Whether these kernels support a call: on sm_90, "2:4" or "1:2" in 16-bit dtypes, without a bias, D a multiple of 8 up to
    128."""
    query = args.query
    if query.device.type != "cuda" or arch_of(query.device) != 90 or args.bias is not None:
        return False
    known = (args.pattern_n, args.pattern_m) in ((2, 4), (1, 2)) and query.dtype in (torch.bfloat16, torch.float16)
    return known and query.shape[3] <= MAX_HEAD_DIM and query.shape[3] % 8 == 0 and not obstacles("90a")


def gradients(
    args: NMSparseArgs, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Write dq, dk and dv for the selection `kept`; delta is rowsum(dout * out) - dlse."""
    query, key, value = (for_copy_engine(x) for x in args[:3])
    args = args._replace(query=query, key=key, value=value)
    dout = for_copy_engine(dout)
    dkv, dquery = pick_backward(padded_dim(query.shape[3]), args.block_mask is not None)
    launch_dkv(args, dkv, dout, lse, kept, delta, dk, dv)
    launch_dq(args, dquery, dout, lse, kept, delta, dq)


def for_copy_engine(tensor: Tensor) -> Tensor:
    """A 16-bit `[B, H, T, D]` that the copy engine can read, copied if necessary: its rows are distinct and at multiples of 16
    bytes."""
    apart = tensor.shape[2] <= 1 or tensor.stride(2) != 0
    return on_16_bytes(tensor) if apart else tensor.clone(memory_format=torch.contiguous_format)


def launch_dkv(
    args: NMSparseArgs, config: DkvConfig, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Run `backward_dkv_sm90.cu`."""
    dim, blocks = padded_dim(args.query.shape[3]), -(-args.key.shape[2] // 128)
    kernel = load(DKV, "backward_dkv_sm90", _DKV_KINDS, backward_options(args, config), dk.device, "90a")
    run = kernel.configure(grid=dk.shape[0] * dk.shape[1] * blocks, block=384, shared_bytes=config.shared_bytes(dim))
    _run(run, args, 64, dout, lse, kept, delta, dk, dv)


def launch_dq(args: NMSparseArgs, config: DqConfig, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dq: Tensor) -> None:
    """Run `backward_dq_sm90.cu`."""
    if args.mask is not None or args.block_mask is not None:
        # keys that a mask hides may hold NaN, and a weight of 0 times NaN is NaN. A query that keeps a NaN key already has a NaN
        # lse
        args = args._replace(key=torch.where(args.key.isfinite(), args.key, 0))
    dim, blocks = padded_dim(args.query.shape[3]), -(-args.query.shape[2] // 128)
    kernel = load(DQ, "backward_dq_sm90", _DQ_KINDS, backward_options(args, config), dq.device, "90a")
    run = kernel.configure(grid=dq.shape[0] * dq.shape[1] * blocks, block=384, shared_bytes=config.shared_bytes(dim))
    _run(run, args, config.block_kv, dout, lse, kept, delta, dq)


def _run(run, args: NMSparseArgs, key_box: int, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, *made: Tensor) -> None:
    query, key, value = args[:3]
    heads, q_len, head_dim = query.shape[1:]
    seen, mask = visible_keys(args), block_mask_of(args)
    maps = (rows_map(query, q_len, 64), rows_map(key, seen, key_box), rows_map(value, seen, key_box), rows_map(dout, q_len, 64))
    there = sum(present(x) << 2 * i for i, x in enumerate((query, key, value, dout)))
    vectors = kept.shape[3] % 4 == 0 and kept.data_ptr() % 16 == 0
    run(
        *maps,
        *(0 if x is None else x.data_ptr() for x in (kept, lse, delta, mask, args.seed, *made)),
        heads, heads // key.shape[1], q_len, key.shape[2], seen, kept.shape[3], -(-key.shape[2] // 4), head_dim, there, int(vectors),
        *(stride for x in made for stride in x.stride()[:3]), *(mask.stride()[:3] if mask is not None else (0, 0, 0)),
        args.scale * LOG2E, args.scale, 1 / (1 - args.dropout_p), drop_threshold(args.dropout_p),
    )  # fmt: skip


def backward_options(args: NMSparseArgs, config: DkvConfig | DqConfig) -> Options:
    """The options with which one of the kernels is compiled for a call."""
    return Options.of(
        {
            **config.defines(),
            "HEAD_DIM": padded_dim(args.query.shape[3]),
            "SHARED_BYTES": config.shared_bytes(padded_dim(args.query.shape[3])),
            "BF16": args.query.dtype == torch.bfloat16,
            "CAUSAL": args.is_causal,
            "DROPOUT": args.seed is not None,
            "BLOCKS": args.block_mask is not None,
        }
    )
