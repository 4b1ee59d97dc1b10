"""The covering list of each operation and backend: choices that a run makes before it draws at random. In every configuration class, which the
launchers tell apart by head dim, length, kind of call and width of numbers, every two values of the other arguments come together in some entry.

Random features alone leave holes: they are drawn once for each family of seeds, and few families fall to one backend (docs/notes/endurance.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, UPPER_LEFT

Space = Mapping[str, tuple[Any, ...]]
Choice = tuple[str, Any]

# seeds of an entry, however many a family has: what is covered are kernels and the paths to them, not numbers
SEEDS = 2
# the tiles of every launcher: powers of two from 16 on. Head dims end at 256; no tile holds more than 128 tokens, and 256 stands for all beyond
TILES = (256, 128, 64, 32, 16)
ONE, MANY = "one", "many"
# of a mask or bias: all of its own, one row for all queries, shared by the batch, a bias for each window of an image
MASKS = ("none", "bool", "bool row", "bias", "bias row", "bias shared", "windows")
_FLAG = (False, True)
# of 2:4 and 1:2, which sparse tensor cores multiply, and the rest
PATTERNS = ("2:4", "1:2", "other")


@dataclass(frozen=True)
class Entry:
    """One entry of a covering list. number: its place there. choices: what is not drawn."""

    number: int
    choices: Mapping[str, Any]


_ATTENTION: Space = {"mask": MASKS, "dropout": _FLAG, "causal": _FLAG, "lengths": _FLAG, "grouped": _FLAG, "lse_grad": _FLAG}
_PACKED: Space = {"mask": MASKS[:-1], "dropout": _FLAG, "causal": _FLAG, "lengths": _FLAG, "lse_grad": _FLAG}
_VARLEN: Space = {
    "causal": (FULL, UPPER_LEFT, BOTTOM_RIGHT), "dropout": _FLAG, "bias": _FLAG, "grouped": _FLAG, "lse_grad": _FLAG, "packed": _FLAG,
    "cross": _FLAG, "tail": (0, 3), "window": (None, (4, 9)),
}  # fmt: skip
_RANKS: Space = {"keep": (7, 1, 1000), "sinks": (0, 4), "window": (0, 9), "ties": _FLAG}
_DYNAMIC: Space = {
    "causal": (True, False), "lengths": _FLAG, "documents": _FLAG, "add_scores": _FLAG, "grouped": _FLAG, "lse_grad": _FLAG, **_RANKS,
}  # fmt: skip
_CACHE: Space = {"add_scores": _FLAG, "grouped": _FLAG, **_RANKS}
_EXPIRY: Space = {"lengths": _FLAG, "documents": _FLAG, **_RANKS}
_NM_SPARSE: Space = {**_ATTENTION, "mask": MASKS[:-1], "blocks": _FLAG, "dense_first": (0, 1), "dense_recent": (0, 1)}

ARGUMENTS: dict[str, Space] = {
    "attention": _ATTENTION,
    "attention_qkvpacked": _PACKED,
    "attention_varlen": _VARLEN,
    "dynamic_mask_attention": _DYNAMIC,
    "dynamic_mask_cache": _CACHE,
    "expiry": _EXPIRY,
    "nm_sparse_attention": _NM_SPARSE,
}
_DIM, _LONGEST, _QUERIES = {"dim": TILES}, {"longest": TILES}, {"queries": (MANY, ONE)}
# what configurations may follow from, apart from the width of numbers
SIZES: dict[str, Space] = {
    "attention": {**_DIM, **_LONGEST, **_QUERIES},
    "attention_qkvpacked": {**_DIM, **_LONGEST},
    "attention_varlen": {**_DIM, **_LONGEST},
    "dynamic_mask_attention": {**_DIM, **_LONGEST, **_QUERIES},
    "dynamic_mask_cache": _DIM,
    "expiry": _LONGEST,
    "nm_sparse_attention": {**_DIM, "pattern": PATTERNS, **_LONGEST, **_QUERIES},
}
# backend -> sizes by which its launchers tell configurations apart, with the width; the others are arguments like any. Not named: no launcher of ours,
# or ("auto") those that are covered under their own names
_CLASSES: dict[str, tuple[str, ...]] = {
    "long": ("dim", "longest"),
    "short": ("dim", "longest", "queries"),
    "shared_bias": ("dim", "longest"),
    "volta": ("dim",),
    "volta_fp16": ("dim",),
    "ragged": ("dim", "longest"),
    "gather": ("dim", "queries"),
    "gather_cpp": ("dim", "queries"),
    "decode": ("dim",),
    "mma_sp": ("dim", "pattern"),
    "masked": ("dim", "pattern"),
}


def tile_of(extent: int) -> int:
    """The tile that holds a head dim or a number of tokens."""
    return min(max(16, 1 << (extent - 1).bit_length()), TILES[0])


def classes_of(operation: str, backend: str, widths: tuple[int, ...]) -> Space:
    """The axes of the configuration classes of a backend. widths: bytes of a number, of the dtypes that run."""
    if operation == "dynamic_mask_cache" or backend not in _CLASSES:
        return {}
    return {name: SIZES[operation][name] for name in _CLASSES[backend] if name in SIZES[operation]} | {"width": widths}


def arguments_of(operation: str, backend: str, widths: tuple[int, ...], dropout: bool) -> Space:
    """The arguments that vary in pairs within each class. dropout: whether a case may drop weights."""
    axes = classes_of(operation, backend, widths)
    sizes = {name: values for name, values in {**SIZES[operation], "width": widths}.items() if name not in axes}
    space = {**sizes, **ARGUMENTS[operation]}
    return space if dropout or "dropout" not in space else {**space, "dropout": (False,)}


def allowed(operation: str, first: Choice, second: Choice) -> bool:
    """Whether two choices may come together: what the public function refuses, and what means nothing, is no pair."""
    return frozenset((first, second)) not in _FORBIDDEN.get(operation, frozenset())


def _never(*pairs: tuple[Choice, Choice]) -> frozenset[frozenset[Choice]]:
    return frozenset(map(frozenset, pairs))


_CAUSAL_MASK = _never(*((("causal", True), ("mask", kind)) for kind in MASKS[1:]))
_FORBIDDEN = {
    "attention": _CAUSAL_MASK | _never((("lengths", True), ("mask", "windows"))),
    "attention_qkvpacked": _CAUSAL_MASK,
    # windows of queries and keys that differ in lengths are no kernel's
    "attention_varlen": _never(
        (("packed", True), ("grouped", True)),
        (("packed", True), ("cross", True)),
        (("window", (4, 9)), ("bias", True)),
        (("window", (4, 9)), ("cross", True)),
    ),
    "dynamic_mask_attention": _never((("window", 9), ("causal", False))),
    "nm_sparse_attention": _CAUSAL_MASK,
}


@functools.lru_cache(maxsize=64)
def entries(operation: str, backend: str, widths: tuple[int, ...], dropout: bool) -> tuple[Entry, ...]:
    """The covering list. Neighbours are of different classes, so that a run that ends early has seen most classes."""
    axes = classes_of(operation, backend, widths)
    rows = pairwise(operation, arguments_of(operation, backend, widths, dropout))
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    every = ({**cell, **row} for row in rows for cell in cells)
    return tuple(Entry(number, MappingProxyType(choices)) for number, choices in enumerate(every))


def pairwise(operation: str, space: Space) -> list[dict[str, Any]]:
    """Rows in which every two values of a space that may come together do: greedily, from a pair that no row has yet, one argument after another by
    the value that brings most new pairs."""
    left = dict.fromkeys(_pairs_of(operation, space))
    rows = []
    while left:
        row = dict(next(iter(left)))
        for name, values in space.items():
            if name not in row:
                fit = [(name, v) for v in values if all(allowed(operation, (name, v), chosen) for chosen in row.items())]
                news = [sum(_pair(choice, chosen) in left for chosen in row.items()) for choice in fit]
                row[name] = fit[news.index(max(news))][1]
        for first, second in itertools.combinations(row.items(), 2):
            left.pop(_pair(first, second), None)
        rows.append({name: row[name] for name in space})
    return rows


def _pairs_of(operation: str, space: Space) -> Iterator[tuple[Choice, Choice]]:
    for first, second in itertools.combinations(space, 2):
        for pair in itertools.product(((first, v) for v in space[first]), ((second, v) for v in space[second])):
            if allowed(operation, *pair):
                yield _pair(*pair)


def _pair(first: Choice, second: Choice) -> tuple[Choice, Choice]:
    return (first, second) if first[0] < second[0] else (second, first)
