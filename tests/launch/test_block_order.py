"""The order of thread blocks in which block 0 of a problem takes longest, on a CPU."""

from __future__ import annotations

import emulator
import pytest
import torch

from saccade.launch.cuda import HEADERS, CudaLaunch
from saccade.nvrtc import Options, Source

SOURCE = """
#include "block_order.cuh"
extern "C" __global__ void order(int* found, int problems, int blocks, int early) {
    order_blocks(int(blockIdx.x), problems, blocks, early, found[2 * blockIdx.x], found[2 * blockIdx.x + 1]);
}
"""


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
def test_every_block_has_one_place_and_the_long_ones_of_the_last_problems_come_first(tmp_path):
    (tmp_path / "order.cu").write_text(SOURCE)
    source = Source(tmp_path / "order.cu", (HEADERS,))
    for problems, blocks in ((3, 4), (1, 5), (5, 1), (4, 2)):
        for early in (0, 1, 2, problems, problems + 3):
            found = torch.full((problems * blocks, 2), -1, dtype=torch.int32)
            numbers = {"problems": problems, "blocks": blocks, "early": early}
            emulator.run(CudaLaunch(source, "order", Options(), (problems * blocks, 1), 32, 0, {"found": found, **numbers}))
            order, first = [tuple(pair) for pair in found.tolist()], max(0, problems - early)
            assert sorted(order) == [(problem, block) for problem in range(problems) for block in range(blocks)]
            long_ones = [(problem, 0) for problem in range(first, problems)]
            assert order == long_ones + [pair for pair in sorted(order) if pair not in long_ones]
