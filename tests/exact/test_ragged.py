"""The ragged kernels: lists of sequences by length, and `attention` with lengths, which reads real keys alone at any length.

Packed sequences are tested in test_varlen.py.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
import torch
from contracts.exact import DEVICE, DTYPES, AttentionContract, named
from contracts.opt_outs import opted_out

import saccade
from saccade import native
from saccade.errors import CompileError
from saccade.exact.long import choice, config, sm90
from saccade.exact.problem import describe_attention
from saccade.exact.ragged import call as ragged_call
from saccade.exact.ragged import launchers, launches, token_launches
from saccade.exact.ragged import plan as ragged_plan
from saccade.exact.ragged.backend import RAGGED
from saccade.exact.ragged.config import MOST_AT_ONCE, TILES
from saccade.exact.ragged.dense import DENSE
from saccade.exact.testing.check import check_attention
from saccade.exact.varlen.args import VarlenArgs
from saccade.exact.varlen.problem import describe_varlen
from saccade.launch import disabled
from saccade.launch.triton import launch_any
from saccade.native.recording import Recorder
from saccade.testing.cases import Case
from saccade.testing.judge import report


@opted_out("exact/test_ragged.py::TestRagged")
class TestRagged(AttentionContract):
    """Dense rows, whole or with lengths."""

    backend = "ragged"


# more than a tile of queries and keys, whose ends are not those of a tile
BESIDE = [
    Case("a-bias-for-all", 2, 2, 2, 70, 150, 16, bias=(1, 2, 70, 150)),
    Case("a-bias-of-keys", 3, 2, 2, 70, 90, 16, bias=(3, 1, 1, 90)),
    Case("a-bias-of-queries", 2, 2, 1, 70, 150, 16, bias=(70, 1)),
    Case("a-bias-for-each", 2, 4, 2, 70, 90, 16, bias=(2, 4, 70, 90), dropout_p=0.2, lse_grad=True, lengths=True),
    Case("biases-of-windows", 4, 2, 2, 70, 70, 16, bias=(2, 2, 70, 70), windows=2),
    Case("a-mask", 2, 2, 2, 70, 150, 16, mask="bool"),
    Case("a-mask-and-lengths", 3, 4, 2, 70, 90, 24, mask="bool", mask_shape=(3, 1, 1, 90), lengths=True, dropout_p=0.1),
    Case("whole-rows", 2, 4, 2, 70, 150, 16, dropout_p=0.1, lse_grad=True),
    Case("whole-causal-rows", 2, 2, 2, 150, 90, 16, is_causal=True),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_masks_and_biases(case, dtype):
    results = check_attention(case, dtype, DEVICE, "ragged")
    assert all(r.ok for r in results), report(case, results)


SIZES = {
    "square": (3, 2, 2, 150, 150, 16),
    "grouped": (2, 4, 2, 20, 140, 24),
    "decoding": (4, 2, 2, 1, 200, 16),
    "short": (5, 2, 2, 9, 12, 32),
    "wide": (2, 1, 1, 33, 40, 256),
}
FEATURES: dict[str, dict] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.2},
    "lse-grad": {"lse_grad": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", SIZES)
def test_budget(size, feature, dtype):
    case = Case(f"{size}-{feature}", *SIZES[size], lengths=True, **FEATURES[feature])
    results = check_attention(case, dtype, DEVICE, "ragged")
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("features", [{}, {"is_causal": True, "lse_grad": True}], ids=["plain", "causal"])
def test_packed(features):
    case = Case("packed", 3, 2, 2, 140, 140, 16, lengths=True, packed=True, **features)
    results = check_attention(case, DTYPES[0], DEVICE, "ragged")
    assert all(r.ok for r in results), report(case, results)


def padded(dtype=DTYPES[0], q_len=140, kv_len=150):
    query, key, value = (torch.randn(3, t, 2, 16, device=DEVICE).to(dtype).transpose(1, 2) for t in (q_len, kv_len, kv_len))
    return query, key, value, torch.tensor([0, 129, 70], dtype=torch.int32, device=DEVICE)


def differentiated(query, key, value, lengths, **options):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out = saccade.attention(*leaves, lengths=lengths, backend="ragged", **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def test_padding_may_hold_anything():
    query, key, value, lengths = padded()
    clean = differentiated(query, key, value, lengths)
    beyond = (torch.arange(150, device=DEVICE) >= lengths[:, None])[:, None, :, None]
    dirty = differentiated(query, key.masked_fill(beyond, float("nan")), value.masked_fill(beyond, float("inf")), lengths)
    for x, y in zip(dirty, clean, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert not clean[0][0].any()  # a row without keys
    for gradient in clean[2:]:
        assert not gradient.masked_select(beyond.expand_as(gradient)).any()


def test_layouts_give_the_same():
    query, key, value, lengths = padded()
    expected = differentiated(query, key, value, lengths)
    for x, y in zip(differentiated(*(x.contiguous() for x in (query, key, value)), lengths), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dim", "value_dim", "said"),
    [(264, 264, "needs a head dim of 1 to 256, got 264"), (16, 8, "needs values as wide as keys, got D = 16 and Dv = 8")],
)
def test_what_it_declines(dim, value_dim, said):
    query, key, value = (torch.randn(1, 2, 9, d, device=DEVICE) for d in (dim, dim, value_dim))
    with pytest.raises(saccade.UnsupportedProblem, match=said):
        saccade.attention(query, key, value, backend="ragged")


@pytest.mark.gpu
def test_auto_takes_them_beyond_the_short_kernels(monkeypatch):
    """Python makes these calls, as it does until C++ is compiled. Later `auto` takes `long` for few rows on sm_90."""
    monkeypatch.setattr(native, "calls", None)
    query, key, value, lengths = padded(torch.bfloat16)
    assert "-> ragged" in saccade.explain(query, key, value, lengths=lengths)
    assert "-> short" in saccade.explain(
        *(x[:, :, :64].repeat(4096, 1, 1, 1) for x in (query, key, value)), lengths=lengths.clamp(max=64).repeat(4096)
    )


# --- lists by length


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("number", [1, 3, 1023, 1024, 1025, 5000, MOST_AT_ONCE, MOST_AT_ONCE + 1])
def test_lists_hold_every_sequence_once_in_order(number, recorded):
    """Beyond MOST_AT_ONCE sequences, which C++ does not replay, they are counted by a launch of its own."""
    lengths = torch.randint(0, 200, (number,), generator=torch.Generator().manual_seed(number))
    others = torch.randint(0, 200, (number,), generator=torch.Generator().manual_seed(number + 1))
    ends = [torch.cat((torch.zeros(1, dtype=torch.long), x.cumsum(0))).int().to(DEVICE) for x in (lengths, others)]
    with Recorder() if recorded else contextlib.nullcontext() as recorder:
        if recorder is not None and number > MOST_AT_ONCE:
            recorder.refused = True
        plan = ragged_plan.make_plan(*ends)
    assert plan.members.shape == (len(TILES) + 1, MOST_AT_ONCE if recorded and number <= MOST_AT_ONCE else number)
    longest = torch.maximum(lengths, others)
    limits = [0, *TILES, 10**9]
    for i, count in enumerate(plan.counts.tolist()):
        wanted = ((longest > limits[i]) & (longest <= limits[i + 1])).nonzero().flatten()
        assert plan.members[i, :count].tolist() == wanted.tolist()


def test_lists_are_made_once_in_a_capture(monkeypatch):
    """By the layers of a model. Another capture makes its own, and nothing is kept for offsets that are gone."""
    capture = [7]
    monkeypatch.setattr(ragged_plan, "capture_id", lambda device: capture[0])
    monkeypatch.setattr(ragged_plan, "values_known", lambda x: False)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    first = ragged_plan.plan_of(ends, ends)
    assert ragged_plan.plan_of(ends, ends) is first
    assert ragged_plan.plan_of(ends, ends.clone()) is not first
    capture[0] = 8
    assert ragged_plan.plan_of(ends, ends) is not first
    second = ragged_plan.plan_of(ends, ends)
    ends[1] = 3
    third = ragged_plan.plan_of(ends, ends)
    assert third is not second
    assert ragged_plan.plan_of(ends, ends) is third
    capture[0] = 0
    assert ragged_plan.plan_of(ends, ends) is not ragged_plan.plan_of(ends, ends)
    kept = [key for key in ragged_plan._PLANS if id(ends) in key]
    assert {key[2] for key in kept} == {7, 8}
    del ends
    assert not ragged_plan._PLANS.keys() & set(kept)


def test_lists_of_inference_mode_follow_changes_in_a_capture(monkeypatch):
    """Such tensors count no changes, so every layer makes its lists."""
    monkeypatch.setattr(ragged_plan, "capture_id", lambda device: 7)
    with torch.inference_mode():
        ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
        ragged_plan.plan_of(ends, ends)
        ends[2] = 40
        assert ragged_plan.plan_of(ends, ends).counts.tolist() == [1, 0, 1, 0, 0]


def test_lists_in_a_graph_of_the_compiler_are_not_kept(monkeypatch):
    """torch raises if memory of its graph's pool lives on that is no output."""
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    first = ragged_plan.plan_of(ends, ends)
    assert ragged_plan.plan_of(ends, ends) is first
    monkeypatch.setattr(ragged_plan, "in_compilers_graph", lambda device: True)
    assert ragged_plan.plan_of(ends, ends) is not first


