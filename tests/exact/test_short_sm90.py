"""The CUDA C++ kernels for sm_90, which no interpreter runs: within the error budget on such a GPU; everywhere their binaries and
how they are chosen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from saccade.exact.args import AttentionArgs
from saccade.exact.problem import describe_attention, problem_of
from saccade.exact.short import choice, sm90
from saccade.exact.short.backend import SHORT
from saccade.exact.short.choice import SM90_ELEMENTS
from saccade.exact.short.config import SM90, Config, pick
from saccade.exact.short.launch import BACKWARD_TENSORS, FORWARD_TENSORS
from saccade.exact.short.launchers import backward, forward
from saccade.exact.testing.check import compare
from saccade.nvrtc import Options, build, obstacles
from saccade.testing.baseline import differentiate
from saccade.testing.cases import Case
from saccade.testing.inputs import Inputs, make
from saccade.testing.judge import report
from tools.aot import SHARED_LIMIT
from tools.cubin import disassemble, resource_usage

FORMS = {
    "exact": {},
    "ragged": {"ragged": True},
    "causal": {"is_causal": True},
    "lse-gradient": {"ragged": True, "is_causal": True, "lse_grad": True},
}


class Forced(torch.autograd.Function):
    """The launchers under a chosen configuration for each direction."""

    @staticmethod
    def forward(ctx, query, key, value, args, configs, lse_grad):
        ctx.args, ctx.configs, ctx.lse_grad = args._replace(query=query, key=key, value=value), configs, lse_grad
        out, ctx.lse = forward(ctx.args, configs[0])
        return out, ctx.lse.clone()

    @staticmethod
    def backward(ctx, dout, dlse):
        dlse = dlse if ctx.lse_grad else None
        dq, dk, dv, _ = backward(ctx.args, dout, dlse, None, ctx.lse, bias_grad=False, packed=None, config=ctx.configs[1])
        return dq, dk, dv, None, None, None


def run(case: Case, inputs: Inputs, configs):
    def call(x: Inputs):
        args = AttentionArgs(x.query, x.key, x.value, None, None, None, None, 0.0, case.is_causal, case.head_dim**-0.5)
        return Forced.apply(x.query, x.key, x.value, args, configs, case.lse_grad)

    return differentiate(call, inputs, 0, True)


def case_of(direction: str, rows: int, dim: int, ragged: bool = False, **features) -> Case:
    # 300 problems: more than one for each persistent program, so that buffers are reused
    q_len, kv_len = (rows - 9, rows - 3) if ragged else (rows, rows)
    if direction.startswith("pool"):
        q_len = 1
        features.pop("is_causal", None)
    return Case("sm90", 150, 2, 2, q_len, kv_len, dim - 8 if ragged else dim, **features)


@pytest.mark.sm90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", SM90, ids=str)
def test_budget(key, form, dtype):
    case = case_of(*key, **FORMS[form])
    inputs = make(case, dtype, "cuda")
    configs = (SM90[key], None) if key[0] == "fwd" else (None, SM90[key])
    results = compare(case, inputs, run(case, inputs, configs))
    assert all(r.ok for r in results), report(case, results)


@pytest.mark.sm90
@pytest.mark.parametrize("key", SM90, ids=str)
def test_many_times_the_same_bits(key):
    # if memory is reused while the copy engine still reads it, the result changes
    case = case_of(*key)
    inputs = make(case, torch.bfloat16, "cuda")
    configs = (SM90[key], None) if key[0] == "fwd" else (None, SM90[key])
    first = run(case, inputs, configs)
    for _ in range(20):
        again = run(case, inputs, configs)
        assert all(torch.equal(x, again[name]) for name, x in first.items())


def large_args(**changes) -> AttentionArgs:
    batch, length, dim = SM90_ELEMENTS // (2 * 128 * 64), 128, 64
    query = torch.empty(batch, length, 2, dim, dtype=changes.pop("dtype", torch.bfloat16), device="meta").transpose(1, 2)
    args = AttentionArgs(query, query, query, None, None, None, None, 0.0, False, 0.125)
    return args._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"dtype": torch.float32}, False),
        ({"mask": torch.empty(1, 1, 1, 128, dtype=torch.bool, device="meta")}, False),
        ({"lengths": torch.empty(2048, dtype=torch.int32, device="meta")}, False),
        ({"seed": torch.empty(1, dtype=torch.int64, device="meta"), "dropout_p": 0.1}, False),
        ({"key": torch.empty(2048, 1, 128, 64, dtype=torch.bfloat16, device="meta")}, False),
        ({"key": torch.empty(2048, 2, 33, 64, dtype=torch.bfloat16, device="meta")}, False),
    ],
    ids=str,
)
def test_which_calls_take_them(monkeypatch, changes, expected):
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    args = large_args(**changes)
    if args.key.shape != args.query.shape:
        args = args._replace(value=args.key)
    problem = replace(problem_of(args), arch=90)
    assert bool(choice.choose("bwd", problem).sm90) == expected
    assert not choice.choose("bwd", problem, addressed=False).sm90
    assert not choice.choose("bwd", replace(problem, arch=100)).sm90
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ("no compiler",))
    assert not choice.choose("bwd", problem).sm90


@pytest.mark.parametrize(
    ("shape", "boolean", "warps"),
    [
        ((8, 1, 1, 128), True, 8),
        ((8, 4, 128, 128), True, 8),
        ((8, 1, 1, 128), False, 8),
        ((128,), False, 8),
        ((8, 4, 128, 128), False, 4),
    ],
)
def test_a_row_for_all_queries_is_not_split_into_query_blocks(shape, boolean, warps, monkeypatch):
    """128 x 32 in blocks of queries takes six times the instructions beside such a row."""
    query = torch.empty(8, 4, 128, 32, dtype=torch.bfloat16)
    added = torch.empty(shape, dtype=torch.bool if boolean else torch.bfloat16)
    args = AttentionArgs(query, query, query, added if boolean else None, None if boolean else added, None, None, 0.0, False, 1.0)
    given = replace(problem_of(args), arch=90)
    assert {choice.choose(direction, given).warps for direction in ("fwd", "bwd")} == {warps}


def test_without_them_the_ordinary_tables_speak():
    for direction, rows, dim in SM90:
        ordinary = pick(direction, rows, dim, 2, 90, plain=True, sm90=False)
        assert isinstance(ordinary, Config)
        assert not ordinary.sm90


@pytest.mark.parametrize(("batch", "told"), [(2048, True), (16, False)])
def test_explain_tells_what_would_run(monkeypatch, batch, told):
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ())
    query = torch.empty(batch, 2, 128, 64, dtype=torch.bfloat16, device="meta")
    problem = describe_attention(query, query, query, None, 0.0, False, None, False, None, False, False, True)
    text = str(SHORT.form(replace(problem, device_type="cuda", arch=90)))
    assert text.count("sm90='backward'") + text.count("sm90='forward'") == (2 if told else 0)


@pytest.mark.parametrize(
    ("shape", "needs_grad", "bias_grad", "preferred"),
    [((1, 4, 49, 49), True, True, True), ((1, 4, 49, 49), True, False, False), ((8192, 4, 49, 49), True, True, True)],
    ids=["Swin", "frozen bias", "bias of each row"],
)
def test_biases_that_auto_takes(shape, needs_grad, bias_grad, preferred):
    query = torch.empty(8192, 4, 49, 32, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    problem = describe_attention(query, query, query, bias, 0.0, False, None, False, None, False, False, needs_grad)
    assert SHORT.prefers(replace(problem, device_type="cuda", arch=90, bias_grad=bias_grad)) == preferred


@pytest.mark.parametrize(
    ("images", "tokens", "dim", "host_counts", "preferred"),
    [
        (128, 49, 32, True, True), (1, 49, 32, True, False), (128, 16, 32, True, False), (128, 100, 32, True, False),
        (1, 49, 32, False, True), (128, 100, 64, False, True), (128, 49, 128, False, False),
    ],
    ids=["Swin", "one image", "few tokens", "larger windows", "one image from C++", "larger windows from C++", "wide heads from C++"],
)  # fmt: skip
def test_biases_of_windows_that_auto_takes(images, tokens, dim, host_counts, preferred):
    """As a bias that the batch shares is taken; whose windows are all of the batch is that of each row. If host time does not count,
    every bias is taken up to D = 64."""
    query = torch.empty(images, 64, 3, tokens, dim, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(64, 3, tokens, tokens, dtype=torch.bfloat16, device="meta", requires_grad=True)
    problem = describe_attention(query, query, query, bias, 0.0, False, None, False, None, False, False, True)
    problem = replace(problem, device_type="cuda", arch=90, host_counts=host_counts)
    assert f"B={64 * images} H=3 Tq={tokens}" in str(problem)
    assert f"bias[64x3x{tokens}x{tokens}]+grad windows=64 grad" in str(problem)
    assert SHORT.why_not(problem) == []
    assert SHORT.prefers(problem) == preferred
    if host_counts and preferred:
        assert "programs_per_sm=4" in str(SHORT.form(problem))


def planned(key, dtype=torch.bfloat16, **form) -> sm90.Sm90Launch:
    """The launch of a row of the table, without a GPU."""
    direction, *_ = key
    case = case_of(*key, **form)
    shapes = [(case.batch, length, case.heads, case.head_dim) for length in (case.q_len, case.kv_len, case.kv_len, case.q_len)]
    query, key_, value, dout = (torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2) for shape in shapes)
    args = AttentionArgs(query, key_, value, None, None, None, None, 0.0, case.is_causal, 0.125)
    if direction == "fwd":
        return sm90.plan_forward(args, dout, SM90[key])
    return sm90.plan_backward(args, dout, case.lse_grad, (query, key_, value), SM90[key])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("form", "dtype"), [("exact", torch.bfloat16), ("lse-gradient", torch.float16)], ids=["plain", "every feature"]
)
@pytest.mark.parametrize("key", SM90, ids=str)
def test_binary(key, form, dtype):
    built = planned(key, dtype, **FORMS[form]).built
    made = build(sm90.source(built.form), sm90.ARCHITECTURE, Options.of(built.defines))
    (usage,) = resource_usage(made.cubin).values()
    # bytes of local memory, which hold spilled registers. At 128 x 32 a persistent block that spills ten is 6 % faster than one
    # that spills two
    plain, featured = (40, 112) if key == ("bwd", 128, 32) else (8, 64)
    assert usage.stack <= (plain if form == "exact" else featured), usage
    assert built.shared_bytes + usage.shared <= SHARED_LIMIT[90]
    # only the log of ptxas tells whether products wait for each other
    assert "serializ" not in made.log, made.log
    products = len(re.findall(r"\bHGMMA\b", disassemble(made.cubin)))
    assert (products == 0) == key[0].startswith("pool")
    # blocks of the table's number share a multiprocessor: registers, and 228 KiB less 1 KiB a block
    if key[0] != "fwd":
        blocks = max(SM90[key].programs_per_sm, 1)
        assert usage.registers * built.threads * blocks <= 65536
        assert (built.shared_bytes + 1024) * blocks <= 228 * 1024


@pytest.mark.parametrize("key", SM90, ids=str)
def test_a_launch_gives_what_its_kernel_takes(key):
    launch, names = planned(key), FORWARD_TENSORS if key[0] == "fwd" else BACKWARD_TENSORS
    parameters, numbers = launch.built.parameters, launch.built.numbers
    parameters.in_order(launch.built.name, numbers, without=(*parameters.maps, *parameters.pointers))
    assert tuple(f"{names[place]}_map" for place, _ in launch.moved) == parameters.maps
    assert tuple(names[place] for place in launch.pointers) == parameters.pointers
    if not parameters.maps:  # strides of every tensor are numbers
        assert (numbers["query_head"], numbers["dquery_head"], numbers["key_head"]) == (numbers["head_dim"],) * 3
        assert numbers["key_row"] == numbers["dvalue_row"] == numbers["heads"] * numbers["head_dim"]
        assert numbers["dvalue_batch"] == numbers["value_batch"] == numbers["kv_len"] * numbers["key_row"]
        assert numbers["dout_batch"] == numbers["query_batch"] == numbers["key_row"]


def large_problem(q_len, kv_len, dim, is_causal=False):
    query, key = (torch.empty(2**10, 2**10, n, dim, dtype=torch.bfloat16, device="meta") for n in (q_len, kv_len))
    return replace(problem_of(AttentionArgs(query, key, key, None, None, None, None, 0.0, is_causal, 0.125)), arch=90)


def test_one_causal_query_is_left_to_triton():
    # it sees one key, whatever their number
    assert choice.takes_sm90(large_problem(1, 64, 64)) == (not obstacles("90a"))
    assert not choice.takes_sm90(large_problem(1, 64, 64, is_causal=True))


def test_rows_of_results_are_whole_chunks():
    assert not choice.takes_sm90(large_problem(128, 128, 60))
