"""The meaning of N:M sparse attention in plain torch: score, select, attend. It takes O(Tq * Tk) memory; on float64 inputs it is
the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine import dense
from saccade.engine.backend import Backend
from saccade.engine.layout import repeat_heads
from saccade.engine.philox import dropout_keep
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.problem import BLOCK, NMSparseProblem


def visible_scores(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: Tensor | None = None,
    block: int = 64,
    is_causal: bool = False,
) -> Tensor:
    """`scale * Q K^T + bias`, `[B, H, Tq, Tk]` in at least float32, -inf where the key is invisible."""
    accumulate = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    keys = repeat_heads(key.to(accumulate), group)
    scores = scale * (query.to(accumulate) @ keys.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.to(accumulate)
    seen = dense.visible(query.shape[2], key.shape[2], mask, None, is_causal, query.device)
    if block_mask is not None:
        seen = seen & whole_tiles(block_mask, query.shape[2], key.shape[2], block)
    return scores.masked_fill(~seen, float("-inf"))


def whole_tiles(block_mask: Tensor, q_len: int, kv_len: int, block: int) -> Tensor:
    """`block_mask` `[.., Tq / block, Tk / block]` as a mask of single queries and keys, `[.., Tq, Tk]`."""
    return block_mask.repeat_interleave(block, dim=-2).repeat_interleave(block, dim=-1)[..., :q_len, :kv_len]


def never_pruned(q_len: int, kv_len: int, group: int, dense_first: int, dense_recent: int, device: torch.device) -> Tensor:
    """The keys that a query never prunes, bool `[Tq, Tk]`: those below `dense_first`, and groups with any of the last `dense_recent`
    keys up to the query's own index.

    With groups g = j // M, key j of query i is among the latter if `M g <= i` and `M g + M > i + 1 - dense_recent`. That is at least
    one group, so `dense_recent` of 0 is a case of its own.
    """
    keys = torch.arange(kv_len, device=device)
    queries = torch.arange(q_len, device=device)[:, None]
    dense = (keys < dense_first).expand(q_len, kv_len)
    if dense_recent:
        first = keys - keys % group
        dense = dense | ((first <= queries) & (first + group > queries + 1 - dense_recent))
    return dense


def select(scores: Tensor, keep: int, group: int, dense_first: int = 0, dense_recent: int = 0) -> Tensor:
    """The scores that are kept, bool like `scores` `[.., Tk]`: of each `group` consecutive ones, from 0 on, the `keep` largest; with
    `dense_first` or `dense_recent`, of scores `[.., Tq, Tk]`, also those of `never_pruned`.

    A score is beaten by every larger one of its group, and by an equal one at a lower index; it is kept if fewer than `keep` beat
    it. -inf marks an invisible key, which is never kept; a short last group counts as filled up with such keys. NaN ranks above
    every number, so that it shows in the result.
    """
    kv_len = scores.shape[-1]
    ranked = scores.detach().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    # Keys of a group by their indices, not by a view of groups: with symbolic lengths their divisibility would guard the graph.
    filled = torch.nn.functional.pad(ranked, (0, group - 1), value=float("-inf"))
    keys = torch.arange(kv_len, device=scores.device)
    first, slot = keys - keys % group, keys % group
    beaten = torch.zeros_like(ranked, dtype=torch.long)
    for other_slot in range(group):
        other = filled[..., first + other_slot]
        beaten = beaten + ((other > ranked) | ((other == ranked) & (other_slot < slot)))
    kept = beaten < keep
    if dense_first or dense_recent:
        q_len, kv_len = scores.shape[-2:]
        kept = kept | never_pruned(q_len, kv_len, group, dense_first, dense_recent, scores.device)
    return kept & (ranked > float("-inf"))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    survivors: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense attention to the keys that `kept` `[B, H, Tq, Tk]` keeps; gradients flow only through these.

    survivors: bool `[B, H, Tq, Tk]`, the dropout draw. Values that no query keeps never matter.
    """
    return dense.attend(query, key, value, scale=scale, mask=kept, bias=bias, keep=survivors, dropout_p=dropout_p)


def padded_group(group: int) -> int:
    """The number of slots of a group in a stored selection: the smallest power of two that is at least `group`."""
    return 1 << (group - 1).bit_length()


def pack_selection(kept: Tensor, group: int) -> Tensor:
    """A selection, bool `[.., Tk]`, as kernels store it: int32 `[.., words]`, one bit per slot (see `NMSparseLaunchers`)."""
    kv_len, padded = kept.shape[-1], padded_group(group)
    groups = torch.nn.functional.pad(kept, (0, -kv_len % group)).unflatten(-1, (-(-kv_len // group), group))
    slots = torch.nn.functional.pad(groups, (0, padded - group)).flatten(-2)
    words = torch.nn.functional.pad(slots, (0, -slots.shape[-1] % 32)).unflatten(-1, (-(-slots.shape[-1] // 32), 32))
    # the sum of distinct powers of two, the last of which is negative as an int32
    return (words.long() << torch.arange(32, device=kept.device)).sum(-1).to(torch.int32)


def unpack_selection(bits: Tensor, group: int, kv_len: int) -> Tensor:
    """A stored selection, int32 `[.., words]`, as bool `[.., Tk]`."""
    slots = (bits.unsqueeze(-1) >> torch.arange(32, device=bits.device)) & 1
    keys = torch.arange(kv_len, device=bits.device)
    return slots.flatten(-2)[..., keys // group * padded_group(group) + keys % group] != 0


def _attend(args: NMSparseArgs, problem: NMSparseProblem) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = args.query.shape
    survivors = None
    if args.seed is not None:
        survivors = dropout_keep(args.seed, args.dropout_p, batch, heads, q_len, args.key.shape[2])
    bias = None if args.bias is None else args.bias.detach()
    scores = visible_scores(
        args.query.detach(),
        args.key.detach(),
        scale=args.scale,
        mask=args.mask,
        bias=bias,
        block_mask=args.block_mask,
        block=BLOCK,
        is_causal=args.is_causal,
    )
    kept = select(scores, args.pattern_n, args.pattern_m, args.dense_first, args.dense_recent)
    out, lse = attend(
        args.query,
        args.key,
        args.value,
        kept,
        scale=args.scale,
        bias=args.bias,
        survivors=survivors,
        dropout_p=args.dropout_p,
    )
    return out.to(args.query.dtype), lse


REFERENCE = Backend(
    name="reference",
    is_reference=True,
    operation="nm_sparse_attention",
    summary="plain torch, any device; the meaning of the operation, O(Tq * Tk) memory",
    why_not=lambda problem: [],
    prefers=lambda problem: False,
    attend=_attend,
)
