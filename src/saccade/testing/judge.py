"""Judges whether a result is within its error budget against float64; the rule is in `saccade.exact.testing.check`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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
    return judge_all({name: actual}, {name: oracle}, {name: baseline}, {name: magnitude}, dtype, {name: spread})[0]


def judge_all(
    actual: dict[str, Tensor],
    oracle: dict[str, Tensor],
    baseline: dict[str, Tensor],
    magnitude: dict[str, float],
    dtype: torch.dtype,
    spread: dict[str, float] | None = None,
) -> list[Result]:
    """Compare every tensor of a run with its budget, by name. baseline: of each tensor one, or several stacked, the largest error of which counts."""
    fitting = [name for name, x in actual.items() if x.shape == oracle[name].shape]
    # one transfer for all of them: a process that shares the device with others waits for its turn at each
    measured = [_measured(actual[name], oracle[name], baseline[name]) for name in fitting]
    numbers = dict(zip(fitting, torch.stack(measured).tolist() if measured else [], strict=True))
    results = []
    for name, x in actual.items():
        if name in numbers:
            found = _Measured(*numbers[name])
            results.append(_verdict(name, x, found, magnitude[name], dtype, (spread or {}).get(name, 0.0)))
        else:
            reason = f"shape {list(x.shape)}, expected {list(oracle[name].shape)}"
            results.append(Result(name, math.inf, 0.0, math.inf, math.inf, False, reason=reason))
    return results


class _Measured(NamedTuple):
    """What is measured of a tensor where it lies. own: of the baseline; sizes are root mean squares. differing: where infinities first differ, or -1."""

    differing: float
    largest: float
    error: float
    own_error: float
    size: float
    error_size: float
    own_error_size: float
    worst: float


def _measured(actual: Tensor, oracle: Tensor, baseline: Tensor) -> Tensor:
    """The numbers of `_Measured`, float64."""
    if oracle.numel() == 0:
        return torch.tensor(_Measured(-1.0, *[0.0] * 7), dtype=torch.float64, device=oracle.device)
    # the lse of a query that sees no key is either equal or wrong; there is no distance
    infinite = oracle.isinf()
    differing = ((actual.isinf() != infinite) | (infinite & (actual != oracle))).flatten()
    first = torch.where(differing.any(), differing.to(torch.uint8).argmax(), -1)
    error, own = ((x.double() - oracle).masked_fill(infinite, 0.0).abs().reshape(-1, oracle.numel()) for x in (actual, baseline))
    error = error.flatten()
    oracle = oracle.masked_fill(infinite, 0.0).abs().flatten()
    worst = error.nan_to_num(math.inf).argmax()  # nothing is looked up by it here: that would wait for the device
    sizes = [x.square().mean(dim=-1).sqrt().max() for x in (oracle, error, own)]
    return torch.stack([first.double(), oracle.max(), error.max(), own.max(), *sizes, worst.double()])


def _verdict(name: str, actual: Tensor, found: _Measured, magnitude: float, dtype: torch.dtype, spread: float) -> Result:
    if found.differing >= 0:
        return Result(name, math.inf, 0.0, math.inf, math.inf, False, _index(found.differing, actual), "infinities differ")
    working = 2.0**-24 if name == "lse" or dtype == torch.float32 else torch.finfo(dtype).eps / 2
    floor = working * found.largest + _FLOAT32_ROUNDING * magnitude
    # the largest of many errors lies at three to four times their root mean square
    budget = (GRADIENT_FACTOR if name.startswith("d") else FACTOR) * max(found.own_error, 3 * spread) + floor
    error = math.inf if math.isnan(found.error) else found.error
    # a result that cancels to zero has no relative error
    size = max(found.size, floor / RMS_LIMIT)
    rms = found.error_size / size if size else 0.0
    limit = max(RMS_LIMIT, 2 * found.own_error_size / size if size else 0.0)
    reason = "" if error <= budget else "largest error over budget"
    if not math.isfinite(found.own_error):
        reason = "the baseline is not finite, so that it allows anything"
    # the mean of a few errors says no more than the largest, which may lie anywhere in its budget
    if not reason and actual.numel() >= FEWEST_FOR_RMS and not rms <= limit:
        reason = f"rms over {limit:.2e}"
    ratio = error / budget if budget else (0.0 if error == 0 else math.inf)
    return Result(name, error, budget, ratio, rms, not reason, _index(found.worst, actual), reason)


def _index(place: float, of: Tensor) -> tuple[int, ...]:
    """The index of the number at `place` of a tensor in row-major order; () if it has none."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(int(place)), of.shape)) if of.numel() else ()
