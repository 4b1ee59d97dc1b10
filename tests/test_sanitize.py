"""`scripts/sanitize.py`: how it reads compute-sanitizer's output, and what it runs, as far as a machine without a GPU can tell."""

from __future__ import annotations

import csv
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "sanitize.py"


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# written by hand in the form that the manual of compute-sanitizer documents
CLEAN = """========= COMPUTE-SANITIZER
sanitized 21 cases, declined 4
========= ERROR SUMMARY: 0 errors
"""
MEMCHECK = """========= COMPUTE-SANITIZER
a line of the program
========= Invalid __global__ write of size 4 bytes
=========     at short_forward+0x1b0 in forward.cu:61
=========     by thread (5,0,0) in block (3,0,0)
=========     Address 0x7f4e3ac00204 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x7f4e3ac00000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x2f1e3c]
=========                in /usr/lib/libcuda.so.1
=========
========= Invalid __shared__ read of size 2 bytes
=========     at short_backward+0x40 in backward.cu:12
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at tile_kernel(float *)+0xb0 in tile.cuh:40
=========     and Read access at tile_kernel(float *)+0x280 in tile.cuh:44 [124 hazards]
=========
sanitized 3 cases, declined 0
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
RACECHECK_CLEAN = """========= COMPUTE-SANITIZER
sanitized 3 cases, declined 0
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""
INITCHECK = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at combine+0x90 in combine.cu:20
=========     by thread (0,0,0) in block (1,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
SYNCCHECK = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at pooling+0x150 in pooling.cu:37
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 16 errors (6 errors were not printed)
"""
DIED = """========= COMPUTE-SANITIZER
Traceback (most recent call last):
ModuleNotFoundError: No module named 'saccade'
"""


@pytest.mark.parametrize(
    ("text", "code", "expected", "said"),
    [
        (CLEAN, 0, (0, 0, "", ""), "ok"),
        (RACECHECK_CLEAN, 0, (0, 0, "", ""), "ok"),
        (MEMCHECK, 1, (2, 0, "Invalid __global__ write of size 4 bytes", "at short_forward+0x1b0 in forward.cu:61"), "found"),
        (
            RACECHECK, 0,
            (1, 1, "Error: Race reported between Write access at tile_kernel(float *)+0xb0 in tile.cuh:40",
             "and Read access at tile_kernel(float *)+0x280 in tile.cuh:44 [124 hazards]"),
            "found",
        ),
        (INITCHECK, 0, (1, 0, "Uninitialized __global__ memory read of size 4 bytes", "at combine+0x90 in combine.cu:20"), "found"),
        (SYNCCHECK, 0, (16, 0, "Barrier error detected. Divergent thread(s) in block", "at pooling+0x150 in pooling.cu:37"), "found"),
        (DIED, 1, (None, 0, "", ""), "failed"),
        (CLEAN, 1, (0, 0, "", ""), "failed"),
        ("", -9, (None, 0, "", ""), "failed"),
    ],
    ids=["clean", "no race", "memcheck", "racecheck", "initcheck", "synccheck", "died", "ended with 1", "killed"],
)  # fmt: skip
def test_output_is_read(sanitize, text, code, expected, said):
    found = sanitize.parse(text)
    assert tuple(found) == expected
    assert sanitize.verdict(found, code) == said


def test_cases_are_counted(sanitize):
    assert sanitize.counts_of(CLEAN) == (21, 4)
    assert sanitize.counts_of(DIED) == (0, 0)


def test_every_family_of_kernels_is_run(sanitize):
    given = type("Given", (), {"op": None, "backend": None})
    assert set(sanitize._pairs(given)) == {
        *(("attention", b) for b in ("short", "volta", "volta_fp16", "long", "shared_bias", "ragged")), ("attention_varlen", "ragged"),
        ("dynamic_mask_attention", "gather"), ("nm_sparse_attention", "masked"), ("nm_sparse_attention", "mma_sp"), ("decoding", "decode"),
    }  # fmt: skip
    assert sanitize._dtypes(type("Given", (), {"dtype": None}), "volta_fp16") == ["fp16"]
    assert sanitize._dtypes(type("Given", (), {"dtype": None}), "short") == ["bf16", "fp32"]
    for operation, _ in sanitize._pairs(given):
        assert len(sanitize.cases_of(operation, False)) > 1
        assert operation == "decoding" or len(sanitize.cases_of(operation, True)) > len(sanitize.cases_of(operation, False))


@pytest.mark.parametrize(
    "operation", ["attention", "attention_varlen", "dynamic_mask_attention", "nm_sparse_attention", "decoding"]
)
def test_cases_run_forward_and_backward(sanitize, operation):
    for case in sanitize.cases_of(operation, False)[:4]:
        sanitize.call(operation, case, torch.float32, "auto" if operation == "decoding" else "reference", "cpu")


TOOL = """#!{python}
import os, sys
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
words = sys.argv[1:]
tool, program = words[1], words[6:]
assert words[2:6] == ["--print-limit", "20", "--report-api-errors", "no"]
assert words[0] == "--tool" and program[2] == "--child", words
name = {{"memcheck": "MEMCHECK", "racecheck": "RACECHECK_CLEAN", "initcheck": "CLEAN", "synccheck": "DIED"}}[tool]
sys.path.insert(0, {folder!r})
import test_sanitize
print(getattr(test_sanitize, name))
sys.exit(tool in ("memcheck", "synccheck"))
"""


def test_the_whole_with_a_tool_that_prints_what_is_written_here(sanitize, tmp_path, monkeypatch, capsys):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable, folder=str(Path(__file__).parent)))
    tool.chmod(0o755)
    out = tmp_path / "summary.csv"
    words = ["--sanitizer", str(tool), "--op", "attention", "--backend", "short", "--dtype", "fp32", "--out", str(out)]
    words += ["--logs", str(tmp_path / "logs")]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *words])
    assert sanitize.main() == 1
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(r["tool"], r["verdict"], r["cases"], r["errors"]) for r in rows] == [
        ("memcheck", "found", "0", "2"), ("racecheck", "ok", "3", "0"), ("initcheck", "ok", "21", "0"), ("synccheck", "failed", "0", ""),
    ]  # fmt: skip
    assert rows[0]["where"] == "at short_forward+0x1b0 in forward.cu:61"
    assert rows[0]["torch"] == torch.__version__
    assert {x.name for x in (tmp_path / "logs").iterdir()} == {
        "attention_short_fp32_memcheck.txt", "attention_short_fp32_synccheck.txt",
    }  # fmt: skip
    assert "ModuleNotFoundError" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *words, "--tool", "racecheck"])
    assert sanitize.main() == 0


def test_without_the_tool_it_says_where_that_comes_from(sanitize, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--sanitizer", os.devnull + "/none"])
    assert sanitize.main() == 2
    assert "comes with the CUDA toolkit" in capsys.readouterr().err
