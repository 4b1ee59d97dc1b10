"""`dynamic_mask_scores`: the kernels and plain torch against float64, layouts, ranks, extremes, errors, and the layer that uses it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from contracts.exact import DEVICE, DTYPES, named

import saccade
from saccade.dynamic_mask.scores import launchers, op, reference
from saccade.dynamic_mask.scores.api import layer_scores
from saccade.errors import CompileError
from saccade.launch import disabled
from saccade.nn.dynamic_mask import DynamicMaskAttention
from saccade.testing.judge import judge

OPS = torch.ops.saccade
# B, S, Hkv, D: several tiles of tokens and chunks of E, one program of backward with several tiles, one token, many heads, odd sizes
CASES = [(2, 37, 2, 24), (1, 150, 1, 64), (2, 70, 3, 200), (3, 1, 2, 16), (1, 5, 20, 8), (1, 33, 1, 1)]
NAMES = ("scores", "dvalues", "dweight", "dA", "dbias")


def inputs(case, dtype, layout="tokens", has_bias=True, device=DEVICE):
    """Values, weight, A, bias and the gradient of the scores."""
    batch, tokens, heads, dim = case
    values = torch.randn(batch, tokens, heads, dim, device=device).to(dtype)
    values = values.transpose(1, 2).contiguous() if layout == "heads" else values.flatten(2)
    weight = (2 * torch.randn(heads, heads * dim, device=device) / (heads * dim) ** 0.5).to(dtype)
    bias = torch.randn(heads, device=device) if has_bias else None
    return values, weight, torch.randn(heads, device=device), bias, torch.randn(batch, heads, tokens, device=device)


def results(given, form="exp", backend="fused", function=saccade.dynamic_mask_scores):
    """The scores and every gradient."""
    *tensors, dscores = given
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    values, weight, A, bias = leaves
    scores = function(values, weight, A, bias=bias, form=form, backend=backend)
    return [
        scores.detach(), *torch.autograd.grad(scores, [x for x in leaves if x is not None], dscores.to(scores.dtype)),
    ]  # fmt: skip


def in_its_dtype(values, weight, A, *, bias, form, backend):
    """Plain torch as a model computes it, with z in the dtype of the values."""
    values = values if values.dim() == 3 else values.transpose(1, 2).flatten(2)
    return reference.formed(F.linear(values, weight, None if bias is None else bias.to(values.dtype)).mT, A, form)


def magnitudes(given, form):
    """The largest sum of absolute terms behind a number of each result. Those of a score count once for each level of a sum by pairs: kernels, tensor
    cores and torch add the terms of z in different orders."""
    values, weight, A, bias, dscores = (None if x is None else x.double() for x in given)
    steps = F.softplus(reference.products_of(values, weight, bias))
    by_z, by_A = reference.derivatives_of(reference.products_of(values, weight, bias), A, form).abs()
    rows = (values if values.dim() == 3 else values.transpose(1, 2).flatten(2)).abs()
    dz, terms = by_z * dscores.abs(), weight.abs() @ rows.mT + (0.0 if bias is None else bias.abs()[:, None])
    of_A = (dscores.abs() * by_A * (1 + terms * (1 + A.abs()[:, None]))).sum((0, 2))
    levels = max(1.0, math.log2(weight.shape[1]))
    found = (by_z * terms * levels + by_A / steps, dz.mT @ weight.abs(), dz @ rows, of_A, dz.sum((0, 2)))
    return [x.max().item() for x in found]


def judged(given, form, backend):
    """The results of a backend under the budget of the house, the scores of any dtype held against plain torch in float32."""
    dtype = given[0].dtype
    actual = results(given, form, backend)
    oracle = results([None if x is None else x.double() for x in given], form, "reference")
    plain = results(given, form, "", in_its_dtype)
    plain[0] = reference.scores_of(*(None if x is None else x.float() for x in given[:4]), form)
    kinds = (torch.float32, dtype, dtype, torch.float32, torch.float32)
    for name, kind, size, ours, exact, theirs in zip(NAMES, kinds, magnitudes(given, form), actual, oracle, plain, strict=False):
        assert ours.dtype == kind, name
        found = judge(name, ours, exact, theirs, size, kind)
        assert found.ok, found
    torch.testing.assert_close(actual[0], plain[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("layout", ["tokens", "heads"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_budget(case, layout, form, dtype):
    judged(inputs(case, dtype, layout, has_bias=form == "exp"), form, "fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=named)
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_budget_of_plain_torch(case, dtype):
    judged(inputs(case, dtype), "exp", "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (2, 64), (8, 64), (8, 128)])
def test_budget_at_the_sizes_of_models(heads, dim, dtype):
    """A of at most 0.5: a larger one makes a single score of 8,000 tokens the largest by far, which one lucky rounding of torch's judges; and its
    gradient overflows float16."""
    values, weight, A, bias, dscores = inputs((2, 4097, heads, dim), dtype, has_bias=False)
    judged((values, weight, A.clamp(-0.5, 0.5), bias, dscores), "exp", "fused")


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_the_sums_of_many_tokens_take_one_order(dtype):
    """Several programs, each with several tiles: the same bits in every run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launchers, "_PROGRAMS", 3)
        given = inputs((2, 120, 2, 32), dtype)
        judged(given, "exp", "fused")
        for first, second in zip(results(given), results(given), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=named)