def test_the_list_of_every_sequence_is_not_made_in_a_graph_of_the_compiler(monkeypatch):
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(ragged_plan, "_NUMBERS", {})
    with monkeypatch.context() as inside:
        inside.setattr(ragged_plan, "in_compilers_graph", lambda device: True)
        assert ragged_plan.every_sequence(ends, 2) is None
        assert not ragged_plan._NUMBERS
    assert ragged_plan.every_sequence(ends, 2) is not None


def test_lists_of_empty_sequences_are_empty():
    ends = torch.full((3001,), 7, dtype=torch.int32, device=DEVICE)
    ends[:1500] = 0  # one sequence of seven tokens
    for recorder in (contextlib.nullcontext(), Recorder()):
        with recorder:
            plan = ragged_plan.make_plan(ends, ends)
        assert plan.counts.tolist() == [1, 0, 0, 0, 0]
        assert plan.members[0, 0] == 1499


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}], ids=["plain", "causal", "dropout"])
def test_lists_of_a_recorded_call_give_its_results(options, monkeypatch):
    """With the bits of a call that makes its lists once: launches of a recorded call are for any batch of the kind."""
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    monkeypatch.setattr(token_launches, "MOST_EAGER", 0)
    lengths = torch.tensor([0, 140, 9, 0, 64, 20, 130])
    leaves = [torch.randn(int(lengths.sum()) + 2, 2, 16, device=DEVICE).to(DTYPES[0]).requires_grad_() for _ in range(3)]
    ends = lengths.cumsum(0).int().to(DEVICE)
    results = []
    for recorder in (contextlib.nullcontext(), Recorder()):
        torch.manual_seed(3)
        with recorder:
            out = saccade.attention_varlen(*leaves, ends, ends, 140, 140, backend="ragged", **options)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("longest", [9, 130])
