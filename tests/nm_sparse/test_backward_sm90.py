"""The backward for sm_90a: on a GPU every mode against float64 with a given selection; everywhere the binaries and the
layouts."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import pytest
import torch
from contracts.exact import DEVICE
from contracts.nm_sparse import pack

import saccade
from saccade.nm_sparse import op as ops_nm_sparse
from saccade.nm_sparse import reference
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backward_sm90 import launchers as backward_sm90
from saccade.nm_sparse.backward_sm90 import one_pass
from saccade.nm_sparse.fused.config import DkvConfig, DqConfig, OnePassConfig, pick_backward, pick_one_pass
from saccade.nm_sparse.fused.launchers import bytes_of_bias
from saccade.nm_sparse.masked import launchers
from saccade.nm_sparse.testing.cases import NM_SPARSE
from saccade.nm_sparse.testing.check import check_nm_sparse
from saccade.nm_sparse.testing.inputs import make_nm_sparse
from saccade.nvrtc import build, obstacles
from saccade.testing.judge import report
from tools.cubin import disassemble, resource_usage

# bytes, in builds with dropout or a block mask
SPILL = 40


def call(head_dim: int, is_causal: bool = False, dtype: torch.dtype = torch.bfloat16, **given) -> NMSparseArgs:
    """A call of which only the metadata of the tensors is used."""
    query = torch.empty(1, 1, 8, head_dim, dtype=dtype)
    return NMSparseArgs(query, query, query, *[None] * 4, 2, 4, 0.0, is_causal, 1.0)._replace(**given)


def binaries(args):
    """(result of NVRTC, resources, instructions, columns of scores) of both kernels."""
    if obstacles("90a"):
        pytest.skip(obstacles("90a")[0])
    pytest.importorskip("triton")
    configs = pick_backward(args.query.shape[3], args.block_mask is not None, bytes_of_bias(args))
    for source, config in zip((backward_sm90.DKV, backward_sm90.DQ), configs, strict=True):
        columns = 64 if source is backward_sm90.DKV else config.block_kv
        built = build(source, "90a", backward_sm90.backward_options(args, config))
        (usage,) = resource_usage(built.cubin).values()
        yield built, usage, disassemble(built.cubin), columns


def assert_pipelined(built, code: str, head_dim: int, columns: int) -> None:
    """Products over D for S and dP, over a tile for the gradients, which wait for each other only where the source requires
    it."""
    assert "serialized" not in built.log
    products = re.findall(r"\bHGMMA\.64x(\d+)x16\.F32\.?(?:BF16)?([^;]*)", code)
    transposed = sum("tnspB" in rest for _, rest in products)
    assert transposed == (8 if columns == 128 else 4 if "backward_dq" in code else 8)
    assert len(products) == 2 * head_dim // 16 + transposed
    assert {int(n) for n, rest in products if "tnspB" in rest} == {head_dim}
    assert {int(n) for n, rest in products if "tnspB" not in rest} == {columns}
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) <= 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tuned_binaries(head_dim, is_causal):
    for built, usage, code, columns in binaries(call(head_dim, is_causal)):
        assert usage.stack == 0
        # of 384 threads; the consumers take 240 of the producers' 24
        assert usage.registers == 168
        assert_pipelined(built, code, head_dim, columns)


@functools.cache
def writes_of(options):
    """The kernel that writes dQ, which cases share."""
    return build(one_pass.WRITE_DQ, "90a", options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ordered", "dtype"),
    [(True, torch.bfloat16), (True, torch.float16), (False, torch.bfloat16)],
    ids=["bfloat16", "float16", "unordered"],
)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_binary_of_one_pass(head_dim, is_causal, ordered, dtype):
    """Five products a tile, dQ and dK of the last one again behind the loop; waits only where the source asks for them."""
    if obstacles("90a"):
        pytest.skip(obstacles("90a")[0])
    pytest.importorskip("triton")
    args = call(head_dim, is_causal, dtype)
    built = build(one_pass.ONE_PASS, "90a", one_pass.one_pass_options(args, pick_one_pass(head_dim, ordered)))
    (usage,) = resource_usage(built.cubin).values()
    code = disassemble(built.cubin)
    assert (usage.stack, usage.registers) == (0, 168)
    assert "serialized" not in built.log
    products = re.findall(r"\bHGMMA\.64x(\d+)x16", code)
    scores, gradients = head_dim // 16, 4
    assert len(products) == 2 * scores + gradients + 2 * (8 + gradients)
    assert products.count(str(head_dim)) == (3 * gradients if head_dim == 128 else 2 * scores + 3 * gradients)
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 5
    assert "UBLKRED" in code  # adds to memory
    assert ("UBLKCP.G.S" in code) == ordered  # in order, the first block stores
    assert next(iter(resource_usage(writes_of(one_pass.write_dq_options(args)).cubin).values())).stack == 0


def test_when_one_pass_makes_the_gradients():
    def takes(q_len: int, kv_len: int, is_causal: bool, head_dim: int = 128, **given) -> bool:
        query, key = (torch.empty(1, 1, length, head_dim, dtype=torch.bfloat16) for length in (q_len, kv_len))
        return one_pass.takes(call(head_dim, is_causal, **given)._replace(query=query, key=key))

    few, many = one_pass.FEW, one_pass.MANY
    assert takes(few, few, True)
    assert takes(few, few, True, 96)
    assert not takes(few - 1, many, True)
    assert not takes(many, many, True, 64)
    assert takes(many, many, False)
    assert not takes(many - 1, many, False)
    assert not takes(many, many - 1, False)
    with saccade.nm_sparse.unordered_gradients():
        assert takes(few, few, False)
        assert not takes(few - 1, few, False)
        assert takes(many, many, True, 64)
        assert not takes(many, many - 1, True, 64)
        with saccade.nm_sparse.unordered_gradients(False):
            assert not takes(few, few, False)
        assert not takes(few, few, False, **FEATURES["dropout"])
        assert not takes(few, few, False, **FEATURES["blocks"])
        assert not takes(few, few, False, bias=torch.zeros(1))
    assert not takes(few, few, False)


FEATURES = {
    "half": {"dtype": torch.float16},
    "dropout": {"seed": torch.zeros(1, dtype=torch.int64), "dropout_p": 0.5},
    "blocks": {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_binaries(head_dim, feature):
    for built, usage, code, columns in binaries(call(head_dim, True, **FEATURES[feature])):
        assert usage.stack <= (0 if feature == "half" else SPILL)
        assert ("BF16" in code) == (feature != "half")
        assert_pipelined(built, code, head_dim, columns)


# bytes of the stack: none but in the kernel of dK and dV at D = 128, in the warps that copy, or outside the products
BIAS_SPILL = {"plain": {2: 0, 4: 8}, "dropout": {2: 40, 4: 56}, "blocks": {2: 56, 4: 64}}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("feature", BIAS_SPILL)
@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_binaries_with_a_bias(head_dim, wide, feature):
    bias = torch.empty(1, 1, 8, 8, dtype=torch.float32 if wide else torch.bfloat16)
    args = call(head_dim, True, bias=bias, **FEATURES.get(feature, {}))
    for built, usage, code, columns in binaries(args):
        spills = head_dim == 128 and "backward_dkv" in code
        assert usage.stack <= (BIAS_SPILL[feature][4 if wide else 2] if spills else 0)
        assert usage.registers == 168
        assert_pipelined(built, code, head_dim, columns)
        assert "LDGSTS" in code  # copies of 16 bytes
        assert ("LDSM.16.MT88.4" in code) == ("backward_dkv" in code and not wide)


def test_shared_memory():
    assert DkvConfig(4).shared_bytes(128) == 1024 + 4 * 16384 + 4 * (2 * 16384 + 128 * 8 + 2 * 320) + 8 * 9
    assert DqConfig(128, 2).shared_bytes(128) == 1024 + 4 * 16384 + 2 * (2 * 32768 + 128 * 16) + 8 * 5
    rings = 2 * 16384 + 3 * (16384 + 128 * 8 + 2 * 320)
    assert OnePassConfig(2).shared_bytes(128) == 1024 + 4 * 16384 + rings + 2 * 16384 + 2 * 16384 + 8 * 13 + 8
    # 64 rows of 128 numbers and 16 bytes, and a third number for each query; 128 rows of 64 numbers and 8 more
    assert DkvConfig(2, bias=4).shared_bytes(128) == 1024 + 4 * 16384 + 2 * (2 * 16384 + 128 * 8 + 3 * 320 + 64 * 528) + 8 * 5
    assert DqConfig(64, 2, bias=2).shared_bytes(64) == 1024 + 4 * 8192 + 2 * (2 * 8192 + 128 * 8 + 128 * 144) + 8 * 5
    for head_dim in (64, 128):
        assert pick_one_pass(head_dim).shared_bytes(head_dim) <= 227 * 1024
        for blocks, bias in itertools.product((False, True), (0, 2, 4)):
            assert all(config.shared_bytes(head_dim) <= 227 * 1024 for config in pick_backward(head_dim, blocks, bias))


def transposed(words):
    """`transpose_bits` of cuda/backward.cuh, lane by lane."""
    lanes = torch.arange(32)
    for j, left in ((16, 0xFFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        other, upper = words[lanes ^ j], (lanes & j) != 0
        mine = torch.where(upper, 0xFFFFFFFF ^ left, left)
        other = torch.where(upper, other >> j, other << j & 0xFFFFFFFF)
        words = (words & mine) | (other & (0xFFFFFFFF ^ mine))
    return words


def permuted(x: int, y: int, selector: int) -> int:
    """The byte permutation of PTX: the high bit of a selector copies a sign."""
    source = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
    picks = [selector >> 4 * n & 15 for n in range(4)]
    return int.from_bytes(bytes((0xFF if source[p & 7] & 128 else 0) if p & 8 else source[p] for p in picks), "little")


def pair_mask(word: int, t: int, i: int) -> int:
    """`pair_mask` of cuda/backward.cuh: two neighbours of column group i."""
    shifted = [word << n & 0xFFFFFFFF for n in (7 - 2 * t, 6 - 2 * t)]
    return permuted(*shifted, 0xCC88 + 0x1111 * i)


def test_bits_reach_the_operand_of_the_next_product():
    """The bits of 64 queries and 128 keys, transposed by the producer; the masks of the pairs of a lane; the places in the
    operand."""
    kept = torch.rand(64, 128) < 0.5
    words = (kept.view(64, 4, 32).long() << torch.arange(32)).sum(-1)  # as stored: [query][word]
    bits = torch.stack([transposed(words[half : half + 32, warp]) for warp in range(4) for half in (0, 32)])
    bits = bits.view(4, 2, 32).transpose(1, 2).reshape(128, 2)  # [key][32 queries], as the producers store it
    operand = torch.zeros(128, 64, dtype=torch.bool)
    for key in range(128):
        for t in range(4):
            for i in range(8):
                mask = pair_mask(int(bits[key, i // 4]), t, i % 4)
                assert mask in (0, 0xFFFF, 0xFFFF0000, 0xFFFFFFFF)
                # register 2 i + h of A, rows g + 8 h: columns 8 (i % 2) + 2 t of the 16 of product i / 2
                column = 16 * (i // 2) + 8 * (i % 2) + 2 * t
                operand[key, column], operand[key, column + 1] = bool(mask & 1), bool(mask >> 31)
    assert torch.equal(operand, kept.T)


def test_bits_of_a_query_reach_its_pairs():
    """The dQ kernel reads the words as they are stored."""
    kept = torch.rand(128) < 0.5
    words = (kept.view(4, 32).long() << torch.arange(32)).sum(-1)
    for t in range(4):
        for i in range(16):
            mask = pair_mask(int(words[i // 4]), t, i % 4)
            assert [bool(mask & 1), bool(mask >> 31)] == kept[8 * i + 2 * t : 8 * i + 2 * t + 2].tolist()


def test_what_is_taken(monkeypatch):
    args = call(64)
    assert not backward_sm90.takes(args)
    monkeypatch.setattr(backward_sm90, "arch_of", lambda device: 90)
    monkeypatch.setattr(backward_sm90, "obstacles", lambda architecture: ())

    class OnGpu:
        device = torch.device("cuda", 0)

        def __init__(self, shape, dtype=torch.bfloat16):
            self.shape, self.dtype = shape, dtype

    def taken(shape=(1, 1, 8, 64), dtype=torch.bfloat16, **given):
        return backward_sm90.takes(args._replace(query=OnGpu(shape, dtype), **given))

    assert taken()
    assert taken((1, 1, 8, 24), torch.float16, pattern_n=1, pattern_m=2, mask=torch.ones(1, dtype=torch.bool))
    assert not taken((1, 1, 8, 136))
    assert not taken((1, 1, 8, 20))
    assert not taken(dtype=torch.float32)
    assert not taken(pattern_n=1, pattern_m=4)
    assert taken(bias=torch.zeros(1))
    monkeypatch.setattr(backward_sm90, "arch_of", lambda device: 100)
    assert not taken()


@pytest.mark.parametrize(
    ("view", "same"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[..., 8:24], True),
        (lambda x: x[:1].expand(4, -1, -1, -1), True),
        (lambda x: x[..., 4:20], False),
        (lambda x: x[:, :, :1].expand(-1, -1, 9, -1), False),
        (lambda x: x.mT, False),
        (lambda x: x[:1, :1, :1, :1].expand(2, 3, 8, 32), False),
    ],
)
def test_what_the_copy_engine_does_not_take_is_copied(view, same):
    x = view(torch.arange(2 * 3 * 8 * 32).view(2, 3, 8, 32).bfloat16())
    made = backward_sm90.for_copy_engine(x)
    assert (made is x) == same
    assert torch.equal(made, x)
    assert made.stride(3) == 1
    assert same or made.is_contiguous()


def plain(**different):
    return replace(NM_SPARSE[0], **{"q_len": 256, "kv_len": 256, "head_dim": 128, **different})


GPU_CASES = [
    plain(),
    plain(q_len=193, kv_len=387, pattern="1:2"),
    plain(q_len=731, kv_len=731, is_causal=True),
    plain(q_len=200, kv_len=500, is_causal=True, head_dim=64),
    plain(q_len=500, kv_len=203, is_causal=True, heads=6),
    plain(q_len=330, kv_len=345, dropout_p=0.3),
    plain(q_len=330, kv_len=330, dropout_p=0.3, head_dim=64, is_causal=True, heads=4, blocks=True),
    plain(q_len=1000, kv_len=1100, blocks=True),
    plain(q_len=100, kv_len=300, head_dim=80),
]
BIAS_CASES = [
    plain(bias=(2, 2, 256, 256)),
    plain(q_len=193, kv_len=387, pattern="1:2", bias=(1, 2, 193, 387)),
    plain(q_len=200, kv_len=500, head_dim=64, bias=(2, 1, 1, 500)),
    plain(q_len=500, kv_len=203, heads=6, bias=(1, 6, 500, 1)),
    plain(q_len=330, kv_len=345, dropout_p=0.3, bias=(330, 345)),
    plain(q_len=1000, kv_len=1104, blocks=True, bias=(1, 2, 1000, 1104)),
    plain(q_len=100, kv_len=300, head_dim=80, bias=(1, 1, 100, 300)),
]


@pytest.fixture
def used(monkeypatch):
    """Whether each backward ran on these kernels."""
    if obstacles("90a") or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90 and NVRTC")
    answers, takes = [], backward_sm90.takes
    monkeypatch.setattr(backward_sm90, "takes", lambda args: answers.append(takes(args)) or answers[-1])
    return answers


@pytest.fixture(params=["two passes", "one pass", "one pass, unordered"])
def way(request, monkeypatch):
    """Every way to the gradients, whichever was measured faster."""
    monkeypatch.setattr(one_pass, "prefers", lambda args: request.param != "two passes")
    with saccade.nm_sparse.unordered_gradients("unordered" in request.param):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_budget(used, way, case, dtype):
    results = check_nm_sparse(case, dtype, DEVICE, "mma_sp")
    assert used == [True]
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", BIAS_CASES, ids=str)
def test_biases(used, case, dtype):
    results = check_nm_sparse(case, dtype, DEVICE, "mma_sp")
    assert used == [True]
    assert "dbias" in {r.name for r in results}
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -3e38, -1e9, 1e9, 3e38])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_biases_at_the_limits(used, head_dim, value):
    """Rows and keys next to which lse has lost the logarithm of the sum: forward keeps what the reference keeps in such rows, and every gradient is
    that of the reference in float32 under the selection of forward."""
    torch.manual_seed(0)
    query, key, value_, dout = (torch.randn(2, 2, n, head_dim, device=DEVICE).bfloat16() for n in (150, 210, 210, 150))
    bias = torch.randn(2, 2, 150, 210, device=DEVICE)
    bias[:, :, 70], bias[:, :, 71, 1:], bias[:, 0, :64, 3] = value, value, value
    args = NMSparseArgs(query, key, value_, None, bias, None, None, 2, 4, 0.0, False, head_dim**-0.5)
    out, lse, kept = ops_nm_sparse.forward(args, True, "mma_sp")
    kept_keys = reference.unpack_selection(kept, 4, 210)
    leaves = [x.float().requires_grad_() for x in (query, key, value_, bias)]
    wanted, wanted_lse = reference.attend(*leaves[:3], kept_keys, scale=head_dim**-0.5, bias=leaves[3])
    found = ops_nm_sparse.backward(args, dout, None, out, lse, kept, True, "mma_sp")
    assert used == [True]
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-3)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, leaves, dout.float()), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.02 * theirs.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("keys_hidden", [7, 70, 130])
def test_hidden_keys_may_hold_nan(used, way, keys_hidden):
    case = plain(q_len=200, kv_len=300, keys_hidden=keys_hidden)
    results = check_nm_sparse(case, torch.bfloat16, DEVICE, "masked")
    assert used == [True]
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_groups_that_are_never_pruned(used, way, pattern, is_causal):
    """Stored bits with whole groups, of a forward that is not `mma_sp`."""
    case = plain(q_len=330, kv_len=345, pattern=pattern, is_causal=is_causal, dense_first=4, dense_recent=64)
    results = check_nm_sparse(case, torch.bfloat16, DEVICE, "masked")
    assert used == [True]
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.gpu
def test_keys_beyond_the_queries_are_never_read(used, way):
    inputs = make_nm_sparse(plain(q_len=200, kv_len=300, is_causal=True), torch.bfloat16, DEVICE)
    inputs.key[:, :, 200:] = inputs.value[:, :, 200:] = float("nan")
    leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = saccade.nm_sparse_attention(*leaves, is_causal=True, backend="mma_sp")
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert used == [True]
    assert not any(x.isnan().any() for x in (dq, dk, dv))
    assert (dk[:, :, 200:] == 0).all()
    assert (dv[:, :, 200:] == 0).all()


@pytest.mark.gpu
def test_a_selection_that_no_score_would_choose(used, way):
    inputs = make_nm_sparse(plain(q_len=150, kv_len=280), torch.bfloat16, DEVICE)
    q, k, v = inputs.query, inputs.key, inputs.value
    args = NMSparseArgs(q, k, v, None, None, None, None, 2, 4, 0.0, False, 0.05)
    kept = torch.rand(*q.shape[:3], 70, 4, device=DEVICE)
    kept = ((kept > kept.sort(-1).values[..., 1:2]) & (torch.rand_like(kept) < 0.8)).flatten(-2)  # at most two of four
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = reference.attend(*leaves, kept, scale=0.05)
    wanted = torch.autograd.grad(out, leaves, inputs.dout.double())
    found = ops_nm_sparse.backward(
        args, inputs.dout, None, out.to(q.dtype).detach(), lse.float().detach(), pack(kept, 4), False, "masked"
    )
    assert used == [True]
    for ours, theirs in zip(found[:3], wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("passes", [1, 2])
def test_the_same_bits_every_run_and_close_to_the_masking_kernels(used, monkeypatch, passes):
    monkeypatch.setattr(one_pass, "prefers", lambda args: passes == 1)
    inputs = make_nm_sparse(plain(q_len=2048, kv_len=2048, is_causal=True), torch.bfloat16, DEVICE)
    args = NMSparseArgs(inputs.query, inputs.key, inputs.value, None, None, None, None, 2, 4, 0.0, True, 0.1)
    out, lse, kept = ops_nm_sparse.forward(args, True, "mma_sp")
    first, again = (launchers.backward(args, inputs.dout, None, out, lse, kept, bias_grad=False)[:3] for _ in range(2))
    assert used == [True, True]
    monkeypatch.setattr(backward_sm90, "takes", lambda args: False)
    theirs = launchers.backward(args, inputs.dout, None, out, lse, kept, bias_grad=False)[:3]
    for a, b, c in zip(first, again, theirs, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.float(), c.float(), rtol=0.02, atol=0.02 * c.float().abs().max().item())
