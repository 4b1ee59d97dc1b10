"""Saved-tensor hooks that return tensors with another layout: every operation and backend gives the same gradients as without
hooks."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.engine.saved import save, saved
from saccade.errors import InvalidArgument

HAS_GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_GPU else (torch.float32, torch.float16)
DEVICE = "cuda" if HAS_GPU else "cpu"


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the two axes before the last swapped in memory."""
    return tensor if tensor.dim() < 3 else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides, shifted by one element, so that the address is no multiple of 16 bytes."""
    if 0 in tensor.stride():
        return tensor
    room = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.element_size() + 1)
    moved = room[1:].as_strided(tensor.shape, tensor.stride())
    return moved.copy_(tensor)


def packed_dense(tensor: torch.Tensor) -> torch.Tensor:
    """As `torch.autograd.graph.save_on_cpu` does: contiguous."""
    return tensor.contiguous().clone()


HOOKS = {"turned": turned, "shifted": shifted, "contiguous": packed_dense}


def leaves(dtype: torch.dtype, length: int = 40, heads: int = 4, dim: int = 32):
    make = lambda: torch.randn(2, length, heads, dim, device=DEVICE, dtype=dtype).transpose(1, 2).requires_grad_()  # noqa: E731
    return make(), make(), make()


def attention(backend, return_lse=True):
    def call(dtype):
        given = leaves(dtype)
        return given, lambda: saccade.attention(*given, backend=backend, return_lse=return_lse)

    return call


def packed(dtype):
    qkv = torch.randn(2, 40, 3, 4, 32, device=DEVICE, dtype=dtype, requires_grad=True)
    return (qkv,), lambda: saccade.attention_qkvpacked(qkv, backend="short", return_lse=True)


def masked(dtype):
    given = leaves(dtype)
    bias = torch.randn(1, 4, 40, 40, device=DEVICE, dtype=dtype, requires_grad=True)
    return (*given, bias), lambda: saccade.attention(*given, attn_mask=bias, backend="short", return_lse=True)


def sparse(backend, pattern="2:4"):
    def call(dtype):
        given = leaves(dtype, 64, 2, 64)
        return given, lambda: saccade.nm_sparse_attention(*given, pattern=pattern, backend=backend, return_lse=True)

    return call


def dynamic(backend):
    def call(dtype):
        given = leaves(dtype, 96, 2, 64)
        scores = torch.randn(2, 2, 96, device=DEVICE, requires_grad=True)
        return (*given, scores), lambda: saccade.dynamic_mask_attention(*given, scores, keep=16, backend=backend, return_lse=True)

    return call


CALLS = {
    "short": attention("short"),
    "sdpa": attention("sdpa", return_lse=False),
    "reference": attention("reference"),
    "packed": packed,
    "bias": masked,
    "masked": sparse("masked"),
    "gather": dynamic("gather"),
    "dynamic": dynamic("auto"),
    "gather_torch": dynamic("gather_torch"),
}
if not HAS_GPU:
    CALLS["sdpa with lse"] = attention("sdpa")
if HAS_GPU:
    CALLS["mma_sp"] = sparse("mma_sp")
    if torch.cuda.get_device_capability() >= (7, 0):
        CALLS["volta"] = attention("volta")


def gradients(given, call, hook):
    identity = lambda x: x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(identity, hook or identity):
        results = call()
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(5)
    return torch.autograd.grad(results, given, [torch.randn_like(r) for r in results])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_do_not_depend_on_how_tensors_come_back(name, hook, dtype):
    if name == "volta" and dtype != torch.float16:
        pytest.skip("float16 alone")
    if name == "sdpa" and (HAS_GPU or hook == "shifted"):
        pytest.skip("torch's own kernels read what torch saved as they find it, and refuse or fault where a hook moved it")
    if name == "mma_sp" and dtype == torch.float32:
        pytest.skip("16 bits alone, for 2:4")
    given, call = CALLS[name](dtype)
    plain = gradients(given, call, None)  # the first call: plans are remembered
    hooked = gradients(given, call, HOOKS[hook])
    for x, y in zip(plain, hooked, strict=True):
        # the same kernel on the same numbers; sums of gathered keys may be added in another order
        torch.testing.assert_close(y, x, rtol=0, atol=0 if name not in ("gather", "volta") else 1e-2 * x.abs().max().item())
    again = gradients(given, call, None)
    for x, y in zip(plain, again, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0 if name not in ("gather", "volta") else 1e-2 * x.abs().max().item())


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (
            lambda x: x.double() if x.is_floating_point() else x,
            r"backward found torch\.float64 of shape .* where forward had saved",
        ),
        (
            lambda x: x[:1] if x.dim() == 4 else x,
            r"shape \[1, 4, 40, 32\] where forward had saved torch.float\d+ of shape \[2, 4, 40, 32\]",
        ),
    ],
    ids=["dtype", "fewer rows"],
)
def test_a_hook_that_changes_the_dtype_or_shape_is_told(hook, said):
    given, call = CALLS["short"](torch.float16 if HAS_GPU else torch.float32)
    with pytest.raises(InvalidArgument, match=said):
        gradients(given, call, hook)


def test_an_address_that_is_no_multiple_of_16_is_copied():
    """Launches are remembered for the alignment that forward saw."""
    seen = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            save(ctx, x)
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            seen.extend(saved(ctx))
            return dout

    x = torch.randn(4, 32, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, shifted):
        out = Keeps.apply(x)
    out.sum().backward()
    assert shifted(x).data_ptr() % 16
    assert seen[0].data_ptr() % 16 == 0
    assert seen[0].equal(x)


def test_activations_on_the_cpu():
    given, call = CALLS["short"](torch.float16)
    plain = torch.autograd.grad(call()[0].sum(), given)
    with torch.autograd.graph.save_on_cpu():
        out, _ = call()
    for x, y in zip(plain, torch.autograd.grad(out.sum(), given), strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)
