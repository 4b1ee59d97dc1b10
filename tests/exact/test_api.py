"""The parts of the public functions around a backend: prepared calls, lengths, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.engine import prepare
from saccade.exact import api as functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def qkv(*shape, **options):
    return [torch.randn(*shape, device=DEVICE, **options) for _ in range(3)]


def test_prepared_calls_are_remembered_by_everything_they_depend_on(monkeypatch):
    monkeypatch.setattr(prepare, "_PREPARED", {})
    monkeypatch.setattr(functional, "on_a_cpu", lambda *a: None)
    q, k, v = qkv(2, 2, 5, 16)
    mask, trained = torch.ones(5, 5, dtype=torch.bool, device=DEVICE), q.clone().requires_grad_()
    calls = [
        lambda: saccade.attention(q, k, v),
        lambda: saccade.attention(q, k, v, is_causal=True),
        lambda: saccade.attention(q, k, v, scale=0.5),
        lambda: saccade.attention(q, k, v, dropout_p=0.5),
        lambda: saccade.attention(q, k, v, mask),
        lambda: saccade.attention(q, k, v, mask.float()),
        lambda: saccade.attention(q, k, v, return_lse=True),
        lambda: saccade.attention(q, k, v, backend="reference"),
        lambda: saccade.attention(q.half(), k.half(), v.half()),
        lambda: saccade.attention(q.mT.contiguous().mT, k, v),
        lambda: saccade.attention(trained, k, v),
        lambda: saccade.attention(q, k, v, lengths=torch.tensor([3, 5], device=DEVICE)),
        lambda: saccade.attention(q, k, v, lengths=torch.tensor([3, 5], device=DEVICE, dtype=torch.int32)),
        lambda: saccade.attention(q, k, v, mask[:1]),
        lambda: saccade.attention(q, k, v, mask[:1].expand(5, 5)),
        lambda: saccade.attention(trained, k, v, mask.float()),
        lambda: saccade.attention(trained, k, v, mask.float().requires_grad_()),
        lambda: saccade.attention_qkvpacked(torch.stack((q, k, v)).permute(1, 3, 0, 2, 4)),
    ]
    for number, call in enumerate(calls, start=1):
        call()
        call()
        assert len(prepare._PREPARED) == number


def test_a_captured_call_is_prepared_by_itself(monkeypatch):
    """The host's time does not count there, so another backend may be chosen."""
    monkeypatch.setattr(prepare, "_PREPARED", {})
    monkeypatch.setattr(functional, "on_a_cpu", lambda *a: None)
    tensors = qkv(2, 2, 5, 16)
    for captured in (False, True):
        for module in ("exact.prepared", "engine.problem"):
            monkeypatch.setattr(f"saccade.{module}.compiled_or_captured", lambda tensor, captured=captured: captured)
        saccade.attention(*tensors)
    assert [call.problem.python_counts for call in prepare._PREPARED.values()] == [True, False]


def test_prepared_calls_of_dynamic_masks_too(monkeypatch):
    monkeypatch.setattr(prepare, "_PREPARED", {})
    q, k, v = qkv(2, 2, 5, 16)
    scores = torch.randn(2, 2, 5, device=DEVICE)
    lengths, documents = torch.tensor([3, 5], device=DEVICE), torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)

    def call(query=q, key=k, value=v, key_scores=scores, **options):
        saccade.dynamic_mask_attention(query, key, value, key_scores, **{"keep": 2, "backend": "gather_torch", **options})

    calls = [
        {}, {"keep": 3}, {"is_causal": False}, {"lengths": lengths}, {"lengths": lengths.int()}, {"document_ids": documents},
        {"add_scores": False}, {"scale": 0.5}, {"enable_gqa": True}, {"backend": "reference"}, {"key_scores": scores.half()},
        {"query": q.mT.contiguous().mT}, {"key": k.mT.contiguous().mT}, {"value": v.mT.contiguous().mT},
        {"query": q.clone().requires_grad_()}, {"key_scores": scores.clone().requires_grad_(), "scale": 0.25},
        {"query": q[:, :, 1:]},
    ]  # fmt: skip
    for number, options in enumerate(calls, start=1):
        call(**options)
        call(**options)
        assert len(prepare._PREPARED) == number, options
    call(keep=1)
    for wrong in ({"keep": True}, {"keep": 1.0}, {"key_scores": scores[:, :1]}, {"key_scores": None}, {"keep": [1]}):
        with pytest.raises(saccade.InvalidArgument):
            call(**{"keep": 1, **wrong})


