"""Calls with a bias that C++ replays: its arguments equal those of Python's launch, and the gradient of the bias has its shape."""

from __future__ import annotations

import pytest
import torch
from recorded_triton import recording

import saccade
from saccade import native
from saccade.engine.dispatch import Plan
from saccade.engine.prepare import Prepared
from saccade.exact import replay
from saccade.exact.args import AttentionArgs
from saccade.exact.op import OPS
from saccade.exact.problem import by_window, describe_attention, in_one_batch
from saccade.exact.recorded import begin_recording
from saccade.exact.short.backend import SHORT
from saccade.exact.short.launch import BACKWARD_TENSORS, FORWARD_TENSORS
from saccade.native.recording import Recorder

BATCH, HEADS, LENGTH, DIM = 3, 2, 40, 16


@pytest.fixture
def seen(monkeypatch):
    """Launches so far: (kernel, programs, [argument, ...])."""
    yield from recording(monkeypatch)


def named(launch, tensors):
    """The launch with the addresses of known tensors replaced by their names, and of others by "other"."""
    names = {x.data_ptr(): name for name, x in tensors.items()}
    function, programs, values = launch
    return function, programs, [names.get(v, "other" if v > 2**20 else v) for v in values]


# of one shape for all, for each head, for each batch row and head (whose gradient needs no sum), a row for all queries
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "shape", [(LENGTH, LENGTH), (1, HEADS, LENGTH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH), (HEADS, 1, LENGTH)]
)
@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "lengths"])
@pytest.mark.parametrize("bias_grad", [False, True], ids=["constant", "trained"])
@pytest.mark.parametrize("outside", [False, True], ids=["heads first", "tokens outside the batch"])
def test_a_bias(seen, shape, lengths, bias_grad, outside):
    torch.manual_seed(3)
    leaves = [torch.randn(BATCH, HEADS, LENGTH, DIM, dtype=torch.float16) for _ in range(3)]
    if outside:  # row strides are arguments, where otherwise they are constants
        leaves = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    bias = torch.randn(shape, dtype=torch.float16, requires_grad=bias_grad)
    real = torch.randint(1, LENGTH + 1, (BATCH,), dtype=torch.int32) if lengths else None
    problem = describe_attention(*leaves, bias, 0.0, False, None, False, real, False, False, True)
    prepared, given = Prepared(Plan(problem, SHORT, named=True)), [x.detach() for x in (*leaves, bias)]
    args = AttentionArgs(*given[:3], None, given[3], real, None, 0.0, False, DIM**-0.5, launches=prepared.launches)
    known = dict(zip(("query", "key", "value", "bias"), given, strict=True)) | ({"lengths": real} if lengths else {})
    with Recorder() as recorder:
        out, lse = OPS.launchers("short").forward(args)
    by_python = [named(seen[-1], known | {"out": out})]
    dout = torch.randn_like(out)
    gradients = OPS.launchers("short").backward(args, dout, None, None, lse, bias_grad=bias_grad, packed=None)
    assert (BATCH * HEADS * DIM in by_python[0][2]) is outside
    written = dict(zip(("dquery", "dkey", "dvalue"), gradients[:3], strict=True))
    by_python.append(named(seen[-1], known | written | {"dout": dout}))
    call = (*leaves, bias, 0.0, False, None, False, real, False, "short")
    inputs = (*leaves, bias, *([real] if lengths else []))
    args = args._replace(query=leaves[0], key=leaves[1], value=leaves[2], bias=bias)
    replay.record(prepared, call, inputs, args, out, lse, recorder)
    assert len(native.calls) == 1
    if lengths:
        native.calls.checked(real, LENGTH)
    wanted = [*leaves, bias] if bias_grad else leaves
    for i in range(3):
        before = len(seen)
        made = native.calls.run(*call)
        found = torch.autograd.grad(made, wanted, dout)
        assert len(seen) == before + 2
        written = dict(zip(("dquery", "dkey", "dvalue"), found, strict=False))
        assert named(seen[-2], known | {"out": made}) == by_python[0]
        if i:  # the first backward is Python's
            assert named(seen[-1], known | written | {"dout": dout}) == by_python[1]
        assert [x.shape for x in found] == [x.shape for x in wanted]
        assert all(x.dtype == torch.float16 for x in found)
    if bias_grad and shape == (BATCH, HEADS, LENGTH, LENGTH):
        assert found[3].data_ptr() in seen[-1][2]


