"""Packed self-attention by tiles of tokens, which a CUDA graph captures: under the interpreter they are asked for by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.exact.ragged import launches, token_launches

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a capture asks for them on a GPU: tests/exact/test_tokens_on_gpu.py"
)
LENGTHS = [(5, 9, 30, 70, 1, 0, 3), (130,), (64, 64), (3,) * 25, (1,), (16, 100, 2, 2)]


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """Every call that they could take."""
    seen = []

    def capture_id(device):
        seen.append(device)
        return 1

    monkeypatch.setattr(token_launches, "capture_id", capture_id)
    token_launches._KNOWN.clear()
    yield seen
    token_launches._KNOWN.clear()


def batch(lengths, heads=(2, 2), dim=16, dtype=torch.float32, tail=5):
    tokens = sum(lengths) + tail
    tensors = [torch.randn(tokens, n, dim, dtype=dtype, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    return tensors, F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), max(lengths)


def results(backend, tensors, ends, longest, **options):
    torch.manual_seed(0)
    out, lse = saccade.attention_varlen(
        *tensors, ends, ends, longest, longest, return_lse=True, backend=backend, enable_gqa=True, **options
    )
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    gradients = torch.autograd.grad((out, lse), tensors, (dout, torch.zeros_like(lse)))
    return out, lse, *gradients


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"is_causal": True, "dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: "-".join(map(str, x[:5])))
def test_as_the_reference(lengths, options, chosen):
    for heads, dim in (((2, 2), 16), ((4, 2), 24)):
        given = batch(lengths, heads, dim)
        expected = results("reference", *given, **options)
        chosen.clear()
        found = results("ragged", *given, **options)
        assert chosen
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_half_precision():
    given = batch((20, 40, 8), dim=32, dtype=torch.float16)
    for got, want in zip(results("ragged", *given), results("reference", *given), strict=True):
        torch.testing.assert_close(got, want, atol=4e-3, rtol=4e-3)


def test_nan_of_one_sequence_reaches_no_other_and_none_leaks_from_the_tail():
    (q, k, v), ends, longest = batch((5, 9, 30, 7))
    dirty = [x.detach().clone() for x in (q, k, v)]
    dirty[2][6], dirty[0][8] = float("nan"), float("inf")  # of the second sequence
    for x in dirty:
        x[51:] = float("nan")
    found = results("ragged", [x.requires_grad_() for x in dirty], ends, longest)
    expected = results("ragged", [q, k, v], ends, longest)
    clean = torch.cat([torch.arange(5), torch.arange(14, 51)])
    for got, want in zip(found, expected, strict=True):
        tokens = 1 if got.dim() == 2 else 0
        torch.testing.assert_close(got.index_select(tokens, clean), want.index_select(tokens, clean))
    assert all((x[51:] == 0).all() for x in (found[0], *found[2:]))
    assert (found[1][:, 51:] == float("-inf")).all()


@pytest.mark.parametrize("window", [None, (7, 20)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_tail_of_whole_tiles_may_hold_anything(causal, window):
    """A batch that fills a small part of what a graph was captured for."""
    (q, k, v), ends, longest = batch((5, 20), tail=300)
    dirty = [x.detach().clone() for x in (q, k, v)]
    for x in dirty:
        x[25:] = float("nan")
    options = {"is_causal": causal, "window": window}
    found = results("ragged", [x.requires_grad_() for x in dirty], ends, longest, **options)
    expected = results("reference", [q, k, v], ends, longest, **options)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert not any(x[25:].any() for x in found[2:])


def test_packed_gradient():
    (q, k, v), ends, longest = batch((5, 9, 30))
    qkv = torch.stack((q, k, v), 1).detach().requires_grad_()
    out = saccade.attention_varlen_qkvpacked(qkv, ends, longest, backend="ragged")
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
    apart = saccade.attention_varlen(q, k, v, ends, ends, longest, longest, backend="reference")
    for got, want in zip(gradient.unbind(1), torch.autograd.grad(apart.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_wrong_offsets_read_nothing_outside():
    wrong = torch.tensor([0, 50, 10, 10**6], dtype=torch.int32)
    bounds = token_launches.bounds_of(wrong, 49)
    assert ((bounds[:2] >= 0) & (bounds[:2] <= 49)).all()


def test_bounds_are_found_once_for_a_batch(monkeypatch):
    _, ends, _ = batch((5, 9, 30, 0, 2))
    first = token_launches.bounds_of(ends, 50)
    assert token_launches.bounds_of(ends, 50) is first
    assert first[0, :46].tolist() == [0] * 5 + [5] * 9 + [14] * 30 + [44] * 2
    assert first[1, :46].tolist() == [5] * 5 + [14] * 9 + [44] * 30 + [46] * 2
    assert first[2, :46].tolist() == [0] * 5 + [1] * 9 + [2] * 30 + [4] * 2
    assert (first[:2, 46:] == 46).all()
    ends[1] = 4
    assert token_launches.bounds_of(ends, 50)[1, 0] == 4
    del ends
    assert not token_launches._KNOWN


def test_bounds_of_inference_mode_follow_changes_in_a_capture():
    """Such tensors count no changes, so every layer finds its bounds."""
    with torch.inference_mode():
        ends = torch.tensor([0, 4, 9], dtype=torch.int32)
        token_launches.bounds_of(ends, 20)
        ends[1] = 6
        assert token_launches.bounds_of(ends, 20)[1, 0] == 6


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("lengths", [(130, 5), (16, 200, 2)], ids=str)
def test_backward_of_longer_sequences_by_lists(lengths, options, monkeypatch):
    """Forward is token tiles, and backward draws the same weights again."""
    monkeypatch.setattr(token_launches, "MOST_LONG_BACKWARD", 100)
    monkeypatch.setattr(token_launches, "_has_chunks", lambda call: True)
    given = batch(lengths)
    expected = results("reference", *given, **options)
    monkeypatch.setattr(token_launches, "backward", lambda *given: pytest.fail("token tiles"))
    monkeypatch.setattr(launches, "forward_tile", lambda *given: pytest.fail("lists"))
    for got, want in zip(results("ragged", *given, **options), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_backward_of_longer_sequences_by_tiles_where_lists_were_not_timed(monkeypatch):
    monkeypatch.setattr(token_launches, "MOST_LONG_BACKWARD", 100)
    monkeypatch.setattr(launches, "forward_tile", lambda *given: pytest.fail("lists"))
    ran, backward = [], token_launches.backward
    monkeypatch.setattr(token_launches, "backward", lambda *given: ran.append(1) or backward(*given))
    results("ragged", *batch((130, 5)))
    assert ran


@pytest.mark.parametrize(
    "change", [{"attn_bias": torch.zeros(2, 30, 30)}, {"cross": True}, {"dim": 80}, {"large": True}], ids=lambda x: next(iter(x))
)
def test_what_they_leave_to_buckets(change, monkeypatch):
    (q, k, v), ends, longest = batch((5, 9, 30), dim=change.get("dim", 16))
    if "large" in change:
        monkeypatch.setattr(token_launches, "MOST_NUMBERS", 100)
    monkeypatch.setattr(token_launches, "forward", lambda *given: pytest.fail("token tiles"))
    other = ends.clone() if "cross" in change else ends
    bias = {"attn_bias": change["attn_bias"]} if "attn_bias" in change else {}
    saccade.attention_varlen(q, k, v, ends, other, longest, longest, backend="ragged", **bias)
