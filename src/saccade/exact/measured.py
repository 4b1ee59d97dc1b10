"""Measured times of the kernels of `attention`: the nearest measured call decides what `auto` takes.

`measured.csv` has a line for each row of the committed tables in `benchmarks/results`; `python -m tools.choices` makes it. A call is
compared only with calls of its class: the same dtype class, direction, features, tile of tokens and tile of columns, called in the same way
(eager or captured). The nearest one is taken, by distances in problems, queries, keys and columns on logarithmic scales. The sizes of a
problem weigh `WEIGHT` times as much as the number of problems. Beyond `FARTHEST` no line counts, and the rule of the backend holds.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import NamedTuple

from saccade.engine.problem import DTYPE_NAMES, Problem
from saccade.engine.rule import RESULTS, Line, Rule, Source

FILE = Path(__file__).with_name("measured.csv")
# the order in which `auto` tries the backends that were timed
TIMED = ("long", "short", "sdpa")
# How far a call may be from a measured one, in quarters of an octave: in problems (B * H), and in queries, keys or columns, which weigh more
FARTHEST_PROBLEMS, FARTHEST, WEIGHT = 4, 1, 3
# times that differ by less are equal
NOISE = 0.03
# numbers (B * H * Tk * D) from which a call fills a GPU, so that more problems take as many times as long
FILLING = 2**23
# who launches a call; the tables have no row of the last but those that hold for any of them
WAYS = ("eager", "captured", "by Python")
# tokens and columns that share a tile of the short kernels
_TILES = (32, 64, 128, 256)
# from so many numbers on quarter k of an octave begins: 2^((k - 1/2) / 4), rounded up
_QUARTERS = tuple(-int(-(2 ** ((k - 0.5) / 4)) // 1) for k in range(1, 97))


class Measured(NamedTuple):
    """A line of the file. times: milliseconds by backend. order: the backends, in the order in which to take them. cuda: the time of
    `short` is that of its CUDA C++ kernels for sm_90."""

    arch: int
    table: str
    way: str
    direction: str
    problem: str
    cuda: bool
    times: tuple[tuple[str, float], ...]
    order: tuple[str, ...]


class Place(NamedTuple):
    """The place of a call within its class, in quarters of an octave."""

    problems: int
    queries: int
    keys: int
    columns: int


class Class(NamedTuple):
    """The facts that a call must share with a measured one."""

    arch: int
    direction: str
    itemsize: int
    features: str
    tokens: int
    columns: int
    filled: bool


def rule(problem: Problem, name: str) -> Rule | None:
    """Why `auto` takes a backend or leaves it, by the nearest measured call; None if no call near this one was measured on it."""
    found = nearest(problem, name)
    if found is None:
        return None
    # a backend is asked only after those before it were not taken
    rivals = [other for other in found.order if TIMED.index(other) >= TIMED.index(name)]
    times = dict(found.times)
    other = "sdpa" if rivals[0] == name else rivals[0]
    least, most = sorted((times[name], times[other]))
    by = "torch's function" if other == "sdpa" else f"`{other}`"
    said = f"the nearest measured call took {times[name]:.4g} ms, and {times[other]:.4g} ms by {by}"
    if most <= (1 + NOISE) * least:
        said += ", a difference within noise"
    if found.arch != problem.arch:
        said += f", on sm_{found.arch}, as sm_{problem.arch} was not measured"
    return Rule(said, Source(f"{RESULTS}/{found.table}.csv", (Line(found.problem),)), against=rivals[0] != name)


def nearest(problem: Problem, name: str) -> Measured | None:
    """The nearest measured call on a backend; None if there is none."""
    by_cuda = True if problem.arch == 90 and _short_takes_cuda(problem) else False  # noqa: SIM210
    # as plain tuples, which torch.compile hands to a function that it does not trace
    found = _nearest(name, tuple(class_of(problem)), tuple(place_of(problem)), way_of(problem), by_cuda)
    return None if found is None else Measured(*found)


def _short_takes_cuda(problem: Problem) -> bool:
    from saccade.exact.short.choice import takes_sm90

    return max(problem.q_len, problem.kv_len) <= 128 and takes_sm90(problem)


def _nearest(name: str, class_: tuple, place_: tuple, way: str, by_cuda: bool) -> tuple | None:
    wanted, place, lines = Class(*class_), Place(*place_), _lines()
    arch = _nearest_architecture(wanted.arch)
    near: list[tuple[int, int, bool, bool, int, int, Measured]] = []
    for sizes, candidates in lines.get((wanted._replace(arch=arch), by_cuda, way), {}).items():
        distances = [abs(a - b) for a, b in zip(place[1:], sizes, strict=True)]
        if max(distances) > FARTHEST:
            continue
        for there, fills, line in candidates:
            apart = abs(place.problems - there)
            # a call that fills a GPU represents all larger ones
            problems = 0 if fills and place.problems > there else apart
            # if several are equally near: the one with the nearer number of problems, then one that timed the backend, then one that
            # was called in the same way
            order = problems + WEIGHT * sum(distances), apart, name not in line.order, line.way != way, len(near)
            near.append((*order, problems, line))
    if not near:
        return None
    *_, problems, line = min(near)
    # the nearest one did not time the backend, and a farther one does not count
    return tuple(line) if problems <= FARTHEST_PROBLEMS and name in line.order else None


# its arguments are plain numbers and names, so a compiled graph keeps the answer; see `hardware.allows_tf32`
_nearest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def way_of(problem: Problem) -> str:
    """The launcher of a call: C++ ("eager"), a graph in which host time is not paid ("captured"), or Python. The tables
    have calls of the last kind only if they take longer on the device, whoever launches them ("any")."""
    if not problem.python_counts:
        return "captured"
    return "by Python" if problem.host_counts else "eager"


def class_of(problem: Problem) -> Class:
    """The class of a call."""
    longest = max(problem.q_len, problem.kv_len)
    # Beyond the short kernels there are two classes: tokens that fill tiles of 128, and all others.
    # The condition and not its value, which may be a symbol.
    filled = True if longest > 128 and problem.q_len % 128 == 0 and problem.kv_len % 128 == 0 else False  # noqa: SIM210
    direction = "fwd+bwd" if problem.needs_grad else "fwd"
    tokens = _tile(longest) if longest <= 128 else 256
    return Class(problem.arch, direction, problem.dtype.itemsize, features_of(problem), tokens, _tile(problem.head_dim), filled)


def place_of(problem: Problem) -> Place:
    """The place of a call in its class."""
    problems = problem.batch * problem.heads
    return Place(_quarter(problems), _quarter(problem.q_len), _quarter(problem.kv_len), _quarter(problem.head_dim))


def features_of(problem: Problem) -> str:
    """The features that a call has besides queries, keys and values."""
    form = "row" if problem.row_mask else "window" if problem.windows else "shared" if problem.mask_rows == 1 else "own"
    present = (
        (problem.q_len == 1, "one query"),
        (problem.heads != problem.kv_heads, "grouped"),
        (problem.mask == "bool", f"{form} mask"),
        (problem.mask == "bias", f"{form} bias{' gradient' if problem.bias_grad and problem.needs_grad else ''}"),
        (problem.dropout_p > 0, "dropout"),
        (problem.lengths, "lengths"),
        (problem.key_mask, "key mask"),
        (problem.is_causal, "causal"),
    )
    return ", ".join([name for there, name in present if there])


def described(text: str, direction: str) -> Problem:
    """The problem that a table describes, `attention(B=2 H=4 Tq=8 ... sm_90)`."""
    operation, _, rest = text.rstrip(")").partition("(")
    words = rest.split()
    sizes = {name: value for name, found, value in (word.partition("=") for word in words) if found}
    added = next((word for word in words if word.startswith(("mask[", "bias["))), "")
    shape = added[added.find("[") + 1 : added.find("]")]
    heads, head_dim = int(sizes["H"]), int(sizes["D"])
    return Problem(
        operation=operation,
        batch_shape=(int(sizes["B"]),),
        heads=heads,
        kv_heads=int(sizes.get("Hkv", heads)),
        q_len=int(sizes["Tq"]),
        kv_len=int(sizes["Tk"]),
        head_dim=head_dim,
        value_dim=int(sizes.get("Dv", head_dim)),
        dtype=next(dtype for dtype, name in DTYPE_NAMES.items() if name in words),
        device_type="cuda",
        device_index=0,
        arch=int(words[-1].removeprefix("sm_")),
        rank=4,
        last_strides=(1, 1, 1),
        scale=head_dim**-0.5,
        is_causal="causal" in words,
        dropout_p=float(sizes.get("dropout", 0)),
        mask={"m": "bool", "b": "bias"}.get(added[:1]),
        mask_shape=tuple(map(int, shape.split("x"))) if shape else None,
        bias_grad=added.endswith("+grad") and direction == "fwd+bwd",
        lengths="lengths" in words,
        key_mask="key_mask" in words,
        needs_grad=direction == "fwd+bwd",
        host_counts=False,
    )


class Candidate(NamedTuple):
    """A line as it is looked up. fills: whether its call fills a GPU."""

    problems: int
    fills: bool
    line: Measured


# by class, whether `short` is timed by its CUDA C++ kernels, and the way of calling: by sizes
Lines = dict[tuple[Class, bool, str], dict[tuple[int, ...], list[Candidate]]]


@functools.cache
def _lines() -> Lines:
    """The lines of the file, read when the first call on a GPU is planned."""
    found: Lines = {}
    known: dict[tuple[str, str], tuple[Class, Place, bool]] = {}
    for line in read():
        key = line.problem, line.direction
        if key not in known:
            problem = described(*key)
            numbers = problem.batch * problem.heads * problem.kv_len * problem.head_dim
            known[key] = class_of(problem), place_of(problem), numbers >= FILLING
        class_, (problems, *sizes), fills = known[key]
        for way in WAYS if line.way == "any" else (line.way,):
            alike = found.setdefault((class_, line.cuda, way), {})
            alike.setdefault(tuple(sizes), []).append(Candidate(problems, fills, line))
    return found


@functools.cache
def _nearest_architecture(arch: int) -> int:
    return min({key.arch for key, *_ in _lines()}, key=lambda measured: abs(measured - arch))


def read() -> list[Measured]:
    """The lines of the file."""
    with open(FILE, newline="", encoding="utf-8") as handle:
        return [_line(row) for row in csv.DictReader(handle)]


def _line(row: dict[str, str]) -> Measured:
    times = tuple((name, float(row[name])) for name in TIMED if row[name])
    arch = int(row["problem"].rstrip(")").rpartition("sm_")[2])
    cuda = row["cuda"] == "yes"
    return Measured(arch, row["table"], row["way"], row["direction"], row["problem"], cuda, times, tuple(row["order"].split(">")))


def _tile(extent: int) -> int:
    """The tile that holds an extent. Compared and not computed: an extent may be a symbol of a compiled graph."""
    for tile in _TILES:
        if extent <= tile:
            return tile
    return 2 * _TILES[-1]


def _quarter(extent: int) -> int:
    """The nearest quarter of an octave, found only by comparisons, as for `_tile`."""
    low, high = 0, len(_QUARTERS)
    while low < high:
        middle = (low + high) // 2
        if extent < _QUARTERS[middle]:
            high = middle
        else:
            low = middle + 1
    return low
