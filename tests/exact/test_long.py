"""The kernels of sequences beyond 128 tokens on sm_90: backend `long`, and the ragged family's calls of these lengths."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.engine.dispatch import choose
from saccade.exact.backends import BACKENDS
from saccade.exact.long import backend as long_backend
from saccade.exact.long import bias_gradient, config, sm90
from saccade.exact.long.backend import LONG
from saccade.exact.problem import describe_attention
from saccade.exact.ragged import call as ragged_call
from saccade.exact.ragged import launchers
from saccade.exact.testing.check import check_attention, public_call
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.testing.varlen_check import check_varlen
from saccade.exact.varlen.args import VarlenArgs
from saccade.hardware import assumed
from saccade.nvrtc import Options, build, toolchain
from saccade.testing.baseline import differentiate
from saccade.testing.cases import Case
from saccade.testing.inputs import make
from saccade.testing.judge import report
from tools.aot import SHARED_LIMIT
from tools.cubin import resource_usage

# lengths around the sizes of chunks (64), rounds (128) and last tiles (16, 32, 64); more heads than multiprocessors in the last
SIZES = {
    "129": (2, 3, 3, 129, 129), "160": (2, 3, 3, 160, 160), "197": (2, 3, 3, 197, 197), "256": (2, 2, 2, 256, 256), "257": (2, 2, 2, 257, 257),
    "577": (1, 2, 2, 577, 577), "short": (3, 2, 2, 7, 33), "65": (2, 3, 3, 65, 65), "128": (2, 3, 3, 128, 128), "one-query": (3, 2, 2, 1, 300), "one-key": (2, 2, 2, 300, 1),
    "cross": (2, 2, 2, 130, 385), "long": (1, 1, 1, 2048, 1100), "many": (60, 5, 5, 141, 193),
}  # fmt: skip
FEATURES: dict[str, dict] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"lengths": True},
    "causal-lengths-lse": {"is_causal": True, "lengths": True, "lse_grad": True},
    "dropout": {"dropout_p": 0.2},
    "causal-lengths-lse-dropout": {"is_causal": True, "lengths": True, "lse_grad": True, "dropout_p": 0.1},
}
# (B, H, Hkv, Tq, Tk): groups of 2, 3 and 4, one key head for all, and blocks of backward that own several key heads
GROUPED = {
    "65": (2, 6, 2, 65, 65), "128": (2, 4, 1, 128, 128), "197": (2, 12, 4, 197, 197), "cross": (2, 4, 2, 130, 385), "577": (1, 8, 2, 577, 577),
    "one-query": (3, 4, 1, 1, 300), "many": (60, 12, 4, 141, 193),
}  # fmt: skip
# shapes of masks of 12 rows, 4 heads and both axes odd; None: for each pair of each head
MASKS = {"each": None, "batch": (2, 1, 197, 261), "shared": (197, 261), "keys": (2, 1, 1, 261), "queries": (4, 197, 1)}


# (rows, heads, bias): rows that share one, rows and heads, an odd number of them, and none
BIASES = {
    "rows": (6, 3, (1, 3, 197, 261)), "rows-and-heads": (5, 3, (1, 1, 197, 261)), "rank-2": (3, 3, (197, 261)), "heads": (3, 4, (3, 1, 197, 261)),
    "none": (3, 2, (3, 2, 197, 261)),
}  # fmt: skip
BIAS_FEATURES: dict[str, dict] = {
    "plain": {},
    "lengths-lse": {"lengths": True, "lse_grad": True},
    "dropout": {"dropout_p": 0.2},
}


@pytest.mark.sm90
class TestBudget:
    backend = "long"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [8, 32, 40, 64, 128])
    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("size", SIZES)
    def test_rows(self, size, feature, dim, dtype):
        self.check(Case(f"{size}-{feature}", *SIZES[size], dim, **FEATURES[feature]), dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [32, 40, 64, 128])
    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("size", GROUPED)
    def test_grouped_heads(self, size, feature, dim, dtype):
        self.check(Case(f"grouped-{size}-{feature}", *GROUPED[size], dim, **FEATURES[feature]), dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [32, 64, 128])
    @pytest.mark.parametrize("feature", ["plain", "lengths"])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @pytest.mark.parametrize("shape", MASKS)
    def test_masks(self, shape, kv_heads, feature, dim, dtype):
        masked = {"mask": "bool", "mask_shape": MASKS[shape], "lse_grad": True}
        self.check(Case(f"mask-{shape}-{feature}", 2, 4, kv_heads, 197, 261, dim, **masked, **FEATURES[feature]), dtype)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dim", [8, 32, 40, 64])
    @pytest.mark.parametrize("feature", BIAS_FEATURES)
    @pytest.mark.parametrize("shape", BIASES)
    def test_biases(self, shape, feature, dim, dtype):
        rows, heads, bias = BIASES[shape]
        case = Case(f"bias-{shape}-{feature}", rows, heads, heads, 197, 261, dim, bias=bias, **BIAS_FEATURES[feature])
        self.check(case, dtype)

    @pytest.mark.parametrize("size", [*SIZES, "triangle"])
    def test_biases_of_sizes(self, size):
        batch, heads, kv_heads, q_len, kv_len = SIZES.get(size, (256, 4, 4, 256, 256))
        self.check(
            Case(f"bias-{size}", batch, heads, kv_heads, q_len, kv_len, 32, bias=(1, heads, q_len, kv_len)), torch.bfloat16
        )

    @pytest.mark.parametrize("feature", BIAS_FEATURES)
    def test_biases_of_grouped_heads(self, feature):
        case = Case("bias-grouped", 5, 12, 4, 197, 261, 64, bias=(1, 12, 197, 261), **BIAS_FEATURES[feature])
        self.check(case, torch.float16)

    def test_biases_of_windows(self):
        self.check(Case("bias-windows", 6, 2, 2, 197, 197, 32, bias=(2, 2, 197, 197), windows=2), torch.bfloat16)

    @pytest.mark.parametrize("tokens", [(65, 65), (128, 128), (129, 577), (512, 512)], ids=str)
    def test_masks_of_many_rows(self, tokens):
        self.check(Case("masks", 40, 6, 6, *tokens, 64, mask="bool", mask_shape=(40, 1, *tokens)), torch.bfloat16)

    @pytest.mark.parametrize(
        "features", [{}, {"is_causal": True, "lse_grad": True}, {"dropout_p": 0.3}], ids=["plain", "causal", "dropout"]
    )
    def test_packed_qkv(self, features):
        self.check(Case("packed", 3, 2, 2, 197, 197, 64, packed=True, **features), torch.bfloat16)

    def check(self, case, dtype):
        results = check_attention(case, dtype, "cuda", self.backend)
        assert all(r.ok for r in results), report(case, results)


@pytest.mark.sm90
@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["all", "dropout"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_many_times_the_same_bits(dim, dropout_p):
    # if memory is reused while it is still read, or dQ is added up in another order, the result changes
    case = Case("bits", 50, 8, 8, 261, 330, dim, lengths=True, dropout_p=dropout_p)
    inputs = make(case, torch.bfloat16, "cuda")
    first = differentiate(public_call(case, "long", True), inputs, 0, True)
    for _ in range(20):
        again = differentiate(public_call(case, "long", True), inputs, 0, True)
        assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.sm90
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_padding_may_hold_anything(bad):
    case = Case("padding", 4, 2, 2, 150, 330, 64, lengths=True)
    clean = make(case, torch.bfloat16, "cuda")
    clean = replace(clean, lengths=torch.tensor([0, 129, 330, 65], dtype=torch.int32, device="cuda"))
    kept = (torch.arange(330, device="cuda") < clean.lengths[:, None])[:, None, :, None]
    dirty = replace(clean, key=clean.key.where(kept, bad), value=clean.value.where(kept, bad))
    expected, results = (differentiate(public_call(case, "long", True), x, 0, True) for x in (clean, dirty))
    for name, x in expected.items():
        assert torch.equal(x, results[name]), name


@pytest.mark.sm90
def test_strange_memory():
    """Rows at odd addresses, with odd strides, and keys that all heads share: copied, and right."""
    base = torch.randn(3, 200, 2 * 68 + 1, device="cuda", dtype=torch.bfloat16)
    query = base[:, :, 1:].unflatten(2, (2, 68))[..., :64].transpose(1, 2)
    key = torch.randn(3, 1, 200, 64, device="cuda", dtype=torch.bfloat16).expand(3, 2, 200, 64)
    leaves = [x.detach().requires_grad_() for x in (query, key, key)]
    results = {}
    for backend in ("long", "reference"):
        out = saccade.attention(*leaves, backend=backend)
        results[backend] = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
    for ours, theirs in zip(results["long"], results["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.sm90
@pytest.mark.parametrize("at_once", [True, False], ids=["one launch", "buckets"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["all", "dropout"])
@pytest.mark.parametrize("causal", [0, 1, 2], ids=["full", "upper-left", "lower-right"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_packed_sequences_of_any_length(dim, causal, dropout_p, at_once, monkeypatch):
    """The long form of the ragged family against its Triton kernels: lengths 0, 1 and around tiles on both sides, NaN between the sequences."""
    monkeypatch.setattr(config, "timed", lambda *given: True)
    if not at_once:
        monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    seed = torch.tensor([7], device="cuda") if dropout_p else None
    hard = (0, 1, 16, 31, 64, 127, 128, 129, 197, 256, 257, 400)
    pairs = torch.tensor([(q, q if causal == 1 else k) for q, k in itertools.product(hard, hard[::-1])])
    ends = [F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in pairs.T]
    query, key, value, dout = (
        torch.randn(int(e[-1]) + 3, 2, dim, device="cuda", dtype=torch.bfloat16) for e in (*ends, ends[1], ends[0])
    )
    for x in (query, key, value):
        x[-3:] = float("nan")
    args = VarlenArgs(query, key, value, *ends, None, seed, 400, 400, dropout_p, causal, dim**-0.5)
    results = []
    for chosen in ({}, None):
        configs = launchers.Configs({}, {}, {}, chosen)
        out, lse = launchers.forward(args, configs)
        lse[:, -3:] = 0.0  # of no sequence
        dlse = lse.masked_fill(lse.isinf(), 0.0)  # the gradient of a row without keys times its probabilities, 0, must not be NaN
        results.append((out, lse, *launchers.backward(args, dout, dlse, out, lse, bias_grad=False, configs=configs)[:3]))
    # If a key is the only one, no gradient reaches the key through `out`: dP - delta is 0. With dropout `out` is the value times 1 / (1 - p), rounded
    # to 16 bits. Delta holds the rounding errors, summed over up to 128 queries: some 0.05 to 0.1 of dk. Triton's tiles of up to 128 tokens do not
    # read `out`; its kernels for longer sequences do, and agree.
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-1 if dropout_p and name == "dk" else 3e-2)


@pytest.mark.sm90
def test_under_a_cuda_graph_and_compile():
    leaves = [torch.randn(4, 3, 197, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    step = lambda: torch.autograd.grad(saccade.attention(*leaves, backend="long").float().square().sum(), leaves)  # noqa: E731
    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for x, y in zip(captured, expected, strict=True):
        assert torch.equal(x, y)
    compiled = torch.compile(lambda *x: saccade.attention(*x, backend="long"), fullgraph=True)
    assert torch.equal(compiled(*leaves), saccade.attention(*leaves, backend="long"))


@pytest.mark.sm90
@pytest.mark.parametrize("causal", [0, 1, 2], ids=["full", "upper-left", "lower-right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_packed_grouped_heads(kv_heads, dim, dtype, causal, monkeypatch):
    """Beside sequences that tiles of Triton hold."""
    monkeypatch.setattr(config, "timed", lambda *given: True)
    queries = (0, 1, 33, 65, 128, 129, 197, 257, 400)
    keys = queries if causal == 1 else queries[::-1]
    case = VarlenCase("grouped", queries, keys, 4, kv_heads, dim, causal, lse_grad=True, tail=3)
    results = check_varlen(case, dtype, "cuda", "ragged")
    assert all(r.ok for r in results), "\n".join(map(str, results))


@pytest.mark.sm90
@pytest.mark.parametrize("feature", ["grouped", "mask"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_features_give_the_same_bits_every_time(dim, feature):
    features = {"mask": "bool", "mask_shape": (50, 1, 261, 330)} if feature == "mask" else {"lengths": True}
    case = Case("bits", 50, 8, 8 if feature == "mask" else 2, 261, 330, dim, **features)
    inputs = make(case, torch.bfloat16, "cuda")
    first = differentiate(public_call(case, "long", True), inputs, 0, True)
    for _ in range(10):
        again = differentiate(public_call(case, "long", True), inputs, 0, True)
        assert all(torch.equal(x, again[name]) for name, x in first.items())


def triangle(rows=132, tokens=197, dim=32, heads=2, far=None, dtype=torch.bfloat16):
    """q, k, v and a bias that the rows share, with gradients."""
    leaves = [torch.randn(rows, tokens, heads, dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3)]
    bias = torch.randn(1, heads, tokens, tokens, device="cuda", dtype=dtype)
    if far is not None:
        bias[:, :, 2], bias[:, :, 4, 1:], bias[:, :, 8, ::3] = far, far, far
    return [x.requires_grad_() for x in (*leaves, bias)]


def differentiated(leaves, backend, dtype=None, **options):
    given = [x if dtype is None else x.detach().to(dtype).requires_grad_() for x in leaves]
    out = saccade.attention(*given, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), given)]


@pytest.mark.sm90
@pytest.mark.parametrize("far", [None, -float("inf"), torch.finfo(torch.bfloat16).min, -3000.0])
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_biases_beside_masks_of_keys(masked, dim, far):
    """And far numbers in them: a row of finfo.min is uniform, and one of -inf gives zeros."""
    leaves = triangle(9, dim=dim, far=far)
    seen = torch.rand(9, 197, device="cuda") < 0.7 if masked else None
    found = differentiated(leaves, "long", key_mask=seen)
    wanted = differentiated(leaves, "reference", torch.float32, key_mask=seen)
    for name, x, want in zip(("out", "dq", "dk", "dv", "dbias"), found, wanted, strict=True):
        torch.testing.assert_close(
            x.float(), want, rtol=2e-2, atol=2e-2 * max(1.0, want.abs().amax().item()), msg=lambda s, n=name: f"{n}: {s}"
        )


@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("tokens", [130, 577])
def test_masks_of_keys_of_many_rows_with_a_bias(tokens, dim, dtype):
    """More rows than multiprocessors, more chunks than places for their selectors, a row that sees no key, and masks of other strides."""
    leaves = triangle(140, tokens, dim, dtype=dtype)
    seen = torch.rand(140, tokens, device="cuda") < 0.5
    seen[3], seen[4, 1:], seen[5] = False, False, True
    wanted = differentiated(leaves, "reference", torch.float32, key_mask=seen)
    for mask in (seen, seen.T.contiguous().T):
        found = differentiated(leaves, "long", key_mask=mask)
        assert not found[0][3].any()
        for name, x, want in zip(("out", "dq", "dk", "dv", "dbias"), found, wanted, strict=True):
            torch.testing.assert_close(
                x.float(), want, rtol=2e-2, atol=2e-2 * max(1.0, want.abs().amax().item()), msg=lambda s, n=name: f"{n}: {s}"
            )


@pytest.mark.sm90
def test_two_biases_in_a_row_and_one_in_a_graph():
    """No map of a tensor outlives it; a graph reads what lies where its bias was."""
    first = triangle()
    second = [*first[:3], (2 * first[3].detach()).requires_grad_()]
    expected = [differentiated(x, "shared_bias") for x in (first, second)]
    for leaves, wanted in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        for x, want in zip(differentiated(leaves, "long"), wanted, strict=True):
            torch.testing.assert_close(x.float(), want.float(), rtol=3e-2, atol=3e-2 * want.float().abs().amax().item())
    eager = differentiated(first, "long")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiated(first, "long")
    with torch.no_grad():
        first[3].mul_(2)
    graph.replay()
    again = differentiated(second, "long")
    for x, y, other in zip(captured, again, eager, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, other)


@pytest.mark.sm90
def test_biases_give_the_same_bits_every_time():
    leaves = triangle(150, 330, 64)
    first = differentiated(leaves, "long")
    for _ in range(10):
        assert all(map(torch.equal, differentiated(leaves, "long"), first))


# --- without a GPU

PARTS = ("grouped", "mask", "dropout", "window")


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("packed", "causal", "bf16"), [(0, 0, 1), (1, 2, 0)], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "features", [f for n in range(5) for f in itertools.combinations(PARTS, n) if not {"mask", "window"} <= {*f}], ids="-".join
)
@pytest.mark.parametrize("key", sm90.CONFIGS, ids=str)
def test_binary(key, features, packed, causal, bf16):
    if packed and "mask" in features:
        pytest.skip("packed sequences take no mask")
    direction, dim = key
    chosen = sm90.CONFIGS[key]
    flags = [x in features for x in PARTS]
    aligned = (causal or 1) if "window" in features else causal
    segment = config.SHARES if packed else config.SEGMENTS[-1]
    macros = sm90.defines(direction, dim, bool(bf16), bool(packed), aligned, chosen, *flags, segment)
    made = build(sm90.source(direction), sm90.ARCHITECTURE, Options.of(macros))
    # ptxas says so where it waits for every product, or where it ignores the registers that are asked for
    assert "Potential Performance Loss" not in made.log, made.log
    (usage,) = resource_usage(made.cubin).values()
    windows = "window" in features
    assert usage.stack <= (144 + 16 * windows if dim == 128 else 40 + 48 * windows), usage
    threads, shared = sm90.threads(direction, chosen), sm90.shared_bytes(direction, dim, chosen)
    assert usage.registers * threads <= 65536
    assert shared <= SHARED_LIMIT[90]
    # what the warpgroups ask for is there: otherwise they wait for ever
    if direction == "backward":
        keys, queries, loads = chosen.registers
        asked = 2 * keys + queries + loads
    else:
        compute, loads = chosen.registers
        asked = 2 * chosen.teams * compute + loads
    assert asked <= usage.registers * threads // 128


BIASED = {"mask": "bias", "mask_shape": (1, 12, 197, 197)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp16"])
@pytest.mark.parametrize("features", [f for n in range(4) for f in itertools.combinations(PARTS[:3], n)], ids="-".join)
@pytest.mark.parametrize(
    ("key", "late"),
    [*((key, False) for key in sm90.CONFIGS if key != ("backward", 128)), (("forward", 32), True)],
    ids=str,
)
def test_binary_with_a_bias(key, late, features, bf16):
    direction, dim = key
    chosen = sm90.CONFIGS[key]
    flags = [x in features for x in PARTS]
    macros = sm90.defines(direction, dim, bf16, False, 0, chosen, *flags, bias=True, late=late)
    made = build(sm90.source(direction), sm90.ARCHITECTURE, Options.of(macros))
    assert "Potential Performance Loss" not in made.log, made.log
    (usage,) = resource_usage(made.cubin).values()
    # beside a mask of keys the warps that load, which have 24 to 32 registers, spill some
    assert usage.stack <= (104 if late else 40), usage
    assert usage.registers * sm90.threads(direction, chosen) <= 65536
    assert sm90.shared_bytes(direction, dim, chosen, True, "mask" in features) <= SHARED_LIMIT[90]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp16"])
@pytest.mark.parametrize("features", [f for n in range(4) for f in itertools.combinations(PARTS[:3], n)], ids="-".join)
@pytest.mark.parametrize("dim", config.BIAS_GRADIENT)
def test_binary_of_the_gradient_of_a_bias(dim, features, bf16):
    macros = bias_gradient.defines(dim, bf16, *[x in features for x in PARTS[:3]])
    made = build(sm90.source("bias_gradient"), sm90.ARCHITECTURE, Options.of(macros))
    assert "Potential Performance Loss" not in made.log, made.log
    (usage,) = resource_usage(made.cubin).values()
    assert usage.stack <= (144 if "dropout" in features else 0), usage
    compute, loads = config.BIAS_GRADIENT[dim].registers
    assert 2 * compute + loads <= usage.registers * 384 // 128
    assert bias_gradient.shared_bytes(dim, "mask" in features) <= SHARED_LIMIT[90]


@pytest.mark.parametrize(
    ("tiles", "members", "wanted"),
    [(64, 512, (256, 2)), (16, 256, (32, 8)), (256, 1024, (1024, 1)), (1, 1, (1, 1)), (1728, 4, (4, 1)), (4, 3, (1, 3))],
    ids=str,
)
def test_parts_of_the_rows_that_share_a_bias(tiles, members, wanted):
    each, parts = bias_gradient.parts_of(tiles, members, 132)
    assert (each, parts) == wanted
    assert (parts - 1) * each < members <= parts * each


def problem_of(monkeypatch, batch=512, heads=12, q_len=197, kv_len=197, dim=64, **changes):
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ())
    dtype, grad = changes.pop("dtype", torch.bfloat16), changes.pop("grad", True)
    query, key = (torch.empty(batch, heads, t, dim, dtype=dtype, device="meta") for t in (q_len, kv_len))
    problem = describe_attention(query, key, key, None, 0.0, False, None, False, None, False, False, grad)
    return replace(problem, **{"device_type": "cuda", "arch": 90, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": 100}, "needs an sm_90 GPU .*, got sm_100"),
        ({"device_type": "cpu"}, "needs an sm_90 GPU .*, got cpu"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32"),
        ({"dim": 20}, "needs a head dim that is a multiple of 8, from 8 to 128, got 20"),
        ({"dim": 136}, "from 8 to 128, got 136"),
        ({"q_len": 2049}, "needs Tq and Tk of at most 2048, got 2049 and 197"),
        ({"kv_heads": 1, "q_len": 700}, "at most 8,192 queries that share a key head .Tq . H / Hkv., got 8,400"),
        (
            {"mask": "bias", "mask_shape": (1, 1, 1, 197)},
            "needs a bias for each query and key, .*, 197, 197., got .1, 1, 1, 197.",
        ),
        ({**BIASED, "bias_dtype": torch.float32}, "needs a bias in the dtype of query, torch.bfloat16, got torch.float32"),
        ({**BIASED, "dim": 128}, "a head dim of at most 64 for the gradients of a call with a bias, got 128"),
        ({"scale": -1.0}, "needs a positive scale that is normal in float32, got -1.0"),
    ],
    ids=str,
)
def test_what_it_declines(monkeypatch, changes, said):
    (reason,) = LONG.why_not(problem_of(monkeypatch, **changes))
    assert re.search(said, reason), reason


def test_windows_are_taken_by_name_or_before_the_reference(monkeypatch):
    windowed = problem_of(monkeypatch, window=(64, 64), q_len=4096, kv_len=4100)
    assert LONG.why_not(windowed) == []
    assert LONG.by_name_only(windowed) == "its windows are not timed on dense rows"
    assert LONG.by_name_only(problem_of(monkeypatch)) == ""
    # in place of the reference, where torch's function would need too large a mask
    with assumed("triton"), toolchain.assumed():
        few, many = (problem_of(monkeypatch, n, 8, 500, 500, window=(64, 64), lengths=True) for n in (64, 4096))
        assert choose(BACKENDS, few).backend.name == "sdpa"
        assert choose(BACKENDS, many).backend is LONG
    (reason,) = LONG.why_not(problem_of(monkeypatch, window=(64, 64), q_len=2**16 + 1))
    assert "needs Tq and Tk of at most 65536, got 65537 and 197" in reason


def test_biases_are_taken(monkeypatch):
    biased = problem_of(monkeypatch, **BIASED)
    assert LONG.why_not(biased) == LONG.why_not(problem_of(monkeypatch, **BIASED, dim=128, grad=False)) == []
    assert LONG.by_name_only(biased) == ""


CAPTURED = {"host_counts": False, "python_counts": False}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"grad": False}, ""),
        ({"dim": 32, "lengths": True}, ""),
        ({"key_mask": True}, ""),
        ({"dim": 128, "grad": False}, "timed at D = 1 to 64 and 129 to 1024 tokens, got D = 128"),
        ({"q_len": 128, "mask_shape": (128, 197)}, "got D = 64, 128 queries and 197 keys"),
        ({"kv_len": 1025, "mask_shape": (197, 1025)}, "197 queries and 1025 keys"),
        ({"batch": 64, "mask_shape": (32, 12, 197, 197), **CAPTURED}, ""),
        ({"mask_shape": (512, 12, 197, 197)}, "each row and head has its own"),
        ({"mask_shape": (512, 1, 197, 197)}, ""),
        ({"batch": 1, "mask_shape": (1, 12, 197, 197), **CAPTURED}, "each row and head has its own"),
        ({"batch": 100}, "eager call of 46,570,800 pairs is host time"),
        ({"batch": 100, "grad": False}, ""),
        ({"batch": 100, **CAPTURED}, ""),
        ({"batch": 4, "host_counts": False}, ""),
        ({"batch": 2, "host_counts": False}, "up to 197 tokens a bias was timed from 32 problems .B . H. on, got 24"),
        ({"batch": 15, "q_len": 513, "mask_shape": (513, 197), **CAPTURED}, "from 192 problems .B . H. on, got 180"),
    ],
    ids=str,
)
def test_what_auto_takes_of_calls_with_a_bias(monkeypatch, changes, said):
    monkeypatch.setattr(config, "TIMED_BIAS_HEAD_DIM", (1, 64))
    monkeypatch.setattr(config, "TIMED_BIAS_TOKENS", (129, 1024))
    problem = problem_of(monkeypatch, **(BIASED | changes))
    assert LONG.why_not(problem) == []
    assert LONG.prefers(problem) == (said == "")
    assert re.search(said, LONG.rule(problem).said)


@pytest.mark.parametrize(
    ("tokens", "dim", "taken"), [(128, 16, True), (1024, 64, True), (127, 32, False), (1025, 64, False), (300, 8, False)]
)
def test_a_bias_is_taken_where_it_was_timed(monkeypatch, tokens, dim, taken):
    shape = {"q_len": tokens, "kv_len": tokens, "dim": dim, "mask_shape": (1, 12, tokens, tokens)}
    assert LONG.prefers(problem_of(monkeypatch, **(BIASED | shape))) == taken


ROWS_77 = {"q_len": 77, "kv_len": 77}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"grad": False}, ""),
        ({"q_len": 577, "kv_len": 577}, ""),
        ({"q_len": 64, "kv_len": 64}, "measured with 65 to 128, or 129 to 577, queries and keys, got 64 and 64"),
        ({"q_len": 128, "kv_len": 129}, "got 128 and 129"),
        ({"q_len": 1, "kv_len": 300}, "got 1 and 300"),
        ({"kv_len": 600}, "got 197 and 600"),
        ({"batch": 1}, "host time"),
        ({"batch": 130}, "host time"),
        ({"batch": 130, "grad": False}, ""),
        ({"batch": 130, "dim": 32, "grad": False}, ""),
        # C++ makes the call
        ({"batch": 1, "host_counts": False}, ""),
        ({"batch": 1, "host_counts": False, "grad": False}, ""),
        ({"batch": 44, "dim": 128, "host_counts": False}, "host time"),
        # captured
        ({"batch": 3, **CAPTURED}, "36 problems .B . H. do not fill a GPU, .*; 48 do"),
        ({"batch": 4, **CAPTURED}, ""),
        ({"batch": 1, "q_len": 160, "kv_len": 160, **CAPTURED}, ""),
        ({"batch": 4, "kv_len": 512, **CAPTURED}, "96 do"),
        ({"batch": 8, "kv_len": 512, **CAPTURED}, ""),
        ({"batch": 1, "kv_len": 512, "grad": False, **CAPTURED}, ""),
        ({"batch": 21, "dim": 128, **CAPTURED}, "264 do"),
        ({"batch": 44, "dim": 128, **CAPTURED}, ""),
        # beside the kernels of `short`
        ({"batch": 31, **ROWS_77, **CAPTURED}, "fewer than 384 problems .B . H., got 372"),
        ({"batch": 32, **ROWS_77, **CAPTURED}, ""),
        ({"batch": 32, **ROWS_77}, "host time"),
        ({"batch": 32, **ROWS_77, "host_counts": False}, ""),
        ({"batch": 342, **ROWS_77, **CAPTURED}, "faster from 4,096 problems .B . H. on, got 4,104"),
        ({"batch": 342, **ROWS_77, "lengths": True, **CAPTURED}, ""),
        ({"batch": 63, **ROWS_77, "grad": False, **CAPTURED}, "fewer than 768 problems"),
        ({"batch": 128, **ROWS_77, "grad": False, **CAPTURED}, ""),
        ({"batch": 128, "q_len": 128, "kv_len": 128, "grad": False, **CAPTURED}, "beyond 112 tokens: 0.96 to 0.98 of torch"),
        ({"batch": 64, "q_len": 128, "kv_len": 128, "grad": False, **CAPTURED}, ""),
        ({"batch": 128, "q_len": 128, "kv_len": 128, "grad": False, "lengths": True, **CAPTURED}, ""),
        ({"batch": 1024, **ROWS_77, "dim": 32, "grad": False, **CAPTURED}, ""),
        ({"batch": 1024, **ROWS_77, "dim": 32, **CAPTURED}, "from 8,192 problems"),
        ({"batch": 128, **ROWS_77, "dim": 128, **CAPTURED}, ""),
        ({"batch": 256, **ROWS_77, "dim": 128, **CAPTURED}, "from 2,048 problems"),
        ({"q_len": 256, "kv_len": 256}, ""),
        ({"q_len": 256, "kv_len": 256, "grad": False}, ""),
        ({"q_len": 256, "kv_len": 256, "grad": False, "dim": 32}, ""),
        ({"q_len": 256, "kv_len": 256, "grad": False, "lengths": True}, ""),
        ({"dim": 128}, ""),
        ({"dim": 128, "grad": False}, ""),
        ({"q_len": 256, "kv_len": 256, "dim": 128, "grad": False}, "nearest measured call took 0.3009 ms, and 0.2969 ms"),
        ({"q_len": 512, "kv_len": 512, "dim": 128, "grad": False, "lengths": True}, "beyond D = 64"),
        ({"kv_len": 300, "dim": 128, "grad": False}, "beyond D = 64"),
        ({"dim": 128, "kv_len": 300}, "beyond D = 64"),
    ],
    ids=str,
)
def test_what_auto_takes(monkeypatch, changes, said):
    problem = problem_of(monkeypatch, **changes)
    assert LONG.why_not(problem) == []
    assert LONG.prefers(problem) == (said == "")
    assert re.search(said, LONG.rule(problem).said)


GROUPS, MASKED = {"kv_heads": 4}, {"mask": "bool", "mask_shape": (512, 1, 128, 128), "q_len": 128, "kv_len": 128}
DROPPED = {"dropout_p": 0.1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (GROUPS, ""),
        ({**GROUPS, "kv_len": 257}, "timed with grouped heads at D = 33 to 64 and up to 256 tokens, got D = 64 and 257"),
        ({**GROUPS, "dim": 128}, "timed with grouped heads at D = 33 to 64 and up to 256 tokens, got D = 128 and 197"),
        ({**GROUPS, "dim": 32}, "timed with grouped heads at D = 33 to 64"),
        ({**GROUPS, "batch": 8, **CAPTURED}, "32 problems .B . Hkv. do not fill"),
        ({**GROUPS, "batch": 8, "grad": False, **CAPTURED}, ""),
        (MASKED, ""),
        ({**MASKED, "grad": False}, ""),
        ({**MASKED, "kv_len": 160, "q_len": 160}, "timed with masks at D = 33 to 64 and up to 128 tokens"),
        ({**MASKED, "mask_shape": (512, 1, 1, 128)}, "a mask that all queries share"),
        ({**MASKED, "mask_shape": (128,)}, "a mask that all queries share"),
        ({**MASKED, "mask_shape": (160,), "q_len": 160, "kv_len": 160}, "up to 128 tokens"),
        ({**MASKED, "dim": 32}, "timed with masks at D = 33 to 64"),
        ({**MASKED, "batch": 40, "host_counts": False}, "host time"),
        (DROPPED, ""),
        ({**DROPPED, "kv_len": 512}, ""),
        ({**DROPPED, "kv_len": 513}, "timed with dropout at D = 1 to 64 and up to 512 tokens"),
        ({**DROPPED, "dim": 32}, ""),
        ({**DROPPED, "kv_len": 257, "grad": False}, "timed with dropout at D = 1 to 64 and up to 256 tokens"),
        ({**DROPPED, "lengths": True}, ""),
        ({**DROPPED, "batch": 1}, "host time"),
        ({**DROPPED, "q_len": 128, "kv_len": 128, "batch": 1024, **CAPTURED}, ""),
        ({**DROPPED, "q_len": 128, "kv_len": 128, "grad": False, **CAPTURED}, ""),
        ({**DROPPED, **GROUPS}, "grouped heads and dropout were not timed together"),
    ],
    ids=str,
)
def test_what_auto_takes_of_calls_with_features(monkeypatch, changes, said):
    problem = problem_of(monkeypatch, **changes)
    assert LONG.why_not(problem) == []
    assert LONG.prefers(problem) == (said == "")
    assert re.search(said, LONG.rule(problem).said)


def test_explain_tells_what_would_run(monkeypatch):
    assert LONG.form(problem_of(monkeypatch)).count("Sm90Config") == 2
    assert LONG.form(problem_of(monkeypatch, grad=False)).count("Sm90Config") == 1
    assert long_backend.LONGEST <= config.MAX_TOKENS
