"""Choosing a backend, refusing, and explaining."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import saccade
from saccade.engine import dispatch
from saccade.engine.alternatives import Alternatives
from saccade.engine.backend import Backend
from saccade.engine.dispatch import choose, explain
from saccade.errors import CompileError, InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.exact.backends import BACKENDS as ATTENTION
from saccade.exact.problem import describe_attention
from saccade.launch import disabled
from saccade.operations import OPERATIONS, find

X = torch.zeros(1, 1, 4, 8)
PROBLEM = describe_attention(X, X, X, None, 0.0, False, None, False, None, False, False, False)


def backend(name: str, reasons: tuple[str, ...] = (), prefers: bool = True) -> Backend:
    return Backend(name, "attention", f"summary of {name}", lambda problem: list(reasons), lambda problem: prefers)


A, B = backend("a"), backend("b")
CANNOT, RATHER_NOT = backend("cannot", ("needs this", "needs that")), backend("rather", prefers=False)


def test_auto_takes_the_first_that_can_and_prefers():
    assert choose((CANNOT, RATHER_NOT, A, B), PROBLEM).backend is A
    assert choose((B, A), PROBLEM).backend is B


def test_auto_takes_the_first_that_can_when_none_prefers():
    assert choose((CANNOT, RATHER_NOT, replace(RATHER_NOT, name="other")), PROBLEM).backend is RATHER_NOT


def test_auto_takes_a_backend_of_a_name_only_where_the_reference_is_left():
    untimed, reference = (
        replace(A, by_name_only=lambda problem: "not timed", spares_reference=True),
        replace(RATHER_NOT, name="reference", is_reference=True),
    )
    inexact = replace(backend("inexact"), by_name_only=lambda problem: "less exact")
    assert choose((untimed, RATHER_NOT, reference), PROBLEM).backend is RATHER_NOT
    assert choose((inexact, untimed, CANNOT, reference), PROBLEM).backend is untimed
    assert choose((inexact, CANNOT, reference), PROBLEM).backend is reference
    assert choose((replace(CANNOT, spares_reference=True), reference), PROBLEM).backend is reference
    assert "  -> a: summary of a, as only the reference is left: not timed" in explain((untimed, reference), PROBLEM)


@pytest.mark.parametrize("by_name_only", ["", "not timed"])
def test_auto_passes_over_what_did_not_compile_for_the_shape(monkeypatch, by_name_only):
    """Failures are remembered by the shapes of query and key, which differ in heads and length here."""
    monkeypatch.setattr(disabled, "_disabled", {})
    monkeypatch.setattr(disabled, "_warned", set())

    def run(launchers):
        if launchers == "a":
            raise CompileError("a kernel of it does not compile", (), "error")
        return launchers

    first = replace(A, by_name_only=lambda problem: by_name_only, spares_reference=True, launchers=lambda: "a")
    reference = replace(RATHER_NOT, name="reference", is_reference=True)
    query, key = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
    problem = describe_attention(query, key, key, None, 0.0, False, None, True, None, False, False, False)
    assert choose((first, reference), problem).backend is first
    alternatives = Alternatives("attention", (first, reference), (), "computed", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="a kernel of it does not compile; backend 'reference' computes instead"):
        assert alternatives.attempt(("a", "reference"), query, key, run) == "computed"
    assert choose((first, reference), problem).backend is reference
    assert "a: disabled: a kernel of it does not compile" in explain((first, reference), problem)
    assert choose((first, reference), replace(problem, kv_len=8)).backend is first


def test_a_name_is_an_order():
    assert choose((A, RATHER_NOT), PROBLEM, "rather").backend is RATHER_NOT
    with pytest.raises(UnsupportedProblem) as caught:
        choose((A, CANNOT), PROBLEM, "cannot")
    assert str(caught.value).splitlines() == [
        "backend 'cannot' cannot run",
        "    attention(B=1 H=1 Tq=4 Tk=4 D=8 fp32 cpu)",
        "  cannot: needs this",
        "          needs that",
    ]


def test_no_backend_can():
    with pytest.raises(UnsupportedProblem) as caught:
        choose((CANNOT, replace(CANNOT, name="neither")), PROBLEM)
    text = str(caught.value)
    assert text.startswith("no backend can run")
    assert text.count("needs this") == text.count("needs that") == 2
    assert isinstance(caught.value, (SaccadeError, NotImplementedError))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(InvalidArgument, match=r"^backend is 'x'; allowed are 'auto', 'a', 'cannot'$"):
        choose((A, CANNOT), PROBLEM, "x")


def test_explain_has_a_line_for_each():
    lines = explain((CANNOT, RATHER_NOT, A, B), PROBLEM).splitlines()
    assert lines == [
        str(PROBLEM),
        "     cannot: cannot: needs this; needs that",
        "     rather: could, but not preferred for such a problem",
        "  -> a: summary of a",
        "     b: could, but an earlier backend is preferred",
    ]


def test_explain_shows_the_configuration():
    chosen = replace(A, form=lambda problem: "fwd=Config(4)")
    assert "  -> a: summary of a, fwd=Config(4)" in explain((chosen,), PROBLEM)


def test_explain_when_nothing_can():
    assert "->" not in explain((CANNOT,), PROBLEM)


def test_public_explain_names_every_backend():
    text = saccade.explain(X, X, X, is_causal=True)
    assert text.startswith("attention(B=1 H=1 Tq=4 Tk=4 D=8 fp32 causal")
    assert all(f" {b.name}: " in text for b in ATTENTION)
    assert text.count("->") == 1


def test_explain_chooses_as_attention_does(monkeypatch):
    chosen = []
    monkeypatch.setattr("saccade.engine.prepare._PREPARED", {})
    monkeypatch.setattr("saccade.exact.api.on_a_cpu", lambda *a: None)
    monkeypatch.setattr("saccade.engine.prepare.choose", lambda *a: chosen.append(dispatch.choose(*a)) or chosen[-1])
    x = torch.zeros(1, 1, 4, 12)
    saccade.attention(x, x, x)
    assert f"-> {chosen[0].backend.name}: " in saccade.explain(x, x, x)


def test_falling_to_the_reference_is_said_once(caplog):
    dispatch._warn_reference.cache_clear()
    reference = find("attention", "reference")
    with caplog.at_level(logging.WARNING, "saccade"):
        for _ in range(3):
            assert choose((CANNOT, reference), PROBLEM).backend is reference
    assert [r.getMessage() for r in caplog.records] == [
        f"only the reference backend can run {PROBLEM}: correct, but slow and O(Tq * Tk) in memory"
    ]
    dispatch._warn_reference.cache_clear()


def test_falling_to_the_reference_is_not_said_in_a_compiled_graph():
    """A log call would break the graph."""
    torch._dynamo.reset()
    dispatch._warn_reference.cache_clear()  # what was said before would not be said again
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    found = torch.compile(lambda x: saccade.nm_sparse_attention(x, x, x), fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, saccade.nm_sparse_attention(x, x, x, backend="reference"))
    torch._dynamo.reset()


def test_auto_without_a_gpu_is_torch_unless_the_lse_is_wanted():
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    assert choose(ATTENTION, PROBLEM).backend.name == "sdpa"


def test_the_table_ends_with_the_reference_and_names_are_unique():
    for operation, backends in ((o.name, o.backends) for o in OPERATIONS.values()):
        assert backends[-1].name == "reference"
        assert len({b.name for b in backends}) == len(backends)
        assert all(b.operation == operation for b in backends)
        # one way to run, not two
        assert all((b.attend is None) != (b.launchers is None) for b in backends)
        assert all(b.summary for b in backends)
