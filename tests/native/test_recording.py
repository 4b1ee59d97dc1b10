"""Launches are noted where they are made: each address by the tensor and the offset that it is, numbers that change, and memory that launches share."""

from __future__ import annotations

import contextlib
import gc
import struct
import weakref
from types import SimpleNamespace

import pytest
import torch
from parameter_lists import listed
from recorded_triton import recording

import saccade
from saccade import native
from saccade.exact.args import AttentionArgs
from saccade.exact.long import launchers as long_launchers
from saccade.exact.long import sm90
from saccade.exact.op import OPS
from saccade.exact.ragged import call as ragged_call
from saccade.exact.recorded import begin_recording
from saccade.exact.short.launch import BACKWARD_TENSORS
from saccade.exact.varlen.op import OPS as VARLEN
from saccade.native.described import FIXED, KEYS, QUERIES, ROWS_OF_16_BYTES, SEQUENCES, Number, Planned
from saccade.native.recording import Recorder, is_recorded, lasting, refuse, scratch, shares, varying
from saccade.nvrtc import kernel as nvrtc_kernel
from saccade.nvrtc.tensor_map import TensorMap
from saccade.recorder import ACTIVE

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")


def launch(*pointers, maps=(), **blocks) -> None:
    """A launch of CUDA C++, as `Bound` tells of it. Tensors stand for their addresses."""
    shape = SimpleNamespace(grid=3, block=128, shared_bytes=0)
    bound = SimpleNamespace(function=7, shape=shape, dependent=False, numbers=(11,))
    given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in pointers]
    ACTIVE.recorder.cuda(bound, given, [(x.data_ptr(), *how) for x, *how in maps], **blocks)


def places(planned: Planned, which: int = 0) -> list:
    """(slot, value) of each argument but the bound number."""
    found = planned.launches[which]
    return list(zip(found.slots, found.values, strict=True))[:-1]


def test_each_address_is_a_tensor_and_an_offset():
    query, key, out = (torch.zeros(4, 8) for _ in range(3))
    with Recorder() as recorder:
        launch(query, key, 0, out[1:], out, maps=[(key, (4, 8), (32,), (1, 8))])
    planned = recorder.planned((query, key, out), 2)
    assert places(planned) == [(0, 0), (1, 0), (FIXED, 0), (2, 32), (2, 0)]
    (found,) = planned.launches
    assert (found.function, found.grid, found.threads) == (7, (3, 1, 1), 128)
    assert (found.slots[-1], found.values[-1]) == (FIXED, 11)
    assert found.moved == ((1, 0, (4, 8), (32,), (1, 8)),)
    assert planned == Planned([found])


def test_blocks_that_follow_from_the_tokens():
    """Unless nobody says how: other calls would be launched with the blocks of this one."""
    query, out = torch.zeros(4, 8), torch.zeros(4, 8)
    for follows, expected in (((6, 0, 64), ((6, 1, 1), 0, 64)), (None, None)):
        with Recorder() as recorder:
            launch(query, out, grid=18, follows=follows)
        planned = recorder.planned((query, out), 1)
        assert (planned and (planned.launches[0].grid, planned.launches[0].per_sequence, planned.launches[0].tile)) == expected


def test_views_of_one_tensor():
    """Query, key and value of a packed tensor, and the gradients in another one."""
    qkv, dqkv = torch.zeros(2, 5, 3, 4, 8), torch.zeros(2, 5, 3, 4, 8)
    with Recorder() as recorder:
        launch(*qkv.unbind(2), *dqkv.unbind(2))
    third = 4 * 8 * 4
    expected = [(slot, i * third) for slot in (0, 1) for i in range(3)]
    assert places(recorder.planned((qkv, dqkv), 1)) == expected


