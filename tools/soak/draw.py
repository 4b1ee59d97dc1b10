"""Random problems. One seed is one case: its family of seeds decides what kernels are compiled for (lengths, heads, features, dtype, and a few places
where tensors may lie), so that those compiled for one serve all of them; its stack of neighbouring seeds, which are judged together, decides how many
batch rows there are, which of the places it is, and how it is called; the seed itself decides the data and the lengths of sequences. An entry of the covering list fixes some of what would be drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, UPPER_LEFT
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.testing.cases import Case
from tools.soak import cover
from tools.soak.cache import APPEND, DRAFT, LEFT, RESET, RIGHT, TAKE, CacheCase, Step

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
_KEEP = (1, 2, 7, 16, 33, 1000)


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
    itself. entry: of the covering list, whose choices count whatever is drawn."""

    def __init__(self, operation: str, backend: str, seed: int, family: int, entry: cover.Entry | None = None):
        of_entry = "" if entry is None else f"entry {entry.number} "
        self.family = Random(f"{of_entry}{seed // family} {operation} {backend}")
        self.stack = Random(f"{of_entry}{stack_of(seed, family)} {operation} {backend} sizes")
        self.own = Random(f"{of_entry}{seed} {operation} {backend} lengths")
        self.choices: Mapping[str, Any] = {} if entry is None else entry.choices

    def given(self, name: str, drawn: Any) -> Any:
        """The choice of that name, or what was drawn where nothing chooses."""
        return self.choices.get(name, drawn)


def case_of(operation: str, draw: Draw, sizes: Sizes, dropout: bool) -> Any:
    """A case of an operation, as the operation's own check takes it. dropout: whether it may drop weights."""
    return _DRAWS[operation](draw, sizes, _dropout(draw) * dropout)


def _chance(draw: Random, probability: float) -> bool:
    return draw.random() < probability


def _length(draw: Random, sizes: Sizes, zero: float = _SELDOM) -> int:
    return 0 if _chance(draw, zero) else draw.choice(sizes.lengths)


def _dropout(draw: Draw) -> float:
    drawn = draw.family.choice((0.0, 0.0, 0.1, 0.5))
    wanted = draw.choices.get("dropout")
    return drawn if wanted is None else (drawn or 0.3) * wanted


def _heads(draw: Draw) -> tuple[int, int]:
    # kernels are compiled for the group, and many for the strides, which follow from the number of heads
    kv_heads = draw.family.randint(1, 3)
    group, wanted = draw.family.choice((1, 1, 2, 3)), draw.choices.get("grouped")
    group = group if wanted is None else max(group, 2) if wanted else 1
    return kv_heads * group, kv_heads


def _dim(draw: Draw, sizes: Sizes) -> int:
    """A head dim, of the tile that an entry names."""
    tile = draw.choices.get("dim")
    return draw.family.choice(sizes.dims if tile is None else [d for d in LARGE.dims if cover.tile_of(d) == tile])


def _window(draw: Draw, plain: bool, probability: float) -> tuple[int | None, int | None] | None:
    """A sliding window, seldom one that is open on a side. plain: whether the call has nothing that excludes one. An entry of a covering list has the
    window that it names: kernels that know none would decline it, and with it what else it covers."""
    widths = (0, 1, 4, 9, 33, 64, 300, None)
    drawn = (draw.family.choice(widths), draw.family.choice(widths)) if _chance(draw.family, probability) else None
    return draw.given("window", None if draw.choices else drawn) if plain else None


def _tokens(draw: Draw, sizes: Sizes, drawn: tuple[int, int]) -> tuple[int, int]:
    """Queries and keys: as they were drawn, or the longer of the tile that an entry names, and one or many queries."""
    tile = draw.choices.get("longest")
    if tile is None:
        if "queries" not in draw.choices:
            return drawn
        tile = draw.family.choice(cover.TILES)
    most = max(sizes.lengths[-1], 129)  # beyond the widest tile, a CPU has one length
    allowed = [n for n in LARGE.lengths if n <= most]
    longest = draw.family.choice([n for n in allowed if cover.tile_of(n) == tile and n > 1])
    if draw.choices.get("queries") == cover.ONE:
        return 1, longest
    shorter = draw.family.choice([n for n in allowed if 1 < n <= longest])
    return draw.family.choice(((longest, longest), (shorter, longest), (longest, shorter)))


