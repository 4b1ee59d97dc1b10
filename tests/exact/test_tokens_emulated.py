"""Token tiles in CUDA C++ on a CPU: the unchanged sources under the emulator, behind the public function, within the error budgets of the backends."""

from __future__ import annotations

import dataclasses

import emulator
import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade.engine import prepare
from saccade.exact.ragged import backend, config, token_launches, tokens_sm90
from saccade.exact.ragged import call as ragged_call
from saccade.exact.testing.varlen_cases import VarlenCase
from saccade.exact.testing.varlen_check import check_varlen
from saccade.exact.varlen.args import BOTTOM_RIGHT, UPPER_LEFT
from saccade.exact.varlen.problem import describe_varlen
from saccade.launch.cache import LaunchCache
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc import Options
from saccade.testing.judge import report

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/exact/test_tokens_on_gpu.py runs them there")
SHORT = (5, 9, 30, 0, 0, 1, 17, 3, 16, 40)
BESIDE_A_LONG_ONE = (3, 250, 1, 9)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The kernels that ran, by name."""
    if emulator.COMPILER is None:
        pytest.skip("needs g++")
    seen = []

    def ready(described, device):
        launch = emulator.ready(described, device)
        return lambda *pointers, **options: (seen.append(described.kernel), launch(*pointers, **options))

    monkeypatch.setattr(CudaLaunch, "ready", ready)
    monkeypatch.setattr(config, "TOKENS_SM90", {"forward": 64, "backward": 64})
    monkeypatch.setattr(config, "LONGEST_TOKENS_SM90", 2**16)
    monkeypatch.setattr(
        backend, "triton_reasons", lambda *_: []
    )  # the interpreter would compute bfloat16, which it has not to here
    monkeypatch.setattr(ragged_call, "arch_of", lambda device: 90)
    monkeypatch.setattr(tokens_sm90, "obstacles", lambda architecture: ())
    monkeypatch.setattr(tokens_sm90, "_LAUNCHES", LaunchCache())
    monkeypatch.setattr(token_launches, "capture_id", lambda device: 1)  # every call that they could take
    token_launches._KNOWN.clear()
    prepare.forget()
    yield seen
    token_launches._KNOWN.clear()
    prepare.forget()


def check(case, dtype, seen, arrange=None):
    results = check_varlen(case, dtype, "cpu", "ragged", arrange=arrange)
    assert all(r.ok for r in results), report(case, results)
    assert seen == ["tokens_forward", "tokens_backward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [16, 32, 40, 64])
def test_head_dims_and_dtypes(dim, dtype, ran):
    """Tokens behind the last sequence are NaN, and their results zeros."""
    check(VarlenCase("short", SHORT, head_dim=dim, tail=5, lse_grad=True), dtype, ran)


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("causal", [UPPER_LEFT, BOTTOM_RIGHT], ids=["upper-left", "lower-right"])
@pytest.mark.parametrize("lengths", [SHORT, BESIDE_A_LONG_ONE], ids=["short", "long"])
def test_causal(lengths, causal, dim, ran):
    check(VarlenCase("causal", lengths, head_dim=dim, causal=causal, tail=3, lse_grad=True), torch.bfloat16, ran)


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize(
    "lengths", [BESIDE_A_LONG_ONE, (64,), (113,), (114,), (49, 113, 2), (128, 128), (1,) * 70, (7, 340), (0, 0, 2)], ids=str
)
def test_ends_of_tiles_and_of_chunks(lengths, dim, ran):
    check(VarlenCase("ends", lengths, head_dim=dim), torch.bfloat16, ran)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("lengths", [SHORT, BESIDE_A_LONG_ONE], ids=["short", "long"])
def test_packed_views(lengths, dim, dtype, ran):
    """query, key and value lie in one tensor `[T, 3, H, D]`, and so do their gradients."""
    check(VarlenCase("packed", lengths, head_dim=dim, packed=True, tail=2), dtype, ran)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("lengths", [SHORT, BESIDE_A_LONG_ONE], ids=["short", "long"])
@pytest.mark.parametrize("causal", [0, UPPER_LEFT], ids=["full", "causal"])
def test_grouped_heads(causal, lengths, kv_heads, ran):
    case = VarlenCase("grouped", lengths, heads=4, kv_heads=kv_heads, head_dim=32, causal=causal, tail=5, lse_grad=True)
    check(case, torch.float16, ran)


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("lengths", [SHORT, BESIDE_A_LONG_ONE], ids=["short", "long"])
@pytest.mark.parametrize(("kv_heads", "causal"), [(2, 0), (1, UPPER_LEFT)], ids=["plain", "grouped-causal"])
def test_dropout(kv_heads, causal, lengths, dim, ran):
    """The draw of Triton's kernels, whose bits these read."""
    case = VarlenCase("dropout", lengths, kv_heads=kv_heads, head_dim=dim, causal=causal, dropout_p=0.3, lse_grad=True, tail=2)
    check(case, torch.bfloat16, ran)


