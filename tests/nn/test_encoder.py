"""The modules against torch's own, weight for weight, and the CLS-only last layer against the whole stack, in float64."""

import inspect

import pytest
import torch

from saccade import InvalidArgument
from saccade.nn.attention import AttentionPooling, SelfAttention
from saccade.nn.encoder import Encoder, EncoderLayer

WIDTH, HEADS, HIDDEN = 24, 3, 40


def _tokens(batch=3, tokens=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()


def _pair(norm_first, activation="gelu", bias=True, dropout=0.0):
    torch.manual_seed(1)
    theirs = torch.nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=torch.float64
    )
    ours = EncoderLayer(WIDTH, HEADS, HIDDEN, dropout, activation, norm_first=norm_first, bias=bias, dtype=torch.float64)
    # torch starts biases at 0, which would hide a misplaced one
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def _gradients(out, inputs):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), inputs)


def _assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh])
@pytest.mark.parametrize("norm_first", [True, False])
def test_layer_is_torchs_layer(norm_first, activation, bias):
    ours, theirs = _pair(norm_first, activation, bias)
    x = _tokens()
    out, expected = ours(x), theirs(x)
    _assert_equal(out, expected)
    names = [name for name, _ in ours.named_parameters()]
    got = _gradients(out, [x, *ours.parameters()])
    want = _gradients(expected, [x, *(theirs.get_parameter(name) for name in names)])
    _assert_equal(got, want)


@pytest.mark.parametrize("norm_first", [True, False])
def test_lengths_are_torchs_padding_mask(norm_first):
    ours, theirs = _pair(norm_first)
    x, lengths = _tokens(), torch.tensor([7, 1, 4])
    real = torch.arange(7) < lengths[:, None]
    _assert_equal(ours(x, lengths)[real], theirs(x, src_key_padding_mask=~real)[real])


def test_causal_is_torchs_causal():
    ours, theirs = _pair(True)
    x = _tokens()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    _assert_equal(ours(x, is_causal=True), theirs(x, mask, is_causal=True))
    _assert_equal(ours(x, attn_mask=mask), theirs(x, mask))


def test_stack_is_torchs_stack():
    ours, theirs = _pair(True)
    stack = torch.nn.TransformerEncoder(theirs, 3, torch.nn.LayerNorm(WIDTH, dtype=torch.float64), enable_nested_tensor=False)
    encoder = Encoder(ours, 3, torch.nn.LayerNorm(WIDTH, dtype=torch.float64))
    torch.manual_seed(5)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    encoder.load_state_dict(stack.state_dict())
    x = _tokens()
    _assert_equal(encoder(x), stack(x))


