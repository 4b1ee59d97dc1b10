"""Tiny random models with attn_implementation "saccade" against "sdpa", forward and backward."""

import copy
import logging
import subprocess
import sys

import pytest
import torch

import saccade
from saccade.integrations import mask_forms
from saccade.integrations import transformers as integration

transformers = pytest.importorskip("transformers")

WIDTH, HIDDEN, HEADS, LAYERS = 32, 48, 4, 2


@pytest.fixture(scope="module", autouse=True)
def _registered():
    saccade.integrations.transformers.register()


def _bert(**more):
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=LAYERS,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more,
    )  # fmt: skip
    return transformers.BertModel, config


def _llama(kind="Llama", **more):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=60, hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2,
        num_hidden_layers=LAYERS, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM"), config


def _pair(model_class, config, dtype=torch.float64):
    torch.manual_seed(0)
    # a copy, as models that share a config share its attention
    theirs = model_class._from_config(copy.deepcopy(config), attn_implementation="sdpa").to(dtype).eval()
    ours = model_class._from_config(config, attn_implementation="saccade").to(dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    assert (ours.config._attn_implementation, theirs.config._attn_implementation) == ("saccade", "sdpa")
    return ours, theirs


def _tokens(batch=3, tokens=9):
    return torch.randint(2, 60, (batch, tokens), generator=torch.Generator().manual_seed(2))


def _padding(side, lengths=(9, 1, 5), tokens=9):
    position, lengths = torch.arange(tokens), torch.tensor(lengths)[:, None]
    return (position < lengths if side == "right" else position >= tokens - lengths).long()


def _compare(ours, theirs, real=None, **inputs):
    """Outputs at real tokens, and gradients of every parameter from a loss over them."""
    gradients = []
    for model in (ours, theirs):
        out = model(**inputs)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        out = out if real is None else out[real.bool()]
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        gradients.append((out, *torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_bert_padded():
    ours, theirs = _pair(*_bert())
    mask = _padding("right")
    _compare(ours, theirs, mask, input_ids=_tokens(), attention_mask=mask)


def test_bert_without_padding():
    _compare(*_pair(*_bert()), input_ids=_tokens())


def test_bert_as_decoder_with_cross_attention():
    model_class, config = _bert(is_decoder=True, add_cross_attention=True)
    ours, theirs = _pair(model_class, config)
    memory = torch.randn(3, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = _padding("right", (6, 2, 4), 6)
    _compare(ours, theirs, input_ids=_tokens(), encoder_hidden_states=memory, encoder_attention_mask=seen)


def test_bert_padding_would_matter():
    """The test above means something only if the mask reaches the kernel."""
    model = _pair(*_bert())[0]
    mask = _padding("right")
    with_mask, without = (model(_tokens(), attention_mask=m).last_hidden_state[mask.bool()] for m in (mask, None))
    assert (with_mask - without).abs().max() > 1e-3


def test_bert_own_4d_mask():
    ours, theirs = _pair(*_bert())
    mask = torch.rand(3, 1, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    _compare(ours, theirs, input_ids=_tokens(), attention_mask=mask)
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    _compare(ours, theirs, input_ids=_tokens(), attention_mask=additive)


def test_vit():
    config = transformers.ViTConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=LAYERS, image_size=16,
        patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _compare(*_pair(transformers.ViTModel, config), pixel_values=images)


def test_t5_position_bias():
    config = transformers.T5Config(
        vocab_size=60, d_model=WIDTH, d_kv=8, d_ff=HIDDEN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    if not getattr(transformers.T5ForConditionalGeneration, "_supports_sdpa", False):
        pytest.skip("this release of transformers runs T5 in eager mode only")
    ours, theirs = _pair(transformers.T5ForConditionalGeneration, config)
    mask = _padding("right", (9, 3, 5))
    _compare(ours, theirs, input_ids=_tokens(), attention_mask=mask, decoder_input_ids=_tokens(3, 5))


@pytest.mark.parametrize("side", ["left", "right"])
def test_llama_grouped_heads_padded(side):
    mask = _padding(side, (9, 2, 5))
    _compare(*_pair(*_llama()), mask, input_ids=_tokens(), attention_mask=mask)


def test_llama_without_padding_is_causal():
    ours, theirs = _pair(*_llama())
    _compare(ours, theirs, input_ids=_tokens())
    changed = _tokens()
    changed[:, -1] = 3
    torch.testing.assert_close(ours(changed).logits[:, :-1], ours(_tokens()).logits[:, :-1])


@pytest.mark.parametrize("cache", [None, "static"])
def test_llama_generates_the_same_tokens(cache):
    ours, theirs = _pair(*_llama())
    arguments = {
        "attention_mask": _padding("left", (9, 2, 5)),
        "max_new_tokens": 5,
        "do_sample": False,
        "cache_implementation": cache,
    }
    assert torch.equal(ours.generate(_tokens(), **arguments), theirs.generate(_tokens(), **arguments))


@pytest.mark.parametrize("tokens", [4, 9])
def test_mistral_sliding_window_is_in_the_mask(tokens):
    _compare(*_pair(*_llama("Mistral", sliding_window=5, head_dim=8)), input_ids=_tokens(tokens=tokens))


def test_packed_sequences_are_kept_apart():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    # transformers itself reads them only if there is no cache
    _compare(*_pair(*_llama()), input_ids=_tokens(1), position_ids=positions, use_cache=False)


def test_an_encoder_takes_the_batches_of_the_flattening_collator():
    """One row of packed sequences, without a mask, gives what each sequence gives by itself; gradients too."""
    sequences = [torch.randint(2, 60, (n,)).tolist() for n in (5, 1, 9, 3)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": tokens} for tokens in sequences])
    del batch["labels"]
    model = _pair(*_bert())[1]
    model.set_attn_implementation("saccade")
    packed = model(**batch).last_hidden_state[0]
    alone = torch.cat([model(torch.tensor([tokens])).last_hidden_state[0] for tokens in sequences])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    weight = next(model.parameters())
    gradients = [torch.autograd.grad(x.square().sum(), weight)[0] for x in (packed, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_packed_sequences_under_autocast():
    """Llama turns queries and keys by positions in float32, beside values in the dtype of autocast."""
    ours, theirs = _pair(*_llama(), dtype=torch.float32)
    batch = {"input_ids": _tokens(1), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "use_cache": False}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, wanted = (model(**batch).logits for model in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_packed_sequences_of_a_causal_layer():
    query, key, value = (x[:1] for x in _qkv())
    ends = torch.tensor([0, 1, 4], dtype=torch.int32)
    out, _ = integration.attention_forward(_Layer(), query, key, value, None, is_causal=True, cu_seq_lens_q=ends, max_length_q=3)
    for a, b in ((0, 1), (1, 4)):
        part = [x[:, :, a:b] for x in (query, key, value)]
        expected = saccade.attention(*part, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[:, a:b], expected.transpose(1, 2))


def test_dropout_in_training_runs_and_follows_the_seed():
    model_class, config = _bert()
    config.attention_probs_dropout_prob = 0.5
    model = _pair(model_class, config, torch.float32)[0].train()
    outs = []
    for _ in range(2):
        torch.manual_seed(0)
        outs.append(model(_tokens()).last_hidden_state)
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], model(_tokens()).last_hidden_state)


def test_set_attn_implementation_on_a_living_model():
    model = _pair(*_bert())[1]
    before = model(_tokens()).last_hidden_state
    model.set_attn_implementation("saccade")
    torch.testing.assert_close(model(_tokens()).last_hidden_state, before)


def test_bert_compiles_without_a_graph_break():
    model = _pair(*_bert())[0]
    inputs = {"input_ids": _tokens(), "attention_mask": _padding("right")}
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).last_hidden_state
    torch.testing.assert_close(out, model(**inputs).last_hidden_state)


def test_gradient_checkpointing_gives_the_same_gradients():
    model_class, config = _bert()
    config.attention_probs_dropout_prob = 0.3
    gradients = []
    for checkpointing in (False, True):
        model = _pair(model_class, config)[0].train()
        if checkpointing:
            # renamed in the course of transformers 5
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        torch.manual_seed(0)
        out = model(_tokens(), attention_mask=_padding("right")).last_hidden_state
        gradients.append(torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True))
    torch.testing.assert_close(*gradients)


class _Layer(torch.nn.Module):
    is_causal = True


def _qkv(q_len=4, kv_len=4, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, h, t, 8, generator=generator) for h, t in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )


def test_result_is_time_first_and_contiguous():
    out, weights = integration.attention_forward(_Layer(), *_qkv(), None)
    assert out.shape == (2, 4, 4, 8)
    assert out.is_contiguous()
    assert weights is None


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])])
def test_position_bias_adds_to_mask_and_causal(mask):
    query, key, value = _qkv(kv_heads=4)
    bias = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    seen = seen if mask is None else seen & mask.bool()[:, None, None, :]
    out, _ = integration.attention_forward(_Layer(), query, key, value, mask, position_bias=bias)
    expected = saccade.attention(query, key, value, torch.where(seen, bias, float("-inf"))).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert bias.grad.isfinite().all()


@pytest.mark.parametrize("forward", [integration.attention_forward, integration.nm_sparse_forward])
def test_key_padding_leaves_a_layer_causal(forward):
    """A mask `[B, Tk]` says which keys are padding, and nothing of windows or of what comes later."""
    query, key, value = _qkv()
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    seen = padding.bool()[:, None, None, :] & torch.ones(4, 4, dtype=torch.bool).tril()
    for given in (None, True, False):
        out, _ = forward(_Layer(), query, key, value, padding, is_causal=given)
        whole, _ = forward(_Layer(), query, key, value, padding.bool()[:, None, None, :] if given is False else seen)
        torch.testing.assert_close(out, whole)
    with pytest.raises(saccade.UnsupportedProblem, match="sliding_window is 2 for 4 keys"):
        forward(_Layer(), query, key, value, padding, sliding_window=2)
    with pytest.raises(saccade.UnsupportedProblem, match="3 queries, 7 keys and no mask for each query"):
        forward(_Layer(), *_qkv(q_len=3, kv_len=7), torch.ones(2, 7))
    one, _ = forward(_Layer(), *_qkv(q_len=1), padding)  # a decoding step sees all keys but padding
    torch.testing.assert_close(one, forward(_Layer(), *_qkv(q_len=1), padding.bool()[:, None, None, :])[0])


def test_more_keys_than_queries_without_a_mask_are_refused():
    """An empty static cache, or the last tokens alone: without a mask it is unknown which keys the first query sees."""
    with pytest.raises(saccade.UnsupportedProblem, match="3 queries, 7 keys and no mask"):
        integration.attention_forward(_Layer(), *_qkv(q_len=3, kv_len=7), None)


def _mask_of(**call):
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    causal = call.pop("causal", False)
    call = {"batch_size": 3, "q_length": 9, "kv_length": 9, "allow_is_bidirectional_skip": not causal, **call}
    return integration.boolean_mask(mask_function=causal_mask_function if causal else bidirectional_mask_function, **call)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_of_an_encoder_is_one_row(side):
    padding = _padding("right", (9, 2, 5)) if side == "holes" else _padding(side, (9, 2, 5))
    if side == "holes":
        padding[:, 1] = 0
    mask = _mask_of(attention_mask=padding.bool())
    assert mask.shape == (3, 1, 9, 9)
    assert mask.stride(2) == 0
    assert mask.untyped_storage().nbytes() == 27
    assert torch.equal(mask, padding.bool()[:, None, None, :].expand(3, 1, 9, 9))
    query, key, value = (torch.randn(3, 4, 9, 8) for _ in range(3))
    out, _ = integration.attention_forward(_Layer(), query, key, value, mask)
    expected = saccade.attention(query, key, value, padding.bool()[:, None, None, :])
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert mask_forms.key_padding(mask).shape == (3, 1, 1, 9)


def test_a_mask_that_hides_nothing_is_no_mask():
    assert _mask_of(attention_mask=torch.ones(3, 9, dtype=torch.bool)) is None
    assert _mask_of() is None


def test_a_causal_mask_stays_whole_where_the_layer_would_not_know():
    assert _mask_of(causal=True) is None
    assert _mask_of(causal=True, attention_mask=_padding("right").bool()).stride(2) != 0
    static = _mask_of(causal=True, q_length=3)  # an empty static cache of 9
    assert torch.equal(static[0, 0], torch.ones(3, 9, dtype=torch.bool).tril())
    config = transformers.PaliGemmaConfig().text_config
    config.use_bidirectional_attention = True  # its layers claim not to be causal
    assert _mask_of(causal=True, config=config) is not None


def test_a_decoder_configured_as_an_encoder_is_one():
    model_class, config = _llama(is_causal=False)
    torch.manual_seed(0)
    theirs = model_class._from_config(config, attn_implementation="eager").double().eval()
    ours = model_class._from_config(config, attn_implementation="saccade").double().eval()
    ours.load_state_dict(theirs.state_dict())
    _compare(ours, theirs, input_ids=_tokens())


def test_77_tokens_causal_and_padded():
    config = transformers.CLIPTextConfig(
        vocab_size=60, hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=LAYERS,
        max_position_embeddings=77, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    mask = _padding("right", (77, 4, 30), 77)
    _compare(*_pair(transformers.CLIPTextModel, config), mask, input_ids=_tokens(tokens=77), attention_mask=mask)


class _Silent(torch.nn.Module):
    """A layer that declares no direction."""

    def __init__(self, **config):
        super().__init__()
        self.config = transformers.PreTrainedConfig()
        for name, value in config.items():
            setattr(self.config, name, value)


def test_an_undeclared_direction_is_read_from_the_config_or_refused():
    query, key, value = _qkv()
    for config in ({"is_causal": True}, {"is_decoder": True}, {"is_causal": False}, {"is_decoder": False}):
        out, _ = integration.attention_forward(_Silent(**config), query, key, value, None)
        causal = next(iter(config.values()))
        expected = saccade.attention(query, key, value, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    # a config that denies it outranks the layer
    denied = _Silent(is_causal=False)
    denied.is_causal = True
    out, _ = integration.attention_forward(denied, query, key, value, None)
    torch.testing.assert_close(out, saccade.attention(query, key, value, enable_gqa=True).transpose(1, 2))
    with pytest.raises(saccade.UnsupportedProblem, match="_Silent and its config say neither is_causal nor is_decoder"):
        integration.attention_forward(_Silent(), query, key, value, None)
    # the mask says it
    integration.attention_forward(_Silent(), query, key, value, torch.ones(2, 1, 4, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"indices": torch.zeros(2, 4, 1)}, "sparse choice of keys"),
        ({"block_indices": torch.zeros(2, 4, 1)}, "sparse choice of blocks"),
        ({"cache": object()}, "paged cache"),
        ({"sliding_window": 3}, "sliding_window is 3 for 4 keys"),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 4])}, "packs 2 sequences into a batch of 2 rows"),
    ],
)
def test_what_would_change_the_result_is_refused(arguments, sentence):
    with pytest.raises(saccade.UnsupportedProblem, match=sentence):
        integration.attention_forward(_Layer(), *_qkv(), None, **arguments)


