"""The relative bias of T5's layers: one for all batch rows, beside a mask of padding, with its gradient."""

from __future__ import annotations

import copy

import pytest
import torch

import saccade
from saccade.integrations import transformers as integration

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MODELS = [("T5EncoderModel", "T5Config"), ("UMT5EncoderModel", "UMT5Config")]


@pytest.fixture
def named():
    with integration.register("saccade_bias"):
        yield "saccade_bias"


def pair(model, config, name):
    torch.manual_seed(0)
    config = getattr(transformers, config)(**SIZES)
    theirs = getattr(transformers, model)._from_config(copy.deepcopy(config), attn_implementation="eager").double()
    ours = getattr(transformers, model)._from_config(config, attn_implementation=name).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.fixture
def seen(monkeypatch):
    """The bias and the mask of keys of each call of `attention`."""
    calls = []

    def attention(*given, **options):
        calls.append((given[3], options["key_mask"]))
        return saccade.attention(*given, **options)

    monkeypatch.setattr(integration, "attention", attention)
    return calls


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("model", "config"), MODELS)
def test_outputs_and_gradients_are_those_of_eager(model, config, padded, named, seen):
    ours, theirs = pair(model, config, named)
    tokens = torch.randint(2, 60, (3, 11))
    mask = torch.arange(11) < torch.tensor([11, 4, 7])[:, None] if padded else torch.ones(3, 11, dtype=torch.bool)
    gradients = []
    for network in (ours, theirs):
        out = network(input_ids=tokens, attention_mask=mask.long()).last_hidden_state[mask]
        gradients.append((out, *torch.autograd.grad(out.square().sum(), list(network.parameters()))))
    for x, want in zip(*gradients, strict=True):
        torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-8)
    assert any("relative_attention_bias" in name for name, _ in ours.named_parameters())
    for bias, keys in seen:
        assert bias.shape == (1, 4, 11, 11), "batch rows share it"
        assert (keys is not None) == padded
    assert len(seen) == 2


def test_a_decoder_takes_its_causal_mask_into_the_bias(named, seen):
    """A mask that differs by query is no mask of keys."""
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES, decoder_start_token_id=0)
    theirs = transformers.T5ForConditionalGeneration._from_config(copy.deepcopy(config), attn_implementation="eager").double()
    ours = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=named).double()
    ours.load_state_dict(theirs.state_dict())
    tokens, mask = torch.randint(2, 60, (2, 9)), torch.arange(9) < torch.tensor([9, 5])[:, None]
    given = {"input_ids": tokens, "attention_mask": mask.long(), "decoder_input_ids": torch.randint(2, 60, (2, 6))}
    torch.testing.assert_close(ours(**given).logits, theirs(**given).logits)
    assert [keys is not None for _, keys in seen] == [True, True, False, True, False, True]


@pytest.mark.parametrize("backend", ["shared_bias", "ragged", "sdpa"])
def test_any_backend_takes_the_call(backend):
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 4, 20, 8) for _ in range(3))
    bias, mask = torch.randn(1, 4, 20, 20), (torch.rand(2, 20) < 0.7)
    mask[:, 0] = True
    layer = torch.nn.Module()
    layer.is_causal = False
    found, _ = integration.attention_forward(
        layer, query, key, value, mask[:, None, None, :], position_bias=bias, scaling=1.0, backend=backend
    )
    scores = (query @ key.mT + bias).masked_fill(~mask[:, None, None, :], -torch.inf)
    torch.testing.assert_close(found, (torch.softmax(scores, -1) @ value).transpose(1, 2), rtol=1e-4, atol=1e-5)
