"""The staged pipeline as users see it: its meaning, its container, and the calls that it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

import saccade
from saccade.nm_sparse import reference
from saccade.nm_sparse.weights import NMWeights, compress, scores

KINDS = [(torch.bfloat16, "2:4"), (torch.float16, "1:2"), (torch.float32, "1:2")]


def inputs(dtype=torch.float32, q_len=37, kv_len=50, dim=24, heads=2, kv_heads=2):
    return tuple(torch.randn(2, h, n, dim).to(dtype) for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))


@pytest.mark.parametrize(("dtype", "pattern"), KINDS)
@pytest.mark.parametrize("feature", ["plain", "causal", "bool", "bias", "grouped", "blocks", "blocks-bool"])
def test_stages_give_what_the_operation_gives(dtype, pattern, feature):
    query, key, value = inputs(dtype, heads=4 if feature == "grouped" else 2)
    mask = blocks = None
    if "blocks" in feature:
        query, key, value = inputs(dtype, 140, 200)
        blocks = torch.tensor([[[True, False, True, False], [False] * 4, [False, True, True, True]]])
    if "bool" in feature:
        mask = torch.rand(2, 1, query.shape[2], key.shape[2]) < 0.6
        mask[:, :, 4] = False
    elif feature == "bias":
        mask = torch.randn(1, 2, 37, 50).to(dtype)
    gqa = feature == "grouped"
    pruned = scores(query, key, mask, feature == "causal", None, gqa, pattern=pattern, block_mask=blocks)
    staged = pruned.softmax().matmul(value, enable_gqa=gqa)
    fused = saccade.nm_sparse_attention(
        query, key, value, mask, 0.0, feature == "causal", None, gqa, pattern=pattern, block_mask=blocks, backend="reference"
    )
    assert staged.dtype == dtype
    # scores and weights are rounded to the dtype between the stages, and nowhere else
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}[dtype]
    torch.testing.assert_close(staged, fused, rtol=8 * unit, atol=8 * unit)
    if "bool" in feature:
        assert (staged[:, :, 4] == 0).all()
    if blocks is not None:
        assert (staged[:, :, 64:128] == 0).all()
        assert (pruned.to_dense()[:, :, :64, 64:128] == -torch.inf).all()
        assert (pruned.softmax().to_dense()[:, :, :64, 64:128] == 0).all()


@pytest.mark.parametrize(("dtype", "pattern"), KINDS)
def test_scores_hold_what_is_selected(dtype, pattern):
    query, key, _ = inputs(dtype)
    found = scores(query, key, pattern=pattern)
    exact = reference.visible_scores(query, key, scale=24**-0.5)
    selected = reference.select(exact, *map(int, pattern.split(":")))
    assert torch.equal(found.kept(), selected)
    assert torch.equal(found.to_dense(), exact.to(dtype).masked_fill(~selected, -torch.inf))
    assert found.shape == (2, 2, 37, 50)
    assert found.dtype == dtype
    weights = found.softmax()
    assert torch.equal(weights.kept(), selected)
    assert (weights.to_dense()[~selected] == 0).all()
    torch.testing.assert_close(weights.to_dense().float().sum(-1), torch.ones(2, 2, 37), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("dtype", "pattern"), KINDS)
def test_memory_is_nine_sixteenths(dtype, pattern):
    query, key, _ = inputs(dtype, 64, 128)
    found = scores(query, key, pattern=pattern)
    assert found.nbytes == 2 * 2 * 64 * 128 * dtype.itemsize * 9 // 16


def test_softmax_in_place_and_apart():
    query, key, _ = inputs()
    found = scores(query, key, pattern="1:2")
    apart = found.softmax()
    assert found.values.data_ptr() != apart.values.data_ptr()
    before = found.values.data_ptr()
    same = found.softmax_()
    assert same.values.data_ptr() == before
    assert torch.equal(same.values, apart.values)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")
@pytest.mark.parametrize(("dtype", "pattern"), KINDS)
def test_to_torch_and_back(dtype, pattern):
    dense = torch.rand(2, 3, 64, 128).to(dtype) + 0.5
    weights = compress(dense, pattern)
    theirs = weights.to_torch(1, 2)
    assert theirs.packed.data_ptr() == weights.values[1, 2].data_ptr()
    ours = NMWeights.from_torch(theirs, pattern)
    assert torch.equal(ours.to_dense()[0, 0], weights.to_dense()[1, 2])
    assert NMWeights.from_torch(theirs).pattern == ("1:2" if dtype == torch.float32 else "2:4")
    values, metadata = sparse_semi_structured_from_dense_cutlass(weights.to_dense()[1, 2])
    assert torch.equal(theirs.packed, values)
    assert torch.equal(theirs.meta, metadata)
    assert ours.matmul(torch.ones(1, 1, 128, 8, dtype=dtype)).shape == (1, 1, 64, 8)


def test_compress_decodes_to_the_pruned_matrix():
    dense = torch.randn(37, 50)
    pruned = dense.masked_fill(~reference.select(dense, 1, 2), 0.0)
    assert torch.equal(compress(dense, "1:2").to_dense()[0, 0], pruned)
    assert (compress(dense, "1:2", fill=-torch.inf).to_dense()[0, 0] == pruned.masked_fill(pruned == 0, -torch.inf)).all()


def test_rows_that_see_nothing_and_nan():
    query, key, value = inputs()
    mask = torch.zeros(37, 50, dtype=torch.bool)
    assert (scores(query, key, mask, pattern="1:2").softmax().matmul(value) == 0).all()
    key[0, 0, 5] = torch.nan
    out = scores(query, key, pattern="1:2").softmax().matmul(value)
    assert out[0, 0].isnan().all()
    assert not out[1].isnan().any()


def test_no_keys_and_no_queries():
    query, none = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 0, 16)
    assert (scores(query, none, pattern="1:2").softmax().matmul(none) == torch.zeros(1, 1, 3, 16)).all()
    assert scores(none, query, pattern="1:2").softmax().matmul(query).shape == (1, 1, 0, 16)


QUERY = torch.randn(1, 2, 8, 16)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: scores(QUERY, QUERY), saccade.InvalidArgument, r"'2:4' and dtype torch\.float32; .* '1:2' for float32"),
        (lambda: scores(QUERY.half(), QUERY.half(), pattern="4:8"), saccade.InvalidArgument, "'4:8'; .* '2:4' and '1:2'"),
        (lambda: scores(QUERY, QUERY, pattern="2:2"), saccade.InvalidArgument, "keeps every key"),
        (lambda: scores(QUERY.double(), QUERY.double(), pattern="1:2"), saccade.InvalidArgument, "bfloat16, float16 and float32"),
        (lambda: scores(QUERY, QUERY[..., :8], pattern="1:2"), saccade.InvalidArgument, "head dims of query and key differ"),
        (lambda: scores(QUERY, QUERY, pattern="1:2", backend="short"), saccade.InvalidArgument, "'short'; allowed are 'auto', 'mma_sp'"),
        (
            lambda: scores(QUERY, QUERY, pattern="1:2", block_mask=torch.ones(1, 1, 2, 1, dtype=torch.bool)),
            saccade.InvalidArgument,
            r"block_mask has shape \[1, 1, 2, 1\].*\[1, 2, 1, 1\]",
        ),
        (lambda: scores(QUERY, QUERY, pattern="1:2").matmul(QUERY), saccade.InvalidArgument, r"take \.softmax\(\) before"),
        (lambda: scores(QUERY, QUERY, pattern="1:2").softmax().softmax(), saccade.InvalidArgument, "already taken"),
        (lambda: scores(QUERY, QUERY, pattern="1:2").softmax().matmul(QUERY[:, :, :5]), saccade.InvalidArgument, r"\[1, 2, 5, 16\]"),
        (lambda: scores(QUERY, QUERY, pattern="1:2").softmax().matmul(QUERY[:, :1]), saccade.InvalidArgument, "value has 1 heads"),
        (lambda: scores(QUERY, QUERY, pattern="1:2").softmax().matmul(QUERY.half()), saccade.InvalidArgument, "must be the same"),
        (lambda: compress(torch.ones(4)), saccade.InvalidArgument, "two to four dims"),
        (lambda: NMWeights.from_torch(QUERY), saccade.InvalidArgument, "must be a SparseSemiStructuredTensorCUTLASS"),
        (
            lambda: scores(QUERY.clone().requires_grad_(), QUERY, pattern="1:2"),
            saccade.UnsupportedProblem,
            "query needs a gradient.*nm_sparse_attention",
        ),
        (
            lambda: scores(QUERY, QUERY, pattern="1:2").softmax().matmul(QUERY.clone().requires_grad_()),
            saccade.UnsupportedProblem,
            "value needs a gradient",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_kernels_say_what_they_need():
    with pytest.raises(saccade.UnsupportedProblem, match="needs a CUDA device, got cpu"):
        scores(QUERY, QUERY, pattern="1:2", backend="mma_sp")


def test_scores_that_were_overwritten_are_weights():
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in "qkv")
    scores = saccade.nm_sparse.scores(query, key, pattern="1:2")
    expected = scores.softmax()
    assert torch.equal(scores.softmax_().to_dense(), expected.to_dense())
    assert torch.equal(scores.to_dense(), expected.to_dense())
    assert torch.equal(scores.matmul(value), expected.matmul(value))
    with pytest.raises(saccade.InvalidArgument, match="softmax was already taken"):
        scores.softmax()


def test_autocast_casts_values_as_it_casts_scores():
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in "qkv")
    whole = saccade.nm_sparse.scores(query, key, pattern="1:2").softmax()
    with torch.autocast("cpu", torch.bfloat16):
        weights = saccade.nm_sparse.scores(query, key).softmax()
        assert torch.equal(weights.matmul(value), weights.matmul(value.bfloat16()))
        # made outside: their dtype counts
        assert whole.matmul(value).dtype == torch.float32