def test_keys_tie_in_16_bits_and_not_here(dtype):
    values, weight, A, _, _ = inputs((1, 2000, 1, 32), dtype, has_bias=False)
    exact = saccade.dynamic_mask_scores(values.double(), weight.double(), A.double())
    for backend in ("fused", "reference"):
        ours = saccade.dynamic_mask_scores(values, weight, A, backend=backend)
        assert ours.unique().numel() > 1950
        # ranked as float64 ranks them, but for neighbours that float32 cannot tell apart
        falls = exact[0, 0][ours[0, 0].argsort()].diff()
        assert falls.min() > -4e-6 * exact.max()
    assert in_its_dtype(values, weight, A, bias=None, form="exp", backend="").unique().numel() < 1900


def views(values):
    """The same values `[B, Hkv, S, D]` with other strides."""
    batch, heads, tokens, dim = values.shape
    wide = torch.full((batch, heads, tokens, dim + 8), math.nan, device=values.device, dtype=values.dtype)
    packed = torch.full((batch, tokens, 3, heads, dim), math.nan, device=values.device, dtype=values.dtype)
    odd = torch.full((batch, tokens + 1, heads * dim + 1), math.nan, device=values.device, dtype=values.dtype)
    wide[..., :dim], packed[:, :, 2] = values, values.transpose(1, 2)
    odd[:, 1:, 1:] = values.transpose(1, 2).flatten(2)
    return {
        "tokens first": values.transpose(1, 2).contiguous().transpose(1, 2), "slice of rows": wide[..., :dim],
        "packed": packed[:, :, 2].transpose(1, 2), "packed, side by side": packed[:, :, 2].flatten(2), "misaligned": odd[:, 1:, 1:],
        "batch last": values.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), "every second number": values.repeat_interleave(2, -1)[..., ::2],
        "one row for all": values[:1].expand_as(values), "one token for all": values[:, :, :1].clone().expand_as(values),
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_layouts(backend):
    values, *rest = inputs((3, 19, 2, 24), torch.float32, "heads")
    for name, view in views(values).items():
        if name == "every second number" and backend == "fused":
            with pytest.raises(saccade.UnsupportedProblem, match="needs a last stride of 1, got 2 for values"):
                saccade.dynamic_mask_scores(view, rest[0], rest[1], backend="fused")
            continue
        plain = view.clone(memory_format=torch.contiguous_format)
        for ours, expected in zip(
            results((view, *rest), backend=backend), results((plain, *rest), backend="reference"), strict=True
        ):
            # both sums are float32, and their order differs from processor to processor: 5e-5 was seen
            torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_extremes(backend, form):
    """The end of softplus, tiny values of it, infinities and NaN are as in torch in float64, and NaN stays in its token."""
    z = torch.tensor(
        [-200.0, -88.0, -60.0, -20.0, -1e-6, 0.0, 1e-6, 19.9, 20.1, 60.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 1.0]
    )
    values, weight = z.view(1, -1, 1).to(DEVICE), torch.ones(1, 1, device=DEVICE)
    for slope in (-0.7, 0.0, 0.9):
        A = torch.tensor([slope], device=DEVICE)
        ours = saccade.dynamic_mask_scores(values, weight, A, form=form, backend=backend).double()
        steps = slope * torch.nn.functional.softplus(values.double())
        expected = (steps.exp() if form == "exp" else steps).mT
        torch.testing.assert_close(ours, expected.float().double(), rtol=3e-6, atol=1e-38, equal_nan=True)
    given = values[:, :10], weight, A, None, torch.ones(1, 1, 10, device=DEVICE)
    exact = results([None if x is None else x.double() for x in given], form, "reference")
    for found, wanted in zip(results(given, form, backend), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=1e-38)