def test_separate_views_of_one_memory():
    """Each of them is a tensor of its own, though they lie between one another."""
    query, key, value = torch.zeros(2, 5, 3, 4, 8).unbind(2)
    out = torch.zeros(2, 5, 4, 8)
    with Recorder() as recorder:
        launch(query, key, value, out)
    assert places(recorder.planned((query, key, value, out), 3)) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_addresses_that_may_be_of_two_tensors():
    x, out = torch.zeros(6, 8), torch.zeros(6, 8)
    with Recorder() as recorder:
        launch(x, out)
    assert places(recorder.planned((x, x.view(8, 6), out), 2)) == [(0, 0), (2, 0)]  # C++ looks it up as such
    assert recorder.planned((x, x.view(8, 6), out), 1) is None  # the second is a result
    with Recorder() as recorder:
        launch(x, x[2:], x[4:], out)
    assert recorder.planned((x, out), 1) is not None
    assert recorder.planned((x, x[2:4], out), 2) is None  # a bias in the memory of a packed tensor


def test_memory_of_which_a_call_does_not_know():
    query, out = torch.zeros(4, 8), torch.zeros(4, 8)
    copied = query.clone()
    with Recorder() as recorder:
        launch(copied, out)
    assert recorder.planned((query, out), 1) is None
    with Recorder() as recorder:
        launch(query, 4096, out)  # a number that is not marked
    assert recorder.planned((query, out), 1) is None


def test_a_tensor_ends_behind_its_last_number():
    """Also one whose rows lie apart: its last number is at 7 * 16 + 7."""
    whole = torch.zeros(16, 16)
    for key in (whole[:8], whole[:8, :8]):
        ends = key.storage_offset() + sum((n - 1) * s for n, s in zip(key.shape, key.stride(), strict=True))
        for number, placed in ((ends, [(0, 4 * ends)]), (ends + 1, None)):
            with Recorder() as recorder:
                launch(whole.view(-1)[number:])
            planned = recorder.planned((key,), 1)
            assert (planned and places(planned)) == placed


def test_results_that_no_launch_writes():
    """Torch filled them, or summed into them."""
    query, out, other = (torch.zeros(4, 8) for _ in range(3))
    with Recorder() as recorder:
        launch(query, out)
    assert recorder.planned((query, out, other), 1) is None
    assert recorder.planned((query, out, other[:0]), 1) is not None
    with Recorder() as recorder:
        pass
    assert recorder.planned((query, out), 1) is None


def test_work_that_is_no_launch():
    query, out = torch.zeros(4, 8), torch.zeros(4, 8)
    with Recorder() as recorder:
        launch(query, out)
        refuse()
    assert recorder.planned((query, out), 1) is None


def test_numbers_that_change():
    query, out = torch.zeros(4, 8), torch.zeros(4, 8)
    with Recorder() as recorder:
        tokens, sequences, width = varying((4, 2, 8), (QUERIES, SEQUENCES, FIXED))
        launch(query, out, tokens, sequences, width, maps=[(query, (tokens, 8), (32,), (1, 8))])
    planned = recorder.planned((query, out), 1)
    assert places(planned)[2:] == [(QUERIES, 0), (SEQUENCES, 0), (FIXED, 8)]
    assert planned.launches[0].moved[0].sizes == (QUERIES, 8)
    assert (tokens + 1, type(tokens + 1)) == (5, int)  # what is worked out from one is none
    assert varying((4, 2), (QUERIES, KEYS)) == (4, 2)
    assert type(varying((4,), (QUERIES,))[0]) is int  # nobody notes it


