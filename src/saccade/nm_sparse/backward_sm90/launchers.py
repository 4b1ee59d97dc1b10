"""Launchers of the backward pass for sm_90a: which calls it supports, tensor maps and grids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.engine.layout import on_16_bytes
from saccade.hardware import arch_of
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, addresses, strides
from saccade.launch.dropout import drop_threshold
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backward_sm90 import one_pass
from saccade.nm_sparse.bias_rows import bias_rows
from saccade.nm_sparse.fused.config import DkvConfig, DqConfig, padded_dim, pick_backward
from saccade.nm_sparse.fused.launchers import block_mask_of, bytes_of_bias, present, rows_map, visible_keys
from saccade.nvrtc import Launch, Options, Source, load, obstacles

DKV = Source(Path(__file__).parent / "cuda" / "backward_dkv_sm90.cu", (HEADERS,))
DQ = Source(Path(__file__).parent / "cuda" / "backward_dq_sm90.cu", (HEADERS,))
MAX_HEAD_DIM = 128


def takes(args: NMSparseArgs) -> bool:
    """Whether these kernels support a call: on sm_90, "2:4" or "1:2" in 16-bit dtypes, D a multiple of 8 up to 128."""
    query = args.query
    if query.device.type != "cuda" or arch_of(query.device) != 90:
        return False
    known = (args.pattern_n, args.pattern_m) in ((2, 4), (1, 2)) and query.dtype in (torch.bfloat16, torch.float16)
    return known and query.shape[3] <= MAX_HEAD_DIM and query.shape[3] % 8 == 0 and not obstacles("90a")


def gradients(
    args: NMSparseArgs, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> Tensor | None:
    """Write dq, dk and dv for the selection `kept`; delta is rowsum(dout * out) - dlse.

    With a bias returns a factor for the weights exp(S - lse) of each row, float32 `[B, H, Tq]`. It is 1; or 1 by the sum of these
    weights, if a score is so large that lse has lost the logarithm of the sum.
    """
    query, key, value = (for_copy_engine(x) for x in args[:3])
    args = args._replace(query=query, key=key, value=value)
    dout = for_copy_engine(dout)
    if one_pass.takes(args):
        one_pass.gradients(args, dout, lse, kept, delta, dq, dk, dv)
        return None
    log_inverse = None
    if args.bias is not None:
        args = args._replace(bias=bias_rows(args.bias, query, key.shape[2]))
        log_inverse = torch.empty_like(lse)
    dkv, dquery = pick_backward(padded_dim(query.shape[3]), args.block_mask is not None, bytes_of_bias(args))
    launch_dq(args, dquery, dout, lse, kept, delta, dq, log_inverse)
    launch_dkv(args, dkv, dout, lse, kept, delta, dk, dv, log_inverse)
    return None if log_inverse is None else log_inverse.exp2_()


def for_copy_engine(tensor: Tensor) -> Tensor:
    """A 16-bit `[B, H, T, D]` that the copy engine can read, copied if necessary: its rows are distinct and at multiples of 16
    bytes."""
    apart = tensor.shape[2] <= 1 or tensor.stride(2) != 0
    return on_16_bytes(tensor) if apart else tensor.clone(memory_format=torch.contiguous_format)


def launch_dkv(
    args: NMSparseArgs, config: DkvConfig, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
    log_inverse: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `backward_dkv_sm90.cu`. A bias is one of `bias_rows`; log_inverse: with a bias, what `launch_dq` wrote."""
    if args.block_mask is not None:
        args = args._replace(block_mask=args.block_mask.mT.contiguous())
    dim, blocks = padded_dim(args.query.shape[3]), -(-args.key.shape[2] // 128)
    kernel = load(DKV, "backward_dkv_sm90", backward_options(args, config), dk.device, "90a")
    run = kernel.configure(grid=dk.shape[0] * dk.shape[1] * blocks, block=384, shared_bytes=config.shared_bytes(dim))
    _run(run, args, 64, dout, lse, kept, delta, log_inverse, dkey=dk, dvalue=dv)


def launch_dq(
    args: NMSparseArgs, config: DqConfig, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dq: Tensor,
    log_inverse: Tensor | None = None,
) -> None:  # fmt: skip
    """Run `backward_dq_sm90.cu`. A bias is one of `bias_rows`; log_inverse: with a bias, written for `launch_dkv`: -log2 of the sum of a row's weights."""
    if args.mask is not None:
        # Keys that a mask hides may hold NaN, and a weight of 0 times NaN is NaN. A query that keeps a NaN key already has a NaN
        # lse. No product is made of keys that a block mask hides from a warpgroup.
        args = args._replace(key=args.key.nan_to_num(0.0, 0.0, 0.0))
    dim, blocks = padded_dim(args.query.shape[3]), -(-args.query.shape[2] // 128)
    kernel = load(DQ, "backward_dq_sm90", backward_options(args, config), dq.device, "90a")
    run = kernel.configure(grid=dq.shape[0] * dq.shape[1] * blocks, block=384, shared_bytes=config.shared_bytes(dim))
    _run(run, args, config.block_kv, dout, lse, kept, delta, log_inverse, dquery=dq)


def _run(
    run: Launch, args: NMSparseArgs, key_box: int, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor,
    log_inverse: Tensor | None, **made: Tensor,
) -> None:  # fmt: skip
    query, key, value = args[:3]
    heads, q_len, head_dim = query.shape[1:]
    seen, mask = visible_keys(args), block_mask_of(args)
    there = sum(present(x) << 2 * i for i, x in enumerate((query, key, value, dout)))
    # whether `kept` may be read by 16 bytes
    vectors = kept.shape[3] % 4 == 0 and kept.data_ptr() % 16 == 0
    run(
        query_map=rows_map(query, q_len, 64), key_map=rows_map(key, seen, key_box), value_map=rows_map(value, seen, key_box),
        dout_map=rows_map(dout, q_len, 64), **_bias_arguments(args.bias, log_inverse),
        **addresses(kept=kept, lse=lse, delta=delta, block_mask=mask, seed=args.seed, **made),
        heads=heads, group=heads // key.shape[1], q_len=q_len, kv_len=key.shape[2], seen=seen, words=kept.shape[3],
        counters=-(-key.shape[2] // 4), head_dim=head_dim, present=there, vectors=int(vectors),
        **strides(mask=(0, 0, 0) if mask is None else mask.stride()[:3], **{name: x.stride()[:3] for name, x in made.items()}),
        exponent=args.scale * LOG2E, scale=args.scale, spared=1 / (1 - args.dropout_p), threshold=drop_threshold(args.dropout_p),
    )  # fmt: skip


def _bias_arguments(bias: Tensor | None, log_inverse: Tensor | None) -> dict[str, Any]:
    if bias is None:
        return {}
    return {**addresses(bias=bias, log_inverse=log_inverse), **strides(bias=bias.stride()[:3]), "bias_columns": bias.shape[3]}


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
