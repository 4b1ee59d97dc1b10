"""Sliding windows: their edges by brute force, every gradient, what is refused, and what `explain` says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import saccade
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.exact import bands
from saccade.exact.long import choice
from saccade.exact.ragged import token_launches
from saccade.exact.ragged.backend import RAGGED
from saccade.exact.varlen.api import attend
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, FULL_BOTTOM_RIGHT, UPPER_LEFT
from saccade.exact.varlen.problem import describe_varlen

EDGES = [(0, 0), (1, 0), (0, 1), (3, 7), (None, 2), (5, None), (200, 300), (64, 64)]
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="on a CPU, by Triton's interpreter")


def ends_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def seen_by(i, q_len, k_len, window, causal):
    """The keys that query i sees, said as plainly as can be."""
    row = i + (k_len - q_len if causal in (BOTTOM_RIGHT, FULL_BOTTOM_RIGHT) else 0)
    left, right = window
    keys = [j for j in range(k_len) if (left is None or j >= row - left) and (right is None or j <= row + right)]
    return [j for j in keys if causal not in (UPPER_LEFT, BOTTOM_RIGHT) or j <= row]


def brute(query, key, value, window, causal):
    """out `[T, H, D]` and lse `[H, T]` of one sequence, a query and a head at a time."""
    group = query.shape[1] // key.shape[1]
    if not len(query):
        return query, query[..., 0].T
    outs, sums = [], []
    for i in range(query.shape[0]):
        keys = seen_by(i, query.shape[0], key.shape[0], window, causal)
        for h in range(query.shape[1]):
            scores = query[i, h] @ key[keys, h // group].T * query.shape[2] ** -0.5
            outs.append(scores.softmax(0) @ value[keys, h // group] if keys else 0.0 * query[i, h])
            sums.append(scores.logsumexp(0) if keys else torch.tensor(float("-inf"), dtype=query.dtype))
    return torch.stack(outs).view_as(query), torch.stack(sums).view(query.shape[:2]).T


def of_each_sequence(tensors, lengths, window, causal):
    parts = [x.split(n) for x, n in zip(tensors, (lengths[0], lengths[1], lengths[1]), strict=True)]
    found = [brute(*part, window, causal) for part in zip(*parts, strict=True)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)


def differentiated(out, lse, tensors):
    dlse = torch.where(lse.isinf(), 0.0, lse.detach().cos())
    return out, lse, *torch.autograd.grad((out, lse), tensors, (out.detach().cos(), dlse))


def packed_tensors(lengths, dtype=torch.float64, heads=(2, 1), dim=8):
    shapes = ((sum(lengths[0]), heads[0]), (sum(lengths[1]), heads[1]), (sum(lengths[1]), heads[1]))
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, dim, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def packed_call(tensors, lengths, window, causal, backend, lse=True):
    ends = ends_of(lengths[0])
    other = ends if lengths[0] is lengths[1] else ends_of(lengths[1])
    return attend((*tensors, ends, other, max(lengths[0]), max(lengths[1]), 0.0, causal, None, True, None, window, lse, backend))


SELF, CROSS = (5, 30, 0, 1), (7, 12, 4, 0)


@pytest.mark.parametrize("lengths", [(SELF, SELF), (SELF, CROSS)], ids=["self", "cross"])
@pytest.mark.parametrize("causal", [FULL, UPPER_LEFT, BOTTOM_RIGHT, FULL_BOTTOM_RIGHT])
@pytest.mark.parametrize("window", EDGES, ids=str)
def test_reference_of_packed_sequences(window, causal, lengths):
    tensors = packed_tensors(lengths)
    expected = differentiated(*of_each_sequence(tensors, lengths, window, causal), tensors)
    found = differentiated(*packed_call(tensors, lengths, window, causal, "reference"), tensors)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("lengths", [((300, 64, 0, 2),) * 2, ((300, 40, 3, 200), (30, 200, 0, 280))], ids=["self", "cross"])
@pytest.mark.parametrize("causal", [FULL, UPPER_LEFT, BOTTOM_RIGHT, FULL_BOTTOM_RIGHT])
@pytest.mark.parametrize("window", EDGES, ids=str)
def test_blocks_of_torch_on_packed_sequences(window, causal, lengths):
    tensors = packed_tensors((lengths[0], lengths[1]))
    expected, found = (packed_call(tensors, lengths, window, causal, name, lse=False) for name in ("reference", "sdpa"))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out, tensors, expected.detach().cos()) for out in (found, expected)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("real", [None, (30, 260)], ids=["whole", "lengths"])
@pytest.mark.parametrize("sizes", [(260, 260), (40, 260), (260, 40), (1, 260)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", EDGES, ids=str)
def test_blocks_of_torch_on_dense_rows(window, causal, sizes, real):
    shapes = ((sizes[0], 4), (sizes[1], 2), (sizes[1], 2))
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(2, t, h, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_() for t, h in shapes
    ]
    lengths = None if real is None else torch.tensor([min(n, sizes[1]) for n in real])
    made = [
        saccade.attention(
            *tensors, is_causal=causal, enable_gqa=True, lengths=lengths, window=window, return_lse=True, backend=backend
        )
        for backend in ("sdpa", "reference")
    ]
    for got, want in zip(*(differentiated(*results, tensors) for results in made), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("window", EDGES, ids=str)
def test_reference_of_dense_rows_is_that_of_packed_ones(window):
    tensors = [x[None].transpose(1, 2) for x in packed_tensors(((33,), (20,)))]
    out, lse = saccade.attention(*tensors, enable_gqa=True, window=window, return_lse=True, backend="reference")
    packed = packed_call(packed_tensors(((33,), (20,))), ((33,), (20,)), window, FULL, "reference")
    torch.testing.assert_close(out[0].transpose(0, 1), packed[0])
    torch.testing.assert_close(lse[0], packed[1])


def test_padding_may_hold_anything():
    query = torch.randn(2, 2, 150, 16)
    key, value = (torch.randn(2, 2, 150, 16).requires_grad_() for _ in range(2))
    lengths = torch.tensor([40, 150])
    clean = saccade.attention(query, key, value, lengths=lengths, window=(9, 30))
    dirty = [x.detach().clone() for x in (key, value)]
    for x in dirty:
        x[0, :, 40:] = float("nan")
    assert torch.equal(saccade.attention(query, *dirty, lengths=lengths, window=(9, 30)), clean)


def test_work_grows_with_the_width():
    def mask(tokens):
        return bands.band_of(tokens, tokens, 64, 64, False).mask_numbers

    assert mask(2**14) <= 2**14 * 3 * 129
    assert mask(2**16) <= 4.01 * mask(2**14)


# --- the kernels, interpreted


def interpreted(lengths, window, causal, dim=16, heads=(2, 2), dropout_p=0.0, backend="ragged", dtype=torch.float32):
    tensors = packed_tensors((lengths, lengths), dtype, heads, dim)
    torch.manual_seed(5)
    ends = ends_of(lengths)
    out, lse = attend(
        (*tensors, ends, ends, max(lengths), max(lengths), dropout_p, causal, None, True, None, window, True, backend)
    )
    return differentiated(out, lse, tensors)


@INTERPRETED
@pytest.mark.parametrize("causal", [FULL, UPPER_LEFT])
@pytest.mark.parametrize("window", [(0, 0), (0, 1), (3, 40), (20, 5), (None, 2), (5, None), (500, 500)], ids=str)
def test_token_tiles(window, causal):
    lengths = (5, 90, 0, 64, 1, 2, 2)
    for got, want in zip(*(interpreted(lengths, window, causal, backend=b) for b in ("ragged", "reference")), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@INTERPRETED
@pytest.mark.parametrize(
    "options", [{"heads": (4, 2), "dropout_p": 0.3}, {"dim": 80}, {"dim": 160}, {"dtype": torch.float16}], ids=str
)
def test_token_tiles_with(options):
    lengths, window = (9, 150, 0, 30), (45, 7)
    tolerance = 4e-3 if "dtype" in options else 2e-5
    made = (interpreted(lengths, window, FULL, backend=b, **options) for b in ("ragged", "reference"))
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@INTERPRETED
def test_token_tiles_leave_distant_keys_alone(monkeypatch):
    """A tile reads the keys of its window: what lies further away may be NaN."""
    tensors = [x.detach() for x in packed_tensors(((256,), (256,)), torch.float32, (2, 2), 16)]
    clean = packed_call(tensors, ((256,),) * 2, (8, 8), FULL, "ragged", lse=False)
    tensors[1][200:], tensors[2][200:] = float("nan"), float("nan")
    found = packed_call(tensors, ((256,),) * 2, (8, 8), FULL, "ragged", lse=False)
    assert torch.equal(found[:128], clean[:128])


@INTERPRETED
@pytest.mark.parametrize("layout", ["bthd", "bhtd", "one row"])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_rows_by_token_tiles(causal, layout):
    batch = 1 if layout == "one row" else 2
    tensors = [torch.randn(batch, 45, n, 16).transpose(1, 2) for n in (4, 2, 2)]
    tensors = [(x.contiguous() if layout == "bhtd" else x).requires_grad_() for x in tensors]

    def made(backend):
        found = saccade.attention(*tensors, is_causal=causal, enable_gqa=True, window=(7, 3), return_lse=True, backend=backend)
        return differentiated(*found, tensors)

    for got, want in zip(made("ragged"), made("reference"), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@INTERPRETED
def test_packed_projections_by_token_tiles():
    qkv = torch.randn(2, 40, 3, 2, 16, requires_grad=True)
    for call in (
        lambda b: saccade.attention_qkvpacked(qkv, window=(4, 2), backend=b),
        lambda b: saccade.attention_varlen_qkvpacked(qkv.flatten(0, 1), ends_of((40, 40)), 40, window=(4, 2), backend=b),
    ):
        outs = [call(backend) for backend in ("ragged", "reference")]
        torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), qkv)[0] for x in outs), atol=2e-5, rtol=2e-5)


def test_a_window_of_any_length_is_token_tiles(monkeypatch):
    monkeypatch.setattr(token_launches, "MOST_NUMBERS", 1)
    call = type("Call", (), {"args": type("Args", (), {"window_left": 3, "window_right": -1})()})()
    assert token_launches.takes(call, "forward")


# --- calls


def test_calls_that_differ_in_the_window_alone():
    """A prepared call of one window is never found for another, nor C++'s for any."""
    x = torch.randn(1, 2, 100, 16)
    outs = [saccade.attention(x, x, x, window=window) for window in (None, (3, 3), (3, 4), (4, 3), (3, None), (None, 3), (3, 3))]
    packed = x[0].transpose(0, 1)
    ends = ends_of((60, 40))
    others = [
        saccade.attention_varlen(*[packed] * 3, ends, ends, 60, 60, window=w) for w in (None, (3, 3), (3, 4), (4, 3), (3, 3))
    ]
    for found in (outs, others):
        assert torch.equal(found[1], found[-1])
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(found[:-1], 2))


