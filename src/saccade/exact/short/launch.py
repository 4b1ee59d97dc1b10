"""From arguments to a running kernel. Whatever depends only on metadata is worked out once per signature and then replayed.

Triton's own `kernel[grid](...)` spends tens of microseconds binding and specialising forty arguments; a short attention takes
less on the device. Strides and sizes are part of the signature here, so that the compiled kernel can be called directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.env import interpreting_triton
from saccade.exact.args import AttentionArgs, windows_of
from saccade.exact.short.bias_gradient import BiasSharing
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import first_launch
from saccade.recorder import ACTIVE

# the tensors of a direction, in the order in which the launchers hand them over and the kernels take them
_INPUTS = ("query", "key", "value", "bias", "mask", "lengths", "seed")
FORWARD_TENSORS = (*_INPUTS, "out", "lse")
BACKWARD_TENSORS = (*_INPUTS, "dout", "lse", "dlse", "dquery", "dkey", "dvalue", "dbias")


@dataclass
class Launch:
    """One kernel, ready for tensors of one signature. `static` holds all arguments after the tensors, constexprs included.

    descriptors: name of a tensor argument -> (rows, columns) of its tile, if the kernel takes a TMA descriptor.
    names: names of the tensor arguments, in their order; needed if there are descriptors.
    """

    kernel: Any
    programs: int
    static: tuple
    options: dict[str, Any]
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    runner: Any = None
    compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # Triton launches on the current device, whatever device the tensors are on
            with torch.cuda.device(device):
                self._launch(tensors)
        else:
            self._launch(tensors)

    def _launch(self, tensors: tuple[Tensor, ...]) -> None:
        if self.runner is not None:
            # addresses, not tensors: for a tensor the launcher fetches the address again and checks it with the driver
            self.runner(*(self.arguments(tensors) if self.descriptors else [t.data_ptr() for t in tensors]), *self.static)
        else:
            compiled = first_launch(self.kernel, self.grid, (*self.arguments(tensors), *self.static), self.options)
            if interpreting_triton():
                return
            self.compiled = compiled
            # bound to the kernel and the grid; looks up the current stream at each call
            self.runner = compiled[self.grid]
        if ACTIVE.recorder is not None:
            self._note(ACTIVE.recorder, tensors)

    @property
    def grid(self) -> tuple[int, int, int]:
        """In the form in which Triton takes it."""
        return self.programs, 1, 1

    def _note(self, recorder: Any, tensors: tuple[Tensor, ...]) -> None:
        if self.descriptors:
            recorder.refused = True  # C++ cannot make Triton's descriptors
            return
        recorder.triton(self.compiled, self.grid, tensors, (*[t.data_ptr() for t in tensors], *self.static))

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The tensors in the form in which the kernel takes them."""
        if not self.descriptors:
            return tensors
        tiles = self.descriptors
        return tuple([describe(x, *tiles[name]) if name in tiles else x for name, x in zip(self.names, tensors, strict=True)])


@dataclass
class BackwardPlan:
    """The plan of a backward call, made once per signature.

    launch: called with the tensors of backward, a `Launch` or one of `sm90`.
    kv_share: 1 if a program sums dK and dV over the query heads of a group. Otherwise the group size: each query head writes its
        own float32 dK and dV, which are summed afterwards (bias gradients, pooling and the chunked kernel keep no sum over
        heads).
    sharing: how the programs share the sum of dbias, if it is requested.
    heads: the number of query heads.
    """

    launch: Any
    kv_share: int
    sharing: BiasSharing | None
    heads: int

    def per_query_head(self, gradient: Tensor) -> Tensor:
        """The tensor into which the kernel writes dK or dV: the gradient itself, or a float32 `[B, H, Tk, D]`."""
        if self.kv_share == 1:
            return gradient
        batch, _, kv_len, dim = gradient.shape
        return gradient.new_empty((batch, self.heads, kv_len, dim), dtype=torch.float32)


def describe(tensor: Tensor, rows: int, cols: int) -> Any:
    """TMA descriptor of a `[B, H, T, D]` tensor as `[B, T, H, D]`, with tiles `[1, rows, 1, cols]`.

    The order matters. With `[1, 1, rows, cols]` Triton feeds K and V to the matrix units from shared memory. That needs a third
    buffer of each, which no longer fits at S = 128, D = 64. With `[1, rows, 1, cols]` they go through registers.
    """
    tensor = tensor.transpose(1, 2)
    # the stride of an axis of size 1 is never used, but the descriptor checks its alignment too
    strides = [stride if extent > 1 else 16 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)]
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), [*strides[:-1], 1], [1, rows, 1, cols])


def takes_tma(*tensors: Tensor) -> bool:
    """Whether the copy engine can address these tensors: base and strides are multiples of 16 bytes, and no stride is 0."""
    return all(
        t.data_ptr() % 16 == 0
        and all(s > 0 and s * t.element_size() % 16 == 0 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1)
        for t in tensors
    )


def aligned(args: AttentionArgs) -> tuple[bool, ...]:
    """Whether each tensor of a call starts at a multiple of 16 bytes."""
    return tuple([t.data_ptr() % 16 == 0 for t in args[:6] if t is not None])


_UNPREPARED = LaunchCache()


def launches_of(args: AttentionArgs) -> LaunchCache:
    """The launches remembered for calls that differ only in their data. A call that was not prepared, such as one in a compiled
    graph, is looked up."""
    if args.launches is not None:
        return args.launches
    signature = tuple([None if t is None else metadata(t)[:4] for t in args[:6]]), args.seed is None, args[7:10]
    return _UNPREPARED.get_or_make(signature, LaunchCache)


def forget() -> None:
    """Forget the launches of calls that were not prepared, so that they are planned again."""
    _UNPREPARED.clear()


def metadata(tensor: Tensor) -> tuple:
    """Shape, strides, dtype, device and alignment of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0


# a row stride that a kernel multiplies by row numbers below 256 in int32
_FARTHEST = 2**31 // 256


def row_strides(tensors: Sequence[Tensor]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """(strides of `[B, H, T, D]` tensors that a kernel takes as arguments, ROW_STRIDES: its constants).

    Arguments are (batch, head), and the row stride is a constant of the compiled kernel. In the layout `[T, B, H, D]`, tokens outside the
    batch, the row stride depends on the number of sequences. If all tensors have it, the row stride is the third argument and its constant is 0.
    """
    several = [t for t in tensors if t.shape[2] > 1]  # the row stride of a single token has no meaning
    outside = bool(several) and all(t.stride(0) < t.stride(2) < _FARTHEST for t in several)
    kept = 3 if outside else 2
    return [t.stride()[:kept] for t in tensors], tuple([0 if outside else t.stride(2) for t in tensors])


def bias_strides(bias: Tensor | None, full: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The strides of a bias as `strides4` gives them, and behind them the number of windows if each has its own bias (see `windows_of`)."""
    windows = windows_of(bias, full[0])
    return (*strides4(bias, (windows, *full[1:])), windows) if windows else strides4(bias, full)


def strides4(tensor: Tensor | None, full: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """(batch, head, query, key) strides of a mask or bias broadcast to `full`; zeros when there is none."""
    return (0, 0, 0, 0) if tensor is None else tensor.expand(full).stride()
