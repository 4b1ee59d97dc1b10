"""The facts that the launches of a call share, worked out once for a signature: strides, features, and which rows share the bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.shared_bias.config import WIDEST, Config, config_of
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.triton import pow2

# if at least this many rows and heads share a bias, a copy padded to whole tiles pays for itself
_SHARING = 4


class Given(NamedTuple):
    """The tensors of a call as kernels read them. The query takes the place of those that are absent, and is never read there."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    lengths: Tensor
    visible: Tensor
    seed: Tensor


class SharedBiasCall:
    """A call without its data. Its tensors have dense last dimensions; its bias is a view `[W, H, Tq, Tk]`, with strides of 0 where it broadcasts.

    may_copy: the bias is copied where whole tiles pay, as every kernel reads it.
    """

    def __init__(self, args: AttentionArgs, config: Config | None = None, bias_grad: bool = False, may_copy: bool = True):
        query, key, bias = args.query, args.key, args.bias
        assert bias is not None, "the backend takes calls with a bias"
        self.batch, self.heads, self.q_len, self.head_dim = query.shape
        self.kv_len, self.owners = key.shape[2], key.shape[1]
        self.group = self.heads // max(1, self.owners)  # of an empty call
        self.block_d = pow2(max(16, self.head_dim))
        self.config = config or config_of(self.block_d, query.element_size(), arch_of(query.device))
        self.scale, self.dropout_p, self.bias_grad = args.scale, args.dropout_p, bias_grad
        self.precision = "ieee" if query.dtype == torch.float32 else "tf32"
        self.exact = query.dtype == torch.float32
        self.has = args.lengths is not None, args.mask is not None, args.seed is not None
        self.device, self.processors = query.device, multiprocessors(query.device)
        rows = self._rows_of(bias)
        # rows b, b + W, .. share a bias; heads too if there is one owner
        self.windows, self.bias_owners = rows.shape[:2]
        self.members = self.batch // max(1, self.windows) * (self.heads // max(1, self.bias_owners))
        self.padded = self.kv_len % WIDEST == 0
        # T5's bias is a view of `[Tq, Tk, H]`
        good = self.padded and rows.stride(3) == 1
        self.copies = may_copy and not good and self.members >= _SHARING and rows.shape[3] == self.kv_len
        self.padded |= self.copies
        self._remembered: dict[Any, Any] = {}
        self._note_strides(self.given(args))

    def _note_strides(self, given: Given) -> None:
        of_row, of_head, of_query, of_key = given.bias.stride()
        self.columns = given.bias.shape[3]
        self.unit = next(n for n in (16, 8, 4, 2, 1) if of_query % n == 0)
        self.wide_bias = (of_query + of_key) * WIDEST >= 2**31
        strides = of_row if self.windows > 1 else 0, of_head, of_query // self.unit, of_key
        visible = given.visible.stride(0) if self.has[1] else 0
        # what each kernel is given after the strides of its rows
        self.numbers = strides, visible, self.windows, self.heads
        self.inputs = tuple([x.stride()[:3] for x in given[:3]])

    def _rows_of(self, bias: Tensor) -> Tensor:
        """A bias `[W, ..]` of rank 4. A bias that was expanded over the batch counts as one row, unless each row needs a gradient."""
        bias = bias[(None,) * (4 - bias.dim())]
        shared = bias.shape[0] == self.batch and bias.stride(0) == 0 and not self.bias_grad
        return bias[:1] if shared else bias

    def given(self, args: AttentionArgs) -> Given:
        """The tensors of a call of this signature."""
        query, bias, lengths, mask = args.query, args.bias, args.lengths, args.mask
        assert bias is not None, "the backend takes calls with a bias"
        rows, columns = self._rows_of(bias), self.kv_len
        if self.copies:
            rows = _widened(rows)
            columns = rows.shape[3]
        rows = rows.expand(self.windows, self.heads, self.q_len, columns)
        visible = query if mask is None else _keys_of(mask, self.batch, self.kv_len)
        seed = query if args.seed is None else args.seed
        return Given(query, args.key, args.value, rows, query if lengths is None else lengths, visible, seed)

    @property
    def turns(self) -> bool:
        """Whether dK and dV read a copy of the bias."""
        return self.config.turns and self.members >= _SHARING

    def turned(self, given: Given) -> tuple[Tensor, tuple]:
        """The copy, `[W, Hb, Tk, Tq or more]`, and in place of `numbers` those of its strides."""
        rows = given.bias[:, : self.bias_owners, :, : self.kv_len]
        copy = _widened(rows.transpose(2, 3))
        of_row, of_head, of_key, _ = copy.stride()
        strides = of_row if self.windows > 1 else 0, of_head if self.bias_owners > 1 else 0, 1, of_key
        return copy, (strides, *self.numbers[1:])

    def once(self, name: str, strides: tuple, make: Callable[[], Any]) -> Any:
        """The plan of a launch, worked out once. strides: of the tensors whose layout may differ in another call of the signature."""
        found = self._remembered.get((name, strides))
        if found is None:
            found = self._remembered[name, strides] = make()
        return found

    def chunks(self, programs: int) -> tuple[int, int]:
        """(members of a chunk, chunks) if one chunk of all of them is so many programs."""
        wanted = max(1, self.config.programs * self.processors // programs)
        each = -(-self.members // min(wanted, self.members))
        return each, -(-self.members // each)

    def last(self, strides: tuple) -> tuple:
        """The constants that each kernel ends with. strides: of the rows that it reads and writes."""
        # whether 32 bits do not hold a distance inside of a tile of rows
        wide = max(row for *_, row in strides) * WIDEST >= 2**31
        return self.padded, self.unit, self.block_d != self.head_dim, wide, self.wide_bias, self.precision


def call_of(args: AttentionArgs, config: Config | None, bias_grad: bool, may_copy: bool = True) -> SharedBiasCall:
    """The call of these arguments: that of its signature, if the call was prepared."""
    if args.launches is None:
        return SharedBiasCall(args, config, bias_grad, may_copy)
    chosen = config or config_of(pow2(max(16, args.query.shape[3])), args.query.element_size(), arch_of(args.query.device))
    key = "shared_bias", bias_grad, may_copy
    found = args.launches.get(key)
    if found is None or found.config is not chosen:
        found = args.launches.remember(key, SharedBiasCall(args, chosen, bias_grad, may_copy))
    return found


def _widened(rows: Tensor) -> Tensor:
    """A dense copy whose last dimension is filled up to whole tiles. Padding by 0 would copy too."""
    missing = -rows.shape[-1] % WIDEST
    return (F.pad(rows, (0, missing)) if missing else rows).contiguous()


def _keys_of(mask: Tensor, batch: int, kv_len: int) -> Tensor:
    """A mask `[B or 1, 1, 1, Tk or 1]` as int8 `[B, Tk]` with a dense last dimension."""
    rows = mask[(None,) * (4 - mask.dim())].expand(batch, 1, 1, kv_len)[:, 0, 0]
    return (rows if rows.stride(1) == 1 else rows.contiguous()).view(torch.int8)


def dense_last(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is dense."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