def test_no_limit_is_no_window():
    x = torch.randn(1, 2, 30, 16)
    assert torch.equal(saccade.attention(x, x, x, window=(None, None)), saccade.attention(x, x, x))
    causal = saccade.attention(x, x, x, is_causal=True)
    torch.testing.assert_close(saccade.attention(x, x, x, is_causal=True, window=(None, 3)), causal)
    torch.testing.assert_close(saccade.attention(x, x, x, window=(None, 0)), causal)


@pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), (-1, 2), (1.0, 2), (True, 1), "ab", (torch.tensor(1), 2)], ids=str)
def test_bad_windows(window):
    x, ends = torch.randn(1, 2, 8, 16), ends_of((8,))
    packed = [x[0].transpose(0, 1)] * 3
    qkv = torch.stack(packed, 1)
    for call in (
        lambda: saccade.attention(x, x, x, window=window),
        lambda: saccade.attention_qkvpacked(qkv[None], window=window),
        lambda: saccade.attention_varlen(*packed, ends, ends, 8, 8, window=window),
        lambda: saccade.attention_varlen_qkvpacked(qkv, ends, 8, window=window),
        lambda: saccade.explain(x, x, x, window=window),
    ):
        with pytest.raises(
            InvalidArgument, match=r"window is .* it must be \(left, right\), each a whole number of tokens of at least 0"
        ):
            call()


