"""Every operation with DTensors: equal to the call with whole tensors, forward and backward, without a single collective; and what
is said of placements that would need one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode

import saccade
from saccade import nn

B, H, HKV, T, D = 4, 4, 2, 12, 16
# a GPU multiplies float32 as TF32, in an order that may depend on the batch
LIMITS = {"cpu": 1e-4, "cuda": 1e-2}


def data(device, *shapes, dtype=torch.float32):
    """Tensors that are the same on every rank."""
    made = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=made).to(device, dtype) for shape in shapes]


def _attention(device, heads=H, kv_heads=H, **options):
    tensors = dict(zip(("query", "key", "value"), data(device, (B, heads, T, D), *[(B, kv_heads, T, D)] * 2), strict=True))
    return saccade.attention, tensors, {"enable_gqa": heads != kv_heads, "return_lse": True, **options}, BHTD


BHTD = dict.fromkeys(("query", "key", "value", "key_scores"), (0, 1)) | {"lengths": (0, None), "document_ids": (0, None)}


def calls(device):
    """name -> (function, tensors, options, dims of batch and heads of each tensor)."""
    lengths = torch.tensor([12, 7, 1, 9], device=device)
    bias, mask, block = data(device, (H, T, T), (B, 1, T, T), (1, H, 1, 1))
    function, tensors, options, dims = _attention(device)
    grouped = _attention(device, kv_heads=HKV)
    found = {
        "attention": (function, tensors, options, dims),
        "attention on the fast path of a CPU": (function, tensors, {}, dims),
        "attention, grouped": grouped,
        "attention, one head of keys": _attention(device, kv_heads=1),
        "attention, lengths": (function, tensors | {"lengths": lengths}, options, dims),
        "attention, bias": (function, tensors | {"attn_mask": bias}, options, dims | {"attn_mask": (None, 0)}),
        "attention, mask": (function, tensors | {"attn_mask": mask > 0}, options, dims | {"attn_mask": (0, None)}),
        "attention, uneven": _attention(device, heads=3, kv_heads=3),
    }
    (qkv,) = data(device, (B, T, 3, H, D))
    found["packed"] = (saccade.attention_qkvpacked, {"qkv": qkv}, {"is_causal": True}, {"qkv": (0, 3)})
    query, key, value, scores = data(device, (B, H, T, D), (B, HKV, T, D), (B, HKV, T, D), (B, HKV, T))
    sparse = {"query": query, "key": key, "value": value, "key_scores": scores}
    ids = torch.arange(T, device=device).div(5, rounding_mode="floor").expand(B, T).contiguous()
    options = {"keep": 3, "enable_gqa": True, "return_lse": True}
    found["dynamic"] = (saccade.dynamic_mask_attention, sparse, options, BHTD)
    found["dynamic, lengths"] = (saccade.dynamic_mask_attention, sparse | {"lengths": lengths}, options, BHTD)
    found["dynamic, documents"] = (saccade.dynamic_mask_attention, sparse | {"document_ids": ids}, options, BHTD)
    # the scores of early tokens are low, so that keys are kept which only sinks and a window keep
    rising = sparse | {"key_scores": scores + torch.arange(T, device=device)}
    found["dynamic, sinks"] = (saccade.dynamic_mask_attention, rising, options | {"sinks": 2}, BHTD)
    falling = sparse | {"key_scores": scores - torch.arange(T, device=device)}
    found["dynamic, window"] = (saccade.dynamic_mask_attention, falling, options | {"window": 3}, BHTD)
    both = {"sinks": 1, "window": 2}
    always = sparse | {"document_ids": ids, "lengths": lengths}
    found["dynamic, sinks and window of documents"] = (saccade.dynamic_mask_attention, always, options | both, BHTD)
    row = {name: x[:1] for name, x in sparse.items()} | {"cu_seqlens": torch.tensor([0, 5, 5, 12], device=device)}
    found["dynamic, offsets"] = (saccade.dynamic_mask_attention, row, options | both, BHTD | {"cu_seqlens": (None, None)})
    by_offsets = {name: row[name] for name in ("key_scores", "cu_seqlens")}
    found["expiry, offsets"] = (saccade.expiry, by_offsets, {"keep": 3} | both, BHTD | {"cu_seqlens": (None, None)})
    found["expiry"] = (saccade.expiry, {"key_scores": scores}, {"keep": 3}, BHTD)
    nm = {"query": query, "key": key.repeat_interleave(2, 1), "value": value.repeat_interleave(2, 1)}
    blocks = nm | {"block_mask": block > -9, "attn_mask": bias}
    found["nm"] = (saccade.nm_sparse_attention, nm, {"is_causal": True, "return_lse": True}, BHTD)
    dense = {"dense_first": 4, "dense_recent": 4, "return_lse": True}
    found["nm, dense keys"] = (saccade.nm_sparse_attention, nm, dense, BHTD)
    dims = BHTD | {"block_mask": (None, 1), "attn_mask": (None, 0)}
    found["nm, lengths"] = (saccade.nm_sparse_attention, nm | {"lengths": lengths}, {"is_causal": True, "return_lse": True}, BHTD)
    found["nm, blocks and bias"] = (saccade.nm_sparse_attention, blocks, {}, dims)
    found |= varlen_calls(device, bias)
    return found


def varlen_calls(device, bias):
    """The calls with packed sequences, whose tokens cannot be sharded."""
    rows, heads = (
        torch.tensor([0, 5, 5, 17, 20], dtype=torch.int32, device=device),
        {"query": (None, 1), "key": (None, 1), "value": (None, 1)},
    )
    query, key, value, packed = data(device, (20, H, D), (20, HKV, D), (20, HKV, D), (20, 3, H, D))
    tensors = {"query": query, "key": key, "value": value, "cu_seqlens_q": rows, "cu_seqlens_k": rows, "attn_bias": bias}
    options = {"max_seqlen_q": 12, "max_seqlen_k": 12, "enable_gqa": True, "return_lse": True}
    dims = heads | {"cu_seqlens_q": (None, None), "cu_seqlens_k": (None, None), "attn_bias": (None, 0)}
    one = {"qkv": packed, "cu_seqlens": rows}
    return {
        "varlen": (saccade.attention_varlen, tensors, options, dims),
        "varlen packed": (
            saccade.attention_varlen_qkvpacked,
            one,
            {"max_seqlen": 12},
            {"qkv": (None, 2), "cu_seqlens": (None, None)},
        ),
    }


def places(mesh, roles, x, dims, whole):
    """The placements of a tensor whose dims are (batch, heads), as the mesh shards them by `roles`."""
    found = []
    for role in roles:
        at = {"batch": dims[0], "heads": dims[1], "none": None}[role]
        shared = at is None or (x.shape[at] == 1 and whole[role] > 1)
        found.append(Replicate() if shared else Shard(at))
    return found


def outputs(function, tensors, options):
    """The results as a tuple, and the tensors whose gradients are asked for."""
    leaves = {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in tensors.items()}
    found = function(**leaves, **options)
    return (found if isinstance(found, tuple) else (found,)), [x for x in leaves.values() if x.requires_grad]


def _equal(rank, ranks, device, roles, names):
    """Call by call: how far results and gradients are from those of whole tensors, and how many collectives there were."""
    shape = (ranks,) if len(roles) == 1 else (2, ranks // 2)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("a", "b")[: len(shape)])
    report = {}
    for name, (function, tensors, options, dims) in calls(device).items():
        first = next(iter(tensors))
        batch, heads = (1 if d is None else tensors[first].shape[d] for d in dims[first])
        if (
            names not in name
            or ("batch" in roles and dims[first][0] is None)
            or ("heads" in roles and (heads % ranks) and len(roles) == 2)
        ):
            continue
        whole = {"batch": batch, "heads": heads}
        kept_heads = {x.shape[dims[n][1]] for n, x in tensors.items() if dims.get(n) and dims[n][1] is not None}
        if "heads" in roles and any(1 < h < heads and h % (ranks if len(roles) == 1 else 2) for h in kept_heads):
            continue
        expected, leaves = outputs(function, tensors, options)
        grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x) for x in expected]
        differentiable = expected[0].requires_grad
        wanted = torch.autograd.grad(expected, leaves, grads) if differentiable else []
        spread = {n: distribute_tensor(x, mesh, places(mesh, roles, x, dims[n], whole)) for n, x in tensors.items()}
        with CommDebugMode() as count:
            found, own = outputs(function, spread, options)
        spread_grads = [distribute_tensor(g, mesh, f.placements) for g, f in zip(grads, found, strict=True)]
        with CommDebugMode() as count_back:
            got = torch.autograd.grad(found, own, spread_grads) if differentiable else []
        assert all(isinstance(x, DTensor) for x in (*found, *got))
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert all(x.placements == found[0].placements or x.dim() != 4 for x in found)
        pairs = [*zip(found, expected, strict=True), *zip(got, wanted, strict=True)]
        far = max((f.full_tensor().double() - e.double()).abs().max().item() for f, e in pairs)
        report[name] = far, count.get_total_counts() + count_back.get_total_counts()
    return report


@pytest.mark.parametrize("roles", [("batch",), ("heads",), ("none",)], ids=str)
def test_equal_to_whole_tensors_without_a_collective(two, roles):
    reports = two(_equal, roles, "")
    assert len(reports[0]) >= 14
    for report in reports:
        for name, (far, collectives) in report.items():
            assert far < LIMITS[two.device_type], (name, far)
            assert collectives == 0, name


@pytest.mark.parametrize("roles", [("batch", "heads"), ("none", "batch"), ("heads",)], ids=str)
def test_meshes_of_four(four, roles):
    reports = four(_equal, roles, "attention")
    assert len(reports[0]) >= 4
    for report in reports:
        for name, (far, collectives) in report.items():
            assert far < LIMITS[four.device_type], (name, far)
            assert collectives == 0, name


def _refused(rank, ranks, device):
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    query, key, value, scores = data(device, (B, H, T, D), (B, HKV, T, D), (B, HKV, T, D), (B, HKV, T))

    def on(x, place):
        return DTensor.from_local(x, mesh, [place]) if isinstance(place, Partial) else distribute_tensor(x, mesh, [place])

    def said(function, *args, **options):
        try:
            function(*args, **options)
        except saccade.InvalidArgument as error:
            return str(error)

    sharded = [on(x, Shard(1)) for x in (query, key, value)]
    six = distribute_tensor(data(device, (B, 6, T, D))[0], mesh, [Shard(1)])
    seen = scores[:, 0] > 0
    rows, ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (4, T))
    other = DeviceMesh(device.type, list(range(ranks))[::-1])
    return {
        "sequence": said(saccade.attention, *(on(x, Shard(2)) for x in (query, query, query))),
        "head dim": said(saccade.nm_sparse_attention, *(on(x, Shard(3)) for x in (query, query, query))),
        "partial": said(saccade.attention, *(on(x, Partial()) for x in (query, query, query))),
        "mixed": said(saccade.attention, sharded[0], on(key, Replicate()).requires_grad_(), sharded[2], enable_gqa=True),
        "plain": said(saccade.dynamic_mask_attention, *sharded, scores, keep=3, enable_gqa=True),
        "groups": said(saccade.attention, six, *(on(data(device, (B, 3, T, D))[0], Shard(1)),) * 2, enable_gqa=True),
        "tokens": said(saccade.attention_varlen, *(on(query[0], Shard(0)),) * 3, rows, rows, 4, 4),
        # on each of two ranks the part would be a call that is allowed
        "groups of tokens": said(
            saccade.attention_varlen,
            on(data(device, (T, 5, D))[0], Shard(1)),
            *(on(key[0, :2].transpose(0, 1), Shard(1)),) * 2,
            *(rows, rows, 4, 4),
            enable_gqa=True,
        ),
        "dropout": said(saccade.attention, *(on(query, Replicate()),) * 3, dropout_p=0.1),
        "no probability": said(saccade.attention, *(on(query, Replicate()),) * 3, dropout_p=-0.1),
        "mesh": said(saccade.attention, sharded[0], *(distribute_tensor(query, other, [Shard(1)]),) * 2),
        "rank": said(saccade.attention, *(on(query[0], Shard(0)),) * 3),
        "other": said(saccade.attention, sharded[0], None, None),
        "one row": said(saccade.attention, *(on(x, Replicate()) for x in (query[:1], query, query))),
        "one head": said(saccade.attention, *(on(x, Shard(0)) for x in (query[:, :1], query, query))),
        "rows": said(
            saccade.dynamic_mask_attention,
            *(on(x[:ranks], Shard(0)) for x in (query, query, query, query[..., 0])),
            keep=3,
            cu_seqlens=ends,
        ),
        "rows of expiry": said(saccade.expiry, on(scores[:ranks], Shard(0)), 3, cu_seqlens=ends),
        "packed": said(saccade.attention_qkvpacked, on(data(device, (B, T, 3, H, D))[0], Shard(1))),
        "plain key_mask": said(saccade.attention, *(on(query, Shard(0)),) * 3, key_mask=seen),
        "sharded key_mask": said(saccade.attention, *(query,) * 3, key_mask=on(seen, Shard(0))),
    }


def test_placements_that_cannot_run_are_named(two):
    for texts in two(_refused):
        end = "Shard(0), the batch, Shard(1), the heads, and Replicate() run without an exchange: redistribute it to one of these first"
        # torch writes a placement as Shard(dim=2) or S(2)
        assert texts["sequence"].startswith(f"query is {Shard(2)} on mesh dim tp (size 2); {end}, or see saccade.distributed")
        assert texts["head dim"] == f"query is {Shard(3)} on mesh dim tp (size 2); {end}"
        assert texts["partial"] == f"query is {Partial()} on mesh dim tp (size 2); {end}"
        assert texts["mixed"].startswith(
            f"key is {Replicate()} on mesh dim tp (size 2), where query is sharded by its heads; it must be"
        )
        assert texts["plain"].startswith(
            "key_scores is a plain tensor and query is sharded on mesh dim tp (size 2); make key_scores a DTensor"
        )
        assert texts["groups"].startswith("key has 3 heads and query 6, sharded over 2 ranks; both must be multiples of 2")
        assert texts["groups of tokens"].startswith(
            "key has 2 heads and query 5, sharded over 2 ranks; both must be multiples of 2"
        )
        assert texts["tokens"].startswith(
            f"query is {Shard(0)} on mesh dim tp (size 2); Shard(1), the heads, and Replicate() run"
        )
        assert texts["dropout"].startswith("dropout_p is 0.1 and query is replicated on mesh dim tp (size 2)")
        assert texts["no probability"] == "dropout_p is -0.1; allowed is 0 <= dropout_p < 1"
        assert "they must be on one mesh" in texts["mesh"]
        assert texts["rank"] == f"query has shape {[H, T, D]}; a DTensor must be [B, H, T, D], as key and value"
        for name, given in (("one row", [1, H, T, D]), ("one head", [B, 1, T, D])):
            assert texts[name].startswith(f"query has shape {given}, key {[B, H, T, D]}; a DTensor query is not broadcast")
        assert texts["other"] == "key is a NoneType; it must be a torch.Tensor"
        assert "Shard(3), the heads" in texts["packed"]
        assert texts["plain key_mask"].startswith("key_mask is a plain tensor and query is sharded on mesh dim tp")
        assert texts["sharded key_mask"] == (
            "key_mask is a DTensor, a subclass of torch.Tensor with operations of its own; "
            "it must be a plain torch.Tensor, such as key_mask.to_local()"
        )
        for name, heads in (("rows", H), ("rows of expiry", HKV)):  # each rank holds one row of two
            assert texts[name].startswith(f"key_scores is [2, {heads}, 12]; with cu_seqlens all documents lie in one row")


def _smaller(rank, ranks, device):
    """Calls that are refused with whole tensors, although each rank's parts would broadcast."""
    mesh = init_device_mesh(device.type, (ranks,))
    query, packed, mask, few, scores = data(device, (B, H, T, D), (B, T, 3, H, D), (ranks, 1, T, T), (B, ranks, T, T), (B, H, T))
    lengths, blocks = (
        torch.ones(B - 1, dtype=torch.int64, device=device),
        torch.ones(ranks, 1, 1, 1, dtype=torch.bool, device=device),
    )

    def by(dim, *tensors):
        return [distribute_tensor(x, mesh, [Shard(dim)]) for x in tensors]

    rows, heads = by(0, query, query, query), by(1, query, query, query)
    calls = {
        "rows of key": lambda: saccade.attention(rows[0], *by(0, query[:ranks], query[:ranks])),
        "heads of key": lambda: saccade.attention(heads[0], *by(1, query[:, :ranks], query[:, :ranks])),
        "rows of mask": lambda: saccade.attention(*rows, *by(0, mask)),
        "heads of mask": lambda: saccade.attention(*heads, *by(1, few)),
        "rows of lengths": lambda: saccade.attention(*rows, lengths=by(0, lengths)[0]),
        "rows of key_mask": lambda: saccade.attention(*rows, key_mask=by(0, mask[:, 0, 0] > 0)[0]),
        "packed": lambda: saccade.attention_qkvpacked(*by(0, packed, mask)),
        "nm": lambda: saccade.nm_sparse_attention(*rows, *by(0, mask)),
        "nm, heads": lambda: saccade.nm_sparse_attention(*heads, *by(1, few)),
        "dynamic, rows of lengths": lambda: saccade.dynamic_mask_attention(
            *rows, *by(0, scores), keep=3, lengths=by(0, lengths)[0]
        ),
        "dynamic, heads of key": lambda: saccade.dynamic_mask_attention(
            heads[0], *by(1, query[:, :3], query[:, :3], scores[:, :3]), keep=3, enable_gqa=True
        ),
        "blocks": lambda: saccade.nm_sparse_attention(*rows, block_mask=by(0, blocks)[0]),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = f"no error: {call().shape}"
        except saccade.InvalidArgument as error:
            said[name] = str(error)
    return said


def test_errors_are_about_whole_tensors(two):
    wanted = {
        "rows of key": "batch dimensions differ", "heads of key": "query has 4 heads, key and value 2; pass enable_gqa=True",
        "rows of mask": "attn_mask has shape [2, 1, 12, 12]; it must broadcast to [4, 4, 12, 12]",
        "heads of mask": "attn_mask has shape [4, 2, 12, 12]", "rows of lengths": "lengths has shape [3]",
        "rows of key_mask": "key_mask has shape [2, 12]; it must be [4, 12]", "packed": "attn_mask has shape [2, 1, 12, 12]",
        "nm": "attn_mask has shape [2, 1, 12, 12]", "nm, heads": "attn_mask has shape [4, 2, 12, 12]",
        "dynamic, rows of lengths": "lengths has shape [3]", "dynamic, heads of key": "4 query heads are no multiple of 3 key heads",
        "blocks": "block_mask has shape [2, 1, 1, 1]",
    }  # fmt: skip
    for said in two(_smaller):
        assert said.keys() == wanted.keys()
        for name, text in said.items():
            assert text.startswith(wanted[name]), (name, text)


def _outside(rank, ranks, device):
    mesh = DeviceMesh(device.type, [0])
    query = distribute_tensor(data(device, (B, H, T, D))[0], mesh, [Shard(0)])
    try:
        return str(saccade.attention(query, query, query).shape)
    except saccade.InvalidArgument as error:
        return str(error)


def test_a_rank_outside_the_mesh(two):
    inside, outside = two(_outside)
    assert inside == str(torch.Size((B, H, T, D)))
    assert outside.endswith("which this rank is not in; only the ranks of a mesh call an operation on it")


def _plain_and_cut(rank, ranks, device):
    """Plain tensors beside replicas, and replicas that are cut without an exchange."""
    mesh = init_device_mesh(device.type, (ranks,))
    query, key, value = data(device, *[(B, H, T, D)] * 3)
    lengths = torch.tensor([12, 7, 1, 9], device=device)
    expected = saccade.attention(query, key, value, lengths=lengths)
    sharded = [distribute_tensor(x, mesh, [Shard(0)]) for x in (query, key, value)]
    replicas = [distribute_tensor(x, mesh, [Replicate()]) for x in (query, key, value)]
    with CommDebugMode() as count:
        cut = saccade.attention(*sharded, lengths=distribute_tensor(lengths, mesh, [Replicate()], src_data_rank=None))
        plain = saccade.attention(*replicas, lengths=lengths)
    assert count.get_total_counts() == 0
    near = {"atol": LIMITS[device.type]}
    same = torch.allclose(cut.full_tensor(), expected, **near) and torch.allclose(plain.full_tensor(), expected, **near)
    # heads outside of time in memory, as a projection makes them: the result is laid out so, too
    views = [distribute_tensor(x.transpose(1, 2).contiguous(), mesh, [Shard(2)]).transpose(1, 2) for x in (query, key, value)]
    out = saccade.attention(*views, lengths=lengths)
    assert out.stride() == tuple(views[0].stride())
    masks = {"attn_mask": data(device, (H, 1, T))[0] > 0, "key_mask": torch.arange(T, device=device) < lengths[:, None]}
    expected_masked = saccade.attention(query, key, value, **masks)
    heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (query, key, value)]
    masked = saccade.attention(*heads, **masks | {"attn_mask": distribute_tensor(masks["attn_mask"], mesh, [Shard(0)])})
    same = same and torch.allclose(masked.full_tensor(), expected_masked, **near)
    return same and torch.allclose(out.full_tensor(), expected, **near)


