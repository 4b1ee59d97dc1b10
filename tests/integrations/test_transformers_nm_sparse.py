"""attn_implementation "saccade_nm": the same model with its attention pruned N:M."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.integrations import transformers as integration

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _registered():
    integration.register_nm_sparse()
    integration.register_nm_sparse("saccade_nm_1_2", pattern="1:2")


class _Layer(torch.nn.Module):
    is_causal = False


def _bert(attention, tokens=24):
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2,
        max_position_embeddings=tokens, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel._from_config(config, attn_implementation=attention).double().eval()


def _tokens(batch, tokens):
    return torch.randint(2, 60, (batch, tokens), generator=torch.Generator().manual_seed(2))


def _qkv(heads=4, kv_heads=2, tokens=9):
    return (torch.randn(2, h, tokens, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("pattern", ["2:4", "1:2", "1:4"])
def test_the_protocol_reaches_the_operation(pattern):
    query, key, value = _qkv()
    mask = torch.rand(2, 1, 9, 9) < 0.8
    out, weights = integration.nm_sparse_forward(_Layer(), query, key, value, mask, scaling=0.3, pattern=pattern)
    expected = saccade.nm_sparse_attention(query, key, value, mask, scale=0.3, enable_gqa=True, pattern=pattern)
    assert weights is None
    assert torch.equal(out, expected.transpose(1, 2))
    assert out.is_contiguous()
    out, _ = integration.nm_sparse_forward(_Layer(), query, key, value, None, is_causal=True, pattern=pattern)
    expected = saccade.nm_sparse_attention(query, key, value, is_causal=True, enable_gqa=True, pattern=pattern)
    assert torch.equal(out, expected.transpose(1, 2))


@pytest.mark.parametrize("name", ["saccade_nm", "saccade_nm_1_2"])
def test_padding_changes_nothing(name):
    """Rows alone and padded on the right give the same: padding takes no place in a group of keys."""
    model, tokens = _bert(name), _tokens(3, 21)
    lengths = (21, 6, 13)
    mask = (torch.arange(21) < torch.tensor(lengths)[:, None]).long()
    padded = model(tokens, attention_mask=mask).last_hidden_state
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(padded[row, :length], alone)


def test_it_is_another_result_and_close():
    tokens = _tokens(2, 20)
    dense, pruned, half = (_bert(name)(tokens).last_hidden_state for name in ("sdpa", "saccade_nm", "saccade_nm_1_2"))
    cosine = torch.nn.functional.cosine_similarity(dense, pruned, dim=-1)
    assert 0.9 < cosine.min() < 1 - 1e-9
    assert not torch.equal(pruned, half)


def test_it_learns():
    model = _bert("saccade_nm").train()
    model(_tokens(2, 20)).last_hidden_state.square().sum().backward()
    query = model.encoder.layer[0].attention.self.query.weight
    assert query.grad.abs().sum() > 0


def test_dense_keys_reach_the_operation():
    query, key, value = _qkv(tokens=25)
    options = {"dense_first": 4, "dense_recent": 8}
    out, _ = integration.nm_sparse_forward(_Layer(), query, key, value, None, is_causal=True, **options)
    expected = saccade.nm_sparse_attention(query, key, value, is_causal=True, enable_gqa=True, **options)
    assert torch.equal(out, expected.transpose(1, 2))
    integration.register_nm_sparse("saccade_nm_dense", dense_first=8, dense_recent=16)
    tokens = _tokens(1, 24)
    with torch.no_grad():
        # 8 + 16 of 24 keys leave those to prune of which none is among the first or the recent ones
        found = [_bert(name)(tokens).last_hidden_state for name in ("saccade_nm", "saccade_nm_dense", "sdpa")]
    far, near = ((x - found[2]).norm() for x in found[:2])
    assert 0 < near < far


def test_recent_keys_of_queries_without_their_index():
    query, key, value = _qkv(tokens=25)
    with pytest.raises(saccade.UnsupportedProblem, match="dense_recent is 8 for 1 queries and 25 keys"):
        integration.nm_sparse_forward(_Layer(), query[:, :, -1:], key, value, None, dense_recent=8)
    integration.nm_sparse_forward(_Layer(), query[:, :, -1:], key, value, None, dense_first=8)


def test_what_is_refused():
    with pytest.raises(saccade.InvalidArgument, match="dense_first is 3 with a pattern whose groups have 4 keys"):
        integration.register_nm_sparse("saccade_bad", dense_first=3)
    with pytest.raises(saccade.UnsupportedProblem, match="sinks"):
        integration.nm_sparse_forward(_Layer(), *_qkv(), None, s_aux=torch.zeros(4))
    with pytest.raises(saccade.InvalidArgument, match="pattern is '4:2'"):
        integration.register_nm_sparse("saccade_bad", pattern="4:2")
    with pytest.raises(saccade.InvalidArgument, match="backend is 'short'; allowed are 'auto', "):
        integration.register_nm_sparse("saccade_bad", backend="short")
    with pytest.raises(saccade.InvalidArgument, match="name is 'sdpa'"):
        integration.register_nm_sparse("sdpa")
