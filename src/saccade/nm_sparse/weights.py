"""The staged pipeline of N:M sparse attention, for users who need the pruned weights themselves.

    weights = saccade.nm_sparse.scores(query, key, pattern="2:4").softmax()     # nothing dense is ever in memory
    out = weights.matmul(value)                                                # sparse tensor cores

As in the Dfss paper, three kernels write and read the kept half of the scores. `saccade.nm_sparse_attention` computes the same in
one kernel and is the function for models: it moves no scores, and has gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.engine.arguments import check_choice, check_count, check_flag, real_number, shown
from saccade.engine.calls import autocast, gradient_needed, uncast
from saccade.engine.kinds import check_kinds
from saccade.engine.layout import repeat_heads
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.hardware import arch_of
from saccade.nm_sparse import compressed, reference
from saccade.nm_sparse.problem import BLOCK, describe_nm_sparse, parse_pattern
from saccade.nm_sparse.staged.backend import why_not

BACKENDS = ("auto", "mma_sp", "reference")


@dataclass(frozen=True, eq=False)
class NMWeights:
    """A matrix `[B, H, Tq, Tk]` in the compressed format of sparse tensor cores: of each group of M keys, N are kept.

    Attributes:
        values: `[B, H, rows, columns / 2]`, the kept numbers in order; rows is Tq rounded up to a multiple of 32, columns is Tk
            rounded up to a multiple of 64 (32 for float32); the padding holds `fill`.
        metadata: int16 `[B, H, rows, columns / 16]` (`/ 8` for float32), which numbers are kept, in the layout of CUTLASS (Dfss, Fig.
            6 and Eq. 9). For each head these are exactly the bytes of `torch.sparse.to_sparse_semi_structured`.
        shape: (B, H, Tq, Tk).
        pattern: "2:4" or "1:2".
        fill: the value of a number that is not kept, -inf in scores and 0 in weights.
        is_causal: whether query i sees only keys 0 to i.
        backend: as in `scores`, of the products that follow.
    """

    values: Tensor
    metadata: Tensor
    shape: tuple[int, int, int, int]
    pattern: str
    fill: float
    is_causal: bool = False
    backend: str = "auto"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the kept numbers."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device that holds the kept numbers."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the kept numbers and the metadata: 9/16 of the dense matrix, before padding."""
        return self.values.nbytes + self.metadata.nbytes

    def softmax(self) -> NMWeights:
        """Softmax of each row over its kept scores. A row without a score above -inf becomes zeros.

        Raises:
            InvalidArgument: these are weights already.
        """
        return self._softmax(None)

    def softmax_(self) -> NMWeights:
        """`softmax` into the memory of these scores, which then hold weights too."""
        found = self._softmax(self.values)
        object.__setattr__(self, "fill", found.fill)  # frozen for other code
        return found

    def matmul(self, value: Tensor, enable_gqa: bool = False) -> Tensor:
        """The product with `value`, on sparse tensor cores if available.

        Args:
            value: `[B, Hkv, Tk, Dv]` of the same dtype.
            enable_gqa: each value head serves H / Hkv heads; otherwise Hkv is H.

        Returns:
            `[B, H, Tq, Dv]`. float32 is multiplied as TF32 by the kernels.

        Raises:
            InvalidArgument: these are scores and no weights yet; or value has another shape, dtype or device.
            UnsupportedProblem: value needs a gradient; or the backend that was named cannot run here.

        This is a product and not attention: a kept weight of 0 times a NaN value is NaN, also for a key that was masked.
        """
        if autocast(value)[0] is not value:
            value = value.to(self.dtype)  # cast under autocast as in `scores`
        self._check_value(value, enable_gqa)
        if _chosen(self.backend, value, self.shape[3]) == "reference":
            with uncast(value):
                return self._plain_matmul(value)
        from saccade.nm_sparse.staged import launchers

        return launchers.matmul(self.values, self.metadata, value, self._skips, self.shape[2])

    def to_dense(self, fill: float | None = None) -> Tensor:
        """The matrix `[B, H, Tq, Tk]`, `fill` (default: `self.fill`) where nothing is kept."""
        dense = compressed.expand(self.values, self.metadata, self.fill if fill is None else _check_fill(fill))
        return dense[..., : self.shape[2], : self.shape[3]]

    def kept(self) -> Tensor:
        """The numbers that are kept, bool `[B, H, Tq, Tk]`; masked keys that fill a slot count as kept."""
        return compressed.expand(torch.ones_like(self.values), self.metadata, 0.0)[..., : self.shape[2], : self.shape[3]] != 0

    def to_torch(self, batch: int, head: int) -> torch.sparse.SparseSemiStructuredTensorCUTLASS:
        """One head as torch's semi-structured tensor `[rows, columns]`, padding included; shares memory. Numbers not kept count
        as 0.

        Raises:
            InvalidArgument: `batch` or `head` is no index of these weights.
        """
        for name, number, most in (("batch", batch, self.shape[0]), ("head", head, self.shape[1])):
            if check_count(name, number, 0) >= most:
                raise InvalidArgument(f"{name} is {number}; the weights have {most}")
        values, metadata = self.values[batch, head], self.metadata[batch, head]
        return torch.sparse.SparseSemiStructuredTensorCUTLASS(
            torch.Size((values.shape[0], 2 * values.shape[1])),
            packed=values, meta=metadata, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None,
        )  # fmt: skip

    @staticmethod
    def from_torch(sparse: torch.sparse.SparseSemiStructuredTensorCUTLASS, pattern: str | None = None) -> NMWeights:
        """A semi-structured tensor of torch `[rows, columns]` as weights `[1, 1, rows, columns]`; shares memory.

        pattern: "1:2" or "2:4"; by default "1:2" for float32 and "2:4" for 16-bit dtypes, which is what the format holds.
        """
        values, metadata = getattr(sparse, "packed", None), getattr(sparse, "meta", None)
        if not isinstance(values, Tensor) or not isinstance(metadata, Tensor):
            raise InvalidArgument(
                f"sparse is a {type(sparse).__name__}; it must be a SparseSemiStructuredTensorCUTLASS with packed and meta"
            )
        if pattern is None:
            pattern = "1:2" if values.dtype == torch.float32 else "2:4"
        _check_format(values.dtype, pattern)
        rows, kept = values.shape
        return NMWeights(values[None, None], metadata[None, None], (1, 1, rows, 2 * kept), pattern, 0.0)

    @property
    def _skips(self) -> bool:
        """Whether kernels may skip what is above the diagonal, because softmax has put zeros there."""
        return self.is_causal and self.fill == 0.0

    def _softmax(self, out: Tensor | None) -> NMWeights:
        if self.fill != float("-inf"):
            raise InvalidArgument("softmax was already taken: these are weights, pruned ones count as 0, not scores")
        values = torch.empty_like(self.values) if out is None else out
        if _chosen(self.backend, self.values, self.shape[3]) == "reference":
            values.copy_(torch.softmax(self.values.float(), dim=-1).masked_fill(self._blind(), 0.0))
        else:
            from saccade.nm_sparse.staged import launchers

            launchers.softmax(self.values, self.is_causal, values)
        return replace(self, values=values, fill=0.0)

    def _blind(self) -> Tensor:
        """Rows without a score above -inf, `[B, H, rows, 1]`."""
        return (self.values == float("-inf")).all(-1, keepdim=True)

    def _plain_matmul(self, value: Tensor) -> Tensor:
        groups = self.shape[1] // value.shape[1] if value.shape[1] else 1
        value = repeat_heads(value, groups)
        return (self.to_dense(0.0).float() @ value.float()).to(value.dtype)

    def _check_value(self, value: Tensor, enable_gqa: bool) -> None:
        batch, heads, _, kv_len = self.shape
        enable_gqa = check_flag("enable_gqa", enable_gqa)
        check_kinds(value=value)
        if self.fill != 0.0:
            raise InvalidArgument("these are scores: take .softmax() before .matmul(value)")
        if gradient_needed(value):
            raise UnsupportedProblem(_NO_GRADIENT.format(name="value"))
        wanted = f"[{batch}, {heads}{' or a divisor of it' if enable_gqa else ''}, {kv_len}, Dv]"
        if not isinstance(value, Tensor) or value.dim() != 4 or (value.shape[0], value.shape[2]) != (batch, kv_len):
            given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidArgument(f"value is {given}; with weights {list(self.shape)} it must be {wanted}")
        if value.shape[1] != heads and (not enable_gqa or value.shape[1] == 0 or heads % value.shape[1]):
            raise InvalidArgument(f"value has {value.shape[1]} heads, the weights {heads}; it must be {wanted}")
        if value.dtype != self.dtype or value.device != self.device:
            raise InvalidArgument(
                f"value is {value.dtype} on {value.device}, the weights {self.dtype} on {self.device}; they must be the same"
            )


