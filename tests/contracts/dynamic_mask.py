"""The contract of every backend of `dynamic_mask_attention`: the test of a backend inherits `DynamicMaskContract` and names the
backend. Also
helpers shared by the tests of the kernels for sm_90a: a plain case, and whether the kernel ran it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from contracts.exact import DEVICE, DTYPES, named

import saccade
from saccade.dynamic_mask.reference import kept
from saccade.dynamic_mask.testing.cases import DYNAMIC_MASK
from saccade.dynamic_mask.testing.check import check_dynamic_mask, compare_dynamic_mask, differentiate, public_call
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.native.compiler import no_compiler
from saccade.testing.inputs import time_first
from saccade.testing.judge import report

# for parameters of tests that run wherever they can
IN_CPP = pytest.param(
    "gather_cpp", marks=pytest.mark.skipif(DEVICE != "cpu" or bool(no_compiler()), reason="needs a CPU and a C++ compiler")
)
CASES = [c for c in DYNAMIC_MASK if "large" not in c.tags]

# fifteen blocks of forward, eleven of backward; two tiles and a part, or three
PLAIN = replace(DYNAMIC_MASK[0], name="plain", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=700, head_dim=128, keep=100)


def watch_takes(monkeypatch, native) -> list[bool]:
    """Whether the kernel of a module ran each call that it was offered."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 device")
    answers: list[bool] = []
    takes = native.takes
    # nothing is remembered, so that each call is planned again
    monkeypatch.setattr("saccade.dynamic_mask.prepared._find", lambda *given: (None, None))
    monkeypatch.setattr(native, "takes", lambda *tensors: answers.append(takes(*tensors)) or answers[-1])
    return answers


SMALL = replace(CASES[0], name="small", batch=3, heads=4, kv_heads=2, q_len=21, kv_len=21, keep=5)
ONE = replace(SMALL, name="one", q_len=1)
BOTH = pytest.mark.parametrize("case", [SMALL, ONE], ids=str)
PADDED = (21, 0, 9)  # real keys of each batch row


