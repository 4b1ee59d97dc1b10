"""Calls that C++ replays, on a CPU: the launch is a function of this file that computes attention instead of a kernel."""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import os
import struct
import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.native.build import Build
from saccade.native.described import Described, Moved, Planned

BATCH, HEADS, TIME, DIM = 2, 3, 5, 8
SCALE = DIM**-0.5
FORWARD, BACKWARD, COPY = 1, 2, 3
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint32)] * 2, *[ctypes.c_int] * 4,
)  # fmt: skip
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


@pytest.fixture(scope="module")
def module():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SACCADE_NATIVE", "1")
        build = Build()
    found = build.wait()
    if found is None:
        pytest.skip(build.refusal)
    return found


def at(address: int, strides=None) -> torch.Tensor:
    """The float32 tensor `[B, H, T, D]` at an address."""
    memory = (ctypes.c_float * (BATCH * HEADS * TIME * DIM * 3)).from_address(address)
    strides = strides or (HEADS * TIME * DIM, TIME * DIM, DIM, 1)
    return torch.frombuffer(memory, dtype=torch.float32).as_strided((BATCH, HEADS, TIME, DIM), strides)


@pytest.fixture
def launched(module):
    """The launches so far, as (kernel, grid, threads, shared bytes, scale): each computes attention or its gradients."""
    seen = []

    def launch(kernel, x, y, z, threads, _, __, shared, stream, places, ___):
        if kernel == COPY:
            ctypes.memmove(*reversed([ctypes.c_int64.from_address(places[i]).value for i in range(2)]), shared)
            return 0
        count = 6 if kernel == FORWARD else 9
        addresses = [ctypes.c_int64.from_address(places[i]).value for i in range(count - 1)]
        (scale,) = struct.unpack("f", ctypes.string_at(places[count - 1], 4))
        seen.append((kernel, (x, y, z), threads, shared, scale))
        if kernel == FORWARD:
            q, k, v, out, lse = (at(a) for a in addresses)
            scores = scale * (q @ k.mT)
            out.copy_(scores.softmax(-1) @ v)
            lse.flatten()[: BATCH * HEADS * TIME].copy_(scores.logsumexp(-1).flatten())
        else:
            q, k, v, _, dout, *gradients = (at(a) for a in addresses)
            with torch.enable_grad():
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                found = torch.autograd.grad((scale * (leaves[0] @ leaves[1].mT)).softmax(-1) @ leaves[2], leaves, dout.clone())
            for into, gradient in zip(gradients, found, strict=True):
                into.copy_(gradient)
        return 0

    def stream(index, into):
        into[0] = 0
        return 0

    functions = _LAUNCH(launch), _STREAM(stream), _ENCODE(encode)
    module.use_driver(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))
    yield seen
    module.use_driver(0, 0, 0)


def encode(into, kind, rank, address, sizes, strides, box, ones, interleave, swizzle, promotion, fill):
    """Writes down what the driver would encode: the address, and the numbers of the description."""
    assert (kind, interleave, promotion, fill) == (9, 0, 3, 0)
    assert swizzle == (3 if box[0] == 64 else 2)
    assert [ones[i] for i in range(rank)] == [1] * rank
    assert into % 64 == 0
    numbers = [address, *sizes[:rank], *strides[: rank - 1], *box[:rank]]
    ctypes.memmove(into, struct.pack(f"{len(numbers)}q", *numbers), 8 * len(numbers))
    return 0


def launch_of(kernel: int, slots: tuple[int, ...]):
    (scale,) = struct.unpack("i", struct.pack("f", SCALE))
    return Described(kernel, (7, 1, 1), 128, 4096, (*slots, -1), (*(0,) * len(slots), scale))


LSE = torch.empty(BATCH, HEADS, TIME)
PLAIN = (False, False, False, -1, TIME, False, -1, False)  # the form of a call (`remember`)


