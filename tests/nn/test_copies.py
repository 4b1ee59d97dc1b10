"""Every module of `saccade.nn` is copied, saved and loaded as modules of torch are: the result computes the same bits."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import saccade
from saccade import nn

WIDTH, HEADS, TOKENS = 32, 4, 9


def encoder():
    return nn.Encoder(nn.EncoderLayer(WIDTH, HEADS, 48, dropout=0.0), 2, torch.nn.LayerNorm(WIDTH))


# every module by its name, so that a new one without a row here is noticed
MAKE = {
    "AttentionPooling": lambda: nn.AttentionPooling(WIDTH, HEADS),
    "DynamicMaskAttention": lambda: nn.DynamicMaskAttention(WIDTH, HEADS, 2, keep=3),
    "Encoder": encoder,
    "EncoderLayer": lambda: nn.EncoderLayer(WIDTH, HEADS, 48, dropout=0.0, norm_first=True),
    "NystromAttention": lambda: nn.NystromAttention(WIDTH, HEADS, landmarks=4, conv_kernel=3),
    "SelfAttention": lambda: nn.SelfAttention(WIDTH, HEADS),
    "TriangleAttention": lambda: nn.TriangleAttention(WIDTH, 8, HEADS),
}


@pytest.fixture(params=MAKE)
def module(request):
    torch.manual_seed(0)
    made = MAKE[request.param]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)  # some begin at zero, where any two modules agree
    return made


def computed(module):
    """Output and gradients on one input."""
    rows = (TOKENS,) if isinstance(module, nn.TriangleAttention) else ()
    x = torch.randn(2, *rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_every_module_is_here():
    assert set(MAKE) == set(saccade.nn.__all__)


def test_a_deep_copy_computes_the_same_and_shares_nothing(module):
    expected = computed(module)  # a call leaves nothing behind that cannot be copied
    other = copy.deepcopy(module)
    assert type(other) is type(module)
    assert_same(computed(other), expected)
    pointers = {p.data_ptr() for p in module.parameters()}
    assert not [p for p in other.parameters() if p.data_ptr() in pointers]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same(computed(module), expected)


def test_a_state_dict_goes_through_a_file_into_a_new_module(module, request):
    expected, state = computed(module), io.BytesIO()
    torch.save(module.state_dict(), state)
    state.seek(0)
    other = MAKE[request.node.callspec.params["module"]]()
    assert not torch.equal(computed(other)[0], expected[0])
    loaded = torch.load(state, weights_only=True)
    assert list(loaded) == list(other.state_dict())
    other.load_state_dict(loaded)
    assert_same(computed(other), expected)


def test_a_missing_or_foreign_name_is_an_error(module):
    state = module.state_dict()
    first = next(iter(state))
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({name: x for name, x in state.items() if name != first})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({**state, "foreign": torch.zeros(1)})


def test_a_whole_module_is_pickled(module):
    expected, file = computed(module), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert_same(computed(torch.load(file, weights_only=False)), expected)


def test_made_on_meta_and_filled_by_assignment(module, request):
    expected = computed(module)
    with torch.device("meta"):
        other = MAKE[request.node.callspec.params["module"]]()
    other.load_state_dict(module.state_dict(), assign=True)
    assert_same(computed(other), expected)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("shape", [(0, TOKENS, WIDTH), (2, 0, WIDTH)], ids=str)
def test_an_empty_batch_and_rows_without_tokens(name, shape):
    if name == "TriangleAttention":
        shape, given = (shape[0], shape[1], *shape[1:]), [{}, {"mask": torch.zeros(shape[0], shape[1], shape[1])}]
    else:
        given = [{"lengths": lengths} for lengths in (None, torch.zeros(shape[0], dtype=torch.int32))]
    x = torch.zeros(shape, requires_grad=True)
    for options in given:
        out = MAKE[name]()(x, **options)
        assert out.shape == (shape if name != "AttentionPooling" else shape[::2])
        assert out.isfinite().all()
        out.sum().backward()


@pytest.mark.parametrize("name", MAKE)
def test_script_is_refused_in_a_sentence(name):
    with pytest.raises(
        saccade.UnsupportedProblem, match=f"torch.jit.script does not compile {name} of saccade.nn; use torch.compile"
    ):
        torch.jit.script(torch.nn.Sequential(MAKE[name]()))


@pytest.mark.parametrize("name", MAKE)
def test_every_parameter_is_made_anew_by_reset_parameters(name):
    """As programs do that make a model on the meta device and give it memory afterwards."""
    torch.manual_seed(0)
    expected = MAKE[name]()
    with torch.device("meta"):
        module = MAKE[name]()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    module.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    for (place, found), wanted in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert found.isfinite().all(), place
        assert (found.std() > 0) == (wanted.std() > 0), place
