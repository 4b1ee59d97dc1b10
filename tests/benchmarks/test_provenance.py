"""Every committed row says where, when and with what it was made."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import machine

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


def test_code_that_no_commit_holds_is_not_named_as_the_commit(tmp_path, monkeypatch):
    def git(*asked):
        about = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(tmp_path), *about, *asked], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(machine, "HERE", tmp_path / "benchmarks")
    code, rows = tmp_path / "src/saccade/kernel.py", tmp_path / "benchmarks/results/rows.csv"
    for path in (code, rows):
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
    git("init", "-q")
    assert machine.commit() == "unknown"
    git("add", "-A")
    git("commit", "-qm", "a change")
    head = git("rev-parse", "--short", "HEAD")
    rows.write_text("measured\n")
    assert machine.commit() == head
    code.write_text("x = 2\n")
    assert machine.commit() == f"{head}-dirty"
    git("commit", "-qam", "another")
    assert machine.commit() == git("rev-parse", "--short", "HEAD")
    code.with_name("new.cu").write_text("int x;\n")
    assert machine.commit().endswith("-dirty")
