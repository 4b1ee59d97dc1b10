"""Configurations worth measuring for a problem: what `saccade tune` searches. Never consulted at run time."""

from __future__ import annotations

import itertools

from saccade.kernels.short.config import Config, heuristic

_SM90_SHARED_BYTES = 227 * 1024


def candidates(direction: str, rows: int, dim: int) -> list[Config]:
    """Distinct configurations for bf16 tiles of `rows` x `dim`, the heuristic first."""
    if direction.startswith("pool"):
        found = _pooling(rows, dim)
    else:
        found = _whole(direction, rows, dim) + _chunked(rows, dim)
    return list(dict.fromkeys([heuristic(direction, rows, dim, 2), *found]))


def _pooling(rows: int, dim: int) -> list[Config]:
    area = rows * dim
    found = []
    for heads, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        elements = area * heads // (32 * warps)  # of K for each thread
        if 8 <= elements <= 64:
            found.append(Config(warps=warps, heads=heads))
            if warps >= 2 and elements >= 16:
                found.append(Config(warps=warps, heads=heads, programs_per_sm=max(1, 32 // warps)))
    for chunk, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (1, 2)):
        if chunk < dim and dim >= 128 and 8 <= rows * chunk // (32 * warps) <= 64:
            found.append(Config(warps=warps, chunk=chunk, stages=stages))
    return found


def _whole(direction: str, rows: int, dim: int) -> list[Config]:
    tensors = 3 if direction == "fwd" else 4
    if tensors * rows * dim * 2 > _SM90_SHARED_BYTES * 3 // 4:
        return []
    warps_of = {32: (1, 2), 64: (2, 4, 8), 128: (4, 8)}[rows]
    found = []
    for warps in warps_of:
        for q_blocks, registers, prefetch in itertools.product((1, 2), (0, 128), (False, True)):
            if rows == 128 or (q_blocks == 1 and (registers == 0 or direction == "bwd")):
                found.append(Config(warps, q_blocks=q_blocks, max_registers=registers, prefetch=prefetch))
        for per_sm, stages, prefetch in itertools.product((1, 2, 3, 4, 6, 8, 16), (1, 2, 3), (False, True)):
            shared = tensors * rows * dim * 2 * max(1, stages - 1)
            too_few = per_sm * warps < 8 and rows < 128
            if per_sm * warps <= 32 and per_sm * shared <= _SM90_SHARED_BYTES and not too_few and not (prefetch and stages > 1):
                found.append(Config(warps, stages=stages, programs_per_sm=per_sm, prefetch=prefetch))
                if rows == 128 and stages == 1:
                    found.append(Config(warps, q_blocks=2, stages=1, programs_per_sm=per_sm, prefetch=prefetch))
    if rows * dim <= 64 * 32 or (direction == "fwd" and rows * dim <= 64 * 64):
        for heads, warps in itertools.product((2, 4), (1, 2, 4, 8)):
            if rows // 32 * heads >= warps >= heads // 2:
                found.append(Config(warps, heads=heads))
                found.append(Config(warps, heads=heads, prefetch=True))
    return found


def _chunked(rows: int, dim: int) -> list[Config]:
    found = []
    for chunk, warps, stages, registers in itertools.product((32, 64, 128), (4, 8), (1, 2, 3, 4), (0, 128)):
        if chunk <= dim // 2 and dim >= 128 and rows >= 64 and not (registers and stages == 1):
            found.append(Config(warps, chunk=chunk, stages=stages, max_registers=registers))
            if stages in (2, 3):
                found.append(Config(warps, chunk=chunk, stages=stages, max_registers=registers, prefetch=True))
    return found
