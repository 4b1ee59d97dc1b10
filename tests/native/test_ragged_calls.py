"""Packed batches that C++ replays: its arguments equal those of Python's launch, for other numbers of tokens and sequences too."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import recorded_triton
import torch
import torch.nn.functional as F
from recorded_triton import interpreted, number_of, recording

import saccade
from saccade import native
from saccade.engine import op_replay
from saccade.exact.ragged import call as ragged_call
from saccade.exact.ragged import plan, token_launches
from saccade.exact.varlen import api, replay
from saccade.exact.varlen.api import attend
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, UPPER_LEFT
from saccade.exact.varlen.op import OPS
from saccade.native.recording import Recorder

HEADS, DIM = 3, 16
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are recorded on a CPU, where Triton's interpreter stands in"
)


@pytest.fixture
def seen(monkeypatch):
    yield from recording(monkeypatch)


def batch(lengths, keys=None, grad=False):
    ends = [F.pad(torch.tensor(x).cumsum(0), (1, 0)).int() for x in (lengths, keys or lengths)]
    made = [torch.randn(int(e[-1]) + 1, HEADS, DIM).half().requires_grad_(grad) for e in (ends[0], ends[1], ends[1])]
    return made, ends[0], ends[0] if keys is None else ends[1], max(lengths), max(keys or lengths)


def told(launches, named, ends):
    """Launches with the names of the tensors in place of their addresses."""
    names = {x.data_ptr(): name for name, x in named.items()}
    members, count = ragged_call.every_sequence(ends, ends.shape[0] - 1)
    known = names | {members.data_ptr(): "members", count.data_ptr(): "count"}
    return [
        (function, programs, [known.get(v, "scratch" if v > 2**20 else v) for v in values])
        for function, programs, values in launches
    ]


def run(seen, given, by_python=False, dout=None, **options):
    """The launches of a call and of its gradient, with the addresses of its own tensors as names."""
    tensors, ends_q, ends_k, longest_q, longest_k = given
    calls, before = native.calls, len(seen)
    if by_python:
        native.calls = None
    try:
        out = saccade.attention_varlen(*tensors, ends_q, ends_k, longest_q, longest_k, backend="ragged", **options)
        named = dict(zip(("q", "k", "v"), tensors, strict=True)) | {"cu_q": ends_q, "cu_k": ends_k, "out": out}
        if dout is not None:
            named |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, tensors, dout), strict=True)) | {"dout": dout}
    finally:
        native.calls = calls
    return told(seen[before:], named, ends_q)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "scale": 0.3}, {"dropout_p": 0.2}], ids=["plain", "causal", "dropout"]
)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_another_batch_of_the_kind(seen, cross, options, monkeypatch):
    first = batch([5, 9, 1], [7, 16, 2] if cross else None)
    made = run(seen, first, **options)
    assert len(native.calls) == 1
    assert run(seen, first, **options) == made
    assert len(seen) == 2
    other = batch([12, 3, 8, 16, 1, 2], [4, 4, 4, 4, 4, 4] if cross else None)
    with monkeypatch.context() as patch:
        patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
        by_cpp = run(seen, other, **options)
    assert by_cpp == run(seen, other, by_python=True, **options)
    assert {"q", "k", "v", "cu_k", "out", "members", "count"} <= set(by_cpp[0][2])
    assert by_cpp != made


def packed_batch(lengths, grad=False):
    qkv = torch.randn(sum(lengths) + 1, 3, HEADS, DIM).half().requires_grad_(grad)
    return qkv, F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), max(lengths)


def run_packed(seen, given, by_python=False, dout=None, **options):
    """As `run`, of one tensor for queries, keys and values."""
    qkv, ends, longest = given
    calls, before = native.calls, len(seen)
    if by_python:
        native.calls = None
    try:
        torch.manual_seed(0)
        out = saccade.attention_varlen_qkvpacked(qkv, ends, longest, backend="ragged", **options)
        named = {"q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2], "cu": ends, "out": out}
        if dout is not None:
            (dqkv,) = torch.autograd.grad(out, qkv, dout)
            assert dqkv.is_contiguous()
            named |= {"dq": dqkv[:, 0], "dk": dqkv[:, 1], "dv": dqkv[:, 2], "dout": dout}
    finally:
        native.calls = calls
    return told(seen[before:], named, ends)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}], ids=["plain", "dropout"])
@pytest.mark.parametrize(("lengths", "others"), [([5, 9, 1], ([12, 3, 8, 16], [16] * 40)), ([140, 9], ([5, 250, 130, 1], [129]))])
def test_packed_gradients(seen, lengths, others, options, monkeypatch):
    """The same launches as Python's, into one gradient."""
    first = packed_batch(lengths, grad=True)
    run_packed(seen, first, dout=torch.randn(sum(lengths) + 1, HEADS, DIM).half(), **options)
    assert len(native.calls) == 1
    for lengths in others:
        other = packed_batch(lengths, grad=True)
        dout = torch.randn(sum(lengths) + 1, HEADS, DIM).half()
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
            by_cpp = run_packed(seen, other, dout=dout, **options)
        by_python = run_packed(seen, other, by_python=True, dout=dout, **options)
        assert [ours[2] for ours in by_cpp] == [theirs[2] for theirs in by_python]
        assert {"q", "k", "v", "cu", "dq", "dk", "dv", "dout"} <= {value for launch in by_cpp for value in launch[2]}
    assert len(native.calls) == 1


