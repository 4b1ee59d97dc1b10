"""`NystromAttention`: self-attention through landmarks, with its two large matrices pruned N:M. Public as
`saccade.nn.NystromAttention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.engine.arguments import check_lengths
from saccade.engine.calls import uncast
from saccade.engine.kinds import check_kinds
from saccade.engine.lengths import checked_lengths
from saccade.errors import InvalidArgument
from saccade.exact.api import attention
from saccade.nm_sparse.api import nm_sparse_attention
from saccade.nm_sparse.problem import parse_pattern
from saccade.nn.checks import check_backend, check_heads, check_made, check_plain, check_size, check_tokens
from saccade.nn.module import Module

# it converges in about six; this bound catches a number meant for another argument, which would take very long
_MOST_ITERATIONS = 1000


class NystromAttention(Module):
    """Multi-head self-attention in O(S m): `softmax(Q K~^T) softmax(Q~ K~^T)^+ softmax(Q~ K^T) V`, all scaled by `1 / sqrt(D)`.

    Q~ and K~ are m landmarks, means of m segments of nearly equal length. The first and the third matrix, `[S, m]` and `[m, S]`,
    are attentions of their own, pruned N:M. The m x m pseudo-inverse in the middle stays dense and is computed in float32 by
    iterating `Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4`, from `A^T / (|A|_1 |A|_inf)`.

    Args:
        embed_dim: E, a multiple of num_heads.
        num_heads: H.
        landmarks: m; with fewer tokens than that, every token is one.
        pattern: "N:M" for both large matrices, None for dense ones.
        iterations: number of iterations for the pseudo-inverse.
        conv_kernel: odd width of a convolution over the values of each head, added to the output as in Nystromformer; or None.
        bias: whether both projections add a bias.
        backend: as in `saccade.nm_sparse_attention`, or in `saccade.attention` if pattern is None.
        device: of the parameters, torch's default unless given.
        dtype: of the parameters, torch's default unless given.

    Raises:
        InvalidArgument: a size, pattern or input shape is invalid.

    Source: Nystromformer (Xiong et al., 2021); its combination with N:M pruning is Dfss (paper 003), appendix A.7.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        landmarks: int = 64,
        pattern: str | None = "2:4",
        iterations: int = 6,
        conv_kernel: int | None = None,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(embed_dim, num_heads, landmarks, iterations, conv_kernel)
        check_made(device, dtype, bias)
        check_backend(backend)
        if pattern is not None:
            parse_pattern(pattern)
        self.embed_dim, self.num_heads, self.landmarks, self.pattern = embed_dim, num_heads, landmarks, pattern
        self.iterations, self.backend = iterations, backend
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.conv = None
        if conv_kernel is not None:
            self.conv = nn.Conv2d(
                num_heads, num_heads, (conv_kernel, 1), padding=(conv_kernel // 2, 0), groups=num_heads, bias=False,
                device=device, dtype=dtype,
            )  # fmt: skip

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: `[B, S, E]`.
            lengths: int `[B]`, number of real tokens of each row; tokens beyond it are not attended to and belong to no landmark.

        Returns:
            `[B, S, E]`.
        """
        check_tokens(x, self.embed_dim)
        check_plain("x", x, "NystromAttention")
        qkv = self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        count = self.landmarks if x.shape[1] >= self.landmarks else max(x.shape[1], 1)
        # the tokens and the landmarks that a row has
        real = marked = used = None
        if lengths is not None:
            check_kinds(lengths=lengths)
            check_lengths(query, lengths)
            lengths = checked_lengths(lengths, x.shape[1])
            real = (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[:, None, None, :]
            used = lengths.clamp(max=count)
            marked = (torch.arange(count, device=x.device) < used[:, None])[:, None, None, :]
            value = value.masked_fill(~real.mT, 0.0)
        with uncast(x):  # autocast would multiply in 16 bits
            query_marks, key_marks = (segment_means(y, count, lengths).to(x.dtype) for y in (query, key))
        gathered = self._attend(query_marks, key, value, lengths, real)
        with uncast(x):
            inner = pseudo_inverse(_among_landmarks(query_marks, key_marks, marked), self.iterations) @ gathered.float()
        heads = self._attend(query, key_marks, inner.to(x.dtype), used, marked)
        if self.conv is not None and x.shape[1]:
            heads = heads + self.conv(value)
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        if self.pattern is None:
            out = attention(query, key, value, lengths=lengths, backend=self.backend)
        else:
            out = nm_sparse_attention(query, key, value, real, pattern=self.pattern, backend=self.backend)
        return out if isinstance(out, Tensor) else out[0]

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, landmarks={self.landmarks}, pattern={self.pattern!r}, "
            f"iterations={self.iterations}, backend={self.backend!r}"
        )


def _among_landmarks(query_marks: Tensor, key_marks: Tensor, marked: Tensor | None) -> Tensor:
    """The matrix in the middle, `softmax(Q~ K~^T / sqrt(D))` in float32; 0 beyond the landmarks of a row, `marked` `[B, 1, 1, m]`."""
    scores = query_marks.float() @ key_marks.float().mT * query_marks.shape[-1] ** -0.5
    if marked is None:
        return torch.softmax(scores, dim=-1)
    weights = torch.softmax(scores.masked_fill(~marked, torch.finfo(scores.dtype).min), dim=-1)
    return weights.masked_fill(~(marked & marked.mT), 0.0)  # the inverse of zeros is zeros


def segment_means(x: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
    """Means of `count` consecutive segments of `x [B, H, S, D]`, float32 `[B, H, count, D]`.

    There are `used = min(count, n)` segments, n the real tokens of the row. Segment i holds tokens `i n // used` to
    `(i + 1) n // used - 1`; the others are empty, and 0.
    """
    batch, _, tokens, _ = x.shape
    real = torch.full((batch,), tokens, device=x.device) if lengths is None else lengths.long()
    used = real.clamp(min=1, max=count)[:, None]
    edges = torch.minimum(torch.arange(count + 1, device=x.device), used) * real[:, None] // used
    # the segment of each token; tokens beyond the last edge belong to none
    place = torch.searchsorted(edges, torch.arange(tokens, device=x.device).expand(batch, -1).contiguous(), right=True) - 1
    sizes = edges.diff(dim=-1)
    share = F.one_hot(place, count + 1)[..., :count].to(torch.float32) / sizes.clamp(min=1)[:, None]
    # padding may hold anything, and 0 times NaN is NaN
    seen = x.float().masked_fill((place == count)[:, None, :, None], 0.0)
    return share.mT[:, None] @ seen


def pseudo_inverse(matrix: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of `[.., m, m]`, non-negative with rows that add up to 1 (or to 0), by iteration."""
    size = matrix.sum(-2).amax(-1) * matrix.sum(-1).amax(-1)
    inverse = matrix.mT / size.clamp(min=torch.finfo(matrix.dtype).tiny)[..., None, None]
    identity = torch.eye(matrix.shape[-1], device=matrix.device, dtype=matrix.dtype)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


def _check(embed_dim: int, num_heads: int, landmarks: int, iterations: int, conv_kernel: int | None) -> None:
    check_heads(embed_dim, num_heads)
    check_size("landmarks", landmarks)
    check_size("iterations", iterations, _MOST_ITERATIONS)
    if conv_kernel is None:
        return
    check_size("conv_kernel", conv_kernel)
    if conv_kernel % 2 == 0:
        raise InvalidArgument(f"conv_kernel is {conv_kernel}; it must be odd and positive, or None")
