"""A compiled kernel on a device: loaded once, launched on torch's current stream with raw pointers."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from saccade.errors import InvalidArgument, SaccadeError
from saccade.nvrtc.architecture import architecture_for, architecture_named
from saccade.nvrtc.arguments import Parameters, as_word, check_sizes
from saccade.nvrtc.capture import loading_allowed
from saccade.nvrtc.compiler import Options, compile_cubin
from saccade.nvrtc.declared import parameters_of
from saccade.nvrtc.source import Source
from saccade.nvrtc.tensor_map import TensorMap, as_map, tensor_map
from saccade.recorder import ACTIVE

# dynamic shared memory, in bytes, above which a kernel must opt in: 48 KiB need no request, less the static shared memory of the
# kernel
_UNASKED = 16 * 1024

Extent = int | tuple[int, ...]


def load(
    source: Source,
    name: str,
    options: Options,
    device: torch.device,
    architecture: str | int | None = None,
) -> Kernel:
    """The kernel `name` (declared `extern "C"`) of a source on a CUDA device; it is compiled and loaded at the first call, and
    looked up later.

    Args:
        device: a CUDA device with its index.
        architecture: "90a" for instructions that only sm_90a has; by default the architecture of the device.

    Raises:
        CompilerUnavailable, CompileError: as `compile_cubin`.
        InvalidArgument: the parameters in the source do not fit the compiled kernel.

    The first call loads a module, which is possible during CUDA graph capture too.
    """
    wanted = (source, name, options, device, architecture)
    kernel = _loaded.get(wanted)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(wanted)
            if kernel is None:
                native, listed = _native(source, name, options, device, architecture), parameters_of(source, name, options)
                kernel = _loaded[wanted] = Kernel(native, name, listed, device.index)
    return kernel


class Shape(NamedTuple):
    """Blocks, threads per block, and bytes of dynamic shared memory."""

    grid: Extent
    block: Extent
    shared_bytes: int


class Kernel:
    """A loaded kernel. `native` is cuda.core's object, with `attributes` and `occupancy`."""

    def __init__(self, native: Any, name: str, parameters: Parameters, device_index: int):
        self.native, self.name, self.parameters, self.device_index = native, name, parameters, device_index
        self._launches: dict[Shape, Launch] = {}
        self._shared = _UNASKED
        try:
            sizes = [parameter.size for parameter in native.arguments_info]
        except NotImplementedError:  # drivers older than CUDA 12.4 do not report it
            return
        check_sizes(name, parameters, sizes)

    def configure(self, grid: Extent, block: Extent, shared_bytes: int = 0) -> Launch:
        """The kernel with its launch configuration; remembered."""
        shape = Shape(grid, block, shared_bytes)
        launch = self._launches.get(shape)
        if launch is None:
            if len(self._launches) >= 4096:  # only an endless stream of new shapes gets here
                self._launches.clear()
            self._allow_shared(shared_bytes)
            launch = self._launches[shape] = Launch(self, shape)
        return launch

    def _allow_shared(self, wanted: int) -> None:
        if wanted <= self._shared:
            return
        # cuda.core can read this attribute, but not set it
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with loading_allowed(torch.device("cuda", self.device_index)):
            (status,) = driver.cuKernelSetAttribute(attribute, wanted, self.native.handle, driver.CUdevice(self.device_index))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise SaccadeError(
                f"kernel {self.name} cannot have {wanted} bytes of dynamic shared memory on cuda:{self.device_index}: {status.name}"
            )
        self._shared = wanted


