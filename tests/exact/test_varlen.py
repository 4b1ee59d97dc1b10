"""`attention_varlen`: every backend under the contract, bad input, and what is asked of it beside numbers."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from contracts.exact import DEVICE, HAS_GPU
from contracts.opt_outs import opted_out
from contracts.varlen import VarlenContract
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import saccade
from saccade import flash_attn_interface as flash_attn
from saccade.errors import UnsupportedProblem
from saccade.exact.ragged import call as ragged_call
from saccade.exact.ragged import launchers
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.testing.varlen_check import check_varlen
from saccade.exact.varlen import api, behind, by_torch
from saccade.exact.varlen.args import FULL, UPPER_LEFT, VarlenArgs
from saccade.exact.varlen.problem import describe_as_packed, describe_varlen
from saccade.testing.judge import report

DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


class TestRagged(VarlenContract):
    """Batches this small are one launch."""

    backend = "ragged"


class TestRaggedByLists(VarlenContract):
    """A launch for each bucket of lengths, as larger batches have it."""

    backend = "ragged"

    @pytest.fixture(autouse=True)
    def by_lists(self, monkeypatch):
        monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
        monkeypatch.setattr(ragged_call, "ONE_PADDED", 0)

    @pytest.mark.parametrize("dropout_p", [0.0, 0.3])
    @pytest.mark.parametrize("lengths", [(20, 0, 70, 3), (20, 140, 70)], ids=str)
    def test_a_bias_that_is_longer_than_the_sequences_of_a_launch(self, lengths, dropout_p):
        """In float32 a tile holds few sequences of D = 64, and each bucket beyond has a launch of the long form."""
        ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        tensors = [torch.randn(sum(lengths), 2, 64, device=DEVICE) for _ in range(4)]
        bias = torch.randn(2, 150, 150, device=DEVICE, requires_grad=True)

        def gradient(backend):
            torch.manual_seed(3)
            out = saccade.attention_varlen(*tensors[:3], ends, ends, 150, 150, dropout_p, attn_bias=bias, backend=backend)
            return torch.autograd.grad(out, bias, tensors[3])[0]

        torch.testing.assert_close(gradient("ragged"), gradient("reference"), rtol=2e-5, atol=2e-5)


class TestReference(VarlenContract):
    backend = "reference"


@opted_out("exact/test_varlen.py::TestSdpa")
class TestSdpa(VarlenContract):
    backend = "sdpa"


@pytest.mark.skipif(not HAS_GPU, reason="torch's packed attention runs on a GPU")
@opted_out("exact/test_varlen.py::TestFlash")
class TestFlash(VarlenContract):
    backend = "flash"


def tensors(*lengths: int, heads: int = 2, dim: int = 16, dtype=DTYPE, grad: bool = False):
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    made = [torch.randn(sum(lengths), heads, dim, device=DEVICE, dtype=dtype, requires_grad=grad) for _ in range(3)]
    return made, ends


# --- bad input


def call(query, key, value, ends, **changes):
    given_arguments = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 9, "max_seqlen_k": 9, **changes}
    return saccade.attention_varlen(query, key, value, **given_arguments)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cu_seqlens_q": torch.tensor([1, 4, 13], dtype=torch.int32)}, "begins with 1; it must begin with 0"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 4], dtype=torch.int32)}, "decreases from 9 to 4 at sequence 1"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 14], dtype=torch.int32)}, "ends with 14, beyond the 13 tokens"),
        ({"max_seqlen_k": 8}, "cu_seqlens_k has a sequence of 9 tokens, longer than max_seqlen_k = 8"),
        ({"cu_seqlens_q": torch.tensor([0.0, 4.0, 13.0])}, "cu_seqlens_q is torch.float32 of shape"),
        ({"cu_seqlens_q": torch.tensor([[0, 4, 13]], dtype=torch.int32)}, "of shape \\[1, 3\\]"),
        ({"cu_seqlens_q": [0, 4, 13]}, "cu_seqlens_q is a list"),
        ({"cu_seqlens_q": torch.empty(3, dtype=torch.int32, device="meta")}, f"cu_seqlens_q is on meta, query on {DEVICE}"),
        ({"cu_seqlens_k": torch.empty(3, dtype=torch.int32, device="meta")}, f"cu_seqlens_k is on meta, query on {DEVICE}"),
        ({"cu_seqlens_k": torch.tensor([0, 13], dtype=torch.int32)}, "cu_seqlens_q has 3 numbers, cu_seqlens_k 2"),
        ({"max_seqlen_q": -1}, "max_seqlen_q is -1"),
        ({"max_seqlen_q": torch.tensor(9)}, "max_seqlen_q is a torch.Tensor; it must be an int"),
        ({"max_seqlen_q": 9.0}, "max_seqlen_q is 9.0"),
        ({"max_seqlen_q": True}, "max_seqlen_q is True"),
        ({"cu_seqlens_q": torch.empty(0, dtype=torch.int32)}, "of shape \\[0\\]"),
        ({"attn_bias": torch.empty(2, 9, 9, device="meta")}, f"attn_bias is on meta, query on {DEVICE}"),
        ({"attn_bias": torch.zeros(2, 9, 8)}, "attn_bias has shape \\[2, 9, 8\\]; it must be"),
        ({"attn_bias": torch.zeros(2, 9, 9, dtype=torch.bool)}, "attn_bias is torch.bool"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"is_causal": "yes"}, "is_causal is 'yes'"),
        ({"scale": "a"}, "scale is 'a'"),
        ({"backend": "fast"}, "backend is 'fast'; allowed are 'auto', 'ragged', 'flash', 'sdpa', 'reference'"),
    ],
)
def test_bad_input(monkeypatch, changes, said):
    monkeypatch.setenv("SACCADE_CHECK_LENGTHS", "1")
    (query, key, value), ends = tensors(4, 9)
    moved = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.dim() and not x.is_meta else x for n, x in changes.items()}
    with pytest.raises(saccade.InvalidArgument, match=said):
        call(query, key, value, ends, **moved)


def test_shapes_are_checked():
    (query, key, value), ends = tensors(4, 9)
    with pytest.raises(saccade.InvalidArgument, match="must be packed, \\[tokens, heads, head dim\\]"):
        call(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), ends)
    with pytest.raises(saccade.InvalidArgument, match=r"key has shape \[\]; it must be"):
        call(query, key.sum(), value, ends)
    with pytest.raises(saccade.InvalidArgument, match="head dims of query and key differ"):
        call(query, key[..., :8], value, ends)
    for other in (value[:-1], value[:, :1]):
        with pytest.raises(saccade.InvalidArgument, match="key and value differ in tokens or heads"):
            call(query, key, other, ends)
    with pytest.raises(saccade.InvalidArgument, match="pass enable_gqa=True"):
        call(query, key[:, :1], value[:, :1], ends)
    with pytest.raises(saccade.InvalidArgument, match=r"they must agree, in tensors \[tokens, heads, head dim\]"):
        call(query[:, :1], key, value, ends)
    with pytest.raises(saccade.InvalidArgument, match="no multiple of"):
        call(query[:, :1], key, value, ends, enable_gqa=True)
    with pytest.raises(saccade.InvalidArgument, match="qkv has shape"):
        saccade.attention_varlen_qkvpacked(query, ends, 9)


@pytest.mark.skipif(HAS_GPU, reason="on a GPU reading the values would wait for it")
def test_values_are_checked_on_a_cpu_without_being_asked():
    (query, key, value), ends = tensors(4, 9)
    with pytest.raises(saccade.InvalidArgument, match="ends with 26, beyond the 13 tokens"):
        call(query, key, value, ends * 2, max_seqlen_q=18, max_seqlen_k=18)


def test_a_remembered_call_does_not_vouch_for_another():
    """Results that are worked out once for a kind of call are not used for calls that differ in one of the things that are checked."""
    (query, key, value), ends = tensors(1, 1)
    longest, bias = {"max_seqlen_q": 1, "max_seqlen_k": 1}, torch.zeros(2, 1, 1, device=DEVICE)
    for backend in ("auto", "ragged", "reference"):
        right = longest | {"backend": backend}
        call(query, key, value, ends, **right)
        call(query, key, value, ends, **right, attn_bias=bias)
        with pytest.raises(saccade.InvalidArgument, match="key and value differ in tokens"):
            call(query, key, value[:-1], ends, **right)
        for wrong in (ends[:0], ends[None]):
            with pytest.raises(saccade.InvalidArgument, match=r"cu_seqlens_q is torch\.int32 of shape"):
                call(query, key, value, wrong, **right)
        for name in longest:
            for wrong in (True, 1.0):
                with pytest.raises(saccade.InvalidArgument, match=f"{name} is {wrong}; it must be an int"):
                    call(query, key, value, ends, **(right | {name: wrong}))
        with pytest.raises(saccade.InvalidArgument, match="attn_bias has shape"):
            call(query, key, value, ends, **right, attn_bias=bias[:1])
        assert not call(query, key, value, ends, **right).requires_grad
        leaf = query.clone().requires_grad_()
        assert call(leaf, key, value, ends, **right).requires_grad
    # of other lengths for the keys, torch's packed attention would align a causal mask otherwise
    for other in (ends, ends.clone()):
        call_of = (query, key, value, ends, other, 1, 1, 0.0, UPPER_LEFT, None, False, None, None, False, "auto")
        assert api._prepare(call_of, False).problem.same_lengths == (other is ends)


@pytest.mark.parametrize("by_lists", [False, True], ids=["at-once", "by-lists"])
@pytest.mark.parametrize("ends", [[0, 300, 400], [5, 9, 13], [0, 9, 4], [-7, 3, 13], [0, 2, 2**30]])
def test_wrong_lengths_never_read_outside(ends, by_lists, monkeypatch):
    """Lengths that nobody checked are clamped: results of the other sequences are right, and nothing faults."""
    if by_lists:
        monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)
    (query, key, value), _ = tensors(4, 9)
    wrong = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    args = VarlenArgs(query, key, value, wrong, wrong, None, None, 9, 9, 0.0, 0, 0.25)
    out, lse = launchers.forward(args)
    launchers.backward(args, torch.ones_like(out), None, out, lse, bias_grad=False)
    if HAS_GPU:
        torch.cuda.synchronize()
    if ends[:2] == [0, 2]:
        right = saccade.attention(*(x[:2].unsqueeze(0).transpose(1, 2).double() for x in (query, key, value)), scale=0.25)
        torch.testing.assert_close(out[:2].double(), right[0].transpose(0, 1), rtol=2e-2, atol=2e-2)


# --- very many sequences, very many numbers


def sampled_errors(lengths: torch.Tensor, heads: int, dim: int, number: int) -> dict[str, float]:
    """Relative errors of a call, over the first three, the last three and `number` other sequences, which float64 computes without the rest."""
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int().to(DEVICE)
    tensors = [torch.randn(int(ends[-1]), heads, dim, device=DEVICE, dtype=torch.float16) for _ in range(4)]
    found = outputs(tensors, ends, int(lengths.max()), "ragged")
    among = torch.arange(len(lengths))
    chosen = torch.cat((among[:3], among[-3:], torch.randint(len(lengths), (number,)))).unique()
    tokens = torch.cat([torch.arange(*ends[s : s + 2].tolist()) for s in chosen]).to(DEVICE)
    some = torch.cat((lengths.new_zeros(1), lengths[chosen].cumsum(0))).int().to(DEVICE)
    expected = outputs([x[tokens].double() for x in tensors], some, int(lengths[chosen].max()), "reference")
    return {n: ((x[tokens].double() - expected[n]).norm() / expected[n].norm()).item() for n, x in found.items()}


def outputs(tensors: list[torch.Tensor], ends: torch.Tensor, longest: int, backend: str) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = saccade.attention_varlen(*leaves, ends, ends, longest, longest, backend=backend)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *torch.autograd.grad(out, leaves, tensors[3])), strict=True))


@pytest.mark.parametrize("sequences", [40, pytest.param(1_000_000, marks=[pytest.mark.gpu, pytest.mark.slow])])
def test_a_million_sequences(sequences, monkeypatch):
    monkeypatch.setattr(ragged_call, "ONE_LAUNCH", 0)  # of 40, too
    errors = sampled_errors(torch.randint(0, 31, (sequences,)), 2, 16, min(500, sequences // 4))
    assert max(errors.values()) < 0.005, errors


@pytest.mark.parametrize(
    ("sequences", "heads"),
    [(3, 1), pytest.param(16_400, 16, marks=[pytest.mark.gpu, pytest.mark.slow, pytest.mark.xdist_group("large memory")])],
)
def test_more_numbers_than_int32_counts(sequences, heads):
    """Beyond 2^31 in each tensor: tiles of each size, and the long form, read and write behind it. The last sequences are of each kind."""
    if heads > 1 and torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of device memory")
    lengths = torch.tensor([128, 200, 60]).repeat(sequences // 3 + 1)[:sequences]
    assert heads == 1 or int(lengths[: -sequences // 100].sum()) * heads * 64 > 2**31
    errors = sampled_errors(lengths, heads, 64, min(sequences, 300))
    assert max(errors.values()) < 0.005, errors


# --- random problems through the public function


@settings(max_examples=60 if HAS_GPU else 12, deadline=None)
@given(data=st.data())
def test_random_problems(data):
    # a token at least: of nothing there is no largest error
    lengths = (data.draw(st.integers(1, 70)), *data.draw(st.lists(st.integers(0, 70), max_size=5)))
    cross = data.draw(st.booleans())
    keys = (data.draw(st.integers(1, 70)), *(data.draw(st.integers(0, 70)) for _ in lengths[1:])) if cross else None
    bias = max(*lengths, *(keys or ()), 0) <= 32 and data.draw(st.booleans())  # what every dtype and head dim here has a tile for
    group, kv_heads = data.draw(st.sampled_from([(1, 1), (1, 2), (3, 1), (2, 2)]))
    case = VarlenCase(
        "random", lengths, keys, group * kv_heads, kv_heads, data.draw(st.sampled_from([8, 16, 24, 40])),
        data.draw(st.sampled_from([0, 1, 2])), data.draw(st.sampled_from([0.0, 0.25])),
        group == 1 and bias, data.draw(st.booleans()), tail=data.draw(st.sampled_from([0, 3])),
    )  # fmt: skip
    results = check_varlen(case, DTYPE, DEVICE, "ragged")
    assert all(r.ok for r in results), report(case, results)


# --- beside numbers


@pytest.mark.parametrize("backend", ["ragged", "reference"])
def test_hooks_that_change_strides(backend):
    """Activations offloaded by hooks may come back in another layout; gradients must not change."""
    (query, key, value), ends = tensors(17, 3, 40, grad=True)

    def gradients():
        out = saccade.attention_varlen(query, key, value, ends, ends, 40, 40, backend=backend)
        return torch.autograd.grad(out.float().square().sum(), (query, key, value))

    plain = gradients()
    swap = lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(swap, lambda x: x):
        hooked = gradients()
    for x, y in zip(hooked, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_compiled_without_recompiling_for_each_batch():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def step(query, key, value, ends):
        return saccade.attention_varlen(query, key, value, ends, ends, 64, 64, backend="ragged").square().sum()

    compiled = []
    for lengths in ((4, 9), (30, 1, 17), (8, 8, 8, 8, 40), (64, 2, 5)):
        made, ends = tensors(*lengths, grad=True)
        gradients = torch.autograd.grad(step(*made, ends), made)
        expected = torch.autograd.grad(
            saccade.attention_varlen(*made, ends, ends, 64, 64, backend="reference").square().sum(), made
        )
        for x, y in zip(gradients, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=3e-2, atol=3e-2)
        compiled.append(counter.frame_count)
    assert len(set(compiled)) == 1, compiled


def test_checkpointed():
    from torch.utils.checkpoint import checkpoint

    (query, key, value), ends = tensors(17, 3, 40, grad=True)
    run = lambda *x: saccade.attention_varlen(*x, ends, ends, 40, 40, 0.3, backend="ragged")  # noqa: E731
    results = []
    for around in (lambda *x: run(*x), lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(3)
        out = around(query, key, value)
        results.append((out, *torch.autograd.grad(out.float().sum(), (query, key, value))))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_second_derivatives_raise():
    (query, key, value), ends = tensors(4, 9, grad=True)
    out = saccade.attention_varlen(query, key, value, ends, ends, 9, 9, backend="ragged")
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), query)


def test_nothing_at_all():
    query = torch.randn(0, 2, 16, device=DEVICE, dtype=DTYPE)
    ends = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for backend in ("auto", "ragged", "reference"):
        assert saccade.attention_varlen(query, query, query, ends, ends, 0, 0, backend=backend).shape == (0, 2, 16)
    # queries, and no sequence: they belong to none
    out, lse = saccade.attention_varlen(
        query.new_ones(3, 2, 16), query, query, ends, ends, 0, 0, return_lse=True, backend="ragged"
    )
    assert not out.any()
    assert lse.isneginf().all()


def test_int64_offsets():
    (query, key, value), ends = tensors(4, 9)
    expected = saccade.attention_varlen(query, key, value, ends, ends, 9, 9)
    torch.testing.assert_close(saccade.attention_varlen(query, key, value, ends.long(), ends.long(), 9, 9), expected)


@pytest.mark.parametrize("backend", ["ragged", "reference"])
def test_offsets_that_are_not_contiguous(backend):
    (query, key, value), ends = tensors(4, 9)
    apart = torch.stack((ends, torch.full_like(ends, 5)), 1)[:, 0]
    found, expected = (saccade.attention_varlen(query, key, value, x, x, 9, 9, backend=backend) for x in (apart, ends))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_autocast_casts_the_inputs_and_nothing_behind_them():
    (query, key, value), ends = tensors(4, 9, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = saccade.attention_varlen(query, key, value, ends, ends, 9, 9, backend="reference")
    cast = [x.bfloat16() for x in (query, key, value)]
    expected = saccade.attention_varlen(*cast, ends, ends, 9, 9, backend="reference")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- the ops


@pytest.mark.parametrize("backend", ["ragged", "reference"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(backend, with_bias):
    (query, key, value), ends = tensors(5, 0, 12)
    bias = torch.randn(2, 12, 12, device=DEVICE) if with_bias else None
    call = (ends, ends.clone(), bias, None, 12, 12, 0.0, 1, 0.25)
    ops = torch.ops.saccade
    torch.library.opcheck(ops.attention_varlen_forward.default, (query, key, value, *call, backend))
    out, lse = ops.attention_varlen_forward(query, key, value, *call, backend)
    given = (torch.randn_like(out), torch.randn_like(lse), out, lse)
    torch.library.opcheck(ops.attention_varlen_backward.default, (*given, query, key, value, *call, with_bias, backend))
    qkv = torch.stack((query, key, value), 1)
    torch.library.opcheck(ops.attention_varlen_packed_backward.default, (*given, qkv, *call, with_bias, backend))


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-46])
def test_a_scale_that_is_not_positive(scale):
    """torch's own function hides keys by -inf and multiplies by the scale afterwards, which makes NaN of them."""
    x = torch.randn(3, 12, 2, 8, device=DEVICE)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)
    found, expected = (
        saccade.attention_varlen(*x, ends, ends, 7, 7, is_causal=True, scale=scale, backend=name)
        for name in ("sdpa", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("fake", [False, True])
def test_tensors_without_values(fake):
    """On the meta device, and under a mode of torch that computes shapes alone."""
    with FakeTensorMode() if fake else torch.device("meta"):
        x, ends = torch.zeros(9, 2, 8, requires_grad=True), torch.zeros(3, dtype=torch.int32)
        out = saccade.attention_varlen(x, x, x, ends, ends, 5, 5, is_causal=True)
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


def other_batches():
    """Tokens, and the ends of sequences of two batches of them."""
    x = torch.randn(24, 2, 16, device=DEVICE)
    return x, *(torch.tensor(ends, dtype=torch.int32, device=DEVICE) for ends in ([0, 5, 5, 14, 24], [0, 3, 13, 20, 24]))


def by_auto(x, ends):
    return saccade.attention_varlen(x, x, x, ends, ends, 10, 10, is_causal=True)


def test_a_dense_batch_as_packed_says_whether_its_host_time_is_paid(monkeypatch):
    x = torch.randn(2, 1, 3, 8)
    described = [describe_as_packed(x, x, x, None, 0.0, False, None, False, False, False)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    described.append(describe_as_packed(x, x, x, None, 0.0, False, None, False, False, False))
    assert [problem.host_counts for problem in described] == [True, False]


reads_ends = pytest.mark.skipif(HAS_GPU, reason="kernels compute such calls on a GPU, and read the ends on the device")


@reads_ends
@pytest.mark.unpoisoned
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_program_takes_other_lengths():
    x, ends, others = other_batches()
    expected = by_auto(x, others)
    torch.testing.assert_close(torch.jit.trace(by_auto, (x, ends), check_trace=False)(x, others), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(make_fx(by_auto)(x, ends)(x, others), expected, rtol=1e-4, atol=1e-5)


@reads_ends
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_mapped_over_batches():
    x, ends, others = other_batches()
    expected = torch.stack([by_auto(x, ends), by_auto(x + 1, others)])
    found = torch.func.vmap(by_auto)(torch.stack([x, x + 1]), torch.stack([ends, others]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.functionalize(by_auto)(x, ends), expected[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedProblem, match="a call for each length needs the lengths on the host"):
        torch.func.vmap(lambda ends: saccade.attention_varlen(x, x, x, ends, ends, 10, 10, backend="sdpa"))(ends[None])
    # lengths that are not mapped over stay what they are
    found = torch.func.vmap(by_auto, (0, None))(torch.stack([x, x + 1]), ends)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    # nor are they readable where a gradient of each batch is asked for
    of_one = torch.func.grad(lambda x, ends: saccade.attention_varlen(x, x, x, ends, ends, 10, 10, backend="sdpa").sum())
    with pytest.raises(UnsupportedProblem, match="a call for each length needs the lengths on the host"):
        torch.func.vmap(of_one)(torch.stack([x, x + 1]), torch.stack([ends, others]))


# --- nested tensors


def nested(lengths, heads=2, dim=16, offsets=None):
    tokens = torch.randn(sum(lengths), heads * dim, device=DEVICE, dtype=DTYPE, requires_grad=True)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE) if offsets is None else offsets
    made = torch.nested.nested_tensor_from_jagged(tokens, ends)
    return tokens, made.unflatten(-1, (heads, dim)).transpose(1, 2)


@pytest.mark.parametrize("keys", [None, (5, 30, 1)], ids=["self", "cross"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors_as_torch_takes_them(keys, is_causal):
    lengths = (17, 3, 40)
    query_tokens, query = nested(lengths)
    offsets = query.offsets() if keys is None else None
    key_tokens, key = nested(keys or lengths, offsets=offsets)
    value_tokens, value = nested(keys or lengths, offsets=key.offsets())
    leaves = [query_tokens, key_tokens, value_tokens]
    out = saccade.attention(query, key, value, is_causal=is_causal)
    assert out.is_nested
    assert out.shape == query.shape
    assert out._get_max_seqlen() == 40
    gradients = torch.autograd.grad(out.transpose(1, 2).values().float().square().sum(), leaves, retain_graph=True)
    expected = [
        saccade.attention(q[None], k[None], v[None], is_causal=is_causal, backend="reference")[0]
        for q, k, v in zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
    ]
    for x, y in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad(sum(x.float().square().sum() for x in expected), leaves)
    for x, y in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=4e-2, atol=4e-2)


def test_nested_tensors_that_are_refused():
    _, query = nested((3, 5))
    dense = torch.randn(2, 2, 5, 16, device=DEVICE, dtype=DTYPE)
    with pytest.raises(saccade.InvalidArgument, match="key is dense; query, key and value must all be nested"):
        saccade.attention(query, dense, dense)
    tokens_first = query.transpose(1, 2)
    with pytest.raises(saccade.InvalidArgument, match=r"query has shape .*; query, key and value must all be nested"):
        saccade.attention(tokens_first, tokens_first, tokens_first)
    with pytest.raises(saccade.InvalidArgument, match="attn_mask is given with nested tensors"):
        saccade.attention(query, query, query, torch.ones(5, 5, dtype=torch.bool, device=DEVICE))
    with pytest.raises(saccade.InvalidArgument, match="key_mask is given with nested tensors, which have lengths of their own"):
        saccade.attention(query, query, query, key_mask=torch.ones(2, 5, dtype=torch.bool, device=DEVICE))
    with pytest.raises(saccade.InvalidArgument, match="return_lse is True with nested tensors"):
        saccade.attention(query, query, query, return_lse=True)
    with pytest.raises(saccade.InvalidArgument, match="of different lengths"):
        saccade.attention(query, query, nested((5, 3))[1])
    ends, lengths = torch.tensor([0, 4, 10], device=DEVICE), torch.tensor([2, 6], device=DEVICE)
    holes = torch.nested.nested_tensor_from_jagged(torch.randn(10, 32, device=DEVICE, dtype=DTYPE), ends, lengths)
    query, whole = (x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (holes, holes.contiguous()))
    with pytest.raises(
        saccade.InvalidArgument,
        match=r"query has tokens between its sequences .*; pass what torch\.nested\.as_nested_tensor\(x\.unbind",
    ):
        saccade.attention(query, query, query)
    first = holes.values()[None, :2].unflatten(-1, (2, 16)).transpose(1, 2)
    expected = saccade.attention(first, first, first, backend="reference")[0]
    torch.testing.assert_close(saccade.attention(whole, whole, whole).unbind()[0], expected, rtol=2e-2, atol=2e-2)


def test_the_advice_for_narrowed_nested_tensors_trains():
    leaf = torch.randn(3, 6, 32, device=DEVICE, dtype=DTYPE, requires_grad=True)
    starts, lengths = torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([3, 5, 4], device=DEVICE)
    narrowed = torch.nested.narrow(leaf, 1, starts, lengths, layout=torch.jagged)
    whole = torch.nested.as_nested_tensor(narrowed.unbind(), layout=torch.jagged).unflatten(-1, (2, 16)).transpose(1, 2)
    saccade.attention(whole, whole, whole).values().float().sum().backward()
    assert (leaf.grad != 0).any(-1).sum(-1).tolist() == [3, 5, 4]


@pytest.mark.unpoisoned
@pytest.mark.parametrize("known", [{}, {"min_seqlen": 1, "max_seqlen": 17}], ids=["without", "with_max_seqlen"])
@pytest.mark.parametrize("replaced", [False, True])
def test_compiled_nested_tensors_train(known, replaced):
    tokens = torch.randn(20, 2, 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
    made = torch.nested.nested_tensor_from_jagged(tokens, torch.tensor([0, 3, 20], device=DEVICE), **known)

    def attend(x):
        call = torch.nn.functional.scaled_dot_product_attention if replaced else saccade.attention
        return call(*[x.transpose(1, 2)] * 3)

    expected = attend(made).values()
    wanted = torch.autograd.grad(expected.float().square().sum(), tokens)[0]
    torch._dynamo.reset()
    with saccade.replace_sdpa() if replaced else contextlib.nullcontext():
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(made).values()
    found = torch.autograd.grad(out.float().square().sum(), tokens)[0]
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found, wanted, rtol=4e-2, atol=4e-2)


# --- the names of flash-attn


def test_flash_attn_names():
    (query, key, value), ends = tensors(4, 9, 20)
    other = torch.tensor([0, 9, 12, 33], dtype=torch.int32, device=DEVICE)
    out, lse, nothing = flash_attn.flash_attn_varlen_func(
        query, key, value, other, ends, 21, 20, 0.0, 0.3, True, return_attn_probs=True
    )
    assert nothing is None
    assert lse.shape == (2, 33)
    for s in range(3):
        rows, keys = slice(*other[s : s + 2].tolist()), slice(*ends[s : s + 2].tolist())
        q_len, k_len = rows.stop - rows.start, keys.stop - keys.start
        mask = torch.ones(q_len, k_len, dtype=torch.bool, device=DEVICE).tril(k_len - q_len)
        x = [t.transpose(0, 1).unsqueeze(0) for t in (query[rows], key[keys], value[keys])]
        expected = saccade.attention(*x, mask, scale=0.3, backend="reference")[0].transpose(0, 1)
        torch.testing.assert_close(out[rows], expected, rtol=2e-2, atol=2e-2)
        dense = flash_attn.flash_attn_func(*(t.transpose(1, 2) for t in x), softmax_scale=0.3, causal=True)
        torch.testing.assert_close(dense[0], expected, rtol=2e-2, atol=2e-2)
    qkv = torch.stack((query, key, value), 1)
    packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends, 20, causal=True)
    torch.testing.assert_close(
        packed, saccade.attention_varlen(query, key, value, ends, ends, 20, 20, is_causal=True), rtol=2e-2, atol=2e-2
    )
    dense = flash_attn.flash_attn_qkvpacked_func(qkv[None, :20])
    torch.testing.assert_close(dense, saccade.attention_qkvpacked(qkv[None, :20]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "option",
    [
        {"window_size": (4, -2)},
        {"softcap": 3.0},
        {"alibi_slopes": torch.ones(2)},
        {"block_table": torch.ones(1)},
        {"s_aux": torch.ones(2)},
    ],
)
def test_flash_attn_options_that_are_not_here(option):
    (query, key, value), ends = tensors(4, 9)
    with pytest.raises(saccade.InvalidArgument, match=next(iter(option))):
        flash_attn.flash_attn_varlen_func(query, key, value, ends, ends, 9, 9, **option)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize(("tokens", "keys", "tail"), [(0, 0, 0), (0, 3, 0), (5, 0, 0), (0, 0, 3)])
def test_a_batch_without_queries_or_keys_has_gradients_of_zero(tokens, keys, tail, backend):
    """They were cut off: backward raised that the output does not require grad."""
    query = torch.randn(tokens + tail, 2, 8, requires_grad=True)
    key, value = (torch.randn(keys, 2, 8, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, tokens, keys, requires_grad=True)
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (tokens, keys)]
    out = saccade.attention_varlen(query, key, value, *offsets, tokens, keys, attn_bias=bias, backend=backend)
    gradients = torch.autograd.grad(out.sum(), (query, key, value, bias))
    assert not out.any()
    assert not any(g.any() for g in gradients)


class DenseLast(torch.autograd.Function):
    """The layout that torch's packed attention demands of its inputs and of the gradient of its output."""

    @staticmethod
    def forward(ctx, *tensors):
        assert all(x.stride(-1) == 1 for x in tensors)
        return tensors[0] + tensors[1] + tensors[2]

    @staticmethod
    def backward(ctx, dout):
        assert dout.stride(-1) == 1
        return dout.clone(), dout.clone(), dout.clone()  # as torch makes them, in memory of their own


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("order", ["T H D", "H T D"])
def test_an_output_of_any_layout_is_cleared_behind_the_last_sequence(in_place, order):
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    numbers = torch.randn(7, 3, 8, device=DEVICE)
    out = numbers.clone() if order == "T H D" else numbers.transpose(0, 1).contiguous().transpose(0, 1)
    expected = numbers.clone()
    expected[5:] = 0.0
    assert torch.equal(behind.Behind(offsets, in_place).of_output(out), expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_torchs_packed_attention_gets_dense_rows(monkeypatch, in_place):
    """In any order of the dimensions; tokens behind the last sequence give and get zeros."""
    if not in_place:
        monkeypatch.setattr(behind, "eager", lambda *tensors: False)
    assert behind.behind(torch.zeros(2, dtype=torch.int32, device=DEVICE)).in_place == in_place
    packed = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(packed, "varlen_attn", lambda q, k, v, *offsets, **options: DenseLast.apply(q, k, v))
    tensors = [
        torch.randn(16, 8, 2, device=DEVICE).half().permute(1, 2, 0).requires_grad_() for _ in range(3)
    ]  # [T, H, D], D the slowest
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    args = VarlenArgs(*tensors, offsets, offsets, None, None, 4, 4, 0.0, 0, 0.25)
    problem = describe_varlen(*tensors, offsets, offsets, 4, 4, 0.0, 0, None, False, None, False, True, False)
    out, _ = by_torch._attend_flash(args, problem)
    dout = torch.randn(16, 8, 2, device=DEVICE).half().permute(1, 2, 0)
    gradients = torch.autograd.grad(out, tensors, dout)
    torch.testing.assert_close(out[:6], sum(x[:6] for x in tensors))
    assert not out[6:].any()
    for gradient in gradients:
        torch.testing.assert_close(gradient[:6], dout[:6])
        assert not gradient[6:].any()


# --- torch's function, length by length


def grouped(lengths: list[int], keys: list[int], seed: int = 0, order: list[int] | None = None, **options):
    """Results of each sequence, [out, dq, dk, dv], and the gradient of the bias, where the batch has the sequences in another order."""
    source = torch.Generator().manual_seed(seed)
    parts = [
        [torch.randn(n, h, 8, generator=source) for n, h in ((q, 4), (k, 2), (k, 2), (q, 4))]
        for q, k in zip(lengths, keys, strict=True)
    ]
    order = list(range(len(lengths))) if order is None else order
    leaves = [torch.cat([parts[s][i] for s in order]).requires_grad_() for i in range(3)]
    bias = torch.randn(4, max(lengths), max(keys), generator=source, requires_grad=True)
    ends = [torch.tensor([0, *(n[s] for s in order)]).cumsum(0).int() for n in (lengths, keys)]
    out = saccade.attention_varlen(*leaves, *ends, max(lengths), max(keys), enable_gqa=True, attn_bias=bias, **options)
    gradients = torch.autograd.grad(out, (*leaves, bias), torch.cat([parts[s][3] for s in order]))
    sizes = [[n[s] for s in order] for n in (lengths, lengths, keys, keys)]
    split = [x.split(n) for x, n in zip((out.detach(), *gradients[:3]), sizes, strict=True)]
    return [[x[order.index(s)] for x in split] for s in range(len(lengths))], gradients[3]


LENGTHS, KEYS = [3, 7, 3, 0, 3, 7, 5], [4, 7, 4, 3, 2, 7, 0]


@pytest.mark.parametrize("is_causal", [False, True])
def test_by_lengths_the_order_of_a_batch_is_nothing(is_causal):
    first, dbias = grouped(LENGTHS, KEYS, is_causal=is_causal, backend="sdpa")
    moved, moved_dbias = grouped(LENGTHS, KEYS, order=[5, 2, 6, 0, 1, 3, 4], is_causal=is_causal, backend="sdpa")
    expected, expected_dbias = grouped(LENGTHS, KEYS, is_causal=is_causal, backend="reference")
    for ours, others, right in zip(first, moved, expected, strict=True):
        for x, y, z in zip(ours, others, right, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
            torch.testing.assert_close(x, z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moved_dbias, dbias, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dbias, expected_dbias, rtol=1e-5, atol=1e-5)


def test_there_is_a_call_for_each_length_and_for_so_many_scores(monkeypatch):
    calls = []
    monkeypatch.setattr(
        by_torch, "torch_attention", lambda *x, attend=by_torch.torch_attention, **o: calls.append(x[0].shape) or attend(*x, **o)
    )
    whole, _ = grouped(LENGTHS, KEYS, backend="sdpa")
    assert sorted(calls) == [(1, 4, 3, 8), (2, 4, 3, 8), (2, 4, 7, 8)]
    monkeypatch.setattr(by_torch, "_MOST_SCORES", 4 * 7 * 7)
    calls.clear()
    parts, _ = grouped(LENGTHS, KEYS, backend="sdpa")
    assert sorted(calls) == [(1, 4, 3, 8), (1, 4, 7, 8), (1, 4, 7, 8), (2, 4, 3, 8)]
    for x, y in zip(itertools.chain(*whole), itertools.chain(*parts), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_by_lengths_without_a_gradient_and_mapped_over():
    """Parts are looked up when their call comes, and written into the output, which a batched one could not take."""
    ends = [torch.tensor([0, *n]).cumsum(0).int() for n in (LENGTHS, KEYS)]
    query = torch.randn(2, sum(LENGTHS), 2, 8)
    key, value = torch.randn(2, 2, sum(KEYS), 2, 8).unbind(0)
    ways = {
        b: [saccade.attention_varlen(query[i], key[i], value[i], *ends, 7, 7, backend=b) for i in (0, 1)]
        for b in ("sdpa", "reference")
    }
    mapped = torch.func.vmap(lambda *x: saccade.attention_varlen(*x, *ends, 7, 7, backend="sdpa"), in_dims=(None, 0, 0))(
        query[0], key, value
    )
    for i in (0, 1):
        torch.testing.assert_close(ways["sdpa"][i], ways["reference"][i], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mapped[0], ways["sdpa"][0], rtol=1e-5, atol=1e-6)


def test_dropout_by_lengths_drops_each_weight_apart():
    """Values are one-hot, so out is the weights: a share of them is dropped, the others grow, and no two sequences drop the same."""
    lengths = torch.tensor([30, 8, 30, 30])
    ends = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    query = torch.zeros(98, 2, 32)
    value = torch.cat([torch.eye(32)[: int(n)] for n in lengths])[:, None].repeat(1, 2, 1)
    out = saccade.attention_varlen(query, query, value, ends, ends, 30, 30, 0.25, backend="sdpa")
    whole = [out[int(a) : int(a) + 30, :, :30] for a in (ends[0], ends[2], ends[3])]
    for x in whole:
        assert 0.2 < (x == 0).float().mean() < 0.3
        torch.testing.assert_close(x[x > 0], torch.full_like(x[x > 0], 1 / 30 / 0.75))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[1], whole[2])


@pytest.mark.parametrize(("q", "k"), [(0, 3), (197, 0)])
def test_torch_is_not_asked_for_a_batch_without_a_query_or_a_key(q, k):
    """Its backward would launch an empty grid, which CUDA calls an invalid argument."""
    query, key = (torch.empty(n, 2, 64, dtype=torch.bfloat16, device="meta") for n in (q, k))
    ends = [torch.tensor([0, n], dtype=torch.int32, device="meta") for n in (q, k)]
    problem = describe_varlen(query, key, key, *ends, q, k, 0.0, FULL, None, False, None, False, True, False)
    reasons = by_torch._why_not_flash(replace(problem, device_type="cuda", arch=90))
    assert reasons == [f"torch's packed attention needs a sequence that is not empty, got max_seqlen_q={q} and max_seqlen_k={k}"]


@pytest.mark.parametrize("options", [{}, {"window": (2, 2)}, {"is_causal": True}], ids=str)
def test_no_heads(options):
    """As a rank has none where DTensors have fewer heads than there are ranks."""
    empty, ends = (
        torch.randn(20, 0, 8, device=DEVICE, requires_grad=True),
        torch.tensor([0, 5, 20], dtype=torch.int32, device=DEVICE),
    )
    out = saccade.attention_varlen(empty, empty, empty, ends, ends, 15, 15, **options)
    assert out.shape == empty.shape
    (gradient,) = torch.autograd.grad(out.sum(), empty)
    assert gradient.shape == empty.shape
