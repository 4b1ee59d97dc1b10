"""Biases at the limits of float32 have the same meaning in every backend as in torch: only -inf hides a key.

Next to a large finite bias the products of queries and keys are lost in rounding, so keys with the same bias tie, and a row of
only such keys gives the mean of its values. The expected result is the reference in float32, which divides each row by its own
sum.
"""

from __future__ import annotations

import math

import pytest
import torch
from contracts.dynamic_mask import IN_CPP

import saccade

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, SINGLE = torch.finfo(torch.float16).min, torch.finfo(torch.float32).min
VALUES = [-math.inf, HALF, SINGLE, -1e9, 1e9, -3e38, 3e38, torch.finfo(torch.float32).max, 1e6, -1e6]
# beyond finfo.max / log2(e) a backend that works in base 2 clamps its scores, and so its lse, to that number
LARGEST_LSE = 2.3e38
B, H, TQ, TK, D = 2, 2, 7, 24, 16


def planted(value: float, where: str) -> torch.Tensor:
    """A bias of small numbers with `value` in a row, a column, in all of a row but one key, or beside larger and smaller ones."""
    bias = torch.randn(B, H, TQ, TK)
    if where == "row":
        bias[:, :, 2] = value
    elif where == "column":
        bias[..., 3] = value
    elif where == "most of a row":
        bias[:, :, 2, 1:] = value
    else:
        bias[:, :, 2] = value
        bias[:, :, 2, 4:9] = -math.inf if value < 0 else SINGLE
        bias[:, :, 4] = -1e9
        bias[:, :, 4, :5] = value
    return bias.to(DEVICE)


def gradients(call, tensors, dout):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = call(*leaves)
    grads = torch.autograd.grad((out, lse), leaves, (dout, torch.full_like(lse, 0.25)), allow_unused=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), grads, strict=True))}


def assert_same(ours, theirs, tolerance=2e-5):
    for name, x in ours.items():
        expected = theirs[name].to(x.dtype)
        if name == "lse":
            x, expected = (y.clamp(-LARGEST_LSE, LARGEST_LSE).where(y.isfinite(), y) for y in (x, expected))
        assert not x.isnan().any(), name
        torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def dense_inputs(q_len=TQ, dtype=torch.float32):
    return [torch.randn(B, H, t, D, device=DEVICE).to(dtype) for t in (q_len, TK, TK, q_len)]


def tolerance_of(value, dtype=torch.float32):
    # at 1e6 neighbouring float32 scores are a sixteenth apart, and two orders of summation may round to different ones
    return 0.15 if abs(value) == 1e6 else 0.01 if dtype == torch.float16 else 0.02 if value == HALF else 2e-5


