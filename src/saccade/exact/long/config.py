"""Shapes, limits and timed ranges of the kernels of sm_90 for long sequences. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass

# Between rounds of keys each block of backward stores dQ of all queries of a sequence: 69 MB at this length and D = 64
MAX_TOKENS, MAX_HEAD_DIM = 2048, 128
# With a window, a block of backward takes a segment of keys. A segment has so many rounds of 128 keys: the first of these numbers with which every
# multiprocessor gets a segment. The block continues behind its segment as far as a window reaches. With 512 keys on both sides of a query, this adds half
# of its work to a segment of four rounds, and an eighth to one of 16.
# If a sequence may be longer than the largest, blocks have equal shares of all rounds instead: segments of 16 rounds filled the
# multiprocessors badly. Backward at D = 128 and 8,192 tokens took 0.58 to 0.61 of its time with this and chunks passed (H200, docs/notes/long.md).
SEGMENTS = (16, 8, 4)
SHARES = 1  # in place of the number of rounds of a segment
MAX_TOKENS_IN_WINDOWS = 2**16  # the sources count up to 1,023 rounds
# Features with which the kernels were timed (docs/notes/long.md): one at a time, up to this D and from another on,
# and for dense rows up to so many tokens. `auto` takes no backend `long` for other calls, and the ragged family computes them by Triton. Read at each call.
TIMED_HEAD_DIM = 64
TIMED_FROM = {"grouped heads": 33, "masks": 33, "dropout": 1}
TIMED_TOKENS = {"grouped heads": 256, "masks": 128, "dropout": 512}
TIMED_WINDOWS = 128  # head dims up to which packed sequences with a window of any width take these kernels
TIMED_FORWARD = 256  # of a call without a gradient; 0.99 of torch's speed at 512 under dropout
# A bias that rows share: the range of D and of tokens in which it was timed. Backward has no memory for its tiles beyond D = 64.
TIMED_BIAS_HEAD_DIM, TIMED_BIAS_TOKENS = (16, 64), (128, 1024)
MAX_BIAS_HEAD_DIM = 64
# D rounded up, of forward with a bias that computes weights before maxima, and looks for these only where weights are large: 265 of 298 instructions of
# a tile, but some spilled registers: 0.97 of the time at 512 tokens, 1.01 at 256 (docs/notes/long.md). Read at each call.
LATE_MAXIMA = (32,)
# The most queries that share a key head there: each block of backward stores dQ of all of them between rounds of keys; 277 MB at D = 64
MAX_SHARING = 8192


def segment_rounds(rounds: int, longest: int, multiprocessors: int) -> int:
    """Rounds of a segment, or SHARES. rounds: of all sequences and key heads of a call. longest: those of the longest sequence."""
    if longest > SEGMENTS[0]:
        return SHARES
    return next((n for n in SEGMENTS if rounds >= n * multiprocessors), SEGMENTS[-1])


def most_tokens(window: bool) -> int:
    """The longest sequence of queries or keys, with or without a window."""
    return MAX_TOKENS_IN_WINDOWS if window else MAX_TOKENS


def timed(feature: str, head_dim: int) -> bool:
    """Whether the kernels were timed with a feature at a head dim."""
    return TIMED_FROM[feature] <= head_dim <= TIMED_HEAD_DIM


@dataclass(frozen=True)
class Sm90Config:
    """How a kernel is compiled.

    stages: chunks in shared memory at a time.
    registers: of a thread of each kind of warpgroup. Forward: those that compute, and the one that loads. Backward: the two that own keys, the one
        that computes dQ and the one that loads; 512 in all four.
    teams: of forward, pairs of warpgroups that share queries; each has memory of its own. Two in one block, and not two blocks: beside a
        warpgroup that loads they have 112 registers of a thread; 104 are too few for the products.
    """

    stages: int
    registers: tuple[int, ...]
    teams: int = 1


# (direction, D rounded up)
CONFIGS = {
    ("forward", 32): Sm90Config(4, (112, 32), teams=2),
    ("forward", 64): Sm90Config(4, (112, 32), teams=2),
    ("forward", 128): Sm90Config(4, (240, 24)),
    ("backward", 32): Sm90Config(4, (176, 88, 72)),
    ("backward", 64): Sm90Config(4, (192, 72, 56)),
    ("backward", 128): Sm90Config(2, (208, 64, 32)),
}
# of the gradient of a bias, whose warpgroups that compute hold its tile and the sums in registers
BIAS_GRADIENT = {32: Sm90Config(4, (240, 24)), 64: Sm90Config(2, (240, 24))}


def rounded(head_dim: int) -> int:
    """Columns of a tile of these kernels."""
    return 32 if head_dim <= 32 else 64 if head_dim <= 64 else 128