def inputs(requires_grad=True, dtype=torch.float32):
    torch.manual_seed(4)
    return [torch.randn(BATCH, HEADS, TIME, DIM, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]


def attend(q, k, v):
    return (SCALE * (q @ k.mT)).softmax(-1) @ v


def remember(memory, tensors, by_python):
    q = tensors[0]
    gradients = [torch.empty_like(x, device="meta") for x in tensors] if q.requires_grad else []
    lse = torch.empty(BATCH, HEADS, TIME)
    assert memory.remember(
        (*tensors,), q.detach(), lse, Planned([launch_of(FORWARD, (0, 1, 2, 3, 4))]), gradients, by_python, PLAIN
    )


def by_python(*tensors):
    q, k, v, lse, dout = tensors
    assert lse.shape == (BATCH, HEADS, TIME)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(attend(*leaves), leaves, dout)


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_call_is_replayed_and_no_other(module, launched):
    memory = module.Memory()
    tensors = inputs(requires_grad=False)
    assert memory.run(*tensors) is None
    remember(memory, tensors, by_python)
    assert_close([memory.run(*tensors)], [attend(*tensors)])
    assert launched == [(FORWARD, (7, 1, 1), 128, 4096, pytest.approx(SCALE))]
    again = [x + 1 for x in tensors]  # other data, the same launch
    assert_close([memory.run(*again)], [attend(*again)])
    q, k, v = tensors
    others = [
        (q, k), (q, k, v, v), (q.double(), k.double(), v.double()), (q[:1], k[:1], v[:1]), (q.mT.contiguous().mT, k, v),
        tuple(inputs()), (torch.empty(q.numel() + 1)[1:].view(q.shape), k, v), (q.to("meta"), k, v), (q.to_sparse(), k, v),
        (q, k, None), (q, k, 1.0), (None, k, v), (q, k, v, None), (q, k, v, [1]), (q, k, v, 1), (),
    ]  # fmt: skip
    for number, other in enumerate(others):
        assert memory.run(*other) is None, number
    assert len(launched) == 2
    assert len(memory) == 1
    memory.forget()
    assert memory.run(*tensors) is None


REENTRANT = """
import torch
from saccade.native.build import Build

class Plan:
    def __del__(self):
        # any of these may also come from another thread, which the end of a Python object lets in
        memory.forget()
        remember(torch.empty(1, 1, 1, 3), None)
        assert memory.run(*(torch.empty(1, 1, 1, 2),) * 3) is None
        memory.checked(torch.tensor([1]), 1)

def remember(x, plan):
    assert memory.remember((x, x, x), x, x[..., 0], ([], (), (), ()), [], plan, (False, False, False, -1, 1, False, -1, False))

for how in "forget", "replace", "overflow":
    print(how, flush=True)
    memory = Build().wait().Memory()
    for size in range(4, 40):
        remember(torch.empty(1, 1, 1, size), Plan())
    if how == "forget":
        memory.forget()
    elif how == "replace":
        remember(torch.empty(1, 1, 1, 4), None)
    else:
        for size in range(40, 4200):
            remember(torch.empty(1, 1, 1, size), None)
    memory.forget()
    memory.forget()
    print(len(memory), flush=True)
"""


def test_the_end_of_a_call_may_use_the_memory(module):
    """In a process of its own, which would die."""
    environment = os.environ | {"SACCADE_NATIVE": "1"}
    command = [sys.executable, "-c", REENTRANT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "forget\n0\nreplace\n0\noverflow\n0\n"), done.stderr


def test_options_count_by_value(module, launched):
    memory = module.Memory()
    tensors = inputs(requires_grad=False)
    options = [
        (None,),
        (True,),
        (False,),
        (0.0,),
        (0.5,),
        (-0.0,),
        ("auto",),
        ("short",),
        ("",),
        ("a name that is long",),
        ("a name that is longer",),
        (None, 0.5),
        (0.5, None),
    ]
    for given in options:
        assert memory.run(*tensors, *given) is None, given
        assert memory.remember(
            (*tensors, *given),
            tensors[0],
            torch.empty(BATCH, HEADS, TIME),
            Planned([launch_of(FORWARD, (0, 1, 2, 3, 4))]),
            [],
            None,
            PLAIN,
        )
        assert memory.run(*tensors, *given) is not None, given
    assert len(memory) == len(options)
    assert memory.run(*tensors, float("0.5")) is not None  # another object of the same value
    for odd in (1, 0, torch.float32, "x" * 33, (), torch.tensor(0.5, device="meta")):
        assert memory.run(*tensors, odd) is None, odd
        assert memory.key((*tensors, odd)) is None


def test_a_thread_of_its_own(module, launched):
    memory = module.Memory()
    tensors = inputs()
    remember(memory, tensors, by_python)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: memory.run(*tensors), range(64)):
            assert_close([out], [attend(*tensors)])
            assert_close(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(attend(*tensors).sum(), tensors))


