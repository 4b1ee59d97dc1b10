"""The reference in the form of a family of kernels, which takes over where a kernel does not compile."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.by_torch import reference_launchers
from saccade.engine.layout import HEADS
from saccade.exact.args import AttentionArgs
from saccade.exact.reference import attend

LAUNCHERS = reference_launchers(attend, HEADS)


@pytest.mark.parametrize("bias", ["none", "constant", "trained"])
@pytest.mark.parametrize("has_dlse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_gradients_are_those_of_autograd(device, bias, has_dlse, packed):
    qkv = torch.randn(2, 5, 3, 2, 8, device=device, requires_grad=True)
    rows = HEADS.unpack(qkv)
    added = None if bias == "none" else torch.randn(2, 1, 5, 5, device=device, requires_grad=bias == "trained")
    args = AttentionArgs(*rows, None, added, None, None, 0.0, False, 0.3)
    out, lse = attend(args)
    directions = torch.randn_like(out), torch.randn_like(lse) if has_dlse else torch.zeros_like(lse)
    trained = [added] if bias == "trained" else []
    expected = torch.autograd.grad((out, lse), [*rows, *trained], directions)
    plain = args._replace(**{name: None if x is None else x.detach() for name, x in zip(args._fields[:5], args, strict=False)})
    found_out, found_lse = LAUNCHERS.forward(plain)
    torch.testing.assert_close((found_out, found_lse), (out, lse))
    into = torch.empty_like(qkv) if packed else None
    *found, dbias = LAUNCHERS.backward(
        plain, directions[0], directions[1] if has_dlse else None, None, found_lse, bias_grad=bool(trained), packed=into
    )
    assert (dbias is None) == (not trained)
    for mine, theirs in zip([*found, *([dbias] if trained else [])], expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    if into is not None:
        torch.testing.assert_close(torch.stack(HEADS.unpack(into)), torch.stack(expected[:3]))