def test_plain_tensors_beside_replicas_and_replicas_that_are_cut(two):
    assert all(two(_plain_and_cut))


def _dropped(rank, ranks, device):
    """Sharded heads drop weights by their rank's generator, in backward as in forward."""
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(rank)
    tensors = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in data(device, *[(B, H, T, D)] * 3)]
    out = saccade.attention(*tensors, dropout_p=0.5, backend="reference")
    (dvalue,) = torch.autograd.grad(out, tensors[2], out.detach())
    # linear in value: <out, out> = <dvalue, value>
    local = [x.to_local().detach() for x in (out, dvalue, tensors[2])]
    return (local[0].square().sum() - (local[1] * local[2]).sum()).abs().item() / local[0].square().sum().item()


def test_dropout_of_sharded_heads(two):
    assert max(two(_dropped)) < LIMITS[two.device_type]


MODULES = {
    "self-attention": lambda: nn.SelfAttention(32, 4),
    "a layer": lambda: nn.EncoderLayer(32, 4, 48, dropout=0.0),
    "pooling": lambda: nn.AttentionPooling(32, 4),
    "dynamic masks": lambda: nn.DynamicMaskAttention(32, 4, keep=4),
}


def _modules(rank, ranks, device, name):
    """The error of outputs and gradients of a module whose parameters are replicated and whose input is sharded by batch."""
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(5)
    whole, copy = MODULES[name]().to(device), MODULES[name]().to(device)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # the scores of dynamic masks begin as equal ones
    copy.load_state_dict(whole.state_dict())
    sharded = distribute_module(copy, mesh)
    (x,) = data(device, (B, T, 32))
    given = [x.requires_grad_(), distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()]
    outs = [module(y) for module, y in zip((whole, sharded), given, strict=True)]
    torch.autograd.backward(outs, [2 * out.detach() for out in outs])
    pairs = [outs, [y.grad for y in given], *zip(*[[p.grad for p in m.parameters()] for m in (whole, sharded)], strict=True)]
    return outs[1].placements == (Shard(0),), max(
        (a - b.full_tensor()).abs().max().item() / a.abs().max().item() for a, b in pairs if a is not None
    )


