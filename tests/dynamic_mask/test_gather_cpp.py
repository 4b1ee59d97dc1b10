"""Dynamic mask attention in C++ on a CPU: the contract, selection, threads, widths, numbers at the limits, and where it is chosen."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch
from contracts.dynamic_mask import DynamicMaskContract
from contracts.exact import DEVICE

import saccade
from saccade.dynamic_mask import op
from saccade.dynamic_mask.backends import BACKENDS
from saccade.dynamic_mask.gather.cpu import launchers
from saccade.dynamic_mask.problem import describe_dynamic_mask
from saccade.dynamic_mask.selection.intervals import causal_expiry
from saccade.dynamic_mask.testing.cases import DYNAMIC_MASK
from saccade.dynamic_mask.testing.check import check_dynamic_mask
from saccade.engine import prepare
from saccade.engine.dispatch import explain
from saccade.errors import CompileError
from saccade.launch import disabled
from saccade.native import library
from saccade.native.compiler import no_compiler
from saccade.testing.judge import report

pytestmark = [
    pytest.mark.skipif(bool(no_compiler()), reason=no_compiler() or "none"),
    pytest.mark.skipif(DEVICE != "cpu", reason="needs tensors on a CPU"),
]


class TestGatherCpp(DynamicMaskContract):
    backend = "gather_cpp"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision(self, dtype):
        results = check_dynamic_mask(DYNAMIC_MASK[0], dtype, DEVICE, self.backend)
        assert all(r.ok for r in results), report(DYNAMIC_MASK[0], results)


def made(batch=1, heads=2, kv_heads=2, q_len=200, kv_len=200, dim=16, value_dim=None, dtype=torch.float32):
    """Leaves of a call: query, key, value, key_scores."""
    generator = torch.Generator().manual_seed(q_len + dim)
    shapes = (
        (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, value_dim or dim), (batch, kv_heads, kv_len),
    )  # fmt: skip
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def outputs(leaves, backend, **options):
    """out, lse and the gradients of a call, for the same dout and dlse."""
    out, lse = saccade.dynamic_mask_attention(*leaves, return_lse=True, backend=backend, **options)
    seed = torch.Generator().manual_seed(5)
    given = [torch.randn(x.shape, generator=seed, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    given[1] = torch.where(lse.isinf(), 0.0, given[1])
    return [out, lse, *torch.autograd.grad((out, lse), leaves, given)]


def compared(leaves, **options):
    """gather_cpp against the reference in float64."""
    ours = outputs(leaves, "gather_cpp", **options)
    exact = outputs([x.detach().double().requires_grad_() for x in leaves], "reference", **options)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dscores"), ours, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (7, 7), (16, 40), (33, 16), (64, 64), (80, 128), (200, 8)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_widths_and_lengths(dim, value_dim, length):
    compared(made(q_len=length, kv_len=length, dim=dim, value_dim=value_dim), keep=20)


@pytest.mark.parametrize("keep", [1, 5, 6, 7, 64, 128, 500])
def test_lists_of_any_length(keep):
    compared(made(q_len=190, kv_len=190), keep=keep)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (6, 2), (20, 20)])
@pytest.mark.parametrize("q_len", [37, 300])
def test_heads_that_share_keys(heads, kv_heads, q_len):
    """One row and twenty: backward splits the blocks of a row where there are fewer rows than tasks."""
    compared(made(2, heads, kv_heads, q_len, 300), keep=30, enable_gqa=True)


def test_not_causal_and_padded():
    compared(made(3, q_len=70, kv_len=150), keep=30, is_causal=False, lengths=torch.tensor([150, 0, 33]))


def test_without_adding_scores():
    leaves = made()
    ours, plain = (
        saccade.dynamic_mask_attention(*leaves, keep=9, add_scores=False, backend=name) for name in ("gather_cpp", "gather_torch")
    )
    torch.testing.assert_close(ours, plain, rtol=2e-6, atol=2e-6)


def test_strided_views():
    leaves = [x.detach() for x in made(2)]
    packed = torch.stack([x.transpose(1, 2) for x in leaves[:3]], 2)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    scores = leaves[3].repeat_interleave(3, -1)[..., ::3]
    assert not views[0].is_contiguous()
    assert not scores.is_contiguous()
    ours = saccade.dynamic_mask_attention(*views, scores, keep=9, backend="gather_cpp")
    assert torch.equal(ours, saccade.dynamic_mask_attention(*leaves, keep=9, backend="gather_cpp"))


def test_views_whose_heads_are_innermost():
    shape = (2, 3, 33, 5)  # D is no multiple of 16, so rows are padded
    dense = [torch.randn(shape) for _ in range(4)]
    views = [x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in dense]  # in order of address: B, T, D, H
    scores = torch.randn(shape[:3])
    found = []
    for *leaves, dout in (dense, views):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = saccade.dynamic_mask_attention(*leaves, scores, keep=9, backend="gather_cpp")
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    torch.testing.assert_close(found[1], found[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("scores", ["random", "ties", "falling", "rising", "zeros of both signs"])
@pytest.mark.parametrize(("length", "keep"), [(1, 1), (2, 1), (50, 1), (300, 17), (300, 299), (300, 300), (300, 900)])
def test_selection_equals_plain_torch(scores, length, keep):
    torch.manual_seed(length + keep)
    values = {
        "random": torch.randn(2, 3, length), "ties": torch.randn(2, 3, length).round(),
        "falling": -torch.arange(length).float().expand(2, 3, length), "rising": torch.arange(length).float().expand(2, 3, length),
        "zeros of both signs": torch.zeros(2, 3, length).copysign(torch.randn(2, 3, length)),
    }[scores]  # fmt: skip
    for lengths in (None, torch.tensor([length // 2, length]), torch.tensor([0, 1], dtype=torch.int32)):
        start, stop = launchers.causal_intervals(values, keep, lengths)
        assert torch.equal(stop, causal_expiry(values, keep, lengths))
        assert torch.equal(start, torch.arange(length, dtype=torch.int32).expand_as(stop))


def test_selection_by_documents():
    torch.manual_seed(0)
    scores, ids = torch.randn(2, 2, 90).mul(2).round(), torch.randint(0, 5, (2, 90)).sort(-1).values
    assert op._ranks(scores) == "gather_cpp"
    for lengths in (None, torch.tensor([70, 0])):
        _, stop = op.causal_intervals(scores, 6, lengths, ids)
        assert torch.equal(stop, causal_expiry(scores, 6, lengths, ids))


def test_the_number_of_threads_changes_no_bit():
    leaves, before = made(2, 4, 2, 500, 500), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(outputs(leaves, "gather_cpp", keep=40, enable_gqa=True))
    finally:
        torch.set_num_threads(before)
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, -0x400000], ids=["quiet", "all ones", "all bits", "negative"])
def test_a_nan_stays_one_whatever_its_bits(bits):
    leaves = [x.detach() for x in made()]
    leaves[0][0, 1, 70, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    out, lse = saccade.dynamic_mask_attention(*leaves, keep=9, return_lse=True, backend="gather_cpp")
    expected = torch.zeros(lse.shape, dtype=torch.bool)
    expected[0, 1, 70] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected[..., None].expand_as(out))


def test_a_key_that_no_query_keeps_may_hold_a_nan():
    leaves = [x.detach() for x in made(q_len=1)]
    worst = leaves[3][0, 0].argmin()
    clean = saccade.dynamic_mask_attention(*leaves, keep=9, backend="gather_cpp")
    for x in leaves[1:3]:
        x[0, 0, worst] = float("nan")
    assert torch.equal(saccade.dynamic_mask_attention(*leaves, keep=9, backend="gather_cpp"), clean)


@pytest.mark.parametrize("size", [1e-20, 30.0, 3000.0])
def test_scores_of_any_size(size):
    """From weights that are all equal to those of which all but one are 0, as 2^-126 is the least that is kept."""
    leaves = made()
    with torch.no_grad():
        leaves[3].mul_(size)
    out, lse = saccade.dynamic_mask_attention(*leaves, keep=50, return_lse=True, backend="gather_cpp")
    exact, log = saccade.dynamic_mask_attention(*(x.double() for x in leaves), keep=50, return_lse=True, backend="reference")
    # a score of 3,000 is known to 2e-4
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=max(2e-6, 1e-6 * size))
    torch.testing.assert_close(lse.double(), log, rtol=1e-6, atol=2e-6)


def test_exponentials_over_their_whole_range():
    """One key of score 0 and one of x: the weight of the second is the sigmoid of x."""
    x = torch.linspace(-95, 0, 4000)
    query, key = torch.ones(1, 4000, 1, 1), torch.zeros(1, 4000, 2, 1)
    key[0, :, 1, 0] = x
    value = torch.tensor([0.0, 1.0])[:, None].expand(1, 4000, 2, 1)
    out = saccade.dynamic_mask_attention(query, key, value, torch.zeros(1, 4000, 2), keep=2, scale=1.0, backend="gather_cpp")
    exact = torch.sigmoid(x.double())
    known = exact > 2.0**-125
    torch.testing.assert_close(out.flatten()[known].double(), exact[known], rtol=8e-6, atol=0)
    assert not out.flatten()[exact < 2.0**-127].any()


def chosen(leaves) -> str:
    return explain(BACKENDS, describe_dynamic_mask(*leaves, 9, True, None, None, True, None, False, True))


def test_auto_takes_it_on_a_cpu(monkeypatch):
    leaves = made()
    assert "-> gather_cpp" in chosen(leaves)
    assert "-> gather_torch" in chosen([x.detach().double() for x in leaves])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "-> gather_torch" in chosen(leaves)
    assert "no C++ compiler was found" in chosen(leaves)
    assert op._ranks(leaves[3]) is None
    with pytest.raises(saccade.UnsupportedProblem, match=r"no C\+\+ compiler was found"):
        saccade.dynamic_mask_attention(*leaves, keep=9, backend="gather_cpp")


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A compiler that fails, and nothing that was compiled before."""
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_failed", {})
    monkeypatch.setattr(
        library, "command", lambda folder, target: [sys.executable, "-c", "import sys; sys.exit('no such header')"]
    )
    prepare.forget()
    yield
    disabled.forget()
    prepare.forget()


