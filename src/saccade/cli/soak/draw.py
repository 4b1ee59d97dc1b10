"""Random problems. One seed is one case: its family of seeds decides what kernels are compiled for (lengths, heads, features, dtype, and a few places
where tensors may lie), so that those compiled for one serve all of them; its stack of neighbouring seeds, which are judged together, decides how many
batch rows there are, which of the places it is, and how it is called; the seed itself decides the data and the lengths of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from saccade.cli.soak.cache import APPEND, DRAFT, LEFT, RESET, RIGHT, TAKE, CacheCase, Step
from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, UPPER_LEFT
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.testing.cases import Case

# seeds of a family, unless it is told otherwise: few suit a CPU, where hardly anything is compiled
FAMILY = 8
# stacks of a family, if it has as many seeds
_STACKS = 32
# around the tiles of 16 to 128, and primes between them
_LENGTHS = (1, 2, 3, 5, 13, 16, 17, 31, 32, 33, 47, 64, 65)
_LONG = (100, 127, 128, 129, 160, 197, 255, 256, 257, 384)
_DIMS = (1, 8, 16, 24, 32, 33, 48, 64)
_WIDE = (80, 96, 128, 160, 256)
# the oracle computes in float64 with some twenty tensors of scores, which would leave little time for other cases
_MOST_SCORES = 2**20
_SELDOM, _OFTEN = 0.04, 0.3


@dataclass(frozen=True)
class Sizes:
    """How large problems may be; a CPU, and Triton's interpreter even more, get small ones."""

    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    batch: int


SMALL = Sizes(_LENGTHS, _DIMS, 3)
LARGE = Sizes((*_LENGTHS, *_LONG), (*_DIMS, *_WIDE), 9)


def stack_of(seed: int, family: int) -> int:
    """The stack of a seed, where a family has so many seeds."""
    return seed // family * _STACKS + seed % family * _STACKS // max(family, _STACKS) if family > _STACKS else seed


class Draw:
    """Random numbers for a case. family: of what all cases of a family share; stack: of what those of a stack share; own: of what each has for
    itself."""

    def __init__(self, operation: str, backend: str, seed: int, family: int):
        self.family = Random(f"{seed // family} {operation} {backend}")
        self.stack = Random(f"{stack_of(seed, family)} {operation} {backend} sizes")
        self.own = Random(f"{seed} {operation} {backend} lengths")


def case_of(operation: str, draw: Draw, sizes: Sizes, dropout: bool) -> Any:
    """A case of an operation, as the operation's own check takes it. dropout: whether it may drop weights."""
    return _DRAWS[operation](draw, sizes, draw.family.choice((0.0, 0.0, 0.1, 0.5)) * dropout)


def _chance(draw: Random, probability: float) -> bool:
    return draw.random() < probability


def _length(draw: Random, sizes: Sizes, zero: float = _SELDOM) -> int:
    return 0 if _chance(draw, zero) else draw.choice(sizes.lengths)


def _heads(draw: Draw) -> tuple[int, int]:
    # kernels are compiled for the group, and many for the strides, which follow from the number of heads
    kv_heads = draw.family.randint(1, 3)
    return kv_heads * draw.family.choice((1, 1, 2, 3)), kv_heads


