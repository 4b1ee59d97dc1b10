"""The parameter lists of all kernels in CUDA C++: what Python declares, and gives by name, is what the sources say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import saccade
from saccade.dynamic_mask.gather.sm90 import backward as gather_backward
from saccade.dynamic_mask.gather.sm90 import forward as gather_forward
from saccade.dynamic_mask.selection import expiry_cuda, lists_cuda
from saccade.errors import InvalidArgument
from saccade.exact.long import mask_bits
from saccade.exact.long import sm90 as long
from saccade.exact.ragged import sm80 as ragged
from saccade.exact.short import sm90 as short
from saccade.exact.volta import launchers as volta
from saccade.launch import cuda
from saccade.launch.cuda import CudaLaunch, addresses, check_pointers, run, stride_names, strides
from saccade.nm_sparse import bias_rows, key_bits, query_bits
from saccade.nm_sparse.backward_sm90 import launchers as nm_backward
from saccade.nm_sparse.backward_sm90 import one_pass
from saccade.nm_sparse.fused import last_wave
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.staged import launchers as staged
from saccade.nvrtc import Options, Parameters

ROOT = Path(saccade.__file__).parent
GATHER, SELECTION = "dynamic_mask/gather/sm90/cuda", "dynamic_mask/selection/cuda"
SHORT, VOLTA = "exact/short/cuda", "exact/volta/cuda"
FUSED, STAGED, NM_BACKWARD = "nm_sparse/fused/cuda", "nm_sparse/staged/cuda", "nm_sparse/backward_sm90/cuda"
LONG_MACROS = ("GROUPED", "MASK", "DROPOUT")

# (file, kernel, macros that are not zero) -> declared parameters
DECLARED = {
    (f"{GATHER}/forward_sm90.cu", "forward_sm90", ("RUNS",)): gather_forward.PARAMETERS_WITH_MAPS,
    (f"{GATHER}/forward_sm90.cu", "forward_sm90", ()): gather_forward.PARAMETERS,
    (f"{GATHER}/backward_sm90.cu", "backward_sm90", ()): gather_backward.PARAMETERS,
    (f"{SELECTION}/expiry.cu", "expiry_sort", ()): expiry_cuda.SORT_PARAMETERS,
    (f"{SELECTION}/expiry.cu", "expiry_find", ()): expiry_cuda.FIND_PARAMETERS,
    (f"{SELECTION}/lists.cu", "query_lists", ()): lists_cuda.PARAMETERS,
    (f"{SHORT}/forward_sm90.cu", "forward_sm90", ()): short.FORWARD_PARAMETERS,
    (f"{SHORT}/backward_sm90.cu", "backward_sm90", ()): short.BACKWARD_PARAMETERS,
    (f"{SHORT}/backward_turns_sm90.cu", "backward_turns_sm90", ()): short.BACKWARD_PARAMETERS,
    (f"{SHORT}/backward_streamed_sm90.cu", "backward_streamed_sm90", ()): short.BACKWARD_PARAMETERS,
    (f"{SHORT}/pooling_backward.cu", "pooling_backward", ()): short.POOLING_PARAMETERS,
    ("exact/ragged/cuda/backward.cu", "ragged_backward", ()): ragged.PARAMETERS,
    **{
        (
            f"exact/long/cuda/{d}_sm90.cu",
            f"long_{d}_sm90",
            tuple(itertools.compress(LONG_MACROS, chosen)),
        ): long.parameters(d, *chosen)
        for d in ("forward", "backward")
        for chosen in itertools.product((False, True), repeat=len(LONG_MACROS))
    },
    ("exact/long/cuda/mask_bits.cu", "mask_bits", ()): mask_bits.PARAMETERS,
    (f"{VOLTA}/forward.cu", "volta_forward", ()): volta.FORWARD_PARAMETERS,
    (f"{VOLTA}/backward.cu", "volta_backward", ()): volta.BACKWARD_PARAMETERS,
    (f"{VOLTA}/query_gradient.cu", "volta_query_gradient", ()): volta.QUERY_GRADIENT_PARAMETERS,
    (f"{VOLTA}/bias_gradient.cu", "volta_bias_gradient", ()): volta.BIAS_GRADIENT_PARAMETERS,
    (f"{VOLTA}/delta.cu", "volta_delta", ()): volta.DELTA_PARAMETERS,
    ("nm_sparse/cuda/key_bits.cu", "key_bits", ()): key_bits.PARAMETERS,
    ("nm_sparse/cuda/query_bits.cu", "query_bits", ()): query_bits.PARAMETERS,
    ("nm_sparse/cuda/shown_values.cu", "shown_values", ()): bias_rows.PARAMETERS,
    (f"{FUSED}/fused_sm90.cu", "fused_sm90", ()): fused.sm90_parameters(False, False),
    (f"{FUSED}/fused_sm90.cu", "fused_sm90", ("QUERY_BITS",)): fused.sm90_parameters(True, False),
    (f"{FUSED}/fused_sm90.cu", "fused_sm90", ("BIAS",)): fused.sm90_parameters(False, True),
    (f"{FUSED}/fused_sm90.cu", "fused_sm90", ("QUERY_BITS", "BIAS")): fused.sm90_parameters(True, True),
    (f"{FUSED}/fused_sm80.cu", "fused_sm80", ()): fused.sm80_parameters(False, False),
    (f"{FUSED}/fused_sm80.cu", "fused_sm80", ("QUERY_BITS",)): fused.sm80_parameters(True, False),
    (f"{FUSED}/fused_sm80.cu", "fused_sm80", ("BIAS",)): fused.sm80_parameters(False, True),
    (f"{FUSED}/fused_sm80.cu", "fused_sm80", ("QUERY_BITS", "BIAS")): fused.sm80_parameters(True, True),
    (f"{FUSED}/combine.cu", "combine", ()): last_wave.PARAMETERS,
    (f"{STAGED}/scores.cu", "nm_scores", ()): staged.SCORES_PARAMETERS,
    (f"{STAGED}/softmax.cu", "nm_softmax", ()): staged.SOFTMAX_PARAMETERS,
    (f"{STAGED}/matmul.cu", "nm_matmul", ()): staged.MATMUL_PARAMETERS,
    (f"{NM_BACKWARD}/backward_dkv_sm90.cu", "backward_dkv_sm90", ()): nm_backward.DKV_PARAMETERS,
    (f"{NM_BACKWARD}/backward_dkv_sm90.cu", "backward_dkv_sm90", ("BIAS",)): nm_backward.DKV_BIAS_PARAMETERS,
    (f"{NM_BACKWARD}/backward_dq_sm90.cu", "backward_dq_sm90", ()): nm_backward.DQ_PARAMETERS,
    (f"{NM_BACKWARD}/backward_dq_sm90.cu", "backward_dq_sm90", ("BIAS",)): nm_backward.DQ_BIAS_PARAMETERS,
    (f"{NM_BACKWARD}/backward_one_pass_sm90.cu", "backward_one_pass_sm90", ()): one_pass.ONE_PASS_PARAMETERS,
    (f"{NM_BACKWARD}/write_dq_sm90.cu", "write_dq_sm90", ()): one_pass.WRITE_DQ_PARAMETERS,
}
C_TYPES = {
    "long long": "int64", "int64": "int64", "int": "int32", "u32": "uint32", "unsigned": "uint32", "u64": "uint64", "float": "float32",
    "__grid_constant__ TensorMap": "tensor_map",
}  # fmt: skip
KERNEL = re.compile(r'extern "C" __global__ (?:void )?__launch_bounds__\(.*?\)\s+(\w+)\(\s*(.*?)\s*\) \{', re.DOTALL)


def kernels(path: Path, macros: tuple[str, ...] = ()) -> dict[str, str]:
    """The kernels of a file and their parameter lists, preprocessed."""
    text = path.read_text()
    for header in path.parent.glob("*.cuh"):
        for name, value in re.findall(r"#define (\w+)\s+((?:[^\n]*\\\n)*[^\n]*)", header.read_text()):
            if "TensorMap" in value or "," in value:  # a macro that stands for a part of a list
                text = re.sub(rf"\b{name}\b", value.replace("\\\n", "\n").replace("\\", r"\\"), text)
    choose = lambda found: found[2] if found[1] in macros else ""  # noqa: E731
    lists = {name: re.sub(r"#if (\w+)\n(.*?)#endif", choose, of, flags=re.DOTALL) for name, of in KERNEL.findall(text)}
    assert len(lists) == len(re.findall(r"__global__", text)), path
    return lists


def parameters(of: str) -> list[tuple[str, str]]:
    """(name, type) of each parameter of a list in C++."""
    found = []
    for one in of.split(","):
        c_type, pointer, name = re.fullmatch(r"\s*(?:const )?(.*?)\s*(\*?)\s*(\w+)\s*", one, re.DOTALL).groups()
        found.append((name, "pointer" if pointer else C_TYPES[" ".join(c_type.split())]))
    return found


@pytest.mark.parametrize("key", DECLARED, ids=lambda key: f"{key[0]}-{'-'.join(key[1:2] + key[2])}")
def test_names_types_and_order_are_those_of_the_source(key):
    file, kernel, macros = key
    assert list(DECLARED[key].kinds.items()) == parameters(kernels(ROOT / file, macros)[kernel])


def test_every_kernel_is_declared():
    found = {(str(path.relative_to(ROOT)), kernel) for path in ROOT.rglob("*.cu") for kernel in kernels(path)}
    assert found == {(file, kernel) for file, kernel, _ in DECLARED}


def test_strides_have_the_names_that_lists_declare():
    assert stride_names(key=2, mask=4) == "key_batch key_head mask_batch mask_head mask_row mask_column"
    given = strides(key=(8, 16), mask=(1, 2, 3, 4))
    assert list(given) == stride_names(key=2, mask=4).split()
    assert list(given.values()) == [8, 16, 1, 2, 3, 4]


def test_addresses_by_name():
    x = torch.zeros(3)
    assert addresses(x=x, mask=None) == {"x": x.data_ptr(), "mask": 0}


def call_of(x: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor, swapped: bool, about: str) -> CudaLaunch:
    assert about == "cpu"
    arguments = {"x": out if swapped else x, "mask": mask, "out": x if swapped else out, "n": x.numel()}
    listed = Parameters(pointer="x mask out", int32="n")
    return CudaLaunch(key_bits.SOURCE, "scale", listed, Options(), (1, 1), 32, 0, arguments)


@pytest.fixture
def launched(monkeypatch):
    """The addresses that launches are given, each with the numbers that its first call described."""
    seen = []
    monkeypatch.setattr(cuda, "_READY", cuda.LaunchCache())
    monkeypatch.setattr(CudaLaunch, "ready", lambda call, device: lambda *given: seen.append((call.arguments["n"], given)))
    return seen


def test_a_signature_is_described_once_and_then_given_addresses(launched):
    for _ in range(2):
        x, out = torch.zeros(5), torch.zeros(5)
        run(call_of, (x, None, out), (False,), lambda device: device.type)
        assert launched[-1] == (5, (x.data_ptr(), 0, out.data_ptr()))
    assert len(cuda._READY) == 1


def test_tensors_out_of_place_are_refused(launched):
    x, out = torch.zeros(5), torch.zeros(5)
    with pytest.raises(
        InvalidArgument, match="3 tensors are given for the pointers x, mask, out of scale; out of place are x, out"
    ):
        run(call_of, (x, None, out), (True,), lambda device: device.type)
    assert not launched
    call = SimpleNamespace(kernel="scale", parameters=Parameters(pointer="x"), arguments={"x": x})
    with pytest.raises(InvalidArgument, match="2 tensors are given for the pointers x of scale; out of place are none"):
        check_pointers(call, (x, out))
