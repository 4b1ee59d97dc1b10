"""A bias for each window, which all images share: `[images, W, H, T, D]` with `[W, H, Tq, Tk]`, as torch's function broadcasts it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.errors import InvalidArgument, UnsupportedProblem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGES, WINDOWS, HEADS, TOKENS, DIM = 3, 4, 2, 9, 16
TORCHS = F.scaled_dot_product_attention


def tensors(bias=(WINDOWS, HEADS, TOKENS, TOKENS), dtype=torch.float32, images=IMAGES):
    """query, key, value and bias; the first three are views of one projection `[images, W, T, 3, H, D]`, as models have them."""
    torch.manual_seed(5)
    packed = torch.randn(images, WINDOWS, TOKENS, 3, HEADS, DIM, device=DEVICE, dtype=dtype)
    leaves = [x.detach().requires_grad_() for x in packed.permute(3, 0, 1, 4, 2, 5).unbind(0)]
    return [*leaves, torch.randn(bias, device=DEVICE, dtype=dtype, requires_grad=True)]


def results(function, given):
    out = function(*given)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), given)]


def compare(function, given):
    """Outputs and gradients against torch's function in float64, which takes rank 5."""
    expected = results(TORCHS, [x.detach().double().requires_grad_() for x in given])
    for found, want in zip(results(function, given), expected, strict=True):
        assert found.shape == want.shape
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def by(backend, **options):
    return lambda q, k, v, bias: saccade.attention(q, k, v, bias, backend=backend, **options)


@pytest.mark.parametrize("backend", ["short", "sdpa", "reference", "auto"])
@pytest.mark.parametrize(
    "bias",
    [
        (WINDOWS, HEADS, TOKENS, TOKENS), (1, WINDOWS, HEADS, TOKENS, TOKENS), (WINDOWS, 1, TOKENS, TOKENS), (WINDOWS, HEADS, 1, TOKENS),
        (WINDOWS, 1, 1, 1),
    ],
    ids=str,
)  # fmt: skip
def test_what_torch_computes(bias, backend):
    compare(by(backend), tensors(bias))


@pytest.mark.parametrize("backend", ["short", "sdpa", "reference"])
def test_each_window_gets_its_own_bias(backend):
    """The bias of window w leaves key w alone, so that the values tell which bias was read: b % W, and not b // W."""
    query, key, value, _ = tensors()
    bias = torch.full((WINDOWS, 1, 1, TOKENS), -torch.inf, device=DEVICE)
    for window in range(WINDOWS):
        bias[window, :, :, window] = 0.0
    out = saccade.attention(query, key, value, bias, backend=backend)
    for window in range(WINDOWS):
        wanted = value[:, window, :, window : window + 1].expand(-1, -1, TOKENS, -1)
        torch.testing.assert_close(out[:, window], wanted)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("backend", ["short", "sdpa", "reference"])
def test_few_images(images, backend):
    compare(by(backend), tensors(images=images))


@pytest.mark.parametrize("backend", ["short", "sdpa", "reference"])
def test_no_images(backend):
    given = tensors(images=0)
    out = saccade.attention(*given, backend=backend)
    assert out.shape == given[0].shape
    found = torch.autograd.grad(out.sum(), given, allow_unused=True)  # torch gives its bias None there
    assert all(x is None or (x.shape == y.shape and not x.any()) for x, y in zip(found, given, strict=True))


def test_the_gradient_of_the_bias_has_the_same_bits_each_time():
    given = tensors(dtype=torch.float16)
    first = results(by("short"), given)
    for again in (results(by("short"), given) for _ in range(3)):
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_the_log_sum_exp_has_the_shape_of_the_windows():
    query, key, value, bias = tensors()
    for backend in ("short", "reference"):
        out, lse = saccade.attention(query, key, value, bias, return_lse=True, backend=backend)
        assert out.shape == query.shape
        wanted = (query @ key.mT * DIM**-0.5 + bias).logsumexp(-1)
        torch.testing.assert_close(lse, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["short", "sdpa"])
def test_layouts_that_do_not_fold_into_a_view(backend):
    """Windows before images in memory, and keys that all images share."""
    query, key, value, bias = tensors()
    query = query.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    compare(by(backend), [query, key, value, bias])
    key = key.detach()[:1].clone().requires_grad_()
    compare(by(backend), [query, key, value, bias])