def _batch(draw: Draw, sizes: Sizes, scores: int) -> int:
    """Batch rows. scores: of each, of which a case has at most `_MOST_SCORES`, or no fewer than one row."""
    most = max(1, min(sizes.batch, _MOST_SCORES // max(1, scores)))
    return 0 if _chance(draw.stack, _SELDOM) else draw.stack.randint(1, most)


def _mask(draw: Random, sizes: tuple[int, int, int, int]) -> tuple[str | None, tuple[int, ...] | None]:
    """None, "bool" or "bias", and a shape that broadcasts to `sizes`."""
    kind = draw.choice((None, None, "bool", "bias"))
    if kind is None:
        return None, None
    shape = tuple(1 if _chance(draw, _OFTEN) else n for n in sizes)
    return kind, shape[2:] if _chance(draw, 0.15) else shape


def _attention(draw: Draw, sizes: Sizes, dropout_p: float) -> Case:
    (heads, kv_heads), family = _heads(draw), draw.family
    q_len = 1 if _chance(family, 0.1) else _length(family, sizes)
    kv_len = q_len if _chance(family, 0.4) else _length(family, sizes)
    return _featured(draw, sizes, dropout_p, (_batch(draw, sizes, heads * q_len * kv_len), heads, kv_heads, q_len, kv_len))


def _packed(draw: Draw, sizes: Sizes, dropout_p: float) -> Case:
    heads, length = draw.family.randint(1, 6), _length(draw.family, sizes)
    batch = _batch(draw, sizes, heads * length**2)
    return _featured(draw, sizes, dropout_p, (batch, heads, heads, length, length), packed=True)


def _featured(draw: Draw, sizes: Sizes, dropout_p: float, shape: tuple[int, int, int, int, int], packed: bool = False) -> Case:
    """A case of (B, H, Hkv, Tq, Tk) with whatever `attention` takes."""
    (batch, heads, _, q_len, kv_len), family = shape, draw.family
    kind, mask_shape = _mask(family, (batch, heads, q_len, kv_len))
    by_window, images = _chance(family, 0.5), draw.stack.randint(1, 3)
    windows = batch if kind == "bias" and not packed and batch > 1 and mask_shape and mask_shape[:-3] == (batch,) else 0
    if windows and by_window:  # the bias of each row becomes that of each window, in so many images
        shape = (batch * images, *shape[1:])
    else:
        windows = 0
    return Case(
        "drawn", *shape, family.choice(sizes.dims),
        is_causal=kind is None and _chance(family, _OFTEN),
        mask="bool" if kind == "bool" else None,
        mask_shape=mask_shape if kind == "bool" else None,
        bias=mask_shape if kind == "bias" else None,
        lengths=_chance(family, _OFTEN) and not windows, dropout_p=dropout_p, lse_grad=_chance(family, 0.5), packed=packed,
        windows=windows,
    )  # fmt: skip


def _varlen(draw: Draw, sizes: Sizes, dropout_p: float) -> VarlenCase:
    (heads, kv_heads), family = _heads(draw), draw.family
    packed, cross = _chance(family, _OFTEN), _chance(family, 0.5)
    heads = kv_heads if packed else heads
    # kernels are compiled for no length, only for the longest of a bucket
    longest = _length(family, sizes, 0.1), _length(family, sizes, 0.1)
    most = max(1, min(2 * sizes.batch, _MOST_SCORES // max(1, heads * max(longest) ** 2)))
    sequences = draw.stack.randint(1, most)
    q_lengths, k_lengths = (_lengths(draw.own, sizes, sequences, n) for n in longest)
    return VarlenCase(
        "drawn", q_lengths, k_lengths if cross and not packed else None, heads, kv_heads, family.choice(sizes.dims),
        causal=family.choice((FULL, FULL, UPPER_LEFT, BOTTOM_RIGHT)), dropout_p=dropout_p, bias=_chance(family, 0.2),
        lse_grad=_chance(family, 0.5), packed=packed, tail=draw.stack.choice((0, 0, 3)),
    )  # fmt: skip


def _lengths(draw: Random, sizes: Sizes, sequences: int, longest: int) -> tuple[int, ...]:
    """Lengths of sequences, at least one of them the longest."""
    allowed = [n for n in sizes.lengths if n <= longest]
    found = [draw.choice(allowed) if allowed and not _chance(draw, 0.1) else 0 for _ in range(sequences)]
    found[draw.randrange(sequences)] = longest
    return tuple(found)


def _dynamic_mask(draw: Draw, sizes: Sizes, dropout_p: float) -> DynamicMaskCase:
    (heads, kv_heads), family = _heads(draw), draw.family
    kv_len, is_causal, documents = _length(family, sizes), _chance(family, 0.7), _chance(family, _OFTEN)
    # the last query stands at the last key
    bounded = is_causal or documents
    q_len = kv_len if _chance(family, 0.5) else min(_length(family, sizes), kv_len if bounded else max(sizes.lengths))
    batch = _batch(draw, sizes, heads * q_len * kv_len)
    return DynamicMaskCase(
        "drawn", batch, heads, kv_heads, q_len, kv_len, family.choice(sizes.dims), family.choice((1, 2, 7, 16, 33, 1000)),
        is_causal=is_causal, lengths=_chance(family, _OFTEN), documents=documents, add_scores=_chance(family, 0.8),
        ties=_chance(family, _OFTEN), lse_grad=_chance(family, 0.5), sinks=family.choice((0, 0, 1, 4)),
        window=family.choice((0, 0, 1, 9)) if is_causal else 0,
    )  # fmt: skip


def _cache(draw: Draw, sizes: Sizes, dropout_p: float) -> CacheCase:
    (heads, kv_heads), own, family = _heads(draw), draw.own, draw.family
    kinds = (APPEND, APPEND, APPEND, RIGHT, LEFT, DRAFT, RESET, TAKE)
    steps = [Step(own.choice((APPEND, RIGHT, LEFT)), own.choice((1, 3, 17, 40)))]  # a prompt
    for _ in range(own.randint(4, 16)):
        kind = own.choice(kinds)
        steps.append(Step(kind, 0 if kind in (RESET, TAKE) else own.choice((1, 1, 1, 2, 5, 8, 9))))
    always = _chance(family, 0.5)
    return CacheCase(
        "drawn", own.randint(1, sizes.batch), heads, kv_heads, family.choice(sizes.dims), family.choice((1, 2, 7, 16, 33, 1000)), tuple(steps),
        sinks=family.choice((0, 1, 4)) * always, window=family.choice((0, 1, 9)) * always, add_scores=_chance(family, 0.8),
        ties=_chance(family, _OFTEN),
    )  # fmt: skip


def _expiry(draw: Draw, sizes: Sizes, dropout_p: float) -> DynamicMaskCase:
    family, heads = draw.family, draw.stack.randint(1, 4)
    length = _length(family, sizes)
    return DynamicMaskCase(
        "drawn", _batch(draw, sizes, heads * length**2), heads, heads, length, length, 1, family.choice((1, 2, 7, 16, 33, 1000)),
        lengths=_chance(family, _OFTEN), documents=_chance(family, _OFTEN), ties=_chance(family, 0.5),
        sinks=family.choice((0, 0, 1, 4)), window=family.choice((0, 0, 1, 9)),
    )  # fmt: skip


def _nm_sparse(draw: Draw, sizes: Sizes, dropout_p: float) -> NMSparseCase:
    (heads, kv_heads), family = _heads(draw), draw.family
    q_len, kv_len = _length(family, sizes), _length(family, sizes)
    batch = _batch(draw, sizes, heads * q_len * kv_len)
    kind, shape = _mask(family, (batch, heads, q_len, kv_len))
    group = family.randint(2, 16)
    pattern = family.choice(("2:4", "2:4", "1:2", "1:2", f"{family.randint(1, group - 1)}:{group}"))
    size = int(pattern.partition(":")[2])
    return NMSparseCase(
        "drawn", batch, heads, kv_heads, q_len, kv_len, family.choice(sizes.dims),
        is_causal=kind is None and _chance(family, _OFTEN),
        mask="bool" if kind == "bool" else None,
        mask_shape=shape if kind == "bool" else None,
        bias=shape if kind == "bias" else None,
        lengths=_chance(family, _OFTEN), dropout_p=dropout_p, lse_grad=_chance(family, 0.5), pattern=pattern,
        blocks=_chance(family, 0.2) and min(q_len, kv_len) > 0,
        dense_first=family.choice((0, 0, 1, 2)) * size, dense_recent=family.choice((0, 0, 1, 3)) * size,
    )  # fmt: skip


_DRAWS: dict[str, Callable[[Draw, Sizes, float], Any]] = {
    "attention": _attention,
    "attention_qkvpacked": _packed,
    "attention_varlen": _varlen,
    "dynamic_mask_attention": _dynamic_mask,
    "dynamic_mask_cache": _cache,
    "expiry": _expiry,
    "nm_sparse_attention": _nm_sparse,
}
