"""Every extra can be installed together with the newest torch of the package index on Linux: pip resolves this and downloads only
metadata. And what is published installs: the source distribution, and the wheel that is built from it, in an environment of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/saccade-attention/saccade"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"": [], **PROJECT["optional-dependencies"]}
IN_DEMO = {"", "hf", "bench"}  # resolved with it; each resolution takes pip ten seconds
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "python_version": "3.12", "extra": ""}
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "any")


def resolve(folder: Path, *words: str) -> list[dict]:
    """The packages that pip would install for these requirements, Python 3.12 on Linux: the metadata of each. RuntimeError with pip's
    reasons."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    # for a wheel without separate metadata only the end is read
    command += ["--use-feature=fast-deps"]
    command += ["--python-version", "3.12", "--only-binary=:all:", "--target", str(folder / "none")]
    command += [word for name in _PLATFORMS for word in ("--platform", name)]
    try:
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index takes longer than three minutes")
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [entry["metadata"] for entry in json.loads(report.read_text())["install"]]


def newest_torch(folder: Path) -> dict:
    try:
        return resolve(folder, "--no-deps", "torch")[0]
    except RuntimeError as error:
        pytest.skip(f"no package index has torch for Linux: {str(error).strip()[-200:]}")


def of_torch(metadata: dict) -> list[str]:
    """torch's requirements on packages that we require too. Its other libraries, which are gigabytes, do not matter, and a mirror
    may lack them."""
    found = []
    for line in metadata["requires_dist"]:
        wanted = Requirement(line)
        if (wanted.marker is None or wanted.marker.evaluate(LINUX)) and wanted.name.startswith(("cuda-", "triton", "numpy")):
            parts = "[nvrtc]" if "nvrtc" in wanted.extras else ""
            found.append(f"{wanted.name}{parts}{wanted.specifier}")
    return found


def of_saccade(extra: str) -> list[str]:
    """The requirements of an extra, extras of extras too."""
    lines, pending = list(PROJECT["dependencies"]), list(EXTRAS[extra])
    while pending:
        wanted = Requirement(pending.pop())
        if wanted.name == PROJECT["name"]:
            pending += [line for part in wanted.extras for line in EXTRAS[part]]
        else:
            lines.append(str(wanted))
    wanted_here = [Requirement(line) for line in lines]
    return [f"{w.name}{w.specifier}" for w in wanted_here if w.marker is None or w.marker.evaluate(LINUX)]


@pytest.fixture(scope="session")
def torch_alone(tmp_path_factory) -> list[str]:
    """Words for pip: a wheel of the newest torch's name, version and requirements that matter here, in place of the real one."""
    folder = tmp_path_factory.mktemp("torch")
    real = newest_torch(folder)
    requires = of_torch(real)
    assert any(line.startswith("cuda-bindings") for line in requires)
    version = f"{real['version']}+alone"
    metadata = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{metadata}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return ["--find-links", str(folder), f"torch=={version}"]


def test_the_demo_wants_what_other_extras_want():
    assert any(line.startswith("saccade-attention[hf,bench]") for line in EXTRAS["demo"])
    assert set(EXTRAS) > IN_DEMO


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra not in IN_DEMO])
def test_an_extra_resolves_beside_the_newest_torch(extra, torch_alone, tmp_path):
    found = resolve(tmp_path, *torch_alone, *of_saccade(extra))
    names = {entry["name"] for entry in found}
    # no extra is needed for any kernel: the compiler is installed with torch, cuda-core with us
    assert {"cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"} <= names
    assert extra != "cu12" or "nvidia-cuda-nvrtc-cu12" in names


@pytest.mark.slow
def test_what_no_resolver_can_join_fails(torch_alone, tmp_path):
    """The test above can fail: bindings that torch excludes."""
    with pytest.raises(RuntimeError, match="cuda-bindings"):
        resolve(tmp_path, *torch_alone, "cuda-bindings==12.*")


def run(*words: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a command that must succeed; path: a folder of modules for its Python."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution of this tree, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("published")
    backend = folder / "backend"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(backend), "hatchling"]
    if subprocess.run(install, capture_output=True, check=False, timeout=180).returncode:
        pytest.skip("no package index has hatchling, which builds")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT, path=backend)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    tree = folder / source.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=tree, path=backend)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


