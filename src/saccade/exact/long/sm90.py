"""CUDA C++ for sequences beyond 64 tokens on sm_90a (`cuda/*_sm90.cu`): the copy engine loads whole tiles, and warpgroups multiply them.

Triton forms the scores twice in backward (seven products a pair of tiles), because dK and dV need one order of tiles and dQ the other. Here dS
passes from the warpgroups that own keys to one that adds up dQ, so that five products are left. The last tile of queries or keys is only as large as
its contents. The kernels take plain and causal calls, dense or packed, in 16-bit dtypes, with grouped heads and dropout. Dense rows may have a
boolean mask, a bias (`bias.py`), or a bias and a mask of keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.exact.long import choice, key_mask
from saccade.exact.long import config as settings
from saccade.exact.long.config import CONFIGS, Sm90Config, rounded, segment_rounds
from saccade.exact.long.mask_bits import pack, strides_of
from saccade.exact.varlen.args import ALIGNED_LAST, BOTTOM_RIGHT, UPPER_LEFT, VarlenArgs
from saccade.hardware import multiprocessors
from saccade.launch.cache import LaunchCache
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, CudaLaunch
from saccade.launch.dropout import survival_inverse, word_threshold
from saccade.native.described import FIXED, KEYS, LONGEST_K, LONGEST_Q, QUERIES, SEQUENCES
from saccade.native.recording import scratch, varying
from saccade.nvrtc import Bound, Options, Source

_FOLDER = Path(__file__).parent / "cuda"
ARCHITECTURE = "90a"
# queries of a team of forward, and how many times as many are in its memory; rows of a chunk, which are keys in forward and queries in backward;
# keys of a round of backward
BLOCK_ROWS, QUERY_SLOTS, CHUNK_ROWS, ROUND_ROWS = 128, 2, 64, 128
# bytes of the bias of 128 x 64 pairs: of a block's queries and a chunk of keys in forward, of a chunk of queries and a round of keys in backward
_BIAS_TILE = 2 * BLOCK_ROWS * CHUNK_ROWS


def source(direction: str) -> Source:
    """The file of a direction."""
    return Source(_FOLDER / f"{direction}_sm90.cu", (HEADERS,))


def threads(direction: str, config: Sm90Config) -> int:
    """Threads of a block."""
    return 256 * config.teams + 128 if direction == "forward" else 512


def bias_stages(head_dim: int) -> int:
    """Tiles of the bias in the memory of a block of forward."""
    return 4 if rounded(head_dim) == 32 else 2


def late_maxima(head_dim: int) -> bool:
    """Whether forward with a bias computes weights before maxima."""
    return rounded(head_dim) in settings.LATE_MAXIMA


def shared_bytes(direction: str, head_dim: int, config: Sm90Config, bias: bool = False, keys: bool = False) -> int:
    """Dynamic shared memory of a block; the sources check it. keys: with a bias and a mask of keys."""
    row, stages = 2 * rounded(head_dim), config.stages
    if direction == "forward":
        team = QUERY_SLOTS * (BLOCK_ROWS * row + 32) + stages * 2 * CHUNK_ROWS * row + 8 * (2 * QUERY_SLOTS + 3 * stages)
        team += keys * stages * key_mask.SELECTOR_BYTES
        return config.teams * (-(-team // 1024) * 1024) + bias * bias_stages(head_dim) * (_BIAS_TILE + 16)
    tiles = (
        4 * ROUND_ROWS * row + (2 * stages + 2 * owns_delta(head_dim, bias)) * CHUNK_ROWS * row + 2 * ROUND_ROWS * CHUNK_ROWS * 2
    )
    return tiles + stages * (2 * CHUNK_ROWS * 4 + bias * (_BIAS_TILE + 16)) + 4 * 32 + 8 * (8 + 3 * stages)


def owns_delta(head_dim: int, bias: bool = False) -> bool:
    """Whether backward computes delta itself. At D = 128 the tiles of out do not fit in shared memory too; with a bias another kernel computes it."""
    return head_dim <= 64 and not bias


def defines(
    direction: str, head_dim: int, bf16: bool, packed: bool, causal: int, config: Sm90Config,
    grouped: bool = False, mask: bool = False, dropout: bool = False, window: bool = False, segment: int = 0, bias: bool = False,
    late: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The macros that a kernel is compiled with. segment: rounds of one, of backward with a window. late: see `late_maxima`."""
    found = {
        "HEAD_DIM": rounded(head_dim), "BF16": bf16, "PACKED": packed, "CAUSAL": causal, "GROUPED": grouped, "MASK": mask and not bias,
        "DROPOUT": dropout, "STAGES": config.stages,
        "SHARED_BYTES": shared_bytes(direction, head_dim, config, bias, bias and mask),
    }  # fmt: skip
    if window:
        found |= {"WINDOW": 1, "SEGMENT": segment} if direction == "backward" else {"WINDOW": 1}
    if bias:
        found |= {"BIAS": 1, "KEY_MASK": mask}
        if direction == "forward":
            found |= {"BIAS_STAGES": bias_stages(head_dim), "LATE_MAXIMA": late}
    if direction == "forward":
        registers = dict(zip(("COMPUTE_REGISTERS", "LOAD_REGISTERS"), config.registers, strict=True))
        return found | registers | {"TEAMS": config.teams, "QUERY_SLOTS": QUERY_SLOTS}
    registers = dict(zip(("KEY_REGISTERS", "QUERY_REGISTERS", "LOAD_REGISTERS"), config.registers, strict=True))
    return found | registers | {"OWN_DELTA": owns_delta(head_dim, bias)}


