"""Triangle attention against its formula in plain torch, and against the state of OpenFold's module."""

from __future__ import annotations

import pytest
import torch

from saccade import InvalidArgument
from saccade.nn import TriangleAttention

NAMES = {
    "layer_norm.weight", "layer_norm.bias", "linear.weight", "mha.linear_q.weight", "mha.linear_k.weight", "mha.linear_v.weight",
    "mha.linear_o.weight", "mha.linear_o.bias", "mha.linear_g.weight", "mha.linear_g.bias",
}  # fmt: skip


def module(**options):
    torch.manual_seed(0)
    made = TriangleAttention(12, 8, 3, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def formula(layer, z, mask=None):
    """The definition, for each row by itself."""
    mask = torch.ones(z.shape[:-1], dtype=torch.bool) if mask is None else mask
    if not layer.starting:
        z, mask = z.transpose(-2, -3), mask.transpose(-1, -2)
    x = layer.layer_norm(z)
    bias = layer.linear(x).movedim(-1, -3)[..., None, :, :, :]  # [*, 1, H, J, J]
    query, key, value = (
        f(x).unflatten(-1, (3, 8)).transpose(-2, -3) for f in (layer.mha.linear_q, layer.mha.linear_k, layer.mha.linear_v)
    )
    scores = query @ key.mT / 8**0.5 + bias
    weights = torch.softmax(scores.masked_fill(~mask[..., None, None, :], -torch.inf), -1).nan_to_num()
    heads = (weights @ value).transpose(-2, -3).flatten(-2)
    out = layer.mha.linear_o(heads * torch.sigmoid(layer.mha.linear_g(x)))
    return out if layer.starting else out.transpose(-2, -3)


@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
@pytest.mark.parametrize("shape", [(7, 7), (1, 7, 7), (2, 7, 7), (2, 3, 5, 5)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_formula(starting, shape, masked):
    layer, z = module(starting=starting), torch.randn(*shape, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(shape) < 0.7 if masked else None
    found, expected = layer(z, mask), formula(layer, z, mask)
    torch.testing.assert_close(found, expected)
    leaves = [z, *layer.parameters()]
    for x, want in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)), strict=True):
        torch.testing.assert_close(x, want)


def test_names_are_those_of_openfold():
    assert set(module().state_dict()) == NAMES
    assert set(module(bias=False).state_dict()) == NAMES - {"mha.linear_o.bias", "mha.linear_g.bias"}


def test_a_mask_of_numbers_is_one_of_truths():
    layer, z = module(), torch.randn(1, 6, 6, 12, dtype=torch.float64)
    mask = torch.rand(1, 6, 6) < 0.6
    torch.testing.assert_close(layer(z, mask.float()), layer(z, mask), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.randn(5, 6, 12), None), r"z is \[5, 6, 12\]; it must be a torch.Tensor of shape \[\*, N, N, 12\]"),
        ((torch.randn(5, 5, 11), None), r"z is \[5, 5, 11\]"),
        (("z", None), "z is str"),
        ((torch.randn(5, 5, 12), torch.ones(5)), r"mask is \[5\]; it must be a torch.Tensor of shape \[5, 5\]"),
    ],
)
def test_bad_inputs(given, said):
    with pytest.raises(InvalidArgument, match=said):
        module().float()(*given)


@pytest.mark.parametrize("name", ["c_in", "c_hidden", "no_heads"])
def test_bad_sizes(name):
    with pytest.raises(InvalidArgument, match=f"{name} is 0; it must be a whole number"):
        TriangleAttention(**{"c_in": 8, "c_hidden": 8, "no_heads": 2, name: 0})
