"""The staged kernels: their sources run on a CPU by the emulator, their binaries for every architecture, and the kernels on a
GPU.

Each stage is judged by its own inputs, so that no error hides another and selections need no tolerance: scores by float64,
softmax by the scores that the kernel wrote, the product by the weights that it reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import emulator
import pytest
import torch

from saccade.nm_sparse import compressed as nm_format
from saccade.nm_sparse import reference as nm_sparse
from saccade.nm_sparse.staged import launchers
from saccade.nm_sparse.staged.backend import why_not
from saccade.nm_sparse.staged.config import Tile, matmul_tile, matmul_width, most_shared, scores_tile, softmax_lanes
from saccade.nm_sparse.staged.launchers import Limits
from saccade.nm_sparse.weights import NMWeights, scores
from saccade.nvrtc import compile_cubin, obstacles
from tools.cubin import disassemble, resource_usage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# of a rounding to the dtype, and of the operands of a product
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-23}
OPERAND = {BF16: 2.0**-22, FP16: 2.0**-22, FP32: 2.0**-10}


@dataclass(frozen=True)
class Case:
    """One problem of the pipeline."""

    name: str
    dtype: torch.dtype = BF16
    pattern: str = "2:4"
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 37
    kv_len: int = 150
    dim: int = 64
    value_dim: int = 64
    is_causal: bool = False
    mask: str = ""
    blocks: bool = False
    ties: bool = False

    def __str__(self) -> str:
        return self.name


# cases of one line share their kernels, which the emulator compiles
CASES = [
    Case("bf16"), Case("bf16-ties", ties=True), Case("bf16-one-key", kv_len=1), Case("bf16-aligned", q_len=64, kv_len=128),
    Case("fp16-blocks", FP16, q_len=300, kv_len=70), Case("fp16-grouped", FP16, heads=4, q_len=140),
    Case("causal", is_causal=True, q_len=150), Case("causal-ties", is_causal=True, ties=True, q_len=200, kv_len=90),
    Case("one-of-two", pattern="1:2"), Case("one-of-two-ties", pattern="1:2", ties=True),
    Case("tf32", FP32, "1:2"), Case("tf32-ties", FP32, "1:2", ties=True, kv_len=77),
    Case("tf32-causal", FP32, "1:2", is_causal=True, q_len=90, kv_len=100),
    Case("mask", mask="bool"), Case("bias", mask="bias"), Case("bias-float32", mask="float32"),
    Case("tf32-bias", FP32, "1:2", mask="bias"),
    Case("narrow", dim=20, value_dim=36), Case("wide", FP16, dim=128, value_dim=208, kv_len=70),
    Case("tf32-wide", FP32, "1:2", dim=96, value_dim=100, kv_len=40), Case("long", kv_len=2100, q_len=3, heads=1, kv_heads=1),
    Case("blocks", q_len=200, kv_len=300, blocks=True), Case("blocks-ties", q_len=130, kv_len=190, blocks=True, ties=True),
    Case("blocks-causal", FP16, "1:2", q_len=290, kv_len=200, is_causal=True, blocks=True),
    Case("blocks-bias", q_len=70, kv_len=140, mask="bias", blocks=True), Case("blocks-mask", q_len=70, kv_len=140, mask="bool", blocks=True),
    Case("tf32-blocks", FP32, "1:2", q_len=140, kv_len=200, blocks=True, ties=True),
]  # fmt: skip


def make(case: Case, device: str = "cpu"):
    """query, key, value, mask, block mask, scale; whole numbers with ties, whose scores are exact in any order."""
    shapes = (
        (case.heads, case.q_len, case.dim),
        (case.kv_heads, case.kv_len, case.dim),
        (case.kv_heads, case.kv_len, case.value_dim),
    )
    query, key, value = (torch.randn(2, *shape, device=device) for shape in shapes)
    if case.ties:
        query, key = query.clamp(-1.4, 1.4).round(), key.clamp(-1.4, 1.4).round()
    mask = None
    if case.mask == "bool":
        mask = torch.rand(2, 1, case.q_len, case.kv_len, device=device) < 0.6
        mask[:, :, 3] = False
    elif case.mask:
        mask = torch.randn(1, case.heads, 1, case.kv_len, device=device).to(FP32 if case.mask == "float32" else case.dtype)
    blocks = None
    if case.blocks:
        blocks = torch.rand(2, 1, -(-case.q_len // 64), -(-case.kv_len // 64), device=device) < 0.5
        blocks[1, :, 0] = False  # whole rows
        # garbage that only hidden tiles meet, and a key block that every query sees
        blocks[:, :, :, -1], blocks[:, :, :, 1] = False, True
        blocks[1, :, 0] = False
        key[:, :, (blocks.shape[3] - 1) * 64 :] = torch.nan
    # with the strides of [B, T, H, D]
    query, key, value = (x.to(case.dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    return query, key, value, mask, blocks, 0.25 if case.ties else case.dim**-0.5


def emulated(case: Case, limits: Limits = Limits(232448, 1)):  # noqa: B008
    """(scores, weights, product) by the sources of the kernels, on poisoned memory."""
    query, key, value, mask, blocks, scale = make(case)
    rows, cols = nm_format.padded(case.q_len, case.kv_len, case.dtype)
    values = torch.full((2, case.heads, rows, cols // 2), torch.nan, dtype=case.dtype)
    metadata = torch.zeros(2, case.heads, rows, cols * case.dtype.itemsize // 32, dtype=torch.int16)
    keep = int(case.pattern[0])
    query, key = (launchers.padded(x, 32 // x.element_size()) for x in (query, key))
    masks = (launchers.as_mask(query, key, mask), launchers.as_block_mask(query, blocks))
    emulator.launch(launchers.scores_call, (query, key, *masks, values, metadata), case.is_causal, scale, keep, limits)
    found = NMWeights(values, metadata, (2, case.heads, case.q_len, case.kv_len), case.pattern, -torch.inf)
    shares = torch.full_like(values, torch.nan)
    emulator.launch(launchers.softmax_call, (values, shares), case.is_causal, limits)
    weights = NMWeights(shares, metadata, found.shape, case.pattern, 0.0)
    wide = launchers.padded(value, 16 // value.element_size())
    out = torch.full((2, case.heads, case.q_len, wide.shape[3]), torch.nan, dtype=case.dtype)
    emulator.launch(launchers.matmul_call, (shares, metadata, wide, out), case.is_causal, limits)
    return found, weights, out[..., : case.value_dim]


def judge(case: Case, found: NMWeights, weights: NMWeights, out: torch.Tensor) -> None:
    """Every stage against float64 and its bound; the selection is optimal up to the error of the scores."""
    query, key, value, mask, blocks, scale = remade(case, found.device.type)
    groups = case.heads // case.kv_heads
    keys = key.double().repeat_interleave(groups, 1)
    boolean = mask is not None and mask.dtype == torch.bool
    exact = nm_sparse.visible_scores(
        query.double(), key.double(), scale=scale, mask=mask if boolean else None,
        bias=None if mask is None or boolean else mask, block_mask=blocks, is_causal=case.is_causal,
    )  # fmt: skip
    # what is hidden may be NaN
    bound = 2 * OPERAND[case.dtype] * scale * (query.double().abs() @ keys.abs().nan_to_num(0.0).mT) + 1e-6
    if case.ties:
        kept = nm_format.gather(exact, exact.to(case.dtype), *map(int, case.pattern.split(":")), -torch.inf)
        assert torch.equal(found.metadata, kept[1])
        assert torch.equal(found.values, kept[0])
    judge_selection(case, exact, bound, found.kept())
    dense, kept = found.to_dense().double(), found.kept()
    hidden = exact == -torch.inf
    assert (dense[hidden] == -torch.inf).all()
    visible = kept & ~hidden
    assert ((dense - exact).abs() <= bound + UNIT[case.dtype] * exact.abs())[visible].all()
    padding = nm_format.expand(found.values, found.metadata, -torch.inf)
    assert (padding[..., case.q_len :, :] == -torch.inf).all()
    assert (padding[..., case.kv_len :] == -torch.inf).all()

    shares = torch.softmax(found.values.double(), -1).nan_to_num(0.0)
    assert ((weights.values.double() - shares).abs() <= 2 * UNIT[case.dtype] * shares + 2e-7).all()
    used, values = weights.to_dense().double(), value.double().repeat_interleave(groups, 1)
    room = UNIT[case.dtype] * (used @ values).abs() + 2 * OPERAND[case.dtype] * (used @ values.abs()) + 1e-6
    assert ((out.double() - used @ values).abs() <= room).all()


def remade(case: Case, device: str):
    """The data of `make`, again."""
    torch.manual_seed(1234)
    return make(case, device)


def judge_selection(case: Case, exact: torch.Tensor, bound: torch.Tensor, kept: torch.Tensor) -> None:
    """Every group fills its slots, and no score that was left out exceeds a kept one by more than both bounds."""
    keep, group = map(int, case.pattern.split(":"))
    pad = (0, -case.kv_len % group)

    def grouped(x: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, pad, value=fill).unflatten(-1, (-1, group))

    whole = grouped(kept, False).sum(-1)[..., : case.kv_len // group]
    assert (whole == keep).all()
    best_lost = grouped((exact - bound).masked_fill(kept, -torch.inf), -torch.inf).amax(-1)
    worst_kept = grouped((exact + bound).masked_fill(~kept, torch.inf), torch.inf).amin(-1)
    assert (best_lost <= worst_kept).all()


needs_emulator = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.mark.sampled(3)
@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case):
    torch.manual_seed(1234)
    judge(case, *emulated(case))


@needs_emulator
def test_emulated_keys_are_split_between_blocks():
    case = Case("split", q_len=20, kv_len=1500, heads=1, kv_heads=1)
    torch.manual_seed(1234)
    limits = Limits(232448, 132)
    query, key, *_, scale = make(case)
    values = torch.empty(2, 1, 32, 768, dtype=BF16)
    metadata = torch.empty(2, 1, 32, 96, dtype=torch.int16)
    assert launchers.scores_call(query, key, None, None, values, metadata, False, scale, 2, limits).grid[1] > 1
    torch.manual_seed(1234)
    judge(case, *emulated(case, limits))


ALL_SHARED = 232448  # bytes, as much as the emulator has


@pytest.mark.sampled(3)
@needs_emulator
@pytest.mark.parametrize(("dtype", "pattern"), [(BF16, "2:4"), (FP32, "1:2")])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(1, 2, ALL_SHARED, 1),
        Tile(8, 2, ALL_SHARED, 1, True, 4),
        Tile(2, 4, ALL_SHARED, 2, True),
        Tile(4, 3, ALL_SHARED, 1, False, 4),
    ],
    ids=str,
)
def test_emulated_tiles_of_any_size(monkeypatch, tile, dtype, pattern):
    monkeypatch.setattr(launchers, "scores_tile", lambda *_: tile)
    monkeypatch.setattr(launchers, "matmul_tile", lambda *_: tile)
    case = Case("tiles", dtype, pattern, heads=1, kv_heads=1, q_len=270)
    torch.manual_seed(1234)
    judge(case, *emulated(case))


@needs_emulator
@pytest.mark.parametrize(("dtype", "pattern"), [(BF16, "2:4"), (BF16, "1:2"), (FP32, "1:2")])
def test_emulated_nan_is_kept_and_shows(dtype, pattern):
    case = Case("nan", dtype, pattern, heads=1, kv_heads=1)
    query, key, *_, scale = make(case)
    key[0, 0, 6] = torch.nan
    key[0, 0, 41] = torch.nan
    rows, cols = nm_format.padded(37, 150, dtype)
    values = torch.zeros(2, 1, rows, cols // 2, dtype=dtype)
    metadata = torch.zeros(2, 1, rows, cols * dtype.itemsize // 32, dtype=torch.int16)
    emulator.run(
        launchers.scores_call(query, key, None, None, values, metadata, False, scale, int(pattern[0]), Limits(232448, 1))
    )
    dense = NMWeights(values, metadata, (2, 1, 37, 150), pattern, 0.0).to_dense()
    assert dense[0, 0, :, [6, 41]].isnan().all()
    assert dense.isnan().sum() == 2 * 37
    shares = torch.empty_like(values)
    emulator.run(launchers.softmax_call(values, shares, False, Limits(232448, 1)))
    assert shares[0, 0, :37].isnan().all()
    assert not shares[1].isnan().any()


@needs_emulator
@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_emulated_scale_that_turns_the_order(scale):
    """Integers, so results are exact: the smallest products are the largest scores, or all are equal."""
    query, key, *_ = make(Case("negative", ties=True))
    rows, cols = nm_format.padded(37, 150, BF16)
    values, metadata = torch.empty(2, 2, rows, cols // 2, dtype=BF16), torch.empty(2, 2, rows, cols // 16, dtype=torch.int16)
    emulator.run(launchers.scores_call(query, key, None, None, values, metadata, False, scale, 2, Limits(232448, 1)))
    exact = scale * (query.float() @ key.float().mT)
    wanted = nm_format.gather(exact, exact.to(BF16), 2, 4, -torch.inf)
    assert torch.equal(metadata, wanted[1])
    assert torch.equal(values, wanted[0])


@pytest.mark.parametrize("chunks", [1, 4, 12, 16, 17, 100, 128, 129, 500, 2048, 8192])
def test_rows_of_any_length_have_lanes(chunks):
    lanes, vectors = softmax_lanes(chunks)
    assert lanes * vectors >= chunks
    assert vectors <= 8
    assert lanes <= 1024
    assert softmax_lanes(8193) is None


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_every_device(arch, dim, itemsize):
    for q_len in (1, 40, 1000):
        for tile in (
            scores_tile(dim, itemsize, q_len, most_shared(arch)),
            matmul_tile(matmul_width(dim), itemsize, q_len, most_shared(arch)),
        ):
            assert tile.shared_bytes <= most_shared(arch)


def test_what_the_kernels_decline():
    cuda = torch.device("cuda", 0)
    assert why_not(torch.device("cpu"), 0, BF16, 10) == ["needs a CUDA device, got cpu"]
    assert why_not(cuda, 75, BF16, 10) == ["needs sparse tensor cores, of sm_80 and later; this device is sm_75"]
    assert any("float64" in reason for reason in why_not(cuda, 90, torch.float64, 10))
    assert any("at most 131072 keys" in reason for reason in why_not(cuda, 90, BF16, 131073))
    assert any("head dim of at most 256, got 300" in reason for reason in why_not(cuda, 90, BF16, 10, 300))


def binaries(arch: int, dtype: torch.dtype, pattern: str, dim: int, is_causal: bool):
    """The three calls of a plain problem, and scores under a block mask."""
    query = torch.empty(1, 1, 512, dim, dtype=dtype)
    values = torch.empty(1, 1, 512, 256, dtype=dtype)
    metadata = torch.empty(1, 1, 512, 512 * dtype.itemsize // 32, dtype=torch.int16)
    limits = Limits(most_shared(arch), 132)
    for blocks in (None, torch.ones(1, 1, 8, 8, dtype=torch.bool)):
        yield launchers.scores_call(query, query, None, blocks, values, metadata, is_causal, 0.125, int(pattern[0]), limits)
    yield launchers.softmax_call(values, values, is_causal, limits)
    yield launchers.matmul_call(values, metadata, query, query, is_causal, limits)


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("dtype", "pattern"), [(BF16, "2:4"), (FP16, "1:2"), (FP32, "1:2")])
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 120])
def test_binaries_use_the_matrix_units_and_spill_nothing(arch, dtype, pattern, dim):
    pytest.importorskip("cuda.core")
    pytest.importorskip("triton")
    if obstacles(arch):
        pytest.skip(obstacles(arch)[0])
    sparse = r"HMMA\.SP\.16816\.F32\.TF32" if dtype == FP32 else r"HMMA\.SP\.16832\.F32"
    dense = r"HMMA\.1688\.F32\.TF32" if dtype == FP32 else r"HMMA\.16816\.F32"
    wanted = {"nm_scores": dense, "nm_matmul": sparse, "nm_softmax": r"MUFU\.EX2"}
    for call in binaries(arch, dtype, pattern, dim, is_causal=dim == 64):
        cubin = compile_cubin(call.source, arch, call.options)
        usage = resource_usage(cubin)[call.kernel]
        assert usage.stack == 0, (call.kernel, usage)
        assert re.search(wanted[call.kernel], disassemble(cubin)), call.kernel


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    query, key, value, mask, blocks, scale = remade(case, "cuda")
    gqa = case.heads != case.kv_heads
    found = scores(query, key, mask, case.is_causal, scale, gqa, pattern=case.pattern, block_mask=blocks, backend="mma_sp")
    weights = found.softmax()
    judge(case, found, weights, weights.matmul(value, enable_gqa=gqa))
    assert torch.equal(found.softmax_().values, weights.values)


@pytest.mark.gpu
def test_in_a_graph_and_on_another_stream():
    case = Case("graph", q_len=256, kv_len=256)
    query, key, value, *_ = remade(case, "cuda")

    def run() -> torch.Tensor:
        return scores(query, key, pattern="2:4", backend="mma_sp").softmax().matmul(value)

    wanted = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
