"""Dynamic masks over a sharded sequence against the same call on one device: kept keys, outputs, gradients, bytes, errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor, init_device_mesh

import saccade
import saccade.distributed
from saccade.distributed.candidates import best, choose, entries_of, offer
from saccade.dynamic_mask import offers
from saccade.testing.traffic import Traffic

EVEN = (16, 16, 16, 16)
ALWAYS = ("sinks", "window")


def whole(device, sizes, kv_heads=2, dtype=torch.float32, scores="random", documents=None, heads=4, dim=16, batch=2):
    """query, key, value, key_scores, document_ids of the whole sequence, the same on every rank."""
    made = torch.Generator().manual_seed(sum(sizes) + dim)
    n = sum(sizes)
    query, key, value = (torch.randn(batch, h, n, dim, generator=made).to(device, dtype) for h in (heads, kv_heads, kv_heads))
    noise = torch.randn(batch, kv_heads, n, generator=made)
    kinds = {
        "random": lambda: noise,
        "ties": lambda: (noise * 1.5).round(),
        "equal": lambda: torch.zeros_like(noise),
        "zeros": lambda: torch.where(noise > 0, 0.0, -0.0),
        "falling": lambda: -torch.arange(n).expand_as(noise) / n,
        "rising": lambda: torch.arange(n).expand_as(noise) / n,
        "extreme": lambda: torch.where(noise > 0, 3.0e38, -3.0e38),
    }
    ids = None
    if documents is not None:
        rows = [torch.tensor(documents), torch.tensor(documents[::-1])]
        ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)) * 3 - 5, row) for row in rows[:batch]]).to(device)
    return query, key, value, kinds[scores]().clone().to(device), ids


def mine(x, rank, sizes, dim=2):
    """This rank's stretch of a whole tensor."""
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def stretches(sizes, ranks):
    """Lengths for as many ranks as there are: those of four, put together for two, and for eight cut in two."""
    if ranks > len(sizes):
        parts = ranks // len(sizes)
        return tuple((size + i) // parts for size in sizes for i in range(parts))
    each = len(sizes) // ranks
    return tuple(sum(sizes[i * each : (i + 1) * each]) for i in range(ranks))


def relative(found, expected):
    """Distance over norm, in float64."""
    return ((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def _always(options):
    """(options of `whole`, options of a call that name keys to keep whatever their scores)."""
    return {n: x for n, x in options.items() if n not in ALWAYS}, {n: x for n, x in options.items() if n in ALWAYS}


def _outputs_and_gradients(rank, ranks, device, sizes, keep, options):
    """Distances from one device: out, lse and each gradient."""
    (options, always), sizes = _always(options), stretches(sizes, ranks)
    add_scores = options.pop("add_scores", True)
    query, key, value, scores, ids = whole(device, sizes, **options)
    leaves = [x.requires_grad_() for x in (query, key, value, scores)]
    call = {"keep": keep, "enable_gqa": True, "add_scores": add_scores, "return_lse": True, **always}
    out, lse = saccade.dynamic_mask_attention(*leaves, document_ids=ids, **call)
    made = torch.Generator().manual_seed(5)
    dout, dlse = torch.randn(out.shape, generator=made).to(out), torch.randn(lse.shape, generator=made).to(lse)
    wanted = [x for x in leaves if add_scores or x is not scores]
    expected = torch.autograd.grad((out, lse), wanted, (dout, dlse))
    own = [mine(x, rank, sizes).detach().clone().requires_grad_() for x in leaves]
    own_ids = None if ids is None else mine(ids, rank, sizes, 1)
    found, found_lse = saccade.distributed.dynamic_mask_attention(*own, document_ids=own_ids, **call)
    grads = torch.autograd.grad((found, found_lse), own[: len(wanted)], (mine(dout, rank, sizes), mine(dlse, rank, sizes)))
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in own[: len(wanted)]]
    distances = [relative(found, mine(out, rank, sizes)), relative(found_lse, mine(lse, rank, sizes))]
    return distances + [relative(g, mine(e, rank, sizes)) for g, e in zip(grads, expected, strict=True)]


def _kept_keys(rank, ranks, device, sizes, keep, options):
    """Whether every query of this rank keeps exactly the keys that it keeps on one device."""
    (options, always), sizes = _always(options), stretches(sizes, ranks)
    query, key, _, scores, ids = whole(device, sizes, **options)
    n = sum(sizes)
    # value j is the j-th unit vector, so that an output shows which keys have a weight
    value = torch.eye(n, device=device, dtype=query.dtype).expand(*key.shape[:2], n, n)
    call = {"keep": keep, "enable_gqa": True, "add_scores": False, "backend": "gather_torch", **always}
    expected = saccade.dynamic_mask_attention(query, key, value, scores, document_ids=ids, **call)
    tensors = [mine(x, rank, sizes) for x in (query, key, value, scores)]
    found = saccade.distributed.dynamic_mask_attention(
        *tensors, document_ids=None if ids is None else mine(ids, rank, sizes, 1), **call
    )
    at = torch.arange(sum(sizes[:rank]), sum(sizes[: rank + 1]), device=device)
    if ids is None:  # the rule itself, beside the operation's own selection
        table = saccade.expiry(scores, keep, **always).repeat_interleave(query.shape[1] // key.shape[1], 1)
        rule = (torch.arange(n, device=device) <= at[:, None]) & (at[:, None] < table[:, :, None, :])
        assert torch.equal(mine(expected, rank, sizes) != 0, rule)
    return torch.equal(found != 0, mine(expected, rank, sizes) != 0)


CASES = {
    "even": ((24, 24, 24, 24), 8, {}),
    "one key": ((8, 8, 8, 8), 1, {}),
    "short shards": ((5, 5, 5, 5), 12, {}),
    "all kept": ((6, 6, 6, 6), 1000, {}),
    "uneven": ((30, 3, 0, 17), 7, {}),
    "first empty": ((0, 9, 2, 20), 6, {}),
    "uneven and short": ((3, 9, 1, 2), 8, {}),
    "ties": ((20, 20, 20, 20), 9, {"scores": "ties"}),
    "equal": ((12, 12, 12, 12), 7, {"scores": "equal"}),
    "zeros of both signs": ((12, 12, 12, 12), 7, {"scores": "zeros"}),
    "falling": ((12, 12, 12, 12), 7, {"scores": "falling"}),
    "rising": ((12, 12, 12, 12), 7, {"scores": "rising"}),
    "documents": ((16, 16, 16, 16), 6, {"documents": [10, 30, 1, 23]}),
    "a long document": ((16, 16, 16, 16), 20, {"documents": [5, 57, 2]}),
    "documents and ties": ((9, 20, 0, 12), 6, {"documents": [8, 2, 15, 16], "scores": "ties"}),
    "documents of one": ((4, 4, 4, 4), 6, {"documents": [4, 4, 4, 4]}),
    "sinks": ((16, 16, 16, 16), 4, {"sinks": 3, "scores": "rising"}),
    "window": ((16, 16, 16, 16), 4, {"window": 5, "scores": "falling"}),
    "sinks and window": ((20, 20, 20, 20), 4, {"sinks": 2, "window": 4, "scores": "ties"}),
    "sinks of several shards": ((3, 3, 3, 3), 2, {"sinks": 8, "scores": "rising"}),
    "window of several shards": ((4, 4, 4, 4), 2, {"window": 11, "scores": "falling"}),
    "sinks and window, uneven": ((30, 3, 0, 17), 3, {"sinks": 2, "window": 6}),
    "sinks and window, first empty": ((0, 9, 2, 20), 3, {"sinks": 3, "window": 4}),
    "all sinks": ((6, 6, 6, 6), 2, {"sinks": 10**30, "window": 3}),
    "all in the window": ((6, 6, 6, 6), 2, {"window": 10**30}),
    "window of itself": ((8, 8, 8, 8), 2, {"window": 1, "scores": "falling"}),
    "sinks and window of documents": ((16, 16, 16, 16), 3, {"documents": [10, 30, 1, 23], "sinks": 2, "window": 3}),
    "sinks and window of a long document": (
        (9, 20, 0, 12),
        2,
        {"documents": [5, 30, 6], "sinks": 5, "window": 7, "scores": "ties"},
    ),
    "one head of keys": ((16, 16, 16, 16), 6, {"kv_heads": 1}),
    "one batch row, all heads": ((16, 16, 16, 16), 6, {"kv_heads": 4, "batch": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_kept_keys_are_those_of_one_device(many, name):
    assert all(many(_kept_keys, *CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(many, name):
    for distances in many(_outputs_and_gradients, *CASES[name]):
        assert max(distances) < 1e-5, distances


def _interpreted(rank, ranks, device, check, *args):
    """A check whose offers are ranked and copied by the kernels of a GPU, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        served = []
        by_kernels, copy = offers.by_kernels, offers.copy
        patched.setattr(offers, "by_kernels", lambda *x: by_kernels(*x) or served.append("torch"))
        patched.setattr(offers, "copy", lambda *x: served.append("kernel") or copy(*x))
        found = check(rank, ranks, device, *args)
    assert served
    assert set(served) == {"kernel"}, served
    return found


@pytest.mark.parametrize("two", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    "name", ["even", "short shards", "ties", "zeros of both signs", "one batch row, all heads", "sinks and window", "all sinks"]
)
def test_kernels_on_two_ranks(two, name):
    """Rank 1 takes all offers of rank 0 where there are `keep` of them."""
    assert all(two(_interpreted, _kept_keys, *CASES[name]))
    for distances in two(_interpreted, _outputs_and_gradients, *CASES[name]):
        assert max(distances) < 1e-5, distances


@pytest.mark.parametrize("four", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", ["even", "uneven", "first empty", "ties", "equal", "sinks", "window", "sinks and window"])
def test_kernels_on_four_ranks(four, name):
    assert all(four(_interpreted, _kept_keys, *CASES[name]))
    for distances in four(_interpreted, _outputs_and_gradients, *CASES[name]):
        assert max(distances) < 1e-5, distances


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float64, "dim": 8},
        {"add_scores": False},
        {"scores": "extreme"},
        {"scores": "extreme", "sinks": 3, "window": 4},
    ],
    ids=str,
)
def test_two_ranks(two, options):
    for distances in two(_outputs_and_gradients, (20, 14), 6, options):
        assert max(distances) < 1e-5, distances


def _again(rank, ranks, device, backend):
    """Whether a second backward through one graph gives the same gradients as the first, and as another backend's."""
    sizes = (20,) * ranks
    found = []
    for name in (backend, "auto"):
        own = [mine(x, rank, sizes).clone().requires_grad_() for x in whole(device, sizes)[:4]]
        out = saccade.distributed.dynamic_mask_attention(*own, keep=5, enable_gqa=True, backend=name)
        found += [torch.autograd.grad(out.square().sum(), own, retain_graph=True) for _ in range(2)]
    return max(relative(x, e) for other in found[1:] for x, e in zip(other, found[0], strict=True))


@pytest.mark.parametrize("backend", ["reference", "gather_torch"])
def test_backward_again_and_by_another_backend(two, backend):
    assert max(two(_again, backend)) < 1e-5


def _in_bfloat16(rank, ranks, device):
    """The errors of one device and of the group, each against float64."""
    sizes, keep = (40,) * ranks, 12
    tensors = [x.to(torch.bfloat16) for x in whole(device, sizes)[:4]]
    dout = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(3)).to(tensors[0])

    def run(operation, inputs, gradient):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = operation(*leaves, keep=keep, enable_gqa=True)
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    exact = run(saccade.dynamic_mask_attention, [x.double() for x in tensors], dout.double())
    alone = run(saccade.dynamic_mask_attention, tensors, dout)
    found = run(saccade.distributed.dynamic_mask_attention, [mine(x, rank, sizes) for x in tensors], mine(dout, rank, sizes))
    part = [mine(x, rank, sizes) for x in exact]
    return [(relative(f, e), relative(mine(a, rank, sizes), e)) for f, a, e in zip(found, alone, part, strict=True)]


def test_bfloat16_stays_within_the_budget(many):
    for pairs in many(_in_bfloat16):
        for found, alone in pairs:
            assert found <= 2 * alone + 2**-9, pairs


def _bytes(rank, ranks, device, n, keep, dtype):
    sizes = (n // ranks,) * ranks
    query, key, value, scores, _ = whole(device, sizes, dtype=dtype)
    own = [mine(x, rank, sizes).clone().requires_grad_() for x in (query, key, value, scores)]
    with Traffic() as forward:
        out = saccade.distributed.dynamic_mask_attention(*own, keep=keep, enable_gqa=True)
    with Traffic() as backward:
        out.sum().backward()
    row = 2 * key.shape[3] * key.element_size() + scores.element_size() + 8  # K, V, score and a position
    return forward.received, backward.received, 2 * key.shape[1] * ranks * keep * row, forward.calls, backward.calls


@pytest.mark.parametrize("n", [256, 1024])
def test_bytes_do_not_depend_on_the_length(many, n):
    for forward, backward, rows, calls, calls_back in many(_bytes, n, 32, torch.float32):
        assert 0 < forward <= rows
        assert backward <= rows
        assert forward + backward <= 2.2 * rows
        # one exchange of sizes, one of offers; one back
        assert calls == {"_allgather_base_": 2}
        assert calls_back == {"alltoall_base_": 1}


def _pairs(rank, ranks, device, n, keep):
    """How many (query, key) pairs this rank attends to."""
    sizes = (n,) * ranks
    query, key, _, scores, _ = whole(device, sizes)
    value = torch.eye(n * ranks, device=device).expand(*key.shape[:2], -1, -1)
    tensors = [mine(x, rank, sizes) for x in (query, key, value, scores)]
    out = saccade.distributed.dynamic_mask_attention(*tensors, keep=keep, enable_gqa=True, add_scores=False)
    return torch.count_nonzero(out).item() // (query.shape[0] * query.shape[1])


def test_every_rank_does_the_same_work(many):
    """So stretches need no zigzag order: only the first rank, whose first queries see fewer keys, has less."""
    n, keep = 60, 8
    first, *others = many(_pairs, n, keep)
    assert others == [n * keep] * len(others)
    assert first == n * keep - keep * (keep - 1) // 2


def _raised(rank, ranks, device, change):
    """The error that each rank raises when rank 1 differs; the group still works after it."""
    sizes = EVEN[:ranks]
    query, key, value, scores, ids = whole(device, sizes, documents=[sum(sizes) - 4, 4], batch=1)
    tensors = {"query": query, "key": key, "value": value, "key_scores": scores}
    call = {name: mine(x, rank, sizes).clone() for name, x in tensors.items()} | {"keep": 4, "enable_gqa": True}
    if change == "documents decrease across ranks":
        call["document_ids"] = mine(ids, ranks - 1 - rank, sizes, 1)
    elif rank == 1:
        change_one(call, change, mine(ids, rank, sizes, 1))
    try:
        saccade.distributed.dynamic_mask_attention(**call)
        text = ""
    except (saccade.InvalidArgument, saccade.UnsupportedProblem) as error:
        text = str(error)
    saccade.distributed.dynamic_mask_attention(*(mine(x, rank, sizes) for x in tensors.values()), keep=4, enable_gqa=True)
    return text


def change_one(call, change, ids):
    """Make the call of one rank differ."""
    if change == "keep":
        call["keep"] = 5
    elif change in ALWAYS:
        call[change] = 2
    elif change == "offsets":
        call["cu_seqlens"] = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    elif change == "no number":
        call["sinks"] = -1
    elif change == "no backend":
        call["backend"] = "none"
    elif change == "backend of no call":
        call |= {name: call[name].double() for name in ("query", "key", "value")} | {"backend": "gather"}
    elif change == "meta":
        call |= {name: x.to("meta") for name, x in call.items() if isinstance(x, torch.Tensor)}
    elif change == "dtype":
        call |= {name: call[name].double() for name in ("query", "key", "value")}
    elif change == "scores":
        call["key_scores"] = call["key_scores"].to(torch.bfloat16)
    elif change == "heads":
        call["query"] = call["query"][:, :2]
    elif change == "documents":
        call["document_ids"] = ids
    elif change == "gradient":
        call["key"].requires_grad_()
    elif change == "refused":
        call["key"] = call["key"][:, :, :, :-1]
    elif change == "nothing":
        call["query"] = None
    elif change == "no flag":
        call["return_lse"] = "yes"
    elif change == "nan":
        call["key_scores"][0, 0, 3] = float("nan")
    elif change == "inf":
        call["key_scores"][0, 0, 3] = -float("inf")
    elif change == "documents decrease":
        call["document_ids"] = ids.flip(1)


SAID = {
    "keep": "keep is 4 on rank 0 and 5 on rank 1; all ranks must agree",
    "dtype": "the dtype of query, key and value is float32 on rank 0 and float64 on rank 1",
    "scores": "the dtype of key_scores is float32 on rank 0 and bfloat16 on rank 1",
    "heads": "the number of query heads is 4 on rank 0 and 2 on rank 1",
    "documents": "document_ids is not given on rank 0 and given on rank 1",
    "gradient": "a gradient of key, value or key_scores is not needed on rank 0 and needed on rank 1",
    "sinks": "sinks is 0 on rank 0 and 2 on rank 1; all ranks must agree",
    "window": "window is 0 on rank 0 and 2 on rank 1; all ranks must agree",
    "nan": "key_scores of rank 1 holds a value that is not finite",
    "inf": "key_scores of rank 1 holds a value that is not finite",
    "documents decrease across ranks": "document_ids decreases from one rank to the next",
}


@pytest.mark.parametrize("change", SAID)
def test_ranks_that_disagree_all_raise_and_go_on(two, change):
    for text in two(_raised, change):
        assert text.startswith(SAID[change]), text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("refused", "head dims of query and key differ"),
        ("nothing", "query is a NoneType"),
        ("no number", "sinks is -1; it must be a whole number of keys, at least 0"),
        ("no backend", "backend is 'none'; allowed are 'auto', 'gather', 'gather_cpp', 'gather_torch', 'reference'"),
        ("backend of no call", "backend 'gather' cannot run"),
        ("meta", "query, key, value and key_scores are on meta; ranks exchange their values"),
        ("offsets", "cu_seqlens is given; it must be None, as it counts from the start of a sequence"),
    ],
)
def test_a_rank_that_refuses_its_arguments_stops_all(two, change, said):
    other, own = two(_raised, change)
    assert other == "rank 1 refuses its arguments, so no rank can go on; its own error says why"
    assert own.startswith(said)


def _group_of_one(rank, ranks, device):
    groups = [dist.new_group([r]) for r in range(ranks)]
    tensors = whole(device, (20,))[:4]
    found = saccade.distributed.dynamic_mask_attention(*tensors, keep=4, enable_gqa=True, group=groups[rank])
    same = torch.equal(found, saccade.dynamic_mask_attention(*tensors, keep=4, enable_gqa=True))
    options = {"keep": 4, "sinks": 2, "window": 3, "enable_gqa": True}
    found = saccade.distributed.dynamic_mask_attention(*tensors, group=groups[rank], **options)
    same = same and torch.equal(found, saccade.dynamic_mask_attention(*tensors, **options))
    try:
        saccade.distributed.dynamic_mask_attention(*tensors, keep=4, enable_gqa=True, group=groups[1 - rank])
    except saccade.InvalidArgument as error:
        return same, str(error)


def test_a_group_of_one_and_one_of_others(two):
    for same, text in two(_group_of_one):
        assert same
        assert "in the group" in text or "that this rank is in" in text


def _outside(rank, ranks, device):
    mesh = DeviceMesh(device.type, [0])
    tensors = whole(device, (20,))[:4]
    if rank == 0:
        return str(saccade.distributed.dynamic_mask_attention(*tensors, keep=4, enable_gqa=True, group=mesh).shape)
    calls = (
        lambda: saccade.distributed.dynamic_mask_attention(*tensors, keep=4, enable_gqa=True, group=mesh),
        lambda: saccade.distributed.attention(*tensors[:3], group=mesh),
        lambda: saccade.distributed.head_tail(tensors[0], 2, group=mesh),
    )
    said = set()
    for call in calls:
        with pytest.raises(saccade.InvalidArgument) as raised:
            call()
        said.add(str(raised.value))
    return said.pop() if len(said) == 1 else sorted(said)


def test_a_rank_outside_the_mesh_of_a_call(two):
    inside, outside = two(_outside)
    assert inside.startswith("torch.Size")
    assert "which rank 1 is not in; it must be a process group that this rank is in" in outside


def _under_hooks(rank, ranks, device, how):
    """Whether checkpointing, activations kept on the CPU or a compiled caller change no gradient."""
    from torch.utils.checkpoint import checkpoint

    sizes = (24,) * ranks
    tensors = whole(device, sizes)[:4]

    def grads(how):
        own = [mine(x, rank, sizes).clone().requires_grad_() for x in tensors]

        def run(*own):
            return saccade.distributed.dynamic_mask_attention(*own, keep=5, enable_gqa=True)

        if how == "checkpoint":
            out = checkpoint(run, *own, use_reentrant=False)
        elif how == "offload":
            with torch.autograd.graph.save_on_cpu():
                out = run(*own)
        elif how == "compile":
            out = torch.compile(run, backend="aot_eager")(*own)
        else:
            out = run(*own)
        return torch.autograd.grad(out.square().sum(), own)

    # a GPU adds gradients in any order
    same = torch.equal if device.type == "cpu" else torch.allclose
    return all(same(a, b) for a, b in zip(grads(how), grads(None), strict=True))


@pytest.mark.parametrize("how", ["checkpoint", "offload", "compile"])
def test_checkpointing_offloading_and_compiled_callers(two, how):
    assert all(two(_under_hooks, how))


def test_without_a_process_group():
    tensors = whole(torch.device("cpu"), (8,))[:4]
    with pytest.raises(saccade.InvalidArgument, match=r"no process group; call torch\.distributed\.init_process_group first"):
        saccade.distributed.dynamic_mask_attention(*tensors, keep=2, enable_gqa=True)
    with pytest.raises(saccade.InvalidArgument, match="no process group"):
        saccade.distributed.attention(*tensors[:3])


def _second_derivative(rank, ranks, device):
    own = [mine(x, rank, EVEN[:ranks]).clone().requires_grad_() for x in whole(device, EVEN[:ranks])[:4]]
    out = saccade.distributed.dynamic_mask_attention(*own, keep=5, enable_gqa=True)
    (dkey,) = torch.autograd.grad(out.square().sum(), own[1], create_graph=True)
    try:
        torch.autograd.grad(dkey.sum(), own[0])
    except RuntimeError as error:
        return str(error)


def _mapped_over(rank, ranks, device):
    tensors = [mine(x, rank, EVEN[:ranks]) for x in whole(device, EVEN[:ranks])[:4]]

    def call(scores):
        return saccade.distributed.dynamic_mask_attention(*tensors[:3], scores, keep=3, enable_gqa=True)

    try:
        torch.vmap(call)(tensors[3][None])
    except saccade.InvalidArgument as error:
        return str(error)


def test_calls_whose_numbers_cannot_be_read_are_refused(two):
    assert all("ranks must read whether they agree" in text for text in two(_mapped_over))


def test_second_derivatives_raise(two):
    assert all("no second derivative" in text for text in two(_second_derivative))


def _of_dtensors(rank, ranks, device):
    mesh = init_device_mesh(device.type, (ranks,))
    tensors = [distribute_tensor(x, mesh, [Shard(2)]) for x in whole(device, EVEN[:ranks])[:4]]
    try:
        saccade.distributed.dynamic_mask_attention(*tensors, keep=3, enable_gqa=True)
    except saccade.InvalidArgument as error:
        return str(error)


def test_dtensors_are_refused(two):
    for text in two(_of_dtensors):
        assert text == "query is a DTensor; each rank gives its own stretch as a plain tensor, query.to_local()"


def test_entries_order_scores_as_the_operation_ranks_them():
    scores = torch.tensor([1.0, -0.0, 0.0, -2.5, 1.0, -3.4e38, 3.4e38, 1e-45, -1e-45]).view(1, 1, -1)
    by_rule = sorted(range(9), key=lambda j: (scores[0, 0, j].item(), j))
    assert entries_of(scores)[0, 0].argsort().tolist() == by_rule
    offered = torch.tensor([True, True, False, True, False, False, True, True, False])
    assert entries_of(scores, offered)[0, 0].argsort()[:4].tolist() == [2, 4, 5, 8]


def test_best_of_parts_is_best_of_the_whole():
    made = torch.Generator().manual_seed(0)
    for keep in (1, 3, 8):
        scores = (torch.randn(2, 3, 40, generator=made) * 2).round()
        parts = scores.split(10, dim=2)
        places = [offer(entries_of(part), keep) for part in parts]
        offers = torch.stack([part.gather(2, at) for part, at in zip(parts, places, strict=True)], 2)
        chosen, real = choose(offers, [10] * 4, keep, None)
        assert real is None
        positions = torch.stack([at + 10 * p for p, at in enumerate(places)], 2).flatten(2).gather(2, chosen)
        assert torch.equal(positions, best(entries_of(scores), keep))
