"""Machine code is compared by its instructions, and the host's part of a launch by what is launched."""

from __future__ import annotations

import csv
import json
import re
import shutil

import pytest

from saccade.nvrtc import Options, Source, build, obstacles
from tools import launches, same_code
from tools.cubin import instructions_of

KERNEL = 'extern "C" __global__ void scale(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 3.0f; }'


@pytest.mark.skipif(bool(obstacles("90")), reason="needs NVRTC")
def test_instructions_tell_kernels_apart_and_no_names(tmp_path):
    def instructions(text: str) -> str:
        (tmp_path / "scale.cu").write_text(text)
        return instructions_of(build(Source(tmp_path / "scale.cu"), "90", Options()).cubin)

    plain = instructions(KERNEL)
    assert instructions("// one\n" + KERNEL.replace(" n)", " count)").replace("< n", "< count")) == plain
    assert instructions(KERNEL.replace("3.0f", "5.0f")) != plain
    assert instructions(KERNEL.replace("void scale", "void other")) != plain


def test_a_triton_file_has_kernels_and_a_host_part(tmp_path):
    path, kernel = tmp_path / "forward.py", "import triton\n\n\n@triton.jit\ndef kernel(x):\n    return x\n\n\nGRID = 4\n"

    def parts(text: str) -> tuple[list[str], list[str]]:
        path.write_text(text)
        return same_code._parts(path)

    kernels, host = parts(kernel)
    assert parts(kernel.replace("return x", "return x + 1"))[0] != kernels
    assert parts(kernel.replace("return x", "return x + 1"))[1] == host
    assert parts(kernel.replace("import", '"""A page."""\nimport')) == (kernels, host)
    assert parts(kernel.replace("4", "5"))[0] == kernels
    assert parts(kernel.replace("4", "5"))[1] != host


@pytest.mark.skipif(bool(obstacles("90")), reason="needs NVRTC")
def test_a_changed_source_is_compiled_from_both_checkouts(tmp_path, monkeypatch):
    name = "src/saccade/exact/scale.cu"
    roots = [tmp_path / place for place in ("before", "now")]
    for root, text in zip(roots, (KERNEL, "// one\n" + KERNEL), strict=True):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    build_of_it = (str(roots[1] / name), "90", ("--gpu-architecture=sm_90", f"--include-path={roots[1]}"))
    monkeypatch.setattr(same_code, "ROOT", roots[1])
    assert same_code.instructions_at(roots[0], build_of_it) == same_code.instructions_at(roots[1], build_of_it)
    (roots[0] / name).write_text(KERNEL.replace("3.0f", "5.0f"))
    assert same_code.instructions_at(roots[0], build_of_it) != same_code.instructions_at(roots[1], build_of_it)
    (roots[0] / name).unlink()
    assert same_code.instructions_at(roots[0], build_of_it) == "absent"


def test_builds_of_a_feature_that_older_sources_lack_are_left_out():
    flags = [("--define-macro=DIM=32", f"--define-macro=WINDOW={on}", "--define-macro=SEGMENT=4") for on in (0, 1)]
    builds = [("backward.cu", "90a", flags[0]), ("backward.cu", "90a", flags[1]), ("forward.cu", "90a", flags[0][:2])]
    assert same_code.without_new_features(builds, {"DIM"}) == [builds[0], builds[2]]
    assert same_code.without_new_features(builds, {"DIM", "WINDOW", "SEGMENT"}) == builds
    # a build without the macro is one without the feature
    absent = ("backward.cu", "90a", flags[0][:1])
    assert same_code.without_new_features([*builds, absent], {"DIM"}) == [builds[2], absent]


PROBLEMS = {
    "short": ["attention(B=8 H=4 Tq=64 Tk=64 D=32 bf16 bias[1x4x64x64]+grad grad sm_90)", "attention(B=8192 H=8 Tq=128 Tk=128 D=64 bf16 packed grad sm_90)"],
    "long": ["attention(B=64 H=12 Tq=197 Tk=197 D=64 bf16 lengths grad sm_90)"],
    "ragged": [
        "attention_varlen(B=1024 H=12 D=64 bf16 longest=417 mean=126 tokens=128963)",
        "attention_varlen(B=8 H=12 D=64 bf16 window=(64, 64) longest=8192 tokens=38001)",
    ],
}  # fmt: skip
GRIDS = {
    "short": (
        "short/sm90.py",
        "return _launch(built, batch * heads, FORWARD",
        "return _launch(built, 1 + batch * heads, FORWARD",
    ),
    "long": ("long/sm90.py", 'launch = _launch("forward", args, grid,', 'launch = _launch("forward", args, grid + 1,'),
    "ragged": ("ragged/launches.py", "max(1, min(self.most", "max(1, 1 + min(self.most"),
}


def launched(root, backend: str) -> dict[str, dict]:
    program = "import json, sys; from tools import launches; launches.problems_of = lambda *asked: json.loads(sys.argv[2]); print(json.dumps(launches.main(sys.argv[1], '')))"
    return same_code._printed(root, ["-c", program, backend, json.dumps(PROBLEMS[backend])], same_code.ROOT)


