"""Masks of queries and heads as bits: the packing kernel on a CPU, by the emulator."""

from __future__ import annotations

import re

import emulator
import pytest
import torch

from saccade.nm_sparse import query_bits
from saccade.nm_sparse.key_bits import is_of_keys, narrowed
from saccade.nvrtc import build, obstacles
from tools.cubin import disassemble, resource_usage

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture
def packed(monkeypatch):
    """The packing, run by the emulator."""
    monkeypatch.setattr(query_bits, "run", lambda make, tensors, options, about: emulator.launch(make, tensors, *options, None))
    return query_bits.pack_queries


def any_tile(seen: torch.Tensor) -> torch.Tensor:
    """Whether one of 64 rows sees one of 64 keys."""
    rows, keys = seen.shape[2:]
    padded = torch.nn.functional.pad(seen, (0, -keys % 64, 0, -rows % 64))
    return padded.unflatten(3, (-1, 64)).any(4).unflatten(2, (-1, 64)).any(3)


def views(q_len: int, kv_len: int) -> dict[str, torch.Tensor]:
    """Masks of every kind of stride, with rows, keys and tiles that are hidden whole."""
    full = torch.rand(2, 3, q_len, kv_len) < 0.6
    full[:, :, q_len // 2] = False
    full[:, 1, :, kv_len // 3] = False
    full[0, 2, :64, : max(64, kv_len - 64)] = False
    far = torch.zeros(2, 3, q_len, 2 * kv_len + 1, dtype=torch.bool)
    far[..., 1::2] = full
    return {
        "full": full,
        "rank 2": full[0, 0],
        "heads": full[:, :, :1],
        "heads expanded": full[:, :1].expand(-1, 3, -1, -1),
        "batch expanded": full[:1].expand(2, -1, -1, -1),
        "queries expanded": full[:, :, :1].expand(-1, -1, q_len, -1),
        "keys expanded": full[..., :1].expand(-1, -1, -1, kv_len),
        "keys of one": full[..., :1],
        "every second key": far[..., 1::2],
        "columns first": full.mT.contiguous().mT,
        "from the end": full.flip(3)[..., : kv_len - 1] if kv_len > 1 else full,
    }


@needs_compiler
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (3, 33), (65, 64), (130, 31), (70, 577)])
def test_bits_tiles_and_keys(packed, q_len, kv_len, is_causal):
    torch.manual_seed(0)
    for name, mask in views(q_len, kv_len).items():
        length = mask.shape[-1] if mask.shape[-1] > 1 else kv_len
        found = packed(mask, q_len, length, is_causal)
        seen = mask[(None,) * (4 - mask.dim())].expand(2, 3, q_len, length)
        if is_causal:
            seen = seen & torch.ones(q_len, length, dtype=torch.bool).tril()
        bits = (found.bits[..., None] >> torch.arange(32) & 1).flatten(3).bool()
        assert found.bits.shape[3] == 2 * -(-length // 64)
        assert torch.equal(bits[..., :length].expand(seen.shape), seen), name
        assert not bits[..., length:].any(), name
        tiles = any_tile(seen)
        assert torch.equal(found.tiles.expand(tiles.shape), tiles), name
        assert torch.equal(found.keys.expand(2, 3, -1), seen.any(2)), name


@needs_compiler
def test_no_more_bits_than_the_mask_differs_in(packed):
    """Shapes, and where the rows of one query lie: at batch * step + head * step + query * step."""
    full = torch.ones(2, 3, 5, 70, dtype=torch.bool)
    for mask, is_causal, shape, sizes, steps in (
        (full, False, (2, 3, 5), (4, 15), (5, 1)),
        (full[:, :1], False, (2, 1, 5), (4, 5), (0, 1)),
        (full[:1, :, :1], False, (1, 3, 1), (4, 0), (1, 0)),
        (full[:1, :, :1].expand(2, 3, 5, 70), True, (1, 3, 5), (4, 0), (5, 1)),
        (full[:, :1, :1], True, (2, 1, 5), (4, 5), (0, 1)),
    ):
        found = packed(mask, 5, 70, is_causal)
        assert (tuple(found.bits.shape[:3]), found.sizes, found.steps) == (shape, sizes, steps)


def test_which_masks_are_of_keys_alone():
    mask = torch.ones(2, 3, 5, 7, dtype=torch.bool)
    assert narrowed(mask[:, :1].expand(2, 3, 5, 7)).shape == (2, 1, 5, 7)
    assert narrowed(mask[0, 0]).shape == (1, 1, 5, 7)
    assert is_of_keys(mask[:, :1, :1])
    assert is_of_keys(mask[:, :1, :1].expand(2, 3, 5, 7))
    assert not is_of_keys(mask[:, :1])
    assert not is_of_keys(mask[:, :, :1])
    assert query_bits.is_by_query(mask[:, :1, :1], True)
    assert not query_bits.is_by_query(mask[:, :1, :1], False)
    assert not query_bits.is_by_query(None, True)


@needs_compiler
def test_eight_keys_are_one_load_where_they_can_be(packed, monkeypatch):
    torch.manual_seed(0)
    loads = []
    make = query_bits.query_bits_call
    monkeypatch.setattr(
        query_bits, "query_bits_call", lambda *given: loads.append(dict(make(*given).options.defines)["WIDE"]) or make(*given)
    )
    block = torch.rand(2, 1, 70, 152) < 0.5
    assert block.data_ptr() % 8 == 0
    for mask, wide in (
        (block[..., :144], "1"),
        (block[..., 8:], "1"),
        (block[:, :, :1, :144].expand(-1, -1, 70, -1), "1"),
        (block[..., 1:145], "0"),  # begins at an odd byte
        (block[..., :143], "0"),
        (block.mT.contiguous().mT, "0"),
        (block.flatten()[: 2 * 70 * 151].view(2, 1, 70, 151)[..., :144], "0"),
        (block.view(torch.uint8).mul(2).view(torch.bool), "1"),  # True is any byte but 0
    ):
        found = packed(mask, 70, mask.shape[3], False)
        bits = (found.bits[..., None] >> torch.arange(32) & 1).flatten(3).bool()
        assert torch.equal(bits[..., : mask.shape[3]].expand(mask.shape), mask.view(torch.uint8) != 0)
        assert torch.equal(found.keys[:, 0], (mask.view(torch.uint8) != 0).any(2)[:, 0])
        assert loads.pop() == wide


@pytest.mark.parametrize("architecture", ["80", "90a", "120"])
@pytest.mark.parametrize(("is_causal", "wide"), [(False, True), (True, True), (False, False)], ids=["full", "causal", "by bytes"])
def test_the_binary(is_causal, wide, architecture):
    """Several loads are under way before the first is waited for: one after the other, each would wait for device memory."""
    if obstacles(architecture):
        pytest.skip(obstacles(architecture)[0])
    pytest.importorskip("triton")
    mask = torch.ones(2, 3, 5, 70, dtype=torch.bool)
    call = query_bits.query_bits_call(mask, mask, torch.ones(2, 3, 1, 2), mask, is_causal, wide, None)
    assert (call.grid, call.threads) == ((6, 1), 256)
    built = build(query_bits.SOURCE, architecture, call.options)
    (usage,) = resource_usage(built.cubin).values()
    assert usage.stack == 0
    assert usage.registers <= 64  # half of the warps that a multiprocessor holds at least
    code = [line for line in disassemble(built.cubin).splitlines() if re.search(r"\b(LDG|STG)\.E", line)]
    assert all(("LDG.E.64" if wide else "LDG.E.U8") in line for line in code[:4])
