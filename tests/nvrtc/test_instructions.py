"""Binaries for every architecture without a GPU: the kernel is in them, and the matrix instruction it was written for."""

from __future__ import annotations

import re

import pytest

from saccade.nvrtc import ARCHITECTURES, Options, Source, compile_cubin, obstacles
from tools.cubin import disassemble, resource_usage

pytest.importorskip("cuda.core")
pytest.importorskip("triton")

VOLTA = r"""
extern "C" __global__ void product(const unsigned* a, const unsigned* b, float* d) {
    int t = threadIdx.x;
    float c[8] = {};
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[2 * t]), "r"(a[2 * t + 1]), "r"(b[2 * t]), "r"(b[2 * t + 1]));
    for (int i = 0; i < 8; i++) d[8 * t + i] = c[i];
}
"""

TURING = r"""
extern "C" __global__ void product(const unsigned* a, const unsigned* b, float* d) {
    int t = threadIdx.x;
    float c[4] = {};
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * t]), "r"(a[2 * t + 1]), "r"(b[t]));
    for (int i = 0; i < 4; i++) d[4 * t + i] = c[i];
}
"""

SPARSE = r"""
extern "C" __global__ void product(const unsigned* a, const unsigned* b, const unsigned* e, float* d) {
    int t = threadIdx.x;
    float c[4] = {};
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[4 * t]), "r"(a[4 * t + 1]), "r"(a[4 * t + 2]), "r"(a[4 * t + 3]),
          "r"(b[4 * t]), "r"(b[4 * t + 1]), "r"(b[4 * t + 2]), "r"(b[4 * t + 3]), "r"(e[t]));
    for (int i = 0; i < 4; i++) d[4 * t + i] = c[i];
}
"""

# A in registers, B in shared memory by descriptor: m64n8k16, and sparse m64n8k32
SM90 = r"""
extern "C" __global__ void product(const unsigned* a, unsigned long long b, unsigned e, float* d) {
    int t = threadIdx.x;
    float c[4] = {};
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 0, 0;\n"
#if SPARSE
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9, 0, p, 1, 1, 0; }"
#else
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[4 * t]), "r"(a[4 * t + 1]), "r"(a[4 * t + 2]), "r"(a[4 * t + 3]), "l"(b), "r"(e));
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) d[4 * t + i] = c[i];
}
"""


def needs(architecture: str) -> None:
    """NVRTC 13 knows no sm_70, an early 12 no sm_120."""
    missing = obstacles(architecture)
    if missing:
        pytest.skip(missing[0])


def instructions(tmp_path, text: str, architecture: str, **defines: int) -> str:
    """Disassembly of the one kernel in `text`, which must neither spill nor be missing."""
    needs(architecture)
    path = tmp_path / "product.cu"
    path.write_text(text)
    cubin = compile_cubin(Source(path), architecture, Options.of(defines))
    usage = resource_usage(cubin)
    assert set(usage) == {"product"}
    assert usage["product"].stack == 0
    return disassemble(cubin)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gets_its_own_binary(fill, architecture):
    needs(architecture)
    cubin = compile_cubin(fill, architecture, Options.of({"FACTOR": 2}))
    (kernel,) = resource_usage(cubin)
    assert kernel == "fill"
    code = disassemble(cubin)
    assert re.search(rf"(\.target\s+sm_|EF_CUDA_SM){architecture.rstrip('a')}\b", code)
    assert "STG" in code


@pytest.mark.parametrize("architecture", ["70", "75"])
def test_volta_and_turing_have_the_product_of_volta(tmp_path, architecture):
    code = instructions(tmp_path, VOLTA, architecture)
    assert set(re.findall(r"\bHMMA[\w.]*", code)) == {f"HMMA.884.F32.F32.STEP{i}" for i in range(4)}


def test_later_architectures_emulate_the_product_of_volta(tmp_path):
    assert "HMMA" not in instructions(tmp_path, VOLTA, "90")


@pytest.mark.parametrize(
    ("text", "architecture", "defines", "instruction"),
    [
        (TURING, "75", {}, r"\bHMMA\.1688\.F32"),
        (TURING, "89", {}, r"\bHMMA\.1688\.F32"),
        (SPARSE, "80", {}, r"\bHMMA\.SP\.16832\.F32\.BF16"),
        (SPARSE, "86", {}, r"\bHMMA\.SP\.16832\.F32\.BF16"),
        (SPARSE, "90", {}, r"\bHMMA\.SP\.16832\.F32\.BF16"),
        (SPARSE, "120", {}, r"\bHMMA\.SP\.16832\.F32\.BF16"),
        (SM90, "90a", {"SPARSE": 0}, r"\bHGMMA\.64x8x16\.F32\.BF16"),
        (SM90, "90a", {"SPARSE": 1}, r"\bHGMMA\.SP\.64x8x32\.F32\.BF16"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_matrix_instructions(tmp_path, text, architecture, defines, instruction):
    code = instructions(tmp_path, text, architecture, **defines)
    assert re.search(instruction, code), re.findall(r"\bHG?MMA[\w.]*", code)
