"""torch.compile without graph breaks. The backend aot_eager makes the whole capture and needs no C++ compiler."""

from __future__ import annotations

import pytest
import torch

import saccade

pytestmark = pytest.mark.unpoisoned
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (2, 2, 6, 16)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def separate(**keywords):
    return lambda q, k, v, *tensors: saccade.attention(q, k, v, *tensors, backend="short", **keywords)


def with_lengths(q, k, v, lengths):
    return saccade.attention(q, k, v, lengths=lengths, backend="short")


def packed(qkv):
    return saccade.attention_qkvpacked(qkv, backend="short", is_causal=True)


def tensor(*shape, grad=True):
    return torch.randn(*shape, device=DEVICE, requires_grad=grad)


def qkv3(grad):
    return [tensor(*SHAPE, grad=grad) for _ in range(3)]


def time_first(grad):
    """As `nn.MultiheadAttention` has them."""
    return [torch.randn(6, 2, 2, 16, device=DEVICE).permute(1, 2, 0, 3).requires_grad_(grad) for _ in range(3)]


def by_scores(q, k, v, scores):
    return saccade.dynamic_mask_attention(q, k, v, scores, keep=3, is_causal=True, backend="gather")


def pruned(q, k, v):
    return saccade.nm_sparse_attention(q, k, v, backend="masked")


PROGRAMS = {
    "plain": (separate(), lambda g: qkv3(g)),
    "causal": (separate(is_causal=True), lambda g: qkv3(g)),
    "pooling": (separate(), lambda g: [tensor(2, 2, 1, 16, grad=g), *qkv3(g)[1:]]),
    "lengths": (with_lengths, lambda g: [*qkv3(g), torch.tensor([3, 6], device=DEVICE)]),
    "mask": (separate(), lambda g: [*qkv3(g), torch.rand(6, 6, device=DEVICE) < 0.8]),
    "bias": (separate(), lambda g: [*qkv3(g), tensor(1, 2, 6, 6, grad=g)]),
    "windows": (separate(), lambda g: [*(tensor(2, 3, 2, 6, 16, grad=g) for _ in range(3)), tensor(3, 2, 6, 6, grad=g)]),
    "lse": (separate(return_lse=True), lambda g: qkv3(g)),
    "dropout": (separate(dropout_p=0.3), lambda g: qkv3(g)),
    "packed": (packed, lambda g: [tensor(2, 6, 3, 2, 16, grad=g)]),
    "time first": (separate(), time_first),
    "time first, dynamic mask": (by_scores, lambda g: [*time_first(g), tensor(2, 2, 6, grad=g)]),
    "time first, pruned": (pruned, time_first),
}


def results(function, arguments):
    torch.manual_seed(3)
    out = function(*arguments)
    outputs = list(out) if isinstance(out, tuple) else [out]
    leaves = [a for a in arguments if a.requires_grad]
    grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), leaves) if leaves else ()
    return [*outputs, *grads]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_with_the_eager_result(name, training):
    function, make = PROGRAMS[name]
    arguments = make(training)
    expected, actual = results(function, arguments), results(compiled(function), arguments)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.stride() == e.stride()
        torch.testing.assert_close(a, e)


def test_auto_in_one_graph():
    function = lambda q, k, v: saccade.attention(q, k, v, is_causal=True)  # noqa: E731
    arguments = qkv3(True)
    # on a GPU a graph may choose another backend than an eager call, whose host time counts; torch's function may multiply in
    # TF32
    close = {"rtol": 2e-3, "atol": 2e-3} if arguments[0].is_cuda else {}
    for a, e in zip(results(compiled(function), arguments), results(function, arguments), strict=True):
        torch.testing.assert_close(a, e, **close)


@pytest.mark.parametrize("function", [saccade.attention, saccade.nm_sparse_attention])
def test_autocast_in_one_graph(function):
    arguments = qkv3(True)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, actual = results(function, arguments), results(compiled(function), arguments)
    assert actual[0].dtype is torch.bfloat16
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("order", ["BHTD", "TBHD"])
def test_dynamic_shapes(order):
    run = compiled(separate(is_causal=True), dynamic=True)
    for batch, time in ((2, 6), (3, 9), (5, 17)):
        sizes = {"B": batch, "H": 2, "T": time, "D": 16}
        drawn = (torch.randn([sizes[name] for name in order], device=DEVICE) for _ in range(3))
        arguments = [x.permute([order.index(name) for name in "BHTD"]).requires_grad_() for x in drawn]
        for a, e in zip(results(run, arguments), results(separate(is_causal=True), arguments), strict=True):
            assert a.stride() == e.stride()
            torch.testing.assert_close(a, e)


def of_rows(x, kept):
    y = x[kept].transpose(1, 2)
    return saccade.attention(y, y, y, backend="short")


def masked_rows(x, kept):
    y = x[kept].transpose(1, 2)
    return by_scores(y, y, y, y[..., 0])


def masked_tokens(x, kept):
    y = x[kept].permute(1, 2, 0, 3)
    return by_scores(y, y, y, y[..., 0])


@pytest.mark.parametrize("run", [of_rows, masked_rows, masked_tokens])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_rows_or_tokens_that_data_decide(run):
    x, kept = tensor(7, 6, 2, 16, grad=False), torch.tensor([True, False, True, True, False, True, True], device=DEVICE)
    actual, expected = compiled(run, dynamic=True)(x, kept), run(x, kept)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected)


def test_errors_are_raised_under_compilation_too():
    q, k, v = qkv3(False)
    with pytest.raises(Exception, match="head dims of query and key differ"):
        compiled(separate())(q, k[..., :8], v)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_refusal_names_its_reasons_under_compilation(fullgraph, dynamic):
    torch._dynamo.reset()
    q, k, v = qkv3(False)
    run = torch.compile(
        lambda *x: saccade.attention(*x, dropout_p=0.1, return_lse=True, backend="volta"),
        fullgraph=fullgraph, dynamic=dynamic, backend="eager",
    )  # fmt: skip
    with pytest.raises(Exception, match=r"backend 'volta' cannot run(.|\n)*volta: "):
        run(q, k, v)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "run",
    [
        lambda x: saccade.attention(x, x, x, return_lse=True, backend="short"),
        lambda x: saccade.nm_sparse_attention(x, x * 2, x, backend="masked"),
        lambda x: saccade.dynamic_mask_attention(x, x, x, x[..., 0], keep=4),
    ],
    ids=["attention", "nm_sparse_attention", "dynamic_mask_attention"],
)
def test_one_tensor_in_several_places(run):
    """torch 2.13 takes no tensor of an autograd.Function twice."""
    x = tensor(*SHAPE)
    actual, expected = (
        torch.autograd.grad(torch.cat([y.flatten() for y in by(x)]).square().sum(), x) for by in (compiled(run), run)
    )
    torch.testing.assert_close(actual, expected)
