"""Cases that are drawn, run and judged. Everything follows from the operation, the backend, the seeds, the size of their family and the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, NamedTuple

import torch

from saccade.dynamic_mask.backends import DECODING
from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.env import interpreting_triton
from saccade.errors import UnsupportedProblem
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.operations import OPERATIONS
from tools.soak.cache import CacheCase
from tools.soak.checks import CHECKS, Judged, Setting
from tools.soak.cover import Entry, entries
from tools.soak.draw import FAMILY, LARGE, SMALL, Draw, case_of

# draws until a backend takes one, and the same for an entry of the covering list, where less is drawn
_TRIES, _TRIES_OF_ENTRY = 12, 8
# arrangements in memory that a family has: kernels are compiled for what divides strides and addresses, so that as many as there are cases would have
# most of them wait for a compiler
_PLACES = 4
# an entry of the covering list must not be lost because its backend declines each of so few
_PLACES_OF_ENTRIES = 64
# memory for the cases that are judged together, since two dozen processes share a GPU, and bytes for each score and each number of a head's query or
# key: three times what was alive at once on a CPU, since freed memory is not all of use again
_MOST_BYTES, _OF_SCORE, _OF_NUMBER = 1e9, 250, 170
# how often a case is tried again, after so many seconds, where other processes have taken the memory of the GPU
_PAUSES = (1.0, 3.0, 9.0)
# dynamic masks in plain torch count keys on the host, for which a call waits, so that it cannot be captured
_READS_NUMBERS = ("reference", "gather_torch")
# a cache is no single call, and the check of `expiry` reads its table on the host
_NOT_CAPTURED = ("dynamic_mask_cache", "expiry")
# packed calls of the others read lengths on the host, or `auto` may take one that does
_CAPTURED_PACKED = ("ragged", "flash")
_HALF, _PLAIN = (torch.bfloat16, torch.float16), (torch.float32,)


class Outcome(NamedTuple):
    """The outcome of a case. ratio: its worst error over its budget. said: the drawn case and, of a failure, what is wrong; empty where the backend
    took no draw. fatal: the process is of no use after the failure, since its device is lost, or torch's random numbers belong to a capture that
    failed. together: how many cases from this seed on it took to find the failure."""

    operation: str
    backend: str
    seed: int
    ran: bool
    ok: bool
    ratio: float = 0.0
    said: str = ""
    seconds: float = 0.0
    fatal: bool = False
    together: int = 1


def pairs() -> list[tuple[str, str]]:
    """Every operation with every backend, and with "auto"."""
    found = []
    for name, operation in OPERATIONS.items():
        backends = [b.name for b in operation.backends]
        found += [(name, backend) for backend in (*backends, "auto")]
        if name == "attention":
            found += [("attention_qkvpacked", backend) for backend in (*backends, "auto")]
    # nothing but the backend's own selection is judged there, and the check asks it by name
    found.remove(("nm_sparse_attention", "auto"))
    attending = [name for op, name in found if op == "dynamic_mask_attention"]
    caches = [("dynamic_mask_cache", name) for name in (*(b.name for b in DECODING), *attending)]
    return [*found, *caches, ("expiry", "auto")]


def is_slow(operation: str, backend: str) -> bool:
    """Whether a case takes a hundred times as long as others: the life of a cache, and the loop over queries that defines dynamic masks."""
    return operation == "dynamic_mask_cache" or (operation, backend) == ("dynamic_mask_attention", "reference")


def covering(operation: str, backend: str, device: torch.device) -> tuple[Entry, ...]:
    """The covering list of a backend on a device, in the widths that run there."""
    ours = _by_us(operation, backend)
    return entries(operation, backend, tuple(sorted({dtype.itemsize for dtype in _dtypes(device, ours)})), ours)


def run_case(operation: str, backend: str, seed: int, device: torch.device, family: int = FAMILY) -> Outcome:
    """Draw and judge one case."""
    return run_stack(operation, backend, (seed,), device, family)[0]


def run_stack(
    operation: str, backend: str, seeds: tuple[int, ...], device: torch.device, family: int = FAMILY, entry: Entry | None = None
) -> list[Outcome]:
    """Draw and judge cases of one stack; any error but a refusal of the backend is a failure. family: how many seeds share their kernels. entry: of
    the covering list."""
    began = time.perf_counter()
    draws = [Draw(operation, backend, seed, family, entry) for seed in seeds]
    for _ in range(_TRIES if entry is None else _TRIES_OF_ENTRY):
        drawn = [_drawn(operation, backend, draw, seed // family, device) for draw, seed in zip(draws, seeds, strict=True)]
        cases, (_, dtype, way, places) = [case for case, *_ in drawn], drawn[0]
        outcomes: list[Outcome] = []
        for some in _chunks(cases, seeds):
            setting = Setting(dtype, device, backend, tuple(seeds[i] for i in some), way, places)
            found = _of_chunk(operation, [cases[i] for i in some], setting, began)
            if found is None and not outcomes and operation != "attention_varlen":  # and so would the others
                break
            outcomes += found or [Outcome(operation, backend, seeds[i], False, True) for i in some]
            began = time.perf_counter()
            if outcomes[-1].fatal:
                break
        if any(outcome.ran for outcome in outcomes):
            return outcomes
    return [Outcome(operation, backend, seed, False, True, seconds=(time.perf_counter() - began) / len(seeds)) for seed in seeds]


def _drawn(operation: str, backend: str, draw: Draw, family: int, device: torch.device) -> tuple[Any, torch.dtype, str, str]:
    """(case, dtype, way, places): all but what the case draws from `draw.own` is the same for all cases of a stack."""
    ours = _by_us(operation, backend)
    case = case_of(operation, draw, LARGE if device.type == "cuda" else SMALL, ours)
    dtypes = _dtypes(device, ours)
    dtype = draw.family.choice([d for d in dtypes if d.itemsize == draw.choices.get("width", d.itemsize)])
    way = _way(draw.stack, device, case, backend)
    way = "stream" if way == "graph" and operation in _NOT_CAPTURED else way
    place = draw.stack.randrange(_PLACES_OF_ENTRIES if draw.choices else _PLACES)
    return case, dtype, way, f"{family} {operation} {backend} {place}"


def _chunks(cases: Sequence[Any], seeds: Sequence[int]) -> Iterator[range]:
    """Places of the cases that are judged together."""
    case = cases[0]
    if isinstance(case, CacheCase):
        size = 1
    else:
        rows = len(case.q_lengths) if hasattr(case, "q_lengths") else case.batch
        lengths = (max(case.q_lengths), max(case.keys)) if hasattr(case, "q_lengths") else (case.q_len, case.kv_len)
        each = _OF_SCORE * lengths[0] * lengths[1] + _OF_NUMBER * sum(lengths) * case.head_dim
        size = max(1, int(_MOST_BYTES / max(1, rows * case.heads * each)))
    for first in range(0, len(seeds), size):
        yield range(first, min(first + size, len(seeds)))


def _of_chunk(operation: str, cases: list[Any], setting: Setting, began: float) -> list[Outcome] | None:
    """The outcomes of cases that are judged together, one that tells an error for all of them; None where the backend refuses the first."""
    backend, seeds = setting.backend, setting.seeds
    try:
        results = _with_memory(lambda: _results(operation, cases, setting), setting.way)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises on a problem that it took is what is looked for)
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:400]} in {_said(cases[0], setting)}"
        fatal = isinstance(error, torch.AcceleratorError) or setting.way == "graph"
        return [
            Outcome(operation, backend, seeds[0], True, False, math.inf, wrong, time.perf_counter() - began, fatal, len(seeds))
        ]
    if results is None:
        return None
    seconds = (time.perf_counter() - began) / len(seeds)
    outcomes = []
    for case, seed, found in zip(cases, seeds, results, strict=True):
        said = _said(case, setting)
        if found is None:
            outcomes.append(Outcome(operation, backend, seed, False, True, seconds=seconds))
            continue
        wrong = "; ".join(" ".join(str(r).split()) for r in found if not r.ok)
        if wrong and setting.way == "graph":  # what a graph does after others of its cases is repeated by these
            first, said = seeds[0], f"{wrong} of seed {seed} in {said}"
            outcomes.append(
                Outcome(
                    operation, backend, first, True, False, max(r.ratio for r in found), said, seconds, together=seed - first + 1
                )
            )
            continue
        ratio = max((r.ratio for r in found), default=0.0)
        outcomes.append(
            Outcome(operation, backend, seed, True, not wrong, ratio, f"{wrong} in {said}" if wrong else said, seconds)
        )
    return outcomes


def _with_memory(run: Callable[[], Judged | None], way: str) -> Judged | None:
    """`run`, again after a while where it found no memory. A capture that failed spoils the process, and is not tried again."""
    for pause in () if way == "graph" else _PAUSES:
        try:
            return run()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(pause)
    return run()


def _said(case: Any, setting: Setting) -> str:
    return f"{case!r} {setting.dtype} {setting.way}"


def _dtypes(device: torch.device, ours: bool) -> tuple[torch.dtype, ...]:
    # as in `saccade verify`: bfloat16 is wrong in Triton's interpreter, and torch's own CPU kernels are not tested in half precision
    if device.type == "cuda":
        return (*_HALF, *_PLAIN)
    return (torch.float16, *_PLAIN) if ours and interpreting_triton() else _PLAIN


def _by_us(operation: str, backend: str) -> bool:
    """Whether no kernel of torch's own runs, which "auto" may take: the oracle cannot repeat its draw of dropout."""
    table = OPERATIONS[
        "attention" if operation == "attention_qkvpacked" else operation if operation in OPERATIONS else "attention"
    ]
    return backend != "auto" and not any(b.own_dropout for b in table.backends if b.name == backend)


def _way(draw: Random, device: torch.device, case: Any, backend: str) -> str:
    if device.type != "cuda":
        return "plain"
    # fewer captures, each of which warms up three times and collects garbage first
    way = draw.choice((*["plain"] * 5, "stream", "stream", "graph"))
    if isinstance(case, DynamicMaskCase) and backend in _READS_NUMBERS and way == "graph":
        return "stream"
    if isinstance(case, VarlenCase) and backend not in _CAPTURED_PACKED and way == "graph":
        return "stream"
    # a graph draws another Philox key than the oracle, and its warming up needs a gradient for every input
    dropped = hasattr(case, "dropout_p") and case.dropout_p > 0
    return "stream" if way == "graph" and dropped else way


def _results(operation: str, cases: list[Any], setting: Setting) -> Judged | None:
    """Judged results of each case, None for one that the backend refuses; None where it refuses them with and without the log-sum-exp."""
    for lse in (True, False):
        try:
            with _stream(setting):
                return CHECKS[operation](cases, setting, lse, setting.draws(operation))
        except UnsupportedProblem:
            continue
    return None


def _stream(setting: Setting) -> AbstractContextManager[Any]:
    if setting.way != "stream":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(setting.device))