def test_grouped_heads():
    query, _, _, bias = tensors()
    key, value = (torch.randn(IMAGES, WINDOWS, 1, TOKENS, DIM, device=DEVICE, requires_grad=True) for _ in range(2))
    for backend in ("short", "sdpa"):
        found = results(by(backend, enable_gqa=True), [query, key, value, bias])
        wanted = results(TORCHS, [query, key, value, bias])  # torch broadcasts one head
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_bias_of_another_dtype(dtype):
    """As a mask of float32 is added to a bias in half precision, and as a model keeps it under autocast."""
    query, key, value, bias = tensors(dtype=dtype)
    other = bias.detach().to(torch.float32 if dtype == torch.float16 else torch.float16).requires_grad_()
    for backend in ("short", "reference"):
        out, *_, found = results(by(backend), [query, key, value, other])
        wanted, *_, want = results(TORCHS, [x.detach().double().requires_grad_() for x in (query, key, value, other)])
        assert found.dtype == other.dtype
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)


def test_replaced_function():
    with saccade.replace_sdpa():
        compare(F.scaled_dot_product_attention, tensors())


def test_explained():
    text = saccade.explain(*tensors())
    assert text.startswith(f"attention(B={IMAGES * WINDOWS} H=2 Tq=9 Tk=9 D=16 fp32 bias[4x2x9x9]+grad windows=4 grad")
    assert "takes no bias for each of 4 windows, which the images share" in text
    assert "rank" not in text


# --- what stays as it was

OTHERS = [
    (TOKENS, TOKENS),
    (HEADS, 1, TOKENS),
    (1, HEADS, TOKENS, TOKENS),
    (IMAGES, WINDOWS, HEADS, TOKENS, TOKENS),
    (IMAGES, 1, 1, 1, 1),
]


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("shape", [*OTHERS, (WINDOWS, 1, TOKENS, TOKENS)], ids=str)
def test_other_masks_of_rank_5_go_to_torch_as_they_are(shape, kind):
    query, key, value, _ = tensors()
    mask = torch.randn(shape, device=DEVICE)
    if kind == "bool":
        mask = mask > -1.0
    elif shape == (WINDOWS, 1, TOKENS, TOKENS):
        return  # a bias for each window
    expected = TORCHS(query, key, value, mask)
    assert torch.equal(saccade.attention(query, key, value, mask), expected)
    with pytest.raises(UnsupportedProblem, match="rank 4"):
        saccade.attention(query, key, value, mask, backend="short")


def test_rank_4_has_no_windows():
    """A bias for fewer rows than the batch has is refused, as torch refuses it: which rows are of one image is not told."""
    query, key, value, bias = (x.flatten(0, 1) if x.dim() == 5 else x for x in tensors())
    with pytest.raises(InvalidArgument, match=r"attn_mask has shape \[4, 2, 9, 9\]; it must broadcast to \[12, 2, 9, 9\]"):
        saccade.attention(query, key, value, bias)


@pytest.mark.parametrize("backend", ["auto", "short", "sdpa", "reference"])
@pytest.mark.parametrize(
    "shape", [(WINDOWS - 1, 1, 1, 1), (IMAGES * WINDOWS, 1, 1, 1), (WINDOWS, HEADS + 1, 1, 1), (1, 1, WINDOWS, 1, 1, 1)], ids=str
)
def test_wrong_shapes_are_refused(shape, backend):
    query, key, value, _ = tensors()
    with pytest.raises(InvalidArgument) as caught:
        saccade.attention(query, key, value, torch.zeros(shape, device=DEVICE), backend=backend)
    assert f"attn_mask has shape {list(shape)}; it must broadcast to [3, 4, 2, 9, 9]" in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("images", [0, 2])
def test_no_windows(images, backend):
    query = torch.randn(images, 0, HEADS, TOKENS, DIM, device=DEVICE, requires_grad=True)
    out = saccade.attention(query, query, query, torch.zeros(0, HEADS, TOKENS, TOKENS, device=DEVICE), backend=backend)
    (found,) = torch.autograd.grad(out.sum(), query)
    assert out.shape == found.shape == query.shape


def test_windows_have_no_lengths():
    query, key, value, bias = tensors()
    with pytest.raises(InvalidArgument, match="lengths has shape"):
        saccade.attention(query, key, value, bias, lengths=torch.ones(IMAGES, dtype=torch.int32, device=DEVICE))
