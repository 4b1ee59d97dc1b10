"""The parameter lists of kernels in CUDA C++, read from their sources, and launches that repeat by addresses alone."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parameter_lists import listed

import saccade
from saccade.errors import InvalidArgument
from saccade.exact.ragged import sm80
from saccade.exact.varlen.args import VarlenArgs
from saccade.launch import cuda
from saccade.launch.cuda import HEADERS, CudaLaunch, addresses, check_pointers, run, strides
from saccade.nvrtc import Options, Source, parameters_of

ROOT = Path(saccade.__file__).parent
SCALE = """
// void scale(int no_list) {
#define SIZES int n, long long x_row
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1) scale(
    const __grid_constant__ TensorMap x_map, const float* x,  // the rows, by address
    const unsigned char* mask,
#if DROPOUT
    const u64* seed, u32 threshold,
#endif
    float *out, SIZES, /* log2 */ float factor
#if RUNS
    , unsigned runs
#endif
) {
    if (n > 0) { out[0] = x[0]; }
}
extern "C" __global__ void fill(float* out) { out[0] = 0; }
"""


@pytest.fixture
def scale(tmp_path):
    def source(text: str = SCALE) -> Source:
        (tmp_path / "scale.cu").write_text(text)
        return Source(tmp_path / "scale.cu")

    return source


def kinds(source: Source, kernel: str, **macros: int) -> dict[str, str]:
    return parameters_of(source, kernel, Options.of(macros)).kinds


def test_names_types_and_order_are_those_of_the_source(scale):
    plain = {
        "x_map": "tensor_map", "x": "pointer", "mask": "pointer", "out": "pointer", "n": "int32", "x_row": "int64", "factor": "float32",
    }  # fmt: skip
    found = kinds(scale(), "scale", DROPOUT=0)
    assert list(found.items()) == list(plain.items())
    assert kinds(scale(), "fill") == {"out": "pointer"}


def test_a_parameter_is_there_if_its_macro_is_not_zero(scale):
    assert list(kinds(scale(), "scale", DROPOUT=2)) == ["x_map", "x", "mask", "seed", "threshold", "out", "n", "x_row", "factor"]
    assert list(kinds(scale(), "scale", RUNS=1).items())[-2:] == [("factor", "float32"), ("runs", "uint32")]


def test_a_macro_of_a_header_stands_for_a_part_of_a_list(tmp_path):
    (tmp_path / "sizes.cuh").write_text("#define SIZES int n, \\\n    long long row\n")
    (tmp_path / "k.cu").write_text('#include "sizes.cuh"\nextern "C" __global__ void k(float* x, SIZES) {}')
    assert kinds(Source(tmp_path / "k.cu"), "k") == {"x": "pointer", "n": "int32", "row": "int64"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "scale.cu has no kernel scale"),
        ("__device__ void scale(int n) {}", "scale.cu has no kernel scale"),
        ("__global__ void scale(double n) {}", "a parameter of kernel scale of scale.cu is 'double n'; allowed are pointers, long long"),
        ("__global__ void scale(\n#ifdef A\nint n\n#endif\n) {}", "have '#ifdef A'; allowed are #if NAME and #endif, not nested"),
        ("__global__ void scale(\n#if A\n#if B\nint n\n#endif\n#endif\n) {}", "have '#if B'; allowed are"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(scale, text, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        kinds(scale(text), "scale")


SOURCES = sorted(ROOT.rglob("*.cu"))
NAME = re.compile(r"__global__ (?:void )?(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\(")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_kernel_of_the_package_is_read(path):
    """Under every choice of the macros that lists depend on; tests of the launchers hold their arguments against these lists."""
    text = path.read_text(encoding="utf-8")
    names = NAME.findall(text)
    assert len(names) == text.count("__global__") > 0
    for name, chosen in itertools.product(names, itertools.product((0, 1), repeat=5)):
        macros = dict(zip(("RUNS", "MASK", "DROPOUT", "GROUPED", "BIAS"), chosen, strict=True))
        assert kinds(Source(path, (HEADERS,)), name, **macros, QUERY_BITS=chosen[0])


def test_backward_of_packed_tokens_gives_what_its_kernel_takes(monkeypatch):
    """Its numbers are bound once; the addresses and the numbers of tokens come with each call."""
    seen = {}

    def loaded(source, kernel, options, device):
        listed = parameters_of(source, kernel, options)
        bind = lambda numbers: seen.update(listed=listed, numbers=listed.in_order(kernel, numbers, listed.pointers))  # noqa: E731
        return SimpleNamespace(configure=lambda *shape: SimpleNamespace(bind=bind))

    monkeypatch.setattr(sm80, "load", loaded)
    monkeypatch.setattr(sm80, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(sm80, "_LAUNCHES", cuda.LaunchCache())
    tensors = tuple(torch.empty(10, 2, 64, dtype=torch.bfloat16) for _ in range(8))
    offsets = torch.tensor([0, 10], dtype=torch.int32)
    args = VarlenArgs(*tensors[:3], offsets, offsets, None, None, 10, 10, 0.0, 0, 0.125)
    sm80._launch(64, args, tensors, False, None)
    assert seen["numbers"] == [128, 64] * 8 + [2, 0.125]
    assert len(seen["listed"].pointers) == 14 + 4


def test_a_list_is_read_once(scale, monkeypatch):
    source = scale()
    first = parameters_of(source, "scale", Options.of({"DROPOUT": 1, "WARPS": 4}))
    monkeypatch.setattr(Source, "text", lambda self: pytest.fail("the source is read again"))
    assert parameters_of(source, "scale", Options.of({"DROPOUT": 1, "WARPS": 8})) is first
    assert parameters_of(source, "scale", Options()) != first


def test_strides_by_name():
    given = strides(key=(8, 16), mask=(1, 2, 3, 4))
    assert given == {"key_batch": 8, "key_head": 16, "mask_batch": 1, "mask_head": 2, "mask_row": 3, "mask_column": 4}


def test_addresses_by_name():
    x = torch.zeros(3)
    assert addresses(x=x, mask=None) == {"x": x.data_ptr(), "mask": 0}


@pytest.fixture
def call_of(tmp_path):
    (tmp_path / "scale.cu").write_text('extern "C" __global__ void scale(float* x, const bool* mask, float* out, int n) {}')

    def make(x: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor, swapped: bool, about: str) -> CudaLaunch:
        assert about == "cpu"
        arguments = {"x": out if swapped else x, "mask": mask, "out": x if swapped else out, "n": x.numel()}
        return CudaLaunch(Source(tmp_path / "scale.cu"), "scale", Options(), (1, 1), 32, 0, arguments)

    return make


@pytest.fixture
def launched(monkeypatch):
    """The addresses that launches are given, each with the numbers that its first call described."""
    seen = []
    monkeypatch.setattr(cuda, "_READY", cuda.LaunchCache())
    monkeypatch.setattr(CudaLaunch, "ready", lambda call, device: lambda *given: seen.append((call.arguments["n"], given)))
    return seen


def test_a_signature_is_described_once_and_then_given_addresses(launched, call_of):
    described = []

    def noted(x, *others):
        described.append(len(x))
        return call_of(x, *others)

    for _ in range(2):
        x, out = torch.zeros(5), torch.zeros(5)
        run(noted, (x, None, out), (False,), lambda device: device.type)
        assert launched[-1] == (5, (x.data_ptr(), 0, out.data_ptr()))
    assert described == [5]


def test_whatever_a_launch_depends_on_is_described_anew(launched, call_of):
    described = []

    def first(*given):
        described.append(given)
        return call_of(*given[:3], False, "cpu")

    def second(*given):
        return first(*given)

    out, rows = torch.zeros(6), torch.zeros(2, 3)
    for make, x, mask, options in (
        (first, rows, None, (1,)),
        (first, rows[:1], None, (1,)),
        (first, rows.t().contiguous().t(), None, (1,)),
        (first, rows.half(), None, (1,)),
        (first, rows, rows > 0, (1,)),
        (first, rows, None, (2,)),
        (second, rows, None, (1,)),
    ):
        for _ in range(2):
            run(make, (x, mask, out), options, lambda device: device.type)
    assert [tuple(given[0].shape) for given in described] == [(2, 3), (1, 3), *[(2, 3)] * 5]
    assert len(launched) == 14


@pytest.mark.parametrize(("arch", "starts_early"), [(80, False), (89, False), (90, True), (120, True)])
def test_only_devices_from_sm_90_on_start_a_kernel_before_its_predecessor_ends(monkeypatch, call_of, arch, starts_early):
    bound = []
    launch = SimpleNamespace(bind=lambda numbers, dependent: bound.append((numbers, dependent)))
    monkeypatch.setattr(cuda, "load", lambda *given: SimpleNamespace(configure=lambda *shape: launch))
    monkeypatch.setattr(cuda, "arch_of", lambda device: arch)
    x, out = torch.zeros(5), torch.zeros(5)
    call = call_of(x, None, out, False, "cpu")
    for dependent in (False, True):
        call._replace(dependent=dependent).ready(torch.device("cuda", 0))
    assert bound == [({"n": 5}, False), ({"n": 5}, starts_early)]


def test_tensors_out_of_place_are_refused(launched, call_of):
    x, out = torch.zeros(5), torch.zeros(5)
    with pytest.raises(
        InvalidArgument, match="3 tensors are given for the pointers x, mask, out of scale; out of place are x, out"
    ):
        run(call_of, (x, None, out), (True,), lambda device: device.type)
    assert not launched
    call = SimpleNamespace(kernel="scale", parameters=listed("pointer x"), arguments={"x": x})
    with pytest.raises(InvalidArgument, match="2 tensors are given for the pointers x of scale; out of place are none"):
        check_pointers(call, (x, out))
