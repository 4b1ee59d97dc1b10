"""Launchers of the fused kernels on sparse tensor cores: allocation, tensor maps, grids."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.engine.layout import empty_like_heads
from saccade.errors import InvalidArgument
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, addresses, strides
from saccade.launch.dropout import drop_threshold
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.bias_rows import with_bias
from saccade.nm_sparse.bits import words_of
from saccade.nm_sparse.fused import last_wave
from saccade.nm_sparse.fused.config import Sm80Config, Sm90Config, padded_dim, pick_sm80, pick_sm90
from saccade.nm_sparse.fused.last_wave import Split
from saccade.nm_sparse.key_bits import NO_KEYS, KeyBits
from saccade.nm_sparse.mask_bits import with_bits
from saccade.nm_sparse.query_bits import QueryBits, is_by_query
from saccade.nvrtc import Options, Source, TensorMap, load, tensor_map

SM90 = Source(Path(__file__).parent / "cuda" / "fused_sm90.cu", (HEADERS,))
SM80 = Source(Path(__file__).parent / "cuda" / "fused_sm80.cu", (HEADERS,))


def forward(args: NMSparseArgs, stores: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, kept): out laid out like query, lse float32 `[B, H, Tq]`, kept the bits of `NMSparseLaunchers`."""
    query, key = args.query, args.key
    out = empty_like_heads(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    words = words_of(key.shape[2], args.pattern_m)
    # zeros, because tiles beyond the causal edge, or hidden by the block mask, are never visited
    kept = torch.zeros((*query.shape[:3], words) if stores else (0,), dtype=torch.int32, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:
        return out.zero_(), lse.fill_(-math.inf), kept
    _check_addresses(args)
    args, keys = with_bits(with_bias(args))
    arch = arch_of(query.device)
    by_query = _by_query(args)
    of_keys, biased = args.mask is not None and not by_query, args.bias is not None
    features = (args.block_mask is not None, args.seed is not None, of_keys, by_query, biased)
    if arch == 90 and query.dtype != torch.float32:
        config = pick_sm90(query.shape[3], args.pattern_n, query.shape[2], args.is_causal, *features)
        launch_sm90(args, config, out, lse, kept, keys)
    else:
        shape = pick_sm80(query.shape[3], arch, args.pattern_n, args.is_causal, any(features), query.dtype == torch.float32)
        launch_sm80(args, shape, out, lse, kept, keys)
    return out, lse, kept


def _check_addresses(args: NMSparseArgs) -> None:
    """Checks that `why_not` cannot make while a call is traced."""
    for name, tensor in (("query", args.query), ("key", args.key), ("value", args.value)):
        if tensor.data_ptr() % 16:
            raise InvalidArgument(
                f"{name} begins at {tensor.data_ptr():#x}; backend 'mma_sp' needs multiples of 16 bytes, call .clone() on it"
            )


def launch_sm90(
    args: NMSparseArgs, config: Sm90Config, out: Tensor, lse: Tensor, kept: Tensor, keys: KeyBits | QueryBits = NO_KEYS
) -> None:
    """Run `fused_sm90.cu`; `kept` is filled unless it is empty. keys: the mask of `args` as bits; a bias is one of `bias_rows`."""
    head_dim, seen = args.query.shape[3], visible_keys(args)
    tiles = -(-seen // config.block_kv) if args.block_mask is not None else 0
    plan = _split_of(args, config, multiprocessors(out.device))
    blocks_run = min(plan.pieces, multiprocessors(out.device)) if config.persistent else plan.pieces
    options = sm90_options(args, config, kept.numel() > 0, plan.parts > 1)
    kernel = load(SM90, "fused_sm90", options, out.device, "90a")
    shared = config.shared_bytes(padded_dim(head_dim), tiles)
    run = kernel.configure(grid=blocks_run, block=128 * (config.warpgroups + 1), shared_bytes=shared)
    parts = last_wave.allocate(plan, config.block_q, padded_dim(head_dim), out.device)
    run(
        **_maps(args, config, seen),
        **addresses(out=out, part_outs=parts.outs, part_sums=parts.sums),
        **_shared_arguments(args, lse, kept, keys),
        head_dim=head_dim, present=present(args.query) | present(args.key) << 2 | present(args.value) << 4,
        whole=plan.whole, parts=plan.parts, **strides(out=out.stride()[:3]),
    )  # fmt: skip
    if plan.parts > 1:
        last_wave.combine(parts, out, lse, plan)


def _split_of(args: NMSparseArgs, config: Sm90Config, processors: int) -> Split:
    """The blocks of queries that are split into parts: none if blocks differ in length, or if this was not measured."""
    batch, heads, q_len, _ = args.query.shape
    blocks = batch * heads * -(-q_len // config.block_q)
    plain = not args.is_causal and args.block_mask is None and args.mask is None and args.seed is None
    plain = plain and args.bias is None
    if not plain or padded_dim(args.query.shape[3]) != 128 or q_len % config.block_q:
        return Split(blocks)
    return last_wave.split(blocks, processors, -(-args.key.shape[2] // config.block_kv))


def launch_sm80(
    args: NMSparseArgs, config: Sm80Config, out: Tensor, lse: Tensor, kept: Tensor, keys: KeyBits | QueryBits = NO_KEYS
) -> None:
    """Run `fused_sm80.cu`; `kept` is filled unless it is empty. keys: the mask of `args` as bits; a bias is one of `bias_rows`."""
    batch, heads, q_len, head_dim = args.query.shape
    blocks = batch * heads * -(-q_len // (16 * config.tall * config.warps))
    kernel = load(SM80, "fused_sm80", sm80_options(args, config, kept.numel() > 0), out.device)
    run = kernel.configure(grid=blocks, block=32 * config.warps, shared_bytes=config.shared_bytes(head_dim))
    query, key, value = args[:3]
    run(
        **addresses(query=query, key=key, value=value, out=out),
        **_shared_arguments(args, lse, kept, keys),
        **strides(query=query.stride()[:3], key=key.stride()[:3], value=value.stride()[:3], out=out.stride()[:3]),
    )


def _shared_arguments(args: NMSparseArgs, lse: Tensor, kept: Tensor, keys: KeyBits | QueryBits) -> dict[str, Any]:
    """The arguments that both kernels take.

    key_words and keys_batch are `KeyBits.sizes`, or `QueryBits.sizes` with the steps of a mask of queries.
    """
    batch, heads, q_len, _ = args.query.shape
    mask, (key_words, keys_batch) = block_mask_of(args), keys.sizes
    steps = dict(zip(("keys_head", "keys_query"), keys.steps, strict=True)) if isinstance(keys, QueryBits) else {}
    return {
        **steps, **_bias_arguments(args),
        **addresses(lse=lse, kept=kept, block_mask=mask, seed=args.seed, key_bits=keys.bits, key_spans=keys.spans),
        "heads": heads, "group": heads // args.key.shape[1], "q_len": q_len, "kv_len": visible_keys(args), "words": kept.shape[-1],
        "counters": -(-args.key.shape[2] // 4), "problems": batch * heads, "opaque_one": 1, "key_words": key_words,
        "keys_batch": keys_batch, **strides(mask=(0, 0, 0) if mask is None else mask.stride()[:3]),
        "scale": args.scale * LOG2E, "spared": 1 / (1 - args.dropout_p), "threshold": drop_threshold(args.dropout_p),
    }  # fmt: skip


def _bias_arguments(args: NMSparseArgs) -> dict[str, Any]:
    bias = args.bias
    if bias is None:
        return {}
    given = {**addresses(bias=bias), **strides(bias=bias.stride()[:3])}
    return {**given, "bias_columns": bias.shape[3], "score_scale": args.scale}


def sm90_options(args: NMSparseArgs, config: Sm90Config, stores: bool, split: bool = False) -> Options:
    """The options with which `fused_sm90.cu` is compiled for a call. split: some blocks are split into parts of their keys."""
    dim = padded_dim(args.query.shape[3])
    own = {"HEAD_DIM": dim, "SHARED_BYTES": config.shared_bytes(dim), "SPLIT": split}
    return Options.of({**config.defines(), **_defines(args, stores), **own})


def sm80_options(args: NMSparseArgs, config: Sm80Config, stores: bool) -> Options:
    """The options with which `fused_sm80.cu` is compiled for a call."""
    dim = args.query.shape[3]
    own = {"HEAD_DIM": dim, "SHARED_BYTES": config.shared_bytes(dim)}
    return Options.of({**config.defines(), **_defines(args, stores), **own})


def _defines(args: NMSparseArgs, stores: bool) -> dict[str, int | bool]:
    return {
        "BF16": args.query.dtype == torch.bfloat16,
        "PAIRS": args.pattern_m == 2,
        "CAUSAL": args.is_causal,
        "STORES": stores,
        "DROPOUT": args.seed is not None,
        # tiles that a mask of queries hides are a block mask
        "BLOCKS": args.block_mask is not None or _by_query(args),
        "KEYS": args.mask is not None and not _by_query(args),
        "QUERY_BITS": _by_query(args),
        "BIAS": bytes_of_bias(args),
    }


def bytes_of_bias(args: NMSparseArgs) -> int:
    """Bytes of a number of a bias of `bias_rows`, 0 without one."""
    return 0 if args.bias is None else args.bias.element_size()


def _by_query(args: NMSparseArgs) -> bool:
    return is_by_query(args.mask, args.is_causal)


def visible_keys(args: NMSparseArgs) -> int:
    """The number of keys that some query can see; the others may hold anything and are never read."""
    return min(args.key.shape[2], args.query.shape[2]) if args.is_causal else args.key.shape[2]


def _maps(args: NMSparseArgs, config: Sm90Config, seen: int) -> dict[str, TensorMap]:
    tail = rows_map(args.key, seen, 2)
    # four keys form a dimension, and half of it is copied at a time; there is no map for fewer than four keys
    keys = _fours(args.key, seen // 4, config.block_kv // 4) if seen >= 4 else tail
    query, value = rows_map(args.query, args.query.shape[2], 64), rows_map(args.value, seen, config.block_kv)
    return {"query_map": query, "key_map": keys, "tail_map": tail, "value_map": value}


def rows_map(tensor: Tensor, rows: int, box: int) -> TensorMap:
    """Map of `[B, H, rows, D]`, copied `box` rows and 64 columns at a time."""
    sizes, strides = _outer(tensor)
    return tensor_map(tensor.data_ptr(), (*sizes, rows, tensor.shape[3]), (*strides, 2 * _row_stride(tensor)), (1, 1, box, 64))


def _fours(tensor: Tensor, fours: int, box: int) -> TensorMap:
    """Map of `[B, H, fours, 4, D]`."""
    sizes, strides = _outer(tensor)
    row = 2 * _row_stride(tensor)
    return tensor_map(tensor.data_ptr(), (*sizes, fours, 4, tensor.shape[3]), (*strides, 4 * row, row), (1, 1, box, 2, 64))


def _outer(tensor: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """(sizes, strides in bytes) of batch and heads; size 1 with any stride if all share one."""
    there = present(tensor)
    sizes = (tensor.shape[0] if there & 1 else 1, tensor.shape[1] if there & 2 else 1)
    return sizes, (2 * tensor.stride(0) if there & 1 else 16, 2 * tensor.stride(1) if there & 2 else 16)


def _row_stride(tensor: Tensor) -> int:
    return tensor.stride(2) if tensor.shape[2] > 1 else tensor.shape[3]


def present(tensor: Tensor) -> int:
    """Bit 0: batch rows are distinct; bit 1: heads are."""
    apart = [tensor.shape[i] > 1 and tensor.stride(i) != 0 for i in (0, 1)]
    return apart[0] | apart[1] << 1


def block_mask_of(args: NMSparseArgs) -> Tensor | None:
    """The block mask for all batch rows and heads, with contiguous columns."""
    mask = args.block_mask
    if mask is None:
        return None
    mask = mask if mask.stride(3) == 1 or mask.shape[3] == 1 else mask.contiguous()
    return mask.expand(*args.query.shape[:2], *mask.shape[2:])
