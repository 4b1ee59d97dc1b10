"""Calls of `long` with a bias that rows share: C++ makes forward and backward with the launches of Python, and adds up the parts as Python does."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import recorded_cuda
import torch
from recorded_cuda import NUMBERS, bound_of_long, call_of_bias_gradient
from recorded_triton import number_of, recording

import saccade
from saccade import native
from saccade.engine import dispatch
from saccade.exact.long import bias_gradient, sm90
from saccade.exact.op import OPS
from saccade.exact.recorded import begin_recording
from saccade.launch import cuda as launch_cuda
from saccade.launch.cache import LaunchCache
from saccade.launch.cuda import CudaLaunch
from saccade.native.recording import Recorder

BATCH, HEADS, DIM = 6, 2, 64
SIZES = (136, 192), (200, 256)  # queries and keys
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are stubs on a CPU")


@pytest.fixture
def seen(monkeypatch):
    """Launches so far, Triton's (kernel, programs, arguments) and those of CUDA C++ (see `recorded_cuda`). Calls are recorded as on a GPU."""
    made = recording(monkeypatch, with_cuda=True)
    found = next(made)
    monkeypatch.setattr("saccade.exact.api.begin", begin_recording)
    monkeypatch.setattr(dispatch, "why_not", lambda backend, problem: [])
    monkeypatch.setattr(sm90, "_launch", bound_of_long(found))
    monkeypatch.setattr(bias_gradient, "_call", call_of_bias_gradient(found))
    monkeypatch.setattr(bias_gradient, "_LAUNCHES", LaunchCache())
    for module in (sm90, bias_gradient):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    # what Python's calls free could begin where their next memory does
    held, scratch = [], sm90.scratch
    monkeypatch.setattr(sm90, "scratch", lambda *given: held.append(scratch(*given)) or held[-1])
    yield found
    next(made, None)


