"""The sm_80 form of the kernel on sparse tensor cores: forced under the contract on any GPU; everywhere its binaries,
configurations and copies."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import emulator
import pytest
import torch
from contracts.nm_sparse import QUERY_MASKS, NMSparseContract, check_query_mask
from contracts.opt_outs import opted_out

import saccade
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.fused.backend import MAX_HEAD_DIM_TF32
from saccade.nm_sparse.fused.config import Sm80Config, pick_sm80
from saccade.nvrtc import build, obstacles
from tools.cubin import disassemble, resource_usage


def force(monkeypatch, arch: int) -> None:
    """Force the sm_80 form, with the configurations of an architecture."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs sparse tensor cores")
    if torch.cuda.get_device_properties(0).shared_memory_per_block_optin < {80: 163, 86: 99, 90: 227}[arch] * 1024:
        pytest.skip("these shapes need more shared memory")
    monkeypatch.setattr(fused, "arch_of", lambda device: 80)
    monkeypatch.setattr(fused, "pick_sm80", lambda head_dim, _, *call: pick_sm80(head_dim, arch, *call))


@pytest.mark.gpu
@opted_out("nm_sparse/test_fused_sm80.py::TestSm80")
class TestSm80(NMSparseContract):
    backend = "mma_sp"

    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch):
        force(monkeypatch, 80)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (31, 65), (257, 64), (600, 600), (2048, 2048)])
