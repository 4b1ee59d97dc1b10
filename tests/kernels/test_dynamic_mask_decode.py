"""The decode kernel, token by token, against a list that is ranked again from scratch at each token."""

from __future__ import annotations

import math

import pytest
import torch

from saccade.kernels.contract import Places
from saccade.kernels.dynamic_mask import decode_launcher
from saccade.kernels.dynamic_mask.decode_launcher import Decode, DecodeConfig, pick_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = [DecodeConfig(1, 16), DecodeConfig(2, 16), DecodeConfig(4, 32)]


@pytest.fixture(params=CONFIGS, ids=lambda c: f"{c.splits}x{c.block_n}")
def config(request, monkeypatch):
    """Several splits and several tiles, which the choice for an interpreter never gives."""
    monkeypatch.setattr(decode_launcher, "pick_decode", lambda *_: request.param)
    return request.param


def empty_places(batch, kv_heads, keep, dim, dtype=torch.float32):
    """Places that nobody has used hold garbage, though no NaN: the products see them with weight 0."""
    return Places(
        *(torch.full((batch, kv_heads, keep, dim), 1e4, dtype=dtype, device=DEVICE) for _ in "kv"),
        torch.full((batch, kv_heads, keep), 9.0, device=DEVICE),
        torch.full((batch, kv_heads, keep), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(batch, kv_heads, dtype=torch.int64, device=DEVICE),
    )


def tokens_of(count, batch=2, heads=4, kv_heads=2, dim=16, dtype=torch.float32, ties=True):
    query = torch.randn(batch, heads, count, dim)
    key, value = (torch.randn(batch, kv_heads, count, dim) for _ in "kv")
    scores = torch.randn(batch, kv_heads, count)
    scores = scores.round() * 0.5 if ties else scores  # -0.0 among them
    return [*(x.to(DEVICE, dtype) for x in (query, key, value)), scores.to(DEVICE)]


def expected(tensors, b, h, last, keep, scale, add_scores=True, real=None):
    """(out, lse, kept positions) of one query head at token `last`, in float64; positions count real tokens."""
    query, key, value, scores = (x.double().cpu() for x in tensors)
    g = h // (query.shape[1] // key.shape[1])
    seen = [j for j in range(last + 1) if real is None or real[b, j]]
    kept = sorted(sorted(seen, key=lambda j: (scores[b, g, j].item(), j))[-keep:])
    logits = scale * key[b, g, kept] @ query[b, h, last] + (scores[b, g, kept] if add_scores else 0)
    return logits.softmax(0) @ value[b, g, kept], logits.logsumexp(0), [seen.index(j) for j in kept]


def run(tensors, places, *, step=1, lengths=None, scale=0.3, add_scores=True):
    """(out, lse) of all tokens, `step` at a time."""
    call, found = None, []
    for i in range(0, tensors[0].shape[2], step):
        new = [x[:, :, i : i + step] for x in tensors]
        given = None if lengths is None else lengths[:, i // step].contiguous()
        call = call or Decode(*new, given, places, scale, add_scores, True)
        found.append(call(*new, given, places))
    return [torch.cat(pieces, dim=2) for pieces in zip(*found, strict=True)]


def compare(tensors, places, found, keep, tolerance=1e-5, **options):
    out, lse = found
    options.setdefault("scale", 0.3)
    real = options.get("real")
    batch, heads, count, _ = out.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(count):
                if real is not None and not real[b, i]:
                    continue
                want, log_sum, _ = expected(tensors, b, h, i, keep, **options)
                torch.testing.assert_close(out[b, h, i].double().cpu(), want, rtol=tolerance, atol=tolerance)
                assert lse[b, h, i].item() == pytest.approx(log_sum.item(), abs=10 * tolerance)
    group = heads // places.key.shape[1]
    for b in range(batch):
        for g in range(places.key.shape[1]):
            *_, kept = expected(tensors, b, g * group, count - 1, keep, **options)
            assert sorted(p for p in places.position[b, g].tolist() if p >= 0) == kept


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("keep", [1, 2, 37, 64])
def test_token_by_token(config, keep, ties):
    tensors = tokens_of(90, ties=ties)
    places = empty_places(2, 2, keep, 16)
    compare(tensors, places, run(tensors, places), keep)
    assert places.seen.tolist() == [[90, 90], [90, 90]]


@pytest.mark.parametrize("score", [0.0, -3.0, 1e30])
def test_equal_scores_are_a_sliding_window(config, score):
    tensors = tokens_of(40, heads=2)
    tensors[3].fill_(score)
    places = empty_places(2, 2, 11, 16)
    compare(tensors, places, run(tensors, places, add_scores=False), 11, add_scores=False)
    assert sorted(places.position[1, 1].tolist()) == list(range(29, 40))


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
    tensors = tokens_of(24, batch=1, heads=heads, kv_heads=kv_heads, dim=dim)
    places = empty_places(1, kv_heads, 19, dim)
    compare(tensors, places, run(tensors, places), 19)


def test_half_precision(config):
    tensors = tokens_of(50, dtype=torch.float16)
    places = empty_places(2, 2, 33, 16, torch.float16)
    compare(tensors, places, run(tensors, places), 33, tolerance=3e-3)


@pytest.mark.parametrize("add_scores", [True, False])
@pytest.mark.parametrize("step", [2, 5, 8])
def test_several_tokens_at_once(config, step, add_scores):
    tensors = tokens_of(40)
    places = empty_places(2, 2, 18, 16)
    compare(tensors, places, run(tensors, places, step=step, add_scores=add_scores), 18, add_scores=add_scores)


def test_padding_is_not_kept(config):
    """Rows end at different tokens of each call; what lies behind may hold anything."""
    calls, step, keep = 14, 3, 9
    tensors = tokens_of(calls * step)
    lengths = torch.randint(0, step + 1, (2, calls), dtype=torch.int32, device=DEVICE)
    lengths[:, 0] = torch.tensor([step, 1])
    real = (torch.arange(step, device=DEVICE) < lengths[..., None]).flatten(1)
    dirty = [*tensors[:3], tensors[3].clone()]
    for x in dirty[1:]:
        x.transpose(1, 2)[~real] = float("nan")
    places = empty_places(2, 2, keep, 16)
    compare(tensors, places, run(dirty, places, step=step, lengths=lengths), keep, real=real)
    assert places.seen.tolist() == [[n] * 2 for n in real.sum(1).tolist()]
    assert not any(x.isnan().any() for x in places[:3])


def test_strides_of_the_new_tokens(config):
    tensors = tokens_of(30, dim=16)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]  # as `[B, T, H, D]` in memory
    found = []
    for source in (tensors, views):
        places = empty_places(2, 2, 12, 16)
        found.append(run(source, places, step=3))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_row_that_keeps_nothing():
    tensors = tokens_of(1)
    places = empty_places(2, 2, 4, 16)
    lengths = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    out, lse = run(tensors, places, lengths=lengths)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert (lse[1] > -math.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 4])
def test_hundreds_of_steps(monkeypatch, splits):
    monkeypatch.setattr(decode_launcher, "pick_decode", lambda *_: DecodeConfig(splits, 16))
    tensors = tokens_of(600, batch=1, heads=1, kv_heads=1, dim=4)
    places = empty_places(1, 1, 50, 4)
    compare(tensors, places, run(tensors, places), 50)


def test_the_choice_of_splits():
    assert pick_decode(8, 1024, 256, 132) == DecodeConfig(16, 64)
    assert pick_decode(8, 2048, 256, 132) == DecodeConfig(16, 64)
    assert pick_decode(2, 1024, 256, 132) == DecodeConfig(16, 64)  # no more than there are tiles
    assert pick_decode(512, 1024, 256, 132) == DecodeConfig(1, 64)
    assert pick_decode(1, 10**6, 1024, 132) == DecodeConfig(32, 16)
    assert pick_decode(1, 1, 32, 132).splits == 1
