"""Binaries of the CUDA sources that have no larger test without a GPU: they compile for every target, spill nothing and fit."""

from __future__ import annotations

import pytest
import torch

from saccade.exact.long import bias, mask_bits
from saccade.exact.ragged import sm80, tokens_sm90
from saccade.exact.ragged.config import TOKENS_SM90_CONFIGS
from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL, VarlenArgs
from saccade.nm_sparse import bias_rows, key_bits
from saccade.nm_sparse.fused import last_wave
from saccade.nvrtc import Options, build, obstacles
from tools.aot import SHARED_LIMIT
from tools.cubin import Usage, resource_usage

pytest.importorskip("cuda.core")
pytest.importorskip("triton")  # its wheel has the tools that read a binary
TARGETS = pytest.mark.parametrize("architecture", ["80", "90", "120"])


def usage_of(source, options, architecture: str) -> Usage:
    if obstacles(architecture):
        pytest.skip(obstacles(architecture)[0])
    (usage,) = resource_usage(build(source, architecture, options).cubin).values()
    return usage


@pytest.mark.sampled(6)
@TARGETS
@pytest.mark.parametrize(("causal", "dtype", "has_dlse"), [(FULL, torch.bfloat16, False), (BOTTOM_RIGHT, torch.float16, True)])
@pytest.mark.parametrize("key", sm80.CONFIGS, ids=str)
def test_binaries_of_the_ragged_backward(key, causal, dtype, has_dlse, architecture):
    tile, dim = key
    config, rows = sm80.CONFIGS[key], torch.empty(200, 4, dim, dtype=dtype)
    ends = torch.empty(5, dtype=torch.int32)
    args = VarlenArgs(rows, rows, rows, ends, ends, None, None, tile, tile, 0.0, causal, 0.1)
    usage = usage_of(sm80.SOURCE, sm80.options(tile, args, has_dlse, config.stages), architecture)
    assert usage.stack == 0
    shared = sm80.shared_bytes(tile, dim, config.stages) + usage.shared
    assert 2 * tile * usage.registers <= 65536  # two warps for every 16 rows
    assert architecture == "120" or shared <= SHARED_LIMIT[int(architecture)]  # where it does not fit, `takes` declines


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("grouped", "dlse"), [(False, False), (True, True)], ids=["plain", "grouped"])
@pytest.mark.parametrize("dropout", [False, True], ids=["all", "dropout"])
@pytest.mark.parametrize(("causal", "bf16"), [(False, True), (True, False)], ids=["full", "causal"])
@pytest.mark.parametrize("key", TOKENS_SM90_CONFIGS, ids=str)
def test_binaries_of_token_tiles(key, causal, bf16, dropout, grouped, dlse):
    """As many blocks of a multiprocessor as the configuration says."""
    direction, dim = key
    shape = TOKENS_SM90_CONFIGS[key]
    macros = tokens_sm90.defines(direction, dim, bf16, causal, dropout, shape, grouped, dlse)
    usage = usage_of(tokens_sm90.source(direction), Options.of(macros), tokens_sm90.ARCHITECTURE)
    # bytes of local memory. With grouped heads dK and dV are held while dQ is computed
    plain = 256 if key == ("backward", 64) else 64
    assert usage.stack <= (plain if not grouped or direction == "forward" else 10 * dim)
    assert shape.blocks * 2 * tokens_sm90.TILE * usage.registers <= 65536
    shared = tokens_sm90.shared_bytes(direction, dim) + usage.shared
    assert shape.blocks * (shared + 1024) <= SHARED_LIMIT[90] + 1024  # of each block the system has 1,024 bytes


@TARGETS
@pytest.mark.parametrize("rows_lie_close", [False, True])
def test_binaries_of_mask_bits(rows_lie_close, architecture):
    mask = torch.ones(2, 3, 40, 70, dtype=torch.bool)
    call = mask_bits.mask_bits_call(mask.mT if rows_lie_close else mask, torch.empty(2, 3, 70, 2, dtype=torch.int64), 132)
    assert usage_of(call.source, call.options, architecture).stack == 0


@pytest.mark.parametrize("rows_lie_close", [False, True])
def test_binaries_of_bias_rows(rows_lie_close):
    rows = torch.zeros(2, 3, 70, 70, dtype=torch.bfloat16)
    call = bias.bias_rows_call(rows.mT if rows_lie_close else rows, torch.empty(2, 3, 70, 72, dtype=torch.bfloat16), 132)
    usage = usage_of(call.source, call.options, "90")
    assert usage.stack == 0
    assert usage.registers <= 32  # of the eight blocks of a multiprocessor


@TARGETS
def test_binaries_of_key_bits(architecture):
    mask = torch.ones(2, 70, dtype=torch.bool)
    call = key_bits.key_bits_call(mask, torch.empty(2, 4, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32), None)
    assert usage_of(call.source, call.options, architecture).stack == 0


@TARGETS
@pytest.mark.parametrize("blocks", [None, (2, 4, 1, 2)], ids=["", "block mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_binaries_of_shown_values(dtype, blocks, architecture):
    value, bias = torch.ones(2, 2, 70, 64, dtype=dtype), torch.zeros(2, 4, 5, 70)
    tensors = (value, bias, torch.empty(2, 2, 70, dtype=torch.bool))
    if blocks is None:
        call = bias_rows.shown_values_call(*tensors, False, None)
    else:
        call = bias_rows.shown_by_blocks_call(*tensors, torch.ones(blocks, dtype=torch.bool), True, None)
    assert usage_of(call.source, call.options, architecture).stack == 0


@TARGETS
@pytest.mark.parametrize("dim", [64, 128])
def test_binaries_of_combine(dim, architecture):
    plan = last_wave.split(140, 132, 64)
    parts = last_wave.allocate(plan, 128, dim, torch.device("cpu"))
    out, lse = torch.empty(1, 140, 128, dim, dtype=torch.bfloat16), torch.empty(1, 140, 128)
    call = last_wave.combine_call(*parts, out, lse, plan, None)
    assert usage_of(call.source, call.options, architecture).stack == 0
