"""`NMSparseProblem`, the frozen description of a call of `nm_sparse_attention`, and the checks that `attention` does not have."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from saccade.engine.arguments import check_count, check_flag, check_lengths, check_mask, check_shapes
from saccade.engine.kinds import check_kinds
from saccade.engine.problem import Problem, describe
from saccade.errors import InvalidArgument
from saccade.hardware import allows_tf32

# queries and keys of one tile of `block_mask`
BLOCK = 64
MAX_GROUP = 16
# so that kernels may add it to the index of a key in 32 bits
MAX_DENSE = 2**30
# not vars(), which some releases of torch.compile cannot trace
_OF_DENSE = tuple(field.name for field in fields(Problem))
_A_PATTERN = "it must be 'N:M' with 1 <= N < M <= 16, such as '2:4', '1:2' or '4:8'"


@dataclass(frozen=True)
class NMSparseProblem(Problem):
    """A call of `nm_sparse_attention` without its data: of each `group` consecutive keys, `keep` are kept.

    aligned: the rows of query, key and value are distinct and at multiples of 16 bytes.
    tf32: torch may multiply float32 as TF32 (`torch.backends.cuda.matmul.fp32_precision`).
    dense_first, dense_recent: keys that are never pruned, at the start of a row and up to the query.
    """

    keep: int = 2
    group: int = 4
    block_mask: bool = False
    aligned: bool = True
    tf32: bool = False
    dense_first: int = 0
    dense_recent: int = 0

    @property
    def pattern(self) -> str:
        """The pattern as it is written, "2:4"."""
        return f"{self.keep}:{self.group}"

    def __str__(self) -> str:
        head, _, rest = super().__str__().partition("(")
        counts = (("dense_first", self.dense_first), ("dense_recent", self.dense_recent))
        words = [self.pattern, *(f"{name}={n}" for name, n in counts if n), *["blocks"] * self.block_mask]
        return f"{head}({' '.join(words)} {rest}"


def describe_nm_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    pattern: str,
    block_mask: Tensor | None,
    lengths: Tensor | None,
    return_lse: bool,
    needs_grad: bool,
    dense_first: int = 0,
    dense_recent: int = 0,
) -> NMSparseProblem:
    """Check the arguments of `nm_sparse_attention` and describe the call.

    Raises:
        InvalidArgument: with the values given and what is allowed.
    """
    keep, group = parse_pattern(pattern)
    dense_first, dense_recent = check_dense(dense_first, dense_recent, group)
    dense = describe(
        "nm_sparse_attention", query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, False, needs_grad
    )  # fmt: skip
    if query.dim() != 4:
        raise InvalidArgument(f"query has shape {list(query.shape)}; it must be [B, H, Tq, D]")
    check_kinds(block_mask=block_mask)
    _check_block_mask(query, key, block_mask)
    described = {name: getattr(dense, name) for name in _OF_DENSE}
    if lengths is not None and dense.mask != "bias":
        # backends are given lengths as a mask of keys, within the boolean mask of the call if it has one
        row = (query.shape[0], 1, 1, key.shape[2])
        described |= {"mask": "bool", "mask_shape": tuple(torch.broadcast_shapes(row, dense.mask_shape or row))}
    aligned = all(map(_is_aligned, (query, key, value)))
    tf32 = query.dtype == torch.float32 and allows_tf32()
    return NMSparseProblem(
        **described, keep=keep, group=group, block_mask=block_mask is not None, aligned=aligned, tf32=tf32, dense_first=dense_first,
        dense_recent=dense_recent,
    )  # fmt: skip


def _is_aligned(tensor: Tensor) -> bool:
    strides = [stride for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if size > 1]
    apart = tensor.shape[2] <= 1 or tensor.stride(2) != 0
    # the offset and not the address: a fake tensor has no address, and torch allocates at multiples of 512 bytes. While tracing
    # neither may be read; the launcher then checks the address
    offset = 0 if torch.compiler.is_compiling() else tensor.storage_offset()
    return apart and not any(n * tensor.element_size() % 16 for n in (offset, *strides))


def parse_pattern(pattern: str) -> tuple[int, int]:
    """(N, M) of a pattern "N:M": of each M consecutive keys the N with the largest scores are kept."""
    found = re.fullmatch(r"([0-9]{1,2}):([0-9]{1,2})", pattern) if isinstance(pattern, str) else None
    if found is None:
        raise InvalidArgument(f"pattern is {pattern!r}; {_A_PATTERN}")
    keep, group = int(found[1]), int(found[2])
    if keep == group > 0:
        raise InvalidArgument(f"pattern is {pattern!r}, which keeps every key; {_A_PATTERN}, or use saccade.attention")
    if not 1 <= keep < group <= MAX_GROUP:
        raise InvalidArgument(f"pattern is {pattern!r}; {_A_PATTERN}")
    return keep, group


def check_dense(dense_first: int, dense_recent: int, group: int) -> tuple[int, int]:
    """(dense_first, dense_recent) as ints; whole groups, so that a query either prunes a group or keeps all of it."""
    return _whole_groups("dense_first", dense_first, group), _whole_groups("dense_recent", dense_recent, group)


def _whole_groups(name: str, given: int, group: int) -> int:
    count = check_count(name, given, 0)
    if count % group or count > MAX_DENSE:
        raise InvalidArgument(
            f"{name} is {count} with a pattern whose groups have {group} keys; it must be a multiple of {group} from 0 to {MAX_DENSE}"
        )
    return count


def check_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    lengths: Tensor | None,
    block_mask: Tensor | None,
    enable_gqa: bool,
) -> None:
    """Check the shapes of whole DTensors, as a part of a mask may broadcast where the whole does not: one row of two beside two of four."""
    if query.dim() != 4:
        raise InvalidArgument(f"query has shape {list(query.shape)}; it must be [B, H, Tq, D]")
    check_shapes(query, key, value, check_flag("enable_gqa", enable_gqa))
    check_mask(query, key, attn_mask, False, query.shape[1])
    check_lengths(query, lengths)
    _check_block_mask(query, key, block_mask)


def _check_block_mask(query: Tensor, key: Tensor, block_mask: Tensor | None) -> None:
    if block_mask is None:
        return
    if not isinstance(block_mask, Tensor):
        raise InvalidArgument(f"block_mask is a {type(block_mask).__name__}; it must be a bool torch.Tensor or None")
    if block_mask.dtype != torch.bool:
        raise InvalidArgument(f"block_mask has dtype {block_mask.dtype}; it must be bool (True = attend)")
    if block_mask.device != query.device:
        raise InvalidArgument(f"block_mask is on {block_mask.device}, query on {query.device}; they must be the same")
    full = (query.shape[0], query.shape[1], -(-query.shape[2] // BLOCK), -(-key.shape[2] // BLOCK))
    sizes = tuple(block_mask.shape)
    wrong = len(sizes) < 2 or sizes[-2:] != full[2:] or len(sizes) > 4
    if wrong or any(a not in (1, b) for a, b in zip(reversed(sizes[:-2]), reversed(full[:2]), strict=False)):
        raise InvalidArgument(
            f"block_mask has shape {list(sizes)}; with tiles of {BLOCK} queries and {BLOCK} keys it must be {list(full)}, "
            f"B and H broadcast"
        )
