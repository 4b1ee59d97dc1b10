"""The problems every backend of `attention_varlen` must survive: lengths around the tiles, empty sequences, each feature."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.exact.varlen.args import BOTTOM_RIGHT, FULL_BOTTOM_RIGHT, UPPER_LEFT


@dataclass(frozen=True)
class VarlenCase:
    """One named problem, without its data.

    q_lengths, k_lengths: tokens of each sequence; k_lengths None for self-attention. window: (left, right). tail: tokens behind the last sequence.
    """

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] | None = None
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    causal: int = 0
    dropout_p: float = 0.0
    bias: bool = False
    lse_grad: bool = False
    packed: bool = False
    tail: int = 0
    window: tuple[int | None, int | None] | None = None
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.q_lengths if self.k_lengths is None else self.k_lengths


_QUICK = frozenset({"quick"})
_LONG = frozenset({"long"})
_SELF = (5, 16, 17, 0, 33, 64, 1, 31)
_CROSS = (7, 15, 40, 3, 0, 12, 64, 9)

VARLEN: tuple[VarlenCase, ...] = (
    VarlenCase("self", _SELF, tags=_QUICK),
    VarlenCase("tiles", (63, 65, 127, 128), head_dim=32),
    VarlenCase("tiles-64", (33, 50, 64, 70, 100), (64, 41, 49, 128, 66), head_dim=64, causal=BOTTOM_RIGHT, lse_grad=True),
    VarlenCase("tiles-128", (33, 64, 70), (50, 64, 90), head_dim=128, tags=frozenset({"large"})),
    VarlenCase("one-token", (1, 1, 1)),
    VarlenCase("one-sequence", (19,), lse_grad=True),
    VarlenCase("cross", _SELF, _CROSS, lse_grad=True, tags=_QUICK),
    VarlenCase("no-queries", (0, 0, 3), (4, 0, 2)),
    VarlenCase("tail", _SELF, _CROSS, tail=5, tags=_QUICK),
    VarlenCase("causal", _SELF, causal=UPPER_LEFT),
    VarlenCase("causal-cross", _SELF, _CROSS, causal=UPPER_LEFT, tags=_QUICK),
    VarlenCase("lower-right-cross", _SELF, _CROSS, causal=BOTTOM_RIGHT, lse_grad=True, tags=_QUICK),
    VarlenCase("grouped", _SELF, _CROSS, heads=6, kv_heads=2, head_dim=24),
    VarlenCase("grouped-causal-dropout", _SELF, heads=4, kv_heads=1, causal=UPPER_LEFT, dropout_p=0.2),
    VarlenCase("dropout", _SELF, _CROSS, dropout_p=0.3, lse_grad=True),
    VarlenCase("bias", _SELF, _CROSS, bias=True, tags=_QUICK),
    VarlenCase("bias-self-dropout", _SELF, bias=True, dropout_p=0.2, lse_grad=True),
    VarlenCase("packed", _SELF, packed=True, tags=_QUICK),
    VarlenCase("packed-causal-tail", _SELF, packed=True, causal=UPPER_LEFT, tail=3),
    VarlenCase("packed-bias", (9, 30, 4), packed=True, bias=True),
    VarlenCase("bias-beyond-a-tile", (150, 9, 0, 70), (140, 30, 5, 33), bias=True, lse_grad=True),
    VarlenCase("packed-bias-beyond-a-tile", (150, 9), packed=True, bias=True, dropout_p=0.1),
    VarlenCase("dim-1", (9, 4), head_dim=1),
    VarlenCase("dim-80", (9, 20), (14, 5), head_dim=80),
    VarlenCase("dim-256", (9, 20), (14, 5), head_dim=256, tags=frozenset({"large"})),
    VarlenCase("long", (130, 5, 0, 200), head_dim=32, tags=_LONG),
    VarlenCase("long-cross", (10, 130, 140, 0), (160, 0, 129, 60), heads=2, kv_heads=1, lse_grad=True, tags=_LONG),
    VarlenCase("long-causal-dropout-tail", (131, 7), heads=2, kv_heads=1, causal=UPPER_LEFT, dropout_p=0.1, tail=3, tags=_LONG),
    VarlenCase("window", _SELF, window=(4, 9), lse_grad=True, tags=_QUICK),
    VarlenCase(
        "window-causal-grouped-dropout-tail", (70, 0, 9, 40), heads=4, causal=UPPER_LEFT, window=(20, None), dropout_p=0.2, tail=3
    ),
    VarlenCase("window-one-sided", (70, 5, 33), head_dim=80, window=(None, 2)),
    VarlenCase("window-packed", _SELF, packed=True, window=(0, 1)),
    VarlenCase("window-cross", _SELF, _CROSS, window=(3, 6), lse_grad=True),
    VarlenCase("window-cross-last", _SELF, _CROSS, causal=FULL_BOTTOM_RIGHT, window=(3, 6)),
    VarlenCase("window-cross-last-causal", _SELF, _CROSS, causal=BOTTOM_RIGHT, window=(7, None)),
    VarlenCase("window-long", (300, 2, 150), window=(64, 64), tags=_LONG),
    # around 128 and 256, and one sequence of many rounds of keys beside an empty one
    VarlenCase("long-edges", (0, 1, 31, 33, 127, 129, 256, 257, 577), heads=1, kv_heads=1, tags=_LONG | {"large"}),
    VarlenCase("long-lower-right", (129, 20, 150), (150, 140, 10), causal=BOTTOM_RIGHT, tags=_LONG),
)
