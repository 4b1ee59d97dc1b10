"""Decoding with `keep` entries equals attention over the whole history, token for token."""

from __future__ import annotations

import pytest
import torch

import saccade


def history(tokens, batch=2, heads=4, kv_heads=2, dim=8, ties=False):
    torch.manual_seed(tokens)
    query = torch.randn(batch, heads, tokens, dim, dtype=torch.float64)
    key, value = (torch.randn(batch, kv_heads, tokens, dim, dtype=torch.float64) for _ in range(2))
    scores = torch.randn(batch, kv_heads, tokens)
    return query, key, value, scores.round() if ties else scores


def whole(query, key, value, scores, keep, **options):
    return saccade.dynamic_mask_attention(query, key, value, scores, keep=keep, enable_gqa=True, **options)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("keep", [1, 7])
def test_token_by_token(keep, ties):
    tensors = history(120, ties=ties)
    expected = whole(*tensors, keep)
    cache = saccade.DynamicMaskCache(keep)
    for i in range(120):
        out = cache.attend(*(x[:, :, i : i + 1] for x in tensors), enable_gqa=True)
        torch.testing.assert_close(out, expected[:, :, i : i + 1])
    assert cache.nbytes <= keep * 2 * 2 * (8 * 8 * 2 + 4 + 8)


@pytest.mark.slow
def test_thousands_of_steps():
    keep, tokens = 32, 3000
    tensors = history(tokens, batch=1, heads=2, kv_heads=1, ties=True)
    expected = whole(*tensors, keep)
    cache = saccade.DynamicMaskCache(keep)
    for i in range(tokens):
        out = cache.attend(*(x[:, :, i : i + 1] for x in tensors), enable_gqa=True)
        torch.testing.assert_close(out, expected[:, :, i : i + 1])


@pytest.mark.parametrize("pieces", [(50, 1, 1, 8, 40), (3, 97), (100,)])
def test_prefill_and_several_tokens_at_once(pieces):
    tensors = history(100)
    expected = whole(*tensors, 9)
    cache, start = saccade.DynamicMaskCache(9), 0
    for count in pieces:
        out = cache.attend(*(x[:, :, start : start + count] for x in tensors), enable_gqa=True)
        torch.testing.assert_close(out, expected[:, :, start : start + count])
        start += count


def test_prompts_of_different_lengths():
    lengths, keep, steps = torch.tensor([20, 6]), 8, 30
    tensors = history(60)
    cache = saccade.DynamicMaskCache(keep)
    out = cache.attend(*(x[:, :, :20] for x in tensors), lengths=lengths, enable_gqa=True)
    # each row alone: its own prompt, then the tokens that follow
    rows = [
        [torch.cat((x[b : b + 1, :, : lengths[b]], x[b : b + 1, :, 20 : 20 + steps]), dim=2) for x in tensors] for b in range(2)
    ]
    expected = [whole(*row, keep) for row in rows]
    for b in range(2):
        torch.testing.assert_close(out[b : b + 1, :, : lengths[b]], expected[b][:, :, : lengths[b]])
    for i in range(steps):
        out = cache.attend(*(x[:, :, 20 + i : 21 + i] for x in tensors), enable_gqa=True)
        for b in range(2):
            torch.testing.assert_close(out[b], expected[b][0, :, lengths[b] + i : lengths[b] + i + 1])
    assert cache.seen.tolist() == [50, 36]
    assert repr(cache) == "DynamicMaskCache(keep=8, seen=[50, 36])"


def test_padding_of_a_prompt_may_hold_anything():
    tensors = history(12)
    dirty = [x.clone() for x in tensors]
    for x in dirty[1:3]:
        x[1, :, 5:] = float("nan")
    caches = [saccade.DynamicMaskCache(4) for _ in range(2)]
    for cache, source in zip(caches, (tensors, dirty), strict=True):
        cache.attend(*source, lengths=torch.tensor([12, 5]), enable_gqa=True)
    step = [x[:, :, :1] for x in tensors]
    clean, other = (cache.attend(*step, enable_gqa=True) for cache in caches)
    assert torch.equal(clean, other)


def test_rows_can_be_taken():
    tensors = history(20)
    cache, rows = saccade.DynamicMaskCache(5), torch.tensor([1, 1, 0])
    cache.take_rows(rows)  # empty: nothing to take
    cache.attend(*(x[:, :, :19] for x in tensors), lengths=torch.tensor([19, 7]), enable_gqa=True)
    other = [x[:, :, 19:] for x in tensors]
    expected = cache.attend(*other, enable_gqa=True)
    again = saccade.DynamicMaskCache(5)
    again.attend(*(x[:, :, :19] for x in tensors), lengths=torch.tensor([19, 7]), enable_gqa=True)
    again.take_rows(rows)
    assert again.seen.tolist() == [7, 7, 19]
    torch.testing.assert_close(again.attend(*(x[rows] for x in other), enable_gqa=True), expected[rows])


def test_bad_arguments():
    with pytest.raises(saccade.InvalidArgument, match="keep is 0"):
        saccade.DynamicMaskCache(0)
    cache = saccade.DynamicMaskCache(4)
    tensors = history(3)
    with pytest.raises(saccade.InvalidArgument, match="3 queries, 2 keys and 3 scores"):
        cache.attend(tensors[0], tensors[1][:, :, :2], tensors[2], tensors[3], enable_gqa=True)
    cache.attend(*tensors, enable_gqa=True)
    with pytest.raises(saccade.InvalidArgument, match=r"the cache holds \[B, Hkv\] = \[2, 2\], key is \[1, 2\]"):
        cache.attend(*(x[:1] for x in tensors), enable_gqa=True)
