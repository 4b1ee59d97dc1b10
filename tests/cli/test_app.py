"""The commands as a user types them; slow commands are tested in parts."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from saccade import InvalidArgument, SaccadeError, __version__
from saccade.cli.app import app
from saccade.cli.explain import DescribedCall, answer, problem_of
from saccade.cli.info import backends_on, nvrtc_lines
from saccade.cli.tables import about, find_benchmarks, tables_in

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def run(*words):
    return CliRunner().invoke(app, words, env={"COLUMNS": "160"})


def test_python_dash_m_prints_one_sentence_for_a_mistake():
    words = [sys.executable, "-m", "saccade", "explain", "--heads", "8", "--hkv", "3"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("saccade: 8 query heads are no multiple of 3 key heads")
    assert result.stderr.count("\n") == 1


def test_version_is_one_line():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_info_as_json():
    report = json.loads(run("info", "--json").stdout)
    assert report["versions"]["saccade"] == __version__
    cpu = next(d for d in report["devices"] if d["name"] == "cpu")
    assert cpu["backends"]["attention"]["sdpa"] == []
    assert set(cpu["backends"]["attention"]) == {
        "short",
        "volta",
        "volta_fp16",
        "long",
        "shared_bias",
        "ragged",
        "sdpa",
        "reference",
    }
    assert cpu["backends"]["dynamic_mask_attention"]["gather_torch"] == []
    assert set(cpu["backends"]["dynamic_mask_attention"]) == {"gather", "gather_cpp", "gather_torch", "reference"}
    assert set(report["caches"]) == {"triton", "nvrtc", "native"}


@pytest.mark.parametrize(
    ("arch", "runs"), [(70, {"volta", "volta_fp16"}), (90, {"short", "long", "ragged", "shared_bias", "volta", "volta_fp16"})]
)
def test_info_asks_each_backend_about_a_call_that_it_is_for(arch, runs, monkeypatch):
    monkeypatch.setattr(
        "saccade.cli.info.problem_of", lambda call, device: replace(problem_of(call, CPU), device_type="cuda", arch=arch)
    )
    monkeypatch.setattr("saccade.exact.volta.backend._device_reasons", lambda problem: [])
    found = backends_on(CPU)["attention"]
    assert {name for name, reasons in found.items() if not reasons} == runs | {"sdpa", "reference"}


def test_info_as_tables():
    out = run("info").stdout
    for word in (
        "Versions",
        "dynamic_mask_attention",
        "short",
        "sdpa",
        "reference",
        "NVRTC",
        "triton cache",
        "nvrtc cache",
        "native cache",
    ):
        assert word in out


def test_info_says_what_compiles_cuda_and_what_is_missing():
    found = json.loads(run("info", "--json").stdout)["nvrtc"]
    assert set(found["cache"]) == {"folder", "entries", "bytes"}
    both = {"version": "13.0", "missing": {"sm_70": ["sm_70 needs NVRTC 12"], "sm_75": [], "sm_90": []}}
    assert nvrtc_lines(both) == ["NVRTC 13.0 compiles CUDA C++ for sm_75, sm_90", "sm_70 needs NVRTC 12"]
    none = {"version": None, "missing": {"sm_70": ["install it"], "sm_75": ["install it"]}}
    assert nvrtc_lines(none) == ["CUDA C++ cannot be compiled here", "install it"]


def test_cache_says_what_lies_there_and_deletes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path))
    kept = tmp_path / "nvrtc" / "entries" / "ab" / ("0" * 62)
    library, stranger = tmp_path / "native" / f"saccade_calls-{'0' * 32}.so", tmp_path / "native" / "other.so"
    for path in (kept, library, stranger):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0" * 2**20)
    one = f"{tmp_path / 'nvrtc'}: {{}}1 kernel from CUDA C++, 1.0 MiB\n{tmp_path / 'native'}: {{}}1 library from C++, 1.0 MiB\n"
    assert run("cache").stdout == one.format("", "")
    assert run("cache", "--clear").stdout == one.format("deleted ", "deleted ")
    assert run("cache").stdout.count(": 0 ") == 2
    assert stranger.exists()


TORCHLESS = """
import sys
import saccade_command
sys.modules["torch"] = None  # an import of it would fail
sys.argv = ["saccade", *{words}]
saccade_command.main()
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version"], __version__),
        (["cache"], "libraries from C++"),
        (["bench"], "short_full"),
        (["bench", "nosuch"], "there is no table 'nosuch'"),
        (["time", "--mask", "rows"], "'lengths'"),
        (["verify", "--op", "x"], "'attention_varlen'"),
        (["explain", "--dtype", "int8"], "'bf16'"),
        (["explain", "--arch", "12"], "80 for sm_80"),
    ],
    ids=" ".join,
)
def test_answered_without_torch(words, said):
    done = subprocess.run([sys.executable, "-c", TORCHLESS.format(words=words)], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if words[-1] in ("--version", "cache", "bench") else 2), done.stderr
    assert said in done.stdout + done.stderr


