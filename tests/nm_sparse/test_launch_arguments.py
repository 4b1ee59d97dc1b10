"""What the launches with tensor maps give their kernels, by name, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import saccade
from saccade.errors import InvalidArgument
from saccade.nm_sparse.args import NMSparseArgs
from saccade.nm_sparse.backward_sm90 import launchers as backward
from saccade.nm_sparse.backward_sm90 import one_pass
from saccade.nm_sparse.fused import launchers as fused
from saccade.nm_sparse.fused.config import pick_backward, pick_sm80, pick_sm90
from saccade.nm_sparse.key_bits import KeyBits
from saccade.nm_sparse.query_bits import QueryBits
from saccade.nvrtc import Parameters

B, H, HKV, TQ, TK, D = 2, 4, 2, 130, 200, 64


@pytest.fixture
def given(monkeypatch):
    """The arguments of each launch, by kernel; every name must be one of the kernel's. A map is the numbers that it is made of."""
    seen = {}

    def load(source, kernel, parameters, *rest):
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


def assert_sizes(found, args, kept):
    assert (found["heads"], found["group"], found["q_len"], found["counters"]) == (H, H // HKV, TQ, TK // 4)
    assert (found["words"], found["threshold"]) == (kept.shape[3], 1 << 23)
    assert found["spared"] == 2.0
    assert found["block_mask"] == args.block_mask.data_ptr()
    assert found["seed"] == args.seed.data_ptr()
    assert strides_in(found, "mask") == args.block_mask.expand(B, H, -1, -1).stride()[:3]


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
        assert (found["part_outs"], found["part_sums"], found["whole"], found["parts"]) == (0, 0, B * H * -(-TQ // 128), 1)


@pytest.mark.parametrize("arch", [80, 90])
def test_forward_with_a_mask_of_queries(given, monkeypatch, arch):
    """The bits of the mask, their steps, the hidden tiles as a block mask for each problem, and cleared values."""
    mask, words = torch.ones(B, H, TQ, TK, dtype=torch.bool), 8
    mask[0, 1] = False
    bits = torch.zeros(B, H, TQ, words, dtype=torch.int32)
    tiles, seen = torch.ones(B, H, 3, 4, dtype=torch.bool), torch.ones(B, H, TK, dtype=torch.bool)
    tiles[1, 0, 2, 1] = False
    seen[:, :, 7] = False
    seen[0, 2, 9] = False  # seen by the other head of these keys
    packed = QueryBits(bits, tiles, seen)
    monkeypatch.setattr(fused, "pack_queries", lambda *given: packed)
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
    assert torch.equal(value[0, 1, 9], args.value[0, 1, 9])
    assert torch.equal(value[:, :, 10:], args.value[:, :, 10:])


def test_backward(given, featured):
    dout, lse, kept = made()
    delta = torch.empty_like(lse)
    dquery, dkey, dvalue = tensors_of((TQ, H), (TK, HKV), (TK, HKV))
    dkv, dq = pick_backward(D, True)
    backward.launch_dkv(featured, dkv, dout, lse, kept, delta, dkey, dvalue)
    backward.launch_dq(featured, dq, dout, lse, kept, delta, dquery)
    for kernel, gradients in (("backward_dkv_sm90", {"dkey": dkey, "dvalue": dvalue}), ("backward_dq_sm90", {"dquery": dquery})):
        found = given[kernel]
        assert_sizes(found, featured, kept)
        assert (found["kv_len"], found["seen"], found["head_dim"], found["scale"]) == (TK, TK, D, 0.125)
        for name, tensor in {"kept": kept, "lse": lse, "delta": delta, **gradients}.items():
            assert found[name] == tensor.data_ptr()
        for name, tensor in gradients.items():
            assert strides_in(found, name) == tensor.stride()[:3]
        assert found["query_map"][:2] == (featured.query.data_ptr(), (B, H, TQ, D))
        assert found["dout_map"][:2] == (dout.data_ptr(), (B, H, TQ, D))
        assert found["value_map"][:2] == (featured.value.data_ptr(), (B, HKV, TK, D))
        assert found["key_map"][1] == (B, HKV, TK, D)  # in dQ of a copy, as a mask may hide NaN


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


def test_an_argument_that_is_not_given_is_missed(given, featured):
    out, lse, kept = made()
    config = pick_sm80(D, 80, 2, False, True, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "SM80_PARAMETERS", fused.SM80_PARAMETERS + Parameters(int32="more"))
        with pytest.raises(InvalidArgument, match="kernel fused_sm80 lacks more; it takes query, key, value, out, lse"):
            fused.launch_sm80(featured, config, out, lse, kept)
    assert not given