def test_nothing_that_python_looks_after(module, launched):
    memory = module.Memory()
    tensors = inputs(requires_grad=False)
    remember(memory, tensors, by_python)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        pass

    with Watch():
        assert memory.run(*tensors) is None
    with torch.overrides.BaseTorchFunctionMode():
        assert memory.run(*tensors) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.run(*tensors) is None
    half = [x.bfloat16() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.key((*half,)) is not None
        # one tensor of another dtype is one that Python casts
        for other in range(3):
            assert memory.key(tuple(tensors[i] if i == other else half[i] for i in range(3))) is None
    with torch.autograd.forward_ad.dual_level():
        assert memory.run(*tensors) is None
    assert memory.run(*(x.as_subclass(Own) for x in tensors)) is None
    nested = torch.nested.nested_tensor([torch.randn(4, 8), torch.randn(3, 8)])  # without sizes
    assert memory.run(nested, nested, nested) is None
    assert memory.run(*(x.to_sparse() for x in tensors)) is None
    with torch.inference_mode():
        assert memory.run(*tensors) is not None
        frozen = [x.clone() for x in tensors]
    assert memory.run(*frozen) is None
    found = []
    torch.vmap(lambda q: found.append(memory.run(q, *tensors[1:])) or q)(torch.stack([tensors[0]] * 2))
    assert found == [None]


def test_gradients(module, launched):
    memory = module.Memory()
    tensors = inputs()
    calls = []

    def plan(*given):
        calls.append(given)
        assert memory.remember_backward(key, given, Planned([launch_of(BACKWARD, (0, 1, 2, 3, 4, 5, 6, 7))]))
        return by_python(*given)

    remember(memory, tensors, plan)
    key = memory.key((*tensors,))
    dout = torch.randn(BATCH, HEADS, TIME, DIM)
    expected = torch.autograd.grad(attend(*tensors), tensors, dout)
    for times in range(3):
        out = memory.run(*tensors)
        assert out.grad_fn.name() == "saccade::KnownAttentionBackward"
        assert_close([out], [attend(*tensors)])
        assert_close(torch.autograd.grad(out, tensors, dout), expected)
        assert len(calls) == 1
        assert [kernel for kernel, *_ in launched].count(BACKWARD) == times
    zeros = torch.autograd.grad(memory.run(*tensors).sgn().sum(), tensors)  # a gradient that has no memory
    assert_close(zeros, [torch.zeros_like(x) for x in tensors])
    # torch negates it when it reads it
    assert_close(torch.autograd.grad(memory.run(*tensors), tensors, torch._neg_view(-dout)), expected)
    # a gradient with another layout is planned again, and a broadcast one is right too
    strange = dout.mT.contiguous().mT
    assert_close(torch.autograd.grad(memory.run(*tensors), tensors, strange), expected)
    memory.run(*tensors).sum().backward()
    assert_close([x.grad for x in tensors], torch.autograd.grad(attend(*tensors).sum(), tensors))
    with torch.no_grad():
        # another signature: nothing is recorded there
        assert memory.run(*tensors) is None
        remember(memory, [x.detach() for x in tensors], by_python)
        # without recording, whether inputs require gradients does not matter
        assert_close([memory.run(*tensors)], [attend(*tensors)])


def test_a_profiler_sees_forward_and_backward(module, launched):
    memory = module.Memory()
    tensors = inputs()
    remember(memory, tensors, by_python)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        memory.run(*tensors).sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert "saccade::KnownAttention" in names
    assert "saccade::KnownAttentionBackward" in names


def test_graphs_are_freed_and_second_derivatives_refused(module, launched):
    memory = module.Memory()
    tensors = inputs()
    remember(memory, tensors, by_python)
    out = memory.run(*tensors)
    torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    torch.autograd.grad(out.sum(), tensors)
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        torch.autograd.grad(out.sum(), tensors)
    (dq, *_) = torch.autograd.grad(memory.run(*tensors).sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), tensors, allow_unused=True)
    out = memory.run(*tensors)
    with torch.no_grad():
        tensors[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_of_saved_tensors_may_bring_back_other_strides(module, launched):
    memory = module.Memory()
    tensors = inputs()
    launches = [launch_of(BACKWARD, (0, 1, 2, 3, 4, 5, 6, 7))]

    def plan(*given):
        assert memory.remember_backward(key, given, Planned(launches))
        return by_python(*given)

    remember(memory, tensors, plan)
    key = memory.key((*tensors,))
    dout = torch.randn(BATCH, HEADS, TIME, DIM)
    expected = torch.autograd.grad(attend(*tensors), tensors, dout)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT if x.dim() == 4 else x):
            out = memory.run(*tensors)
        assert_close(torch.autograd.grad(out, tensors, dout), expected)


