"""Judges whether a result is within its error budget against float64; the rule is in `saccade.exact.testing.check`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.testing.baseline import Baseline, Outputs
from saccade.testing.cases import Case

FACTOR, GRADIENT_FACTOR, RMS_LIMIT = 2.0, 3.0, 0.005
FEWEST_FOR_RMS = 8  # numbers of a result
_FLOAT32_ROUNDING = 2.0**-24


BEYOND = "largest error over budget"  # a reason of `Result`


@dataclass(frozen=True)
class Result:
    """How far one tensor is from float64. ratio: error over budget. rms: relative root mean square. worst: its index."""

    name: str
    error: float
    budget: float
    ratio: float
    rms: float
    ok: bool
    worst: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"FAILED ({self.reason})"
        return (
            f"{self.name:>5}: error {self.error:.3e}, budget {self.budget:.3e}, ratio {self.ratio:.2f}, rms {self.rms:.2e}, "
            f"worst at {self.worst}: {verdict}"
        )


def report(case: Case, results: list[Result]) -> str:
    """Readable lines, one for each tensor."""
    return "\n".join([case.name, *(f"  {r}" for r in results)])


def judge(name: str, actual: Tensor, oracle: Tensor, baseline: Tensor, magnitude: float, dtype: torch.dtype) -> Result:
    """Compare one tensor with its budget. magnitude: the largest sum of absolute terms behind one of its numbers."""
    magnitudes = torch.tensor([magnitude], dtype=torch.float64, device=oracle.device)
    return judge_all({name: actual}, {name: oracle}, Baseline({name: baseline[None]}, {name: magnitudes}, {}), dtype)[0]


def judge_all(actual: Outputs, oracle: Outputs, baseline: Baseline, dtype: torch.dtype) -> list[Result]:
    """Compare the tensors of one call with their budgets, by name. An output that the baseline has must be there, with its dtype."""
    return judge_calls(actual, oracle, baseline, dtype, 1)[0]


def judge_calls(actual: Outputs, oracle: Outputs, baseline: Baseline, dtype: torch.dtype, calls: int) -> list[list[Result]]:
    """The results of each of several calls whose tensors are joined in their first dimension."""
    unfit = {name: _unfit(actual.get(name), oracle[name], x.dtype) for name, x in baseline.outputs.items()}
    fitting = [name for name, reason in unfit.items() if not reason]
    none = torch.zeros(2, calls, dtype=torch.float64, device=next(iter(oracle.values())).device)
    extra = {name: (baseline.magnitude[name], *baseline.likely.get(name, none)) for name in fitting}
    measured = [_measured(actual[n], oracle[n], baseline.outputs[n], extra[n], calls) for n in fitting]
    # one transfer for all of them: a process that shares the device with others waits for its turn at each
    numbers = dict(zip(fitting, torch.stack(measured).tolist() if measured else [], strict=True))
    results: list[list[Result]] = [[] for _ in range(calls)]
    for name in (*actual, *(name for name in unfit if name not in actual)):
        for call, into in enumerate(results):
            if name in numbers:
                into.append(_verdict(name, actual[name], _Measured(*numbers[name][call]), dtype, calls))
            else:
                reason = unfit.get(name, "the baseline has no such output")
                into.append(Result(name, math.inf, 0.0, math.inf, math.inf, False, reason=reason))
    return results


def _unfit(actual: Tensor | None, oracle: Tensor, dtype: torch.dtype) -> str:
    """Why a tensor cannot be compared; empty if it can."""
    if actual is None:
        return "missing"
    if actual.shape != oracle.shape:
        return f"shape {list(actual.shape)}, expected {list(oracle.shape)}"
    return "" if actual.dtype == dtype else f"{actual.dtype}, expected {dtype}"


class _Measured(NamedTuple):
    """The measurements of a tensor, on its device, for one call. own: of the baseline; sizes are root mean squares. differing: where infinities first
    differ, or -1."""

    differing: float
    largest: float
    error: float
    own_error: float
    size: float
    error_size: float
    own_error_size: float
    worst: float
    magnitude: float
    likely: float
    likely_size: float


def _measured(actual: Tensor, oracle: Tensor, baseline: Tensor, extra: tuple[Tensor, ...], calls: int) -> Tensor:
    """The numbers of `_Measured` of each call, float64 `[calls, 11]`."""
    if oracle.numel() == 0:
        none = torch.tensor(_Measured(-1.0, *[0.0] * 10), dtype=torch.float64, device=oracle.device)
        return none.expand(calls, -1)
    actual, oracle = (x.reshape(calls, -1) for x in (actual, oracle))
    baseline = baseline.reshape(-1, *oracle.shape)
    # the lse of a query that sees no key is either equal or wrong; there is no distance
    infinite = oracle.isinf()
    differing = (actual.isinf() != infinite) | (infinite & (actual != oracle))
    first = torch.where(differing.any(-1), differing.to(torch.uint8).argmax(-1), -1)
    error, own = ((x.double() - oracle).masked_fill(infinite, 0.0).abs() for x in (actual, baseline))
    oracle = oracle.masked_fill(infinite, 0.0).abs()
    worst = error.nan_to_num(math.inf).argmax(-1)  # it is not used as an index here, which would wait for the device
    sizes = [x.square().mean(-1).sqrt() for x in (oracle, error)]
    own_size = own.square().mean(-1).sqrt().amax(0)
    found = [first.double(), oracle.amax(-1), error.amax(-1), own.amax(-1).amax(0), *sizes, own_size, worst.double(), *extra]
    return torch.stack(found, dim=-1)


def _verdict(name: str, joined: Tensor, found: _Measured, dtype: torch.dtype, calls: int) -> Result:
    numbers = joined.numel() // calls
    if found.differing >= 0:
        return Result(name, math.inf, 0.0, math.inf, math.inf, False, _index(found.differing, joined, calls), "infinities differ")
    working = 2.0**-24 if name == "lse" or dtype == torch.float32 else torch.finfo(dtype).eps / 2
    floor = working * found.largest + _FLOAT32_ROUNDING * found.magnitude
    # the largest of many errors is three to four times their root mean square
    budget = (GRADIENT_FACTOR if name.startswith("d") else FACTOR) * max(found.own_error, found.likely) + floor
    error = math.inf if math.isnan(found.error) else found.error
    # a result that cancels to zero has no relative error
    size = max(found.size, floor / RMS_LIMIT)
    rms = found.error_size / size if size else 0.0
    limit = max(RMS_LIMIT, 2 * max(found.own_error_size, found.likely_size) / size if size else 0.0)
    reason = "" if error <= budget else BEYOND
    if not math.isfinite(found.own_error):
        reason = "the baseline is not finite, so that it allows anything"
    elif not math.isfinite(budget):
        reason = "the budget is not finite, so that it allows anything"
    # the mean of a few errors says no more than the largest, which may lie anywhere in its budget
    if not reason and numbers >= FEWEST_FOR_RMS and not rms <= limit:
        reason = f"rms over {limit:.2e}"
    ratio = error / budget if budget else (0.0 if error == 0 else math.inf)
    return Result(name, error, budget, ratio, rms, not reason, _index(found.worst, joined, calls), reason)


def _index(place: float, joined: Tensor, calls: int) -> tuple[int, ...]:
    """The index of the number at `place`, in row-major order, of the part of one call; () if it has none."""
    numbers, rest, index = joined.numel() // calls, int(place), []
    for size in joined.shape[1:] if numbers else ():
        numbers //= size
    for size in reversed((numbers, *joined.shape[1:]) if numbers else ()):
        rest, i = divmod(rest, size)
        index.append(i)
    return tuple(reversed(index))
