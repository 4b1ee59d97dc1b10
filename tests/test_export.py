"""torch.export with a dynamic batch and dynamic lengths: one program serves all sizes, with the eager results."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.export import Dim

import saccade

pytestmark = pytest.mark.unpoisoned
BATCH, TOKENS = Dim("batch", min=1, max=64), Dim("tokens", min=2, max=4096)
PACKED, ENDS = Dim("packed", min=2, max=4096), Dim("ends", min=3, max=64)
HEADS, DIM, LONGEST = 2, 16, 40


@pytest.fixture(autouse=True)
def without_interpreter(monkeypatch):
    """As on a user's CPU: under the interpreter of other tests kernels for up to 128 tokens could run, which a program decides by a guard."""
    monkeypatch.setattr("saccade.launch.requirements.interpreting_triton", lambda: False)


class Attention(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return saccade.attention(query, key, value, **self.options)


class WithLengths(nn.Module):
    def forward(self, query, key, value, lengths):
        return saccade.attention(query, key, value, lengths=lengths)


class Packed(nn.Module):
    def forward(self, query, key, value, ends):
        return saccade.attention_varlen(query, key, value, ends, ends, LONGEST, LONGEST, is_causal=True)


class DynamicMask(nn.Module):
    def forward(self, query, key, value, scores):
        return saccade.dynamic_mask_attention(query, key, value, scores, keep=8)


class NMSparse(nn.Module):
    def forward(self, query, key, value):
        return saccade.nm_sparse_attention(query, key, value, pattern="2:4", backend="reference")


def dense(batch: int, tokens: int) -> list[torch.Tensor]:
    return [torch.randn(batch, HEADS, tokens, DIM) for _ in range(3)]


def with_lengths(batch: int, tokens: int) -> list[torch.Tensor]:
    return [*dense(batch, tokens), torch.randint(1, tokens + 1, (batch,))]


def with_scores(batch: int, tokens: int) -> list[torch.Tensor]:
    return [*dense(batch, tokens), torch.randn(batch, HEADS, tokens)]


def packed(batch: int, tokens: int) -> list[torch.Tensor]:
    lengths = torch.randint(0, min(tokens, LONGEST) + 1, (batch,))
    lengths[-1] = min(tokens, LONGEST)
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return [*(torch.randn(int(ends[-1]), HEADS, DIM) for _ in range(3)), ends]


WIDE = {0: BATCH, 2: TOKENS}
PROGRAMS = {
    "attention": (Attention(), dense, (WIDE,) * 3),
    "causal": (Attention(is_causal=True), dense, (WIDE,) * 3),
    "lengths": (WithLengths(), with_lengths, (*(WIDE,) * 3, {0: BATCH})),
    "attention_varlen": (Packed(), packed, (*({0: PACKED},) * 3, {0: ENDS})),
    "dynamic_mask_attention": (DynamicMask(), with_scores, (WIDE,) * 4),
    "nm_sparse_attention": (NMSparse(), dense, (WIDE,) * 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_serves_all_sizes(name):
    torch.manual_seed(0)
    module, make, shapes = PROGRAMS[name]
    program = torch.export.export(module, tuple(make(3, 20)), dynamic_shapes=shapes)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    for batch, tokens in ((3, 20), (2, 7), (7, 150), (5, 33)):
        given = make(batch, tokens)
        torch.testing.assert_close(loaded(*given), module(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "dynamic_mask_attention", "nm_sparse_attention"])
def test_the_program_is_sensitive_to_its_inputs(name):
    """Nothing of the example is baked in."""
    torch.manual_seed(0)
    module, make, shapes = PROGRAMS[name]
    program = torch.export.export(module, tuple(make(3, 20)), dynamic_shapes=shapes).module()
    given = make(4, 24)
    first = program(*given)
    for i in range(3):
        changed = [x.flip(0).contiguous() if j == i else x for j, x in enumerate(given)]
        assert not torch.allclose(program(*changed), first)
