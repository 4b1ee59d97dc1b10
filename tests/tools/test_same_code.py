"""Machine code is compared by its instructions, and a Triton file by what runs on the host too."""

from __future__ import annotations

import pytest

from saccade.nvrtc import Options, Source, build, obstacles
from tools import same_code
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


def test_the_host_part_of_a_triton_file_has_no_kernels(tmp_path):
    path, kernel = tmp_path / "forward.py", "import triton\n\n\n@triton.jit\ndef kernel(x):\n    return x\n\n\nGRID = 4\n"

    def host_part(text: str) -> list[str]:
        path.write_text(text)
        return same_code._host_part(path)

    assert host_part(kernel.replace("return x", "return x + 1")) == host_part(kernel)
    assert host_part(kernel.replace("4", "5")) != host_part(kernel)


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
