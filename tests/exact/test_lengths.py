"""`attention` with lengths by the ragged kernels: real keys alone, whatever the padding holds, at any length."""

from __future__ import annotations

import pytest
import torch
from contracts.exact import DEVICE, DTYPES, HAS_GPU, named

import saccade
from saccade.exact.testing.check import check_attention
from saccade.testing.cases import Case
from saccade.testing.judge import report

SIZES = {
    "square": (3, 2, 2, 150, 150, 16),
    "grouped": (2, 4, 2, 20, 140, 24),
    "decoding": (4, 2, 2, 1, 200, 16),
    "short": (5, 2, 2, 9, 12, 32),
    "wide": (2, 1, 1, 33, 40, 256),
}
FEATURES: dict[str, dict] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.2},
    "lse-grad": {"lse_grad": True},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", SIZES)
def test_budget(size, feature, dtype):
    case = Case(f"{size}-{feature}", *SIZES[size], lengths=True, **FEATURES[feature])
    results = check_attention(case, dtype, DEVICE, "ragged")
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("features", [{}, {"is_causal": True, "lse_grad": True}], ids=["plain", "causal"])
def test_packed(features):
    case = Case("packed", 3, 2, 2, 140, 140, 16, lengths=True, packed=True, **features)
    results = check_attention(case, DTYPES[0], DEVICE, "ragged")
    assert all(r.ok for r in results), report(case, results)


def padded(dtype=DTYPES[0], q_len=140, kv_len=150):
    query, key, value = (torch.randn(3, t, 2, 16, device=DEVICE).to(dtype).transpose(1, 2) for t in (q_len, kv_len, kv_len))
    return query, key, value, torch.tensor([0, 129, 70], dtype=torch.int32, device=DEVICE)


def differentiated(query, key, value, lengths, **options):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = saccade.attention(*leaves, lengths=lengths, backend="ragged", **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def test_padding_may_hold_anything():
    query, key, value, lengths = padded()
    clean = differentiated(query, key, value, lengths)
    beyond = (torch.arange(150, device=DEVICE) >= lengths[:, None])[:, None, :, None]
    dirty = differentiated(query, key.masked_fill(beyond, float("nan")), value.masked_fill(beyond, float("inf")), lengths)
    for x, y in zip(dirty, clean, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert not clean[0][0].any()  # a row without keys
    for gradient in clean[2:]:
        assert not gradient.masked_select(beyond.expand_as(gradient)).any()


def test_layouts_give_the_same():
    query, key, value, lengths = padded()
    expected = differentiated(query, key, value, lengths)
    for x, y in zip(differentiated(*(x.contiguous() for x in (query, key, value)), lengths), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(("options", "said"), [({}, "needs lengths"), ({"attn_mask": True}, "takes no attn_mask beside lengths")])
def test_what_it_declines(options, said):
    query, key, value, lengths = padded()
    given = {"lengths": lengths} if options else {}
    mask = {"attn_mask": torch.ones(140, 150, dtype=torch.bool, device=DEVICE)} if options else {}
    with pytest.raises(saccade.UnsupportedProblem, match=said):
        saccade.attention(query, key, value, backend="ragged", **given, **mask)


@pytest.mark.skipif(not HAS_GPU, reason="auto takes these kernels on a GPU")
def test_auto_takes_them_beyond_the_short_kernels():
    query, key, value, lengths = padded(torch.bfloat16)
    assert "-> ragged" in saccade.explain(query, key, value, lengths=lengths)
    assert "-> short" in saccade.explain(
        *(x[:, :, :128].repeat(4096, 1, 1, 1) for x in (query, key, value)), lengths=lengths.repeat(4096)
    )
