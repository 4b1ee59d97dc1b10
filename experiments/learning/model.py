"""A two-layer transformer whose seeds train side by side: every weight is `[G, in, out]` for G seeds, and every product is
batched.

Seeds stay independent (the loss is a sum over them and Adam is elementwise), and a step takes the same host time as for a single
model. Attention is one of

    dense             causal attention, torch's SDPA
    window            a causal sliding window of w keys, also by dynamic_mask_attention: where all scores tie, the newest keys win
    dynamic           dynamic mask of w keys: saccade.dynamic_mask_attention, with A starting at 0 as in paper 004
    dynamic_detached  the same scores rank the keys but are not added: no gradient reaches A and dt_proj (A = 1, not 0)
    dynamic_frozen    A stays 0, which by the rule for ties is the same function as `window`

and, where a key mask is given (an encoder's), without causality: dense, or "2:4", "1:2": saccade.nm_sparse_attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from captured import added_normed, normed, turned, working_dtype
from torch import Tensor, nn

from saccade import dynamic_mask_attention, nm_sparse_attention

VARIANTS = ("dense", "window", "dynamic", "dynamic_detached", "dynamic_frozen")
PATTERNS = ("2:4", "1:2")


class StackedLinear(nn.Module):
    """G linear layers: `[G, R, in]` to `[G, R, out]`, no bias."""

    def __init__(self, seeds: list[torch.Generator], inputs: int, outputs: int) -> None:
        super().__init__()
        drawn = [torch.randn(inputs, outputs, generator=g) * inputs**-0.5 for g in seeds]
        self.weight = nn.Parameter(torch.stack(drawn))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input of each seed by its own weight."""
        return torch.bmm(x, self.weight)


