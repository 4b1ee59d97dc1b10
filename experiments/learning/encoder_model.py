"""Encoders of the blocks of `language_model.py`, without causality, and what reads them: masked tokens, or the class of a text.

Attention is one of

    dense           torch's SDPA; with padding saccade.attention, which skips it
    1:2, 2:4        saccade.nm_sparse_attention
    nystrom         Nystromformer: softmax(Q K_m) softmax(Q_m K_m)^+ softmax(Q_m K) V with means of parts as landmarks
    nystrom_1:2, nystrom_2:4   the same, its two large softmaxes, Q K_m and Q_m K, pruned by saccade.nm_sparse_attention

Parameters have the same names and first values with every attention, so that weights of one go into another. Nystromformer's
convolution of the values is left out.

Source: Dfss (paper 003), and its Fig. 17 for the last two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from language_model import HEAD_DIM, Attention, Layer, Norm, Size, draw
from model import rotary_of
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from approximations import pooled, pseudo_inverse

from saccade import attention as exact_attention
from saccade import nm_sparse_attention

ATTENTIONS = ("dense", "1:2", "2:4", "nystrom", "nystrom_1:2", "nystrom_2:4")


class EncoderAttention(Attention):
    """Self-attention to all keys by one of ATTENTIONS. landmarks: of Nystromformer."""

    def __init__(self, width: int, attention: str, backend: str, landmarks: int) -> None:
        super().__init__(width, "dense", 2, backend)
        self.nystrom, self.landmarks = attention.startswith("nystrom"), landmarks
        self.pattern = attention.rsplit("_", 1)[-1] if ":" in attention else None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """mask: int32 `[B]`, how many of the first tokens are no padding."""
        if not self.nystrom:
            return self._softmax(query, key, value, mask)
        if mask is not None:  # padding adds nothing to a landmark
            real = (torch.arange(query.shape[2], device=mask.device) < mask[:, None])[:, None, :, None]
            query, key = query * real, key * real
        parts = [pooled(x.float(), self.landmarks) for x in (query, key)]
        few_queries, few_keys = (x.to(value.dtype) for x in parts)
        inner = self._softmax(few_queries, key, value, mask)
        # in float32 under autocast too: the inverse has large entries that cancel, which bfloat16 would lose
        with torch.autocast(query.device.type, enabled=False):
            inverse = pseudo_inverse(torch.softmax(parts[0] @ parts[1].mT * HEAD_DIM**-0.5, -1))
            between = (inverse @ inner.float()).to(value.dtype)
        return self._softmax(query, few_keys, between, None)

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        if self.pattern is not None:
            return nm_sparse_attention(query, key, value, lengths=lengths, pattern=self.pattern, backend=self.backend)
        if lengths is None:
            return F.scaled_dot_product_attention(query, key, value)
        return exact_attention(query, key, value, lengths=lengths)


class Encoder(nn.Module):
    """Tokens `[B, T]` to hidden states `[B, T, E]`, with rotary positions.

    Args:
        size: width and layers. vocabulary: token ids. attention: of ATTENTIONS. seed: of the weights. backend: of `nm_sparse_attention`.
        landmarks: of Nystromformer; the length of the tokens must be a multiple.
    """

    def __init__(
        self, size: Size, vocabulary: int, attention: str, seed: int, backend: str = "auto", landmarks: int = 64
    ) -> None:
        super().__init__()
        if attention not in ATTENTIONS:
            raise ValueError(f"attention is {attention!r}; there are {', '.join(ATTENTIONS)}")
        self.landmarks = landmarks if attention.startswith("nystrom") else 1
        self.words = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size.width, "dense", 2, backend) for _ in range(size.layers))
        for layer in self.layers:
            layer.attention = EncoderAttention(size.width, attention, backend, landmarks)
        self.norm = Norm(size.width)
        draw(self, seed, size.layers)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalised hidden states. lengths: int32 `[B]`, how many of the first tokens are no padding."""
        if tokens.shape[1] % self.landmarks:
            raise ValueError(f"{tokens.shape[1]} tokens are no multiple of {self.landmarks} landmarks")
        x = self.words(tokens)
        rotary = self._rotary(tokens)
        for layer in self.layers:
            x = layer(x, rotary, lengths)
        return self.norm(x)

    def _rotary(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_of(tokens.shape[1], HEAD_DIM, tokens.device)

    @property
    def count(self) -> int:
        """Parameters."""
        return sum(p.numel() for p in self.parameters())


class MaskedModel(Encoder):
    """Logits of the chosen places alone, by the tied embedding."""

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """`[B, P, V]` of `tokens [B, T]` at `places [B, P]`."""
        hidden = super().forward(tokens)
        chosen = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
        return F.linear(chosen, self.words.weight)


class Classifier(Encoder):
    """Logits of classes, of one text or of several that are encoded apart.

    Args:
        classes: how many. texts: how many texts an example has, 1 or 2. first: read the first token, or else the mean of all real ones.
        pad: the token id of padding, which comes last; None: there is none. side: tokens are the rows of a square of so many a row, and
            half of each head's features turn with the row, half with the column; 0: they are a line.
    """

    def __init__(
        self, size: Size, vocabulary: int, attention: str, seed: int, backend: str = "auto", landmarks: int = 64, *,
        classes: int, texts: int, first: bool, pad: int | None, side: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(size, vocabulary, attention, seed, backend, landmarks)
        self.texts, self.first, self.pad, self.side = texts, first, pad, side
        self.read_norm = Norm(size.width)  # a mean of many tokens is short
        self.mix = nn.Linear((4 if texts == 2 else 1) * size.width, 2 * size.width, bias=False)
        self.classify = nn.Linear(2 * size.width, classes, bias=False)
        draw(self, seed, size.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[B, classes]` of `[B, texts, T]`."""
        flat = tokens.flatten(0, 1)
        real = None if self.pad is None else flat != self.pad
        hidden = super().forward(flat, None if real is None else real.sum(1, dtype=torch.int32))
        if self.first:
            read = hidden[:, 0]
        elif real is None:
            read = hidden.mean(1)
        else:
            read = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        read = self.read_norm(read)
        if self.texts == 2:
            one, other = read.unflatten(0, (-1, 2)).unbind(1)
            read = torch.cat((one, other, one - other, one * other), -1)
        return self.classify(F.gelu(self.mix(read)))

    def _rotary(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if not self.side:
            return super()._rotary(tokens)
        line = rotary_of(self.side, HEAD_DIM // 2, tokens.device)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        # of each half of the features, which a turn pairs, the first part has the row and the second the column
        quarter = HEAD_DIM // 4
        both = [torch.cat((x[at // self.side, :, :quarter], x[at % self.side, :, :quarter]), -1).repeat(1, 1, 2) for x in line]
        return both[0], both[1]
