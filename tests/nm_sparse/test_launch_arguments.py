"""The arguments that launches with tensor maps pass to their kernels, by name, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import emulator
import pytest
import torch

import saccade
from saccade.errors import InvalidArgument
from saccade.nm_sparse import bias_rows, mask_bits
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backward_sm90 import launchers as backward
from saccade.nm_sparse.backward_sm90 import one_pass
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.fused.config import pick_backward, pick_sm80, pick_sm90
from saccade.nm_sparse.key_bits import KeyBits
from saccade.nm_sparse.query_bits import QueryBits
from saccade.nm_sparse.reference import whole_tiles
from saccade.nvrtc import parameters_of

B, H, HKV, TQ, TK, D = 2, 4, 2, 130, 200, 64


@pytest.fixture
def given(monkeypatch):
    """The arguments of each launch, by kernel; every name must be one of the kernel's. A map is the numbers that it is made of."""
    seen = {}

    def load(source, kernel, options, *rest):
        parameters = parameters_of(source, kernel, options)

        def launch(**arguments):
            in_order = parameters.in_order(kernel, arguments)
            assert list(zip(parameters.kinds, in_order, strict=True)) == [(name, arguments[name]) for name in parameters.kinds]
            seen[kernel] = arguments

        return SimpleNamespace(configure=lambda **shape: launch)

    for module in (fused, backward, one_pass):
        monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(fused, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(fused, "tensor_map", lambda *numbers: numbers)
    return seen


def tensors_of(*lengths_and_heads):
    return [torch.randn(B, length, heads, D, dtype=torch.bfloat16).transpose(1, 2) for length, heads in lengths_and_heads]


def arguments(**changes) -> NMSparseArgs:
    query, key, value = tensors_of((TQ, H), (TK, HKV), (TK, HKV))
    plain = NMSparseArgs(query, key, value, None, None, None, None, 2, 4, 0.0, False, 0.125)
    return plain._replace(**changes)


def strides_in(found, name, count=3):
    return tuple(found[f"{name}_{dim}"] for dim in ("batch", "head", "row")[:count])


def assert_sizes(found, args, kept, transposed=False):
    assert (found["heads"], found["group"], found["q_len"], found["counters"]) == (H, H // HKV, TQ, TK // 4)
    assert (found["words"], found["threshold"]) == (kept.shape[3], 1 << 23)
    assert found["spared"] == 2.0
    assert (found["block_mask"] == args.block_mask.data_ptr()) != transposed
    assert found["seed"] == args.seed.data_ptr()
    mask = args.block_mask.mT.contiguous() if transposed else args.block_mask
    assert strides_in(found, "mask") == mask.expand(B, H, -1, -1).stride()[:3]


@pytest.fixture
def featured():
    blocks = torch.ones(B, 1, -(-TQ // 64), -(-TK // 64), dtype=torch.bool)
    return arguments(block_mask=blocks, seed=torch.tensor([3]), dropout_p=0.5)


def made():
    (out,) = tensors_of((TQ, H))
    return out, torch.empty(B, H, TQ), torch.zeros(B, H, TQ, 7, dtype=torch.int32)


@pytest.mark.parametrize("arch", [80, 90])
def test_forward(given, featured, arch):
    out, lse, kept = made()
    keys = KeyBits(torch.zeros(B, 11, dtype=torch.int32), torch.zeros(B, 2, dtype=torch.int32))
    if arch == 80:
        fused.launch_sm80(featured, pick_sm80(D, 80, 2, False, True, False), out, lse, kept, keys)
    else:
        fused.launch_sm90(featured, pick_sm90(D, 2, TQ, False, True, True, False), out, lse, kept, keys)
    found = given[f"fused_sm{arch}"]
    assert_sizes(found, featured, kept)
    assert (found["kv_len"], found["problems"], found["opaque_one"]) == (TK, B * H, 1)
    assert (found["key_words"], found["keys_batch"]) == (11, 1)
    for name, tensor in (("out", out), ("lse", lse), ("kept", kept), ("key_bits", keys.bits), ("key_spans", keys.spans)):
        assert found[name] == tensor.data_ptr()
    assert strides_in(found, "out") == out.stride()[:3]
    inputs = {"query": featured.query, "key": featured.key, "value": featured.value}
    for name, tensor in inputs.items():
        if arch == 80:
            assert (found[name], strides_in(found, name)) == (tensor.data_ptr(), tensor.stride()[:3])
        else:
            assert found[f"{name}_map"][0] == tensor.data_ptr()
    if arch == 90:
        assert found["tail_map"][:2] == (featured.key.data_ptr(), (B, HKV, TK, D))
        assert found["key_map"][1] == (B, HKV, TK // 4, 4, D)
        assert (found["part_outs"], found["part_sums"], found["whole"], found["parts"]) == (0, 0, B * H * -(-TQ // 64), 1)


@pytest.mark.parametrize("arch", [80, 90])
def test_forward_with_a_mask_of_queries(given, monkeypatch, arch):
    """The bits of the mask, their steps, the hidden tiles as a block mask for each problem, and cleared values."""
    mask, words = torch.ones(B, H, TQ, TK, dtype=torch.bool), 8
    mask[0, 1] = mask[..., 7] = mask[1, 1, :, 9] = False
    bits = torch.zeros(B, H, TQ, words, dtype=torch.int32)
    tiles = torch.ones(B, H, 3, 4, dtype=torch.bool)
    tiles[1, 0, 2, 1] = False
    packed = QueryBits(bits, tiles, mask.any(2))
    monkeypatch.setattr(mask_bits, "pack_queries", lambda *given: packed)
    monkeypatch.setattr(fused, "arch_of", lambda device: arch)
    monkeypatch.setattr(fused, "addresses", lambda **tensors: tensors)
    monkeypatch.setattr(fused, "rows_map", lambda tensor, *box: tensor)
    blocks = torch.ones(1, H, 3, 4, dtype=torch.bool)
    blocks[0, 3] = False
    args = arguments(mask=mask, block_mask=blocks)
    fused.forward(args, True)
    found = given[f"fused_sm{arch}"]
    assert found["key_bits"] is bits
    assert found["key_spans"] is None
    assert (found["key_words"], found["keys_batch"], found["keys_head"], found["keys_query"]) == (words, H * TQ, TQ, 1)
    assert torch.equal(found["block_mask"], tiles & blocks)
    assert strides_in(found, "mask") == (tiles & blocks).stride()[:3]
    value = found["value" if arch == 80 else "value_map"]
    assert not value[:, :, 7].any()
    assert torch.equal(value[1, 0, 9], args.value[1, 0, 9])  # seen by the other head of these keys
    assert torch.equal(value[:, :, 10:], args.value[:, :, 10:])


BIASES = {
    "where it lies": (lambda: torch.randn(B, H, TQ, TK).bfloat16(), True),
    "of a head": (lambda: torch.randn(1, H, TQ, TK).bfloat16(), True),
    "expanded": (lambda: torch.randn(1, 1, TQ, TK).expand(B, H, TQ, TK), True),
    "keys": (lambda: torch.randn(B, 1, 1, TK), True),
    "rank 2": (lambda: torch.randn(TQ, TK).bfloat16(), True),
    "more columns": (lambda: torch.randn(B, H, TQ, TK + 8)[..., :TK], True),
    "queries": (lambda: torch.randn(B, H, TQ, 1), False),
    "columns first": (lambda: torch.randn(B, H, TK, TQ).mT, False),
    "an odd address": (lambda: torch.randn(B, H, TQ, TK + 8)[..., 1 : TK + 1], False),
    "another dtype": (lambda: torch.randn(B, H, TQ, TK).double(), False),
    "half beside bfloat16": (lambda: torch.randn(B, H, TQ, TK).half(), False),
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("arch", [80, 90])
def test_forward_with_a_bias(given, monkeypatch, arch, kind):
    """Its address and steps, 0 where it broadcasts; values of keys that it hides from all queries are cleared."""
    make, same = BIASES[kind]
    torch.manual_seed(0)
    bias = make()
    if bias.shape[-1] == TK:
        bias = bias.clone(memory_format=torch.preserve_format) if kind == "expanded" else bias
        bias.data[..., 7] = -torch.inf
    monkeypatch.setattr(fused, "arch_of", lambda device: arch)
    monkeypatch.setattr(fused, "addresses", lambda **tensors: tensors)
    monkeypatch.setattr(fused, "rows_map", lambda tensor, *box: tensor)
    monkeypatch.setattr(
        bias_rows, "shown_values", lambda bias, value, blocks, is_causal: (bias[:, ::2, 0, :TK] != -torch.inf)[..., None]
    )
    args = arguments(bias=bias)
    fused.forward(args, True)
    found = given[f"fused_sm{arch}"]
    rows = found["bias"]
    assert rows.dtype in (torch.bfloat16, torch.float32)
    assert torch.equal(rows[..., :TK].float(), bias.expand(B, H, TQ, TK).float())
    assert (rows.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()) == same
    assert strides_in(found, "bias") == rows.stride()[:3]
    assert not any(n * rows.element_size() % 16 for n in (found["bias_columns"], *strides_in(found, "bias")))
    assert rows.data_ptr() % 16 == 0
    assert rows.stride(3) == 1
    whole = bias[(None,) * (4 - bias.dim())]
    shared = [dim for dim in range(3) if whole.shape[dim] == 1 or whole.stride(dim) == 0]
    assert all(rows.stride(dim) == 0 for dim in shared)
    assert (found["score_scale"], found["bias_columns"]) == (args.scale, rows.shape[3])
    value = found["value" if arch == 80 else "value_map"]
    hidden = 7 if bias.shape[-1] == TK else None
    assert hidden is None or not value[:, :, hidden].any()
    assert torch.equal(value[:, :, 8:], args.value[:, :, 8:])


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["full", "a head's", "a batch row's", "keys", "keys of heads", "queries", "float32"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("blocks", [None, (1, 1), (B, H)], ids=["", "one block mask", "block masks"])
def test_which_values_are_shown(monkeypatch, kind, dtype, is_causal, blocks):
    """Values that are no numbers, of keys that are hidden from every query of the heads that share them."""
    monkeypatch.setattr(bias_rows, "run", lambda make, tensors, options, about: emulator.launch(make, tensors, *options, None))
    torch.manual_seed(0)
    query, value = torch.randn(B, H, TQ, D, dtype=dtype), torch.randn(B, TK, HKV, D).to(dtype).transpose(1, 2)
    bias = torch.randn(B, H, TQ, TK).masked_fill(torch.rand(B, H, 1, TK) < 0.8, -torch.inf)
    bias[:, :, :-1, 100:] = -torch.inf  # the last query alone
    bias[1, 1, 3, 7], bias[0, 0, 0, 8] = torch.nan, torch.finfo(torch.bfloat16).min
    cut = {"a head's": bias[:1], "a batch row's": bias[:, :1], "keys": bias[:, :1, :1], "keys of heads": bias[:1, :, :1]}
    bias = {**cut, "queries": bias[..., 7:8]}.get(kind, bias)
    bias = bias if kind == "float32" else bias.to(dtype)
    odd = torch.rand(B, HKV, TK) < 0.5
    odd[:, :, 7:9] = True
    at = torch.randint(D, (B, HKV, TK, 1))
    value.scatter_(3, at, torch.where(odd[..., None], torch.tensor([torch.nan, torch.inf])[at % 2], 1.0).to(dtype))
    tiles = None if blocks is None else torch.rand(*blocks, -(-TQ // 64), -(-TK // 64)) < 0.5
    found = bias_rows.shown_values(bias_rows.bias_rows(bias, query, TK), value, tiles, is_causal)
    seen = (bias != -torch.inf).expand(B, H, TQ, TK)
    seen = seen & torch.ones(TQ, TK, dtype=torch.bool).tril() if is_causal else seen
    seen = (seen if tiles is None else seen & whole_tiles(tiles, TQ, TK, 64)).unflatten(1, (HKV, -1)).any(3).any(2)
    assert torch.equal(found[..., 0], seen | ~odd)
    assert not found.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_backward_with_a_bias(given, monkeypatch, dtype):
    """Each kernel reads the bias; that of dQ, which runs first, writes what corrects weights, for the other."""
    dout, lse, _ = made()
    kept = torch.zeros(B, H, TQ, 7, dtype=torch.int32)
    gradients = tensors_of((TQ, H), (TK, HKV), (TK, HKV))
    monkeypatch.setattr(backward, "addresses", lambda **tensors: tensors)
    bias = torch.randn(1, H, TQ, TK).to(dtype)
    corrections = backward.gradients(arguments(bias=bias), dout, lse, kept, torch.empty_like(lse), *gradients)
    assert list(given) == ["backward_dq_sm90", "backward_dkv_sm90"]
    for found in given.values():
        assert found["bias"].data_ptr() == bias.data_ptr()
        assert strides_in(found, "bias") == (0, TQ * TK, TK)
        assert found["bias_columns"] == TK
        assert found["log_inverse"] is corrections
    assert corrections.shape == lse.shape


def test_backward(given, featured):
    dout, lse, kept = made()
    delta = torch.empty_like(lse)
    dquery, dkey, dvalue = tensors_of((TQ, H), (TK, HKV), (TK, HKV))
    dkv, dq = pick_backward(D, True)
    backward.launch_dkv(featured, dkv, dout, lse, kept, delta, dkey, dvalue)
    backward.launch_dq(featured, dq, dout, lse, kept, delta, dquery)
    for kernel, gradients in (("backward_dkv_sm90", {"dkey": dkey, "dvalue": dvalue}), ("backward_dq_sm90", {"dquery": dquery})):
        found = given[kernel]
        assert_sizes(found, featured, kept, transposed=kernel == "backward_dkv_sm90")
        assert (found["kv_len"], found["seen"], found["head_dim"], found["scale"]) == (TK, TK, D, 0.125)
        for name, tensor in {"kept": kept, "lse": lse, "delta": delta, **gradients}.items():
            assert found[name] == tensor.data_ptr()
        for name, tensor in gradients.items():
            assert strides_in(found, name) == tensor.stride()[:3]
        assert found["query_map"][:2] == (featured.query.data_ptr(), (B, H, TQ, D))
        assert found["dout_map"][:2] == (dout.data_ptr(), (B, H, TQ, D))
        assert found["value_map"][:2] == (featured.value.data_ptr(), (B, HKV, TK, D))
        assert found["key_map"][:2] == (
            featured.key.data_ptr(),
            (B, HKV, TK, D),
        )  # no copy without NaN: no product of hidden blocks is made


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_backward_in_one_pass(given, monkeypatch, ordered):
    """Its launches; what blocks of keys add to begins as zeros where none of them is the first."""
    kept, mask = torch.zeros(B, H, TQ, 7, dtype=torch.int32), torch.ones(B, 1, 1, TK, dtype=torch.bool)
    dout, lse, _ = made()
    delta = torch.empty_like(lse)
    dquery, dkey, dvalue = tensors_of((TQ, H), (TK, HKV), (TK, HKV))
    launch, seen = one_pass.launch_one_pass, []
    monkeypatch.setattr(one_pass, "launch_one_pass", lambda *all: seen.append(all) or launch(*all))
    args = arguments(mask=mask)
    args.key[0, 0, 5] = float("nan")
    with saccade.nm_sparse.unordered_gradients(not ordered):
        one_pass.gradients(args, dout, lse, kept, delta, dquery, dkey, dvalue)
    ((_, config, *_, sums, turns, _, _),) = seen
    assert config.ordered == ordered
    assert sums.numel() == B * H * 3 * 64 * D
    assert ordered or not sums.any()
    assert turns.tolist() == [0] * (1 + B * H * 3)
    found = given["backward_one_pass_sm90"]
    assert (found["heads"], found["group"], found["q_len"], found["kv_len"], found["words"]) == (H, H // HKV, TQ, TK, 7)
    assert (found["head_dim"], found["scale"], found["present"], found["vectors"]) == (D, 0.125, 255, 0)
    for name, tensor in {
        "kept": kept,
        "lse": lse,
        "delta": delta,
        "parked": sums,
        "turns": turns,
        "dkey": dkey,
        "dvalue": dvalue,
    }.items():
        assert found[name] == tensor.data_ptr()
    for name, tensor in {"dkey": dkey, "dvalue": dvalue}.items():
        assert strides_in(found, name) == tensor.stride()[:3]
    assert found["query_map"][:2] == (args.query.data_ptr(), (B, H, TQ, D))
    assert found["key_map"][0] != args.key.data_ptr()  # a copy, as the mask may hide NaN
    written = given["write_dq_sm90"]
    assert (written["parked"], written["dquery"]) == (sums.data_ptr(), dquery.data_ptr())
    assert (written["heads"], written["q_len"], written["head_dim"], written["scale"]) == (H, TQ, D, 0.125)
    assert strides_in(written, "dquery") == dquery.stride()[:3]


def test_an_argument_that_the_source_does_not_take_is_refused(given, featured):
    out, lse, kept = made()
    config = pick_sm80(D, 80, 2, False, True, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_bias_arguments", lambda args: {"more": 1})
        with pytest.raises(InvalidArgument, match="kernel fused_sm80 does not take more; it takes query, key, value, out, lse"):
            fused.launch_sm80(featured, config, out, lse, kept)
    assert not given


@pytest.mark.parametrize("kind", ["rows", "heads", "start", "columns"])
def test_rows_of_a_bias_begin_at_16_bytes(kind):
    """A bias is copied if a row of it begins elsewhere."""
    odd = {
        "rows": torch.randn(2, 3, 9, 17)[..., :16],
        "heads": torch.randn(500).as_strided((2, 3, 9, 16), (200, 51, 16, 1)),
        "start": torch.randn(2 * 3 * 9 * 16 + 1)[1:].view(2, 3, 9, 16),
        "columns": torch.randn(2, 3, 16, 9).mT,
    }[kind]
    query = torch.zeros(2, 3, 9, 8)
    found = bias_rows.bias_rows(odd, query, 16)
    assert torch.equal(found[..., :16], odd)
    assert found.stride(3) == 1
    assert not any(n * 4 % 16 for n in found.stride()[:3])
    assert found.data_ptr() % 16 == 0
    plain = odd.clone(memory_format=torch.contiguous_format)
    assert bias_rows.bias_rows(plain, query, 16).data_ptr() == plain.data_ptr()
