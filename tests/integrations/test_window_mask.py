"""Models with sliding windows: without padding their layers take the window in place of a mask of all pairs of tokens."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy
import pytest
import torch

import saccade
from saccade.exact.backends import BACKENDS
from saccade.exact.problem import describe_attention
from saccade.integrations import transformers as integration
from saccade.integrations import window_mask
from saccade.integrations.window_mask import WindowMask

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "Mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}, [(3, 0)] * 2),
    "Qwen2": (
        "Qwen2ForCausalLM", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, [None, (3, 0)],
    ),
    "Gemma3Text": (
        "Gemma3ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        [(3, 0), None],
    ),
    "EmbeddingGemma": (
        "Gemma3TextModel",
        {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
         "use_bidirectional_attention": True},
        [(3, 3), None],
    ),
    "ModernBert": (
        "ModernBertModel",
        {"global_attn_every_n_layers": 2, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2, "attention_dropout": 0.0},
        [None, (3, 3)],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _registered():
    saccade.integrations.transformers.register()


@pytest.fixture
def windows(monkeypatch):
    """The windows of the calls of `attention`."""
    found, attend = [], integration.attention

    def attention(*given, window=None, **options):
        found.append(window)
        return attend(*given, window=window, **options)

    monkeypatch.setattr(integration, "attention", attention)
    return found


def pair(name):
    kind, more, _ = MODELS[name]
    config = getattr(transformers, "Gemma3TextConfig" if name == "EmbeddingGemma" else f"{name}Config")(**SIZES, **more)
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    theirs = made._from_config(copy.deepcopy(config), attn_implementation="sdpa").double().eval()
    ours = made._from_config(config, attn_implementation="saccade").double().eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tokens(batch=2, length=13):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(2))


def gradients(model, **inputs):
    out = model(**inputs)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, *torch.autograd.grad((out * weights).sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("name", MODELS)
def test_layers_take_the_window(name, windows):
    ours, theirs = pair(name)
    for got, want in zip(*(gradients(model, input_ids=tokens()) for model in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert windows == MODELS[name][2]


@pytest.mark.parametrize("name", MODELS)
def test_padding_takes_the_mask(name, windows):
    ours, theirs = pair(name)
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[0, 9:] = 0
    found, expected = (model(input_ids=tokens(), attention_mask=mask)[0] for model in (ours, theirs))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-9, atol=1e-9)
    assert windows == [None, None]


@pytest.mark.parametrize("name", ["Mistral", "ModernBert"])
def test_a_compiled_model_takes_the_mask(name, windows):
    ours, theirs = pair(name)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    for length in (13, 17):
        torch.testing.assert_close(compiled(tokens(length=length))[0], theirs(tokens(length=length))[0], rtol=1e-9, atol=1e-9)
    assert set(windows) == {None}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Gemma3Text"])
def test_generation_past_the_window(name, cache):
    ours, theirs = pair(name)
    arguments = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(ours.generate(tokens(), **arguments), theirs.generate(tokens(), **arguments))


@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text"])
def test_a_prompt_in_two_parts(name):
    ours, theirs = pair(name)
    outs = []
    for model in (ours, theirs):
        first = model(tokens(length=7), use_cache=True)
        outs.append(model(tokens(length=13)[:, 7:], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


def test_packed_rows_take_the_window(monkeypatch):
    """As an optimised encoder and flash-attn's collator give them: the ends of the sequences beside the mask of the row."""
    ours, theirs = pair("ModernBert")
    row, ends = tokens(1, 20), torch.tensor([0, 12, 20], dtype=torch.int32)
    positions = torch.tensor([[*range(12), *range(8)]])
    found, attend = [], integration.attend_packed

    def attend_packed(call, qkv):
        found.append(call[-3])
        return attend(call, qkv)

    monkeypatch.setattr(integration, "attend_packed", attend_packed)
    forward = ours.layers[0].attn.__class__.forward

    def with_ends(self, *given, **options):
        return forward(self, *given, **options, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=12, max_length_k=12)

    monkeypatch.setattr(ours.layers[0].attn.__class__, "forward", with_ends)
    out = ours(row, position_ids=positions)[0][0]
    monkeypatch.undo()
    expected = [theirs(part)[0][0] for part in (row[:, :12], row[:, 12:])]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-9, atol=1e-9)
    assert found == [None, (3, 3)]


def test_the_mask_is_formed_for_whoever_computes_with_it():
    mask = WindowMask(2, 5, (1, 0), torch.device("cpu"))
    places = torch.arange(5)
    ahead = places - places[:, None]
    expected = ((ahead <= 0) & (ahead >= -1)).expand(2, 1, 5, 5)
    query = torch.zeros(2, 1, 5, 4)
    assert mask.holds_for(query, query)
    assert not mask.holds_for(query, query[:, :, :3])
    assert copy.deepcopy(mask).window == (1, 0)
    assert torch.equal(mask & True, expected)
    assert not mask.holds_for(query, query)
    assert torch.equal(copy.deepcopy(mask).formed(), expected)
    mask[:, :, 0] = False
    assert not copy.deepcopy(mask)[:, :, 0].any()


