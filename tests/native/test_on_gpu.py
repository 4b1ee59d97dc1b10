"""Calls that C++ replays on a GPU: in every case of the contract bitwise the same as from Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import saccade
from saccade import native
from saccade.exact.op import OPS
from saccade.exact.ragged import config
from saccade.exact.testing.cases import ATTENTION
from saccade.exact.testing.check import check_attention, public_call
from saccade.exact.varlen.op import OPS as VARLEN
from saccade.testing.baseline import differentiate
from saccade.testing.cases import Case
from saccade.testing.inputs import make

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]


def results(case, dtype, layout):
    inputs = make(case, dtype, "cuda", layout=layout)
    # windows are of packed sequences, to which rows of equal lengths are handed too
    return differentiate(public_call(case, "ragged" if case.window else "short", False), inputs, 0, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [c for c in ATTENTION if "quick" in c.tags or "large" in c.tags], ids=lambda c: c.name)
def test_every_case(case, dtype, calls):
    case = replace(case, lse_grad=False)
    layout = "packed" if case.packed else "bthd"
    first = results(case, dtype, layout)
    # forward from C++ and backward planned by Python, then both from C++
    for _ in range(2):
        for name, x in results(case, dtype, layout).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("backend", ["short", "long"])
def test_time_outside_the_batch(calls, backend):
    """As `nn.MultiheadAttention` has it: results lie so too, when Python plans the call and when C++ replays it."""
    tokens = 32 if backend == "short" else 197
    case = Case("time first", 3, 4, 4, tokens, tokens, 64)
    inputs = make(case, torch.bfloat16, "cuda", layout="tbhd")
    run = public_call(case, backend, False)
    first = differentiate(run, inputs, 0, False)
    assert all(x.permute(2, 0, 1, 3).is_contiguous() for x in first.values())
    assert all(r.ok for r in check_attention(case, torch.bfloat16, "cuda", backend, lse=False, inputs=inputs))
    for _ in range(2):
        for name, x in differentiate(run, inputs, 0, False).items():
            assert x.stride() == first[name].stride(), name
            assert torch.equal(x, first[name]), name


def test_calls_are_taken(calls):
    qkv = torch.randn(2, 32, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    separate = [x.detach().requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind(0)]
    mask = torch.rand(2, 1, 1, 32, device="cuda") > 0.2
    for call, leaves in (
        (lambda: saccade.attention_qkvpacked(qkv, backend="short"), [qkv]),
        (lambda: saccade.attention(*separate, backend="short"), separate),
        (lambda: saccade.attention(*separate, mask, backend="short"), separate),
        (lambda: saccade.attention(*separate, is_causal=True, backend="short"), separate),
    ):
        before = len(calls)
        expected = call()
        assert expected.grad_fn.name() != "saccade::KnownAttentionBackward"
        assert len(calls) == before + 1
        dout = torch.randn_like(expected)
        gradients = torch.autograd.grad(expected, leaves, dout)
        for _ in range(2):
            out = call()
            assert out.grad_fn.name() == "saccade::KnownAttentionBackward"
            assert out.stride() == expected.stride()
            assert torch.equal(out, expected)
            for x, y in zip(torch.autograd.grad(out, leaves, dout), gradients, strict=True):
                assert torch.equal(x, y)
                assert x.stride() == y.stride()


def tensors(length, dim=64, batch=48, requires_grad=True):
    return [
        torch.randn(batch, 6, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)
    ]


def again(call, leaves):
    """Whether a call gives the same from Python and, twice, from C++: outputs, and gradients planned by Python and by C++."""
    first = call()
    assert first.grad_fn.name() != "saccade::KnownAttentionBackward"
    dout = torch.randn_like(first)
    expected = (first, *torch.autograd.grad(first, leaves, dout))
    for _ in range(3):
        out = call()
        assert out.grad_fn.name() == "saccade::KnownAttentionBackward"
        found = (out, *torch.autograd.grad(out, leaves, dout))
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(call(), first)


@pytest.mark.parametrize(("backend", "length"), [("short", 64), pytest.param("long", 197, marks=pytest.mark.sm90)])
def test_tensors_in_one_memory(backend, length, calls):
    """Launches are known by addresses: a call of one tensor for keys and values is of another kind than that of two."""
    query, key, value = tensors(length)
    for count, given in enumerate(((query, key, key), (query, key, value), (query, query, query)), 1):
        again(lambda given=given: saccade.attention(*given, backend=backend), list({id(x): x for x in given}.values()))
        assert len(calls) == 2 * count  # with a gradient and without


@pytest.mark.sm90
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "dim"), [(128, 64), (100, 128), (128, 32)])
def test_kernels_of_sm90_that_take_tensor_maps(length, dim, causal, calls):
    leaves = tensors(length, dim, batch=800)
    again(lambda: saccade.attention(*leaves, is_causal=causal, backend="short"), leaves)


@pytest.mark.sm90
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "dim"), [(197, 64), (130, 32), (256, 128)])
def test_rows_beyond_128_tokens(length, dim, causal, calls):
    leaves = tensors(length, dim)
    again(lambda: saccade.attention(*leaves, is_causal=causal, backend="long"), leaves)
    qkv = torch.randn(8, length, 3, 6, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    again(lambda: saccade.attention_qkvpacked(qkv, is_causal=causal, backend="long"), [qkv])


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("form", ["exp", "linear"])
def test_scores_of_a_few_tokens(tokens, form, calls, monkeypatch):
    """As decoding makes them: the bits of Python's launch, from C++."""
    weight, A = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16), torch.randn(8, device="cuda")

    def run():
        values = torch.randn(3, tokens, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        return values, saccade.dynamic_mask_scores(values, weight, A, form=form)

    run()
    assert len(calls) == 1
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("saccade.dynamic_mask.scores.op.forward", lambda *given: pytest.fail("Python makes the call"))
            values, found = run()
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            assert torch.equal(found, saccade.dynamic_mask_scores(values, weight, A, form=form))


@pytest.mark.parametrize("backend", ["mma_sp", "masked"])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "pattern": "1:2"}, {"return_lse": True}, {"block_mask": True}], ids=str
)
@pytest.mark.parametrize(("tokens", "dim"), [(256, 64), (1000, 128), (4096, 128)])
def test_pruned_attention_without_a_gradient(tokens, dim, options, backend, calls, monkeypatch):
    """The bits of Python's launches, from C++, those of a split last wave too."""
    options = dict(options)
    if "block_mask" in options:
        tiles = -(-tokens // 64)
        options["block_mask"] = (torch.rand(1, 6, tiles, tiles, device="cuda") > 0.5) | torch.eye(tiles, device="cuda").bool()

    def run(*rows):
        return saccade.nm_sparse_attention(*rows, backend=backend, **options)

    run(*tensors(tokens, dim, 3, False))
    assert len(calls) == 1
    for _ in range(3):
        rows = tensors(tokens, dim, 3, False)
        with monkeypatch.context() as patch:
            patch.setattr("saccade.nm_sparse.api.forward", lambda *given: pytest.fail("Python makes the call"))
            found = run(*rows)
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            expected = run(*rows)
        for x, y in zip(*[z if isinstance(z, tuple) else (z,) for z in (found, expected)], strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()


# (D, features, dtype, shape of the bias before its queries and keys)
SHARED_BIASES = [
    (32, (), torch.bfloat16, (1, 4)),
    (32, ("keys",), torch.bfloat16, (1, 4)),
    (64, (), torch.float16, ()),
    (64, ("keys",), torch.float16, (3, 4)),  # of each of three windows
    (64, ("keys", "lengths"), torch.bfloat16, (12, 1)),
    (64, ("dropout",), torch.bfloat16, (1, 4)),
    (64, ("keys", "dropout"), torch.bfloat16, (12, 4)),
]


def share_a_bias(size, dim, features, dtype, shape):
    """12 rows of 4 heads and a bias, which has a row of finfo.min, and the options of a call."""
    batch = (4, 3) if shape[:1] == (3,) else (12,)
    rows = [torch.randn(*batch, n, 4, dim, device="cuda", dtype=dtype).transpose(-3, -2) for n in (size[0], *[size[1]] * 2)]
    bias = torch.randn(*shape, *size, device="cuda", dtype=dtype)
    bias[..., 3, :] = torch.finfo(dtype).min
    options = {"dropout_p": 0.25} if "dropout" in features else {}
    if "keys" in features:
        options["key_mask"] = torch.rand(*batch, size[1], device="cuda") > 0.3
        options["key_mask"].view(-1, size[1])[5] = False  # a row that sees no key
    if "lengths" in features:
        options["lengths"] = torch.randint(1, size[1] + 1, batch, device="cuda", dtype=torch.int32)
    return (*rows, bias), options, torch.randn_like(rows[0])


@pytest.mark.sm90
@pytest.mark.parametrize("trained", [False, True], ids=["constant", "trained"])
@pytest.mark.parametrize("kind", SHARED_BIASES, ids=str)
def test_rows_that_share_a_bias(kind, trained, calls, monkeypatch):
    """Both directions, of three sizes in turn, of which the last has to copy its bias, with the bits of Python's launches and of torch's sum of the parts."""

    def run(given, options, dout):
        leaves = [x.detach().requires_grad_(i < 3 or trained) for i, x in enumerate(given)]
        if "lengths" in options:
            calls.checked(options["lengths"], leaves[1].shape[-2])
        torch.manual_seed(5)
        out = saccade.attention(*leaves, backend="long", **options)
        by_cpp = out.grad_fn.name() == "saccade::KnownAttentionBackward"
        return by_cpp, [out, *torch.autograd.grad(out, [x for x in leaves if x.requires_grad], dout)]

    sizes = (256, 384), (136, 200), (150, 343)
    for size in sizes:
        assert [run(*share_a_bias(size, *kind))[0] for _ in range(2)] == [False, True]  # the latter's backward is Python's
    assert len(calls) == 3
    for size in (*sizes, *sizes):
        call = share_a_bias(size, *kind)
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            made, expected = run(*call)
            assert not made
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.api.prepare_attention", lambda *given: pytest.fail("Python makes the call"))
            patch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the gradient"))
            made, found = run(*call)
            assert made
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)
            assert (x.stride(), x.dtype) == (y.stride(), y.dtype)
    assert len(calls) == 3


@pytest.mark.sm90
def test_a_bias_that_rows_share_under_hooks_and_in_a_graph(calls):
    """Gradients are right for copies of saved tensors, in a captured call and with a bias that is copied; a gradient of the gradient is refused."""
    leaves, options, dout = share_a_bias((256, 256), 32, ("keys",), torch.bfloat16, (1, 4))
    leaves = [x.requires_grad_() for x in leaves]

    def call():
        return saccade.attention(*leaves, backend="long", **options)

    expected = torch.autograd.grad(call(), leaves, dout)
    for way in (call, call, lambda: on_cpu(call), lambda: torch.utils.checkpoint.checkpoint(call, use_reentrant=False)):
        for x, y in zip(torch.autograd.grad(way(), leaves, dout), expected, strict=True):
            assert torch.equal(x, y)
    (dbias,) = torch.autograd.grad(call(), leaves[3:], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dbias.float().sum().backward()
    # its nodes that add to gradients belong to the stream of eager calls
    leaves = [x.detach().requires_grad_() for x in leaves]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(call(), leaves, dout)
    graph.replay()
    for x, y in zip(captured, expected, strict=True):
        assert torch.equal(x, y)
    # the copy engine cannot read it, and reads a copy that C++ makes too; far rows are formed again from the bias itself, perhaps by other instructions
    known, turned = len(calls), leaves[3].detach().mT.contiguous().mT.requires_grad_()
    for _ in range(3):
        found = torch.autograd.grad(
            saccade.attention(*leaves[:3], turned, backend="long", **options), [*leaves[:3], turned], dout
        )
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-6)
    assert len(calls) == known + 1


@pytest.mark.parametrize(
    ("backend", "length"), [("short", 50), ("short", 128), pytest.param("long", 197, marks=pytest.mark.sm90)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths(backend, length, dtype, calls):
    leaves = tensors(length)
    lengths = torch.randint(0, length + 1, (48,), device="cuda", dtype=dtype)
    again(lambda: saccade.attention(*leaves, lengths=lengths, backend=backend), leaves)
    other = lengths.clone()
    other[3] = length + 1
    with pytest.raises(saccade.InvalidArgument, match=f"{length + 1}"):
        saccade.attention(*leaves, lengths=other, backend=backend)
    # other values in the same tensor are looked at again
    lengths.zero_()
    assert not saccade.attention(*leaves, lengths=lengths, backend=backend).any()


@pytest.mark.parametrize("length", [50, 128])
def test_an_expanded_mask(length, calls):
    leaves = tensors(length)
    row = torch.rand(48, 1, 1, length, device="cuda") > 0.2
    mask = row.expand(-1, 1, length, -1)
    again(lambda: saccade.attention(*leaves, mask, backend="short"), leaves)
    of_row = saccade.attention(*leaves, row, backend="short")
    assert torch.equal(saccade.attention(*leaves, mask, backend="short"), of_row)


@pytest.mark.parametrize("given", ["nothing", "lengths", "mask"])
@pytest.mark.parametrize(("backend", "length"), [("short", 64), pytest.param("long", 197, marks=pytest.mark.sm90)])
def test_ops_of_compiled_programs(backend, length, given, calls, monkeypatch):
    """Forward and backward below autograd, by C++ from the second call on, with the results of an eager call."""
    lengths = torch.randint(0, length + 1, (48,), device="cuda", dtype=torch.int32) if given == "lengths" else None
    mask = (torch.rand(48, 1, 1, length, device="cuda") > 0.3) if given == "mask" and backend == "short" else None

    def computed(query, key, value, dout):
        call = (query, key, value, mask, None, lengths, None, 0.0, False, 0.125)
        out, lse = OPS.forward_op(*call, f"auto:{backend}")
        saved = out if backend == "long" else None
        return [out, *OPS.backward_op(dout, None, saved, lse, *call, False, f"auto:{backend}")[:3]]

    batches = [tensors(length) for _ in range(3)]
    eager = []
    with monkeypatch.context() as patch:
        patch.setattr(native, "calls", None)
        for leaves in batches:
            out = saccade.attention(*leaves, mask, scale=0.125, lengths=lengths, backend=backend)
            dout = torch.randn_like(out)
            eager.append((dout, [out, *torch.autograd.grad(out, leaves, dout)]))
    for i, (leaves, (dout, expected)) in enumerate(zip(batches, eager, strict=True)):
        if i == 1:
            assert len(calls) == 2
            monkeypatch.setattr(OPS, "launchers", lambda name: pytest.fail("Python makes the call"))
        for x, y in zip(computed(*[x.detach() for x in leaves], dout), expected, strict=True):
            assert torch.equal(x, y)
            assert x.stride() == y.stride()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("shape", [(49, 49), (1, 6, 49, 49), (48, 6, 49, 49), (6, 1, 49)])
def test_a_bias(shape, trained, calls):
    """Also of a bias whose gradient programs leave in shares."""
    leaves = tensors(49, 32)
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=trained)
    again(lambda: saccade.attention(*leaves, bias, backend="short"), [*leaves, bias] if trained else leaves)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("shape", [(4, 6, 49, 49), (4, 1, 49, 49), (1, 4, 6, 49, 49), (4, 6, 1, 49)])
def test_a_bias_for_each_window(shape, trained, calls):
    leaves = [x.detach().unflatten(0, (12, 4)).requires_grad_() for x in tensors(49, 32)]
    bias = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=trained)
    again(lambda: saccade.attention(*leaves, bias, backend="short"), [*leaves, bias] if trained else leaves)
    repeated = bias.reshape(shape[-4:]).repeat(12, 1, 1, 1)
    expected = saccade.attention(*(x.flatten(0, 1) for x in leaves), repeated, backend="short")
    found = saccade.attention(*leaves, bias, backend="short").flatten(0, 1)
    # by other tiles, which add in another order
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(("backend", "length"), [("short", 64), pytest.param("long", 197, marks=pytest.mark.sm90)])
def test_dropout(calls, backend, length):
    leaves = tensors(length)

    def call():
        torch.manual_seed(5)
        return saccade.attention(*leaves, dropout_p=0.1, backend=backend)

    again(call, leaves)
    torch.manual_seed(6)
    assert not torch.equal(call(), saccade.attention(*leaves, dropout_p=0.1, backend=backend))


def test_auto_is_torch_where_torch_is_chosen(calls):
    q, k, v = (torch.randn(2, 4, 640, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    dout = torch.randn(2, 4, 640, 65, device="cuda", dtype=torch.bfloat16)[..., :64]  # misaligned rows
    gradients = torch.autograd.grad(expected, (q, k, v), dout.contiguous())
    for _ in range(3):
        out = saccade.attention(q, k, v, is_causal=True)
        assert torch.equal(out, expected)
        for x, y in zip(torch.autograd.grad(out, (q, k, v), dout), gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert len(calls) == 1


def test_gradients_of_another_layout_than_the_output(calls):
    """torch's own backward is wrong there (tests/exact/test_sdpa.py)."""
    leaves = [torch.randn(2, 72, 6, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]
    mask = torch.rand(1, 1, 72, 72, device="cuda") > 0.2
    dout = torch.randn(2, 72, 6, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    wanted = None
    for gradient in (dout, dout, dout, dout.contiguous(), dout.mT.contiguous().mT):
        found = torch.autograd.grad(saccade.attention(*leaves, mask, backend="sdpa"), leaves, gradient)
        wanted = wanted or found
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    assert len(calls) == 1


def test_graphs_of_the_device_and_other_streams(calls):
    q, k, v = (torch.randn(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(3):
        saccade.attention(q, k, v, backend="short")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = saccade.attention(q, k, v, backend="short")
    q.normal_()
    graph.replay()
    assert torch.equal(out, saccade.attention(q, k, v, backend="short"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = saccade.attention(q, k, v, backend="short")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, there)


def test_threads_checkpointing_and_hooks(calls):
    q, k, v = (torch.randn(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def call():
        return saccade.attention(q, k, v, backend="short")

    expected = torch.autograd.grad(call().float().square().sum(), (q, k, v))
    ways = (
        lambda: call(),
        lambda: torch.utils.checkpoint.checkpoint(call, use_reentrant=False),
        lambda: on_cpu(call),
        lambda: in_a_thread(call),
    )
    for way in ways:
        for _ in range(2):
            found = torch.autograd.grad(way().float().square().sum(), (q, k, v))
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_hooks_bring_one_memory_back_in_several(calls):
    """The first token of the keys as a query, as in pooling: it begins where they begin, and `save_on_cpu` brings back a copy of it alone."""
    rows = torch.randn(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call():
        return saccade.attention(rows[:, :, :1], rows, rows, backend="short")

    (expected,) = torch.autograd.grad(call().float().square().sum(), rows)
    for way in (call, call, lambda: on_cpu(call), lambda: on_cpu(call), call):
        (found,) = torch.autograd.grad(way().float().square().sum(), rows)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("more", [8, -2])
def test_keys_of_other_tokens_under_one_list(calls, more):
    """Tokens behind the last sequence get zeros, however many there are of each."""
    (query, *others), ends, longest = packed_batch([5, 9, 1], 64)

    def gradients(*given):
        out = saccade.attention_varlen(*given, ends, ends, longest, longest, backend="ragged")
        return torch.autograd.grad(out, given, torch.ones_like(out))

    for _ in range(3):  # C++ replays both directions of as many tokens of each
        gradients(query, *others)
    key, value = (torch.randn(len(x) + more, 4, 64, device="cuda", dtype=x.dtype, requires_grad=True) for x in others)
    for _ in range(3):
        for x in gradients(query, key, value):
            assert not x[15:].any()
            assert x.isfinite().all()


def on_cpu(call):
    with torch.autograd.graph.save_on_cpu():
        return call()


def in_a_thread(call):
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def packed_batch(lengths, dim, kv_heads=4):
    """Leaves, their ends and the longest, on the device."""
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    shapes = [(sum(lengths) + 3, heads, dim) for heads in (4, kv_heads, kv_heads)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    return leaves, ends, max(lengths)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("options", "preferred"),
    [({}, False), ({"is_causal": True}, False), ({"dropout_p": 0.3}, False), ({"dropout_p": 0.3}, True)],
    ids=["plain", "causal", "dropout", "dropout by CUDA C++"],
)
def test_packed_batches_of_long_sequences(calls, options, preferred, dim, monkeypatch):
    """As below, beyond the tiles: on sm_90 by CUDA C++, which leaves the tokens behind the last sequence to a launch of its own."""
    monkeypatch.setattr(config, "timed", lambda *given: preferred)
    check_kind(calls, ([40, 0, 200, 3], [[33, 17, 256, 1, 2, 50], [150] * 30, [135]]), dim, options, monkeypatch)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}], ids=["plain", "causal", "dropout"])
def test_packed_batches_of_a_kind(calls, options, monkeypatch):
    """One description serves batches of other numbers of tokens and sequences, with the bits of Python's launches."""
    check_kind(calls, ([40, 0, 64, 3], [[33, 17, 64, 1, 2, 50], [64] * 30, [35]]), 32, options, monkeypatch)


@pytest.mark.parametrize(
    ("lengths", "others"), [([40, 0, 64, 3], [[33, 17, 64, 1], [35]]), ([40, 0, 200], [[33, 256, 1], [150] * 9])]
)
def test_packed_ops_of_compiled_programs(lengths, others, calls, monkeypatch):
    """Forward and backward below autograd, by C++ from the second batch on, with the results of an eager call."""

    def computed(leaves, ends, longest, dout):
        call = (*[x.detach() for x in leaves], ends, ends, None, None, longest, longest, 0.0, 0, 0.125)
        out, lse = VARLEN.forward_op(*call, "auto:ragged")
        return [out, *VARLEN.backward_op(dout, None, out, lse, *call, False, "auto:ragged")[:3]]

    for i, given in enumerate([lengths, *others]):
        leaves, ends, longest = packed_batch(given, 64)
        dout = torch.randn_like(leaves[0])
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            out = saccade.attention_varlen(*leaves, ends, ends, longest, longest, scale=0.125)
            expected = [out, *torch.autograd.grad(out, leaves, dout)]
        with monkeypatch.context() as patch:
            if i:
                patch.setattr(VARLEN, "launchers", lambda name: pytest.fail("Python makes the call"))
            found = computed(leaves, ends, longest, dout)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(calls) == 2


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}], ids=["plain", "dropout"])
@pytest.mark.parametrize("batches", [([40, 0, 64, 3], [[33, 17, 1], [64] * 30]), ([40, 0, 200], [[33, 256, 1], [150] * 9])])
def test_one_tensor_of_queries_keys_and_values(calls, batches, dim, options, monkeypatch):
    check_kind(calls, batches, dim, options, monkeypatch, packed=True)


KINDS_BY_LISTS = {
    "32": (32, {}, {}),
    "64": (64, {}, {}),
    "128": (128, {}, {}),
    "64-dropout": (64, {"dropout_p": 0.3}, {}),
    "64-grouped": (64, {"enable_gqa": True, "is_causal": True}, {"kv_heads": 2}),
    "64-packed": (64, {}, {"packed": True}),
}


@pytest.mark.parametrize("longest", [417, 512, 1000, 128])
@pytest.mark.parametrize(("dim", "options", "how"), KINDS_BY_LISTS.values(), ids=KINDS_BY_LISTS)
def test_lists_of_a_kind(calls, dim, options, how, longest, monkeypatch):
    """Batches beyond one launch, which go by lists of lengths: small ones stand for them."""
    monkeypatch.setattr("saccade.exact.ragged.call.ONE_LAUNCH", 0)
    for module in ("call", "token_launches"):
        monkeypatch.setattr(f"saccade.exact.ragged.{module}.MOST_EAGER", 0)
    less = 0 if longest == 512 else 17  # a longest sequence of 512 is a kind of its own
    batches = [longest, 0, 40, 64, 17, 3], ([longest, 1, 65, 128, 0, 2], [longest - less, 20, 100] * 3, [longest] + [9] * 1100)
    check_kind(calls, batches, dim, {"backend": "ragged", **options}, monkeypatch, **how)


def test_lists_of_a_large_batch(calls, monkeypatch):
    """520 sequences, of which the longest has 512 tokens, are more than one launch takes; a smaller batch is another kind."""
    check_kind(calls, ([512] + [30] * 519, ([512] + [30] * 2000, [512, 100] * 260)), 64, {"backend": "ragged"}, monkeypatch)
    leaves, ends, longest = packed_batch([512] + [30] * 9, 64)
    for count in (2, 2):
        saccade.attention_varlen(*leaves, ends, ends, longest, longest, backend="ragged")
        assert len(calls) == count


def check_kind(calls, batches, dim, options, monkeypatch, packed=False, kv_heads=4):
    """The first batch is Python's; each of the others is made by C++, with the bits of Python's launches."""

    def differentiated(leaves, ends, longest):
        torch.manual_seed(5)
        if packed:
            leaves = [torch.stack([x.detach() for x in leaves], 1).requires_grad_()]
            out = saccade.attention_varlen_qkvpacked(*leaves, ends, longest, **options)
        else:
            out = saccade.attention_varlen(*leaves, ends, ends, longest, longest, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    first, others = batches
    differentiated(*packed_batch(first, dim, kv_heads))
    assert len(calls) == 1
    for lengths in others:
        batch = packed_batch(lengths, dim, kv_heads)
        with monkeypatch.context() as patch:
            patch.setattr("saccade.exact.varlen.api._prepare", lambda *given: pytest.fail("Python makes the call"))
            found = differentiated(*batch)
        with monkeypatch.context() as patch:
            patch.setattr(native, "calls", None)
            expected = differentiated(*batch)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert len(calls) == 1