def test_a_window_beside_a_mask():
    x, ends = torch.randn(1, 2, 8, 16), ends_of((8,))
    for mask in (torch.ones(8, 8, dtype=torch.bool), torch.zeros(8, 8)):
        with pytest.raises(InvalidArgument, match=r"window=\(1, 2\) and attn_mask \(shape \[8, 8\]\) are both given; hide"):
            saccade.attention(x, x, x, mask, window=(1, 2))
    packed = [x[0].transpose(0, 1)] * 3
    with pytest.raises(InvalidArgument, match=r"window=\(1, 2\) and attn_bias \(shape \[2, 8, 8\]\) are both given; hide"):
        saccade.attention_varlen(*packed, ends, ends, 8, 8, attn_bias=torch.zeros(2, 8, 8), window=(1, 2))


def test_kernels_without_windows_say_so():
    x = torch.randn(1, 2, 8, 16)
    for backend in ("short", "volta"):
        with pytest.raises(UnsupportedProblem, match=r"takes no sliding window, got window=\(1, None\)"):
            saccade.attention(x, x, x, window=(1, None), backend=backend)
    said = saccade.explain(x, x, x, window=(1, None))
    assert "window=(1, None)" in said.splitlines()[0]
    assert "takes no sliding window, got window=(1, None)" in said
    ends = ends_of((8,))
    packed = [x[0].transpose(0, 1)] * 3
    with pytest.raises(
        UnsupportedProblem, match=r"takes window=\(1, 1\) where queries and keys share one tensor of cu_seqlens, got two"
    ):
        saccade.attention_varlen(*packed, ends, ends.clone(), 8, 8, window=(1, 1), backend="ragged")


