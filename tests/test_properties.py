"""Properties on random shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contracts.dynamic_mask import IN_CPP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import saccade
from saccade.dynamic_mask.testing.cases import DynamicMaskCase
from saccade.dynamic_mask.testing.check import check_dynamic_mask
from saccade.exact.testing.check import check_attention
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.nm_sparse.testing.check import check_nm_sparse
from saccade.testing.cases import Case
from saccade.testing.inputs import make
from saccade.testing.judge import report

pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@st.composite
def cases(draw):
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 3]))
    heads = kv_heads * group
    q_len, kv_len = draw(st.sampled_from([1, 2, 5, 16, 18])), draw(st.integers(1, 34))
    packed = group == 1 and draw(st.booleans())
    kv_len = q_len if packed else kv_len
    broadcast = tuple(n if draw(st.booleans()) else 1 for n in (batch, heads, q_len, kv_len))
    kind = draw(st.sampled_from([None, "bool", "bias"]))
    return Case(
        "drawn", batch, heads, kv_heads, q_len, kv_len, draw(st.integers(1, 33)),
        is_causal=kind is None and draw(st.booleans()),
        mask="bool" if kind == "bool" else None,
        mask_shape=broadcast if kind == "bool" else None,
        bias=broadcast if kind == "bias" else None,
        lengths=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.2, 0.7])),
        packed=packed,
        lse_grad=draw(st.booleans()),
    )  # fmt: skip


@QUIET
@given(case=cases(), seed=st.integers(0, 1000))
def test_short_is_within_budget_on_any_small_problem(case, seed):
    results = check_attention(case, torch.float32, DEVICE, "short", seed=seed)
    assert all(r.ok for r in results), f"{case!r}\n{report(case, results)}"


@QUIET
@given(case=cases(), seed=st.integers(0, 1000))
def test_reference_and_torch_agree_on_any_small_problem(case, seed):
    for backend in ("sdpa", "reference"):
        if case.dropout_p and backend == "sdpa":
            continue
        results = check_attention(case, torch.float32, DEVICE, backend, seed=seed, lse=backend == "reference")
        assert all(r.ok for r in results), f"{case!r}\n{report(case, results)}"


@QUIET
@given(case=cases(), split=st.integers(1, 33))
def test_lse_joins_attention_over_two_halves_of_the_keys(case, split):
    """The purpose of lse: results over parts of the keys can be combined with weights exp(lse)."""
    case = replace(case, mask=None, bias=None, lengths=False, dropout_p=0.0, packed=False, is_causal=False)
    x = make(case, torch.float32, DEVICE)
    if split >= case.kv_len:
        split = case.kv_len
    options = {"enable_gqa": True, "return_lse": True, "backend": "short"}
    whole, _ = saccade.attention(x.query, x.key, x.value, **options)
    parts = [
        saccade.attention(x.query, x.key[:, :, part], x.value[:, :, part], **options)
        for part in (slice(0, split), slice(split, None))
    ]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    joined = sum(out * torch.exp(lse - total)[..., None] for out, lse in parts)
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)


@QUIET
@given(case=cases())
def test_a_constant_added_to_every_score_changes_lse_alone(case):
    case = replace(case, mask=None, bias=None, lengths=False, dropout_p=0.0, packed=False, is_causal=False)
    x = make(case, torch.float32, DEVICE)
    options = {"enable_gqa": True, "return_lse": True, "backend": "short"}
    out, lse = saccade.attention(x.query, x.key, x.value, **options)
    shifted, moved = saccade.attention(x.query, x.key, x.value, torch.full((1, 1), 2.0, device=DEVICE), **options)
    torch.testing.assert_close(shifted, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moved, lse + 2.0, rtol=1e-5, atol=1e-5)


@st.composite
def dynamic_mask_cases(draw):
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 3]))
    kv_len, is_causal, documents = draw(st.integers(1, 34)), draw(st.booleans()), draw(st.booleans())
    q_len = draw(st.integers(1, kv_len if is_causal or documents else 34))
    return DynamicMaskCase(
        "drawn", batch, kv_heads * group, kv_heads, q_len, kv_len, draw(st.integers(1, 33)), draw(st.integers(1, 40)),
        is_causal=is_causal, documents=documents, lengths=draw(st.booleans()), add_scores=draw(st.booleans()),
        ties=draw(st.booleans()), lse_grad=draw(st.booleans()),
    )  # fmt: skip


@QUIET
@given(case=dynamic_mask_cases(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("backend", ["auto", "gather", IN_CPP, "gather_torch", "reference"])
def test_dynamic_masks_are_within_budget_on_any_small_problem(backend, case, seed):
    results = check_dynamic_mask(case, torch.float32, DEVICE, backend, seed=seed)
    assert all(r.ok for r in results), f"{case!r}\n{report(case, results)}"


@st.composite
def nm_sparse_cases(draw):
    batch, kv_heads, share = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 3]))
    heads, q_len, kv_len = kv_heads * share, draw(st.sampled_from([1, 2, 5, 33, 66])), draw(st.integers(1, 70))
    broadcast = tuple(n if draw(st.booleans()) else 1 for n in (batch, heads, q_len, kv_len))
    kind = draw(st.sampled_from([None, None, "bool", "bias"]))
    group = draw(st.integers(2, 16))
    dense_first, dense_recent = (group * draw(st.sampled_from([0, 0, 1, 3])) for _ in range(2))
    return NMSparseCase(
        "drawn", batch, heads, kv_heads, q_len, kv_len, draw(st.integers(1, 33)),
        is_causal=kind is None and draw(st.booleans()),
        mask="bool" if kind == "bool" else None,
        mask_shape=broadcast if kind == "bool" else None,
        bias=broadcast if kind == "bias" else None,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.2, 0.7])),
        lse_grad=draw(st.booleans()),
        pattern=f"{draw(st.integers(1, group - 1))}:{group}",
        blocks=draw(st.booleans()),
        dense_first=dense_first,
        dense_recent=dense_recent,
    )  # fmt: skip


@settings(QUIET, max_examples=25 if torch.cuda.is_available() else 10)  # 3 s each in Triton's interpreter
@given(case=nm_sparse_cases(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("backend", ["masked", "reference"])
def test_nm_sparse_is_within_budget_on_any_small_problem(backend, case, seed):
    results = check_nm_sparse(case, torch.float32, DEVICE, backend, seed=seed)
    assert all(r.ok for r in results), f"{case!r}\n{report(case, results)}"