WRONG = {
    "dtype": lambda x: x.double(),
    "rank": lambda x: x[None],
    "fewer rows": lambda x: x[:1],
    "device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "lse"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("known", [False, True], ids=["by Python", "by C++"])
def test_backward_reads_nothing_but_what_forward_saved(module, launched, which, wrong, known):
    memory, tensors = module.Memory(), inputs()
    remember(memory, tensors, by_python)
    dout = torch.ones(BATCH, HEADS, TIME, DIM)
    if known:
        assert memory.remember_backward(
            memory.key((*tensors,)), (*tensors, LSE, dout), Planned([launch_of(BACKWARD, (0, 1, 2, 3, 4, 5, 6, 7))])
        )
    packed = []

    def unpack(given):
        number, tensor = given
        return WRONG[wrong](tensor) if number == which else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or (len(packed) - 1, x), unpack):
        out = memory.run(*tensors)
    with pytest.raises(
        RuntimeError, match=r"backward found .* where forward had saved Float of shape .*must return what it was given"
    ):
        out.backward(dout)
    assert [kernel for kernel, *_ in launched] == [FORWARD]


def test_data_that_was_replaced_by_fewer_rows_is_not_read(module, launched):
    memory, tensors = module.Memory(), inputs()
    remember(memory, tensors, by_python)
    dout = torch.ones(BATCH, HEADS, TIME, DIM)
    assert memory.remember_backward(
        memory.key((*tensors,)), (*tensors, LSE, dout), Planned([launch_of(BACKWARD, (0, 1, 2, 3, 4, 5, 6, 7))])
    )
    out = memory.run(*tensors)
    for tensor in tensors:
        tensor.data = torch.randn(1, HEADS, TIME, DIM)
    with pytest.raises(RuntimeError, match=r"\[1, 3, 5, 8\] on cpu where forward had saved Float of shape \[2, 3, 5, 8\]"):
        out.backward(dout)
    assert [kernel for kernel, *_ in launched] == [FORWARD]


def test_a_tensor_that_was_broadcast_comes_back_dense(module, launched):
    """`save_on_cpu` makes a copy of all its elements."""
    memory, seen = module.Memory(), []
    tensors = [*inputs()[:2], torch.randn(1, HEADS, TIME, DIM).requires_grad_()]
    wide = tensors[2].expand(BATCH, -1, -1, -1)

    def plan(*given):
        seen.append(given[2].stride())
        return by_python(*given)

    remember(memory, [*tensors[:2], wide], plan)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous().clone()):
        out = memory.run(*tensors[:2], wide)
    out.sum().backward()
    assert seen == [wide.stride()]


