"""Whether all ranks make the same call: a few numbers from every rank, exchanged before anything whose size depends on them.

The exchange also carries facts that a call needs anyhow: the length of each shard, and whether its scores are finite. It overlaps with the selection
of candidates: the host reads it while the device still selects. No rank continues before it has read the calls of all others. So if ranks disagree,
all of them raise, and none waits for an exchange that never comes.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.distributed.groups import start_all_gather
from saccade.dynamic_mask.problem import decreases
from saccade.errors import InvalidArgument

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REFUSED, _NOT_FINITE, _DECREASES = 4, 1, 2
_MOST = 2**62  # a larger keep (sinks, window) keeps every key too, and must fit an int64


@dataclass(frozen=True)
class AgreedCall:
    """The arguments that must be alike on all ranks, except for `tokens`, the length of a rank's shard. An empty call says that the
    rank has refused its arguments."""

    keep: int = 0
    batch: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    dtype: torch.dtype = torch.float32
    scores_dtype: torch.dtype = torch.float32
    scale: float = 0.0
    add_scores: bool = False
    documents: bool = False
    gradient: bool = False
    sinks: int = 0
    window: int = 0
    tokens: int = 0

    @property
    def recent(self) -> int:
        """How many keys before a shard its first query keeps because they are the newest; it is itself one of `window`."""
        return max(self.window - 1, 0)

    def numbers(self) -> tuple[int, ...]:
        """The call as int64, `tokens` last."""
        return (
            min(self.keep, _MOST), self.batch, self.heads, self.kv_heads, self.head_dim, self.value_dim, _code(self.dtype),
            _code(self.scores_dtype), struct.unpack("q", struct.pack("d", self.scale))[0], self.add_scores, self.documents,
            self.gradient, min(self.sinks, _MOST), min(self.window, _MOST), self.tokens,
        )  # fmt: skip


def _code(dtype: torch.dtype) -> int:
    return _DTYPES.index(dtype) if dtype in _DTYPES else -1


def _dtype(number: int) -> str:
    return str(_DTYPES[number]).removeprefix("torch.") if number >= 0 else "of another dtype"


def _given(number: int) -> str:
    return "given" if number else "not given"


# the text for each number of a call, in order: its name and its value
_WORDS: tuple[tuple[str, Any], ...] = (
    ("keep is", str),
    ("the batch is", str),
    ("the number of query heads is", str),
    ("the number of key heads is", str),
    ("the head dim of query and key is", str),
    ("the head dim of value is", str),
    ("the dtype of query, key and value is", _dtype),
    ("the dtype of key_scores is", _dtype),
    ("scale is", lambda number: repr(struct.unpack("d", struct.pack("q", number))[0])),
    ("add_scores is", lambda number: str(bool(number))),
    ("document_ids is", _given),
    ("a gradient of key, value or key_scores is", lambda number: "needed" if number else "not needed"),
    ("sinks is", str),
    ("window is", str),
)


class Agreement:
    """The exchange of a call with all ranks of a group, begun when it is made and read once."""

    def __init__(self, group: Any, rank: int, ranks: int, mine: Tensor) -> None:
        """mine: `told`; its last place holds the fault of the shard, on the device."""
        self.rank = rank
        self._all = torch.empty(ranks, mine.numel(), dtype=torch.int64, device=mine.device)
        self._mine = mine  # held until it was sent
        self._work = start_all_gather(self._all, mine, group)

    def read(self) -> list[int]:
        """The length of each rank's shard.

        Raises:
            InvalidArgument: on every rank alike, if the calls differ or a shard holds scores that cannot be ranked.
        """
        rows = self._rows()
        refused = [rank for rank, row in enumerate(rows) if row[-1] == _REFUSED]
        if refused:
            raise InvalidArgument(f"rank {refused[0]} refuses its arguments, so no rank can go on; its own error says why")
        for at, (what, shown) in enumerate(_WORDS):
            for rank, row in enumerate(rows):
                if row[at] != rows[0][at]:
                    raise InvalidArgument(
                        f"{what} {shown(rows[0][at])} on rank 0 and {shown(row[at])} on rank {rank}; all ranks must agree"
                    )
        for rank, row in enumerate(rows):
            if row[-1] & _NOT_FINITE:
                raise InvalidArgument(
                    f"key_scores of rank {rank} holds a value that is not finite in float32, in which scores are ranked; scores "
                    "must be finite"
                )
            if row[-1] & _DECREASES:
                raise InvalidArgument(f"document_ids of rank {rank} decreases; within a row of the sequence it must not")
        return [row[-2] for row in rows]

    def _rows(self) -> list[list[int]]:
        if not self._all.is_cuda:
            self._work.wait()
            return self._all.tolist()
        # a stream of its own, so that the host waits for this exchange and not for the selection that was launched after it
        stream = _side_stream(self._all.device)
        host = torch.empty(self._all.shape, dtype=self._all.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            self._work.wait()
            host.copy_(self._all, non_blocking=True)
        stream.synchronize()
        return host.tolist()


def told(call: AgreedCall, device: torch.device, fault: int = 0) -> Tensor:
    """The message of a rank to the others, int64 `[16]`: the call, and the number of its fault."""
    return _on_device((*call.numbers(), fault), device).clone()


def fault_of(scores: Tensor, document_ids: Tensor | None) -> Tensor:
    """A number on the device that marks a shard whose keys cannot be ranked; 0 for any other."""
    ranked = scores.float()
    # one reduction: a sum of finite numbers may overflow, their largest magnitude cannot
    largest = torch.linalg.vector_norm(ranked, float("inf")) if ranked.numel() else ranked.new_zeros(())
    fault = (~torch.isfinite(largest)).to(torch.int64) * _NOT_FINITE
    if document_ids is not None:
        fault = fault + decreases(document_ids).any().to(torch.int64) * _DECREASES
    return fault


def refuse(group: Any, rank: int, ranks: int, device: torch.device) -> None:
    """Inform all ranks that this one refuses its arguments; the caller raises."""
    Agreement(group, rank, ranks, told(AgreedCall(), device, _REFUSED))._rows()


@functools.lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Remembered, as each copy to a GPU costs host time; a call of one shape repeats."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
