"""The contract of every backend of `attention`. The test of a backend inherits `AttentionContract` and names the backend."""

from __future__ import annotations

import math
import mmap
import os
import zlib
from dataclasses import replace

import pytest
import torch

import saccade
from saccade.exact.testing.cases import ATTENTION
from saccade.exact.testing.check import check_attention, public_call
from saccade.operations import find
from saccade.testing.baseline import differentiate
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs, make
from saccade.testing.judge import report

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# bfloat16 only on a GPU, because the interpreter computes it wrongly
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if HAS_GPU else (torch.float32, torch.float16)
SMALL = Case("small", 3, 2, 2, 9, 21, 16, lse_grad=True)
POOL = Case("pool", 3, 2, 2, 1, 21, 16, lse_grad=True)
BOTH = pytest.mark.parametrize("case", [SMALL, POOL], ids=str)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class AttentionContract:
    """Inherit and set `backend`; `opt_outs.py` has every backend that departs from these values, and why. `has_lse` says whether it returns the lse, `own_dropout` whether it draws the library's own
    Philox mask."""

    backend: str
    # device memory for the test of large offsets
    large_bytes = 60e9
    has_lse = True
    own_dropout = True
    # whether layouts and repetitions give the same bits, or only nearly
    same_bits = True
    skipped_tags: tuple[str, ...] = ()
    # of the budget, in the interpreter, only the cases tagged "quick"; for a backend whose own tests there have its other shapes
    cross_section = False
    # of the budget, in the interpreter, each case in one dtype, in turn, unless every case is asked for
    dtypes_in_turn = False
    # cases whose true gradient is 0, where a backend that is not ours returns rounding errors
    only_rounding: tuple[str, ...] = ()
    # whether results lie in memory as the inputs do; where torch makes them, it decides
    keeps_layout = True
    # whether garbage in keys that a boolean mask hides from all queries never leaks; torch allows that it does
    clears_masked = True
    # how much of the budget may be used; more than 1 only for a backend that is not ours
    slack = 1.0

    # --- helpers

    def outputs(self, case: Case, inputs: Inputs, seed: int = 0) -> dict[str, torch.Tensor]:
        return differentiate(public_call(case, self.backend, self.has_lse), inputs, seed, self.has_lse)

    def call(self, query, key, value, attn_mask=None, **keywords):
        return saccade.attention(query, key, value, attn_mask, backend=self.backend, **keywords)

    def same(self, first: dict, second: dict) -> None:
        assert first.keys() == second.keys()
        for name, x in first.items():
            if self.same_bits:
                assert torch.equal(x, second[name]), f"{name} differs, by {(x - second[name]).abs().max().item():.3e}"
            else:
                tolerance = 4 * torch.finfo(x.dtype).eps
                torch.testing.assert_close(
                    x, second[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
                )

    # --- the budget

    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("case", ATTENTION, ids=str)
    def test_budget(self, case: Case, dtype):
        if case.tags & set(self.skipped_tags):
            pytest.skip("beyond this backend's limits")
        if self.cross_section and not HAS_GPU and "quick" not in case.tags:
            pytest.skip("a cross-section where kernels are interpreted")
        in_turn = self.dtypes_in_turn and not HAS_GPU and not os.environ.get("EVERY_CASE")
        if in_turn and dtype != DTYPES[zlib.crc32(case.name.encode()) % 2]:  # neighbours are alike, so not their order
            pytest.skip("in the other dtype, unless every case is asked for")
        if case.dropout_p and not self.own_dropout:
            pytest.skip("draws its own dropout mask")
        if HAS_GPU and dtype != torch.float32 and case.name.endswith(self.only_rounding):
            pytest.skip(
                "torch adds up rounded dS: of a bias constant over the keys, whose gradient cancels, only rounding is left"
            )
        try:
            results = check_attention(case, dtype, DEVICE, self.backend, lse=self.has_lse)
        except saccade.UnsupportedProblem as refusal:
            if case.window is None:
                raise
            pytest.skip(str(refusal).splitlines()[-1])
        assert {"out", "dq", "dk", "dv"} <= {r.name for r in results}
        assert all(r.ok or r.ratio <= self.slack > 1.0 for r in results), report(case, results)

    @BOTH
    def test_bias_of_another_dtype_keeps_its_gradient_in_it(self, case):
        case = replace(case, bias=(1, 2, case.q_len, 21))
        inputs = make(case, torch.float16, DEVICE)
        inputs = replace(inputs, bias=inputs.bias.float())
        results = self.outputs(case, inputs)
        assert results["dbias"].dtype == torch.float32
        expected = differentiate(public_call(case, "reference", self.has_lse), inputs.to(torch.float64), 0, self.has_lse)
        error = (results["dbias"] - expected["dbias"]).norm() / expected["dbias"].norm()
        assert error < 0.005, error

    @BOTH
    def test_a_finite_number_of_a_float32_bias_hides_no_key_of_16_bits(self, case):
        """finfo.min of float32 is -inf in 16 bits: a whole row of it has the mean of the values, and such a key beside others weighs nothing."""
        inputs = make(replace(case, bias=(1, 2, case.q_len, 21)), torch.float16, DEVICE)
        bias = inputs.bias.float().index_fill(3, torch.tensor([4, 7], device=DEVICE), torch.finfo(torch.float32).min)
        bias = bias.index_fill(2, torch.tensor([0], device=DEVICE), torch.finfo(torch.float32).min)
        out = self.call(inputs.query, inputs.key, inputs.value, bias)
        expected = saccade.attention(*(x.double() for x in (inputs.query, inputs.key, inputs.value, bias)), backend="reference")
        torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=5e-3)

    @BOTH
    @pytest.mark.parametrize("axis", [0, 1], ids=["rows", "heads"])
    def test_a_bias_that_was_expanded_has_a_gradient_of_each(self, case, axis):
        """Its memory does not tell it from one that broadcasts, whose gradient is a sum."""
        shape = [3, 2, case.q_len, 21]
        shape[axis] = 1
        inputs = make(replace(case, bias=tuple(shape)), torch.float16, DEVICE)
        case, inputs = replace(case, bias=(3, 2, *shape[2:])), replace(inputs, bias=inputs.bias.expand(3, 2, -1, -1))
        results = self.outputs(case, inputs)
        expected = differentiate(public_call(case, "reference", self.has_lse), inputs.to(torch.float64), 0, self.has_lse)
        error = (results["dbias"] - expected["dbias"]).norm() / expected["dbias"].norm()
        assert error < 0.005, error

    # --- queries that see nothing

    @BOTH
    @pytest.mark.parametrize("how", ["mask", "lengths", "bias"])
    def test_a_query_that_sees_no_key(self, case, how):
        inputs = make(case, torch.float32, DEVICE)
        if how == "mask":
            inputs = replace(inputs, mask=torch.zeros(1, 1, 1, 21, dtype=torch.bool, device=DEVICE))
        elif how == "lengths":
            inputs = replace(inputs, lengths=torch.zeros(3, dtype=torch.int32, device=DEVICE))
        else:
            inputs = replace(inputs, bias=torch.full((1, 2, case.q_len, 21), -math.inf, device=DEVICE))
        results = self.outputs(case, inputs)
        for name, x in results.items():
            expected = torch.full_like(x, -math.inf if name == "lse" else 0.0)
            assert torch.equal(x, expected), f"{name} is {x}"

    @BOTH
    @pytest.mark.parametrize("incoming", [math.nan, math.inf, -math.inf])
    def test_what_comes_back_to_the_lse_of_a_query_that_sees_no_key(self, case, incoming):
        """As from `lse.square()` or a logaddexp of two such lse: it reaches no gradient."""
        if not self.has_lse:
            pytest.skip("gives no lse")
        seen = torch.arange(case.q_len, device=DEVICE) % 3 > 0
        inputs = make(case, torch.float32, DEVICE)
        inputs = replace(inputs, mask=seen[:, None].expand(1, 1, -1, 21), dlse=inputs.dlse.where(seen, 0.0))
        found = self.outputs(case, replace(inputs, dlse=inputs.dlse.where(seen, incoming)))
        self.same(self.outputs(case, inputs), found)
        assert not any(x.isnan().any() for x in found.values())

    # --- NaN

    @BOTH
    @pytest.mark.parametrize("how", ["mask", "lengths"])
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 6e4])
    def test_garbage_in_padded_keys_never_leaks(self, case, how, garbage):
        if how == "mask" and not self.clears_masked and not math.isfinite(garbage):
            pytest.skip("under a mask the meaning is torch's: a weight of 0 times a NaN is NaN")
        valid = torch.tensor([5, 21, 0], device=DEVICE)
        visible = torch.arange(21, device=DEVICE) < valid[:, None]
        clean = make(case, torch.float32, DEVICE)
        if how == "lengths":
            clean = replace(clean, lengths=valid.to(torch.int32))
        else:
            clean = replace(clean, mask=visible[:, None, None, :])
        kept = visible[:, None, :, None]
        dirty = replace(clean, key=clean.key.where(kept, garbage), value=clean.value.where(kept, garbage))
        expected, results = self.outputs(case, clean), self.outputs(case, dirty)
        self.same(expected, results)
        assert not any(x.isnan().any() for x in results.values())

    @BOTH
    @pytest.mark.parametrize("where", ["query", "key", "value"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_nan_and_inf_in_visible_inputs_propagate(self, case, where, bad):
        inputs = make(case, torch.float32, DEVICE)
        tensor = getattr(inputs, where).clone()
        # the sign that makes the score +inf, because a key whose score is -inf would rightly have no weight
        tensor[1, 0, 0, 3] = bad * inputs.query[1, 0, 0, 3].sign() if where == "key" else bad
        out = self.outputs(case, replace(inputs, **{where: tensor}))["out"]
        assert not out[1, 0, 0].isfinite().all()
        assert out[0].isfinite().all()
        assert out[2].isfinite().all()
        assert out[1, 1].isfinite().all()

    # --- layouts, determinism, symmetries

    @pytest.mark.parametrize("layout", ["bhtd", "tbhd", "packed", "expanded"])
    def test_layouts_give_the_same_bits(self, layout):
        case = Case("square", 2, 2, 2, 19, 19, 24, lse_grad=True)
        plain, other = (make(case, torch.float32, DEVICE, layout=name) for name in ("bthd", layout))
        if layout == "expanded":
            plain = replace(plain, **{n: getattr(other, n).clone() for n in ("query", "key", "value")})
        self.same(self.outputs(case, plain), self.outputs(case, other))

    @pytest.mark.parametrize("layout", ["bthd", "bhtd", "tbhd"])
    @pytest.mark.parametrize("sizes", [(2, 3, 9, 17), (2, 1, 9, 17), (2, 3, 1, 17)], ids=["heads", "one-head", "one-query"])
    def test_results_lie_as_the_inputs_do(self, sizes, layout):
        """A model that goes on in the order of its inputs copies nothing, `nn.MultiheadAttention` ([T, B, H, D]) among them."""
        if not self.keeps_layout:
            pytest.skip("torch decides")
        batch, heads, q_len, kv_len = sizes
        case = Case("lying", batch, heads, heads, q_len, kv_len, 16)
        inputs = make(case, torch.float32, DEVICE, layout=layout)
        found = self.outputs(case, inputs)
        for name, like in (("out", inputs.query), ("dq", inputs.query), ("dk", inputs.key), ("dv", inputs.value)):
            assert [n for n, size in zip(found[name].stride(), like.shape, strict=True) if size > 1] == [
                n for n, size in zip(like.stride(), like.shape, strict=True) if size > 1
            ], name

    @BOTH
    def test_any_strides_with_contiguous_last_dim(self, case):
        inputs = make(case, torch.float32, DEVICE)

        def spread(x, extra):
            wide = torch.full((x.shape[0], 2 * x.shape[1], x.shape[2] + 3, x.shape[3] + extra), math.nan, device=x.device)
            view = wide[:, 1::2, 2 : 2 + x.shape[2], 3 : 3 + x.shape[3]]
            view.copy_(x)
            return view

        # every tensor has its own strides, so that reading it with those of another shows
        spreads = {n: spread(getattr(inputs, n), 3 + i) for i, n in enumerate(("query", "key", "value", "dout"))}
        self.same(self.outputs(case, inputs), self.outputs(case, replace(inputs, **spreads)))

    def test_dout_may_be_expanded(self):
        inputs = make(SMALL, torch.float32, DEVICE)
        ones = torch.ones_like(inputs.dout)
        expanded = torch.ones((), device=DEVICE).expand_as(ones)
        self.same(self.outputs(SMALL, replace(inputs, dout=ones)), self.outputs(SMALL, replace(inputs, dout=expanded)))

    @pytest.mark.parametrize("case", [SMALL, POOL, replace(SMALL, bias=(1, 2, 9, 21)), replace(SMALL, dropout_p=0.4)], ids=repr)
    def test_twice_gives_the_same_bits(self, case):
        if case.dropout_p and self.has_lse and not self.own_dropout:
            pytest.skip("gives the lse without dropout alone")
        inputs = make(case, torch.float16, DEVICE)
        self.same(self.outputs(case, inputs), self.outputs(case, inputs))

    @BOTH
    def test_permuting_the_batch_permutes_the_result(self, case):
        case = replace(case, lengths=True, mask="bool", mask_shape=(3, 1, case.q_len, 21))
        inputs = make(case, torch.float32, DEVICE)
        order = torch.tensor([2, 0, 1], device=DEVICE)
        permuted = Inputs(*(None if x is None else x[order] for x in vars(inputs).values()))
        expected = {name: x[order] for name, x in self.outputs(case, inputs).items()}
        self.same(expected, self.outputs(case, permuted))

    @BOTH
    def test_a_mask_that_hides_nothing_is_no_mask(self, case):
        inputs = make(case, torch.float32, DEVICE)
        everything = torch.ones(case.q_len, 21, dtype=torch.bool, device=DEVICE)
        full = torch.full((3,), 21, dtype=torch.int64, device=DEVICE)
        expected = self.outputs(case, inputs)
        for other in (replace(inputs, mask=everything), replace(inputs, lengths=full)):
            for name, x in self.outputs(case, other).items():
                torch.testing.assert_close(x, expected[name], rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("q_len", [1, 9])
    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_grouped_heads_are_repeated_heads(self, q_len, kv_heads):
        grouped = Case("grouped", 2, 4, kv_heads, q_len, 21, 16, lse_grad=True)
        inputs = make(grouped, torch.float32, DEVICE)
        share = 4 // kv_heads
        repeated = replace(inputs, key=inputs.key.repeat_interleave(share, 1), value=inputs.value.repeat_interleave(share, 1))
        expected = self.outputs(replace(grouped, kv_heads=4), repeated)
        for name in ("dk", "dv"):
            expected[name] = expected[name].unflatten(1, (kv_heads, share)).sum(dim=2)
        for name, x in self.outputs(grouped, inputs).items():
            torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5)

    @BOTH
    def test_scale_is_a_factor_on_the_scores(self, case):
        inputs = make(case, torch.float32, DEVICE)
        by_scale = self.call(inputs.query, inputs.key, inputs.value, scale=0.5)
        by_query = self.call(inputs.query * 0.5, inputs.key, inputs.value, scale=1.0)
        self.same({"out": by_scale}, {"out": by_query})  # a power of two: exact
        assert not torch.equal(by_scale, self.call(inputs.query, inputs.key, inputs.value))
        flat = self.call(inputs.query, inputs.key, inputs.value, scale=1e-7)
        torch.testing.assert_close(flat, inputs.value.mean(2, keepdim=True).expand_as(flat), rtol=1e-5, atol=1e-5)

    def test_causal_is_upper_left(self):
        for q_len, kv_len in ((9, 21), (21, 9)):
            inputs = make(replace(SMALL, q_len=q_len, kv_len=kv_len), torch.float32, DEVICE)
            causal = self.call(inputs.query, inputs.key, inputs.value, is_causal=True)
            mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE).tril()
            torch.testing.assert_close(causal, self.call(inputs.query, inputs.key, inputs.value, mask), rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(causal[:, :, 0], inputs.value[:, :, 0])

    @BOTH
    def test_lse_has_its_own_gradient(self, case):
        if not self.has_lse:
            pytest.skip("gives no lse")
        inputs = make(case, torch.float32, DEVICE)
        query, key = (x.clone().requires_grad_() for x in (inputs.query, inputs.key))
        value = inputs.value.clone().requires_grad_()
        _, lse = self.call(query, key, value, return_lse=True)
        grads = torch.autograd.grad(lse, (query, key, value), inputs.dlse, allow_unused=True, materialize_grads=True)
        expected = torch.logsumexp(0.25 * query.double() @ key.double().mT, -1)
        wanted = torch.autograd.grad(expected, (query, key), inputs.dlse.double())
        for x, w in zip(grads, wanted, strict=False):
            torch.testing.assert_close(x, w.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(grads[2], torch.zeros_like(value))

    # --- nothing to do, and far too much

    @pytest.mark.parametrize(
        "sizes", [(0, 2, 9, 21), (2, 0, 9, 21), (2, 2, 0, 21), (2, 2, 9, 0), (0, 2, 1, 21), (2, 2, 1, 0)], ids=str
    )
    @pytest.mark.parametrize("bias", [False, True])
    def test_empty(self, sizes, bias):
        batch, heads, q_len, kv_len = sizes
        case = Case("empty", batch, heads, heads, q_len, kv_len, 16, bias=(1, 1, q_len, kv_len) if bias else None)
        case = replace(case, kv_heads=heads or 1) if heads else case
        inputs = make(replace(case, heads=heads, kv_heads=heads), torch.float32, DEVICE)
        query, key, value = (x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
        attn_bias = None if not bias else inputs.bias.requires_grad_()
        out = self.call(query, key, value, attn_bias)
        assert out.shape == (batch, heads, q_len, 16)
        assert torch.equal(out, torch.zeros_like(out))
        tensors = [query, key, value, *([attn_bias] if bias else [])]
        for tensor, grad in zip(tensors, torch.autograd.grad(out.sum(), tensors, allow_unused=True), strict=True):
            assert grad is None or torch.equal(grad, torch.zeros_like(tensor))

    @pytest.mark.gpu
    @pytest.mark.parametrize("q_len", [1, 3])
    def test_more_problems_than_65535(self, q_len):
        case = Case("many", 33000, 2, 2, q_len, 5, 16)
        results = check_attention(case, torch.float16, DEVICE, self.backend, lse=self.has_lse)
        assert all(r.ok for r in results), report(case, results)

    @pytest.mark.gpu
    @pytest.mark.slow
    @pytest.mark.xdist_group("large memory")  # one at a time: each takes up to 60 GB
    @pytest.mark.parametrize("q_len", [1, 128])
    def test_offsets_beyond_int32(self, q_len):
        needed = self.large_bytes if q_len > 1 else 60e9
        if torch.cuda.mem_get_info()[0] < needed:
            pytest.skip(f"needs {needed / 1e9:.0f} GB of device memory")
        batch = 2**31 // (16 * 128 * 64) + 2
        shape = (batch, 128, 16, 64)
        key, value = (torch.randn(shape, device=DEVICE, dtype=torch.float16).transpose(1, 2).requires_grad_() for _ in range(2))
        query = torch.randn((batch, q_len, 16, 64), device=DEVICE, dtype=torch.float16).transpose(1, 2).requires_grad_()
        dout = torch.randn_like(query)
        whole = torch.autograd.grad(out := self.call(query, key, value), (query, key, value), dout)
        tail = [x[-2:].detach().clone().requires_grad_() for x in (query, key, value)]
        expected = torch.autograd.grad(part := self.call(*tail), tail, dout[-2:])
        for x, y in zip(
            (out, *whole), (part, *expected), strict=True
        ):  # with few problems another configuration may run, so results are close and not equal
            error = (x[-2:].float() - y.float()).norm() / y.float().norm()
            assert error < 0.005, error

    @pytest.mark.parametrize(
        "view",
        [((3, 1, 5, 8), (2**30, 40, 8, 1)), ((1, 3, 5, 8), (120, 2**30, 8, 1)), ((1, 1, 3, 8), (24, 24, 2**30, 1))],
        ids=["batch", "head", "row"],
    )
    def test_huge_strides(self, view):
        # each stride fits an int32, twice the stride does not, and the last row is beyond 2^31 elements; untouched pages cost
        # nothing
        elements = 2**31 + 64
        if HAS_GPU:
            block = torch.empty(elements, dtype=torch.float16, device=DEVICE)
        else:
            block = torch.frombuffer(mmap.mmap(-1, 2 * elements), dtype=torch.float16)
        far = block.as_strided(*view)
        batch, heads, time, dim = view[0]
        source = make(Case("far", batch, heads, heads, time, time, dim), torch.float16, DEVICE)
        far.copy_(source.key)
        out = self.call(source.query, far, far)
        self.same({"out": out}, {"out": self.call(source.query, source.key, source.key)})

    @pytest.mark.parametrize("kind", ["mask", "bias"])
    @pytest.mark.parametrize("strides", [(2**30, 25, 5, 1), (75, 2**30, 5, 1), (15, 5, 2**29, 1)], ids=["batch", "head", "query"])
    def test_huge_strides_of_a_mask(self, kind, strides):
        dtype = torch.bool if kind == "mask" else torch.float16
        elements = 2**31 + 64
        if HAS_GPU:
            block = torch.empty(elements, dtype=dtype, device=DEVICE)
        else:
            block = torch.frombuffer(mmap.mmap(-1, dtype.itemsize * elements), dtype=dtype)
        shape = (3 if strides[0] == 2**30 else 1, 3 if strides[1] == 2**30 else 1, 5, 5)
        source = make(Case("far", shape[0], shape[1], shape[1], 5, 5, 8), torch.float16, DEVICE)
        near = torch.rand(shape, device=DEVICE) < 0.7 if kind == "mask" else torch.randn(shape, device=DEVICE).half()
        far = block.as_strided(shape, strides)
        far.copy_(near)
        out = [self.call(source.query, source.key, source.value, m) for m in (far, near)]
        self.same({"out": out[0]}, {"out": out[1]})

    # --- what it costs

    @pytest.mark.gpu
    @pytest.mark.parametrize("q_len", [1, 64])
    def test_backward_needs_no_memory_beyond_its_results(self, q_len):
        if find("attention", self.backend).launchers is None:
            pytest.skip("torch's own memory")
        make_ = lambda t: torch.randn(512, t, 8, 64, device=DEVICE, dtype=torch.float16).transpose(1, 2).requires_grad_()  # noqa: E731
        query, key, value = make_(q_len), make_(64), make_(64)
        dout = torch.randn_like(query)
        out = self.call(query, key, value)
        torch.autograd.grad(out, (query, key, value), dout, retain_graph=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, (query, key, value), dout)
        extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
        assert extra <= 4096, f"{extra} bytes beyond the gradients"

    @pytest.mark.gpu
    def test_forward_saves_only_inputs_and_lse(self):
        if find("attention", self.backend).launchers is None:
            pytest.skip("torch's own memory")
        query, key, value = (
            torch.randn(512, 64, 8, 64, device=DEVICE, dtype=torch.float16).transpose(1, 2).requires_grad_() for _ in range(3)
        )
        self.call(query, key, value)
        before = torch.cuda.memory_allocated()
        out = self.call(query, key, value)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        assert kept <= 512 * 8 * 64 * 4 + 4096, f"{kept} bytes kept beyond out"
