"""Whether the attentions in tables of N:M attention and its rivals compute what they should, before anything is timed.

    error(call) <= 3 error(definition in the same dtype) + half a rounding, of whole heads, the worst of them

An error is `|O' - O| / |O|` against the definition in float64. The factor is the one that gradients have elsewhere: contenders sum in
another order than their definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from approximations import Mechanism, error
from nm_common import SHORT
from torch import Tensor

_FACTOR = 3.0


@dataclass(frozen=True)
class Contender:
    """`attend` is what is timed, with Q not scaled; `definition` what it should compute, with Q scaled."""

    attend: Mechanism
    definition: Mechanism


def error_over_budget(call: Callable[..., Tensor], definition: Callable[..., Tensor], given: Sequence[Tensor]) -> float:
    """The error of `call` over what is allowed; 1 is the limit, and a result with a NaN is infinitely beyond it. Both take the tensors
    `given`, in the dtype of the call, and return `[B, H, n, D]`; `definition` takes them in float64 too."""
    exact = definition(*(x.double() for x in given))
    plain, found = (error(function(*given).double(), exact).max() for function in (definition, call))
    ratio = (found / (_FACTOR * plain + torch.finfo(given[0].dtype).eps / 2)).item()
    return math.inf if math.isnan(ratio) else ratio


def checked(
    contenders: Callable[[int], dict[str, Contender]], dtype: torch.dtype, lengths: Sequence[int], dim: int, device: str
) -> dict[str, float]:
    """Error over budget of each of `contenders(length)`, the worst of the lengths.

    Queries and keys are small integers, so that scores are exact and every backend must prune the same ones.

    Raises:
        SystemExit: one of them is beyond its budget, so that no time of a wrong result is written.
    """
    found: dict[str, float] = {}
    for length in lengths:
        drawn = torch.randn(3, 2, 2, length, dim, generator=torch.Generator().manual_seed(0)).to(device)
        # integers of -1 to 1, as in saccade.nm_sparse.testing.inputs
        heads = [x.clamp(-1.4, 1.4).round().to(dtype) for x in drawn[:2]] + [drawn[2].to(dtype)]
        for name, contender in contenders(length).items():
            ratio = error_over_budget(contender.attend, _of_unscaled(contender.definition), heads)
            found[name] = max(found.get(name, 0.0), ratio)
    wrong = [f"{name} by {ratio:.3g}" for name, ratio in found.items() if ratio > 1]
    if wrong:
        raise SystemExit(f"nothing is timed: in {SHORT[dtype]} the error is over its budget for {', '.join(wrong)}")
    return found


def _of_unscaled(definition: Mechanism) -> Mechanism:
    return lambda query, key, value: definition(query * query.shape[-1] ** -0.5, key, value)
