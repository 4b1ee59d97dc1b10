"""Numbers and flags: plain ones are accepted, anything else is refused with a message, and nothing is frozen at its first
value."""

from __future__ import annotations

import fractions

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import saccade

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors():
    query, key, value = (torch.randn(1, 2, 8, 16, device=DEVICE) for _ in range(3))
    return query, key, value, torch.randn(1, 2, 8, device=DEVICE)


def attention(q, k, v, scores, **options):
    return saccade.attention(q, k, v, **options)


def packed(q, k, v, scores, **options):
    return saccade.attention_qkvpacked(torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2), **options)


def dynamic_mask(q, k, v, scores, **options):
    return saccade.dynamic_mask_attention(q, k, v, scores, **{"keep": 3, **options})


def nm_sparse(q, k, v, scores, **options):
    return saccade.nm_sparse_attention(q, k, v, **options)


def staged(q, k, v, scores, **options):
    return saccade.nm_sparse.scores(q, k, **{"pattern": "1:2", **options}).to_dense()


def decoding(q, k, v, scores, **options):
    return saccade.DynamicMaskCache(keep=3).attend(q, k, v, scores, **options)


ALL = [attention, packed, dynamic_mask, nm_sparse, staged, decoding]
every = pytest.mark.parametrize("call", ALL, ids=lambda f: f.__name__)


@every
@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda x: x], ids=["learned", "tensor"])
def test_a_scale_that_is_a_tensor_is_never_frozen(call, make):
    temperature = make(torch.tensor(0.5))
    # the second is another value of the same tensor
    for value in (0.5, 2.0):
        with torch.no_grad():
            temperature.fill_(value)
        with pytest.raises(saccade.InvalidArgument, match=r"scale is a torch\.Tensor of shape \[\]; .* multiply query by it"):
            call(*tensors(), scale=temperature)


def test_what_the_sentence_advises_learns_the_temperature():
    q, k, v, _ = tensors()
    temperature = torch.tensor(0.5, device=DEVICE, requires_grad=True)
    for value in (0.5, 2.0):
        with torch.no_grad():
            temperature.fill_(value)
        out = saccade.attention(q * temperature, k, v, scale=1.0)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=value))
        (gradient,) = torch.autograd.grad(out.square().sum(), temperature)
        assert gradient != 0


@every
@pytest.mark.parametrize("scale", [2, np.float32(2), np.float64(2), np.int64(2), fractions.Fraction(2), np.float16(2)], ids=repr)
def test_plain_numbers_of_other_kinds_are_numbers(call, scale):
    x = tensors()
    assert torch.equal(call(*x, scale=scale), call(*x, scale=2.0))


@every
@pytest.mark.parametrize(
    "scale", ["a", [0.5], 1j, object, np.zeros(()), float("inf"), b"1", pytest.param(10**400, id="beyond floats")], ids=repr
)
def test_what_is_no_scale(call, scale):
    for _ in range(2):
        with pytest.raises(saccade.InvalidArgument, match=r"^scale is .*; it must be a finite number, or None for 1/sqrt\(D\)$"):
            call(*tensors(), scale=scale)


@pytest.mark.parametrize("call", [attention, packed, nm_sparse], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dropout_p", [None, "a", torch.tensor(0.1), [0.1], 1.0, -0.1, float("nan"), 1j], ids=repr)
def test_what_is_no_probability(call, dropout_p):
    for _ in range(2):
        with pytest.raises(saccade.InvalidArgument, match=r"^dropout_p is .*; allowed is 0 <= dropout_p < 1$"):
            call(*tensors(), dropout_p=dropout_p)


FLAGS = [
    *((call, "is_causal") for call in (attention, packed, dynamic_mask, nm_sparse, staged)),
    *((call, "enable_gqa") for call in (attention, dynamic_mask, nm_sparse, staged, decoding)),
    *((call, "return_lse") for call in (attention, packed, dynamic_mask, nm_sparse)),
    *((call, "add_scores") for call in (dynamic_mask, decoding)),
]


@pytest.mark.parametrize(("call", "name"), FLAGS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_flags(call, name):
    x = tensors()
    for yes, no in ((np.True_, np.False_), (1, 0), (np.int32(1), 1 - 1.0)):
        for plain, other in ((True, yes), (False, no)):
            torch.testing.assert_close(call(*x, **{name: other}), call(*x, **{name: plain}), rtol=0, atol=0)
    for wrong in (torch.tensor(True), None, "yes", 2, [True], np.ones(1, dtype=bool)):
        for _ in range(2):
            with pytest.raises(saccade.InvalidArgument, match=rf"^{name} is .*; it must be True or False$"):
                call(*x, **{name: wrong})


def test_keep():
    q, k, v, scores = tensors()
    expected = saccade.dynamic_mask_attention(q, k, v, scores, keep=3)
    assert torch.equal(saccade.dynamic_mask_attention(q, k, v, scores, keep=np.int64(3)), expected)
    assert torch.equal(saccade.expiry(scores, np.int32(3)), saccade.expiry(scores, 3))
    assert saccade.DynamicMaskCache(keep=np.int64(3)).keep == 3
    for wrong in (torch.tensor(3), "3", 3.0, True, 0, None, np.float32(3)):
        for make in (
            lambda w: saccade.dynamic_mask_attention(q, k, v, scores, keep=w),
            lambda w: saccade.expiry(scores, w),
            lambda w: saccade.DynamicMaskCache(keep=w),
            lambda w: saccade.nn.dynamic_mask.DynamicMaskAttention(32, 2, keep=w),
        ):
            with pytest.raises(saccade.InvalidArgument, match=r"^keep is .*; it must be a whole number of keys, at least 1$"):
                make(wrong)


def test_dropout_of_modules():
    for wrong in (None, "a", torch.tensor(0.1), 1.0):
        for make in (saccade.nn.attention.SelfAttention, saccade.nn.attention.AttentionPooling):
            with pytest.raises(saccade.InvalidArgument, match=r"^dropout is .*; allowed is 0 <= dropout < 1$"):
                make(32, 2, dropout=wrong)
