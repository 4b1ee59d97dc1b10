"""A decoder-only language model, RMSNorm, rotary positions, SwiGLU, tied embeddings, whose attention is one of

    dense           causal attention, torch's SDPA
    window          a causal sliding window of w keys: dynamic_mask_attention whose scores all tie, where the newest keys win
    dynamic         saccade.dynamic_mask_attention: the w best keys, scores learned, A starts at 0 as in paper 004
    dynamic_recent  the same, but half of the w are the newest keys, whatever their scores
    topk            the w best keys by scores of the same form that are never trained and not added: A = 1, dt_proj as drawn
    topk_recent     the same, but half of the w are the newest keys

Ideas against the loss of the paper's form (`--method` names them; they are not among all):

    linear_recent   dynamic_recent with s = A * softplus(W v), A from 1: a score grows with its key, not exponentially
    gated_recent    scores choose, and a kept value is multiplied by 2 sigmoid(W v) of its own score: attention has no bias to learn the choice by
    slow_recent     dynamic_recent whose A learns ten times as slowly
    sinks_recent    dynamic_recent that keeps the first four keys too
    gated_dense     dense attention to values with the gate of gated_recent: what the gate does by itself
    gated_window    the same of a sliding window

`topk` is what `model.py` calls dynamic_detached. In the forms with the newest keys a query that counts a key twice keeps fewer than w.
Every parameter is drawn by its own name and the seed, so that methods and sizes start from the same numbers where shapes agree.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from captured import added_normed, gated, normed, turned, working_dtype
from model import rotary_of, sliding_window
from torch import Tensor, nn

from saccade import dynamic_mask_attention

METHODS = ("dense", "window", "dynamic", "dynamic_recent", "topk", "topk_recent")
IDEAS = ("linear_recent", "gated_recent", "slow_recent", "sinks_recent", "gated_dense", "gated_window")
SINKS = 4
HEAD_DIM = 64  # the kernels of sm_90 have D = 64 and 128


@dataclass(frozen=True)
class Size:
    """The size of a model. lr: the highest learning rate, the same for every method."""

    width: int
    layers: int
    lr: float


# the names count the parameters with 8,192 tokens: 3.4, 10.1, 30.0 and 98.3 million
SIZES = {
    "tiny": Size(64, 2, 4e-3),
    "3M": Size(192, 4, 3e-3),
    "10M": Size(320, 6, 2e-3),
    "30M": Size(512, 8, 1.5e-3),
    "100M": Size(768, 13, 1e-3),
}


class Norm(nn.Module):
    """Root-mean-square norm over the last dim; float32 out, also of bfloat16, unless another dtype is asked for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalise; the shape does not change."""
        return normed(x, self.weight, dtype)


class Attention(nn.Module):
    """Self-attention by one method; names and form of `saccade.nn.DynamicMaskAttention`."""

    def __init__(self, width: int, method: str, keep: int, backend: str) -> None:
        super().__init__()
        self.method, self.backend = method, backend
        self.recent = keep - keep // 2 if method.endswith("_recent") else 0
        self.sinks = SINKS if method == "sinks_recent" else 0
        self.keep = keep - self.recent - self.sinks
        heads = width // HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)
        if method not in ("dense", "window"):
            learned = not method.startswith("topk")
            from_one = method.startswith(("topk", "linear", "gated"))
            has_rate = learned and not method.startswith("gated")
            self.A = nn.Parameter(torch.ones(heads) if from_one else torch.zeros(heads), requires_grad=has_rate)
            self.dt_proj = nn.Linear(width, heads, bias=False).requires_grad_(learned)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """`[B, T, E]` to the same. rotary: cos and sin `[T, 1, D]`. mask: of an encoder."""
        heads = (*x.shape[:2], -1, HEAD_DIM)
        values = self.v_proj(x)
        value = values.view(heads).transpose(1, 2)
        query = turned(self.q_proj(x).view(heads), self.q_norm.weight, *rotary, value.dtype).transpose(1, 2)
        key = turned(self.k_proj(x).view(heads), self.k_norm.weight, *rotary, value.dtype).transpose(1, 2)
        out = self._attend(query, key, value, values, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        scores = None if self.method in ("dense", "window") else self.scores(values)
        if scores is not None and self.method.startswith("gated"):
            value = value * (2 * scores.sigmoid()).to(value.dtype)[..., None]
        if self.method.endswith("dense"):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        if scores is None or self.method == "gated_window":
            return sliding_window(query, key, value, self.keep, self.backend)
        added = not self.method.startswith(("topk", "gated"))
        return dynamic_mask_attention(
            query,
            key,
            value,
            scores,
            keep=self.keep,
            window=self.recent,
            sinks=self.sinks,
            add_scores=added,
            backend=self.backend,
        )

    def scores(self, values: Tensor) -> Tensor:
        """`exp(A * softplus(W_dt v))`, float32 `[B, H, T]` from `[B, T, E]` (paper 004, Eq. 3), or as an idea has it."""
        with (
            torch.autocast(values.device.type, enabled=False),
            torch.set_grad_enabled(torch.is_grad_enabled() and self.dt_proj.weight.requires_grad),
        ):
            # in float32 under autocast too: the 8 bits of bfloat16 would make ties, which go to the newest key
            scores = self.dt_proj(values.float())
            if not self.method.startswith("gated"):
                scores = self.A * (0.1 if self.method.startswith("slow") else 1.0) * F.softplus(scores)
            if not self.method.startswith(("linear", "gated")):
                scores = scores.exp()
            return scores.transpose(1, 2)


class Layer(nn.Module):
    """Pre-norm: attention, then SwiGLU of 8/3 of the width, rounded up to 64."""

    def __init__(self, width: int, method: str, keep: int, backend: str) -> None:
        super().__init__()
        hidden = -(-8 * width // (3 * 64)) * 64
        self.attention = Attention(width, method, keep, backend)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """`[B, T, E]` to the same."""
        dtype = working_dtype(x)
        attended = self.attention(self.norm1(x, dtype), rotary, mask)
        x, inner = added_normed(x, attended, self.norm2.weight, dtype)
        return x + self.down(gated(self.gate(inner), self.up(inner)))


class LanguageModel(nn.Module):
    """Tokens `[B, T]` to logits.

    Args:
        size: of SIZES. vocabulary: token ids. method: of METHODS or IDEAS. keep: w. seed: of the weights. backend: of
            `dynamic_mask_attention`.
    """

    def __init__(self, size: Size, vocabulary: int, method: str, keep: int, seed: int, backend: str = "auto") -> None:
        super().__init__()
        if method not in METHODS + IDEAS:
            raise ValueError(f"method is {method!r}; there are {', '.join(METHODS + IDEAS)}")
        if keep < 2:
            raise ValueError(f"keep is {keep}; it must be at least 2, one best and one newest key")
        self.method, self.keep = method, keep
        self.words = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size.width, method, keep, backend) for _ in range(size.layers))
        self.norm = Norm(size.width)
        draw(self, seed, size.layers)

    def forward(self, tokens: Tensor, last: int | None = None, places: Tensor | None = None) -> Tensor:
        """Logits `[B, T, V]`, or `[B, last, V]` of the last positions alone, or `[B, P, V]` at `places [B, P]`."""
        length = tokens.shape[1]
        x = self.words(tokens)
        rotary = rotary_of(length, HEAD_DIM, tokens.device)
        for layer in self.layers:
            x = layer(x, rotary, None)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
        return F.linear(self.norm(x if last is None else x[:, -last:]), self.words.weight)

    @property
    def count(self) -> int:
        """Parameters, the tied embedding once."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def draw(model: nn.Module, seed: int, layers: int) -> None:
    """Give each matrix its first values, by its name and the seed; a meta tensor gets none."""
    deep = (2 * layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not parameter.is_meta:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
            scale = 0.02 * (deep if name.endswith(("o_proj.weight", "down.weight")) else 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * scale)
