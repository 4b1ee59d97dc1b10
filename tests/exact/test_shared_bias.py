"""The kernels of a bias that many rows share: backend `shared_bias`, and a mask of keys beside a bias."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from contracts.exact import BOTH, DEVICE, DTYPES, AttentionContract, named
from contracts.opt_outs import opted_out
from torch.nn.attention.bias import causal_upper_left

import saccade
from saccade.exact.args import AttentionArgs
from saccade.exact.problem import describe_attention
from saccade.exact.shared_bias import launchers
from saccade.exact.shared_bias.backend import FEWEST_PAIRS, SHARED_BIAS
from saccade.exact.shared_bias.call import SharedBiasCall
from saccade.exact.shared_bias.config import Config, Shape, config_of, forced
from saccade.exact.testing.cases import ATTENTION
from saccade.exact.testing.check import check_attention
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs
from saccade.testing.judge import report

SMALL_SHAPES = (Shape(32, 32, 4, 1),) * 4
# the forms of backward, in small tiles
FORMS = {
    "apart": Config(*SMALL_SHAPES, programs=64),
    "turned": Config(*SMALL_SHAPES, turns=True),
}


def biased(case: Case) -> bool:
    return case.bias is not None and case.head_dim <= 128


@opted_out("exact/test_shared_bias.py::TestSharedBias")
class TestSharedBias(AttentionContract):
    """The kernels take calls with a bias alone: where the contract has none, one of zeros stands in, and a boolean mask is one of -inf."""

    backend = "shared_bias"

    def outputs(self, case: Case, inputs: Inputs, seed: int = 0) -> dict[str, torch.Tensor]:
        assert not case.is_causal, case
        if inputs.bias is not None:
            return super().outputs(case, inputs, seed)
        added = added_of(inputs.mask, inputs.query)
        found = super().outputs(case, replace(inputs, mask=None, bias=added), seed)
        del found["dbias"]
        return found

    def call(self, query, key, value, attn_mask=None, **keywords):
        if attn_mask is None or attn_mask.dtype == torch.bool:
            attn_mask = added_of(attn_mask, query)
        return super().call(query, key, value, attn_mask, enable_gqa=query.shape[1] != key.shape[1], **keywords)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", DTYPES, ids=named)
    @pytest.mark.parametrize("case", [c for c in ATTENTION if biased(c)], ids=str)
    def test_budget(self, case: Case, dtype):
        results = check_attention(case, dtype, DEVICE, self.backend)
        assert all(r.ok for r in results), report(case, results)

    @pytest.mark.gpu
    @pytest.mark.parametrize("q_len", [1, 3])
    def test_more_problems_than_65535(self, q_len):
        case = Case("many", 33000, 2, 2, q_len, 5, 16, bias=(1, 2, q_len, 5))
        results = check_attention(case, torch.float16, DEVICE, self.backend)
        assert all(r.ok for r in results), report(case, results)

    @BOTH
    def test_twice_gives_the_same_bits(self, case):
        super().test_twice_gives_the_same_bits(replace(case, bias=(1, 2, case.q_len, 21)))


def added_of(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """A bias that hides what a boolean mask hides, `[1, 1, 1, 1]` of zeros for none."""
    if mask is None:
        return torch.zeros(1, 1, 1, 1, dtype=query.dtype, device=query.device)
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -math.inf)


# more than a tile of queries and of keys, whose ends are not those of a tile; each shape that a bias may have
CASES = [
    Case("rows-of-a-structure", 5, 2, 2, 70, 70, 16, bias=(1, 2, 70, 70), lse_grad=True),
    Case("lengths", 4, 2, 2, 70, 90, 16, bias=(1, 2, 70, 90), lengths=True),
    Case("heads-share", 3, 4, 2, 40, 96, 24, bias=(1, 1, 40, 96)),
    Case("rank-2", 2, 2, 1, 70, 64, 16, bias=(70, 64)),
    Case("each-row", 2, 2, 2, 70, 90, 16, bias=(2, 2, 70, 90), lengths=True, lse_grad=True),
    Case("windows", 6, 2, 2, 70, 70, 16, bias=(2, 2, 70, 70), windows=2),
    Case("keys", 3, 2, 2, 70, 90, 16, bias=(3, 1, 1, 90)),
    Case("dropout", 5, 2, 2, 70, 90, 16, bias=(1, 2, 70, 90), dropout_p=0.3, lse_grad=True),
    Case("dropout-grouped-lengths", 3, 4, 2, 40, 70, 16, bias=(1, 1, 40, 70), dropout_p=0.2, lengths=True),
    Case("queries", 3, 2, 2, 70, 90, 16, bias=(2, 70, 1)),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_keeps_the_budget(form, case, dtype):
    with forced(FORMS[form]):
        results = check_attention(case, dtype, DEVICE, "shared_bias")
    assert all(r.ok for r in results), report(case, results)


def record(rows=5, tokens=70, keys=70, heads=2, dim=16, dtype=torch.float32, bias=None, mask=None, lengths=None):
    """(args, dout) of a call whose bias the rows share."""
    torch.manual_seed(3)
    query, key, value, dout = (
        torch.randn(rows, n, heads, dim, device=DEVICE).to(dtype).transpose(1, 2) for n in (tokens, keys, keys, tokens)
    )
    bias = torch.randn(1, heads, tokens, keys, device=DEVICE).to(dtype) if bias is None else bias
    return AttentionArgs(query, key, value, mask, bias, lengths, None, 0.0, False, dim**-0.5), dout


def gradients(args, dout, config=None):
    out, lse = launchers.forward(args, config)
    return out, lse, *launchers.backward(args, dout, None, out, lse, bias_grad=True, packed=None, config=config)


@pytest.mark.parametrize("tokens", [1, 33, 65])
@pytest.mark.parametrize("form", FORMS)
def test_one_key_behind_whole_tiles(form, tokens):
    args, dout = record(rows=2, tokens=tokens, keys=tokens)
    out, _, *found = gradients(args, dout, FORMS[form])
    given = [x.clone().requires_grad_() for x in (args.query, args.key, args.value, args.bias)]
    expected = torch.nn.functional.scaled_dot_product_attention(*given)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for x, y in zip(found, torch.autograd.grad(expected, given, dout), strict=True):
        torch.testing.assert_close(x.view(y.shape), y, rtol=1e-4, atol=1e-4)


def test_forms_agree_and_repeat_their_bits():
    args, dout = record(rows=3, heads=1)
    first = gradients(args, dout, FORMS["apart"])
    for config in FORMS.values():
        found = gradients(args, dout, config)
        for x, y, again in zip(found, first, gradients(args, dout, config), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
            assert torch.equal(x, again)


def test_chunks_take_every_row_once():
    for rows in (1, 2, 5, 31):
        args, _ = record(rows=rows, tokens=8, keys=8)
        for programs in (1, 3, 7, 64):
            call = SharedBiasCall(args, replace(FORMS["apart"], programs=programs))
            each, chunks = call.chunks(1)
            assert each * (chunks - 1) < call.members == rows <= each * chunks
            assert chunks <= programs


def test_the_gradient_of_a_bias_that_many_rows_share():
    """Rows are added up in float32: in 16 bits the sum of 300 would be off by a hundredth."""
    args, dout = record(rows=300, tokens=4, keys=6, heads=1, dtype=torch.float16)
    leaves = [x.detach().double().requires_grad_() for x in (*args[:3], args.bias)]
    out, lse = saccade.attention(*leaves, return_lse=True, backend="reference")
    (wanted,) = torch.autograd.grad(out, leaves[3:], dout.double())
    # outputs that are not rounded, so that the sum alone is
    args = args._replace(bias=args.bias.float())
    found = launchers.backward(args, dout, None, out.detach().float(), lse.detach().float(), bias_grad=True, packed=None)[-1]
    assert (found - wanted).norm() < 2e-6 * wanted.norm()


def test_a_bias_that_was_expanded_over_rows():
    """Forward reads it as one; autograd asks for the gradient of each row."""
    args, dout = record()
    expanded = args._replace(bias=args.bias.expand(5, -1, -1, -1))
    assert SharedBiasCall(expanded).windows == 1
    shared, apart = gradients(args, dout), gradients(expanded, dout)
    for x, y in zip(shared[:-1], apart[:-1], strict=True):
        torch.testing.assert_close(x, y)
    assert apart[-1].shape == expanded.bias.shape
    torch.testing.assert_close(apart[-1].sum(0, keepdim=True), shared[-1], rtol=1e-5, atol=1e-5)


def test_a_bias_whose_heads_lie_inside_of_its_keys():
    """As T5 makes it, `[Tq, Tk, H]`: rows that share it read a copy with dense rows."""
    args, dout = record(rows=6)
    turned = args.bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    call = SharedBiasCall(args._replace(bias=turned))
    assert call.given(args._replace(bias=turned)).bias.stride(3) == 1
    for x, y in zip(gradients(args, dout), gradients(args._replace(bias=turned), dout), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("far", [None, -math.inf, -65504.0, 3000.0])
def test_numbers_of_rows_need_no_copy_of_the_bias(far):
    """For kernels of another family, which read the bias themselves. Rows with a far lse are formed again, from either."""
    args, dout = record(rows=5, tokens=33, keys=70, dtype=torch.float16)
    if far is not None:
        args.bias[:, :, 2], args.bias[:, :, 4, 1:], args.bias[:, :, 8, ::3] = far, far, far
    out, lse = launchers.forward(args)
    found = [
        launchers.rows_of(args, dout, None, out, lse, bias_grad=True, config=FORMS["apart"], may_copy=copied)
        for copied in (True, False)
    ]
    copy, bias = [x.given.bias for x in found]
    assert (copy.data_ptr() != args.bias.data_ptr(), bias.data_ptr() != args.bias.data_ptr()) == (True, False)
    assert torch.equal(*[x.numbers for x in found])
    assert bool((found[0].numbers[0] != -math.log2(math.e) * lse).any()) == (far is not None)


# --- biases at the limits of numbers

FAR = [-math.inf, -65504.0, -3.4e38, 3e38, 1e9, -1e9, 3000.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", FAR)
def test_far_biases_mean_what_the_reference_means(value, form):
    torch.manual_seed(1)
    bias = torch.randn(1, 2, 40, 50, device=DEVICE)
    bias[:, :, 2] = value  # all of a row
    bias[:, :, 4, 1:] = value  # all but one key
    bias[:, :, 6] = -math.inf
    bias[:, :, 6, 4:9] = value
    bias[:, :, 8, ::3] = value
    # there neighbouring float32 scores are this far apart
    tolerance = {-65504.0: 0.02, 3000.0: 1e-3}.get(value, 2e-5)
    args, dout = record(rows=3, tokens=40, keys=50, bias=bias)
    leaves = [x.detach().requires_grad_() for x in (*args[:3], bias)]
    expected = saccade.attention(*leaves, return_lse=True, backend="reference")
    wanted = (*[x.detach() for x in expected], *torch.autograd.grad(expected[0], leaves, dout))
    for name, x, want in zip(("out", "lse", "dq", "dk", "dv", "dbias"), gradients(args, dout, FORMS[form]), wanted, strict=True):
        assert not x.isnan().any(), name
        torch.testing.assert_close(x, want, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def test_far_biases_in_16_bits():
    """finfo.min in padded keys and in whole rows of padded queries, as models make masks."""
    half = torch.float16
    bias = torch.randn(1, 2, 40, 50, device=DEVICE).to(half)
    bias[..., 45:] = torch.finfo(half).min
    bias[:, :, 35:] = torch.finfo(half).min
    args, dout = record(rows=3, tokens=40, keys=50, bias=bias, dtype=half)
    leaves = [x.detach().float().requires_grad_() for x in (*args[:3], bias)]
    expected = saccade.attention(*leaves, backend="reference")
    wanted = (expected.detach(), *torch.autograd.grad(expected, leaves, dout.float()))
    out, _, *grads = gradients(args, dout)
    for x, want in zip((out, *grads), wanted, strict=True):
        torch.testing.assert_close(x.float(), want, rtol=0.02, atol=0.02)


# --- a mask of keys


def masked(rows=4, tokens=70, dtype=torch.float32):
    torch.manual_seed(5)
    query, key, value = (torch.randn(rows, tokens, 2, 16, device=DEVICE).to(dtype).transpose(1, 2) for _ in range(3))
    bias = torch.randn(1, 2, tokens, tokens, device=DEVICE).to(dtype)
    seen = torch.rand(rows, tokens, device=DEVICE) < 0.6
    seen[1] = False
    return [x.requires_grad_() for x in (query, key, value, bias)], seen


def differentiated(leaves, *rest, **options):
    out, lse = saccade.attention(*leaves, *rest, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad((out.square().sum() + lse.clamp(min=-1e3).sum()), leaves)


@pytest.mark.parametrize("backend", ["shared_bias", "ragged", "sdpa", "auto"])
@pytest.mark.parametrize("lengths", [None, (70, 30, 0, 69)])
def test_a_mask_of_keys_beside_a_bias(backend, lengths):
    """The same as one bias for each row that holds -inf, which torch's users have to build."""
    leaves, seen = masked()
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    if backend == "sdpa" and DEVICE == "cuda":
        pytest.skip("torch's function gives no lse there")
    whole = leaves[3] + added_of(seen, leaves[0])[:, None, None]
    expected = differentiated([*leaves[:3], whole], lengths=lengths, backend="reference")
    found = differentiated(leaves, key_mask=seen, lengths=lengths, backend=backend)
    for x, want in zip(found[:5], expected[:5], strict=True):
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[5], expected[5].sum(0, keepdim=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_hidden_keys_get_no_gradient_in_any_form(form):
    leaves, seen = masked()
    with forced(FORMS[form]):
        found = differentiated(leaves, key_mask=seen, backend="shared_bias")
    expected = differentiated(leaves, key_mask=seen, backend="reference")
    for x, want in zip(found, expected, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-5)
    assert not found[3][~seen[:, None, :].expand(-1, 2, -1)].any()
    assert not found[0][1].any()


def test_a_mask_of_keys_alone_or_beside_a_boolean_mask():
    leaves, seen = masked()
    pairs = torch.rand(70, 70, device=DEVICE) < 0.7
    for given in (None, pairs):
        both = seen[:, None, None] if given is None else seen[:, None, None] & given
        found = saccade.attention(*leaves[:3], given, key_mask=seen)
        torch.testing.assert_close(found, saccade.attention(*leaves[:3], both), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 2, 20, 20), (2, 20, 20), (), (3, 1, 1, 20, 20), (3, 2, 2, 1, 20)], ids=str)