def test_plain_torch_computes_where_it_does_not_compile(broken):
    leaves = made()

    def both():
        return [outputs(leaves, backend, keep=9) for backend in ("gather_torch", "auto")]

    with pytest.warns(
        RuntimeWarning, match=r"cannot compile .*cpp; .* computes instead, more slowly(.|\n)*no such header"
    ) as told:
        expected, ours = both()
    assert len(told) == 1
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        torch.testing.assert_close(outputs(leaves, "auto", keep=9), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(CompileError, match="no such header"):
        saccade.dynamic_mask_attention(*leaves, keep=9, backend="gather_cpp")


def test_two_threads_call_at_once():
    leaves = [[x.detach() for x in made(q_len=n, kv_len=n)] for n in (300, 400)]
    alone = [saccade.dynamic_mask_attention(*x, keep=20, backend="gather_cpp") for x in leaves]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(saccade.dynamic_mask_attention, *leaves[i % 2], keep=20, backend="gather_cpp") for i in range(40)]
        for i, call in enumerate(calls):
            assert torch.equal(call.result(), alone[i % 2])


def test_a_child_process_computes_after_a_fork():
    """Threads of a call end with it, so that a child has all it needs."""
    code = (
        "import os, torch, saccade\n"
        "x = torch.randn(1, 2, 300, 16); s = torch.randn(1, 2, 300)\n"
        "one = saccade.dynamic_mask_attention(x, x, x, s, keep=9, backend='gather_cpp')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    two = saccade.dynamic_mask_attention(x, x, x, s, keep=9, backend='gather_cpp')\n"
        "    os._exit(0 if torch.equal(one, two) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "2"})


def test_auto_computes_where_the_compiler_cannot_be_run(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("no program\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_failed", {})
    leaves = [x.detach() for x in made(q_len=40, kv_len=40)]
    prepare.forget()
    try:
        with pytest.warns(
            RuntimeWarning, match=r"compiler cannot be run \(Exec format error\); .* computes instead, more slowly\.$"
        ):
            found = saccade.dynamic_mask_attention(*leaves, keep=5)
        torch.testing.assert_close(found, saccade.dynamic_mask_attention(*leaves, keep=5, backend="gather_torch"))
    finally:
        disabled.forget()
        prepare.forget()


WRONG = {
    "query": lambda x: x[:, :, :, :8],
    "value": lambda x: x[:, :, :5],
    "key_scores": lambda x: x[..., :1],
    "start": lambda x: x[:0],
    "stop": lambda x: x.long(),
    "dout": lambda x: x[:, :1],
    "out": lambda x: x[..., :1],
    "dlse": lambda x: x[..., :1],
}


@pytest.mark.parametrize("name", WRONG)
def test_the_op_reads_nothing_beyond_a_tensor(name):
    """It is public to torch, and C++ takes addresses: one row of intervals for twenty would be read beyond its end."""
    x, scores = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20)
    start = torch.arange(20, dtype=torch.int32).expand(1, 2, 20).contiguous()
    given = {"query": x, "key": x, "value": x, "key_scores": scores, "start": start, "stop": start + 3}
    rest, ops = (3, True, 0.25, "gather_cpp"), torch.ops.saccade
    out, lse = ops.dynamic_mask_forward(*given.values(), *rest)
    first = {"dout": out, "dlse": lse, "out": out, "lse": lse}
    ops.dynamic_mask_backward(*first.values(), *given.values(), *rest)
    op, call = (ops.dynamic_mask_forward, given) if name in given else (ops.dynamic_mask_backward, first | given)
    call = call | {name: WRONG[name](call[name])}
    with pytest.raises(saccade.InvalidArgument, match=rf"{name} is torch\.\w+ of shape .* on cpu; this call needs .*shape \["):
        op(*call.values(), *rest)


def test_the_op_of_intervals_reads_nothing_beyond_lengths():
    scores = torch.randn(3, 2, 20)
    with pytest.raises(
        saccade.InvalidArgument, match=r"lengths is torch\.int64 of shape \[1\] on cpu; this call needs shape \[3\]"
    ):
        torch.ops.saccade.dynamic_mask_intervals(scores, 3, 20, True, torch.tensor([5]), None)
    with pytest.raises(saccade.InvalidArgument, match="keep is 0"):
        torch.ops.saccade.dynamic_mask_intervals(scores, 0, 20, True, None, None)


FORKED = """
import os, signal, torch, saccade
# short, so that torch needs no second thread for sums of its own, which would wait in the child too
x, s = torch.randn(1, 2, 130, 16), torch.randn(1, 2, 130)
leaf = x.clone().requires_grad_()
calls = {
    "forward": lambda: saccade.dynamic_mask_attention(x, x, x, s, keep=9, backend="gather_cpp"),
    "backward": lambda: saccade.dynamic_mask_attention(leaf, x, x, s, keep=9, backend="gather_cpp").sum().backward(),
    "expiry": lambda: saccade.expiry(s, 9),
    "torch": lambda: (torch.randn(1000, 1000) * 2 + 1).sum(),
}

def waits(first, then):
    calls[first]()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        calls[then]()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

# nothing is called in this process, so that the parents of all pairs begin alike
for pair in ["torch", "forward"], ["torch", "backward"], ["expiry", "forward"], ["forward", "backward"], ["backward", "expiry"]:
    parent = os.fork()
    if parent == 0:
        os._exit(waits(*pair))
    assert os.waitpid(parent, 0)[1] == 0, f"{pair[1]} waits for threads of a parent that called {pair[0]}"
"""


def test_a_child_waits_for_no_thread_of_its_parent():
    """Whichever of our functions, or of torch's, the parent had called."""
    command = [sys.executable, "-c", FORKED]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "2"})


def test_processors_of_every_kind(tmp_path, monkeypatch):
    """The sources for other widths of vectors compile, and give the same to rounding."""
    leaves = made(1, 4, 2, 200, 200, 40)
    expected = outputs(leaves, "gather_cpp", keep=30, enable_gqa=True)
    able = torch.backends.cpu.get_cpu_capability()
    for kind in {"AVX512": ("AVX2", "DEFAULT"), "AVX2": ("DEFAULT",)}.get(able, ()):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        monkeypatch.setattr(library, "_loaded", {})
        found = outputs(leaves, "gather_cpp", keep=30, enable_gqa=True)
        assert len(library._loaded) == 1
        for x, y in itertools.zip_longest(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
