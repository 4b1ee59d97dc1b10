"""Process groups of two, four and eight ranks: gloo on a CPU, NCCL where there are as many GPUs."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool

_POOLS: dict[tuple[int, str], RankPool] = {}


def _pool(ranks: int, device_type: str) -> RankPool:
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    return _POOLS.setdefault((ranks, device_type), RankPool(ranks, device_type))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def two(request) -> RankPool:
    """Two ranks."""
    return _pool(2, request.param)


@pytest.fixture(params=DEVICES)
def four(request) -> RankPool:
    """Four ranks; two where there are fewer GPUs."""
    few = request.param == "cuda" and torch.cuda.device_count() < 4
    return _pool(2 if few else 4, request.param)


MANY = [
    pytest.param((4, "cpu"), id="4 on cpu"),
    *(pytest.param((ranks, "cuda"), id=f"{ranks} on cuda", marks=pytest.mark.gpu) for ranks in (2, 4, 8)),
]


@pytest.fixture(params=MANY)
def many(request) -> RankPool:
    """Four ranks on a CPU; two, four and eight where there are as many GPUs."""
    return _pool(*request.param)


@pytest.fixture(scope="session", autouse=True)
def pools_end():
    """End all processes with the session."""
    yield
    for pool in _POOLS.values():
        pool.stop()
    _POOLS.clear()
