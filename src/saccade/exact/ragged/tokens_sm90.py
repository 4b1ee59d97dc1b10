"""Token tiles in CUDA C++ (`cuda/tokens_*.cu`), for sm_90: what they take, and their launches.

A warp takes 16 tokens and multiplies only the rows of their sequences, where Triton's programs of four warps multiply those of 64 tokens. All rows are
requested together. Each block finds the bounds of its tokens. The draw of dropout is that of the Triton kernels, which take what these decline:
windows, D beyond 64 or not a multiple of 8, tensors that 16-byte copies cannot address.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.engine.window import has_window
from saccade.exact.long.config import rounded
from saccade.exact.ragged import config
from saccade.exact.ragged.call import RaggedCall
from saccade.exact.ragged.config import TokensSm90Config
from saccade.exact.varlen.args import HIDE_LATER
from saccade.launch.cache import LaunchCache
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, CudaLaunch
from saccade.launch.disabled import FAILURES, disable, failure_of
from saccade.launch.dropout import survival_inverse
from saccade.native.described import FIXED, QUERIES, SEQUENCES
from saccade.native.recording import varying
from saccade.nvrtc import Bound, Options, Source, obstacles
from saccade.nvrtc.capture import capture_id

ARCHITECTURE = "90a"
TILE, ROWS = 64, 128  # tokens of a block; rows of a tile in shared memory, which the sources fill up to ROWS - 15
_FOLDER = Path(__file__).parent / "cuda"
_STRIDED = {
    "forward": ("query", "key", "value", "out"),
    "backward": ("query", "key", "value", "dout", "out", "dquery", "dkey", "dvalue"),
}


def source(direction: str) -> Source:
    """The file of a direction."""
    return Source(_FOLDER / f"tokens_{direction}.cu", (HEADERS,))


def shared_bytes(direction: str, head_dim: int) -> int:
    """Dynamic shared memory of a block; the sources check it."""
    row = 2 * rounded(head_dim)
    return (TILE + 2 * ROWS) * row if direction == "forward" else ROWS * (4 * row + 8)


def defines(
    direction: str, head_dim: int, bf16: bool, causal: bool, dropout: bool, shape: TokensSm90Config, grouped: bool = False, dlse: bool = False
) -> dict[str, int]:  # fmt: skip
    """The macros that a kernel is compiled with."""
    found = {
        "HEAD_DIM": rounded(head_dim), "ROWS": ROWS, "WARPS": TILE // 16, "BF16": bf16, "CAUSAL": causal, "DROPOUT": dropout, "BLOCKS": shape.blocks,
        "GROUPED": grouped, "SHARED_BYTES": shared_bytes(direction, head_dim),
    }  # fmt: skip
    return found | ({"STEP": shape.step} if direction == "forward" else {"HAS_DLSE": dlse})


def prefers(call: RaggedCall, direction: str) -> bool:
    """Whether these kernels were timed for a direction of a packed call, and are faster than Triton's."""
    args = call.args
    longest = max(args.max_q, args.max_k)
    if not config.in_tokens_sm90(direction, call.arch, call.size, call.head_dim, longest, has_window(args)):
        return False
    numbers = call.total_q * call.heads * call.block_d
    return not capture_id(args.query.device) or config.captured_tokens_sm90(numbers, call.head_dim, args.seed is not None)


def takes(call: RaggedCall, direction: str, *others: Tensor) -> bool:
    """Whether these kernels compute a direction of a call that token tiles take. others: out, or dout, out and the gradients."""
    args = call.args
    if not prefers(call, direction) or not args.scale > 0:
        return False
    if obstacles(ARCHITECTURE) or failure_of(_named(call, direction)) is not None:
        return False
    return all(_is_movable(x) for x in (*args[:3], *others))


def _is_movable(tensor: Tensor) -> bool:
    """Whether 16 bytes are the unit of all its rows, and 31 bits hold its strides."""
    strides = tensor.stride()[:2]
    return tensor.data_ptr() % 16 == 0 and all(0 <= s < 2**31 and s % 8 == 0 for s in strides)


