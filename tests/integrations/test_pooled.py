"""`cls_only` on tiny random models: the pooled output and every gradient are those of the unchanged model."""

import copy
import pickle

import pytest
import torch
from torch import nn

import saccade
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.integrations import pooled_layers
from saccade.integrations import transformers as integration
from saccade.integrations.pooled import cls_only

transformers = pytest.importorskip("transformers")

TEXT = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "Ernie", "Data2VecText")
BATCH, TOKENS, END = 3, 9, 50


@pytest.fixture(scope="module", autouse=True)
def _registered():
    integration.register()


def text_config(name, **more):
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
    extra = {"embedding_size": 16} if name == "Electra" else {}
    settings = {**sizes, **quiet, "max_position_embeddings": 40, "pad_token_id": 1, **extra, **more}
    return getattr(transformers, f"{name}Config")(**settings)


def vision_config(name, **more):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "initializer_range": 0.2,
    }
    quiet = {} if name == "CLIPVision" else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    extra = {"projection_dim": 16} if name == "CLIPVision" else {}
    return getattr(transformers, f"{name}Config")(image_size=12, patch_size=4, **{**sizes, **quiet, **extra, **more})


def clip_text_config(**more):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 60}
    ids = {"eos_token_id": END, "bos_token_id": 49, "pad_token_id": 0}
    return transformers.CLIPTextConfig(**{**sizes, **ids, "max_position_embeddings": 16, "projection_dim": 16, **more})


def make(name, config, attention="sdpa"):
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, attn_implementation=attention).eval()


def texts(padded=True):
    ids = torch.randint(4, 49, (BATCH, TOKENS))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
        mask[2, :3] = 0  # on the left too: the first token is then one that no token sees
    return {"input_ids": ids, "attention_mask": mask}


def captions(padded=True):
    """Ends in the middle, a second end token behind one of them, padding behind another, and an id above that of the end."""
    found = texts(padded=False)
    found["input_ids"][0, 2] = END + 5
    found["input_ids"][0, -1] = found["input_ids"][1, 4] = found["input_ids"][2, 3] = found["input_ids"][2, 6] = END
    if padded:
        found["attention_mask"][1, 5:] = 0
        return found
    return {"input_ids": found["input_ids"]}


def images():
    return {"pixel_values": torch.randn(BATCH, 3, 12, 12)}