def test_some_inputs_alone_need_a_gradient(module, launched):
    memory = module.Memory()
    q, k, v = inputs()
    tensors = [q.detach(), k, v.detach()]
    remember_all = [torch.empty_like(x, device="meta") for x in tensors]
    lse = torch.empty(BATCH, HEADS, TIME)
    memory.remember((*tensors,), q.detach(), lse, Planned([launch_of(FORWARD, (0, 1, 2, 3, 4))]), remember_all, by_python, PLAIN)
    out = memory.run(*tensors)
    (found,) = torch.autograd.grad(out.sum(), k)
    assert_close([found], torch.autograd.grad(attend(*tensors).sum(), k))


def test_an_error_of_python_reaches_the_caller(module, launched):
    memory = module.Memory()
    tensors = inputs()

    def failing(*given):
        raise ValueError("no backward today")

    remember(memory, tensors, failing)
    with pytest.raises(ValueError, match="no backward today"):
        memory.run(*tensors).sum().backward()


def test_torch_runs_what_is_left_to_it(module):
    memory = module.Memory()
    tensors = inputs()
    assert memory.remember_torch((*tensors, True), 0.0, True, SCALE, False, None, None)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    out = memory.run(*tensors, True)
    assert_close([out], [expected])
    # a boolean mask arrives as 0 and -inf, and a bias unchanged
    mask = torch.rand(BATCH, 1, TIME, TIME) > 0.3
    mask[0, 0, 1] = False
    assert memory.remember_torch((*tensors, mask), 0.0, False, 0.3, False, torch.tensor(0.0), torch.tensor(float("-inf")))
    bias = torch.randn(1, HEADS, TIME, TIME, requires_grad=True)
    assert memory.remember_torch((*tensors, bias), 0.0, False, 0.3, False, None, None)
    for added in (mask, bias):
        leaves = [*tensors, bias] if added is bias else tensors
        wanted = torch.nn.functional.scaled_dot_product_attention(*tensors, added, scale=0.3)
        found = memory.run(*tensors, added)
        assert_close([found], [wanted])
        assert_close(torch.autograd.grad(found.square().sum(), leaves), torch.autograd.grad(wanted.square().sum(), leaves))
    # a gradient whose rows are misaligned arrives copied
    wide = torch.randn(BATCH, HEADS, TIME, DIM + 1)[..., :DIM]
    assert_close(torch.autograd.grad(out, tensors, wide), torch.autograd.grad(expected, tensors, wide))


def test_wrong_descriptions_are_refused(module):
    memory = module.Memory()
    tensors = inputs(requires_grad=False)
    with pytest.raises(RuntimeError, match="seven arguments"):
        memory.remember((*tensors,))
    plain = launch_of(FORWARD, (0,))
    moved = Moved(0, 0, (2, 8), (16,), (1, 64))
    for launch, said in (
        ((1, 2), "nine parts"),
        (launch_of(FORWARD, (0,) * 97), "at most 96"),
        (plain._replace(moved=(moved,) * 9), "at most 8 tensors"),
        (plain._replace(moved=(moved._replace(strides=()),)), "one stride less"),
    ):
        with pytest.raises(RuntimeError, match=said):
            memory.remember((*tensors,), tensors[0], tensors[0], Planned([launch]), [], None, PLAIN)
    wrong = ((), PLAIN[:5], (*PLAIN[:3], 3, *PLAIN[4:]), (*PLAIN[:6], 3, False), (*PLAIN[:5], True, -1, False), PLAIN[:7])
    for form in wrong:
        with pytest.raises(RuntimeError, match="eight parts"):
            memory.remember((*tensors,), tensors[0], tensors[0], Planned([plain]), [], None, form)


def test_the_log_sum_exp_beside(module, launched):
    memory, tensors = module.Memory(), inputs(requires_grad=False)
    planned = Planned([launch_of(FORWARD, (0, 1, 2, 3, 4))])
    assert memory.remember((*tensors,), tensors[0], LSE, planned, [], None, (*PLAIN[:7], True))
    found = memory.run(*tensors)
    assert isinstance(found, tuple)
    assert_close(found, [attend(*tensors), (SCALE * (tensors[0] @ tensors[1].mT)).logsumexp(-1)])