def test_a_mask_of_keys_of_windows(shape):
    """Beside a bias for each window, which is read once, and beside any other, which goes to torch as it is."""
    query, key, value = (torch.randn(3, 2, 2, 20, 8, device=DEVICE) for _ in range(3))
    bias, seen = torch.randn(shape, device=DEVICE), torch.rand(3, 2, 20, device=DEVICE) < 0.6
    found = saccade.attention(query, key, value, bias, key_mask=seen)
    whole = bias + added_of(seen, query)[:, :, None, None]
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(query, key, value, whole).nan_to_num())


@pytest.mark.parametrize("backend", ["short", "shared_bias", "sdpa", "reference", "packed", "varlen"])
def test_a_bias_that_is_the_imaginary_part_of_a_conjugate(backend):
    """torch negates it when it is read; its memory has the other sign."""
    x = torch.randn(20, 3, 2, 16, device=DEVICE)
    made = torch.randn(2, 20, 20, device=DEVICE, dtype=torch.complex64, requires_grad=True)
    bias = made.conj().imag
    assert bias.is_neg()

    def attend(bias):
        if backend == "packed":
            return saccade.attention_qkvpacked(x[None], bias, backend="short")
        if backend == "varlen":
            ends = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
            return saccade.attention_varlen_qkvpacked(x, ends, 20, attn_bias=bias, backend="ragged")
        return saccade.attention(*x.permute(1, 2, 0, 3)[:, None], bias, backend=backend)

    plain = -made.imag
    found, expected = attend(bias), attend(plain)
    torch.testing.assert_close(found, expected)
    (got,), (want,) = (torch.autograd.grad(out.square().sum(), made) for out in (found, expected))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, None], ids=str)
