"""The short family under the contract, every configuration forced, and every reason it declines."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from contracts.exact import DEVICE, HAS_GPU, AttentionContract
from contracts.opt_outs import opted_out

import saccade
from saccade.engine.calls import split_mask
from saccade.engine.layout import unpack
from saccade.exact.args import AttentionArgs
from saccade.exact.problem import describe_attention
from saccade.exact.problem import problem_of as problem_of_args
from saccade.exact.short import choice
from saccade.exact.short.backend import SHORT
from saccade.exact.short.bias_gradient import BiasSharing
from saccade.exact.short.config import LARGE, OWN_BIAS, Config, heuristic, pick, tile_size
from saccade.exact.short.launch import Launch, row_strides
from saccade.exact.short.launchers import backward, forward
from saccade.exact.testing.check import check_attention, compare
from saccade.launch import requirements
from saccade.launch.cache import LaunchCache
from saccade.testing.baseline import differentiate
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs, make
from saccade.testing.judge import report
from tools.aot import recording
from tools.tuner.candidates import candidates


@opted_out("exact/test_short.py::TestShort")
class TestShort(AttentionContract):
    backend = "short"


class Forced(torch.autograd.Function):
    """The launchers under a chosen configuration, differentiable."""

    @staticmethod
    def forward(ctx, query, key, value, bias, args, config, lse_grad):
        args = args._replace(query=query, key=key, value=value, bias=bias)
        ctx.args, ctx.config, ctx.lse_grad = args, config, lse_grad
        out, ctx.lse = forward(args, config)
        return out, ctx.lse.clone()

    @staticmethod
    def backward(ctx, dout, dlse):
        dlse = dlse if ctx.lse_grad else None
        bias_grad = ctx.args.bias is not None
        dq, dk, dv, dbias = backward(ctx.args, dout, dlse, None, ctx.lse, bias_grad=bias_grad, packed=None, config=ctx.config)
        return dq, dk, dv, dbias, None, None, None


def forced(case: Case, config: Config):
    def run(x: Inputs):
        seed = None
        if case.dropout_p:
            seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=x.query.device)
        args = AttentionArgs(
            x.query, x.key, x.value, x.mask, x.bias, x.lengths, seed, case.dropout_p, case.is_causal, case.head_dim**-0.5
        )
        return Forced.apply(x.query, x.key, x.value, x.bias, args, config, case.lse_grad)

    return run


MATRIX_CONFIGS = {
    "plain": Config(4),
    "heads-2": Config(4, heads=2),
    "heads-4": Config(4, heads=4),
    "q-blocks-2": Config(4, q_blocks=2),
    "q-blocks-4": Config(4, q_blocks=4),
    "heads-2-q-blocks-2": Config(4, heads=2, q_blocks=2),
    "persistent": Config(4, programs_per_sm=1),
    "persistent-3-staged": Config(4, programs_per_sm=3, stages=2),
    "heads-2-persistent": Config(4, heads=2, programs_per_sm=1),
    "chunk-32": Config(4, chunk=32),
    "chunk-64": Config(4, chunk=64, stages=3),
    # forward's chunked kernel has one program per problem, backward's iterates over problems, and neither takes several heads
    "chunk-32-persistent-heads-2": Config(4, chunk=32, programs_per_sm=1, heads=2),
    "registers": Config(4, max_registers=128),
    "tma": Config(4, tma=True),
    "tma-q-blocks-2-grouped-heads": Config(4, tma=True, q_blocks=2),
    "tma-chunk-32": Config(4, tma=True, chunk=32),
    "tma-persistent": Config(4, tma=True, programs_per_sm=1),
}
POOL_CONFIGS = {
    "plain": Config(4),
    "heads-2": Config(4, heads=2),
    "heads-4": Config(4, heads=4),
    "persistent": Config(4, programs_per_sm=1),
    "heads-2-persistent": Config(4, heads=2, programs_per_sm=2),
    "chunk-32": Config(4, chunk=32, stages=2),
    "heads-2-chunk-32": Config(4, heads=2, chunk=32),
    "matrix": Config(4, matrix=True),
    "matrix-heads-2": Config(4, heads=2, matrix=True),
    "matrix-chunk-32": Config(4, chunk=32, matrix=True),
}
# B = 3, H = 4 so that heads and persistent programs divide unevenly; two chunks of the head dim, the second one cut
FEATURES = {
    "plain": {},
    "causal-lse": {"is_causal": True, "lse_grad": True},
    "mask-lengths": {"mask": "bool", "lengths": True},
    "mask-heads": {"mask": "bool", "mask_shape": (1, 4, 1, 41), "lse_grad": True},
    "dropout": {"dropout_p": 0.3},
    "bias-head": {"bias": (1, 4, "q", 41)},
    "bias-batch-lengths": {"bias": (3, 1, "q", 41), "lengths": True, "lse_grad": True},
    "bias-shared": {"bias": (1, 1, 1, 41), "dropout_p": 0.2},
    "bias-windows": {"batch": 6, "bias": (2, 4, "q", 41), "windows": 2, "lse_grad": True},
    "bias-windows-heads-alike": {"batch": 6, "bias": (3, 1, "q", 41), "windows": 3, "dropout_p": 0.2},
    "grouped": {"kv_heads": 2, "dropout_p": 0.2, "is_causal": True},
}


def feature_case(name: str, q_len: int, chunk: int) -> Case:
    features = dict(FEATURES[name])
    if "bias" in features:
        features["bias"] = tuple(q_len if n == "q" else n for n in features["bias"])
    return replace(Case(name, 3, 4, 4, q_len, 41, 72 if chunk == 64 else 40), **features)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("config", MATRIX_CONFIGS.values(), ids=MATRIX_CONFIGS)
def test_every_matrix_configuration(config, feature):
    case = feature_case(feature, 35, config.chunk)
    # four heads at once in float32 take 256 KB of shared memory, more than any GPU has
    dtype = torch.float16 if config.heads == 4 and DEVICE == "cuda" else torch.float32
    results = check_attention(case, dtype, DEVICE, "short", run=forced(case, config))
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("config", POOL_CONFIGS.values(), ids=POOL_CONFIGS)
def test_every_pooling_configuration(config, feature):
    case = feature_case(feature, 1, config.chunk)
    results = check_attention(case, torch.float32, DEVICE, "short", run=forced(case, config))
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [Config(4, heads=2), Config(4, q_blocks=2), Config(4, chunk=32)], ids=str)
def test_configurations_in_both_dtypes_on_full_tiles(config, dtype):
    # no masking of rows, keys or columns anywhere
    case = Case("full", 2, 2, 2, 64, 64, 64)
    results = check_attention(case, dtype, DEVICE, "short", run=forced(case, config))
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("config", [Config(4, tma=True), Config(4, tma=True, chunk=32)], ids=["whole", "chunked"])
@pytest.mark.parametrize("stride", [0, 40 * 41 + 4, 3], ids=["zero", "aligned", "odd"])
def test_a_batch_of_one_may_have_any_batch_stride(config, stride):
    # the copy engine needs strides that are multiples of 16 bytes, even for an axis of size 1
    case = Case("one", 1, 2, 2, 41, 41, 20)
    inputs = make(case, torch.float32, DEVICE)
    odd = {n: (x := getattr(inputs, n)).as_strided(x.shape, (stride, *x.stride()[1:])) for n in ("query", "key", "value", "dout")}
    results = compare(case, inputs, differentiate(forced(case, config), replace(inputs, **odd), 0, True))
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize("layout", ["bhtd", "expanded", "misaligned"])
def test_what_the_copy_engine_cannot_address_is_loaded_otherwise(layout):
    case = Case("tma", 2, 2, 2, 20, 20, 24)
    inputs = make(case, torch.float32, DEVICE, layout="bthd" if layout == "misaligned" else layout)
    if layout == "misaligned":  # 4 bytes off, and rows of 25 elements
        wide = torch.zeros(2, 20, 2, 25, device=DEVICE)
        key = wide[..., 1:].transpose(1, 2)
        key.copy_(inputs.key)
        inputs = replace(inputs, key=key)
    results = compare(case, inputs, differentiate(forced(case, Config(4, tma=True)), inputs, 0, True))
    assert all(r.ok for r in results), report(case, results)


# forward and backward of every kernel: whole, several heads, blocks of queries, chunks, the copy engine, one query
OUTSIDE = [
    ("plain", 35),
    ("heads-2", 35),
    ("q-blocks-2", 35),
    ("chunk-32", 35),
    ("tma", 35),
    ("plain", 1),
    ("heads-2-chunk-32", 1),
]


@pytest.mark.parametrize(("name", "q_len"), OUTSIDE)
def test_tokens_outside_the_batch(name, q_len):
    """`[T, B, H, D]`: the row stride holds the number of sequences and is an argument of the kernel."""
    config = (POOL_CONFIGS if q_len == 1 else MATRIX_CONFIGS)[name]
    case = replace(feature_case("plain", q_len, config.chunk), lse_grad=True)
    inputs = make(case, torch.float32, DEVICE, layout="tbhd")
    results = compare(case, inputs, differentiate(forced(case, config), inputs, 0, True))
    assert all(r.ok for r in results), report(case, results)


def constants(launch: Launch) -> dict[str, Any]:
    """By name, those for which Triton compiles a kernel anew."""
    parameters = list(inspect.signature(launch.kernel.fn).parameters.values())
    static = zip(parameters[-len(launch.static) :], launch.static, strict=True)
    return {p.name: value for p, value in static if "constexpr" in str(p.annotation)}


def launched(batch: int, q_len: int, outside: Sequence[bool]) -> list[Launch]:
    """The launches of forward and backward; outside: of query, key, value and the gradient, whether tokens are outside the batch."""

    def tensor(length: int, outside: bool) -> torch.Tensor:
        make = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
        return make(length, batch, 4, 64).permute(1, 2, 0, 3) if outside else make(batch, length, 4, 64).transpose(1, 2)

    query, key, value, dout = (tensor(n, o) for n, o in zip((q_len, 48, 48, q_len), outside, strict=True))
    args = AttentionArgs(query, key, value, None, None, None, None, 0.0, False, 0.125)
    lse = torch.empty(batch, 4, q_len, device="meta")
    with recording(Launch) as launches:
        forward(args)
        backward(args, dout, None, None, lse, bias_grad=False, packed=None)
    return [launch for launch, _ in launches]


@pytest.mark.parametrize("q_len", [48, 1])
@pytest.mark.parametrize("outside", [True, False])
def test_one_binary_for_every_number_of_sequences(q_len, outside):
    few, many = (launched(batch, q_len, [outside] * 4) for batch in (8, 24))
    assert len(few) == len(many) == 2
    for one, other in zip(few, many, strict=True):
        assert constants(one) == constants(other)
        assert (set(constants(one)["ROW_STRIDES"]) == {0}) is outside
        assert len(one.static[0]) == (3 if outside else 2)


def test_rows_of_several_layouts_are_constants():
    for launch in launched(8, 48, [True, False, True, True]):
        assert set(constants(launch)["ROW_STRIDES"]) == {4 * 64, 8 * 4 * 64}
        assert len(launch.static[0]) == 2


def test_a_row_stride_beyond_32_bits_is_a_constant():
    far = torch.empty_strided((2, 1, 3, 16), (16, 16, 2**23, 1), device="meta")
    near = torch.empty_strided((2, 1, 3, 16), (16, 16, 2**23 - 16, 1), device="meta")
    assert row_strides([far]) == ([(16, 16)], (2**23,))
    assert row_strides([near]) == ([(16, 16, 2**23 - 16)], (0,))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 41])
@pytest.mark.parametrize(
    "config", [Config(4, prefetch=2), Config(4, prefetch=2, heads=2), Config(4, prefetch=2, chunk=32)], ids=str
)
def test_prefetch_changes_nothing(config, q_len):
    # inline assembly: not for the interpreter
    inputs = make(Case("prefetch", 5, 4, 4, q_len, 41, 64), torch.float16, DEVICE)
    args = AttentionArgs(inputs.query, inputs.key, inputs.value, None, None, None, None, 0.0, False, 0.125)
    plain = replace(config, prefetch=0)
    (out, lse), (expected, expected_lse) = forward(args, config), forward(args, plain)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    both = [backward(args, inputs.dout, None, None, lse, bias_grad=False, packed=None, config=c)[:3] for c in (config, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_packed_gradients_are_views_of_one_tensor():
    inputs = make(Case("packed", 2, 2, 2, 9, 9, 16, packed=True), torch.float32, DEVICE)
    args = AttentionArgs(*unpack(inputs.qkv), None, None, None, None, 0.0, False, 0.25)
    _, lse = forward(args)
    packed = torch.empty_like(inputs.qkv)
    packed.fill_(float("nan"))
    dq, dk, dv, _ = backward(args, inputs.dout, None, None, lse, bias_grad=False, packed=packed)
    assert dq.data_ptr() == packed.data_ptr()
    assert dk.data_ptr() == packed[:, :, 1].data_ptr()
    assert dv.data_ptr() == packed[:, :, 2].data_ptr()
    assert not packed.isnan().any()


# --- the grid: batch x heads on its first axis, whatever their number


def test_batch_times_heads_beyond_65535_is_one_axis(monkeypatch):
    from saccade.exact.short import launch as launch_module
    from tools.aot import recording

    heads, batch = 12, 40000
    for q_len in (1, 4):
        query = torch.empty(batch, heads, q_len, 16, device="meta")
        key = torch.empty(batch, heads, 8, 16, device="meta")
        with recording(launch_module.Launch) as launches:
            args = AttentionArgs(query, key, key, None, None, None, None, 0.0, False, 0.25)
            forward(args, Config(1))
            forward(args, Config(1, heads=4))
            lse = torch.empty(batch, heads, q_len, device="meta")
            backward(args, query, None, None, lse, bias_grad=False, packed=None, config=Config(1))
        assert [launch.programs for launch, _ in launches] == [480000, 120000, 480000]
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append(grid) or self

    launch_module.Launch(Kernel(), 480000, (), {})(torch.empty(1))
    assert seen[0] == (480000, 1, 1)


# --- configuration


def test_pick_takes_a_table_only_where_it_was_measured(monkeypatch):
    from saccade.exact.short import config as config_module

    large, robust = Config(7), Config(9)
    monkeypatch.setitem(config_module.LARGE, ("fwd", 64, 64), large)
    monkeypatch.setitem(config_module.ROBUST, ("fwd", 64, 64), robust)
    pick.cache_clear()
    for arch in (90, 100):
        assert pick("fwd", 64, 64, 2, arch) == large
        assert pick("fwd", 64, 64, 2, arch, False) == robust
    for rows, dim, size, arch in ((64, 64, 4, 90), (64, 64, 2, 80), (64, 64, 2, 120), (16, 64, 2, 90)):
        for plain in (True, False):
            assert pick("fwd", rows, dim, size, arch, plain) == heuristic("fwd", rows, dim, size, arch)
    pick.cache_clear()


@pytest.mark.parametrize(
    ("bias", "own"),
    [((6, 4, 49, 49), True), ((1, 4, 49, 49), False), ((6, 4, 1, 49), False), ((3, 4, 49, 49), False), ((4, 49, 49), False)],
)
def test_a_bias_of_its_own_for_each_batch_row(bias, own):
    """It takes fewer queries at a time; one for each of three windows does not."""
    query = torch.randn(6, 4, 49, 32, dtype=torch.float16)
    args = AttentionArgs(query, query, query, None, torch.randn(bias, dtype=torch.float16), None, None, 0.0, False, 0.2)
    assert (choice.choose("fwd", replace(problem_of_args(args), arch=90)) == OWN_BIAS["fwd", 64, 32]) is own


def test_only_many_plain_problems_are_plain():
    query = torch.empty(choice.LARGE_PROBLEMS, 1, 64, 64, dtype=torch.bfloat16, device="meta")
    many = replace(problem_of(query), arch=90)
    assert choice.choose("fwd", many) is LARGE["fwd", 64, 64]
    for changes in ({"batch_shape": (choice.LARGE_PROBLEMS - 1,)}, {"kv_heads": 2}, {"is_causal": True}, {"dropout_p": 0.1}):
        assert choice.choose("fwd", replace(many, **changes)) is not LARGE["fwd", 64, 64]


# shapes of masks and biases for queries [6, 4, 49, 32], and how they are expanded
SHAPES = [
    ((49,), None), ((1, 49), (49, 49)), ((49, 49), None), ((4, 1, 49), None), ((6, 1, 1, 49), None), ((6, 1, 1, 49), (6, 1, 49, 49)),
    ((1, 4, 49, 49), None), ((1, 4, 49, 49), (6, 4, 49, 49)), ((6, 4, 49, 49), None),
]  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 120])
@pytest.mark.parametrize("tokens", [1, 49])
def test_the_launcher_plans_what_explain_describes(tokens, arch):
    """Both read one description: of the arguments of a kernel, and of the call itself."""
    seen = set()
    for (shape, expanded), dtype, return_lse in itertools.product(SHAPES, (torch.bool, torch.float16, None), (False, True)):
        query, key = torch.zeros(6, 4, tokens, 32, dtype=torch.float16), torch.zeros(6, 4, 49, 32, dtype=torch.float16)
        added = None
        if dtype is not None:
            cut = (*shape[:-2], min(shape[-2], tokens), shape[-1]) if len(shape) > 1 else shape
            added = torch.zeros(cut, dtype=dtype)
            added = added if expanded is None else added.expand(*expanded[:-2], tokens, 49)
        described = describe_attention(query, key, key, added, 0.1, False, None, False, None, return_lse, False, True)
        mask, bias = split_mask(described, added)
        args = AttentionArgs(query, key, key, mask, bias, None, torch.zeros(1, dtype=torch.int64), 0.1, False, described.scale)
        launched = replace(problem_of_args(args, return_lse=return_lse), arch=arch)
        found = choice.forms(replace(described, arch=arch))
        assert found.fwd == choice.choose("fwd", launched)
        assert found.bwd == choice.choose("bwd", launched)
        seen.add(found)
    assert len(seen) > 1 or (arch, tokens) != (90, 49)


def test_a_gpu_that_is_not_here_has_as_many_multiprocessors_as_such_gpus_have():
    query = torch.empty(1024, 8, 49, 32, dtype=torch.float16, device="meta")
    bias = torch.empty(1, 8, 49, 49, dtype=torch.float16, device="meta")
    problem = describe_attention(query, query, query, bias, 0.0, False, None, False, None, False, False, False)
    away = replace(problem, device_type="cuda", device_index=99, arch=90)
    assert choice.shared_bias_programs(away, 4) == 4 * 132


def test_pick_prints_when_asked(monkeypatch, capsys):
    monkeypatch.setenv("SACCADE_PRINT_CONFIG", "1")
    pick.cache_clear()
    pick("fwd", 64, 64, 4, 0)
    assert "saccade: short fwd rows=64 dim=64 sm_0: Config(" in capsys.readouterr().err
    pick.cache_clear()


def test_tile_size():
    assert [tile_size(n) for n in (0, 1, 16, 17, 33, 64, 65, 128)] == [16, 16, 16, 32, 64, 64, 128, 128]


@pytest.mark.parametrize("direction", ["fwd", "bwd", "pool_fwd", "pool_bwd"])
def test_candidates_begin_with_the_heuristic_and_are_distinct(direction):
    for rows in (32, 64, 128):
        for dim in (32, 64, 128, 256):
            found = candidates(direction, rows, dim)
            assert found[0] == heuristic(direction, rows, dim, 2)
            assert len(found) == len(set(found)) > 1


def test_launch_cache_is_bounded(monkeypatch):
    cache = LaunchCache()
    monkeypatch.setattr(LaunchCache, "limit", 3)
    for n in range(10):
        assert cache.remember((n,), n) == n
    assert len(cache) <= 3
    assert cache[(9,)] == 9


# --- sharing of a bias


@pytest.mark.parametrize(
    "shape",
    [(6, 4, 5, 7), (1, 4, 5, 7), (6, 1, 5, 7), (1, 1, 5, 7), (1, 1, 1, 7), (5, 7), (4, 5, 1), (2, 4, 5, 7), (3, 1, 5, 1)],
    ids=str,
)
@pytest.mark.parametrize("target", [1, 2, 7, 24, 1000])
def test_every_program_meets_one_bias_matrix_only(shape, target):
    sharing = BiasSharing.of(torch.zeros(shape), 6, 4, 5, 7, target)
    full = (1,) * (4 - len(shape)) + shape
    problems = range(6 * 4)
    assert sharing.programs % sharing.groups == 0
    assert sharing.programs <= len(problems)
    for program in range(sharing.programs):
        met = set()
        for index in range(program, len(problems), sharing.programs):
            b, h = (index % 6, index // 6) if sharing.batch_inner else divmod(index, 4)
            met.add((b % full[0], h if full[1] > 1 else 0))  # of windows row b reads row b % W
        assert len(met) == 1, f"program {program} meets {met}"
        b, h = met.pop()
        assert program % sharing.groups == (b * full[1] + h if full[0] > 1 else h)


@pytest.mark.parametrize("programs", [1, 3, 6])
def test_bias_gradient_with_any_number_of_programs(monkeypatch, programs):
    # a CPU counts as one multiprocessor: pretend there are more
    monkeypatch.setattr("saccade.exact.short.plans_triton.multiprocessors", lambda device: programs)
    for shape in ((1, 2, 9, 21), (1, 1, 9, 21), (4, 1, 9, 1), (2, 2, 9, 21), (2, 1, 9, 1)):
        case = Case(f"bias-{programs}", 4, 2, 2, 9, 21, 16 + programs, bias=shape, windows=2 if shape[0] == 2 else 0)
        results = check_attention(case, torch.float32, DEVICE, "short")
        assert all(r.ok for r in results), report(case, results)


@pytest.mark.parametrize(
    ("groups", "images", "programs"),
    [(192, 64, 768), (96, 64, 480), (48, 64, 240), (192, 2, 384), (1500, 64, 1500), (3, 1000, 240)],
    ids=["Swin-T 56 x 56", "Swin-T 28 x 28", "Swin-T 14 x 14", "two images", "many windows", "few windows"],
)
def test_programs_of_windows_keep_a_gpu_busy(groups, images, programs):
    sharing = BiasSharing.of(torch.empty(groups, 1, 49, 49, device="meta"), groups * images, 1, 49, 49, 2 * 132)
    assert sharing.programs == programs


# --- what it declines


def problem_of(query, key=None, value=None):
    key = query if key is None else key
    return describe_attention(
        query, key, key if value is None else value, None, 0.0, False, None, False, None, False, False, False
    )


META = {"device": "meta"}
DECLINED = [
    (torch.empty(2, 5, 16, **META), r"needs tensors of rank 4, \[B, H, T, D\], got rank 3"),
    (torch.empty(1, 1, 129, 16, **META), "needs Tq and Tk of at most 128, got 129 and 129"),
    (torch.empty(1, 1, 5, 257, **META), "needs a head dim of 1 to 256, got 257"),
    (torch.empty(1, 1, 5, 16, dtype=torch.float64, **META), "needs bfloat16, float16 or float32, got torch.float64"),
    (torch.empty(1, 1, 16, 5, **META).mT, r"needs a last stride of 1, got \(5, 5, 5\)"),
    (torch.empty(1, 1, 5, 16, **META), "needs a CUDA device, got meta"),
]


@pytest.mark.parametrize(("query", "sentence"), DECLINED, ids=[s[:30] for _, s in DECLINED])
def test_declines(query, sentence):
    assert any(re.match(sentence, reason) for reason in SHORT.why_not(problem_of(query)))


def test_declines_values_of_another_width():
    query, value = torch.zeros(1, 1, 5, 16), torch.zeros(1, 1, 5, 8)
    assert "needs values as wide as keys, got D = 16 and Dv = 8" in SHORT.why_not(problem_of(query, query, value))


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-50])
def test_declines_a_scale_that_does_not_keep_the_largest_score_largest(scale):
    # the scale is applied after the maximum of the row is found
    problem = replace(problem_of(torch.zeros(1, 1, 5, 16)), scale=scale)
    assert f"needs a positive scale that is normal in float32, got {scale}" in SHORT.why_not(problem)
    x = torch.randn(1, 2, 5, 16, device=DEVICE)
    expected = saccade.attention(x.double(), x.double(), x.double(), scale=scale, backend="reference")
    torch.testing.assert_close(saccade.attention(x, x, x, scale=scale), expected.float(), rtol=1e-5, atol=1e-5)


def test_declines_old_gpus():
    problem = replace(problem_of(torch.zeros(1, 1, 5, 16)), device_type="cuda", device_index=0, arch=75)
    assert SHORT.why_not(problem) == ["needs sm_80 or later (below it Triton has no matrix units), this device is sm_75"]
    assert SHORT.why_not(replace(problem, arch=80)) == []


def test_declines_without_triton(monkeypatch):
    monkeypatch.setattr(requirements, "has_package", lambda name: False)
    assert SHORT.why_not(problem_of(torch.zeros(1, 1, 5, 16))) == ["needs Triton, which is not installed"]


def test_declines_a_cpu_without_the_interpreter(monkeypatch):
    problem = problem_of(torch.zeros(1, 1, 5, 16))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (reason,) = SHORT.why_not(problem)
    assert reason.startswith("needs a CUDA device, got cpu (TRITON_INTERPRET=1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert SHORT.why_not(problem) == []
    (reason,) = SHORT.why_not(replace(problem, dtype=torch.bfloat16))
    assert reason.startswith("Triton's interpreter computes bfloat16 wrongly")


def test_an_odd_last_stride_does_not_matter_for_one_column():
    x = torch.zeros(1, 1, 5, 4)[..., ::4]
    assert not any("last stride" in r for r in SHORT.why_not(problem_of(x)))


def test_refusal_lists_every_reason():
    x = torch.zeros(1, 1, 300, 300, dtype=torch.float64, device=DEVICE)
    with pytest.raises(saccade.UnsupportedProblem) as caught:
        saccade.attention(x, x, x, backend="short")
    text = str(caught.value)
    sentences = ["backend 'short' cannot run", "Tq=300 Tk=300 D=300 fp64", "at most 128", "of 1 to 256", "got torch.float64"]
    places = [text.index(s) for s in sentences]
    assert all(a < b for a, b in pairwise(places))


def test_describes_the_configuration_that_runs():
    problem = problem_of(torch.zeros(1, 1, 64, 64, device=DEVICE))
    assert "fwd=Config(" in str(SHORT.form(problem))
    assert "bwd=Config(" in str(SHORT.form(replace(problem, needs_grad=True)))
    if not HAS_GPU:
        assert not SHORT.prefers(problem)


def test_a_launch_is_remembered_by_the_alignment_of_every_tensor_it_is_given():
    inputs = make(Case("aligned", 1, 2, 2, 9, 9, 16), torch.float32, DEVICE)
    args = AttentionArgs(inputs.query, inputs.key, inputs.value, None, None, None, None, 0.0, False, 0.25, launches=LaunchCache())
    _, lse = forward(args)
    memory = torch.zeros(1 + lse.numel(), device=DEVICE)
    before = len(args.launches)
    for start in (0, 1):  # both contiguous, the second 4 bytes off
        dlse = memory[start : start + lse.numel()].view(lse.shape)
        backward(args, inputs.dout, dlse, None, lse, bias_grad=False, packed=None)
    assert len(args.launches) == before + 2


def test_a_launch_is_compiled_once_and_then_replayed(monkeypatch):
    from saccade.exact.short import launch as launch_module

    calls = []

    class Kernel:
        def __getitem__(self, grid):
            def run(*arguments, **options):
                calls.append(("triton", grid, arguments, options))
                return {(7, 1, 1): lambda *again: calls.append(("compiled", (7, 1, 1), again, {}))}

            return run

    monkeypatch.setattr(launch_module, "interpreting_triton", lambda: False)
    launch = launch_module.Launch(Kernel(), 7, (1, 2), {"num_warps": 4})
    x, y = torch.empty(1), torch.empty(2)
    launch(x)
    launch(y)
    assert calls == [("triton", (7, 1, 1), (x, 1, 2), {"num_warps": 4}), ("compiled", (7, 1, 1), (y.data_ptr(), 1, 2), {})]


def test_a_launch_switches_to_the_device_of_its_tensors(monkeypatch):
    from types import SimpleNamespace

    from saccade.exact.short import launch as launch_module

    entered, launched = [], []

    class OnDevice:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device.index)

        def __exit__(self, *error):
            return False

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    launch = launch_module.Launch(None, 7, (), {}, runner=lambda address: launched.append((address, list(entered))))
    for index in (0, 1):
        launch(SimpleNamespace(device=torch.device("cuda", index), data_ptr=lambda index=index: index))
    assert launched == [(0, []), (1, [1])]


@pytest.mark.parametrize("q_len", [1, 9])
def test_a_remembered_launch_never_serves_another_call(q_len):
    from saccade.exact.short import launch as launch_module

    case = Case("remembered", 2, 2, 2, q_len, 9, 16, lse_grad=True)
    # always the same tensors; each call must give the same result as with nothing remembered
    variants = [
        (replace(case, **changes), config)
        for changes in ({}, {"is_causal": True}, {"dropout_p": 0.2}, {"dropout_p": 0.6}, {"lse_grad": False})
        for config in (Config(4), Config(4, heads=2))
    ]

    def run(variant):
        inputs = make(case, torch.float32, DEVICE)
        inputs = inputs if variant[0].lse_grad else replace(inputs, dlse=None)
        return differentiate(forced(*variant), inputs, 0, True)

    expected = []
    for variant in variants:
        launch_module.forget()
        expected.append(run(variant))
    launch_module.forget()
    for _ in range(2):
        for variant, results in zip(variants, expected, strict=True):
            for name, x in run(variant).items():
                assert torch.equal(x, results[name]), (variant, name)