def test_weights_cannot_be_had(caplog):
    integration.warn_weights.cache_clear()
    with caplog.at_level(logging.WARNING, "saccade"):
        integration.attention_forward(_Layer(), *_qkv(), None, output_attentions=True)
    assert "output_attentions" in caplog.text


def test_register_twice_and_under_a_second_name():
    integration.register()
    integration.register("saccade_reference", backend="reference")
    model = _pair(*_bert())[1]
    before = model(_tokens()).last_hidden_state
    model.set_attn_implementation("saccade_reference")
    torch.testing.assert_close(model(_tokens()).last_hidden_state, before)


def test_a_name_is_given_up():
    method = transformers.PreTrainedModel.get_correct_attn_implementation
    names = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    first, second = integration.register("saccade_once"), integration.register("saccade_once", backend="reference")
    assert repr(first) == "<registration of 'saccade_once': active>"
    assert names["saccade_once"].keywords == {"backend": "reference"}
    second.restore()
    second.restore()
    assert names["saccade_once"].keywords == {"backend": "auto"}
    assert first.active
    assert not second.active
    first.restore()
    assert "saccade_once" not in names
    assert "saccade_once" not in transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    assert not integration.is_registered("saccade_once")
    assert transformers.PreTrainedModel.get_correct_attn_implementation is method  # other names are registered
    with integration.register_nm_sparse("saccade_once") as again:
        assert again.name == "saccade_once"
        assert "saccade_once" in names
    assert "saccade_once" not in names
    with pytest.raises(saccade.SaccadeError, match="'saccade_once' was given up; register it again"):
        again.__enter__()


