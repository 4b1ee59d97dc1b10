"""Compiling the C++ path: in the background, once, and with a reason where it is impossible."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from saccade import native
from saccade.native import build, compiler, cuda, kept
from saccade.native.build import Build, status
from saccade.native.described import ADDRESS, FIXED, KEYS, QUERIES, SEQUENCES, Described, Moved, Number
from saccade.native.sealed import MARK, is_sealed, seal
from saccade.native.triton import describe


@pytest.fixture(autouse=True)
def wanted(monkeypatch):
    monkeypatch.setenv("SACCADE_NATIVE", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_source_compiles():
    """Elsewhere a module that is not there is a reason to skip; where there is a compiler, it has to be there."""
    ours = Build()
    if ours.refusal:
        pytest.skip(ours.refusal)
    assert ours.wait() is not None, ours.refusal


@pytest.mark.skipif(sys.platform != "linux", reason="reads the libraries of a process as Linux tells them")
def test_the_module_shares_the_streams_of_the_process(tmp_path):
    """A copy of the C++ library of its own ended in a segmentation fault where an error told a size."""
    if compiler.compiler() is None:
        pytest.skip("no C++ compiler was found")
    shared = compiler.standard_library()
    if not shared:
        pytest.skip("this process has another C++ library than libstdc++")
    assert shared[0] in build.command(tmp_path / "x")
    source = tmp_path / "told.cpp"
    source.write_text("#include <sstream>\nint told(int n) { std::ostringstream s; s << n; return s.str().size(); }\n")
    sizes = []
    for number, words in enumerate(((), shared)):
        made = tmp_path / f"told{number}.so"
        # as where the compiler has no shared one
        command = [*compiler.compiler(), "-static-libstdc++", "-shared", "-fPIC", str(source), *words, "-o", str(made)]
        subprocess.run(command, check=True)
        sizes.append(made.stat().st_size)
    if sizes[0] < 500_000:
        pytest.skip("this compiler has no static libstdc++")
    assert sizes[1] < 100_000


def test_it_is_compiled_beside_the_program(tmp_path, monkeypatch):
    # a slow compiler that copies an existing module
    folder, there = tmp_path, Build()
    if there.wait() is None:
        pytest.skip(there.refusal)
    library = build.library()
    slow = folder / "compile.py"
    slow.write_text(f"import shutil, sys, time\ntime.sleep(4)\nshutil.copy({str(library)!r}, sys.argv[1])\n")
    elsewhere = folder / "again"
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(elsewhere))
    monkeypatch.setattr(build, "command", lambda target: [sys.executable, str(slow), str(target)])
    ours = Build()
    start = time.monotonic()
    assert ours.poll() is None
    assert time.monotonic() - start < 3  # the call does not wait for the compiler, which takes 4 s
    module = ours.wait(60)
    assert module is not None
    assert len(module.Memory()) == 0
    assert [p.suffix for p in (elsewhere / "native").iterdir()] == [".so"]
    assert Build().poll() is not None  # the next process finds it


def test_what_does_not_compile_is_said_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(build, "command", lambda target: [sys.executable, "-c", "import sys; sys.exit('no such header')"])
    ours = Build()
    if ours.refusal:
        pytest.skip(ours.refusal)
    assert ours.wait() is None
    assert "no such header" in ours.refusal
    assert ours.poll() is None
    assert len(caplog.records) == 1
    assert list((folder / "native").iterdir()) == []


@pytest.fixture
def copied(folder, monkeypatch):
    """A compiler that copies the module which this machine has compiled; the count of its runs is the length of the file "runs"."""
    monkeypatch.delenv("SACCADE_CACHE_DIR")
    there = Build()
    if there.wait() is None:
        pytest.skip(there.refusal)
    unsealed, kept = folder / "unsealed", build.library().read_bytes()
    unsealed.write_bytes(kept[: -len(MARK) - 32])
    compile_it = folder / "compile.py"
    compile_it.write_text(
        f"import shutil, sys\nopen({str(folder / 'runs')!r}, 'a').write('.')\nshutil.copy({str(unsealed)!r}, sys.argv[1])\n"
    )
    monkeypatch.setenv("SACCADE_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(build, "command", lambda target: [sys.executable, str(compile_it), str(target)])
    return folder


def runs(folder) -> int:
    return len((folder / "runs").read_text())


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: b"",
        lambda kept: b"no library",
        lambda kept: kept[:-1],
        lambda kept: kept[:-1] + bytes([kept[-1] ^ 1]),
        lambda kept: kept[:5000] + bytes([kept[5000] ^ 1]) + kept[5001:],
        lambda kept: kept[: -len(MARK) - 32],
        lambda kept: kept[: -len(MARK) - 32] + seal("another.so", kept[: -len(MARK) - 32]),
    ],
    ids=["empty", "foreign", "truncated", "another digest", "one bit", "no digest", "swapped"],
)
def test_a_damaged_file_is_never_loaded_and_compiled_anew(copied, damage, caplog):
    assert Build().wait() is not None
    library = build.library()
    whole = library.read_bytes()
    assert runs(copied) == 1
    assert Build().poll() is not None  # whole, it is loaded
    assert runs(copied) == 1
    # a file of its own: this process has mapped the other
    (copied / "damaged").write_bytes(damage(whole))
    (copied / "damaged").replace(library)
    library.chmod(0o600)
    ours = Build()
    assert ours.poll() is None
    assert ours.wait(60) is not None
    assert library.read_bytes() == whole
    assert runs(copied) == 2
    assert not caplog.records


def test_a_library_is_closed_to_others(copied):
    before = os.umask(0)
    try:
        assert Build().wait() is not None
    finally:
        os.umask(before)
    library = build.library()
    assert stat.S_IMODE(library.stat().st_mode) == 0o600
    assert stat.S_IMODE(library.parent.stat().st_mode) == stat.S_IMODE(library.parent.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["folder", "file"])
def test_nothing_is_loaded_from_where_others_write(copied, what, caplog):
    assert Build().wait() is not None
    library = build.library()
    (library.parent if what == "folder" else library).chmod(0o777)
    ours = Build()
    assert ours.wait() is None
    assert "can be written by other users (mode 0777); chmod go-w closes it" in ours.refusal
    assert len(caplog.records) == 1
    assert ours.poll() is None
    assert runs(copied) == 1


def test_a_killed_compiler_is_told(copied, monkeypatch, caplog):
    monkeypatch.setattr(build, "command", lambda target: ["sh", "-c", f"echo half > {target}; kill -9 $$"])
    ours = Build()
    assert ours.wait(60) is None
    assert "cannot compile calls.cpp (it was ended by signal 9)" in ours.refusal
    assert len(caplog.records) == 1
    assert list(build.library().parent.iterdir()) == []


def test_what_a_killed_process_left_goes_after_an_hour(copied):
    build.library().parent.mkdir(parents=True, mode=0o700)
    old, new = (build.library().parent / name for name in ("tmpold.so", "tmpnew.log"))
    for path in (old, new):
        path.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    assert Build().wait(60) is not None
    assert not old.exists()
    assert new.exists()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_once(copied, monkeypatch, caplog):
    monkeypatch.setattr(kept.tempfile, "mkdtemp", full)
    ours = Build()
    assert ours.wait() is None
    assert "No space left on device" in ours.refusal
    assert len(caplog.records) == 1


def test_where_the_cache_is_full_the_module_is_loaded_from_temporary_files(copied, monkeypatch, caplog):
    monkeypatch.setattr(kept, "seal", full)
    assert Build().wait(60) is not None
    assert list(build.library().parent.iterdir()) == []
    assert not caplog.records


def test_a_compiler_that_hangs_is_ended(copied, monkeypatch, caplog):
    monkeypatch.setattr(build, "command", lambda target: ["sleep", "1000"])
    monkeypatch.setattr(compiler, "MOST_SECONDS", 0.3)
    ours = Build()
    assert ours.wait(30) is None
    assert "sleep took more than 0 s to compile calls.cpp, and was ended" in ours.refusal
    assert len(caplog.records) == 1


def test_a_child_of_a_fork_leaves_the_compilation_to_its_parent(copied, monkeypatch):
    monkeypatch.setattr(build, "command", lambda target: ["sleep", "1000"])
    ours = Build()
    monkeypatch.setattr(native, "calls", None)
    monkeypatch.setattr(native, "_build", ours)
    assert ours.poll() is None
    child = os.fork()
    if child == 0:
        os._exit(0 if native._build is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert native._build is ours
    assert ours._folder.path.is_dir()
    ours._compilation.stop()


def test_many_builds_at_once_end_in_one_file(copied):
    ours = [Build() for _ in range(8)]
    for one in ours:
        assert one.poll() is None
    assert all(one.wait(60) is not None for one in ours)
    assert runs(copied) == 8
    assert [p.suffix for p in build.library().parent.iterdir()] == [".so"]
    assert is_sealed(build.library().name, build.library().read_bytes())


@pytest.mark.parametrize(
    ("name", "value", "reason"), [("SACCADE_NATIVE", "0", "SACCADE_NATIVE is 0"), ("CXX", "no-such-compiler", "no C++ compiler")]
)
def test_reasons_not_to(monkeypatch, name, value, reason):
    monkeypatch.setenv(name, value)
    ours = Build()
    assert reason in ours.refusal
    assert ours.wait() is None
    assert reason in status()


def test_without_a_driver_python_goes_on(monkeypatch):
    monkeypatch.setattr(native, "calls", None)
    monkeypatch.setattr(native, "_starts", 0)
    monkeypatch.setattr(native, "_build", SimpleNamespace(poll=lambda: SimpleNamespace(has_driver=lambda: False)))
    native.start(lambda: pytest.fail("not ready"))
    assert native.calls is None


def test_a_call_on_a_cpu_compiles_nothing():
    code = (
        "import torch, saccade; x = torch.zeros(1, 1, 4, 8); saccade.attention(x, x, x, backend='reference'); "
        "from saccade import native; assert native._build is None and native.calls is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def compiled(signature, **changes):
    metadata = {"num_ctas": 1, "num_warps": 4, "shared": 1024, "global_scratch_size": 0, "launch_pdl": False} | changes
    return SimpleNamespace(metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature), function=77)


SIGNATURE = {
    "q": "*bf16",
    "out": "*bf16",
    "strides": ("i64", "constexpr"),
    "n": "i32",
    "p": "fp32",
    "BLOCK": "constexpr",
    "flag": "i1",
}


AT = 1 << 40  # an address


def test_a_triton_kernel_as_a_launch(monkeypatch):
    monkeypatch.setattr("saccade.native.triton._behind", lambda function, sizes: 2 if sizes == [8, 8, 8, 4, 4, 1] else None)
    found = describe(compiled(SIGNATURE), (9, 2, 1), (AT, AT + 64, (4096, 1), -5, 0.5, 32, True))
    function, grid, threads, shared, slots, values, moved, per_sequence, tile = found
    assert (moved, per_sequence, tile) == ((), 0, 0)
    assert (function, grid, threads, shared) == (77, (9, 2, 1), 128, 1024)
    assert slots == (ADDRESS, ADDRESS, *[FIXED] * 6)
    half = int.from_bytes(bytes.fromhex("0000003f") + bytes(4), "little")
    assert values == (AT, AT + 64, 4096, 0xFFFFFFFB, half, 1, 0, 0)
    assert torch.tensor([0.5]).view(torch.int32).item() == half


def test_numbers_that_change_from_batch_to_batch(monkeypatch):
    monkeypatch.setattr("saccade.native.triton._behind", lambda function, sizes: 0 if sizes == [8, 8, 8, 4, 4, 1] else None)
    arguments = (AT, AT, (Number(4096, FIXED), 1), Number(5, SEQUENCES), 0.5, 32, True)
    found = describe(compiled(SIGNATURE), (9, 1, 1), arguments, 12)
    assert (found.slots[2:], found.values[2:4], found.per_sequence) == ((FIXED, SEQUENCES, FIXED, FIXED), (4096, 0), 12)


@pytest.mark.parametrize("changes", [{"num_ctas": 2}, {"global_scratch_size": 128}, {"launch_pdl": True}])
def test_kernels_that_want_more_stay_with_python(changes):
    assert describe(compiled(SIGNATURE, **changes), (9, 1, 1), (AT, AT, (4096, 1), -5, 0.5, 32, True)) is None


def test_arguments_that_do_not_fit_the_kernel_stay_with_python(monkeypatch):
    monkeypatch.setattr("saccade.native.triton._behind", lambda function, sizes: None)
    assert describe(compiled(SIGNATURE), (9, 1, 1), (AT, AT, (4096, 1), -5, 0.5, 32, True)) is None
    assert describe(compiled({"x": "fp8e5"}), (9, 1, 1), (1.0,)) is None


def bound(grid=(9, 2), block=256, dependent=False):
    shape = SimpleNamespace(grid=grid, block=block, shared_bytes=1024)
    return SimpleNamespace(function=77, shape=shape, dependent=dependent, numbers=(5, 6))


MAP = (AT, (Number(4, KEYS), 64), (128,), (1, 64))


def test_a_kernel_in_cuda_as_a_launch():
    found = cuda.describe(bound(), (AT + 16, Number(12, FIXED), Number(7, QUERIES)), (MAP,))
    moved = (Moved(ADDRESS, AT, (KEYS, 64), (128,), (1, 64)),)
    assert found == Described(77, (9, 2, 1), 256, 1024, (ADDRESS, FIXED, QUERIES, FIXED, FIXED), (AT + 16, 12, 0, 5, 6), moved)
    assert cuda.describe(bound(grid=3), (), ()).grid == (3, 1, 1)


def test_launches_in_cuda_that_want_more_stay_with_python():
    assert cuda.describe(bound(dependent=True), (), (MAP,)) is None
    assert cuda.describe(bound(block=(32, 4)), (), (MAP,)) is None
    assert cuda.describe(bound(), (), (MAP,) * 9) is None
    assert cuda.describe(bound(), (AT,) * 95, ()) is None