@pytest.mark.parametrize(
    ("marked", "follows"), [(False, (8, 2, 0)), (True, None), (True, (8, 2, 0))], ids=["plain", "grid", "all"]
)
def test_numbers_of_one_batch(marked, follows, monkeypatch):
    """A Triton kernel for any batch: its numbers are marked, and its grid is known to follow them, or it is not replayed."""
    monkeypatch.setattr("saccade.native.triton._behind", lambda function, sizes: 0)
    query, out = torch.zeros(4, 8), torch.zeros(4, 8)
    signature = {"query": "*fp32", "out": "*fp32", "tokens": "i32", "heads": "i32"}
    metadata = SimpleNamespace(num_ctas=1, num_warps=4, shared=0)
    compiled = SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=metadata, function=7)
    with Recorder() as recorder:
        tokens = varying((4,), (QUERIES,)) if marked else (4,)
        recorder.triton_any(compiled, follows, (query, out), [query.data_ptr(), out.data_ptr()], tokens, (2,))
    planned = recorder.planned((query, out), 1)
    if not marked or follows is None:
        assert planned is None
        return
    (found,) = planned.launches
    assert (found.grid, found.per_sequence, found.tile) == ((8, 1, 1), 2, 0)
    assert (found.slots, found.values) == ((0, 1, QUERIES, FIXED), (0, 0, 0, 2))


def test_memory_that_launches_share():
    """Its rule is kept: bytes of all calls, or for each token."""
    query, out = torch.zeros(5, 8), torch.zeros(5, 8)
    with Recorder() as recorder:
        bounds = scratch((3, 5), torch.int32, query.device, 5)
        launch(query, bounds)
        address = bounds.data_ptr()
        del bounds
        parked = scratch((70,), torch.float32, query.device)
        assert parked.data_ptr() != address  # no other memory takes its place
        launch(query, address, parked[2:], out)
    planned = recorder.planned((query, out), 1)
    assert (planned.scratch, planned.per_query) == ((0, 280), (12, 0))
    assert places(planned, 0) == [(0, 0), (2, 0)]
    assert places(planned, 1) == [(0, 0), (2, 0), (3, 8), (1, 0)]
    with Recorder() as recorder:
        launch(query, scratch((70,), torch.float32, query.device), out)
    planned = recorder.planned((query, out), 1)
    assert (planned.scratch, planned.per_query) == ((280,), ())


def test_memory_that_came_after_a_launch_was_not_its():
    query, out = torch.zeros(5, 8), torch.zeros(5, 8)
    with Recorder() as recorder:
        made = torch.zeros(5)
        launch(query, made, out)
        recorder.note_scratch(made, 0)  # as if `scratch` had got the memory of a tensor that ended meanwhile
    assert recorder.planned((query, out), 1) is None


def test_shares_of_a_gradient_are_added_by_cpp():
    query, dquery, dbias = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(2, 4, 4)
    with Recorder() as recorder:
        first = scratch((5,), torch.float32, query.device)
        made = shares((6, 4, 4), 2, query.device)
        launch(query, dquery, first, made, scratch((7,), torch.float32, query.device))
    planned = recorder.planned((query, dquery, dbias), 1)
    assert (made.shape, made.dtype) == ((6, 4, 4), torch.float32)
    assert (planned.shares, planned.scratch) == ((1, 2, 4, 4), (20, 384, 28))


def test_tables_that_last():
    """One stays in its place, and of another that row is read which a number says."""
    query, out = torch.zeros(4, 8), torch.zeros(4, 8)
    table, rows = torch.zeros(9, dtype=torch.int32), torch.zeros(9, 4, dtype=torch.int32)
    with Recorder() as recorder:
        launch(query, lasting(table), lasting(rows[3], 48, ROWS_OF_16_BYTES), out)
    planned = recorder.planned((query, out), 1)
    assert places(planned)[1:3] == [(FIXED, table.data_ptr()), (ROWS_OF_16_BYTES, rows.data_ptr())]


def test_who_notes():
    assert not is_recorded()
    with Recorder() as outer:
        with contextlib.suppress(ZeroDivisionError), Recorder() as inner:
            assert ACTIVE.recorder is inner
            assert 1 / 0
        assert ACTIVE.recorder is outer
    assert not is_recorded()


