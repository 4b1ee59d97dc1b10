"""The function of cuequivariance_torch by its name and order of arguments, against plain torch."""

from __future__ import annotations

import inspect

import pytest
import torch

from saccade import InvalidArgument, UnsupportedProblem
from saccade.integrations.triangle import triangle_attention

B, N, H, Q, K, D = 2, 5, 3, 6, 7, 8


def inputs(structures=B, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(structures, N, H, t, D, dtype=dtype) for t in (Q, K, K))
    bias = torch.randn(structures, 1, H, Q, K)
    mask = torch.rand(structures, N, 1, 1, K) < 0.6
    mask[..., 0] = True
    return [x.requires_grad_() for x in (q, k, v, bias)], mask


def plain(q, k, v, bias, mask=None, scale=None):
    """The formula of NVIDIA's page: hidden keys have a score of -1e9."""
    scores = q.double() @ k.double().mT * (D**-0.5 if scale is None else scale) + bias.double()
    if mask is not None:
        scores = torch.where(mask != 0, scores, -1e9)
    return (torch.softmax(scores, -1) @ v.double()).to(q.dtype)


def test_arguments_are_those_of_cuequivariance():
    parameters = inspect.signature(triangle_attention).parameters
    assert list(parameters) == ["q", "k", "v", "bias", "mask", "scale", "return_aux"]
    assert [p.default for p in parameters.values()][4:] == [None, None, False]


@pytest.mark.parametrize("structures", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_what_plain_torch_computes(structures, masked, scale):
    leaves, mask = inputs(structures)
    mask = mask if masked else None
    found, expected = (f(*leaves, mask, scale) for f in (triangle_attention, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for x, want in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)


def test_a_structure_without_its_dim():
    leaves, mask = inputs(1)
    found = triangle_attention(*(x[0] for x in leaves), mask[0].float())
    torch.testing.assert_close(found, triangle_attention(*leaves, mask)[0], rtol=0, atol=0)


def test_a_row_without_keys_is_0():
    leaves, mask = inputs(1)
    mask[0, 2] = False
    assert not triangle_attention(*leaves, mask)[0, 2].any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bias": torch.zeros(B, H, Q, K)}, r"bias has shape \[2, 3, 6, 7\]; it must be \[2, 1, 3, 6, 7\]"),
        ({"bias": torch.zeros(B, 1, H, Q, K, dtype=torch.bool)}, "bias has dtype torch.bool; it must be floating"),
        ({"bias": None}, "bias is a NoneType"),
        ({"mask": torch.ones(B, N, K)}, r"mask has shape \[2, 5, 7\]; it must be \[2, 5, 1, 1, 7\]"),
        ({"k": torch.zeros(N, H, K, D)}, "q, k and v have 5, 4 and 5 dims"),
    ],
)
def test_bad_arguments(change, said):
    leaves, mask = inputs()
    given = dict(zip(("q", "k", "v", "bias"), leaves, strict=True)) | {"mask": mask} | change
    with pytest.raises(InvalidArgument, match=said):
        triangle_attention(**given)


@pytest.mark.parametrize("name", ["k", "v"])
def test_other_structures_are_not_left_out(name):
    leaves, mask = inputs(1)
    given = dict(zip(("q", "k", "v", "bias"), leaves, strict=True)) | {"mask": mask}
    given[name] = torch.cat((given[name], given[name]))
    numbers = (1, 2, 1) if name == "k" else (1, 1, 2)
    with pytest.raises(InvalidArgument, match="q, k and v are of {}, {} and {} structures".format(*numbers)):
        triangle_attention(**given)


def test_auxiliary_results_are_refused():
    leaves, _ = inputs()
    with pytest.raises(UnsupportedProblem, match="return_aux is True"):
        triangle_attention(*leaves, return_aux=True)
