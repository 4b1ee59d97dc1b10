"""Reads the kernels of SDPA's memory-efficient backend for a V100 out of a torch wheel, without a GPU, and counts their instructions.

    python experiments/volta/volta_peer.py torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl [--out benchmarks/results/predictions/volta_peer.csv]

The wheel must be a CUDA build that still has sm_70 code. A kernel is the one that torch takes for full float16 rows of that head
size without dropout and without a bias. Its loop over tiles is followed along the cheapest path that makes every product of a tile:
no bias, no mask, no maximum that rises. The loops over the depth of a product are inside it, one for each product, and each
iteration multiplies 32 x 32 x 32 numbers in a warp; how often one repeats for a tile follows from the tile. So the counts are the
least that the kernel can issue.
"""

from __future__ import annotations

import argparse
import heapq
import re
import subprocess
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from volta_clocks import name_of
from volta_common import write_table

from tools.cubin import Usage, disassemble, resource_usage, utility

LIBRARY = "torch/lib/libtorch_cuda.so"
# of one warp: products of 32 x 32 x 32, in instructions
PRODUCT = 128


class Peer(NamedTuple):
    """A kernel of torch and its tile. trips: for each of its products in the order of its code, how often the loop over the depth
    repeats."""

    direction: str
    dim: int
    name: str
    rows: int
    keys: int
    warps: int
    trips: tuple[int, ...]

    @property
    def products(self) -> int:
        """How often a warp multiplies 32 x 32 x 32 numbers for a tile."""
        return (2 if self.direction == "forward" else 5) * self.rows * self.keys * self.dim // 32**3 // self.warps


# products forward: Q K^T, P V; backward: Q K^T, P^T dO, dO V^T, dS K, dS^T Q
PEERS = (
    Peer("forward", 64, "fmha_cutlassF_f16_aligned_64x64_rf_sm70", 64, 64, 4, (2, 2)),
    Peer("forward", 128, "fmha_cutlassF_f16_aligned_32x128_rf_sm70", 32, 128, 4, (4, 4)),
    Peer("backward", 64, "fmha_cutlassB_f16_aligned_64x64_k64_seqaligned_sm70", 64, 64, 4, (2, 2, 2, 2, 2)),
    Peer("backward", 128, "fmha_cutlassB_f16_aligned_128x64_k128_seqaligned_sm70", 128, 64, 8, (4, 4, 4, 2, 4)),
)


class Block(NamedTuple):
    """Instructions that only run together, and the blocks that may follow."""

    instructions: list[str]
    following: list[int]

    @property
    def multiplies(self) -> int:
        """How many products of 32 x 32 x 32 one pass makes."""
        return sum(x.startswith("HMMA") for x in self.instructions) // PRODUCT


def blocks_of(assembly: str) -> list[Block]:
    """The blocks of one kernel in the order of their addresses."""
    lines: list[tuple[bool, str]] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([^;]*);", line):
            lines.append((bool(found[1]), found[2]))
    heads = {0, *labels.values(), *(i + 1 for i, (_, x) in enumerate(lines) if re.match("BRA|EXIT|RET", x))}
    starts = sorted(x for x in heads if x < len(lines))
    numbers = {start: i for i, start in enumerate(starts)}
    ends = [*starts[1:], len(lines)]
    return [
        Block([x for _, x in lines[start:end]], [numbers[x] for x in _following(lines[end - 1], end, labels) if x in numbers])
        for start, end in zip(starts, ends, strict=True)
    ]


def _following(last: tuple[bool, str], end: int, labels: dict[str, int]) -> list[int]:
    """The places to which control goes after a block's last instruction. A call is not followed: it returns."""
    is_conditional, text = last
    if not re.match("BRA|EXIT|RET", text):
        return [end]
    target = re.search(r"\.L_\w+", text)
    return ([labels[target[0]]] if target else []) + ([end] if is_conditional else [])


def head_of(blocks: list[Block]) -> int:
    """The first block of the smallest loop that holds every product."""
    multiplying = [i for i, block in enumerate(blocks) if block.multiplies]
    loops = [
        (i - head, head)
        for i, block in enumerate(blocks)
        for head in block.following
        if head <= multiplying[0] <= multiplying[-1] <= i
    ]
    return min(loops)[1]


