"""The fused kernels on sparse tensor cores: on a GPU the contract; everywhere the binaries, the layouts, and the calls that are
declined."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import emulator
import pytest
import torch
from contracts.nm_sparse import BIASES, QUERY_MASKS, NMSparseContract, check_bias, check_query_mask, problem_of
from contracts.opt_outs import opted_out
from parameter_lists import listed

import saccade
from saccade.engine.dispatch import choose
from saccade.launch.dropout import drop_threshold
from saccade.nm_sparse import key_bits
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.fused import last_wave
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.fused.config import Sm90Config, pick_sm90
from saccade.nm_sparse.masked import launchers as masked
from saccade.nm_sparse.query_bits import is_by_query
from saccade.nm_sparse.testing.cases import NM_SPARSE
from saccade.nm_sparse.testing.check import check_nm_sparse, judge_selection, public_call, selection_of
from saccade.nm_sparse.testing.inputs import make_nm_sparse
from saccade.nvrtc import build, obstacles
from saccade.operations import find
from saccade.testing.baseline import differentiate, oracle_of
from saccade.testing.judge import report
from tools.cubin import disassemble, issue_clocks, resource_usage

MMA_SP = find("nm_sparse_attention", "mma_sp")
# bytes: the causal 2:4 kernels that store their selection keep two loop bounds there
SM90_STORED_SPILL = 16


def test_training_without_triton_is_declined(monkeypatch):
    """Backward of every backend is that of `masked`, in Triton."""
    case = next(c for c in NM_SPARSE if not c.mask and c.bias is None and c.head_dim % 16 == 0)
    trained = problem_of(case, make_nm_sparse(case, torch.bfloat16, "cpu"))
    sentence = "its backward needs Triton, which is not installed, and a gradient is required"
    assert trained.needs_grad
    assert not any(sentence in reason for reason in MMA_SP.why_not(trained))
    monkeypatch.setattr("saccade.nm_sparse.fused.backend.has_package", lambda name: name != "triton")
    assert any(sentence in reason for reason in MMA_SP.why_not(trained))
    assert not any(sentence in reason for reason in MMA_SP.why_not(replace(trained, needs_grad=False)))


@pytest.mark.gpu
@opted_out("nm_sparse/test_fused.py::TestMmaSp")
class TestMmaSp(NMSparseContract):
    backend = "mma_sp"


TF32_CASES = [
    replace(c, pattern="1:2") for c in NM_SPARSE if c.pattern in ("2:4", "1:2") and c.head_dim % 16 == 0 and c.head_dim <= 128
]


@pytest.fixture
def allow_tf32():
    """A setter of torch's float32 precision; the old setting is restored."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32

    def allow(answer: bool) -> None:
        matmul.allow_tf32 = answer

    yield allow
    matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("case", TF32_CASES, ids=str)
def test_float32_as_tf32(case, allow_tf32):
    """On numbers that TF32 holds scores are exact to float32, so the selection is judged as any; what is rounded is P, to 11
    bits."""
    allow_tf32(True)
    inputs = make_nm_sparse(case, torch.bfloat16, "cuda").to(torch.float32)
    reasons = MMA_SP.why_not(problem_of(case, inputs))
    if reasons:
        pytest.skip("; ".join(reasons))
    kept = selection_of(case, inputs, "mma_sp")
    assert judge_selection(case, inputs, kept).ok
    actual = differentiate(public_call(case, "mma_sp", True), inputs, 0, True)
    oracle = oracle_of(case, replace(inputs, mask=kept, lengths=None), 0, True)
    assert torch.equal(actual["lse"] == -math.inf, oracle["lse"] == -math.inf)
    for name, x in actual.items():
        # lse of rows that see nothing
        wanted, x = (y.double().masked_fill(y == -math.inf, 0.0) for y in (oracle[name], x))
        error, size = (x - wanted).norm(), wanted.norm()
        assert error <= (1e-5 if name == "lse" else 2.0**-11) * size + 1e-6, (name, (error / size).item())


def test_a_call_tells_whether_torch_may_round(allow_tf32):
    case = TF32_CASES[0]
    for allowed in (False, True):
        allow_tf32(allowed)
        assert problem_of(case, make_nm_sparse(case, torch.float32, "cpu")).tf32 == allowed
        assert not problem_of(case, make_nm_sparse(case, torch.bfloat16, "cpu")).tf32


def call(head_dim: int, pattern: str, is_causal: bool, dtype: torch.dtype = torch.bfloat16, **given) -> NMSparseArgs:
    """A call of which only the metadata of the tensors is used."""
    query = torch.empty(1, 1, 8, head_dim, dtype=dtype)
    keep, group = map(int, pattern.split(":"))
    return NMSparseArgs(query, query, query, *[None] * 4, keep, group, 0.0, is_causal, 1.0)._replace(**given)


