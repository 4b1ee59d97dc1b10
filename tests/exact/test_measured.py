"""The nearest measured call: found, cited, and never beyond the limits."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch

import saccade
from saccade.cli.explain import DescribedCall, answer
from saccade.engine import dispatch, prepare
from saccade.exact import measured
from saccade.exact.backends import BACKENDS
from saccade.exact.measured import FARTHEST, FARTHEST_PROBLEMS, described, nearest, place_of, rule
from saccade.exact.problem import describe_attention
from saccade.exact.short import choice
from saccade.exact.short.backend import SHORT
from saccade.hardware import assumed
from saccade.nvrtc import toolchain
from tools import choices

CLIP = "attention(B=512 H=12 Tq=77 Tk=77 D=64 bf16 sm_90)"


@pytest.fixture(autouse=True)
def other_machine():
    with assumed("triton"), toolchain.assumed():
        yield


def problem_of(text: str, direction: str = "fwd", captured: bool = False, **changes):
    found = replace(described(text, direction), **changes)
    return choices.captured(found) if captured else found


def test_the_file_is_what_the_tables_give(capsys):
    text, changes = choices.made()
    assert text == measured.FILE.read_text()
    assert changes == []


@pytest.mark.parametrize(
    "text",
    [
        "attention(B=3 H=8 Hkv=2 Tq=1 Tk=50 D=64 fp16 causal dropout=0.1 lse grad sm_80)",
        "attention(B=3 H=8 Tq=49 Tk=50 D=64 fp32 bias[1x8x49x50]+grad lengths grad sm_90)",
        "attention(B=3 H=8 Tq=49 Tk=50 D=64 bf16 mask[3x1x1x50] sm_120)",
    ],
)
def test_a_description_is_read_back(text):
    found = replace(described(text, "fwd+bwd" if " grad " in text else "fwd"), return_lse=" lse " in text)
    assert str(found) == text


@pytest.mark.parametrize(
    ("text", "direction", "captured", "chosen"),
    [
        # the text tower of CLIP, of 30 million numbers
        (CLIP, "fwd", True, "short"),
        (CLIP, "fwd", False, "short"),
        # padding as transformers hands it over
        ("attention(B=1024 H=8 Tq=128 Tk=128 D=64 bf16 bias[1024x1x1x128] grad sm_90)", "fwd+bwd", False, "short"),
        ("attention(B=1024 H=8 Tq=128 Tk=128 D=32 bf16 bias[1024x1x1x128] grad sm_90)", "fwd+bwd", False, "short"),
        ("attention(B=1024 H=8 Tq=128 Tk=128 D=128 bf16 dropout=0.1 grad sm_90)", "fwd+bwd", False, "short"),
        ("attention(B=1024 H=8 Tq=128 Tk=128 D=128 bf16 dropout=0.1 sm_90)", "fwd", False, "sdpa"),
        # of which "auto" is `long` in the table
        ("attention(B=1024 H=8 Tq=128 Tk=128 D=128 bf16 lengths grad sm_90)", "fwd+bwd", True, "short"),
        ("attention(B=1024 H=8 Tq=128 Tk=128 D=64 bf16 lengths grad sm_90)", "fwd+bwd", True, "long"),
        ("attention(B=1024 H=12 Tq=197 Tk=197 D=64 bf16 grad sm_90)", "fwd+bwd", True, "long"),
    ],
)
def test_rows_decide(text, direction, captured, chosen):
    plan = dispatch.choose(BACKENDS, problem_of(text, direction, captured))
    assert plan.backend.name == chosen


def test_the_nearest_is_the_measured_call_itself():
    for line in measured.read():
        name = "long" if "long" in line.order else "short"
        found = nearest(problem_of(line.problem, line.direction, line.way == "captured"), name)
        assert found is not None
        assert place_of(described(found.problem, line.direction)) == place_of(described(line.problem, line.direction))
        assert [n for n in found.order if n in line.order] == [n for n in line.order if n in found.order]


def test_a_quarter_of_an_octave():
    for n in (*range(1, 300), 10**4, 10**6):
        assert measured._quarter(n) == math.floor(4 * math.log2(n) + 0.5)


def test_no_line_counts_beyond_the_limits():
    for batch, tokens, captured in itertools.product((1, 8, 40, 200, 700, 4000), (5, 20, 33, 70, 100, 128), (True, False)):
        problem = problem_of(f"attention(B={batch} H=8 Tq={tokens} Tk={tokens} D=64 bf16 sm_90)", "fwd", captured)
        found = nearest(problem, "short")
        if found is None:
            continue
        there = described(found.problem, "fwd")
        here, other = place_of(problem), place_of(there)
        assert abs(here.queries - other.queries) <= FARTHEST
        filling = there.batch * there.heads * there.kv_len * there.head_dim >= measured.FILLING
        assert abs(here.problems - other.problems) <= FARTHEST_PROBLEMS or (filling and here.problems > other.problems)
        assert choice.tile_size(max(tokens, 32)) == choice.tile_size(max(there.kv_len, 32))
    assert nearest(problem_of("attention(B=4 H=8 Tq=128 Tk=128 D=64 bf16 dropout=0.1 sm_90)"), "short") is None
    assert nearest(problem_of("attention(B=1024 H=8 Tq=128 Tk=128 D=64 bf16 causal dropout=0.1 sm_90)"), "short") is None


def test_the_sizes_of_a_problem_weigh_more_than_the_number_of_problems():
    """The table has 64 tokens at as many problems, and 50 tokens at 768."""
    problem = problem_of("attention(B=64 H=16 Tq=56 Tk=56 D=64 bf16 sm_90)")
    found = described(nearest(problem, "short").problem, "fwd")
    assert (found.kv_len, found.batch * found.heads) == (50, 768)


def test_a_nearer_line_that_did_not_time_a_backend_leaves_it_to_its_rule():
    exact = "attention(B=256 H=12 Tq=128 Tk=128 D=64 bf16 sm_90)"
    assert nearest(problem_of(exact), "short") is not None
    assert nearest(problem_of(exact), "long") is None


def test_a_card_that_was_not_measured_has_the_rows_of_the_nearest_architecture():
    text = "attention(B=256 H=12 Tq=50 Tk=50 D=64 bf16 sm_80)"
    found = rule(problem_of(text), "short")
    assert "on sm_90, as sm_80 was not measured" in found.said
    assert "was not measured" not in rule(problem_of(text.replace("80", "90")), "short").said


def test_times_of_cuda_kernels_speak_for_no_gpu_without_them(monkeypatch):
    """CLIP's tower is faster by the kernels of sm_90 alone."""
    assert nearest(problem_of(CLIP), "short").cuda
    away = nearest(problem_of(CLIP, arch=80), "short")
    assert away is None or not away.cuda
    monkeypatch.setattr(choice, "obstacles", lambda architecture: ("no compiler",))
    here = nearest(problem_of(CLIP), "short")
    assert here is None or not here.cuda


