"""The registered operators: schemas, fakes that tell the truth about shapes and strides, no aliasing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import saccade  # noqa: F401
from saccade.testing.cases import Case
from saccade.testing.inputs import make

pytestmark = pytest.mark.unpoisoned
OPS = torch.ops.saccade

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CASES = [
    Case("plain", 2, 2, 2, 5, 7, 16),
    Case("pool", 2, 2, 2, 1, 7, 16),
    Case("grouped-mask-lengths", 2, 4, 2, 5, 7, 16, mask="bool", lengths=True),
    Case("bias-dropout-causal", 2, 2, 2, 5, 7, 16, bias=(1, 2, 5, 7), dropout_p=0.2, lse_grad=True),
    Case("empty", 0, 2, 2, 5, 7, 16),
]
PACKED = [
    Case("packed", 2, 2, 2, 7, 7, 16, packed=True),
    Case(
        "packed-bias-lengths-dropout",
        2,
        2,
        2,
        7,
        7,
        16,
        packed=True,
        bias=(2, 1, 7, 7),
        lengths=True,
        dropout_p=0.2,
        lse_grad=True,
    ),
]
LAYOUTS = ["bthd", "bhtd", "expanded"]


def seed(case: Case):
    return torch.tensor([11], device=DEVICE) if case.dropout_p else None


def forward_arguments(case: Case, layout: str = "bthd"):
    x = make(case, torch.float32, DEVICE, layout=layout)
    return x, (x.query, x.key, x.value, x.mask, x.bias, x.lengths, seed(case), case.dropout_p, case.is_causal, 0.25)


def backward_arguments(case: Case, layout: str = "bthd"):
    x, call = forward_arguments(case, layout)
    _, lse = OPS.attention_forward.default(*call, "short")
    return (x.dout, x.dlse, None, lse, *call, x.bias is not None, "short")


def packed_arguments(case: Case):
    x, call = forward_arguments(case)
    _, lse = OPS.attention_forward.default(*call, "short")
    return (x.dout, x.dlse, None, lse, x.qkv, *call[3:], x.bias is not None, "short")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_forward(case):
    torch.library.opcheck(OPS.attention_forward.default, (*forward_arguments(case)[1], "short"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_backward(case):
    torch.library.opcheck(OPS.attention_backward.default, backward_arguments(case))


def test_opcheck_of_the_reference():
    """It takes over where a kernel does not compile, and differentiates by torch inside an op, which modes call below autograd."""
    torch.library.opcheck(OPS.attention_backward.default, (*backward_arguments(CASES[0])[:-1], "reference"))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_opcheck_packed_backward(case):
    torch.library.opcheck(OPS.attention_packed_backward.default, packed_arguments(case))


def described(tensors):
    return [(tuple(t.shape), t.stride(), t.dtype, t.device.type) for t in tensors]


def of_fakes(operator, arguments):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        return described(operator(*fakes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fakes_have_the_real_strides(case, layout):
    arguments = (*forward_arguments(case, layout)[1], "short")
    assert of_fakes(OPS.attention_forward.default, arguments) == described(OPS.attention_forward.default(*arguments))
    arguments = backward_arguments(case, layout)
    assert of_fakes(OPS.attention_backward.default, arguments) == described(OPS.attention_backward.default(*arguments))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_fakes_have_the_real_strides(case):
    arguments = packed_arguments(case)
    assert of_fakes(OPS.attention_packed_backward.default, arguments) == described(
        OPS.attention_packed_backward.default(*arguments)
    )


def test_gradients_have_the_layout_of_their_inputs():
    case = Case("plain", 2, 3, 3, 5, 7, 16)
    dq, dk, dv, _ = OPS.attention_backward.default(*backward_arguments(case, "bthd"))
    assert all(g.transpose(1, 2).is_contiguous() for g in (dq, dk, dv))
    dq, dk, dv, _ = OPS.attention_backward.default(*backward_arguments(case, "bhtd"))
    assert all(g.is_contiguous() for g in (dq, dk, dv))