_NO_GRADIENT = (
    "{name} needs a gradient, which the staged pipeline does not have: use saccade.nm_sparse_attention, which does, "
    "or call it under torch.no_grad()"
)


def scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: str = "2:4",
    block_mask: Tensor | None = None,
    backend: str = "auto",
) -> NMWeights:
    """`prune(scale * Q K^T + mask)`: scores that are pruned N:M before they leave the registers, and stored compressed.

    In each M consecutive keys (from key 0 on) the N with the largest scores are kept; ties go to the lower index, as in
    `nm_sparse_attention`. A masked key is -inf and fills a slot only if nothing else is left.

    Args:
        query: `[B, H, Tq, D]`.
        key: `[B, Hkv, Tk, D]`.
        attn_mask: bool (True = attend) or float (added to the scores), broadcastable to `[B, H, Tq, Tk]`.
        is_causal: query i sees keys 0 to i.
        scale: factor on the products, `1/sqrt(D)` by default.
        enable_gqa: H may be a multiple of Hkv; otherwise they are equal.
        pattern: "2:4" or "1:2" for bfloat16 and float16, "1:2" for float32 (multiplied as TF32 by the kernels).
        block_mask: as in `nm_sparse_attention`, bool `[B, H, ceil(Tq / 64), ceil(Tk / 64)]`, B and H broadcast; the keys of a hidden tile
            are masked. The kernel multiplies no hidden tile, but stores its -inf like any score, and later stages read it.
        backend: "mma_sp" (CUDA C++, sm_80 and later, D up to 256), "reference" (plain torch, any device, holds the dense scores),
            "auto" the first of them that can. Query and key are copied if the head dim is not a multiple of 16 (8 for float32) or
            their rows do not begin at multiples of 16 bytes.

    Returns:
        the scores `[B, H, Tq, Tk]` as `NMWeights`, pruned ones counting as -inf.

    Raises:
        InvalidArgument: a bad argument, or a pattern that the format does not have.
        UnsupportedProblem: `backend` cannot run this here; a tensor needs a gradient.

    Source:
        Dfss (paper 003), section 3 and appendix A.1.
    """
    query, key = autocast(query, key)
    problem = describe_nm_sparse(
        query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa, pattern, block_mask, None, False, needs_grad=False
    )
    _check_format(query.dtype, pattern)
    for name, tensor in (("query", query), ("key", key), ("attn_mask", attn_mask)):
        if gradient_needed(tensor):
            raise UnsupportedProblem(_NO_GRADIENT.format(name=name))
    is_causal = problem.is_causal
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    blocks = None if block_mask is None else block_mask[(None,) * (4 - block_mask.dim())]
    if _chosen(backend, query, key.shape[2], query.shape[3]) == "reference":
        with uncast(query):
            values, metadata = _plain_scores(query, key, attn_mask, blocks, is_causal, problem.scale, pattern)
    else:
        from saccade.nm_sparse.staged import launchers

        padded = compressed.padded(query.shape[2], key.shape[2], query.dtype)
        keep, _ = parse_pattern(pattern)
        values, metadata = launchers.scores(query, key, attn_mask, blocks, is_causal, problem.scale, keep, *padded)
    return NMWeights(values, metadata, shape, pattern, float("-inf"), is_causal, backend)


