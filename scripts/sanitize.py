"""Runs NVIDIA's compute-sanitizer over the kernels of every operation and backend, at small and odd shapes, forward and backward.

    python scripts/sanitize.py                                   # all four tools, every backend of this GPU
    python scripts/sanitize.py --tool racecheck --op attention --backend short --every

Each tool runs each backend in a process of its own, without torch's caching allocator, behind whose blocks an access out of bounds would
lie in other memory of the process and not be seen. The result is a CSV; exit code 1 if a tool found something or could not finish.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
COLUMNS = (
    "tool", "operation", "backend", "dtype", "verdict", "cases", "declined", "errors", "warnings", "first", "where", "seconds", "device", "saccade",
    "torch", "triton", "driver", "commit", "date",
)  # fmt: skip
_TAGS = {"quick", "fallback", "long"}
_DECODING = "decoding"
_NOT_ON_A_GPU = ("gather_torch", "gather_cpp")  # launchers that call torch alone, or run on a CPU


class Found(NamedTuple):
    """The findings of one run of a tool. errors is None if the tool did not come to its summary. first, where: the first report, and the place in the kernel."""

    errors: int | None
    warnings: int = 0
    first: str = ""
    where: str = ""


def parse(text: str) -> Found:
    """Read the output of compute-sanitizer: lines that begin with nine equals signs, among whatever the program prints.

    memcheck, initcheck and synccheck end with `ERROR SUMMARY: 2 errors`, racecheck with `RACECHECK SUMMARY: 1 hazard displayed (1 error,
    0 warnings)`. A report is a line that is not indented, followed by indented ones, the first of which says where (`at ...`).
    """
    lines = [line.removeprefix("=========").rstrip() for line in text.splitlines() if line.startswith("=========")]
    errors, warnings = None, 0
    for line in lines:
        if summary := re.search(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?", line):
            errors, warnings = int(summary[1]), int(summary[2])
        elif summary := re.search(r"ERROR SUMMARY: (\d+) errors?", line):
            errors = int(summary[1])
    for number, line in enumerate(lines):
        report = line.strip()
        indented = line.startswith("     ")
        if (
            indented
            or not report
            or report == "COMPUTE-SANITIZER"
            or "SUMMARY" in report
            or report.startswith("Target application")
        ):
            continue
        where = lines[number + 1].strip() if number + 1 < len(lines) and lines[number + 1].startswith("     ") else ""
        return Found(errors, warnings, report, where)
    return Found(errors, warnings)


def verdict(found: Found, returncode: int) -> str:
    """ "ok", "found" (the tool reports something), or "failed" (the tool or the program did not finish)."""
    if found.errors or found.warnings or (found.first and found.errors is not None):
        return "found"
    return "ok" if found.errors == 0 and returncode == 0 else "failed"


def counts_of(text: str) -> tuple[int, int]:
    """(cases, declined) as `child` prints them."""
    said = re.search(r"^sanitized (\d+) cases, declined (\d+)$", text, re.MULTILINE)
    return (int(said[1]), int(said[2])) if said else (0, 0)


def child(operation: str, backend: str, dtype: str, every: bool) -> None:
    """Run the cases of a backend, forward and backward, and print how many."""
    import torch

    from saccade.cli.device import DTYPES
    from saccade.errors import UnsupportedProblem

    ran = declined = 0
    for case in cases_of(operation, every):
        try:
            call(operation, case, DTYPES[dtype], backend)
            torch.cuda.synchronize()
            ran += 1
        except UnsupportedProblem:
            declined += 1
    print(f"sanitized {ran} cases, declined {declined}", flush=True)


def cases_of(operation: str, every: bool) -> list[Any]:
    """The named problems that are run: the quick ones and those of long rows, or all but the large."""
    from saccade.operations import OPERATIONS

    if operation == _DECODING:
        return [1, 3]  # tokens at a time
    cases = OPERATIONS[operation].cases
    return [c for c in cases if "large" not in c.tags and (every or c.tags & _TAGS)]


def call(operation: str, case: Any, dtype: Any, backend: str, device: str = "cuda") -> None:
    from saccade.dynamic_mask.testing import check as dynamic_mask
    from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
    from saccade.exact.testing import check as exact
    from saccade.exact.testing.varlen_check import padded, run_packed
    from saccade.nm_sparse.testing import check as nm_sparse
    from saccade.nm_sparse.testing.inputs import make_nm_sparse
    from saccade.testing.baseline import differentiate
    from saccade.testing.inputs import make

    if operation == "attention":
        differentiate(exact.public_call(case, backend, False), make(case, dtype, device), 0, False)
    elif operation == "attention_varlen":
        run_packed(case, padded(case, dtype, device, 0, (max(case.q_lengths), max(case.keys)))[1], backend, 0, False)
    elif operation == "dynamic_mask_attention":
        dynamic_mask.differentiate(dynamic_mask.public_call(case, backend, False), make_dynamic_mask(case, dtype, device), False)
    elif operation == "nm_sparse_attention":
        differentiate(nm_sparse.public_call(case, backend, False), make_nm_sparse(case, dtype, device), 0, False)
    else:
        _decode(case, dtype, backend, device)


def _decode(tokens: int, dtype: Any, backend: str, device: str) -> None:
    """A prompt of 37 tokens, then a few more, into a cache that keeps 7 keys."""
    import torch

    import saccade

    cache = saccade.DynamicMaskCache(7)
    for length in (37, *[tokens] * 4):
        query, key, value = (torch.randn(2, 2, length, 64, device=device, dtype=dtype) for _ in range(3))
        cache.attend(query, key, value, torch.randn(2, 2, length, device=device), backend="auto" if length == 37 else backend)


def main() -> int:
    """Run the tools; 1 if one found something or did not finish."""
    given = _arguments()
    if given.child:
        child(given.op[0], given.backend[0], given.dtype[0], given.every)
        return 0
    program = shutil.which(given.sanitizer)
    if program is None:
        print(
            f"there is no {given.sanitizer!r}: compute-sanitizer comes with the CUDA toolkit; --sanitizer names its path",
            file=sys.stderr,
        )
        return 2
    rows = []
    for operation, backend in _pairs(given):
        for dtype in _dtypes(given, backend):
            for tool in given.tool:
                rows.append(_row(program, tool, operation, backend, dtype, given))
                print(", ".join(f"{c} {v}" for c, v in zip(COLUMNS[:11], rows[-1], strict=False) if v != ""), flush=True)
                _write(given.out, rows)
    return 1 if any(row[4] not in ("ok", "declined") for row in rows) else 0


def _row(program: str, tool: str, operation: str, backend: str, dtype: str, given: argparse.Namespace) -> tuple[Any, ...]:
    import torch
    from machine import machine

    import saccade

    words = [
        program,
        "--tool",
        tool,
        "--print-limit",
        "20",
        # a library that asks the driver for functions it may not have is no fault of a kernel
        "--report-api-errors",
        "no",
        sys.executable,
        __file__,
        "--child",
        "--op",
        operation,
        "--backend",
        backend,
    ]
    words += ["--dtype", dtype, *(["--every"] if given.every else [])]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SACCADE_NATIVE": "0"}
    began = time.monotonic()
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=given.timeout, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = (error.stdout or b"").decode(errors="replace"), -1
    found, (ran, declined) = parse(text), counts_of(text)
    said = verdict(found, code)
    if said == "ok" and not ran:
        said = "declined"
    if said == "failed":
        print(text[-2000:], file=sys.stderr)
    if given.logs is not None and said not in ("ok", "declined"):
        given.logs.mkdir(parents=True, exist_ok=True)
        (given.logs / f"{operation}_{backend}_{dtype}_{tool}.txt").write_text(text, encoding="utf-8")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    errors = "" if found.errors is None else found.errors
    return (
        tool, operation, backend, dtype, said, ran, declined, errors, found.warnings, found.first, found.where, f"{time.monotonic() - began:.0f}", device,
        saccade.__version__, *(machine()[name] for name in ("torch", "triton", "driver", "commit", "date")),
    )  # fmt: skip


def _write(out: Path, rows: list[tuple[Any, ...]]) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *rows])


def _pairs(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Operations and backends with kernels of ours; what runs in plain torch or on a CPU is not for these tools."""
    from saccade.operations import OPERATIONS

    every = [
        (name, b.name)
        for name, o in OPERATIONS.items()
        for b in o.backends
        if b.launchers is not None and b.name not in _NOT_ON_A_GPU
    ]
    every += [(_DECODING, b.name) for b in OPERATIONS["dynamic_mask_attention"].decoding]
    return [(op, b) for op, b in every if op in (given.op or [op]) and b in (given.backend or [b])]


def _dtypes(given: argparse.Namespace, backend: str) -> list[str]:
    return given.dtype or (["fp16"] if backend.startswith("volta") else ["bf16", "fp32"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--op", action="append")
    parser.add_argument("--backend", action="append")
    parser.add_argument("--dtype", action="append", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--every", action="store_true", help="all named problems but the large")
    parser.add_argument("--out", type=Path, default=Path("sanitize.csv"))
    parser.add_argument("--logs", type=Path, help="a folder for all that a tool says of a backend, unless that is nothing")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one backend under one tool")
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.tool = given.tool or list(TOOLS)
    return given


if __name__ == "__main__":
    sys.exit(main())