def test_a_small_batch_is_one_launch_without_lists(longest, monkeypatch):
    """Sequences may have any length, 0 too. Beyond the largest tile the long form runs, whose backward has two kernels and row sums."""
    launched = []
    monkeypatch.setattr(
        launches,
        "launch_any",
        lambda kernel, *given, **options: launched.append(kernel) or launch_any(kernel, *given, **options),
    )
    monkeypatch.setattr(ragged_call, "plan_of", lambda *ends: pytest.fail("lists are made"))
    tokens = longest + 4
    leaves = [torch.randn(tokens + 2, 2, 16, device=DEVICE).to(DTYPES[0]).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 4, 4, tokens], dtype=torch.int32, device=DEVICE)
    results = []
    for backend in ("ragged", "reference"):
        out = saccade.attention_varlen(*leaves, ends, ends, longest, longest, backend=backend)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert len(launched) == (2 if longest <= TILES[-1] else 4)


@pytest.mark.parametrize(("bias", "most"), [(False, ragged_call.ONE_LAUNCH), (True, ragged_call.ONE_PADDED)])
def test_how_large_one_launch_may_be(bias, most):
    query = torch.empty(5, 32, 64, device="meta", dtype=torch.bfloat16)
    added = torch.empty(32, 128, 128, device="meta") if bias else None
    limit = most // (32 * 128 * 64)
    for sequences, at_once in ((limit, True), (limit + 1, False)):
        ends = torch.zeros(sequences + 1, dtype=torch.int32)
        call = ragged_call.RaggedCall(VarlenArgs(query, query, query, ends, ends, added, None, 128, 128, 0.0, 0, 0.1))
        bucket = call.at_once()
        assert (bucket is not None) == at_once
        if bucket is not None:
            assert (bucket.tile, bucket.small) == (128, 0 if bias else 32)