def launched_by_name(monkeypatch, parameters, shape, **arguments):
    """A recorder that was told of a launch with these arguments."""
    monkeypatch.setattr(nvrtc_kernel, "on_current_stream", lambda *given: None)
    made = nvrtc_kernel.Launch.__new__(nvrtc_kernel.Launch)
    listed_ones = listed(parameters)
    made._kernel, made._parameters, made._enqueue = SimpleNamespace(name="copy", device_index=0), listed_ones, None
    made._maps = [i for i, offset in enumerate(listed_ones.offsets) if offset is None]
    made.shape, made.parameters, made.function = shape, listed_ones, 7
    with Recorder() as recorder:
        made(**arguments)
    return recorder


SHAPE = nvrtc_kernel.Shape(3, 128, 64)


def test_a_launch_by_name(monkeypatch):
    """Addresses anywhere among the arguments, and numbers by their bytes."""
    x, y = torch.zeros(8), torch.zeros(8)
    moved = TensorMap(bytes(128), (x.data_ptr(), (2, 4), (16,), (1, 64)))
    given = {"a": moved, "n": -5, "x": x.data_ptr(), "f": 0.5, "y": y.data_ptr()}
    recorder = launched_by_name(monkeypatch, "tensor_map a, int32 n, pointer x, float32 f, pointer y", SHAPE, **given)
    planned = recorder.planned((x, y), 1)
    assert planned is not None
    (launch,) = planned.launches
    bits = int.from_bytes(struct.pack("f", 0.5), "little")
    assert launch.slots == (-1, 0, -1, 1)
    assert launch.values == (2**32 - 5, 0, bits, 0)
    assert launch.moved == ((0, 0, (2, 4), (16,), (1, 64)),)
    assert (launch.function, launch.grid, launch.threads, launch.shared_bytes) == (7, (3, 1, 1), 128, 64)


@pytest.mark.parametrize(
    ("parameters", "shape", "a"),
    [
        ("pointer x, tensor_map a", SHAPE, TensorMap(bytes(128), (64, (2, 4), (16,), (1, 64)))),
        ("tensor_map a, pointer x", SHAPE, TensorMap(bytes(128))),
        ("int32 a, pointer x", nvrtc_kernel.Shape(3, (32, 4), 64), 1),
    ],
    ids=["a map behind a pointer", "a map of no tensor", "threads in two dimensions"],
)
def test_launches_by_name_that_are_not_replayed(monkeypatch, parameters, shape, a):
    assert launched_by_name(monkeypatch, parameters, shape, a=a, x=0).refused


# --- through the public functions, with stubs in the place of kernels


@pytest.fixture
def seen(monkeypatch):
    """Launches so far; dense calls are recorded as on a GPU."""
    monkeypatch.setattr("saccade.exact.api.begin", begin_recording)
    yield from recording(monkeypatch)


B, H, T, D = 3, 2, 40, 16
_DOUT = BACKWARD_TENSORS.index("dout")


def dense(*shapes, **options):
    def call(*given):
        return saccade.attention(*given, backend="short", **options)

    return call, shapes


def with_lengths(q, k, v):
    lengths = torch.tensor([T, 4, 9], dtype=torch.int32)
    native.calls.checked(lengths, T)
    return saccade.attention(q, k, v, lengths=lengths, backend="short")


def with_mask(q, k, v):
    return saccade.attention(q, k, v, torch.ones(B, 1, T, T, dtype=torch.bool).tril(), backend="short")


def with_mask_of_keys(q, k, v, bias):
    return saccade.attention(q, k, v, bias, key_mask=torch.arange(T).expand(B, T) > 2, backend="short")


def ragged(longest, **options):
    lengths = [longest, 5, longest - 7]

    def call(*given):
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        if len(given) == 1:
            return saccade.attention_varlen_qkvpacked(given[0], ends, longest, backend="ragged", **options)
        return saccade.attention_varlen(*given, ends, ends, longest, longest, backend="ragged", **options)

    return call, [(sum(lengths), H, D)] * 3


