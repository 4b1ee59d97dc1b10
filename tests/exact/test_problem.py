"""Every bad argument raises one sentence with what was given; every valid call is described."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import saccade
from saccade import native
from saccade.engine.calls import split_mask
from saccade.engine.problem import replayed_by_cpp
from saccade.errors import InvalidArgument
from saccade.exact.long.backend import LONG
from saccade.exact.problem import describe_attention

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 4, 7, 8)
BAD = {
    "not a tensor": ({"query": [1.0]}, "query is a list; it must be a torch.Tensor"),
    "rank": ({"query": Q[0, 0, 0]}, "query has shape [8]; it must be [B, H, T, D], or at least [T, D]"),
    "ranks differ": ({"query": Q[0, :3]}, "ranks differ: query [3, 5, 8], key [2, 4, 7, 8], value [2, 4, 7, 8]; each must be [B, H, T, D]"),
    "dtypes": ({"key": K.half()}, "dtypes differ: query torch.float32, key torch.float16, value torch.float32; they must be the same"),
    "integers": ({"query": Q.int(), "key": K.int(), "value": K.int()}, "query, key and value are torch.int32; they must be floating point"),
    "devices": ({"key": K.to("meta")}, "devices differ: query cpu, key meta, value cpu; they must be the same"),
    "head dims": ({"key": K[..., :4]}, "head dims of query and key differ: query [2, 4, 5, 8], key [2, 4, 7, 4], value [2, 4, 7, 8]"),
    "lengths of key and value": ({"value": K[:, :, :3]}, "key and value have different lengths: query [2, 4, 5, 8], key [2, 4, 7, 8], value [2, 4, 3, 8]"),
    "heads of key and value": ({"value": K[:, :2]}, "key has 4 heads, value 2; they must agree (query [2, 4, 5, 8], key [2, 4, 7, 8], value [2, 2, 7, 8])"),
    "no gqa": ({"key": K[:, :2], "value": K[:, :2]}, "query has 4 heads, key and value 2; pass enable_gqa=True to share them"),
    "tokens before heads": ({"query": Q.transpose(1, 2), "key": K.transpose(1, 2), "value": K.transpose(1, 2)}, "query has 5 heads, key and value 7; they must agree, in tensors [B, H, T, D] (query [2, 5, 4, 8], key [2, 7, 4, 8], value [2, 7, 4, 8])"),
    "heads do not divide": ({"key": K[:, :3], "value": K[:, :3], "enable_gqa": True}, "4 query heads are no multiple of 3 key heads"),
    "no key heads": ({"key": K[:, :0], "value": K[:, :0], "enable_gqa": True}, "4 query heads are no multiple of 0 key heads"),
    "batch": ({"query": torch.zeros(3, 4, 5, 8)}, "batch dimensions differ: query [3, 4, 5, 8], key [2, 4, 7, 8], value [2, 4, 7, 8]"),
    "mask not a tensor": ({"attn_mask": True}, "attn_mask is a bool; it must be a torch.Tensor or None"),
    "mask and causal": ({"attn_mask": torch.ones(5, 7), "is_causal": True}, "attn_mask (shape [5, 7]) and is_causal=True are both given; put the causal mask into attn_mask"),
    "mask dtype": ({"attn_mask": torch.ones(5, 7).int()}, "attn_mask has dtype torch.int32; allowed are bool (True = attend) and floating point (added to the scores)"),
    "mask device": ({"attn_mask": torch.ones(5, 7, device="meta")}, "attn_mask is on meta, query on cpu; they must be the same"),
    "mask shape": ({"attn_mask": torch.ones(7, 5)}, "attn_mask has shape [7, 5]; it must broadcast to [2, 4, 5, 7]"),
    "mask of keys": ({"attn_mask": torch.ones(2, 7)}, "attn_mask has shape [2, 7]; it must broadcast to [2, 4, 5, 7]; a mask of the keys of each batch row is [B, 1, 1, Tk]"),
    "mask wider than the batch": ({"query": Q[:1], "key": K[:1], "value": K[:1], "attn_mask": torch.ones(2, 1, 5, 7)}, "attn_mask has shape [2, 1, 5, 7]; it must broadcast to [1, 4, 5, 7]"),
    "mask wider than the queries": ({"query": Q[:, :, :1], "attn_mask": torch.ones(5, 7)}, "attn_mask has shape [5, 7]; it must broadcast to [2, 4, 1, 7]"),
    "mask rank": ({"attn_mask": torch.ones(1, 1, 1, 5, 7)}, "attn_mask has shape [1, 1, 1, 5, 7]; it must broadcast to [2, 4, 5, 7]"),
    "dropout 1": ({"dropout_p": 1.0}, "dropout_p is 1.0; allowed is 0 <= dropout_p < 1"),
    "dropout negative": ({"dropout_p": -0.1}, "dropout_p is -0.1; allowed is 0 <= dropout_p < 1"),
    "dropout nan": ({"dropout_p": float("nan")}, "dropout_p is nan; allowed is 0 <= dropout_p < 1"),
    "scale": ({"scale": float("inf")}, "scale is inf; it must be a finite number, or None for 1/sqrt(D)"),
    "lengths not a tensor": ({"lengths": [5, 5]}, "lengths is a list; it must be an integer torch.Tensor of shape [B]"),
    "lengths dtype": ({"lengths": torch.ones(2)}, "lengths has dtype torch.float32; allowed are int32 and int64"),
    "lengths shape": ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths has shape [3]; it must be [B] for query [2, 4, 5, 8]"),
    "lengths device": ({"lengths": torch.ones(2, dtype=torch.int32, device="meta")}, "lengths is on meta, query on cpu; they must be the same"),
    "lengths beyond": ({"lengths": torch.tensor([3, 8])}, "lengths range from 3 to 8; allowed is 0 to Tk = 7"),
    "lengths negative": ({"lengths": torch.tensor([-1, 7])}, "lengths range from -1 to 7; allowed is 0 to Tk = 7"),
    "backend": ({"backend": "fast"}, "backend is 'fast'; allowed are 'auto', 'long', 'short', 'volta', 'volta_fp16', 'shared_bias', 'ragged', 'sdpa', 'reference'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), BAD.values(), ids=BAD)
def test_a_bad_argument_gets_a_sentence(changes, sentence):
    arguments = {"query": Q, "key": K, "value": K, **changes}
    with pytest.raises(InvalidArgument, match="^" + re.escape(sentence)) as caught:
        saccade.attention(**arguments)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("qkv", "sentence"),
    [
        ("text", "qkv is a str; it must be a torch.Tensor of shape [B, S, 3, H, D]"),
        (torch.zeros(2, 5, 3, 8), "qkv has shape [2, 5, 3, 8]; it must be [B, S, 3, H, D]"),
        (torch.zeros(2, 5, 4, 2, 8), "qkv has shape [2, 5, 4, 2, 8]; it must be [B, S, 3, H, D]"),
        (torch.zeros(2, 5, 3, 8, 2).mT, "qkv has strides (240, 48, 16, 1, 2); the last one must be 1, call .contiguous() on it"),
    ],
)
def test_bad_packed_input(qkv, sentence):
    with pytest.raises(InvalidArgument, match="^" + re.escape(sentence)):
        saccade.attention_qkvpacked(qkv)


def test_a_last_stride_other_than_1_is_named_by_the_backend_that_needs_it():
    strided = torch.zeros(2, 4, 8, 5).mT
    with pytest.raises(saccade.UnsupportedProblem, match=r"needs a last stride of 1, got \(5, 1, 1\) for query, key and value"):
        saccade.attention(strided, K, K, backend="short")
    assert saccade.attention(strided, K, K).shape == strided.shape  # torch takes it


def test_a_boolean_mask_cannot_require_a_gradient():
    with pytest.raises(RuntimeError, match="require gradients"):
        torch.ones(5, 7, dtype=torch.bool).requires_grad_()


def test_the_same_bad_call_raises_twice():
    # plans are remembered: an error must not be
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="dropout_p is 2"):
            saccade.attention(Q, K, K, dropout_p=2)


def test_lengths_are_checked_again_after_a_change_in_place():
    lengths = torch.tensor([3, 7])
    saccade.attention(Q, K, K, lengths=lengths)
    lengths[0] = 9
    with pytest.raises(InvalidArgument, match="range from 7 to 9"):
        saccade.attention(Q, K, K, lengths=lengths)
    longer = torch.tensor([3, 7])
    saccade.attention(Q, K, K, lengths=longer)
    with pytest.raises(InvalidArgument, match="Tk = 6"):
        saccade.attention(Q, K[:, :, :6], K[:, :, :6], lengths=longer)


def describe(query=Q, key=K, **changes):
    arguments = {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, "lengths": None, "return_lse": False, "packed": False,
        "needs_grad": False,
    }  # fmt: skip
    return describe_attention(query, key, key, **(arguments | changes))


def test_a_problem_prints_what_was_asked():
    assert str(describe()) == "attention(B=2 H=4 Tq=5 Tk=7 D=8 fp32 cpu)"
    bias = torch.zeros(1, 4, 5, 7, requires_grad=True)
    text = str(describe(key=K[:, :2], attn_mask=bias, dropout_p=0.1, enable_gqa=True, return_lse=True, needs_grad=True))
    assert text == "attention(B=2 H=4 Hkv=2 Tq=5 Tk=7 D=8 fp32 bias[1x4x5x7]+grad dropout=0.1 lse grad cpu)"
    text = str(describe(is_causal=True, lengths=torch.ones(2, dtype=torch.int64), packed=True))
    assert text == "attention(B=2 H=4 Tq=5 Tk=7 D=8 fp32 causal lengths packed cpu)"
    assert "mask[5x7] cpu" in str(describe(attn_mask=torch.ones(5, 7, dtype=torch.bool)))
    assert "Dv=3" in str(describe_attention(Q, K, K[..., :3], None, 0.0, False, None, False, None, False, False, False))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_bias_has_a_gradient_where_the_call_has_one(needs_grad):
    x = torch.zeros(1, 1, 4, 8)
    for trained in (False, True):
        bias = torch.zeros(4, 4, requires_grad=trained)
        found = describe_attention(x, x, x, bias, 0.0, False, None, False, None, False, False, needs_grad)
        assert found.bias_grad is (trained and needs_grad)


def test_a_problem_is_a_key():
    assert describe() == describe()
    assert hash(describe()) == hash(describe())
    assert describe() != describe(is_causal=True)
    assert describe(scale=0.5).scale == 0.5
    assert describe().scale == 8**-0.5
    assert describe().batch == 2
    assert describe().device == torch.device("cpu")


@pytest.mark.parametrize("shape", [(2, 1, 5, 5), (5, 5), (2, 3, 5, 5)], ids=str)
def test_a_mask_expanded_over_the_queries_is_a_mask_of_keys(shape):
    """Described as what it is, so that `auto` chooses as for `[B, 1, 1, Tk]`; a mask that is not expanded stays as it is.
    A bias is described in the same way, and handed on as it is."""
    row = torch.rand(*shape[:-2], 1, 5) > 0.4
    row[..., 0] = True
    x = torch.randn(2, 3, 5, 8)
    for mask, expected in ((row.expand(shape), (*shape[:-2], 1, 5)), (row.expand(shape).contiguous(), shape)):
        problem = describe_attention(x, x, x, mask, 0.0, False, None, False, None, False, False, False)
        assert problem.mask_shape == expected
        found, _ = split_mask(problem, mask)
        assert found.shape == expected
        torch.testing.assert_close(saccade.attention(x, x, x, mask), saccade.attention(x, x, x, row))
        torch.testing.assert_close(saccade.nm_sparse_attention(x, x, x, mask), saccade.nm_sparse_attention(x, x, x, row))
    nothing = x[:, :, :0]
    for attend in (saccade.attention, saccade.nm_sparse_attention):
        assert attend(nothing, x, x, row.expand(shape)[..., :0, :], return_lse=True)[0].shape == nothing.shape
    bias = torch.randn(*shape[:-2], 1, 5).expand(shape)
    problem = describe_attention(x, x, x, bias, 0.0, False, None, False, None, False, False, False)
    assert problem.mask_shape == (*shape[:-2], 1, 5)
    assert split_mask(problem, bias)[1] is bias


def test_host_time_counts_unless_cpp_makes_the_call_again(monkeypatch):
    monkeypatch.setattr(native, "calls", None)
    problem = describe_attention(Q, K, K, None, 0.0, False, None, False, None, False, False, False)
    assert problem.host_counts
    monkeypatch.setattr(native, "calls", object())
    assert replayed_by_cpp(problem, None) == replace(problem, host_counts=False)
    other = replace(problem, return_lse=True)
    assert replayed_by_cpp(other, None) == replace(other, host_counts=False)
    trained = replace(other, needs_grad=True)
    assert replayed_by_cpp(trained, None) == trained


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 2, 3, 4, 8)], ids=["rows", "windows"])
def test_host_time_beside_a_mask_of_keys_counts_as_without(monkeypatch, shape):
    monkeypatch.setattr(native, "calls", object())
    x, bias, seen = torch.randn(shape), torch.randn(2, 3, 4, 4), torch.ones(*shape[:-3], 4, dtype=torch.bool)
    problem = describe_attention(x, x, x, bias, 0.0, False, None, False, None, False, False, False)
    assert not problem.host_counts
    beside = describe_attention(x, x, x, bias, 0.0, False, None, False, None, False, False, False, None, seen)
    assert beside == replace(problem, key_mask=True)


@pytest.mark.parametrize("keys", [200, 197, 49])
@pytest.mark.parametrize("laid", [lambda x: x, lambda x: x.mT.contiguous().mT], ids=["rows", "transposed"])
def test_host_time_of_a_bias_does_not_count(monkeypatch, keys, laid):
    """C++ repeats the call, and the copy of a bias whose rows begin at odd addresses."""
    monkeypatch.setattr(native, "calls", object())
    x, bias = torch.randn(12, 3, keys, 32).bfloat16(), laid(torch.randn(1, 3, keys, keys).bfloat16())
    problem = describe_attention(x, x, x, bias, 0.0, False, None, False, None, False, False, False)
    assert not problem.host_counts
    on_sm90 = replace(problem, device_type="cuda", device_index=0, arch=90)
    assert "host time" not in LONG.rule(on_sm90).said


def test_a_number_is_refused_though_an_equal_one_is_remembered():
    query = torch.randn(1, 2, 4, 8)
    saccade.attention(query, query, query, scale=1.0, backend="reference")
    with pytest.raises(saccade.InvalidArgument, match=r"scale is \(1\+0j\); it must be a finite number"):
        saccade.attention(query, query, query, scale=1 + 0j, backend="reference")
