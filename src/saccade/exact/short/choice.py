"""Chooses the configuration of a call from its description, for its launchers and for `explain`. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from saccade.engine.problem import Problem
from saccade.exact.short.config import Config, kernel_name, pick, tile_size
from saccade.hardware import multiprocessors, usual_multiprocessors
from saccade.launch.disabled import failure_of
from saccade.nvrtc import obstacles

# programs per multiprocessor in the configurations for a shared bias, which are used only if there is work for so many programs
_SHARED_BIAS_PROGRAMS = 4
# batch x heads from which the table LARGE applies: TMA descriptors cost host time, and the kernel must run longer than that.
# Inferred, not timed by itself: 8,192 problems of S = 64, D = 32 took 0.62 ms a step. The large table scales to 0.1 ms on the device.
# 49,152 is the smallest count measured with it (ViT, benchmarks/results/h100/short_models.csv).
LARGE_PROBLEMS = 49_152
# Each call looks up tensor maps, backward seven of them, and the kernel must run longer than that: 4,096 problems of 128 x 64
# take 0.1 ms.
SM90_ELEMENTS = 2**25


class Forms(NamedTuple):
    """The configurations of a call. bwd: None without a gradient."""

    fwd: Config
    bwd: Config | None

    def __str__(self) -> str:
        return ", ".join(f"{name}={config}" for name, config in self._asdict().items() if config is not None)


def forms(problem: Problem) -> Forms:
    """The configurations that run a call, if the copy engine can address its tensors."""
    return Forms(choose("fwd", problem), choose("bwd", problem) if problem.needs_grad else None)


def choose(direction: str, problem: Problem, addressed: bool = True) -> Config:
    """The configuration of one direction, "fwd" or "bwd". addressed: whether the copy engine can address the tensors."""
    masked, grouped = _is_masked(problem), problem.heads != problem.kv_heads
    featured = problem.is_causal or masked or (direction == "bwd" and problem.return_lse)
    plain = problem.batch * problem.heads >= LARGE_PROBLEMS and not grouped and not featured
    row = problem.mask == "bias" and problem.row_mask
    unsplit = problem.mask == "bool" or row
    own_bias = problem.mask == "bias" and not row and problem.mask_rows == problem.batch > 1
    kind = "pool_" + direction if problem.q_len == 1 else direction
    tiles = tile_size(max(problem.q_len, problem.kv_len)), tile_size(problem.head_dim)
    shared_bias = not grouped and shared_bias_programs(problem, _SHARED_BIAS_PROGRAMS) > 0
    sm90 = addressed and takes_sm90(problem)
    chosen = pick(kind, *tiles, problem.dtype.itemsize, problem.arch, plain, sm90, shared_bias, unsplit, own_bias)
    if chosen.sm90 and failure_of(kernel_name(chosen.sm90)):
        chosen = pick(kind, *tiles, problem.dtype.itemsize, problem.arch, plain, False, shared_bias, unsplit, own_bias)
    return chosen


def takes_sm90(problem: Problem) -> bool:
    """Whether the kernels of `sm90.py` can run such a call, if the copy engine can address its tensors."""
    q_len, kv_len, head_dim = problem.q_len, problem.kv_len, problem.head_dim
    elements = problem.batch * problem.heads * tile_size(kv_len) * tile_size(head_dim)
    # a single causal query sees a single key; rows of results are whole chunks of 16 bytes where D is a multiple of 8
    shaped = (not problem.is_causal if q_len == 1 else tile_size(q_len) == tile_size(kv_len)) and head_dim % 8 == 0
    plain = problem.heads == problem.kv_heads and not _is_masked(problem) and problem.dtype.itemsize == 2
    return problem.arch == 90 and elements >= SM90_ELEMENTS and shaped and plain and not obstacles("90a")


def shared_bias_programs(problem: Problem, programs_per_sm: int) -> int:
    """The number of persistent programs; 0 if no problems share a bias. Each program computes a single head if the batch shares
    the bias, and a single head of one window if the images share it."""
    windows = problem.windows
    if problem.mask != "bias" or (problem.mask_rows > 1 and not windows):
        return 0
    groups, sharing = (problem.heads * windows, problem.batch // windows) if windows else (problem.heads, problem.batch)
    chunks = programs_per_sm * _multiprocessors(problem) // groups
    if windows and programs_per_sm:  # heads of windows beyond the programs that fit at once still read their bias only once
        chunks = max(chunks, 1)
    return groups * chunks if 0 < chunks < sharing else 0


def _is_masked(problem: Problem) -> bool:
    return problem.mask is not None or problem.lengths or problem.dropout_p > 0


def _multiprocessors(problem: Problem) -> int:
    return multiprocessors(problem.device) if problem.on_this_machine else usual_multiprocessors(problem.arch)
