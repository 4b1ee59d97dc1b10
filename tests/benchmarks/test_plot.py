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
import plot_auto  # noqa: E402
import plot_fused  # noqa: E402
import plot_style  # noqa: E402
from matplotlib import colors, image  # noqa: E402

RESULTS = BENCHMARKS / "results"


@pytest.mark.parametrize("table", ["nm_fused", "nm_fused_sm80"])
def test_fused_tables_show_both_patterns_beside_flash(table, tmp_path, monkeypatch):
    path = Path(shutil.copy(RESULTS / "h200" / f"{table}.csv", tmp_path))
    panels = []
    lines = plot_fused._lines
    monkeypatch.setattr(plot_fused, "_lines", lambda rows: panels.append(lines(rows)) or panels[-1])
    light, dark = plot.draw(path)
    assert min(light.stat().st_size, dark.stat().st_size) > 10_000
    with open(path, newline="") as handle:
        lengths = {int(re.search(r"Tk=(\d+)", row["problem"])[1]) for row in csv.DictReader(handle)}
    assert len(panels) == 4
    for panel in panels:
        for name in ("mma_sp 1:2", "mma_sp 2:4", "sdpa_flash"):
            assert [n for n, _ in panel[name]] == sorted(lengths)


@pytest.mark.parametrize("table", ["h200/short_full", "h100/nm_figure5", "h200/dynamic_mask_decode"])
def test_a_plot_is_the_same_on_light_and_on_dark_paper(table, tmp_path):
    written = plot.draw(Path(shutil.copy(RESULTS / f"{table}.csv", tmp_path)))
    assert {p.name for p in written} == {p.name for p in tmp_path.glob("*.png")}
    assert len({image.imread(p).shape for p in written}) == 1
    for theme in plot_style.THEMES:
        pictures = [image.imread(p) for p in written if p.name.endswith(".dark.png") == (theme.suffix == ".dark.png")]
        assert pictures
        for picture in pictures:
            assert picture[0, 0, :3] == pytest.approx(colors.to_rgb(theme.paper), abs=0.02)  # the paper
            ours = abs(picture[..., :3] - colors.to_rgb(plot_style.SACCADE.colour)).max(-1) < 0.03
            assert ours.sum() > 500


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
    gains = plot_auto._gains(rows)
    assert sum(map(len, gains.values())) == len({(row["problem"], row["note"], row["direction"]) for row in rows})
    first = {row["backend"]: float(row["ms_p50"]) for row in rows[:3]}
    assert gains["float16", "fwd"][0] == pytest.approx(first["sdpa"] / first["auto"])
    same_rows = [{**row, "note": "equal rows, copied"} for row in rows[:3]]
    assert plot_auto._gains(same_rows) == {("equal rows", "fwd"): gains["float16", "fwd"][:1]}
    assert plot_auto._kind("attention(B=1024 H=8 Tq=49 Tk=49 D=32 bf16 mask[1024x1x1x49] grad sm_90)") == "key mask"
    assert plot_auto._kind("attention(B=1024 H=8 Tq=32 Tk=32 D=64 bf16 mask[1024x1x32x32] grad sm_90)") == "full mask"


def test_problems_of_packed_sequences_share_a_label():
    shape = "attention_varlen(B=4096 H=12 D={} bf16 longest=128 mean=40 tokens=163385)"
    assert plot._labels([shape.format(dim) for dim in (32, 64, 128)]) == ["D=32", "D=64\nmean 40\nmax 128\nB=4,096", "D=128"]
    models = ["attention(B=8192 H=4 Tq=49 Tk=49 D=32 bf16 bias[1x4x49x49]+grad sm_90)", "attention(B=9 H=8 Tq=1 Tk=32 D=64 bf16)"]
    assert plot._labels(models) == ["S=49\nD=32\nbias H=4", "1×32\nD=64"]


def test_every_committed_plot_can_be_drawn_again(monkeypatch):
    drawn = []
    monkeypatch.setattr(plot_style, "save", lambda path, build: drawn.append(path) or [path])
    assert plot_all.main([]) == 0
    plots = {p.relative_to(RESULTS) for p in RESULTS.rglob("*.png") if not p.name.endswith(".dark.png")}
    assert {p.with_suffix(".png").relative_to(RESULTS) for p in drawn} >= plots


def test_a_folder_without_tables_is_refused(tmp_path, capsys):
    assert plot_all.main(["--results", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
