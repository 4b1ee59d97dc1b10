"""Cases that are drawn, run and judged. Everything follows from the operation, the backend, the seeds, the size of their family and the device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.cli.soak.cache import CacheCase, check_cache
from saccade.cli.soak.draw import FAMILY, LARGE, SMALL, Draw, case_of
from saccade.cli.soak.layouts import arrangement, rearranged, with_lengths
from saccade.dynamic_mask.backends import DECODING
from saccade.dynamic_mask.testing import check as dynamic_mask
from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.dynamic_mask.testing.inputs import joined, make_dynamic_mask
from saccade.dynamic_mask.testing.ranking import kept_by_counting
from saccade.env import interpreting_triton
from saccade.errors import UnsupportedProblem
from saccade.exact.testing import check as exact
from saccade.exact.testing import varlen_check as varlen
from saccade.nm_sparse.testing import check as nm_sparse
from saccade.nm_sparse.testing.inputs import make_nm_sparse
from saccade.operations import OPERATIONS
from saccade.testing.inputs import make
from saccade.testing.judge import Result

# draws until a backend takes one
_TRIES = 12
# arrangements in memory that a family has: kernels are compiled for what divides strides and addresses, so that as many as there are cases would have
# most of them wait for a compiler
_PLACES = 4
# memory for the cases that are judged together, since two dozen processes share a GPU, and bytes for each score and each number of a head's query or
# key: three times what was alive at once on a CPU, since freed memory is not all of use again
_MOST_BYTES, _OF_SCORE, _OF_NUMBER = 1e9, 250, 170
# how often a case is tried again, after so many seconds, where other processes have taken the memory of the GPU
_PAUSES = (1.0, 3.0, 9.0)
# dynamic masks in plain torch count keys on the host, for which a call waits, so that it cannot be captured
_READS_NUMBERS = ("reference", "gather_torch")
_HALF, _PLAIN = (torch.bfloat16, torch.float16), (torch.float32,)
Judged = list[list[Result] | None]


class Outcome(NamedTuple):
    """What became of a case. ratio: its worst error over its budget. said: the drawn case and, of a failure, what is wrong; empty where the backend
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


class Setting(NamedTuple):
    """How the cases of a stack are run, apart from their numbers. way: "plain", "stream" (one of its own) or "graph" (captured and replayed). places:
    the seed of where their tensors lie."""

    dtype: torch.dtype
    device: torch.device
    backend: str
    seeds: tuple[int, ...]
    way: str
    places: str

    def draws(self, operation: str) -> list[Random]:
        """Random numbers for the data of each case."""
        return [Random(f"{seed} {operation}") for seed in self.seeds]

    @property
    def source(self) -> torch.Generator | None:
        """What draws the data on a GPU, where it is used."""
        return torch.Generator(self.device) if self.device.type == "cuda" else None


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


def run_case(operation: str, backend: str, seed: int, device: torch.device, family: int = FAMILY) -> Outcome:
    """Draw and judge one case."""
    return run_stack(operation, backend, (seed,), device, family)[0]