def takes(args: VarlenArgs, *others: Tensor) -> bool:
    """Whether the kernels take a call. others: out, or dout, out and the gradients."""
    query = args.query
    if not choice.takes(choice.kind_of(args)):
        return False
    sequences = query.shape[0] if query.dim() == 4 else args.cu_seqlens_q.shape[0] - 1
    if sequences * query.shape[1] * -(-args.max_q // BLOCK_ROWS) >= 2**31:
        return False
    return all(movable(x) for x in (*args[:3], *others))


def movable(tensor: Tensor) -> bool:
    """Whether 16 bytes are the unit of all its rows."""
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return tensor.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in strides)


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, head, row), in numbers."""
    if tensor.dim() == 4:
        return tensor.stride()[:3]  # type: ignore[return-value]
    return 0, tensor.stride(1), tensor.stride(0)


class Moved(NamedTuple):
    """How the copy engine moves a tensor: 64 rows at a time, of 64 columns or 32; packed rows are those of one batch row."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    box: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, tokens: int) -> Moved:
        """The stride of an axis of size 1 is never used, but has to be a multiple of 16 bytes. tokens: which described number counts its packed rows."""
        sizes = (
            tuple(tensor.shape)
            if tensor.dim() == 4
            else (1, tensor.shape[1], *varying(tensor.shape[:1], (tokens,)), tensor.shape[2])
        )
        strides = tuple([2 * s if n > 1 else 16 for s, n in zip(_strides(tensor), sizes[:3], strict=True)])
        return cls(sizes, strides, (1, 1, 64, 32 if tensor.shape[-1] <= 32 else 64))

    @classmethod
    def of_bias(cls, bias: Tensor | None) -> tuple[Moved, ...]:
        """That of a bias (`bias.readable`), if there is one: tiles of 64 queries and 64 keys."""
        return () if bias is None else (cls.of(bias, 0)._replace(box=(1, 1, CHUNK_ROWS, CHUNK_ROWS)),)


