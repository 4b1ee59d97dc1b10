"""Landmark attention against its formula in float64, and the effect of pruning its two matrices."""

from __future__ import annotations

import itertools

import pytest
import torch

from saccade import InvalidArgument
from saccade.nm_sparse import reference as nm_sparse
from saccade.nn import nystrom
from saccade.nn.nystrom import NystromAttention, pseudo_inverse, segment_means


def module(pattern, **more):
    torch.manual_seed(0)
    return NystromAttention(24, 3, pattern=pattern, **more).double()


def projected(layer, x):
    return layer.in_proj(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)


@pytest.mark.parametrize("pattern", [None, "2:4", "1:2"])
def test_the_formula(pattern):
    layer, x = module(pattern, landmarks=8), torch.randn(2, 30, 24, dtype=torch.float64)
    query, key, value = projected(layer, x)
    edges = [i * 30 // 8 for i in range(9)]
    marks = [torch.stack([y[:, :, a:b].mean(2) for a, b in itertools.pairwise(edges)], 2) for y in (query, key)]
    scores = [8**-0.5 * a @ b.mT for a, b in ((query, marks[1]), (marks[0], marks[1]), (marks[0], key))]
    if pattern is not None:
        keep, group = map(int, pattern.split(":"))
        for i in (0, 2):
            scores[i] = scores[i].masked_fill(~nm_sparse.select(scores[i], keep, group), -torch.inf)
    first, middle, last = (torch.softmax(s, -1) for s in scores)
    heads = first @ pseudo_inverse(middle, 6) @ (last @ value)
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    # landmarks and the middle are float32
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_a_landmark_for_each_token_is_dense_attention():
    layer, x = module(None, landmarks=64, iterations=30), torch.randn(1, 10, 24, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj.weight *= 3  # a matrix far from singular
    query, key, value = projected(layer, x)
    heads = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(layer(x), layer.out_proj(heads.transpose(1, 2).flatten(2)), rtol=1e-2, atol=1e-2)


def test_the_pseudo_inverse_is_one():
    matrix = torch.softmax(3 * torch.randn(2, 12, 12, dtype=torch.float64) + 6 * torch.eye(12), -1)
    torch.testing.assert_close(pseudo_inverse(matrix, 20), torch.linalg.pinv(matrix), rtol=1e-6, atol=1e-6)


def test_segments_cover_every_token_once():
    x = torch.randn(2, 1, 11, 3)
    means = segment_means(x, 4, torch.tensor([11, 6]))
    for row, count in ((0, 11), (1, 6)):
        edges = [i * count // 4 for i in range(5)]
        expected = torch.stack([x[row, 0, a:b].mean(0) for a, b in itertools.pairwise(edges)])
        torch.testing.assert_close(means[row, 0], expected)
    fewer = segment_means(x, 4, torch.tensor([11, 2]))[1, 0]
    assert torch.equal(fewer[:2], x[1, 0, :2])  # a segment for each token, then empty ones
    assert (fewer[2:] == 0).all()


@pytest.mark.parametrize("pattern", [None, "2:4"])
@pytest.mark.parametrize("length", [1, 3, 7, 8])
def test_rows_shorter_than_the_landmarks_do_not_depend_on_padding(length, pattern):
    layer, x = module(pattern, landmarks=8, conv_kernel=3), torch.randn(2, 20, 24, dtype=torch.float64)
    alone = layer(x[:1, :length])
    for tokens in (length, 9, 20):
        if tokens < length:
            continue
        dirty = x[:, :tokens].clone()
        dirty[0, length:] = torch.nan
        padded = layer(dirty, torch.tensor([length, tokens]))
        torch.testing.assert_close(padded[:1, :length], alone, rtol=1e-5, atol=1e-5)
        assert padded[1].isfinite().all()
    empty = layer(x, torch.tensor([0, 20]))
    assert empty.isfinite().all()


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        (torch.tensor([-1, 5]), "lengths range from -1 to 5; allowed is 0 to Tk = 12"),
        (torch.tensor([13, 5]), "lengths range from 5 to 13"),
        (torch.tensor([2.0, 5.0]), r"lengths has dtype torch\.float32; allowed are int32 and int64"),
        (torch.tensor([2]), r"lengths has shape \[1\]; it must be \[B\]"),
        ([2, 5], "lengths is a list"),
    ],
)
def test_bad_lengths(lengths, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        module(None)(torch.randn(2, 12, 24, dtype=torch.float64), lengths)


@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_the_backend_reaches_both_kinds_of_matrices(pattern):
    with pytest.raises(InvalidArgument, match="backend is 'fast'"):
        module(pattern, backend="fast")(torch.randn(2, 5, 24, dtype=torch.float64))


@pytest.mark.parametrize("pattern", [None, "2:4"])
def test_padding_never_leaks(pattern):
    layer, x = module(pattern, landmarks=4, conv_kernel=3), torch.randn(2, 12, 24, dtype=torch.float64)
    lengths = torch.tensor([12, 7])
    clean = layer(x, lengths)
    x[1, 7:] = torch.nan
    torch.testing.assert_close(layer(x, lengths)[1, :7], clean[1, :7])
    torch.testing.assert_close(layer(x[1:, :7])[0, :6], clean[1, :6])


def test_the_inverse_stays_in_float32_under_autocast(monkeypatch):
    """Sixteen bits would be multiplied again in each iteration."""
    given = []

    def watched(matrix, iterations):
        given.extend((matrix, found := pseudo_inverse(matrix, iterations)))
        return found

    monkeypatch.setattr(nystrom, "pseudo_inverse", watched)
    layer, x = module(None, landmarks=16).float(), torch.randn(2, 128, 24)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert [y.dtype for y in given] == [torch.float32] * 2
    torch.testing.assert_close(given[1], pseudo_inverse(given[0], 6))


def test_gradients_reach_everything():
    layer = module("2:4", landmarks=4, conv_kernel=3)
    x = torch.randn(2, 12, 24, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10, "num_heads": 3}, "embed_dim is 10 and num_heads 3"),
        ({"landmarks": 0}, "landmarks is 0"),
        ({"landmarks": 8.0}, "landmarks is 8.0; it must be a whole number"),
        ({"iterations": 0}, "iterations is 0"),
        ({"conv_kernel": 4}, "conv_kernel is 4"),
        ({"pattern": "4:2"}, "'4:2'"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        NystromAttention(**{"embed_dim": 24, "num_heads": 3, **arguments})
    with pytest.raises(InvalidArgument, match=r"\[B, S, 24\]"):
        module(None)(torch.randn(2, 5, 8))


def test_exports_with_any_number_of_tokens():
    layer, tokens = module("2:4", landmarks=8, conv_kernel=3), torch.export.Dim("tokens", min=8, max=512)
    traced, x = (torch.randn(2, n, 24, dtype=torch.float64) for n in (30, 51))
    program = torch.export.export(layer, (traced,), dynamic_shapes={"x": {1: tokens}}).module()
    torch.testing.assert_close(program(x), layer(x))
