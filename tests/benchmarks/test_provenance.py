"""Every committed row says where, when and with what it was made."""

import csv
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TABLES = sorted(RESULTS.glob("*/*.csv"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_rows_name_the_gpu_the_versions_the_commit_and_the_day(table):
    with open(table, newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert rows
    for row in rows:
        assert row.get("gpu") or row.get("device")
        assert all(row[name] for name in ("torch", "triton", "driver", "commit", "date")), row
