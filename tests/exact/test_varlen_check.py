"""The check of packed sequences refuses wrong outputs and gradients, and what is not 0 behind the last sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import saccade
from saccade.exact.testing import varlen_check
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.testing.varlen_check import check_calls, check_varlen, padded, run_packed
from saccade.exact.varlen.args import UPPER_LEFT
from saccade.testing.roundings import IN_PIECES, UNAVOIDABLE

CASE = VarlenCase("checked", (5, 0, 9), (7, 3, 12), lse_grad=True, bias=True)
NAMES = ["out", "lse", "dq", "dk", "dv", "dbias"]


def breaking(monkeypatch, change):
    """`attend` with its results changed by `change(out, lse)`."""
    right = varlen_check.attend

    def wrong(*args):
        return change(*right(*args))

    monkeypatch.setattr(varlen_check, "attend", wrong)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda out, lse: (out * 1.001, lse), {"out", "dv"}),
        (lambda out, lse: (out, lse * 1.001), {"lse"}),
        (lambda out, lse: (2 * out - out.detach(), lse), {"dq", "dk", "dv", "dbias"}),
        (lambda out, lse: (out, 2 * lse - lse.detach()), {"dq", "dk", "dbias"}),
    ],
    ids=["out", "lse", "gradient of out", "gradient of lse"],
)
def test_wrong_outputs_and_gradients_are_found(change, names, monkeypatch):
    assert all(r.ok for r in check_varlen(CASE, torch.float32, "cpu", "reference"))
    breaking(monkeypatch, change)
    results = check_varlen(CASE, torch.float32, "cpu", "reference")
    assert [r.name for r in results] == NAMES
    assert names <= {r.name for r in results if not r.ok}
    assert all(r.ok for r in results if r.name in {"out", "lse"} - names)


@pytest.mark.parametrize("value", [1e-30, -1.0, float("nan")])
def test_behind_the_last_sequence_there_are_zeros(value, monkeypatch):
    case = replace(CASE, tail=2)

    def change(out, lse):
        written = out.clone()
        written[-1, 0, 0] = value
        return written, lse

    assert all(r.ok for r in check_varlen(case, torch.float32, "cpu", "reference"))
    breaking(monkeypatch, change)
    with pytest.raises(AssertionError, match="out: not 0 behind the last sequence"):
        check_varlen(case, torch.float32, "cpu", "reference")


def test_tokens_behind_the_last_sequence_hold_nan(monkeypatch):
    seen = []
    right = varlen_check.attend
    monkeypatch.setattr(varlen_check, "attend", lambda values, packed: seen.append(values[:3]) or right(values, packed))
    check_varlen(replace(CASE, tail=2), torch.float32, "cpu", "reference")
    assert all(x[-2:].isnan().all() and x[:-2].isfinite().all() for x in seen[0])


def test_of_calls_judged_together_each_has_its_own_verdict(monkeypatch):
    cases = [replace(CASE, q_lengths=lengths, causal=UPPER_LEFT) for lengths in ((5, 0, 9), (9, 1, 1), (2, 9, 4), (9, 9, 9))]
    problems = [padded(case, torch.float32, "cpu", seed, (9, 12)) for seed, case in enumerate(cases)]
    called = []

    def change(out, lse):
        called.append(out)
        if len(called) == 2:
            raise saccade.UnsupportedProblem("not this one")
        return (out * 1.01 if len(called) == 3 else out), lse

    breaking(monkeypatch, change)
    found = check_calls(cases, problems, "reference", range(4), True, lambda: None)
    assert found[1] is None
    assert [all(r.ok for r in found[i]) for i in (0, 2, 3)] == [True, False, True]


def test_it_is_the_named_backend_that_is_checked():
    with pytest.raises(saccade.InvalidArgument, match="nowhere"):
        check_varlen(CASE, torch.float32, "cpu", "nowhere")


@pytest.mark.parametrize(("backend", "granted"), [("reference", UNAVOIDABLE), ("sdpa", IN_PIECES), ("ragged", IN_PIECES)])
def test_the_roundings_that_a_backend_is_granted(backend, granted, monkeypatch):
    class Seen(Exception):
        pass

    def baseline_of(case, inputs, seed, lse, roundings):
        assert roundings == granted
        raise Seen

    monkeypatch.setattr(varlen_check, "run_packed", lambda case, inputs, name, *_: run_packed(case, inputs, "reference"))
    monkeypatch.setattr(varlen_check, "baseline_of", baseline_of)
    with pytest.raises(Seen):
        check_varlen(CASE, torch.float32, "cpu", backend)
