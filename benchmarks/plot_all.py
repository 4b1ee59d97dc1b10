"""Draws every plot again from the CSVs that are there, light and dark. It measures nothing and needs no GPU.

    python benchmarks/plot_all.py [TABLE ...] [--results benchmarks/results] [--pages .]

A table that several folders hold is drawn from its newest CSV. Plots of its older ones are removed, and the README and the pages of `docs`
then show the new plot; the command names each, since the words below a plot have the machine and the day.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / "experiments" / name) for name in ("learning", "quality"))]

import curves  # noqa: E402
import language_curves  # noqa: E402
import lra_curves  # noqa: E402
import mlm_curves  # noqa: E402
import plot  # noqa: E402

TABLES = (
    "short_full", "short_pooling", "short_models", "short_auto", "short_long", "short_sizes", "short_ragged", "shared_bias", "windows", "volta",
    "dynamic_mask_length", "dynamic_mask_decode", "dynamic_mask_cpu", "nm_fused", "nm_fused_sm80", "nm_figure5", "nm_figure11",
    "nm_memory", "nm_end_to_end", "nm_rivals", "pooled_depth", "models", "encoders",
)  # fmt: skip
QUALITY = {
    "nm_quality_minilm": "minilm", "performer_mse": "performer", "attention_error": "attention_error", "nm_figure12": "figure12", "nm_figure19": "figure19",
}  # fmt: skip
CURVES = {
    **dict.fromkeys(("learning", "listops", "mqar"), curves), **dict.fromkeys(("language", "needle"), language_curves),
    "mlm": mlm_curves, "lra": lra_curves,
}  # fmt: skip


def draw(path: Path) -> list[Path]:
    """The plots of one CSV, by its name; none of a CSV that is read as a table only."""
    if path.stem in TABLES:
        return plot.draw(path)
    if path.stem in CURVES:
        return CURVES[path.stem].draw(path)
    if path.stem in QUALITY:
        # they import torch and the encoder, which the other plots do not need
        module = importlib.import_module(QUALITY[path.stem])
        with open(path, newline="") as handle:
            return module.draw(list(csv.DictReader(handle)), path)
    return []


def show(written: list[Path], pages: list[Path]) -> None:
    """Remove the same plots of other machines, and let the pages show these."""
    for plot_path in written:
        folder = plot_path.parent
        for old in sorted(set(folder.parent.glob(f"*/{plot_path.name}")) - {plot_path}):
            old.unlink()
            link = f"results/{old.parent.name}/{old.name}"
            for page in pages:
                text = page.read_text(encoding="utf-8")
                if link in text:
                    page.write_text(text.replace(link, f"results/{folder.name}/{old.name}"), encoding="utf-8")
                    print(f"{page} shows {folder.name}/{old.name} in place of {old.parent.name}'s: mend the words below it")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and draw; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="draw these alone")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder that holds a folder for each machine")
    parser.add_argument("--pages", type=Path, default=HERE.parent, help="folder of the README and of docs/")
    given = parser.parse_args(arguments)
    found = {table: plot.newest(given.results, table) for table in given.tables or (*TABLES, *CURVES, *QUALITY)}
    missing = [table for table in given.tables if found[table] is None]
    if missing or not any(found.values()):
        print(
            f"plot_all.py: --results is {given.results}, which holds no */{missing[0] if missing else '*'}.csv", file=sys.stderr
        )
        return 2
    pages = [given.pages / "README.md", *sorted((given.pages / "docs").rglob("*.md"))]
    for path in filter(None, found.values()):
        written = draw(path)
        show(written, [page for page in pages if page.is_file()])
        print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