def _batch(draw: Draw, sizes: Sizes, scores: int) -> int:
    """Batch rows. scores: of each, of which a case has at most `_MOST_SCORES`, or no fewer than one row; two or three for an entry, whose masks differ
    between rows."""
    if draw.choices:
        return draw.stack.choice((2, 3)) if 3 * scores <= _MOST_SCORES else 2
    most = max(1, min(sizes.batch, _MOST_SCORES // max(1, scores)))
    return 0 if _chance(draw.stack, _SELDOM) else draw.stack.randint(1, most)


def _mask(draw: Draw, sizes: tuple[int, int, int, int]) -> tuple[str | None, tuple[int, ...] | None]:
    """None, "bool" or "bias", and a shape that broadcasts to `sizes`."""
    wanted = draw.choices.get("mask")
    return _drawn_mask(draw.family, sizes) if wanted is None else _wanted_mask(wanted, sizes)


def _wanted_mask(wanted: str, sizes: tuple[int, int, int, int]) -> tuple[str | None, tuple[int, ...] | None]:
    batch, heads, q_len, kv_len = sizes
    if wanted == "none":
        return None, None
    shapes = {"row": (batch, 1, 1, kv_len), "shared": (1, heads, q_len, kv_len)}
    return wanted.partition(" ")[0].replace("windows", "bias"), shapes.get(wanted.partition(" ")[2], sizes)


def _drawn_mask(draw: Random, sizes: tuple[int, int, int, int]) -> tuple[str | None, tuple[int, ...] | None]:
    kind = draw.choice((None, None, "bool", "bias"))
    if kind is None:
        return None, None
    shape = tuple(1 if _chance(draw, _OFTEN) else n for n in sizes)
    return kind, shape[2:] if _chance(draw, 0.15) else shape


def _attention(draw: Draw, sizes: Sizes, dropout_p: float) -> Case:
    (heads, kv_heads), family = _heads(draw), draw.family
    q_len = 1 if _chance(family, 0.1) else _length(family, sizes)
    kv_len = q_len if _chance(family, 0.4) else _length(family, sizes)
    q_len, kv_len = _tokens(draw, sizes, (q_len, kv_len))
    return _featured(draw, sizes, dropout_p, (_batch(draw, sizes, heads * q_len * kv_len), heads, kv_heads, q_len, kv_len))


def _packed(draw: Draw, sizes: Sizes, dropout_p: float) -> Case:
    heads, length = draw.family.randint(1, 6), _length(draw.family, sizes)
    length = max(_tokens(draw, sizes, (length, length)))
    batch = _batch(draw, sizes, heads * length**2)
    return _featured(draw, sizes, dropout_p, (batch, heads, heads, length, length), packed=True)


def _featured(draw: Draw, sizes: Sizes, dropout_p: float, shape: tuple[int, int, int, int, int], packed: bool = False) -> Case:
    """A case of (B, H, Hkv, Tq, Tk) with whatever `attention` takes."""
    (batch, heads, _, q_len, kv_len), family = shape, draw.family
    kind, mask_shape = _mask(draw, (batch, heads, q_len, kv_len))
    by_window, images = draw.given("mask", "windows" if _chance(family, 0.5) else "") == "windows", draw.stack.randint(1, 3)
    windows = batch if kind == "bias" and not packed and batch > 1 and mask_shape and mask_shape[:-3] == (batch,) else 0
    if windows and by_window:  # the bias of each row becomes that of each window, in so many images
        shape = (batch * images, *shape[1:])
    else:
        windows = 0
    case = Case(
        "drawn", *shape, _dim(draw, sizes),
        is_causal=draw.given("causal", kind is None and _chance(family, _OFTEN)),
        mask="bool" if kind == "bool" else None,
        mask_shape=mask_shape if kind == "bool" else None,
        bias=mask_shape if kind == "bias" else None,
        lengths=draw.given("lengths", _chance(family, _OFTEN) and not windows), dropout_p=dropout_p,
        lse_grad=draw.given("lse_grad", _chance(family, 0.5)), packed=packed, windows=windows,
    )  # fmt: skip
    # drawn last, so that the other cases of a seed stay as they were
    return replace(case, window=_window(draw, kind is None, 0.1))


def _varlen(draw: Draw, sizes: Sizes, dropout_p: float) -> VarlenCase:
    (heads, kv_heads), family = _heads(draw), draw.family
    packed, cross = draw.given("packed", _chance(family, _OFTEN)), draw.given("cross", _chance(family, 0.5))
    heads = kv_heads if packed else heads
    # kernels are compiled for no length, only for the longest of a bucket
    longest = _tokens(draw, sizes, (_length(family, sizes, 0.1), _length(family, sizes, 0.1)))
    if draw.choices and not cross:
        longest = (max(longest),) * 2
    most = max(1, min(2 * sizes.batch, _MOST_SCORES // max(1, heads * max(longest) ** 2)))
    sequences = draw.stack.randint(1, most)
    q_lengths, k_lengths = (_lengths(draw.own, sizes, sequences, n) for n in longest)
    case = VarlenCase(
        "drawn", q_lengths, k_lengths if cross and not packed else None, heads, kv_heads, _dim(draw, sizes),
        causal=draw.given("causal", family.choice((FULL, FULL, UPPER_LEFT, BOTTOM_RIGHT))), dropout_p=dropout_p,
        bias=draw.given("bias", _chance(family, 0.2)), lse_grad=draw.given("lse_grad", _chance(family, 0.5)), packed=packed,
        tail=draw.given("tail", draw.stack.choice((0, 0, 3))),
    )  # fmt: skip
    return replace(case, window=_window(draw, not case.bias, 0.3))


def _lengths(draw: Random, sizes: Sizes, sequences: int, longest: int) -> tuple[int, ...]:
    """Lengths of sequences, at least one of them the longest."""
    allowed = [n for n in sizes.lengths if n <= longest]
    found = [draw.choice(allowed) if allowed and not _chance(draw, 0.1) else 0 for _ in range(sequences)]
    found[draw.randrange(sequences)] = longest
    return tuple(found)


def _dynamic_mask(draw: Draw, sizes: Sizes, dropout_p: float) -> DynamicMaskCase:
    (heads, kv_heads), family = _heads(draw), draw.family
    kv_len, is_causal = _length(family, sizes), draw.given("causal", _chance(family, 0.7))
    documents = draw.given("documents", _chance(family, _OFTEN))
    # the last query stands at the last key
    bounded = is_causal or documents
    q_len = kv_len if _chance(family, 0.5) else min(_length(family, sizes), kv_len if bounded else max(sizes.lengths))
    q_len, kv_len = _tokens(draw, sizes, (q_len, kv_len))
    q_len, kv_len = (min(q_len, kv_len), max(q_len, kv_len)) if bounded else (q_len, kv_len)
    batch = _batch(draw, sizes, heads * q_len * kv_len)
    return DynamicMaskCase(
        "drawn", batch, heads, kv_heads, q_len, kv_len, _dim(draw, sizes), draw.given("keep", family.choice(_KEEP)),
        is_causal=is_causal, lengths=draw.given("lengths", _chance(family, _OFTEN)), documents=documents,
        add_scores=draw.given("add_scores", _chance(family, 0.8)), ties=draw.given("ties", _chance(family, _OFTEN)),
        lse_grad=draw.given("lse_grad", _chance(family, 0.5)), sinks=draw.given("sinks", family.choice((0, 0, 1, 4))),
        window=draw.given("window", family.choice((0, 0, 1, 9)) if is_causal else 0),
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
        "drawn", own.randint(1, sizes.batch), heads, kv_heads, _dim(draw, sizes), draw.given("keep", family.choice(_KEEP)), tuple(steps),
        sinks=draw.given("sinks", family.choice((0, 1, 4)) * always), window=draw.given("window", family.choice((0, 1, 9)) * always),
        add_scores=draw.given("add_scores", _chance(family, 0.8)), ties=draw.given("ties", _chance(family, _OFTEN)),
    )  # fmt: skip


def _expiry(draw: Draw, sizes: Sizes, dropout_p: float) -> DynamicMaskCase:
    family, heads = draw.family, draw.stack.randint(1, 4)
    length = _length(family, sizes)
    length = max(_tokens(draw, sizes, (length, length)))
    return DynamicMaskCase(
        "drawn", _batch(draw, sizes, heads * length**2), heads, heads, length, length, 1, draw.given("keep", family.choice(_KEEP)),
        lengths=draw.given("lengths", _chance(family, _OFTEN)), documents=draw.given("documents", _chance(family, _OFTEN)),
        ties=draw.given("ties", _chance(family, 0.5)), sinks=draw.given("sinks", family.choice((0, 0, 1, 4))),
        window=draw.given("window", family.choice((0, 0, 1, 9))),
    )  # fmt: skip


def _nm_sparse(draw: Draw, sizes: Sizes, dropout_p: float) -> NMSparseCase:
    (heads, kv_heads), family = _heads(draw), draw.family
    q_len, kv_len = _tokens(draw, sizes, (_length(family, sizes), _length(family, sizes)))
    batch = _batch(draw, sizes, heads * q_len * kv_len)
    kind, shape = _mask(draw, (batch, heads, q_len, kv_len))
    group = family.randint(2, 16)
    other = f"{family.randint(1, group - 1)}:{group}"
    pattern = draw.given("pattern", family.choice(("2:4", "2:4", "1:2", "1:2", other)))
    if pattern == "other":
        pattern = "3:8" if other in cover.PATTERNS else other
    size = int(pattern.partition(":")[2])
    return NMSparseCase(
        "drawn", batch, heads, kv_heads, q_len, kv_len, _dim(draw, sizes),
        is_causal=draw.given("causal", kind is None and _chance(family, _OFTEN)),
        mask="bool" if kind == "bool" else None,
        mask_shape=shape if kind == "bool" else None,
        bias=shape if kind == "bias" else None,
        lengths=draw.given("lengths", _chance(family, _OFTEN)), dropout_p=dropout_p, lse_grad=draw.given("lse_grad", _chance(family, 0.5)),
        pattern=pattern, blocks=draw.given("blocks", _chance(family, 0.2) and min(q_len, kv_len) > 0),
        dense_first=draw.given("dense_first", family.choice((0, 0, 1, 2))) * size,
        dense_recent=draw.given("dense_recent", family.choice((0, 0, 1, 3))) * size,
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