def _named(call: RaggedCall, direction: str) -> tuple[Any, ...]:
    """The key under which a failure to compile is remembered."""
    args = call.args
    features = args.causal in HIDE_LATER, args.seed is not None, call.group > 1
    return "attention_varlen", f"tokens_{direction}", rounded(call.head_dim), args.query.dtype, *features


_LAUNCHES = LaunchCache()


def _launch(call: RaggedCall, direction: str, tensors: tuple[Tensor, ...], dlse: bool) -> Bound:
    """The launch of a call; its numbers of tokens and sequences, and its blocks, are free. tensors: of _STRIDED."""
    args, shape = call.args, config.TOKENS_SM90_CONFIGS[direction, rounded(call.head_dim)]
    query, causal, dropped = args.query, args.causal in HIDE_LATER, None if args.seed is None else args.dropout_p
    lies = tuple([s for x in tensors for s in x.stride()[:2]])
    key = (
        direction,
        lies,
        call.heads,
        call.head_dim,
        call.group,
        query.dtype,
        query.device,
        causal,
        args.scale,
        dropped,
        dlse,
        shape,
    )
    found = _LAUNCHES.get(key)
    if found is None:
        numbers: dict[str, Any] = {"head_dim": call.head_dim}
        if call.group > 1:
            numbers["group_size"] = call.group
        if direction == "forward":
            numbers |= {"heads": call.heads, "exponent": args.scale * LOG2E}
        else:
            numbers |= {"owners": call.heads // call.group, "scale": args.scale}
        if dropped is not None:
            numbers["inverse"] = survival_inverse(dropped)
        strides = dict(zip((f"{n}_{dim}" for n in _STRIDED[direction] for dim in ("row", "head")), lies, strict=True))
        bf16 = query.dtype == torch.bfloat16
        macros = defines(direction, call.head_dim, bf16, causal, dropped is not None, shape, call.group > 1, dlse)
        described = CudaLaunch(
            source(direction), f"tokens_{direction}", Options.of(macros), (1, 1), 2 * TILE, shared_bytes(direction, call.head_dim),
            strides | numbers, ARCHITECTURE,
        )  # fmt: skip
        found = _LAUNCHES.remember(key, described.ready(query.device))
    return found


def _run(
    call: RaggedCall, direction: str, strided: tuple[Tensor, ...], pointers: tuple[Tensor, ...], bits: Tensor | None, words: int, dlse: bool
) -> bool:  # fmt: skip
    """Whether the kernel ran; False if it does not compile here."""
    try:
        launch = _launch(call, direction, strided, dlse)
    except FAILURES as error:
        disable(_named(call, direction), "the Triton kernel", error)
        return False
    free = varying((call.total_q, call.sequences, *[words] * (bits is not None)), (QUERIES, SEQUENCES, FIXED))
    owners = call.heads if direction == "forward" else call.heads // call.group
    given = pointers if bits is None else (*pointers, bits)
    launch(*[x.data_ptr() for x in given], *free, grid=-(-call.total_q // TILE) * owners, follows=(owners, 0, TILE))
    return True


def forward(call: RaggedCall, bits: Tensor | None, words: int, out: Tensor, lse: Tensor) -> bool:
    """out and lse of all tokens of a call that they take; False if the kernel does not compile. bits, words: of `survivors_kernel`, bits None
    without dropout."""
    inputs = call.args[:3]
    return _run(call, "forward", (*inputs, out), (*inputs, call.args.cu_seqlens_q, out, lse), bits, words, False)


def backward(
    call: RaggedCall, bits: Tensor | None, words: int, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> bool:  # fmt: skip
    """Every gradient of all tokens; False as in `forward`."""
    inputs = call.args[:3]
    pointers = (*inputs, call.args.cu_seqlens_q, dout, out, lse, lse if dlse is None else dlse, *gradients)
    return _run(call, "backward", (*inputs, dout, out, *gradients), pointers, bits, words, dlse is not None)
