"""The compressed format of sparse tensor cores in plain torch: kept numbers row by row, and metadata in the CUTLASS layout.

A group is 4 consecutive numbers of 16 bits or 2 of 32 bits. Half of it is kept, in order. Four bits of metadata say which ones: the
index of the first kept number in the low two bits, that of the second in the high two. A 32-bit number counts as two halves, so 0x4
keeps the first and 0xE the second. Four groups make a 16-bit element, low bits first. Elements [rows, columns] are then permuted
(Dfss, appendix A.1.1, Eq. 9). Row r moves to `r // 32 * 32 + r % 8 * 4 + r % 32 // 8`. The upper right and lower left corners of
each 2 x 2 block are swapped. Pairs of neighbouring columns form 32-bit words, which are stored column by column. Word l of 32 rows
is then the one that lane l of a warp passes to `mma.sp`. `torch.sparse.to_sparse_semi_structured` stores the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# rows of a block of metadata
ROWS = 32


def group_of(dtype: torch.dtype) -> int:
    """How many numbers form a group of the format, 8 bytes. Half of them are kept."""
    return 8 // dtype.itemsize


def span_of(dtype: torch.dtype) -> int:
    """Columns are padded to a multiple of this number: 64, or 32 for 32-bit numbers, as torch requires."""
    return 128 // dtype.itemsize


def padded(q_len: int, kv_len: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns with their padding."""
    span = span_of(dtype)
    return -(-q_len // ROWS) * ROWS, -(-kv_len // span) * span


def choose(scores: Tensor, keep: int, group: int, per_group: int) -> Tensor:
    """The `scores [.., columns]` that fill the slots of their groups: indices int64 `[.., groups, kept]`, ascending.

    The `keep` largest of each `group` are chosen; of equal ones those at lower indices, and NaN before all others. The result has
    the groups of the format, of `per_group` numbers each. Unlike in `nm_sparse.select`, every slot is filled, with -inf if
    nothing else is left.
    """
    ranked = scores.detach().float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    order = ranked.unflatten(-1, (-1, group)).sort(dim=-1, descending=True, stable=True).indices[..., :keep].sort(dim=-1).values
    # groups of the pattern in one of the format: 2 of "1:2" on 16 bits
    places = per_group // group
    order = order.unflatten(-2, (-1, places)) + group * torch.arange(places, device=scores.device)[:, None]
    return order.flatten(-2)


def codes(chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Four bits for each group of `chosen [.., groups, kept]`."""
    if dtype.itemsize == 4:
        return torch.where(chosen[..., 0] == 0, 0x4, 0xE)
    return chosen[..., 0] | chosen[..., 1] << 2


def chosen_of(code: Tensor, dtype: torch.dtype) -> Tensor:
    """The indices that four bits encode: the inverse of `codes`."""
    if dtype.itemsize == 4:
        return (code == 0xE).long().unsqueeze(-1)
    return torch.stack((code & 3, code >> 2 & 3), dim=-1)


def pack(chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Metadata int16 `[.., rows, columns]` of `chosen [.., rows, groups, kept]`; rows and groups padded."""
    nibbles = codes(chosen, dtype).unflatten(-1, (-1, 4))
    elements = (nibbles << 4 * torch.arange(4, device=chosen.device)).sum(-1)
    elements = torch.where(elements >= 2**15, elements - 2**16, elements).short()
    order = _order(elements.shape[-2], elements.shape[-1], chosen.device)
    return (
        torch.empty_like(elements)
        .flatten(-2)
        .scatter_(-1, order.expand(*elements.shape[:-2], -1), elements.flatten(-2))
        .view_as(elements)
    )


def unpack(metadata: Tensor, dtype: torch.dtype) -> Tensor:
    """The kept indices int64 `[.., rows, groups, kept]` of metadata: the inverse of `pack`."""
    order = _order(metadata.shape[-2], metadata.shape[-1], metadata.device)
    elements = metadata.flatten(-2).gather(-1, order.expand(*metadata.shape[:-2], -1)).view_as(metadata)
    nibbles = elements.long().unsqueeze(-1) >> 4 * torch.arange(4, device=metadata.device) & 15
    return chosen_of(nibbles.flatten(-2), dtype)


def _order(rows: int, columns: int, device: torch.device) -> Tensor:
    """The place in memory of the metadata element (row, column), int64 `[rows * columns]`."""
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    row = row // ROWS * ROWS + row % 8 * 4 + row % ROWS // 8
    row, column = row.expand(rows, columns), column.expand(rows, columns)
    swap = (row % 2 == 0).long() * (column % 2 == 1) - (row % 2 == 1).long() * (column % 2 == 0)
    row, column = row + swap, column - swap
    return (column // 2 * rows * 2 + row * 2 + column % 2).flatten()


def compress(dense: Tensor, keep: int, group: int, fill: float) -> tuple[Tensor, Tensor]:
    """(values `[.., rows, columns / 2]`, metadata int16 `[.., rows, columns / 16 or / 8]`) of `dense [.., Tq, Tk]`, padded with
    `fill`."""
    return gather(dense, dense, keep, group, fill)


def gather(scores: Tensor, dense: Tensor, keep: int, group: int, fill: float) -> tuple[Tensor, Tensor]:
    """Like `compress`, but `scores` choose the kept numbers; `dense` may be a rounded copy of them."""
    dtype = dense.dtype
    q_len, kv_len = dense.shape[-2:]
    rows, columns = padded(q_len, kv_len, dtype)
    space = (0, columns - kv_len, 0, rows - q_len)
    # -inf, so that padding never takes a slot from a real number
    ranked = torch.nn.functional.pad(scores, space, value=float("-inf"))
    dense = torch.nn.functional.pad(dense, space, value=fill)
    chosen = choose(ranked, keep, group, group_of(dtype))
    values = dense.unflatten(-1, (-1, group_of(dtype))).gather(-1, chosen).flatten(-2)
    return values.contiguous(), pack(chosen, dtype)


def expand(values: Tensor, metadata: Tensor, fill: float) -> Tensor:
    """The padded dense matrix of kept numbers and metadata, `fill` everywhere else."""
    chosen = unpack(metadata, values.dtype)
    group = group_of(values.dtype)
    dense = values.new_full((*chosen.shape[:-1], group), fill)
    return dense.scatter_(-1, chosen, values.unflatten(-1, (-1, group // 2))).flatten(-2)