class Call:
    """A kind of calls. features: of "lengths", "dropout" and "keys", a mask of keys. trained: the bias has a gradient."""

    def __init__(self, size, shape, features, trained, monkeypatch):
        self.size, self.features = size, features
        self.shape = (*shape, *size)
        leading = (1,) * (4 - len(self.shape)) + self.shape[:-2]
        _, self.parts = bias_gradient.parts_of(
            leading[0] * leading[1] * -(-size[0] // 128) * -(-size[1] // 128), BATCH * HEADS // (leading[0] * leading[1]), 132
        )
        # what the kernel leaves, of which each order of addition has bits of its own
        self.sums = torch.randn(self.parts, *leading, *size) * 2.0 ** torch.randint(-8, 8, (self.parts, *leading, *size))
        self.trained = trained
        self.kind = "_dropout" * ("dropout" in features) + "_bias" + "_keys" * ("keys" in features)
        monkeypatch.setitem(recorded_cuda.EFFECTS, number_of(f"bias_gradient{self.kind}"), self._leave)

    def _leave(self, pointers) -> None:
        ctypes.memmove(pointers[4], self.sums.data_ptr(), 4 * self.sums.numel())

    @property
    def kernels(self) -> list[int]:
        """The numbers of the kernels that are launched."""
        names = [f"forward{self.kind}", "rows_kernel", f"backward{self.kind}", *[f"bias_gradient{self.kind}"] * self.trained]
        return [number_of(name) for name in names]

    @property
    def scratch(self) -> tuple[int, ...]:
        """Bytes of the memory that the launches of backward share."""
        parked = BATCH * HEADS * -(-self.size[0] // 64) * 64 * DIM
        numbers = 3 * BATCH * HEADS * self.size[0]
        return (4 * numbers, 4 * parked, *[4 * self.sums.numel()] * self.trained)

    @property
    def dbias(self) -> torch.Tensor:
        total = self.sums[0] if self.parts == 1 else self.sums.sum(0)
        return total.bfloat16().view(self.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """New ones, with the same layouts."""
        batch = (BATCH // 3, 3) if self.shape[:1] == (3,) else (BATCH,)
        rows = [torch.randn(*batch, n, HEADS, DIM).bfloat16().transpose(-3, -2) for n in (self.size[0], *[self.size[1]] * 2)]
        found = dict(zip(("query", "key", "value"), (x.requires_grad_() for x in rows), strict=True))
        found["bias"] = torch.randn(self.shape).bfloat16().requires_grad_(self.trained)
        if "lengths" in self.features:
            found["lengths"] = torch.randint(1, self.size[1] + 1, (BATCH,), dtype=torch.int32)
            native.calls.checked(found["lengths"], self.size[1])
        if "keys" in self.features:
            found["key_mask"] = torch.rand(*batch, self.size[1]) > 0.3
        return found

    def run(self, seen, given=None):
        """(name of the node of autograd, launches with names in the place of addresses, gradients) of a call."""
        given, before = given or self.tensors(), len(seen)
        options = {name: given[name] for name in ("lengths", "key_mask") if name in given}
        dropped = 0.25 if "dropout" in self.features else 0.0
        leaves = [given[n] for n in ("query", "key", "value", *["bias"] * self.trained)]
        out = saccade.attention(*[given[n] for n in ("query", "key", "value", "bias")], dropped, backend="long", **options)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, dout)
        given = given | {"out": out, "dout": dout} | dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=False))
        return out.grad_fn.name(), self._named(seen[before:], given), gradients

    def _named(self, launches, tensors):
        names = {x.data_ptr(): name for name, x in tensors.items()}

        def name(address, said):
            assert address > 2**24
            assert address not in names, f"{said} lies where {names[address]} begins"
            names[address] = said

        forward, rows, backward, *gradient = launches
        name(forward[5][5], "lse")
        if "dropout" in self.features:
            name(forward[5][-1 - len(NUMBERS)], "seed")
        for i, said in enumerate(("shift", "inverse", "terms")):
            name(rows[2][9] + 4 * i * BATCH * HEADS * self.size[0], said)
        name(backward[5][7], "parked")
        if gradient:
            name(gradient[0][5][4], "sums")

        def told(x):
            return [told(y) for y in x] if isinstance(x, tuple | list) else names.get(x, "unknown" if x > 2**24 else x)

        return told(launches)


# (of all, of the heads, of each window and head, of each row and head, of each row)
SHAPES = (), (1, HEADS), (3, HEADS), (BATCH, HEADS), (BATCH, 1)
FEATURES = [(), ("keys",), ("lengths",), ("dropout",), ("keys", "dropout"), ("keys", "lengths")]


def by_cpp(monkeypatch):
    """From here on Python may make no launch."""
    monkeypatch.setattr("saccade.exact.api.prepare_attention", lambda *given: pytest.fail("Python makes the call"))
    monkeypatch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the gradient"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("features", "shape"), [(f, s) for f in FEATURES for s in SHAPES if s[:1] != (3,) or "lengths" not in f], ids=str
)
@pytest.mark.parametrize("trained", [False, True], ids=["constant", "trained"])
def test_forward_and_backward(seen, trained, features, shape, monkeypatch):
    """Two sizes take turns."""
    calls, plans, planned = [Call(size, shape, features, trained, monkeypatch) for size in SIZES], [], Recorder.planned
    monkeypatch.setattr(Recorder, "planned", lambda *given: plans.append(planned(*given)) or plans[-1])
    by_python = []
    for call in calls:
        monkeypatch.setitem(recorded_cuda.EFFECTS, call.kernels[-1], call._leave) if trained else None
        first, second = call.run(seen), call.run(seen)  # the latter's backward is Python's, which tells C++ of it
        assert [name == "saccade::KnownAttentionBackward" for name, *_ in (first, second)] == [False, True]
        assert first[1] == second[1]
        assert plans.pop().scratch == call.scratch
        assert plans.pop().scratch == ()
        by_python.append(first)
    assert len(native.calls) == 2
    by_cpp(monkeypatch)
    for call, first in [*zip(calls, by_python, strict=True)] * 2:
        monkeypatch.setitem(recorded_cuda.EFFECTS, call.kernels[-1], call._leave) if trained else None
        name, launches, gradients = call.run(seen)
        assert name == "saccade::KnownAttentionBackward"
        assert launches == first[1]
        assert [launch[0] for launch in launches] == call.kernels
        assert [(x.shape, x.stride(), x.dtype) for x in gradients] == [(x.shape, x.stride(), x.dtype) for x in first[2]]
        if trained:
            assert torch.equal(gradients[3], call.dbias)
            assert torch.equal(first[2][3], call.dbias)
    assert not plans


