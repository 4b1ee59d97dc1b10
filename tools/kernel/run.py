"""One round of the loop for a kernel: its tests, its binaries, and on a GPU its times before and after a change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from saccade.errors import SaccadeError
from tools.kernel.families import ROOT, family_of, tests_of

# compiled for without a GPU: of Triton's kernels the two architectures that most users have
TRITON_TARGETS = ("90", "80")
# a change below this is noise unless the ranges of both are apart
NOISE = 0.03


class Line(NamedTuple):
    """One row of the table: what was done, what came out, and whether it is right."""

    what: str
    found: str
    ok: bool
    details: str = ""


def tested(kernel: Path, part: str, dtype: str, seconds: float, log: Path | None) -> Line:
    """Run the tests of a kernel: of its contract, or of its binaries."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tools.kernel.plugin", "--kernel", str(kernel), "--kernel-part", part,
        "--kernel-dtype", dtype, "--kernel-seconds", str(seconds), *tests_of(family_of(kernel)),
    ]  # fmt: skip
    if log is not None:
        # every case is a candidate: only those that compile this source take time
        command += ["--kernel-log", str(log), "--every-case"]
        command += ["--kernel-together"] * family_of(kernel).together
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    if log is not None:
        environment |= {"SACCADE_CACHE_DIR": str(log.parent)}  # what is kept on disk would not be compiled
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return read_tests(done.stdout + done.stderr, done.returncode, "contract" if part == "contract" else "binaries")


def read_tests(text: str, code: int, what: str) -> Line:
    """The line of what pytest printed at the end. Code 5 says that no test was found."""
    counts = {
        name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|errors?)\b", text.rpartition("\n=")[2] or text)
    }
    late = sum(int(n) for n in re.findall(r"SKIPPED \[(\d+)\].*: out of time", text))
    on_gpu = sum(int(n) for n in re.findall(r"SKIPPED \[(\d+)\].*: needs (?:a CUDA|an sm_90) device", text))
    bad = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    found = f"{counts.get('passed', 0)} tests passed"
    found += f", {len(bad)} failed" if bad else ""
    found += f", {on_gpu} need a GPU" if on_gpu else ""
    found += f", {late} left for lack of time" if late else ""
    if code not in (0, 1, 5):
        bad = bad or text.strip().splitlines()[-3:]
    return Line(what, found, code in (0, 5) and not bad, "\n".join(bad[:8]))


def compiled_by_triton(kernel: Path) -> list[Line]:
    """Compile the Triton kernels of a file, or those that use its functions, for each target."""
    with ThreadPoolExecutor(len(TRITON_TARGETS)) as pool:
        return list(pool.map(lambda arch: _triton(kernel, arch), TRITON_TARGETS))


def _triton(kernel: Path, arch: str) -> Line:
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "TRITON_CACHE_DIR": folder}
        command = [sys.executable, "tests/launch/test_compile_targets.py", arch, str(kernel)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return Line(f"sm_{arch}", "does not compile", False, "\n".join(done.stderr.strip().splitlines()[-6:]))
    answer = json.loads(done.stdout.splitlines()[-1])
    rows = answer["rows"]
    if not rows:
        return Line(
            f"sm_{arch}", "nothing was compiled", False, "tests/launch/test_compile_targets.py has no launch of this kernel"
        )
    return Line(f"sm_{arch}", _resources(rows), not answer["failures"], "\n".join(answer["failures"]))


def _resources(rows: list[dict]) -> str:
    most = {name: max(row[name] for row in rows) for name in ("registers", "stack", "shared")}
    kernels = len({row["kernel"] for row in rows})
    return (
        f"{len(rows)} builds of {kernels} kernels: up to {most['registers']} registers, {most['stack']} bytes of stack, "
        f"{most['shared']} bytes of shared memory"
    )


def compiled_by_nvrtc(kernel: Path, dtype: str, seconds: float) -> list[Line]:
    """Run the tests that compile a CUDA source, and show what they compiled of it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        log = Path(folder) / "compiled"
        line = tested(kernel, "binaries", dtype, seconds, log)
        rows = [json.loads(text) for text in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return [line, *read_log(kernel, rows)]


def read_log(kernel: Path, rows: list[dict]) -> list[Line]:
    """A line for each architecture that a source was compiled for."""
    ours = [row for row in rows if Path(row["source"]) == kernel]
    if not ours:
        return [Line("NVRTC", "nothing was compiled", False, f"no test of the family compiled {kernel.name} within its time")]
    lines = []
    for arch in sorted({row["arch"] for row in ours}):
        builds = [row["usage"] for row in ours if row["arch"] == arch]
        if not all(builds):
            lines.append(Line(arch, "does not compile", False, f"NVRTC refuses {kernel.name}"))
            continue
        registers, stack = (max(used[i] for usage in builds for used in usage.values()) for i in (0, 1))
        lines.append(Line(arch, f"{len(builds)} builds: up to {registers} registers, {stack} bytes of stack", True))
    return lines


@contextlib.contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """A worktree of a revision, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "before"
        made = subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(place), revision],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise SaccadeError(f"git makes no worktree of {revision!r}: {made.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(place)], capture_output=True, check=True)


def timed(kernel: Path, revision: str, device: str = "cuda", dtype: str = "bfloat16") -> list[Line]:
    """The times of a family's problems at a revision and now, in turns."""
    lines: list[Line] = []
    with checkout_of(revision) as before:
        for problem in family_of(kernel).problems:
            rounds = [[_measured(root, problem, device, dtype) for root in (before, ROOT)] for _ in range(2)]
            lines += compared(problem, rounds)
    return lines


def _measured(root: Path, problem: tuple, device: str, dtype: str) -> dict:
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "tools.kernel.timed", *map(str, problem), device, dtype]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"refused": done.stderr.strip()[-300:]}


def compared(problem: tuple, rounds: list[list[dict]]) -> list[Line]:
    """A line for each direction: slower only if both medians are slower and the ranges do not meet."""
    name = " ".join(map(str, problem))
    said = [found["refused"] for pair in rounds for found in pair if "refused" in found]
    if said:
        return [Line(name, "was not timed", True, said[0])]
    lines = []
    for direction in rounds[0][0]:
        old, new = ([pair[i][direction] for pair in rounds] for i in (0, 1))
        ratio = min(p50 for p50, *_ in new) / min(p50 for p50, *_ in old)
        slower = ratio > 1 + NOISE and min(p20 for _, p20, _ in new) > max(p80 for *_, p80 in old)
        found = f"{min(old)[0]:.4f} ms before, {min(new)[0]:.4f} after, {ratio:.3f} of it"
        lines.append(Line(f"{name}, {direction}", found, not slower))
    return lines