def test_a_call_that_python_launches_follows_rows_that_host_time_does_not_decide():
    small = "attention(B=128 H=8 Tq=17 Tk=17 D=64 bf16 sm_90)"
    assert nearest(problem_of(small), "short") is not None
    assert nearest(problem_of(small, host_counts=True), "short") is None


def test_a_rule_cites_its_row():
    found = rule(problem_of(CLIP, captured=True), "short")
    assert "took 0.07432 ms, and 0.1069 ms by torch's function" in str(found)
    assert "benchmarks/results/h200/short_sizes.csv at attention(B=512 H=12 Tq=77 Tk=77 D=64 bf16 grad sm_90)" in str(found)
    slower = rule(problem_of("attention(B=1024 H=8 Tq=128 Tk=128 D=128 bf16 lengths grad sm_90)", "fwd+bwd"), "long")
    assert slower.against
    assert re.search(r"took 1\.\d+ ms, and 1\.\d+ ms by `short`", slower.said)
    within = rule(problem_of("attention(B=512 H=8 Tq=256 Tk=256 D=128 bf16 sm_90)"), "long")
    assert within.against
    assert "a difference within noise" in within.said


def test_a_remembered_call_looks_nothing_up(monkeypatch):
    looked = []
    monkeypatch.setattr(prepare, "_PREPARED", {})
    monkeypatch.setattr(prepare, "choose", lambda *a: looked.append(a) or dispatch.choose(*a))
    monkeypatch.setattr("saccade.exact.api.on_a_cpu", lambda *a: None)
    x = torch.randn(1, 2, 5, 8)
    for _ in range(3):
        saccade.attention(x, x, x)
    assert len(looked) == 1


@pytest.mark.parametrize("batch", [1, 64, 512])
@pytest.mark.parametrize(("tokens", "grad"), [(32, True), (77, False), (197, True)])
def test_explain_of_a_gpu_that_is_not_here_names_what_a_program_runs_there(batch, tokens, grad):
    call = DescribedCall(batch=batch, heads=12, kv_heads=12, q_len=tokens, kv_len=tokens, needs_grad=grad)
    said = json.loads(answer(call, None, 90, as_json=True))
    direction = "fwd+bwd" if grad else "fwd"
    replayed = problem_of(f"attention(B={batch} H=12 Tq={tokens} Tk={tokens} D=64 bf16 sm_90)", direction)
    assert not replayed.host_counts
    assert said["chosen"] == dispatch.choose(BACKENDS, replayed).backend.name != "sdpa"


@pytest.mark.parametrize("dynamic", [False, True])
def test_rules_are_traced_by_torch_compile(dynamic):
    """Sizes may be symbols there: they are compared, so that a graph holds for a range of them."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=backend)
    def taken(x):
        made = describe_attention(x, x, x, None, 0.0, False, None, False, None, False, False, False)
        problem = replace(made, device_type="cuda", device_index=0, arch=90, host_counts=False, python_counts=False)
        return x + 1 if SHORT.rule(problem).against else x - 1

    for batch, expected in ((512, -1), (500, -1), (256, 1)):
        x = torch.zeros(batch, 12, 77, 64, dtype=torch.bfloat16)
        assert taken(x)[0, 0, 0, 0].item() == expected
    assert len(graphs) == (2 if dynamic else 3)
    torch._dynamo.reset()