@pytest.mark.parametrize("masking", ["none", "lengths", "causal", "mask", "bias"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_cls_only_equals_the_whole_stack(layers, norm_first, masking):
    encoder = Encoder(_pair(norm_first)[0], layers)
    x = _tokens()
    generator = torch.Generator().manual_seed(3)
    arguments = {
        "none": {},
        "lengths": {"lengths": torch.tensor([7, 2, 5])},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": torch.rand(3, 1, 7, 7, generator=generator) > 0.4},
        "bias": {"attn_mask": torch.randn(HEADS, 1, 7, dtype=torch.float64, generator=generator)},
    }[masking]
    whole = encoder(x, **arguments)[:, :1]
    cls = encoder(x, cls_only=True, **arguments)
    assert cls.shape == (3, 1, WIDTH)
    _assert_equal(cls, whole)
    inputs = [x, *encoder.parameters()]
    _assert_equal(_gradients(cls, inputs), _gradients(whole, inputs))


def test_cls_only_of_attention_without_bias():
    layer = SelfAttention(WIDTH, HEADS, bias=False, dtype=torch.float64)
    x = _tokens()
    _assert_equal(layer(x, cls_only=True), layer(x)[:, :1])


def test_padding_does_not_reach_the_cls_token():
    encoder, lengths = Encoder(_pair(False)[0], 1), torch.tensor([7, 2, 5])
    x = _tokens().detach()
    garbage = x.masked_fill(~(torch.arange(7) < lengths[:, None])[..., None], float("nan"))
    _assert_equal(encoder(garbage, lengths, cls_only=True), encoder(x, lengths, cls_only=True))


def test_pooling_is_one_query_of_attention():
    torch.manual_seed(0)
    pooling = AttentionPooling(WIDTH, HEADS, dtype=torch.float64)
    torch.nn.init.normal_(pooling.query)
    x, lengths = _tokens(), torch.tensor([7, 1, 4])
    out = pooling(x, lengths)
    assert out.shape == (3, WIDTH)
    key, value = (t.unflatten(-1, (HEADS, -1)) for t in pooling.kv_proj(x).chunk(2, dim=-1))
    scores = torch.einsum("hd,bshd->bhs", pooling.query, key) * (WIDTH // HEADS) ** -0.5
    scores = scores.masked_fill(~(torch.arange(7) < lengths[:, None])[:, None], float("-inf"))
    expected = pooling.out_proj(torch.einsum("bhs,bshd->bhd", scores.softmax(-1), value).flatten(1))
    _assert_equal(out, expected)
    inputs = [x, *pooling.parameters()]
    _assert_equal(_gradients(out, inputs), _gradients(expected, inputs))


def test_defaults_are_torchs():
    ours, theirs = (inspect.signature(layer).parameters for layer in (EncoderLayer, torch.nn.TransformerEncoderLayer))
    for name in ("dim_feedforward", "dropout", "layer_norm_eps", "norm_first", "bias"):
        assert ours[name].default == theirs[name].default


@pytest.mark.parametrize("module", [SelfAttention, AttentionPooling])
def test_weights_are_dropped_in_training_alone(module):
    attention, x = module(WIDTH, HEADS, dropout=0.5, dtype=torch.float64), _tokens()
    whole = module(WIDTH, HEADS, dtype=torch.float64)
    whole.load_state_dict(attention.state_dict())
    torch.manual_seed(5)
    first, second = attention(x), attention(x)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(attention(x), first)
    assert torch.equal(attention.eval()(x), whole.eval()(x))


def test_dropout_follows_mode_and_seed():
    layer = EncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.5, dtype=torch.float64)
    x = _tokens()
    torch.manual_seed(0)
    first = layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_autocast():
    encoder, pooling = Encoder(EncoderLayer(WIDTH, HEADS, HIDDEN), 1).eval(), AttentionPooling(WIDTH, HEADS)
    x = _tokens().detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(encoder(x, cls_only=True), encoder(x)[:, :1], rtol=0.05, atol=0.05)
        assert pooling(x).dtype == torch.bfloat16


@pytest.mark.parametrize("cls_only", [False, True])
def test_compiles_without_a_graph_break(cls_only):
    encoder = Encoder(EncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0), 2)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    x, lengths = _tokens().detach().float(), torch.tensor([7, 2, 5])
    out = compiled(x, lengths, cls_only=cls_only)
    expected = encoder(x, lengths, cls_only=cls_only)
    torch.testing.assert_close(out, expected)
    inputs = list(encoder.parameters())
    torch.testing.assert_close(_gradients(out, inputs), _gradients(expected, inputs))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: SelfAttention(10, 3), "embed_dim is 10 and num_heads 3"),
        (lambda: SelfAttention(12, 0), "num_heads 0"),
        (lambda: SelfAttention(12, 3.0), "num_heads 3.0"),
        (lambda: SelfAttention(12, 3, dropout=1.0), "dropout is 1.0"),
        (lambda: AttentionPooling(12, 5), "embed_dim is 12 and num_heads 5"),
        (lambda: EncoderLayer(12, 5), "d_model is 12 and nhead 5; d_model must be a positive multiple of nhead"),
        (lambda: EncoderLayer(12, 3, activation="swish"), "activation is 'swish'"),
        (lambda: Encoder(EncoderLayer(12, 3), 0), "num_layers is 0"),
        (lambda: Encoder(EncoderLayer(12, 3), "2"), "num_layers is '2'; it must be a whole number, at least 1"),
        (lambda: SelfAttention(12, 3)([0.0] * 12), r"x is a list; it must be a torch\.Tensor of shape \[B, S, 12\]"),
        (lambda: SelfAttention(12, 3)(torch.zeros(2, 12)), r"x has shape \[2, 12\]"),
        (lambda: AttentionPooling(12, 3)(torch.zeros(2, 5, 10)), r"x has shape \[2, 5, 10\]"),
        (lambda: SelfAttention(12, 3, backend="fast")(torch.zeros(2, 5, 12)), "backend is 'fast'"),
        (
            lambda: SelfAttention(12, 3)(torch.zeros(2, 5, 12), attn_mask=torch.zeros(9, 5), cls_only=True),
            r"attn_mask has shape \[9, 5\]; it must broadcast to \[B, H, 5, 5\]",
        ),
        (lambda: Encoder(EncoderLayer(12, 3), 2)(torch.zeros(2, 5, 12), cls_only="no"), "cls_only is 'no'"),
    ],
)
def test_bad_arguments_are_named(build, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        build()
