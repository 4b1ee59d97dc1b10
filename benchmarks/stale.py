"""The committed results that are older than the kernels that they measure: `python benchmarks/run.py --stale`.

A row names the commit at which it was measured. Kernels, and the code that shapes their launches, are compared as code: comments, docstrings, blank
lines, imports, names that changed (`RENAMED`) and parameter lists of CUDA kernels in Python do not count: the kernel's source has its list. A file that was only moved has not changed, nor has one whose definitions
came from other files of its wing. Nor has one whose machine code is the same: `python -m tools.same_code` compares it and writes `same_code.csv`. For rows
that measure the device alone (`BY_LAUNCHES`), it also compares what the launchers launch for the problems of these rows. The host's part of a call is not
compared, except for whole encoders.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# file, code before and code now (`code_of`), of which the machine code is the same; or, with a commit, the launches for what was measured there. With
# `run_by` too, kernels alone differ, and none of them was run but by these problems
SAME_CODE = HERE / "same_code.csv"
LAUNCHES = "launches of "  # before the problems that launch otherwise; rows that measure the host are not told about
ABSENT = "absent"  # the code before of a file that was not there: no launch that was measured needs it
_SHORT, _LONG = "exact/short/*", "exact/long/*"
_PACKED = ("exact/ragged/*", _LONG)  # packed sequences beyond a tile run on the kernels of `long`
_NM = ("nm_sparse/fused/*", "nm_sparse/cuda/*", "nm_sparse/masked/*", "nm_sparse/backward_sm90/*", "nm_sparse/staged/*")
_DMA = ("dynamic_mask/gather/*", "dynamic_mask/selection/*")
SHAPES = (
    "bias_gradient.py", "call.py", "choice.py", "config.py", "key_mask.py", "launch.py", "launchers.py", "launches.py", "mask_bits.py", "plans_triton.py", "sm80.py",
    "sm90.py", "token_launches.py", "tokens_sm90.py",
)  # fmt: skip
_WHOLE = ("exact/cpu.py", "encoders/*", "distributed/*")  # no kernels: every file counts
# file -> the kind of rows of whole encoders, or of N:M attention, that alone run it
_STRINGS, _IMAGES, _TRAINING = "from strings", " images", "training"
_BIAS = " bias"  # of rows of N:M attention
_ONLY = {
    "src/saccade/nm_sparse/cuda/shown_values.cu": _BIAS,
    **{f"src/saccade/encoders/{name}.py": _STRINGS for name in ("pipeline", "prefix", "strings", "together", "tokens")},
    **{f"src/saccade/encoders/{name}.py": _IMAGES for name in ("images", "padded")},
    **{f"src/saccade/encoders/{name}.py": _TRAINING for name in ("captured", "training")},
}
# table, by the longest beginning that fits -> the code whose speed or accuracy it measures, below src/saccade
MEASURED: dict[str, tuple[str, ...]] = {
    "short": (_SHORT,),
    "short_auto": (_SHORT, _LONG),
    "short_long": (_SHORT, _LONG),
    "short_sizes": (_SHORT, _LONG),
    "short_ragged": _PACKED,
    "windows": _PACKED,
    "shared_bias": ("exact/shared_bias/*", _LONG),
    "pooled_depth": (_SHORT,),
    "models": (_SHORT, *_PACKED),
    "encoders": (*_PACKED, "encoders/*"),
    "encoder_profile": (*_PACKED, "encoders/*"),
    "auto_cpu": ("exact/cpu.py",),
    "short_tune": (),  # candidates of one kernel
    "dynamic_mask": _DMA,
    "dynamic_mask_cpu": ("dynamic_mask/gather/cpu/*",),
    "dynamic_mask_decode": ("dynamic_mask/decode/*",),
    "dynamic_mask_sampling": ("dynamic_mask/scores/*", *_DMA),
    "context_parallel": (*_DMA, "distributed/*"),
    "tensor_parallel": (*_DMA, "distributed/*"),
    "nm": _NM,
    "nm_finetune": (),  # trainings
    "nm_quality": (),
    "nm_figure12": (),  # errors of the method
    "nm_figure19": (),
    "volta": ("exact/volta/*",),
}
# tables whose problems `tools.launches` reads -> notes of the rows that measure the device alone, or None if all do; other rows measure the host too
BY_LAUNCHES: dict[str, tuple[str, ...] | None] = {
    "short_full": None, "short_long": None, "short_models": None, "short_pooling": None,
    "shared_bias": None, "short_sizes": ("kernel",), "short_ragged": ("captured",), "windows": ("captured",), "short_auto": (),
}  # fmt: skip
# names that changed and nothing with them: the first is compared as the second
RENAMED = {
    "choice.kind_of": "kind_of", "choice.named": "named", "_varlen": "of_dense", "set_aside": "disable", "in_base_2": "to_log2", "with_bias": "_with_bias", "with_bits": "_with_bits",
    **dict.fromkeys(("CudaLaunch", "RaggedCall", "AgreedCall"), "Call"),
    **dict.fromkeys(("QueryBlock", "KeyBlock"), "Work"),
    **{f"{kernel}Shared": "Shared" for kernel in (
        "Forward", "Backward", "Streamed", "Turns", "LongForward", "LongBackward", "Gather", "KeyGradient", "QueryGradient", "OnePass", "Fused",
    )},
}  # fmt: skip
_RENAMED_WORDS = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, RENAMED))})(?!\w)")

# names of parameter lists, and what took one before it was read from the source; `CudaLaunch` is compared as `Call`
_LISTS, _TAKE_LISTS = re.compile(r"(?:\w+_)?PARAMETERS|parameters"), ("Call", "load")


@dataclass(frozen=True)
class Verdict:
    """A CSV of results. commits: where its rows were measured, in their order. changed: files that differ since. stale: rows that are older than them."""

    path: Path
    rows: int
    commits: tuple[str, ...]
    changed: tuple[str, ...] = ()
    stale: int = 0
    unknown: str = ""  # why nothing can be said

    @property
    def is_stale(self) -> bool:
        return bool(self.changed)


def patterns_of(table: str) -> tuple[str, ...]:
    """The code that a table measures; empty if it measures none, as trainings do."""
    fitting = [start for start in MEASURED if table.startswith(start)]
    return MEASURED[max(fitting, key=len)] if fitting else ()


def verdicts(results: Path = HERE / "results") -> list[Verdict]:
    """One for each CSV of results that measures code."""
    return [
        verdict(path) for path in sorted(results.glob("*/*.csv")) if patterns_of(path.stem) and path.parent.name != "predictions"
    ]


def verdict(path: Path) -> Verdict:
    """The changes since the rows of a CSV were measured."""
    rows, changed, unknown = _judged(path)
    commits = tuple(dict.fromkeys(row.get("commit") or "" for row in rows))
    found = tuple(sorted(set().union(*changed.values())))
    return Verdict(path, len(rows), commits, found, len(_older(path, rows, changed)), unknown)


def older_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that are older than the code that they measure.

    Raises:
        ValueError: nothing can be said about them.
    """
    rows, changed, unknown = _judged(path)
    if unknown:
        raise ValueError(unknown)
    return _older(path, rows, changed)