def test_small_gradients_of_float16():
    """The gradient of a score is far below what float16 holds, and that of the weights is not."""
    values, weight, A, bias, dscores = inputs((1, 600, 1, 32), torch.float16)
    values, dscores = values.abs() * 1e3, dscores.abs() * 1e-8
    given = values, weight * 1e-3, A, bias, dscores
    exact = results([x.double() for x in given], backend="reference")
    torch.testing.assert_close(results(given)[2].double(), exact[2], rtol=4e-3, atol=1e-6)
    assert exact[2].abs().max() > 1e-5


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
def test_a_gradient_that_is_no_number_stays_in_its_token_and_head(dtype, number):
    given = inputs((1, 20, 2, 16), dtype)
    given[4][0, 1, 3] = number
    found, exact = results(given), results([x.double() for x in given], backend="reference")
    others = [i for i in range(20) if i != 3]
    assert not found[1][0, 3].isfinite().all()
    for ours, wanted in ((found[1][0, others], exact[1][0, others]), (found[2][0], exact[2][0])):
        torch.testing.assert_close(ours.double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("case", [(0, 5, 2, 8), (2, 0, 2, 8)], ids=str)
@pytest.mark.parametrize("layout", ["tokens", "heads"])
def test_empty(case, layout, backend):
    scores, *gradients = results(inputs(case, torch.float32, layout), backend=backend)
    assert scores.shape == (case[0], 2, case[1])
    assert [x.abs().sum() for x in gradients] == [0] * 4


def test_only_what_needs_a_gradient_is_saved():
    values, weight, A, bias, _ = inputs(CASES[0], torch.float32)
    assert saccade.dynamic_mask_scores(values, weight, A, bias=bias, backend="fused").grad_fn is None
    weight.requires_grad_()
    scores = saccade.dynamic_mask_scores(values, weight, A, bias=bias, backend="fused")
    assert [None if x is None else x.shape for x in scores.grad_fn.saved_tensors][2] == (2, *scores.shape)
    scores.sum().backward()
    assert values.grad is A.grad is bias.grad is None
    with torch.no_grad():
        assert saccade.dynamic_mask_scores(values, weight, A, backend="fused").grad_fn is None


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_autocast(backend):
    """Values and weights are multiplied in the dtype of autocast, all else stays in float32."""
    values, weight, A, bias, _ = inputs(CASES[2], torch.float32)
    half = saccade.dynamic_mask_scores(values.half(), weight.half(), A, bias=bias, backend=backend)
    with torch.autocast(DEVICE, torch.float16):
        found = saccade.dynamic_mask_scores(values, weight, A, bias=bias, backend=backend)
        assert found.dtype == torch.float32
        gradient = results(inputs(CASES[2], torch.float32), backend=backend)[1]
    assert torch.equal(found, half)
    assert gradient.dtype == torch.float32


@pytest.mark.unpoisoned
@pytest.mark.parametrize("layout", ["tokens", "heads"])
def test_opcheck(layout):
    values, weight, A, bias, dscores = inputs((2, 20, 2, 16), torch.float32, layout)
    call = (values, weight, A, bias, "exp", True, "auto")
    torch.library.opcheck(OPS.dynamic_mask_scores_forward.default, call)
    torch.library.opcheck(OPS.dynamic_mask_scores_forward.default, (*call[:3], None, "linear", False, "fused"))
    derivatives = OPS.dynamic_mask_scores_forward(*call)[1]
    torch.library.opcheck(OPS.dynamic_mask_scores_backward.default, (dscores, derivatives, values, weight, "auto"))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_compiles_as_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(saccade.dynamic_mask_scores, fullgraph=True, backend="aot_eager")
    for case in (CASES[0], (3, 41, 2, 24)):
        given = inputs(case, torch.float32)
        for ours, expected in zip(
            results(given, backend=backend, function=compiled), results(given, backend=backend), strict=True
        ):
            torch.testing.assert_close(ours, expected)
    torch._dynamo.reset()


def test_kernels_that_do_not_compile(monkeypatch):
    """`auto` computes in plain torch, with one warning; a named backend raises."""
    given = inputs(CASES[0], torch.float32)
    expected = results(given, backend="reference")

    def fail(*_):
        raise CompileError("no kernel today", (), "")

    monkeypatch.setattr(launchers, "backward", fail)
    monkeypatch.setattr(disabled, "_disabled", {})
    monkeypatch.setattr(disabled, "_warned", set())
    with pytest.raises(CompileError, match="no kernel today"):
        results(given)
    for layout in ("tokens", "heads"):
        disabled.forget()
        other = inputs(CASES[0], torch.float32, layout)
        with pytest.warns(RuntimeWarning, match="no kernel today; plain torch computes instead"):
            found = results(other, backend="auto")
        for ours, plain in zip(found, results(other, backend="reference"), strict=True):
            torch.testing.assert_close(ours, plain)
    monkeypatch.setattr(launchers, "forward", fail)  # known to fail, and not asked again
    for ours, plain in zip(results(given, backend="auto"), expected, strict=True):
        assert torch.equal(ours, plain)
    disabled.forget()
    with pytest.warns(RuntimeWarning, match="no kernel today"):
        derivatives = op.forward(*given[:4], "exp", True, "auto")
    for ours, plain in zip(op.backward(given[4], derivatives[1], *given[:2], "auto"), expected[1:], strict=True):
        torch.testing.assert_close(ours, plain)


def test_who_computes(monkeypatch):
    values, weight, A, _, _ = inputs(CASES[0], torch.float64)
    assert saccade.dynamic_mask_scores(values, weight, A).dtype == torch.float64
    with pytest.raises(saccade.UnsupportedProblem, match="needs bfloat16, float16 or float32, got "):
        saccade.dynamic_mask_scores(values, weight, A, backend="fused")
    values, weight = values.float(), weight.float()
    with saccade.disabled():
        monkeypatch.setattr(launchers, "forward", lambda *_: pytest.fail("a kernel ran"))
        saccade.dynamic_mask_scores(values, weight, A)
        with pytest.raises(saccade.UnsupportedProblem, match="saccade is disabled"):
            saccade.dynamic_mask_scores(values, weight, A, backend="fused")
    many = torch.randn(65, 48, device=DEVICE)
    with pytest.raises(saccade.UnsupportedProblem, match="needs at most 64 key heads, got 65"):
        saccade.dynamic_mask_scores(values, many, torch.randn(65, device=DEVICE), backend="fused")


def test_there_is_no_second_derivative():
    values, weight, A, _, _ = inputs(CASES[0], torch.float32)
    scores = saccade.dynamic_mask_scores(values.requires_grad_(), weight, A, backend="fused")
    (first,) = torch.autograd.grad(scores.sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"values": 3}, "values is 3; it must be a floating-point torch.Tensor"),
        ({"values": torch.randn(2, 48)}, r"values has shape \[2, 48\] and weight \[2, 48\]; they must be \[B, S, E\] or"),
        ({"values": torch.randn(2, 5, 47)}, r"have 47 numbers a token, weight \[2, 48\] 48 columns; they must agree"),
        ({"values": torch.randn(2, 2, 5, 23)}, "have 46 numbers a token"),
        (
            {"weight": torch.randn(2, 48).half()},
            "dtypes differ: values torch.float32, weight torch.float16; they must be the same",
        ),
        ({"weight": torch.ones(2, 48, dtype=torch.int64)}, "weight is torch.int64"),
        ({"A": torch.randn(3)}, r"A has shape \[3\]; it must be \[2\], for weight \[2, 48\]"),
        ({"A": None}, "A is None; it must be a floating-point torch.Tensor"),
        ({"bias": torch.randn(2, 1)}, r"bias has shape \[2, 1\]; it must be \[2\]"),
        ({"bias": 0.5}, r"bias is 0.5; it must be a floating-point torch.Tensor \[Hkv\] or None"),
        ({"A": torch.randn(2, device="meta")}, "A is on meta, values on cpu; they must be the same"),
        ({"form": "log"}, "form is 'log'; allowed are 'exp', 'linear'"),
        ({"backend": "gather"}, "backend is 'gather'; allowed are 'auto', 'fused', 'reference'"),
    ],
)
def test_bad_arguments(argument, sentence):
    values, weight, A, bias, _ = inputs(CASES[0], torch.float32, device="cpu")
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        saccade.dynamic_mask_scores(**{"values": values, "weight": weight, "A": A, "bias": bias} | argument)


