"""Plots of every table show ours beside the peers, in one style, light and dark."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import plot  # noqa: E402
import plot_all  # noqa: E402
import plot_nm  # noqa: E402
import plot_short  # noqa: E402
import plot_style  # noqa: E402
from matplotlib import colors, image  # noqa: E402

RESULTS = BENCHMARKS / "results"


@pytest.mark.parametrize("table", ["nm_fused", "nm_fused_sm80"])
def test_fused_tables_show_both_patterns_beside_flash(table, tmp_path, monkeypatch):
    path = Path(shutil.copy(plot.newest(RESULTS, table), tmp_path))
    panels = []
    throughput = plot_nm.throughput
    monkeypatch.setattr(plot_nm, "throughput", lambda rows: panels.append(throughput(rows)) or panels[-1])
    light, dark = plot.draw(path)
    assert min(light.stat().st_size, dark.stat().st_size) > 10_000
    with open(path, newline="") as handle:
        lengths = {int(re.search(r"Tk=(\d+)", row["problem"])[1]) for row in csv.DictReader(handle)}
    assert len(panels) == 8  # light and dark
    for panel in panels:
        flash, *ours = ([n for n, _ in panel[name]] for name in ("sdpa_flash", "mma_sp 1:2", "mma_sp 2:4"))
        assert ours == [flash, flash] == [sorted(flash)] * 2
    assert {n for panel in panels for n, _ in panel["sdpa_flash"]} == lengths


@pytest.mark.parametrize("table", ["short_full", "nm_figure5", "dynamic_mask_decode"])
def test_a_plot_is_the_same_on_light_and_on_dark_paper(table, tmp_path):
    written = plot.draw(Path(shutil.copy(plot.newest(RESULTS, table), tmp_path)))
    assert {p.name for p in written} == {p.name for p in tmp_path.glob("*.png")}
    assert len({image.imread(p).shape for p in written}) == 1
    for theme in plot_style.THEMES:
        pictures = [image.imread(p) for p in written if p.name.endswith(".dark.png") == (theme.suffix == ".dark.png")]
        assert pictures
        for picture in pictures:
            assert picture[0, 0, :3] == pytest.approx(colors.to_rgb(theme.paper), abs=0.02)  # the paper
            ours = abs(picture[..., :3] - colors.to_rgb(plot_style.SACCADE.colour)).max(-1) < 0.03
            assert ours.sum() > 500


def test_problems_of_one_name_have_their_batch_beside_it():
    problems = [
        f"attention(B={batch} H=8 Tq={tokens} Tk={tokens} D=16 bf16)" for batch, tokens in ((10, 12), (2000, 12), (10, 40))
    ]
    rows = [
        {"problem": problem, "direction": "fwd", "backend": backend, "ms_p50": "1.0", "note": ""}
        for problem in problems
        for backend in ("short", "sdpa_flash")
    ]
    labels = [row.name for _, row in plot._rows(rows)]
    assert labels == ["12 tokens, D = 16, B = 10", "12 tokens, D = 16, B = 2,000", "40 tokens, D = 16"]


def test_an_implementation_has_one_name_and_one_colour():
    names = {look.name for look in plot_style.LOOKS.values()}
    assert len(names) == len({look.colour for look in plot_style.LOOKS.values()})
    style = BENCHMARKS / "plot_style.py"
    others = [p for p in BENCHMARKS.rglob("*.py") if p != style]
    assert not [p.name for p in others if re.search(r"[\"']#[0-9a-f]{6}[\"']", p.read_text(encoding="utf-8"))]


def test_the_legend_has_ours_first_and_the_roof_last():
    labels = ["roof: bytes moved", "SDPA flash, dense", "FlashAttention-4", "SDPA, called directly", "saccade 2:4"]
    in_order = ["saccade 2:4", "FlashAttention-4", "SDPA flash, dense", "SDPA, called directly", "roof: bytes moved"]
    assert sorted(labels, key=plot_style._rank) == in_order


def test_the_plot_of_auto_has_every_problem_once():
    with open(RESULTS / "h200" / "short_auto.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    gains = plot_short.auto_gains(rows)
    assert set(gains) == {(row["problem"], row["note"], row["direction"]) for row in rows}
    first = {row["backend"]: float(row["ms_p50"]) for row in rows[:3]}
    assert gains[rows[0]["problem"], "", "fwd"] == pytest.approx(first["sdpa"] / first["auto"])
    lost = plot_short._words("attention(B=1024 H=8 Hkv=2 Tq=1 Tk=50 D=64 bf16 grad sm_90)")
    assert lost == "B=1024 H=8 Hkv=2 Tq=1 Tk=50 D=64 bf16"


def test_a_row_compares_with_the_best_peer():
    name = "attention(B=9 H=8 Tq=128 Tk=128 D=64 bf16 causal grad sm_90)"
    times = {"short": (1.0, 2.5), "sdpa_flash": (4.0, 6.0), "sdpa_cudnn": (3.0, 7.0)}
    rows = [
        {"table": "short_full", "problem": name, "direction": way, "backend": b, "ms_p50": str(t), "note": ""}
        for b, both in times.items()
        for way, t in zip(("fwd", "bwd"), both, strict=True)
    ]
    ((heading, row),) = plot._rows(rows)
    assert (heading, row.name) == ("separate Q, K, V", "128 tokens, D = 64, causal, H = 8")
    assert [dot.value for dot in row.dots] == [3.0, pytest.approx(10 / 3.5)]  # the sum, as both together were not measured
    assert row.said == "3.00 · 2.86  SDPA cuDNN"
    ((heading, row),) = plot._rows([r | {"note": "triangle, compiled in 9 s"} for r in rows])
    assert heading == "triangle"
    alone = [r for r in rows if r["backend"] == "short"]
    assert list(plot._rows(alone)) == []


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (
            "attention_varlen(B=4096 H=12 D=32 bf16 longest=128 mean=40 tokens=163385)",
            ("mean 40 of 128 tokens, 4,096 sequences", "D = 32, H = 12"),
        ),
        ("attention(B=9 H=8 Tq=1 Tk=32 D=64 bf16 packed grad)", ("packed QKV", "1 query, 32 keys, D = 64")),
        (
            "attention_varlen(B=247 H=12 D=64 bf16 window=(64, 64) longest=256 tokens=36812)",
            ("window 64, 64", "D = 64, longest 256"),
        ),
    ],
)
def test_problems_that_share_a_heading_differ_in_their_names(problem, label):
    assert plot._label(problem) == label


def test_every_committed_plot_can_be_drawn_again(monkeypatch):
    drawn = []
    monkeypatch.setattr(plot_style, "save", lambda path, build: drawn.append(path) or [])
    assert plot_all.main([]) == 0
    plots = {p.relative_to(RESULTS) for p in RESULTS.rglob("*.png") if not p.name.endswith(".dark.png")}
    assert {p.with_suffix(".png").relative_to(RESULTS) for p in drawn} == plots


def test_a_folder_without_tables_is_refused(tmp_path, capsys):
    assert plot_all.main(["--results", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("days", "shown"),
    [("221", "b"), ("22", "a"), ("2111", "a"), ("2211", "b"), ("1111", "a")],
    ids=["three of four", "a part", "tie", "more", "older"],
)
def test_a_part_of_a_table_is_not_shown(tmp_path, days, shown):
    """A row a problem: of whole tables the one with most rows of the latest day is shown, and the first of equal ones."""
    for name, of_rows in (("a", "2111"), ("b", days)):
        (tmp_path / name).mkdir()
        lines = [f"problem {i},2026-01-0{day}" for i, day in enumerate(of_rows)]
        (tmp_path / name / "t.csv").write_text("\n".join(["problem,date", *lines]) + "\n")
    assert plot.newest(tmp_path, "t") == tmp_path / shown / "t.csv"


def test_the_newest_table_is_drawn_and_shown(tmp_path, capsys):
    """If two machines have a table, the plot of the older one goes, and pages show the new one."""
    page = tmp_path / "docs" / "speed.md"
    page.parent.mkdir()
    page.write_text("![Maps](../benchmarks/results/h200/short_sizes.png)")
    text = (RESULTS / "h200" / "short_sizes.csv").read_text()
    for folder, day in (("h200", "2026-01-02"), ("h100", "2026-03-01")):
        table = tmp_path / folder / "short_sizes.csv"
        table.parent.mkdir()
        table.write_text(re.sub(r"2026-\d\d-\d\d", day, text))
    for name in ("short_sizes.png", "short_sizes.dark.png"):
        (tmp_path / "h200" / name).write_text("old")
    assert plot_all.main(["--results", str(tmp_path), "--pages", str(tmp_path), "short_sizes"]) == 0
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.png")) == [
        "h100/short_sizes.dark.png",
        "h100/short_sizes.png",
    ]
    assert page.read_text() == "![Maps](../benchmarks/results/h100/short_sizes.png)"
    assert "mend the words below it" in capsys.readouterr().out
