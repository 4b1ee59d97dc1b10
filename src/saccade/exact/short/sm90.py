"""Launches of the CUDA C++ kernels for sm_90a: the compile options, shared memory and arguments of each form.

At S = 128 Triton keeps tiles and both score matrices in registers, so one program fills a multiprocessor and its phases wait for
each other. These kernels keep every tile in shared memory; the copy engine brings the tiles there and takes the results from
there. They take plain and causal calls in 16-bit dtypes. Masks, biases, lengths, dropout and grouped heads stay with Triton.
Source: paper 002; the memory traffic is the minimum it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.short.config import Config, kernel_name, tile_size
from saccade.exact.short.launch import BACKWARD_TENSORS, FORWARD_TENSORS
from saccade.hardware import multiprocessors
from saccade.launch.constants import LOG2E
from saccade.launch.cuda import HEADERS, strides
from saccade.nvrtc import Bound, Options, Parameters, Source, load, parameters_of

_FOLDER = Path(__file__).parent / "cuda"
ARCHITECTURE = "90a"
# of the streamed form: columns of a tile, and tiles of V and of dO
CHUNK, SLOTS = 64, 2
# room for 8 barriers behind the tiles; the sources check what a launch asks for (SHARED_BYTES)
BARRIER_BYTES = 64


def source(form: str) -> Source:
    """The file of a form."""
    return Source(_FOLDER / f"{kernel_name(form)}.cu", (HEADERS,))


class Built(NamedTuple):
    """One kernel as it is compiled and launched, without the tensors. It is plain data, so that tests can compile it without a
    GPU."""

    form: str
    defines: dict[str, int]
    threads: int
    shared_bytes: int
    numbers: dict[str, float]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return kernel_name(self.form)

    @property
    def options(self) -> Options:
        """How the kernel is compiled."""
        return Options.of(self.defines)

    @property
    def parameters(self) -> Parameters:
        """The kernel's parameters, in its order."""
        return parameters_of(source(self.form), self.name, self.options)