@pytest.fixture
def tokens(seen, monkeypatch):
    """Token tiles take every call of a kind that they take on a GPU outside of graphs."""

    def takes(call):
        return call.args.cu_seqlens_q is call.args.cu_seqlens_k and max(call.args.max_q, call.args.max_k) <= 128

    monkeypatch.setattr(ragged_call.RaggedCall, "eager_tokens", property(takes))


TOKENS = ("bounds", "forward_tokens", "bounds", "backward_tokens")
DROPPED = ("bounds", "survivors", "forward_tokens", "bounds", "survivors", "backward_tokens")


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "scale": 0.3}, {"dropout_p": 0.2}], ids=["plain", "causal", "dropout"]
)
def test_token_tiles(seen, tokens, options, packed, monkeypatch):
    """The bounds of each batch, then the kernel, in both directions, for another number of tokens and of sequences."""
    make, called = (packed_batch, run_packed) if packed else (batch, run)
    first = make([5, 9, 1], grad=True)
    called(seen, first, dout=torch.randn(16, HEADS, DIM).half(), **options)
    assert len(native.calls) == 1
    for lengths in ([12, 3, 8, 16], [16] * 40, [1]):
        other = make(lengths, grad=True)
        dout = torch.randn(sum(lengths) + 1, HEADS, DIM).half()
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
            by_cpp = called(seen, other, dout=dout, **options)
        token_launches._KNOWN.clear()
        by_python = called(seen, other, by_python=True, dout=dout, **options)
        kernels = DROPPED if "dropout_p" in options else TOKENS
        assert [function for function, *_ in by_cpp] == [number_of(f"{name}_kernel") for name in kernels]
        by_python.insert(len(kernels) // 2, by_python[0])  # it keeps the bounds from forward to backward
        for ours, theirs in zip(by_cpp, by_python, strict=True):
            assert ours[:2] == theirs[:2]
            assert without_bounds(ours[2]) == without_bounds(theirs[2])
        assert by_cpp[len(kernels) // 2 - 1][1] == -(-(sum(lengths) + 1) // 64) * HEADS
    assert len(native.calls) == 1


def without_bounds(values):
    """C++ gives scratch memory back at once, so that a result may have had its address."""
    at = (1, 2) if isinstance(values[3], int) else (3, 4)  # of bounds and survivors, whose stand-in the first kernel has not
    return ["scratch" if i in at and not isinstance(v, int) else v for i, v in enumerate(values)]


def test_more_tokens_than_token_tiles_take(seen, tokens, monkeypatch):
    for module in (token_launches, ragged_call):
        monkeypatch.setattr(module, "MOST_EAGER", 64 * HEADS * DIM)
    run(seen, batch([5, 9, 1]))
    ends = torch.tensor([0, 16, 32, 48], dtype=torch.int32)
    for rows, made in ((64, True), (65, False)):
        q, k, v = (torch.zeros(rows, HEADS, DIM).half() for _ in range(3))
        call = (16, 16, q, k, v, ends, ends, 0.0, "full", None, False, False, "ragged")
        assert (native.calls.run_ragged(*call) is not None) == made


TILE, LONG = ("forward_tile", "backward_tile"), ("forward_long", "delta", "backward_keys", "backward_queries")


@pytest.mark.parametrize(
    ("lengths", "others", "kernels"),
    [([5, 9, 1], ([12, 3, 8, 16], [1], [16] * 40), TILE), ([140, 9], ([5, 250, 130, 1], [129]), LONG)],
    ids=["tile", "long"],
)
def test_gradients(seen, lengths, others, kernels):
    first = batch(lengths, grad=True)
    run(seen, first, dout=torch.randn(sum(lengths) + 1, HEADS, DIM).half())
    for lengths in others:
        other = batch(lengths, grad=True)
        dout = torch.randn(sum(lengths) + 1, HEADS, DIM).half()
        by_cpp = run(seen, other, dout=dout)
        assert [function for function, *_ in by_cpp] == [number_of(f"{name}_kernel") for name in kernels]
        by_python = run(seen, other, by_python=True, dout=dout)
        for ours, theirs in zip(by_cpp, by_python, strict=True):
            assert ours[2] == theirs[2]
            assert ours[1] >= theirs[1]  # as many programs as the longest batch of the kind can use
        assert {"dq", "dk", "dv", "dout"} <= {value for launch in by_cpp for value in launch[2]}
    # the first gradient of a kind is Python's, the others C++'s
    assert len(native.calls) == 1


@pytest.mark.parametrize(
    ("lengths", "others", "kernels"),
    [([5, 9, 1], ([12, 3, 8, 16], [1]), TILE), ([140, 9], ([5, 250, 130, 1], [129]), LONG)],
    ids=["tile", "long"],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_ops_of_compiled_programs(seen, lengths, others, kernels, dropout_p, monkeypatch):
    """Forward and backward below autograd: the first batch is Python's, and others of its kind are C++'s."""
    monkeypatch.setattr(op_replay, "may_record", lambda *given: native.calls is not None)

    def computed(given, by_python=False):
        (query, key, value), ends, _, longest, _ = given
        torch.manual_seed(1)
        dout, seed = torch.randn_like(query), torch.zeros(1, dtype=torch.int64) if dropout_p else None
        call = (query, key, value, ends, ends, None, seed, longest, longest, dropout_p, 0, 0.25)
        before, calls = len(seen), native.calls
        if by_python:
            native.calls = None
        try:
            out, lse = OPS.forward_op(*call, "ragged")
            gradients = OPS.backward_op(dout, None, out, lse, *call, False, "ragged")
        finally:
            native.calls = calls
        assert (out.shape, lse.shape) == (query.shape, (HEADS, query.shape[0]))
        assert [x.shape for x in gradients] == [query.shape, key.shape, value.shape, (0,)]
        named = dict(zip(("q", "k", "v", "dq", "dk", "dv"), (query, key, value, *gradients), strict=False))
        named |= {"cu": ends, "out": out, "lse": lse, "dout": dout} | ({"seed": seed} if dropout_p else {})
        members, count = ragged_call.every_sequence(ends, ends.shape[0] - 1)
        names = {x.data_ptr(): name for name, x in (named | {"members": members, "count": count}).items()}
        return [(f, p, [names.get(v, "other" if v > 2**20 else v) for v in values]) for f, p, values in seen[before:]]

    computed(batch(lengths))
    assert len(native.calls) == 2
    for other in others:
        given = batch(other)
        with monkeypatch.context() as patch:
            patch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the call"))
            by_cpp = computed(given)
        by_python = computed(given, by_python=True)
        assert [function for function, *_ in by_cpp] == [number_of(f"{name}_kernel") for name in kernels]
        for ours, theirs in zip(by_cpp, by_python, strict=True):
            assert ours[2] == theirs[2]
            assert ours[1] >= theirs[1]  # as many programs as the longest batch of the kind can use


def test_ops_record_a_small_batch_after_a_large_one(seen, monkeypatch):
    """A large one goes by lists of lengths, which is another kind."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", HEADS * DIM * 9 * 3)
    may_record = op_replay.may_record
    monkeypatch.setattr(op_replay, "may_record", lambda call, query: may_record(call, SimpleNamespace(is_cuda=True)))
    for lengths, known in (([9] * 4, 1), ([9] * 3, 2), ([9, 8, 7, 6, 5], 2), ([5], 2)):
        tensors, ends, _, longest, _ = batch(lengths)
        OPS.forward_op(*tensors, ends, ends, None, None, longest, longest, 0.0, 0, 0.25, "ragged")
        assert len(native.calls) == known


def test_ops_with_a_bias_stay_with_python(seen, monkeypatch):
    monkeypatch.setattr(op_replay, "may_record", lambda *given: native.calls is not None)
    (query, key, value), ends, *_ = batch([5, 9, 1])
    bias = torch.randn(HEADS, 9, 9).half()
    call = (query, key, value, ends, ends, bias, None, 9, 9, 0.0, 0, 0.25)
    out, lse = OPS.forward_op(*call, "ragged")
    OPS.backward_op(torch.randn_like(out), None, out, lse, *call, True, "ragged")
    plain = (*call[:5], None, *call[6:])
    OPS.backward_op(torch.randn_like(out), torch.randn_like(lse), out, lse, *plain, False, "ragged")
    assert len(native.calls) == 0


def test_what_stays_with_python(seen, monkeypatch):
    first = batch([5, 9, 1])
    run(seen, first)
    (query, key, value), ends, *_ = first

    def known(*changed, longest=9, **options):
        q, k, v, e, f = changed or (query, key, value, ends, ends)
        alignment = options.pop("causal", "full")
        call = (longest, longest, q, k, v, e, f, 0.0, alignment, None, False, False, "ragged")
        return native.calls.run_ragged(*call)

    assert known() is not None
    assert known(longest=16) is not None  # the same tile
    assert known(longest=17) is None
    assert known(longest=0) is None
    assert known(longest=2**70) is None
    assert known(longest=9.0) is None
    assert known(causal="upper") is None
    assert known(query, key, value, ends.long(), ends.long()) is None
    assert known(query, key, value, ends, ends.clone()) is None  # one list for both was described
    assert known(query, key, value[:-1], ends, ends) is None
    assert known(query, key, value, ends[None], ends[None]) is None
    assert known(query[0], key, value, ends, ends) is None
    assert known(query.float(), key, value, ends, ends) is None
    assert known(query[:0], key, value, ends, ends) is None
    many = torch.zeros(10**5, dtype=torch.int32)
    assert known(query, key, value, many, many) is None
    monkeypatch.setenv("SACCADE_CHECK_LENGTHS", "1")
    before = len(seen)
    too_far = ends * 9
    for longest in (9, 81):  # a kind of call that C++ knows, and another
        with pytest.raises(saccade.InvalidArgument, match="beyond the"):
            saccade.attention_varlen(query, key, value, too_far, too_far, longest, longest, backend="ragged")
    assert len(seen) == before


def test_a_call_with_the_log_sum_exp_is_not_described(seen):
    (query, key, value), ends, *_ = batch([5, 9, 1])
    for _ in range(2):
        found = saccade.attention_varlen(query, key, value, ends, ends, 9, 9, return_lse=True, backend="ragged")
        assert isinstance(found, tuple)
    assert len(native.calls) == 0


def test_gradients_by_python_are_those_of_the_call(seen, monkeypatch):
    made, launchers = [], OPS.launchers

    def spied(name):
        def backward(args, *rest, **options):
            made.append((args.causal, args.scale, args.dropout_p))
            return launchers(name).backward(args, *rest, **options)

        return SimpleNamespace(forward=launchers(name).forward, backward=backward)

    monkeypatch.setattr(OPS, "launchers", spied)
    for lengths in ([5, 9, 1], [12, 3, 8]):
        dout = torch.randn(sum(lengths) + 1, HEADS, DIM).half()
        run(seen, batch(lengths, grad=True), dout=dout, is_causal=True, scale=0.3)
    assert made == [(UPPER_LEFT, 0.3, 0.0)] * 2


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "cu_seqlens"])
def test_backward_reads_no_more_rows_than_were_saved(seen, which):
    """The number of tokens is no part of what is known of a packed call."""
    run(seen, batch([5, 9, 1], grad=True), dout=torch.randn(16, HEADS, DIM).half())
    tensors, ends_q, ends_k, longest_q, longest_k = batch([5, 9, 1], grad=True)
    out = saccade.attention_varlen(*tensors, ends_q, ends_k, longest_q, longest_k, backend="ragged")
    before = len(seen)
    changed = [*tensors, ends_q][which]
    changed.data = changed.detach()[:3].clone()
    with pytest.raises(RuntimeError, match=r"of shape \[3.*where forward had saved .* of shape \[(16, 3, 16|4)\]"):
        out.sum().backward()
    assert len(seen) == before


def test_causal_masks_of_two_alignments_are_two_kinds(seen):
    tensors, ends_q, ends_k, longest_q, longest_k = batch([5, 9, 1], [7, 16, 2])
    rest = (longest_q, longest_k, 0.0)
    for count, causal in enumerate((FULL, UPPER_LEFT, BOTTOM_RIGHT), 1):
        attend((*tensors, ends_q, ends_k, *rest, causal, None, False, None, None, False, "ragged"))
        assert len(native.calls) == count


def test_a_larger_batch_is_not_one_launch(seen, monkeypatch):
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 2**20)
    run(seen, batch([5, 9, 1]))
    limit = ragged_call.ONE_LAUNCH // (HEADS * DIM * 16)
    (query, key, value), *_ = batch([16])
    for sequences, made in ((limit, True), (limit + 1, False)):
        ends = torch.zeros(sequences + 1, dtype=torch.int32)
        call = (16, 16, query, key, value, ends, ends, 0.0, "full", None, False, False, "ragged")
        assert (native.calls.run_ragged(*call) is not None) == made


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_call_is_not_kept_alive(seen, packed):
    """The function that C++ calls for a gradient of a new layout lives as long as the process; it held the first call's tensors."""
    given = packed_batch([5, 9, 3], grad=True) if packed else batch([5, 9, 3], grad=True)
    tensors = [given[0]] if packed else given[0]
    held = [x * 1 for x in tensors]
    alive = [weakref.ref(x) for x in held]
    make = run_packed if packed else run
    assert make(seen, (held[0] if packed else held, *given[1:]))
    assert len(native.calls) == 1
    del held
    gc.collect()
    assert not [x for x in alive if x() is not None]


def test_a_capture_is_left_to_python(seen, monkeypatch):
    """In a graph host time does not count, and Python then takes other launches."""
    given = batch([5, 9, 1])
    assert run(seen, given)
    call = replay.call_of((*given[0], *given[1:], 0.0, FULL, None, False, None, None, False, "ragged"), None)
    assert replay.replayed(call) is not None
    monkeypatch.setattr(recorded_triton, "capturing", [1])
    assert replay.replayed(call) is None


@pytest.mark.parametrize("window", [(3, 3), (3, 4), (None, 2)], ids=str)
def test_a_window_is_left_to_python(seen, window, monkeypatch):
    """Calls that differ in the window alone share no replay: C++ remembers none that has one, and finds none for it."""
    given = batch([5, 9, 1])
    plain = run(seen, given)
    assert len(plain) == len(native.calls) == 1
    tensors, ends, _, longest, _ = given
    interpreted(monkeypatch)
    out = saccade.attention_varlen(*tensors, ends, ends, longest, longest, backend="ragged", window=window)
    expected = saccade.attention_varlen(*tensors, ends, ends, longest, longest, backend="reference", window=window)
    torch.testing.assert_close(out[:-1], expected[:-1], atol=4e-3, rtol=4e-3)
    assert len(seen) == len(native.calls) == 1
    dense = [x[None].transpose(1, 2) for x in tensors]
    assert native.calls.key((*dense, None, 0.0, False, None, False, None, None, False, "auto")) is not None
    assert native.calls.key((*dense, None, 0.0, False, None, False, None, window, False, "auto")) is None


def test_ops_with_a_window_are_left_to_python(seen, monkeypatch):
    """Compiled programs call ops, whose calls C++ replays too."""
    asked = []
    monkeypatch.setattr(op_replay, "replayed", asked.append)
    tensors, ends, _, longest, _ = batch([5, 9, 1])
    call = (*tensors, ends, ends, None, None, longest, longest, 0.0, FULL, 0.25, "reference")
    (plain, lse), (windowed, _) = (torch.ops.saccade.attention_varlen_forward(*call, *window) for window in ((), (2, -1)))
    assert asked[0] is not None
    assert asked[1] is None
    assert not torch.equal(plain, windowed)
    rest = (*tensors, ends, ends, None, None, longest, longest, 0.0, FULL, 0.25, False, "reference")
    plain, windowed = (
        torch.ops.saccade.attention_varlen_backward(plain, None, plain, lse, *rest, *window) for window in ((), (2, -1))
    )
    assert asked[2] is not None
    assert asked[3] is None
    assert not torch.equal(plain[2], windowed[2])


@pytest.mark.parametrize("which", ["q", "k"])
def test_offsets_of_two_dtypes_are_left_to_python(seen, which):
    """Kernels get a converted copy, which no other call has."""
    tensors, ends, _, longest, _ = batch([5, 9, 1])
    ends_q, ends_k = (ends.long() if name == which else ends.clone() for name in ("q", "k"))
    for _ in range(2):
        saccade.attention_varlen(*tensors, ends_q, ends_k, longest, longest, backend="ragged")
    assert len(native.calls) == 0


def test_token_tiles_are_not_replayed_where_keys_have_other_tokens(seen, monkeypatch):
    """One list of sequences, but more tokens behind them in keys: token tiles would leave gradients of these unwritten."""
    takes = property(lambda call: call.args.cu_seqlens_q is call.args.cu_seqlens_k and call.total_q == call.total_k)
    monkeypatch.setattr(ragged_call.RaggedCall, "eager_tokens", takes)
    (query, key, _), ends, _, longest, _ = batch([5, 9, 1])
    run(seen, batch([5, 9, 1]))
    for more in (F.pad(key, (0, 0, 0, 0, 0, 8)), key[:-1]):
        given = (query, more, more.clone()), ends, ends, longest, longest
        for _ in range(2):
            (launch,) = run(seen, given)
            assert launch[0] == number_of("forward_tile_kernel")


def test_dropout_of_fewer_keys_than_queries(seen, tokens):
    """Longest lengths are limits, which may differ though both are the same sequences; bits of dropout are kept for all of the kind."""
    for longest in (40, 60):
        tensors, ends, *_ = batch([longest, 9, 1])
        given = tensors, ends, ends, 64, longest
        by_cpp = run(seen, given, dropout_p=0.2)
    token_launches._KNOWN.clear()
    assert [launch[2][5:] for launch in by_cpp] == [launch[2][5:] for launch in run(seen, given, by_python=True, dropout_p=0.2)]


def test_a_table_is_made_once(monkeypatch):
    """Two threads may be the first: replayed launches hold the address of the table that stays."""
    ends, nested = torch.tensor([0, 3], dtype=torch.int32), []
    monkeypatch.setattr(plan, "_NUMBERS", {})

    def known(offsets):
        if not nested:
            nested.append(None)
            nested.append(plan.every_sequence(ends, 1))
        return True

    monkeypatch.setattr(plan, "values_known", known)
    mine, theirs = plan.every_sequence(ends, 1), nested[1]
    assert [x.data_ptr() for x in mine] == [x.data_ptr() for x in theirs]


def test_few_kinds_of_one_call_are_remembered(seen, monkeypatch):
    """Heads outside of tokens: their stride is another number at each number of tokens."""
    monkeypatch.setattr("saccade.launch.cache.LaunchCache.limit", 3)
    found = []
    monkeypatch.setattr("saccade.exact.recorded.Recorder", lambda: found.append(Recorder()) or found[-1])
    prepared, prepare = [], api._prepare
    monkeypatch.setattr(api, "_prepare", lambda *given: prepared.append(prepare(*given)) or prepared[-1])
    for count in range(5, 12):
        tensors, ends, *_ = batch([count])
        outside = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
        run(seen, (outside, ends, ends, 16, 16))
    assert len(found) == len(native.calls) == 7
    assert len({id(x) for x in prepared}) == 1
    assert len(prepared[0].recorded) <= 3