class Plan(NamedTuple):
    """A launch for tensors of one signature.

    free: its numbers of tokens and sequences, and their strides; with dropout the address of the seed comes behind them. slots: which of them change
    from call to call. moved: of the tensors that the copy engine moves, in the kernel's order. parked: how many numbers of scratch memory it needs
    for unfinished dQ.
    """

    launch: Bound
    free: tuple[int, ...]
    slots: tuple[int, ...]
    moved: tuple[Moved, ...]
    parked: int = 0

    def run(self, tensors: tuple[Tensor, ...], pointers: tuple[int, ...], seed: Tensor | None = None) -> None:
        """Launch with the tensors that are moved, the addresses of the others in the kernel's order, and the seed of dropout."""
        maps = [(x.data_ptr(), *moved) for x, moved in zip(tensors, self.moved, strict=True)]
        free = varying(self.free, self.slots)
        self.launch(*pointers, *free, *(() if seed is None else (seed.data_ptr(),)), maps=maps)


_LAUNCHES = LaunchCache()


def _launch(
    direction: str, args: VarlenArgs, grid: int, written: tuple[Tensor, ...], numbers: dict[str, Any], config: Sm90Config
) -> Bound:
    """The launch of a call; its numbers of tokens and sequences are free."""
    query = args.query
    names = ("out",) if direction == "forward" else ("dquery", "dkey", "dvalue")
    lies = {n: _strides(x) for n, x in zip(names, written, strict=True)}
    if args.mask is not None and args.bias is None:
        lies["mask"] = strides_of(args.mask, direction == "backward")
    strides = {f"{n}_{dim}": s for n, of in lies.items() for dim, s in zip(("batch", "head", "row"), of, strict=True)}
    if args.mask is not None and args.bias is not None:
        strides |= key_mask.strides_of(args.mask)
    heads, head_dim, group = query.shape[1], query.shape[-1], choice.kind_of(args).group
    # a block of backward owns a key head
    numbers |= {"heads": heads if direction == "forward" else heads // group, "head_dim": head_dim}
    if group > 1:
        numbers["group_size"] = group
    dropped = None if args.seed is None else args.dropout_p
    window = window_of(args)
    if window is not None:
        numbers |= dict(zip(("window_left", "window_right"), window, strict=True))
    matrices, late = None if args.bias is None else tuple(args.bias.shape[:2]), late_maxima(head_dim)
    if matrices is not None:
        numbers |= dict(zip(("bias_windows", "bias_owners"), matrices, strict=True))
    size = (heads, head_dim, group, args.mask is None, matrices, late, query.dim(), query.dtype, query.device)
    key = (direction, grid, tuple(strides.values()), size, args.causal, args.scale, dropped, window, _segment(args), config)
    found = _LAUNCHES.get(key)
    if found is None:
        if dropped is not None:
            numbers |= {"threshold": word_threshold(dropped), "inverse": survival_inverse(dropped)}
        call = _call(direction, args, grid, strides | numbers, config)
        found = _LAUNCHES.remember(key, call.ready(query.device))
    return found


def _call(direction: str, args: VarlenArgs, grid: int, arguments: dict[str, Any], config: Sm90Config) -> CudaLaunch:
    query, features = args.query, choice.kind_of(args).features
    causal = _alignment(args) if features[-1] else args.causal
    macros = defines(
        direction, query.shape[-1], query.dtype == torch.bfloat16, query.dim() == 3, causal, config, *features, _segment(args),
        args.bias is not None, late_maxima(query.shape[-1]),
    )  # fmt: skip
    beside = args.bias is not None and args.mask is not None
    shared = shared_bytes(direction, query.shape[-1], config, args.bias is not None, beside)
    return CudaLaunch(
        source(direction), f"long_{direction}_sm90", Options.of(macros), (grid, 1), threads(direction, config), shared, arguments,
        ARCHITECTURE,
    )  # fmt: skip


def window_of(args: VarlenArgs) -> tuple[int, int] | None:
    """(left, right) of a window."""
    return choice.window_of((args.window_left, args.window_right), args.causal)


def _segment(args: VarlenArgs) -> int:
    if window_of(args) is None:
        return 0
    dense = args.query.dim() == 4
    rounds = args.key.shape[0] * -(-args.max_k // ROUND_ROWS) if dense else args.key.shape[0] // ROUND_ROWS
    return segment_rounds(rounds * args.key.shape[1], -(-args.max_k // ROUND_ROWS), multiprocessors(args.query.device))


def segment_rows(args: VarlenArgs) -> int:
    """Keys of a segment: with a window, the part of a sequence that a block of backward takes. If it takes a share of all rounds, the keys of a round."""
    return _segment(args) * ROUND_ROWS


def _alignment(args: VarlenArgs) -> int:
    """The key that a window is aligned with, as a value of the macro CAUSAL."""
    return BOTTOM_RIGHT if args.causal in ALIGNED_LAST else UPPER_LEFT


# the result of `_free`, and the numbers of scratch memory for unfinished dQ
_PACKED = (SEQUENCES, QUERIES, KEYS, LONGEST_Q, LONGEST_K, FIXED, QUERIES, FIXED)
_DENSE = (FIXED,) * len(_PACKED)


def _slots(args: VarlenArgs) -> tuple[int, ...]:
    return _DENSE if args.query.dim() == 4 else _PACKED


def _free(args: VarlenArgs) -> tuple[int, ...]:
    """The numbers that change from call to call, which are passed in place of pointers."""
    query, key = args.query, args.key
    if query.dim() == 4:
        batch, heads = query.shape[:2]
        return batch, batch * args.max_q, batch * args.max_k, args.max_q, args.max_k, heads * args.max_q, args.max_q
    sequences = args.cu_seqlens_q.shape[0] - 1
    return sequences, query.shape[0], key.shape[0], args.max_q, args.max_k, 0, query.shape[0]


def offsets_of(args: VarlenArgs, members: Tensor | None, count: Tensor | None) -> tuple[int, int, int, int]:
    """Addresses of cu_q, cu_k, members and count; for dense rows, cu_k is their lengths or null."""
    if members is not None and count is not None:
        return args.cu_seqlens_q.data_ptr(), args.cu_seqlens_k.data_ptr(), members.data_ptr(), count.data_ptr()
    return 0, 0 if args.cu_seqlens_k is None else args.cu_seqlens_k.data_ptr(), 0, 0


def plan_forward(args: VarlenArgs, out: Tensor, config: Sm90Config | None = None, longest: int = 0) -> Plan:
    """The launch of forward calls of a signature. longest: it serves batches of any size, of so many tokens a sequence at most. Raises as `forward`."""
    config = config or CONFIGS["forward", rounded(args.query.shape[-1])]
    free = _free(args)
    work = free[0] * args.query.shape[1] * -(-args.max_q // BLOCK_ROWS)
    most = multiprocessors(args.query.device)
    grid = most if longest else max(1, min(-(-work // config.teams), most))
    if args.bias is not None:  # teams of a block share tiles of a matrix
        matrices = args.bias.shape[0] * args.bias.shape[1]
        members = free[0] * args.query.shape[1] // matrices
        grid = max(1, min(matrices * -(-members // config.teams) * -(-args.max_q // BLOCK_ROWS), most))
    launch = _launch("forward", args, grid, (out,), {"exponent": args.scale * (1.0 if args.bias is not None else LOG2E)}, config)
    moved = tuple(map(Moved.of, (*args[:3], out), (QUERIES, KEYS, KEYS, QUERIES)))
    return Plan(launch, free, _slots(args), (*moved, *Moved.of_bias(args.bias)))


def plan_backward(
    args: VarlenArgs, dout: Tensor, out: Tensor, gradients: tuple[Tensor, Tensor, Tensor], config: Sm90Config | None = None,
    longest: int = 0,
) -> Plan:  # fmt: skip
    """The launch of backward calls of a signature. longest: as of `plan_forward`. Raises as `forward`."""
    head_dim, group = rounded(args.query.shape[-1]), choice.kind_of(args).group
    config = config or CONFIGS["backward", head_dim]
    free = _free(args)
    most = multiprocessors(args.query.device)
    window = window_of(args)
    blocks = free[0] * (args.query.shape[1] // group) * (1 if window is None else -(-args.max_k // segment_rows(args)))
    grid = most if longest else max(1, min(blocks, most))
    launch = _launch("backward", args, grid, gradients, {"scale": args.scale}, config)
    max_q, max_k = longest or args.max_q, longest or args.max_k
    chunks = -(-max_q // CHUNK_ROWS)
    if window is not None:  # the chunks whose dQ one round has begun and another continues
        chunks = max(1, min(chunks, (sum(window) + 62) // CHUNK_ROWS + 1))
    parked_block = group * chunks * CHUNK_ROWS * head_dim if max_k > ROUND_ROWS or window is not None else 0
    moved = tuple(map(Moved.of, (*args[:3], dout, out), (QUERIES, KEYS, KEYS, QUERIES, QUERIES)))
    return Plan(launch, (*free, parked_block), _slots(args), (*moved, *Moved.of_bias(args.bias)), max(1, grid * parked_block))


def forward(
    args: VarlenArgs, members: Tensor | None, count: Tensor | None, out: Tensor, lse: Tensor, config: Sm90Config | None = None,
    longest: int = 0,
) -> None:  # fmt: skip
    """Write out and lse. members, count: the sequences of the launch, with a window their parts of BLOCK_ROWS queries, None for dense rows. longest: as
    of `plan_forward`.

    Raises:
        CompileError, CompilerUnavailable: the kernel does not compile here.
    """
    plan = plan_forward(args, out, config, longest)
    run_forward(plan, (*args[:3], out), offsets_of(args, members, count), lse, args.mask, args.seed)


def shown_by(mask: Tensor | None, biased: bool, by_key: bool) -> tuple[Tensor, ...]:
    """The form of a mask `[B, H, Tq, Tk]` that a kernel reads: bits of pairs, or with a bias the mask itself, which is one of keys."""
    if mask is None:
        return ()
    return (mask if biased else pack(mask, by_key),)


def run_forward(
    plan: Plan, moved: tuple[Tensor, ...], offsets: tuple[int, ...], lse: Tensor, mask: Tensor | None, seed: Tensor | None
) -> None:
    """A launch that is known. moved: query, key, value, out, bias if any. mask: as it is, `[B, H, Tq, Tk]`. seed: of dropout."""
    shown = shown_by(mask, len(moved) > 4, by_key=False)
    plan.run(moved, (*offsets, moved[3].data_ptr(), lse.data_ptr(), *[x.data_ptr() for x in shown]), seed)


def backward(
    args: VarlenArgs, members: Tensor | None, count: Tensor | None, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    delta: Tensor, gradients: tuple[Tensor, Tensor, Tensor], config: Sm90Config | None = None, longest: int = 0,
) -> None:  # fmt: skip
    """Write dq, dk and dv. members, count: as in `forward`; with a window they are of parts of `segment_rows` keys. delta: a given one if the kernel
    does not compute it, scratch memory otherwise. Raises as `forward`."""
    plan = plan_backward(args, dout, out, gradients, config, longest)
    run_backward(
        plan, (*args[:3], dout, out), offsets_of(args, members, count), dlse, lse, delta, gradients, args.mask, args.seed
    )


def run_backward(
    plan: Plan, moved: tuple[Tensor, ...], offsets: tuple[int, ...], dlse: Tensor | None, lse: Tensor, delta: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, seed: Tensor | None, inverse: Tensor | None = None,
) -> None:  # fmt: skip
    """A launch that is known. moved: query, key, value, dout, out, bias if any. mask, seed: as in `run_forward`. inverse: of a bias, which numbers of
    its rows come with in place of lse and delta (`NumbersOfRows` of the source)."""
    parked = scratch((plan.parked,), torch.float32, lse.device)
    shown = shown_by(mask, inverse is not None, by_key=True)
    dq, dk, dv = gradients
    pointers = (
        *offsets, lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(), delta.data_ptr(), parked.data_ptr(), dq.data_ptr(),
        dk.data_ptr(), dv.data_ptr(), *([] if inverse is None else [inverse.data_ptr()]), *[x.data_ptr() for x in shown],
    )  # fmt: skip
    plan.run(moved, pointers, seed)
