"""The queries that keep a key: intervals against one brute-force ranking for each query, bit for bit."""

from __future__ import annotations

import heapq
import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import saccade
from saccade.dynamic_mask.reference import kept
from saccade.dynamic_mask.selection.intervals import block_lists, causal_expiry, intervals, ranked_by_document, within_documents


def visible(start: torch.Tensor, stop: torch.Tensor, q_len: int) -> torch.Tensor:
    at = torch.arange(q_len) + start.shape[2] - q_len
    return (at[:, None] >= start[:, :, None, :]) & (at[:, None] < stop[:, :, None, :])


@st.composite
def selections(draw):
    batch, heads, kv_len = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["distinct", "ties", "equal", "bf16"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scores = torch.randn(batch, heads, kv_len, generator=generator)
    if kind == "ties":
        scores = scores.mul(1.5).round()
    elif kind == "equal":
        scores = torch.ones_like(scores)
    elif kind == "bf16":
        scores = scores.to(torch.bfloat16)
    lengths = documents = None
    if draw(st.booleans()):
        lengths = torch.tensor(draw(st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch)))
    if draw(st.booleans()):
        documents = torch.randint(0, 4, (batch, kv_len), generator=generator).sort(-1).values
    return scores, draw(st.integers(1, 45)), draw(st.integers(1, kv_len)), draw(st.booleans()), lengths, documents


@hypothesis.given(selections())
def test_intervals_are_the_ranking_of_every_query(selection):
    scores, keep, q_len, is_causal, lengths, documents = selection
    start, stop = intervals(scores, keep, q_len, is_causal, lengths, documents)
    assert start.dtype == stop.dtype == torch.int32
    assert torch.equal(visible(start, stop, q_len), kept(scores, keep, q_len, is_causal, lengths, documents))


def test_more_queries_than_keys_see_the_same_keys():
    scores = torch.tensor([[[1.0, 3.0, 2.0, 0.0, 5.0]]])
    start, stop = intervals(scores, 2, 8, False, None, None)
    assert torch.equal(visible(start, stop, 8), torch.tensor([False, True, False, False, True]).expand(1, 1, 8, 5))


@hypothesis.given(selections())
def test_documents_as_one_order(selection):
    """Kernels without documents, given the ranks by document, compute what documents mean."""
    scores, keep, _, _, lengths, documents = selection
    if documents is None:
        documents = torch.zeros(scores.shape[0], scores.shape[2], dtype=torch.int64)
    ranks = ranked_by_document(scores, documents)
    assert ranks.dtype == torch.float32
    assert (ranks >= torch.finfo(torch.float32).tiny).all()
    found = within_documents(causal_expiry(ranks, keep, lengths), documents)
    assert torch.equal(found, causal_expiry(scores, keep, lengths, documents))


def test_zeros_of_both_signs_tie_within_a_document():
    scores = torch.tensor([[[0.0, -0.0, 0.0, -0.0, 1.0, -1.0]]])
    documents = torch.tensor([[0, 0, 0, 0, 7, 7]])
    ranks = ranked_by_document(scores, documents)[0, 0]
    assert ranks.argsort().tolist() == [0, 1, 2, 3, 5, 4]


@hypothesis.given(selections(), st.integers(0, 45), st.integers(0, 45))
def test_what_is_kept_besides(selection, sinks, window):
    """The union of the best keys, the first ones of a document and the newest, still one interval a key."""
    scores, keep, q_len, is_causal, lengths, documents = selection
    window = window if is_causal else 0
    start, stop = intervals(scores, keep, q_len, is_causal, lengths, documents, sinks=sinks, window=window)
    assert start.dtype == stop.dtype == torch.int32
    found = visible(start, stop, q_len)
    assert torch.equal(found, kept(scores, keep, q_len, is_causal, lengths, documents, sinks, window))
    assert found.sum(-1).max() <= keep + sinks + window


def by_hand(scores, keep, sinks, window):
    """Causal, one document, no padding: a loop that shares nothing with the reference."""
    tokens = scores.shape[2]
    mask = torch.zeros(*scores.shape[:2], tokens, tokens, dtype=torch.bool)
    for b, h, i in itertools.product(range(scores.shape[0]), range(scores.shape[1]), range(tokens)):
        best = sorted(range(i + 1), key=lambda j: (-scores[b, h, j].item(), -j))[:keep]
        mask[b, h, i, sorted({*best, *range(min(sinks, i + 1)), *range(max(0, i - window + 1), i + 1 if window else 0)})] = True
    return mask


@pytest.mark.parametrize(("keep", "sinks", "window"), [(3, 2, 0), (3, 0, 4), (1, 1, 1), (4, 30, 2), (2, 1, 30), (5, 3, 6)])
def test_the_reference_of_what_is_kept_besides(keep, sinks, window):
    scores = torch.randn(2, 2, 20).mul(2).round()
    expected = by_hand(scores, keep, sinks, window)
    assert torch.equal(kept(scores, keep, 20, sinks=sinks, window=window), expected)
    table = saccade.expiry(scores, keep, sinks=sinks, window=window)
    q, k = torch.arange(20)[:, None], torch.arange(20)[None, :]
    assert torch.equal((k <= q) & (q < table[:, :, None, :]), expected)