def test_what_is_no_tensor_is_refused(module):
    memory, (q, k, v) = module.Memory(), inputs(requires_grad=False)
    planned = Planned([launch_of(FORWARD, (0,))])
    for wrong in (None, 3, "out", [q]):
        for given in (
            (wrong, q, planned, [], None, PLAIN),
            (q, wrong, planned, [], None, PLAIN),
            (q, q, planned, [wrong], None, PLAIN),
        ):
            with pytest.raises(TypeError, match=f"a tensor is expected, not {type(wrong).__name__}"):
                memory.remember((q, k, v), *given)
        with pytest.raises(TypeError, match="a tensor is expected"):
            memory.remember_op((q, k, v), [wrong], planned, [])
    with pytest.raises(TypeError, match="a tensor is expected, not NoneType"):
        memory.remember_torch((q, k, v), 0.0, False, 0.3, False, q, None)
    assert memory.remember((q, k, v), q, q, planned, [], None, PLAIN)
    with pytest.raises(TypeError, match="a tensor is expected, not int"):
        memory.remember_backward(memory.key((q, k, v)), (q, k, v, q, 3), planned)


def test_the_copy_engine_is_given_each_address_anew(module, launched):
    """The kernel takes the maps first; here a map holds the numbers that it was encoded from, and Python reads them back."""
    memory, maps = module.Memory(), []
    tensors = inputs(requires_grad=False)

    def keep(kernel, x, y, z, threads, _, __, shared, stream, places, ___):
        maps.append([struct.unpack("10q", ctypes.string_at(places[i], 80)) for i in range(2)])
        maps[-1].append(ctypes.c_int64.from_address(places[2]).value)
        return 0

    function = _LAUNCH(keep)
    encoder, streams = _ENCODE(encode), _STREAM(lambda index, into: 0)
    module.use_driver(*(ctypes.cast(f, ctypes.c_void_p).value for f in (function, streams, encoder)))
    moved = (Moved(0, 16, (5, 4, 64), (640, 128), (1, 3, 64)), Moved(3, 0, (5, 4, 32), (640, 128), (1, 3, 32)))
    described = Described(FORWARD, (7, 1, 1), 128, 4096, (1,), (32,), moved)
    assert memory.remember((*tensors,), tensors[0], torch.empty(BATCH, HEADS, TIME), Planned([described]), [], None, PLAIN)
    for given in (tensors, [x + 1 for x in tensors]):
        out = memory.run(*given)
        first, second, pointer = maps[-1]
        # the contiguous dimension first
        assert first[:9] == (given[0].data_ptr() + 16, 64, 4, 5, 128, 640, 64, 3, 1)
        assert second[:9] == (out.data_ptr(), 32, 4, 5, 128, 640, 32, 3, 1)
        assert pointer == given[1].data_ptr() + 32


def test_backward_is_given_the_output_a_seed_and_scratch_memory(module, launched):
    memory, seen, tensors = module.Memory(), [], inputs()
    form, key = (False, True, True, -1, TIME, False, -1, False), memory.key((*tensors,))

    def plan(*given):
        *_, out, seed = given
        seen.append((out, seed))
        # places: inputs, lse, dout, out, seed, three gradients, scratch
        launch = launch_of(BACKWARD, (0, 1, 2, 3, 4, 7, 8, 9))._replace(
            slots=(0, 1, 2, 3, 4, 7, 8, 9, -1, 5, 6, 10, 11), values=(0,) * 8 + (scale(),) + (0,) * 4
        )
        assert memory.remember_backward(key, given, Planned([launch], (64, 128)))
        return by_python(*given[:5])

    gradients = [torch.empty_like(x, device="meta") for x in tensors]
    lse = torch.empty(BATCH, HEADS, TIME)
    forward = Described(FORWARD, (7, 1, 1), 128, 4096, (0, 1, 2, 3, 4, -1, 5), (0, 0, 0, 0, 0, scale(), 0))
    assert memory.remember((*tensors,), tensors[0].detach(), lse, Planned([forward]), gradients, plan, form)
    dout = torch.randn(BATCH, HEADS, TIME, DIM)
    expected = torch.autograd.grad(attend(*tensors), tensors, dout)
    torch.manual_seed(9)
    out = memory.run(*tensors)
    torch.manual_seed(9)
    assert_close(torch.autograd.grad(out, tensors, dout), expected)
    ((saved, seed),) = seen
    # the same draw as Python makes, and the output without its history: it must not own itself
    assert seed.equal(torch.randint(0, 2**62, (1,), dtype=torch.int64))
    assert saved.equal(out)
    assert saved.grad_fn is None
    assert_close(torch.autograd.grad(memory.run(*tensors), tensors, dout), expected)
    assert len(seen) == 1
    out = memory.run(*tensors)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, tensors, dout)
    watched = weakref.ref(memory.run(*tensors))
    gc.collect()
    assert watched() is None, "an output that nobody holds is kept by its own node"


