"""C++ with a plain C interface: compiled once, checked when loaded, and a reason where it is impossible."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from saccade.errors import CompileError, CompilerUnavailable
from saccade.native import compiler, kept, library
from saccade.native.compiler import no_compiler
from saccade.native.sealed import MARK, seal
from saccade.native.sealed import is_sealed as fits

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler() or "none")
SOURCE = 'extern "C" int answer(int x) { return x + VALUE; }\n'


def is_sealed(path: Path) -> bool:
    return fits(path.name, path.read_bytes())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A source of its own and an empty cache."""
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_failed", {})
    found = tmp_path / "here" / "cpp"
    found.mkdir(parents=True)
    (found / "answer.cpp").write_text('#include "value.hpp"\n' + SOURCE)
    (found / "value.hpp").write_text("#define VALUE 40\n")
    return found


@pytest.fixture
def compiled(monkeypatch):
    """The commands that were run."""
    runs, compile_it = [], library._compile
    monkeypatch.setattr(library, "_compile", lambda folder, target: runs.append(target) or compile_it(folder, target))
    return runs


def forget():
    library._loaded.clear()
    library._failed.clear()


def test_compiled_once_and_closed_to_others(folder, compiled):
    assert library.load(folder).answer(2) == 42
    assert library.load(folder) is library.load(folder)
    kept = library.path_of(folder)
    assert is_sealed(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]
    forget()
    assert library.load(folder).answer(2) == 42  # as another process would
    assert len(compiled) == 1


def test_a_changed_header_is_another_library(folder):
    library.load(folder)
    (folder / "value.hpp").write_text("#define VALUE 1\n")
    forget()
    assert library.load(folder).answer(2) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: b"no library",
        lambda kept: kept[:-1],
        lambda kept: kept[:3000] + bytes([kept[3000] ^ 1]) + kept[3001:],
        lambda kept: kept[: -len(MARK) - 32],
    ],
    ids=["empty", "foreign", "truncated", "one bit", "no digest"],
)
def test_a_damaged_file_is_compiled_anew(folder, compiled, damage, tmp_path):
    library.load(folder)
    kept = library.path_of(folder)
    damaged = tmp_path / "damaged"  # a file of its own: this process has mapped the other
    damaged.write_bytes(damage(kept.read_bytes()))
    damaged.replace(kept)
    kept.chmod(0o600)
    forget()
    assert library.load(folder).answer(2) == 42
    assert len(compiled) == 2
    assert is_sealed(kept)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_nothing_is_loaded_from_where_others_write(folder, compiled, what, caplog):
    library.load(folder)
    kept = library.path_of(folder)
    (kept.parent if what == "folder" else kept).chmod(0o777)
    forget()
    assert library.load(folder).answer(2) == 42  # compiled apart
    assert len(compiled) == 2
    assert compiled[1].parent not in (kept.parent, kept)
    assert not compiled[1].exists()
    assert [record.message for record in caplog.records] == [caplog.records[0].message]
    assert "can be written by other users" in caplog.text or "Operation not permitted" in caplog.text


