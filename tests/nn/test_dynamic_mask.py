"""The module: its definition, Doge's weights, and which parameters get gradients."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.nn.dynamic_mask import DynamicMaskAttention


def module(**options):
    torch.manual_seed(0)
    layer = DynamicMaskAttention(32, 4, 2, **{"keep": 6, **options})
    with torch.no_grad():
        layer.A.copy_(torch.tensor([-0.7, 0.9]))
    return layer


def test_starts_as_a_sliding_window():
    layer = DynamicMaskAttention(32, 4, 2, keep=5)
    assert torch.equal(layer.scores(torch.randn(1, 20, 16)), torch.ones(1, 2, 20))
    hidden = torch.randn(1, 20, 32)
    changed = hidden.clone()
    changed[:, :10] += 1.0  # out of the window of the last query
    torch.testing.assert_close(layer(hidden)[:, -1], layer(changed)[:, -1])
    changed[:, 15] += 1.0
    assert not torch.allclose(layer(hidden)[:, -1], layer(changed)[:, -1])


@pytest.mark.parametrize("tokens", [6, 40])
def test_doge_s_layer_with_doge_s_weights(tokens):
    doge = pytest.importorskip("transformers.models.doge.modeling_doge")
    from transformers import DogeConfig

    config = DogeConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, keep_window_size=6, attn_implementation="eager",
        rms_norm_eps=1e-6,
    )  # fmt: skip
    torch.manual_seed(1)
    theirs = doge.DogeAttention(config, layer_idx=0).eval()
    with torch.no_grad():
        theirs.A.copy_(torch.tensor([-0.7, 0.9]))
    ours = DynamicMaskAttention(32, 4, 2, keep=6)
    ours.load_state_dict(theirs.state_dict())
    hidden = torch.randn(2, tokens, 32)
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = torch.cat((angles, angles), -1).expand(2, tokens, 8)
    rotary = (angles.cos(), angles.sin())
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(2, 1, tokens, tokens)
    expected, _ = theirs(hidden, rotary, causal)
    torch.testing.assert_close(ours(hidden, rotary), expected)


def test_gradients_reach_every_parameter():
    layer = module()
    layer(torch.randn(2, 30, 32)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_decoding_with_a_cache():
    layer, hidden = module(), torch.randn(2, 25, 32)
    cache = saccade.DynamicMaskCache(6)
    with torch.no_grad():
        pieces = [layer(hidden[:, :10], cache=cache)] + [layer(hidden[:, i : i + 1], cache=cache) for i in range(10, 25)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(hidden), rtol=1e-5, atol=1e-6)


def test_the_linear_form_keeps_the_same_keys_with_other_weights():
    values = torch.randn(1, 30, 16)
    first, second = module(), module(form="linear")
    a, b = first.scores(values), second.scores(values)
    torch.testing.assert_close(a, b.exp())
    assert torch.equal(saccade.expiry(a.detach(), 6), saccade.expiry(b.detach(), 6))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads, 4"),
        ({"num_heads": 0, "head_dim": 8}, "num_heads is 0; it must be a whole number, at least 1"),
        ({"head_dim": 0}, "head_dim is 0; it must be a whole number, at least 1"),
        ({"form": "relu"}, "form is 'relu'; allowed are 'exp', 'linear'"),
        ({"keep": 0}, "keep is 0"),
    ],
)
def test_bad_arguments(options, sentence):
    with pytest.raises(saccade.InvalidArgument, match=sentence):
        DynamicMaskAttention(**{"embed_dim": 32, "num_heads": 4, "keep": 4, **options})


@pytest.mark.parametrize("frozen", [(), ("k_proj", "k_norm"), ("A", "dt_proj", "v_proj")], ids=str)
def test_a_cache_refuses_what_needs_a_gradient(frozen):
    layer, hidden = module(), torch.randn(2, 5, 32)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    with pytest.raises(saccade.UnsupportedProblem, match="the contents of a cache get none"):
        layer(hidden, cache=saccade.DynamicMaskCache(6))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith(("q_", "o_")))
    layer(hidden, cache=saccade.DynamicMaskCache(6)).sum().backward()  # with a cache, queries still get gradients
    assert layer.q_proj.weight.grad.abs().sum() > 0


def test_a_cache_of_another_keep_is_refused():
    with pytest.raises(
        saccade.InvalidArgument, match=r"are \(5, 0, 0\) in the cache and \(6, 0, 0\) in this module; they must agree"
    ):
        module()(torch.randn(1, 3, 32), cache=saccade.DynamicMaskCache(5))


def test_sinks_and_a_window_reach_the_cache():
    """A layer over the whole sequence, and the same token by token."""
    torch.manual_seed(0)
    layer = DynamicMaskAttention(32, 4, 2, keep=3, sinks=2, window=4).double()
    torch.nn.init.normal_(layer.A)
    hidden = torch.randn(2, 20, 32, dtype=torch.float64)
    cache = saccade.DynamicMaskCache(3, sinks=2, window=4)
    with torch.no_grad():
        expected = layer(hidden)
        found = torch.cat([layer(hidden[:, i : i + 1], cache=cache) for i in range(20)], dim=1)
        plain = DynamicMaskAttention(32, 4, 2, keep=3).double()
        plain.load_state_dict(layer.state_dict())
        assert not torch.allclose(plain(hidden), expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # scores are float32


def test_bad_inputs():
    angles = torch.ones(5, 3)
    with pytest.raises(saccade.InvalidArgument, match="with head_dim 3; rotary embedding pairs halves, so it must be even"):
        DynamicMaskAttention(32, 4, head_dim=3, keep=4)(torch.randn(2, 5, 32), (angles, angles))
    with pytest.raises(saccade.InvalidArgument, match=r"hidden has shape \[2, 5, 31\]; it must be \[B, S, 32\]"):
        module()(torch.randn(2, 5, 31))
    with pytest.raises(saccade.InvalidArgument, match="a cache holds one document per row"):
        module()(torch.randn(1, 5, 32), cache=saccade.DynamicMaskCache(4), document_ids=torch.zeros(1, 5, dtype=torch.int64))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_rotary_embeddings_of_float32_serve_a_layer_of_16_bits(autocast, cached):
    layer, hidden, angles = (
        module(keep=20),
        torch.randn(2, 20, 32),
        torch.rand(20, 8),
    )  # all kept: scores of 16 bits rank other keys
    rotary, cache = (angles.cos(), angles.sin()), saccade.DynamicMaskCache(20) if cached else None
    with torch.no_grad():
        expected = layer(hidden, rotary)
        if not autocast:
            layer, hidden = layer.bfloat16(), hidden.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = layer(hidden, rotary, cache=cache)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_padding_may_hold_anything():
    layer = saccade.nn.DynamicMaskAttention(32, 4, keep=4)
    clean, lengths = torch.randn(2, 9, 32), torch.tensor([9, 5])
    dirty = clean.clone()
    dirty[1, 5:] = float("nan")
    expected, found = layer(clean, lengths=lengths), layer(dirty, lengths=lengths)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1, :5], expected[1, :5])