def test_the_same_as_the_masking_kernel(monkeypatch, q_len, kv_len, head_dim, pattern, is_causal, arch):
    """Full and partial blocks and tiles; enough problems for more than one turn of causal blocks."""
    force(monkeypatch, arch)
    query = torch.randn(3, q_len, 8, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(3, kv_len, 4, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    ours, theirs = (
        saccade.nm_sparse_attention(
            query, key, value, pattern=pattern, is_causal=is_causal, enable_gqa=True, return_lse=True, backend=backend
        )
        for backend in ("mma_sp", "masked")
    )
    # near-ties may be decided differently, so single rows may differ but not the whole
    assert (ours[0].double() - theirs[0].double()).norm() <= 0.01 * theirs[0].double().norm()
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", [80, 86])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("kind", QUERY_MASKS)
def test_masks_of_queries(monkeypatch, kind, pattern, head_dim, arch):
    force(monkeypatch, arch)
    check_query_mask(kind, pattern, head_dim, torch.bfloat16)


def call(head_dim: int, pattern: str, is_causal: bool, dtype: torch.dtype = torch.bfloat16, **given) -> NMSparseArgs:
    """A call of which only the metadata of the tensors is used."""
    query = torch.empty(1, 1, 8, head_dim, dtype=dtype)
    keep, group = map(int, pattern.split(":"))
    return NMSparseArgs(query, query, query, *[None] * 4, keep, group, 0.0, is_causal, 1.0)._replace(**given)


def binary(args: NMSparseArgs, config: Sm80Config, stores: bool, architecture: str):
    missing = obstacles(architecture)
    if missing:
        pytest.skip(missing[0])
    pytest.importorskip("triton")
    built = build(fused.SM80, architecture, fused.sm80_options(args, config, stores))
    (usage,) = resource_usage(built.cubin).values()
    assert usage.registers * 32 * config.warps * config.resident <= 65536
    return built.cubin, usage


@pytest.mark.sampled(8)
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90", "120"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_binaries(head_dim, pattern, is_causal, architecture):
    """Causal calls store their selection."""
    args = call(head_dim, pattern, is_causal)
    config = pick_sm80(head_dim, int(architecture), args.pattern_n, is_causal)
    cubin, usage = binary(args, config, is_causal, architecture)
    assert usage.stack == 0
    code = disassemble(cubin)
    # in parts, masked tiles have products of their own
    paths = 2 if config.parts > 1 else 1
    assert code.count("HMMA.16816.F32.BF16") == paths * head_dim // 16 * 8 * config.tall
    assert code.count("HMMA.SP.16832.F32.BF16") == paths * head_dim // 8 * 2 * config.tall


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", ["80", "86", "90"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_binaries_of_float32(head_dim, is_causal, architecture):
    config = pick_sm80(head_dim, int(architecture), 1, is_causal, tf32=True)
    cubin, usage = binary(call(head_dim, "1:2", is_causal, torch.float32), config, is_causal, architecture)
    assert usage.stack == 0
    code = disassemble(cubin)
    assert code.count("HMMA.1688.F32.TF32") == head_dim // 8 * 8
    assert code.count("HMMA.SP.16816.F32.TF32") == head_dim // 8 * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("architecture", ["80", "86"])
@pytest.mark.parametrize("given", ["dropout", "blocks", "keys", "queries", "queries, dropout"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_binaries_of_features(head_dim, given, architecture):
    bits, full = torch.ones(1, 1, 1, 8, dtype=torch.bool), torch.ones(1, 1, 8, 8, dtype=torch.bool)
    features = {
        "dropout": {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
        "blocks": {"block_mask": bits},
        "keys": {"mask": bits},
        "queries": {"mask": full},
        "queries, dropout": {"mask": full, "seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
    }
    args = call(head_dim, "2:4", given != "keys", **features[given])
    _, usage = binary(args, pick_sm80(head_dim, int(architecture), 2, args.is_causal, True), True, architecture)
    assert usage.stack == 0


@pytest.mark.parametrize("head_dim", [16, 48, 80, 112, 256])
def test_other_widths(head_dim):
    cubin, usage = binary(call(head_dim, "2:4", True), pick_sm80(head_dim, 80, 2, True), False, "80")
    assert usage.stack == 0
    assert "HMMA.SP.16832.F32.BF16" in disassemble(cubin)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120, 121])
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
def test_a_shape_fits_every_architecture(head_dim, arch):
    limit = {80: 163, 90: 227, 100: 227}.get(arch, 99) * 1024
    for keep in (1, 2):
        for is_causal in (False, True):
            for features in (False, True):
                assert pick_sm80(head_dim, arch, keep, is_causal, features).shared_bytes(head_dim) <= limit
    if head_dim <= MAX_HEAD_DIM_TF32:
        assert pick_sm80(head_dim, arch, 1, False, tf32=True).shared_bytes(head_dim) <= limit


def test_tall_warps_where_they_fit():
    """The claims of the note: 32 queries per warp on sm_80 at both widths, on sm_86 and sm_89 only at D = 64."""
    for arch in (80, 90):
        assert all(pick_sm80(d, arch, k, c).tall == 2 for d in (64, 128) for k in (1, 2) for c in (False, True))
    for arch in (86, 89):
        assert [pick_sm80(d, arch, 2, False).tall for d in (64, 128)] == [2, 1]


# replacements for the GPU instructions of a copy, which record places and addresses
COPIES = """
#include <vector>
#define __device__
#define __forceinline__ inline
#define TF32 {tf32}
#define WARPS {warps}
#define BLOCK_KV 64
#define BLOCKS {blocks}
typedef unsigned u32;
#if TF32
typedef float Number;
constexpr int CHUNKS = {head_dim} / 4;
#else
typedef unsigned short Number;
constexpr int CHUNKS = {head_dim} / 8;
#endif
struct {{ int x; }} threadIdx;
int thread_of() {{ return threadIdx.x; }}
long long* out;
const Number* base;
void copy_16(u32 to, const void* from, bool inside) {{ *out++ = to, *out++ = (const Number*)from - base, *out++ = inside; }}
#include "tile_copies.cuh"
template <bool PERMUTED>
long long copies(const Number* from, long long stride, int first, int tile, int kv_len, long long* to) {{
    base = from, out = to;
    for (threadIdx.x = 0; threadIdx.x < 32 * WARPS; threadIdx.x++) {{
        Tiles<1000, PERMUTED> tiles(from, stride, first);
        if (first == tile) tiles.copy_first(7, tile, kv_len);
        else tiles.copy(7, tile, kv_len);
    }}
    return (out - to) / 3;
}}
extern "C" long long copies_of_keys(const Number* from, long long stride, int first, int tile, int kv_len, long long* to) {{
    return copies<true>(from, stride, first, tile, kv_len, to);
}}
extern "C" long long copies_of_values(const Number* from, long long stride, int first, int tile, int kv_len, long long* to) {{
    return copies<false>(from, stride, first, tile, kv_len, to);
}}
extern "C" int key(int place) {{ return key_at(place); }}
"""


@cache
def copies_of(**shape) -> ctypes.CDLL:
    """The copies of a tile, compiled for a CPU."""
    folder = Path(tempfile.mkdtemp(prefix="saccade-copies-"))
    for name in ("async_copy.cuh", "numbers.cuh"):  # what COPIES stands in for
        (folder / name).write_text("")
    (folder / "tile_copies.cuh").write_text((fused.SM80.path.parent / "tile_copies.cuh").read_text())
    (folder / "copies.cpp").write_text(COPIES.format(**shape))
    command = [emulator.COMPILER, "-std=c++17", "-w", "-shared", "-fPIC", folder / "copies.cpp", "-o", folder / "copies.so"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "copies.so"))
    for function in (library.copies_of_keys, library.copies_of_values):
        function.restype = ctypes.c_longlong
        function.argtypes = [ctypes.c_void_p, ctypes.c_longlong, *[ctypes.c_int] * 3, ctypes.c_void_p]
    return library


@pytest.mark.sampled(3)
@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("tf32", "head_dim"), [(0, 16), (0, 64), (0, 80), (0, 128), (1, 48), (1, 64), (1, 128)])
def test_copies_of_a_tile(head_dim, tf32, warps):
    """Every 16 bytes are copied once and to the right place, by either way."""
    numbers = 4 if tf32 else 8
    chunks, stride = head_dim // numbers, 3 * head_dim
    found, any_address = torch.empty(3 * 64 * chunks, dtype=torch.int64), torch.empty(1)
    for blocks, first, tile in ((0, 2, 2), (0, 2, 1), (1, 4, 1)):
        library = copies_of(tf32=tf32, head_dim=head_dim, warps=warps, blocks=blocks)
        kv_len = 64 * first + 37
        for copies, key_at in ((library.copies_of_keys, library.key), (library.copies_of_values, lambda place: place)):
            assert copies(any_address.data_ptr(), stride, first, tile, kv_len, found.data_ptr()) == 64 * chunks
            wanted = {}
            for place in range(64):
                key = 64 * tile + key_at(place)
                for chunk in range(chunks):
                    at = (key * stride if key < kv_len else 0) + chunk * numbers
                    wanted[7 + 1000 * place + 16 * chunk] = (at, int(key < kv_len))
            assert {to: (at, inside) for to, at, inside in found.reshape(-1, 3).tolist()} == wanted


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
def test_a_lane_finds_its_four_keys():
    library = copies_of(tf32=0, head_dim=64, warps=4, blocks=0)
    # accumulator of a column group of 8: lane t holds columns 2t and 2t + 1
    for q in range(4):
        for t in range(4):
            assert [library.key(16 * q + 8 * j + 2 * t + b) for j in (0, 1) for b in (0, 1)] == [
                16 * q + 4 * t + c for c in range(4)
            ]
