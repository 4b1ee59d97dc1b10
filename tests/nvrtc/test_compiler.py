"""From sources to cubins: keys, errors, and caches that are damaged, shared, forked or missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from saccade.errors import CompileError, InvalidArgument
from saccade.nvrtc import Options, Source, build, compile_cubin, compiler, store
from saccade.nvrtc.source import reached
from saccade.nvrtc.toolchain import Nvrtc, find_nvrtc

pytest.importorskip("cuda.core")

TWICE = Options.of({"FACTOR": 2})


@pytest.fixture
def builds(monkeypatch):
    """Every build that is made, as (name of the source, architecture)."""
    seen = []

    def counted(source, architecture, options):
        seen.append((source.path.name, architecture))
        return build(source, architecture, options)

    monkeypatch.setattr(compiler, "build", counted)
    return seen


def entry(cache):
    (path,) = (p for p in (cache / "entries").rglob("*") if p.is_file())
    return path


def test_compiles_once_a_process_and_once_a_machine(fill, builds, cache):
    first = compile_cubin(fill, 90, TWICE)
    assert first[:4] == b"\x7fELF"
    assert compile_cubin(fill, "sm_90", TWICE) is first
    compiler.forget()
    assert compile_cubin(fill, 90, TWICE) == first
    assert builds == [("fill.cu", "90")]
    assert store.contents() == (cache, 1, entry(cache).stat().st_size)


def test_threads_compile_once(fill, builds):
    threads = [threading.Thread(target=compile_cubin, args=(fill, 90, TWICE)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_a_key_holds_all_that_the_binary_depends_on(fill, tmp_path, monkeypatch):
    nvrtc = Nvrtc((12, 9), (90,))

    def key(source=fill, architecture="90", options=TWICE, nvrtc=nvrtc):
        return compiler.key_of(source, architecture, options, nvrtc)

    keys = [key(), key(architecture="90a"), key(nvrtc=Nvrtc((12, 8), (90,)))]
    keys += [key(options=Options.of({"FACTOR": 3})), key(options=Options.of({"FACTOR": 2}, fast_math=True))]
    assert key() == keys[0]
    header = tmp_path / "headers" / "value.cuh"
    header.write_text('#include "deeper.cuh"\n')
    keys.append(key())
    (tmp_path / "headers" / "deeper.cuh").write_text("#define VALUE 3.0f\n")
    keys.append(key())
    (tmp_path / "headers" / "deeper.cuh").write_text("#define VALUE 4.0f\n")
    keys.append(key())
    fill.path.write_text(fill.path.read_text() + "\n")
    keys.append(key())
    monkeypatch.setattr("saccade.__version__", "0.0.0")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_key_forgets_where_a_checkout_lies(tmp_path):
    keys, lined = set(), set()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "empty.cu").write_text('extern "C" __global__ void empty() {}')
        source = Source(tmp_path / place / "empty.cu")
        keys.add(compiler.key_of(source, "90", Options(), find_nvrtc()))
        lined.add(compiler.key_of(source, "90", Options.of(line_info=True), find_nvrtc()))
    assert (len(keys), len(lined)) == (1, 2)


def test_the_compiler_looks_for_headers_in_the_order_of_the_key(fill, tmp_path):
    """If two headers have one name, the key must hold the one that is compiled."""
    folders = (fill.path.parent, *fill.headers, tmp_path / "toolkit")
    flags = compiler.flags_of(fill, "90", TWICE, folders[-1:])
    assert [flag for flag in flags if "include" in flag] == [f"--include-path={folder}" for folder in folders]
    folders[-1].mkdir()
    (folders[-1] / "value.cuh").write_text("#define VALUE 5.0f\n")
    found = {path.name: path for path, _ in reached(fill, folders[-1:])}
    assert found["value.cuh"].parent == fill.headers[0]


def test_a_header_of_the_toolkit_is_found_and_counts(tmp_path):
    path = tmp_path / "half.cu"
    path.write_text('#include <cuda_fp16.h>\nextern "C" __global__ void half_one(half* out) { *out = __float2half(1.0f); }')
    assert compile_cubin(Source(path), 80)


def test_an_error_names_file_line_options_and_architecture(fill):
    with pytest.raises(CompileError) as caught:
        compile_cubin(fill, 75)
    message = str(caught.value)
    assert message.startswith(
        f"NVRTC {find_nvrtc().name} cannot compile {fill.path} for sm_75\noptions: --gpu-architecture=sm_75"
    )
    assert f'{fill.path}(5): error: identifier "FACTOR" is undefined' in message
    assert caught.value.log in message
    assert store.contents().entries == 0


def test_an_error_in_a_header_names_the_header(fill, tmp_path):
    (tmp_path / "headers" / "value.cuh").write_text("\n\n#error no value\n")
    with pytest.raises(CompileError, match=r"headers/value.cuh\(3\): .*no value"):
        compile_cubin(fill, 90, TWICE)


def test_a_flag_that_nvrtc_does_not_know_is_named(fill):
    with pytest.raises(CompileError, match="--no-such-flag"):
        compile_cubin(fill, 90, Options.of({"FACTOR": 2}, flags=("--no-such-flag",)))


def test_the_log_of_a_build_has_warnings(tmp_path):
    path = tmp_path / "warned.cu"
    path.write_text('extern "C" __global__ void warned() { int unused; }')
    assert '"unused" was declared but never referenced' in build(Source(path), 90).log


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: kept[:20],
        lambda kept: kept[:-1],
        lambda kept: kept[:200] + bytes([kept[200] ^ 1]) + kept[201:],
        lambda kept: b"something else",
    ],
    ids=["empty", "head", "truncated", "one bit", "foreign"],
)
def test_a_damaged_entry_is_compiled_again_and_mended(fill, builds, cache, damage):
    cubin = compile_cubin(fill, 90, TWICE)
    kept = entry(cache).read_bytes()
    entry(cache).write_bytes(damage(kept))
    compiler.forget()
    assert compile_cubin(fill, 90, TWICE) == cubin
    assert len(builds) == 2
    assert entry(cache).read_bytes() == kept


def test_the_users_cache_folder_is_the_default(monkeypatch):
    monkeypatch.delenv("SACCADE_CACHE_DIR")
    assert store.folder().parts[-2:] == ("saccade", "nvrtc") or os.name == "nt"
    monkeypatch.setenv("SACCADE_CACHE_DIR", "~/elsewhere")
    assert store.folder() == Path.home() / "elsewhere" / "nvrtc"


def test_an_entry_under_another_key_is_refused():
    assert store.unpack("a", store.pack("a", b"cubin")) == b"cubin"
    assert store.unpack("b", store.pack("a", b"cubin")) is None


def test_a_folder_that_cannot_be_made_costs_one_warning(fill, builds, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(
        RuntimeWarning, match=r"cannot use its cache of compiled kernels in .*file/cache/nvrtc .*SACCADE_CACHE_DIR"
    ):
        assert compile_cubin(fill, 90, TWICE)
    compiler.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cubin(fill, 80, TWICE)
    assert len(builds) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_costs_one_warning(fill, cache):
    cache.mkdir(mode=0o500, parents=True)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert compile_cubin(fill, 90, TWICE)


def test_a_full_disk_costs_one_warning_and_leaves_nothing(fill, cache, monkeypatch):
    compile_cubin(fill, 90, TWICE)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match=r"cannot write its cache .*No space left on device") as caught:
        assert all(compile_cubin(fill, architecture, TWICE) for architecture in (80, 75))
    assert len(caught) == 1
    assert store.contents().entries == 1
    assert not list((cache / "tmp").iterdir())


def test_the_least_recently_used_go_first(monkeypatch, cache):
    monkeypatch.setattr(store, "LIMIT_BYTES", 5000)
    for n in range(4):
        store.write(str(n), b"x" * 1000)
    for path in (cache / "entries").rglob("*"):
        os.utime(path, (1, 1))
    assert store.read("0") is not None  # used again
    store.write("4", b"x" * 1000)
    assert store.read("0") is not None
    assert store.contents().bytes <= 5000


def test_clear_deletes_cubins_alone(fill, cache):
    compile_cubin(fill, 90, TWICE)
    others = cache / "entries" / "ab" / "photograph"
    others.parent.mkdir(exist_ok=True)
    others.write_text("")
    assert store.clear().entries == 1
    assert store.contents() == (cache, 0, 0)
    assert others.exists()
    assert store.read("nothing") is None


def test_two_processes_race_for_one_entry(fill):
    """Twenty rounds of read, compile, write and clear in two processes at once: each must see a complete cubin or none."""
    racer = (
        "import sys, time, hashlib; from pathlib import Path; from saccade.nvrtc import Options, Source, compiler, toolchain\n"
        "path, headers = sys.argv[1:]; source = Source(Path(path), (Path(headers),)); toolchain.find_nvrtc()\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for _ in range(20):\n"
        "    compiler.forget(); cubin = compiler.compile_cubin(source, 90, Options.of({'FACTOR': 2}))\n"
        "    compiler.store.clear()\n"
        "print(hashlib.sha256(cubin).hexdigest())\n"
    )
    words = [sys.executable, "-W", "error::RuntimeWarning", "-c", racer, str(fill.path), str(fill.headers[0])]
    racers = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in racers:
        assert process.stdout.readline() == "ready\n"
    answers = [process.communicate("go\n")[0] for process in racers]
    assert [process.returncode for process in racers] == [0, 0]
    assert len(set(answers)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_a_build_and_compiles_in_the_child(fill, monkeypatch):
    compile_cubin(fill, 90, TWICE)
    building, built = threading.Event(), threading.Event()

    def slow(source, architecture, options):
        building.set()
        time.sleep(0.3)
        made = build(source, architecture, options)
        built.set()
        return made

    monkeypatch.setattr(compiler, "build", slow)
    thread = threading.Thread(target=compile_cubin, args=(fill, 80, TWICE))
    thread.start()
    building.wait()
    child = os.fork()
    if child == 0:
        # the parent's memory is there; another architecture goes through NVRTC and the disk
        whole = all(compile_cubin(fill, a, TWICE)[:4] == b"\x7fELF" for a in (90, 80, 75))
        os._exit(0 if whole and built.is_set() else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.contents().entries == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_does_not_keep_the_lock_of_the_disk(fill):
    compile_cubin(fill, 90, TWICE)
    with store._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if compile_cubin(fill, 80, TWICE) and store.contents().entries == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda s: Options.of({"1x": 2}), "'1x' is no name of a macro"),
        (lambda s: Options.of({"X": 2.0}), "macro X is 2.0; allowed are int, bool and str"),
        (lambda s: Options.of(max_registers=1000), "max_registers is 1000; allowed is 16 to 255"),
        (lambda s: compile_cubin(s, 60), "architecture is 60; allowed are 70, 75, 80, 86, 89, 90, 90a, 100, 120"),
        (lambda s: Source(s.path.parent / "no.cu"), "there is no source .*no.cu"),
        (lambda s: Source(s.path, (s.path.parent / "no",)), "there is no folder .*no for the headers of fill.cu"),
    ],
)
def test_mistakes_get_a_sentence(fill, make, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        make(fill)


def test_an_include_by_macro_is_refused(fill):
    fill.path.write_text("#define NAME <cuda_fp16.h>\n#include NAME\n")
    with pytest.raises(InvalidArgument, match="includes NAME, a macro"):
        compile_cubin(fill, 90)


def test_defines_are_sorted_and_written_as_text():
    assert Options.of({"B": True, "A": 7, "C": "int"}).defines == (("A", "7"), ("B", "1"), ("C", "int"))