@pytest.mark.parametrize("features", FEATURES, ids="-".join)
def test_what_each_argument_is(seen, features, monkeypatch):
    """By the names that the sources give to maps and pointers."""
    call = Call(SIZES[0], (1, HEADS), features, True, monkeypatch)
    for _ in range(2):
        call.run(seen)
    by_cpp(monkeypatch)
    forward, rows, *backward = call.run(seen)[1]
    length, keys = "lengths" if "lengths" in features else 0, {"key_mask": "key_mask"} if "keys" in features else {}
    assert rows[2][:10] == [
        "query", "key", "bias", length or "query", "key_mask" if keys else "query", "dout", "out", "lse", "lse", "shift"
    ]  # fmt: skip
    written = {"dquery": "dquery", "dkey": "dkey", "dvalue": "dvalue"}
    wanted = (
        ("forward", forward, {"cu_k": length, "out": "out", "lse": "lse"}),
        ("backward", backward[0], {
            "cu_k": length, "lse": "shift", "dlse": 0, "delta": "terms", "parked": "parked", "inverse_sums": "inverse", **written,
        }),
        ("bias_gradient", backward[1], {"lengths": length, "shift": "shift", "inverse_sums": "inverse", "terms": "terms", "dbias": "sums"}),
    )  # fmt: skip
    for name, launch, pointers in wanted:
        maps, names = recorded_cuda.parameters(f"{name}{call.kind}")
        assert [x[0] for x in launch[4]] == [x.removesuffix("_map") for x in maps]
        found = dict(zip(names, launch[5], strict=False))
        seed = {"seed": "seed"} if "dropout" in features else {}
        assert {x: found[x] for x in (*pointers, *keys, *seed)} == pointers | keys | seed
        assert "unknown" not in str(launch)


def test_nothing_that_is_recorded_holds_a_tensor(seen, monkeypatch):
    call, alive = Call(SIZES[0], (1, HEADS), ("keys",), True, monkeypatch), []
    for _ in range(3):
        given = call.tensors()
        *_, gradients = call.run(seen, given)
        alive += [weakref.ref(x) for x in (*given.values(), *gradients)]
        del given, gradients
    gc.collect()
    assert len(native.calls) == 1
    assert not [x for x in alive if x() is not None]


def test_a_mask_of_keys_is_saved_as_any_tensor(seen, monkeypatch):
    """Hooks may bring it back elsewhere, and backward notices a change in place."""
    call = Call(SIZES[0], (1, HEADS), ("keys",), True, monkeypatch)
    for _ in range(2):
        call.run(seen)
    by_cpp(monkeypatch)
    given, copies = call.tensors(), {}
    names = {x.data_ptr(): name for name, x in given.items()}

    def copied(tensor):
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        copies[names.get(tensor.data_ptr())] = found
        return found

    def run():
        return saccade.attention(
            *[given[n] for n in ("query", "key", "value", "bias")], key_mask=given["key_mask"], backend="long"
        )

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, copied):
        out = run()
    torch.autograd.grad(out, given["bias"], torch.randn_like(out))
    maps, pointers = recorded_cuda.parameters(f"bias_gradient{call.kind}")
    launch = seen[-1]
    assert dict(zip(pointers, launch[5], strict=False))["key_mask"] == copies["key_mask"].data_ptr()
    assert dict(zip(maps, launch[4], strict=True))["bias_map"][0] == copies["bias"].data_ptr()
    out = run()
    given["key_mask"].logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, given["bias"], torch.randn_like(out))