@pytest.mark.parametrize("window", [(2, 3), (None, 3)], ids=str)
def test_compiled_and_differentiated_by_the_ops(window):
    """A window reaches the kernels of traced calls, forward and backward."""
    x = torch.randn(1, 2, 20, 16, requires_grad=True)
    backend = "sdpa" if torch.cuda.is_available() else "ragged"

    def call(x):
        return saccade.attention(x, 2 * x, 3 * x, window=window, backend=backend)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, call(x))
    (got,), (want,) = (torch.autograd.grad(out.square().sum(), x) for out in (compiled, call(x)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("window", [(2, 3), (0, 3)], ids=str)
def test_compiled_for_any_number_of_tokens_in_any_order_of_dimensions(window):
    """64 tokens and 7 are a block of queries without padding, 20 and 100 are not."""

    def call(qkv):
        return saccade.attention_qkvpacked(qkv, window=window, backend="sdpa")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 20, 64, 100):
        qkv = torch.randn(2, tokens, 3, 4, 8, requires_grad=True)
        (out, got), (expected, want) = ((o, torch.autograd.grad(o.square().sum(), qkv)[0]) for o in (compiled(qkv), call(qkv)))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(got, want)


def test_nested_tensors():
    parts = [torch.randn(n, 2, 16) for n in (5, 30)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = saccade.attention(nested, nested, nested, window=(2, 1))
    packed, ends = torch.cat(parts), ends_of((5, 30))
    expected = saccade.attention_varlen(packed, packed, packed, ends, ends, 30, 30, window=(2, 1))
    torch.testing.assert_close(out.transpose(1, 2).values(), expected)


@pytest.mark.parametrize(
    ("window", "longest", "grad", "against"),
    [
        ((64, 64), 8192, True, False),
        ((256, 256), 2048, True, False),
        ((256, 256), 8192, True, True),
        ((256, 256), 8192, False, False),
        ((1023, 0), 512, True, False),
        ((1023, 0), 2048, True, True),
        ((1023, None), 2048, True, True),
    ],
)
def test_wide_windows_with_backward_go_to_torch_beyond_measured_lengths(window, longest, grad, against, monkeypatch):
    tokens = torch.empty(9000, 4, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(9, dtype=torch.int32, device="meta")
    problem = describe_varlen(
        tokens, tokens, tokens, ends, ends, longest, longest, 0.0, 0, None, False, None, False, True, grad, window=window
    )
    rule = RAGGED.rule(replace(problem, device_type="cuda", arch=80, needs_grad=grad))
    assert rule.against == against
    assert (f"beyond {512 if window[0] == 1023 else 2048} tokens" in rule.said) == against
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    assert not RAGGED.rule(replace(problem, device_type="cuda", arch=90, needs_grad=grad)).against  # CUDA C++


@pytest.mark.parametrize(
    ("dim", "arch", "window", "longest", "grad", "said"),
    [
        (128, 90, (256, 256), 8192, True, ""),
        (128, 90, (512, 0), 8192, True, ""),
        (128, 90, (1023, 0), 2048, True, ""),
        (128, 90, (1023, 0), 2049, True, "0.96 of the speed"),
        (128, 90, (1023, None), 2049, True, "0.96 of the speed"),
        (128, 90, (1023, 0), 8192, False, ""),
        (64, 90, (1023, 0), 8192, True, ""),
        (128, 80, (64, 64), 256, False, "the kernels of sm_90 alone were measured"),
        (96, 90, (64, 64), 256, False, "compute 128 columns beyond D = 64"),
        (124, 90, (64, 64), 256, False, "the kernels of sm_90 alone were measured"),
        (136, 90, (64, 64), 256, False, "up to D = 128 alone"),
    ],
)
def test_windows_of_wide_heads_that_auto_takes(dim, arch, window, longest, grad, said, monkeypatch):
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    tokens = torch.empty(9000, 4, dim, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(9, dtype=torch.int32, device="meta")
    problem = describe_varlen(
        tokens, tokens, tokens, ends, ends, longest, longest, 0.0, 0, None, False, None, False, True, grad, window=window
    )
    rule = RAGGED.rule(replace(problem, device_type="cuda", arch=arch, needs_grad=grad))
    assert rule.against == bool(said)
    assert said in rule.said
    if said == "0.96 of the speed":  # and not with grouped heads
        assert not RAGGED.rule(replace(problem, device_type="cuda", arch=arch, needs_grad=grad, kv_heads=1)).against
