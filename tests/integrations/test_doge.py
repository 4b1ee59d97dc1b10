"""Tiny random Doge models with attn_implementation "saccade_dynamic_mask" against eager: logits, gradients, padding, decoding.

A is random, so that there are no ties; models are float32, in which eager computes its softmax for every model.
"""

import copy
import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.integrations import doge

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.doge")

from saccade.integrations.doge_cache import DogeCache  # noqa: E402

KEEP, VOCABULARY = 5, 100


@pytest.fixture(scope="module", autouse=True)
def _registered():
    doge.register()


def _config(**more):
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "max_position_embeddings": 128, "keep_window_size": KEEP, "bos_token_id": 1, "pad_token_id": 0,
        "eos_token_id": None,
    }  # fmt: skip
    return transformers.DogeConfig(**settings | more)


def _pair(implementation="saccade_dynamic_mask", **more):
    torch.manual_seed(0)
    theirs = transformers.DogeForCausalLM._from_config(_config(**more), attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.A.copy_(torch.randn(layer.self_attn.A.shape))
            # scores so far apart that rounding does not change their order
            layer.self_attn.dt_proj.weight.mul_(30.0)
    ours = transformers.DogeForCausalLM._from_config(_config(**more), attn_implementation=implementation).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def _tokens(batch=3, tokens=23):
    """No token twice in a row: in the first layer equal tokens have equal scores, and eager leaves ties to topk."""
    generator = torch.Generator().manual_seed(2)
    return torch.stack([torch.randperm(VOCABULARY - 2, generator=generator)[:tokens] + 2 for _ in range(batch)])


def _padding(side, lengths=(23, 14, 2), tokens=23):
    position, lengths = torch.arange(tokens), torch.tensor(lengths)[:, None]
    return (position < lengths if side == "right" else position >= tokens - lengths).long()


def _compare(ours, theirs, real=None, **inputs):
    """Logits at real tokens, and gradients of every parameter from a loss over them."""
    found = []
    for model in (ours, theirs):
        logits = model(**inputs).logits
        logits = logits if real is None else logits[real.bool()]
        weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
        found.append((logits, *torch.autograd.grad((logits * weights).sum(), list(model.parameters()))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("keep", [1, KEEP, 23, 2048])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_and_gradients(keep, kv_heads):
    _compare(*_pair(keep_window_size=keep, num_key_value_heads=kv_heads), input_ids=_tokens())


def test_the_window_matters():
    """The comparison above means something only if keys are dropped and scores are added, and both change the result."""
    model, tokens = _pair()[0], _tokens()
    expected = model(tokens).logits
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.keep_window_size = 23
    assert (other(tokens).logits - expected).abs().max() > 1e-3
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.self_attn.A.data.mul_(0.5)  # the same order, other weights
    assert (other(tokens).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(side):
    mask = _padding(side)
    _compare(*_pair(), mask, input_ids=_tokens(), attention_mask=mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_looked_at(side):
    model, mask = _pair()[0], _padding(side)
    first, second = _tokens(), torch.where(mask.bool(), _tokens(), 3)
    a, b = (model(x, attention_mask=mask).logits[mask.bool()] for x in (first, second))
    torch.testing.assert_close(a, b)
    without = model(first).logits[mask.bool()]
    assert side == "right" or (a - without).abs().max() > 1e-3


def test_strictly_causal():
    model, tokens = _pair()[0], _tokens()
    expected = model(tokens).logits
    for at in (1, 9, 22):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 7) % 58 + 2
        logits = model(changed).logits
        torch.testing.assert_close(logits[:, :at], expected[:, :at], rtol=1e-6, atol=1e-6)
        assert (logits[:, at:] - expected[:, at:]).abs().max() > 1e-3


def test_packed_sequences_are_kept_apart():
    positions = torch.cat((torch.arange(9), torch.arange(14))).view(1, 23)
    ours, theirs = _pair()
    tokens = _tokens(1)
    # with a cache transformers does not look at the positions
    _compare(ours, theirs, input_ids=tokens, position_ids=positions, use_cache=False)
    alone = ours(tokens[:, 9:]).logits
    torch.testing.assert_close(ours(tokens, position_ids=positions, use_cache=False).logits[:, 9:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("told", ["positions", "positions, cache", "ends"])
def test_borders_that_no_mask_tells(told):
    """Position ids that restart under a cache, and ends alone: each sequence gives what it gives by itself."""
    model = _pair()[0]
    tokens, lengths = _tokens(1, 20), (8, 12)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "position_ids": positions} if told == "ends" else {"position_ids": positions}
    found = model(tokens, use_cache=told != "positions", **given).logits
    alone = torch.cat([model(x).logits for x in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [({"position_bias": torch.zeros(1)}, "a position_bias is given"), ({"is_causal": False}, "is_causal=False is given")],
)
def test_no_argument_is_dropped(argument, sentence):
    q = torch.randn(1, 2, 6, 8)
    call = doge.DogeCall(None, 4, None)
    with pytest.raises(saccade.UnsupportedProblem, match=sentence):
        doge.attention_forward(torch.nn.Module(), q, q, q, torch.randn(1, 2, 6), dynamic_mask=call, **argument)


class _Largest(TorchDispatchMode):
    """Records the largest number of elements of any result."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_of_size_n_by_n(padded):
    # one matrix [n, n] has 1.2 million numbers; the largest of ours, a block of scores, 72,000 a head
    count = 1100
    mask = torch.ones(1, count, dtype=torch.long)
    mask[:, :7] = 0 if padded else 1
    sizes = []
    for model in _pair(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1):
        with _Largest() as largest:
            model(_tokens(1, 90).repeat(1, 13)[:, :count], attention_mask=mask).logits.sum().backward()
        sizes.append(largest.elements)
    assert sizes[0] < count**2 / 8
    # eager mode makes such a matrix, so the test can detect one
    assert sizes[1] >= count**2


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generates_the_same_tokens(cache, beams):
    arguments = {
        "attention_mask": _padding("left"),
        "max_new_tokens": 8,
        "do_sample": False,
        "no_repeat_ngram_size": 1,
        "num_beams": beams,
    }
    ours, theirs = (m.generate(_tokens(), cache_implementation=cache, **arguments) for m in _pair())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_generates_the_same_tokens_with_a_bounded_cache(padded, beams):
    ours, theirs = _pair()
    arguments = {"max_new_tokens": 20, "do_sample": False, "no_repeat_ngram_size": 1, "num_beams": beams}
    if padded:
        arguments["attention_mask"] = _padding("left")
    cache = DogeCache(ours.config)
    assert torch.equal(ours.generate(_tokens(), past_key_values=cache, **arguments), theirs.generate(_tokens(), **arguments))
    assert cache.get_seq_length() == 23 + 19
    # key and value of 8 float32, a score, a position
    entry = 8 * 4 * 2 + 4 + 4
    assert cache.nbytes == 2 * 3 * beams * 2 * KEEP * entry
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("pieces", [(23,), (10, 1, 12), (1,) * 23])
@torch.no_grad()
def test_logits_in_pieces(bounded, pieces):
    model, tokens = _pair()[0], _tokens()
    mask = _padding("left")
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    cache = DogeCache(model.config) if bounded else transformers.DynamicCache(config=model.config)
    logits, start = [], 0
    for count in pieces:
        stop = start + count
        logits.append(model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
        start = stop
    real = mask.bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], expected[real], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_right_padded_prompt_goes_on_in_the_bounded_cache():
    model, tokens, lengths = _pair()[0], _tokens(), (23, 14, 2)
    cache, next_token = DogeCache(model.config), torch.full((3, 1), 5)
    model(tokens, attention_mask=_padding("right"), past_key_values=cache)
    positions = torch.tensor(lengths)[:, None]
    logits = model(next_token, position_ids=positions, past_key_values=cache).logits
    for row, length in enumerate(lengths):
        alone = model(torch.cat((tokens[row : row + 1, :length], next_token[:1]), 1)).logits[:, -1:]
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_rows_of_the_bounded_cache_can_be_repeated_and_selected():
    model, cache = _pair()[0], DogeCache(_config())
    cache.batch_repeat_interleave(2)  # nothing yet, nothing to do
    model(_tokens(2, 9), past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    logits = model(torch.tensor([[4], [4]]), past_key_values=cache).logits
    expected = model(torch.cat((_tokens(2, 9).flip(0), torch.tensor([[4], [4]])), 1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_bounded_cache_needs_the_config_of_a_doge_model():
    with pytest.raises(saccade.InvalidArgument, match="config is a BertConfig; it must have keep_window_size"):
        DogeCache(transformers.BertConfig())


def test_a_bounded_cache_needs_this_implementation():
    ours, theirs = _pair()
    cache = DogeCache(theirs.config)
    theirs(_tokens(), past_key_values=cache)
    with pytest.raises(saccade.UnsupportedProblem, match="23 tokens were handed to this cache and never attended to"):
        theirs(_tokens(tokens=1), past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        found, expected = ours(_tokens(), past_key_values=cache).logits, ours(_tokens()).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(saccade.InvalidArgument, match="the cache keeps 7 entries"):
        ours(_tokens(), past_key_values=DogeCache(_config(keep_window_size=7)))
    with pytest.raises(saccade.UnsupportedProblem, match="cannot take tokens back"):
        DogeCache(ours.config).crop(1)


def test_equal_scores_are_a_sliding_window():
    torch.manual_seed(0)  # a fresh model: A = 0
    model = transformers.DogeForCausalLM._from_config(_config(num_hidden_layers=1), attn_implementation="saccade_dynamic_mask")
    tokens = _tokens(1)
    changed = tokens.clone()
    changed[:, : 23 - KEEP] = 3
    torch.testing.assert_close(model(tokens).logits[:, -1], model(changed).logits[:, -1])


def test_half_precision_and_autocast_come_close_to_eager():
    ours, theirs = _pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = (m(_tokens()).logits.float() for m in (ours, theirs))
    assert (a - b).norm() / b.norm() < 0.1
    ours, theirs = (m.to(torch.bfloat16) for m in (ours, theirs))
    ours.model.config.keep_window_size = 64  # everything kept: ties decide nothing
    for model in (ours, theirs):
        for layer in model.model.layers:
            layer.self_attn.keep_window_size = 64
    a, b = (m(_tokens()).logits.float() for m in (ours, theirs))
    assert (a - b).norm() / b.norm() < 0.05


def test_gradient_checkpointing_gives_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        model = _pair()[0].train()
        if checkpointing:
            # renamed in the course of transformers 5
            (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        # checkpointing has no cache, which lays values out in another way, and scores differ by roundings then
        logits = model(_tokens(), attention_mask=_padding("right"), use_cache=False).logits
        found.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    torch.testing.assert_close(*found)


def test_mixture_of_experts():
    pair = _pair(is_moe=True, num_experts=16, num_experts_per_tok=2)
    try:
        pair[1](_tokens())
    except TypeError as error:
        pytest.skip(f"transformers {transformers.__version__} does not run it by itself: {error}")
    _compare(*pair, input_ids=_tokens())


def test_other_implementations_are_as_they_were():
    theirs = _pair()[1]
    expected = theirs(_tokens()).logits
    with pytest.MonkeyPatch.context() as undo:
        kind = type(theirs.model.layers[0].self_attn)
        undo.setattr(kind, "forward", kind.forward.__wrapped__)
        assert torch.equal(theirs(_tokens()).logits, expected)


def test_scores_are_float32_in_a_model_of_16_bits(monkeypatch):
    """Tokens that tie in the dtype of the model are ranked; an adapter on the projection is not passed over."""
    ours = _pair()[0].to(torch.bfloat16)
    seen = []
    attend = doge.dynamic_mask_attention
    monkeypatch.setattr(doge, "dynamic_mask_attention", lambda *given, **more: (seen.append(given[3]), attend(*given, **more))[1])
    ours(_tokens())
    assert {(x.dtype, x.shape) for x in seen} == {(torch.float32, (3, 2, 23))}
    layer = ours.model.layers[0].self_attn
    layer.dt_proj = torch.nn.Sequential(layer.dt_proj, torch.nn.Hardtanh())
    ours(_tokens())
    assert seen[2].dtype == torch.float32
    assert not torch.allclose(seen[0], seen[2])


def test_registering_again_and_switching_a_living_model():
    doge.register()
    doge.register("saccade_dynamic_mask_reference", backend="reference")
    # replaced once
    assert not hasattr(transformers.models.doge.modeling_doge.DogeAttention.forward.__wrapped__, "__wrapped__")
    theirs = _pair()[1]
    expected = theirs(_tokens()).logits
    for name in ("saccade_dynamic_mask_reference", "saccade_dynamic_mask", "eager"):
        theirs.set_attn_implementation(name)
        torch.testing.assert_close(theirs(_tokens()).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "inputs", "sentence"),
    [
        ({"sliding_window": 8}, {}, "config.sliding_window is 8; dynamic mask attention allows None only"),
        ({"is_causal": False}, {}, "config.is_causal is False; this integration is causal"),
        ({}, {"attention_mask": torch.ones(3, 1, 23, 23, dtype=torch.int64)}, r"attention_mask is torch.int64 \[3, 1, 23, 23\]"),
        ({}, {"attention_mask": torch.ones(3, 1, 23, 23, dtype=torch.bool)}, r"attention_mask is torch.bool \[3, 1, 23, 23\]"),
        ({}, {"attention_mask": torch.tensor([[1] * 23, [1] * 23, [1] * 7 + [0] * 2 + [1] * 14])}, "hides token 7 of row 2"),
        ({"attention_dropout": 0.25}, {}, "attention dropout is 0.25"),
        ({}, {"softcap": 30.0}, "softcap"),
    ],
)
def test_what_it_cannot_serve(settings, inputs, sentence):
    model = _pair(**settings)[0].train()
    with pytest.raises(saccade.UnsupportedProblem, match=sentence):
        model(_tokens(), **inputs)


def test_empty_keys_of_a_static_cache_are_cut_off_without_padding_too():
    assert doge.document_mask(2, 4, 4) is None
    for length, before in ((3, 0), (1, 4)):
        assert doge.document_mask(2, length, 8, q_offset=before).tolist() == [[[[1] * (before + length)]]] * 2


def test_a_mask_function_of_the_callers_own_is_refused():
    with pytest.raises(saccade.UnsupportedProblem, match="an or_mask_function or and_mask_function is given"):
        doge.document_mask(1, 4, 4, use_vmap=True)


def test_a_model_without_scores_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="saccade_dynamic_mask")
    with pytest.raises(saccade.UnsupportedProblem, match="LlamaAttention passes no key scores"):
        model(_tokens())


def test_two_copies_of_this_package_serve_their_own_names():
    found = importlib.util.find_spec("saccade.integrations.doge")
    other = importlib.util.module_from_spec(found)
    found.loader.exec_module(other)
    theirs, _ = _pair()
    expected = theirs(_tokens()).logits
    with other.register("saccade_dynamic_mask_of_another_copy"):
        for name in ("saccade_dynamic_mask_of_another_copy", "saccade_dynamic_mask"):
            theirs.set_attn_implementation(name)
            torch.testing.assert_close(theirs(_tokens()).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "eager", "my_flash", ""])
def test_names_that_transformers_would_misread(name):
    with pytest.raises(saccade.InvalidArgument, match="name is"):
        doge.register(name)


def test_unknown_backend():
    with pytest.raises(saccade.InvalidArgument, match="backend is 'short'; allowed are 'auto', 'gather'"):
        doge.register("saccade_other", backend="short")


def test_another_release_of_transformers_is_refused_by_name(monkeypatch):
    layer = transformers.models.doge.modeling_doge.DogeAttention
    monkeypatch.setattr(layer, "forward", lambda self, states: None)
    with pytest.raises(saccade.SaccadeError, match=r"forward of transformers .* takes \(self, states\); needed are"):
        doge.register()
    monkeypatch.setattr(doge, "has_package", lambda name: False)
    with pytest.raises(saccade.SaccadeError, match="pip install"):
        doge.register()