# of rows: their commit, whether they measure launches alone, and the problem in tables whose problems are launched for comparison, or what they run
Kind = tuple[str, bool, str]


def _judged(path: Path) -> tuple[list[dict[str, str]], dict[Kind, set[str]], str]:
    """(rows, the files that changed since those of a kind, why nothing can be said)."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    commits = dict.fromkeys(row.get("commit") or "" for row in rows)
    if "" in commits:
        return rows, {}, "rows name no commit"
    missing = [x for x in commits if not _tree(x)]
    if missing:
        return rows, {}, f"this checkout has no commit {missing[0]}"
    # no GPU runs what lies in a folder `cpu`
    run = {name: blob for name, blob in _tree("HEAD").items() if path.parent.name == "cpu" or "/cpu/" not in name}
    now = {name: blob for name, blob in run.items() if is_measured(name, patterns_of(path.stem), blob)}
    kinds = {_kind(path, row) for row in rows}
    changed = {}
    for commit, by_launches, about in kinds:
        problem = about if path.stem in BY_LAUNCHES else ""
        changed[commit, by_launches, about] = {
            name
            for name, blob in now.items()
            if _ONLY.get(name, about) == about and not _is_in(name, blob, commit, by_launches, problem)
        }
    return rows, changed, ""


def _older(path: Path, rows: list[dict[str, str]], changed: dict[Kind, set[str]]) -> list[dict[str, str]]:
    return [row for row in rows if changed and changed[_kind(path, row)]]


def _kind(path: Path, row: Mapping[str, str]) -> Kind:
    problem = row.get("problem", "")
    if path.stem in ("encoders", "encoder_profile"):
        about = "" if row.get("direction") == "fwd" else _TRAINING
        problem = next((x for x in (_STRINGS, _IMAGES) if x in problem), about)
    elif path.stem.startswith("nm_"):
        problem = _BIAS if _BIAS in problem else ""
    elif path.stem not in BY_LAUNCHES:
        problem = ""
    return row["commit"], is_by_launches(path.stem, row), problem


def is_by_launches(table: str, row: Mapping[str, str]) -> bool:
    """Whether a row measures nothing but the launches that `tools.launches` knows, and not the host that makes them."""
    notes = BY_LAUNCHES.get(table, ())
    return notes is None or row.get("note") in notes


def is_measured(name: str, patterns: Iterable[str], blob: str) -> bool:
    """Whether a file of the repository is among what a table measures."""
    below = name.removeprefix("src/saccade/")
    if below == name or not any(fnmatch(below, x) for x in patterns):
        return False
    if name.endswith(".py"):
        is_whole = any(fnmatch(below, x) for x in _WHOLE)
        return is_whole or Path(name).name in SHAPES or "@triton.jit" in _git("cat-file", "blob", blob)
    return Path(name).suffix in (".cu", ".cuh", ".cpp", ".hpp")


def _is_in(name: str, blob: str, commit: str, by_launches: bool, problem: str) -> bool:
    """Whether a commit has the code of a file, there or under another folder, or each definition of it in files of the same wing."""
    if _has_not_changed(name, blob, commit):
        return True
    equal = equal_codes(name, _digest(_definitions(blob, Path(name).suffix)), commit if by_launches else "", (commit, problem))
    return bool(_older_codes(name, commit) & equal)


@cache
def _has_not_changed(name: str, blob: str, commit: str) -> bool:
    before = _tree(commit)
    if blob in before.values():
        return True
    return _definitions(blob, Path(name).suffix) <= _wing(commit, name) and not _redefines(name, blob, before.get(name))


@cache
def _older_codes(name: str, commit: str) -> set[str]:
    """The codes that files of this name had at a commit."""
    before = _tree(commit)
    same_name = {old for path, old in before.items() if path.startswith("src/") and Path(path).name == Path(name).name}
    return {_digest(_definitions(old, Path(name).suffix)) for old in same_name} | ({ABSENT} if name not in before else set())


def _redefines(name: str, blob: str, old: str | None) -> bool:
    """Whether a name of a Python file has another value than before: one that another file of the wing had then is no definition that moved."""
    if old is None or not name.endswith(".py"):
        return False
    then, now = (_named(_git("cat-file", "blob", x)) for x in (old, blob))
    return any(then[x] and found - then[x] for x, found in now.items() if x in then)


def _named(text: str) -> dict[str, frozenset[str]]:
    """Name -> digests of the statements at the top of a Python file that define it."""
    found: dict[str, frozenset[str]] = {}
    for statement in ast.parse(text).body:
        digests = definitions_of(ast.unparse(statement), ".py")
        for name in _names(statement):
            found[name] = found.get(name, frozenset()) | digests
    return found


def _names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [x.id for target in targets if target is not None for x in ast.walk(target) if isinstance(x, ast.Name)]


def code_of(text: str, name: str) -> str:
    """A digest of the code of a file."""
    return _digest(definitions_of(text, name))


def _digest(definitions: frozenset[str]) -> str:
    return hashlib.sha256("".join(sorted(definitions)).encode()).hexdigest()[:16]


def equal_codes(name: str, code: str, commit: str = "", row: tuple[str, str] = ("", "")) -> set[str]:
    """This code of a file, and its older ones that have the same machine code, by any number of steps. commit: or that have the same launches for what was
    measured there. row: or whose kernels this problem did not run, or launched the same, at this commit."""
    found = {code}
    for file, before, now, measured, run_by in reversed(_same_code()):
        holds = measured in ("", commit) and not run_by
        if run_by:
            holds = bool(row[1]) and measured == (commit if run_by.startswith(LAUNCHES) else row[0])
            holds = holds and row[1] not in run_by.removeprefix(LAUNCHES).split("; ")
        if Path(file).name == Path(name).name and now in found and holds:
            found.add(before)
    return found


@cache
def _same_code() -> list[tuple[str, str, str, str, str]]:
    with SAME_CODE.open(newline="") as file:
        rows = csv.DictReader(file)
        return [(row["file"], row["before"], row["now"], row["measured"], row.get("run_by") or "") for row in rows]


def _wing(commit: str, name: str) -> frozenset[str]:
    """The definitions of a commit in all files of a file's wing and kind."""
    wing, suffix = name.split("/")[:3], Path(name).suffix
    found = (blob for path, blob in _tree(commit).items() if path.split("/")[:3] == wing and Path(path).suffix == suffix)
    return frozenset().union(*(_definitions(blob, Path(name).suffix) for blob in found))