@pytest.mark.parametrize("whole", range(3))
def test_a_mask_of_keys_of_tensors_that_are_broadcast(whole, kind):
    """It has a row for each batch row of the result, whichever tensor has them."""
    tensors = [torch.randn(3 if at == whole else 1, 2, 20, 8, device=DEVICE) for at in range(3)]
    seen = torch.rand(3, 20, device=DEVICE) < 0.6
    mask = None if kind is None else (torch.randn(3, 1, 20, 20, device=DEVICE) > 0).to(kind)
    found = saccade.attention(*tensors, mask, key_mask=seen)
    torch.testing.assert_close(found, saccade.attention(*(x.expand(3, -1, -1, -1) for x in tensors), mask, key_mask=seen))
    assert "B=3" in saccade.explain(*tensors, mask, key_mask=seen)


@pytest.mark.parametrize(
    ("mask", "options", "said"),
    [
        (torch.ones(4, 69, dtype=torch.bool), {}, r"key_mask has shape \[4, 69\]; it must be \[4, 70\]"),
        (torch.ones(4, 70), {}, r"key_mask has dtype torch.float32; it must be a bool torch.Tensor \[B, Tk\]"),
        (True, {}, "key_mask is a bool; it must be a bool torch.Tensor"),
        (torch.ones(4, 70, dtype=torch.bool), {"is_causal": True}, "key_mask and is_causal=True are both given"),
        (
            torch.ones(4, 70, dtype=torch.bool),
            {"attn_mask": causal_upper_left(70, 70)},
            "key_mask and a causal attn_mask are both",
        ),
        (torch.ones(4, 70, dtype=torch.bool), {"window": (3, 3)}, r"key_mask and .*window.* are both given"),
    ],
)
def test_bad_masks_of_keys(mask, options, said):
    leaves, _ = masked()
    mask = mask.to(DEVICE) if isinstance(mask, torch.Tensor) else mask
    with pytest.raises(saccade.InvalidArgument, match=said):
        saccade.attention(*leaves[:3], key_mask=mask, **options)