def compress(dense: Tensor, pattern: str = "2:4", *, fill: float = 0.0) -> NMWeights:
    """Prune a matrix `[.., rows, columns]` of up to four dims by value, and compress it, as `scores` does with scores.

    Args:
        dense: bfloat16, float16 or float32, any device.
        pattern: as in `scores`.
        fill: the value of a number that is not kept: -inf for scores.

    Returns:
        the matrix as `NMWeights` of four dims; dims that `dense` lacks are in front, with size 1.

    Raises:
        InvalidArgument: another number of dims or dtype, or a pattern that the format does not have.
        UnsupportedProblem: dense needs a gradient.

    The N largest numbers of a group are kept, not those that differ from 0. For a matrix that is already 2:4 and has negative
    numbers, use `torch.sparse.to_sparse_semi_structured` and `NMWeights.from_torch`.

    Source:
        the layout of Dfss (paper 003), appendix A.1.1, Eq. 9.
    """
    check_kinds(dense=dense)
    fill = _check_fill(fill)
    if not isinstance(dense, Tensor) or not 2 <= dense.dim() <= 4:
        given = list(dense.shape) if isinstance(dense, Tensor) else type(dense).__name__
        raise InvalidArgument(f"dense is {given}; it must be a tensor [.., rows, columns] of two to four dims")
    _check_format(dense.dtype, pattern)
    if gradient_needed(dense):
        raise UnsupportedProblem(_NO_GRADIENT.format(name="dense"))
    wide = dense[(None,) * (4 - dense.dim())]
    values, metadata = compressed.compress(wide, *parse_pattern(pattern), fill)
    batch, heads, rows, columns = wide.shape
    return NMWeights(values, metadata, (batch, heads, rows, columns), pattern, fill)


