"""The facts that the launches of a ragged call share: its sizes, and the sequences that each launch takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.window import has_window
from saccade.exact.long import sm90
from saccade.exact.long.choice import kind_of
from saccade.exact.long.config import Sm90Config
from saccade.exact.ragged import choice
from saccade.exact.ragged.config import (
    FASTER_IN_CHUNKS,
    MOST_AT_ONCE,
    MOST_EAGER,
    TILES,
    LongConfig,
    TileConfig,
    fits,
    in_token_tiles,
    small_tile,
)
from saccade.exact.ragged.plan import every_sequence, make_plan, plan_of
from saccade.exact.ragged.sm80 import Sm80Config
from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.triton import pow2
from saccade.native.described import FIXED, KEYS, LONGEST_K, LONGEST_Q, QUERIES, SEQUENCES
from saccade.native.recording import is_recorded, refuse, varying


class Configs(NamedTuple):
    """Shapes of launches in place of the measured ones, for measuring: by (direction, tile), by direction and
    by tile. sm80, sm90: None for only Triton; sm90 by direction."""

    tiles: dict[tuple[str, int], TileConfig]
    long: dict[str, LongConfig]
    sm80: dict[int, Sm80Config] | None
    sm90: dict[str, Sm90Config] | None


MEASURED = Configs({}, {}, {}, {})

# Numbers (sequences x heads x longest x D, D a power of two) up to which a call is one launch, padded to its longest sequence. A larger call makes
# lists by length and takes a launch for each. If host time counts, five launches cost a model more of it than the padding costs the device. Before
# token tiles took such batches, MiniLM was measured with 256 sentences: a step had 0.72 of the speed of stock's padded attention with all these
# launches, and 0.90 with one.
ONE_LAUNCH = 2**26
# The same where padding costs more than that. While a CUDA graph is captured, host time does not count. With a bias, the launch has no smaller tile
# and reads the bias of the whole tile.
ONE_PADDED = 2**23


@dataclass(frozen=True)
class Bucket:
    """The sequences of one launch. tile: 0 for the long form. small: a second, smaller tile for those that it holds, or 0.
    dense: there is no list, and unread tensors take its place. longest: the most tokens of a sequence; 0: as many as in the call.
    any_size: the most tokens of a sequence in any batch for which the launch is planned, so that C++ may replay it; 0: it is for this batch."""

    tile: int
    members: Tensor
    count: Tensor
    dense: bool = False
    small: int = 0
    longest: int = 0
    any_size: int = 0

    @property
    def listed(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.dense else (self.members, self.count)


_VARYING = (QUERIES, KEYS, SEQUENCES, QUERIES, LONGEST_Q, LONGEST_K)


class RaggedCall:
    """A call whose tensors have dense last dimensions."""

    def __init__(self, args: VarlenArgs, configs: Configs = MEASURED):
        query, key = args.query, args.key
        self.args, self.configs = args, configs
        self.dense = query.dim() == 4
        self.heads, self.head_dim = query.shape[1], query.shape[-1]
        self.group = self.heads // max(1, key.shape[1])  # of an empty call
        self.block_d = pow2(max(16, self.head_dim))
        self.size, self.arch = query.element_size(), arch_of(query.device)
        self.sequences = query.shape[0] if self.dense else args.cu_seqlens_q.shape[0] - 1
        self.total_q = self.sequences * args.max_q if self.dense else query.shape[0]
        self.total_k = self.sequences * args.max_k if self.dense else key.shape[0]
        # of lse: `[B, H, Tq]`, or `[H, T]`
        self.lse_batch_stride = self.heads * args.max_q if self.dense else 0
        self.lse_stride = args.max_q if self.dense else self.total_q
        self.precision = "ieee" if query.dtype == torch.float32 else "tf32"
        self.masks_dims = self.block_d != self.head_dim
        self.featured = args.bias is not None or args.seed is not None

    @property
    def eager_tokens(self) -> bool:
        """Whether the call is of a kind that token tiles compute outside of CUDA graphs, up to MOST_EAGER numbers."""
        args = self.args
        packed = not self.dense and args.cu_seqlens_q is args.cu_seqlens_k and self.total_q == self.total_k
        taken = in_token_tiles(self.size, self.block_d, max(args.max_q, args.max_k), args.bias is not None)
        return taken and packed and args.query.is_cuda and self.sequences <= MOST_AT_ONCE

    @property
    def varying(self) -> tuple[int, ...]:
        numbers = self.total_q, self.total_k, self.sequences, self.lse_stride, self.args.max_q, self.args.max_k
        return varying(numbers, (FIXED,) * len(numbers) if self.dense else _VARYING)

    def buckets(self) -> list[Bucket]:
        """The launches that the lengths may need, the longest first, because it takes the most time."""
        args = self.args
        if self.dense:
            return [Bucket(0, args.query, args.query, True)]
        longest = max(args.max_q, args.max_k)
        at_once = self.at_once()
        if at_once is not None:
            return [at_once]
        any_size, found = self.any_size(False), []
        plan = (make_plan if any_size else plan_of)(args.cu_seqlens_q, args.cu_seqlens_k)
        for i, below in enumerate((0, *TILES)):
            if i == 0 or longest > below:
                most = TILES[i] if i < len(TILES) else 0
                tile = most if self.in_a_tile(most) else 0
                found.append(
                    Bucket(tile, plan.members[i], plan.counts[i : i + 1], longest=most, any_size=min(most or any_size, any_size))
                )
        return found[::-1]

    def in_a_tile(self, most: int) -> bool:
        """Whether the bucket of so many tokens is computed in whole tiles; 0: the one beyond them."""
        if not most or not fits(most, self.block_d, self.size, self.arch):
            return False
        if most < FASTER_IN_CHUNKS or self.configs.sm90 is None:
            return True
        return not (choice.prefers(kind_of(self.args), "forward", "backward") and sm90.takes(self.args))

    def at_once(self) -> Bucket | None:
        """All sequences of a small packed batch, in the smallest tile that holds the longest or in the long form."""
        longest = max(self.args.max_q, self.args.max_k)
        captured = self.args.query.is_cuda and torch.cuda.is_current_stream_capturing()
        most = ONE_PADDED if captured or self.args.bias is not None else ONE_LAUNCH
        if self.eager_tokens and not captured:
            return None
        if self.sequences * self.heads * longest * self.block_d > most:
            return None
        every = every_sequence(self.args.cu_seqlens_q, self.sequences)
        tile = next((t for t in TILES if t >= longest and fits(t, self.block_d, self.size, self.arch)), 0)
        # a gradient of the bias is summed in tiles of one size
        small = small_tile(tile) if self.args.bias is None else 0
        return None if every is None else Bucket(tile, *every, small=small, any_size=self.any_size(tile > 0))

    def any_size(self, in_a_tile: bool) -> int:
        """The most tokens of a sequence in any batch for which a recorded call is planned; 0 if it is planned for its own batch."""
        if not is_recorded():
            return 0
        # a map of a single token does not hold the distance to the next
        mapped = in_a_tile or min(self.total_q, self.total_k) > 1
        if self.args.bias is not None or self.sequences > MOST_AT_ONCE or not mapped or not self.is_one_kind():
            refuse()
            return 0
        return max(16, pow2(max(self.args.max_q, self.args.max_k)))

    def is_one_kind(self) -> bool:
        """Whether all batches that C++ does not tell apart have the same kernels: those of as many queries up to a power of two."""
        most = pow2(self.args.max_q)
        taken = {sm90.takes(self.args._replace(max_q=longest)) for longest in (most // 2 + 1, most)}
        works = MOST_AT_ONCE * self.heads * -(-most // sm90.BLOCK_ROWS)
        return taken == {False} or (taken == {True} and works < 2**31)

    def within(self, bucket: Bucket) -> RaggedCall:
        """The call with the longest lengths of a launch. Dropout still counts its draws by the most keys of the complete call."""
        if not bucket.longest:
            return self
        names = ("max_q", "max_k") if self.args.seed is None else ("max_q",)
        # C++ distinguishes batches by the powers of two that hold these, so another batch of the kind has the same powers
        (most,) = varying((bucket.longest,), (FIXED,))
        longest: dict[str, Any] = {name: most for name in names if getattr(self.args, name) > most}
        return RaggedCall(self.args._replace(**longest), self.configs)

    def most(self, each: int) -> int:
        """Programs that the processors hold."""
        return each * multiprocessors(self.args.query.device)


def limits(args: VarlenArgs) -> tuple[int, int, int, bool, bool]:
    """(width, most, most sequences, by tokens, by lists): a batch is one launch while its rows times width are at most `most`. A larger one goes by
    lists; `by lists` says whether this one does. Rows are its tokens, or those of all sequences padded to the longest."""
    call = RaggedCall(args)
    if has_window(args):
        return 1, 2**31, MOST_AT_ONCE, True, False
    by_tokens = call.eager_tokens
    width, most = call.heads * call.block_d, MOST_EAGER if by_tokens else ONE_LAUNCH
    rows = call.total_q if by_tokens else call.sequences * max(args.max_q, args.max_k)
    return width, most, MOST_AT_ONCE, by_tokens, rows * width > most