def test_functions_that_are_windows_alone():
    code = transformers.masking_utils
    causal, both = code.sliding_window_causal_mask_function(3), code.sliding_window_bidirectional_mask_function(3)
    assert window_mask.window_of(causal) == (2, 0)
    assert window_mask.window_of(both) == (3, 3)
    for other in (
        code.causal_mask_function,
        code.and_masks(causal, both),
        code.sliding_window_overlay(3),
        code.or_masks(causal, both),
    ):
        assert window_mask.window_of(other) is None
    places = {"batch_size": 1, "q_offset": 0, "kv_offset": 0, "device": "cpu"}
    assert window_mask.window_mask(causal, None, 9, 9, places) is not None
    assert window_mask.window_mask(causal, None, 9, 12, places) is None
    assert window_mask.window_mask(causal, None, 1, 1, places) is None
    assert window_mask.window_mask(causal, torch.ones(1, 9), 9, 9, places) is None
    assert window_mask.window_mask(causal, None, 9, 9, places | {"kv_offset": 3}) is None
    assert window_mask.window_of(code.sliding_window_causal_mask_function(0)) is None


def test_both_parts_of_gemma_s_window_have_one_width():
    from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay as overlay

    code = transformers.masking_utils
    of = lambda left, right: code.or_masks(code.sliding_window_causal_mask_function(left), overlay(right))  # noqa: E731
    assert [window_mask.window_of(of(6, right)) for right in (5, 6, 7)] == [None, (5, 5), None]


def test_packed_rows_whose_windows_are_not_those_of_the_row():
    one, two = (torch.zeros(rows, 1, 5, 4) for rows in (1, 2))
    mask, masks = (WindowMask(rows, 5, (1, 0), torch.device("cpu")) for rows in (1, 2))
    ends, others = (torch.tensor([0, x, 5]) for x in (2, 3))
    assert window_mask.window_for(mask, one, one, ends, None) == window_mask.window_for(mask, one, one, ends, ends) == (1, 0)
    assert window_mask.window_for(mask, one, one, ends, others) is None
    assert window_mask.window_for(masks, two, two, ends, ends) is None
    assert window_mask.window_for(masks, two, two, None, None) == (1, 0)


@pytest.mark.parametrize("backend", ["auto", *(known.name for known in BACKENDS)])
def test_backends_by_name_get_the_window_if_they_take_windows(monkeypatch, backend):
    """Formed for a backend that knows windows, the mask of 16,384 tokens would be 256 MiB."""
    seen = []
    monkeypatch.setattr(integration, "attention", lambda query, *given, **options: (seen.append((given[2], options)), query)[1])
    query = torch.zeros(1, 2, 5, 16)
    mask = WindowMask(1, 5, (2, 0), query.device)
    integration.attention_forward(torch.nn.Module(), query, query, query, mask, is_causal=True, backend=backend)
    ((added, options),) = seen
    problem = describe_attention(query, query, query, None, 0.0, False, None, False, None, False, False, False, (2, 0))
    on_any_gpu = [replace(problem, dtype=torch.float16, device_type="cuda", arch=arch) for arch in (70, 90)]
    known = [known for known in BACKENDS if backend in ("auto", known.name)]
    refused = [[reason for reason in b.why_not(on) if "takes no sliding window" in reason] for b in known for on in on_any_gpu]
    if all(refused):
        assert options["window"] is None
        assert added.equal(mask.formed())
    else:
        assert options["window"] == (2, 0)
        assert added is None


@pytest.mark.parametrize("rows", [1, 3])
def test_the_mask_has_the_strides_that_it_says(rows):
    """Views, writes in place and printing rely on them."""
    window = (2, 1)
    made = [WindowMask(rows, 5, window, torch.device("cpu")) for _ in range(3)]
    assert made[0].is_contiguous()
    expected = made[0].clone()
    assert torch.equal(made[0].view(-1), expected.view(-1))
    assert repr(made[1]).startswith("WindowMask(")
    made[2][0, :, :, 0] = False
    expected[0, :, :, 0] = False
    assert torch.equal(made[2].clone(), expected)


def test_the_mask_lends_its_memory_through_dlpack():
    """An unformed mask has none: its address is null."""
    mask = WindowMask(2, 5, (2, 1), torch.device("cpu"))
    assert torch.equal(torch.from_dlpack(mask), mask.formed())


def test_the_mask_is_shared():
    """torch would share the memory at its address, which is null: a segmentation fault."""
    mask = WindowMask(2, 5, (2, 1), torch.device("cpu"))
    expected = mask.clone()
    assert mask.share_memory_() is mask
    assert mask.formed().is_shared()
    assert torch.equal(mask.clone(), expected)


def test_the_mask_is_read_as_numbers():
    mask = WindowMask(2, 5, (2, 1), torch.device("cpu"))
    expected = mask.clone()
    assert mask.tolist() == expected.tolist()
    assert (mask.numpy() == expected.numpy()).all()
    assert numpy.asarray(mask).shape == (2, 1, 5, 5)
