"""Every bad argument of N:M sparse attention raises one sentence with what was given and what is allowed."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import saccade
from saccade.nm_sparse.args import NMSparseCall
from saccade.nm_sparse.bits import words_of
from saccade.nm_sparse.prepared import prepare_nm_sparse
from saccade.nm_sparse.problem import describe_nm_sparse, parse_pattern

X = torch.randn(2, 4, 70, 8)


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "1:16", "15:16", "3:7"])
def test_patterns(pattern):
    assert ":".join(map(str, parse_pattern(pattern))) == pattern


@pytest.mark.parametrize(
    "pattern", ["", "2", "2:", "2/4", "a:b", "2:4:8", "-1:4", "2.0:4", "²:4", "0:4", "5:4", "4:17", "0:0", None, (2, 4)]
)
def test_what_is_no_pattern(pattern):
    words = re.escape(f"pattern is {pattern!r}; it must be 'N:M' with 1 <= N < M <= 16, such as '2:4'")
    with pytest.raises(saccade.InvalidArgument, match=words):
        saccade.nm_sparse_attention(X, X, X, pattern=pattern)


def test_a_pattern_that_prunes_nothing():
    with pytest.raises(saccade.InvalidArgument, match=r"pattern is '4:4', which keeps every key; .* or use saccade\.attention"):
        saccade.nm_sparse_attention(X, X, X, pattern="4:4")


def blocks(*shape, **options):
    return {"block_mask": torch.ones(*shape, **{"dtype": torch.bool, **options})}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (blocks(70, 70), r"block_mask has shape \[70, 70\]; with tiles of 64 queries and 64 keys it must be \[2, 4, 2, 2\], B and H broadcast"),
        (blocks(2, 1), r"block_mask has shape \[2, 1\]"),
        (blocks(3, 4, 2, 2), r"block_mask has shape \[3, 4, 2, 2\]"),
        (blocks(1, 2, 4, 2, 2), r"block_mask has shape \[1, 2, 4, 2, 2\]"),
        (blocks(2), r"block_mask has shape \[2\]"),
        (blocks(2, 2, dtype=torch.float32), r"block_mask has dtype torch\.float32; it must be bool"),
        (blocks(2, 2, device="meta"), r"block_mask is on meta, query on cpu"),
        ({"block_mask": [[True]]}, r"block_mask is a list"),
        ({"query": X[0]}, r"ranks differ"),
        ({"query": X[0], "key": X[0], "value": X[0]}, r"query has shape \[4, 70, 8\]; it must be \[B, H, Tq, D\]"),
        ({"dropout_p": 1.0}, r"dropout_p is 1\.0; allowed is 0 <= dropout_p < 1"),
        ({"attn_mask": torch.ones(70, 70, dtype=torch.bool), "is_causal": True}, r"are both given"),
        ({"scale": float("nan")}, r"scale is nan"),
        ({"key": X[:, :2], "value": X[:, :2]}, r"pass enable_gqa=True"),
        ({"backend": "dense"}, r"backend is 'dense'; allowed are 'auto'.*'reference'"),
    ],
)  # fmt: skip
def test_bad_arguments(changes, sentence):
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.nm_sparse_attention(**{"query": X, "key": X, "value": X, **changes})


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        (torch.tensor([71, 3]), r"lengths range from 3 to 71; allowed is 0 to Tk = 70"),
        (torch.tensor([1]), r"lengths has shape \[1\]"),
        (torch.tensor([1.0, 2.0]), r"lengths has dtype torch.float32"),
    ],
    ids=["value", "shape", "dtype"],
)
def test_bad_lengths(lengths, sentence):
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.nm_sparse_attention(X, X, X, lengths=lengths)


def test_padding_may_hold_anything():
    """With a mask and without, causal and not: the same as the real keys alone, and no gradient for the padding."""
    lengths = torch.tensor([70, 41])
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.rand(2, 1, 70, 70) < 0.8}, {"attn_mask": torch.randn(70, 70)}):
        key, value = (torch.randn(X.shape) for _ in range(2))
        with torch.no_grad():
            key[1, :, 41:], value[1, :, 41:] = float("nan"), float("inf")
        leaves = [key.requires_grad_(), value.requires_grad_()]
        out = saccade.nm_sparse_attention(X, *leaves, lengths=lengths, **options)
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        cut = {name: x[..., :41] if name == "attn_mask" else x for name, x in options.items()}
        alone = saccade.nm_sparse_attention(
            X[1:],
            key[1:, :, :41],
            value[1:, :, :41],
            **{n: x[1:] if n == "attn_mask" and x.dim() == 4 else x for n, x in cut.items()},
        )
        torch.testing.assert_close(out[1:], alone)
        assert all(x.isfinite().all() and not x[1, :, 41:].any() for x in gradients)


@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2), (4, 2, 2), (2, 4, 2, 2), (2, 1, 2, 2)])
def test_block_masks_broadcast(shape):
    out = saccade.nm_sparse_attention(X, X, X, **blocks(*shape), backend="reference")
    assert torch.equal(out, saccade.nm_sparse_attention(X, X, X, backend="reference"))


def test_takes_the_place_of_attention():
    ours = list(inspect.signature(saccade.nm_sparse_attention).parameters.values())
    theirs = list(inspect.signature(saccade.attention).parameters.values())
    shared = [p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ours[: len(shared)] == shared
    assert [p.name for p in ours if p.kind is p.KEYWORD_ONLY] == [
        "pattern",
        "block_mask",
        "lengths",
        "dense_first",
        "dense_recent",
        "return_lse",
        "backend",
    ]


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors [1, 2, 4, 8] of float16 whose rows are not distinct pieces at multiples of 16 bytes."""
    memory = torch.zeros(2, 5, 9).half()
    return {
        "start": torch.zeros(65).half()[1:].view(1, 2, 4, 8),
        "rows": memory[None, :, :4, :8],
        "heads": torch.zeros(80).half().as_strided((1, 2, 4, 8), (80, 33, 8, 1)),
        "one row for all": torch.zeros(1, 2, 1, 8).half().expand(1, 2, 4, 8),
    }