def packed(longest, **options):
    call, (shape, *_) = ragged(longest, **options)
    return call, [(shape[0], 3, *shape[1:])]


ROWS = [(B, H, T, D)] * 3
FORMS = {
    "attention": dense(*ROWS),
    "causal": dense(*ROWS, is_causal=True),
    "dropout": dense(*ROWS, dropout_p=0.3),
    "lengths": (with_lengths, ROWS),
    "mask": (with_mask, ROWS),
    "bias": dense(*ROWS, (1, H, T, T)),
    "bias of each row": dense(*ROWS, (B, H, T, T)),
    "bias and a mask of keys": (with_mask_of_keys, [*ROWS, (1, H, T, T)]),
    "windows": dense(*[(B, 4, H, T, D)] * 3, (4, H, T, T)),
    "qkvpacked": (lambda qkv: saccade.attention_qkvpacked(qkv, backend="short"), [(B, T, 3, H, D)]),
    "varlen": ragged(16),
    "varlen, dropout": ragged(16, dropout_p=0.2),
    "varlen, long": ragged(200),
    "varlen, long, dropout": ragged(200, dropout_p=0.2),
    "varlen qkvpacked": packed(16),
    "varlen qkvpacked, long": packed(200),
}


# the same in token tiles, as on a GPU
TOKENS = {f"{name}, tokens": FORMS[name] for name in ("varlen", "varlen, dropout", "varlen qkvpacked")}


@on_a_cpu
@pytest.mark.parametrize("name", [*FORMS, *TOKENS])
def test_nothing_that_is_recorded_holds_a_tensor(seen, name, monkeypatch):
    """Graphs and tensors end with the caller's own, after backward by Python and by C++."""
    monkeypatch.setattr(ragged_call.RaggedCall, "eager_tokens", name in TOKENS)
    call, shapes = (TOKENS if name in TOKENS else FORMS)[name]
    alive, nodes = [], []
    for _ in range(3):
        leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
        given = [x * 1 for x in leaves]
        out = call(*given)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, dout)
        nodes.append(out.grad_fn.name())
        alive += [weakref.ref(x) for x in (*leaves, *given, out, dout, *gradients)]
        del leaves, given, out, dout, gradients
    gc.collect()
    assert [name == "saccade::KnownAttentionBackward" for name in nodes] == [False, True, True]
    assert len(native.calls) == 1
    assert not [x for x in alive if x() is not None]


@on_a_cpu
@pytest.mark.parametrize("ops", [OPS, VARLEN], ids=["attention", "attention_varlen"])
def test_nothing_that_ops_record_holds_a_tensor(seen, ops, monkeypatch):
    monkeypatch.setattr("saccade.engine.op_replay.may_record", lambda *given: True)
    alive = []
    for _ in range(3):
        if ops is OPS:
            call = (*[torch.randn(B, H, T, D).half() for _ in range(3)], None, None, None, None, 0.0, False, 0.25)
        else:
            ends = torch.tensor([0, 9, 16], dtype=torch.int32)
            call = (*[torch.randn(16, H, D).half() for _ in range(3)], ends, ends, None, None, 9, 9, 0.0, 0, 0.25)
        name = "short" if ops is OPS else "ragged"
        out, lse = ops.forward_op(*call, name)
        dout = torch.randn_like(out)
        gradients = ops.backward_op(dout, None, out, lse, *call, False, name)
        alive += [weakref.ref(x) for x in (*call[:3], out, lse, dout, *gradients)]
        del call, out, lse, dout, gradients
    gc.collect()
    assert len(native.calls) == 2
    assert not [x for x in alive if x() is not None]