def test_a_mask_of_keys_of_tensors_without_a_batch():
    rows = torch.randn(2, 70, 16, device=DEVICE)
    with pytest.raises(saccade.InvalidArgument, match=r"key_mask needs query and key of rank 4 or more, got \[2, 70, 16\]"):
        saccade.attention(rows, rows, rows, key_mask=torch.ones(70, dtype=torch.bool, device=DEVICE))


def test_explain_names_a_mask_of_keys():
    leaves, seen = masked()
    assert "bias[1x2x70x70]+grad key_mask" in saccade.explain(*leaves, key_mask=seen)


@pytest.mark.parametrize("backend", ["shared_bias", "auto"])
def test_a_compiled_call_with_a_mask_of_keys(backend):
    leaves, seen = masked(tokens=20)

    def loss(*given):
        return saccade.attention(*given[:4], key_mask=given[4], backend=backend).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for x, want in zip(*(torch.autograd.grad(f(*leaves, seen), leaves) for f in (compiled, loss)), strict=True):
        assert torch.equal(x, want)


# --- what it declines, and what `auto` takes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": None, "mask_shape": None}, "takes a floating attn_mask, got none"),
        ({"mask": "bool"}, "takes a floating attn_mask, got a boolean one"),
        ({"head_dim": 136, "value_dim": 136}, "needs a head dim of 1 to 128, got 136"),
        ({"value_dim": 8}, "needs values as wide as keys, got D = 32 and Dv = 8"),
        ({"rank": 3}, r"needs tensors of rank 4, \[B, H, T, D\], got rank 3"),
        ({"arch": 75, "device_type": "cuda"}, "needs sm_80 or later"),
    ],
)
def test_what_it_declines(change, said):
    reasons = SHARED_BIAS.why_not(replace(described(), **change))
    assert any(re.search(said, reason) for reason in reasons), reasons


