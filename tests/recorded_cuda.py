"""CUDA C++ kernels that do not run: a launch writes down its arguments, from Python through a stand-in for `Bound`, from C++ through functions in the
place of the driver's."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

from saccade.exact.long import bias, bias_gradient, sm90
from saccade.exact.ragged import sm80, tokens_sm90
from saccade.exact.short import sm90 as short_sm90
from saccade.nm_sparse.fused import last_wave
from saccade.nvrtc import Options, parameters_of
from saccade.recorder import ACTIVE

NUMBERS = (11, -1, 13)
# what the launch of a kernel does besides being written down, from Python and from C++: a function of its arguments, by the kernel's number
EFFECTS: dict = {}
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint32)] * 2, *[ctypes.c_int] * 4,
)  # fmt: skip


class Stub:
    """Stands in for `Bound`, and writes down what it is called with."""

    dependent, numbers = False, NUMBERS

    def __init__(self, seen: list, name: str, grid, threads: int, shared_bytes: int):
        self.seen, self.function = seen, sum(name.encode())
        self.shape = SimpleNamespace(grid=grid, block=threads, shared_bytes=shared_bytes)

    def __call__(self, *pointers: int, maps=(), grid: int = 0, follows=None) -> None:
        if ACTIVE.recorder is not None:
            ACTIVE.recorder.cuda(self, pointers, maps, grid, follows)
        shape = grid or self.shape.grid
        extents = (*(shape if isinstance(shape, tuple) else (shape,)), 1, 1)[:3]
        self.seen.append((self.function, extents, self.shape.block, self.shape.shared_bytes, tuple(maps), (*pointers, *NUMBERS)))
        if self.function in EFFECTS:
            EFFECTS[self.function](pointers)


def bound_of_long(found):
    """In the place of `sm90._launch`."""

    def bound(direction, args, grid, written, numbers, config):
        dropout, packed = "_dropout" * (args.seed is not None), "_packed" * (args.query.dim() == 3) + _beside(args)
        shared = sm90.shared_bytes(direction, 64, config)
        return Stub(found, f"{direction}{dropout}{packed}", (grid, 1), sm90.threads(direction, config), shared)

    return bound


def _beside(args) -> str:
    """A bias of a call, and its mask of keys, as names of kernels have them."""
    return "" if args.bias is None else "_bias" + "_keys" * (args.mask is not None)


def call_of_bias_gradient(found):
    """In the place of `bias_gradient._call`."""

    def call(args, bias, lies, grid, each):
        name = f"bias_gradient{'_dropout' * (args.seed is not None)}{_beside(args)}"
        stub = Stub(found, name, (grid, each), 384, bias_gradient.shared_bytes(64))
        return SimpleNamespace(ready=lambda device: stub)

    return call


def ready_of(found, *kernels: str):
    """In the place of `CudaLaunch.ready`, for these kernels."""

    def ready(call, device):
        assert call.kernel in kernels
        return Stub(found, call.kernel, call.grid, call.threads, call.shared_bytes)

    return ready


class Named:
    """Stands in for a loaded kernel and for a `Launch` of it, which takes all arguments by name."""

    def __init__(self, seen: list, source, name: str, options):
        self.seen, self.parameters, self.function = seen, parameters_of(source, name, options), sum(name.encode())
        numbers = len(self.parameters.kinds) - len(self.parameters.maps) - len(NUMBERS)
        COUNTS[self.function] = len(self.parameters.maps), numbers

    def configure(self, grid, block, shared_bytes=0):
        self.shape = SimpleNamespace(grid=grid, block=block, shared_bytes=shared_bytes)
        return self

    def __call__(self, **arguments) -> None:
        if ACTIVE.recorder is not None:
            ACTIVE.recorder.cuda_by_name(self, arguments)
        maps = tuple([arguments[name].about for name in self.parameters.maps])
        values = [
            self.parameters.word(name, arguments[name]) for name in self.parameters.kinds if name not in self.parameters.maps
        ]
        extents = (*(self.shape.grid if isinstance(self.shape.grid, tuple) else (self.shape.grid,)), 1, 1)[:3]
        self.seen.append((self.function, extents, self.shape.block, self.shape.shared_bytes, maps, tuple(values)))


def bound_of_tokens(found):
    """In the place of `tokens_sm90._launch`."""

    def bound(call, direction, tensors, dlse):
        name = f"tokens_{direction}" + "_dropout" * (call.args.seed is not None)
        return Stub(found, name, (1, 1), 2 * tokens_sm90.TILE, tokens_sm90.shared_bytes(direction, call.head_dim))

    return bound


def functions(found: list):
    """(encode, launch) in the place of the driver's functions, which add to `found`."""

    def encode(into, kind, rank, address, sizes, strides, box, *_):
        numbers = [rank, address, *sizes[:rank][::-1], *strides[: rank - 1][::-1], *box[:rank][::-1]]
        ctypes.memmove(into, struct.pack(f"{len(numbers)}q", *numbers), 8 * len(numbers))
        return 0

    def launch(kernel, x, y, z, threads, _, __, shared, stream, places, ___):
        maps, count = COUNTS[kernel]
        made = []
        for i in range(maps):
            rank, address, *numbers = struct.unpack("16q", ctypes.string_at(places[i], 128))
            ends = rank, 2 * rank - 1, 3 * rank - 1
            made.append((address, *[tuple(numbers[a:b]) for a, b in zip((0, *ends[:2]), ends, strict=True)]))
        values = [ctypes.c_int64.from_address(places[maps + i]).value for i in range(count + len(NUMBERS))]
        found.append((kernel, (x, y, z), threads, shared, tuple(made), tuple(values)))
        if kernel in EFFECTS:
            EFFECTS[kernel](values)
        return 0

    return encode, launch


def _parameters():
    yield "bias_rows", parameters_of(bias.SOURCE, "bias_rows", Options())
    yield "combine", parameters_of(last_wave.SOURCE, "combine", Options())
    yield "ragged_backward", parameters_of(sm80.SOURCE, "ragged_backward", Options())
    for direction in ("forward", "backward"):
        yield f"{direction}_sm90", parameters_of(short_sm90.source(direction), f"{direction}_sm90", Options())
        for dropout in ("", "_dropout"):
            options = Options.of({"DROPOUT": bool(dropout)})
            tokens = f"tokens_{direction}"
            yield f"{tokens}{dropout}", parameters_of(tokens_sm90.source(direction), tokens, options)
            for packed in ("", "_packed"):
                yield f"{direction}{dropout}{packed}", parameters_of(sm90.source(direction), f"long_{direction}_sm90", options)
            for keys in ("", "_keys"):
                biased = Options.of({"DROPOUT": bool(dropout), "BIAS": True, "KEY_MASK": bool(keys)})
                kernel = f"long_{direction}_sm90"
                yield f"{direction}{dropout}_bias{keys}", parameters_of(sm90.source(direction), kernel, biased)
                if direction == "backward":
                    source = sm90.source("bias_gradient")
                    yield f"bias_gradient{dropout}_bias{keys}", parameters_of(source, "long_bias_gradient_sm90", biased)


_PARAMETERS = {name: (found.maps, found.pointers) for name, found in _parameters()}
# of the kernels by the number that stands for their name: how many maps and pointers they take
COUNTS = {sum(name.encode()): (len(maps), len(pointers)) for name, (maps, pointers) in _PARAMETERS.items()}
assert len(COUNTS) == len(_PARAMETERS), "two kernels have one number"


def parameters(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the maps and of the pointers of a kernel."""
    return _PARAMETERS[name]
