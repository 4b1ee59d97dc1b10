"""The draws of dropout that follow from a seed, as the public functions make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.engine.philox import dropout_keep
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs

Seeds = int | Sequence[int]  # of each call its own, if several are judged together


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of a GPU. `torch.manual_seed` also queues a call for every absent kind of device, with its stack trace: half
    a millisecond and a kilobyte each time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def dropout_of(case: Case, inputs: Inputs, seed: Seeds) -> tuple[Tensor | None, float]:
    """The weights that dropout keeps, bool `[B, H, Tq, Tk]`, and the probability that it keeps one."""
    if case.dropout_p == 0:
        return None, 1.0
    keys = []
    for each in [seed] if isinstance(seed, int) else seed:
        seed_generators(each, inputs.query.device)
        # drawn as `saccade.exact.api` draws it
        keys.append(torch.randint(0, 2**62, (1,), dtype=torch.int64, device=inputs.query.device))
    calls = torch.cat(keys)[:, None, None, None]
    keep = dropout_keep(calls, case.dropout_p, case.batch // case.calls, case.heads, case.q_len, case.kv_len)
    return keep.flatten(0, 1), 1.0 - case.dropout_p