@on_a_cpu
def test_calls_of_one_tensor_are_of_another_kind(seen):
    """Keys and values of one memory, and of two: neither is launched with the addresses of the other."""
    query, key, value = (torch.randn(*ROWS[0]).half() for _ in range(3))
    for count, (given, addresses) in enumerate((((query, key, key), 2), ((query, key, value), 3), ((query, query, query), 1)), 1):
        for _ in range(3):
            saccade.attention(*given, backend="short")
            found = seen[-1][2][:3]
            assert found == [x.data_ptr() for x in given]
            assert len(set(found)) == addresses
        assert len(native.calls) == count


@on_a_cpu
def test_an_incoming_gradient_that_is_an_input_is_of_another_kind(seen):
    """Other gradients are tensors of their own, with other addresses."""
    query, key, value = (torch.randn(*ROWS[0]).half().requires_grad_() for _ in range(3))
    saccade.attention(query, key, value, backend="short")
    for dout in (query.detach(), torch.randn_like(query)) * 2:
        out = saccade.attention(query, key, value, backend="short")
        torch.autograd.grad(out, (query, key, value), dout)
        assert seen[-1][2][_DOUT] == dout.data_ptr()


@on_a_cpu
@pytest.mark.parametrize("dropped", [0, 1], ids=["all", "first token"])
def test_saved_tensors_of_one_memory_may_come_back_in_two(seen, dropped):
    """Hooks may return copies. A query that is the first token of the keys begins where they begin, but its copy is no copy of them."""
    rows = torch.randn(*ROWS[0]).half().requires_grad_()
    query = rows[:, :, :1] if dropped else rows
    dout = torch.randn_like(query)
    saccade.attention(query, rows, rows, backend="short")
    for hooks in (False, True, False, True):
        copied = []

        def copy(x, copied=copied):
            copied.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x))
            return copied[-1]

        unpack = copy if hooks else (lambda x: x)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = saccade.attention(query, rows, rows, backend="short")
        torch.autograd.grad(out, rows, dout)
        expected = copied[:3] if hooks else (query, rows, rows)
        assert seen[-1][2][:3] == [x.data_ptr() for x in expected]


def test_the_copy_engine_moves_tensors_of_the_call_alone():
    query, out, table = (torch.zeros(4, 8) for _ in range(3))
    with Recorder() as recorder:
        launch(query, out, maps=[(lasting(table), (4, 8), (32,), (1, 8))])
    assert recorder.planned((query, out), 1) is None


@on_a_cpu
def test_gradients_that_torch_sums_are_left_to_python(seen):
    """Keys of grouped heads get a gradient from each head, which a kernel for one query does not sum."""
    query, key, value = (torch.randn(B, heads, tokens, D).half() for heads, tokens in ((4, 1), (2, 9), (2, 9)))
    args = AttentionArgs(query, key, value, None, None, None, None, 0.0, False, 0.25)
    for heads, refused in ((2, True), (4, False)):
        key, value = (x.repeat_interleave(heads // 2, 1) for x in (key, value))
        args = args._replace(key=key, value=value)
        out, lse = OPS.launchers("short").forward(args)
        with Recorder() as recorder:
            OPS.launchers("short").backward(args, torch.randn_like(out), None, None, lse, bias_grad=False, packed=None)
        assert recorder.refused == refused


@on_a_cpu
@pytest.mark.parametrize("dim", [64, 128])
def test_delta_by_another_kernel_is_left_to_python(monkeypatch, dim):
    monkeypatch.setattr(sm90, "_launch", lambda *given: lambda *pointers, maps: None)
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 132)
    query, key, value, dout, out = (torch.randn(1, 2, 70, dim).half() for _ in range(5))
    args = AttentionArgs(query, key, value, None, None, None, None, 0.0, False, 0.25)
    with Recorder() as recorder:
        long_launchers.backward(args, dout, None, out, torch.randn(1, 2, 70), bias_grad=False, packed=None)
    assert recorder.refused == (dim > 64)


def test_a_number_knows_its_slot():
    number = Number(5, KEYS)
    assert (number, number.slot, hash(number)) == (5, KEYS, hash(5))