@pytest.mark.parametrize("step", [32, 64])
@pytest.mark.parametrize("lengths", [SHORT, BESIDE_A_LONG_ONE, (33, 47, 48, 49)], ids=["short", "long", "edges"])
def test_other_steps_of_forward(lengths, step, ran, monkeypatch):
    chosen = {key: shape._replace(step=step) for key, shape in config.TOKENS_SM90_CONFIGS.items()}
    monkeypatch.setattr(config, "TOKENS_SM90_CONFIGS", chosen)
    check(VarlenCase("steps", lengths, head_dim=64), torch.bfloat16, ran)


@pytest.mark.parametrize("causal", [0, UPPER_LEFT], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [SHORT, BESIDE_A_LONG_ONE], ids=["short", "long"])
def test_copies_that_are_early(lengths, causal, ran, monkeypatch):
    """The emulator copies when it is asked to, and not when it is waited for: into tiles that another warp may read yet."""
    of = Options.of
    monkeypatch.setattr(tokens_sm90.Options, "of", lambda macros: of({**macros, "EARLY_COPIES": 1}))
    check(VarlenCase("early", lengths, heads=4, kv_heads=2, head_dim=32, causal=causal, tail=3), torch.bfloat16, ran)


def test_strided_heads(ran):
    """Every second head, at rows of twice the distance."""

    def arrange(x):
        wide = x.new_full((2 * x.shape[0], 2 * x.shape[1], x.shape[2]), float("nan"))
        wide[::2, ::2] = x
        return wide[::2, ::2]

    check(VarlenCase("strided", SHORT, head_dim=32, lse_grad=True), torch.bfloat16, ran, arrange)


def test_random_batches(ran):
    for seed in range(6):
        source = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 40, (), generator=source))
        lengths = torch.empty(count).log_normal_(2.5, 1.0, generator=source).int().clamp(0, 200).tolist()
        case = VarlenCase(
            "random", tuple(lengths), heads=1, kv_heads=1, head_dim=(32, 64)[seed % 2], causal=seed % 3 % 2, tail=seed % 4
        )
        check(case, torch.bfloat16, ran)
        ran.clear()


def outcome(tensors, ends, longest):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = saccade.attention_varlen(*leaves, ends, ends, longest, longest, return_lse=True, backend="ragged")
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("lengths", [(5, 9, 30, 7, 60), (5, 9, 300, 7)], ids=["short", "long"])
def test_nan_of_one_sequence_reaches_no_other(lengths, dim, ran):
    tokens = sum(lengths) + 5
    clean = [torch.randn(tokens, 2, dim).bfloat16() for _ in range(3)]
    dirty = [x.clone() for x in clean]
    dirty[2][6], dirty[0][8] = float("nan"), float("inf")  # of the second sequence
    for x in dirty:
        x[-5:] = float("nan")
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    found, expected = (outcome(x, ends, max(lengths)) for x in (dirty, clean))
    rows = torch.cat([torch.arange(5), torch.arange(14, tokens - 5)])
    for got, want in zip(found, expected, strict=True):
        axis = 1 if got.dim() == 2 else 0
        # alone a sequence is summed in other steps
        torch.testing.assert_close(got.index_select(axis, rows), want.index_select(axis, rows), rtol=0.016, atol=0.01)
    assert not any(x[-5:].any() for x in (found[0], *found[2:]))
    assert (found[1][:, -5:] == float("-inf")).all()


