"""The reference against loops over single numbers, and its derivatives against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from saccade.engine.dense import attend


def by_loops(query, key, value, scale, mask=None, bias=None, lengths=None, is_causal=False, keep=None, dropout_p=0.0):
    """Attention one number at a time, in Python floats."""
    (batch, heads, q_len, dim), (kv_heads, kv_len) = query.shape, key.shape[1:3]
    full = (batch, heads, q_len, kv_len)
    mask, bias, keep = (None if x is None else x.expand(full) for x in (mask, bias, keep))
    out, lse = (
        torch.zeros(batch, heads, q_len, value.shape[3], dtype=torch.float64),
        torch.zeros(batch, heads, q_len, dtype=torch.float64),
    )
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            for i in range(q_len):
                scores = {}
                for j in range(kv_len):
                    if (
                        (is_causal and j > i)
                        or (mask is not None and not mask[b, h, i, j])
                        or (lengths is not None and j >= lengths[b])
                    ):
                        continue
                    dot = sum(float(query[b, h, i, d]) * float(key[b, g, j, d]) for d in range(dim))
                    scores[j] = scale * dot + (0.0 if bias is None else float(bias[b, h, i, j]))
                total = sum(math.exp(s) for s in scores.values())
                lse[b, h, i] = math.log(total) if total else -math.inf
                for j, s in scores.items():
                    if keep is None or keep[b, h, i, j]:
                        out[b, h, i] += math.exp(s) / total / (1 - dropout_p) * value[b, g, j]
    return out, lse


def tensors(kv_heads=4, q_len=3, kv_len=5, dim=2, value_dim=3):
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return make(2, 4, q_len, dim), make(2, kv_heads, kv_len, dim), make(2, kv_heads, kv_len, value_dim)


MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
FEATURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": MASK},
    "mask-per-batch": {"mask": torch.tensor([[1, 0, 0, 1, 1], [0, 1, 1, 0, 0]], dtype=torch.bool).view(2, 1, 1, 5)},
    "lengths": {"lengths": torch.tensor([0, 4])},
    "bias": {"bias": torch.randn(1, 4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))},
    "bias-keys": {"bias": torch.randn(2, 1, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6))},
    "dropout": {"keep": torch.rand(2, 4, 3, 5, generator=torch.Generator().manual_seed(7)) < 0.6, "dropout_p": 0.4},
    "all": {
        "lengths": torch.tensor([2, 5]),
        "mask": MASK,
        "bias": torch.ones(3, 5, dtype=torch.float64).tril(),
        "keep": torch.rand(2, 4, 3, 5, generator=torch.Generator().manual_seed(8)) < 0.6,
        "dropout_p": 0.4,
    },
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_is_the_formula(features, kv_heads):
    query, key, value = tensors(kv_heads)
    for actual, expected in zip(
        attend(query, key, value, scale=0.7, **features), by_loops(query, key, value, 0.7, **features), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_derivatives_are_differences(features):
    query, key, value = (x[:, :2].requires_grad_() for x in tensors(2))
    features = {
        k: v[:, :2] if isinstance(v, torch.Tensor) and v.dim() == 4 and v.shape[1] == 4 else v for k, v in features.items()
    }
    bias = features.get("bias")
    bias = torch.zeros(1, 2, 3, 5, dtype=torch.float64) if bias is None else bias
    features = {k: v for k, v in features.items() if k != "bias"}

    def run(query, key, value, bias):
        out, lse = attend(query, key, value, scale=0.7, bias=bias, **features)
        return out, lse.masked_fill(lse.isinf(), 0.0)  # the difference of two infinities is NaN

    assert torch.autograd.gradcheck(run, (query, key, value, bias.clone().requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computes_in_float32_at_least(dtype):
    query, key, value = (x.to(dtype) for x in tensors())
    out, lse = attend(query, key, value, scale=0.7)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    expected, _ = attend(query.double(), key.double(), value.double(), scale=0.7)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    query, key, value = tensors()
    out, lse = attend(query * 1e4, key * 1e4, value, scale=1.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_a_bias_of_minus_infinity_hides_a_key_whatever_its_score():
    query, key, value = tensors()
    bias = torch.zeros(5, dtype=torch.float64)
    bias[2] = -math.inf
    expected = attend(query, key, value, scale=0.7, bias=bias)
    for odd in (math.nan, math.inf):
        for found, wanted in zip(
            attend(query, key.index_fill(2, torch.tensor(2), odd), value, scale=0.7, bias=bias), expected, strict=True
        ):
            torch.testing.assert_close(found, wanted)