COPIES = {  # keys, how the bias lies, and the directions in which it is copied
    "rows that fill no tiles": (200, lambda x: x, ""),
    "a view of wider rows": (197, lambda x: torch.nn.functional.pad(x, (0, 3))[..., :197], ""),
    "rows at odd addresses": (197, lambda x: x, "forward and backward"),
    "transposed": (192, lambda x: x.mT.contiguous().mT, "forward and backward"),
    # the node of C++ brings a saved tensor back at an address of its own
    "begins at an odd address": (192, lambda x: torch.nn.functional.pad(x, (1, 7))[..., 1:193], "forward"),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_bias_that_is_copied(seen, kind, monkeypatch):
    """C++ launches the copy too, and hands it to every kernel that moves tiles of the bias."""
    keys, laid, copied = COPIES[kind]
    wide = -(-keys // 8) * 8
    call, copy, kinds = Call((136, keys), (1, HEADS), (), True, monkeypatch), number_of("bias_rows"), []
    monkeypatch.setattr(CudaLaunch, "ready", recorded_cuda.ready_of(seen, "bias_rows"))
    monkeypatch.setattr(launch_cuda, "_READY", LaunchCache())
    for i in range(4):
        if i == 2:
            by_cpp(monkeypatch)
        given, before = call.tensors(), len(seen)
        bias = given["bias"] = laid(given["bias"].detach()).requires_grad_()
        leaves = [given[n] for n in ("query", "key", "value", "bias")]
        out = saccade.attention(*leaves, backend="long")
        forward, middle = seen[before:], len(seen)
        *_, dbias = torch.autograd.grad(out, leaves, torch.randn_like(out))
        assert torch.equal(dbias, call.dbias)
        for direction, launches in (("forward", forward), ("backward", seen[middle:])):
            copies = [x for x in launches if x[0] == copy]
            assert len(copies) == (direction in copied or (bool(copied) and i == 0))
            maps = [x[4][-1] for x in launches if len(x) > 3 and x[0] != copy]
            assert len(maps) == (1 if direction == "forward" else 2)
            (address,) = {x[0] for x in maps}
            if copies:
                assert copies[0][5][:2] == (bias.data_ptr(), address)
                assert {x[1:3] for x in maps} == {((1, HEADS, 136, keys), (16, 2 * 136 * wide, 2 * wide))}
            assert (address == bias.data_ptr()) == (not copied)
        kinds.append([x[:2] for x in seen[before:]])
    assert kinds[1] == kinds[2] == kinds[3]
    assert len(native.calls) == 1


def test_an_op_without_the_gradient_of_the_bias(seen, monkeypatch):
    """As compiled programs call it: below autograd."""
    monkeypatch.setattr("saccade.engine.op_replay.may_record", lambda *given: True)
    call, kinds = Call(SIZES[0], (1, HEADS), ("keys",), False, monkeypatch), []
    for i in range(3):
        given, before = {n: x.detach() for n, x in call.tensors().items()}, len(seen)
        mask = given["key_mask"][:, None, None]
        arguments = (given["query"], given["key"], given["value"], mask, given["bias"], None, None, 0.0, False, 0.125)
        if i == 2:
            monkeypatch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the call"))
        out, lse = OPS.forward_op(*arguments, "long")
        dout = torch.randn_like(out)
        gradients = OPS.backward_op(dout, None, out, lse, *arguments, False, "long")[:3]
        tensors = given | {"out": out, "dout": dout} | dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))
        kinds.append(call._named(seen[before:], tensors))
    assert len(native.calls) == 2
    assert kinds[0] == kinds[1] == kinds[2]
    assert [launch[0] for launch in kinds[0]] == call.kernels
