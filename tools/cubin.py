"""Reads a cubin on a machine without a GPU: kernels, registers, spills and instructions, with the binary utilities of the Triton
wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """The resources of a kernel. stack: bytes of local memory per thread, which hold spills. shared: bytes of static shared
    memory."""

    registers: int
    stack: int
    shared: int


def disassemble(cubin: bytes) -> str:
    """The machine instructions of every kernel in a cubin."""
    # without the analysis of branches and without data, which are not needed
    return _tool("nvdisasm", cubin, "-ndf", "-c")


def resource_usage(cubin: bytes) -> dict[str, Usage]:
    """Kernel name -> its resources as reported by the assembler."""
    found = re.findall(r"Function ([^\s:]+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))
    return {name: Usage(int(registers), int(stack), int(shared)) for name, registers, stack, shared in found}


def instructions_of(cubin: bytes) -> str:
    """A digest of the machine code of every kernel in a cubin, whose format is ELF: of the sections `.text.<kernel>`."""
    start, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<II8x8xQQ", cubin, start + size * i) for i in range(count)]
    found = []
    for name, _, offset, length in headers:
        at = headers[names][2] + name
        label = cubin[at : cubin.index(b"\0", at)]
        if label.startswith(b".text."):
            found.append(label + b"\0" + cubin[offset : offset + length])
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()[:16]


def issue_clocks(cubin: bytes, begin: str, end: str) -> int:
    """The clocks that a single warp needs from the last instruction that matches `begin` to the last one that matches `end`, not
    counting waits
    for results: the sum of the stall counts that ptxas writes into bits 105 to 108 of each instruction (sm_70 and later)."""
    lines = re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/", _tool("nvdisasm", cubin, "-hex")
    )
    last = max(i for i, (code, _) in enumerate(lines) if re.search(end, code))
    first = max(i for i, (code, _) in enumerate(lines[:last]) if re.search(begin, code))
    return sum(int(high, 16) >> 41 & 15 for _, high in lines[first:last])


def utility(name: str) -> Path:
    """A binary utility of the Triton wheel. Triton is not imported, because that would fix its interpreter switch."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise RuntimeError(f"{name} comes with Triton, which is not installed")
    return Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name


def _tool(name: str, cubin: bytes, *flags: str) -> str:
    """The output of a binary utility for a cubin."""
    program = utility(name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, *flags, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout
