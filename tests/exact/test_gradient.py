"""Gradients in the situations of training: partial, repeated, checkpointed, under autocast; and the cases that must raise."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import saccade

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(requires_grad=True, q_len=5):
    make = lambda t: torch.randn(2, 2, t, 16, device=DEVICE, requires_grad=requires_grad)  # noqa: E731
    return make(q_len), make(7), make(7)


def attention(*args, **keywords):
    return saccade.attention(*args, backend="short", **keywords)


@pytest.mark.parametrize("q_len", [1, 5])
def test_second_derivatives_raise(q_len):
    q, k, v = inputs(q_len=q_len)
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.sum(), k)


def test_a_gradient_penalty_on_a_linear_loss_raises():
    q, k, v = inputs()
    loss = attention(q, k, v).sum()
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError):
        (loss + dq.square().sum()).backward()


def test_packed_second_derivatives_raise():
    qkv = torch.randn(2, 5, 3, 2, 16, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(saccade.attention_qkvpacked(qkv, backend="short").square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


GRAD_OR_NOT = pytest.mark.parametrize("requires_grad", [False, True])


@GRAD_OR_NOT
def test_jvp_raises(requires_grad):
    q, k, v = inputs(requires_grad)
    x = q.clone() if requires_grad else q
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: attention(x, k, v), (x,), (torch.ones_like(q),))


@GRAD_OR_NOT
def test_forward_mode_raises(requires_grad):
    q, k, v = inputs(requires_grad)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises((RuntimeError, NotImplementedError)):
            attention(dual, k, v)


def test_vmap_raises():
    q, k, v = inputs()
    stacked = torch.stack((q, q))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.vmap(lambda x: attention(x, k, v))(stacked)


def test_func_grad_raises():
    q, k, v = inputs(requires_grad=False)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: attention(x, k, v).sum())(q)


def test_the_same_tensor_thrice():
    x = torch.randn(2, 2, 6, 16, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(attention(x, x, x).square().sum(), x)
    y = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(saccade.attention(y, y, y, backend="reference").square().sum(), y)
    torch.testing.assert_close(grad, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs(wanted):
    tensors = inputs(requires_grad=False)
    everything = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(attention(*everything).square().sum(), everything)
    some = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    grads = torch.autograd.grad(attention(*some).square().sum(), [some[i] for i in wanted])
    for i, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, expected[i])


def test_gradient_of_a_bias_alone():
    q, k, v = inputs(requires_grad=False)
    bias = torch.randn(1, 2, 5, 7, device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad(attention(q, k, v, bias).square().sum(), bias)
    (expected,) = torch.autograd.grad(saccade.attention(q, k, v, bias, backend="reference").square().sum(), bias)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


def test_a_bias_without_gradient_gets_none():
    q, k, v = inputs()
    bias = torch.randn(5, 7, device=DEVICE)
    attention(q, k, v, bias).sum().backward()
    assert bias.grad is None
    assert q.grad is not None


def test_no_grad_and_inference_mode_keep_no_graph():
    q, k, v = inputs()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()
    # remembered plans must not carry the mode over
    assert attention(q, k, v).requires_grad


def test_checkpointing_replays_the_dropout_mask():
    q, k, v = inputs()

    def run(x, checkpointed):
        torch.manual_seed(7)
        call = lambda x: attention(x, k, v, dropout_p=0.5) * 2  # noqa: E731
        out = checkpoint(call, x, use_reentrant=False) if checkpointed else call(x)
        # advance the generator between forward and replay
        torch.rand(3, device=DEVICE)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    for plain, replayed in zip(run(q, False), run(q, True), strict=True):
        assert torch.equal(plain, replayed)


def test_dropout_draws_anew_each_call_and_follows_the_seed():
    q, k, v = inputs()
    torch.manual_seed(5)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, attention(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("q_len", [1, 5])
def test_short_and_reference_drop_the_same_weights(q_len):
    q, k, v = inputs(q_len=q_len)
    # one signature after another: a remembered launch must not carry its probability over
    for dropout_p in (0.1, 0.4, 0.8):
        results = []
        for backend in ("short", "reference"):
            torch.manual_seed(9)
            out = saccade.attention(q, k, v, dropout_p=dropout_p, backend=backend)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for x, expected in zip(*results, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-5, atol=2e-5)


def test_autocast_casts_down_and_gradients_come_back_up():
    q, k, v = inputs()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = saccade.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert attention(q, k, v).dtype == torch.float16
        # mixed dtypes are cast before they are checked
        assert attention(q.half(), k, v).dtype == torch.float16
        qkv = torch.randn(2, 5, 3, 2, 16, device=DEVICE)
        assert saccade.attention_qkvpacked(qkv, backend="short").dtype == torch.float16
    assert attention(q, k, v).dtype == torch.float32


def test_retained_graphs_give_the_same_gradient():
    q, k, v = inputs()
    out = attention(q, k, v)
    first = torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.square().sum(), q)[0])


def test_changing_an_input_in_place_before_backward_raises():
    q, k, v = inputs()
    doubled = k * 2
    out = attention(q, doubled, v)
    with torch.no_grad():
        doubled.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_unused_lse_costs_no_gradient_and_a_used_one_adds_up():
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True)
    by_parts = [torch.autograd.grad(x, q, retain_graph=True)[0] for x in (out.sum(), lse.sum())]
    (together,) = torch.autograd.grad(out.sum() + lse.sum(), q)
    torch.testing.assert_close(together, by_parts[0] + by_parts[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(by_parts[0], torch.autograd.grad(attention(q, k, v).sum(), q)[0])


def test_nothing_of_a_call_outlives_it():
    q, k, v = inputs()
    out = attention(q, k, v, lengths=torch.tensor([3, 7], device=DEVICE))
    alive = weakref.ref(out)
    del out
    gc.collect()
    assert alive() is None