def binary(source, options, architecture):
    missing = obstacles(architecture)
    if missing:
        pytest.skip(missing[0])
    pytest.importorskip("triton")
    built = build(source, architecture, options)
    (usage,) = resource_usage(built.cubin).values()
    return built, usage, disassemble(built.cubin)


def assert_pipelined(built, code: str, overlap: bool, least: int = 16) -> None:
    """Products wait for each other only where the source requires it: after a tile's scores and, with `overlap`, its values."""
    assert "serialized" not in built.log
    products = len(re.findall(r"\bHGMMA\b", code))
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    assert products >= least
    assert waits <= (10 if overlap else 4)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("stores", [False, True], ids=["plain", "stores"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_binaries_of_sm_90a(head_dim, pattern, is_causal, stores):
    args = call(head_dim, pattern, is_causal)
    configs = {pick_sm90(head_dim, args.pattern_n, q_len, is_causal, False, False) for q_len in (1024, 4096, 16384)}
    for config, split in itertools.product(configs, {False, head_dim == 128 and not is_causal}):
        built, usage, code = binary(fused.SM90, fused.sm90_options(args, config, stores, split), "90a")
        assert usage.stack <= (SM90_STORED_SPILL if stores else 0)
        assert re.search(rf"HGMMA\.64x{config.block_kv}x16\.F32\.BF16", code)
        assert re.search(rf"HGMMA\.SP\.64x{head_dim}x32\.F32\.BF16 .*tnspB", code)
        assert_pipelined(built, code, config.overlap)


@pytest.mark.parametrize(
    ("pattern", "q_len", "is_causal", "split", "clocks"),
    [
        ("2:4", 16384, False, True, 455),
        ("2:4", 4096, False, True, 460),
        ("2:4", 8192, True, False, 440),
        ("1:2", 16384, False, False, 245),
    ],
)
def test_the_schedule_of_the_selection(pattern, q_len, is_causal, split, clocks):
    """The clocks that ptxas needs from the wait for scores to the vote on overflow: 35 clocks more are 2 to 4 % of the time."""
    config = pick_sm90(128, int(pattern[0]), q_len, is_causal, False, False)
    built, _, _ = binary(fused.SM90, fused.sm90_options(call(128, pattern, is_causal), config, False, split), "90a")
    assert issue_clocks(built.cubin, r"WARPGROUP\.DEPBAR\.LE gsb0", r"VOTE\.ANY") <= clocks


FEATURES = {
    "half": {"dtype": torch.float16},
    "dropout": {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
    "blocks": {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "keys": {"mask": torch.ones(1, 1, 1, 8, dtype=torch.bool), "is_causal": False},
    "keys, blocks, dropout": {
        "mask": torch.ones(1, 1, 1, 8, dtype=torch.bool), "is_causal": False, "seed": torch.zeros(1, dtype=torch.int64),
        "dropout_p": 0.5, "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    },
    "queries": {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool), "is_causal": False},
    "keys, causal": {"mask": torch.ones(1, 1, 1, 8, dtype=torch.bool)},
    "queries, half, dropout": {
        "mask": torch.ones(1, 1, 8, 8, dtype=torch.bool), "is_causal": False, "seed": torch.zeros(1, dtype=torch.int64),
        "dropout_p": 0.5, "dtype": torch.float16,
    },
}  # fmt: skip
# bytes, in builds with a mask of queries and dropout: at D = 64 numbers of the warp that copies, at D = 256 addresses outside the selection
SM90_QUERY_SPILL = {64: 8, 256: 40}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("feature", FEATURES)
def test_other_binaries_of_sm_90a(feature):
    args = call(128, "2:4", **{"is_causal": True, **FEATURES[feature]})
    by_query = is_by_query(args.mask, args.is_causal)
    given = (args.block_mask is not None, args.seed is not None, args.mask is not None and not by_query, by_query)
    config = pick_sm90(128, 2, 4096, args.is_causal, *given)
    built, usage, code = binary(fused.SM90, fused.sm90_options(args, config, False), "90a")
    assert usage.stack == 0
    assert ("F16" if args.query.dtype == torch.float16 else "BF16") in code
    assert_pipelined(built, code, config.overlap)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_binaries_with_a_mask_of_queries(head_dim, pattern, dropout):
    """The bits of a tile are asked for, 8 bytes a row, before the wait for the products of that tile."""
    chance = {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5} if dropout else {}
    args = call(head_dim, pattern, pattern == "1:2", mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), **chance)
    config = pick_sm90(head_dim, args.pattern_n, 4096, args.is_causal, True, dropout, False, True)
    assert config.shared_bytes(head_dim, 4096) <= 227 * 1024
    built, usage, code = binary(fused.SM90, fused.sm90_options(args, config, True), "90a")
    assert usage.stack <= (SM90_QUERY_SPILL.get(head_dim, 0) if dropout else 0)
    assert_pipelined(built, code, config.overlap, 14)  # S of 64 dims is four products, and P V two, at four places
    lines = code.splitlines()
    asked = [i for i, line in enumerate(lines) if "LDG.E.64.CONSTANT" in line]
    assert len(asked) == 4  # two rows, in the first tile and in the others
    for tile in (asked[:2], asked[2:]):
        waits = (i for i in range(tile[0], len(lines)) if "WARPGROUP.DEPBAR" in lines[i])
        assert tile[1] < next(waits)


BLOCKED = {
    "plain": {},
    "causal": {"is_causal": True},
    "1:2, half": {"pattern": "1:2", "dtype": torch.float16},
    "dropout": {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
    "keys": {"mask": torch.ones(1, 1, 1, 8, dtype=torch.bool)},
    "keys, dropout": {
        "mask": torch.ones(1, 1, 1, 8, dtype=torch.bool), "seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5,
    },
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stores", [False, True], ids=["plain", "stores"])
@pytest.mark.parametrize("feature", BLOCKED)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_binaries_with_a_block_mask(head_dim, feature, stores):
    """So many thread blocks as the configuration says share a multiprocessor of 65,536 registers and 228 KiB, of which each takes one more."""
    args = call(
        head_dim,
        block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        **{"pattern": "2:4", "is_causal": False, **BLOCKED[feature]},
    )
    dim = -(-head_dim // 64) * 64
    config = pick_sm90(head_dim, args.pattern_n, 4096, args.is_causal, True, args.seed is not None, args.mask is not None)
    assert (config.warpgroups, config.block_kv) == (1, 64)
    assert config.resident >= 2
    assert config.resident * (config.shared_bytes(dim, 4096) + 1024) <= 228 * 1024
    built, usage, code = binary(fused.SM90, fused.sm90_options(args, config, stores), "90a")
    assert usage.stack == 0
    assert config.resident * 256 * usage.registers <= 65536
    assert_pipelined(built, code, False, 12)  # S of 64 dims is four products, and P V two, at two places


@pytest.mark.parametrize("warpgroups", [2, 3])
def test_several_warpgroups_with_a_block_mask(warpgroups):
    """The other form of the kernel, which head dims above 128 take."""
    args = call(128, "2:4", False, block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    built, usage, code = binary(fused.SM90, fused.sm90_options(args, Sm90Config(warpgroups, 64, 2), True), "90a")
    assert usage.stack == 0
    assert_pipelined(built, code, False)


BLOCK_CASES = {
    "many tiles": {"q_len": 333, "kv_len": 4459},
    "many queries": {"q_len": 2203, "kv_len": 333},
    "causal": {"q_len": 901, "kv_len": 901, "is_causal": True},
    "causal, fewer keys": {"q_len": 901, "kv_len": 131, "is_causal": True},
    "causal, fewer queries": {"q_len": 131, "kv_len": 901, "is_causal": True},
    "one query, one key": {"q_len": 1, "kv_len": 1},
    "three keys": {"q_len": 70, "kv_len": 3},
    "dropout": {"q_len": 450, "kv_len": 901, "dropout_p": 0.3},
    "dropout, causal": {"q_len": 450, "kv_len": 450, "dropout_p": 0.3, "is_causal": True},
    "a mask of keys": {"q_len": 333, "kv_len": 901, "mask": "bool", "mask_shape": (2, 1, 1, 901)},
    "a mask of queries": {"q_len": 333, "kv_len": 901, "mask": "bool", "mask_shape": (2, 4, 333, 901)},
    "a mask of queries, dropout": {"q_len": 333, "kv_len": 901, "mask": "bool", "mask_shape": (333, 901), "dropout_p": 0.3},
    "many heads": {"q_len": 130, "kv_len": 200, "batch": 5, "heads": 40},
}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("kind", BLOCK_CASES)
def test_block_masks(kind, pattern, head_dim):
    """Forward and backward against float64. Every other block of 64 queries of the mask sees about half of the tiles, the last one of head 0 none."""
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": head_dim, **BLOCK_CASES[kind]}
    case = replace(NM_SPARSE[0], name=kind, pattern=pattern, blocks=True, lse_grad=True, **sizes)
    results = check_nm_sparse(case, torch.bfloat16, "cuda", "mma_sp")
    assert {"selection", "out", "lse", "dq", "dk", "dv"} <= {r.name for r in results}
    assert all(r.ok for r in results), report(case, results)


def big_bird(length: int) -> torch.Tensor:
    """A window of three tiles, global first tiles, and about three tiles more in each row, as in BigBird; one row sees nothing."""
    place = torch.arange(-(-length // 64))
    seen = ((place - place[:, None]).abs() <= 1) | (place == 0) | (place[:, None] == 0)
    seen |= torch.rand(seen.shape, generator=torch.Generator().manual_seed(0)) < 3 / len(place)
    seen[len(place) // 2] = False
    return seen[None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("stores", [False, True], ids=["plain", "stores"])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_warpgroup_selects_what_three_select(monkeypatch, head_dim, pattern, stores):
    """The same products of the same tiles: the same selection; O and lse within rounding, and the same bits every time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a alone")
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(3, 4133, h, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (40, 20, 20)
    )
    keep, group = map(int, pattern.split(":"))
    blocks = big_bird(4133).cuda()
    args = NMSparseArgs(query, key, value, None, None, blocks, None, keep, group, 0.0, False, head_dim**-0.5)
    found = [fused.forward(args, stores) for _ in range(3)]
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(found[0], again, strict=True))
    monkeypatch.setattr(fused, "pick_sm90", lambda *call: Sm90Config(3, 64, 4))
    out, lse, kept = fused.forward(args, stores)
    assert torch.equal(found[0][2], kept)
    torch.testing.assert_close(found[0][0], out, rtol=0.02, atol=0.002)
    torch.testing.assert_close(found[0][1], lse, rtol=1e-5, atol=1e-5)
    hidden = slice(64 * (blocks.shape[2] // 2), 64 * (blocks.shape[2] // 2 + 1))
    assert bool((found[0][0][:, :, hidden] == 0).all())
    assert bool((found[0][1][:, :, hidden] == -math.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hidden_blocks_may_hold_nan(head_dim, is_causal):
    """Keys and values of tiles that the mask hides from all queries reach neither O nor a gradient."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 901, 4, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv"]
    blocks = big_bird(901).cuda()
    blocks[..., 5:7] = False
    found = []
    for filling in (0.0, float("nan")):
        given = [x.clone() for x in leaves]
        for x in given[1:]:
            x[:, :, 320:448] = filling
        given = [x.requires_grad_() for x in given]
        out = saccade.nm_sparse_attention(*given, block_mask=blocks, is_causal=is_causal, backend="mma_sp")
        found.append((out, *torch.autograd.grad(out.square().sum(), given)))
    assert all(bool(x.isfinite().all()) for x in found[1])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


# bytes of the stack: bounds of loops in calls that store their selection, and addresses in those with dropout, outside the selection
SM90_BIAS_SPILL = {64: 8, 128: 0, 192: 16, 256: 144}
BIASED = {
    "plain": {},
    "causal": {"is_causal": True},
    "1:2": {"pattern": "1:2"},
    "dropout": {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
    "keys, blocks": {
        "mask": torch.ones(1, 1, 1, 8, dtype=torch.bool), "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    },
    "queries, dropout": {
        "mask": torch.ones(1, 1, 8, 8, dtype=torch.bool), "seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5,
    },
}  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize("feature", BIASED)
@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_binaries_with_a_bias(head_dim, wide, feature):
    """The bias of a tile is asked for, 8 or 16 bytes a lane, before the wait for the products of that tile; beside dropout or a mask ptxas moves
    some of these loads behind it."""
    given = {"pattern": "2:4", "is_causal": False, **BIASED[feature]}
    bias = torch.empty(1, 1, 8, 8, dtype=torch.float32 if wide else torch.bfloat16)
    args = call(head_dim, bias=bias, **given)
    by_query = is_by_query(args.mask, args.is_causal)
    features = (args.block_mask is not None, args.seed is not None, args.mask is not None and not by_query, by_query, True)
    config = pick_sm90(head_dim, args.pattern_n, 4096, args.is_causal, *features)
    assert config.shared_bytes(head_dim, 4096) <= 227 * 1024
    built, usage, code = binary(fused.SM90, fused.sm90_options(args, config, True), "90a")
    never = feature in ("plain", "1:2", "keys, blocks") or head_dim == 128
    assert usage.stack <= (0 if never else SM90_BIAS_SPILL[head_dim])
    assert_pipelined(built, code, config.overlap, 12)  # S of 64 dims is four products, and P V two, at two places
    if feature not in ("plain", "1:2"):
        return
    lines = code.splitlines()
    asked = [i for i, line in enumerate(lines) if re.search(rf"LDG\.E\.{128 if wide else 64}\.CONSTANT", line)]
    assert len(asked) == 2 * 8  # four runs of four keys, two rows, in the first tile and in the others
    for tile in (asked[:8], asked[-8:]):
        waits = (i for i in range(tile[0], len(lines)) if "WARPGROUP.DEPBAR" in lines[i])
        assert tile[-1] < next(waits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("kind", BIASES)
def test_biases(kind, pattern, head_dim, dtype):
    """Forward and backward, the gradient of the bias with them, against float64."""
    check_bias(kind, pattern, head_dim, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_of_zeros(head_dim, is_causal):
    """As a call without a bias, over many blocks and heads, and the same bits every time, gradients too."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 2048, h, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (8, 4, 4)
    )
    plain = NMSparseArgs(query, key, value, *[None] * 4, 2, 4, 0.0, is_causal, head_dim**-0.5)
    biased = plain._replace(bias=torch.zeros(1, 8, 2048, 2048, dtype=torch.bfloat16, device="cuda"))
    (out, lse, kept), (of_plain, lse_of_plain, kept_of_plain) = fused.forward(biased, True), fused.forward(plain, True)
    # tiles of other sizes, and scores that are rounded once more: single near-ties go the other way, but not a key in ten thousand
    assert (kept != kept_of_plain).float().mean() < 1e-4
    assert (out.double() - of_plain.double()).norm() <= 0.01 * of_plain.double().norm()
    torch.testing.assert_close(lse, lse_of_plain, rtol=1e-3, atol=2e-3)
    assert all(torch.equal(x, y) for x, y in zip((out, lse, kept), fused.forward(biased, True), strict=True))
    dout = torch.randn_like(out)
    first, again = (masked.backward(biased, dout, None, out, lse, kept, bias_grad=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    for ours, theirs in zip(first[:3], masked.backward(plain, dout, None, out, lse, kept, bias_grad=False), strict=False):
        assert (ours.double() - theirs.double()).norm() <= 0.01 * theirs.double().norm()


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("kv_len", [1, 32, 33, 300])
def test_a_mask_of_keys_as_bits(monkeypatch, kv_len):
    monkeypatch.setattr(key_bits, "run", lambda make, tensors, options, about: emulator.launch(make, tensors, None))
    torch.manual_seed(0)
    some = torch.rand(3, 1, 1, kv_len) < 0.7
    some[1] = torch.arange(kv_len) < kv_len // 2  # key lengths
    for mask in (
        some,
        some.flip(0),
        some[:1],
        some[0, 0],
        some[0, 0, 0],
        torch.zeros(1, 1),
        torch.ones(3, 1, 1, 1),
        some[..., ::2],
    ):
        mask = mask.bool()
        length = mask.shape[-1] if mask.shape[-1] > 1 else kv_len
        rows = mask[(None,) * (4 - mask.dim())].expand(-1, 1, 1, length)[:, 0, 0]
        bits, spans = key_bits.pack_keys(mask, length)
        unpacked = (bits[..., None] >> torch.arange(32) & 1).flatten(1).bool()
        assert torch.equal(unpacked[:, :length], rows)
        assert not unpacked[:, length:].any()
        place = torch.arange(length).expand(rows.shape)
        assert torch.equal(spans[:, 0].long(), torch.where(rows, place + 1, 0).amax(1))
        assert torch.equal(spans[:, 1].long(), torch.where(rows, length, place).amin(1))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_key_lengths(pattern, head_dim):
    """Padded rows of a batch give the same results as the rows alone, whatever the padding holds."""
    lengths = [700, 1, 0, 333, 512]
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 700, 2, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    mask = torch.arange(700, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    k, v = (torch.where(mask[:, None, :, None], x, float("nan")) for x in (k, v))
    call = {"pattern": pattern, "return_lse": True, "backend": "mma_sp"}
    out, lse = saccade.nm_sparse_attention(q, k, v, mask[:, None, None], **call)
    for b, n in enumerate(lengths):
        alone, of_alone = saccade.nm_sparse_attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **call)
        torch.testing.assert_close(out[b : b + 1], alone, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse[b : b + 1], of_alone, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("kind", QUERY_MASKS)
def test_masks_of_queries(kind, pattern, head_dim, dtype):
    """Forward and backward against float64; backward of the kept keys is that of `masked`."""
    check_query_mask(kind, pattern, head_dim, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_that_hides_nothing(head_dim, is_causal):
    """As a call without a mask, over many blocks and heads, and the same bits every time. A mask may not meet is_causal, so the causal
    one is a mask itself."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 2048, h, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for h in (8, 4, 4)
    )
    mask = torch.ones(2, 8, 2048, 2048, dtype=torch.bool, device="cuda")
    plain = NMSparseArgs(query, key, value, *[None] * 4, 2, 4, 0.0, is_causal, head_dim**-0.5)
    masked = plain._replace(mask=mask.tril() if is_causal else mask, is_causal=False)
    (out, lse, kept), (of_plain, lse_of_plain, kept_of_plain) = fused.forward(masked, True), fused.forward(plain, True)
    # tiles of other sizes: should scores be summed in another order, single near-ties go the other way, but not a key in ten thousand
    assert (kept != kept_of_plain).float().mean() < 1e-4
    assert (out.double() - of_plain.double()).norm() <= 0.01 * of_plain.double().norm()
    torch.testing.assert_close(lse, lse_of_plain, rtol=1e-3, atol=2e-3)
    again = fused.forward(masked, True)
    assert all(torch.equal(x, y) for x, y in zip((out, lse, kept), again, strict=True))


@pytest.mark.parametrize("head_dim", [16, 80, 192, 256])
def test_other_widths_of_sm_90a(head_dim):
    config = pick_sm90(head_dim, 2, 4096, False, False, False)
    _, usage, code = binary(fused.SM90, fused.sm90_options(call(head_dim, "2:4", False), config, False), "90a")
    assert usage.stack == 0
    assert f"HGMMA.SP.64x{-(-head_dim // 64) * 64}x32" in code
    assert config.shared_bytes(-(-head_dim // 64) * 64) <= 227 * 1024


@pytest.mark.parametrize("block_kv", [64, 96, 128])
def test_a_lane_finds_four_keys_and_their_values(block_kv):
    """The copies of K, the accumulators and the sparse operand of both kernels, followed key by key."""
    keys = torch.arange(block_kv)
    fours = keys.reshape(-1, 4)
    # sm_90a: two boxes [fours, 2] one after the other; sm_80: by row
    sm90 = torch.cat([fours[:, 2 * j : 2 * j + 2].reshape(-1) for j in range(2)])
    sm80 = torch.empty_like(keys)
    sm80[(keys & ~15) | (keys & 2) << 2 | (keys & 12) >> 1 | (keys & 1)] = keys
    sixteens = block_kv // 16
    for rows, group in ((sm90, lambda q, j: j * sixteens + q), (sm80, lambda q, j: 2 * q + j)):
        for q in range(sixteens):
            for t in range(4):
                # accumulator of a column group of 8: lane t holds columns 2t and 2t + 1
                found = [int(rows[8 * group(q, c // 2) + 2 * t + c % 2]) for c in range(4)]
                # sparse operand: chunk t of the first or second 16 of 32 keys, which V holds in order
                assert found == [16 * q + 4 * t + c for c in range(4)]


def test_what_is_taken():
    """The backend takes every case with a pattern of sparse tensor cores, without keys that are never pruned, and no other."""
    if obstacles("90a"):
        pytest.skip(obstacles("90a")[0])
    taken = set()
    for case in NM_SPARSE:
        problem = replace(problem_of(case, make_nm_sparse(case, torch.bfloat16, "cpu")), device_type="cuda", arch=90)
        prunes_all = not case.dense_first and not case.dense_recent
        wanted = case.pattern in ("2:4", "1:2") and prunes_all and case.head_dim % 16 == 0
        assert (MMA_SP.why_not(problem) == []) == wanted, case
        taken |= {case.name} if wanted else set()
    assert {
        "pattern-2-4",
        "causal-1-2",
        "dropout",
        "grouped-everything",
        "blocks",
        "length-1x3",
        "dim-80",
        "dim-256",
        "mask-keys",
        "mask-full",
        "mask-heads",
        "mask-queries-blocks-dropout",
        "bias-full",
        "bias-shared",
        "bias-keys",
        "bias-queries",
        "lengths-bias",
        "lengths-causal",
        "lengths-mask-blocks",
    } <= taken


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": 75}, "needs sparse tensor cores, sm_80 or later, this device is sm_75"),
        ({"keep": 2, "group": 8}, "sparse tensor cores multiply 2:4 and 1:2, got 2:8; backend 'masked' takes it"),
        ({"dtype": torch.float64}, r"needs bfloat16, float16 or float32, got torch\.float64; backend 'masked' takes it"),
        (
            {"dtype": torch.float32, "keep": 1, "group": 2},
            r"float32 as TF32, which torch is set not to do; .*allow_tf32 = True allows it",
        ),
        (
            {"dtype": torch.float32, "tf32": True},
            "multiply float32 \\(as TF32\\) only with '1:2', got 2:4; backend 'masked' takes it",
        ),
        (
            {"dtype": torch.float32, "tf32": True, "keep": 1, "group": 2, "head_dim": 144, "value_dim": 144},
            "multiple of 16 up to 128, got 144",
        ),
        ({"scale": -1.0}, "needs a positive scale that is normal in float32, got -1.0"),
        ({"head_dim": 24, "value_dim": 24}, "multiple of 16 up to 256, got 24"),
        ({"head_dim": 272, "value_dim": 272}, "multiple of 16 up to 256, got 272"),
        ({"value_dim": 32}, "needs values as wide as keys, got D = 64 and Dv = 32"),
        ({"last_strides": (2, 1, 1)}, r"needs a last stride of 1, got \(2, 1, 1\)"),
        ({"aligned": False}, "multiples of 16 bytes"),
    ],
)
def test_what_is_declined(change, reason):
    query = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
    case = NM_SPARSE[0]
    inputs = replace(make_nm_sparse(case, torch.bfloat16, "cpu"), query=query, key=query, value=query)
    problem = replace(problem_of(case, inputs), device_type="cuda", arch=90)
    assert re.search(reason, "; ".join(MMA_SP.why_not(replace(problem, **change))))


def test_auto_takes_it_with_a_bias():
    case = next(c for c in NM_SPARSE if c.bias)
    problem = replace(problem_of(case, make_nm_sparse(case, torch.bfloat16, "cpu")), device_type="cuda", arch=90)
    assert problem.mask == "bias"
    if MMA_SP.why_not(problem):
        pytest.skip("; ".join(MMA_SP.why_not(problem)))
    assert choose(BACKENDS, problem).backend is MMA_SP


def test_a_cpu_is_declined():
    x = torch.randn(1, 1, 8, 64)
    with pytest.raises(saccade.UnsupportedProblem, match="needs a CUDA device, got cpu"):
        saccade.nm_sparse_attention(x, x, x, backend="mma_sp")


@pytest.mark.parametrize(
    ("view", "aligned"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[:, :, 1:], True),
        (lambda x: x[..., 4:20], False),
        (lambda x: x[..., 8:24], True),
        (lambda x: x[:1].expand(4, -1, -1, -1), True),
        (lambda x: x[:, :, :1].expand(-1, -1, 9, -1), False),
    ],
)
def test_alignment(view, aligned):
    x = view(torch.empty(2, 3, 8, 32, dtype=torch.bfloat16))
    case = replace(NM_SPARSE[0], heads=x.shape[1], kv_heads=x.shape[1])
    inputs = replace(make_nm_sparse(NM_SPARSE[0], torch.bfloat16, "cpu"), query=x, key=x, value=x)
    assert problem_of(case, inputs).aligned == aligned


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Sm90Config(), Sm90Config(2, 128, 2, overlap=True), Sm90Config(3, 128, 4)], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(449, 300), (777, 1300), (64, 2048), (257, 513), (1000, 1000)])
def test_blocks_of_a_persistent_launch(monkeypatch, config, q_len, kv_len):
    """More blocks than multiprocessors, full and partial ones: every run is bitwise the same as with one thread block per
    block."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a alone")
    dim = 64 if config.block_kv == 128 and config.warpgroups == 3 else 128
    query = torch.randn(7, q_len, 40, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(7, kv_len, 20, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    found = []
    for persistent in (False, True, True):
        monkeypatch.setattr(fused, "pick_sm90", lambda *call, p=persistent: replace(config, persistent=p))
        found.append(saccade.nm_sparse_attention(query, key, value, enable_gqa=True, return_lse=True, backend="mma_sp"))
    assert all(torch.equal(found[0][i], again[i]) for again in found[1:] for i in (0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 16, 4096, 4096), (2, 16, 2048, 8192), (1, 2, 640, 8191), (1, 34, 512, 4097), (1, 3, 128, 9001)]
)
def test_parts_of_the_last_wave(monkeypatch, shape):
    """The same selection as whole blocks, O and lse within rounding, and the same bits every time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a alone")
    batch, heads, q_len, kv_len = shape
    query = torch.randn(batch, q_len, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(batch, kv_len, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    args = NMSparseArgs(query, key, value, *[None] * 4, 2, 4, 0.0, False, 128**-0.5)
    parts = [fused.forward(args, True) for _ in range(3)]
    assert all(torch.equal(x, y) for again in parts[1:] for x, y in zip(parts[0], again, strict=True))
    monkeypatch.setattr(
        fused, "_split_of", lambda args, config, processors: last_wave.Split(batch * heads * q_len // config.block_q)
    )
    whole = fused.forward(args, True)
    assert torch.equal(parts[0][2], whole[2])
    torch.testing.assert_close(parts[0][0], whole[0], rtol=0.02, atol=0.001)
    torch.testing.assert_close(parts[0][1], whole[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "tiles", "plan"),
    [
        (4096, 128, (4092, 4, 33)),
        (4096, 32, (4092, 4, 16)),  # two tiles a part at least
        (4096, 16, (4096, 0, 1)),  # too short
        (4224, 128, (4224, 0, 1)),  # whole waves
        (100, 128, (100, 0, 1)),  # no two parts for each
        (10, 64, (0, 10, 13)),
    ],
)
def test_which_blocks_are_split(blocks, tiles, plan):
    found = last_wave.split(blocks, 132, tiles)
    assert tuple(found) == plan
    assert found.pieces <= -(-blocks // 132) * 132
    ends = [tiles * part // found.parts for part in range(found.parts + 1)]  # as `QueryBlock` has them
    assert all(end - begin >= 2 for begin, end in itertools.pairwise(ends))


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [112, 128, 64])
def test_parts_are_combined(monkeypatch, head_dim, dtype):
    monkeypatch.setattr(last_wave, "run", lambda make, tensors, options, about: emulator.launch(make, tensors, *options, None))
    torch.manual_seed(0)
    batch, heads, q_len, rows, padded = 2, 2, 256, 128, -(-head_dim // 64) * 64
    plan = last_wave.Split(5, 3, 4)  # blocks 5 to 7 of 8
    outs, sums = torch.randn(12, rows, padded), torch.rand(12, rows, 2)
    # offsets: how small the weights of a part are
    sums[..., 0] *= 40
    sums[4, 7], outs[4, 7] = torch.tensor([1e30, 0.0]), 0  # a part without a visible key
    sums[:4, 9, 1], outs[:4, 9] = 0, 0  # a row without a visible key
    sums[2, 11, 1] = float("nan")
    sums[3, 13, 0] = -300  # the last part has weights beside which float32 holds no others
    out = torch.full((batch, q_len, heads, head_dim), 77.0, dtype=dtype).transpose(1, 2)
    lse = torch.full((batch, heads, q_len), 77.0)
    last_wave.combine(last_wave.Parts(outs, sums), out, lse, plan)
    factors = torch.exp2(-sums[..., 0].double()).unflatten(0, (3, 4))
    total = (factors * sums[..., 1].double().unflatten(0, (3, 4))).sum(1)
    wanted = (factors[..., None] * outs.double().unflatten(0, (3, 4))).sum(1) / total[..., None]
    wanted[total == 0] = 0
    blocks, of_blocks = out.reshape(8, rows, head_dim), lse.reshape(8, rows)
    assert bool((blocks[:5] == 77).all() and (of_blocks[:5] == 77).all())
    torch.testing.assert_close(blocks[5:], wanted[..., :head_dim].to(dtype), equal_nan=True, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(of_blocks[5:], total.log().float(), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_a_threshold_of_dropout_is_that_of_the_masking_kernels():
    for p in (0.1, 0.3, 0.5, 0.7, 0.999, 1e-9, 0.0):
        wanted = (torch.arange(2**24) * 2.0**-24 >= torch.tensor(p)).nonzero()[0].item()
        assert drop_threshold(p) == wanted


ORDER = """
#include "block_order.cuh"
extern "C" void order(int* problem, int* block, int problems, int blocks, int early) {
    order_blocks(blockIdx.x, problems, blocks, early, problem[blockIdx.x], block[blockIdx.x]);
}
"""


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
def test_first_blocks_come_first(tmp_path):
    """`order_blocks` of block_order.cuh: each block of each problem once, block 0 of the last problems first."""
    (tmp_path / "order.cu").write_text(ORDER)
    for problems, blocks, early in [(32, 256, 48), (128, 64, 48), (100, 1, 48), (1, 5, 48), (60, 2, 48)]:
        problem, block = torch.full((2, problems * blocks), -1, dtype=torch.int32)
        emulator.run(
            SimpleNamespace(
                source=SimpleNamespace(path=tmp_path / "order.cu"), kernel="order", options=SimpleNamespace(defines=()),
                grid=(problems * blocks, 1), threads=32, parameters=listed("pointer problem, pointer block, int32 problems, int32 blocks, int32 early"),
                arguments={"problem": problem, "block": block, "problems": problems, "blocks": blocks, "early": early},
            )
        )  # fmt: skip
        found = list(zip(problem.tolist(), block.tolist(), strict=True))
        first = min(early, problems)
        assert found[:first] == [(problems - first + i, 0) for i in range(first)]
        assert found[first:] == sorted(found[first:])
        assert sorted(found) == list(itertools.product(range(problems), range(blocks)))


def test_shared_memory_of_the_sm90_kernel():
    # Q, two rings of K and V, barriers: what the source adds up
    config = Sm90Config(3, 96, 2)
    assert config.shared_bytes(128) == 1024 + 3 * 16384 + 4 * 24576 + 8 * (4 * 2 + 2 * 3 + 1)
    # with a block mask, a bit a key tile
    config = Sm90Config(1, 64, 2, resident=2)
    assert config.shared_bytes(128, 65) == 1024 + 16384 + 4 * 16384 + 8 * (4 * 2 + 2 + 1) + 12
    assert Sm90Config(3, 64, 4).shared_bytes(128, 65) - Sm90Config(3, 64, 4).shared_bytes(128) == 65