@pytest.mark.parametrize("shape", [(4, HEADS, LENGTH, LENGTH), (1, 4, 1, 1, LENGTH)], ids=str)
@pytest.mark.parametrize("layout", ["windows follow each other", "dout in another order"])
def test_a_bias_for_each_window(seen, shape, layout):
    """`[images, W, H, T, D]`: C++ launches with the tensors as they are, and its results have that rank."""
    torch.manual_seed(3)
    packed = torch.randn(BATCH, 4, LENGTH, 3, HEADS, DIM, dtype=torch.float16)
    leaves = [x.detach().requires_grad_() for x in packed.permute(3, 0, 1, 4, 2, 5).unbind(0)]
    bias = torch.randn(shape, dtype=torch.float16, requires_grad=True)
    problem = describe_attention(*leaves, bias, 0.0, False, None, False, None, False, False, True)
    assert (problem.windows, problem.host_counts) == (4, False)
    prepared = Prepared(Plan(problem, SHORT, named=True))
    folded = [in_one_batch(x.detach()) for x in (*leaves, bias)]
    args = AttentionArgs(*folded[:3], None, folded[3], None, None, 0.0, False, DIM**-0.5, launches=prepared.launches)
    known = dict(zip(("query", "key", "value", "bias"), (*leaves, bias), strict=True))
    with Recorder() as recorder:
        out, lse = OPS.launchers("short").forward(args)
    by_python = [named(seen[-1], known | {"out": out})]
    dout = torch.randn(BATCH, 4, HEADS, LENGTH, DIM, dtype=torch.float16)
    if layout != "windows follow each other":
        dout = dout.transpose(0, 1).contiguous().transpose(0, 1)
    gradients = OPS.launchers("short").backward(args, in_one_batch(dout), None, None, lse, bias_grad=True, packed=None)
    written = dict(zip(("dquery", "dkey", "dvalue"), gradients[:3], strict=True))
    by_python.append(named(seen[-1], known | written | {"dout": dout}))
    call = (*leaves, bias, 0.0, False, None, False, None, False, "short")
    replay.record(prepared, call, (*leaves, bias), args, by_window(problem, out), by_window(problem, lse), recorder)
    assert len(native.calls) == 1
    for i in range(3):
        before = len(seen)
        made = native.calls.run(*call)
        assert (made.shape, made.stride()) == (leaves[0].shape, by_window(problem, out).stride())
        found = torch.autograd.grad(made, [*leaves, bias], dout)
        assert len(seen) == before + 2
        written = dict(zip(("dquery", "dkey", "dvalue"), found, strict=False))
        assert named(seen[-2], known | {"out": made}) == by_python[0]
        if i:  # the first backward is Python's; so is any whose gradient has to be copied
            by_cpp = named(seen[-1], known | written | {"dout": dout})
            if layout == "windows follow each other":
                assert by_cpp == by_python[1]
            assert ("dout" in by_cpp[2]) == (layout == "windows follow each other")
        assert [x.shape for x in found] == [x.shape for x in (*leaves, bias)]
    assert named(seen[-1], {})[1] == by_python[1][1] == 4 * (HEADS if shape[0] == 4 else 1)


def test_windows_that_are_copied_stay_with_python(seen):
    leaves = [torch.randn(4, BATCH, HEADS, LENGTH, DIM, dtype=torch.float16).transpose(0, 1) for _ in range(3)]
    bias = torch.randn(4, HEADS, LENGTH, LENGTH, dtype=torch.float16)
    problem = describe_attention(*leaves, bias, 0.0, False, None, False, None, False, False, False)
    prepared = Prepared(Plan(problem, SHORT, named=True))
    args = AttentionArgs(*map(in_one_batch, leaves), None, bias, None, None, 0.0, False, 0.25, launches=prepared.launches)
    with Recorder() as recorder:
        out, lse = OPS.launchers("short").forward(args)
    call = (*leaves, bias, 0.0, False, 0.25, False, None, False, "short")
    replay.record(prepared, call, (*leaves, bias), args, by_window(problem, out), by_window(problem, lse), recorder)
    assert len(native.calls) == 0


