"""Every bad argument of dynamic mask attention raises one sentence with what was given."""

from __future__ import annotations

import math

import pytest
import torch

import saccade


def arguments(q_len=4, kv_len=6, heads=2, kv_heads=2):
    query = torch.randn(1, heads, q_len, 8)
    key = torch.randn(1, kv_heads, kv_len, 8)
    return {"query": query, "key": key, "value": key.clone(), "key_scores": torch.randn(1, kv_heads, kv_len), "keep": 2}


def scores_with(value):
    scores = torch.zeros(1, 2, 6)
    scores[0, 1, 3] = value
    return scores


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keep": 0}, r"keep is 0; it must be a whole number of keys, at least 1"),
        ({"keep": 2.0}, r"keep is 2.0"),
        ({"key_scores": torch.zeros(1, 3, 6)}, r"key_scores has shape \[1, 3, 6\]; it must be \[B, Hkv, Tk\] = \[1, 2, 6\]"),
        ({"key_scores": torch.zeros(1, 6)}, r"key_scores has shape \[1, 6\]; it must be \[B, Hkv, Tk\] = \[1, 2, 6\]"),
        ({"key_scores": torch.zeros(1, 2, 6, dtype=torch.int64)}, r"key_scores has dtype torch.int64"),
        ({"key_scores": None}, r"key_scores is a NoneType"),
        ({"key_scores": scores_with(math.nan)}, r"key_scores holds nan at \[0, 1, 3\]"),
        ({"key_scores": scores_with(-math.inf)}, r"key_scores holds -inf at \[0, 1, 3\]"),
        ({"query": torch.randn(1, 2, 7, 8)}, r"7 queries for 6 keys; with is_causal=True"),
        ({"query": torch.randn(2, 7, 8)}, r"query has shape \[2, 7, 8\]; it must be \[B, H, Tq, D\]"),
        ({"document_ids": torch.tensor([[0, 0, 2, 1, 3, 3]])}, r"document_ids goes from 2 to 1 at \[0, 2\]"),
        (
            {"document_ids": torch.tensor([[0, 0, 2**31 - 1, 2**31 - 1, -2, -2]], dtype=torch.int32)},
            r"document_ids goes from 2147483647 to -2 at \[0, 3\]",
        ),
        (
            {"document_ids": torch.zeros(1, 5, dtype=torch.int64)},
            r"document_ids has shape \[1, 5\]; it must be \[B, Tk\] = \[1, 6\]",
        ),
        ({"document_ids": torch.zeros(1, 6)}, r"document_ids is torch.float32"),
        ({"lengths": torch.tensor([7, 7])}, r"lengths has shape \[2\]; it must be \[B\] for key_scores \[1, 2, 6\]"),
        ({"lengths": torch.tensor([7])}, r"lengths range from 7 to 7; allowed is 0 to Tk = 6"),
        ({"scale": math.nan}, r"scale is nan"),
        ({"sinks": -1}, r"sinks is -1; it must be a whole number of keys, at least 0"),
        ({"window": 1.5}, r"window is 1.5; it must be a whole number of keys, at least 0"),
        ({"sinks": True}, r"sinks is True"),
        ({"window": 3, "is_causal": False}, r"window is 3 with is_causal=False"),
        ({"cu_seqlens": torch.tensor([1, 6])}, r"cu_seqlens goes from 1 to 6; it must go from 0 to Tk = 6"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens goes from 0 to 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, r"cu_seqlens goes from 4 to 2 at 1; it must not decrease"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, r"cu_seqlens is torch.float32 \[2\]"),
        ({"cu_seqlens": [0, 6]}, r"cu_seqlens is list"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, r"cu_seqlens is empty"),
        ({"cu_seqlens": torch.tensor([0, 6]), "document_ids": torch.zeros(1, 6, dtype=torch.int64)}, r"are both given"),
        ({"cu_seqlens": torch.tensor([0, 6]), "key_scores": torch.zeros(2, 2, 6)}, r"it must be \[1, Hkv, Tk\]"),
        ({"query": torch.randn(1, 4, 4, 8)}, r"pass enable_gqa=True"),
        (
            {"backend": "scatter"},
            r"backend is 'scatter'; allowed are 'auto', 'gather', 'gather_cpp', 'gather_torch', 'reference'",
        ),
    ],
    ids=lambda x: "" if isinstance(x, str) else None,
)
def test_bad_arguments(changes, sentence):
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.dynamic_mask_attention(**{**arguments(), **changes})


