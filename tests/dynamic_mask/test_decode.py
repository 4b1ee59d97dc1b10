"""The decode kernel, token by token, against a list that is ranked again from scratch at each token."""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from saccade.dynamic_mask.args import Places
from saccade.dynamic_mask.decode import launcher as decode_launcher
from saccade.dynamic_mask.decode.launcher import Decode, DecodeConfig, pick_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cpu" else 1e-4  # of float32
CONFIGS = [DecodeConfig(1, 16), DecodeConfig(4, 16)]


@pytest.fixture(params=CONFIGS, ids=lambda c: f"{c.splits}x{c.block_n}")
def config(request, monkeypatch):
    """Force several splits and several tiles, which are never chosen for the interpreter."""
    monkeypatch.setattr(decode_launcher, "pick_decode", lambda *_: request.param)
    return request.param


def empty_places(batch, kv_heads, keep, dim, dtype=torch.float32):
    """Unused places hold NaN, none of which may be seen."""
    return Places(
        *(torch.full((batch, kv_heads, keep, dim), float("nan"), dtype=dtype, device=DEVICE) for _ in "kv"),
        torch.full((batch, kv_heads, keep), float("nan"), device=DEVICE),
        torch.full((batch, kv_heads, keep), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(batch, kv_heads, dtype=torch.int64, device=DEVICE),
    )


def tokens_of(count, batch=1, heads=2, kv_heads=1, dim=16, dtype=torch.float32, ties=True):
    query = torch.randn(batch, heads, count, dim)
    key, value = (torch.randn(batch, kv_heads, count, dim) for _ in "kv")
    scores = torch.randn(batch, kv_heads, count)
    scores = scores.round() * 0.5 if ties else scores  # -0.0 among them
    return [*(x.to(DEVICE, dtype) for x in (query, key, value)), scores.to(DEVICE)]


def expected(tensors, b, keep, scale, add_scores, real, rule):
    """(indices of the real tokens of a row, out and lse over the full history of those), by the float64 reference."""
    index = torch.arange(tensors[0].shape[2]) if real is None else real[b].nonzero()[:, 0].cpu()
    row = [x[b : b + 1].cpu()[:, :, index] for x in tensors]
    out, lse = saccade.dynamic_mask_attention(
        *(x.double() for x in row[:3]), row[3], keep=keep, scale=scale, add_scores=add_scores, enable_gqa=True, return_lse=True,
        backend="reference", **rule,
    )  # fmt: skip
    return index, out[0], lse[0]


def run(tensors, places, *, step=1, lengths=None, scale=0.3, add_scores=True, **rule):
    """(out, lse) of all tokens, `step` at a time."""
    call, found = None, []
    for i in range(0, tensors[0].shape[2], step):
        new = [x[:, :, i : i + step] for x in tensors]
        given = None if lengths is None else lengths[:, i // step].contiguous()
        call = call or Decode(*new, given, places, scale, add_scores, True, **rule)
        found.append(call(*new, given, places))
    return [torch.cat(pieces, dim=2) for pieces in zip(*found, strict=True)]


def held_of(scores, keep, sinks=0, window=0):
    """The tokens that later ones may need: the first, the newest, and of the others as many of the best as there is room for."""
    newest = len(scores) - 1
    by_worth = sorted(range(len(scores)), key=lambda j: (j < sinks or j > newest - window, scores[j], j))
    return by_worth[-keep - sinks - window :]


def compare(tensors, places, found, keep, tolerance=TOLERANCE, scale=0.3, add_scores=True, real=None, **rule):
    """Outputs token for token, and the places at the end, are those of the full history."""
    out, lse = (x.double().cpu() for x in found)
    for b in range(out.shape[0]):
        index, want, log_sum = expected(tensors, b, keep, scale, add_scores, real, rule)
        torch.testing.assert_close(out[b][:, index], want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[b][:, index], log_sum.double(), rtol=tolerance, atol=10 * tolerance)
        for g, scores in enumerate(tensors[3][b].cpu()[:, index].tolist()):
            kept = held_of(scores, keep, **rule)
            held = places.position[b, g].cpu()
            at = held.argsort()[(held < 0).sum() :]
            assert held[at].tolist() == sorted(kept)
            for entries, source in zip(places, tensors[1:], strict=False):
                assert torch.equal(entries[b, g].cpu()[at], source[b, g].cpu()[index[sorted(kept)]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("keep", [1, 17, 64])
def test_token_by_token(config, keep, ties):
    tensors = tokens_of(40, ties=ties)
    places = empty_places(1, 1, keep, 16)
    compare(tensors, places, run(tensors, places), keep)
    assert places.seen.tolist() == [[40]]


RULES = [
    ({"sinks": 3}, "rising"), ({"window": 5}, "falling"), ({"sinks": 2, "window": 6}, "ties"), ({"sinks": 20, "window": 9}, "equal"),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rule", "kind"), RULES, ids=str)
def test_sinks_and_a_window(config, rule, kind):
    """Beside sinks and a window the entries hold more than the `keep` best, and these must get no weight."""
    tensors, keep = tokens_of(24, ties=kind == "ties"), 4
    along = torch.arange(24, device=DEVICE, dtype=torch.float32)
    if kind != "ties":
        tensors[3][0, 0] = {"rising": along / 8, "falling": -along / 8, "equal": along * 0}[kind]
    places = empty_places(1, 1, keep + sum(rule.values()), 16)
    compare(tensors, places, run(tensors, places, **rule), keep, **rule)


def test_sinks_and_a_window_of_padded_rows(config):
    calls, step, keep, rule = 7, 3, 3, {"sinks": 2, "window": 4}
    tensors = tokens_of(calls * step, batch=2, heads=4, kv_heads=2)
    lengths = torch.randint(0, step + 1, (2, calls), dtype=torch.int32, device=DEVICE)
    real = (torch.arange(step, device=DEVICE) < lengths[..., None]).flatten(1)
    dirty = [*tensors[:3], tensors[3].clone()]
    for x in dirty[1:]:
        x.transpose(1, 2)[~real] = float("nan")
    places = empty_places(2, 2, 9, 16)
    compare(tensors, places, run(dirty, places, step=step, lengths=lengths, **rule), keep, real=real, **rule)
    assert places.seen.tolist() == [[n] * 2 for n in real.sum(1).tolist()]


@pytest.mark.parametrize("score", [0.0, -3.0, 1e30])
def test_equal_scores_are_a_sliding_window(config, score):
    tensors = tokens_of(20)
    tensors[3].fill_(score)
    places = empty_places(1, 1, 11, 16)
    compare(tensors, places, run(tensors, places, add_scores=False), 11, add_scores=False)
    assert sorted(places.position[0, 0].tolist()) == list(range(9, 20))


def test_minus_zero_ties_with_zero(config):
    tensors = tokens_of(6, batch=1, heads=1, kv_heads=1)
    tensors[3][0, 0] = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, -0.0])
    places = empty_places(1, 1, 2, 16)
    compare(tensors, places, run(tensors, places), 2)
    assert sorted(places.position[0, 0].tolist()) == [4, 5]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (3, 1, 20), (6, 2, 24), (2, 2, 80), (20, 1, 16), (2, 1, 256)], ids=str
)
def test_heads_and_dims(config, heads, kv_heads, dim):
    tensors = tokens_of(12, batch=1, heads=heads, kv_heads=kv_heads, dim=dim)
    places = empty_places(1, kv_heads, 9, dim)
    compare(tensors, places, run(tensors, places), 9)


def test_half_precision(config):
    tensors = tokens_of(25, dtype=torch.float16)
    places = empty_places(1, 1, 20, 16, torch.float16)
    compare(tensors, places, run(tensors, places), 20, tolerance=3e-3)


@pytest.mark.parametrize("add_scores", [True, False])
@pytest.mark.parametrize("step", [5])
def test_several_tokens_at_once(config, step, add_scores):
    tensors = tokens_of(40)
    places = empty_places(1, 1, 18, 16)
    compare(tensors, places, run(tensors, places, step=step, add_scores=add_scores), 18, add_scores=add_scores)


def test_padding_is_not_kept(config):
    """Rows end at different tokens of each call; what follows may hold anything."""
    calls, step, keep = 7, 3, 9
    tensors = tokens_of(calls * step, batch=2, heads=4, kv_heads=2)
    lengths = torch.randint(0, step + 1, (2, calls), dtype=torch.int32, device=DEVICE)
    lengths[:, 0] = torch.tensor([step, 1])
    real = (torch.arange(step, device=DEVICE) < lengths[..., None]).flatten(1)
    dirty = [*tensors[:3], tensors[3].clone()]
    for x in dirty[1:]:
        x.transpose(1, 2)[~real] = float("nan")
    places = empty_places(2, 2, keep, 16)
    compare(tensors, places, run(dirty, places, step=step, lengths=lengths), keep, real=real)
    assert places.seen.tolist() == [[n] * 2 for n in real.sum(1).tolist()]
    assert not any(x[..., :1, :].isnan().any() for x in places[:2])  # the first place, used first


def test_strides_of_the_new_tokens(config):
    tensors = tokens_of(9, batch=2, heads=4, kv_heads=2)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]  # as `[B, T, H, D]` in memory
    found = []
    for source in (tensors, views):
        places = empty_places(2, 2, 5, 16)
        found.append(run(source, places, step=3))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_row_that_keeps_nothing():
    tensors = tokens_of(1, batch=2, heads=4, kv_heads=2)
    places = empty_places(2, 2, 4, 16)
    lengths = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    out, lse = run(tensors, places, lengths=lengths)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert (lse[1] > -math.inf).all()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4])
