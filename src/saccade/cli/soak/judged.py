"""One case: drawn, run and judged. Everything follows from the operation, the backend, the seed, the size of its family and the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator
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
from saccade.dynamic_mask.reference import kept
from saccade.dynamic_mask.testing import check as dynamic_mask
from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.env import interpreting_triton
from saccade.errors import UnsupportedProblem
from saccade.exact.testing import check as exact
from saccade.exact.testing.varlen_check import check_varlen
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
# dynamic masks in plain torch count keys on the host, for which a call waits, so that it cannot be captured
_READS_NUMBERS = ("reference", "gather_torch")
_HALF, _PLAIN = (torch.bfloat16, torch.float16), (torch.float32,)


class Outcome(NamedTuple):
    """What became of a case. ratio: its worst error over its budget. said: the drawn case and, of a failure, what is wrong; empty where the backend
    took no draw. fatal: the process is of no use after the failure, since its device is lost, or torch's random numbers belong to a capture that
    failed."""

    operation: str
    backend: str
    seed: int
    ran: bool
    ok: bool
    ratio: float = 0.0
    said: str = ""
    seconds: float = 0.0
    fatal: bool = False


class Setting(NamedTuple):
    """How a case is run, apart from its numbers. way: "plain", "stream" (one of its own) or "graph" (captured and replayed). places: the seed of where
    its tensors lie."""

    dtype: torch.dtype
    device: torch.device
    backend: str
    seed: int
    way: str
    draw: Random
    places: str


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


def run_case(operation: str, backend: str, seed: int, device: torch.device, family: int = FAMILY) -> Outcome:
    """Draw and judge one case; any error but a refusal of the backend is a failure. family: how many seeds share their kernels."""
    began = time.perf_counter()
    drawn = Draw(operation, backend, seed, family)
    for _ in range(_TRIES):
        ours = _by_us(operation, backend)
        case = case_of(operation, drawn, LARGE if device.type == "cuda" else SMALL, ours)
        dtype = drawn.family.choice(_dtypes(device, ours))
        draw = Random(f"{seed} {operation}")
        places = f"{seed // family} {operation} {backend} {drawn.own.randrange(_PLACES)}"
        setting = Setting(dtype, device, backend, seed, _way(draw, device, case, backend), draw, places)
        said = f"{case!r} {dtype} {setting.way}"
        try:
            results = _results(operation, case, setting)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises on a problem that it took is what is looked for)
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            fatal = isinstance(error, torch.AcceleratorError) or setting.way == "graph"
            return Outcome(
                operation, backend, seed, True, False, math.inf, f"{wrong} in {said}", time.perf_counter() - began, fatal
            )
        if results is not None:
            wrong = "; ".join(" ".join(str(r).split()) for r in results if not r.ok)
            ratio = max((r.ratio for r in results), default=0.0)
            said = f"{wrong} in {said}" if wrong else said
            return Outcome(operation, backend, seed, True, not wrong, ratio, said, time.perf_counter() - began)
    return Outcome(operation, backend, seed, False, True, seconds=time.perf_counter() - began)


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


def _results(operation: str, case: Any, setting: Setting) -> list[Result] | None:
    """Judged results; None where the backend refuses the case with and without the log-sum-exp."""
    state = setting.draw.getstate()
    for lse in (True, False):
        setting.draw.setstate(state)
        try:
            with _stream(setting):
                return _CHECKS[operation](case, setting, lse)
        except UnsupportedProblem:
            continue
    return None


def _stream(setting: Setting) -> AbstractContextManager[Any]:
    if setting.way != "stream":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(setting.device))


def _attention(case: Any, setting: Setting, lse: bool) -> list[Result]:
    dtype, device, backend, seed, _, draw, places = setting
    inputs = rearranged(with_lengths(make(case, dtype, device, seed), draw, case.kv_len), Random(places))
    run = _replayed(exact.public_call(case, backend, lse), setting)
    return exact.check_attention(case, dtype, device, backend, seed, lse, run, inputs)


def _varlen(case: Any, setting: Setting, lse: bool) -> list[Result]:
    dtype, device, backend, seed, _, _, places = setting
    return check_varlen(case, dtype, device, backend, seed, lse, arrangement(Random(places)))


def _nm_sparse(case: Any, setting: Setting, lse: bool) -> list[Result]:
    dtype, device, backend, seed, _, draw, places = setting
    inputs = rearranged(with_lengths(make_nm_sparse(case, dtype, device, seed), draw, case.kv_len), Random(places))
    run = _replayed(nm_sparse.public_call(case, backend, lse), setting)
    return nm_sparse.check_nm_sparse(case, dtype, device, backend, seed, lse, inputs, run)


def _dynamic_mask(case: Any, setting: Setting, lse: bool) -> list[Result]:
    dtype, device, backend, seed, _, draw, places = setting
    inputs = rearranged(with_lengths(make_dynamic_mask(case, dtype, device, seed), draw, case.kv_len), Random(places))
    run = dynamic_mask.public_call(case, backend, lse)
    if case.documents and case.batch == 1 and draw.random() < 0.5:
        run = _by_offsets(case, backend, lse)
    return dynamic_mask.check_dynamic_mask(case, dtype, device, backend, seed, lse, inputs, _replayed(run, setting))


def _by_offsets(case: Any, backend: str, lse: bool) -> Callable[[Any], tuple[Tensor, Tensor | None]]:
    """The public function with `cu_seqlens` in place of document_ids."""

    # made once: counting waits for the device, which a call that is captured may not
    @functools.cache
    def offsets(document_ids: Tensor) -> Tensor:
        counts = torch.bincount(document_ids[0].long(), minlength=4)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    def run(x: Any) -> tuple[Tensor, Tensor | None]:
        ends = offsets(x.document_ids)
        result = saccade.dynamic_mask_attention(
            x.query, x.key, x.value, x.key_scores, keep=case.keep, is_causal=case.is_causal, lengths=x.lengths, cu_seqlens=ends,
            sinks=case.sinks, window=case.window, add_scores=case.add_scores, enable_gqa=case.heads != case.kv_heads, return_lse=lse,
            backend=backend,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result, None)

    return run


def _cache(case: Any, setting: Setting, lse: bool) -> list[Result]:
    return check_cache(case, setting.dtype, setting.device, setting.backend, setting.seed)


def _expiry(case: Any, setting: Setting, lse: bool) -> list[Result]:
    """`expiry` keeps exactly the keys that brute force keeps: it is a matter of ranks, so there is no budget."""
    x = with_lengths(make_dynamic_mask(case, setting.dtype, setting.device, setting.seed), setting.draw, case.kv_len)
    table = saccade.expiry(
        x.key_scores, case.keep, lengths=x.lengths, document_ids=x.document_ids, sinks=case.sinks, window=case.window
    )
    rule = (case.keep, case.q_len, True, x.lengths, x.document_ids, case.sinks, case.window)
    wanted = kept(x.key_scores, *rule)
    at = torch.arange(case.kv_len, device=setting.device)
    found = (at <= at[:, None]) & (at[:, None] < table[:, :, None, :])
    if x.lengths is not None:
        # a padded key is in nobody's interval, so this changes nothing where the table is right
        wanted = wanted & (at < x.lengths[:, None, None, None])
    differing = (found != wanted).nonzero()
    if table.shape != x.key_scores.shape or table.dtype != torch.int32 or len(differing):
        where = tuple(differing[0].tolist()) if len(differing) else ()
        return [Result("expiry", math.inf, 0.0, math.inf, math.inf, False, where, "not the keys that brute force keeps")]
    return [Result("expiry", 0.0, 0.0, 0.0, 0.0, True)]


def _replayed(run: Callable[[Any], Any], setting: Setting) -> Callable[[Any], Any]:
    """`run` captured with its backward in a CUDA graph and replayed, where that is the way of the case."""
    if setting.way != "graph":
        return run

    def replay(x: Any) -> tuple[Tensor, Tensor | None]:
        packed = getattr(x, "qkv", None) is not None
        named = [f.name for f in dataclasses.fields(x) if f.name == "qkv" or not (packed and f.name in ("query", "key", "value"))]
        names = [n for n in named if isinstance(y := getattr(x, n), Tensor) and y.requires_grad]

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(y for y in run(dataclasses.replace(x, **dict(zip(names, tensors, strict=True)))) if y is not None)

        leaves = tuple(getattr(x, n) for n in names)
        with _nothing_freed():
            found: Any = torch.cuda.make_graphed_callables(call, leaves, allow_unused_input=True)(*leaves)
        return found[0], found[1] if len(found) > 1 else None

    return replay


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


_CHECKS: dict[str, Callable[[Any, Setting, bool], list[Result]]] = {
    "attention": _attention,
    "attention_qkvpacked": _attention,
    "attention_varlen": _varlen,
    "dynamic_mask_attention": _dynamic_mask,
    "dynamic_mask_cache": _cache,
    "expiry": _expiry,
    "nm_sparse_attention": _nm_sparse,
}
