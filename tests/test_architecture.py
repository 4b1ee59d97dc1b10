"""The arrows of the house, checked by reading the imports, and the budgets of its files."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import saccade.functional

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "saccade"
FILES = sorted(p.relative_to(SRC) for p in SRC.rglob("*.py"))
FAMILIES = sorted(p.name for p in (SRC / "kernels").iterdir() if p.is_dir() and (p / "__init__.py").exists())
DEVICE_PACKAGES = ("triton", "cuda")
OPTIONAL = ("triton", "cuda", "typer", "rich", "platformdirs", "transformers", "matplotlib", "pytest", "hypothesis")


def parsed(path: Path) -> ast.Module:
    return ast.parse((SRC / path).read_text())


def module_of(path: Path) -> str:
    parts = ("saccade", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, top_level: bool = False) -> set[str]:
    """Names of the modules a file imports; only those that run at import, with `top_level`."""
    found: set[str] = set()
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        pending += ast.iter_child_nodes(node)
    return found


def reaches(names: set[str], *prefixes: str) -> set[str]:
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in prefixes)}


def under(*rooms: str) -> list[Path]:
    return [f for f in FILES if f.as_posix().startswith(rooms)]


def test_there_is_something_to_check():
    assert {"short", "sdpa"} <= set(FAMILIES)
    assert len(FILES) > 20
    assert reaches(imports(Path("functional.py")), "saccade.dispatch") == {"saccade.dispatch.choose", "saccade.dispatch.explain"}
    # a lazy import is seen, and told from one at import time
    path = Path("kernels/short/backend.py")
    assert reaches(imports(path), "saccade.kernels.short.launchers")
    assert not reaches(imports(path, top_level=True), "saccade.kernels.short.launchers")


# who (paths under src/saccade) -> may not import
FORBIDDEN = {
    "kernels/": (
        "saccade.reference",
        "saccade.functional",
        "saccade.autograd",
        "saccade.dispatch",
        "saccade.backends",
        "saccade.testing",
    ),
    "reference/": (
        "saccade.functional",
        "saccade.autograd",
        "saccade.ops",
        "saccade.dispatch",
        "saccade.backends",
        "saccade.testing",
    ),
    "problem.py": ("saccade.kernels", "saccade.reference", "saccade.dispatch", "saccade.functional"),
    "dispatch.py": ("saccade.backends", "saccade.reference", "saccade.ops", "saccade.autograd"),
    "nn.py": ("saccade.kernels", "saccade.ops", "saccade.autograd", "saccade.reference"),
    "integrations/": ("saccade.kernels", "saccade.ops", "saccade.autograd", "saccade.reference"),
    "cli/": ("saccade.ops", "saccade.autograd"),
}


@pytest.mark.parametrize("room", FORBIDDEN)
def test_forbidden_arrows(room):
    for path in under(room):
        assert not reaches(imports(path), *FORBIDDEN[room]), path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_imports_no_other(family):
    others = tuple(f"saccade.kernels.{f}" for f in FAMILIES if f not in (family, "shared"))
    for path in under(f"kernels/{family}/"):
        assert not reaches(imports(path), *others), path


def test_functional_knows_kernels_by_their_contract_only():
    reached = reaches(imports(Path("functional.py")), "saccade.kernels")
    assert reached == reaches(reached, "saccade.kernels.contract")


def test_the_contract_imports_no_family():
    assert not reaches(imports(Path("kernels/contract.py")), *(f"saccade.kernels.{f}" for f in FAMILIES))


def test_nvrtc_knows_nothing_of_attention():
    for path in under("nvrtc/"):
        reached = reaches(imports(path), "saccade")
        # the version is part of a cache key, asked for when one is made
        allowed = ("saccade.env", "saccade.errors", "saccade.nvrtc", "saccade.__version__")
        assert reached == reaches(reached, *allowed), path
        assert "saccade.__version__" not in imports(path, top_level=True), path


def test_nvrtc_loads_no_compiler_at_import():
    modules = {module_of(p): p for p in FILES}
    loaded = loaded_by("saccade.nvrtc")
    assert {"saccade.nvrtc.kernel", "saccade.nvrtc.compiler", "saccade.nvrtc.toolchain"} <= loaded
    for name in loaded:
        assert not reaches(imports(modules[name], top_level=True), *OPTIONAL), name


def test_cuda_sources_include_no_torch():
    for path in [*SRC.rglob("*.cu"), *SRC.rglob("*.cuh")]:
        assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


def test_device_packages_are_imported_by_kernels_alone():
    for path in FILES:
        names = reaches(imports(path), *DEVICE_PACKAGES)
        if names and not path.as_posix().startswith(("kernels/", "nvrtc/")):
            # the compiler for tests, and what reports versions, may import it inside a function
            assert path.as_posix().startswith(("testing/", "cli/")), (path, names)
            assert not reaches(imports(path, top_level=True), *DEVICE_PACKAGES), path


def loaded_by(entry: str) -> set[str]:
    """Files of the library that importing `entry` runs, found by following imports at module level."""
    modules = {module_of(p): p for p in FILES}
    pending, seen = [entry], set()
    while pending:
        name = pending.pop()
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if not name or name in seen:
            continue
        seen.add(name)
        pending += [*reaches(imports(modules[name], top_level=True), "saccade"), name.rpartition(".")[0]]
    return seen


def test_what_import_saccade_runs_needs_torch_alone():
    modules = {module_of(p): p for p in FILES}
    loaded = loaded_by("saccade") | loaded_by("saccade.testing")
    assert {"saccade.functional", "saccade.kernels.short.backend", "saccade.reference.dense"} <= loaded
    for name in loaded:
        assert not reaches(imports(modules[name], top_level=True), *OPTIONAL), name


def test_the_environment_is_read_in_one_place():
    for path in FILES:
        used = [
            node for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            and isinstance(node.value, ast.Name) and node.value.id == "os"
        ]  # fmt: skip
        assert not used or path.as_posix() == "env.py" or sets_only(path), path


def sets_only(path: Path) -> bool:
    """The command line may set a variable for what it starts; nothing but env.py may read one."""
    source = (SRC / path).read_text()
    return path.parts[0] == "cli" and not re.search(r"os\.getenv|os\.environ\.get|= os\.environ\[", source)


def test_every_variable_is_documented():
    source = (SRC / "env.py").read_text()
    read = set(re.findall(r'os\.environ\.get\("(\w+)"', source))
    assert read
    assert read <= set(re.findall(r"\| `(\w+)` \|", ast.get_docstring(ast.parse(source))))


def test_public_functions_take_no_catch_all():
    functions = [f for n, f in inspect.getmembers(saccade.functional, inspect.isfunction) if not n.startswith("_")]
    public = [f for f in functions if f.__module__ == saccade.functional.__name__]
    assert public
    for function in public:
        assert inspect.getfullargspec(function).varkw is None, function


def is_device_code(path: Path) -> bool:
    text = (SRC / path).read_text()
    return "@triton.jit" in text


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_small(path):
    lines = len((SRC / path).read_text().splitlines())
    assert lines <= (700 if is_device_code(path) else 400), f"{path} has {lines} lines"


def test_no_assert_on_what_users_give():
    for name in ("functional.py", "problem.py", "dispatch.py"):
        assert not [n for n in ast.walk(parsed(Path(name))) if isinstance(n, ast.Assert)], name


# the compiler of another project fails in as many ways as it has parts; what it raises is raised again, under a name of ours
FOREIGN_COMPILERS = {Path("kernels/launch.py")}


def test_no_blanket_except():
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                if path in FOREIGN_COMPILERS and caught == "Exception":
                    assert isinstance(node.body[-1], ast.Raise), path
                    continue
                assert caught not in ("everything", "Exception", "BaseException"), path


def test_every_module_and_public_function_has_a_docstring():
    for path in FILES:
        tree = parsed(path)
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                if path.parts[0] != "cli":
                    assert ast.get_docstring(node), f"{path}: {node.name}"


PAGES = [p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SRC.rglob("*.md")) if p.name != "CHANGELOG.md"]
A_PATH = re.compile(
    r"`((?:src|tests|benchmarks|docs|examples|kernels|reference|testing)/[\w./-]+)`|\]\(((?!http|#|mailto)[^)#\s]+)"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_mention_paths_that_exist(page):
    for match in A_PATH.finditer(page.read_text()):
        mentioned = match[1] or match[2]
        places = (ROOT / mentioned, SRC / mentioned, page.parent / mentioned)
        assert any(p.exists() for p in places), f"{page.name} mentions {mentioned}"


def test_tests_mirror_the_source():
    """Each family has its test module, each reference too, and contracts are inherited by every backend."""
    tests = ROOT / "tests"
    for family in FAMILIES:
        if family != "shared":
            assert (tests / "kernels" / f"test_{family}.py").exists(), family
    sources = "\n".join(p.read_text() for p in tests.rglob("test_*.py"))
    from saccade.backends import OPERATIONS

    for backends in OPERATIONS.values():
        for backend in backends:
            assert f'backend = "{backend.name}"' in sources, backend.name
