"""The counter of bytes: each collective of torch, by its own functions and by the functional ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from saccade.testing.traffic import Traffic


def _received(rank, ranks, device):
    x = torch.zeros(8 * ranks, device=device)
    parts = list(x.chunk(ranks))
    calls = {
        "all-gather": lambda: dist.all_gather([torch.empty_like(x) for _ in range(ranks)], x),
        "all-gather, functional": lambda: functional.all_gather_tensor(x, 0, dist.group.WORLD).sum(),
        "reduce-scatter": lambda: dist.reduce_scatter(torch.empty_like(parts[0]), parts),
        "reduce-scatter, functional": lambda: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).sum(),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all-to-all, functional": lambda: functional.all_to_all_single(x, None, None, dist.group.WORLD).sum(),
        "all-reduce": lambda: dist.all_reduce(x),
        "barrier": dist.barrier,
        "nothing": lambda: x + 1,
    }
    found = {}
    for name, call in calls.items():
        with Traffic() as traffic:
            call()
        found[name] = traffic.received, sum(traffic.calls.values())
    return found


def test_bytes_of_collectives(many):
    part, others = 4 * 8, many.ranks - 1
    whole = part * many.ranks
    for found in many(_received):
        assert found == {
            "all-gather": (whole * others, 1),
            "all-gather, functional": (whole * others, 1),
            "reduce-scatter": (part * others, 1),
            "reduce-scatter, functional": (part * others, 1),
            "all-to-all": (whole, 1),
            "all-to-all, functional": (whole, 1),
            "all-reduce": (2 * whole, 1),
            "barrier": (0, 0),
            "nothing": (0, 0),
        }