def scale() -> int:
    return struct.unpack("i", struct.pack("f", SCALE))[0]


def test_lengths_are_taken_once_python_has_looked_at_them(module, launched):
    memory, tensors = module.Memory(), inputs(requires_grad=False)
    lengths = torch.tensor([TIME, TIME - 1], dtype=torch.int32)
    call = (*tensors, lengths)
    assert memory.remember(
        call,
        tensors[0],
        torch.empty(BATCH, HEADS, TIME),
        Planned([launch_of(FORWARD, (0, 1, 2, 4, 5))]),
        [],
        None,
        (False, False, False, 3, TIME, False, -1, False),
    )
    assert memory.run(*call) is None
    memory.checked(lengths, TIME + 1)  # of another call
    assert memory.run(*call) is None
    memory.checked(lengths, TIME)
    assert memory.run(*call) is not None
    # values written since, and another tensor
    lengths[0] = 2
    assert memory.run(*call) is None
    memory.checked(lengths, TIME)
    assert memory.run(*call) is not None
    assert memory.run(*tensors, lengths.clone()) is None
    # the address of a tensor that is gone is not taken for it
    for _ in range(100):
        other = torch.tensor([9, 9], dtype=torch.int32)
        assert memory.run(*tensors, other) is None
        memory.checked(other, TIME)
        del other
    assert memory.run(*call) is not None
    with torch.inference_mode():
        frozen = lengths.clone()
        memory.checked(frozen, TIME)
        assert memory.run(*tensors, frozen) is not None
    for _ in range(70):
        memory.checked(torch.tensor([1, 1], dtype=torch.int32), TIME)
    many = [torch.tensor([1, 1], dtype=torch.int32) for _ in range(70)]
    for one in many:
        memory.checked(one, TIME)
    # the oldest are forgotten
    assert memory.run(*call) is None
    assert memory.run(*tensors, many[-1]) is not None
    assert memory.run(*tensors, many[0]) is None


def test_long_lengths_and_a_row_of_an_expanded_mask_are_taken(module, launched):
    memory, tensors, seen = module.Memory(), inputs(), []
    mask = (torch.arange(BATCH * TIME) % 3 > 0).view(BATCH, 1, 1, TIME).expand(-1, 1, TIME, TIME)
    lengths = torch.tensor([TIME, 9, TIME - 1, 9])[::2]  # int64, and not contiguous
    call = (*tensors, mask, lengths)

    def plan(*given):
        seen.append(given)
        return by_python(*given[:3], *given[5:])

    lse = torch.empty(BATCH, HEADS, TIME)
    # what the launch finds at the place of the lengths is copied into lse
    copied = Described(COPY, (1, 1, 1), 1, 4 * BATCH, (4, 6), (0, 0))
    launches = [launch_of(FORWARD, (0, 1, 2, 5, 6)), copied]
    gradients = [torch.empty_like(x, device="meta") for x in tensors]
    assert memory.remember(
        call, tensors[0].detach(), lse, Planned(launches), gradients, plan, (*PLAIN[:3], 4, TIME, True, 3, False)
    )
    assert memory.run(*call) is None
    memory.checked(lengths, TIME)
    out = memory.run(*call)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(attend(*tensors), tensors, dout)
    assert_close(torch.autograd.grad(out, tensors, dout), expected)
    ((*_, row, narrow, lse, _),) = seen
    assert row.equal(mask[:, :, :1])
    assert row.shape == (BATCH, 1, 1, TIME)
    assert narrow.dtype == torch.int32
    assert narrow.tolist() == lengths.tolist()
    assert lse.view(torch.int32).flatten()[:BATCH].tolist() == lengths.tolist()


