"""`Case`: a named problem."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One named problem, without its data.

    mask: "bool" for a boolean mask of shape `mask_shape` (the full `[B, H, Tq, Tk]` if None), in which some queries see nothing.
    bias: shape of an additive bias with gradient. windows: W, where the batch is images times W windows, called as
    `[images, W, H, T, D]`, and the bias is `[W, H, Tq, Tk]`, that of the windows in every image.
    lengths: real keys of each batch row, the first 0 and the last full. window: (left, right) of a sliding window.
    lse_grad: the log-sum-exp gets a gradient too. tags: "quick" (a cross-section), "pooling" (Tq = 1), "large" (slow when
    interpreted), "fallback" (beyond the short kernels).
    calls: of how many calls, as many batch rows each, the outputs are judged together; the bias is then `[calls, *bias]`.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    is_causal: bool = False
    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    lengths: bool = False
    dropout_p: float = 0.0
    packed: bool = False
    lse_grad: bool = False
    windows: int = 0
    window: tuple[int | None, int | None] | None = None
    calls: int = 1
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name