@pytest.mark.skipif(bool(obstacles("90a")), reason="needs NVRTC")
@pytest.mark.parametrize("backend", PROBLEMS)
def test_launches_are_compared_without_a_gpu(backend, tmp_path):
    """Another grid is seen; a function that nobody calls is none of the launches, and of the lines that run."""
    shutil.copytree(same_code.SRC, tmp_path / "src" / "saccade", ignore=shutil.ignore_patterns("__pycache__"))
    found = launched(same_code.ROOT, backend)
    assert len(found["launches"]) == 2 * len(PROBLEMS[backend])
    assert all(found["launches"].values())
    assert found["lines"][f"src/saccade/exact/{backend}/launchers.py"]

    def edited(name: str, before: str, after: str) -> dict[str, dict]:
        path = tmp_path / "src" / "saccade" / "exact" / name
        assert before in path.read_text(encoding="utf-8")
        path.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
        return launched(tmp_path, backend)

    assert edited(f"{backend}/launchers.py", "def forward(", "def unused():\n    return 1\n\n\ndef forward(") == found
    assert edited(*GRIDS[backend])["launches"] != found["launches"]


def test_the_problems_of_a_commit_are_those_of_rows_that_measure_a_backend(tmp_path):
    path = tmp_path / "h100" / "short_sizes.csv"
    path.parent.mkdir()
    rows = [
        ("attention(B=1)", "auto", "kernel", "abc"), ("attention(B=2)", "auto", "", "abc"), ("attention(B=3)", "short", "kernel", "def"),
        ("attention(B=4)", "sdpa", "kernel", "abc"), ("attention(B=5)", "long", "kernel", "abc"), ("attention_varlen(B=6)", "auto", "", "abc"),
    ]  # fmt: skip
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("problem", "backend", "note", "commit"), *rows])

    def found(backend: str, commit: str) -> str:
        made = launches.problems_of(backend, commit, tmp_path, lambda name, problem: "B=2" not in problem or name == "long")
        return "".join(re.findall(r"\d", "".join(made)))

    assert [found(*x) for x in (("short", "abc"), ("long", "abc"), ("ragged", "abc"), ("short", "ghi"))] == ["1", "125", "16", ""]


@pytest.mark.skipif(bool(obstacles("90a")), reason="needs NVRTC")
@pytest.mark.parametrize(
    ("problem", "taken"),
    [
        ("attention(B=1024 H=8 Tq=197 Tk=197 D=64 bf16 grad sm_90)", "long"),
        ("attention(B=1024 H=8 Tq=49 Tk=49 D=32 bf16 bias[1x8x49x49]+grad grad sm_90)", "short"),
        ("attention(B=32 H=8 Tq=64 Tk=64 D=64 bf16 bias[32x1x1x64] grad sm_90)", "short"),
        ("attention(B=256 H=3 Tq=343 Tk=343 D=16 bf16 bias[64x3x343x343]+grad windows=64 grad sm_90)", "long"),
    ],
)
def test_what_auto_takes_is_known_without_a_gpu(problem, taken):
    program = "import json, sys; from tools import launches; launches.pretend([]); print(json.dumps([launches.chosen(x, sys.argv[1]) for x in ('short', 'long')]))"
    found = same_code._printed(same_code.ROOT, ["-c", program, problem], same_code.ROOT)
    assert found[taken == "long"]
    assert found[1] == (taken == "long")


def test_files_count_where_their_backend_was_measured(monkeypatch):
    """`long` was not measured at this commit, and the launches of `short` differ."""
    made = {"short": {"a problem": [1]}, "long": {}, "ragged": {"a problem": [2]}}

    def printed(root, command, folder):
        old = str(root) == "before" and command[2] == "short"
        return {"launches": {"a problem": [3]} if old else made[command[2]]}

    monkeypatch.setattr(same_code, "_printed", printed)
    names = ["src/saccade/exact/short/launch.py", "src/saccade/exact/long/launchers.py", "src/saccade/nm_sparse/launch.py"]
    same_code._launches.cache_clear()
    assert same_code.same_launches(names, "before", "abc") == {names[0]: False, names[1]: True}
    made["ragged"] = {}
    same_code._launches.cache_clear()
    assert same_code.same_launches(names[1:], "before", "abc") == {}
    same_code._launches.cache_clear()


def test_a_file_with_kernels_may_differ_in_what_it_launches(tmp_path, monkeypatch):
    """Its row then holds for one commit."""
    name, text = "src/saccade/exact/ragged/plan.py", "@triton.jit\ndef kernel(x):\n    return x\n\n\nLIMIT = {}\n"
    for root, limit in (("before", 1), ("now", 2)):
        (tmp_path / root / name).parent.mkdir(parents=True)
        (tmp_path / root / name).write_text(text.format(limit))
    monkeypatch.setattr(same_code, "ROOT", tmp_path / "now")
    for launched_as_before in (True, False):
        monkeypatch.setattr(same_code, "same_launches", lambda names, *_, same=launched_as_before: dict.fromkeys(names, same))
        assert same_code.compared({name: text.format(2)}, tmp_path / "before", "abc") == {name: (launched_as_before, "abc")}
    monkeypatch.setattr(same_code, "same_launches", lambda *_: {})
    assert same_code.compared({name: text.format(2)}, tmp_path / "before", "abc") == {name: (False, "")}