class StackedNorm(nn.Module):
    """G root-mean-square norms over the last dim of `[G, .., width]`."""

    def __init__(self, seeds: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(seeds, width))

    def forward(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalise; the shape does not change."""
        return normed(x, self.gain(x), dtype)

    def gain(self, x: Tensor) -> Tensor:
        """The weight, broadcast over `x`."""
        return self.weight.view(x.shape[0], *[1] * (x.dim() - 2), -1)


class StackedAttention(nn.Module):
    """Self-attention of G seeds by one of the variants; the form and names of `saccade.nn.dynamic_mask.DynamicMaskAttention`."""

    def __init__(
        self, seeds: list[torch.Generator], width: int, heads: int, variant: str, keep: int, backend: str, rotary: bool = False
    ) -> None:
        super().__init__()
        if variant not in VARIANTS + PATTERNS:
            raise ValueError(f"variant is {variant!r}; there are {', '.join(VARIANTS + PATTERNS)}")
        if width % heads:
            raise ValueError(f"width is {width} and heads {heads}; width must be a multiple of heads")
        self.heads, self.variant, self.keep, self.backend, self.rotary = heads, variant, keep, backend, rotary
        self.q_proj = StackedLinear(seeds, width, width)
        self.k_proj = StackedLinear(seeds, width, width)
        self.v_proj = StackedLinear(seeds, width, width)
        self.o_proj = StackedLinear(seeds, width, width)
        self.q_norm = StackedNorm(len(seeds), width // heads)
        self.k_norm = StackedNorm(len(seeds), width // heads)
        # drawn for every variant, so that all start from the same weights
        dt_proj = StackedLinear(seeds, width, heads)
        if variant.startswith("dynamic"):
            start = 1.0 if variant == "dynamic_detached" else 0.0
            self.A = nn.Parameter(torch.full((len(seeds), heads), start), requires_grad=variant != "dynamic_frozen")
            self.dt_proj = dt_proj

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """`[G, N, T, E]` to the same. seen: bool `[G * N, 1, 1, T]`, the keys of an encoder."""
        groups, rows, tokens, width = x.shape
        flat = x.flatten(1, 2)
        split = (groups, rows, tokens, self.heads, -1)
        values = self.v_proj(flat)
        pair = ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm))
        if self.rotary:
            turns = rotary_of(tokens, width // self.heads, x.device)
            query, key = (turned(y := proj(flat).view(split), norm.gain(y), *turns, values.dtype) for proj, norm in pair)
        else:
            query, key = (normed(y := proj(flat).view(split), norm.gain(y), values.dtype) for proj, norm in pair)
        query, key, value = (t.flatten(0, 1).transpose(1, 2) for t in (query, key, values.view(split)))
        out = self._attend(query, key, value, values) if seen is None else self._encode(query, key, value, seen)
        return self.o_proj(out.transpose(1, 2).reshape(groups, rows * tokens, width)).view(x.shape)

    def scores(self, values: Tensor) -> Tensor:
        """`exp(A * softplus(W_dt v))`, float32 `[G, R, H]` from `[G, R, E]` (paper 004, Eq. 3)."""
        # under autocast too, because the 8 bits of bfloat16 would make ties, which go to the newest key
        with torch.autocast(values.device.type, enabled=False):
            return (self.A[:, None] * F.softplus(self.dt_proj(values.float()))).exp()

    def _encode(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        if self.variant == "dense":
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        out = nm_sparse_attention(query, key, value, attn_mask=seen, pattern=self.variant, backend=self.backend)
        return out if isinstance(out, Tensor) else out[0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, values: Tensor) -> Tensor:
        if self.variant == "dense":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = query.shape[2]
        if self.variant == "window":
            return sliding_window(query, key, value, self.keep, self.backend)
        scores = self.scores(values).view(-1, tokens, self.heads).transpose(1, 2)
        added = self.variant != "dynamic_detached"
        out = dynamic_mask_attention(query, key, value, scores, keep=self.keep, add_scores=added, backend=self.backend)
        return out if isinstance(out, Tensor) else out[0]


class Layer(nn.Module):
    """Pre-norm: attention, then a feed-forward network of `2 * width`."""

    def __init__(
        self, seeds: list[torch.Generator], width: int, heads: int, variant: str, keep: int, backend: str, rotary: bool = False
    ) -> None:
        super().__init__()
        self.attention = StackedAttention(seeds, width, heads, variant, keep, backend, rotary)
        self.up, self.down = StackedLinear(seeds, width, 2 * width), StackedLinear(seeds, 2 * width, width)
        self.norm1, self.norm2 = StackedNorm(len(seeds), width), StackedNorm(len(seeds), width)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """`[G, N, T, E]` to the same. seen: as `StackedAttention` takes it."""
        dtype = working_dtype(x)
        attended = self.attention(self.norm1(x, dtype), seen)
        x, inner = added_normed(x, attended, self.norm2.gain(x), dtype)
        return x + self.down(F.gelu(self.up(inner.flatten(1, 2)))).view(x.shape)


class StackedTransformer(nn.Module):
    """G independent decoders with learned or rotary positions.

    Args:
        seeds: one model a seed; a seed's weights do not depend on the others.
        vocabulary, length: token ids and positions. width: E. heads: H. layers: number of layers.
        variant: of attention, one of VARIANTS. keep: w. backend: of `dynamic_mask_attention`.
        rotary: positions turn queries and keys and are not learned. "The token before" is then one map for all positions; learned
            positions need one that holds for every pair of them, which 128 features cannot give for the 1,024 of 512 pairs.
        previous: a matrix adds the token before to each token, a short convolution as Zoology's models of MQAR have.
    """

    def __init__(
        self,
        seeds: list[int],
        vocabulary: int,
        length: int,
        *,
        variant: str,
        keep: int,
        width: int = 64,
        heads: int = 2,
        layers: int = 2,
        backend: str = "auto",
        rotary: bool = False,
        previous: bool = False,
    ) -> None:
        super().__init__()
        made = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.tokens = nn.Parameter(torch.stack([torch.randn(vocabulary, width, generator=g) for g in made]) * 0.5)
        drawn = torch.stack([torch.randn(length, width, generator=g) for g in made]) * 0.5
        self.positions = None if rotary else nn.Parameter(drawn)
        self.layers = nn.ModuleList(Layer(made, width, heads, variant, keep, backend, rotary) for _ in range(layers))
        self.norm = StackedNorm(len(seeds), width)
        self.unembed = StackedLinear(made, width, vocabulary)
        self.previous = StackedLinear(made, width, width) if previous else None

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits `[G, N, M, V]` at `places [G, N, M]` of `tokens [G, N, T]`."""
        groups, _, length = tokens.shape
        vocabulary, width = self.tokens.shape[1:]
        # one table of G * V rows, because on a GPU the gradient of indexing with few different ids is summed sequentially
        ids = tokens + vocabulary * torch.arange(groups, device=tokens.device)[:, None, None]
        x = F.embedding(ids, self.tokens.view(-1, width))
        if self.positions is not None:
            x = x + self.positions[:, None, :length]
        if self.previous is not None:
            before = F.pad(x, (0, 0, 1, 0))[:, :, :-1]
            x = x + self.previous(before.flatten(1, 2)).view(x.shape)
        for layer in self.layers:
            x = layer(x)
        answers = self.norm(x).gather(2, places[..., None].expand(-1, -1, -1, x.shape[3]))
        return self.unembed(answers.flatten(1, 2)).view(*places.shape, -1)


def sliding_window(query: Tensor, key: Tensor, value: Tensor, keep: int, backend: str) -> Tensor:
    """Causal attention in which query i sees key j where `i - keep < j <= i`: of equal scores the newest keys are kept."""
    ties = torch.zeros(key.shape[:3], device=key.device)
    return dynamic_mask_attention(query, key, value, ties, keep=keep, add_scores=False, backend=backend)


def rotary_of(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions, which pair the two halves of D: float32 `[T, 1, D]`, the same for every head."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()
