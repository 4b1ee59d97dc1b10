"""The contract of every backend of `attention_varlen`. The test of a backend inherits `VarlenContract` and names the backend."""

from __future__ import annotations

import pytest
import torch
from contracts.exact import DEVICE, DTYPES, named

import saccade
from saccade.exact.testing.varlen_cases import VARLEN, VarlenCase
from saccade.exact.testing.varlen_check import check_varlen
from saccade.testing.judge import report


class VarlenContract:
    """Inherit and set `backend`; opt-outs stand in `opt_outs.py`."""

    backend: str
    has_lse = True
    own_dropout = True
    takes_bias = True
    dtypes = DTYPES

    def skip_unless_taken(self, case: VarlenCase, dtype: torch.dtype) -> None:
        if case.dropout_p and not self.own_dropout:
            pytest.skip("draws its own dropout")
        if case.bias and not self.takes_bias:
            pytest.skip("takes no bias")
        if case.lse_grad and not self.has_lse:
            pytest.skip("has no log-sum-exp")
        if dtype not in self.dtypes:
            pytest.skip(f"does not take {dtype}")

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("case", VARLEN, ids=str)
    def test_budget(self, case: VarlenCase, dtype):
        self.skip_unless_taken(case, dtype)
        try:
            results = check_varlen(case, dtype, DEVICE, self.backend, lse=self.has_lse)
        except saccade.UnsupportedProblem as refusal:
            pytest.skip(str(refusal).splitlines()[-1])
        assert all(r.ok for r in results), report(case, results)

    @pytest.mark.parametrize("first", [0, 1])
    def test_nan_stays_in_its_sequence(self, first):
        dtype = self.dtypes[0]
        ends = torch.tensor([0, 5, 22, 40], dtype=torch.int32, device=DEVICE)
        tensors = [torch.randn(40, 2, 16, device=DEVICE).to(dtype) for _ in range(3)]
        clean = self.differentiated(tensors, ends)
        poisoned = [x.clone() for x in tensors]
        bad = slice(0, 5) if first == 0 else slice(5, 22)
        for x in poisoned:
            x[bad] = float("nan")
        found = self.differentiated(poisoned, ends)
        rest = torch.ones(40, dtype=torch.bool)
        rest[bad] = False
        for x, y in zip(found, clean, strict=True):
            torch.testing.assert_close(x[rest], y[rest], rtol=0, atol=0)
            assert x[bad].isnan().all()

    def differentiated(self, tensors: list[torch.Tensor], ends: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = saccade.attention_varlen(*leaves, ends, ends, 21, 21, backend=self.backend)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_tokens_of_no_sequence(self, is_causal):
        """They get out 0, lse -inf and zero gradients, whatever memory held and whatever comes back."""
        if not self.has_lse:
            pytest.skip("has no log-sum-exp")
        ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
        leaves = [torch.randn(16, 2, 16, device=DEVICE).to(self.dtypes[0]).requires_grad_() for _ in range(3)]
        out, lse = saccade.attention_varlen(*leaves, ends, ends, 7, 7, is_causal=is_causal, return_lse=True, backend=self.backend)
        assert (out[12:] == 0).all()
        assert lse[:, :12].isfinite().all()
        assert (lse[:, 12:] == float("-inf")).all()
        incoming = torch.ones_like(lse).index_fill(1, torch.arange(12, 16, device=DEVICE), float("nan"))
        for gradient in torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), incoming)):
            assert gradient.isfinite().all()
            assert (gradient[12:] == 0).all()

    @pytest.mark.parametrize("incoming", [float("nan"), float("inf")])
    def test_what_comes_back_to_the_lse_of_a_query_that_sees_no_key(self, incoming):
        """The second of three sequences has queries and no keys."""
        if not self.has_lse:
            pytest.skip("has no log-sum-exp")
        ends, ends_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5, 9, 16], [0, 3, 3, 10]))
        leaves = [torch.randn(n, 2, 16, device=DEVICE).to(self.dtypes[0]).requires_grad_() for n in (16, 10, 10)]
        out, lse = saccade.attention_varlen(*leaves, ends, ends_k, 7, 7, return_lse=True, backend=self.backend)
        blind = lse.detach() == float("-inf")
        assert torch.equal(blind, torch.zeros_like(blind).index_fill(1, torch.arange(5, 9, device=DEVICE), True))
        given = torch.randn_like(lse)
        expected, found = (
            torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), given.masked_fill(blind, x)), retain_graph=True)
            for x in (0.0, incoming)
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)

    def test_a_finite_number_of_a_float32_bias_hides_no_key_of_16_bits(self):
        """finfo.min of float32 is -inf in 16 bits: a whole row of it has the mean of the values."""
        if not self.takes_bias:
            pytest.skip("takes no bias")
        ends = torch.tensor([0, 9, 14], dtype=torch.int32, device=DEVICE)
        tensors = [torch.randn(14, 2, 16, device=DEVICE).half() for _ in range(3)]
        bias = torch.randn(2, 9, 9, device=DEVICE).index_fill(1, torch.tensor([3], device=DEVICE), torch.finfo(torch.float32).min)
        out = saccade.attention_varlen(*tensors, ends, ends, 9, 9, attn_bias=bias, backend=self.backend)
        wide = [x.double() for x in tensors]
        expected = saccade.attention_varlen(*wide, ends, ends, 9, 9, attn_bias=bias.double(), backend="reference")
        torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=5e-3)

    def test_strided_inputs(self):
        dtype = self.dtypes[0]
        ends = torch.tensor([0, 9, 9, 30], dtype=torch.int32, device=DEVICE)
        qkv = torch.randn(30, 3, 2, 16, device=DEVICE).to(dtype)
        views = list(qkv.unbind(1))
        transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in views]
        for x, y, z in zip(
            *(self.differentiated(t, ends) for t in (views, transposed, [x.contiguous() for x in views])), strict=True
        ):
            torch.testing.assert_close(x, z, rtol=0, atol=0)
            torch.testing.assert_close(y, z, rtol=0, atol=0)
