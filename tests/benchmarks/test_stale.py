"""Results that are older than the code that they measure are found."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import stale

KERNEL = '''"""A kernel."""

import triton


@triton.jit
def kernel(x):
    return x  # what is given
'''


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """An empty repository; the function commits a file and returns the commit."""

    def git(*given):
        about = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *about, *given], check=True, capture_output=True, text=True
        ).stdout.strip()

    def write(name, text, remove=None):
        if remove is not None:
            (tmp_path / remove).unlink()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        git("add", "-A")
        git("commit", "-qm", "a change")
        stale._tree.cache_clear()
        stale._definitions.cache_clear()
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    yield write
    stale._tree.cache_clear()
    stale._definitions.cache_clear()


def table(tmp_path, commit, name="short_full", notes=("",)):
    path = tmp_path / "results" / "h100" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("table,note,commit\n" + "".join(f"{name},{note},{commit}\n" for note in notes))
    return stale.verdict(path)


def test_a_value_that_another_file_had_is_a_change(repository, tmp_path):
    config, other = "src/saccade/exact/short/config.py", "src/saccade/exact/short/sm90.py"
    repository(other, "ROWS = 128\n")
    commit = repository(config, "ROWS = 64\nCOLUMNS = 32\n")
    repository(config, "COLUMNS = 32\nROWS = 64  # of a tile\n")
    assert not table(tmp_path, commit).is_stale
    repository(config, "ROWS = 128\nCOLUMNS = 32\n")
    assert table(tmp_path, commit).changed == (config,)
    repository(config, "COLUMNS = 32\n")
    assert not table(tmp_path, commit).is_stale, "a definition that went is noticed where it was used"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda write: write("src/saccade/exact/short/forward.py", KERNEL.replace("return x ", "return 2 * x ")), True),
        (lambda write: write("src/saccade/exact/short/forward.py", KERNEL.replace("what is given", "the input")), False),
        (lambda write: write("src/saccade/exact/short/new/forward.py", KERNEL, "src/saccade/exact/short/forward.py"), False),
        (lambda write: write("src/saccade/exact/short/api.py", "x = 1\n"), False),
        (lambda write: write("src/saccade/nm_sparse/fused/forward.py", KERNEL.replace("x", "y")), False),
        (lambda write: write("src/saccade/exact/short/cuda/forward.cu", "int x;\n"), True),
    ],
    ids=["code", "comment", "moved", "host", "another-family", "cuda"],
)
def test_what_counts_as_a_change(repository, tmp_path, change, expected):
    commit = repository("src/saccade/exact/short/forward.py", KERNEL)
    assert not table(tmp_path, commit).is_stale
    change(repository)
    assert table(tmp_path, commit).is_stale is expected


def test_rows_that_say_nothing(repository, tmp_path):
    repository("src/saccade/exact/short/forward.py", KERNEL)
    assert table(tmp_path, "").unknown == "rows name no commit"
    assert table(tmp_path, "0000000").unknown == "this checkout has no commit 0000000"


def test_a_definition_that_moved_has_not_changed(repository, tmp_path):
    config = "from saccade import x\n\nSTAGES = 2\n\n\ndef shape(n):\n    return n + {}\n"
    commit = repository("src/saccade/exact/ragged/config.py", config.format(1))
    repository("src/saccade/exact/long/config.py", config.format(1).partition("\n\n\n")[2])
    repository("src/saccade/exact/ragged/config.py", "from saccade.exact.long.config import shape\n\nSTAGES = 2\n")
    assert not table(tmp_path, commit, "short_ragged").is_stale
    repository("src/saccade/exact/long/config.py", config.format(2).partition("\n\n\n")[2])
    assert table(tmp_path, commit, "short_ragged").changed == ("src/saccade/exact/long/config.py",)


@pytest.mark.parametrize("other", ["int x;\nint y;", '#include "moved.cuh"\nint x; int y;'], ids=["comments", "includes"])
def test_what_is_no_code_of_cuda(other):
    one = "int x; // one\n/* two\n lines */ int y;"
    assert stale.definitions_of(one, "a.cu") == stale.definitions_of(other, "a.cu")
    assert stale.definitions_of(one, "a.cu") != stale.definitions_of("int x; int z;", "a.cu")


def test_each_table_says_what_it_measures():
    tables = Path(stale.__file__).parent / "tables"
    names = [path.stem for path in tables.glob("*.py") if not path.stem.startswith("_")]
    assert [name for name in names if not stale.patterns_of(name)] == []
    source = tables.parents[1] / "src" / "saccade"
    for patterns in stale.MEASURED.values():
        for pattern in patterns:
            assert list(source.glob(pattern)), pattern


def test_a_name_that_changed_is_no_change(monkeypatch):
    monkeypatch.setattr(stale, "RENAMED", {"made": "replayed"})
    monkeypatch.setattr(stale, "_RENAMED_WORDS", re.compile(r"\bmade\b"))
    assert stale.definitions_of("x = made(1)", "a.py") == stale.definitions_of("x = replayed(1)", "a.py")
    assert stale.definitions_of("x = made(2)", "a.py") != stale.definitions_of("x = replayed(1)", "a.py")


def test_a_parameter_list_that_went_is_no_change():
    """Kernels have their lists in their sources, which are compared."""
    before = """