@pytest.mark.parametrize("kind", odd_tensors())
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_prepared_call_knows_whether_rows_can_be_copied_in_pieces(kind, place):
    """A call from another start is another call, though shapes and strides agree."""
    plain = [torch.zeros(64).half().view(1, 2, 4, 8) for _ in range(3)]
    odd = [*plain[:place], odd_tensors()[kind], *plain[place + 1 :]]
    for _ in range(2):
        for tensors, aligned in ((plain, True), (odd, False)):
            call = NMSparseCall(*tensors, None, 0.0, False, None, False, "2:4", None, None, 0, 0, False, "reference")
            assert prepare_nm_sparse(call).problem.aligned is aligned
    single = odd_tensors()["rows"][:, :1, :1]
    assert describe_nm_sparse(single, single, single, None, 0.0, False, None, False, "2:4", None, None, False, False).aligned


@pytest.mark.parametrize(
    ("kv_len", "group", "words"),
    [(1, 2, 1), (32, 2, 1), (33, 2, 2), (64, 4, 2), (65, 4, 3), (24, 3, 1), (27, 3, 2), (16, 16, 1), (17, 16, 1), (33, 16, 2)],
)
def test_words_of_a_selection(kv_len, group, words):
    assert words_of(kv_len, group) == words


def test_the_description_reads_well():
    found = describe_nm_sparse(X, X, X, None, 0.1, True, None, False, "1:2", blocks(2, 2)["block_mask"], None, True, False)
    assert str(found) == "nm_sparse_attention(1:2 blocks B=2 H=4 Tq=70 Tk=70 D=8 fp32 causal dropout=0.1 lse cpu)"