class DynamicMaskContract:
    """Inherit and set `backend`; opt-outs stand in `opt_outs.py`. `keeps_layout` says whether out is laid out like query."""

    backend: str
    keeps_layout = True

    def outputs(self, case, inputs):
        return differentiate(public_call(case, self.backend, True), inputs, True)

    def same(self, first, second):
        """On a GPU the order in which programs add to dK, dV and dscores varies."""
        assert first.keys() == second.keys()
        for name, x in first.items():
            tolerance = 0 if DEVICE == "cpu" else 8 * torch.finfo(x.dtype).eps
            torch.testing.assert_close(x, second[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")

    # --- the budget: outputs, lse and every gradient against float64, for the keys that brute force keeps

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_budget(self, case, dtype):
        results = check_dynamic_mask(case, dtype, DEVICE, self.backend)
        assert all(r.ok for r in results), report(case, results)
        assert [r.name for r in results] == ["out", "lse", "dq", "dk", "dv", *(["dscores"] if case.add_scores else [])]

    # --- padding and queries that keep nothing

    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, 6e4])
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_garbage_in_padding_never_leaks(self, is_causal, garbage, dtype):
        case = replace(SMALL, is_causal=is_causal)
        lengths = torch.tensor(PADDED, device=DEVICE)
        clean = replace(make_dynamic_mask(case, dtype, DEVICE), lengths=lengths)
        real = (torch.arange(case.kv_len, device=DEVICE) < lengths[:, None])[:, None, :, None]
        dirty = replace(
            clean, key=clean.key.where(real, garbage), value=clean.value.where(real, garbage),
            key_scores=clean.key_scores.where(real[..., 0], garbage),
        )  # fmt: skip
        expected, found = self.outputs(case, clean), self.outputs(case, dirty)
        self.same(expected, found)
        assert not any(x.isnan().any() for x in found.values())
        results = compare_dynamic_mask(case, clean, found)
        assert all(r.ok for r in results), report(case, results)
        for name in ("dk", "dv"):
            assert (found[name][~real.expand_as(found[name])] == 0).all()
        assert (found["dscores"][~real[..., 0].expand_as(found["dscores"])] == 0).all()

    @BOTH
    def test_a_query_that_keeps_no_key(self, case):
        inputs = replace(make_dynamic_mask(case, torch.float32, DEVICE), lengths=torch.tensor([0, 21, 0], device=DEVICE))
        found = self.outputs(case, inputs)
        for b in (0, 2):
            assert (found["lse"][b] == -math.inf).all()
            for name in ("out", "dq", "dk", "dv", "dscores"):
                assert (found[name][b] == 0).all(), name
        assert not any(x.isnan().any() for x in found.values())

    @BOTH
    @pytest.mark.parametrize("incoming", [math.nan, math.inf])
    def test_what_comes_back_to_the_lse_of_a_query_that_keeps_no_key(self, case, incoming):
        """It reaches no gradient: by a backward that is planned with forward, and by one that is not."""
        lengths = torch.tensor([0, 21, 0], device=DEVICE)
        inputs = replace(make_dynamic_mask(case, torch.float32, DEVICE), lengths=lengths)
        expected = self.outputs(case, inputs)
        dlse = inputs.dlse.masked_fill(lengths[:, None, None] == 0, incoming)
        self.same(expected, self.outputs(case, replace(inputs, dlse=dlse)))

    @BOTH
    def test_keys_that_nobody_keeps_get_exactly_no_gradient(self, case):
        inputs = make_dynamic_mask(replace(case, keep=2), torch.float32, DEVICE)
        nobody = ~kept(inputs.key_scores, 2, case.q_len).any(2)
        assert nobody.any()
        found = self.outputs(replace(case, keep=2), inputs)
        for name in ("dk", "dv", "dscores"):
            assert (found[name][nobody] == 0).all(), name

    @pytest.mark.parametrize("where", ["query", "key", "value"])
    def test_nan_in_what_is_kept_propagates(self, where):
        case = replace(SMALL, keep=30)
        inputs = make_dynamic_mask(case, torch.float32, DEVICE)
        # a query, or a key that only the last query sees
        getattr(inputs, where)[1, 0, 20, 3] = math.nan
        out = self.outputs(case, inputs)["out"]
        assert out[1, 0, 20].isnan().any()
        assert out[0].isfinite().all()
        assert out[1, 2:].isfinite().all()  # the other key head

    # --- documents and causality

    @pytest.mark.parametrize("is_causal", [True, False])
    def test_documents_are_calls_of_their_own(self, is_causal):
        case = replace(SMALL, is_causal=is_causal)
        inputs = make_dynamic_mask(case, torch.float32, DEVICE)
        edges = (0, 1, 8, 21)
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor(edges).diff()).to(DEVICE).expand(3, -1)
        together = self.outputs(case, replace(inputs, document_ids=ids))
        for start, stop in itertools.pairwise(edges):
            part = {
                n: None if (x := getattr(inputs, n)) is None else x[:, :, start:stop]
                for n in ("query", "key", "value", "key_scores", "dout", "dlse")
            }
            alone = self.outputs(replace(case, q_len=stop - start, kv_len=stop - start), replace(inputs, **part))
            for name, x in alone.items():
                torch.testing.assert_close(together[name][:, :, start:stop], x, rtol=2e-5, atol=2e-5)

    def test_a_future_token_changes_nothing_before_it(self):
        inputs = make_dynamic_mask(SMALL, torch.float32, DEVICE)
        changed = {n: getattr(inputs, n).clone() for n in ("key", "value", "key_scores")}
        for x in changed.values():
            x[:, :, 15:] = 9.0
        before, after = (self.outputs(SMALL, x)["out"] for x in (inputs, replace(inputs, **changed)))
        torch.testing.assert_close(before[:, :, :15], after[:, :, :15], rtol=2e-6, atol=2e-6)
        assert (before[:, :, 15:] - after[:, :, 15:]).abs().amax() > 0.1

    # --- layouts and symmetries

    @BOTH
    def test_any_strides_with_contiguous_last_dim(self, case):
        inputs = make_dynamic_mask(case, torch.float32, DEVICE)

        def spread(x, extra):
            wide = torch.full((x.shape[0], 2 * x.shape[1], x.shape[2] + 3, x.shape[3] + extra), math.nan, device=x.device)
            view = wide[:, 1::2, 2 : 2 + x.shape[2], 3 : 3 + x.shape[3]]
            view.copy_(x)
            return view

        spreads = {n: spread(getattr(inputs, n), 3 + i) for i, n in enumerate(("query", "key", "value", "dout"))}
        spreads["key_scores"] = inputs.key_scores.repeat_interleave(2, dim=2)[..., ::2]
        self.same(self.outputs(case, inputs), self.outputs(case, replace(inputs, **spreads)))

    @BOTH
    def test_grouped_heads_are_repeated_heads(self, case):
        inputs = make_dynamic_mask(case, torch.float32, DEVICE)
        repeated = {n: getattr(inputs, n).repeat_interleave(2, dim=1) for n in ("key", "value", "key_scores")}
        expected = self.outputs(replace(case, kv_heads=4), replace(inputs, **repeated))
        for name in ("dk", "dv", "dscores"):
            expected[name] = expected[name].unflatten(1, (2, 2)).sum(2)
        for name, x in self.outputs(case, inputs).items():
            torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-5)

    @BOTH
    def test_permuting_the_batch_permutes_the_result(self, case):
        inputs = replace(make_dynamic_mask(case, torch.float32, DEVICE), lengths=torch.tensor(PADDED, device=DEVICE))
        order = torch.tensor([2, 0, 1], device=DEVICE)
        permuted = type(inputs)(*(None if x is None else x[order] for x in vars(inputs).values()))
        expected = {name: x[order] for name, x in self.outputs(case, inputs).items()}
        self.same(expected, self.outputs(case, permuted))

    @BOTH
    def test_out_has_the_layout_of_query(self, case):
        if not self.keeps_layout:
            pytest.skip("plain torch decides")
        inputs = make_dynamic_mask(case, torch.float32, DEVICE)
        call = public_call(case, self.backend, False)
        assert call(inputs)[0].transpose(1, 2).is_contiguous()
        assert call(replace(inputs, query=inputs.query.contiguous()))[0].is_contiguous()
        out = call(replace(inputs, query=time_first(inputs.query)))[0]
        assert out.permute(2, 0, 1, 3).is_contiguous()
        assert torch.equal(out, call(inputs)[0])

    def test_a_scale_is_a_factor_on_the_products(self):
        x = make_dynamic_mask(SMALL, torch.float32, DEVICE)
        options = {"keep": SMALL.keep, "enable_gqa": True, "backend": self.backend}
        by_scale = saccade.dynamic_mask_attention(x.query, x.key, x.value, x.key_scores, scale=0.5, **options)
        by_query = saccade.dynamic_mask_attention(0.5 * x.query, x.key, x.value, x.key_scores, scale=1.0, **options)
        torch.testing.assert_close(by_scale, by_query, rtol=2e-6, atol=2e-6)
        assert not torch.equal(by_scale, saccade.dynamic_mask_attention(x.query, x.key, x.value, x.key_scores, **options))

    def test_a_number_added_to_all_scores_changes_lse_alone(self):
        inputs = make_dynamic_mask(SMALL, torch.float32, DEVICE)
        plain, moved = (self.outputs(SMALL, x) for x in (inputs, replace(inputs, key_scores=inputs.key_scores + 2.0)))
        for name, x in moved.items():
            torch.testing.assert_close(x - 2.0 if name == "lse" else x, plain[name], rtol=2e-5, atol=2e-5)