def test_dropout_goes_to_the_kernels_of_sm90_by_one_constant(monkeypatch):
    """And its draws count the keys of the whole call, in a launch of shorter sequences too."""
    monkeypatch.setattr(sm90, "takes", lambda *given: True)
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    query, seed = torch.empty(300, 2, 64, device=DEVICE, dtype=torch.bfloat16), torch.tensor([7], device=DEVICE)
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)
    call = ragged_call.RaggedCall(VarlenArgs(query, query, query, ends, ends, None, seed, 200, 200, 0.1, 0, 0.1))
    for preferred, tile in ((False, 128), (True, 0)):
        monkeypatch.setitem(config.TIMED_FROM, "dropout", 1 if preferred else 65)
        assert launchers.forward_by_cuda(call, query) == preferred
        assert launchers.backward_by_cuda(call, query, query, (query, query, query)) == preferred
        bucket = next(b for b in call.buckets() if b.longest == 128)
        assert bucket.tile == tile
        within = call.within(bucket).args
        assert (within.max_q, within.max_k) == (128, 200)


def test_kernels_that_are_disabled_are_not_described(monkeypatch):
    """C++ is told of what Python launches: of Triton's kernels where those of sm_90 do not compile."""
    monkeypatch.setattr(sm90, "takes", lambda *given: True)
    monkeypatch.setattr(disabled, "_disabled", {})
    query = torch.empty(300, 2, 64, device="meta", dtype=torch.bfloat16)
    ends = torch.zeros(3, dtype=torch.int32)
    call = ragged_call.RaggedCall(VarlenArgs(query, query, query, ends, ends, None, None, 200, 200, 0.0, 0, 0.1))
    assert launchers.forward_by_cuda(call, query)
    assert launchers.backward_by_cuda(call, query, query, (query, query, query))
    grouped = ragged_call.RaggedCall(call.args._replace(key=query[:, :1], value=query[:, :1]))
    assert launchers.forward_by_cuda(grouped, query)
    with monkeypatch.context() as patch:
        patch.setitem(config.TIMED_FROM, "grouped heads", 65)
        assert not launchers.forward_by_cuda(grouped, query)
    with monkeypatch.context() as patch:
        patch.setattr(config, "TIMED_HEAD_DIM", 32)
        assert not launchers.forward_by_cuda(grouped, query)
    dropped = ragged_call.RaggedCall(grouped.args._replace(seed=torch.zeros(1, dtype=torch.int64), dropout_p=0.1))
    assert not launchers.forward_by_cuda(dropped, query)  # not timed together
    with pytest.warns(RuntimeWarning, match="does not compile in this test"):
        disabled.disable(
            choice.named("forward", choice.kind_of(call.args)),
            "another",
            CompileError("it does not compile in this test", (), ""),
        )
    assert not launchers.forward_by_cuda(call, query)
    assert launchers.forward_by_cuda(grouped, query)  # another kernel
    assert launchers.backward_by_cuda(call, query, query, (query, query, query))


def test_of_many_sequences_there_are_lists():
    ends = torch.zeros(ragged_plan.MOST_AT_ONCE + 2, dtype=torch.int32)
    assert ragged_plan.every_sequence(ends, ragged_plan.MOST_AT_ONCE + 1) is None
    members, count = ragged_plan.every_sequence(ends, 1000)
    assert members[:1000].tolist() == list(range(1000))
    assert count[0] == 1000
    assert count.data_ptr() % 16 == 0  # kernels are compiled apart for other addresses


