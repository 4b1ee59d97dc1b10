"""Missing components are reported in one sentence; architectures and their names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from saccade.errors import CompilerUnavailable, InvalidArgument
from saccade.nvrtc import ARCHITECTURES, architecture_for, obstacles, toolchain
from saccade.nvrtc.architecture import architecture_named
from saccade.nvrtc.toolchain import Nvrtc, refusal

NEWER = Nvrtc((13, 0), (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))
LAST_12 = Nvrtc((12, 9), (50, 60, 70, 75, 80, 86, 89, 90, 100, 103, 120, 121))
EARLY_12 = Nvrtc((12, 4), (50, 60, 70, 75, 80, 86, 89, 90))


def test_the_last_nvrtc_12_compiles_for_all():
    assert [refusal(LAST_12, a) for a in ARCHITECTURES] == [None] * len(ARCHITECTURES)


def test_nvrtc_13_refuses_volta_and_says_what_to_install():
    assert refusal(NEWER, "75") is None
    assert refusal(NEWER, "70") == (
        'sm_70 needs NVRTC 12 (12.9 is the last that compiles for it, and may be installed beside another), found NVRTC 13.0: pip install "saccade-attention[cu12]"'
    )


def test_an_early_nvrtc_refuses_what_it_does_not_know():
    assert refusal(EARLY_12, "90a") is None
    assert refusal(EARLY_12, "120") == (
        "NVRTC 12.4 does not compile for sm_120, only up to sm_90: "
        'pip install --upgrade "saccade-attention[cu12]" (12.8 and later know sm_120)'
    )


def test_a_compile_for_volta_with_nvrtc_13_raises_that_sentence(fill, monkeypatch):
    from saccade.nvrtc import compile_cubin

    monkeypatch.setattr(toolchain, "find_all", lambda: (NEWER,))
    with pytest.raises(CompilerUnavailable, match="sm_70 needs NVRTC 12 "):
        compile_cubin(fill, 70)


@pytest.mark.parametrize(
    ("capability", "name"), [(70, "70"), (72, "70"), (75, "75"), (87, "86"), (90, "90"), (103, "100"), (121, "120")]
)
def test_a_device_runs_the_latest_of_its_major(capability, name):
    assert architecture_for(capability) == name


@pytest.mark.parametrize("capability", [61, 110])
def test_a_device_of_another_major_gets_a_sentence(capability):
    with pytest.raises(InvalidArgument, match=f"no source is compiled for compute capability {capability}"):
        architecture_for(capability)


def test_names_of_architectures():
    assert [architecture_named(n) for n in (90, "90", "sm_90", "sm_90a")] == ["90", "90", "90", "90a"]
    with pytest.raises(InvalidArgument, match="architecture is 'sm_90b'; allowed are 70, 75"):
        architecture_named("sm_90b")


def run_without(module: str, script: str) -> list[str]:
    """Output of a fresh process in which importing `module` fails."""
    blocked = f"import sys; sys.modules[{module!r}] = None\n"
    done = subprocess.run([sys.executable, "-c", blocked + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("module", ["cuda", "cuda.core"])
def test_without_cuda_core_everything_else_works(module):
    script = (
        "import torch, saccade\n"
        "print(tuple(saccade.attention(*[torch.ones(1, 1, 2, 8)] * 3).shape))\n"
        "from saccade.nvrtc import obstacles\n"
        "print(*obstacles(90), sep='|')"
    )
    shape, sentence = run_without(module, script)
    assert shape == "(1, 1, 2, 8)"
    assert sentence.startswith("CUDA C++ kernels need cuda-core, which is not here (")
    assert sentence.endswith('): pip install "saccade-attention[cu12]" (or "saccade-attention[cu13]", without sm_70)')
    assert "|" not in sentence


def test_a_compile_without_cuda_core_raises_the_sentence():
    script = (
        "from saccade.nvrtc import Source, compile_cubin\n"
        "from saccade.errors import CompilerUnavailable\n"
        f"try: compile_cubin(Source({str(Path(__file__))!r}), 90)\n"
        "except CompilerUnavailable as error: print(error)"
    )
    (sentence,) = run_without("cuda.core", script)
    assert sentence.startswith("CUDA C++ kernels need cuda-core")


def test_the_newest_that_knows_the_architecture_compiles(monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setattr(toolchain, "find_all", lambda: (NEWER, LAST_12))
    assert [toolchain.require(a) for a in ("70", "75", "90a", "120")] == [LAST_12, NEWER, NEWER, NEWER]


def test_the_newest_comes_first_wherever_it_lies(monkeypatch):
    all_three = {Path(nvrtc.name): nvrtc for nvrtc in (LAST_12, NEWER, EARLY_12)}
    libraries = {
        path: SimpleNamespace(version=lambda nvrtc=nvrtc: nvrtc.version, capabilities=lambda nvrtc=nvrtc: nvrtc.capabilities)
        for path, nvrtc in all_three.items()
    }
    monkeypatch.setattr(toolchain, "_wheel_libraries", lambda: list(libraries))
    monkeypatch.setattr(toolchain, "loaded", libraries.__getitem__)
    assert [nvrtc.name for nvrtc in toolchain.find_all.__wrapped__()] == ["13.0", "12.9", "12.4"]


def test_libraries_that_cannot_be_loaded_get_a_sentence(tmp_path, monkeypatch):
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("not a library")
    monkeypatch.setattr(toolchain, "_wheel_libraries", lambda: [broken])
    with pytest.raises(
        CompilerUnavailable, match=rf"NVRTC, which is not here \({re.escape(str(broken))} cannot be loaded: .*pip install"
    ):
        toolchain.find_all.__wrapped__()
    monkeypatch.setattr(toolchain, "_wheel_libraries", list)
    monkeypatch.setattr(toolchain, "_machine_libraries", list)
    with pytest.raises(
        CompilerUnavailable, match=r"which is not here \(no library of it in the wheels of NVIDIA, nor on this machine\)"
    ):
        toolchain.find_all.__wrapped__()


def test_another_library_is_no_nvrtc(tmp_path):
    import _ctypes

    from saccade.nvrtc.library import Library

    with pytest.raises(OSError, match="has no nvrtcVersion"):
        Library(Path(_ctypes.__file__))


def test_wheels_of_two_versions_lie_beside_each_other(tmp_path, monkeypatch):
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        for other in (name, name.replace("libnvrtc.", "libnvrtc.alt."), name.replace("libnvrtc.", "libnvrtc-builtins.") + ".9"):
            (tmp_path / other).touch()
    monkeypatch.setattr(toolchain, "_nvidia_folders", lambda: [tmp_path])
    assert sorted(p.name for p in toolchain._wheel_libraries()) == ["libnvrtc.so.12", "libnvrtc.so.13"]


def test_nvrtc_is_seen_without_cuda_core():
    """`saccade info` then names the missing component, and does not claim that NVRTC was not found."""
    pytest.importorskip("cuda.core")
    script = (
        "from saccade.cli.info import nvrtc\n"
        "found = nvrtc(); print(found['version']); print(*{s for m in found['missing'].values() for s in m}, sep='|')"
    )
    version, missing = run_without("cuda.core", script)
    assert version == " and ".join(n.name for n in toolchain.find_all())
    assert missing.startswith("CUDA C++ kernels need cuda-core, which is not here")


def test_headers_are_of_nvrtcs_own_major(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    for name, version in (("newer", 13000), ("same", 12080), ("silent", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cuda_fp16.h").write_text("")
        if version:
            (tmp_path / name / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")

    def chosen(wheels, machine):
        monkeypatch.setattr(toolchain, "_wheel_folders", lambda: [tmp_path / name for name in wheels])
        monkeypatch.setattr(toolchain, "_machine_folders", lambda: [tmp_path / name for name in machine])
        return [folder.name for folder in toolchain.toolkit_headers.__wrapped__(12)]

    assert chosen(("none", "silent", "newer", "same"), ()) == ["same"]
    assert chosen(("newer",), ("same",)) == ["same"]
    assert chosen(("newer",), ()) == ["newer"]
    assert chosen(("none",), ()) == []


def test_dispatch_may_ask_under_torch_compile():
    @torch.compile(fullgraph=True, backend="eager")
    def traced(x):
        return x + len(obstacles(90))

    assert traced(torch.zeros(())) == len(obstacles(90))