def test_explain_on_the_cpu():
    out = run("explain", "--device", "cpu", "-B", "4", "-H", "8", "--hkv", "2", "--tq", "7", "--tk", "9", "-D", "40").stdout
    assert out.startswith("attention(B=4 H=8 Hkv=2 Tq=7 Tk=9 D=40 bf16 grad cpu)")
    assert "-> sdpa" in out
    assert "short: cannot: needs a CUDA device" in out


@pytest.mark.parametrize(("arch", "dtype", "chosen"), [("90", "bf16", "short"), ("70", "fp16", "sdpa")])
def test_explain_for_a_gpu_that_is_not_here(arch, dtype, chosen):
    """In the dtype that is usual there, if none is given."""
    sizes = ("--batch", "1024", "--tq", "64", "--tk", "64")
    out = run("explain", "--arch", arch, *sizes, "--causal", "--lengths", "--dropout", "0.1").stdout
    assert f"{dtype} causal lengths dropout=0.1 grad sm_{arch}" in out
    assert f"-> {chosen}" in out


@pytest.mark.parametrize(("arch", "chosen"), [("70", "volta"), ("75", "volta"), ("89", "short"), ("120", "short")])
def test_explain_of_nothing_but_a_gpu_shows_its_kernel(arch, chosen):
    assert f"-> {chosen}" in run("explain", "--arch", arch).stdout


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "nm_sparse_attention"])
def test_explain_as_json_says_what_the_text_says(op):
    words = ("explain", "--op", op, "--arch", "90", "--batch", "1024", "--tq", "64")
    report, text = json.loads(run(*words, "--json").stdout), run(*words).stdout
    assert report["problem"] == text.splitlines()[0]
    assert f"-> {report['chosen']}: " in text
    assert {b["state"] for b in report["backends"]} <= {"chosen", "cannot", "by name only", "not preferred"}
    assert [b["state"] for b in report["backends"]].count("chosen") == 1
    for backend in report["backends"]:
        assert f"{backend['backend']}: " in text
        assert backend["reasons"]
        assert all(reason in text for reason in backend["reasons"])


def test_explain_of_dynamic_masks():
    words = (
        "--op",
        "dynamic_mask_attention",
        "--keep",
        "1024",
        "-H",
        "32",
        "--hkv",
        "8",
        "--tq",
        "1",
        "--tk",
        "65536",
        "-B",
        "2",
    )
    out = run("explain", *words, "--device", "cpu", "--lengths", "--documents").stdout
    assert out.startswith(
        "dynamic_mask_attention(B=2 H=32 Hkv=8 Tq=1 Tk=65536 D=64 keep=1024 bf16 causal lengths documents grad cpu)"
    )
    assert "-> gather_cpp: C++ on a CPU" in out
    assert "gather: cannot: needs a CUDA device" in out
    out = run("explain", *words, "--no-causal", "--arch", "90").stdout
    assert "keep=1024 bf16 grad sm_90)" in out
    assert "-> gather: gathers the kept keys" in out
    out = run("explain", *words, "--no-causal", "--arch", "90", "--dtype", "fp32").stdout
    assert "-> gather: gathers the kept keys" in out


def test_explain_of_bias_mask_and_window():
    assert "bias[1x8x128x128]+grad" in answer(DescribedCall(heads=8, kv_heads=8, q_len=128, kv_len=128, bias="1x8x128x128", bias_grad=True, needs_grad=True), "cpu", None)  # fmt: skip
    assert "window=(64, None)" in answer(DescribedCall(q_len=128, kv_len=128, window="64, none"), "cpu", None)
    assert "window=(64, 8)" in answer(
        DescribedCall(operation="attention_varlen", q_len=128, kv_len=128, window="64,8"), "cpu", None
    )
    assert "window=9" in answer(
        DescribedCall(operation="dynamic_mask_attention", q_len=128, kv_len=128, keep=4, window="9"), "cpu", None
    )
    assert "mask[128x1]" in answer(DescribedCall(q_len=128, kv_len=4, mask="128x1"), "cpu", None)