def test_a_window_of_more_keys_than_an_int32_holds():
    scores = torch.randn(1, 1, 7)
    assert saccade.expiry(scores, 1, window=2**40)[0, 0].tolist() == [7] * 7
    assert saccade.expiry(scores, 1, sinks=2**70)[0, 0].tolist() == [7] * 7


@hypothesis.given(selections())
def test_expiry_is_canonical(selection):
    scores, keep, _, _, lengths, documents = selection
    found = causal_expiry(scores, keep, lengths, documents)
    positions = torch.arange(scores.shape[2])
    assert ((found >= positions) & (found <= scores.shape[2])).all()


def test_scores_of_padding_may_be_nan():
    scores, lengths = torch.randn(2, 3, 40), torch.tensor([17, 40])
    expected = saccade.expiry(scores, 5, lengths=lengths)
    scores[0, :, 17:] = float("nan")
    assert torch.equal(saccade.expiry(scores, 5, lengths=lengths), expected)
    scores[0, 1, 16] = float("nan")
    with pytest.raises(saccade.InvalidArgument, match=r"key_scores holds nan at \[0, 1, 16\]"):
        saccade.expiry(scores, 5, lengths=lengths)


@pytest.mark.parametrize("length", [1000, 2048, 2500])
@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_expiry_against_a_heap(length, kind):
    scores = torch.randn(1, 1, length)
    scores = scores.round() if kind == "ties" else scores
    kept_now: list[tuple[float, int]] = []
    expected = [length] * length
    for j, score in enumerate(scores[0, 0].tolist()):
        heapq.heappush(kept_now, (score, j))
        if len(kept_now) > 64:
            expected[heapq.heappop(kept_now)[1]] = j  # the first position that no longer keeps it
    assert causal_expiry(scores, 64)[0, 0].tolist() == expected


@pytest.mark.parametrize("keep", [1, 5, 64])
def test_equal_scores_are_a_sliding_window(keep):
    found = causal_expiry(torch.zeros(1, 1, 50), keep)
    assert torch.equal(found[0, 0], torch.clamp(torch.arange(50) + keep, max=50).int())


def test_descending_scores_keep_the_first_and_ascending_the_last():
    falling = -torch.arange(20.0).expand(1, 1, 20)
    assert causal_expiry(falling, 3)[0, 0].tolist() == [20, 20, 20, *range(3, 20)]
    rising = torch.arange(20.0).expand(1, 1, 20)
    assert causal_expiry(rising, 3)[0, 0].tolist() == [min(j + 3, 20) for j in range(20)]


def test_an_evicted_key_never_returns():
    mask = kept(torch.randn(1, 2, 60), 7, 60)
    # along the queries: 1 where a key appears, -1 where it goes
    seen = mask.int().diff(dim=2)
    assert ((seen == 1).sum(2) <= 1).all()
    assert ((seen == -1).sum(2) <= 1).all()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_as_the_docstring_of_expiry_has_it(group):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    lines = [x.strip() for x in saccade.expiry.__doc__.splitlines() if x.strip().startswith(("table =", "mask =", "out ="))]
    assert len(lines) == 3
    B, H, T, keep = 2, 4, 100, 9
    query, key, value = (torch.randn(B, h, T, 16) for h in (H, H // group, H // group))
    key_scores = torch.randn(B, H // group, T)
    names = {"saccade": saccade, "flex_attention": flex.flex_attention, "create_block_mask": flex.create_block_mask}
    # in a function, so that the lambdas hold tensors as closures, as they would in a module's forward
    exec("\n    ".join(("def example(query, key, value, key_scores, keep, group, B, H, T):", *lines, "return out")), names)
    out = names["example"](query, key, value, key_scores, keep, group, B, H, T)
    expected = saccade.dynamic_mask_attention(query, key, value, key_scores, keep=keep, enable_gqa=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert (out - plain).abs().max() > 0.1


def test_no_keys_at_all():
    assert causal_expiry(torch.zeros(2, 3, 0), 4).shape == (2, 3, 0)


def test_scores_are_ranked_in_float32():
    scores = torch.tensor([[[1.0, 1.0 + 1e-12, 1.0 - 1e-12]]], dtype=torch.float64)  # equal in float32
    assert causal_expiry(scores, 1)[0, 0].tolist() == [1, 2, 3]


@hypothesis.given(selections(), st.sampled_from([1, 4, 16]))
def test_lists_hold_the_keys_of_every_block(selection, block):
    scores, keep, q_len, is_causal, lengths, documents = selection
    start, stop = intervals(scores, keep, q_len, is_causal, lengths, documents)
    mask = visible(start, stop, q_len)
    keys, count, whole = block_lists(start, stop, q_len, block)
    kv_len = scores.shape[2]
    assert keys.shape[2] == -(-q_len // block)
    for b, h, c in torch.cartesian_prod(*(torch.arange(n) for n in keys.shape[:3])).view(-1, 3).tolist():
        rows = mask[b, h, c * block : (c + 1) * block]
        listed = keys[b, h, c].tolist()
        total, full = count[b, h, c].item(), whole[b, h, c].item()
        assert set(listed[:total]) == set(rows.any(0).nonzero().flatten().tolist())
        assert set(listed[:full]) == set(rows.all(0).nonzero().flatten().tolist())
        assert listed[:full] == sorted(listed[:full])
        assert listed[total:] == [kv_len] * (len(listed) - total)
        if is_causal and documents is None:
            assert total <= keep + block - 1
