"""The cache on disk under everything that a disk and other processes do to it: the right cubin or one warning, and never a foreign one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import stat
import tempfile
import time
import warnings

import pytest

from saccade.errors import CompilerUnavailable
from saccade.nvrtc import Options, Source, compile_cubin, compiler, store
from saccade.nvrtc.toolchain import find_nvrtc

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
TWICE = Options.of({"FACTOR": 2})
PROCESSES = 32


@pytest.fixture(autouse=True)
def nvrtc():
    try:
        find_nvrtc()
    except CompilerUnavailable as error:
        pytest.skip(str(error))


def entries(cache):
    return [p for p in (cache / "entries").rglob("*") if p.is_file()]


def in_child(work) -> int:
    """The process id of a child that runs `work` and ends with 0 if it returned something true and nothing was warned of."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                code = 0 if work() else 1
        finally:
            os._exit(code)
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_many_processes_compile_one_kernel_at_once(fill, cache, tmp_path):
    """All begin together, most compile, all write: one entry stays, and each process has the same cubin."""
    begin_read, begin_write = os.pipe()

    def work(n):
        os.close(begin_write)
        os.read(begin_read, 1)  # ends when the parent closes its end
        cubin = compile_cubin(fill, 90, TWICE)
        (tmp_path / f"digest-{n}").write_text(hashlib.sha256(cubin).hexdigest())
        return cubin[:4] == b"\x7fELF"

    children = [in_child(lambda n=n: work(n)) for n in range(PROCESSES)]
    os.close(begin_write)
    assert [code_of(child) for child in children] == [0] * PROCESSES
    os.close(begin_read)
    assert len({p.read_text() for p in tmp_path.glob("digest-*")}) == 1
    assert store.contents().entries == 1
    assert list((cache / "tmp").iterdir()) == []
    compiler.forget()
    assert hashlib.sha256(compile_cubin(fill, 90, TWICE)).hexdigest() == (tmp_path / "digest-0").read_text()


@pytest.mark.parametrize("moment", ["compiling", "writing", "renaming"])
def test_a_killed_process_leaves_nothing_that_counts(fill, cache, monkeypatch, moment):
    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        if moment == "compiling":
            compiler.build = die
        else:
            setattr(os, "fsync" if moment == "writing" else "replace", die)
        return compile_cubin(fill, 90, TWICE)

    assert code_of(in_child(work)) == -signal.SIGKILL
    if moment == "compiling":
        assert store.contents().entries == 0
    else:
        left = list((cache / "tmp").iterdir())
        assert len(left) == 1
        os.utime(left[0], (time.time() - 7200,) * 2)
    assert store.contents().entries == 0
    assert compile_cubin(fill, 90, TWICE)[:4] == b"\x7fELF"
    assert store.contents().entries == 1
    assert list((cache / "tmp").iterdir()) == []  # what is older than an hour goes when the folder is opened


def test_swapped_entries_are_compiled_again(fill, cache):
    """Two whole files under each other's names: each has a checksum of its own key."""
    doubled, tripled = compile_cubin(fill, 90, TWICE), compile_cubin(fill, 90, Options.of({"FACTOR": 3}))
    assert doubled != tripled
    one, other = entries(cache)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    compiler.forget()
    assert compile_cubin(fill, 90, TWICE) == doubled
    assert compile_cubin(fill, 90, Options.of({"FACTOR": 3})) == tripled
    assert {p.read_bytes() for p in (one, other)} >= {kept}


def failing(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("where", ["mkstemp", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_takes_nothing_costs_one_warning(fill, monkeypatch, where, number):
    monkeypatch.setattr(tempfile if where == "mkstemp" else os, where, failing(number))
    with pytest.warns(RuntimeWarning, match="cannot write its cache") as caught:
        cubins = [compile_cubin(fill, a, TWICE) for a in (90, 80)]
    assert len(caught) == 1
    assert all(c[:4] == b"\x7fELF" for c in cubins)


def test_a_disk_that_cannot_be_written_is_still_read(fill, monkeypatch):
    cubin = compile_cubin(fill, 90, TWICE)
    compiler.forget()
    store.forget()
    for owner, name in ((os, "utime"), (os, "replace"), (tempfile, "mkstemp"), (os, "chmod")):
        monkeypatch.setattr(owner, name, failing(errno.EROFS))
    monkeypatch.setattr(compiler, "build", lambda *args: pytest.fail("it lies on the disk"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cubin(fill, 90, TWICE) == cubin


def test_no_lock_of_files_is_needed(fill, monkeypatch):
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, failing(errno.ENOLCK))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_cubin(fill, 90, TWICE)
    assert store.contents().entries == 1


def test_an_entry_that_cannot_be_read_costs_one_warning(fill, cache):
    cubin = compile_cubin(fill, 90, TWICE)
    (path,) = entries(cache)
    path.unlink()
    path.mkdir()
    compiler.forget()
    with pytest.warns(RuntimeWarning, match="cannot read its cache") as caught:
        assert compile_cubin(fill, 90, TWICE) == cubin
    assert len(caught) == 1


def test_nobody_else_can_enter_or_write(fill, cache):
    before = os.umask(0)
    try:
        compile_cubin(fill, 90, TWICE)
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in entries(cache)} == {0o600}


def test_a_folder_that_others_can_write_is_not_used(fill, cache, monkeypatch):
    """Whoever can write there can make a file with the right checksum."""
    compile_cubin(fill, 90, TWICE)
    (path,) = entries(cache)
    key = compiler.key_of(fill, "90", TWICE, find_nvrtc())
    path.write_bytes(store.pack(key, b"somebody's code"))
    compiler.forget()
    assert compile_cubin(fill, 90, TWICE) == b"somebody's code"  # the checksum alone does not help
    cache.chmod(0o777)
    compiler.forget()
    store.forget()
    with pytest.warns(
        RuntimeWarning, match=rf"cannot use its cache .*{cache} can be written by other users .*chmod go-w"
    ) as caught:
        cubins = [compile_cubin(fill, a, TWICE) for a in (90, 80)]
    assert [c[:4] for c in cubins] == [b"\x7fELF"] * 2
    assert len(caught) == 1
    assert len(entries(cache)) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_not_used(fill, cache):
    cache.mkdir(parents=True, mode=0o700)
    os.chown(cache, 12345, -1)
    with pytest.warns(RuntimeWarning, match="belongs to user 12345, not to 0"):
        assert compile_cubin(fill, 90, TWICE)
    assert list(cache.iterdir()) == []


def test_cubins_in_memory_are_bounded(fill, monkeypatch):
    monkeypatch.setattr(compiler, "_MOST_IN_MEMORY", 3)
    made = [compile_cubin(fill, 90, Options.of({"FACTOR": n})) for n in range(5)]
    assert len(compiler._memory) == 3
    monkeypatch.setattr(compiler, "build", lambda *args: pytest.fail("it lies on the disk"))
    assert [compile_cubin(fill, 90, Options.of({"FACTOR": n})) for n in range(5)] == made


def test_a_source_that_changes_gets_another_entry(fill):
    before = compile_cubin(fill, 90, TWICE)
    fill.path.write_text(fill.path.read_text().replace("VALUE * FACTOR", "VALUE + FACTOR"))
    compiler.forget()
    assert compile_cubin(Source(fill.path, fill.headers), 90, TWICE) != before
    assert store.contents().entries == 2
