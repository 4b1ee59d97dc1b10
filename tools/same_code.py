"""Finds the changed kernels that have the machine code that they had: `python -m tools.same_code COMMIT [PATH ...]`.

CUDA sources are compiled as the tests of their family compile them, and the Triton launches of tests/launch/test_compile_targets.py for sm_90, at
COMMIT and here. A changed file is the same if all builds that reach it have the same instructions, byte for byte. A file of `exact` that shapes launches is
the same if its backends launch the same for each problem that a table measured at COMMIT (`tools.launches`), and the row names this commit. If the kernels
of a file alone differ, it also names the problems that run them: the file is the same for all others. If lines alone differ that no problem runs, it
names none, and rows that measure the host count too. If some problems are launched otherwise, it names them for the rows of the device alone.
`benchmarks/same_code.csv` gets a line for each, and `benchmarks/stale.py` then counts the file as unchanged.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.stale import ABSENT, LAUNCHES, SAME_CODE, SHAPES, Code, code_of, equal_codes
from saccade.errors import SaccadeError
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


def without_new_features(builds: list[Build], known: set[str]) -> list[Build]:
    """The builds whose features older sources had: of a macro that these do not name, those without it, or else with the least value of a source."""
    kept = builds
    for name in {name for build in builds for name in _macros(build)} - known:
        least: dict[str, str] = {}
        for build in builds:
            value = _macros(build).get(name, "")
            least[build[0]] = min(value, least.get(build[0], value))
        kept = [build for build in kept if _macros(build).get(name, "") == least[build[0]]]
    return kept


def _macros(build: Build) -> dict[str, str]:
    defined = (flag.removeprefix("--define-macro=").partition("=") for flag in build[2] if flag.startswith("--define-macro="))
    return {name: value for name, _, value in defined}


def _words(root: Path) -> Iterable[str]:
    """The words of all CUDA sources of a checkout."""
    for path in (root / "src").rglob("*.cu*"):
        yield from re.findall(r"\w+", path.read_text(encoding="utf-8"))


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
    was_there = [build for build in builds if Path(build[0].replace(str(ROOT), str(before))).is_file()]
    builds = without_new_features(was_there, {*_words(before)})
    with ProcessPoolExecutor() as pool:
        old, new = ([*pool.map(instructions_at, repeat(root), builds)] for root in (before, ROOT))
    equal = {
        name: [a == b for build, a, b in zip(builds, old, new, strict=True) if ROOT / name in reach[build[0]]] for name in changed
    }
    return {name: all(found) for name, found in equal.items() if found}


def same_triton(changed: Iterable[str], before: Path) -> dict[str, bool]:
    """Changed Triton files -> whether the launches that use their kernels have the same instructions."""
    there = [name for name in changed if (before / name).is_file()]
    if all(_parts(before / name)[0] == _parts(ROOT / name)[0] for name in there):
        return dict.fromkeys(there, True)  # kernels as they were are not compiled
    old, new = map(_triton_at, (before, ROOT))
    found = {}
    for name in there:
        module = ".".join(Path(name).with_suffix("").parts[1:])
        homes = {home for home, *_ in new if home == name or module in (ROOT / home).read_text(encoding="utf-8")}
        builds = [[build for build in launches if build[0] in homes] for launches in (old, new)]
        if homes:
            found[name] = builds[0] == builds[1]
    return found


def _triton_at(root: Path) -> list[list[str]]:
    """[file, kernel, instructions] of each Triton launch."""
    return _printed(root, ["-c", TRITON], root)


def _printed(root: Path, command: list[str], folder: Path) -> Any:
    """The JSON that Python prints, with `saccade` of a checkout and the tools of this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{ROOT}", "EVERY_CASE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SaccadeError(f"{root} does not make its launches: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# files of a folder -> the backends that run its launchers
_LAUNCHED_BY = {
    "src/saccade/exact/short/": ("short",),
    "src/saccade/exact/long/": ("long", "ragged"),
    "src/saccade/exact/ragged/": ("ragged",),
    "src/saccade/exact/shared_bias/": ("shared_bias",),
}


def same_launches(changed: Iterable[str], before: Path, commit: str) -> dict[str, bool]:
    """Changed files that shape launches -> whether the backends launch the same for each problem that was measured at a commit."""
    backends = {name: of for name in changed for folder, of in _LAUNCHED_BY.items() if name.startswith(folder)}
    found = {}
    for backend in {x for of in backends.values() for x in of}:
        new = _launches(ROOT, backend, commit)["launches"]
        if new:  # something was measured there
            found[backend] = new == _launches(before, backend, commit)["launches"]
    return {name: all(found.get(x, True) for x in of) for name, of in backends.items() if found.keys() & of}


@cache
def _launches(root: Path, backend: str, commit: str) -> dict[str, dict[str, Any]]:
    """The launches of a checkout for problems that were measured at a commit, and the lines that run for them."""
    return dict(_printed(root, ["-m", "tools.launches", backend, commit], ROOT))


def launched_otherwise(name: str, before: Path, commit: str) -> list[str]:
    """The measured problems whose launches differ; none if all do."""
    backends = next(of for folder, of in _LAUNCHED_BY.items() if name.startswith(folder))
    found, measured = set[str](), set[str]()
    for backend in backends:
        now, old = (_launches(root, backend, commit)["launches"] for root in (ROOT, before))
        measured |= {*now}
        found |= {problem for problem in {*now, *old} if now.get(problem) != old.get(problem)}
    plain = {problem.removesuffix(" captured") for problem in found}
    return sorted(plain) if plain < {problem.removesuffix(" captured") for problem in measured} else []


def runs_the_same(name: str, before: Path, commit: str) -> bool:
    """Whether measured problems run the lines of a file that they ran before. Statements that run at import must be as they were."""
    if _outline(before / name) != _outline(ROOT / name):
        return False
    backends = next(of for folder, of in _LAUNCHED_BY.items() if name.startswith(folder))
    now, old = ([_launches(root, x, commit)["lines"].get(name) for x in backends] for root in (ROOT, before))
    return now == old


def _outline(path: Path) -> list[str]:
    """The statements at the top of a file; of functions what is around their bodies."""
    statements = Code().visit(ast.parse(path.read_text(encoding="utf-8"))).body
    for statement in statements:
        if isinstance(statement, ast.FunctionDef):
            statement.body = [ast.Pass()]
    return [*map(ast.dump, statements)]


def run_by(name: str, commit: str) -> list[str]:
    """The problems, of those that were measured at a commit, that run a kernel of a file. Launches name Triton kernels, and the files of CUDA sources."""
    kernels = {Path(name).name}
    if name.endswith(".py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        kernels = {x.name for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)}
    backends = next(of for folder, of in _LAUNCHED_BY.items() if name.startswith(folder))
    made = (_launches(ROOT, x, commit)["launches"] for x in backends)
    found = (problem for of in made for problem, launched in of.items() if any(x[0] in kernels for x in launched))
    return list(dict.fromkeys(problem.removesuffix(" captured") for problem in found))


def _parts(path: Path) -> tuple[list[str], list[str]]:
    """The statements of a file: kernels and their helpers, and the host's, without docstrings and imports."""
    parts: tuple[list[str], list[str]] = [], []
    for statement in Code().visit(ast.parse(path.read_text(encoding="utf-8"))).body:
        is_host = not any("jit" in ast.unparse(x) for x in getattr(statement, "decorator_list", []))
        parts[is_host].append(ast.dump(statement))
    return parts


def compared(texts: dict[str, str], before: Path, commit: str) -> dict[str, tuple[bool, str]]:
    """Changed files -> (whether they are the same, and for what: the launches at the commit, or, with "", everywhere)."""
    cuda = [name for name in texts if name.endswith((".cu", ".cuh"))]
    triton = [name for name, text in texts.items() if name.endswith(".py") and "@triton.jit" in text]
    found = (same_cuda(cuda, before) if cuda else {}) | (same_triton(triton, before) if triton else {})
    shaped = [name for name in triton if found.get(name) and _parts(before / name)[1] != _parts(ROOT / name)[1]]
    other = [name for name, same in found.items() if not same]
    hosts = [*shaped, *other, *(name for name in texts if Path(name).name in SHAPES and name not in triton)]
    launched = same_launches(hosts, before, commit)
    everywhere = {name: (same and name not in shaped, "") for name, same in found.items()}
    everywhere |= {name: (same, commit) for name, same in launched.items() if name not in other}
    shaping = [name for name, same in launched.items() if not same and name.endswith(".py") and name not in triton]
    everywhere |= {
        name: (True, _quoted(commit, LAUNCHES + "; ".join(of)))
        for name in shaping
        if (of := launched_otherwise(name, before, commit))
    }
    # kernels that changed are of no account for problems that do not run them; a header is in no launch
    kernels = [name for name in other if launched.get(name) and not name.endswith(".cuh") and _is_host_alike(name, before)]
    everywhere |= {name: (True, _quoted(commit, "; ".join(run_by(name, commit)) or "none")) for name in kernels}
    unrun = [name for name, same in launched.items() if same and name not in triton and runs_the_same(name, before, commit)]
    return everywhere | {name: (True, _quoted(commit, "none")) for name in unrun if name.endswith(".py")}


def _is_host_alike(name: str, before: Path) -> bool:
    """Whether nothing but the kernels of a file differs."""
    return not name.endswith(".py") or _parts(before / name)[1] == _parts(ROOT / name)[1]


def _quoted(*fields: str) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def unused(
    texts: Mapping[str, str], codes: Mapping[str, tuple[str, str]], found: Mapping[str, tuple[bool, str]]
) -> dict[str, str]:
    """The new files of folders in which nothing else changed what is launched: no measured launch needs them.

    texts: of changed files. codes: those of files that were there, before and now. found: what was compared of these.
    """
    differing = {str(Path(name).parent) for name, (same, _) in found.items() if not same}
    new = {name: text for name, text in texts.items() if name not in codes and name.endswith((".cu", ".cuh", ".py"))}
    return {name: text for name, text in new.items() if not any(_kin(str(Path(name).parent), x) for x in differing)}


def _absent_at(name: str, commit: str) -> str:
    """The commit at which a file was not there, and the problems that run it now if `tools.launches` knows them."""
    if not name.endswith(".cu") or not name.startswith(tuple(_LAUNCHED_BY)):
        return commit
    return _quoted(commit, "; ".join(run_by(name, commit)) or "none")


def _kin(one: str, other: str) -> bool:
    """Whether one folder lies in the other, or is it."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def main(
    commit: Annotated[str, typer.Argument(help="What to compare with, as the rows of tables name it.")],
    paths: Annotated[list[str], typer.Argument(help="Where changed files lie.")] = ["src"],  # noqa: B006
) -> None:
    """Compare changed kernels and launches with a commit, and write down which are the same; exit code 1 if some are not."""
    listed = subprocess.run(
        ["git", "diff", "--name-only", commit, "--", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in listed.stdout.split() if (ROOT / name).is_file()}
    with checkout_of(commit) as before:
        codes = {
            name: (code_of((before / name).read_text(encoding="utf-8"), name), code_of(text, name))
            for name, text in texts.items()
            if name.endswith((".cu", ".cuh", ".py")) and (before / name).is_file()
        }
        # of a header that was split off, as of one that changed, the builds that reach it say whether they are the same
        codes |= {
            name: (ABSENT, code_of(text, name)) for name, text in texts.items() if name.endswith(".cuh") and name not in codes
        }
        changed = {name: texts[name] for name, (old, new) in codes.items() if old not in equal_codes(name, new, commit)}
        found = compared(changed, before, commit)
    known = SAME_CODE.read_text(encoding="utf-8")
    lines = [f"{name},{','.join(codes[name])},{measured}\n" for name, (same, measured) in found.items() if same]
    lines += [
        f"{name},{ABSENT},{code_of(text, name)},{_absent_at(name, commit)}\n"
        for name, text in unused(texts, codes, found).items()
    ]
    SAME_CODE.write_text(known + "".join(line for line in lines if line not in known), encoding="utf-8")
    for name, (same, _) in found.items():
        print(f"{name}: {'the same' if same else 'other instructions or launches'}")
    raise typer.Exit(not all(same for same, _ in found.values()))


if __name__ == "__main__":
    typer.run(main)