def test_prepared_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(prepare, "_PREPARED", {})
    monkeypatch.setattr(prepare, "_MAX_PREPARED", 3)
    for time in range(1, 9):
        saccade.attention(*qkv(1, 1, time, 4))
        assert len(prepare._PREPARED) <= 3


def test_lengths_of_both_integer_types_and_any_stride():
    q, k, v = qkv(3, 2, 5, 16)
    expected = saccade.attention(q, k, v, lengths=torch.tensor([0, 2, 5], device=DEVICE), backend="short")
    for lengths in (
        torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, 9, 2, 9, 5, 9], device=DEVICE)[::2],
    ):
        assert torch.equal(saccade.attention(q, k, v, lengths=lengths, backend="short"), expected)


def test_the_two_lengths_of_alternating_calls_are_both_respected():
    q, k, v = qkv(2, 2, 5, 16)
    short, full = torch.tensor([1, 1], device=DEVICE), torch.tensor([5, 5], device=DEVICE)
    for _ in range(2):
        one = saccade.attention(q, k, v, lengths=short, backend="short")
        torch.testing.assert_close(one, v[:, :, :1].expand_as(one), rtol=1e-6, atol=1e-6)
        assert torch.equal(saccade.attention(q, k, v, lengths=full, backend="short"), saccade.attention(q, k, v, backend="short"))


def test_packed_gradient_is_one_packed_tensor():
    packed = torch.randn(2, 5, 3, 2, 16, device=DEVICE, requires_grad=True)
    saccade.attention_qkvpacked(packed, backend="short").square().sum().backward()
    assert packed.grad.shape == packed.shape
    assert packed.grad.is_contiguous()
    split = packed.detach().clone().requires_grad_()
    query, key, value = (split[:, :, i].transpose(1, 2) for i in range(3))
    saccade.attention(query, key, value, backend="short").square().sum().backward()
    torch.testing.assert_close(packed.grad, split.grad, rtol=1e-6, atol=1e-6)


def test_packed_input_of_any_strides():
    wide = torch.randn(2, 5, 3, 2, 32, device=DEVICE)
    view = wide[..., 8:24].detach().requires_grad_()
    plain = view.detach().contiguous().requires_grad_()
    for packed in (view, plain):
        saccade.attention_qkvpacked(packed, backend="short").square().sum().backward()
    assert torch.equal(view.grad, plain.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 33])
def test_cuda_graphs_replay_with_new_inputs_and_new_dropout(q_len):
    q, k, v = (torch.randn(4, 2, t, 32, device="cuda", dtype=torch.float16, requires_grad=True) for t in (q_len, 33, 33))

    def step():
        out = saccade.attention(q, k, v, dropout_p=0.5, backend="short")
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    assert not torch.equal(first[0], captured[0])  # another draw
    assert all(x.isfinite().all() for x in captured)
    with torch.no_grad():
        v.zero_()
    graph.replay()
    assert torch.equal(captured[0], torch.zeros_like(captured[0]))


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    q, k, v = (torch.randn(64, 8, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = saccade.attention(q, k, v, backend="short")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = q + 0
        out = saccade.attention(late, k, v, backend="short")
    side.synchronize()
    assert torch.equal(out, expected)
