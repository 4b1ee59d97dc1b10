"""Finds the changed kernels that have the machine code that they had: `python -m tools.same_code COMMIT`.

CUDA sources are compiled as the tests of their family compile them, and the Triton launches of tests/launch/test_compile_targets.py for sm_90, at
COMMIT and here. A changed file is the same if all builds that reach it have the same instructions, byte for byte. `benchmarks/same_code.csv` gets a
line for each, and `benchmarks/stale.py` then counts the file as unchanged.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.stale import SAME_CODE, code_of
from saccade.launch.cuda import HEADERS
from saccade.nvrtc.library import Program, loaded
from saccade.nvrtc.source import Source, reached
from saccade.nvrtc.toolchain import require
from tools.cubin import instructions_of
from tools.kernel.families import ROOT, SRC, family_of, tests_of
from tools.kernel.run import checkout_of

TRITON = """
import importlib.util, inspect, json, sys
from pathlib import Path
from tools import aot
from tools.cubin import instructions_of
root, real, found = Path.cwd(), aot.compile_launch, []
def compiled(launch, tensors, arch):
    made = real(launch, tensors, arch)
    found.append((Path(inspect.getsourcefile(launch.kernel.fn)).relative_to(root).as_posix(), made.kernel, instructions_of(made.cubin)))
    return made
aot.compile_launch = compiled
spec = importlib.util.spec_from_file_location("targets", root / "tests/launch/test_compile_targets.py")
targets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(targets)
targets.compile_all(90)
print(json.dumps(found))
"""
Build = tuple[str, str, Sequence[str]]  # source, architecture, flags of NVRTC


def builds_of(sources: Iterable[Path]) -> list[Build]:
    """The builds that the tests of binaries make of these sources' families."""
    tests = sorted({test for source in sources for test in tests_of(family_of(source))})
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        log = Path(folder) / "compiled"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(os.cpu_count()),
            "-p",
            "tools.kernel.plugin",
            "--kernel-part",
            "binaries",
        ]
        command += ["--kernel-together", "--kernel-log", str(log), "--every-case", "-k", "binar", *tests]
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "SACCADE_CACHE_DIR": folder}
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
        rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
        return sorted({(row["source"], row["arch"].removeprefix("sm_"), tuple(row["flags"])) for row in rows})


def instructions_at(root: Path, build: Build) -> str:
    """The instructions of a build, from the sources of a checkout."""
    source, architecture, flags = build
    path, found = Path(source.replace(str(ROOT), str(root))), require(architecture).path
    if not path.is_file() or found is None:
        return "absent"
    program = Program(loaded(found), path.read_text(encoding="utf-8"), str(path))
    try:
        compiles = program.compile([flag.replace(str(ROOT), str(root)) for flag in flags])
        return instructions_of(program.cubin()) if compiles else "refused"
    finally:
        program.destroy()


def same_cuda(changed: Iterable[str], before: Path) -> dict[str, bool]:
    """Changed CUDA files that builds reach -> whether all these builds have the same instructions."""
    reach = {str(path): {file for file, _ in reached(Source(path, (HEADERS,)))} for path in SRC.rglob("*.cu")}
    touched = {source for source, files in reach.items() if files & {ROOT / name for name in changed}}
    builds = [build for build in builds_of(map(Path, touched)) if build[0] in touched]
    with ProcessPoolExecutor() as pool:
        old, new = ([*pool.map(instructions_at, repeat(root), builds)] for root in (before, ROOT))
    equal = {
        name: [a == b for build, a, b in zip(builds, old, new, strict=True) if ROOT / name in reach[build[0]]] for name in changed
    }
    return {name: all(found) for name, found in equal.items() if found}


def same_triton(changed: Iterable[str], before: Path) -> dict[str, bool]:
    """Changed Triton files -> whether the launches that use them have the same instructions, and the host's part of them did not change."""
    old, new = map(_launches_at, (before, ROOT))
    found = {}
    for name in changed:
        module = ".".join(Path(name).with_suffix("").parts[1:])
        homes = {home for home, *_ in new if home == name or module in (ROOT / home).read_text(encoding="utf-8")}
        builds = [[build for build in launches if build[0] in homes] for launches in (old, new)]
        if homes and (before / name).is_file():
            found[name] = builds[0] == builds[1] and _host_part(before / name) == _host_part(ROOT / name)
    return found


def _launches_at(root: Path) -> list[list[str]]:
    """[file, kernel, instructions] of each Triton launch."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{ROOT}", "EVERY_CASE": "1"}
    done = subprocess.run([sys.executable, "-c", TRITON], cwd=root, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _host_part(path: Path) -> list[str]:
    kept = (x for x in ast.parse(path.read_text(encoding="utf-8")).body if not isinstance(x, ast.Import | ast.ImportFrom))
    return [ast.dump(x) for x in kept if not any("jit" in ast.unparse(y) for y in getattr(x, "decorator_list", []))]


def main(commit: Annotated[str, typer.Argument(help="What to compare with.")]) -> None:
    """Compare the machine code of changed kernels with a commit, and write down which is the same; exit code 1 if some is not."""
    listed = subprocess.run(
        ["git", "diff", "--name-only", commit, "--", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in listed.stdout.split() if (ROOT / name).is_file()}
    cuda = [name for name in texts if name.endswith((".cu", ".cuh"))]
    triton = [name for name, text in texts.items() if name.endswith(".py") and "@triton.jit" in text]
    with checkout_of(commit) as before:
        found = (same_cuda(cuda, before) if cuda else {}) | (same_triton(triton, before) if triton else {})
        rows = [
            (x, code_of((before / x).read_text(encoding="utf-8"), x), code_of(texts[x], x))
            for x in found
            if found[x] and (before / x).is_file()
        ]
    known = SAME_CODE.read_text(encoding="utf-8")
    lines = [f"{name},{old},{now}\n" for name, old, now in rows if old != now]
    SAME_CODE.write_text(known + "".join(line for line in lines if line not in known), encoding="utf-8")
    for name in (*cuda, *triton):
        print(f"{name}: {'no test compiles it' if name not in found else 'the same' if found[name] else 'other instructions'}")
    raise typer.Exit(not all(found.values()))


if __name__ == "__main__":
    typer.run(main)