def test_with_the_last_name_nothing_of_transformers_stays_changed():
    program = """
import saccade, transformers
from transformers import PreTrainedModel
from transformers.models.doge.modeling_doge import DogeAttention
from saccade.integrations import doge, transformers as ours
before = [PreTrainedModel.get_correct_attn_implementation, DogeAttention.forward, DogeAttention.prepare_dynamic_mask]
handles = [ours.register(), ours.register_nm_sparse(), doge.register(), doge.register("saccade_other")]
for handle in handles:
    assert PreTrainedModel.get_correct_attn_implementation is not before[0]
    handle.restore()
assert [PreTrainedModel.get_correct_attn_implementation, DogeAttention.forward, DogeAttention.prepare_dynamic_mask] == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", [3, None, b"x"])
def test_what_is_no_name(name):
    with pytest.raises(saccade.InvalidArgument, match="it must be a str"):
        integration.register(name)


@pytest.mark.parametrize("name", ["sdpa", "eager", "my_flash", "a/b", "", "paged|x"])
def test_names_that_transformers_would_misread(name):
    with pytest.raises(saccade.InvalidArgument, match="name is"):
        integration.register(name)


def test_unknown_backend():
    with pytest.raises(saccade.InvalidArgument, match="backend is 'fast'"):
        integration.register("saccade_fast", backend="fast")


def test_without_transformers_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(integration, "has_package", lambda name: False)
    with pytest.raises(saccade.SaccadeError, match="pip install"):
        integration.register()
