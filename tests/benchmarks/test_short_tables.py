"""The tables of longer sequences and of many sizes run with the reference on a CPU, and are drawn from their rows."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import saccade
from saccade.exact.long.backend import LONG
from saccade.exact.problem import describe_attention

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BANDWIDTH = 4e9  # bytes a millisecond


@pytest.fixture
def load(monkeypatch):
    """Name -> module, on the CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    monkeypatch.setattr(importlib.import_module("short_common"), "DEVICE", "cpu")
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def long(load, monkeypatch):
    table = load("tables.short_long")
    monkeypatch.setattr(table, "stream_bandwidth", lambda: BANDWIDTH)
    monkeypatch.setattr(table, "ROUNDS", 1)
    monkeypatch.setattr(table, "WARM_UP_MS", 1)
    plain = [table.Case(table.square(3, 2, length, dim)) for dim in (8, 16) for length in (20, 33)]
    models = [
        table.Case(table.square(3, 4, 24, 16), "ViT"),
        table.Case(table.square(3, 4, 40, 16), "BERT", "lengths"),
        table.Case(table.square(3, 2, 24, 16), feature="causal"),
    ]
    monkeypatch.setattr(table, "CASES", plain + models)
    return table


@pytest.fixture
def sizes(load, monkeypatch):
    table, common = load("tables.short_sizes"), load("short_common")
    monkeypatch.setattr(table, "capture", lambda calls: calls)  # there are no CUDA graphs here
    shapes = [common.Shape(n // 2, 2, length, length, 8) for length in (12, 130) for n in (2, 4)]
    monkeypatch.setattr(table, "SHAPES", shapes)
    return table


def rows_of(table, path: Path) -> list[dict[str, str]]:
    from rows import Writer

    table.run(Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def by_reference(table, monkeypatch):
    monkeypatch.setattr(table, "BACKENDS", {name: "auto" if name == "auto" else "reference" for name in table.BACKENDS})


def test_longer_sequences_on_a_cpu(long, monkeypatch, tmp_path, capsys):
    by_reference(long, monkeypatch)
    rows = rows_of(long, tmp_path / "short_long.csv")
    ours = [r for r in rows if r["backend"] == "long"]
    assert [r["direction"] for r in ours] == ["fwd", "bwd", "fwd+bwd"] * 7
    assert all(0 < float(r["error_ratio"]) < 1 for r in ours if r["direction"] != "fwd+bwd")
    assert all(float(r["roof_ms"]) > 0 and float(r["tflops"]) > 0 for r in rows)
    assert [r["note"] for r in ours[::3]] == ["", "", "", "", "ViT", "BERT", ""]
    assert [word for r in ours[::3] for word in ("lengths", "causal") if f" {word} " in r["problem"]] == ["lengths", "causal"]
    assert {r["problem"] for r in rows if r["backend"] == "sdpa_flash"} == {r["problem"] for r in ours}
    printed = capsys.readouterr().out
    assert "sdpa_cudnn does not run this row" in printed
    assert re.search(r"S=40 D=16 BERT lengths: long fwd [\d.]+ bwd [\d.]+ fwd\+bwd [\d.]+, share of the roof", printed)
    assert re.search(r"S=24 D=16 plain causal: .* total x[\d.]+ of sdpa\w* fwd x[\d.]+ of sdpa\w*; auto total x", printed)
    assert "beyond its budget" not in printed


def test_a_backend_that_does_not_run_leaves_the_other_rows(long, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(long, "BACKENDS", {"long": "volta", "auto": "auto"})
    monkeypatch.setattr(long, "CASES", long.CASES[:1])
    rows = rows_of(long, tmp_path / "short_long.csv")
    assert {r["backend"] for r in rows} == {"auto", "sdpa", "sdpa_flash"}
    printed = capsys.readouterr().out
    assert "long does not run this row" in printed
    assert re.search(r"plain: auto fwd .*, total x[\d.]+ of sdpa", printed)


def test_the_grid_of_longer_sequences(load):
    table = load("tables.short_long")
    assert len(table.PLAIN) == 24
    for case in table.PLAIN + table.CAUSAL:
        shape, problem = case.shape, case.shape.q_len * case.shape.dim
        assert 2**27 - shape.heads * problem < shape.batch * shape.heads * problem <= 2**27
    assert {case.name for case in table.MODELS} == {"ViT-B/16", "ViT-L/14", "CLIP-L/336", "BERT", "SigLIP"}
    assert all(129 <= case.shape.q_len <= 577 for case in table.CASES)


def test_the_roof_is_the_larger_of_bytes_and_products(load):
    table = load("tables.short_long")
    case = table.Case(table.square(2, 3, 100, 64))
    keys, tensor, lse = 2 * 100, 2 * 2 * 3 * 100 * 64, 4 * 2 * 3 * 100
    by_bytes = table._roofs(case, keys, 1.0)
    assert by_bytes == {"fwd": 4 * tensor + lse, "bwd": 8 * tensor + lse, "fwd+bwd": 12 * tensor + 2 * lse}
    by_products = table._roofs(case, keys, 1e30)
    forward = 4 * 100**2 * 64 * 6 / 700e9
    assert by_products == {d: pytest.approx(x * forward) for d, x in (("fwd", 1), ("bwd", 2.5), ("fwd+bwd", 3.5))}
    causal = table._roofs(table.Case(case.shape, feature="causal"), keys, 1e30)
    assert causal["fwd"] == pytest.approx(forward / 2)
    half = table._roofs(table.Case(case.shape, feature="lengths"), keys // 2, 1.0)
    assert half["fwd"] == 3 * tensor + lse  # K and V of real keys
    assert half["bwd"] == 7 * tensor + lse  # their gradients whole


def test_many_sizes_on_a_cpu(sizes, monkeypatch, tmp_path, capsys):
    by_reference(sizes, monkeypatch)
    rows = rows_of(sizes, tmp_path / "short_sizes.csv")
    assert {r["backend"] for r in rows if " Tq=12 " in r["problem"]} == {"short", "auto", "sdpa", "sdpa_flash"}
    assert {r["backend"] for r in rows if " Tq=130 " in r["problem"]} == {"long", "auto", "sdpa", "sdpa_flash"}
    assert len(rows) == 4 * 4 * 2 * 2  # shapes, implementations, directions, notes
    assert {(r["direction"], r["note"]) for r in rows} == {(d, n) for d in ("fwd", "fwd+bwd") for n in ("", "kernel")}
    printed = capsys.readouterr().out
    assert (
        len(re.findall(r"^S=\d+ D=8 \d problems: auto, eager fwd x.*kernel, in a graph fwd\+bwd x", printed, re.MULTILINE)) == 4
    )
    assert len(re.findall(r"on average, \d of 4 rows below 0.97, the worst x[\d.]+ at S=", printed)) == 4


def test_the_shapes_of_many_sizes(load):
    table = load("tables.short_sizes")
    assert len(table.SHAPES) == 98
    assert {s.batch * s.heads for s in table.SHAPES} == set(table.PROBLEMS)


def test_gains_are_over_the_best_of_the_others(load):
    from saccade.testing.timing import Timing

    table = load("tables.short_sizes")
    eager = {"auto": 2.0, "sdpa": 1.0, "short": 0.1, "sdpa_flash": 0.5}
    graph = {"short": 1.0, "auto": 0.1, "sdpa": 0.1, "sdpa_flash": 4.0, "sdpa_cudnn": 3.0}
    times = {"": eager, "kernel": graph}
    found = {(n, d): {b: Timing(t, t, t) for b, t in times[n].items()} for n in times for d in table.DIRECTIONS}
    gains = table.gains_of(found)
    assert gains == {
        (what, d): gain for what, gain in (("auto, eager", 0.5), ("kernel, in a graph", 3.0)) for d in table.DIRECTIONS
    }
    first, second = table.SHAPES[:2]
    lines = table.summary({first: gains, second: dict.fromkeys(gains, 2.0)})
    assert lines[0] == ("auto, eager, fwd: x1.00 on average, 1 of 2 rows below 0.97, the worst x0.50 at S=32 D=32 96 problems")
    del found["kernel", "fwd"]["short"]
    assert ("kernel, in a graph", "fwd") not in table.gains_of(found)


def test_a_graph_holds_fewer_calls_of_large_problems(load):
    steps = load("steps")
    assert [steps.calls_in_a_graph(n) for n in (96 * 32 * 32, 2**26, 2**27, 2**28)] == [16, 2, 1, 1]
    made = []
    steps.repeated(lambda: made.append(1), 3)()
    assert len(made) == 3


def test_a_direction_does_what_it_says(load):
    steps = load("steps")
    leaf, dout, graphs = torch.randn(3, requires_grad=True), torch.ones(3), []

    def call() -> torch.Tensor:
        out = 2 * leaf
        graphs.append(out.requires_grad)
        return out

    steps.step(call, "fwd", [leaf], dout)()
    steps.step(call, "fwd+bwd", [leaf], dout)()
    assert graphs == [False, True]
    backward = steps.step(call, "bwd", [leaf], dout)
    for _ in range(2):
        assert torch.equal(backward()[0], torch.full((3,), 2.0))
    assert len(graphs) == 3
    assert leaf.grad is None


@pytest.mark.parametrize(("table", "plots"), [("long", ["", "_models"]), ("sizes", [""])])
def test_they_are_drawn_from_their_rows(table, plots, load, monkeypatch, tmp_path, request):
    pytest.importorskip("matplotlib")
    module = request.getfixturevalue(table)
    by_reference(module, monkeypatch)
    path = tmp_path / f"short_{table}.csv"
    rows_of(module, path)
    written = load("plot_all").draw(path)
    ends = [f"{plot}{suffix}" for plot in plots for suffix in (".png", ".dark.png")]
    assert [p.name for p in written] == [f"short_{table}{end}" for end in ends]
    assert all(p.stat().st_size > 8_000 for p in written)


def test_the_plot_of_longer_sequences_shows_shares_of_the_roof(load):
    row = {"problem": "p", "direction": "fwd", "backend": "long", "roof_ms": "0.3", "ms_p50": "0.6"}
    assert load("plot_lines").shares_of([row]) == {("p", "fwd", "long"): 0.5}


def test_the_map_of_gains_compares_what_the_table_does(load):
    problem = "attention(B=8 H=12 Tq=50 Tk=50 D=64 bf16 grad sm_90)"
    times = {"short": 1.0, "auto": 0.5, "sdpa": 0.1, "sdpa_flash": 4.0, "sdpa_cudnn": 3.0}
    rows = [{"problem": problem, "direction": "fwd", "note": "kernel", "backend": b, "ms_p50": str(t)} for b, t in times.items()]
    sizes = load("plot_short")
    eager, graph = (sizes._gains(rows, "fwd", *way) for way in sizes._WAYS.values())
    assert (eager, graph) == ({}, {(64, 50, 96): 3.0})
    table = load("tables.short_sizes")
    assert list(sizes._WAYS.values()) == list(table.COMPARED.values())


def test_auto_takes_long_rows_where_they_were_faster(monkeypatch):
    monkeypatch.setattr("saccade.nvrtc.obstacles", lambda architecture: ())
    with open(BENCHMARKS / "results" / "h200" / "short_long.csv", newline="") as handle:
        rows = [r for r in csv.DictReader(handle) if r["direction"] != "bwd"]
    times = {(r["problem"], r["note"], r["direction"], r["backend"]): float(r["ms_p50"]) for r in rows}
    taken = set()
    for problem, note, direction, backend in times:
        if backend != "long":
            continue
        size = {name: int(value) for name, value in re.findall(r"\b(\w+)=(\d+)\b", problem)}
        query = torch.empty(size["B"], size["H"], size["Tq"], size["D"], dtype=torch.bfloat16, device="meta")
        lengths = torch.empty(size["B"], dtype=torch.int32, device="meta") if " lengths " in problem else None
        described = describe_attention(
            query, query, query, None, 0.0, "causal" in problem, None, False, lengths, False, False, direction != "fwd"
        )
        if LONG.prefers(replace(described, device_type="cuda", arch=90)):
            gain = times[problem, note, direction, "sdpa"] / times[problem, note, direction, "long"]
            assert gain >= 0.97, (problem, note, direction, gain)
            taken.add((size["Tq"], size["D"], direction))
    assert {(197, 64, "fwd"), (256, 64, "fwd"), (512, 64, "fwd+bwd"), (256, 128, "fwd+bwd"), (197, 128, "fwd")} <= taken
    assert not {(512, 128, "fwd+bwd"), (256, 128, "fwd")} & taken


@pytest.fixture
def models(load):
    return load("tables.short_models")


def test_a_row_of_a_model_names_its_case(models):
    for case in models.every_case():
        shape = case.shape
        query = torch.empty(shape.batch, shape.heads, shape.q_len, shape.dim, device="meta", dtype=torch.bfloat16)
        key = torch.empty(shape.batch, shape.heads, shape.kv_len, shape.dim, device="meta", dtype=torch.bfloat16)
        problem = describe_attention(query, key, key, None, 0.0, case.feature == "causal", None, False, None, False, False, True)
        assert models.case_of({"problem": str(problem)}) == str(case)
    gone = "attention(B=1 H=1 Tq=1 Tk=1 D=1 bf16)"
    assert models.case_of({"problem": gone}) == gone


def test_models_of_tables_fit_a_gpu_and_flash_attention(models):
    """Queries, keys, values, results, and the gradients of two calls; the indices of FlashAttention where it takes the grid."""
    for case in models.every_case():
        forward, backward = case.shape.minimum_bytes()
        assert forward + 2 * backward < 139e9
        if case.shape.batch <= 65_535:
            assert case.shape.batch * case.shape.heads * 128 * max(case.shape.dim, 32) <= 2**31
    tables = [case.shape for case in models.every_case() if case.model in ("TabICL", "TabPFN")]
    assert {shape.dim for shape in tables} == {16}
    assert {(shape.q_len, shape.kv_len) for shape in tables if shape.q_len != shape.kv_len} == {(128, 104), (104, 128)}


def test_each_feature_of_a_model_is_given_to_ours_and_to_the_peers(models, monkeypatch):
    monkeypatch.setattr(models, "DEVICE", "cpu")
    shape = models.Shape(3, 2, 24, 24, 8)
    for feature in ("", "bias", "lengths", "causal"):
        ours, theirs = models.options(models.Case("x", shape, feature))
        if feature == "lengths":
            theirs = {"attn_mask": theirs["attn_mask"].expand(3, 2, 24, 24)}
        leaves, _, _ = shape.leaves()
        found = torch.nn.functional.scaled_dot_product_attention(*leaves, **theirs)
        expected = saccade.attention(*leaves, backend="reference", **ours)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02, msg=feature)