@pytest.fixture
def hook(monkeypatch):
    """hatch_build.py, without hatchling, which is installed where something is built."""
    for module, name in (("builders.hooks", "BuildHookInterface"), ("metadata", "MetadataHookInterface")):
        monkeypatch.setitem(sys.modules, f"hatchling.{module}.plugin.interface", SimpleNamespace(**{name: object}))
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_only_tables_that_git_knows_go_into_a_wheel(hook, tmp_path):
    folder = tmp_path / "benchmarks"
    (folder / "tables").mkdir(parents=True)
    for name in ("run.py", "tables/ours.py", "results.txt", "zz_local.py", "tables/mine.py", "plot_all.py"):
        (folder / name).write_text("")
    (folder / "run.py").write_text("import os\n\ndef main():\n    from zz_local import draw\n")  # plot_all.py is imported by none
    names = lambda: [p.relative_to(folder).as_posix() for p in hook.tables(folder)]  # noqa: E731
    assert names() == ["run.py", "tables/mine.py", "tables/ours.py", "zz_local.py"]  # a source distribution, without .git
    git = ["git", "-C", str(tmp_path), "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "benchmarks/run.py", "benchmarks/tables/ours.py", "benchmarks/results.txt"], check=True)
    assert names() == ["run.py", "tables/ours.py"]
    (tmp_path / ".git" / "HEAD").write_text("damaged")
    with pytest.warns(
        UserWarning, match=r"git does not say which files of .*benchmarks belong to the checkout, so all .*: fatal"
    ):
        assert "zz_local.py" in names()


def test_a_file_under_src_that_git_does_not_know_is_left_out(hook, tmp_path):
    build, target = hook.Tables(), {"exclude": ["*.tmp"]}
    build.root, build.build_config = str(tmp_path), SimpleNamespace(target_config=target)
    package = tmp_path / "src" / "saccade"
    package.mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    for name in ("ours.py", "mine.py", "ignored.log"):
        (package / name).write_text("")
    (tmp_path / "benchmarks" / "run.py").write_text("")
    build.initialize("standard", {"force_include": {}})  # a source distribution, without .git
    assert target["exclude"] == ["*.tmp"]
    git = ["git", "-C", str(tmp_path), "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / ".gitignore").write_text("*.log")
    subprocess.run([*git, "add", "src/saccade/ours.py"], check=True)
    build.initialize("standard", {"force_include": {}})
    assert target["exclude"] == ["*.tmp", "/src/saccade/mine.py"]


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_what_an_index_shows(published, hook):
    source, wheel = published
    package, tables = ROOT / "src", ROOT / "benchmarks"
    ours = {
        p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file() and p.suffix not in (".pyc", ".so", ".o")
    }
    ours |= {f"saccade/benchmarks/{p.relative_to(tables).as_posix()}" for p in hook.tables(tables)}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (place,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(place).decode()
    # kernels in CUDA C++ are data files, which a build forgets in silence
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert any(name.endswith(".cu") for name in names)
    assert re.search("^Name: saccade-attention$", metadata, re.MULTILINE)
    assert "Project-URL: Source, https://github.com/" in metadata
    addresses = REPOSITORY + "/blob/main/", "https://raw.githubusercontent.com/saccade-attention/saccade/main/"
    readme = hook.with_addresses((ROOT / "README.md").read_text(encoding="utf-8"), *addresses)
    assert readme.strip() in metadata
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith("https://")]
    assert not [link for link in re.findall(r'(?:src|srcset)="([^"]+)"', readme) if not link.startswith("https://raw.")]
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "tests/conftest.py", "benchmarks/run.py"}


@pytest.mark.slow
def test_the_wheel_runs_in_an_environment_of_its_own(published, tmp_path):
    _, wheel = published
    home = tmp_path / "clean"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel), cwd=tmp_path)
    # torch and the rest are those of this process: as a path only, so that no editable saccade comes with them
    (modules,) = home.glob("lib/python*/site-packages")
    (modules / "others.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")

    place = run(python, "-c", "import saccade; print(saccade.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(home)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/saccade/__init__.py").read_text(encoding="utf-8"))[1]
    command = home / "bin" / "saccade"
    assert run(command, "--version", cwd=tmp_path).strip() == version
    report = json.loads(run(command, "info", "--json", cwd=tmp_path))
    assert report["versions"]["saccade"] == version
    call = "import saccade, torch; print(saccade.attention(*torch.ones(3, 1, 2, 5, 8)).sum().item())"
    assert run(python, "-c", call, cwd=tmp_path).strip() == "80.0"
    # the tables are there, and write into the folder where they are called
    assert "short_full" in run(command, "bench", cwd=tmp_path)
    runner = next(home.glob("lib/python*/site-packages/saccade/benchmarks/run.py"))
    said = run(python, runner, "--help", cwd=tmp_path)
    assert f"{tmp_path}/results/<gpu>" in "".join(said.split())
    machine = f"import sys; sys.path.insert(0, {str(runner.parent)!r}); import machine; print(machine.machine()['commit'])"
    assert run(python, "-c", machine, cwd=ROOT).strip() == f"v{version}"
