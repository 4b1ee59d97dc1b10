"""The Volta kernels: their sources on a CPU (tests/emulator), their binaries, and, with a GPU, the contract of `attention`.

The emulator follows the fragment layouts of the PTX manual and rounds like float32; a Volta GPU aligns the four products of an
instruction in its own way before it adds them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from dataclasses import replace

import emulator
import pytest
import torch
from contracts.exact import AttentionContract
from contracts.opt_outs import opted_out

import saccade
from saccade.engine.dispatch import choose, explain
from saccade.engine.layout import unpack
from saccade.engine.problem import Problem
from saccade.errors import UnsupportedProblem
from saccade.exact.args import AttentionArgs
from saccade.exact.backends import BACKENDS
from saccade.exact.op import OPS
from saccade.exact.problem import describe_attention
from saccade.exact.testing.cases import ATTENTION as SHAPES
from saccade.exact.testing.check import public_call
from saccade.exact.volta import launchers
from saccade.exact.volta.backend import VOLTA
from saccade.exact.volta.config import backward_tile, forward_tile, multiprocessor_shared
from saccade.exact.volta.launchers import Features
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc import Options, Source, compile_cubin, obstacles
from saccade.nvrtc.toolchain import Nvrtc, refusal
from saccade.testing.baseline import baseline_of, differentiate
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs, make
from saccade.testing.judge import judge_all, report
from saccade.testing.roundings import Roundings
from tools.cubin import disassemble, resource_usage

HALF = torch.float16
needs_emulator = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

# cases of one line share their kernels, which the emulator compiles
CASES = [
    Case("one", 1, 1, 1, 1, 1, 64), Case("odd", 1, 2, 2, 37, 75, 64, lse_grad=False), Case("long", 1, 1, 1, 33, 300, 64),
    Case("grouped", 2, 4, 2, 20, 70, 64), Case("many-queries", 1, 1, 1, 300, 40, 64),
    Case("lse-grad", 1, 2, 2, 40, 70, 64, lse_grad=True), Case("narrow", 2, 2, 2, 17, 65, 8), Case("dim-24", 1, 2, 2, 33, 40, 24),
    Case("dim-80", 1, 2, 1, 70, 65, 80), Case("wide", 1, 1, 1, 70, 130, 128), Case("wide-causal", 1, 1, 1, 130, 140, 128, is_causal=True),
    Case("causal", 1, 2, 2, 150, 100, 64, is_causal=True), Case("causal-short", 1, 2, 2, 20, 130, 64, is_causal=True),
    Case("lengths", 3, 2, 2, 20, 70, 32, lengths=True),
    Case("dropout", 2, 2, 2, 40, 75, 32, dropout_p=0.3), Case("dropout-causal-grouped", 2, 4, 2, 70, 70, 32, is_causal=True, dropout_p=0.1, lengths=True),
    Case("mask", 2, 2, 2, 40, 70, 32, mask="bool"), Case("mask-keys", 2, 2, 1, 40, 70, 32, mask="bool", mask_shape=(2, 1, 1, 70)),
    Case("bias", 2, 2, 2, 40, 70, 32, bias=(1, 2, 40, 70)), Case("bias-queries", 1, 2, 2, 40, 70, 32, bias=(1, 2, 40, 1)),
    Case("bias-keys", 2, 2, 2, 40, 70, 32, bias=(2, 1, 1, 70)), Case("bias-one", 2, 4, 2, 40, 70, 32, bias=(1, 1, 1, 1)),
    Case("bias-shared", 2, 2, 1, 70, 140, 32, dropout_p=0.2, lengths=True, bias=(1, 1, 70, 140)),
    Case("bias-rank-2", 2, 2, 2, 40, 70, 32, bias=(40, 70)), Case("wide-bias", 1, 2, 1, 70, 130, 128, bias=(1, 1, 70, 130)),
    Case("wide-mask-dropout", 1, 2, 1, 66, 70, 128, mask="bool", dropout_p=0.25),
]  # fmt: skip


DETERMINISTIC = ("odd", "wide-causal", "dim-80", "dropout-causal-grouped", "mask", "bias")


@pytest.fixture
def emulated(monkeypatch):
    """Kernels of this family run in the emulator, as for an sm_70."""
    monkeypatch.setattr(launchers, "_run", lambda make, tensors, *options: emulator.launch(make, tensors, *options, 70))


def attend(inputs: Inputs, is_causal: bool = False, dropout_p: float = 0.0, scale: float | None = None, backend: str = "volta"):
    """(out, lse) by the kernels, differentiable, on any device."""
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=inputs.query.device) if dropout_p else None
    lengths = None if inputs.lengths is None else inputs.lengths.to(torch.int32)  # as the public function passes it
    scale = inputs.query.shape[3] ** -0.5 if scale is None else scale
    # of packed inputs the three are copies without a history
    rows = (inputs.query, inputs.key, inputs.value) if inputs.qkv is None else unpack(inputs.qkv)
    args = AttentionArgs(*rows, inputs.mask, inputs.bias, lengths, seed, dropout_p, is_causal, scale)
    return OPS.separate.apply(*args, backend, True)


def outputs_of(case: Case, inputs: Inputs, seed: int = 0, backend: str = "volta"):
    return differentiate(lambda x: attend(x, case.is_causal, case.dropout_p, backend=backend), inputs, seed, True)


def check(case: Case, inputs: Inputs, found: dict, seed: int = 0, half_sums: bool = False) -> None:
    """Every result against float64, within the budget of kernels that see a row in pieces."""
    oracle = differentiate(public_call(case, "reference", True), inputs.to(torch.float64), seed, True)
    baseline = baseline_of(case, inputs, seed, True, Roundings(delta_of_out=True, half_sums=half_sums))
    results = judge_all(found, oracle, baseline, HALF)
    assert {r.name for r in results} == {"out", "lse", "dq", "dk", "dv", *(("dbias",) if inputs.bias is not None else ())}
    assert all(r.ok for r in results), report(case, results)


@contextlib.contextmanager
def deterministic(wanted: bool = True):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- on a CPU


@pytest.mark.sampled(6)
@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(emulated, case):
    inputs = make(case, HALF, "cpu")
    check(case, inputs, outputs_of(case, inputs))


@needs_emulator
@pytest.mark.parametrize("name", ["bias-queries", "bias-keys"])
def test_emulated_gradients_of_one_row_or_column(emulated, name):
    """The last row and the last column of each tile count."""
    (case,) = [case for case in CASES if case.name == name]
    inputs = make(case, HALF, "cpu")
    check(case, inputs, outputs_of(case, inputs))


EXTREME = [-math.inf, -65504.0, 1e6, -1e9, 1e9, -3e38, 3e38, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max]


def check_extreme_biases(value: float, device: str, run, **features) -> None:
    """A row of `value`, a column of it, and a row that holds 5 keys of it beside -1e9: results of the reference, gradients too."""
    case = Case("extreme", 1, 2, 2, 40, 70, 32, bias=(1, 2, 40, 70), lse_grad=True)
    case = replace(case, **features)
    inputs = make(case, HALF, device)
    bias = inputs.bias.float()
    bias[:, :, 2], bias[:, :, 4], bias[:, :, 4, :5] = value, -1e9, value
    bias[:, -1, :, 3] = value
    inputs = replace(inputs, bias=bias)
    ours, theirs = run(case, inputs), differentiate(public_call(case, "reference", True), inputs, 0, True)
    assert set(ours) == {"out", "lse", "dq", "dk", "dv", "dbias"}
    for name, x in ours.items():
        # beyond 2.36e38 scores are clamped in base 2
        x, expected = (y.float().clamp(-2.3e38, 2.3e38) if name == "lse" else y.float() for y in (x, theirs[name]))
        assert not x.isnan().any(), name
        # at 1e6 neighbouring float32 scores are an eighth of a power of two apart, and a sum in another order may round to another one
        tolerance = 0.15 if value == 1e6 else 0.02
        torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


# the kernel that looks for rows whose lse is too coarse takes 32 rows at once: of several problems, of few keys
FAR_FEATURES = {
    "straddling": {"batch": 3, "kv_heads": 1, "q_len": 7, "bias": (1, 2, 7, 70)},
    "lengths": {"batch": 3, "lengths": True},
    "dropout": {"dropout_p": 0.2},
    "wide": {"head_dim": 128, "q_len": 70, "bias": (1, 1, 70, 70)},
    "narrow": {"head_dim": 24, "kv_len": 9},
}


def far_features(name: str) -> dict:
    features = dict(FAR_FEATURES[name])
    features.setdefault("bias", (1, 2, features.get("q_len", 40), features.get("kv_len", 70)))
    return features


def far_scores(case: Case, device: str) -> Inputs:
    """Scores of thousands, in half of the rows of millions, without a bias; and keys in pairs, so that the largest weight is a half."""
    inputs = make(case, HALF, device)
    query, key = inputs.query.clone(), 1000 * inputs.key
    query[:, :, ::2] *= 4000
    key[:, :, 1::2] = key[:, :, : key.shape[2] // 2 * 2 : 2]
    return replace(inputs, query=query, key=key)


def check_far_scores(case: Case, device: str, run) -> None:
    inputs = far_scores(case, device)
    ours, theirs = run(case, inputs), differentiate(public_call(case, "reference", True), inputs.to(torch.float64), 0, True)
    assert (theirs["lse"].abs() > 2**22).any()
    for name, x in ours.items():
        expected = theirs[name].to(x.dtype)
        # float32 scores of 6,000 are off by up to 2e-4 of a power of two; dQ and dK are sums of keys and queries of thousands
        scale = expected[expected.isfinite()].abs().amax().item()
        torch.testing.assert_close(x, expected, rtol=0.01, atol=0.002 * scale, msg=lambda text, n=name: f"{n}: {text}")


FAR_CASES = [
    Case("far", 2, 2, 1, 40, 70, 32, lse_grad=True), Case("far-causal", 1, 2, 2, 70, 70, 32, is_causal=True, lse_grad=True),
    Case("far-mask", 2, 2, 2, 40, 70, 32, mask="bool", lse_grad=True),
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("case", FAR_CASES, ids=str)
def test_emulated_far_scores(emulated, case):
    check_far_scores(case, "cpu", outputs_of)


@needs_emulator
def test_emulated_far_scores_of_a_row_s_own_key(emulated):
    """The last row of a block of 32, which begins 7 rows in front of the second problem: query 24, whose own key outweighs all others."""
    case = Case("far-own-key", 1, 2, 2, 39, 39, 32, is_causal=True, lse_grad=True)
    inputs = far_scores(case, "cpu")
    key = inputs.key.clone()
    key[:, :, 24] = 4000 * inputs.query[:, :, 24].sign()
    given = replace(inputs, key=key)
    ours = outputs_of(case, given)
    theirs = differentiate(public_call(case, "reference", True), given.to(torch.float64), 0, True)
    for name in ("dv", "dk"):
        expected = theirs[name][:, :, 24].to(ours[name].dtype)
        torch.testing.assert_close(ours[name][:, :, 24], expected, rtol=0.01, atol=0.01 * expected.abs().amax().item())


@pytest.mark.gpu
@pytest.mark.parametrize("case", FAR_CASES, ids=str)
def test_far_scores(case):
    check_far_scores(case, "cuda", lambda case, inputs: differentiate(public_call(case, "volta", True), inputs, 0, True))


@pytest.mark.sampled(9)
@needs_emulator
@pytest.mark.parametrize("features", FAR_FEATURES)
@pytest.mark.parametrize("value", [-3e38, 1e9])
def test_emulated_extreme_biases_beside(emulated, value, features):
    check_extreme_biases(value, "cpu", outputs_of, **far_features(features))


@needs_emulator
def test_emulated_extreme_biases_deterministic(emulated):
    with deterministic():
        check_extreme_biases(-1e9, "cpu", outputs_of)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["atomic", "deterministic"])
@pytest.mark.parametrize("features", FAR_FEATURES)
@pytest.mark.parametrize("value", [-3e38, 1e9])
def test_extreme_biases_beside(value, features, way):
    run = lambda case, inputs: differentiate(public_call(case, "volta", True), inputs, 0, True)  # noqa: E731
    with deterministic(way == "deterministic"):
        check_extreme_biases(value, "cuda", run, **far_features(features))


@needs_emulator
@pytest.mark.parametrize("value", EXTREME)
def test_emulated_extreme_biases(emulated, value):
    check_extreme_biases(value, "cpu", outputs_of)


@pytest.mark.gpu
@pytest.mark.parametrize("value", EXTREME)
def test_extreme_biases(value):
    check_extreme_biases(value, "cuda", lambda case, inputs: differentiate(public_call(case, "volta", True), inputs, 0, True))


@pytest.mark.sampled(3)
@needs_emulator
@pytest.mark.parametrize("case", [c for c in CASES if c.name in DETERMINISTIC], ids=str)
def test_emulated_deterministic(emulated, case):
    inputs = make(case, HALF, "cpu")
    with deterministic():
        check(case, inputs, outputs_of(case, inputs))


HALF_SUMS = (
    "odd", "long", "grouped", "many-queries", "lse-grad", "dim-24", "wide", "wide-causal", "causal", "lengths",
    "dropout-causal-grouped", "mask", "bias", "wide-mask-dropout",
)  # fmt: skip


@pytest.mark.sampled(6)
@needs_emulator
@pytest.mark.parametrize("case", [c for c in CASES if c.name in HALF_SUMS], ids=str)
def test_emulated_float16_sums(emulated, case):
    inputs = make(case, HALF, "cpu")
    check(case, inputs, outputs_of(case, inputs, backend="volta_fp16"), half_sums=True)


@needs_emulator
def test_emulated_float16_sums_are_less_exact_and_have_headroom(emulated):
    """4,000 equal weights of values of 30, whose plain sum no float16 holds, average to 30. Tiles of random values are summed by
    themselves: the error is 0.2 %, and 0.44 % were measured with all keys in one sum."""
    case = Case("odd", 1, 2, 2, 37, 75, 64)
    inputs = make(case, HALF, "cpu")
    exact, found = (attend(inputs, backend=name)[1].double() for name in ("volta", "volta_fp16"))
    assert 1e-5 < (found - exact).abs().max() < 1e-2
    many = make(Case("long", 1, 1, 1, 33, 4000, 64), HALF, "cpu")
    flat = replace(many, query=torch.zeros_like(many.query), value=torch.full_like(many.value, 30.0))
    for backend, error in (("volta", 0.0), ("volta_fp16", 0.1)):
        assert (attend(flat, backend=backend)[0] - 30).abs().max() <= error
    exact, found = (attend(many, backend=name)[0].double() for name in ("volta", "volta_fp16"))
    assert (found - exact).abs().mean() < 0.003 * exact.abs().mean()


@needs_emulator
@pytest.mark.parametrize("name", ["odd", "wide-causal", "bias"])
def test_emulated_float16_sums_deterministic(emulated, name):
    case = next(c for c in CASES if c.name == name)
    inputs = make(case, HALF, "cpu")
    with deterministic():
        check(case, inputs, outputs_of(case, inputs, backend="volta_fp16"), half_sums=True)


@needs_emulator
def test_emulated_gradients_of_float16_sums_are_less_exact(emulated):
    """Random inputs, relative to the mean: below 0.6 %, and more than with float32 sums, which would mean that nothing adds in float16."""
    case = Case("odd", 1, 2, 2, 37, 75, 64, lse_grad=False)
    inputs = make(case, HALF, "cpu")
    oracle = differentiate(public_call(case, "reference", True), inputs.to(torch.float64), 0, True)
    single, half = (outputs_of(case, inputs, backend=name) for name in ("volta", "volta_fp16"))
    for name in ("dq", "dk", "dv"):
        errors = [((x[name].double() - oracle[name]).abs().mean() / oracle[name].abs().mean()).item() for x in (single, half)]
        assert 1.5 * errors[0] < errors[1] < 0.006, (name, errors)


@needs_emulator
@pytest.mark.parametrize("backend", ["volta", "volta_fp16"])
def test_emulated_backward_has_the_scores_of_forward(emulated, backend):
    """dO of unit vectors makes dV the weights: those of a row add up to 1 only if backward rounds its scores as forward did. Scores of
    hundreds, where float16 sums are off by an eighth and more."""
    inputs = make(Case("odd", 1, 2, 2, 37, 75, 64, lse_grad=False), HALF, "cpu")
    inputs = replace(inputs, query=30 * inputs.query, dout=torch.eye(37, 64, dtype=HALF).expand(1, 2, 37, 64).contiguous())
    found = differentiate(lambda x: attend(x, backend=backend), inputs, 0, True)
    torch.testing.assert_close(found["dv"].double().sum(2)[..., :37], torch.ones(1, 2, 37).double(), rtol=0, atol=2e-3)


def check_far_float16_sums(device: str, run) -> None:
    """Rows whose lse is too coarse: their maximum is that of scores summed in float16, as backward sums them. Rows whose
    two best keys are near each other have a dout of 0, since those roundings may swap the keys."""
    case = Case("far", 2, 2, 1, 40, 70, 32, lse_grad=True)
    inputs = make(case, HALF, device)
    key = 1000 * inputs.key
    key[:, :, 1::2] = key[:, :, ::2]  # keys in pairs: the largest weight is a half
    scores = inputs.query.double() @ key.double().mT * 32**-0.5
    best = scores[..., ::2].topk(2).values
    clear = best[..., 0] - best[..., 1] > 20
    assert 0.5 < clear.double().mean() < 1
    inputs = replace(inputs, key=key, dout=inputs.dout.where(clear[..., None], 0.0), dlse=inputs.dlse.where(clear, 0.0))
    ours, theirs = run(case, inputs), differentiate(public_call(case, "reference", True), inputs.to(torch.float64), 0, True)
    assert (theirs["lse"].abs() > 1024).double().mean() > 0.5
    for name in ("dq", "dk", "dv"):
        scale = theirs[name].abs().max().item()
        torch.testing.assert_close(
            ours[name].double(), theirs[name], rtol=0.01, atol=0.005 * scale, msg=lambda x, n=name: f"{n}: {x}"
        )


@needs_emulator
def test_emulated_float16_sums_of_far_scores(emulated):
    check_far_float16_sums("cpu", lambda case, inputs: outputs_of(case, inputs, backend="volta_fp16"))


@needs_emulator
@pytest.mark.parametrize("value", [-3e38, -1e9, 1e9])
def test_emulated_float16_sums_of_extreme_biases(emulated, value):
    check_extreme_biases(value, "cpu", lambda case, inputs: outputs_of(case, inputs, backend="volta_fp16"))


@pytest.mark.gpu
def test_float16_sums_of_far_scores():
    check_far_float16_sums("cuda", lambda case, inputs: differentiate(public_call(case, "volta_fp16", True), inputs, 0, True))


@needs_emulator
@pytest.mark.parametrize("growth", [0.0, 0.3, 3.0, -3.0])
@pytest.mark.parametrize("backend", ["volta", "volta_fp16"])
def test_emulated_scores_that_grow(emulated, growth, backend):
    """Weights are relative to a score that rises only where it must: by small steps it stays, by large ones it does not."""
    case = Case("growing", 1, 1, 1, 33, 300, 64)
    inputs = make(case, HALF, "cpu")
    ramp = 1 + growth * torch.arange(300)[:, None] / 300
    query = inputs.key[:, :, 150:151].sign() * inputs.query.abs()
    inputs = replace(inputs, query=query, key=((inputs.key + 0.2 * query[:, :, :1].sign()) * ramp).half())
    check(case, inputs, outputs_of(case, inputs, backend=backend), half_sums=backend == "volta_fp16")


@needs_emulator
@pytest.mark.parametrize("backend", ["volta", "volta_fp16"])
def test_emulated_scores_one_rounding_apart(emulated, backend):
    """Between 2^27 and 2^28 neighbouring float32 scores are 16 powers of two apart: a weight relative to the lower is infinite in float16."""
    case = Case("apart", 1, 2, 2, 20, 70, 32, bias=(1, 2, 20, 70))
    inputs = make(case, HALF, "cpu")
    bias = torch.full((1, 2, 20, 70), 1.2e8)
    bias += 8 * torch.arange(20.0)[:, None]  # maxima of even and of odd mantissas
    bias[..., 40:] += 11.5
    out, _ = attend(replace(inputs, bias=bias), backend=backend)
    assert out.isfinite().all()
    assert (out.abs() <= inputs.value.abs().amax(2, keepdim=True) * 1.001).all()


PRODUCT = """
#include "m8n8k4.cuh"
extern "C" __global__ void product(const u32* a, const u32* b, SUM* c) {
    const int lane = threadIdx.x;
    SUM sum[COUNT];
    for (int i = 0; i < COUNT; i++) sum[i] = c[COUNT * lane + i];
    multiply<A_ORDER, B_ORDER>(sum, a[2 * lane], a[2 * lane + 1], b[2 * lane], b[2 * lane + 1]);
    for (int i = 0; i < COUNT; i++) c[COUNT * lane + i] = sum[i];
}
"""


@needs_emulator
@pytest.mark.parametrize("half_sums", [False, True])
@pytest.mark.parametrize(("a_rows", "b_rows"), [(True, False), (True, True), (False, True)])
def test_the_emulated_instruction_is_four_products(tmp_path, a_rows, b_rows, half_sums):
    """Compare with the rows and columns of the PTX manual, written here independently."""
    (tmp_path / "product.cu").write_text(PRODUCT)
    left, right = torch.randint(-4, 5, (4, 8, 4)).half(), torch.randint(-4, 5, (4, 4, 8)).half()
    a, b, c = torch.empty(32, 4, dtype=HALF), torch.empty(32, 4, dtype=HALF), torch.ones(32, 8, dtype=HALF if half_sums else None)
    for lane in range(32):
        pair, low, high = lane % 16 // 4, lane % 4, lane // 16 * 4
        a[lane] = left[pair, low + high, :] if a_rows else left[pair, high : high + 4, low]
        b[lane] = right[pair, low, high : high + 4] if b_rows else right[pair, :, low + high]
    orders = {True: "ROWS_FIRST", False: "COLUMNS_FIRST"}
    sums = {"SUM": "u32", "COUNT": 4} if half_sums else {"SUM": "float", "COUNT": 8}
    options = Options.of({"A_ORDER": orders[a_rows], "B_ORDER": orders[b_rows], **sums})
    source = Source(tmp_path / "product.cu")
    emulator.run(CudaLaunch(source, "product", options, (1, 1), 32, 0, {"a": a, "b": b, "c": c}))
    for lane, i in itertools.product(range(32), range(8)):
        row, column = (lane & 1) + (i & 2) + lane // 16 * 4, (i & 4) + (lane & 2) + (i & 1)
        if half_sums:
            row, column = lane % 4 + lane // 16 * 4, i
        pair = lane % 16 // 4
        assert c[lane, i] == 1 + (left[pair, row].float() * right[pair, :, column].float()).sum()


SMALL = Case("small", 3, 2, 2, 9, 21, 16, lse_grad=True)


@needs_emulator
@pytest.mark.parametrize("how", ["mask", "lengths", "bias"])
def test_emulated_query_that_sees_no_key(emulated, how):
    inputs = make(SMALL, HALF, "cpu")
    if how == "mask":
        inputs = replace(inputs, mask=torch.zeros(1, 1, 1, 21, dtype=torch.bool))
    elif how == "lengths":
        inputs = replace(inputs, lengths=torch.zeros(3, dtype=torch.int32))
    else:
        inputs = replace(inputs, bias=torch.full((1, 2, 9, 21), -torch.inf))
    for name, x in outputs_of(SMALL, inputs).items():
        assert torch.equal(x, torch.full_like(x, -torch.inf if name == "lse" else 0.0)), name


@needs_emulator
@pytest.mark.parametrize("how", ["mask", "lengths"])
def test_emulated_garbage_in_padded_keys_never_leaks(emulated, how):
    valid = torch.tensor([5, 21, 0])
    visible = torch.arange(21) < valid[:, None]
    clean = make(SMALL, HALF, "cpu")
    clean = replace(clean, lengths=valid.to(torch.int32)) if how == "lengths" else replace(clean, mask=visible[:, None, None, :])
    kept = visible[:, None, :, None]
    expected = outputs_of(SMALL, clean)
    for garbage in (torch.nan, torch.inf, 6e4):
        dirty = replace(clean, key=clean.key.where(kept, garbage), value=clean.value.where(kept, garbage))
        for name, x in outputs_of(SMALL, dirty).items():
            assert torch.equal(x, expected[name]), (name, garbage)


@needs_emulator
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_emulated_nan_in_visible_inputs_propagates(emulated, where):
    inputs = make(SMALL, HALF, "cpu")
    tensor = getattr(inputs, where).clone()
    tensor[1, 0, 0, 3] = torch.nan
    out = outputs_of(SMALL, replace(inputs, **{where: tensor}))["out"]
    assert out[1, 0, 0].isnan().any()
    assert out[[0, 2]].isfinite().all()
    assert out[1, 1].isfinite().all()


@needs_emulator
def test_emulated_layouts_give_the_same_bits(emulated):
    case = Case("square", 2, 2, 2, 19, 19, 24, lse_grad=True)
    expected = outputs_of(case, make(case, HALF, "cpu"))
    for layout in ("bhtd", "packed"):
        for name, x in outputs_of(case, make(case, HALF, "cpu", layout=layout)).items():
            assert torch.equal(x, expected[name]), (layout, name)
    inputs = make(case, HALF, "cpu")

    def spread(x, extra):
        wide = torch.full((x.shape[0], 2 * x.shape[1], x.shape[2] + 3, x.shape[3] + extra), torch.nan, dtype=HALF)
        view = wide[:, 1::2, 2 : 2 + x.shape[2], 3 : 3 + x.shape[3]]
        view.copy_(x)
        return view

    spreads = {n: spread(getattr(inputs, n), 3 + i) for i, n in enumerate(("query", "key", "value", "dout"))}
    for name, x in outputs_of(case, replace(inputs, **spreads)).items():
        assert torch.equal(x, expected[name]), name


@needs_emulator
def test_emulated_scale_is_a_factor_on_the_scores(emulated):
    inputs = make(SMALL, HALF, "cpu")
    out, lse = attend(inputs, scale=0.5)
    by_query = attend(replace(inputs, query=inputs.query * 0.5), scale=1.0)
    assert torch.equal(out, by_query[0])
    torch.testing.assert_close(lse, by_query[1], rtol=1e-6, atol=1e-6)
    assert not torch.equal(out, attend(inputs)[0])


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_nothing_to_compute(q_len, kv_len):
    inputs = make(Case("empty", 1, 2, 2, q_len, kv_len, 16), HALF, "cpu")
    found = differentiate(attend, inputs, 0, True)
    assert torch.equal(found["out"], torch.zeros(1, 2, q_len, 16, dtype=HALF))
    assert (found["lse"] == -torch.inf).all()
    assert all(not found[name].any() for name in ("dq", "dk", "dv"))


# --- what it declines, and that `auto` does not take it


def problem(**changes) -> Problem:
    x = torch.zeros(2, 4, 300, 64, dtype=HALF)
    described = describe_attention(x, x, x, None, 0.0, False, None, False, None, True, False, True)
    return replace(described, **{"device_type": "cuda", "device_index": 0, "arch": 70, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device_type": "cpu", "arch": 0}, "needs a CUDA device, got cpu"),
        ({"arch": 61}, "needs tensor cores, of sm_70 and later; this device is sm_61"),
        ({"dtype": torch.bfloat16}, "needs float16, the only dtype of these matrix instructions, got torch.bfloat16"),
        ({"dtype": torch.float32}, "needs float16, the only dtype of these matrix instructions, got torch.float32"),
        ({"head_dim": 60, "value_dim": 60}, "needs a head dim that is a multiple of 8, from 8 to 128, got 60"),
        ({"head_dim": 136, "value_dim": 136}, "needs a head dim that is a multiple of 8, from 8 to 128, got 136"),
        ({"value_dim": 32}, "needs values as wide as keys, got D = 64 and Dv = 32"),
        ({"rank": 3}, "needs tensors of rank 4, [B, H, T, D], got rank 3"),
        ({"last_strides": (1, 2, 1)}, "needs a last stride of 1, got (1, 2, 1) for query, key and value"),
        ({"scale": -1.0}, "needs a positive scale that is normal in float32, got -1.0"),
        ({"batch_shape": (2**30,)}, "needs B * H * max(Tq, Tk) / 32 of at most 2147483647, got 42949672960"),
    ],
    ids=lambda x: None if isinstance(x, str) else next(iter(x)),
)
def test_what_it_declines(monkeypatch, changes, sentence):
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ())
    assert VOLTA.why_not(problem()) == []
    assert VOLTA.why_not(problem(**changes)) == [sentence]


def test_a_compiler_that_does_not_know_volta_is_one_sentence(monkeypatch):
    thirteen = Nvrtc((13, 0), (75, 80, 90, 100))
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda a: tuple(filter(None, [refusal(thirteen, a)])))
    assert VOLTA.why_not(problem()) == [
        'sm_70 needs NVRTC 12 (12.9 is the last that compiles for it, and may be installed beside another), found NVRTC 13.0: pip install "saccade-attention[cu12]"'
    ]
    assert VOLTA.why_not(problem(arch=75)) == []


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("return_lse", [False, True])
def test_auto_never_takes_an_emulation_and_explain_says_why(monkeypatch, arch, return_lse):
    asked = problem(arch=arch, return_lse=return_lse)
    loaded = []
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: loaded.append(architecture) or ())
    with_lse = "long" if arch == 90 else "ragged"
    assert choose(BACKENDS, asked).backend.name == (with_lse if return_lse else "sdpa")
    assert set(loaded) <= {"90a"}  # and no compiler is searched, but for the kernels of long rows
    assert choose(BACKENDS, asked, "volta").backend is VOLTA
    assert f"volta: could, by name only: sm_{arch} has no such matrix instruction: emulated" in explain(BACKENDS, asked)
    assert "volta_fp16: could, by name only: its sums are float16" in explain(BACKENDS, asked)


@pytest.mark.parametrize("arch", [70, 75])
def test_auto_takes_it_where_the_instruction_is_native(monkeypatch, arch):
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ())
    assert choose(BACKENDS, problem(arch=arch)).backend is VOLTA
    assert choose(BACKENDS, problem(arch=arch, dtype=torch.float32, return_lse=False)).backend.name == "sdpa"
    assert choose(BACKENDS, problem(arch=arch, q_len=17, return_lse=False)).backend.name == "sdpa"
    # torch gives no lse, and although the kernel is slow at such lengths, it is faster than the reference
    assert choose(BACKENDS, problem(arch=arch, q_len=17, return_lse=True)).backend is VOLTA
    assert "volta_fp16: could, by name only: its sums are float16" in explain(BACKENDS, problem(arch=arch))


def test_auto_leaves_volta_to_torch_without_its_compiler(monkeypatch):
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ("no NVRTC",))
    assert choose(BACKENDS, problem(return_lse=False)).backend.name == "sdpa"


def test_by_name_on_a_cpu_it_raises():
    x = torch.zeros(1, 1, 4, 8, dtype=HALF)
    with pytest.raises(UnsupportedProblem, match="volta: needs a CUDA device, got cpu"):
        saccade.attention(x, x, x, backend="volta")


# --- binaries


DIMS = range(8, 129, 8)


@pytest.mark.parametrize("arch", [70, 75, 80, 86, 90, 120])
@pytest.mark.parametrize("dim", DIMS)
def test_tiles_fit_every_device(arch, dim):
    tiles = [forward_tile(dim, q_len, masked, arch) for q_len in (1, 1000) for masked in (False, True)]
    for tile in (*tiles, backward_tile(dim, arch)):
        assert tile.blocks >= 1
        assert tile.blocks * tile.shared_bytes <= multiprocessor_shared(arch) <= (64 if arch == 75 else 96) * 1024


def calls(dim: int, arch: int, is_causal: bool, lengths: bool, dropout: bool, mask: torch.dtype | None):
    """The launches of one problem."""
    x = torch.empty(1, 1, 512, dim, dtype=HALF)
    rows, masks = torch.empty(1, 1, 512), None if mask is None else torch.empty(1, 1, 512, 512, dtype=mask)
    counts, seed = torch.empty(1, dtype=torch.int32) if lengths else None, torch.empty(1, dtype=torch.int64) if dropout else None
    operands, features = (x, x, x, masks, counts, seed), Features(is_causal, 0.1 if dropout else 0.0, 0.125)
    for summed in (features, features._replace(half_sums=True)):
        yield launchers.forward_call(*operands, x, rows, summed, arch)
        yield launchers.backward_call(*operands, x, *[rows] * 3, torch.empty(1, 1, 512, dim), x, x, summed, arch)
        yield launchers.backward_call(*operands, x, *[rows] * 3, None, x, x, summed, arch)
        yield launchers.query_gradient_call(*operands, x, *[rows] * 3, x, summed, arch)
        yield launchers.delta_call(x, x, masks, counts, x, x, *[rows] * 5, summed, arch)
        if masks is not None and mask != torch.bool:
            yield launchers.bias_gradient_call(*operands, x, *[rows] * 3, torch.empty(1, 1, 512, 512), summed, arch)


def inspect(call: CudaLaunch, arch: int, blocks: int) -> None:
    cubin = compile_cubin(call.source, arch, call.options)
    usage = resource_usage(cubin)[call.kernel]
    named = (call.kernel, call.options.defines, usage)
    assert usage.stack == 0, named  # local memory: spills
    assert blocks * call.threads * -(-usage.registers // 8) * 8 <= 65536, named
    if call.kernel != "volta_delta" and arch < 80:
        half_sums = ("HALF_SUMS", "1") in call.options.defines
        assert set(re.findall(r"HMMA\S+?(?=\.STEP)", disassemble(cubin))) == {
            f"HMMA.884.{'F16.F16' if half_sums else 'F32.F32'}"
        }, named


FEATURES = {
    "plain": (False, False, False, None),
    "causal": (True, False, False, None),
    "dropout": (False, False, True, None),
    "all": (True, True, True, None),
    "mask": (False, True, True, torch.bool),
    "half-bias": (False, True, True, HALF),
    "bias": (False, True, True, torch.float32),
}


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "features"), [*((70, name) for name in FEATURES), (75, "plain"), (75, "all"), (75, "bias")], ids=str
)
@pytest.mark.parametrize("dim", [64, 128])
def test_binaries_use_the_tensor_cores_and_spill_nothing(arch, dim, features):
    pytest.importorskip("cuda.core")
    pytest.importorskip("triton")
    if obstacles(arch):
        pytest.skip(obstacles(arch)[0])
    for call in calls(dim, arch, *FEATURES[features]):
        masked = FEATURES[features][3] is not None
        tile = forward_tile(dim, 512, masked, arch) if call.kernel == "volta_forward" else backward_tile(dim, arch)
        inspect(call, arch, 4 if call.kernel == "volta_delta" else tile.blocks)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 40, 72, 96, 120])
def test_binaries_of_other_head_dims_spill_nothing(dim):
    pytest.importorskip("cuda.core")
    pytest.importorskip("triton")
    if obstacles(70):
        pytest.skip(obstacles(70)[0])
    for call in calls(dim, 70, True, True, True, None):
        inspect(call, 70, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", [80, 90])
def test_later_architectures_compile_it_for_checking(arch):
    pytest.importorskip("cuda.core")
    if obstacles(arch):
        pytest.skip(obstacles(arch)[0])
    for call in calls(64, arch, False, False, False, None):
        assert compile_cubin(call.source, arch, call.options)


# --- on a GPU


def within_limits(case: Case) -> bool:
    return case.head_dim % 8 == 0 and case.head_dim <= 128 and not case.windows and not case.window


@pytest.mark.gpu
@opted_out("exact/test_volta.py::TestVolta")
class TestVolta(AttentionContract):
    """The contract in float16, whatever its tests use; deterministic, so that layouts can be compared bit by bit."""

    backend = "volta"
    half_sums = False

    def outputs(self, case, inputs, seed=0):
        with deterministic():
            return outputs_of(case, replace(inputs.to(HALF), bias=inputs.bias), seed, self.backend)

    def check(self, case):
        inputs = make(case, HALF, "cuda")
        check(case, inputs, outputs_of(case, inputs, backend=self.backend), half_sums=self.half_sums)

    def call(self, query, key, value, attn_mask=None, **keywords):
        return saccade.attention(query.half(), key.half(), value.half(), attn_mask, backend=self.backend, **keywords)

    @pytest.mark.parametrize("way", ["atomic", "deterministic"])
    @pytest.mark.parametrize("case", [c for c in (*SHAPES, *CASES) if within_limits(c)], ids=str)
    def test_budget(self, case, way):
        with deterministic(way == "deterministic"):
            self.check(case)

    @pytest.mark.parametrize("size", [(1, 4, 4, 4096, 4096, 64), (1, 2, 1, 2048, 4100, 128)], ids=str)
    def test_long(self, size):
        self.check(Case("long", *size, is_causal=size[5] == 64, dropout_p=0.1))

    def test_public_and_compiled(self):
        inputs = make(Case("public", 2, 4, 2, 200, 300, 64), HALF, "cuda")
        run = lambda q, k, v: saccade.attention(q, k, v, enable_gqa=True, backend=self.backend)  # noqa: E731
        out = run(inputs.query, inputs.key, inputs.value)
        assert torch.equal(out, torch.compile(run, fullgraph=True)(inputs.query, inputs.key, inputs.value))
        assert torch.equal(out, attend(inputs, backend=self.backend)[0])


class TestVoltaFp16(TestVolta):
    """The same with float16 sums, forward and backward; fewer cases, since the layouts of a product are all that differs."""

    backend = "volta_fp16"
    half_sums = True

    @pytest.mark.parametrize("way", ["atomic", "deterministic"])
    @pytest.mark.parametrize("case", [c for c in (*SHAPES[::4], *CASES) if within_limits(c)], ids=str)
    def test_budget(self, case, way):
        with deterministic(way == "deterministic"):
            self.check(case)