def test_explain_of_a_mask_of_keys_beside_a_bias():
    triangle = ("-B", "384", "-H", "4", "--tq", "384", "-D", "32", "--bias", "1x4x384x384", "--bias-grad", "--arch", "80")
    out = run("explain", *triangle, "--key-mask").stdout
    assert "bias[1x4x384x384]+grad key_mask" in out
    assert "-> shared_bias" in out
    assert "mask[32x1x1x128]" in run("explain", "--key-mask", "--arch", "80").stdout
    assert "key_mask and is_causal=True are both given" in str(run("explain", "--key-mask", "--causal").exception)


@pytest.mark.parametrize(
    ("call", "device", "arch", "sentence"),
    [
        (DescribedCall(operation="nothing"), None, None, "op is 'nothing'"),
        (DescribedCall(operation="dynamic_mask_attention"), None, None, "keep is not given"),
        (DescribedCall(operation="dynamic_mask_attention", keep=0), None, None, "keep is 0"),
        (DescribedCall(operation="dynamic_mask_attention", keep=4, q_len=3), None, None, "3 queries for 1 keys"),
        (
            DescribedCall(operation="dynamic_mask_attention", keep=4, dropout_p=0.1),
            None,
            None,
            "dropout_p is 0.1; dynamic_mask_attention has no",
        ),
        (DescribedCall(keep=4), None, None, "keep is 4; attention has no such argument, dynamic_mask_attention has"),
        (DescribedCall(operation="nm_sparse_attention", key_mask=True), None, None, "nm_sparse_attention has no such argument"),
        (DescribedCall(documents=True), None, None, "documents is True; attention has no such"),
        (DescribedCall(window="64"), None, None, r"window is '64'; of attention it is \(left, right\), as 64,64 or 64,none"),
        (DescribedCall(window="64,-1"), None, None, r"window is '64,-1'; of attention it is"),
        (DescribedCall(window="²,3"), None, None, "window is '²,3'; of attention it is"),
        (DescribedCall(mask="1x²"), None, None, "mask is '1x²'; a shape is written as"),
        (
            DescribedCall(operation="dynamic_mask_attention", keep=4, window="6,4"),
            None,
            None,
            "window is '6,4'; of dynamic_mask_attention it is a number",
        ),
        (
            DescribedCall(operation="nm_sparse_attention", window="6,4"),
            None,
            None,
            "window is '6,4'; nm_sparse_attention has no such argument",
        ),
        (DescribedCall(dtype="int8"), None, None, "dtype is 'int8'; allowed are bf16"),
        (DescribedCall(batch=-1), None, None, "none may be negative"),
        (DescribedCall(bias_grad=True), None, None, "bias_grad is True and no bias is given"),
        (DescribedCall(operation="nm_sparse_attention", bias_grad=True), None, None, "bias_grad is True and no bias is given"),
        (DescribedCall(batch=10**20), None, None, r"query would have shape \[100000000000000000000, 1, 1, 64\]"),
        (DescribedCall(batch=0, q_len=10**12, heads=10**8), None, None, "query would have shape"),
        (DescribedCall(kv_len=10**18, head_dim=64), None, None, "key would have shape"),
        (DescribedCall(mask="99999999999999999999x1"), None, None, "mask would have shape"),
        (DescribedCall(q_len=10**9, kv_len=10**9, bias="1x64x1000000000x1000000000"), None, None, "bias would have shape"),
        (DescribedCall(mask="1", bias="1"), None, None, "both given"),
        (DescribedCall(bias="1,2"), None, None, "bias is '1,2'"),
        (DescribedCall(bias="3x5"), None, None, "must broadcast"),
        (DescribedCall(dropout_p=1.5), None, None, "dropout_p is 1.5"),
        (DescribedCall(), "tpu", None, "device is 'tpu'"),
        (DescribedCall(), "cuda:99", None, "torch sees"),
        (DescribedCall(), None, 9, "arch is 9"),
        (DescribedCall(), "cpu", 90, "both given"),
    ],
)
def test_explain_names_what_is_wrong(call, device, arch, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        answer(call, device, arch)


@pytest.mark.parametrize("option", ["--hkv", "--tk"])
def test_a_size_of_zero_is_given(option):
    words = ("explain", "-H", "8", "--tq", "16", "--device", "cpu", option, "0")
    if option == "--hkv":
        assert "8 query heads are no multiple of 0 key heads" in str(run(*words).exception)
    else:
        assert "Tq=16 Tk=0" in run(*words).stdout


@pytest.mark.parametrize("op", ["attention", "dynamic_mask_attention", "nm_sparse_attention"])
def test_head_dim_zero_is_described(op):
    keep = ("--keep", "4") if op.startswith("dynamic") else ()
    result = run("explain", "--op", op, "-D", "0", "--device", "cpu", *keep)
    assert result.exception is None
    assert "D=0" in result.stdout


def test_problem_allocates_nothing():
    import torch

    problem = problem_of(DescribedCall(batch=10**6, heads=64, kv_heads=64, q_len=4096, kv_len=4096), torch.device("cpu"))
    assert problem.batch == 10**6
    assert problem.device == torch.device("cpu")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder in which the imported package is said to lie, which belongs to no checkout."""
    found = tmp_path / "site" / "saccade"
    monkeypatch.setattr("saccade.cli.tables.__file__", str(found / "cli" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    return found


def checkout(folder, *names):
    """A folder that looks like a checkout, with these tables; the folder of the tables."""
    (folder / "src" / "saccade").mkdir(parents=True)
    tables = folder / "benchmarks" / "tables"
    tables.mkdir(parents=True)
    for name in names:
        (tables / name).write_text(f'"""What {name} has (Fig. 5), of `this`: all\nof it. And more."""\n')
    (folder / "benchmarks" / "run.py").touch()
    return tables


def test_bench_of_a_package_without_tables(package):
    with pytest.raises(
        SaccadeError, match="this installation of saccade lacks it; install its wheel, or a checkout with pip install -e"
    ):
        find_benchmarks()
    for words in (("bench",), ("bench", "short_full")):
        assert "this installation of saccade lacks it" in str(run(*words).exception)
    (package / "benchmarks" / "tables").mkdir(parents=True)
    (package / "benchmarks" / "tables" / "short_full.py").touch()
    (package / "benchmarks" / "run.py").touch()
    assert find_benchmarks() == package / "benchmarks"
    assert "short_full" in run("bench").stdout


def test_bench_runs_nothing_of_the_working_folder(package, tmp_path, monkeypatch):
    """Whoever can write into it, or into a folder above, would run code as the user."""
    tables = checkout(tmp_path, "short_full.py")
    (tables.parent / "run.py").write_text("raise SystemExit('it ran')")
    for folder in (tmp_path, tables):
        monkeypatch.chdir(folder)
        with pytest.raises(SaccadeError, match="this installation of saccade lacks it"):
            find_benchmarks()
        assert "this installation of saccade lacks it" in str(run("bench", "short_full").exception)


def test_bench_lists_tables_and_refuses_others(tmp_path, monkeypatch):
    tables = checkout(tmp_path, "short_full.py", "short_pooling.py", "__init__.py")
    monkeypatch.setattr("saccade.cli.tables.__file__", str(tmp_path / "src" / "saccade" / "cli" / "bench.py"))
    assert find_benchmarks() == tables.parent
    assert tables_in(find_benchmarks()) == ["short_full", "short_pooling"]
    printed = run("bench").stdout
    assert all(f"{name}.py has (Fig. 5), of this: all of it" in printed for name in ("short_full", "short_pooling"))
    assert not re.search(r"__init__|And more", printed)
    error = run("bench", "swin").exception
    assert isinstance(error, SaccadeError)
    assert "no table 'swin'" in str(error)


def test_bench_needs_a_gpu(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("saccade.cli.tables.find_benchmarks", lambda: tmp_path)
    monkeypatch.setattr("saccade.cli.tables.tables_in", lambda folder: ["short_full"])
    assert "CUDA GPU" in str(run("bench", "short_full").exception)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("saccade.cli.bench.has_package", lambda name: False)
    assert "pip install 'saccade-attention[bench]'" in str(run("bench", "short_full").exception)


def test_bench_hands_tables_and_options_to_the_runner(tmp_path, monkeypatch):
    checkout(tmp_path, "auto_cpu.py", "other_cpu.py")
    monkeypatch.setattr("saccade.cli.tables.__file__", str(tmp_path / "src" / "saccade" / "cli" / "bench.py"))
    words = ["auto_cpu", "other_cpu", "--rows", "B=2 H=8", "--limit", "60"]
    runner = "import sys; sys.exit(7 if sys.argv[1:] == " + repr(words) + " else 1)"
    (tmp_path / "benchmarks" / "run.py").write_text(runner)
    assert run("bench", *words).exit_code == 7
    assert "no table 'nosuch'" in str(run("bench", "auto_cpu", "nosuch", "--limit", "60").exception)


def test_explain_of_pruned_attention():
    words = (
        "--op",
        "nm_sparse_attention",
        "-B",
        "2",
        "--tq",
        "128",
        "--pattern",
        "1:2",
        "--blocks",
        "--causal",
        "--device",
        "cpu",
    )
    out = run("explain", *words).stdout
    assert "nm_sparse_attention(1:2 blocks B=2 H=8 Tq=128 Tk=128 D=64 bf16 causal grad cpu)" in out
    assert "reference" in out


def test_explain_of_keys_that_are_never_pruned():
    words = ("--op", "nm_sparse_attention", "--tq", "256", "--no-grad", "--arch", "90")
    out = run("explain", *words, "--dense-first", "4", "--dense-recent", "64").stdout
    assert "nm_sparse_attention(2:4 dense_first=4 dense_recent=64 B=32" in out
    assert "prunes every group of keys, and dense_first or dense_recent exempts some; backend 'masked' takes it" in out
    assert "dense_" not in run("explain", *words).stdout
    assert "dense_recent is 3" in str(run("explain", *words, "--dense-recent", "3").exception)
    assert "attention has no such argument" in str(run("explain", "--dense-first", "4").exception)


def test_each_table_says_what_it_measures():
    benchmarks = find_benchmarks()
    assert all(10 < len(about(benchmarks / "tables" / f"{name}.py")) < 250 for name in tables_in(benchmarks))


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user without HOME and without an entry among the users."""

    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    import pwd

    for name in ("HOME", "XDG_CACHE_HOME", "SACCADE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"saccade-{os.getuid()}"


@pytest.mark.parametrize("words", [("cache",), ("cache", "--clear"), ("info",), ("info", "--json")], ids=" ".join)
def test_without_a_home_compiled_code_is_kept_among_temporary_files(words, homeless, monkeypatch):
    result = run(*words)
    assert result.exception is None
    assert str(homeless / "nvrtc") in result.stdout
    monkeypatch.setenv("SACCADE_CACHE_DIR", "~nosuch/x")
    with pytest.warns(UserWarning, match=f"SACCADE_CACHE_DIR is '~nosuch/x', and there is no such home; .* kept in {homeless}"):
        result = run(*words)
    assert result.exception is None
    assert str(homeless / "nvrtc") in result.stdout


def test_a_cache_that_others_write_is_not_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path))
    (tmp_path / "nvrtc").mkdir()
    (tmp_path / "nvrtc").chmod(0o777)
    assert "can be written by other users" in str(run("cache", "--clear").exception)
    assert isinstance(run("cache", "--clear").exception, SaccadeError)


def test_another_machine_s_software_is_assumed(monkeypatch):
    monkeypatch.setattr("saccade.hardware._FOUND", {"triton": False})
    monkeypatch.setattr("saccade.cli.explain.obstacles", lambda arch: ("no NVRTC",))
    call = DescribedCall(batch=32, heads=8, kv_heads=8, q_len=128, kv_len=128, needs_grad=True)
    for arch in (80, 89, 90, 120):
        first, *rest = answer(call, None, arch).splitlines()
        assert first == "assumed, but not here: Triton; no NVRTC"
        assert any(line.startswith("  -> short") for line in rest)
        assert not any("not installed" in line for line in rest)
        assert json.loads(answer(call, None, arch, as_json=True))["assumed"] == ["Triton", "no NVRTC"]
    assert "needs Triton, which is not installed" in answer(call, "cpu", None)