def _check_fill(fill: float) -> float:
    """The value of numbers that are not kept, as a float."""
    number = real_number(fill)
    if number is None:
        raise InvalidArgument(f"fill is {shown(fill)}; it must be a number, 0.0 for weights and -inf for scores")
    return number


def _check_format(dtype: torch.dtype, pattern: str) -> None:
    """The pairs of pattern and dtype that sparse tensor cores support."""
    parse_pattern(pattern)
    if dtype not in compressed.DTYPES:
        raise InvalidArgument(f"dtype is {dtype}; the compressed format has bfloat16, float16 and float32")
    if pattern not in ("1:2", "2:4"):
        raise InvalidArgument(
            f"pattern is {pattern!r}; the compressed format has '2:4' and '1:2' (saccade.nm_sparse_attention takes any N:M)"
        )
    if pattern == "2:4" and dtype == torch.float32:
        raise InvalidArgument(
            "pattern is '2:4' and dtype torch.float32; sparse tensor cores have '1:2' for float32, '2:4' for 16 bits"
        )


def _chosen(backend: str, tensor: Tensor, kv_len: int, head_dim: int | None = None) -> str:
    """The name of the backend that runs: "mma_sp" or "reference"."""
    check_choice("backend", backend, BACKENDS)
    if backend == "reference":
        return backend
    reasons = why_not(tensor.device, arch_of(tensor.device), tensor.dtype, kv_len, head_dim)
    if not reasons:
        return "mma_sp"
    if backend == "mma_sp":
        raise UnsupportedProblem(f"backend 'mma_sp' cannot run nm_sparse.scores here: {'; '.join(reasons)}")
    return "reference"


def _plain_scores(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, block_mask: Tensor | None, is_causal: bool, scale: float, pattern: str
) -> tuple[Tensor, Tensor]:
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    mask, bias = (attn_mask, None) if boolean else (None, attn_mask)
    found = reference.visible_scores(
        query, key, scale=scale, mask=mask, bias=bias, block_mask=block_mask, block=BLOCK, is_causal=is_causal
    )
    return compressed.gather(found, found.to(query.dtype), *parse_pattern(pattern), float("-inf"))
