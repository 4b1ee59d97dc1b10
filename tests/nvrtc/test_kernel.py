"""Launching up to the driver: argument types, launch configurations, streams, shared memory; with stand-ins for a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch
from parameter_lists import listed

from saccade.errors import InvalidArgument, SaccadeError
from saccade.nvrtc import Kernel, Options, Source, kernel, load
from saccade.nvrtc.arguments import KINDS, check_sizes

pytest.importorskip("cuda.core")

POINTER_AND_NUMBER = listed("pointer out, int32 n")
BEHIND = listed("pointer x, tensor_map a, int32 n")  # a map behind a pointer
TWO_POINTERS = listed("pointer x, pointer y, int32 n")


def convert(kind, value):
    (converter,) = listed(f"{kind} x").converters
    return converter(value)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "tensor_map"])
def test_an_argument_has_the_declared_size(kind):
    assert ctypes.sizeof(convert(kind, 1)) == KINDS[kind].bytes == struct.calcsize(KINDS[kind].code)


def test_arguments_keep_their_value():
    assert convert("pointer", 1 << 40).value == 1 << 40
    assert convert("int64", -(1 << 40)).value == -(1 << 40)
    assert convert("uint32", 2**32 - 1).value == 2**32 - 1
    assert convert("float32", 0.125).value == 0.125


@pytest.mark.parametrize(
    ("kind", "value"), [("int32", 2**31), ("int32", -(2**31) - 1), ("uint32", -1), ("uint64", -1), ("int64", 2**63)]
)
def test_what_does_not_fit_is_refused_rather_than_wrapped(kind, value):
    with pytest.raises(InvalidArgument, match=f"{value} does not fit"):
        convert(kind, value)


def test_an_unknown_argument_type_is_refused():
    with pytest.raises(InvalidArgument, match="argument type is 'half'; allowed are pointer, int32"):
        listed("half x")


def test_a_name_stands_for_one_parameter():
    with pytest.raises(InvalidArgument, match="a parameter list names x, n twice"):
        listed("pointer x, pointer y, pointer x, int32 n, int64 n")


def test_arguments_take_their_places_by_name():
    parameters = listed("pointer x, pointer y, int32 n, float32 scale")
    assert parameters.in_order("k", {"scale": 4, "y": 2, "n": 3, "x": 1}) == [1, 2, 3, 4]
    assert parameters.in_order("k", {"scale": 4, "n": 3}, without=("x", "y")) == [3, 4]
    wrong = {
        "lacks n; it takes": {"x": 1, "y": 2, "scale": 4},
        "does not take m; it takes": {"x": 1, "y": 2, "n": 3, "scale": 4, "m": 5},
        "lacks n and does not take m; it takes": {"x": 1, "y": 2, "m": 3, "scale": 4},
    }
    for sentence, given in wrong.items():
        with pytest.raises(InvalidArgument, match=f"kernel k {sentence} x, y, n, scale"):
            parameters.in_order("k", given)


def test_declared_arguments_are_held_against_the_binary():
    check_sizes("k", POINTER_AND_NUMBER, [8, 4])
    with pytest.raises(
        InvalidArgument, match=r"kernel k takes arguments of \[8, 8\] bytes; declared are pointer out, int32 n, of \[8, 4\] bytes"
    ):
        check_sizes("k", POINTER_AND_NUMBER, [8, 8])


def test_memory_holds_each_argument_at_its_offset():
    """Decoded one by one; the map between them takes no memory here."""
    parameters = listed("pointer x, int32 n, tensor_map a, uint64 seed, float32 scale, int64 stride")
    memory = (ctypes.c_char * parameters.size)()
    parameters.write(memory, (1 << 40, -7, 1 << 63, 1.5, -(1 << 40)))
    first = ctypes.addressof(memory)
    assert parameters.offsets == (0, 8, None, 16, 24, 32)
    types = (ctypes.c_uint64, ctypes.c_int32, None, ctypes.c_uint64, ctypes.c_float, ctypes.c_int64)
    found = [of.from_address(first + at).value for of, at in zip(types, parameters.offsets, strict=True) if of]
    assert found == [1 << 40, -7, 1 << 63, 1.5, -(1 << 40)]
    parameters.write(memory, (0, 0, 0, -1e39, 0))
    assert ctypes.c_float.from_address(first + 24).value == float("-inf")
    with pytest.raises(InvalidArgument, match="2147483648 does not fit the int"):
        parameters.write(memory, (0, 1 << 31, 0, 0.0, 0))


def native(*sizes):
    return SimpleNamespace(arguments_info=[SimpleNamespace(size=s) for s in sizes], handle=7)


@pytest.fixture
def driver(monkeypatch):
    """The launches of (pointer, int32) that would reach the driver, which refuses a pointer of 0; device 1 is current, and torch's current
    stream has address 100 + device."""
    from cuda.bindings import driver as binding

    seen = SimpleNamespace(launches=[], entered=[], current=1)

    @contextlib.contextmanager
    def on(index):
        before, seen.current = seen.current, index
        yield
        seen.current = before

    def enqueue(config, function, address, extra):
        places = (ctypes.c_void_p * 2).from_address(address)
        out, n = ctypes.c_uint64.from_address(places[0]).value, ctypes.c_int32.from_address(places[1]).value
        grid, block = (tuple(getattr(config, f"{part}Dim{axis}") for axis in "XYZ") for part in ("grid", "block"))
        seen.launches.append((seen.current, int(config.hStream), int(function), grid, block, config.sharedMemBytes, out, n))
        return (binding.CUresult.CUDA_SUCCESS if out else binding.CUresult.CUDA_ERROR_INVALID_VALUE,)

    def enter(index):
        seen.entered.append(index)
        kernel._thread.index = index

    monkeypatch.setattr(torch.cuda, "current_device", lambda: seen.current)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: seen.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(binding, "cuLaunchKernelEx", enqueue)
    monkeypatch.setattr(kernel, "_enter", enter)
    kernel.forget()
    yield seen
    kernel.forget()


def test_a_launch_runs_on_torchs_stream_of_its_device(driver):
    fill = Kernel(native(8, 4), "fill", POINTER_AND_NUMBER, 0)
    launch = fill.configure(grid=(4, 2), block=128, shared_bytes=1024)
    assert launch is fill.configure((4, 2), 128, 1024)
    assert launch is not fill.configure((4, 3), 128, 1024)
    launch(out=4096, n=7)
    launch(n=8, out=4096)
    assert driver.launches == [(0, 100, 7, (4, 2, 1), (128, 1, 1), 1024, 4096, n) for n in (7, 8)]
    assert driver.entered == [0]
    assert driver.current == 1


def test_a_launch_names_its_arguments(driver):
    launch = Kernel(native(8, 4), "fill", POINTER_AND_NUMBER, 1).configure(1, 32)
    with pytest.raises(InvalidArgument, match="kernel fill lacks n; it takes out, n"):
        launch(out=4096)
    with pytest.raises(InvalidArgument, match="2147483648 does not fit the int"):
        launch(out=4096, n=1 << 31)
    assert not driver.launches
    with pytest.raises(SaccadeError, match="the driver refuses a launch of fill: CUDA_ERROR_INVALID_VALUE"):
        launch(out=0, n=1)


def test_an_old_driver_cannot_tell_sizes(driver):
    class Untold:
        @property
        def arguments_info(self):
            raise NotImplementedError("cuKernelGetParamInfo")

    assert Kernel(Untold(), "fill", listed("pointer out"), 0)


def test_more_shared_memory_is_asked_for_once(driver, monkeypatch):
    from cuda.bindings import driver as binding

    asked = []

    def allow(attribute, wanted, handle, device):
        asked.append((attribute.name, wanted, handle, int(device)))
        good = wanted <= 227 * 1024
        return (binding.CUresult.CUDA_SUCCESS if good else binding.CUresult.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(binding, "cuKernelSetAttribute", allow)
    fill = Kernel(native(), "fill", listed(""), 0)
    for wanted in (16 * 1024, 96 * 1024, 64 * 1024):
        fill.configure(1, 32, wanted)
    assert asked == [("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 96 * 1024, 7, 0)]
    with pytest.raises(
        SaccadeError, match="kernel fill cannot have 300000 bytes of dynamic shared memory on cuda:0: CUDA_ERROR_INVALID"
    ):
        fill.configure(1, 32, 300_000)


def test_a_kernel_is_loaded_once(fill, driver, monkeypatch):
    made = []
    monkeypatch.setattr(kernel, "_native", lambda *given: made.append(given) or native(8, 4))
    device = torch.device("cuda", 0)
    first = load(fill, "fill", Options.of({"FACTOR": 2}), device)
    assert load(fill, "fill", Options.of({"FACTOR": 2}), device) is first
    assert load(fill, "fill", Options.of({"FACTOR": 3}), device) is not first
    assert load(fill, "fill", Options.of({"FACTOR": 2}), torch.device("cuda", 1)) is not first
    assert load(fill, "fill", Options.of({"FACTOR": 2}), device, "90a") is not first
    fill.path.write_text(fill.path.read_text().replace("fill(", "again("))
    assert load(fill, "again", Options.of({"FACTOR": 2}), device).name == "again"
    assert len(made) == 5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_needs_a_cuda_device_with_an_index(fill, device):
    with pytest.raises(InvalidArgument, match=f"device is {device}; allowed are CUDA devices with an index"):
        load(fill, "fill", Options(), torch.device(device))


@pytest.mark.gpu
def test_on_a_gpu(fill):
    device = torch.device("cuda", torch.cuda.current_device())
    out = torch.zeros(1000, device=device)
    launch = load(fill, "fill", Options.of({"FACTOR": 2}), device).configure(8, 128)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(out=out.data_ptr(), n=999)
    stream.synchronize()
    assert out[:999].eq(6).all()
    assert out[999] == 0


@pytest.mark.gpu
def test_in_a_cuda_graph_and_in_an_autograd_thread(fill):
    device = torch.device("cuda", torch.cuda.current_device())
    launch = load(fill, "fill", Options.of({"FACTOR": 2}), device).configure(8, 128)
    out = torch.zeros(1000, device=device)
    launch(out=out.data_ptr(), n=1000)

    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = torch.empty_like(grad)
            launch(out=grad.data_ptr(), n=grad.numel())
            return grad

    x = torch.ones(1000, device=device, requires_grad=True)
    Fill.apply(x).sum().backward()
    assert x.grad.eq(6).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(out=out.data_ptr(), n=1000)
    out.zero_()
    graph.replay()
    assert out.eq(6).all()


@pytest.mark.gpu
def test_declared_and_dynamic_shared_memory_together_on_a_gpu(tmp_path):
    """48 KiB need no request, but this counts static and dynamic shared memory together."""
    path = tmp_path / "both.cu"
    path.write_text(
        "extern __shared__ int more[];\n"
        'extern "C" __global__ void both(int* out) {\n'
        "    __shared__ int own[64];\n"
        "    own[threadIdx.x] = threadIdx.x;\n"
        "    for (int i = threadIdx.x; i < 12288; i += 32) more[i] = i;\n"
        "    __syncthreads();\n"
        "    out[threadIdx.x] = own[31 - threadIdx.x] + more[12287 - threadIdx.x];\n}"
    )
    device = torch.device("cuda", torch.cuda.current_device())
    out = torch.zeros(32, dtype=torch.int32, device=device)
    launch = load(Source(path), "both", Options(), device).configure(1, 32, 48 * 1024)
    launch(out=out.data_ptr())
    assert out.tolist() == [31 + 12287 - 2 * i for i in range(32)]


@pytest.fixture
def enqueued(driver, monkeypatch):
    """The arguments that cuLaunchKernelEx gets for a launch of (pointer, pointer, int32); it refuses a first pointer of 0."""
    from cuda.bindings import driver as binding

    seen = []

    def enqueue(config, function, address, extra):
        places = (ctypes.c_void_p * 3).from_address(address)
        pointers = [ctypes.c_uint64.from_address(places[i]).value for i in (0, 1)]
        grid, block = (tuple(getattr(config, f"{part}Dim{axis}") for axis in "XYZ") for part in ("grid", "block"))
        seen.append(
            SimpleNamespace(
                function=int(function), grid=grid, block=block, shared_bytes=config.sharedMemBytes, stream=int(config.hStream),
                pointers=pointers, number=ctypes.c_int32.from_address(places[2]).value, extra=extra,
                attributes=[(a.id.name, a.value.programmaticStreamSerializationAllowed) for a in config.attrs[: config.numAttrs]],
            )
        )  # fmt: skip
        return (binding.CUresult.CUDA_SUCCESS if pointers[0] else binding.CUresult.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(binding, "cuLaunchKernelEx", enqueue)
    return seen


def test_a_bound_launch_is_given_pointers_alone(driver, enqueued, monkeypatch):
    launch = Kernel(native(8, 8, 4), "fill", TWO_POINTERS, 0).configure((4, 2), 128, 1024)
    bound = launch.bind({"n": -7})
    bound(1 << 40, 0)
    bound(4096, 8192)
    assert [x.pointers for x in enqueued] == [[1 << 40, 0], [4096, 8192]]
    for x in enqueued:
        assert (x.function, x.grid, x.block, x.shared_bytes) == (7, (4, 2, 1), (128, 1, 1), 1024)
        assert (x.stream, x.number, x.extra, x.attributes) == (100, -7, 0, [])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 200 + index)
    bound(4096, 8192)
    assert enqueued[-1].stream == 200
    assert driver.entered == [0]
    assert driver.current == 1
    with pytest.raises(InvalidArgument, match="kernel fill takes 0 maps and 2 pointers, got 0 and 1"):
        bound(4096)
    with pytest.raises(SaccadeError, match="the driver refuses a launch of fill: CUDA_ERROR_INVALID_VALUE"):
        bound(0, 1)
    for numbers, sentence in (({}, "lacks n"), ({"n": 1, "m": 2}, "does not take m"), ({"n": 1, "x": 2}, "does not take x")):
        with pytest.raises(InvalidArgument, match=f"kernel fill {sentence}; it takes n"):
            launch.bind(numbers)
    with pytest.raises(InvalidArgument, match="does not fit the int"):
        launch.bind({"n": 1 << 40})


def test_a_bound_launch_may_be_given_its_blocks_at_each_call(driver, enqueued):
    bound = Kernel(native(8, 8, 4), "fill", TWO_POINTERS, 0).configure((4, 2), 128).bind({"n": 1})
    for blocks in (9, 5):
        bound(1, 2, grid=blocks)
    assert [x.grid for x in enqueued] == [(9, 2, 1), (5, 2, 1)]


def test_a_dependent_launch_says_so(driver, enqueued):
    launch = Kernel(native(8, 8, 4), "fill", TWO_POINTERS, 0).configure(4, 128)
    launch.bind({"n": 1}, dependent=True)(1, 2)
    assert enqueued[0].attributes == [("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)]


@pytest.mark.gpu
def test_a_bound_launch_on_a_gpu(fill):
    device = torch.device("cuda", torch.cuda.current_device())
    out = torch.zeros(1000, device=device)
    bound = load(fill, "fill", Options.of({"FACTOR": 2}), device).configure(8, 128).bind({"n": 999})
    bound(out.data_ptr())
    assert out[:999].eq(6).all()
    assert out[999] == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90")
def test_dependent_launches_see_what_the_ones_before_wrote(tmp_path):
    """Each number comes from another block of the previous launch, and only the last of these blocks waits long."""
    path = tmp_path / "turn.cu"
    path.write_text(
        'extern "C" __global__ void turn(const int* from, int* to, int n) {\n'
        '    asm volatile("griddepcontrol.launch_dependents;");\n'
        '    asm volatile("griddepcontrol.wait;" ::: "memory");\n'
        "    if (blockIdx.x == gridDim.x - 1) __nanosleep(20000);\n"
        "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    if (i < n) to[i] = from[(i + 777) % n] + 1;\n}"
    )
    device, n, steps = torch.device("cuda", torch.cuda.current_device()), 5000, 30
    places = [torch.arange(n, dtype=torch.int32, device=device), torch.empty(n, dtype=torch.int32, device=device)]
    kernel = load(Source(path), "turn", Options(), device).configure(-(-n // 128), 128)
    turn = kernel.bind({"n": n}, dependent=True)

    def run():
        for step in range(steps):
            turn(places[step % 2].data_ptr(), places[1 - step % 2].data_ptr())

    run()
    first = (torch.arange(n, device=device) + 777 * steps) % n + steps
    assert torch.equal(places[0], first.int())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    assert torch.equal(places[0], first[(torch.arange(n, device=device) + 777 * steps) % n].int() + steps)


def test_a_launch_of_maps_by_name(driver, monkeypatch):
    from cuda.bindings import driver as binding

    from saccade.nvrtc.tensor_map import MAP_BYTES, TensorMap

    seen = []

    def enqueue(config, function, address, extra):
        places = (ctypes.c_void_p * 4).from_address(address)
        maps = [ctypes.string_at(places[i], 1) for i in (0, 2)]
        seen.append((*maps, ctypes.c_uint64.from_address(places[1]).value, ctypes.c_int32.from_address(places[3]).value))
        return (binding.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(binding, "cuLaunchKernelEx", enqueue)
    apart = listed("tensor_map a, pointer x, tensor_map b, int32 n")
    launch = Kernel(native(MAP_BYTES, 8, MAP_BYTES, 4), "copy", apart, 0).configure(4, 128)
    first, second = (TensorMap(bytes([i]) * MAP_BYTES) for i in (1, 2))
    launch(n=5, b=second, x=4096, a=first)
    launch(n=6, a=second, x=8192, b=first)
    assert seen == [(b"\1", b"\2", 4096, 5), (b"\2", b"\1", 8192, 6)]
    with pytest.raises(InvalidArgument, match="7 is no TensorMap"):
        launch(n=5, b=7, x=4096, a=first)


def test_a_bound_launch_of_maps(driver, monkeypatch):
    from cuda.bindings import driver as binding

    from saccade.nvrtc.tensor_map import MAP_BYTES, TensorMap

    seen = []

    def enqueue(config, function, address, extra):
        places = (ctypes.c_void_p * 4).from_address(address)
        maps = [ctypes.string_at(places[i], MAP_BYTES) for i in (0, 1)]
        seen.append((*maps, ctypes.c_uint64.from_address(places[2]).value, ctypes.c_int32.from_address(places[3]).value))
        return (binding.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(binding, "cuLaunchKernelEx", enqueue)
    kernel = Kernel(native(MAP_BYTES, MAP_BYTES, 8, 4), "copy", listed("tensor_map a, tensor_map b, pointer x, int32 n"), 0)
    bound = kernel.configure(4, 128).bind({"n": 5})
    monkeypatch.setattr("saccade.nvrtc.kernel.tensor_map", lambda i: TensorMap(bytes([i]) * MAP_BYTES))
    bound(4096, maps=((1,), (2,)))
    bound(8192, maps=((2,), (1,)))
    assert seen == [
        (bytes([1]) * MAP_BYTES, bytes([2]) * MAP_BYTES, 4096, 5),
        (bytes([2]) * MAP_BYTES, bytes([1]) * MAP_BYTES, 8192, 5),
    ]
    with pytest.raises(InvalidArgument, match="kernel copy takes 2 maps and 1 pointers, got 1 and 1"):
        bound(4096, maps=((1,),))
    # a map behind a pointer is bound, or has no place
    with pytest.raises(InvalidArgument, match="kernel copy lacks a; it takes a, n"):
        Kernel(native(8, MAP_BYTES, 4), "copy", BEHIND, 0).configure(4, 128).bind({"n": 5})
    apart = listed("pointer x, int32 n, pointer y")
    with pytest.raises(
        InvalidArgument, match="kernel copy takes pointer x, int32 n, pointer y; to bind numbers, all pointers must"
    ):
        Kernel(native(8, 4, 8), "copy", apart, 0).configure(4, 128).bind({"n": 5})


def test_a_map_that_never_changes_is_bound_as_a_number(driver, monkeypatch):
    from cuda.bindings import driver as binding

    from saccade.nvrtc.tensor_map import MAP_BYTES, TensorMap

    seen = []

    def enqueue(config, function, address, extra):
        places = (ctypes.c_void_p * 3).from_address(address)
        pointer = ctypes.c_uint64.from_address(places[0]).value
        seen.append((pointer, ctypes.string_at(places[1], MAP_BYTES), ctypes.c_int32.from_address(places[2]).value))
        return (binding.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(binding, "cuLaunchKernelEx", enqueue)
    kernel = Kernel(native(8, MAP_BYTES, 4), "copy", BEHIND, 0)
    kernel.configure(4, 128).bind({"n": 5, "a": TensorMap(bytes([3]) * MAP_BYTES)})(4096)
    assert seen == [(4096, bytes([3]) * MAP_BYTES, 5)]
