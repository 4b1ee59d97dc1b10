"""Functions shared by the Volta tables: SparkAttention's grid (paper 001, 4.1) and its baseline, PyTorch's unfused pipeline; and how predictions
are written."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import machine
from torch import Tensor

from saccade.hardware import arch_of

DEVICE = "cuda"
HIDDEN, TOKENS, DROPOUT = 2048, 16384, 0.1
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # the paper's text lists all but 8,192


@dataclass(frozen=True)
class Setting:
    """One problem of the grid."""

    length: int
    dim: int
    is_causal: bool = False
    dropout_p: float = DROPOUT

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, n, D."""
        return max(1, TOKENS // self.length), HIDDEN // self.dim, self.length, self.dim

    @property
    def flops(self) -> float:
        """The operations of forward, 4 B H n^2 D, half if causal, as the paper counts; backward has 2.5 times as many."""
        batch, heads, length, dim = self.shape
        return 4.0 * batch * heads * length**2 * dim / (2 if self.is_causal else 1)

    @property
    def score_bytes(self) -> int:
        """The size of one copy of the scores in float16, in bytes."""
        batch, heads, length, _ = self.shape
        return 2 * batch * heads * length**2

    def tensors(self, count: int) -> list[Tensor]:
        """Random float16 `[B, H, n, D]`, heads beside each other in memory."""
        batch, heads, length, dim = self.shape
        return [torch.randn(batch, length, heads, dim, device=DEVICE).half().transpose(1, 2) for _ in range(count)]

    def __str__(self) -> str:
        batch, heads, length, dim = self.shape
        causal, dropout = " causal" if self.is_causal else "", f" dropout={self.dropout_p:g}" if self.dropout_p else ""
        return f"attention(B={batch} H={heads} Tq={length} Tk={length} D={dim} fp16{causal}{dropout})"


def grid(lengths: tuple[int, ...] = LENGTHS, dropout_p: float = DROPOUT) -> list[Setting]:
    """Every setting, D = 64 first."""
    return [Setting(n, dim, causal, dropout_p) for dim in (64, 128) for causal in (False, True) for n in lengths]


def unfused(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout_p: float = 0.0) -> Tensor:
    """The scores in memory, several times over; in float16 this is the paper's PyTorch_FP16."""
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def emulated() -> str:
    """The note on a row of our kernels about its time on this machine; empty on sm_70 and sm_75."""
    native = torch.device(DEVICE).type == "cuda" and arch_of(torch.device("cuda", torch.cuda.current_device())) in (70, 75)
    return "" if native else "emulated: not a speed"


def write_table(path: Path, table: list[dict[str, str]]) -> None:
    """Rows with the same columns, as a CSV, and with what they were computed; no GPU takes part."""
    table = [row | machine() | {"gpu": "none", "driver": "none"} for row in table]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as handle:
        writer = csv.DictWriter(handle, table[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