@pytest.mark.parametrize(
    "wrong",
    [[0, 90, 10, 10**6], [-5, 60, 30, 300, 7], [100, 50, 0], [60, 50], [5] * 300, [*range(120, 0, -1)] * 9],
    ids=lambda x: str(x[:5]),
)
def test_wrong_offsets_read_nothing_outside(wrong, ran, monkeypatch):
    """The emulator stops at an address outside of shared memory, and numbers around the tensors are NaN."""
    # the public function refuses them, since the host has read them
    run = tokens_sm90._run

    def with_wrong(call, direction, strided, pointers, *rest):
        offsets = torch.tensor(wrong, dtype=torch.int32)
        monkeypatch.setattr(call, "sequences", len(wrong) - 1)
        return run(call, direction, strided, (*pointers[:3], offsets, *pointers[4:]), *rest)

    monkeypatch.setattr(tokens_sm90, "_run", with_wrong)
    around = [torch.full((360, 2, 32), torch.nan).bfloat16() for _ in range(3)]
    for x in around:
        x[120:240] = torch.randn(120, 2, 32)
    found = outcome([x[120:240] for x in around], torch.tensor([0, 20, 120], dtype=torch.int32), 128)
    assert ran
    assert not any(x.isnan().any() for x in found)


@pytest.mark.parametrize("empty", [0, 70, 200, 700])
@pytest.mark.parametrize("before", [0, 63, 64, 65, 900, 3000])
def test_bounds_among_many_sequences(before, empty, ran):
    """So many sequences lie before a tile that a block looks for its own in rounds, and so many empty ones in it that it looks on."""
    lengths = (*[i % 2 for i in range(before)], 5, *[0] * empty, 9, 3, *[0] * empty, 1, 1, *[0] * empty, 30)
    check(VarlenCase("many", lengths, heads=1, kv_heads=1, head_dim=32, tail=3), torch.float16, ran)


@pytest.mark.parametrize(
    "change", [{"dtype": torch.float32}, {"dim": 36}, {"window": (4, 4)}, {"scale": -1.0}, {"odd": True}, {"off": True}], ids=str
)
def test_what_they_leave_to_triton(change, ran, monkeypatch):
    dim, dtype = change.get("dim", 32), change.get("dtype", torch.float16)
    made = [torch.randn(45, 2, dim, dtype=dtype) for _ in range(3)]
    if "odd" in change:
        made[0] = torch.empty(made[0].numel() + 1, dtype=dtype)[1:].view(made[0].shape).copy_(made[0])
    if "off" in change:
        monkeypatch.setattr(config, "TOKENS_SM90", {"forward": 0, "backward": 0})
    ends = torch.tensor([0, 5, 14, 44], dtype=torch.int32)
    options = {name: change[name] for name in ("window", "scale") if name in change}
    saccade.attention_varlen(*made, ends, ends, 30, 30, backend="ragged", **options)
    assert not ran


@pytest.mark.parametrize(("dim", "told"), [(32, True), (64, True), (36, False)])
def test_explained(dim, told, ran, monkeypatch):
    x, ends = torch.zeros(40, 2, dim).bfloat16(), torch.tensor([0, 40], dtype=torch.int32)
    problem = describe_varlen(x, x, x, ends, ends, 40, 40, 0.0, 0, None, False, None, False, True, False)
    problem = dataclasses.replace(problem, device_type="cuda", arch=90)
    monkeypatch.setattr(backend, "obstacles", lambda architecture: ())
    tokens = backend.RAGGED.form(problem).partition("beyond,")[0]
    assert ("fwd: CUDA C++" in tokens, "bwd: CUDA C++" in tokens) == (told, told)
    monkeypatch.setattr(config, "TOKENS_SM90", {"forward": 0, "backward": 0})
    assert "CUDA C++" not in backend.RAGGED.form(problem).partition("beyond,")[0]
