"""`saccade.integrations.tabpfn`: what the backend computes and takes, and, where tabpfn is installed, that its registry calls it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade import SaccadeError, UnsupportedProblem
from saccade.integrations import tabpfn
from saccade.integrations.tabpfn import SaccadeBackend, register, unregister

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Spec:
    """The fields of tabpfn's AttentionSpec that a choice depends on."""

    seq_len_q: int | None = 60
    seq_len_kv: int | None = 60
    num_heads: int = 6
    num_kv_heads: int = 6
    head_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA
    batch_size: int | None = 20_000
    is_grad_enabled: bool = False


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_result_and_gradients_are_those_of_torch(kv_heads):
    query = torch.randn(3, 7, 4, 16, requires_grad=True)
    key, value = (torch.randn(3, 9, kv_heads, 16, requires_grad=True) for _ in range(2))
    ours = SaccadeBackend().run(query, key, value, quantized_kv=None, anything_new=1)
    heads = (x.transpose(1, 2) for x in (query, key, value))
    theirs = F.scaled_dot_product_attention(*heads, enable_gqa=kv_heads != 4).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn_like(ours)
    for found, wanted in zip(*(torch.autograd.grad(x, (query, key, value), dout) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_it_takes_what_its_kernels_are_best_at(monkeypatch):
    monkeypatch.setattr(tabpfn, "arch_of", lambda device: 90)
    backend = SaccadeBackend()
    assert backend.is_preferred(Spec())
    assert backend.is_preferred(Spec(is_grad_enabled=True))
    for change in (
        {"device": torch.device("cpu")}, {"seq_len_kv": None}, {"batch_size": None}, {"seq_len_q": 20_000, "seq_len_kv": 20_000},
    ):  # fmt: skip
        assert not backend.is_preferred(replace(Spec(), **change)), change
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not backend.is_preferred(Spec())


def test_a_choice_made_while_saccade_is_disabled_ends_with_the_block(monkeypatch):
    monkeypatch.setattr(tabpfn, "arch_of", lambda device: 90)
    backend, spec = SaccadeBackend(), Spec(batch_size=19_999)
    with saccade.disabled():
        assert not backend.is_preferred(spec)
    assert backend.is_preferred(spec)
    with saccade.disabled():
        assert not backend.is_preferred(spec)


def test_a_quantised_cache_is_refused():
    x = torch.randn(1, 2, 1, 8)
    for key, value in ((None, None), (x, None), (None, x)):
        with pytest.raises(UnsupportedProblem, match="key or value is None"):
            SaccadeBackend().run(x, key, value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(tabpfn, "has_package", lambda name: False)
    with pytest.raises(SaccadeError, match="pip install tabpfn"):
        register()


def test_the_registry_runs_it(monkeypatch):
    registry = pytest.importorskip("tabpfn.architectures.shared.attention_backends", exc_type=ImportError)
    from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention

    monkeypatch.setattr(SaccadeBackend, "is_preferred", lambda self, spec: True)
    tensors = [torch.randn(2, 5, 3, 8) for _ in range(3)]
    plain = scaled_dot_product_attention(*tensors, backend=None)
    register()
    register()
    try:
        with registry.recorded_attention_backends() as calls:
            torch.testing.assert_close(scaled_dot_product_attention(*tensors), plain)
        assert [call.name for call in calls] == ["saccade"]
    finally:
        unregister()
    assert "saccade" not in [backend.name for backend in registry.registered_attention_backends()]