@pytest.mark.parametrize("name", MODULES)
def test_modules_with_sharded_batches(two, name):
    for placed, error in two(_modules, name):
        assert placed
        assert error < LIMITS[two.device_type]


def _hooks_of_parts(rank, ranks, device):
    mesh = init_device_mesh(device.type, (ranks,))
    leaves = [x.requires_grad_() for x in data(device, *[(B, H, T, D)] * 3)]
    tensors = [distribute_tensor(x, mesh, [Shard(0)]) for x in leaves]
    assert all(x._local_tensor.requires_grad for x in tensors)
    with torch.no_grad():
        for _ in range(3):
            saccade.attention(*tensors)
    return sum(len(x._local_tensor._backward_hooks or ()) for x in tensors)


def test_calls_without_a_gradient_leave_no_hook(two):
    assert two(_hooks_of_parts) == [0, 0]


def _refusing_modules(rank, ranks, device):
    mesh = init_device_mesh(device.type, (ranks,))
    made = nn.NystromAttention(32, 4, 4), nn.TriangleAttention(32, 8, 4)
    for module, name, x in zip(made, ("x", "z"), data(device, (B, T, 32), (B, T, T, 32)), strict=True):
        said = rf"{name} is a DTensor; nn.{type(module).__name__} takes plain tensors"
        with pytest.raises(saccade.InvalidArgument, match=said):
            module.to(device)(distribute_tensor(x, mesh, [Shard(0)]))
    return True


def test_modules_that_refuse_dtensors(two):
    assert all(two(_refusing_modules))


def _compiled(rank, ranks, device):
    mesh = init_device_mesh(device.type, (ranks,))
    tensors = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in data(device, *[(B, H, T, D)] * 3)]

    def run(query, key, value):
        return saccade.attention(query * 2, key, value, is_causal=True) + 1

    eager = run(*tensors)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(*tensors)
    both = [torch.autograd.grad(x, tensors, torch.ones_like(x)) for x in (eager, compiled)]
    return max((a - b).to_local().abs().max().item() for a, b in [(eager, compiled), *zip(*both, strict=True)])


def test_compiled(two):
    assert max(two(_compiled)) < LIMITS[two.device_type]


def test_importing_saccade_imports_no_tensor_of_distributed():
    check = "import sys, saccade; assert not [m for m in sys.modules if m.startswith(('torch.distributed.tensor', 'saccade.distributed'))]"
    subprocess.run([sys.executable, "-c", check], check=True)
