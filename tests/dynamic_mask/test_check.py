"""The check of dynamic mask attention refuses wrong outputs and gradients, and its budgets are narrow."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.dynamic_mask.testing.cases import DYNAMIC_MASK, DynamicMaskCase
from saccade.dynamic_mask.testing.check import (
    _oracle_and_baseline,
    check_dynamic_mask,
    compare_dynamic_mask,
    differentiate,
    public_call,
)
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask

CASE = DynamicMaskCase("checked", 2, 4, 2, 13, 21, 16, 5)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dscores"])
def test_one_wrong_number_is_found(name):
    inputs = make_dynamic_mask(CASE, torch.float32, "cpu")
    actual = differentiate(public_call(CASE, "reference", True), inputs, True)
    assert all(r.ok for r in compare_dynamic_mask(CASE, inputs, actual))
    wrong = actual[name].clone()
    # a number of dscores is a sum over queries and over the heads of a group
    wrong.view(-1)[7] += (1e-4 if name == "dscores" else 2e-5) * wrong.abs().max()
    found = compare_dynamic_mask(CASE, inputs, {**actual, name: wrong})
    assert [r.name for r in found if not r.ok] == [name]


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        (torch.float32, {"out": 14, "lse": 5.5, "dq": 52, "dk": 82, "dv": 20, "dscores": 118}),
        (torch.float16, {"out": 2, "lse": 4.7, "dq": 3.9, "dk": 3.7, "dv": 1.75, "dscores": 2.7}),
        (torch.bfloat16, {"out": 2, "lse": 4.5, "dq": 3.9, "dk": 3.7, "dv": 1.9, "dscores": 2.7}),
    ],
    ids=["float32", "float16", "bfloat16"],
)
def test_budgets_are_no_wider_than_they_were(dtype, widths):
    """In units of the last place of the largest number of each; measured, and a seventh more."""
    inputs = make_dynamic_mask(CASE, dtype, "cpu")
    oracle, _ = _oracle_and_baseline(CASE, inputs, True)
    for result in compare_dynamic_mask(CASE, inputs, differentiate(public_call(CASE, "reference", True), inputs, True)):
        exact = oracle[result.name]
        eps = torch.finfo(torch.float32 if result.name == "lse" else dtype).eps
        assert result.budget <= widths[result.name] * eps * exact.masked_fill(exact.isinf(), 0.0).abs().max(), result


@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_wrong_gradient_behind_a_right_output_is_found(name):
    """Each of out and lse with twice its gradient."""

    def run(x):
        out, lse = public_call(CASE, "reference", True)(x)
        return (2 * out - out.detach(), lse) if name == "out" else (out, 2 * lse - lse.detach())

    found = check_dynamic_mask(CASE, torch.float32, "cpu", "reference", run=run)
    assert {"dq", "dk", "dscores"} <= {r.name for r in found if not r.ok}
    assert all(r.ok for r in found if r.name in ("out", "lse"))


def test_scores_without_a_gradient_are_found():
    def run(x):
        return public_call(CASE, "reference", True)(x.__class__(**{**vars(x), "key_scores": x.key_scores.detach()}))

    found = {r.name: r for r in check_dynamic_mask(CASE, torch.float32, "cpu", "reference", run=run)}
    assert [name for name, r in found.items() if not r.ok] == ["dscores"]
    assert found["dscores"].reason == "missing"


def test_the_baseline_has_every_feature():
    """Without one it would be far from float64, and its errors would allow anything."""
    for case in DYNAMIC_MASK:
        if "large" in case.tags:
            continue
        oracle, baseline = _oracle_and_baseline(case, make_dynamic_mask(case, torch.float32, "cpu"), True)
        assert baseline.outputs.keys() == oracle.keys()
        for name, forms in baseline.outputs.items():
            hidden = oracle[name].isinf()
            errors, exact = (x.masked_fill(hidden, 0.0).square().mean().sqrt() for x in (forms - oracle[name], oracle[name]))
            assert errors <= 1e-6 * max(exact, 1.0), (case, name)


def test_it_is_the_named_backend_that_is_checked():
    with pytest.raises(saccade.InvalidArgument, match="nowhere"):
        check_dynamic_mask(CASE, torch.float32, "cpu", "nowhere")
