"""The check of N:M sparse attention refuses what is wrong: a selection, each in its way, and outputs and gradients under a right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import saccade
from saccade.nm_sparse.testing import check
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.nm_sparse.testing.check import check_nm_sparse, judge_selection, judge_selections, public_call, selection_of
from saccade.nm_sparse.testing.inputs import make_nm_sparse
from saccade.testing.inputs import joined

CPU = torch.device("cpu")
CASE = NMSparseCase("selected", 2, 2, 2, 9, 12, 16, is_causal=True, lse_grad=True)
QUERY, GROUP = 7, slice(0, 4)  # it sees the whole group


def selected(seed=0):
    """Inputs, their right selection, and the keys of a group in the order of their scores for `QUERY` of row 1 and head 1."""
    inputs = make_nm_sparse(CASE, torch.float32, "cpu", seed)
    scores = inputs.key[1, 1, GROUP] @ inputs.query[1, 1, QUERY]
    return inputs, selection_of(CASE, inputs, "reference"), scores.argsort().tolist()


def changed(kept, query, **keys):
    kept = kept.clone()
    for key, value in keys.items():
        kept[1, 1, query, int(key.removeprefix("k"))] = value
    return kept


def test_a_wrong_selection_is_refused_with_the_reason_and_the_place():
    inputs, kept, (worst, third, second, best) = selected()
    assert judge_selection(CASE, inputs, kept).ok
    assert kept[1, 1, QUERY, [second, best]].all()
    wrong = {
        "an invisible key is kept": (3, {"k5": True}),
        "a group keeps too few or too many": (QUERY, {f"k{second}": False}),
        "a key left out beats a kept one": (QUERY, {f"k{best}": False, f"k{worst}": True}),
    }
    for reason, (query, keys) in wrong.items():
        result = judge_selection(CASE, inputs, changed(kept, query, **keys))
        assert (result.ok, result.reason) == (False, reason)
        assert result.worst[:3] == (1, 1, query)
    one_more = judge_selection(CASE, inputs, changed(kept, QUERY, **{f"k{third}": True}))
    assert one_more.reason == "a group keeps too few or too many"


@pytest.mark.parametrize(("excess", "ok"), [(2.0**-21, True), (2.0**-17, False)])
def test_a_key_left_out_may_be_better_by_the_rounding_of_scores_alone(excess, ok):
    case = NMSparseCase("near", 1, 1, 1, 1, 2, 16, pattern="1:2")
    inputs = make_nm_sparse(case, torch.float32, "cpu")
    query, key = torch.zeros_like(inputs.query), torch.zeros_like(inputs.key)
    query[..., 0], key[..., 0] = 1.0, torch.tensor([1.0, 1.0 + excess])
    kept = torch.tensor([[[[True, False]]]])
    assert judge_selection(case, replace(inputs, query=query, key=key), kept).ok == ok


def test_of_two_calls_the_wrong_one_is_named():
    calls = [selected(seed) for seed in (0, 1)]
    worst, *_, best = calls[1][2]
    wrong = changed(calls[1][1], QUERY, **{f"k{best}": False, f"k{worst}": True})
    whole, data = joined(CASE, [inputs for inputs, *_ in calls])
    found = judge_selections(whole, data, torch.cat((calls[0][1], wrong)))
    assert [result.ok for result in found] == [True, False]


def test_a_wrong_selection_fails_the_check_though_what_follows_from_it_is_right(monkeypatch):
    inputs, kept, (worst, *_, best) = selected()
    wrong = changed(kept, QUERY, **{f"k{best}": False, f"k{worst}": True})
    monkeypatch.setattr(check, "selection_of", lambda *_: wrong)

    def run(x):
        return saccade.attention(x.query, x.key, x.value, wrong, return_lse=True, backend="reference")

    results = check_nm_sparse(CASE, torch.float32, CPU, "reference", inputs=inputs, run=run)
    assert [r.name for r in results] == ["selection", "out", "lse", "dq", "dk", "dv"]
    assert [r.name for r in results if not r.ok] == ["selection"]


@pytest.mark.parametrize(
    ("break_it", "names"),
    [
        (lambda out, lse: (out * 1.001, lse), {"out", "dv"}),
        (lambda out, lse: (out, lse * 1.001), {"lse"}),
        (lambda out, lse: (2 * out - out.detach(), lse), {"dq", "dk", "dv"}),
        (lambda out, lse: (out, 2 * lse - lse.detach()), {"dq", "dk"}),
    ],
    ids=["out", "lse", "gradient of out", "gradient of lse"],
)
def test_wrong_outputs_and_gradients_under_a_right_selection(break_it, names):
    case = replace(CASE, is_causal=False)  # every query sees a key
    right = public_call(case, "reference", True)
    results = check_nm_sparse(case, torch.float32, CPU, "reference", run=lambda x: break_it(*right(x)))
    assert names <= {r.name for r in results if not r.ok}
    assert all(r.ok for r in results if r.name in {"selection", "out", "lse"} - names)


def test_it_is_the_named_backend_that_is_checked():
    inputs = make_nm_sparse(CASE, torch.float32, "cpu")
    with pytest.raises(saccade.InvalidArgument, match="nowhere"):
        public_call(CASE, "nowhere", True)(inputs)
    with pytest.raises(StopIteration):
        selection_of(CASE, inputs, "nowhere")


def test_the_selection_is_that_of_the_named_backend(monkeypatch):
    asked = []

    def forward(args, keeps, backend):
        asked.append(backend)
        raise saccade.UnsupportedProblem("asked")

    monkeypatch.setattr(check.op, "forward", forward)
    name = next(b.name for b in check.BACKENDS if b.launchers is not None)
    with pytest.raises(saccade.UnsupportedProblem, match="asked"):
        selection_of(CASE, make_nm_sparse(CASE, torch.float32, "cpu"), name)
    assert asked == [name]
