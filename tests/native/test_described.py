"""C++ passes to a kernel what Python passed: every address, every tensor map and every number, for the kernels of sm_90, without a GPU.

The kernels do not run here: a launch writes down its arguments (`recorded_cuda`).
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from recorded_cuda import ENCODE, Stub, bound_of_long, functions

from saccade import native
from saccade.engine import prepare
from saccade.engine.dispatch import Plan
from saccade.engine.layout import unpack
from saccade.engine.prepare import Prepared
from saccade.exact import replay
from saccade.exact.args import AttentionArgs
from saccade.exact.long import backend as long
from saccade.exact.long import launchers as long_launchers
from saccade.exact.long import sm90
from saccade.exact.op import OPS
from saccade.exact.problem import describe_attention
from saccade.exact.short import backend as short_backend
from saccade.exact.short import launchers as short_launchers
from saccade.exact.short import sm90 as short_sm90
from saccade.exact.short.config import Config
from saccade.native.build import Build
from saccade.native.recording import Recorder

BATCH, HEADS = 3, 4
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


@pytest.fixture
def seen(monkeypatch):
    """Launches so far: (kernel, grid, threads, shared bytes, maps, arguments)."""
    monkeypatch.setenv("SACCADE_NATIVE", "1")
    build = Build()
    module = build.wait()
    if module is None:
        pytest.skip(build.refusal)
    found: list = []

    def bound_of_short(self, device):
        return Stub(found, self.built.name, self.programs, self.built.threads, self.built.shared_bytes)

    monkeypatch.setattr(sm90, "_launch", bound_of_long(found))
    monkeypatch.setattr(sm90, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(short_sm90, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(short_sm90.Sm90Launch, "_bind", bound_of_short)
    encode, launch = functions(found)
    launch, stream, encode = _LAUNCH(launch), _STREAM(lambda index, into: 0), ENCODE(encode)
    module.use_driver(*(ctypes.cast(f, ctypes.c_void_p).value for f in (launch, stream, encode)))
    monkeypatch.setattr(native, "calls", module.Memory())
    prepare.forget()
    yield found
    module.use_driver(0, 0, 0)


def named(launch, tensors: dict[str, torch.Tensor]):
    """The launch with the addresses of known tensors replaced by their names, and of others by "other"."""
    names = {x.data_ptr(): name for name, x in tensors.items()}

    def of(value):
        # no size of these calls is as large as the least address of a process, 2**22
        return names.get(value, "other" if value > 2**20 else value)

    kernel, grid, threads, shared, maps, values = launch
    return kernel, grid, threads, shared, tuple((of(at), *shape) for at, *shape in maps), tuple(of(v) for v in values)


def arguments(length: int, lengths: bool, packed: bool, dropout_p: float, kv_heads: int = HEADS, apart: bool = False):
    """The call, the tensors among its arguments by name, and what the kernels are given."""
    torch.manual_seed(1)
    if packed:
        qkv = torch.randn(BATCH, length, 3, HEADS, 64, dtype=torch.bfloat16)
        # query, key and value behind one another, each whole
        qkv = qkv.permute(2, 0, 1, 3, 4).contiguous().permute(1, 2, 0, 3, 4) if apart else qkv
        qkv.requires_grad_()
        leaves, split = [qkv], [x.detach() for x in unpack(qkv)]
    else:
        all_heads = (HEADS, kv_heads, kv_heads)
        leaves = [torch.randn(BATCH, length, h, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for h in all_heads]
        split = [x.detach() for x in leaves]
    real = torch.randint(1, length + 1, (BATCH,), dtype=torch.int32) if lengths else None
    options = (None, dropout_p, False, None, *[kv_heads != HEADS] * (not packed), real, False, "long")
    given = dict(zip(("query", "key", "value"), split, strict=True))
    if lengths:
        given["lengths"] = real
    return (*leaves, *options), leaves, given, real


def check(
    seen: list,
    chosen,
    run_forward,
    run_backward,
    length: int,
    lengths: bool,
    packed: bool,
    monkeypatch,
    dropout_p: float = 0.0,
    kv_heads: int = HEADS,
    apart: bool = False,
) -> list:
    """Weak references to the tensors of the call."""
    call, leaves, given, real = arguments(length, lengths, packed, dropout_p, kv_heads, apart)
    split = [given[n] for n in ("query", "key", "value")]
    problem = describe_attention(*split, None, dropout_p, False, None, kv_heads != HEADS, real, False, packed, True)
    prepared = Prepared(Plan(problem, chosen, named=True))
    seed = torch.tensor([5]) if dropout_p else None
    args = AttentionArgs(*split, None, None, real, seed, dropout_p, False, 0.125, launches=prepared.launches)
    with Recorder() as recorder:
        out, lse = run_forward(args)
    by_python = {"forward": named(seen.pop(), given | {"out": out})}
    dout = torch.randn(BATCH, length, HEADS, 64, dtype=torch.bfloat16).transpose(1, 2)
    into = torch.empty(leaves[0].shape, dtype=torch.bfloat16) if packed else None
    gradients = run_backward(args._replace(launches=None), dout, None, out, lse, bias_grad=False, packed=into)[:3]
    names = dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))
    by_python["backward"] = named(seen.pop(), given | {"out": out, "dout": dout} | names)
    inputs = tuple([*leaves] + ([real] if lengths else []))
    replay.record(prepared, call, inputs, args, out, lse, recorder)
    assert len(native.calls) == 1
    if lengths:
        assert native.calls.run(*call) is None
        native.calls.checked(real, length)
    # C++ plans backward by calling Python, which then describes its launch
    monkeypatch.setattr(OPS, "launchers", lambda asked: SimpleNamespace(backward=run_backward))
    for _ in range(3):
        made = native.calls.run(*call)
        assert made.stride() == (out.transpose(1, 2) if packed else out).stride()
        assert named(seen.pop(), given | {"out": made}) == by_python["forward"]
        dout = torch.randn(BATCH, length, HEADS, 64, dtype=torch.bfloat16)
        dout = dout if packed else dout.transpose(1, 2)
        found = torch.autograd.grad(made, leaves, dout)
        gradients = unpack(found[0]) if packed else found
        known = given | {"dout": dout, "out": made} | dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))
        launched = named(seen.pop(), known)
        assert launched == by_python["backward"]
        wanted = [into] if packed else leaves
        assert [x.stride() for x in found] == [x.stride() for x in wanted]
    assert {"dquery", "dkey", "dvalue"} <= {at for at, *_ in launched[4]} | set(launched[5])
    assert not seen
    return [weakref.ref(x) for x in (*leaves, *split, out, lse, made, dout, *found, *gradients)]


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["all", "dropout"])
def test_rows_beyond_128_tokens(seen, dropout_p, lengths, packed, monkeypatch):
    check(seen, long.LONG, long_launchers.forward, long_launchers.backward, 197, lengths, packed, monkeypatch, dropout_p)


def test_a_packed_tensor_that_is_not_contiguous(seen, monkeypatch):
    """Its gradient is contiguous, from C++ as from Python, and the kernel writes dk and dv where they lie in that."""
    check(seen, long.LONG, long_launchers.forward, long_launchers.backward, 197, False, True, monkeypatch, apart=True)


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2], ids=["all", "dropout"])
def test_grouped_heads(seen, dropout_p, lengths, monkeypatch):
    check(seen, long.LONG, long_launchers.forward, long_launchers.backward, 197, lengths, False, monkeypatch, dropout_p, 2)


def test_the_plan_of_backward_is_found_by_cpp_alone(seen, monkeypatch):
    """Python plans the first backward; later ones never reach it."""
    calls = []

    def counted(*given, **options):
        calls.append(1)
        return long_launchers.backward(*given, **options)

    check(seen, long.LONG, long_launchers.forward, counted, 130, False, False, monkeypatch)
    assert len(calls) == 2  # once for the comparison


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_nothing_that_is_recorded_holds_a_tensor(seen, packed, monkeypatch):
    alive = check(seen, long.LONG, long_launchers.forward, long_launchers.backward, 197, True, packed, monkeypatch, 0.2)
    gc.collect()
    assert len(native.calls) == 1
    assert not [x for x in alive if x() is not None]


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_the_short_kernels_of_sm90(seen, packed, monkeypatch):
    config = Config(8, sm90="forward"), Config(8, sm90="backward", programs_per_sm=1, persistent=True)
    monkeypatch.setattr(short_launchers, "choose", lambda direction, *given, **options: config[direction == "bwd"])
    run = short_backend.SHORT
    check(seen, run, short_launchers.forward, short_launchers.backward, 128, False, packed, monkeypatch)