class Launch:
    """A kernel with a launch configuration, called with its arguments by name. Runs on torch's current stream of the kernel's
    device.

    shape, parameters, function: its configuration, as given, its parameter list, and the driver's handle of the kernel.
    """

    def __init__(self, kernel: Kernel, shape: Shape):
        from cuda.bindings import driver

        parameters = kernel.parameters
        self._kernel, self._parameters = kernel, parameters
        self.shape, self.parameters, self.function = shape, parameters, int(kernel.native.handle)
        self._memory = (ctypes.c_char * max(parameters.size, 1))()
        first = ctypes.addressof(self._memory)
        places = [0 if offset is None else first + offset for offset in parameters.offsets]
        self._places = (ctypes.c_void_p * max(len(places), 1))(*places)
        self._maps = [i for i, offset in enumerate(parameters.offsets) if offset is None]
        self._function, self._config = driver.CUfunction(int(kernel.native.handle)), _configuration(shape, False)
        self._as_stream, self._launch, self._success = driver.CUstream, driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS
        # the driver reads the arguments from this shared memory
        self._lock = threading.Lock()

    def __call__(self, **arguments: Any) -> None:
        """Enqueue the kernel. Pointers are ints from `data_ptr()`; the caller keeps the tensors alive until it is enqueued."""
        given = self._parameters.in_order(self._kernel.name, arguments)
        maps = [as_map(given[i]) for i in self._maps]
        for i in reversed(self._maps):
            del given[i]
        on_current_stream(self._kernel.device_index, self._enqueue, given, maps)
        if ACTIVE.recorder is not None:
            ACTIVE.recorder.cuda_by_name(self, arguments)

    def bind(self, numbers: Mapping[str, Any], dependent: bool = False) -> Bound:
        """The same launch with all but the pointers, and the tensor maps ahead of them, fixed by name. Calls pass these maps and all
        pointers, in the order of the parameter list.

        dependent: programmatic dependent launch (sm_90 and later): the kernel may start while its predecessor in the stream still
            runs, and itself waits with `griddepcontrol.wait` before it accesses memory.
        """
        return Bound(self._kernel, self.shape, numbers, dependent)

    def _enqueue(self, stream: int, given: list[Any], maps: list[TensorMap]) -> None:
        with self._lock:
            self._parameters.write(self._memory, given)
            for i, one in zip(self._maps, maps, strict=True):
                self._places[i] = one.address
            self._config.hStream = self._as_stream(stream)
            (status,) = self._launch(self._config, self._function, ctypes.addressof(self._places), 0)
        if status is not self._success:
            raise SaccadeError(f"the driver refuses a launch of {self._kernel.name}: {status.name}")