def _git(*asked: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *asked], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


@cache
def _tree(commit: str) -> dict[str, str]:
    """Path -> blob of a commit; empty if this checkout does not have it."""
    found = {}
    for line in _git("ls-tree", "-r", commit, "--", "src").splitlines():
        about, name = line.split("\t", 1)
        found[name] = about.split()[2]
    return found


@cache
def _definitions(blob: str, suffix: str) -> frozenset[str]:
    return definitions_of(_git("cat-file", "blob", blob), suffix)


def definitions_of(text: str, name: str) -> frozenset[str]:
    """Digests of the code in a file, without its comments and imports: of each statement at the top of a Python file, or of the whole."""
    text = _RENAMED_WORDS.sub(lambda found: RENAMED[found[0]], text)
    if name.endswith(".py"):
        try:
            codes = [ast.dump(x) for x in Code().visit(ast.parse(text)).body]
        except SyntaxError:
            codes = [text]
    else:
        plain = re.sub(r"//[^\n]*|/\*.*?\*/|#include[^\n]*", " ", text, flags=re.DOTALL)
        codes = [" ".join(plain.split())]
    return frozenset(hashlib.sha256(code.encode()).hexdigest() for code in codes)


class Code(ast.NodeTransformer):
    """Leaves docstrings, imports, blocks for type checkers and parameter lists out."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ast.get_docstring(node) is not None
            node.body = node.body[found:] or [ast.Pass()]
        return node

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if all(_is_list(target) for target in node.targets) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in _TAKE_LISTS:
            node.args = [x for x in node.args if not _is_list(x)]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def _is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and _LISTS.fullmatch(node.id) is not None


def report(found: list[Verdict]) -> None:
    """A line for each CSV."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Results against the code that they measure")
    for name in ("table", "rows", "stale rows", "measured at", "since then"):
        table.add_column(name, overflow="fold")
    for one in found:
        names = [Path(x).name for x in one.changed]
        said = one.unknown or (
            f"older than {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}" if names else "unchanged"
        )
        table.add_row(f"{one.path.parent.name}/{one.path.name}", str(one.rows), str(one.stale or ""), " ".join(one.commits), said)
    console = Console()
    console.print(table)
    console.print(f"{sum(x.is_stale for x in found)} of {len(found)} tables are older than the code that they measure.")