def test_hundreds_of_steps(monkeypatch, splits):
    monkeypatch.setattr(decode_launcher, "pick_decode", lambda *_: DecodeConfig(splits, 16))
    tensors = tokens_of(300, batch=1, heads=1, dim=4)
    places = empty_places(1, 1, 50, 4)
    compare(tensors, places, run(tensors, places), 50)


def test_the_choice_of_splits():
    assert pick_decode(8, 1024, 256, 132) == DecodeConfig(16, 64)
    assert pick_decode(8, 2048, 256, 132) == DecodeConfig(16, 64)
    assert pick_decode(2, 1024, 256, 132) == DecodeConfig(16, 64)  # no more than there are tiles
    assert pick_decode(512, 1024, 256, 132) == DecodeConfig(1, 64)
    assert pick_decode(1, 10**6, 1024, 132) == DecodeConfig(32, 16)
    assert pick_decode(1, 1, 32, 132).splits == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "keep"), [(1, 32, 8, 1024), (3, 8, 2, 1000), (40, 8, 8, 100)])
def test_many_programs_a_head_in_bfloat16(batch, heads, kv_heads, keep):
    """The library's own split of the places: programs of a head run concurrently, and none may see what another writes."""
    count, steps = keep + 50, 200
    tensors = tokens_of(count + steps, batch, heads, kv_heads, 128, torch.bfloat16)
    kernel, plain = (saccade.DynamicMaskCache(keep) for _ in range(2))
    for cache in (kernel, plain):
        cache.attend(*(x[:, :, :count] for x in tensors), enable_gqa=True)
    for i in range(count, count + steps):
        new = [x[:, :, i : i + 1] for x in tensors]
        out = kernel.attend(*new, enable_gqa=True, backend="decode")
        torch.testing.assert_close(out, plain.attend(*new, enable_gqa=True, backend="gather_torch"), rtol=2e-2, atol=2e-2)
    held, wanted = kernel._ordered(*tensors[1:3]), plain._ordered(*tensors[1:3])
    assert all(torch.equal(a, b) for a, b in zip(held.tensors(), wanted.tensors(), strict=True))
