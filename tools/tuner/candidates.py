"""Configurations worth measuring for a problem, which `python -m tools.tuner` searches."""

from __future__ import annotations

import itertools
from dataclasses import replace

from saccade.exact.short.config import Config, heuristic

_SM90_SHARED_BYTES = 227 * 1024


def candidates(direction: str, rows: int, dim: int) -> list[Config]:
    """Distinct configurations for bf16 tiles of `rows` x `dim`, with the heuristic's choice first."""
    if direction.startswith("pool"):
        found = _pooling(rows, dim) + [replace(c, matrix=True) for c in _tma(direction, rows, dim)]
    else:
        found = _whole(direction, rows, dim) + _chunked(rows, dim) + _tma(direction, rows, dim)
    return list(dict.fromkeys([heuristic(direction, rows, dim, 2), *found]))


def _pooling(rows: int, dim: int) -> list[Config]:
    found = []
    for heads, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        if 8 <= rows * dim * heads // (32 * warps) <= 64:  # elements of K for each thread
            found.append(Config(warps, heads=heads))
    for warps, prefetch in itertools.product((1, 2, 4), (0, 1, 2)):
        found.append(Config(warps, matrix=True, prefetch=prefetch))
        if rows * dim <= 64 * 64:
            found += [Config(warps, matrix=True, heads=heads, prefetch=prefetch) for heads in (2, 4) if warps <= heads]
    for chunk, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (1, 2, 3)):
        if chunk < dim and dim >= 128:
            found.append(Config(warps, chunk=chunk, stages=stages, matrix=True))
            if 8 <= rows * chunk // (32 * warps) <= 64 and stages == 2:
                found.append(Config(warps, chunk=chunk, stages=stages))
    return found


def _whole(direction: str, rows: int, dim: int) -> list[Config]:
    tensors = 3 if direction == "fwd" else 4
    shared = tensors * rows * dim * 2
    if shared > _SM90_SHARED_BYTES * 3 // 4:
        return []
    found = []
    splits = {32: (1, 2), 64: (1, 2, 4), 128: (1, 2, 4, 8)}[rows]
    for warps, q_blocks, registers, prefetch in itertools.product((1, 2, 4, 8), splits, (0, 128), (0, 1, 2)):
        if rows // 32 * max(1, dim // 64) // 2 <= warps <= rows // 16 and (warps >= 4 or not registers):
            for stages in (1,) if q_blocks == 1 else (1, 2, q_blocks + 1):
                found.append(Config(warps, q_blocks=q_blocks, stages=stages, max_registers=registers, prefetch=prefetch))
    for warps, per_sm, stages in itertools.product((2, 4, 8), (1, 2, 3, 4, 8), (2, 3)):
        if 8 <= per_sm * warps <= 32 and warps <= rows // 16 and per_sm * shared * (stages - 1) <= _SM90_SHARED_BYTES:
            found.append(Config(warps, stages=stages, programs_per_sm=per_sm))
    if rows * dim <= 64 * 64:
        for heads, warps, prefetch in itertools.product((2, 4), (1, 2, 4, 8), (0, 1, 2)):
            if rows // 32 * heads >= warps >= heads // 2:
                found.append(Config(warps, heads=heads, prefetch=prefetch))
    return found


def _tma(direction: str, rows: int, dim: int) -> list[Config]:
    shared = (3 if direction.endswith("fwd") else 4) * rows * dim * 2
    found = []
    for warps, stages, per_sm in itertools.product((1, 2, 4, 8), (2, 3, 4), (1, 2, 3, 4, 6, 8, 16)):
        fits = per_sm * shared * (stages - 1) <= _SM90_SHARED_BYTES
        if fits and rows // 32 <= warps <= rows // 16 and 4 <= per_sm * warps <= 32:
            found.append(Config(warps, stages=stages, programs_per_sm=per_sm, tma=True))
    for warps, q_blocks, stages in itertools.product((2, 4, 8), (1, 2, 4), (1, 2, 3)):
        if shared <= _SM90_SHARED_BYTES // 2 and rows // 32 <= warps <= rows // 16 and (q_blocks > 1 or stages == 1):
            found.append(Config(warps, q_blocks=q_blocks, stages=stages, tma=True))
    for chunk, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
        if dim >= 128 and chunk <= dim // 2 and warps <= rows // 8:
            found.append(Config(warps, chunk=chunk, stages=stages, tma=True))
    return found


def _chunked(rows: int, dim: int) -> list[Config]:
    found = []
    for chunk, warps, stages, registers in itertools.product((32, 64, 128), (4, 8), (1, 2, 3, 4), (0, 128)):
        if chunk <= dim // 2 and dim >= 128 and rows >= 32 and not (registers and stages == 1) and warps <= rows // 8:
            found.append(Config(warps, chunk=chunk, stages=stages, max_registers=registers))
            if stages in (2, 3):
                found += [Config(warps, chunk=chunk, stages=stages, max_registers=registers, prefetch=p) for p in (1, 2)]
    return found