LAUNCHER = "LIMIT = {}\n\n\ndef launch(bias):\n    if bias:\n        return {}\n    return 1\n"


@pytest.mark.parametrize(
    ("numbers", "ran", "expected"),
    [((1, 2), "return 1", (True, "abc,none")), ((1, 2), "return 2", (True, "abc")), ((2, 1), "return 1", (True, "abc"))],
)
def test_lines_that_no_problem_runs_are_of_no_account(numbers, ran, expected, tmp_path, monkeypatch):
    """Also for rows that measure the host; a constant is read by lines that are the same."""
    name = "src/saccade/exact/ragged/launchers.py"
    for root, found in (("before", (1, 1)), ("now", numbers)):
        (tmp_path / root / name).parent.mkdir(parents=True)
        (tmp_path / root / name).write_text(LAUNCHER.format(*found))
    monkeypatch.setattr(same_code, "ROOT", tmp_path / "now")
    lines = {tmp_path / "before": "return 1", tmp_path / "now": ran}
    monkeypatch.setattr(
        same_code, "_launches", lambda root, *_: {"launches": {"a problem": [1]}, "lines": {name: [["launch", lines[root]]]}}
    )
    assert same_code.compared({name: LAUNCHER.format(*numbers)}, tmp_path / "before", "abc") == {name: expected}


@pytest.mark.parametrize(
    ("launched", "expected"), [({"a": [1], "b": [2]}, (True, "abc,launches of b")), ({"a": [2], "b": [2]}, (False, "abc"))]
)
def test_problems_that_are_launched_otherwise_are_named(launched, expected, tmp_path, monkeypatch):
    """As long as there are others."""
    name = "src/saccade/exact/ragged/launchers.py"
    made = {tmp_path: {"a": [1], "a captured": [1], "b": [1]}, same_code.ROOT: launched | {"a captured": [1]}}
    monkeypatch.setattr(same_code, "_launches", lambda root, *_: {"launches": made[root], "lines": {}})
    assert same_code.compared({name: "def forward(): pass"}, tmp_path, "abc") == {name: expected}


@pytest.mark.parametrize(("host", "expected"), [(1, (True, 'abc,"a, b; c"')), (2, (False, ""))])
def test_kernels_that_changed_are_of_no_account_for_problems_that_do_not_run_them(host, expected, tmp_path, monkeypatch):
    name, text = "src/saccade/exact/ragged/plan.py", "@triton.jit\ndef kernel(x):\n    return x + {}\n\n\nLIMIT = {}\n"
    for root, numbers in (("before", (1, 1)), ("now", (2, host))):
        (tmp_path / root / name).parent.mkdir(parents=True)
        (tmp_path / root / name).write_text(text.format(*numbers))
    monkeypatch.setattr(same_code, "ROOT", tmp_path / "now")
    monkeypatch.setattr(same_code, "same_triton", lambda names, _: dict.fromkeys(names, False))
    made = {"a, b": [["kernel"]], "c captured": [["other"], ["kernel"]], "d": [["other"]]}
    monkeypatch.setattr(same_code, "_launches", lambda *_: {"launches": made})
    assert same_code.compared({name: text.format(2, host)}, tmp_path / "before", "abc") == {name: expected}
    made.clear()
    made["d"] = [["other"]]
    assert same_code.run_by(name, "abc") == []


@pytest.mark.skipif(bool(obstacles("90a")), reason="needs NVRTC")
def test_launches_name_the_files_of_cuda_sources(monkeypatch):
    """Backward of 64 rows at D = 256 is a file of its own."""
    problem = "attention(B=8000 H=8 Tq=64 Tk=64 D={} bf16 grad sm_90)"
    program = "import json, sys; from tools import launches; launches.problems_of = lambda *asked: json.loads(sys.argv[1]); print(json.dumps(launches.main('short', '')))"
    for dim, runs in ((64, False), (256, True)):
        made = same_code._printed(same_code.ROOT, ["-c", program, json.dumps([problem.format(dim)])], same_code.ROOT)
        monkeypatch.setattr(same_code, "_launches", lambda *_, made=made: made)
        assert same_code.run_by("src/saccade/exact/short/cuda/backward_turns_sm90.cu", "abc") == [problem.format(dim)] * runs


def test_new_files_beside_equal_ones_are_unused():
    texts = {f"src/a/{name}": "x = 1\n" for name in ("launch.py", "new.py", "cuda/new.cu")} | {"src/b/new.py": "x = 1\n"}
    codes = {"src/a/launch.py": ("1", "2")}
    assert same_code.unused(texts, codes, {"src/a/launch.py": (True, "c")}).keys() == texts.keys() - codes.keys()
    assert same_code.unused(texts, codes, {"src/a/launch.py": (False, "c")}).keys() == {"src/b/new.py"}
