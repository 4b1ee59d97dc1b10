"""FLOPs of the ops against those that torch's counter finds for torch's own attention, and when formulas are handed over."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import saccade
from saccade.engine.flops import backward_flops, forward_flops
from saccade.exact.varlen import op as varlen_op
from saccade.exact.varlen.args import VarlenArgs
from saccade.nm_sparse.analysis import kept_by_pattern

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, H, T, D = 2, 4, 32, 16


def counted(call):
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_total_flops()


def qkv(batch=B, heads=H, kv_heads=H, q_len=T, kv_len=T, device=DEVICE):
    query = torch.randn(batch, heads, q_len, D, device=device, requires_grad=True)
    return query, *(torch.randn(batch, kv_heads, kv_len, D, device=device, requires_grad=True) for _ in range(2))


def by_torch(**sizes):
    """(forward, backward) of torch's function, whose products are counted one by one on tensors without data, and of the backward of
    its fused kernels."""
    query, key, value = (x.detach() for x in qkv(**sizes, device="meta"))
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    forward = counted(lambda: F.scaled_dot_product_attention(query, key, value))
    # the arguments of the kernel of 16 bits: sums of exponentials, no bias, seed and offset of dropout
    lse = torch.empty(query.shape[:3], device="meta")
    number = torch.empty((), dtype=torch.int64, device="meta")
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    call = (query, query, key, value, None, query, lse, number, number, 0.0, [True, True, True, False])
    return forward, counted(lambda: op(*call))


def both(call, leaves):
    """(forward, backward) of a call of ours."""
    found = []

    def run():
        found.append(call())

    forward = counted(run)
    return forward, counted(lambda: torch.autograd.grad(found[0].sum(), leaves))


def test_torch_counts_the_textbook_s_products():
    pairs = B * H * T * T
    assert by_torch() == (2 * pairs * 2 * D, 2 * pairs * 5 * D)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["dense", "causal"])
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_attention(options, kv_heads):
    leaves = qkv(kv_heads=kv_heads, kv_len=24)
    found = both(lambda: saccade.attention(*leaves, enable_gqa=True, backend="short", **options), leaves)
    assert found == by_torch(kv_heads=kv_heads, kv_len=24)


def test_attention_packed():
    packed = torch.randn(B, T, 3, H, D, device=DEVICE, requires_grad=True)
    assert both(lambda: saccade.attention_qkvpacked(packed, backend="short"), [packed]) == by_torch()


@pytest.mark.skipif(DEVICE != "cpu", reason="torch's log-sum-exp is returned on a CPU alone")
def test_backward_of_the_log_sum_exp_on_a_cpu():
    leaves = qkv()
    _, backward = both(lambda: saccade.attention(*leaves, return_lse=True, backend="sdpa")[1], leaves)
    assert backward == by_torch()[1]


@pytest.mark.parametrize("packed", [True, False])
def test_attention_varlen_adds_its_sequences(packed):
    lengths = [5, 16, 11]
    ends = torch.tensor([0, 5, 21, 32], dtype=torch.int32, device=DEVICE)
    if packed:
        leaves = [torch.randn(32, 3, H, D, device=DEVICE, requires_grad=True)]
        found = both(lambda: saccade.attention_varlen_qkvpacked(*leaves, ends, 16, backend="ragged"), leaves)
    else:
        leaves = [torch.randn(32, H, D, device=DEVICE, requires_grad=True) for _ in range(3)]
        found = both(lambda: saccade.attention_varlen(*leaves, ends, ends, 16, 16, backend="ragged"), leaves)
    wanted = [by_torch(batch=1, q_len=n, kv_len=n) for n in lengths]
    assert found == tuple(map(sum, zip(*wanted, strict=True)))


@pytest.mark.parametrize("is_causal", [True, False])
def test_dynamic_masks_count_the_kept_share(is_causal):
    leaves, scores = qkv(kv_heads=2), torch.randn(B, 2, T, device=DEVICE)

    def call():
        return saccade.dynamic_mask_attention(
            *leaves, scores, keep=8, is_causal=is_causal, enable_gqa=True, backend="gather_torch"
        )

    forward, backward = by_torch(kv_heads=2)
    assert both(call, leaves) == (forward * 8 // T, backward * 8 // T)
    with FlopCounterMode(display=False) as mode:
        saccade.dynamic_mask_attention(*leaves, scores, keep=1000, is_causal=is_causal, enable_gqa=True, backend="gather_torch")
    assert mode.get_total_flops() == forward


@pytest.mark.parametrize(("pattern", "share"), [("2:4", (1, 2)), ("1:2", (1, 2)), ("1:4", (1, 4))])
def test_pruned_attention_counts_every_score_and_kept_keys_otherwise(pattern, share):
    leaves = qkv()
    forward, backward = by_torch()
    found = both(lambda: saccade.nm_sparse_attention(*leaves, pattern=pattern, backend="masked"), leaves)
    assert found == (forward // 2 + forward // 2 * share[0] // share[1], backward * share[0] // share[1])


def test_a_rest_of_keys_is_kept_up_to_n():
    leaves = qkv(kv_len=22)  # five groups of four keep ten, and both of the last two
    pairs = B * H * T
    forward, _ = both(lambda: saccade.nm_sparse_attention(*leaves, backend="masked"), leaves)
    assert forward == 2 * pairs * 22 * D + 2 * pairs * 12 * D


@pytest.mark.parametrize("options", [{"dense_first": 8}, {"dense_recent": 4}, {"dense_first": 4, "dense_recent": 8}], ids=str)
@pytest.mark.parametrize("kv_len", [T, 22])
def test_keys_that_are_never_pruned_count_whole(options, kv_len):
    leaves = qkv(kv_len=kv_len)
    kept = kept_by_pattern(torch.zeros(T, kv_len), "2:4", **options).sum().item()
    assert kept > kept_by_pattern(torch.zeros(T, kv_len), "2:4").sum().item()
    forward, backward = both(lambda: saccade.nm_sparse_attention(*leaves, backend="masked", **options), leaves)
    assert forward == 2 * B * H * D * (T * kv_len + kept)
    assert backward == 2 * B * H * D * 5 * kept


def test_every_op_that_multiplies_has_a_formula():
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("saccade::")}
    counted_ops = {f"saccade::{packet.__name__}" for packet in flop_registry if "saccade" in str(packet)}
    assert {name for name in ours if "." not in name} - counted_ops == {
        "saccade::dynamic_mask_intervals",
        "saccade::dynamic_mask_kept",
    }


def test_packed_sequences_of_other_queries_than_keys():
    """Every pair within a sequence counts, and a failure is remembered by the longest lengths of both."""
    query, key = torch.zeros(9, 4, 8), torch.zeros(12, 2, 8)
    ends_q, ends_k = torch.tensor([0, 2, 9], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    args = VarlenArgs(query, key, key, ends_q, ends_k, None, None, 7, 8, 0.0, 0, 0.5)
    assert varlen_op._pairs(args) == 4 * (2 * 5 + 7 * 7)
    assert [x.shape for x in varlen_op._shapes(args)] == [(1, 4, 7, 8), (1, 2, 8, 8)]


def test_values_of_another_width():
    """Forward multiplies keys and values once each, backward keys three times and values twice."""
    assert forward_flops(10, 7, 3) == 2 * 10 * (7 + 3)
    assert backward_flops(10, 7, 3) == 2 * 10 * (3 * 7 + 2 * 3)


ORDERS = {
    "counter_last": "import saccade, sys; assert 'torch.utils.flop_counter' not in sys.modules and 'triton' not in sys.modules",
    "counter_first": "import torch.utils.flop_counter, saccade",
}


@pytest.mark.parametrize("order", ORDERS)
def test_formulas_are_handed_over_whoever_is_imported_first(order):
    code = f"""
{ORDERS[order]}
import importlib, sys, inspect, torch
before = list(sys.meta_path)
from torch.utils.flop_counter import flop_registry, FlopCounterMode
assert torch.ops.saccade.attention_forward in flop_registry
assert torch.ops.saccade.nm_sparse_backward in flop_registry
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("saccade")]
assert "class FlopCounterMode" in inspect.getsource(sys.modules["torch.utils.flop_counter"])
importlib.reload(sys.modules["torch.utils.flop_counter"])
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
