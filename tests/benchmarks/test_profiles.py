"""The output of Nsight Compute becomes rows; the minimum traffic of a kernel is that of its operands and results."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEAD = '"ID","Process ID","Kernel Name","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg","Metric Name","Metric Unit","Metric Value"'


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in ("ncu", "profile_volta", "profile_short"):
        sys.modules.pop(name, None)


def printed(kernel: str, case: str, counters: dict[str, str]) -> str:
    ranges = f"<default domain>:case:none:none:none:none:none:none {case}:none:none"
    lines = [f'"0","1","{kernel}","{ranges}","{name}","byte","{value}"' for name, value in counters.items()]
    return "\n".join(["==PROF== Connected", HEAD, *lines])


def test_a_launch_of_the_volta_kernels(script):
    volta = script("profile_volta")
    counters = {volta.READ: "201,326,592", volta.WRITTEN: "69,206,016", volta.CACHE: "1,000,000,000", volta.TIME: "61,000,000"}
    launch, = script("ncu").parse(printed("volta_forward", "4096/64/0/atomic", counters))  # fmt: skip
    row = volta.row_of(launch)
    # q, k, v, out: 16,384 tokens of 2,048 halves each; lse: 32 heads of 16,384 floats
    assert (row["fewest read"], row["fewest written"]) == ("201.3", "69.2")
    assert row["ratio"] == "1.000"
    assert (row["kernel"], row["n"], row["D"], row["causal"], row["time (us)"]) == (
        "volta_forward",
        "4096",
        "64",
        "no",
        "61000.0",
    )


def test_ways_of_backward_differ_by_their_sums(script):
    volta = script("profile_volta")
    counters = {volta.READ: "1e6", volta.WRITTEN: "1e6", volta.CACHE: "1e6", volta.TIME: "1e6"}
    rows = {}
    for way in ("atomic", "deterministic"):
        launch, = script("ncu").parse(printed("volta_backward", f"1024/128/1/{way}", counters))  # fmt: skip
        rows[way] = volta.row_of(launch)
    for column in ("fewest read", "fewest written"):
        assert float(rows["atomic"][column]) - float(rows["deterministic"][column]) == pytest.approx(
            16384 * 2048 * 4 / 1e6, abs=0.2
        )


def test_a_launch_of_a_short_kernel(script):
    short = script("profile_short")
    launch, = script("ncu").parse(printed("_fwd_kernel", "64/64/128/sdpa_flash", {"gpu__time_duration.sum": "2,500"}))  # fmt: skip
    assert short.row_of(launch) == {
        "queries": "64",
        "S": "64",
        "D": "128",
        "implementation": "sdpa_flash",
        "kernel": "_fwd_kernel",
        "time (us)": "2.5",
    }


def test_the_profile_knows_the_names_of_our_kernels(script):
    """A kernel of another name would be missing in the table without a word."""
    pattern = re.compile(script("profile_short").KERNELS.removeprefix("regex:"))
    exact = BENCHMARKS.parent / "src" / "saccade" / "exact"
    cuda = [*(exact / "short" / "cuda").glob("*.cu"), *(exact / "long" / "cuda").glob("*_sm90.cu")]
    text = "\n".join(path.read_text() for path in [*cuda, *(exact / "short").glob("*.py")])
    names = re.findall(r"__global__ [^(]*\([^)]*\)\s+(\w+)\(|^def (\w+_kernel)\(", text, re.MULTILINE)
    found = {first or second for first, second in names}
    assert {"forward_sm90", "long_backward_sm90", "pooling_backward", "_bwd_kernel", "_pool_fwd_kernel"} <= found
    assert [name for name in found if not pattern.search(name)] == []


def test_a_case_without_backward_is_refused(script):
    short, launch = script("profile_short"), script("ncu").Launch
    whole = [launch(f"{q}/{n}/{d}/saccade", kernel) for q, n, d in short.SHAPES for kernel in ("forward_sm90", "backward_sm90")]
    short.complete(whole, short.SHAPES)
    with pytest.raises(script("ncu").NcuFailed, match=r"S = 128, D = 128: of forward and backward only \['forward_sm90'\]"):
        short.complete(whole[:-1], short.SHAPES)
    short.complete(whole[:-1], short.SHAPES[:-1])


def test_a_shape_of_the_command_line(script):
    short = script("profile_short")
    assert short.shape_of("64/64/256") == (64, 64, 256)
    with pytest.raises(argparse.ArgumentTypeError, match="'64/64/65' is none of 32/32/64, "):
        short.shape_of("64/64/65")


def test_without_ncu_it_says_so(script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ncu = script("ncu")
    with pytest.raises(ncu.NcuFailed, match="ncu cannot be run"):
        ncu.profile("nothing.py", "regex:x", ["y"])