def run_stack(operation: str, backend: str, seeds: tuple[int, ...], device: torch.device, family: int = FAMILY) -> list[Outcome]:
    """Draw and judge cases of one stack; any error but a refusal of the backend is a failure. family: how many seeds share their kernels."""
    began = time.perf_counter()
    draws = [Draw(operation, backend, seed, family) for seed in seeds]
    for _ in range(_TRIES):
        drawn = [_drawn(operation, backend, draw, seed // family, device) for draw, seed in zip(draws, seeds, strict=True)]
        cases, (_, dtype, way, places) = [case for case, *_ in drawn], drawn[0]
        outcomes: list[Outcome] = []
        for some in _chunks(cases, seeds):
            setting = Setting(dtype, device, backend, tuple(seeds[i] for i in some), way, places)
            found = _of_chunk(operation, [cases[i] for i in some], setting, began)
            if found is None:  # and so would the others
                break
            outcomes += found
            began = time.perf_counter()
            if outcomes[-1].fatal:
                break
        if outcomes:
            return outcomes
    return [Outcome(operation, backend, seed, False, True, seconds=(time.perf_counter() - began) / len(seeds)) for seed in seeds]


def _drawn(operation: str, backend: str, draw: Draw, family: int, device: torch.device) -> tuple[Any, torch.dtype, str, str]:
    """(case, dtype, way, places): all but what the case draws from `draw.own` is the same for all cases of a stack."""
    ours = _by_us(operation, backend)
    case = case_of(operation, draw, LARGE if device.type == "cuda" else SMALL, ours)
    dtype = draw.family.choice(_dtypes(device, ours))
    way = _way(draw.stack, device, case, backend)
    return case, dtype, way, f"{family} {operation} {backend} {draw.stack.randrange(_PLACES)}"


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
    if isinstance(case, CacheCase) and way == "graph":  # a life of a cache is no single call
        return "stream"
    if isinstance(case, DynamicMaskCase) and backend in _READS_NUMBERS and way == "graph":
        return "stream"
    # a graph draws another Philox key than the oracle, and its warming up needs a gradient for every input
    dropped = hasattr(case, "dropout_p") and case.dropout_p > 0
    return "stream" if way == "graph" and dropped else way


def _results(operation: str, cases: list[Any], setting: Setting) -> Judged | None:
    """Judged results of each case, None for one that the backend refuses; None where it refuses them with and without the log-sum-exp."""
    for lse in (True, False):
        try:
            with _stream(setting):
                return _CHECKS[operation](cases, setting, lse, setting.draws(operation))
        except UnsupportedProblem:
            continue
    return None


def _stream(setting: Setting) -> AbstractContextManager[Any]:
    if setting.way != "stream":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(setting.device))


def _attention(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    case, inputs = cases[0], _placed(make, cases[0], setting, draws)
    run = _replayed(exact.public_call(case, setting.backend, lse), setting)
    return [*exact.check_calls(case, inputs, run, setting.backend, setting.seeds, lse)]


def _placed(made: Callable[..., Any], case: Any, setting: Setting, draws: list[Random]) -> list[Any]:
    """The inputs of each case of a stack, made by `made` and then laid out elsewhere."""
    dtype, device, source = setting.dtype, setting.device, setting.source
    plain = [made(case, dtype, device, seed, source=source) for seed in setting.seeds]
    return [rearranged(with_lengths(x, draw, case.kv_len), Random(setting.places)) for x, draw in zip(plain, draws, strict=True)]


def _varlen(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    dtype, device, backend, seeds, _, places = setting
    source, longest = setting.source, (max(cases[0].q_lengths), max(cases[0].keys))  # of all of them
    problems = [varlen.padded(case, dtype, device, seed, longest, source) for case, seed in zip(cases, seeds, strict=True)]
    return varlen.check_calls(cases, problems, backend, seeds, lse, lambda: arrangement(Random(places)))


def _nm_sparse(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    case, inputs = cases[0], _placed(make_nm_sparse, cases[0], setting, draws)
    run = _replayed(nm_sparse.public_call(case, setting.backend, lse), setting)
    return [*nm_sparse.check_calls(case, inputs, run, setting.backend, setting.seeds, lse)]


def _dynamic_mask(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    case, inputs = cases[0], _placed(make_dynamic_mask, cases[0], setting, draws)
    if setting.backend == "auto" and any(y.stride(-1) != 1 for y in (inputs[0].query, inputs[0].key, inputs[0].value)):
        setting = setting._replace(way="plain")  # plain torch takes them, which reads numbers
    run: Callable[[Any], Any] = dynamic_mask.public_call(case, setting.backend, lse)
    if case.documents and case.batch == 1 and Random(setting.places).random() < 0.5:
        run = _ByOffsets(case, setting.backend, lse)
    return [*dynamic_mask.check_calls(case, inputs, _replayed(run, setting), lse)]


class _ByOffsets:
    """The public function with `cu_seqlens` in place of document_ids, of one batch row."""

    def __init__(self, case: Any, backend: str, lse: bool) -> None:
        self.case, self.backend, self.lse = case, backend, lse
        self.known: dict[Tensor, Tensor] = {}

    def read_again(self, x: Any) -> None:
        """Write the offsets of documents that are other ones now where a captured call reads them."""
        if x.document_ids in self.known:
            self.known[x.document_ids].copy_(self._offsets(x.document_ids))

    def _offsets(self, document_ids: Tensor) -> Tensor:
        counts = torch.bincount(document_ids[0].long(), minlength=4)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        # made once: counting waits for the device, which a call that is captured may not
        ends = self.known.get(x.document_ids)
        if ends is None:
            ends = self.known[x.document_ids] = self._offsets(x.document_ids)
        case = self.case
        result = saccade.dynamic_mask_attention(
            x.query, x.key, x.value, x.key_scores, keep=case.keep, is_causal=case.is_causal, lengths=x.lengths, cu_seqlens=ends,
            sinks=case.sinks, window=case.window, add_scores=case.add_scores, enable_gqa=case.heads != case.kv_heads,
            return_lse=self.lse, backend=self.backend,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, None)


def _cache(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    ((case,), (seed,)) = cases, setting.seeds
    return [check_cache(case, setting.dtype, setting.device, setting.backend, seed)]


def _expiry(cases: list[Any], setting: Setting, lse: bool, draws: list[Random]) -> Judged:
    """`expiry` keeps exactly the keys that counting keeps: it is a matter of ranks, so there is no budget."""
    case, dtype, device, source = cases[0], setting.dtype, setting.device, setting.source
    made = [make_dynamic_mask(case, dtype, device, seed, source) for seed in setting.seeds]
    calls = [with_lengths(x, draw, case.kv_len) for x, draw in zip(made, draws, strict=True)]
    tables = [
        saccade.expiry(
            x.key_scores, case.keep, lengths=x.lengths, document_ids=x.document_ids, sinks=case.sinks, window=case.window
        )
        for x in calls
    ]
    unlike = [t.shape != x.key_scores.shape or t.dtype != torch.int32 for t, x in zip(tables, calls, strict=True)]
    if any(unlike):
        return [
            [_kept_otherwise((), f"shape {list(t.shape)}, {t.dtype}")] if odd else None
            for t, odd in zip(tables, unlike, strict=True)
        ]
    whole, x = joined(case, calls)
    wanted = kept_by_counting(x.key_scores, case.keep, case.q_len, True, x.lengths, x.document_ids, case.sinks, case.window)
    table, at = torch.cat(tables), torch.arange(case.kv_len, device=device)
    found = (at <= at[:, None]) & (at[:, None] < table[:, :, None, :])
    if x.lengths is not None:
        # a padded key is in nobody's interval, so this changes nothing where the table is right
        wanted = wanted & (at < x.lengths[:, None, None, None])
    differing = (found != wanted).unflatten(0, (whole.calls, case.batch))
    wrong = differing.flatten(1).any(1).tolist()
    return [
        [_kept_otherwise(tuple(differing[i].nonzero()[0].tolist()), "not the keys that counting keeps")]
        if wrong[i]
        else [Result("expiry", 0.0, 0.0, 0.0, 0.0, True)]
        for i in range(whole.calls)
    ]


def _kept_otherwise(where: tuple[int, ...], reason: str) -> Result:
    return Result("expiry", math.inf, 0.0, math.inf, math.inf, False, where, reason)


def _replayed(run: Callable[[Any], Any], setting: Setting) -> Callable[[Any], Any]:
    """`run` captured with its backward in a CUDA graph by the first call and replayed by all, where that is the way of the stack."""
    if setting.way != "graph":
        return run
    captured: list[tuple[Any, Any]] = []

    def replay(x: Any) -> tuple[Tensor, Tensor | None]:
        names = _differentiated(x)
        if not captured:
            captured.append((_captured(run, x, names), x))
        graph, first = captured[0]
        for field in dataclasses.fields(x):
            fixed = getattr(first, field.name)
            if isinstance(fixed, Tensor) and field.name not in names and field.name in ("mask", "lengths", "document_ids"):
                fixed.copy_(getattr(x, field.name))
        if isinstance(run, _ByOffsets):
            run.read_again(first)
        # a graph's outputs and gradients lie where those of the next replay will: a product with 1 takes them elsewhere
        found = [y * 1 for y in graph(*(getattr(x, n) * 1 for n in names))]
        return found[0], found[1] if len(found) > 1 else None

    return replay


def _differentiated(x: Any) -> list[str]:
    """The fields of inputs that take a gradient and are not views of another."""
    packed = getattr(x, "qkv", None) is not None
    named = [f.name for f in dataclasses.fields(x) if f.name == "qkv" or not (packed and f.name in ("query", "key", "value"))]
    return [n for n in named if isinstance(y := getattr(x, n), Tensor) and y.requires_grad]


def _captured(run: Callable[[Any], Any], x: Any, names: list[str]) -> Callable[..., Any]:
    """A function of the named fields of `x`, whose others it reads from where they are."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(y for y in run(dataclasses.replace(x, **dict(zip(names, tensors, strict=True)))) if y is not None)

    # rows that share memory cannot be written to, which replaying with other numbers does
    given = (getattr(x, n).detach() for n in names)
    leaves = ((y.clone() if 0 in y.stride() else y).requires_grad_() for y in given)
    with _nothing_freed():
        return torch.cuda.make_graphed_callables(call, tuple(leaves), allow_unused_input=True)


@contextlib.contextmanager
def _nothing_freed() -> Iterator[None]:
    """A context in which no garbage is collected: a graph of an earlier case that is freed while another is captured ends the capture."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_CHECKS: dict[str, Callable[[list[Any], Setting, bool, list[Random]], Judged]] = {
    "attention": _attention,
    "attention_qkvpacked": _attention,
    "attention_varlen": _varlen,
    "dynamic_mask_attention": _dynamic_mask,
    "dynamic_mask_cache": _cache,
    "expiry": _expiry,
    "nm_sparse_attention": _nm_sparse,
}