@pytest.mark.parametrize("error", ["read-only", "full"])
def test_without_a_cache_each_process_compiles(folder, compiled, error, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system") if error == "read-only" else OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "replace", refuse)
    assert library.load(folder).answer(2) == 42
    assert library.load(folder).answer(2) == 42
    assert len(compiled) == 1
    assert len(caplog.records) == 1
    assert "each process compiles it" in caplog.text


def test_what_does_not_compile_is_an_error_each_time_and_compiled_once(folder, compiled):
    (folder / "answer.cpp").write_text("no C++\n")
    for _ in range(2):
        with pytest.raises(CompileError, match=r"cannot compile .*here/cpp(.|\n)*error") as told:
            library.load(folder)
    assert "-O3" in told.value.options
    assert told.value.log
    assert len(compiled) == 1
    assert list(library.path_of(folder).parent.iterdir()) == []


def test_a_killed_compiler_is_told(folder, monkeypatch):
    monkeypatch.setattr(library, "command", lambda folder, target: ["sh", "-c", f"echo half > {target}; kill -9 $$"])
    with pytest.raises(CompileError, match="ended by signal 9"):
        library.load(folder)
    assert list(library.path_of(folder).parent.iterdir()) == []


def test_what_cannot_be_loaded_is_told(folder, monkeypatch):
    monkeypatch.setattr(library, "command", lambda folder, target: ["sh", "-c", f"echo half > {target}"])
    with pytest.raises(CompileError, match="cannot be loaded"):
        library.load(folder)


def test_what_a_killed_process_left_goes_after_an_hour(folder):
    kept = library.path_of(folder)
    kept.parent.mkdir(parents=True, mode=0o700)
    old = kept.parent / "tmpold.so"
    old.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    library.load(folder)
    assert not old.exists()


def test_without_a_compiler(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerUnavailable, match=r"no C\+\+ compiler"):
        library.load(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_a_fork_takes_no_lock_of_a_thread_that_compiles(folder, monkeypatch):
    begun, go_on, real = threading.Event(), threading.Event(), library._compile

    def slowly(*given):
        begun.set()
        assert go_on.wait(60)
        real(*given)

    monkeypatch.setattr(library, "_compile", slowly)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        parent = pool.submit(library.load, folder)
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            go_on.set()
            os._exit(0 if library.load(folder).answer(2) == 42 else 1)
        try:
            assert os.waitpid(child, 0)[1] == 0, "the child waits for a lock that nobody will release"
        finally:
            go_on.set()
        assert parent.result().answer(2) == 42


def test_many_processes_at_once_end_in_one_file(folder):
    code = f"from pathlib import Path; from saccade.native import library; assert library.load(Path({str(folder)!r})).answer(2) == 42"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait(300) for process in started] == [0] * 4
    assert [p.suffix for p in library.path_of(folder).parent.iterdir()] == [".so"]


def test_the_compiler_that_was_asked_for(folder, monkeypatch):
    found = shutil.which("g++") or shutil.which("c++")
    monkeypatch.setenv("CXX", str(found))
    assert library.command(folder, Path("x"))[0] == found


def test_the_compiler_may_have_arguments_and_a_path_with_spaces(folder, monkeypatch, tmp_path):
    found = shutil.which("g++") or shutil.which("c++")
    monkeypatch.setenv("CXX", f"env {found} -DVALUE_TOO=1")
    assert library.command(folder, Path("x"))[:3] == [shutil.which("env"), found, "-DVALUE_TOO=1"]
    assert library.load(folder).answer(2) == 42
    spaced = tmp_path / "a folder" / "g++"
    spaced.parent.mkdir()
    spaced.symlink_to(str(found))
    monkeypatch.setenv("CXX", str(spaced))
    assert library.command(folder, Path("x"))[0] == str(spaced)
    for wrong in ("'g++", "no-such-compiler g++", " "):
        monkeypatch.setenv("CXX", wrong)
        assert no_compiler() == f"no C++ compiler was found: CXX is {wrong!r}, which is no program here"


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("text", ["no interpreter\n", "#!/no/such/interpreter\n"], ids=["no #!", "missing interpreter"])
def test_a_compiler_that_cannot_be_run_is_told(folder, monkeypatch, tmp_path, text):
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    with pytest.raises(CompilerUnavailable, match="compiler cannot be run"):
        library.load(folder)


def test_a_compiler_that_hangs_is_told_and_ended(folder, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", "#!/bin/sh\nsleep 1000 &\nsleep 1000\n"))
    monkeypatch.setattr(compiler, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(compiler, "MOST_SECONDS", 0.6)
    began = time.monotonic()
    with pytest.raises(CompilerUnavailable, match=r"compiler took more than 1 s to compile .*here/cpp, and was ended"):
        library.load(folder)
    assert time.monotonic() - began < 60  # the compiler sleeps for 1,000 s
    (said,) = [record.message for record in caplog.records]
    assert "has been compiling" in said


def test_a_library_that_fits_but_cannot_be_loaded_is_compiled_once_more(folder, compiled):
    """As a compiler leaves it that "succeeds" with an empty file, or one for another C library."""
    path = library.path_of(folder)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no library" + seal(path.name, b"no library"))
    path.chmod(0o600)
    assert library.load(folder).answer(2) == 42
    assert len(compiled) == 1
    assert is_sealed(path)
    assert path.stat().st_size > 1000


def test_what_cannot_be_loaded_is_not_kept(folder, compiled, monkeypatch):
    real = library.command
    monkeypatch.setattr(library, "command", lambda folder, target: ["sh", "-c", f"echo half > {target}"])
    with pytest.raises(CompileError, match="cannot be loaded"):
        library.load(folder)
    assert list(library.path_of(folder).parent.iterdir()) == []
    monkeypatch.setattr(library, "command", real)
    forget()
    assert library.load(folder).answer(2) == 42


def test_where_nothing_may_be_loaded_from_the_cache_it_is_loaded_from_temporary_files(folder, monkeypatch, caplog):
    def refuse(path, real=library.ctypes.CDLL):
        if "/tmpsaccade-" not in path:
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(library.ctypes, "CDLL", refuse)
    assert library.load(folder).answer(2) == 42
    (said,) = [record.message for record in caplog.records]
    assert "failed to map segment" in said
    assert "each process compiles it" in said
    assert list(library.path_of(folder).parent.iterdir()) == []


def test_without_temporary_files_the_cache_serves(folder, monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(kept.tempfile, "gettempdir", none)
    assert library.load(folder).answer(2) == 42
    assert [p.suffix for p in library.path_of(folder).parent.iterdir()] == [".so"]
    forget()
    monkeypatch.setenv("SACCADE_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(CompilerUnavailable, match="no place for temporary files"):
        library.load(folder)


def test_temporary_files_where_others_write_do_not_serve(folder, monkeypatch, tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setattr(kept.tempfile, "gettempdir", lambda: str(open_to_all))
    with kept.Workplace(tmp_path) as here:
        assert here.parent == tmp_path
    assert not here.exists()
    assert list(open_to_all.iterdir()) == []