@pytest.mark.parametrize("where", ["row", "column", "most of a row", "mixed"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("backend", ["short", "sdpa"])
def test_attention(backend, value, where):
    if backend == "sdpa" and DEVICE == "cuda" and 3e38 <= abs(value) < math.inf:
        pytest.skip("torch's fused CUDA kernels give NaN there")
    query, key, value_, dout = dense_inputs()
    bias = planted(value, where)

    def call(q, k, v, b, name=backend):
        result = saccade.attention(q, k, v, b, return_lse=name != "sdpa" or DEVICE == "cpu", backend=name)
        return result if isinstance(result, tuple) else (result, result.new_zeros(B, H, TQ).requires_grad_())

    ours = gradients(call, (query, key, value_, bias), dout)
    theirs = gradients(lambda *x: call(*x, name="reference"), (query, key, value_, bias), dout)
    if backend == "sdpa":
        # torch's own backward rounds differently there; only its output defines the meaning
        ours, theirs = ({"out": x["out"]} for x in (ours, theirs))
    assert_same(ours, theirs, tolerance_of(value))


@pytest.mark.parametrize("value", VALUES)
def test_attention_of_one_query(value):
    query, key, value_, dout = dense_inputs(1)
    bias = planted(value, "most of a row")[:, :, 2:3]
    bias[1] = value

    def call(q, k, v, b, name="short"):
        return saccade.attention(q, k, v, b, return_lse=True, backend=name)

    assert_same(
        gradients(call, (query, key, value_, bias), dout),
        gradients(lambda *x: call(*x, name="reference"), (query, key, value_, bias), dout),
        tolerance_of(value),
    )


@pytest.mark.parametrize("shape", [(1, 1, 1, TK), (1, H, TQ, TK), (B, 1, TQ, TK)], ids=str)
@pytest.mark.parametrize("value", [HALF, SINGLE, 3e38])
def test_a_float_mask_of_padding_in_half_precision(value, shape):
    """Masks as models make them: finfo.min at padded keys, and in whole rows of padded queries."""
    query, key, value_, dout = dense_inputs(dtype=torch.float16)
    bias = planted(value, "row")[: shape[0], : shape[1]]
    bias = bias[:, :, 2:3].contiguous() if shape[2] == 1 else bias
    if abs(value) == abs(HALF):
        bias = bias.half()

    def call(q, k, v, b, name="short"):
        return saccade.attention(q, k, v, b, return_lse=True, backend=name)

    ours = gradients(call, (query, key, value_, bias), dout)
    theirs = gradients(lambda *x: call(*x, name="reference"), (query, key, value_, bias), dout)
    assert_same(ours, theirs, 0.02)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_weights_of_the_reference_add_up_to_one(pattern, dtype, value):
    query, key, _, _ = (x.to(dtype) for x in dense_inputs())
    bias = planted(value, "row").to(dtype)
    ones = torch.ones(B, H, TK, 3, dtype=dtype, device=DEVICE, requires_grad=True)
    if pattern is None:
        out, _ = saccade.attention(query, key, ones, bias, return_lse=True, backend="reference")
    else:
        out, _ = saccade.nm_sparse_attention(query, key, ones, bias, pattern=pattern, return_lse=True, backend="reference")
    expected = torch.ones_like(out)
    if value == -math.inf:
        expected[:, :, 2] = 0
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_weights_of_the_dynamic_mask_add_up_to_one():
    query, key, _, _ = dense_inputs(TK)
    ones = torch.ones(B, H, TK, 3, device=DEVICE)
    for value in VALUES[1:]:
        scores = torch.full((B, H, TK), value, device=DEVICE)
        for backend in ("reference", "gather_torch", "auto"):
            out = saccade.dynamic_mask_attention(query, key, ones, scores, keep=5, backend=backend)
            torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["row", "column", "most of a row", "mixed"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("pattern", ["2:4", "2:3"])
def test_nm_sparse_attention(pattern, value, where):
    query, key, value_, dout = dense_inputs()
    bias = planted(value, where)

    def call(q, k, v, b, name="masked"):
        return saccade.nm_sparse_attention(q, k, v, b, pattern=pattern, return_lse=True, backend=name)

    assert_same(
        gradients(call, (query, key, value_, bias), dout),
        gradients(lambda *x: call(*x, name="reference"), (query, key, value_, bias), dout),
        tolerance_of(value),
    )


def key_scores(value, where):
    scores = torch.randn(B, H, TK)
    if where == "all":
        scores[:] = value
    elif where == "first":  # the first queries see no other keys
        scores[..., :12] = value
    elif where == "some":
        scores[..., ::3] = value
    else:
        scores[..., ::2], scores[..., 1::2] = value, -value / 3
    return scores.to(DEVICE)


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("where", ["all", "first", "some", "both"])
@pytest.mark.parametrize("value", VALUES[1:])
@pytest.mark.parametrize("backend", ["gather", IN_CPP, "gather_torch"])
def test_dynamic_mask_attention(backend, value, where, deterministic):
    if deterministic and backend != "gather":
        pytest.skip("has one form")
    query, key, value_, dout = dense_inputs(TK)
    scores = key_scores(value, where)

    def call(q, k, v, s, name=backend):
        return saccade.dynamic_mask_attention(q, k, v, s, keep=5, return_lse=True, backend=name)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        ours = gradients(call, (query, key, value_, scores), dout)
    finally:
        torch.use_deterministic_algorithms(before)
    theirs = gradients(lambda *x: call(*x, name="reference"), (query, key, value_, scores), dout)
    assert_same(ours, theirs, tolerance_of(value))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("value", VALUES[1:])
@pytest.mark.parametrize("backend", ["decode", "gather", IN_CPP, "gather_torch", "reference"])
def test_decoding(backend, value):
    query, key, value_, _ = dense_inputs(TK)
    for where in ("all", "some", "both"):
        scores = key_scores(value, where)
        expected = saccade.dynamic_mask_attention(query, key, value_, scores, keep=5, backend="reference")
        cache = saccade.DynamicMaskCache(keep=5)
        with torch.no_grad():
            steps = [
                cache.attend(*(x[:, :, i : i + 1] for x in (query, key, value_, scores)), backend=backend) for i in range(TK)
            ]
        tolerance = tolerance_of(value)
        torch.testing.assert_close(torch.cat(steps, 2), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["auto", IN_CPP, "gather_torch", "reference"])
@pytest.mark.parametrize("score", [1e300, -1e300, 3.5e38])
def test_scores_that_no_float32_holds_are_refused(score, backend):
    query, key, value_, _ = dense_inputs(TK)
    scores = torch.zeros(B, H, TK, dtype=torch.float64, device=DEVICE)
    scores[1, 0, 3] = score
    words = r"key_scores holds .* at \[1, 0, 3\]; scores must be finite in float32, in which they are ranked"
    with pytest.raises(saccade.InvalidArgument, match=words):
        saccade.dynamic_mask_attention(query, key, value_, scores, keep=5, backend=backend)
    with pytest.raises(saccade.InvalidArgument, match=words):
        saccade.expiry(scores, 5)
    scores[1, 0, 3] = 3.4e38
    saccade.dynamic_mask_attention(query, key, value_, scores, keep=5, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["all", "first", "some", "both"])
@pytest.mark.parametrize("value", VALUES[1:])
@pytest.mark.parametrize("dim", [64, 128])
def test_dynamic_mask_attention_at_the_head_dims_of_cuda(dim, value, where):
    """On sm_90 this runs in CUDA C++, which walks the list of a block twice where lse has lost the logarithm of the sum; elsewhere in Triton."""
    torch.manual_seed(0)
    inputs = [torch.randn(B, H, 300, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    scores = key_scores(value, where).repeat(1, 1, 13)[..., :300].contiguous()
    check_dynamic_mask(*inputs, scores, max(0.02, tolerance_of(value)))


def check_dynamic_mask(query, key, value, dout, scores, tolerance, **options):
    """out, lse and all gradients against the reference in float32."""
    options = {"keep": 70, "return_lse": True, **options}
    call = lambda *x: saccade.dynamic_mask_attention(*x, backend="gather", **options)  # noqa: E731
    exact = lambda *x: saccade.dynamic_mask_attention(*x, backend="reference", **options)  # noqa: E731
    ours = gradients(call, (query, key, value, scores), dout)
    theirs = gradients(exact, [x.float() for x in (query, key, value, scores)], dout.float())
    for name, x in ours.items():
        assert not x.isnan().any(), name
        x, expected = (y[name].float() for y in (ours, theirs))
        if name == "lse":
            x, expected = (y.clamp(-LARGEST_LSE, LARGEST_LSE) for y in (x, expected))
            torch.testing.assert_close(x, expected, rtol=1e-3, atol=0.02)
            continue
        # gradients of a key are sums over queries, each rounded to 16 bits
        bound = tolerance * max(1.0, expected.abs().amax().item())
        torch.testing.assert_close(x, expected, rtol=0.05, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "length", "keep"), [(6, 2, 333, 5), (1, 1, 1000, 300), (64, 1, 50, 20)])
@pytest.mark.parametrize("dim", [64, 128])
def test_far_rows_of_dynamic_masks_beside_others(dim, heads, kv_heads, length, keep, dtype):
    """The first third of the keys has scores of finfo.min, as left padding has: blocks of far rows alone, mixed blocks, and others."""
    torch.manual_seed(0)
    shapes = [(B, n, length, dim) for n in (heads, kv_heads, kv_heads, heads)]
    inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    scores = torch.randn(B, kv_heads, length, device=DEVICE)
    scores[..., : length // 3] = SINGLE
    check_dynamic_mask(*inputs, scores, 0.02, keep=keep, enable_gqa=True)