def test_dropout_of_torch(module):
    memory, tensors = module.Memory(), inputs()
    assert memory.remember_torch((*tensors, 0.5), 0.5, False, SCALE, False, None, None)
    torch.manual_seed(3)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, dropout_p=0.5, scale=SCALE)
    torch.manual_seed(3)
    assert_close([memory.run(*tensors, 0.5)], [expected])


def test_ops_return_all_their_results(module, launched):
    """Below autograd: the results of forward, then of backward with scratch memory behind them."""
    memory, tensors = module.Memory(), inputs(requires_grad=False)
    call, empty = (*tensors, None, 0.5, "auto:some backend", "forward"), torch.empty(BATCH, HEADS, TIME)
    assert memory.compute(*call) is None
    assert memory.remember_op(call, [tensors[0], empty], Planned([launch_of(FORWARD, (0, 1, 2, 3, 4))]), ())
    assert memory.compute(*call[:-1], "backward") is None
    assert memory.compute(*call[:-2], "auto:some other", "forward") is None
    for given in (tensors, [x + 1 for x in tensors]):
        out, lse = memory.compute(*given, *call[3:])
        assert_close([out], [attend(*given)])
        assert_close([lse], [(SCALE * (given[0] @ given[1].mT)).logsumexp(-1)])
    dout, leaves = torch.randn_like(out), [x.clone().requires_grad_() for x in tensors]
    back = (dout, None, lse, *tensors, "backward")  # slots: dout, lse, query, key, value, three results, scratch
    assert memory.remember_op(back, tensors, Planned([launch_of(BACKWARD, (2, 3, 4, 1, 0, 5, 6, 7))], (64,)), ())
    assert_close(memory.compute(*back), torch.autograd.grad(attend(*leaves), leaves, dout))
    assert all(not x.requires_grad for x in memory.compute(*back))


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(("shape", "groups"), [((HEADS, TIME, TIME), HEADS), ((1, HEADS, 1, TIME), HEADS), ((TIME, 1), 1)])
def test_shares_of_the_gradient_of_a_bias_are_added_up(module, launched, shape, groups, programs):
    """One or two programs of each group leave one; the bias may have one row or column for all."""
    memory, tensors, bias = module.Memory(), inputs(), torch.randn(shape, requires_grad=True)
    call, shares = (*tensors, bias), torch.randn(programs, groups, TIME, TIME)
    # slots of backward: inputs and bias, lse, dout, four gradients, two pieces of scratch; the copy stands for a kernel that leaves the shares
    launches = [
        launch_of(BACKWARD, (0, 1, 2, 4, 5, 6, 7, 8)),
        Described(COPY, (1, 1, 1), 32, 4 * shares.numel(), (-1, 11), (shares.data_ptr(), 0)),
    ]

    key = memory.key(call)

    def plan(*given):
        assert memory.remember_backward(key, given, Planned(launches, (64, 4 * shares.numel()), (), (1, groups, TIME, TIME)))
        return (*by_python(*given[:3], *given[4:6]), torch.zeros(shape))

    gradients = [torch.empty_like(x, device="meta") for x in call]
    lse, forward = torch.empty(BATCH, HEADS, TIME), launch_of(FORWARD, (0, 1, 2, 4, 5))
    assert memory.remember(call, tensors[0].detach(), lse, Planned([forward]), gradients, plan, PLAIN)
    dout = torch.randn(BATCH, HEADS, TIME, DIM)
    first = torch.autograd.grad(memory.run(*call), call, dout)
    found = torch.autograd.grad(memory.run(*call), call, dout)
    assert_close(found[:3], first[:3])
    summed = [dim for dim in (-2, -1) if shape[dim] == 1]
    wanted = shares.sum(0)
    assert_close([found[3]], [(wanted.sum(summed, keepdim=True) if summed else wanted).reshape(shape)])
