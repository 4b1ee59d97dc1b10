"""Tensors that are more than their memory: each is known or refused by its name, and none is read as if it were plain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import saccade
from saccade.engine.kinds import brings_its_own
from saccade.exact.backends import BACKENDS


class Plain(Tensor):
    """A subclass that says nothing."""


class Asking(Tensor):
    """One that wants to be asked."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def two_of(x):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x)


STRANGE = {
    "with a __torch_function__": lambda x: x.as_subclass(Asking),
    "of two tensors": two_of,
    "masked": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}
if torch.backends.mkldnn.is_available():
    STRANGE["of mkldnn"] = lambda x: x.to_mkldnn() if x.dtype == torch.float32 else x.to_sparse()


def qkv(keys=9, queries=5):
    return torch.randn(2, 4, queries, 16), torch.randn(2, 4, keys, 16), torch.randn(2, 4, keys, 16)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("keys", [9, 5])
@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_torch_s_causal_biases(variant, keys, backend):
    query, key, value = qkv(keys)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, variant(5, keys))
    out = saccade.attention(query, key, value, variant(5, keys), backend=backend)
    torch.testing.assert_close(out, expected)
    assert "reference" in saccade.explain(query, key, value, variant(5, keys))


def test_torch_s_causal_biases_of_a_packed_projection():
    packed = torch.randn(2, 5, 3, 4, 16)
    expected = saccade.attention_qkvpacked(packed, is_causal=True)
    torch.testing.assert_close(saccade.attention_qkvpacked(packed, causal_upper_left(5, 5)), expected)


@pytest.mark.unpoisoned
def test_torch_s_causal_biases_in_a_compiled_program():
    query, key, value = qkv()
    compiled = torch.compile(saccade.attention, backend="aot_eager", fullgraph=True)
    mask = causal_lower_right(5, 9)
    torch.testing.assert_close(compiled(query, key, value, mask), saccade.attention(query, key, value, mask))


def test_a_causal_bias_of_another_call_is_refused():
    query, key, value = qkv()
    with pytest.raises(saccade.InvalidArgument, match=r"causal bias of 5 queries and 8 keys, key is of shape \[2, 4, 9, 16\]"):
        saccade.attention(query, key, value, causal_upper_left(5, 8))
    with pytest.raises(saccade.InvalidArgument, match="causal bias and is_causal is True"):
        saccade.attention(query, key, value, causal_upper_left(5, 9), is_causal=True)
    with pytest.raises(saccade.InvalidArgument, match="attn_mask is a CausalBias"):
        saccade.nm_sparse_attention(query, key, value, causal_upper_left(5, 9))


@pytest.mark.parametrize("position", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("backend", ["auto", *[b.name for b in BACKENDS]])
def test_whatever_is_no_plain_tensor_is_refused(kind, position, backend):
    given = dict(zip(("query", "key", "value"), qkv(), strict=True)) | {"attn_mask": torch.zeros(2, 4, 5, 9)}
    if backend == "auto":
        saccade.attention(**given, backend="reference")  # a plain call of the same shape is remembered
    given[position] = STRANGE[kind](given[position])
    if kind == "with a __torch_function__" and backend == "auto":
        return  # torch's function, which runs on a CPU, asks it
    with pytest.raises(saccade.InvalidArgument, match="nested" if kind == "nested" else f"{position} is "):
        saccade.attention(**given, backend="reference" if backend == "auto" else backend)


@pytest.mark.parametrize("kind", STRANGE)
def test_the_other_operations_refuse_them_too(kind):
    query, key, value = qkv()
    scores, ends = torch.randn(2, 4, 9), torch.tensor([0, 5, 9], dtype=torch.int32)
    strange = STRANGE[kind]
    calls = {
        "key_scores": lambda: saccade.dynamic_mask_attention(query, key, value, strange(scores), keep=2),
        "query": lambda: saccade.dynamic_mask_attention(strange(query), key, value, scores, keep=2),
        "block_mask": lambda: saccade.nm_sparse_attention(
            query, key, value, block_mask=strange(torch.ones(1, 1, dtype=torch.bool))
        ),
        "value": lambda: saccade.nm_sparse_attention(query, key, strange(value)),
        "lengths": lambda: saccade.attention(query, key, value, lengths=strange(torch.tensor([3, 4])), backend="reference"),
        "cu_seqlens_q": lambda: saccade.attention_varlen(key[0], key[0], key[0], strange(ends), ends, 9, 9),
        "key": lambda: saccade.attention_varlen(key[0], strange(key[0]), key[0], ends, ends, 9, 9),
    }
    for name, call in calls.items():
        with pytest.raises(saccade.InvalidArgument, match=f"{name} is "):
            call()


def test_float8_is_refused():
    query, key, value = (x.to(torch.float8_e4m3fn) for x in qkv())
    with pytest.raises(saccade.InvalidArgument, match="float8_e4m3fn; they must be floating point, of at least 16 bits"):
        saccade.attention(query, key, value)


def test_what_is_known():
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    assert not any(map(brings_its_own, (Tensor, torch.nn.Parameter, Plain, FakeTensor, FunctionalTensor, AsyncCollectiveTensor)))
    query, key, value = qkv()
    for backend in ("auto", "reference"):
        expected = saccade.attention(query, key, value, backend=backend)
        out = saccade.attention(query.as_subclass(Plain), key, value.as_subclass(Plain), backend=backend)
        assert torch.equal(out.as_subclass(Tensor), expected)