def described(tokens=384, rows=384, dtype=torch.bfloat16, **changes):
    """The problem of a triangle attention on an sm_90 GPU."""
    query = torch.empty(rows, 4, tokens, 32, device="meta", dtype=dtype)
    bias = torch.empty(1, 4, tokens, tokens, device="meta", dtype=dtype, requires_grad=True)
    made = describe_attention(query, query, query, bias, 0.0, False, None, False, None, False, False, True)
    return replace(made, device_type="cuda", device_index=0, arch=90, **changes)


def test_auto_takes_what_torch_reads_again_for_each_row():
    assert SHARED_BIAS.prefers(described())
    assert SHARED_BIAS.prefers(described(rows=96, tokens=512))
    assert not SHARED_BIAS.prefers(described(tokens=128))
    captured = {"host_counts": False, "python_counts": False, "key_mask": True}
    assert SHARED_BIAS.prefers(replace(described(tokens=128), **captured))
    assert not SHARED_BIAS.prefers(replace(described(tokens=64), **captured))
    assert not SHARED_BIAS.prefers(described(dtype=torch.float32))
    assert not SHARED_BIAS.prefers(replace(described(), device_type="cpu", arch=0))
    # of the table: an eager call with backward is slower than torch's at 256 tokens, its forward is not
    small = described(rows=256, tokens=256)
    assert not SHARED_BIAS.prefers(small)
    assert SHARED_BIAS.prefers(replace(small, needs_grad=False))
    assert SHARED_BIAS.prefers(replace(small, host_counts=False, python_counts=False))
    few = described(rows=FEWEST_PAIRS // (4 * 384 * 384) // 2)
    assert not SHARED_BIAS.prefers(replace(few, needs_grad=False))


def test_a_configuration_can_be_forced():
    usual = config_of(32, 2, 90)
    with forced(FORMS["turned"]):
        assert config_of(32, 2, 90) is FORMS["turned"]
        assert "turned" in str(SHARED_BIAS.form(described()))
    assert config_of(32, 2, 90) == usual
    assert "dbias" in str(SHARED_BIAS.form(described()))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["apart", "turned"])
@pytest.mark.parametrize(("tokens", "rows", "dim"), [(384, 24, 32), (512, 8, 64), (343, 16, 32), (1024, 6, 32), (200, 6, 128)])
def test_sizes_of_models(tokens, rows, dim, form):
    """At the library's shapes, with a mask of keys."""
    query, key, value = (torch.randn(rows, tokens, 4, dim, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    bias = torch.randn(1, 4, tokens, tokens, device=DEVICE, dtype=torch.bfloat16)
    seen = torch.rand(rows, tokens, device=DEVICE) < 0.8
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]
    config = config_of(dim, 2, torch.cuda.get_device_capability()[0] * 10)
    with forced(replace(config, turns=form == "turned")):
        found = differentiated(leaves, key_mask=seen, backend="shared_bias")
    expected = differentiated([x.detach().double().requires_grad_() for x in leaves], key_mask=seen, backend="reference")
    for x, want in zip(found, expected, strict=True):
        assert (x.double() - want).norm() <= 0.01 * want.norm()