class Moved(NamedTuple):
    """How the copy engine moves a tensor `[B, H, T, D]`: 64 rows at a time, of 64 columns or all 32."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]  # in bytes: batch rows, heads, rows
    columns: int

    @classmethod
    def of(cls, tensor: Tensor, tile_columns: int) -> Moved:
        """The sizes and strides of the map; the stride of an axis of size 1 is never used, but has to be a multiple of 16
        bytes."""
        size = tensor.element_size()
        strides = tuple(s * size if n > 1 else 16 for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True))
        return cls(tuple(tensor.shape), strides, min(tile_columns, 64))  # type: ignore[arg-type]

    def map(self, tensor: Tensor) -> tuple:
        """The map of a tensor of this shape, as `Bound` takes it."""
        return tensor.data_ptr(), self.sizes, self.strides, (1, 1, 64, self.columns)


@dataclass
class Sm90Launch:
    """One kernel, ready for tensors of one signature; like `launch.Launch` it is called with all tensors of the direction, in
    their order.

    moved: for each tensor map that the kernel takes, the index of its tensor and how that tensor is moved.
    pointers: the indices of the tensors that the kernel takes as pointers. Both are in the order of the kernel.
    """

    built: Built
    programs: int
    moved: tuple[tuple[int, Moved], ...]
    pointers: tuple[int, ...]
    bound: Bound | None = None

    def __call__(self, *tensors: Tensor) -> None:
        maps = [moved.map(tensors[place]) for place, moved in self.moved]
        if self.bound is None:
            self.bound = self._bind(tensors[0].device)
        self.bound(*[tensors[place].data_ptr() for place in self.pointers], maps=maps)

    def _bind(self, device: torch.device) -> Bound:
        built = self.built
        kernel = load(source(built.form), built.name, built.options, device, ARCHITECTURE)
        return kernel.configure(self.programs, built.threads, built.shared_bytes).bind(built.numbers)


def _launch(built: Built, programs: int, names: tuple[str, ...], tensors: dict[str, Tensor], columns: int) -> Sm90Launch:
    """The launch of a kernel. names: of the tensors of its direction. tensors: those that the copy engine moves, by name, in tiles of
    `columns` columns."""
    parameters = built.parameters
    moved = tuple((name, tensors[name]) for name in (x.removesuffix("_map") for x in parameters.maps))
    pointers = tuple(names.index(name) for name in parameters.pointers)
    return Sm90Launch(built, programs, tuple((names.index(name), Moved.of(t, columns)) for name, t in moved), pointers)


def plan_forward(args: AttentionArgs, out: Tensor, config: Config) -> Sm90Launch:
    """The launch of a forward call."""
    rows, dim = _tiles(args)
    tile = rows * dim * 2
    defines = {
        **_defines(args, config), "ROWS": rows, "HEAD_DIM": dim, "WARPGROUPS": config.warps // 4, **_masked(args, rows),
    }  # fmt: skip
    batch, heads, q_len, _ = args.query.shape
    numbers = {"heads": heads, "q_len": q_len, "kv_len": args.key.shape[2], "exponent": args.scale * LOG2E}
    shared = 3 * tile + BARRIER_BYTES
    built = Built("forward", defines | {"SHARED_BYTES": shared}, 32 * config.warps, shared, numbers)
    tensors = {"query": args.query, "key": args.key, "value": args.value, "out": out}
    return _launch(built, batch * heads, FORWARD_TENSORS, tensors, dim)


def plan_backward(
    args: AttentionArgs, dout: Tensor, has_dlse: bool, gradients: tuple[Tensor, Tensor, Tensor], config: Config
) -> Sm90Launch:
    """The launch of a backward call."""
    if args.query.shape[2] == 1:
        return _plan_pooling(args, dout, has_dlse, gradients, config)
    rows, dim = _tiles(args)
    batch, heads, q_len, _ = args.query.shape
    tile, weights = rows * dim * 2, rows * rows * 2
    defines = {**_defines(args, config), "ROWS": rows, "HEAD_DIM": dim, "HAS_DLSE": has_dlse, **_masked(args, rows)}
    problems = batch * heads
    programs = problems
    if config.sm90 == "backward_streamed":
        defines |= {"CHUNK": CHUNK, "SLOTS": SLOTS}
        shared = 2 * tile + 2 * SLOTS * rows * CHUNK * 2 + weights
    elif config.sm90 == "backward_turns":
        shared = 3 * tile + weights + 2 * 4 * rows
    else:
        defines["PERSISTENT"] = config.persistent
        shared = (6 if config.persistent else 5) * tile + weights
    if config.persistent:
        programs = min(problems, config.programs_per_sm * multiprocessors(dout.device))
    numbers = {"problems": problems, "heads": heads, "q_len": q_len, "kv_len": args.key.shape[2], "scale": args.scale}
    shared += BARRIER_BYTES
    built = Built(config.sm90, defines | {"SHARED_BYTES": shared}, 32 * config.warps, shared, numbers)
    tensors = dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))
    tensors |= {"query": args.query, "key": args.key, "value": args.value, "dout": dout}
    return _launch(built, programs, BACKWARD_TENSORS, tensors, CHUNK if config.sm90 == "backward_streamed" else dim)


def _plan_pooling(
    args: AttentionArgs, dout: Tensor, has_dlse: bool, gradients: tuple[Tensor, Tensor, Tensor], config: Config
) -> Sm90Launch:
    batch, heads, _, head_dim = args.query.shape
    kv_len = args.key.shape[2]
    defines = {
        "BF16": args.query.dtype == torch.bfloat16, "HEAD_DIM": max(32, tile_size(head_dim)), "WARPS": config.warps,
        "MAX_KEYS": tile_size(kv_len), "HAS_DLSE": has_dlse,
    }  # fmt: skip
    dq, dk, dv = gradients
    numbers = {
        "heads": heads, "kv_len": kv_len, "head_dim": head_dim, "scale": args.scale,
        **strides(query=args.query.stride()[:2], key=args.key.stride()[:3], value=args.value.stride()[:3], dout=dout.stride()[:2]),
        **strides(dquery=dq.stride()[:2], dkey=dk.stride()[:3], dvalue=dv.stride()[:3]),
    }  # fmt: skip
    built = Built("pooling_backward", defines, 32 * config.warps, 0, numbers)
    return _launch(built, batch * heads, BACKWARD_TENSORS, {}, 0)


def _tiles(args: AttentionArgs) -> tuple[int, int]:
    """Rows and columns of a tile."""
    return tile_size(max(args.query.shape[2], args.key.shape[2])), max(32, tile_size(args.query.shape[3]))


def _defines(args: AttentionArgs, config: Config) -> dict[str, int]:
    return {
        "BF16": args.query.dtype == torch.bfloat16, "CAUSAL": args.is_causal, "BLOCKS_PER_SM": max(config.programs_per_sm, 1),
    }  # fmt: skip


def _masked(args: AttentionArgs, rows: int) -> dict[str, int]:
    return {"MASK_QUERIES": args.query.shape[2] != rows, "MASK_KEYS": args.key.shape[2] != rows}