def test_expiry_checks_the_same():
    with pytest.raises(saccade.InvalidArgument, match="keep is 0"):
        saccade.expiry(torch.zeros(1, 1, 4), 0)
    with pytest.raises(saccade.InvalidArgument, match="key_scores holds inf"):
        saccade.expiry(torch.full((1, 1, 4), math.inf), 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_may_be_numbered_by_any_integers(dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[least, least, -1, -1, most, most]], dtype=dtype)
    given, small = arguments(), torch.tensor([[0, 0, 1, 1, 2, 2]])
    found, expected = (saccade.dynamic_mask_attention(**given, document_ids=x) for x in (ids, small))
    assert torch.equal(found, expected)


def test_expiry_is_a_mask_in_one_line():
    scores, keep = torch.randn(2, 2, 30), 6
    table = saccade.expiry(scores, keep)
    q, k = torch.arange(30)[:, None], torch.arange(30)[None, :]
    from saccade.dynamic_mask.reference import kept

    assert torch.equal((k <= q) & (q < table[:, :, None, :]), kept(scores, keep, 30))


def test_offsets_name_the_documents():
    """The same as ids, empty documents included, with gradients; int32 and int64; values written later are looked at again."""
    x = {name: value.requires_grad_() if name != "keep" else 3 for name, value in arguments(q_len=6).items()}
    leaves = [x[name] for name in ("query", "key", "value", "key_scores")]
    ids = torch.tensor([[0, 0, 0, 2, 2, 3]])
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor([0, 3, 3, 5, 6, 6], dtype=dtype)
        found, expected = (saccade.dynamic_mask_attention(**x, **by) for by in ({"cu_seqlens": offsets}, {"document_ids": ids}))
        assert torch.equal(found, expected)
        for one, other in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)), strict=True):
            assert torch.equal(one, other)
        table = saccade.expiry(x["key_scores"], 2, cu_seqlens=offsets)
        assert torch.equal(table, saccade.expiry(x["key_scores"], 2, document_ids=ids))
    offsets[1] = 7
    with pytest.raises(saccade.InvalidArgument, match="from 7 to 3 at 1"):
        saccade.dynamic_mask_attention(**x, cu_seqlens=offsets)


def test_offsets_in_a_compiled_graph():
    x = arguments(q_len=6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(offsets):
        return saccade.dynamic_mask_attention(**x, cu_seqlens=offsets, sinks=1, window=2)

    for offsets in (torch.tensor([0, 2, 6]), torch.tensor([0, 5, 6])):
        expected = saccade.dynamic_mask_attention(**x, cu_seqlens=offsets, sinks=1, window=2)
        torch.testing.assert_close(call(offsets), expected)


def test_the_description_reads_well():
    from saccade.dynamic_mask.problem import describe_dynamic_mask

    x = arguments()
    found = describe_dynamic_mask(x["query"], x["key"], x["value"], x["key_scores"], 2, True, None, None, True, None, False, True)
    assert str(found) == "dynamic_mask_attention(B=1 H=2 Hkv=2 Tq=4 Tk=6 D=8 keep=2 fp32 causal grad cpu)"


def test_second_derivatives_raise():
    x = arguments()
    leaf = x["query"].requires_grad_()
    out = saccade.dynamic_mask_attention(**x)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()
