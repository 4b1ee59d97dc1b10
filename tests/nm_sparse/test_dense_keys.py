"""Keys that are never pruned, `dense_first` and `dense_recent`: against attention written out here in float64, key by key."""

from __future__ import annotations

import math
import re

import pytest
import torch
from contracts.exact import DEVICE

import saccade
from saccade.engine.philox import dropout_keep
from saccade.nm_sparse import op
from saccade.nm_sparse.analysis import kept_by_pattern
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.bits import recompute_selection
from saccade.nm_sparse.fused.backend import MMA_SP
from saccade.nm_sparse.problem import MAX_DENSE, describe_nm_sparse
from saccade.nm_sparse.reference_launchers import REFERENCE_LAUNCHERS

BACKENDS = ["reference", "masked"]


def kept_by_hand(scores, keep, group, dense_first, dense_recent):
    """The keys that each query keeps, from the definition in words: scores `[B, H, Tq, Tk]`, -inf where invisible."""
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        row = scores[b, h, i].tolist()
        near = {j // group for j in range(i - dense_recent + 1, i + 1)} | {j // group for j in range(dense_first)}
        for g in range(-(-len(row) // group)):
            seen = [j for j in range(g * group, min(g * group + group, len(row))) if row[j] > -math.inf]
            best = sorted(seen, key=lambda j, row=row: (-row[j], j))[:keep]
            kept[b, h, i, seen if g in near else best] = True
    return kept


def expected(query, key, value, hidden, bias, keep, group, dense, survivors, dropout_p):
    """(out, lse) in float64 of a call whose invisible pairs are `hidden`."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[3])
    scores = (scores if bias is None else scores + bias).masked_fill(hidden, -math.inf)
    kept = kept_by_hand(scores.detach().cpu(), keep, group, *dense).to(scores.device)
    scores = scores.masked_fill(~kept, -math.inf)
    lse = scores.logsumexp(-1)
    # a row without a kept key: -inf - -inf would be NaN, in gradients too
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    if survivors is not None:
        weights = weights * survivors / (1 - dropout_p)
    return weights @ value, lse


T = 45
CALLS = {
    "first": {"dense_first": 4},
    "recent": {"dense_recent": 8},
    "recent-one-group": {"dense_recent": 4, "pattern": "1:4"},
    "both": {"dense_first": 8, "dense_recent": 8},
    "causal": {"dense_first": 4, "dense_recent": 8, "is_causal": True},
    "odd-group": {"dense_first": 3, "dense_recent": 9, "pattern": "1:3"},
    "causal-five": {"dense_first": 5, "dense_recent": 10, "pattern": "2:5", "is_causal": True},
    "mask": {"dense_first": 4, "dense_recent": 8, "mask": (2, 2, T, T)},
    "bias": {"dense_first": 4, "dense_recent": 4, "bias": (2, 2, T, T)},
    "bias-shared": {"dense_first": 4, "dense_recent": 6, "pattern": "1:2", "bias": (1, 2, T, 1)},
    "lengths": {"dense_first": 4, "dense_recent": 8, "lengths": (T, 17)},
    "lengths-causal-bias": {"dense_first": 4, "dense_recent": 8, "lengths": (9, T), "bias": (2, 1, T, T)},
    "blocks": {"dense_first": 4, "dense_recent": 8, "blocks": True, "q_len": 70, "kv_len": 130},
    "dropout": {"dense_first": 4, "dense_recent": 8, "dropout_p": 0.3},
    "grouped": {"dense_first": 2, "dense_recent": 6, "pattern": "1:2", "heads": 4, "is_causal": True},
    "more-queries": {"dense_first": 4, "dense_recent": 8, "q_len": 61, "kv_len": 22, "is_causal": True},
    "short-last-group": {
        "dense_recent": 3,
        "pattern": "1:3",
        "q_len": 5,
        "kv_len": 2,
    },  # query 4: keys 2 to 4, of the group of keys 0 and 1
    "more-keys": {"dense_first": 4, "dense_recent": 8, "q_len": 7, "kv_len": 61},
}


def made(name):
    """(leaves, upstream gradients, hidden pairs, arguments of the call) of one of `CALLS`, float64."""
    options = dict(CALLS[name])
    q_len, kv_len, heads = (options.pop(n, default) for n, default in (("q_len", T), ("kv_len", T), ("heads", 2)))
    shapes = ((heads, q_len), (2, kv_len), (2, kv_len))
    leaves = [torch.randn(2, *shape, 16, dtype=torch.float64, device=DEVICE, requires_grad=True) for shape in shapes]
    grown = [torch.randn(2, heads, q_len, *end, dtype=torch.float64, device=DEVICE) for end in ((16,), ())]
    hidden = torch.zeros(2, heads, q_len, kv_len, dtype=torch.bool, device=DEVICE)
    if options.get("is_causal"):
        hidden |= ~torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE).tril()
    if "mask" in options:
        mask = torch.rand(options.pop("mask"), device=DEVICE) < 0.6
        mask[:, :, 5] = False
        options["attn_mask"] = mask
        hidden |= ~mask
    if "bias" in options:
        leaves.append(torch.randn(options.pop("bias"), dtype=torch.float64, device=DEVICE, requires_grad=True))
    if "lengths" in options:
        options["lengths"] = torch.tensor(options["lengths"], device=DEVICE)
        hidden |= torch.arange(kv_len, device=DEVICE) >= options["lengths"][:, None, None, None]
    if options.pop("blocks", False):
        # the tile with the first keys is hidden from the second tile of queries, and one with recent keys from the first
        options["block_mask"] = torch.tensor([[False, True, True], [False, True, False]], device=DEVICE)
        hidden |= ~options["block_mask"].repeat_interleave(64, 0).repeat_interleave(64, 1)[:q_len, :kv_len]
    return leaves, grown, hidden, options


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients_by_hand(backend, name):
    leaves, grown, hidden, options = made(name)
    dtype = torch.float64 if backend == "reference" else torch.float32
    keep, group = map(int, options.get("pattern", "2:4").split(":"))
    dense, dropout_p = [options.get(n, 0) for n in ("dense_first", "dense_recent")], options.get("dropout_p", 0.0)
    survivors = None
    if dropout_p:
        torch.manual_seed(3)
        seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=DEVICE)
        survivors = dropout_keep(seed, dropout_p, *hidden.shape)
    bias = leaves[3] if len(leaves) > 3 else None
    wanted = expected(*leaves[:3], hidden, bias, keep, group, dense, survivors, dropout_p)
    seen = ~hidden.all(-1)  # the lse of other rows is -inf, which has no gradient

    given = [x.detach().to(dtype).requires_grad_() for x in leaves]
    if bias is not None:
        options["attn_mask"] = given[3]
    torch.manual_seed(3)
    found = saccade.nm_sparse_attention(*given[:3], enable_gqa=hidden.shape[1] != 2, return_lse=True, backend=backend, **options)
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.to(torch.promote_types(ours.dtype, torch.float32)).double(), **tolerance)
    gradients = [
        torch.autograd.grad((out * grown[0].to(out.dtype)).sum() + (lse[seen] * grown[1][seen].to(lse.dtype)).sum(), x)
        for (out, lse), x in ((found, given), (wanted, leaves))
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_everywhere_is_attention(backend):
    query, key, value = (torch.randn(1, 2, 50, 16, device=DEVICE) for _ in range(3))
    found = saccade.nm_sparse_attention(query, key, value, is_causal=True, dense_recent=52, backend=backend)
    torch.testing.assert_close(found, saccade.attention(query, key, value, is_causal=True))
    found = saccade.nm_sparse_attention(query, key, value, dense_first=52, backend=backend)
    torch.testing.assert_close(found, saccade.attention(query, key, value))
    found = saccade.nm_sparse_attention(query, key, value, dense_first=MAX_DENSE, dense_recent=MAX_DENSE, backend=backend)
    torch.testing.assert_close(found, saccade.attention(query, key, value))


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_dense_keys_may_hold_anything(backend):
    """Keys and values that a mask hides, or a bias of -inf, hold NaN among the first and the recent ones."""
    query, key, value = (torch.randn(1, 1, 24, 16, device=DEVICE) for _ in range(3))
    hidden = torch.zeros(24, dtype=torch.bool, device=DEVICE)
    hidden[[0, 2, 10, 11, 20]] = True
    poisoned = [x.masked_fill(hidden[:, None], math.nan).requires_grad_() for x in (key, value)]
    options = {"dense_first": 4, "dense_recent": 8, "backend": backend}
    out = saccade.nm_sparse_attention(query, *poisoned, ~hidden, **options)
    gradients = torch.autograd.grad(out.square().sum(), poisoned)
    assert all(x.isfinite().all() and not x[:, :, hidden].any() for x in gradients)
    by_bias = torch.zeros(24, device=DEVICE).masked_fill(hidden, -math.inf).expand(24, 24)
    assert torch.equal(out, saccade.nm_sparse_attention(query, key, value, ~hidden, **options))
    torch.testing.assert_close(out, saccade.nm_sparse_attention(query, key, value, by_bias, **options))


def test_the_rule_group_by_group():
    """2:4 at even scores keeps slots 0 and 1; query i keeps whole the groups of keys i - 3 to i."""
    found = kept_by_pattern(torch.zeros(9, 12), "2:4", dense_recent=4).int()
    assert found[3].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0]  # keys 0 to 3 are one group
    assert found[4].tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]  # keys 1 to 4 are of two
    assert found[7].tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    first = kept_by_pattern(torch.zeros(2, 12), "2:4", dense_first=8)
    assert first.int()[1].tolist() == [1] * 8 + [1, 1, 0, 0]


def test_scores_of_one_row_have_no_query():
    with pytest.raises(saccade.InvalidArgument, match=r"scores has shape \[12\]; .* it must be \[\.\., Tq, Tk\]"):
        kept_by_pattern(torch.zeros(12), "2:4", dense_recent=4)


def test_what_takes_over_where_no_kernel_compiles_selects_the_same():
    query, key, value = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(3))
    args = NMSparseArgs(query, key, value, *[None] * 4, 2, 4, 0.0, True, 0.25, 4, 8)
    ours, theirs = (found.forward(args, True) for found in (REFERENCE_LAUNCHERS, op.launchers("masked")))
    assert torch.equal(ours[2], theirs[2])
    dout = torch.randn_like(query)
    gradients = [
        found.backward(args, dout, None, *theirs, bias_grad=False) for found in (REFERENCE_LAUNCHERS, op.launchers("masked"))
    ]
    for x, y in zip((*ours[:2], *gradients[0][:3]), (*theirs[:2], *gradients[1][:3]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_recomputed_selections_know_the_dense_keys():
    leaves = [torch.randn(1, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def gradients():
        out = saccade.nm_sparse_attention(*leaves, dense_first=4, dense_recent=8, backend="masked")
        return torch.autograd.grad(out.square().sum(), leaves)

    stored = gradients()
    with recompute_selection():
        again = gradients()
    assert all(torch.equal(x, y) for x, y in zip(stored, again, strict=True))


@pytest.mark.parametrize("name", ["dense_first", "dense_recent"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "{} is 3 with a pattern whose groups have 4 keys; it must be a multiple of 4 from 0 to 1073741824"),
        (2**31, "{} is 2147483648 with a pattern whose groups have 4 keys"),
        (-4, "{} is -4; it must be a whole number of keys, at least 0"),
        (4.0, "{} is 4.0; it must be a whole number of keys"),
        (True, "{} is True; it must be a whole number of keys"),
        (None, "{} is None; it must be a whole number of keys"),
    ],
)
def test_what_is_no_number_of_dense_keys(name, given, sentence):
    x = torch.randn(1, 1, 8, 16)
    saccade.nm_sparse_attention(x, x, x, **{name: 4})  # 4.0 must not find what this left
    with pytest.raises(saccade.InvalidArgument, match=re.escape(sentence.format(name))):
        saccade.nm_sparse_attention(x, x, x, **{name: given})


def test_a_call_is_not_remembered_as_one_with_other_dense_keys():
    x = torch.randn(1, 1, 32, 16)
    found = [
        saccade.nm_sparse_attention(x, x, x, dense_first=first, dense_recent=recent) for first in (0, 4) for recent in (0, 4)
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("backend", ["auto", "masked"])
def test_numbers_that_vary_from_call_to_call_are_compiled(backend):
    def run(first, recent):
        return saccade.nm_sparse_attention(x, x, x, dense_first=first, dense_recent=recent, backend=backend)

    torch._dynamo.reset()
    x, compiled = torch.randn(1, 1, 32, 16, device=DEVICE), torch.compile(run, fullgraph=True, backend="eager")
    for n in (4, 8, 12):
        torch.testing.assert_close(compiled(n, 2 * n), run(n, 2 * n))


def test_the_sparse_tensor_cores_decline_and_say_why():
    x = torch.randn(1, 1, 64, 64)
    described = [
        describe_nm_sparse(x, x, x, None, 0.0, False, None, False, "2:4", None, None, False, False, *dense)
        for dense in ((0, 0), (4, 0), (0, 8))
    ]
    reasons = [[r for r in MMA_SP.why_not(problem) if "dense" in r] for problem in described]
    assert reasons == [
        [],
        ["prunes every group of keys, and dense_first or dense_recent exempts some; backend 'masked' takes it"],
        ["prunes every group of keys, and dense_first or dense_recent exempts some; backend 'masked' takes it"],
    ]
    assert str(described[1]).startswith("nm_sparse_attention(2:4 dense_first=4 B=1")
