"""Decoding with `keep` entries equals attention over the whole history, token for token."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import sys
import weakref

import pytest
import torch
from contracts.dynamic_mask import IN_CPP

import saccade

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {"rtol": 1e-5, "atol": 1e-5} if DEVICE == "cpu" else {"rtol": 1e-4, "atol": 1e-4}


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
    keep, tokens = 32, 1500
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


@pytest.mark.parametrize("backend", ["gather", IN_CPP, "gather_torch", "reference", "decode"])
def test_padding_of_a_prompt_may_hold_anything(backend):
    count = 8 if backend == "decode" else 12
    tensors = narrow(history(12)) if backend in ("decode", "gather", "gather_cpp") else history(12)
    tensors = [x[:, :, :count] for x in tensors]
    dirty = [x.clone() for x in tensors]
    for x in dirty:
        x[1, :, 5:] = float("nan")
    lengths = torch.tensor([count, 5], device=tensors[0].device)
    caches, prompts = [saccade.DynamicMaskCache(4) for _ in range(2)], []
    for cache, source in zip(caches, (tensors, dirty), strict=True):
        prompts.append(cache.attend(*source, lengths=lengths, enable_gqa=True, backend=backend))
    for row, length in enumerate(lengths.tolist()):  # the outputs of the prompt's own tokens
        assert torch.equal(prompts[0][row, :, :length], prompts[1][row, :, :length])
        assert prompts[0][row, :, :length].isfinite().all()
    step = [x[:, :, :1] for x in tensors]
    clean, other = (cache.attend(*step, enable_gqa=True) for cache in caches)
    assert torch.equal(clean, other)


def test_rows_can_be_taken():
    tensors = history(20)
    cache, rows = saccade.DynamicMaskCache(5), torch.tensor([1, 1, 0])
    cache.take_rows(rows)  # an empty cache has nothing to take
    cache.attend(*(x[:, :, :19] for x in tensors), lengths=torch.tensor([19, 7]), enable_gqa=True)
    other = [x[:, :, 19:] for x in tensors]
    expected = cache.attend(*other, enable_gqa=True)
    again = saccade.DynamicMaskCache(5)
    again.attend(*(x[:, :, :19] for x in tensors), lengths=torch.tensor([19, 7]), enable_gqa=True)
    again.take_rows(rows)
    assert again.seen.tolist() == [7, 7, 19]
    torch.testing.assert_close(again.attend(*(x[rows] for x in other), enable_gqa=True), expected[rows])


@pytest.mark.parametrize("decodes", [False, True])
def test_rows_that_are_no_rows(decodes):
    tensors = narrow(history(3))
    cache = saccade.DynamicMaskCache(5)
    step = functools.partial(cache.attend, *(x[:, :, :1] for x in tensors), enable_gqa=True)
    step(backend="decode" if decodes else "gather_torch")
    lists = ([0.5], ["0"], [[0], [0, 1]], [2**70])
    for rows in (torch.tensor([[0, 1]]), torch.tensor(1), torch.tensor([0.0]), torch.tensor([True, False]), "01", None, *lists):
        with pytest.raises(
            saccade.InvalidArgument, match=r"^rows is .*; it must be an int32 or int64 torch\.Tensor of shape \[n\]$"
        ):
            cache.take_rows(rows)
    if DEVICE == "cpu":
        for rows in (torch.tensor([0, 2]), torch.tensor([-1])):
            with pytest.raises(saccade.InvalidArgument, match="the cache holds rows 0 to 1"):
                cache.take_rows(rows)
    cache.take_rows([1, 0])
    cache.take_rows(torch.tensor([1, 0], dtype=torch.int32))
    assert cache.seen.tolist() == [1, 1]
    cache.take_rows([])
    assert cache.seen.tolist() == []
    out = cache.attend(*(x[:0, :, :1] for x in tensors), enable_gqa=True, backend="decode" if decodes else "auto")
    assert out.shape == (0, 4, 1, 8)


@pytest.mark.parametrize("which", ["key", "value", "key_scores"])
def test_what_a_cache_holds_gets_no_gradient(which):
    names = ("query", "key", "value", "key_scores")
    tensors = dict(zip(names, history(3), strict=True))
    tensors[which].requires_grad_()
    cache = saccade.DynamicMaskCache(4)
    with pytest.raises(saccade.UnsupportedProblem, match="the contents of a cache get none"):
        cache.attend(**tensors, enable_gqa=True)
    with torch.no_grad():
        assert cache.attend(**tensors, enable_gqa=True).shape == (2, 4, 3, 8)


@pytest.mark.parametrize("keep", [sys.maxsize, 2**70])
def test_any_number_to_keep(keep):
    tensors = history(9)
    cache = saccade.DynamicMaskCache(keep)
    parts = [cache.attend(*(x[:, :, i : i + 3] for x in tensors), enable_gqa=True) for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(parts, 2), whole(*tensors, 9))


@pytest.mark.parametrize("rule", [{"sinks": 2**70}, {"window": 2**70}], ids=str)
def test_any_number_to_keep_always(rule):
    tensors = history(9)
    cache = saccade.DynamicMaskCache(1, **rule)
    parts = [cache.attend(*(x[:, :, i : i + 3] for x in tensors), enable_gqa=True) for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(parts, 2), whole(*tensors, 9))


@pytest.mark.parametrize("options", [{}, {"commit": False}, {"padding_side": "left"}], ids=str)
def test_what_is_no_tensor_and_lengths_of_another_shape_are_refused(options):
    cache, tensors = saccade.DynamicMaskCache(4), history(3)
    for lengths, sentence in (
        ((1, 2), "lengths is a tuple; it must be an integer"),
        (torch.tensor([2]), r"lengths has shape \[1\]; it must be \[B\]"),
        (torch.tensor([1.0, 2.0]), r"lengths has dtype torch\.float32"),
    ):
        with pytest.raises(saccade.InvalidArgument, match=sentence):
            cache.attend(*tensors, lengths=lengths, enable_gqa=True, **options)
    with pytest.raises(saccade.InvalidArgument, match=r"value is NoneType; it must be a torch\.Tensor of rank 4"):
        cache.attend(*tensors[:2], None, tensors[3], lengths=torch.tensor([1, 2]), enable_gqa=True, **options)


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


def narrow(tensors):
    """float32 where the decode kernel runs: on a GPU, or interpreted."""
    return [x.float().to(DEVICE) for x in tensors]


def decoded(tensors, prompt, keep, steps, **options):
    """The cache, and the outputs of the tokens after `prompt`, `steps` at a time, by the kernel."""
    cache, found = saccade.DynamicMaskCache(keep), []
    if prompt:
        cache.attend(*(x[:, :, :prompt] for x in tensors), enable_gqa=True, **options)
    for i in range(prompt, tensors[0].shape[2], steps):
        found.append(cache.attend(*(x[:, :, i : i + steps] for x in tensors), enable_gqa=True, backend="decode", **options))
    return cache, torch.cat(found, dim=2)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("prompt", "steps", "options"), [(0, 1, {}), (15, 1, {"scale": 0.7}), (4, 3, {"add_scores": False})])
def test_the_kernel_decodes_as_the_whole_history(prompt, steps, options, ties):
    tensors, keep = narrow(history(30, ties=ties)), 7
    cache, out = decoded(tensors, prompt, keep, steps, **options)
    torch.testing.assert_close(out, whole(*tensors, keep, **options)[:, :, prompt:], **CLOSE)
    assert cache.seen.tolist() == [30, 30]
    assert cache.nbytes == keep * 2 * 2 * (8 * 4 * 2 + 4 + 4)


def test_the_kernel_and_torch_take_turns():
    """Prompts in the middle of decoding: entries are first in no order, then in order, in the same memory."""
    tensors = narrow(history(70, ties=True))
    expected, cache, start, memory = whole(*tensors, 11), saccade.DynamicMaskCache(11), 0, set()
    for count, backend in (
        (3, "auto"),
        (1, "decode"),
        (20, "auto"),
        (8, "decode"),
        (1, "decode"),
        (2, "auto"),
        (34, "auto"),
        (1, "decode"),
    ):
        new = (x[:, :, start : start + count] for x in tensors)
        out = cache.attend(*new, enable_gqa=True, backend=backend)
        torch.testing.assert_close(out, expected[:, :, start : start + count], **CLOSE)
        start += count
        if start > 3:
            memory.add(tuple(x.data_ptr() for x in cache._places))
    assert start == 70
    assert len(memory) == 1


def test_the_kernel_after_prompts_of_different_lengths_and_beams():
    tensors, rows = narrow(history(24, ties=True)), torch.tensor([1, 0])
    dirty = [x.clone() for x in tensors]
    for x in dirty[1:3]:
        x[1, :, 3:12] = float("nan")
    found = []
    for source, backend in ((tensors, "auto"), (dirty, "decode")):
        cache = saccade.DynamicMaskCache(9)
        cache.attend(*(x[:, :, :12] for x in source), lengths=torch.tensor([12, 3], device=DEVICE), enable_gqa=True)
        for i in range(12, 24):
            if i == 16:
                cache.take_rows(rows)
            if i == 20:
                cache.take_rows(torch.tensor([0, 1, 0]))
            new = (x[:, :, i : i + 1][[0, 1, 0] if i >= 20 else [0, 1]] for x in source)
            lengths = torch.tensor([1, i % 2] if i < 20 else [1, 1, i % 2], device=DEVICE)
            out = cache.attend(*new, lengths=lengths, enable_gqa=True, backend=backend)
            found.append(out[lengths == 1])
        assert cache.seen.tolist() == [13, 22, 11]
    for a, b in zip(found[:12], found[12:], strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_auto_takes_the_kernel_where_it_can(monkeypatch):
    import saccade.dynamic_mask.decode.cache
    from saccade.dynamic_mask.args import DecodeLaunchers

    taken = []

    def plan(*call):
        taken.append(call[0].shape[2])
        return lambda query, *_: (query, None)

    monkeypatch.setattr(saccade.dynamic_mask.decode.cache, "load", lambda backend: DecodeLaunchers(plan))
    (backend,) = saccade.dynamic_mask.decode.cache.DECODING
    liked = dataclasses.replace(backend, prefers=lambda problem: True)
    tensors = narrow(history(9))
    # on a CPU, where only the interpreter runs it, it must be requested by name
    for candidate in (backend, liked):
        monkeypatch.setattr(saccade.dynamic_mask.decode.cache, "DECODING", (candidate,))
        cache = saccade.DynamicMaskCache(4)
        for count in (9, 8, 8, 1):
            cache.attend(*(x[:, :, :count] for x in tensors), enable_gqa=True)
        cache.attend(tensors[0][:, :, :1].requires_grad_(), *(x[:, :, :1] for x in tensors[1:]), enable_gqa=True)
        cache.attend(*(x[:, :, :1] for x in tensors), enable_gqa=True, backend="gather_torch")
    assert taken == [8, 1] * (2 if DEVICE == "cuda" else 1)  # planned once per signature


def test_what_the_kernel_declines():
    cache, tensors = saccade.DynamicMaskCache(4), narrow(history(9))
    attend = functools.partial(cache.attend, enable_gqa=True, backend="decode")
    with pytest.raises(saccade.UnsupportedProblem, match="takes at most 8 tokens at a time, got 9"):
        attend(*tensors)
    with pytest.raises(saccade.UnsupportedProblem, match="query requires a gradient"):
        attend(tensors[0][:, :, :1].requires_grad_(), *(x[:, :, :1] for x in tensors[1:]))
    with pytest.raises(saccade.UnsupportedProblem, match=r"got torch\.float64"):
        attend(*(x[:, :, :1].double() for x in tensors))
    one = [x[:, :, :1] for x in tensors]
    attend(*one)
    # a check on a GPU would wait for it at every token
    if DEVICE == "cpu":
        with pytest.raises(saccade.InvalidArgument, match="scores must be finite"):
            attend(*one[:3], one[3] * float("nan"))
    with pytest.raises(saccade.InvalidArgument, match=r"the cache holds keys of D = 8 in torch\.float32"):
        attend(*(x.half() for x in one))
    with pytest.raises(saccade.InvalidArgument, match="lengths range from 2 to 2"):
        attend(*one, lengths=torch.tensor([2, 2], device=DEVICE))
    assert cache.seen.tolist() == [1, 1]


@pytest.mark.gpu
def test_steps_in_a_cuda_graph():
    tensors = [x.cuda().bfloat16() if x.dim() == 4 else x.cuda() for x in history(64, ties=True, dim=64)]
    expected = whole(*(x.double() for x in tensors[:3]), tensors[3], 13)
    cache = saccade.DynamicMaskCache(13)
    cache.attend(*(x[:, :, :20] for x in tensors), enable_gqa=True)
    new = [x[:, :, 20:21].clone() for x in tensors]
    found = [cache.attend(*new, enable_gqa=True)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(*new, enable_gqa=True)
    for i in range(21, 64):
        for x, source in zip(new, tensors, strict=True):
            x.copy_(source[:, :, i : i + 1])
        graph.replay()
        found.append(out.clone())
    torch.testing.assert_close(torch.cat(found, dim=2).double(), expected[:, :, 20:], rtol=2e-2, atol=2e-2)
    assert cache.seen.tolist() == [64, 64]


@pytest.mark.gpu
def test_the_first_token_cannot_be_captured():
    tensors = [x.cuda().bfloat16() if x.dim() == 4 else x.cuda() for x in history(1)]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(saccade.UnsupportedProblem, match="decode one token before the capture"), torch.cuda.graph(graph):
        saccade.DynamicMaskCache(4).attend(*tensors, enable_gqa=True)


RULES = [{"sinks": 3}, {"window": 6}, {"sinks": 2, "window": 5}, {"sinks": 40, "window": 200}, {"window": 1}]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("keep", "ties", "pieces"), [(7, True, (1,) * 90), (4, False, (30, 5, 1, 1, 8, 45)), (1, True, (90,))])
def test_sinks_and_a_window(rule, keep, ties, pieces):
    tensors = history(90, ties=ties)
    expected = whole(*tensors, keep, **rule)
    cache, start = saccade.DynamicMaskCache(keep, **rule), 0
    for count in pieces:
        out = cache.attend(*(x[:, :, start : start + count] for x in tensors), enable_gqa=True)
        torch.testing.assert_close(out, expected[:, :, start : start + count])
        start += count
    most = keep + rule.get("sinks", 0) + rule.get("window", 0)
    assert cache.size == most
    assert cache.nbytes == min(most, 90) * 2 * 2 * (8 * 8 * 2 + 4 + 4)
    assert all(f"{name}={n}" in repr(cache) for name, n in rule.items())


@pytest.mark.parametrize("rule", [{"sinks": 2, "window": 5}, {"sinks": 20, "window": 40}, {"window": 1}], ids=str)
def test_the_kernel_keeps_sinks_and_a_window(rule):
    """From a prompt on, a prompt in between: outputs, and bit for bit the entries of plain torch."""
    tensors, keep = narrow(history(46, ties=True)), 4
    kernel, plain = (saccade.DynamicMaskCache(keep, **rule) for _ in range(2))
    expected = whole(*tensors, keep, **rule)
    start = 0
    for count in (20, 1, 1, 3, 12, *[1] * 9):
        new = [x[:, :, start : start + count] for x in tensors]
        out = kernel.attend(*new, enable_gqa=True, backend="decode" if count < 9 else "auto")
        torch.testing.assert_close(out, expected[:, :, start : start + count], **CLOSE)
        plain.attend(*new, enable_gqa=True, backend="gather_torch")
        start += count
        held, wanted = kernel._ordered(*tensors[1:3]), plain._ordered(*tensors[1:3])
        used = held.position[0, 0] >= 0  # in every head as many
        for ours, theirs in zip(held.tensors(), wanted.tensors(), strict=True):
            assert torch.equal(ours[:, :, used], theirs[:, :, -int(used.sum()) :])
    assert start == 46
    assert kernel._places is not None  # which only the kernel makes


def test_sinks_and_a_window_begin_with_no_token():
    tensors = history(6)
    cache = saccade.DynamicMaskCache(2, sinks=1, window=2)
    assert cache.attend(*(x[:, :, :0] for x in tensors), enable_gqa=True).shape == (2, 4, 0, 8)
    cache.attend(*(x[:, :, :0] for x in tensors), enable_gqa=True, commit=False)
    cache.commit(0)
    found = cache.attend(*tensors, enable_gqa=True)
    torch.testing.assert_close(found, whole(*tensors, 2, sinks=1, window=2))


def test_sinks_and_a_window_of_prompts_of_different_lengths():
    lengths, rule = torch.tensor([20, 6]), {"sinks": 2, "window": 4}
    tensors = history(50)
    cache = saccade.DynamicMaskCache(5, **rule)
    cache.attend(*(x[:, :, :20] for x in tensors), lengths=lengths, enable_gqa=True)
    rows = [[torch.cat((x[b : b + 1, :, : lengths[b]], x[b : b + 1, :, 20:]), dim=2) for x in tensors] for b in range(2)]
    expected = [whole(*row, 5, **rule) for row in rows]
    for i in range(30):
        out = cache.attend(*(x[:, :, 20 + i : 21 + i] for x in tensors), enable_gqa=True)
        for b in range(2):
            torch.testing.assert_close(out[b], expected[b][0, :, lengths[b] + i : lengths[b] + i + 1])


@pytest.mark.parametrize("rule", [{}, {"sinks": 2, "window": 5}], ids=str)
def test_speculative_tokens_that_are_rejected_leave_nothing_behind(rule):
    """Drafts of four tokens of which each row accepts some; the rejected ones are replaced by the true ones in the next call."""
    torch.manual_seed(3)
    tensors = history(60, ties=True)
    expected = whole(*tensors, 6, **rule)
    cache, at = saccade.DynamicMaskCache(6, **rule), torch.tensor([10, 10])
    cache.attend(*(x[:, :, :10] for x in tensors), enable_gqa=True)
    while int(at.max()) + 4 <= 60:
        draft = [torch.stack([x[b, :, at[b] : at[b] + 4] for b in range(2)]) for x in tensors]
        accepted = torch.randint(0, 5, (2,))
        for b in range(2):  # what is rejected is not what comes later
            for x in draft[1:]:
                x[b, :, accepted[b] :] = torch.randn_like(x[b, :, accepted[b] :])
        before = cache.seen
        out = cache.attend(*draft, enable_gqa=True, commit=False)
        assert torch.equal(cache.seen, before)
        for b in range(2):
            torch.testing.assert_close(out[b, :, : accepted[b]], expected[b, :, at[b] : at[b] + accepted[b]])
        cache.commit(accepted)
        at = at + accepted
        assert torch.equal(cache.seen, at)


def test_what_is_not_committed_is_forgotten():
    tensors = history(12)
    cache = saccade.DynamicMaskCache(4)
    first, rest = [x[:, :, :6] for x in tensors], [x[:, :, 6:] for x in tensors]
    cache.attend(*first, enable_gqa=True)
    cache.attend(*rest, enable_gqa=True, commit=False)
    out = cache.attend(*rest, enable_gqa=True)
    torch.testing.assert_close(out, whole(*tensors, 4)[:, :, 6:])
    with pytest.raises(saccade.InvalidArgument, match="no call waits to be committed"):
        cache.commit(1)
    cache.attend(*rest, enable_gqa=True, commit=False)
    for accepted, said in (
        (-1, "accepted is -1"), (7, "accepted ranges from 7 to 7; the call had 6 tokens"), (torch.tensor([1]), r"\[1\]; it must be int32 or int64"),
        (torch.tensor([1.0, 2.0]), "torch.float32"), (torch.tensor([-1, 2]), "from -1 to 2"),
    ):  # fmt: skip
        with pytest.raises(saccade.InvalidArgument, match=said):
            cache.commit(accepted)
    cache.commit(2)
    assert cache.seen.tolist() == [14, 14]
    with pytest.raises(saccade.InvalidArgument, match="commit is"):
        cache.attend(*rest, enable_gqa=True, commit="yes")
    with pytest.raises(saccade.UnsupportedProblem, match="commit=False"):
        cache.attend(*rest, enable_gqa=True, commit=False, backend="decode")


@pytest.mark.parametrize("backend", ["auto", "decode"])
def test_prompts_padded_on_the_left(backend):
    tensors = narrow(history(7)) if backend == "decode" else history(7)
    lengths = torch.tensor([7, 3], device=tensors[0].device)
    right, left = (saccade.DynamicMaskCache(4) for _ in range(2))
    padded = [x.clone() for x in tensors]
    for x in padded:
        x[1, :, 4:], x[1, :, :4] = x[1, :, :3].clone(), float("nan")
    expected = right.attend(*tensors, lengths=lengths, enable_gqa=True, backend=backend)
    found = left.attend(*padded, lengths=lengths, enable_gqa=True, backend=backend, padding_side="left")
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1, :, 4:], expected[1, :, :3])
    step = [x[:, :, :1] for x in tensors]
    assert torch.equal(*(cache.attend(*step, enable_gqa=True, backend=backend) for cache in (right, left)))
    with pytest.raises(saccade.InvalidArgument, match="padding_side is 'both'"):
        left.attend(*step, enable_gqa=True, padding_side="both")


@pytest.mark.parametrize("backend", ["auto", "decode"])
def test_rows_that_are_reset_begin_anew(backend):
    tensors = narrow(history(30)) if backend == "decode" else history(30)
    cache = saccade.DynamicMaskCache(5, sinks=2)
    cache.reset()  # nothing to empty
    other = [x.flip(2) for x in tensors]
    for i in range(9):
        cache.attend(*(x[:, :, i : i + 1] for x in other), enable_gqa=True, backend=backend)
    cache.reset([1])
    assert cache.seen.tolist() == [9, 0]
    rule = {"sinks": 2}
    rows = (
        torch.cat((other[0][:1, :, :9], tensors[0][:1]), 2),
        *(torch.cat((o[:1, :, :9], x[:1]), 2) for o, x in zip(other[1:], tensors[1:], strict=True)),
    )
    expected = whole(*rows, 5, **rule)[:, :, 9:], whole(*(x[1:] for x in tensors), 5, **rule)
    for i in range(30):
        out = cache.attend(*(x[:, :, i : i + 1] for x in tensors), enable_gqa=True, backend=backend)
        for b in range(2):
            torch.testing.assert_close(out[b : b + 1], expected[b][:, :, i : i + 1], **CLOSE)
    cache.reset()
    assert cache.seen.tolist() == [0, 0]
    out = cache.attend(*(x[:, :, :1] for x in tensors), enable_gqa=True, backend=backend)
    torch.testing.assert_close(out, tensors[2][:, :, :1].repeat_interleave(2, 1), **CLOSE)
    if DEVICE == "cpu":
        with pytest.raises(saccade.InvalidArgument, match="rows range from 2 to 2"):
            cache.reset(torch.tensor([2]))


@pytest.mark.parametrize("backend", ["auto", "decode"])
def test_the_count_of_tokens_is_a_copy(backend):
    cache, tensors = saccade.DynamicMaskCache(4), narrow(history(3))
    cache.attend(*tensors, enable_gqa=True, backend=backend)
    counted = cache.seen
    cache.reset()
    assert counted.tolist() == [3, 3]
    counted.fill_(70)
    assert cache.seen.tolist() == [0, 0]


@pytest.mark.parametrize("backend", ["auto", "decode"])
def test_lengths_of_another_dtype_are_refused_later_too(backend):
    cache, x, lengths = (
        saccade.DynamicMaskCache(keep=4),
        torch.randn(2, 2, 3, 8, device=DEVICE),
        torch.tensor([2, 3], device=DEVICE),
    )
    cache.attend(x, x, x, x[..., 0], lengths=lengths, backend=backend)
    for wrong in (lengths + 0.7, lengths > 2):
        with pytest.raises(saccade.InvalidArgument, match="lengths has dtype"):
            cache.attend(x, x, x, x[..., 0], lengths=wrong, backend=backend)
    assert cache.seen.tolist() == [2, 3]


def test_a_planned_call_is_not_made_while_kernels_are_disabled():
    cache, x = saccade.DynamicMaskCache(keep=4), torch.randn(2, 2, 1, 16, device=DEVICE)
    step = functools.partial(cache.attend, x, x, x, x[..., 0], backend="decode")
    step()
    with saccade.disabled(), pytest.raises(saccade.UnsupportedProblem, match="saccade is disabled"):
        step()
    step()
    assert cache.seen.tolist() == [2, 2]


def test_a_cache_without_values_is_shown():
    cache, x = saccade.DynamicMaskCache(keep=4), torch.empty(2, 2, 1, 16, device="meta")
    cache.attend(x, x, x, x[..., 0])
    assert repr(cache) == "DynamicMaskCache(keep=4, seen=unknown)"


def test_tokens_that_were_not_committed_are_let_go():
    cache, x = saccade.DynamicMaskCache(keep=4), torch.randn(2, 2, 1000, 8)
    memory = weakref.ref(x.untyped_storage())
    cache.attend(x, x, x, x[..., 0], commit=False)
    cache.reset()
    del x
    assert memory() is None


@pytest.mark.parametrize(("batch", "count"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths_of_no_rows_or_no_tokens(batch, count, side):
    cache = saccade.DynamicMaskCache(keep=4)
    lengths = torch.zeros(batch, dtype=torch.int64)
    x = torch.randn(batch, 2, count, 8)
    assert cache.attend(x, x, x, x[..., 0], lengths=lengths, padding_side=side).shape == x.shape
    assert cache.seen.tolist() == [0] * batch


@pytest.mark.parametrize("wrong", [{"backend": "none"}, {"scale": "1"}, {"scores": float("nan")}], ids=str)
def test_a_call_that_is_refused_says_nothing_of_the_batch(wrong):
    cache, (query, key, value, scores) = saccade.DynamicMaskCache(4), history(3)
    with pytest.raises(saccade.InvalidArgument):
        cache.attend(query, key, value, scores + wrong.pop("scores", 0.0), enable_gqa=True, **wrong)
    assert cache.seen is None
    tensors = history(3, batch=3, dim=16)
    torch.testing.assert_close(cache.attend(*tensors, enable_gqa=True), whole(*tensors, 4))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_cache_plans_its_own_launches(copied):
    """A launch as Triton makes it is a function that cannot be pickled, and a copy needs a workspace of its own."""
    cache, tensors = saccade.DynamicMaskCache(4), narrow(history(6))
    pieces = [[x[:, :, i : i + 1] for x in tensors] for i in range(6)]
    expected = whole(*tensors, 4)
    for piece in pieces[:3]:
        cache.attend(*piece, enable_gqa=True, backend="decode")
    cache._decode.runner = lambda *_: None
    other = copied(cache)
    for i in (3, 4, 5):
        out = other.attend(*pieces[i], enable_gqa=True, backend="decode")
        torch.testing.assert_close(out, expected[:, :, i : i + 1], **CLOSE)
    assert cache.seen.tolist() == [3, 3]


def test_autocast_casts_query_key_and_value_alone():
    """As in `dynamic_mask_attention`: a rotary embedding leaves queries and keys in float32, beside values of a projection."""
    query, key, value = (torch.randn(1, 2, 12, 16, device=DEVICE) for _ in "qkv")
    scores, found, expected = torch.randn(1, 2, 12, device=DEVICE), saccade.DynamicMaskCache(4), saccade.DynamicMaskCache(4)
    for part in (slice(7), slice(7, 8), slice(8, 12)):
        rows = [x[:, :, part] for x in (query, key, value)]
        with torch.autocast(DEVICE, torch.bfloat16):
            out = found.attend(*rows[:2], rows[2].bfloat16(), scores[:, :, part])
        assert torch.equal(out, expected.attend(*(x.bfloat16() for x in rows), scores[:, :, part]))


@pytest.mark.parametrize("commit", [True, False])
def test_an_unknown_backend_lists_the_known(commit):
    cache = saccade.DynamicMaskCache(4)
    with pytest.raises(saccade.InvalidArgument, match=r"^backend is 'x'; allowed are 'auto', 'decode', 'gather', "):
        cache.attend(*history(3), enable_gqa=True, backend="x", commit=commit)
