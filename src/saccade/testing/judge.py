"""Judges whether a result is within its error budget against float64; the rule is in `saccade.exact.testing.check`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.testing.cases import Case

FACTOR, GRADIENT_FACTOR, RMS_LIMIT = 2.0, 3.0, 0.005
FEWEST_FOR_RMS = 8  # numbers of a result
_FLOAT32_ROUNDING = 2.0**-24


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


def judge(
    name: str, actual: Tensor, oracle: Tensor, baseline: Tensor, magnitude: float, dtype: torch.dtype, spread: float = 0.0
) -> Result:
    """Compare one tensor with its budget. magnitude: the largest sum of absolute terms behind one of its numbers. spread: the error to expect of one
    number of the baseline, where it has so few that the largest says little."""
    if actual.shape != oracle.shape:
        return Result(
            name, math.inf, 0.0, math.inf, math.inf, False, reason=f"shape {list(actual.shape)}, expected {list(oracle.shape)}"
        )
    actual, baseline = actual.double(), baseline.double()
    # the lse of a query that sees no key is either equal or wrong; there is no distance
    infinite = oracle.isinf()
    differing = actual.isinf() != infinite
    differing |= infinite & (actual != oracle)
    if differing.any():
        return Result(name, math.inf, 0.0, math.inf, math.inf, False, _index(differing), "infinities differ")
    error, own = ((x - oracle).masked_fill(infinite, 0.0).abs() for x in (actual, baseline))
    oracle = oracle.masked_fill(infinite, 0.0)
    working = 2.0**-24 if name == "lse" or dtype == torch.float32 else torch.finfo(dtype).eps / 2
    floor = working * _max(oracle) + _FLOAT32_ROUNDING * magnitude
    # the largest of many errors lies at three to four times their root mean square
    budget = (GRADIENT_FACTOR if name.startswith("d") else FACTOR) * max(_max(own), 3 * spread) + floor
    largest = math.inf if error.isnan().any() else _max(error)
    # a result that cancels to zero has no relative error
    size = max(_rms(oracle), floor / RMS_LIMIT)
    rms = _rms(error) / size if size else 0.0
    limit = max(RMS_LIMIT, 2 * _rms(own) / size if size else 0.0)
    reason = "" if largest <= budget else "largest error over budget"
    # the mean of a few errors says no more than the largest, which may lie anywhere in its budget
    if not reason and actual.numel() >= FEWEST_FOR_RMS and not rms <= limit:
        reason = f"rms over {limit:.2e}"
    ratio = largest / budget if budget else (0.0 if largest == 0 else math.inf)
    return Result(name, largest, budget, ratio, rms, not reason, _index(error.nan_to_num(math.inf)), reason)


def _max(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def _index(error: Tensor) -> tuple[int, ...]:
    if error.numel() == 0:
        return ()
    return tuple(int(i) for i in torch.unravel_index(error.double().argmax(), error.shape))