def test_a_call_during_which_the_library_is_disabled_is_not_remembered(seen, monkeypatch):
    monkeypatch.setattr("saccade.exact.api.begin", begin_recording)
    leaves = [torch.randn(BATCH, HEADS, LENGTH, DIM).half() for _ in range(3)]
    for disabled in (True, False):
        monkeypatch.setattr("saccade.exact.replay.is_disabled", lambda disabled=disabled: disabled)
        saccade.attention(*leaves, backend="short")
        assert len(native.calls) == (not disabled)


def test_what_stays_with_python(seen):
    """A bias whose elements share memory, which saved-tensor hooks could not bring back so."""
    leaves = [torch.randn(BATCH, HEADS, LENGTH, DIM, dtype=torch.float16) for _ in range(3)]
    for bias, taken in (
        (torch.randn(1, 1, LENGTH, LENGTH).half(), True),
        (torch.randn(1, 1, 1, LENGTH).half().expand(1, 1, LENGTH, -1), False),
    ):
        problem = describe_attention(*leaves, bias, 0.0, False, None, False, None, False, False, False)
        prepared = Prepared(Plan(problem, SHORT, named=True))
        args = AttentionArgs(*leaves, None, bias, None, None, 0.0, False, 0.25, launches=prepared.launches)
        with Recorder() as recorder:
            out, lse = OPS.launchers("short").forward(args)
        before = len(native.calls)
        replay.record(
            prepared, (*leaves, bias, 0.0, False, 0.25, False, None, False, "short"), (*leaves, bias), args, out, lse, recorder
        )
        assert (len(native.calls) > before) == taken
        assert problem.host_counts != taken  # what C++ does not take costs host time, by which `auto` chooses


@pytest.mark.parametrize(
    ("windows", "lengths"), [(False, False), (False, True), (True, False)], ids=["rows", "lengths", "windows"]
)
def test_a_mask_of_keys_beside_a_bias(seen, windows, lengths, monkeypatch):
    """The public function: C++ launches as Python does, with the bias, the lengths and the mask of each call in their places."""
    monkeypatch.setattr("saccade.exact.api.begin", begin_recording)
    rows, shape = ((BATCH, 4), (4, HEADS, LENGTH, LENGTH)) if windows else ((BATCH,), (1, HEADS, LENGTH, LENGTH))
    launched = []
    for times in range(3):
        leaves = [torch.randn(*rows, HEADS, LENGTH, DIM).half().requires_grad_() for _ in range(3)]
        leaves.append(torch.randn(shape).half().requires_grad_())
        mask, real = torch.rand(*rows, LENGTH) > 0.3, torch.full((BATCH,), 9, dtype=torch.int32) if lengths else None
        if lengths:
            native.calls.checked(real, LENGTH)
        known = (
            dict(zip(("query", "key", "value", "bias"), leaves, strict=True))
            | {"mask": mask}
            | ({"lengths": real} if lengths else {})
        )
        if times == 2:
            monkeypatch.setattr("saccade.exact.api.prepare_attention", lambda *given: pytest.fail("Python makes the call"))
            monkeypatch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the gradient"))
        out = saccade.attention(*leaves, key_mask=mask, lengths=real, backend="short")
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, dout)
        known |= {"out": out, "dout": dout} | dict(zip(("dquery", "dkey", "dvalue"), found, strict=False))
        launched.append([named(x, known) for x in seen[-2:]])
    assert len(native.calls) == 1
    assert launched[0] == launched[1] == launched[2]
    for (_, _, values), names in zip(launched[2], (FORWARD_TENSORS, BACKWARD_TENSORS), strict=True):
        found = dict(zip(names, values, strict=False))
        assert (found["bias"], found["mask"], found["lengths"]) == ("bias", "mask", "lengths" if lengths else "query")


def test_torch_is_not_given_a_mask_of_keys_alone(seen, monkeypatch):
    """Its function takes one mask, so Python joins both at each call."""
    monkeypatch.setattr("saccade.exact.api.begin", begin_recording)
    leaves = [torch.randn(BATCH, HEADS, LENGTH, DIM) for _ in range(3)]
    bias, mask = torch.randn(1, HEADS, LENGTH, LENGTH), torch.rand(BATCH, LENGTH) > 0.3
    joined = torch.where(mask[:, None, None], bias, float("-inf"))
    wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, joined)
    for _ in range(3):
        torch.testing.assert_close(saccade.attention(*leaves, bias, key_mask=mask, backend="sdpa"), wanted)
    assert len(native.calls) == 0
