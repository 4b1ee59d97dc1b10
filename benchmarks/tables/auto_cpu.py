"""Times `saccade.attention` on a CPU against torch's function called directly: plain, masks, lengths and decoding, with one
thread.

Both compute the same result: for `lengths` torch gets the equivalent boolean mask. They take turns, so that a machine that slows
down slows both; medians with p20 and p80. Rows `auto` are `saccade.attention(...)`, rows `sdpa` are torch's function.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rows import Row, Writer
from torch import Tensor

import saccade
from saccade.exact.problem import describe_attention


class Case(NamedTuple):
    """One comparison; `feature` names what is added to plain attention."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    dim: int
    feature: str = ""
    kv_heads: int | None = None

    def __str__(self) -> str:
        heads = f"H={self.heads} Hkv={self.kv_heads}" if self.kv_heads not in (None, self.heads) else f"H={self.heads}"
        return f"B={self.batch} {heads} Tq={self.q_len} Tk={self.kv_len} D={self.dim} {self.feature}".rstrip()


ENCODER = [
    Case(b, h, s, s, 64, f)
    for b, h, s in ((2, 8, 64), (4, 12, 128), (2, 8, 512))
    for f in ("", "causal", "row mask", "mask", "bias", "lengths", "even lengths")
]
DECODING = [Case(4, 8, 1, t, 64, f, k) for t in (512, 4096) for k in (8, 2) for f in ("", "row mask", "lengths")]
CASES = [*ENCODER, *DECODING, Case(2, 8, 256, 256, 64, "row mask", 2), Case(2, 8, 256, 256, 64, "", 2)]  # fmt: skip
NAMES = ("auto", "sdpa")
TURNS, LEAST_SECONDS = 15, 0.4


def every_case() -> list[Case]:
    """The rows of the table."""
    return CASES


def case_of(row: Mapping[str, str]) -> str:
    """The name of a row's case: the sizes of its problem and what it adds."""
    call, _, feature = row["problem"].rpartition(")")
    return " ".join([*re.findall(r"\b(?:B|H|Hkv|Tq|Tk|D)=[0-9]+", call), feature.strip()]).rstrip()


def run(writer: Writer, repeat_ms: int) -> None:
    """Measure forward, and forward plus backward; for decoding only forward."""
    torch.set_num_threads(1)
    for case in writer.part.cases(every_case()):
        for direction in ("fwd", "fwd+bwd"):
            if direction == "fwd" or case.q_len > 1:
                _record(writer, case, direction)


def _record(writer: Writer, case: Case, direction: str) -> None:
    leaves, ours, theirs, options = calls(case)
    problem = describe_attention(
        *leaves[:3], options.get("attn_mask"), 0.0, case.feature == "causal", None, "enable_gqa" in options, options.get("lengths"),
        False, False, direction != "fwd",
    )  # fmt: skip
    dout = torch.randn_like(leaves[0])
    runs = {name: functools.partial(_run, call, direction, leaves, dout) for name, call in (("auto", ours), ("sdpa", theirs))}
    times = in_turns(writer.part.calls(runs))
    for name, found in times.items():
        p20, p50, p80 = (1e3 * found[int(q * (len(found) - 1))] for q in (0.2, 0.5, 0.8))
        named = f"{problem} {case.feature}".strip()
        writer.add(Row("auto_cpu", named, name, direction, "fp32", p50, p20, p80, note="in turns, one thread"))
    if len(times) == len(runs):
        print(
            f"x{ratio(times):.3f} {direction} {1e6 * statistics.median(times['sdpa']):.0f} us {problem} {case.feature}",
            flush=True,
        )


def ratio(times: dict[str, list[float]]) -> float:
    """torch's time over ours, using the least of each, because other processes can only add time."""
    return min(times["sdpa"]) / min(times["auto"])


def in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each run, sorted; the order changes from turn to turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for call in runs.values():
        call()
    ends, turn = time.perf_counter() + LEAST_SECONDS, 0
    while turn < TURNS or time.perf_counter() < ends:
        for name in sorted(runs, reverse=bool(turn % 2)):
            start = time.perf_counter()
            runs[name]()
            found[name].append(time.perf_counter() - start)
        turn += 1
    return {name: sorted(times) for name, times in found.items()}


def calls(case: Case) -> tuple[list[Tensor], Callable[[], Any], Callable[[], Any], dict[str, Any]]:
    """(leaves, our call, torch's, our options)."""
    kv_heads = case.kv_heads or case.heads
    shapes = ((case.q_len, case.heads), (case.kv_len, kv_heads), (case.kv_len, kv_heads))
    leaves = [torch.randn(case.batch, t, h, case.dim).transpose(1, 2).requires_grad_() for t, h in shapes]
    ours: dict[str, Any] = {} if kv_heads == case.heads else {"enable_gqa": True}
    theirs = dict(ours)
    if case.feature == "causal":
        ours["is_causal"] = theirs["is_causal"] = True
    elif case.feature.endswith("mask"):
        rows = 1 if case.feature == "row mask" else case.q_len
        ours["attn_mask"] = theirs["attn_mask"] = torch.rand(case.batch, 1, rows, case.kv_len) > 0.2
    elif case.feature == "bias":
        bias = torch.randn(1, case.heads, case.q_len, case.kv_len)
        ours["attn_mask"] = theirs["attn_mask"] = bias
    elif case.feature.endswith("lengths"):
        # half full on average, one row full; or all rows full, as most batches of one length are
        real = (
            torch.linspace(1, case.kv_len, case.batch).long()
            if case.feature == "lengths"
            else torch.full((case.batch,), case.kv_len)
        )
        ours["lengths"] = real
        theirs["attn_mask"] = (torch.arange(case.kv_len) < real[:, None])[:, None, None, :]
    return (
        leaves,
        functools.partial(saccade.attention, *leaves, **ours),
        functools.partial(F.scaled_dot_product_attention, *leaves, **theirs),
        ours,
    )


def _run(call: Callable[[], Any], direction: str, leaves: list[Tensor], dout: Tensor) -> None:
    if direction == "fwd":
        with torch.no_grad():
            call()
    else:
        torch.autograd.grad(call(), leaves, dout)
