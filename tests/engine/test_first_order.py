"""Functions with first derivatives alone, where torch differentiates in other ways: twice, under checkpointing, by torch.func, forward."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import saccade
from saccade.errors import UnsupportedProblem

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def varlen(q, k, v):
    ends = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    return saccade.attention_varlen(q[0], k[0], v[0], ends, ends, 1, 1, backend="ragged", return_lse=True)


LSE = {} if HAS_GPU else {"lse": lambda q, k, v, s: saccade.attention(q, k, v, return_lse=True)}
OURS = LSE | {
    "short": lambda q, k, v, s: saccade.attention(q, k, v, backend="short", return_lse=True),
    "packed": lambda q, k, v, s: saccade.attention_qkvpacked(
        torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2), backend="short", return_lse=True
    ),
    "varlen": lambda q, k, v, s: varlen(q, k, v),
    "dynamic": lambda q, k, v, s: saccade.dynamic_mask_attention(q, k, v, s, keep=3, return_lse=True),
    "dynamic in plain torch": lambda q, k, v, s: saccade.dynamic_mask_attention(
        q, k, v, s, keep=3, backend="gather_torch", return_lse=True
    ),
    "pruned": lambda q, k, v, s: saccade.nm_sparse_attention(q, k, v, backend="masked", return_lse=True),
}
REFERENCES = {
    "attention": lambda q, k, v, s: saccade.attention(q, k, v, return_lse=True, backend="reference"),
    "dynamic": lambda q, k, v, s: saccade.dynamic_mask_attention(q, k, v, s, keep=3, return_lse=True, backend="reference"),
    "pruned": lambda q, k, v, s: saccade.nm_sparse_attention(q, k, v, return_lse=True, backend="reference"),
}
ours = pytest.mark.parametrize("name", OURS)
references = pytest.mark.parametrize("name", REFERENCES)


def inputs(dtype=torch.float32, requires_grad=True):
    shapes = [(1, 2, 6, 32)] * 3 + [(1, 2, 6)]
    return [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=requires_grad) for shape in shapes]


def loss(call, given):
    out, lse = call(*given)
    return out.square().sum() + lse.sin().sum()


def gradients(value, given, **options):
    return torch.autograd.grad(value, given, allow_unused=True, materialize_grads=True, **options)


@ours
def test_gradients_with_a_graph_under_checkpointing(name):
    """`create_graph`, as for a penalty on the gradient of another part; checkpointing gives saved tensors a single time."""
    given = inputs()
    expected = gradients(loss(OURS[name], given), given)
    out, lse = checkpoint(OURS[name], *given, use_reentrant=False)
    found = gradients(out.square().sum() + lse.sin().sum(), given, create_graph=True)
    torch.testing.assert_close([x.detach() for x in found], list(expected))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found[0].square().sum(), given[:1])


@ours
def test_second_derivatives_are_refused_on_every_way(name):
    """By the inputs where the loss is linear and the incoming gradient constant, and by the incoming gradient itself."""
    given = inputs()
    out, lse = OURS[name](*given)
    found = gradients(out.sum() + lse.sum(), given, create_graph=True, retain_graph=True)
    dout = torch.randn_like(out, requires_grad=True)
    for first, by in ((found[0], given[0]), (gradients((out * dout).sum(), given, create_graph=True)[0], dout)):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(first.sum(), by)


@ours
def test_transforms_of_torch_func_get_a_sentence(name):
    given = inputs(requires_grad=False)
    said = r"backend '\w+' has a gradient for torch\.autograd alone, and a transform of torch\.func meets \w+\(.*'reference'"
    with pytest.raises(UnsupportedProblem, match=said):
        torch.func.grad(lambda q: loss(OURS[name], [q, *given[1:]]))(given[0])
    with pytest.raises(UnsupportedProblem, match=said):
        torch.func.jvp(lambda q: loss(OURS[name], [q, *given[1:]]), (given[0],), (given[1],))


TRANSFORM = r"backend '\w+' has a gradient for torch\.autograd alone, and a transform of torch\.func meets \w+\("


@ours
@pytest.mark.parametrize("place", [0, 2])
def test_a_gradient_outside_of_vmap_is_not_lost(name, place):
    """Inside of vmap a tensor does not say that the one which it wraps requires a gradient."""
    given = inputs(requires_grad=False)

    def one(x):
        return loss(OURS[name], [x if i == place else y for i, y in enumerate(given)])

    two = torch.stack([given[place], given[place] + 1])
    for mapped, several in ((torch.func.vmap(one), two), (torch.func.vmap(torch.func.vmap(one)), two[None])):
        with pytest.raises(UnsupportedProblem, match=TRANSFORM):
            mapped(several.clone().requires_grad_())
        with pytest.raises(UnsupportedProblem, match=TRANSFORM):
            torch.func.grad(lambda x, mapped=mapped: mapped(x).sum())(several)


COMPILED = {
    "grad": lambda call, x: torch.func.grad(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "grad of vmap": lambda call, x: torch.func.grad(lambda y: torch.func.vmap(call)(y).sum())(x[None]),
}


@ours
@pytest.mark.parametrize("transform", COMPILED)
def test_transforms_are_refused_in_a_compiled_graph_too(name, transform):
    """The compiler would run the Function under the transform, which would get zeros."""
    given = inputs(requires_grad=False)
    torch._dynamo.reset()
    call = lambda q: loss(OURS[name], [q, *given[1:]])  # noqa: E731
    with pytest.raises(Exception, match=TRANSFORM):
        torch.compile(lambda q: COMPILED[transform](call, q), backend="aot_eager")(given[0].requires_grad_())
    torch._dynamo.reset()


def test_a_compiled_graph_drops_no_tangent():
    given = inputs(requires_grad=False)
    torch._dynamo.reset()
    run = torch.compile(lambda q: loss(OURS["dynamic"], [q, *given[1:]]), backend="eager")
    run(given[0])
    with forward_ad.dual_level(), pytest.raises((UnsupportedProblem, NotImplementedError)):
        run(forward_ad.make_dual(given[0], given[1]))
    torch._dynamo.reset()


@ours
def test_forward_mode_gets_a_sentence(name):
    given = inputs(requires_grad=False)
    with forward_ad.dual_level():
        OURS[name](*given)  # nothing here has a tangent
        for place in (0, 2):
            dual = [forward_ad.make_dual(x, torch.ones_like(x)) if i == place else x for i, x in enumerate(given)]
            with pytest.raises(UnsupportedProblem, match=r"forward-mode AD meets \w+\(.*D=32.*'reference'"):
                OURS[name](*dual)


@pytest.mark.skipif(HAS_GPU, reason="torch's kernel of a CPU")
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize(
    "more", [{}, {"attn_mask": torch.ones(6, 6).tril() > 0}, {"is_causal": True}], ids=["plain", "mask", "causal"]
)
def test_torchs_function_gets_the_sentence_too(backend, more):
    q, k, v, _ = inputs(requires_grad=False)
    said = r"backend 'sdpa' has a gradient for torch\.autograd alone, and forward-mode AD meets \w+\(.*'reference' can run there"
    with forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match=said):
        saccade.attention(forward_ad.make_dual(q, k), k, v, **more, backend=backend)
    with pytest.raises(UnsupportedProblem, match=said):
        torch.func.jvp(lambda q: saccade.attention(q, k, v, **more, backend=backend), (q,), (k,))
    with forward_ad.dual_level():  # what torch computes by its plain operations has such a derivative
        dual = saccade.attention(forward_ad.make_dual(q, k), k, v[..., :8], **more, backend=backend)
        assert forward_ad.unpack_dual(dual).tangent.shape == (1, 2, 6, 8)


@references
def test_references_take_every_way(name):
    given = inputs(torch.float64, requires_grad=False)
    tangents = [torch.randn_like(x) for x in given]
    call = lambda *x: loss(REFERENCES[name], x)  # noqa: E731
    everything = (0, 1, 2, 3)
    found = torch.func.grad(call, everything)(*given)
    leaves = [x.clone().requires_grad_() for x in given]
    expected = gradients(loss(REFERENCES[name], leaves), leaves)
    torch.testing.assert_close(list(found), list(expected))
    along = sum((gradient * tangent).sum() for gradient, tangent in zip(found, tangents, strict=True))
    torch.testing.assert_close(torch.func.jvp(call, tuple(given), tuple(tangents))[1], along)
