"""Launchers of the backward that computes dQ, dK and dV of a selection in one pass, for sm_90a."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, addresses, strides
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.fused.config import OnePassConfig, padded_dim, pick_one_pass
from saccade.nm_sparse.fused.launchers import present, rows_map, visible_keys
from saccade.nm_sparse.order import adds_in_order
from saccade.nvrtc import Options, Source, load

ONE_PASS = Source(Path(__file__).parent / "cuda" / "backward_one_pass_sm90.cu", (HEADERS,))
WRITE_DQ = Source(Path(__file__).parent / "cuda" / "write_dq_sm90.cu", (HEADERS,))
TILE = 64  # queries of a sum in memory
FEW, MANY = 1024, 8192  # queries and keys from which one pass is faster, by form


def takes(args: NMSparseArgs) -> bool:
    """Whether one pass makes all gradients of a call that these kernels support: without dropout, block mask and bias, and where
    it was measured faster than two passes."""
    return args.seed is None and args.block_mask is None and args.bias is None and prefers(args)


def prefers(args: NMSparseArgs) -> bool:
    """On an H200, bf16, D = 128: 1.07x to 1.09x the two passes' speed with a causal mask for 1,024 to 8,192 tokens; without one
    1.03x at 8,192, 0.92x to 0.99x below, where blocks of keys that add in turn wait for one another. D = 64: 0.81x to 0.91x. Without
    an order 1.08x to 1.23x, and 1.12x at D = 64 and 8,192 tokens. Few queries were not measured: all blocks of keys would wait for
    one another at the same tile."""
    tokens, wide = min(args.query.shape[2], args.key.shape[2]), padded_dim(args.query.shape[3]) == 128
    if adds_in_order():
        return wide and tokens >= (FEW if args.is_causal else MANY)
    return tokens >= (FEW if wide else MANY)


def gradients(
    args: NMSparseArgs, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Write dq, dk and dv; the copy engine reads the inputs and dout.

    dQ is summed in float32 memory, 4 D bytes a query and head (D rounded up to 64 or 128).
    """
    dim = padded_dim(args.query.shape[3])
    config = pick_one_pass(dim, adds_in_order())
    problems, tiles = dq.shape[0] * dq.shape[1], -(-dq.shape[2] // TILE)
    make = torch.empty if config.ordered else torch.zeros  # in order, the first block of keys stores
    parked = make(problems * tiles * TILE * dim, dtype=torch.float32, device=dq.device)
    # the number that the next thread block takes, and for each tile how many blocks have added to it
    turns = torch.zeros(1 + problems * tiles, dtype=torch.int32, device=dq.device)
    launch_one_pass(args, config, dout, lse, kept, delta, parked, turns, dk, dv)
    launch_write_dq(args, parked, dq)


def launch_one_pass(
    args: NMSparseArgs, config: OnePassConfig, dout: Tensor, lse: Tensor, kept: Tensor, delta: Tensor,
    parked: Tensor, turns: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Run `backward_one_pass_sm90.cu`: dk, dv, and the sums of dQ."""
    query, key, value = args[:3]
    if args.mask is not None:
        # keys that a mask hides may hold NaN, and a dS of 0 times NaN is NaN. A query that keeps a NaN key already has a NaN lse
        key = key.nan_to_num(0.0, 0.0, 0.0)
    heads, q_len, head_dim = query.shape[1:]
    dim, seen = padded_dim(head_dim), visible_keys(args)
    kernel = load(ONE_PASS, "backward_one_pass_sm90", one_pass_options(args, config), dk.device, "90a")
    blocks = dk.shape[0] * dk.shape[1] * -(-dk.shape[2] // 128)
    kernel.configure(grid=blocks, block=384, shared_bytes=config.shared_bytes(dim))(
        query_map=rows_map(query, q_len, TILE), key_map=rows_map(key, seen, 64), value_map=rows_map(value, seen, 64),
        dout_map=rows_map(dout, q_len, TILE),
        **addresses(kept=kept, lse=lse, delta=delta, parked=parked, turns=turns, dkey=dk, dvalue=dv),
        heads=heads, group=heads // key.shape[1], q_len=q_len, kv_len=key.shape[2], words=kept.shape[3], head_dim=head_dim,
        present=sum(present(x) << 2 * i for i, x in enumerate((query, key, value, dout))),
        vectors=int(kept.shape[3] % 4 == 0 and kept.data_ptr() % 16 == 0),
        **strides(dkey=dk.stride()[:3], dvalue=dv.stride()[:3]), exponent=args.scale * LOG2E, scale=args.scale,
    )  # fmt: skip


def launch_write_dq(args: NMSparseArgs, parked: Tensor, dq: Tensor) -> None:
    """Run `write_dq_sm90.cu`: the sums of dQ, times the scale, rounded."""
    kernel = load(WRITE_DQ, "write_dq_sm90", write_dq_options(args), dq.device, "90a")
    heads, q_len, head_dim = dq.shape[1:]
    kernel.configure(grid=dq.shape[0] * heads * -(-q_len // TILE), block=256)(
        **addresses(parked=parked, dquery=dq), heads=heads, q_len=q_len, head_dim=head_dim,
        **strides(dquery=dq.stride()[:3]), scale=args.scale,
    )  # fmt: skip


def one_pass_options(args: NMSparseArgs, config: OnePassConfig) -> Options:
    """The options with which `backward_one_pass_sm90.cu` is compiled for a call."""
    dim = padded_dim(args.query.shape[3])
    more = {"SHARED_BYTES": config.shared_bytes(dim), "CAUSAL": args.is_causal, "DROPOUT": False, "BLOCKS": False}
    return Options.of({**config.defines(), **_types(args), **more})


def write_dq_options(args: NMSparseArgs) -> Options:
    """The options with which `write_dq_sm90.cu` is compiled for a call."""
    return Options.of({**_types(args), "STAGES": 1, "DROPOUT": False, "BLOCKS": False})


def _types(args: NMSparseArgs) -> dict[str, int | bool]:
    return {"HEAD_DIM": padded_dim(args.query.shape[3]), "BF16": args.query.dtype == torch.bfloat16}