def cheapest(blocks: list[Block], trips: tuple[int, ...], products: int) -> Counter[int]:
    """How often each block runs for a tile, on the path of fewest instructions that makes so many products."""
    repeated = dict(zip((i for i, block in enumerate(blocks) if block.multiplies), trips, strict=True))
    head = head_of(blocks)
    waiting: list[tuple[int, int, int, tuple[int, ...]]] = [(0, head, 0, ())]
    seen = set()
    while waiting:
        cost, at, made, path = heapq.heappop(waiting)
        if at == head and path:
            if made == products:
                return Counter({i: path.count(i) * repeated.get(i, 1) for i in path})
            continue
        if (at, made) in seen or made > products:
            continue
        seen.add((at, made))
        times = repeated.get(at, 1)
        for block in blocks[at].following:
            if block != at:
                after = (cost + times * len(blocks[at].instructions), block, made + times * blocks[at].multiplies, (*path, at))
                heapq.heappush(waiting, after)
    raise ValueError(f"no path makes {products} products")


def counts(assembly: str, peer: Peer) -> Counter[str]:
    """Instructions of a warp for one tile, named as in volta_clocks.py."""
    blocks = blocks_of(assembly)
    found: Counter[str] = Counter()
    for i, times in cheapest(blocks, peer.trips, peer.products).items():
        for instruction in blocks[i].instructions:
            found[name_of(instruction)] += times
    return found


def cubins(wheel: Path) -> Iterator[bytes]:
    """The sm_70 code in the wheel's library that holds one of `PEERS`."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            library = archive.extract(LIBRARY, folder)
        subprocess.run([utility("cuobjdump"), "-xelf", ".sm_70.", library], cwd=folder, check=True, capture_output=True)
        for file in sorted(Path(folder).glob("*.cubin")):
            content = file.read_bytes()
            if any(peer.name.encode() in content for peer in PEERS):
                yield content


def kernels(cubin: bytes) -> Iterator[tuple[Peer, str, Usage]]:
    """Those of `PEERS` in a cubin, with their instructions and resources."""
    usage = resource_usage(cubin)
    parts = re.split(r"^\.text\.(\S+):$", disassemble(cubin), flags=re.MULTILINE)
    for symbol, text in zip(parts[1::2], parts[2::2], strict=True):
        for peer in PEERS:
            if re.match(rf"_Z\d+{peer.name}N", symbol):
                yield peer, text, usage[symbol]


def version_of(wheel: Path) -> str:
    """The version of torch, with the CUDA it was built with."""
    with zipfile.ZipFile(wheel) as archive:
        found = re.search(r"__version__ = '(.*)'", archive.read("torch/version.py").decode())
    return found[1] if found else ""


def rows(wheel: Path) -> list[dict[str, str]]:
    """One row for each kernel and kind of instruction."""
    table, version = [], version_of(wheel)
    for cubin in cubins(wheel):
        for peer, text, usage in kernels(cubin):
            common = {
                "torch": version, "wheel": wheel.name, "kernel": peer.name, "direction": peer.direction, "D": str(peer.dim),
                "rows": str(peer.rows), "keys": str(peer.keys), "warps": str(peer.warps), "registers": str(usage.registers),
                "stack_bytes": str(usage.stack),
            }  # fmt: skip
            found = counts(text, peer)
            table += [{**common, "instruction": name, "count": str(found[name])} for name in sorted(found)]
    return sorted(table, key=lambda row: (row["direction"] != "forward", int(row["D"]), row["instruction"]))


def main() -> None:
    """Count; write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="a wheel of torch with sm_70 code")
    parser.add_argument("--out", type=Path, default=None, help="write the counts to this CSV")
    options = parser.parse_args()
    table = rows(options.wheel)
    for row in table:
        print(row["kernel"], row["instruction"], row["count"])
    if options.out is not None:
        write_table(options.out, table)


if __name__ == "__main__":
    main()
