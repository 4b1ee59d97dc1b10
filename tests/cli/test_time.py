"""`saccade time`: small problems on this machine's CPU, its mistakes, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import saccade
from saccade import InvalidArgument, SaccadeError
from saccade.cli import time as command
from saccade.cli.app import app
from saccade.cli.time import Task
from saccade.testing.timing import Timing, measure_in_turns

SMALL = ("--device", "cpu", "-B", "2", "-H", "4", "--tq", "9", "-D", "16", "--rounds", "1")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Milliseconds instead of a second for each row; the kernels' interpreter is not what is timed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(command, "measure_in_turns", lambda calls, rounds, device: measure_in_turns(calls, rounds, device, 1, 1))


def run(*words):
    return CliRunner().invoke(app, ["time", *words], env={"COLUMNS": "160"})


@pytest.mark.parametrize("mask", ["none", "lengths", "row", "full"])
@pytest.mark.parametrize("backward", [True, False])
def test_every_mask_forward_and_backward(mask, backward):
    words = ["--mask", mask, "--json", *["--backward"] * backward]
    report = json.loads(run(*SMALL, *words, "--hkv", "2", "--tk", "11").stdout)
    names = {row["name"] for row in report["rows"]}
    assert names >= {"auto", "sdpa", "torch", "torch math"}
    assert report["chosen"] == "sdpa"
    assert "needs a CUDA device" in report["declined"]["short"]
    assert "Hkv=2 Tq=9 Tk=11 D=16 fp32" in report["problem"]
    assert ("grad" in report["problem"]) == backward
    assert [row["p50"] for row in report["rows"]] == sorted(row["p50"] for row in report["rows"])
    for row in report["rows"]:
        assert 0 < row["p20"] <= row["p50"] <= row["p80"]
    (gain,) = (row["gain"] for row in report["rows"] if row["name"] == "torch")
    assert gain == 1


def test_what_is_timed_is_one_problem_in_every_row():
    task = Task(2, 4, 2, 9, 11, 16, mask="lengths", is_causal=True, backward=True, device="cpu")
    problem = command._problem(task, torch.device("cpu"))
    calls = command._calls(task, problem, command._inputs(task, problem, torch.device("cpu")))
    able, _ = command._those_that_run(calls, problem)
    expected = able["torch"]()
    assert len(expected) == 3
    for name in ("auto", "sdpa", "torch math"):
        for got, want in zip(able[name](), expected, strict=True):
            torch.testing.assert_close(got, want, msg=name)


def test_the_gain_is_torch_s_time_over_ours(monkeypatch):
    times = {"auto": 2.0, "sdpa": 8.0, "torch": 4.0}
    monkeypatch.setattr(
        command, "measure_in_turns", lambda calls, rounds, device: {n: Timing(times.get(n, 1.0), 0.5, 9.0) for n in calls}
    )
    report = json.loads(run(*SMALL, "--json").stdout)
    gains = {row["name"]: row["gain"] for row in report["rows"]}
    assert (gains["auto"], gains["sdpa"], gains["torch"]) == (2.0, 0.5, 1.0)
    assert report["rows"][-1]["name"] == "sdpa"


def test_the_table_names_the_problem_the_choice_and_the_missing():
    out = run(*SMALL, "--dropout", "0.1", "--causal").stdout
    assert "attention(B=2 H=4 Tq=9 Tk=9 D=16 fp32 causal dropout=0.1 cpu), forward" in out
    for words in ("auto (takes sdpa)", "torch (called directly)", "20th to 80th percentile", "short: needs a CUDA device"):
        assert words in out
    assert "torch cudnn: torch has no such kernel" in out


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    assert run(*SMALL, "--plot", str(tmp_path / "times.png")).exit_code == 0
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "has_package", lambda name: name != "matplotlib")
    monkeypatch.setattr(command, "measure", lambda task: pytest.fail("timed first"))
    error = run(*SMALL, "--plot", str(tmp_path / "times.png")).exception
    assert isinstance(error, SaccadeError)
    assert "pip install 'saccade-attention[bench]'" in str(error)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--mask", "row", "--causal"), "causal is given too"),
        (("-B", "0"), r"B, H, Hkv, Tq, Tk and D are \(0, 4, 4, 9, 9, 16\); to be timed each must be at least 1"),
        (("--hkv", "3"), "4 query heads are no multiple of 3 key heads"),
        (("--dropout", "1"), "dropout_p is 1"),
        (("--device", "tpu"), "device is 'tpu'"),
        (("--plot", "times.txt"), "must end in one of .png"),
        (("--plot", "nowhere/times.png"), "there is no folder"),
        (("-B", "1000000", "-H", "1000000"), "do not fit into the memory of cpu"),
    ],
)
def test_mistakes_are_named(words, sentence):
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    with pytest.raises(SaccadeError, match=sentence) as caught:
        raise run(*SMALL, *words).exception
    assert "fit" in sentence or isinstance(caught.value, InvalidArgument)


def test_it_needs_nothing_of_the_checkout(tmp_path):
    words = [sys.executable, "-m", "saccade", "time", *SMALL, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(saccade.__file__).parent.parent)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["unit"] == "ms"
    imported = Path(command.__file__).read_text(encoding="utf-8")
    assert "benchmarks" not in imported


def test_one_round_is_one(monkeypatch):
    """It has no spread, so that none can be too wide."""
    counts = []

    def counted(calls, rounds, device):
        counts.append(rounds)
        return {name: Timing(float(len(counts)), 0.5, 9.0) for name in calls}

    monkeypatch.setattr(command, "measure_in_turns", counted)
    assert "medians of 1 round;" in run(*SMALL).stdout
    assert counts == [1]


def test_more_rounds_are_made_while_a_row_scatters(monkeypatch):
    counts = []

    def scattered(calls, rounds, device):
        counts.append(rounds)
        return {name: Timing(1.0 + (len(counts) % 2 if name == "auto" else 0), 0.5, 3.0) for name in calls}

    monkeypatch.setattr(command, "measure_in_turns", scattered)
    found = run(*SMALL, "--rounds", "3").stdout
    assert len(counts) == 12
    assert "medians of 12 rounds" in found
    assert "differences below that say nothing" in found
    monkeypatch.setattr(
        command, "measure_in_turns", lambda calls, rounds, device: {name: Timing(1.0, 1.0, 1.01) for name in calls}
    )
    found = run(*SMALL, "--rounds", "3").stdout
    assert "medians of 3 rounds; the widest spread of a row is 1 % of its time\n" in found