def layer(**options):
    found = DynamicMaskAttention(32, 4, 2, keep=6, device=DEVICE, **options)
    torch.nn.init.normal_(found.A)
    return found


@pytest.mark.parametrize("form", ["exp", "linear"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_asks_for_them(bias, form):
    """As torch computed them before, in one op."""
    found, values = layer(bias=bias, form=form), torch.randn(2, 30, 16, device=DEVICE)
    expected = in_its_dtype(values, found.dt_proj.weight, found.A, bias=found.dt_proj.bias, form=form, backend="")
    scores = found.scores(values)
    torch.testing.assert_close(scores, expected)
    assert scores.grad_fn.name() == "saccade::DynamicMaskScoresBackward"


@pytest.mark.parametrize("how", ["adapter", "hook", "own forward"])
def test_a_projection_that_is_more_than_its_weights_is_called(how):
    found, values = layer(), torch.randn(2, 30, 16, device=DEVICE)
    before = found.scores(values)
    if how == "adapter":
        found.dt_proj = torch.nn.Sequential(found.dt_proj, torch.nn.Softsign())
    elif how == "hook":
        found.dt_proj.register_forward_hook(lambda module, given, result: F.softsign(result))
    else:
        own = found.dt_proj.forward
        found.dt_proj.forward = lambda x: F.softsign(own(x))
    scores = found.scores(values)
    assert not torch.allclose(scores, before)
    plain = F.softsign(F.linear(values, before.grad_fn.saved_tensors[1]))
    torch.testing.assert_close(scores, reference.formed(plain.mT, found.A, "exp"))
    by_head = values.unflatten(2, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(layer_scores(by_head, found.dt_proj, found.A), scores)
