"""Draws every plot again from the CSVs that are there, light and dark. It measures nothing and needs no GPU.

python benchmarks/plot_all.py [--results benchmarks/results]
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
    "short_full", "short_pooling", "short_models", "short_auto", "short_long", "short_sizes", "short_ragged", "volta",
    "dynamic_mask_length", "dynamic_mask_decode", "dynamic_mask_cpu", "nm_fused", "nm_fused_sm80", "nm_figure5", "nm_figure11",
    "nm_memory", "nm_end_to_end", "nm_rivals", "nm_weights", "pooled_depth", "models", "encoders",
)  # fmt: skip
QUALITY = {
    "nm_quality_minilm": "minilm", "nm_finetune_minilm": "finetune", "performer_mse": "performer",
    "attention_error": "attention_error", "nm_figure12": "figure12",
}  # fmt: skip


def draw(path: Path) -> list[Path]:
    """The plots of one CSV, by its name; none of a CSV that is read as a table only."""
    if path.stem in TABLES:
        return plot.draw(path)
    if path.stem in ("learning", "listops", "mqar"):
        return curves.draw(path)
    if path.stem in ("language", "needle"):
        return language_curves.draw(path)
    if path.stem == "mlm":
        return mlm_curves.draw(path)
    if path.stem == "lra":
        return lra_curves.draw(path)
    if path.stem in QUALITY:
        # they import torch and the encoder, which the other plots do not need
        module = importlib.import_module(QUALITY[path.stem])
        with open(path, newline="") as handle:
            return module.draw(list(csv.DictReader(handle)), path)
    return []


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and draw; an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder that holds a folder for each machine")
    folder = parser.parse_args(arguments).results
    found = sorted(p for p in folder.glob("*/*.csv") if p.parent.name != "predictions")
    if not found:
        print(f"plot_all.py: --results is {folder}, which holds no */*.csv", file=sys.stderr)
        return 2
    for path in found:
        for written in draw(path):
            print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
