"""The gradient of a bias that rows share, by the kernel of sm_90 (`cuda/bias_gradient_sm90.cu`): programs own tiles of the bias and walk the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.exact.long import choice, key_mask, sm90
from saccade.exact.long.config import BIAS_GRADIENT, rounded
from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import multiprocessors
from saccade.launch.cache import LaunchCache
from saccade.launch.cuda import CudaLaunch
from saccade.launch.dropout import survival_inverse, word_threshold
from saccade.native.recording import shares
from saccade.nvrtc import Options

DIRECTION = "bias_gradient"
_SIDE, _THREADS = 128, 384  # queries and keys of a tile
# Parts of the members of a matrix, whose sums are matrices of float32. Writing and reading the sums of a part costs about as much as the tiles of so many members
_MOST_PARTS, _COST_OF_PART = 16, 6
_LAUNCHES = LaunchCache()


def shared_bytes(head_dim: int, mask: bool = False) -> int:
    """Dynamic shared memory of a block; the source checks it. mask: one of keys."""
    stages = BIAS_GRADIENT[rounded(head_dim)].stages
    return stages * (4 * _SIDE * 2 * rounded(head_dim) + 16 + 16 * _SIDE + mask * 2 * key_mask.SELECTOR_BYTES) + 8 * 3 * stages


def defines(head_dim: int, bf16: bool, grouped: bool = False, mask: bool = False, dropout: bool = False) -> dict[str, int]:
    """The macros that the kernel is compiled with."""
    config = BIAS_GRADIENT[rounded(head_dim)]
    registers = dict(zip(("COMPUTE_REGISTERS", "LOAD_REGISTERS"), config.registers, strict=True))
    return registers | {
        "HEAD_DIM": rounded(head_dim), "BF16": bf16, "PACKED": 0, "CAUSAL": 0, "GROUPED": grouped, "MASK": 0, "DROPOUT": dropout, "WINDOW": 0,
        "BIAS": 1, "KEY_MASK": mask, "STAGES": config.stages, "SHARED_BYTES": shared_bytes(head_dim, mask),
    }  # fmt: skip


def parts_of(tiles: int, members: int, processors: int) -> tuple[int, int]:
    """(members of a part, parts) that take the least time. tiles: of one part with all members."""

    def time(parts: int) -> int:
        return -(-tiles * parts // processors) * (-(-members // parts) + _COST_OF_PART)

    best = min(range(1, min(_MOST_PARTS, members) + 1), key=time)
    each = -(-members // best)
    return each, -(-members // each)


def gradient(args: VarlenArgs, dout: Tensor, numbers: Tensor) -> Tensor:
    """The gradient, float32 `[W, H or 1, Tq, Tk]`.

    Args:
        args: a call of dense rows whose query, key and value the copy engine can address, with a bias as `bias.readable` makes it.
        numbers: shift, inverse and terms of each query, `[3, B, H, Tq]`.

    Raises:
        CompileError, CompilerUnavailable: the kernel does not compile here.
    """
    bias, device = args.bias, args.query.device
    assert bias is not None, "the call has a bias"
    members = (
        args.query.shape[0] // bias.shape[0] * (args.query.shape[1] // bias.shape[1])
    )  # rows, or rows and heads, that share a matrix
    tiles = bias.shape[0] * bias.shape[1] * -(-args.max_q // _SIDE) * -(-args.max_k // _SIDE)
    each, parts = parts_of(tiles, members, multiprocessors(device))
    sums = shares((parts, *bias.shape), bias.shape[0] * bias.shape[1], device)
    lies = {} if args.mask is None else key_mask.strides_of(args.mask)
    key = (
        bias.shape,
        args.query.shape,
        args.key.shape,
        args.query.dtype,
        device,
        tuple(lies.values()),
        args.scale,
        args.dropout_p,
        args.seed is None,
        each,
    )
    launch = _LAUNCHES.get(key) or _LAUNCHES.remember(key, _call(args, bias, lies, tiles * parts, each).ready(device))
    tensors = (*numbers, sums, *sm90.shown_by(args.mask, True, by_key=False), *(() if args.seed is None else (args.seed,)))
    moved = (*map(sm90.Moved.of, (*args[:3], dout), (0,) * 4), *sm90.Moved.of_bias(bias))
    maps = [(x.data_ptr(), *how) for x, how in zip((*args[:3], dout, bias), moved, strict=True)]
    launch(0 if args.cu_seqlens_k is None else args.cu_seqlens_k.data_ptr(), *[x.data_ptr() for x in tensors], maps=maps)
    return sums[0] if parts == 1 else sums.sum(0)


def _call(args: VarlenArgs, bias: Tensor, lies: dict[str, int], grid: int, each: int) -> CudaLaunch:
    query = args.query
    grouped, mask, dropout, _ = choice.kind_of(args).features
    numbers = {
        "bias_windows": bias.shape[0], "bias_owners": bias.shape[1], "sequences": query.shape[0], "heads": query.shape[1], "max_q": args.max_q,
        "max_k": args.max_k, "each": each, "scale": args.scale, **lies,
    }  # fmt: skip
    if grouped:
        numbers["group_size"] = choice.kind_of(args).group
    if dropout:
        numbers |= {"threshold": word_threshold(args.dropout_p), "inverse": survival_inverse(args.dropout_p)}
    macros = defines(query.shape[-1], query.dtype == torch.bfloat16, grouped, mask, dropout)
    return CudaLaunch(
        sm90.source(DIRECTION), "long_bias_gradient_sm90", Options.of(macros), (grid, 1), _THREADS, shared_bytes(query.shape[-1], mask), numbers,
        sm90.ARCHITECTURE,
    )  # fmt: skip
