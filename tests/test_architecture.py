"""The permitted dependencies between packages, checked by reading the imports, and the size limits of files."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from contracts.dynamic_mask import DynamicMaskContract
from contracts.exact import AttentionContract
from contracts.nm_sparse import NMSparseContract
from contracts.opt_outs import OPT_OUTS
from contracts.varlen import VarlenContract

import saccade.exact.api

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "saccade"
FILES = sorted(p.relative_to(SRC) for p in SRC.rglob("*.py"))
DEVICE_FILES = sorted(p.relative_to(SRC) for p in SRC.rglob("*.cu*") if p.suffix in (".cu", ".cuh"))
WINGS = ("exact", "dynamic_mask", "nm_sparse")
# families of kernels, and other parts of a wing that only it uses
FAMILIES = {
    "exact": ("short", "volta", "ragged", "long", "shared_bias", "sdpa"),
    "dynamic_mask": ("gather", "decode", "scores"),
    "nm_sparse": ("masked", "fused", "staged"),
}
# family -> modules of another that it may import: packed sequences beyond a tile run on the kernels of `long`, which knows nothing of `ragged`; backward
# of `long` leaves the gradient of a bias, and the numbers of its rows, to the kernels of `shared_bias`
LIBRARIES = {"ragged": ("long.choice", "long.config", "long.sm90"), "long": ("shared_bias.launchers",)}
DEVICE_PACKAGES = ("triton", "cuda")
CONTRACTS = (AttentionContract, VarlenContract, DynamicMaskContract, NMSparseContract)
OPTIONAL = ("triton", "cuda", "typer", "rich", "platformdirs", "transformers", "timm", "matplotlib", "pytest", "hypothesis")


def parsed(path: Path) -> ast.Module:
    return ast.parse((SRC / path).read_text())


def module_of(path: Path) -> str:
    parts = ("saccade", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, top_level: bool = False) -> set[str]:
    """The names of the modules that a file imports; with `top_level` only the imports that run when it is imported."""
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
    assert len(FILES) > 100
    for wing, families in FAMILIES.items():
        for family in families:
            assert under(f"{wing}/{family}"), family
    # lazy imports are found, and distinguished from those at import time
    path = Path("exact/short/backend.py")
    assert reaches(imports(path), "saccade.exact.short.launchers")
    assert not reaches(imports(path, top_level=True), "saccade.exact.short.launchers")


BASE = ("saccade.errors", "saccade.env", "saccade.folders", "saccade.hardware", "saccade.recorder")
# path under src/saccade -> everything of the library that it may import
ARROWS = {
    "launch/": (*BASE, "saccade.launch", "saccade.nvrtc"),
    "engine/": (*BASE, "saccade.engine", "saccade.launch", "saccade.native", "saccade.nvrtc"),
    "native/": (*BASE, "saccade.native"),
    "testing/": (*BASE, "saccade.testing", "saccade.engine"),
    # above the operations: it exchanges rows and calls the public functions, and knows no kernel. `problem` has the checks of
    # arguments, which must all be made before ranks begin an exchange, and `backends` the names that one of them may be; `offers` ranks and
    # copies keys beside the attention
    "distributed/": (
        *BASE,
        "saccade.distributed",
        "saccade.engine",
        "saccade.exact.api",
        "saccade.dynamic_mask.api",
        "saccade.dynamic_mask.backends",
        "saccade.dynamic_mask.offers",
        "saccade.dynamic_mask.problem",
    ),
    **{
        f"{wing}/": (
            *BASE,
            f"saccade.{wing}",
            "saccade.engine",
            "saccade.launch",
            "saccade.native",
            "saccade.nvrtc",
            "saccade.testing",
        )
        for wing in WINGS
    },
}


@pytest.mark.parametrize("room", ARROWS)
def test_arrows(room):
    for path in under(room):
        reached = reaches(imports(path), "saccade")
        assert reached == reaches(reached, *ARROWS[room]), (path, reached - reaches(reached, *ARROWS[room]))


@pytest.mark.parametrize("wing", WINGS)
def test_kernels_of_a_wing_need_no_tests_of_it(wing):
    for path in under(f"{wing}/"):
        if "testing" not in path.parts:
            assert not reaches(imports(path), "saccade.testing", f"saccade.{wing}.testing"), path


@pytest.mark.parametrize(("wing", "family"), [(wing, family) for wing in WINGS for family in FAMILIES[wing]])
def test_a_family_imports_neither_another_nor_what_calls_it(wing, family):
    others = [other for other in FAMILIES[wing] if other != family]
    above = ("api", "op", "ops", "op_replay", "recorded", "gradient", "prepared", "backends", "reference", "reference_launchers")
    forbidden = tuple(f"saccade.{wing}.{room}" for room in (*others, *above))
    library = tuple(f"saccade.{wing}.{module}" for module in LIBRARIES.get(family, ()))
    for path in under(f"{wing}/{family}"):
        # the decoding cache is a public object and looks for a backend like the public function
        if path != Path("dynamic_mask/decode/cache.py"):
            reached = imports(path)
            assert not reaches(reached - reaches(reached, *library), *forbidden), path


def test_users_of_operations_know_no_kernels():
    # these two have a public object of their own
    kernels = tuple(
        f"saccade.{wing}.{family}" for wing in WINGS for family in FAMILIES[wing] if family not in ("decode", "scores")
    )
    for room in ("nn/", "integrations/", "cli/", "distributed/"):
        for path in under(room):
            internal = tuple(
                f"saccade.{wing}.{part}"
                for wing in WINGS
                for part in ("op", "ops", "op_replay", "recorded", "gradient", "prepared", "reference_launchers")
            )
            assert not reaches(imports(path), *kernels, *internal), path


def test_no_circle_of_imports():
    modules = {module_of(p): p for p in FILES}

    def named(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, path in modules.items():
        if path.name == "__init__.py":
            # a package only collects the names of its modules, which import each other and not the package
            continue
        graph[module] = {named(n) for n in reaches(imports(path), "saccade")} - {module}
    done, trail = set(), []

    def visit(module: str) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module in done or module not in graph:
            return
        trail.append(module)
        for following in sorted(graph[module]):
            visit(following)
        trail.pop()
        done.add(module)

    for module in graph:
        visit(module)
    assert len(done) > 100


def test_no_module_carries_an_operation_as_a_suffix():
    for path in FILES:
        assert not re.search(r"_(attention|dynamic_mask|nm_sparse)$", path.stem), path


def test_nvrtc_knows_nothing_of_attention():
    for path in under("nvrtc/"):
        reached = reaches(imports(path), "saccade")
        # the version is part of a cache key, and is read when a key is made
        allowed = ("compiled", "env", "errors", "folders", "nvrtc", "recorder", "__version__")
        allowed = tuple(f"saccade.{name}" for name in allowed)
        assert reached == reaches(reached, *allowed), path
        assert "saccade.__version__" not in imports(path, top_level=True), path


def test_the_list_of_compiled_files_knows_folders_alone():
    (path,) = [path for path in FILES if module_of(path) == "saccade.compiled"]
    assert reaches(imports(path), "saccade") == reaches(imports(path), "saccade.env", "saccade.folders")
    assert not reaches(imports(path), "torch")


def test_nvrtc_loads_no_compiler_at_import():
    modules = {module_of(p): p for p in FILES}
    loaded = loaded_by("saccade.nvrtc")
    assert {"saccade.nvrtc.kernel", "saccade.nvrtc.compiler", "saccade.nvrtc.toolchain"} <= loaded
    for name in loaded:
        assert not reaches(imports(modules[name], top_level=True), *OPTIONAL), name


def test_cuda_sources_include_no_torch():
    for path in [*SRC.rglob("*.cu"), *SRC.rglob("*.cuh")]:
        assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


def test_device_packages_are_imported_by_wings_and_launchers_alone():
    for path in FILES:
        names = reaches(imports(path), *DEVICE_PACKAGES)
        if names and not path.as_posix().startswith(("launch/", "native/", "nvrtc/", *(f"{wing}/" for wing in WINGS))):
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
    assert {"saccade.exact.api", "saccade.exact.short.backend", "saccade.engine.dense"} <= loaded
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
    functions = [f for n, f in inspect.getmembers(saccade.exact.api, inspect.isfunction) if not n.startswith("_")]
    public = [f for f in functions if f.__module__ == saccade.exact.api.__name__]
    assert public
    for function in public:
        assert inspect.getfullargspec(function).varkw is None, function


def is_device_code(path: Path) -> bool:
    return path.suffix != ".py" or "@triton.jit" in (SRC / path).read_text()


@pytest.mark.parametrize("path", [*FILES, *DEVICE_FILES], ids=str)
def test_files_stay_small(path):
    lines = len((SRC / path).read_text().splitlines())
    assert lines <= (700 if is_device_code(path) else 400), f"{path} has {lines} lines"


def test_helpers_of_triton_kernels_group_their_arguments():
    found = {}
    for path in FILES:
        for f in parsed(path).body:
            if isinstance(f, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in f.decorator_list):
                found[path, f.name] = f
    called = {x.func.id for f in found.values() for x in ast.walk(f) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
    helpers = {where: len(f.args.args) for where, f in found.items() if where[1] in called}
    assert len(helpers) > 60
    assert {where: count for where, count in helpers.items() if count > 10} == {}


def test_files_of_the_tools_stay_small():
    for path in (ROOT / "tools").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


def test_the_package_imports_nothing_that_stays_in_a_checkout():
    for path in FILES:
        assert not reaches(imports(path), "tools", "tests", "benchmarks", "experiments", "contracts"), path


def test_no_assert_on_what_users_give():
    for name in ("engine/arguments.py", "engine/problem.py", "engine/dispatch.py", *(f"{wing}/problem.py" for wing in WINGS)):
        assert not [n for n in ast.walk(parsed(Path(name))) if isinstance(n, ast.Assert)], name


# each part of Triton's compiler has errors of its own, so all are caught and raised again as an error of ours
FOREIGN_COMPILERS = {Path("launch/triton.py")}


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
                overload = "overload" in map(ast.unparse, node.decorator_list)  # a signature of what follows
                if path.parts[0] != "cli" and not overload:
                    assert ast.get_docstring(node), f"{path}: {node.name}"


FOLDERS = (ROOT / "docs", ROOT / "tools", ROOT / "experiments", SRC)
PAGES = [p for p in (*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in folder.rglob("*.md"))) if p.name != "CHANGELOG.md"]
A_PATH = re.compile(
    r"`((?:src|tests|tools|benchmarks|experiments|docs|examples|kernels|reference|testing)/[\w./-]+)`|\]\(((?!http|#|mailto)[^)#\s]+)"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_mention_paths_that_exist(page):
    for match in A_PATH.finditer(page.read_text()):
        mentioned = match[1] or match[2]
        places = (ROOT / mentioned, SRC / mentioned, page.parent / mentioned)
        assert any(p.exists() for p in places), f"{page.name} mentions {mentioned}"


def test_backends_opt_out_of_their_contracts_in_one_place():
    """A class that inherits a contract sets `backend` and what is its own: neither another value of the contract, nor None for a test."""
    used = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            name = f"{path.relative_to(ROOT / 'tests').as_posix()}::{node.name}"
            decorators = [ast.unparse(d) for d in node.decorator_list if "opted_out" in ast.unparse(d)]
            assert decorators in ([], [f"opted_out({name!r})"]), name
            used |= {name} if decorators else set()
            if any("Contract" in ast.unparse(base) for base in node.bases):
                targets = {ast.unparse(t) for line in node.body if isinstance(line, ast.Assign) for t in line.targets}
                taken = {t for t in targets if t.startswith("test_") or any(t in vars(contract) for contract in CONTRACTS)}
                assert not taken, f"{name} sets {taken}; tests/contracts/opt_outs.py is the place for it"
    assert used == set(OPT_OUTS)


def test_tests_mirror_the_source():
    """Every wing and room below it has its folder of tests, every family its module, and contracts are inherited by every
    backend."""
    tests = ROOT / "tests"
    for room in (*WINGS, "engine", "launch", "nn", "nvrtc", "cli", "integrations", "testing", "distributed"):
        assert list((tests / room).glob("test_*.py")), room
    for wing, families in FAMILIES.items():
        for family in families:
            assert (tests / wing / f"test_{family}.py").exists(), family
    sources = "\n".join(p.read_text() for p in tests.rglob("test_*.py"))
    from saccade.operations import OPERATIONS

    for operation in OPERATIONS.values():
        for backend in operation.backends:
            assert f'backend = "{backend.name}"' in sources, backend.name