PARAMETERS = Parameters(pointer="x")
def launch(x, n):
    parameters = PARAMETERS if n else MORE_PARAMETERS
    kernel = load(SOURCE, "scale", parameters, options(n), x.device)
    return CudaLaunch(SOURCE, "scale", PARAMETERS, options(n), (n, 1))
"""
    after = """
def launch(x, n):
    kernel = load(SOURCE, "scale", options(n), x.device)
    return CudaLaunch(SOURCE, "scale", options(n), (n, 1))
"""
    assert stale.definitions_of(after, "a.py") <= stale.definitions_of(before, "a.py")
    for other in (after.replace("(n, 1)", "(n, 2)"), after.replace("options(n), x", "options(1), x")):
        assert not stale.definitions_of(other, "a.py") <= stale.definitions_of(before, "a.py")
    assert stale.definitions_of("f(PARAMETERS)", "a.py") != stale.definitions_of("f()", "a.py")


def test_the_same_machine_code_is_no_change(repository, tmp_path, monkeypatch):
    """In as many steps as lines say, back from the code of today."""
    name = "src/saccade/exact/short/cuda/forward.cu"
    texts = ["int x;\n", "int y;\n", "int z;\n"]
    codes = [stale.code_of(text, name) for text in texts]
    monkeypatch.setattr(stale, "SAME_CODE", tmp_path / "same_code.csv")
    lines = [f"{name},{before},{now},\n" for before, now in pairwise(codes)]
    first, _, _ = (repository(name, text) for text in texts)
    for known, is_stale in ((lines, False), (lines[:1], True), (lines[1:], True), ([], True)):
        know(known)
        assert table(tmp_path, first).is_stale is is_stale
    stale._same_code.cache_clear()


def know(lines):
    stale.SAME_CODE.write_text("".join(["file,before,now,measured,run_by\n", *lines]))
    stale._same_code.cache_clear()


def test_the_same_launches_count_for_the_commit_and_the_device_alone(repository, tmp_path, monkeypatch):
    """Rows that measure the host too stay stale."""
    name, texts = "src/saccade/exact/short/launch.py", ("def launch():\n    return 1\n", "def launch():\n    return 2\n")
    monkeypatch.setattr(stale, "SAME_CODE", tmp_path / "same_code.csv")
    commit, _ = (repository(name, text) for text in texts)
    line = ",".join([name, *(stale.code_of(text, name) for text in texts)])

    def found(name, notes=("",)):
        verdict = table(tmp_path, commit, name, notes)
        assert verdict.is_stale is bool(verdict.stale)
        return verdict.stale

    know([f"{line},{commit}\n"])
    assert found("short_full") == 0
    assert found("short_overhead") == 1  # it measures the host
    assert found("short_sizes", ("kernel", "", "kernel")) == 1
    know([f"{line},0000000\n"])  # of another commit
    assert found("short_full") == 1
    assert found("short_sizes", ("kernel", "", "kernel")) == 3
    stale._same_code.cache_clear()


def test_a_kernel_is_no_change_for_problems_that_do_not_run_it(repository, tmp_path, monkeypatch):
    """Whether rows measure the host or not, in tables whose problems are launched for comparison."""
    name, texts = "src/saccade/exact/short/cuda/turns.cu", ("int x;\n", "int y;\n")
    monkeypatch.setattr(stale, "SAME_CODE", tmp_path / "same_code.csv")
    commit, _ = (repository(name, text) for text in texts)
    line = ",".join([name, *(stale.code_of(text, name) for text in texts), commit])

    def older(table):
        path = tmp_path / f"{table}.csv"
        path.write_text(
            "problem,note,commit\n" + "".join(f"{problem},{note},{commit}\n" for problem in "abc" for note in ("", "kernel"))
        )
        return [row["problem"] for row in stale.older_rows(path)]

    know([f'{line},"b; d"\n'])
    assert older("short_full") == older("short_sizes") == ["b", "b"]
    assert older("short_overhead") == [*"aabbcc"]
    know([f"{line},none\n"])
    assert older("short_full") == []
    # launches say nothing of the host, which rows without a note measure in short_sizes
    know([f'{line},"launches of b; d"\n'])
    assert older("short_full") == ["b", "b"]
    assert older("short_sizes") == ["a", "b", "b", "c"]
    stale._same_code.cache_clear()


def test_a_file_that_is_not_needed_is_no_change_where_it_was_absent(repository, tmp_path, monkeypatch):
    """Rows that were measured with other code of the file stay stale."""
    name, texts = "src/saccade/exact/short/launch.py", ("def launch():\n    return 1\n", "def launch():\n    return 2\n")
    monkeypatch.setattr(stale, "SAME_CODE", tmp_path / "same_code.csv")
    without = repository("src/saccade/exact/short/forward.py", KERNEL)
    other, _ = (repository(name, text) for text in texts)
    know([f"{name},{stale.ABSENT},{stale.code_of(texts[1], name)},\n"])
    assert not table(tmp_path, without).is_stale
    assert table(tmp_path, other).changed == (name,)
    know([])
    assert table(tmp_path, without).changed == (name,)
    stale._same_code.cache_clear()


def test_stale_rows_are_those_of_the_older_commits(repository, tmp_path):
    old = repository("src/saccade/exact/short/forward.py", KERNEL)
    new = repository("src/saccade/exact/short/forward.py", KERNEL.replace("return x ", "return 2 * x "))
    path = tmp_path / "short_full.csv"
    path.write_text("table,commit\n" + "".join(f"short_full,{commit}\n" for commit in (new, old, new, old, old)))
    assert (stale.verdict(path).stale, stale.verdict(path).rows) == (3, 5)


@pytest.mark.parametrize(
    ("file", "run_by"), [("together", [2]), ("training", [1]), ("captured", [1]), ("images", [3]), ("graphs", [0, 1, 2, 3])]
)
def test_rows_of_encoders_are_older_than_what_they_run(repository, tmp_path, file, run_by):
    old = repository(f"src/saccade/encoders/{file}.py", "def joined(texts):\n    return texts\n")
    repository(f"src/saccade/encoders/{file}.py", "def joined(texts):\n    return list(texts)\n")
    path = tmp_path / "encoders.csv"
    rows = [
        "MiniLM B=8 sentences=256,fwd", "MiniLM B=8 sentences=8,fwd+bwd", "MiniLM encode from strings texts=2048,fwd",
        "ViT-B/16 B=8 images tokens=197,fwd",
    ]  # fmt: skip
    path.write_text("table,problem,direction,commit\n" + "".join(f"encoders,{x},{old}\n" for x in rows))
    assert [row["problem"] for row in stale.older_rows(path)] == [rows[i].split(",")[0] for i in run_by]


@pytest.mark.parametrize(("file", "expected"), [("tokens", 1), ("graphs", 1), ("training", 0)])
def test_a_profile_of_strings_runs_what_strings_run(repository, tmp_path, file, expected):
    old = repository(f"src/saccade/encoders/{file}.py", "def joined(texts):\n    return texts\n")
    repository(f"src/saccade/encoders/{file}.py", "def joined(texts):\n    return list(texts)\n")
    path = tmp_path / "encoder_profile.csv"
    about = "MiniLM encode from strings texts=32 float32,waiting for the device,host"
    path.write_text(f"table,problem,backend,direction,commit\nencoder_profile,{about},{old}\n")
    assert stale.verdict(path).stale == expected


@pytest.mark.parametrize("name", ["encoders", "windows"])
def test_kernels_whose_file_has_the_name_of_one_of_strings_count(repository, tmp_path, name):
    old = repository("src/saccade/exact/ragged/tokens.py", KERNEL)
    repository("src/saccade/exact/ragged/tokens.py", KERNEL.replace("return x ", "return 2 * x "))
    assert table(tmp_path, old, name).stale == 1


@pytest.mark.parametrize(("folder", "name", "older"), [("h200", "dynamic_mask_length", 0), ("cpu", "dynamic_mask_cpu", 1)])
def test_what_a_cpu_alone_runs_counts_for_tables_of_a_cpu(repository, tmp_path, folder, name, older):
    old = repository("src/saccade/dynamic_mask/gather/cpu/launchers.py", "def rows(x):\n    return x\n")
    repository("src/saccade/dynamic_mask/gather/cpu/launchers.py", "def rows(x):\n    return 2 * x\n")
    path = tmp_path / folder / f"{name}.csv"
    path.parent.mkdir()
    path.write_text(f"table,note,commit\n{name},,{old}\n")
    assert stale.verdict(path).stale == older


def test_tables_of_launches_are_tables_of_exact_attention():
    """Others have problems that `tools.launches` does not read. A table of whole calls has no row of the device alone."""
    assert {pattern for name in stale.BY_LAUNCHES for pattern in stale.patterns_of(name)} <= {
        stale._SHORT,
        stale._LONG,
        *stale._PACKED,
        "exact/shared_bias/*",
    }
    assert not stale.BY_LAUNCHES.keys() & {"short_overhead", "encoders", "models"}
    assert stale.BY_LAUNCHES["short_auto"] == ()  # calls of `auto`, whose problems are dense


def test_a_kernel_for_biases_ages_no_row_without_one():
    """N:M attention looks for NaN under a bias, and its kernel for that runs with a bias alone."""
    file, path = "src/saccade/nm_sparse/cuda/shown_values.cu", Path("nm_masks.csv")
    kinds = [
        stale._kind(path, {"problem": f"nm_sparse(B=2 bf16{x})", "commit": "abc"})[2] for x in (" bias of heads", " mask", "")
    ]
    assert [stale._ONLY[file] == kind for kind in kinds] == [True, False, False]