class Bound:
    """A launch that takes only maps and pointers, so that numbers are not checked and converted at each call, as in `Launch`.

    shape, dependent, function: its configuration, as given, and the driver's handle of the kernel.
    """

    def __init__(self, kernel: Kernel, shape: Shape, numbers: Mapping[str, Any], dependent: bool = False):
        parameters = kernel.parameters
        # maps that change from call to call come first; a constant one may be bound like a number
        maps, count = _leading(parameters, "tensor_map"), len(parameters.pointers)
        if _leading(parameters, "pointer", maps) != count:
            raise InvalidArgument(
                f"kernel {kernel.name} takes {parameters!r}; to bind numbers, all pointers must come before them"
            )
        given = parameters.in_order(kernel.name, numbers, (*parameters.maps[:maps], *parameters.pointers))
        from cuda.bindings import driver

        self._name, self._index, self._count, self._maps = kernel.name, kernel.device_index, count, maps
        self.shape, self.dependent, self.function = shape, dependent, int(kernel.native.handle)
        self._write, self._pointers = struct.Struct(f"{count}Q").pack_into, (ctypes.c_uint64 * count)()
        self._numbers = [c(v) for c, v in zip(parameters.converters[maps + count :], given, strict=True)]  # type: ignore[misc]
        places = [ctypes.addressof(self._pointers) + 8 * i for i in range(count)] + [ctypes.addressof(n) for n in self._numbers]
        self._places = (ctypes.c_void_p * (maps + len(places)))(*[0] * maps, *places)
        self._write_maps = struct.Struct(f"{maps}P").pack_into
        self._address = ctypes.addressof(self._places)
        self._function = driver.CUfunction(int(kernel.native.handle))
        self._config, self._stream, self._as_stream = _configuration(shape, dependent), 0, driver.CUstream
        self._launch, self._success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS
        # the driver reads the pointers from this shared memory
        self._lock = threading.Lock()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The bytes of each bound number, as a whole number of eight bytes."""
        return tuple(map(as_word, self._numbers))

    def __call__(
        self, *pointers: int, maps: Sequence[tuple] = (), grid: int = 0, follows: tuple[int, int, int] | None = None
    ) -> None:
        """Enqueue the kernel on torch's current stream of its device. The caller keeps the tensors alive until it is enqueued. maps: the arguments of
        `tensor_map` for each. grid: blocks, if their number changes from call to call; it is then given at each. follows: for a recorder, how it
        follows from what changes (`Described`)."""
        if len(pointers) != self._count or len(maps) != self._maps:
            raise InvalidArgument(
                f"kernel {self._name} takes {self._maps} maps and {self._count} pointers, got {len(maps)} and {len(pointers)}"
            )
        on_current_stream(self._index, self.enqueue, pointers, [tensor_map(*given) for given in maps], grid)
        if ACTIVE.recorder is not None:
            ACTIVE.recorder.cuda(self, pointers, maps, grid, follows)

    def enqueue(self, stream: int, pointers: tuple[int, ...], maps: Sequence[TensorMap] = (), grid: int = 0) -> None:
        """The same on a stream given by its address, with the device's context already current (see `on_current_stream`); for one
        of several launches."""
        with self._lock:
            if maps:
                self._write_maps(self._places, 0, *[m.address for m in maps])  # the driver reads them from there
            if grid:
                self._config.gridDimX = grid
            if stream != self._stream:
                self._config.hStream, self._stream = self._as_stream(stream), stream
            self._write(self._pointers, 0, *pointers)
            (status,) = self._launch(self._config, self._function, self._address, 0)
        if status is not self._success:
            raise SaccadeError(f"the driver refuses a launch of {self._name}: {status.name}")


def _leading(parameters: Parameters, kind: str, first: int = 0) -> int:
    """How many parameters of a type follow each other from the one with index `first` on."""
    kinds = list(parameters.kinds.values())[first:]
    return next((i for i, other in enumerate(kinds) if other != kind), len(kinds))


def on_current_stream(index: int, enqueue: Callable[..., None], *arguments: Any) -> None:
    """Call `enqueue(stream, *arguments)`, where stream is the address of torch's current stream of a device, with its context
    current."""
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            on_current_stream(index, enqueue, *arguments)
        return
    if getattr(_thread, "index", None) != index:
        _enter(index)
    enqueue(torch._C._cuda_getCurrentRawStream(index), *arguments)


def _configuration(shape: Shape, dependent: bool) -> Any:
    """The configuration of a launch on the default stream, for cuLaunchKernelEx."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(shape.grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(shape.block)
    config.sharedMemBytes = shape.shared_bytes
    if dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def _native(source: Source, name: str, options: Options, device: torch.device, architecture: str | int | None) -> Any:
    """cuda.core's kernel object."""
    if device.type != "cuda" or device.index is None:
        raise InvalidArgument(f"device is {device}; allowed are CUDA devices with an index, as cuda:0")
    if architecture is None:
        major, minor = torch.cuda.get_device_capability(device)
        architecture = architecture_for(10 * major + minor)
    cubin = compile_cubin(source, architecture_named(architecture), options)
    from cuda.core import Device, ObjectCode

    with torch.cuda.device(device), loading_allowed(device):
        Device(device.index).set_current()
        return ObjectCode.from_cubin(cubin, name=source.path.name).get_kernel(name)


def _enter(index: int) -> None:
    """Make the device's context current in this thread: a thread that autograd started may have none yet, and cuLaunchKernel
    needs one."""
    from cuda.core import Device

    Device(index).set_current()
    _thread.index = index


def _three(extent: Extent) -> tuple[int, ...]:
    given = (extent,) if isinstance(extent, int) else extent
    return (*given, 1, 1)[:3]


# not bounded: CUDA graphs and calls that C++ replays hold the driver's handles of these kernels, which unloading would leave dangling. Each
# entry took a compilation, and shapes are numbers of a launch, or one of the few forms that a family has
_loaded: dict[tuple, Kernel] = {}
# kept, because freeing them would call a driver that does not survive a fork
_of_parents: list[Any] = []
_thread = threading.local()
_lock = threading.Lock()


def forget() -> None:
    """Forget every loaded kernel, because a forked child has none of its parent's contexts."""
    global _lock, _thread, _loaded
    _of_parents.append(_loaded)
    _lock, _thread, _loaded = threading.Lock(), threading.local(), {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
