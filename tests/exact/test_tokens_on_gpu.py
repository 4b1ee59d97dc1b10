"""Tiles of tokens in a CUDA graph: any batch that fits the captured number of tokens, as the reference computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade import native
from saccade.engine import prepare
from saccade.exact.long import config as long_config
from saccade.exact.ragged import config, token_launches, tokens_sm90
from saccade.exact.testing.varlen_cases import VARLEN, VarlenCase
from saccade.exact.testing.varlen_check import check_varlen
from saccade.exact.varlen.args import BOTTOM_RIGHT, UPPER_LEFT
from saccade.testing.judge import report

pytestmark = [pytest.mark.gpu, pytest.mark.unpoisoned]


@pytest.fixture(autouse=True, params=["triton", "cuda"])
def form(request, monkeypatch):
    """The token tiles that run where both take a call. A replay that another test recorded would run in place of the form that this one asks for."""
    if request.param == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("token tiles in CUDA C++ are for sm_90")
    monkeypatch.setattr(config, "TOKENS_SM90", dict.fromkeys(config.TOKENS_SM90, 64 if request.param == "cuda" else 0))
    monkeypatch.setattr(config, "LONGEST_TOKENS_SM90", 2**16)
    monkeypatch.setattr(config, "FEWEST_TOKENS_SM90", 0)
    monkeypatch.setattr(config, "DROPOUT_TOKENS_SM90", 64)
    monkeypatch.setattr(long_config, "TIMED_WINDOWS", 0)
    prepare.forget()
    yield request.param
    prepare.forget()


@pytest.fixture
def by_cuda(monkeypatch):
    """The directions that CUDA C++ computed."""
    ran = []
    for name in ("forward", "backward"):
        made = getattr(tokens_sm90, name)

        def noted(*given, made=made, name=name):
            taken = made(*given)
            ran.extend([name] * taken)
            return taken

        monkeypatch.setattr(tokens_sm90, name, noted)
    return ran


def ends_of(lengths, sequences):
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return torch.cat((ends, ends[-1:].expand(sequences + 1 - len(ends)))).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 40, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (20, 9)], ids=str)
def test_one_graph_serves_every_batch(dtype, dim, causal, window, form, by_cuda, monkeypatch):
    seen = []
    forward = token_launches.forward
    monkeypatch.setattr(token_launches, "forward", lambda *given: (seen.append(1), forward(*given)))
    tokens, heads, sequences = 300, 4, 20
    q, k, v, dout = (torch.randn(tokens, heads, dim, device="cuda", dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = ends_of([100, 150, 3], sequences)

    def step():
        out = saccade.attention_varlen(*leaves, ends, ends, 150, 150, is_causal=causal, window=window, backend="ragged")
        return out, *torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert seen
    assert bool(by_cuda) == (form == "cuda" and dtype != torch.float32 and window is None)
    for lengths in ([100, 150, 3], [5] * 20, [64, 64, 64, 64], [1], [33, 0, 90, 0, 150]):
        ends.copy_(ends_of(lengths, sequences))
        graph.replay()
        exact = [x.detach().double().requires_grad_() for x in leaves]
        out = saccade.attention_varlen(*exact, ends, ends, 150, 150, is_causal=causal, window=window, backend="reference")
        expected = (out, *torch.autograd.grad(out, exact, dout.double()))
        for got, want in zip(found, expected, strict=True):
            # of a single key dq and dk are 0, and the kernel's are what rounding left
            error = (got.double() - want).norm() / want.norm().clamp(min=1.0)
            assert error < (1e-5 if dtype == torch.float32 else 6e-3), (lengths, error)
            assert (got[sum(lengths) :] == 0).all()


@pytest.mark.parametrize("launches", ["token tiles", "buckets of lengths"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "kv_heads"), [(32, 4), (40, 2), (64, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_eager_batches(dtype, dim, kv_heads, causal, dropout_p, launches, form, by_cuda, monkeypatch):
    """Batches of one kind, of which Python runs the first and C++ the others; buckets of lengths stay with Python."""
    if launches != "token tiles":
        monkeypatch.setattr(token_launches, "MOST_EAGER", 0)
    launched = []
    for name in ("forward", "backward"):
        made = getattr(token_launches, name)
        monkeypatch.setattr(token_launches, name, lambda *given, made=made, name=name: (launched.append(name), made(*given)))
    for number, lengths in enumerate(([100, 28, 3], [5] * 20, [64, 64, 64, 128], [1], [33, 0, 90, 0, 128], [17] * 900)):
        tokens = sum(lengths) + (5 if number % 2 else 0)
        heads = (4, kv_heads, kv_heads, 4)
        q, k, v, dout = (torch.randn(tokens, n, dim, device="cuda", dtype=dtype) for n in heads)
        leaves, ends = [x.requires_grad_() for x in (q, k, v)], ends_of(lengths, len(lengths))
        longest, grouped = max(lengths), kv_heads != 4
        options = {"is_causal": causal, "enable_gqa": grouped, "dropout_p": dropout_p}
        torch.manual_seed(number)
        out = saccade.attention_varlen(*leaves, ends, ends, longest, longest, backend="ragged", **options)
        found = (out, *torch.autograd.grad(out, leaves, dout))
        exact = [x.detach().double().requires_grad_() for x in leaves]
        torch.manual_seed(number)
        out = saccade.attention_varlen(*exact, ends, ends, longest, longest, backend="reference", **options)
        expected = (out, *torch.autograd.grad(out, exact, dout.double()))
        for got, want in zip(found, expected, strict=True):
            # of a single key dq and dk are 0, and the kernel's are what rounding out left: some 2^-9 of the sums that cancel, as large as dv
            error = (got.double() - want).norm() / want.norm().clamp(min=expected[-1].norm())
            assert error < 6e-3, (lengths, error)
            assert (got[sum(lengths) :] == 0).all()
    assert bool(launched) == (launches == "token tiles")
    assert set(by_cuda) == ({"forward", "backward"} if launched and form == "cuda" else set())


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_cpp_replays_token_tiles(dropout_p, monkeypatch):
    """A batch of another number of tokens and sequences, without Python's launchers."""
    if native.calls is None:
        pytest.skip("C++ is not compiled here")

    def made(lengths):
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(sum(lengths), 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves, ends = [x.requires_grad_() for x in (q, k, v)], ends_of(lengths, len(lengths))
        torch.manual_seed(1)
        out = saccade.attention_varlen(*leaves, ends, ends, 128, 128, dropout_p, backend="ragged")
        return out, *torch.autograd.grad(out, leaves, dout)

    lengths = [70, 3, 120, 1, 64] * 7
    for _ in range(2):
        expected = made(lengths)
    made([100, 28, 3])
    for name in ("forward", "backward"):
        monkeypatch.setattr(token_launches, name, lambda *given: pytest.fail("Python launches it"))
    for got, want in zip(made(lengths), expected, strict=True):
        assert torch.equal(got, want)


SHORT, BESIDE_A_LONG_ONE = (5, 9, 30, 0, 0, 1, 17, 3, 16, 40), (3, 250, 1, 9)
_CASES = [
    *(VarlenCase(f"short-{dim}", SHORT, head_dim=dim, tail=5, lse_grad=True) for dim in (8, 16, 32, 40, 64)),
    *(
        VarlenCase(f"causal-{dim}-{causal}", lengths, head_dim=dim, causal=causal, tail=3, lse_grad=True)
        for lengths in (SHORT, BESIDE_A_LONG_ONE) for dim in (32, 64) for causal in (UPPER_LEFT, BOTTOM_RIGHT)
    ),
    *(
        VarlenCase(f"ends-{dim}-{lengths}", lengths, head_dim=dim)
        for dim in (32, 64) for lengths in ((64,), (113,), (114,), (49, 113, 2), (128, 128), (1,) * 70, (7, 340), (0, 0, 2), (700, 1, 700))
    ),
    *(VarlenCase(f"packed-{dim}", lengths, head_dim=dim, packed=True, tail=2) for dim in (32, 64) for lengths in (SHORT, BESIDE_A_LONG_ONE)),
    *(
        VarlenCase(f"grouped-{kv_heads}-{causal}", lengths, heads=4, kv_heads=kv_heads, head_dim=64, causal=causal, lse_grad=True)
        for kv_heads in (1, 2) for causal in (0, UPPER_LEFT) for lengths in (SHORT, BESIDE_A_LONG_ONE)
    ),
    *(
        VarlenCase(f"dropout-{dim}-{kv_heads}", lengths, kv_heads=kv_heads, head_dim=dim, dropout_p=0.3, lse_grad=True, tail=2)
        for dim in (32, 64) for kv_heads in (1, 2) for lengths in (SHORT, BESIDE_A_LONG_ONE)
    ),
    VarlenCase("many", tuple(range(1, 120)) + (0,) * 300 + (128, 1, 64), heads=12, kv_heads=12, head_dim=32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_budgets(case, dtype, form, by_cuda, monkeypatch):
    """The cases of tests/exact/test_tokens_emulated.py, each called by Python."""
    monkeypatch.setattr(token_launches, "capture_id", lambda device: 1)
    monkeypatch.setattr(token_launches, "_KNOWN", type(token_launches._KNOWN)())
    results = check_varlen(case, dtype, "cuda", "ragged")
    assert all(r.ok for r in results), report(case, results)
    assert by_cuda == ["forward", "backward"] * (form == "cuda")


@pytest.mark.parametrize(
    "case", [case for case in VARLEN if not case.bias and case.k_lengths is None and "large" not in case.tags], ids=str
)
def test_cases_of_every_backend(case):
    results = check_varlen(case, torch.bfloat16, "cuda", "ragged")
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("dim", [32, 64])
def test_the_same_bits_every_time(dim):
    q, k, v, dout = (torch.randn(5000, 12, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves, ends = [x.requires_grad_() for x in (q, k, v)], ends_of([20] * 248 + [40], 249)

    def step():
        out = saccade.attention_varlen(*leaves, ends, ends, 128, 128, backend="ragged")
        return out, *torch.autograd.grad(out, leaves, dout)

    first = step()
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(first, step(), strict=True))


def test_nan_of_one_sequence_reaches_no_other(form):
    lengths = [5, 9, 30, 7, 60, 300, 2]
    clean = [torch.randn(sum(lengths) + 5, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dirty = [x.clone() for x in clean]
    dirty[2][6], dirty[0][8] = float("nan"), float("inf")
    ends, found = ends_of(lengths, len(lengths)), []
    for tensors in (clean, dirty):
        leaves = [x.requires_grad_() for x in tensors]
        out = saccade.attention_varlen(*leaves, ends, ends, 300, 300, window=None, backend="ragged")
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    rows = torch.cat([torch.arange(5), torch.arange(14, sum(lengths) + 5)]).cuda()
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got[rows], want[rows], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("longest", "sequences"), [(100, 8), (400, 200)], ids=["token tiles", "lists"])
def test_layers_in_a_graph_of_torchs_compiler(longest, sequences):
    """It raises if the bounds or lists that two layers could share live on in the memory of its graph."""
    lengths = torch.randint(1, longest, (sequences,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = ends_of(lengths, sequences)
    q, k, v, dout = (torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def layers(q, k, v, ends):
        out = saccade.attention_varlen(q, k, v, ends, ends, longest, longest, backend="ragged")
        return saccade.attention_varlen(out, k, v, ends, ends, longest, longest, backend="ragged")

    expected = torch.autograd.grad(layers(*leaves, ends), leaves, dout)
    compiled = torch.compile(layers, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for x, y in zip(torch.autograd.grad(compiled(*leaves, ends), leaves, dout), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
