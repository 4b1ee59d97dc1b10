"""Counts the instructions of the Volta kernels for one tile, from their machine code and without a GPU, and the clocks that each pipe of a V100
needs for them.

In each kernel's loop over tiles, the instructions on the path of a fully visible tile that raises no maximum are counted (the
other paths are cut out of a copy of the sources). A pipe's clocks are those of one of the four schedulers of a multiprocessor.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

# `tools` and `volta_common` lie there
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from saccade.exact.volta import launchers
from saccade.exact.volta.launchers import Features
from saccade.launch.cuda import CudaLaunch
from saccade.nvrtc import Options, Source, compile_cubin
from tools.cubin import disassemble

# TFLOP/s of a V100-SXM2 at 1.53 GHz: an m8n8k4 a scheduler in 8 clocks
PEAK = 125.3
# clocks of a pipe for one instruction of a warp. Shared memory delivers 128 bytes per clock to four schedulers, and is assumed to
# deliver no more where lanes read the same address; conversions between float and half are assumed to be as slow as exponentials
PIPES = {
    # an m8n8k4 is four of them with float32 sums, and two with float16 sums
    "tensor": {"HMMA": 2, "HMMA.F16": 4},
    "shared": {"LDS.128": 16, "LDS.64": 8, "LDS": 4, "STS.128": 16, "STS.64": 8, "STS": 4, "SHFL": 4, "RED": 4, "ATOMS": 4},
    "special": {"MUFU": 8, "F2F": 8},
    "float": {"FFMA": 2, "FMUL": 2, "FADD": 2, "IMAD": 2, "IMAD.WIDE": 4},
}
OTHER = {"BAR", "BRA", "NOP", "BSSY", "BSYNC", "BMOV", "LD", "LDG", "STG", "LDL", "STL", "S2R", "CS2R"}
OTHER.update(name for pipe in PIPES.values() for name in pipe)


def loop_of(assembly: str) -> list[str]:
    """The instructions of the smallest loop that holds every matrix instruction of a loop."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;]*);", line):
            instructions.append(found[1])
    jumps = (
        (labels.get(m[1], len(instructions)), i) for i, x in enumerate(instructions) if (m := re.search(r"^BRA.*?(\.L_\w+)", x))
    )
    loops = [instructions[first : last + 1] for first, last in jumps if first <= last]
    return max(loops, key=lambda body: (sum(x.startswith("HMMA") for x in body), -len(body)))


def name_of(instruction: str) -> str:
    """The instruction as `PIPES` names it."""
    name = instruction.split()[0]
    base = name.split(".")[0]
    if base == "HMMA" and ".F16.F16" in name:
        return "HMMA.F16"
    widths = {"LDS": (".128", ".64"), "STS": (".128", ".64"), "IMAD": (".WIDE",)}
    return base + next((width for width in widths.get(base, ()) if width in name), "")


def counts(call: CudaLaunch, whole: bool = True) -> Counter[str]:
    """Instructions of a kernel's loop on sm_70; not whole: for a tile that the causal edge cuts."""
    return _counts(call.source, call.options, whole)


@functools.cache
def _counts(source: Source, options: Options, whole: bool) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        for file in source.path.parent.iterdir():
            text = re.sub(r"const bool whole = [^;]*;", f"const bool whole = {str(whole).lower()};", file.read_text())
            (Path(folder) / file.name).write_text(text.replace("if (any_lane(rises))", "if (false)"))
        path = shutil.copy(Path(folder) / source.path.name, Path(folder) / "counted.cu")
        return Counter(name_of(x) for x in loop_of(disassemble(compile_cubin(Source(Path(path), source.headers), 70, options))))


def clocks(found: Counter[str]) -> dict[str, float]:
    """Clocks of each pipe for one tile of one warp."""
    pipes = {pipe: float(sum(found[name] * cost for name, cost in costs.items())) for pipe, costs in PIPES.items()}
    pipes["integer"] = 2.0 * sum(n for name, n in found.items() if name not in OTHER)
    pipes["issue"] = float(found.total())
    return pipes


def span(found: Counter[str]) -> tuple[float, float]:
    """Clocks of a scheduler for one tile of one warp: if all pipes overlap, and if products overlap only with their own loads."""
    pipes = clocks(found)
    alone = max(pipes["tensor"], pipes["shared"]) + found.total() - found["HMMA"] - found["HMMA.F16"] - found["LDS.128"]
    return max(pipes.values()), alone


def calls(dim: int, is_causal: bool, dropout_p: float) -> dict[str, CudaLaunch]:
    """The launches that are predicted, described for an sm_70."""
    x, rows = torch.empty(1, 1, 4096, dim, dtype=torch.float16), torch.empty(1, 1, 4096)
    sums, seed = torch.empty(1, 1, 4096, dim), torch.empty(1, dtype=torch.int64) if dropout_p else None
    operands, features = (x, x, x, None, None, seed), Features(is_causal, dropout_p, dim**-0.5)
    gradients = (x, rows, rows, rows, sums, x, x)
    return {
        "forward": launchers.forward_call(*operands, x, rows, features, 70),
        "forward, float16 sums": launchers.forward_call(*operands, x, rows, features._replace(half_sums=True), 70),
        "backward": launchers.backward_call(*operands, *gradients, features, 70),
        "backward, float16 sums": launchers.backward_call(*operands, *gradients, features._replace(half_sums=True), 70),
    }
