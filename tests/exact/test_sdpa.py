"""torch's own attention under our contract, and the calls that it declines."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.utils._python_dispatch
from contracts.exact import DEVICE, AttentionContract
from contracts.opt_outs import opted_out
from torch._subclasses import FakeTensorMode

import saccade
from saccade.engine.dispatch import choose
from saccade.engine.tracked import Tracked
from saccade.exact import lse, sdpa_mask
from saccade.exact import sdpa as backend
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import broadcast, describe_attention, must_broadcast
from saccade.exact.sdpa import SDPA
from saccade.exact.sdpa_mask import bias_for_torch, mask_for_torch
from saccade.exact.testing.check import check_attention, public_call
from saccade.testing.cases import Case

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@opted_out("exact/test_sdpa.py::TestSdpa")
class TestSdpa(AttentionContract):
    backend = "sdpa"


@opted_out("exact/test_sdpa.py::TestSdpaWithLse")
class TestSdpaWithLse(TestSdpa):
    """The same through our wrapper, with the log-sum-exp."""


@pytest.mark.parametrize(
    ("backend", "dtype", "error", "ok"),
    [
        ("sdpa", torch.bfloat16, 9e-5, True), ("sdpa", torch.float16, 9e-5, True), ("auto", torch.float16, 9e-5, False), ("sdpa", torch.bfloat16, 2e-4, False),
        ("sdpa", torch.float32, 9e-5, False), ("reference", torch.bfloat16, 9e-5, False),
    ],
)  # fmt: skip
def test_the_exponential_of_torch_on_a_cpu_is_allowed_for(backend, dtype, error, ok):
    """In 16 bits, of the lse, and no more than it makes."""
    case = Case("coarse", 2, 2, 2, 9, 17, 16)
    plain = public_call(case, "reference", True)

    def shifted(inputs):
        out, lse = plain(inputs)
        return out, lse + error

    found = {r.name: r.ok for r in check_attention(case, dtype, "cpu", backend, run=shifted)}
    assert found.pop("lse") is ok
    assert all(found.values())


@pytest.mark.gpu
def test_declines_the_log_sum_exp():
    x = torch.randn(1, 1, 4, 8, device="cuda")
    with pytest.raises(saccade.UnsupportedProblem, match=r"does not return the log-sum-exp \(return_lse=True\)"):
        saccade.attention(x, x, x, return_lse=True, backend="sdpa")


def _on_a_gpu(batch, heads=2, kv_heads=2, q_len=10, kv_len=10, dim=32, dtype=torch.bfloat16, **options):
    """The description of a call there, of tensors without memory."""
    query, key = (torch.empty(batch, h, t, dim, dtype=dtype, device="meta") for h, t in ((heads, q_len), (kv_heads, kv_len)))
    given = {"attn_mask": None, "dropout_p": 0.0, "lengths": None, **options}
    problem = describe_attention(
        query,
        key,
        key,
        given["attn_mask"],
        given["dropout_p"],
        False,
        None,
        heads != kv_heads,
        given["lengths"],
        False,
        False,
        True,
    )
    return dataclasses.replace(problem, device_type="cuda", device_index=0, arch=90)


_DROPS = {"dropout_p": 0.1}
_ONE_QUERY = {"q_len": 1, "kv_heads": 1}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"batch": 66_000, **_DROPS}, "takes dropout for at most 65,535 batch rows on a GPU, got 66000"),
        ({"batch": 65_536, "heads": 1, "kv_heads": 1, **_DROPS}, "got 65536"),
        ({"batch": 66_000, "dtype": torch.float32, **_DROPS}, "takes dropout for at most 65,535"),
        ({"batch": 66_000, "q_len": 200, "dim": 160, **_DROPS}, "takes dropout for at most 65,535"),
        (
            {"batch": 66_000, **_ONE_QUERY},
            "one query with grouped heads in 16 bits for at most 65,535 batch rows on a GPU, got 66000 rows, 2 heads and 1 key heads",
        ),
        ({"batch": 66_000, "kv_len": 600, **_ONE_QUERY}, "one query with grouped heads"),
    ],
    ids=str,
)
def test_what_torch_cannot_run_on_a_gpu_is_not_given_to_it(call, sentence):
    """Measured on an H100 with torch 2.11: no valid seed and offset in float32, and no plan of cuDNN in 16 bits."""
    problem = _on_a_gpu(**call)
    (reason,) = SDPA.why_not(problem)
    assert sentence in reason
    assert choose(BACKENDS, problem).backend.name in ("long", "short", "ragged")
    with pytest.raises(saccade.UnsupportedProblem, match="65,535"):
        choose(BACKENDS, problem, "sdpa")


@pytest.mark.parametrize(
    "call",
    [
        {"batch": 65_535, **_DROPS},
        {"batch": 40_000, "heads": 8, "kv_heads": 8, **_DROPS},  # rows count, not rows times heads
        {"batch": 66_000},
        {"batch": 66_000, "dtype": torch.float64, **_DROPS},
        {"batch": 66_000, "q_len": 1},
        {"batch": 66_000, "q_len": 2, "kv_heads": 1},
        {"batch": 65_535, **_ONE_QUERY},
        {"batch": 66_000, "dtype": torch.float32, **_ONE_QUERY},
        {"batch": 66_000, "attn_mask": torch.empty(66_000, 1, 1, 10, dtype=torch.bool, device="meta"), **_ONE_QUERY},
    ],
    ids=str,
)
def test_what_torch_can_run_is_not_kept_from_it(call):
    assert SDPA.why_not(_on_a_gpu(**call)) == []


def test_a_cpu_has_no_such_limit():
    problem = dataclasses.replace(_on_a_gpu(66_000, **_DROPS), device_type="cpu", arch=0)
    assert SDPA.why_not(problem) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "dropout_p", "grad"),
    [(2, 2, 10, 0.1, True), (2, 2, 10, 0.1, False), (4, 2, 1, 0.0, True), (4, 2, 1, 0.0, False), (4, 2, 1, 0.1, True)],
)
def test_auto_runs_more_batch_rows_than_torch_counts(heads, kv_heads, q_len, dropout_p, grad, dtype):
    query = torch.randn(66_000, heads, q_len, 16, device="cuda", dtype=dtype, requires_grad=grad)
    key, value = (torch.randn(66_000, kv_heads, 10, 16, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(2))
    out = saccade.attention(query, key, value, dropout_p=dropout_p, enable_gqa=heads != kv_heads)
    if grad:
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (query, key, value)))
    assert out.isfinite().all()
    if not dropout_p:
        few = [x[-2:].detach().double() for x in (query, key, value)]
        expected = saccade.attention(*few, enable_gqa=True, backend="reference")
        torch.testing.assert_close(out[-2:].double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [49, 64, 197])
def test_a_bias_is_trained_alone(tokens):
    """torch's own function fails there: it keeps no log-sum-exp for backward where only its attn_mask needs a gradient."""
    query, key, value = torch.randn(3, 2, 4, tokens, 32, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1, 4, tokens, tokens, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def gradient(x):
        (found,) = torch.autograd.grad(saccade.attention(*x, bias, backend="sdpa").square().sum(), bias)
        return found

    alone, beside = gradient((query, key, value)), gradient((query.clone().requires_grad_(), key, value))
    torch.testing.assert_close(alone, beside, rtol=0.02, atol=0.02)
    assert alone.abs().sum() > 0


@pytest.mark.gpu
def test_gradients_of_another_layout_than_the_output():
    """torch's own backward is wrong there: its cuDNN plans are kept for the strides of the first gradient."""
    query, key, value = (
        torch.randn(2, 5, 72, 64, device="cuda", dtype=torch.bfloat16)
        .requires_grad_()
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
        for _ in range(3)
    )
    mask = torch.rand(1, 1, 72, 72, device="cuda") > 0.2
    dout = torch.randn(2, 72, 5, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    wanted = None
    for gradient in (dout, dout.contiguous(), dout.mT.contiguous().mT):
        out = saccade.attention(query, key, value, mask, backend="sdpa")
        found = torch.autograd.grad(out, (query, key, value), gradient)
        wanted = wanted or found
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


def test_a_gradient_gets_the_strides_of_the_output():
    gradient = torch.randn(2, 3, 8, 16)
    out = torch.empty(2, 8, 3, 16).transpose(1, 2)
    laid_out = backend._like(out.stride())(gradient)
    assert laid_out.stride() == out.stride()
    assert torch.equal(laid_out, gradient)
    assert backend._like(gradient.stride())(gradient) is gradient
    misaligned = torch.randn(2 * 3 * 8 * 16 + 1)[1:].view(2, 3, 8, 16)
    assert backend._like(misaligned.stride())(misaligned).data_ptr() % 16 == 0


def test_a_tensor_is_tracked_for_another():
    bias = torch.randn(1, 1, 4, 4, requires_grad=True)
    tracked = Tracked.apply(X, bias)
    assert tracked.requires_grad
    assert tracked.data_ptr() == X.data_ptr()
    (found,) = torch.autograd.grad((tracked.sum() + bias.sum()).square(), bias)
    torch.testing.assert_close(found, torch.full_like(bias, 2 * bias.sum().item()))


X = torch.zeros(1, 1, 4, 8)


@pytest.mark.parametrize(
    ("query", "options", "sentence"),
    [
        (X, {"dropout_p": 0.5}, "without dropout, got dropout_p = 0.5"),
        (X[0], {}, "tensors of rank 4 .* got rank 3"),
    ],
)
def test_declines_the_log_sum_exp_that_the_cpu_kernel_cannot_give(query, options, sentence):
    with pytest.raises(saccade.UnsupportedProblem, match=sentence):
        saccade.attention(query, query, query, return_lse=True, backend="sdpa", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "row", "bias", "lengths", "grouped", "causal lengths", "empty"])
def test_the_log_sum_exp_on_a_cpu_is_that_of_the_reference(how, dtype):
    kv_heads, kv_len = (1 if how == "grouped" else 2), (0 if how == "empty" else 21)
    q, k, v = (torch.randn(3, h, t, 16, dtype=dtype) for h, t in ((2, 9), (kv_heads, kv_len), (kv_heads, kv_len)))
    options = {"return_lse": True, "enable_gqa": how == "grouped", "is_causal": "causal" in how}
    if how == "mask":
        options["attn_mask"] = torch.rand(3, 1, 9, 21) > 0.5
        options["attn_mask"][0, 0, 3] = False
    if how == "row":
        options["attn_mask"] = torch.arange(21) < torch.tensor([21, 3, 0])[:, None, None, None]
    if how == "bias":
        options["attn_mask"] = torch.randn(2, 9, 21, dtype=dtype)
        options["attn_mask"][1, 3] = -math.inf
    if "lengths" in how:
        options["lengths"] = torch.tensor([21, 3, 0])
        k[1, :, 3:] = math.nan
    assert "-> sdpa" in saccade.explain(q, k, v, **options)
    out, lse = saccade.attention(q, k, v, backend="sdpa", **options)
    inputs = [x.double() for x in (q, k, v)]
    expected = saccade.attention(*inputs, backend="reference", **options)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {"rtol": 20 * torch.finfo(dtype).eps, "atol": 20 * torch.finfo(dtype).eps}
    torch.testing.assert_close(lse, expected[1].to(lse.dtype), **tolerance)
    torch.testing.assert_close(out, expected[0].to(dtype), **tolerance)


LSE = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": (torch.rand(3, 1, 40, 33, generator=torch.Generator().manual_seed(1)) > 0.5).tril()},
    "bias": {},
    "bias of keys": {},
    "lengths": {"lengths": torch.tensor([33, 7, 0])},
    "causal lengths": {"lengths": torch.tensor([33, 7, 0]), "is_causal": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("numbers", [2**18, 3 * 40 * 33, 5 * 33, 1], ids=["whole", "heads", "queries", "query"])
@pytest.mark.parametrize("how", LSE)
def test_gradients_of_the_log_sum_exp_on_a_cpu(how, numbers, kv_heads, dtype, monkeypatch):
    """In blocks of several batch rows, of some heads, of some queries, and of one."""
    monkeypatch.setattr(lse, "_BLOCK", max(1, numbers // torch.get_num_threads()))
    monkeypatch.setattr(lse, "_CAUSAL_QUERIES", 16)
    tensors = [torch.randn(3, t, h, 8, dtype=dtype).transpose(1, 2) for t, h in ((40, 4), (33, kv_heads), (33, kv_heads))]
    if "bias" in how:
        tensors.append(torch.randn(*((4, 40, 33) if how == "bias" else (3, 1, 1, 33)), dtype=dtype))
        tensors[-1][..., -1:, :5] = -math.inf
    options = {"enable_gqa": kv_heads != 4, "return_lse": True, **LSE[how]}
    dout, dlse = torch.randn(3, 4, 40, 8, dtype=dtype), torch.randn(3, 4, 40)

    def gradients(name, wide):
        leaves = [x.to(wide).requires_grad_() for x in (y.detach().clone() for y in tensors)]
        results = saccade.attention(*leaves, backend=name, **options)
        sent = [x.to(y.dtype) for x, y in zip((dout, dlse), results, strict=True)]
        both = torch.autograd.grad(results, leaves, sent, retain_graph=True)
        alone = [torch.autograd.grad(results[i], leaves, sent[i], allow_unused=True, retain_graph=True) for i in (0, 1)]
        return [*both, *alone[0], *(x for x in alone[1] if x is not None)]

    found, expected = gradients("sdpa", dtype), gradients("reference", torch.float64)
    # the reference knows that values do not affect it, while a kernel returns zeros
    value_of_lse = 2 * len(tensors) + 2
    assert not found.pop(value_of_lse).any()
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm()


def test_the_gradient_of_the_log_sum_exp_holds_no_scores(monkeypatch):
    monkeypatch.setattr(lse, "_BLOCK", 2**14)
    query, key, value = (torch.randn(1, 2, 2048, 8, requires_grad=True) for _ in range(3))
    shapes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            shapes.extend(x.numel() for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor))
            return result

    out, log_sum = saccade.attention(query, key, value, return_lse=True, backend="sdpa")
    with torch.no_grad(), Sizes():
        lse._backward(out, log_sum, query, key, value, None, log_sum, False, 0.3, False)
    block = 2**14 * torch.get_num_threads()
    assert block in shapes
    assert max(shapes) <= max(query.numel(), block)


def test_a_query_that_sees_nothing_hands_on_no_nan():
    query, key, value = (torch.randn(2, 1, 3, 8, requires_grad=True) for _ in range(3))
    results = saccade.attention(query, key, value, lengths=torch.tensor([0, 3]), return_lse=True, backend="sdpa")
    sent = [torch.ones_like(x).masked_fill(torch.tensor([True, False]).view(2, *(1,) * (x.dim() - 1)), math.nan) for x in results]
    for gradient in torch.autograd.grad(results, (query, key, value), sent):
        assert not gradient[0].any()
        assert gradient[1].isfinite().all()


def test_a_second_derivative_with_the_log_sum_exp_raises():
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    out, log_sum = saccade.attention(x, x, x, return_lse=True, backend="sdpa")
    (gradient,) = torch.autograd.grad(out.sum() + log_sum.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; backend='reference' has one"):
        gradient.sum().backward()


def test_float32_biases_keep_their_range_beside_16_bits():
    query, key, value = (torch.randn(1, 1, 3, 8, dtype=torch.float16) for _ in range(3))
    bias = torch.zeros(3, 3)
    bias[1] = torch.finfo(torch.float32).min
    out, log_sum = saccade.attention(query, key, value, bias, return_lse=True, backend="sdpa")
    assert log_sum[0, 0, 1] == torch.finfo(torch.float32).min
    torch.testing.assert_close(out[0, 0, 1], value[0, 0].mean(0), rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(DEVICE == "cuda", reason="fused CUDA kernels take a bias in the dtype of the query alone")
@pytest.mark.parametrize("lengths", [None, (9, 6)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_float32_bias_of_16_bits_is_not_rounded(lengths, kv_heads):
    """A row of finfo.min hides no key: 16 bits would make it -inf."""
    query = torch.randn(2, 2, 9, 16).half()
    key, value = (torch.randn(2, kv_heads, 9, 16).half() for _ in range(2))
    bias = (8 * torch.randn(1, 2, 9, 9)).index_fill(2, torch.tensor(3), torch.finfo(torch.float32).min)
    options = {"enable_gqa": True, "lengths": None if lengths is None else torch.tensor(lengths)}
    found = saccade.attention(query, key, value, bias, **options, backend="sdpa")
    wide = saccade.attention(query.double(), key.double(), value.double(), bias.double(), **options, backend="reference")
    torch.testing.assert_close(found.double(), wide, rtol=1e-3, atol=2e-3)


def test_a_bias_in_16_bits_hides_what_it_hid_in_32():
    """As fused CUDA kernels take it; the gradient passes as through any rounding."""
    bias = torch.tensor([[1.0, -math.inf, -1e30, torch.finfo(torch.float32).min]], requires_grad=True)
    found = bias_for_torch(bias, torch.float16, "cuda")
    assert found.tolist() == [[1.0, -math.inf, -65504.0, -65504.0]]
    assert torch.autograd.grad(found.sum(), bias)[0].tolist() == [[1.0] * 4]


def test_it_may_be_put_in_the_place_of_torchs_function(monkeypatch):
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", saccade.attention)
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)  # calls it from within torch
    assert layer(torch.randn(2, 5, 16)).isfinite().all()


# --- inputs that torch accepts

SAMPLES = "nn.functional.scaled_dot_product_attention"


def _compare_with_torch(tensors, keywords):
    """The same numbers, outputs and gradients, from the same seed."""
    results = []
    for function in (saccade.attention, torch.nn.functional.scaled_dot_product_attention):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        torch.manual_seed(0)
        out = function(*leaves, **keywords)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    # torch uses another kernel for another layout, and scores reach 60: its own float32 is up to 1,000 eps from float64 then, and the two
    # are 70 apart with torch 2.14
    tolerance = 256 * torch.finfo(tensors[0].dtype).eps
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        largest = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(largest, 1.0))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_own_samples(dtype):
    pytest.importorskip("expecttest")  # the next import needs it
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = (op for op in op_db if op.name == SAMPLES)
    samples = list(operator.sample_inputs(DEVICE, dtype, requires_grad=True))
    assert len(samples) >= 20
    for sample in samples:
        if DEVICE == "cuda" and sample.kwargs.get("dropout_p"):
            continue  # torch draws by the kernel that it takes, and has another for tensors of rank 3, which ours makes rank 4
        _compare_with_torch((sample.input, *sample.args), sample.kwargs)


def _gradients(function, tensors, dtype, options):
    """Gradients in float64 of values of a dtype, for an output gradient of ordinary size."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    added = {name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()}
    out = function(*leaves, **added)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
    return [x.double() for x in torch.autograd.grad(out, leaves, weights.to(out.dtype))]


@pytest.mark.sampled(3)
@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["auto", "short", "ragged", "long", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_peaked_rows(dtype, backend):
    """Torch's own samples with values in +-9, where a row has one weight near 1: at most 1.5 times the error of torch's function in the same run.

    Torch's error is that of its function on the same tensors, or broadcast to rank 4 as ours are: its fused kernels, which take no others, round more.
    """
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    torchs = torch.nn.functional.scaled_dot_product_attention
    (operator,) = (op for op in op_db if op.name == SAMPLES)
    worst, compared = {}, 0
    for sample in operator.sample_inputs(DEVICE, dtype, requires_grad=True):
        options = {name: x for name, x in sample.kwargs.items() if name != "dropout_p"}
        if sample.kwargs.get("dropout_p") or len(sample.args) != 2:
            continue
        for seed in range(3):
            torch.manual_seed(seed)
            tensors = [(torch.rand(x.shape, device=DEVICE) * 18 - 9).to(dtype) for x in (sample.input, *sample.args)]
            try:
                ours = _gradients(functools.partial(saccade.attention, backend=backend), tensors, dtype, options)
            except saccade.UnsupportedProblem:
                continue
            compared += 1
            exact = _gradients(torchs, tensors, torch.float64, options)

            def fused(*given, **options):
                grouped = options.get("enable_gqa", False)
                return torchs(*(broadcast(*given, grouped) if must_broadcast(*given, grouped) else given), **options)

            theirs = [_gradients(f, tensors, dtype, options) for f in (torchs, fused)]
            for name, want, got, *others in zip("qkv", exact, ours, *theirs, strict=True):
                error, bounds = (got - want).abs().max(), max((x - want).abs().max() for x in others)
                before = worst.get(name, (0.0, 0.0))
                worst[name] = max(before[0], error.item()), max(before[1], bounds.item())
    if not compared:
        pytest.skip(f"{backend} takes none of the samples")
    eps = torch.finfo(dtype).eps
    for name, (error, bound) in worst.items():
        assert error <= 1.5 * bound + eps, f"d{name}: off by {error:.3g}, torch's function by {bound:.3g}"


@pytest.mark.parametrize(
    ("query", "key", "value", "options"),
    [
        ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
        ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), {}),
        ((2, 4, 5, 8), (2, 4, 7, 8), (1, 4, 7, 8), {}),
        ((5, 8), (3, 7, 8), (3, 7, 8), {"is_causal": True}),
        ((3, 1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), {}),
        ((1, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    ],
    ids=str,
)
def test_batch_rank_and_heads_are_broadcast_as_torch_does(query, key, value, options):
    tensors = [torch.randn(shape, device=DEVICE) for shape in (query, key, value)]
    if options.get("enable_gqa"):  # torch itself broadcasts no batch there
        expanded = [x.expand(2, *x.shape[1:]) for x in tensors]
        assert torch.equal(saccade.attention(*tensors, **options), saccade.attention(*expanded, **options))
        return
    _compare_with_torch(tensors, options)
    assert "sdpa" in saccade.explain(*tensors, **options)
    if len(key) == 4 and len(value) == 4 and value[-1] == 8:  # then every backend takes it
        expected = saccade.attention(*tensors, **options)
        torch.testing.assert_close(saccade.attention(*tensors, backend="short", **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [(), (7,), (1, 7), (5, 7), (5, 1), (4, 5, 7), (1, 5, 7), (4, 1, 7)], ids=str)
def test_masks_of_every_rank_with_grouped_heads(rank, q_len, kind, mask):
    lead = (2,) * (rank - 3)
    mask = tuple(q_len if extent == 5 else extent for extent in mask)
    q, k, v = (torch.randn(*lead, h, t, 8, device=DEVICE) for h, t in ((4, q_len), (2, 7), (2, 7)))
    given = torch.rand(mask, device=DEVICE) > 0.4 if kind == torch.bool else torch.randn(mask, device=DEVICE)
    out = saccade.attention(q, k, v, given, enable_gqa=True)
    every = [x.repeat_interleave(2, dim=-3).double() for x in (k, v)]
    scores = 8**-0.5 * q.double() @ every[0].mT
    scores = scores.masked_fill(~given, -math.inf) if kind == torch.bool else scores + given
    expected = (scores.softmax(-1).nan_to_num(0.0) @ every[1]).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value_dim", [0, 3])
def test_head_dim_zero_is_the_mean_of_the_values(value_dim):
    q, k, v = (torch.randn(2, 2, t, d, device=DEVICE) for t, d in ((3, 0), (5, 0), (5, value_dim)))
    for name in ("auto", "sdpa", "reference"):
        out = saccade.attention(q, k, v, backend=name)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(2, 2, 3, value_dim))


# --- what lengths cost


def _operations(function) -> list[str]:
    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.seen.append(operation.overloadpacket.__name__)
            return operation(*args, **(kwargs or {}))

    with Record() as record:
        function()
    return record.seen


@pytest.mark.skipif(DEVICE == "cuda", reason="about torch's CPU kernels")
@pytest.mark.parametrize("shape", [(2, 1, 1, 300), (2, 1, 300, 300), (2, 4, 300, 300), (300, 300)], ids=str)
def test_a_mask_costs_what_it_costs_torch(shape):
    q, k, v = (torch.randn(2, 4, 300, 16) for _ in range(3))
    mask = torch.rand(shape) > 0.4
    theirs = _operations(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert _operations(lambda: saccade.attention(q, k, v, mask)) == theirs


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU to look at the values would wait for the device")
@pytest.mark.parametrize("garbage", [1.0, math.nan, math.inf, 3e38])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5], [7, 5], [9, 9], [9, 0], [0, 0]], ids=str)
def test_lengths_read_the_padding_and_copy_nothing_that_is_harmless(lengths, garbage, large, monkeypatch):
    if large:
        monkeypatch.setattr(backend, "_ROW", 1)
    q, k, v = (torch.randn(2, 3, t, 8, requires_grad=True) for t in (4, 9, 9))
    kept = (torch.arange(9) < torch.tensor(lengths)[:, None])[:, None, :, None]
    dirty = [x.detach().where(kept, garbage).requires_grad_() for x in (k, v)]
    copies = []
    monkeypatch.setattr(backend, "_rows_are_worth_it", lambda problem: False)
    monkeypatch.setattr(torch.Tensor, "where", lambda x, *a, where=torch.Tensor.where: copies.append(1) or where(x, *a))
    results = []
    for each in ((k, v), dirty, (k, dirty[1]), (dirty[0], v)):
        copies.clear()
        out = saccade.attention(q, *each, lengths=torch.tensor(lengths), backend="sdpa")
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, *each))])
        read = each[0] is not k or each[1] is not v
        assert bool(copies) == (read and min(lengths) < max(lengths) and garbage != 1.0)
    for clean, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, clean)
            assert other.isfinite().all()


def test_dropout_follows_the_seed_and_keeps_the_mean():
    query = torch.zeros(8, 4, 64, 16, device=DEVICE)
    value = torch.ones(8, 4, 64, 16, device=DEVICE)
    torch.manual_seed(3)
    first = saccade.attention(query, query, value, dropout_p=0.25, backend="sdpa")
    torch.manual_seed(3)
    assert torch.equal(first, saccade.attention(query, query, value, dropout_p=0.25, backend="sdpa"))
    # 2048 rows of 64 weights, each kept with 3/4: the mean is 1 within 5 standard deviations of 0.0016
    assert abs(first[..., 0].mean().item() - 1.0) < 0.008


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-46])
@pytest.mark.parametrize("how", ["causal", "lengths", "lse"])
def test_a_scale_that_is_not_positive(how, scale):
    """torch's own function hides keys by -inf and multiplies by the scale afterwards, which makes NaN of them."""
    inputs = [torch.randn(2, 3, 6, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
    options = {"is_causal": True, "scale": scale}
    if how == "lengths":
        options["lengths"] = torch.tensor([6, 2], device=DEVICE)
    if how == "lse" and DEVICE == "cpu":
        options["return_lse"] = True

    def results(backend):
        found = saccade.attention(*inputs, backend=backend, **options)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *torch.autograd.grad([x.square().sum() for x in found], inputs)

    torch.testing.assert_close(results("sdpa"), results("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks_go_to_torch(rank):
    q, k, v = (torch.randn(*(2,) * (rank - 2), 5, 8) for _ in range(3))
    assert torch.equal(saccade.attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_values_of_another_width_and_float64_go_to_torch():
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 12)
    torch.testing.assert_close(saccade.attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert saccade.attention(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.skipif(DEVICE == "cuda", reason="about torch's CPU kernels")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("q_len", [1, 6])
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "row", "head mask", "bias"])
def test_rows_of_many_lengths_one_by_one(how, q_len, kv_heads, monkeypatch):
    q, k, v = (torch.randn(3, t, h, 8).transpose(1, 2).requires_grad_() for t, h in ((q_len, 4), (9, kv_heads), (9, kv_heads)))
    lengths = torch.tensor([4, 9, 0])
    shapes = {"mask": (3, 1, q_len, 9), "row": (3, 1, 1, 9), "head mask": (1, 4, q_len, 9), "bias": (4, q_len, 9)}
    mask = torch.rand(shapes[how]) > 0.3 if "mask" in how or how == "row" else torch.randn(shapes[how]) if how == "bias" else None
    options = {"is_causal": how == "causal", "enable_gqa": kv_heads != 4, "lengths": lengths}
    results = {}
    for name, worth in (("one by one", True), ("masked", False), ("reference", None)):
        monkeypatch.setattr(backend, "_rows_are_worth_it", lambda problem, worth=worth: worth)
        out = saccade.attention(q, k, v, mask, backend="reference" if worth is None else "sdpa", **options)
        results[name] = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    for name in ("one by one", "masked"):
        for got, want in zip(results[name], results["reference"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    garbage = [x.detach().clone() for x in (k, v)]
    for x in garbage:
        x[0, :, 4:] = x[2] = math.nan
    monkeypatch.setattr(backend, "_rows_are_worth_it", lambda problem: True)
    torch.testing.assert_close(saccade.attention(q, *garbage, mask, backend="sdpa", **options), results["one by one"][0])
    assert results["one by one"][0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("how", ["", "causal", "mask", "bias"])
def test_the_short_way_on_a_cpu_is_the_long_one(how, monkeypatch):
    q, k, v = (torch.randn(2, 3, 7, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    mask = {"mask": torch.rand(2, 1, 7, 7) > 0.4, "bias": torch.randn(7, 7)}.get(how)
    mask = mask if mask is None else mask.to(DEVICE)
    results = []
    for name in ("auto", "sdpa"):
        out = saccade.attention(q, k, v, mask, is_causal=how == "causal", backend=name)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for auto, named in zip(*results, strict=True):
        torch.testing.assert_close(auto, named)


@pytest.mark.parametrize("shape", [(5, 33), (1, 33), (2, 3, 5, 33), (1, 1, 5, 33)], ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_a_float32_bias_of_float64_queries(trained, shape):
    """Torch's kernels on a CPU read its memory as float64."""
    q, k, v = (torch.randn(2, 3, n, 8, device=DEVICE, dtype=torch.float64) for n in (5, 33, 33))
    bias = torch.randn(shape, device=DEVICE, requires_grad=trained)
    expected = torch.softmax(q @ k.mT / 8**0.5 + bias.double(), -1) @ v
    torch.testing.assert_close(saccade.attention(q, k, v, bias), expected)
    with saccade.replace_sdpa():
        torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(q, k, v, bias), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the short way is a CPU's")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("length", "how"), [(7, ""), (7, "mask"), (7, "causal"), (4, ""), (4, "causal"), (1, "")])
def test_rows_of_one_length_go_to_torch_at_once(length, how, dtype, monkeypatch):
    q, k, v = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 7, 7) > 0.4 if how == "mask" else None
    with torch.no_grad():
        k[:, :, length:] = v[:, :, length:] = math.nan
    lengths = torch.full((2,), length, dtype=dtype)
    results = []
    for name in ("reference", "auto"):
        if name == "auto":
            monkeypatch.delattr("saccade.exact.api.prepare_attention")
        out = saccade.attention(q, k, v, mask, is_causal=how == "causal", lengths=lengths, backend=name)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for reference, auto in zip(*results, strict=True):
        torch.testing.assert_close(auto, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([8, 8], "range from 8 to 8"),
        ([-1, -1], "range from -1"),
        ([7], r"has shape \[1\]"),
        ([7.0, 7.0], "has dtype torch.float32"),
    ],
)
def test_the_short_way_takes_no_wrong_lengths(lengths, sentence):
    x = torch.randn(2, 3, 7, 8, device=DEVICE)
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.attention(x, x, x, lengths=torch.tensor(lengths, device=DEVICE))


@pytest.mark.parametrize("lengths", [[0, 0], [4, 4]])
def test_one_length_under_a_mask_or_of_nothing_is_described(lengths):
    q, k, v = (torch.randn(2, 3, 7, 8, device=DEVICE) for _ in range(3))
    mask = (torch.rand(2, 1, 7, 7) > 0.4).to(DEVICE)
    real = torch.tensor(lengths, device=DEVICE)
    expected = saccade.attention(q, k, v, mask, lengths=real, backend="reference")
    torch.testing.assert_close(saccade.attention(q, k, v, mask, lengths=real), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.unpoisoned
def test_nothing_fake_is_remembered_of_a_mask(monkeypatch):
    """As a GPU adds it; the two numbers that it is made of are remembered."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # which a build for CPUs lacks
    sdpa_mask._seen_and_hidden.cache_clear()
    mask = torch.tensor([[True, False]], device=DEVICE)
    with FakeTensorMode() as mode:
        assert mask_for_torch(mode.from_tensor(mask), torch.float32).shape == mask.shape
    found = mask_for_torch(mask, torch.float32)
    assert found.tolist() == [[0.0, float("-inf")]]


@pytest.mark.parametrize("of_bias_alone", [False, True])
@pytest.mark.parametrize(("rows", "queries"), [(2, 4), (0, 4), (2, 0)])
def test_a_bias_without_a_key_or_a_query_has_a_gradient_of_zero(rows, queries, of_bias_alone):
    """torch's function leaves it without one, which data parallelism takes for a parameter that is not used."""
    q, k, v = (torch.randn(rows, 2, n, 16, requires_grad=not of_bias_alone) for n in (queries, 4, 4))
    bias = torch.randn(2, queries, 4, requires_grad=True)
    out = saccade.attention(q, k, v, attn_mask=bias, lengths=torch.zeros(rows, dtype=torch.int64))
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("more", [(), (3,)], ids=str)
@pytest.mark.parametrize(("rows", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_so_has_one_whose_call_needs_no_closer_look(rows, queries, keys, more):
    q, k, v = (torch.randn(rows, *more, 2, n, 16) for n in (queries, keys, keys))
    bias = torch.randn(queries, keys, requires_grad=True)
    saccade.attention(q, k, v, attn_mask=bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("shape", [(4, 1), (1,), (1, 2, 1, 1)], ids=str)
def test_a_bias_that_broadcasts_over_no_key_adds_nothing(shape):
    bias = torch.ones(shape, requires_grad=True)
    q, k, v = (torch.randn(1, 2, n, 16) for n in (4, 0, 0))
    out = saccade.attention(q, k, v, attn_mask=bias)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(bias.grad, torch.zeros_like(bias))
