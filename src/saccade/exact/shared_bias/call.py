"""The facts that the launches of a call share: strides, what it has besides queries, keys and values, and who shares its bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.shared_bias.config import WIDEST, Config, config_of
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.triton import pow2

# rows and heads that share a bias, from which a copy with dense rows of whole tiles pays: it is read and written once
_SHARING = 4


class Call:
    """A call whose tensors have dense last dimensions, and whose bias is a view `[W, H, Tq, Tk]`, with strides of 0 where it broadcasts."""

    def __init__(self, args: AttentionArgs, config: Config | None = None, bias_grad: bool = False):
        query, key = args.query, args.key
        self.batch, self.heads, self.q_len, self.head_dim = query.shape
        self.kv_len, self.owners = key.shape[2], key.shape[1]
        self.group = self.heads // max(1, self.owners)  # of an empty call
        self.block_d = pow2(max(16, self.head_dim))
        self.config = config or config_of(self.block_d, query.element_size(), arch_of(query.device))
        self.query, self.key, self.value = query, key, args.value
        self.scale, self.lengths = args.scale, args.lengths
        self.visible = None if args.mask is None else _keys_of(args.mask, self.batch, self.kv_len)
        assert args.bias is not None, "the backend takes calls with a bias"
        # rows b, b + W, .. share a bias
        self.given = _rows_of(args.bias, self.batch, bias_grad)
        self.windows = self.given.shape[0]
        self.bias = self.given.expand(self.windows, self.heads, self.q_len, self.kv_len)
        self.padded = self.kv_len % WIDEST == 0
        # T5's bias is a view of `[Tq, Tk, H]`
        good = self.padded and self.given.stride(3) == 1
        if not good and self.members >= _SHARING and self.given.shape[3] == self.kv_len:
            wide = F.pad(self.given, (0, -self.kv_len % WIDEST)).contiguous()
            self.bias = wide.expand(self.windows, self.heads, self.q_len, wide.shape[3])
            self.padded = True

    @property
    def bias_owners(self) -> int:
        """Heads that have a bias of their own; 1 if all share it."""
        return self.given.shape[1]

    @property
    def members(self) -> int:
        """Rows and heads that share a matrix of the bias."""
        return self.batch // max(1, self.windows) * (self.heads // self.bias_owners)

    def chunks(self, programs: int) -> tuple[int, int]:
        """(members of a chunk, chunks) where one chunk of all of them is so many programs."""
        wanted = max(1, self.config.programs * multiprocessors(self.query.device) // programs)
        each = -(-self.members // min(wanted, self.members))
        return each, -(-self.members // each)

    def wide(self, *tensors: Tensor) -> bool:
        """Whether 32 bits do not hold a distance inside of a tile of rows."""
        return max(x.stride(2) for x in tensors) * WIDEST >= 2**31

    @property
    def wide_bias(self) -> bool:
        """The same of a tile of the bias."""
        return (self.bias.stride(2) + self.bias.stride(3)) * WIDEST >= 2**31

    @property
    def unit(self) -> int:
        """The largest power of two up to 16 that divides the stride of the bias over queries."""
        stride = self.bias.stride(2)
        return next(n for n in (16, 8, 4, 2, 1) if stride % n == 0)

    @property
    def beside(self) -> tuple[Tensor, Tensor, Tensor]:
        """The bias, lengths and visible keys; the query stands in where there are none, and is never read."""
        query = self.query
        return self.bias, query if self.lengths is None else self.lengths, query if self.visible is None else self.visible

    @property
    def numbers(self) -> tuple:
        """What each kernel is given after the strides of its rows."""
        of_row, of_head, of_query, of_key = self.bias.stride()
        strides = of_row if self.windows > 1 else 0, of_head, of_query // self.unit, of_key
        visible = 0 if self.visible is None else self.visible.stride(0)
        return strides, visible, self.windows, self.heads

    @property
    def has(self) -> tuple[bool, bool]:
        """Whether there are lengths, and a mask of keys."""
        return self.lengths is not None, self.visible is not None

    def last(self, *rows: Tensor) -> tuple:
        """The constants that each kernel ends with."""
        precision = "ieee" if self.query.dtype == torch.float32 else "tf32"
        return self.padded, self.unit, self.block_d != self.head_dim, self.wide(*rows), self.wide_bias, precision


def _rows_of(bias: Tensor, batch: int, bias_grad: bool) -> Tensor:
    """A bias `[W, ..]` of rank 4. One that was expanded over the batch is one row, unless the gradient of each row is asked for."""
    bias = bias[(None,) * (4 - bias.dim())]
    shared = bias.shape[0] == batch and bias.stride(0) == 0 and not bias_grad
    return bias[:1] if shared else bias


def _keys_of(mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """A mask `[B or 1, 1, 1, Tk or 1]` as int8 `[B, Tk]` with a dense last dimension."""
    rows = mask[(None,) * (4 - mask.dim())].expand(batch, 1, 1, kv_len)[:, 0, 0]
    return (rows if rows.stride(1) == 1 else rows.contiguous()).view(torch.int8)


def strides_of(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, head, row)."""
    return tensor.stride()[:3]  # type: ignore[return-value]


def dense_last(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is dense."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