def gradients(model, out):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    model.zero_grad()
    (out * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def pooled_of(model, inputs, read):
    out = read(model(**inputs))
    return out.detach(), gradients(model, out)


def check(model, inputs, read=lambda out: out.pooler_output):
    """The pooled output and the gradients, under the handle and after it, against the unchanged model."""
    expected, expected_gradients = pooled_of(model, inputs, read)
    with cls_only(model) as handle:
        found, found_gradients = pooled_of(model, inputs, read)
    again, _ = pooled_of(model, inputs, read)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(again, expected)
    # the whole layer gives zeros where the other tokens' share of it is not read, never a missing gradient
    assert found_gradients.keys() == expected_gradients.keys()
    for name, want in expected_gradients.items():
        torch.testing.assert_close(
            found_gradients[name], want, rtol=1e-4, atol=1e-5 * max(1.0, want.abs().max().item()), msg=name
        )
    return handle


# --- the same output and gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa", "saccade"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["Bert", "XLMRoberta"])
def test_text_encoders(name, padded, attention):
    check(make(f"{name}Model", text_config(name), attention), texts(padded))


@pytest.mark.parametrize("name", TEXT)
def test_text_classifiers(name):
    check(make(f"{name}ForSequenceClassification", text_config(name, num_labels=3)), texts(), lambda out: out.logits)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_multiple_choice(name):
    inputs = {key: value.view(1, BATCH, TOKENS) for key, value in texts().items()}
    check(make(f"{name}ForMultipleChoice", text_config(name)), inputs, lambda out: out.logits)


def test_next_sentence():
    check(make("BertForNextSentencePrediction", text_config("Bert")), texts(), lambda out: out.logits)


def test_an_encoder_without_pooler():
    model = transformers.ElectraModel._from_config(text_config("Electra"), attn_implementation="sdpa").eval()
    check(model, texts(), lambda out: out.last_hidden_state[:, 0])


def test_a_feed_forward_in_chunks():
    check(make("BertModel", text_config("Bert", chunk_size_feed_forward=3)), texts())


@pytest.mark.parametrize("attention", ["eager", "sdpa", "saccade"])
@pytest.mark.parametrize("name", ["ViT", "DeiT", "CLIPVision"])
def test_vision_encoders(name, attention):
    check(make(f"{name}Model", vision_config(name), attention), images())


@pytest.mark.parametrize("name", ["ViT", "DeiT"])
def test_image_classifiers(name):
    check(make(f"{name}ForImageClassification", vision_config(name, num_labels=3)), images(), lambda out: out.logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "saccade"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("end", [END, 2])  # 2 means the highest id
def test_end_token_of_clip(end, padded, attention):
    check(make("CLIPTextModel", clip_text_config(eos_token_id=end), attention), captions(padded))


def test_another_norm_behind_clips_layers_stays_as_it_is():
    class Doubled(nn.LayerNorm):
        def forward(self, input):
            return 2 * super().forward(input)

    model = make("CLIPTextModel", clip_text_config())
    next(module for module in model.modules() if hasattr(module, "final_layer_norm")).final_layer_norm = Doubled(32)
    check(model, captions())


def test_clip_with_projections():
    vision = make("CLIPVisionModelWithProjection", vision_config("CLIPVision"))
    text = make("CLIPTextModelWithProjection", clip_text_config())
    check(vision, images(), lambda out: out.image_embeds)
    check(text, captions(), lambda out: out.text_embeds)


def test_both_towers_of_clip():
    towers = {"text_config": clip_text_config().to_dict(), "vision_config": vision_config("CLIPVision").to_dict()}
    model = make("CLIPModel", transformers.CLIPConfig(**towers, projection_dim=16))
    handle = check(model, {**captions(), **images()}, lambda out: torch.cat([out.image_embeds, out.text_embeds]))
    assert handle.layers == ("text_model.encoder.layers.1", "vision_model.encoder.layers.1")
    expected = model.get_text_features(**captions()).pooler_output.shape
    with cls_only(model):
        assert model.get_text_features(**captions()).pooler_output.shape == expected


@pytest.mark.parametrize("name", ["Bert", "CLIPText"])
def test_gradient_checkpointing_runs_the_layer_again(name):
    config = text_config("Bert") if name == "Bert" else clip_text_config()
    inputs, later = (texts(), texts()) if name == "Bert" else (captions(), captions(padded=False))
    model = make(f"{name}Model", config)
    expected, wanted = pooled_of(model, inputs, lambda out: out.pooler_output)
    model.gradient_checkpointing_enable()
    model.train()  # checkpointing is for training alone; these configurations drop nothing
    with cls_only(model):
        out = model(**inputs).pooler_output
        later["input_ids"] = later["input_ids"].roll(1, 1)
        model(**later)  # another call before backward: its end tokens must not be taken
        found = gradients(model, out)
    torch.testing.assert_close(out.detach(), expected, rtol=1e-5, atol=2e-6)
    for key, want in wanted.items():
        torch.testing.assert_close(found[key], want, rtol=1e-4, atol=1e-5 * max(1.0, want.abs().max().item()), msg=key)


# --- what is computed, and what comes back


@pytest.mark.parametrize("name", ["Bert", "ViT", "CLIPVision", "CLIPText"])
def test_one_token_leaves_the_last_layer(name):
    text = name in ("Bert", "CLIPText")
    config = text_config(name) if name == "Bert" else clip_text_config() if text else vision_config(name)
    inputs = texts() if name == "Bert" else captions() if text else images()
    model = make(f"{name}Model", config)
    whole = model(**inputs)
    seen = {}
    linears = {part.split(".1.")[1]: m for part, m in model.named_modules() if isinstance(m, nn.Linear) and ".1." in part}
    for part, linear in linears.items():
        linear.register_forward_hook(lambda m, args, out, part=part: seen.__setitem__(part, args[0].shape[1]))
    with cls_only(model):
        out = model(**inputs)
        pair = model(**inputs, return_dict=False)
    assert out.last_hidden_state.shape == (BATCH, 1, 32)
    at = torch.tensor([8, 4, 3]) if name == "CLIPText" else torch.zeros(BATCH, dtype=torch.long)
    torch.testing.assert_close(
        out.last_hidden_state[:, 0], whole.last_hidden_state[torch.arange(BATCH), at], rtol=1e-5, atol=2e-6
    )
    assert torch.equal(pair[0], out.last_hidden_state)
    assert torch.equal(pair[1], out.pooler_output)
    assert len(seen) == 6
    keys_and_values = {part for part, tokens in seen.items() if tokens > 1}
    assert {part.rpartition(".")[2].split("_")[0] for part in keys_and_values} in ({"key", "value"}, {"k", "v"})
    with pytest.raises(IndexError):
        out.last_hidden_state[:, 1]


def test_our_attention_gets_one_query(monkeypatch):
    shapes = []

    def attention(query, *rest, **options):
        shapes.append(query.shape[2])
        return saccade.attention(query, *rest, **options)

    monkeypatch.setattr(integration, "attention", attention)
    model = make("BertModel", text_config("Bert"), "saccade")
    with cls_only(model):
        model(**texts())
    model(**texts())
    assert shapes == [TOKENS, 1, TOKENS, TOKENS]


def test_saved_share():
    handle = cls_only(make("BertModel", text_config("Bert")))
    # 4 matrices of 32 x 32, of which 2 for keys and values, 2 of 32 x 48, and two products of 32 numbers for each pair of tokens
    before, after = 9 * (4 * 1024 + 2 * 1536) + 2 * 81 * 32, 9 * 2 * 1024 + (2 * 1024 + 2 * 1536) + 2 * 9 * 32
    assert handle.saved(9) == {"encoder.layer.1": pytest.approx(1 - after / before)}
    assert handle.saved(1) == {"encoder.layer.1": 0.0}
    assert f"{handle.saved(128)['encoder.layer.1']:.0%}" in repr(handle)
    for tokens in (0, True, 1.5, "9"):
        with pytest.raises(InvalidArgument, match=f"tokens is {tokens!r}; it must be a whole number"):
            handle.saved(tokens)
    handle.restore()
    assert "restored" in repr(handle)


def test_dropout_keeps_its_distribution():
    config = text_config("Bert", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    model = make("BertModel", config).train()
    inputs = {name: x[:1].expand(4000, -1) for name, x in texts().items()}

    def moments():
        out = model(**inputs).last_hidden_state[:, 0]
        return out.mean(0), out.std(0)

    with torch.no_grad():
        mean, deviation = moments()
        with cls_only(model):
            found_mean, found_deviation = moments()
        model.eval()
        fixed = model(**inputs).last_hidden_state[0, 0]
        with cls_only(model):
            found = model(**{name: x[:1] for name, x in inputs.items()}).last_hidden_state[0, 0]
        torch.testing.assert_close(found, fixed)  # none outside of training
    assert not torch.allclose(found_mean, fixed, atol=0.05)  # it does drop
    # the standard error of a mean of 4,000 draws is a sixty-third of the deviation, sqrt(2) of that for a difference of two
    assert ((found_mean - mean).abs() < 5 * 1.42 * deviation / 63).all()
    torch.testing.assert_close(found_deviation, deviation, rtol=0.08, atol=0)


def test_dropout_of_a_vision_layer_is_behind_each_half():
    model, seen = make("ViTModel", vision_config("ViT")), []
    model.layers[-1].dropout.register_forward_hook(lambda module, given, out: seen.append(out.shape[:2]))
    with cls_only(model):
        model(**images())
    assert seen == [(BATCH, 1), (BATCH, 1)]


@pytest.mark.unpoisoned
def test_compiled_without_a_break():
    model = make("BertModel", text_config("Bert"), "saccade")
    inputs = texts(padded=False)
    expected = model(**inputs).pooler_output
    with cls_only(model):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs).pooler_output, expected, rtol=1e-5, atol=2e-6)


# --- the handle


def test_restored_by_the_handle_and_after_exceptions():
    model = make("BertModel", text_config("Bert"))
    kinds, names = [type(m) for m in model.modules()], list(model.state_dict())
    handle = cls_only(model)
    assert handle.active
    assert list(model.state_dict()) == names
    assert "PooledBertLayer" in str(model)
    with pytest.raises(SaccadeError, match="already"):
        cls_only(model)
    handle.restore()
    handle.restore()
    assert not handle.active
    assert [type(m) for m in model.modules()] == kinds
    assert not model._forward_pre_hooks
    with pytest.raises(SaccadeError, match="was restored"), handle:
        pass
    with pytest.raises(ZeroDivisionError), cls_only(model):
        raise ZeroDivisionError
    assert [type(m) for m in model.modules()] == kinds


def test_nothing_is_restored_over_a_foreign_change():
    model = make("BertModel", text_config("Bert"))
    handle = cls_only(model)
    layer = model.encoder.layer[-1]
    ours = type(layer)
    layer.__class__ = type("Foreign", (ours,), {})
    with pytest.raises(SaccadeError, match="is a Foreign by now"):
        handle.restore()
    assert handle.active
    layer.__class__ = ours
    handle.restore()


def test_a_deep_copy_has_its_own_weights():
    model = make("BertModel", text_config("Bert"))
    inputs = texts()
    with cls_only(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.encoder.layer[-1].parameters():
                p.mul_(2)
        assert twin(**inputs).last_hidden_state.shape[1] == 1
        assert not torch.allclose(twin(**inputs).pooler_output, model(**inputs).pooler_output)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(model)


# --- refused


@pytest.mark.parametrize(
    "name", ["BertForTokenClassification", "BertForMaskedLM", "BertForQuestionAnswering", "ElectraForMultipleChoice"]
)
def test_models_that_read_other_tokens_are_refused(name):
    model = make(name, text_config("Electra" if "Electra" in name else "Bert"))
    with pytest.raises(UnsupportedProblem, match=f"{name} reads other tokens"):
        cls_only(model)


@pytest.mark.parametrize("base", ["BertModel", "BertForSequenceClassification"])
def test_a_model_of_another_library_is_not_known_by_its_name(base):
    model = make(base, text_config("Bert"))
    model.__class__ = type(base, (type(model),), {})  # whose forward may read what it likes
    with pytest.raises(UnsupportedProblem, match=f"{base} reads other tokens than the pooled one, or is not known"):
        cls_only(model)


def test_other_refusals():
    towers = {"text_config": clip_text_config().to_dict(), "vision_config": vision_config("CLIPVision").to_dict()}
    with pytest.raises(UnsupportedProblem, match="CLIPForImageClassification reads other tokens"):  # it takes the mean
        cls_only(make("CLIPForImageClassification", transformers.CLIPConfig(**towers)))
    with pytest.raises(UnsupportedProblem, match="is a decoder"):
        cls_only(make("BertModel", text_config("Bert", is_decoder=True)))
    with pytest.raises(UnsupportedProblem, match="Sequential"):
        cls_only(nn.Sequential(make("BertModel", text_config("Bert"))))
    with pytest.raises(UnsupportedProblem, match="has no layers"):
        cls_only(make("BertModel", text_config("Bert", num_hidden_layers=0)))


def test_a_layer_of_another_structure_is_refused():
    model = make("BertModel", text_config("Bert"))
    model.encoder.layer[-1].attention.extra = nn.Identity()
    with pytest.raises(UnsupportedProblem, match=r"part 'attention' consists of \['extra', 'output', 'self'\]"):
        cls_only(model)
    assert "Pooled" not in str(model)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_all_tokens_are_refused(name):
    model = make("BertForSequenceClassification", text_config("Bert"), "eager")
    with cls_only(model):
        with pytest.raises(UnsupportedProblem, match=name):
            model(**texts(), **{name: True})
        setattr(model.config, name, True)
        with pytest.raises(UnsupportedProblem, match=name):
            model(**texts())


def test_calls_that_one_query_cannot_serve_are_refused():
    model = make("BertModel", text_config("Bert"))
    with cls_only(model):
        with pytest.raises(UnsupportedProblem, match="packed into one row"):
            model(**texts(padded=False), cu_seq_lens_q=torch.tensor([0, 4, 9]))
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(UnsupportedProblem, match="'flex_attention'"):
            model.encoder.layer[-1](torch.randn(BATCH, TOKENS, 32))
        with pytest.raises(UnsupportedProblem, match="4 dimensions"):
            pooled_layers.mask_row(torch.ones(BATCH, TOKENS), None, TOKENS, torch.ones(1), additive=False)