def test_lists_are_made_once_a_batch(monkeypatch):
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    made = []
    monkeypatch.setattr(ragged_plan, "make_plan", lambda *ends, make=ragged_plan.make_plan: made.append(1) or make(*ends))
    query, key, value = (torch.randn(13, 2, 16, device=DEVICE).to(DTYPES[0]) for _ in range(3))
    ends = torch.tensor([0, 4, 13], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        saccade.attention_varlen(query, key, value, ends, ends, 9, 9, backend="ragged")
    assert len(made) == 1
    ends[1] = 5  # the tensor's version tells
    out = saccade.attention_varlen(query, key, value, ends, ends, 9, 9, backend="ragged")
    assert len(made) == 2
    expected = saccade.attention_varlen(query, key, value, ends, ends, 9, 9, backend="reference")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("longest", "taken", "compiles", "buckets"),
    [
        (300, True, True, [(0, 0), (0, 128), (64, 64), (32, 32), (16, 16)]),
        (100, True, True, [(0, 128), (64, 64), (32, 32), (16, 16)]),
        (64, True, True, [(64, 64), (32, 32), (16, 16)]),
        (100, False, True, [(128, 128), (64, 64), (32, 32), (16, 16)]),
        (100, True, False, [(128, 128), (64, 64), (32, 32), (16, 16)]),
    ],
    ids=str,
)
def test_the_bucket_of_128_goes_to_the_kernels_of_sm90(longest, taken, compiles, buckets, monkeypatch):
    """As (tile, longest); unless they do not take the call, or one of them does not compile."""
    monkeypatch.setattr(sm90, "takes", lambda *given: taken)
    monkeypatch.setattr(disabled, "_disabled", {})
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    query = torch.empty(300, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)
    call = ragged_call.RaggedCall(VarlenArgs(query, query, query, ends, ends, None, None, longest, longest, 0.0, 0, 0.1))
    if not compiles:
        with pytest.warns(RuntimeWarning, match="does not compile at all"):
            disabled.disable(
                choice.named("backward", choice.kind_of(call.args)), "another", CompileError("it does not compile at all", (), "")
            )
    found = call.buckets()
    assert [(b.tile, b.longest) for b in found] == buckets
    assert call.within(found[0]).args.max_q == longest
    assert call.within(found[-1]).args.max_k == 16


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        (
            {},
            "fwd to 128 tokens: CUDA C[+][+] Sm90Config",
            "bwd to 64 tokens: TileConfig.*bwd to 128 tokens: CUDA C[+][+] Sm90Config",
        ),
        ({"kv_heads": 2}, "fwd to 128 tokens: CUDA C[+][+]", "bwd to 128 tokens: CUDA C[+][+]"),
        ({"kv_heads": 2, "head_dim": 32, "value_dim": 32}, "fwd to 128 tokens: TileConfig", "bwd to 128 tokens: TileConfig"),
        ({"kv_heads": 2, "head_dim": 128, "value_dim": 128}, "fwd to 128 tokens: TileConfig", "bwd to 128 tokens: TileConfig"),
        ({}, "fwd beyond: CUDA C[+][+] Sm90Config", "bwd beyond: CUDA C[+][+] Sm90Config"),
        ({"head_dim": 32, "value_dim": 32}, "fwd beyond: fwd LongConfig", "bwd beyond: CUDA C[+][+] Sm90Config"),
        ({"head_dim": 32, "value_dim": 32, "max_q": 512}, "fwd beyond: CUDA C[+][+]", "bwd beyond: CUDA C[+][+]"),
        ({"max_q": 3000}, "fwd beyond: fwd LongConfig", "bwd beyond: keys LongConfig"),
        ({"arch": 80}, "fwd beyond: fwd LongConfig", "bwd beyond: keys LongConfig.*and queries LongConfig"),
        ({"dropout_p": 0.1}, "fwd beyond: CUDA C[+][+] Sm90Config", "bwd beyond: CUDA C[+][+] Sm90Config"),
        ({"dropout_p": 0.1, "kv_heads": 2}, "fwd beyond: fwd LongConfig", "bwd beyond: keys LongConfig"),
    ],
    ids=str,
)
def test_explain_tells_what_computes_sequences_beyond_the_tiles(changes, forward, backward, monkeypatch):
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    tokens, ends = torch.empty(500, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    problem = describe_varlen(tokens, tokens, tokens, ends, ends, 300, 300, 0.0, 0, None, False, None, False, True, False)
    told = RAGGED.form(replace(problem, **{"device_type": "cuda", "arch": 90} | changes))
    assert re.search(forward, told)
    assert re.search(backward, told)


@pytest.mark.parametrize(("heads", "longest", "told"), [(8, 300, "CUDA C"), (4, 300, "CUDA C"), (64, 600, "LongConfig")])
def test_explain_tells_what_computes_grouped_heads(heads, longest, told, monkeypatch):
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    tokens, ends = torch.empty(500, 4, 64, dtype=torch.bfloat16, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    problem = describe_varlen(
        tokens, tokens, tokens, ends, ends, longest, longest, 0.0, 0, None, False, None, False, True, False
    )  # fmt: skip
    found = RAGGED.form(replace(problem, device_type="cuda", arch=90, heads=heads))
    assert re.search(f"fwd beyond: .*{told}.*bwd beyond: .*{told}", found)


def test_explain_tells_kernels_that_run_here(monkeypatch):
    """Not those that were disabled, nor those that no compiler makes; of dense rows with lengths too."""
    monkeypatch.setattr(disabled, "_disabled", {})
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    x, lengths = torch.empty(2, 4, 300, 64, dtype=torch.bfloat16, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    problem = describe_attention(x, x, x, None, 0.0, False, None, False, lengths, False, False, True)
    problem = replace(problem, device_type="cuda", arch=90)
    assert DENSE.form(problem).count("CUDA C++") == 2
    name = choice.named("backward", choice.kind_of_dense(problem))
    with pytest.warns(RuntimeWarning, match="does not compile today"):
        disabled.disable(name, "another", CompileError("it does not compile today", (), ""))
    assert re.fullmatch("forward: CUDA C[+][+] .*, backward: keys LongConfig.* and queries LongConfig.*", DENSE.form(problem))
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ("no compiler",))
    assert "CUDA C++" not in DENSE.form(problem)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_the_launcher_asks_what_explain_describes(dense, causal):
    x = torch.empty((3, 4, 300, 64) if dense else (300, 4, 64), dtype=torch.bfloat16)
    ends, seed = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    args = VarlenArgs(x, x, x, ends, ends, None, seed, 300, 300, 0.1, int(causal), 0.125)
    if dense:
        described = choice.kind_of_dense(describe_attention(x, x, x, None, 0.1, causal, None, False, None, False, False, True))
    else:
        problem = describe_varlen(x, x, x, ends, ends, 300, 300, 0.1, int(causal), None, False, None, False, True, False)
        described = choice.kind_of_packed(problem)
    assert described == choice.kind_of(args)


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (1, 0, 2)], ids=["transposed", "heads-last", "queries-first"])
def test_a_bias_of_another_layout_has_its_gradient_where_it_lies(order):
    """Beyond a tile, as relative positions give one with heads last."""
    lengths = [7, 17, 40]
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v, dout = (torch.randn(sum(lengths), 2, 64, device=DEVICE) for _ in range(4))
    bias = (
        torch.randn([(2, 40, 40)[i] for i in order], device=DEVICE).permute([order.index(i) for i in range(3)]).requires_grad_()
    )
    got, want = (
        torch.autograd.grad(saccade.attention_varlen(q, k, v, ends, ends, 40, 40, attn_bias=bias, backend=name), bias, dout)[0]
        for name in ("ragged", "reference")
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_an_expanded_bias_of_no_query_has_a_gradient():
    query, key, value = (torch.randn(2, 3, n, 16, device=DEVICE) for n in (0, 3, 3))
    bias = torch.randn(1, 0, 1, device=DEVICE).expand(3, 0, 1).requires_grad_()
    out = saccade.attention(query, key, value, bias, backend="ragged")
    assert torch.autograd.grad(out.sum(), bias)[0].shape == (3, 0, 1)
