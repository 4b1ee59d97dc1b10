"""The gain of pruned attention when the rest of an encoder gets faster too: measured with pruned weights, and projected from times with
dense weights as Dfss does (appendix A.6, below its Fig. 15).

The paper takes the time of all that is not attention, O, from its breakdown, lets it run twice as fast, and compares both attentions
around it:

    (A_dense + O / 2) / (A_pruned + O / 2)

With O = 70 % of the time and the least gain of an encoder that the paper reports, 1.08, this is the 1.13 that it then expects at least.
A is the time of an encoder less that of the same encoder without attention, which is O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PAIRS = {"staged 2:4": "unfused", "fused 2:4": "sdpa"}  # pruned attention, and the dense one that is built alike
TWICE = 2.0
Times = dict[
    tuple[str, str], float
]  # (weights, attention) -> milliseconds; weights are "dense" or "2:4", attention may be "none"


@dataclass(frozen=True)
class Gains:
    """The gains of one pruned attention; each is how many times as fast.

    attention: over dense attention, around dense weights. joint: the same around pruned weights. projected: what the paper expects of
    `joint`. rest: what pruned weights bring to all that is not attention, where the paper assumes two. expected: the projection with
    that number. whole: attention and weights pruned over both dense.
    """

    attention: float
    joint: float
    projected: float
    rest: float
    expected: float
    whole: float


def gains(times: Times, attention: str) -> Gains:
    """From the times of one problem, for one of `PAIRS`."""
    dense = PAIRS[attention]
    alone = {name: times["dense", name] for name in ("none", dense, attention)}
    rest = times["dense", "none"] / times["2:4", "none"]
    return Gains(
        attention=alone[dense] / alone[attention],
        joint=times["2:4", dense] / times["2:4", attention],
        projected=projected(alone["none"], alone[dense], alone[attention], TWICE),
        rest=rest,
        expected=projected(alone["none"], alone[dense], alone[attention], rest),
        whole=alone[dense] / times["2:4", attention],
    )


def projected(rest: float, dense: float, pruned: float, faster: float) -> float:
    """The gain of an encoder that takes `pruned` over one that takes `dense`, once the `rest` of both runs `faster`.

    NaN where more would be saved than an encoder takes: times are then those of a disturbed machine, and the table goes on.
    """
    saved = rest - rest / faster
    return (dense - saved) / (pruned - saved) if min(dense, pruned) > saved else math.nan
