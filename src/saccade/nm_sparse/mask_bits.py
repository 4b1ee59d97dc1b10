"""The boolean mask of a call as the fused kernels read it, in bits, and the values that it hides from all queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.key_bits import NO_KEYS, KeyBits, narrowed, pack_keys
from saccade.nm_sparse.problem import BLOCK
from saccade.nm_sparse.query_bits import QueryBits, is_by_query, pack_queries


def with_bits(args: NMSparseArgs) -> tuple[NMSparseArgs, KeyBits | QueryBits]:
    """The arguments with their mask as bits. Values that it hides from all queries are zeros. If the mask differs by query, the block
    mask hides the tiles that no query sees."""
    mask, (kv_heads, kv_len) = args.mask, args.key.shape[1:3]
    if mask is None:
        return args, NO_KEYS
    packed: KeyBits | QueryBits
    if is_by_query(mask, args.is_causal):
        packed, given = pack_queries(mask, args.query.shape[2], kv_len, args.is_causal), args.block_mask
        seen = packed.keys if given is None else _seen_with_blocks(args, narrowed(mask), given)
        tiles = packed.tiles.expand(-1, -1, -(-args.query.shape[2] // BLOCK), -1)
        args = args._replace(block_mask=tiles if given is None else tiles & given)
        seen = seen if seen.shape[1] == 1 else seen.unflatten(1, (kv_heads, -1)).any(2)
        seen = seen[..., None]
    else:
        packed = pack_keys(mask, kv_len)
        seen = narrowed(mask).mT
    # a hidden value may be NaN, and a weight of 0 times NaN is NaN
    return args._replace(value=torch.where(seen, args.value, 0)), packed


def _seen_with_blocks(args: NMSparseArgs, mask: Tensor, block_mask: Tensor) -> Tensor:
    """Whether a query sees a key, bool `[B or 1, H or 1, Tk]`: by mask, block mask and causality together."""
    q_len, kv_len = args.query.shape[2], args.key.shape[2]
    mask = mask.expand(-1, -1, q_len, kv_len)
    if args.is_causal:
        mask = mask.tril()
    by_block = F.pad(mask, (0, 0, 0, -q_len % BLOCK)).unflatten(2, (-1, BLOCK)).any(3)
    return (by_block & block_mask.repeat_interleave(BLOCK, 3)[..., :kv_len]).any(2)
