"""Chunks of tokens -> batches by a budget of tokens -> embeddings on the device -> results in the order of the input.

While the device computes a batch, the next chunk is tokenised and the results of the last batch travel back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.encoders import base
from saccade.encoders.attention import Borders
from saccade.encoders.capacity import size_of
from saccade.encoders.packing import IDS, PLACES, POSITIONS, TYPES, Packed
from saccade.encoders.tokens import Chunk
from saccade.errors import InvalidArgument

GPU_TOKENS, CPU_TOKENS = 16_384, 4_096  # of a batch whose size the user leaves open
_BEHIND = 4  # batches whose results may be in transfer


class Bound(NamedTuple):
    """How much a batch holds. texts: the user's bound, at most that many times the longest text; None for a number of tokens. padded: the batch is
    filled up to its longest text."""

    texts: int | None
    tokens: int
    padded: bool

    def end(self, lengths: Any, sums: Any, first: int) -> int:
        """Behind the last text of the batch that starts with `first`; lengths fall, and sums are theirs with a 0 before."""
        longest = max(1, int(lengths[first]))
        # at most the number of texts: numpy's integers end at 2^63, and a user may pass sys.maxsize
        tokens = min(self.tokens if self.texts is None else self.texts * longest, len(lengths) * longest)
        if self.padded:
            return min(len(lengths), first + max(1, tokens // longest))
        return max(first + 1, int(sums.searchsorted(sums[first] + tokens, "right")) - 1)


def batches(chunks: Iterable[Chunk], bound: Bound) -> Iterator[Chunk]:
    """The texts of chunks in batches, the longest of a chunk first.

    The last batch of a chunk waits for the next chunk, which may fill it. The first chunk's does not wait, because the device waits for it.
    """
    import numpy as np

    left: Chunk | None = None
    for number, chunk in enumerate(chunks):
        whole = chunk if left is None else _joined(left, chunk)
        left = None
        order = np.argsort(-whole.lengths, kind="stable")
        starts, lengths = (np.cumsum(whole.lengths) - whole.lengths)[order], whole.lengths[order]
        sums = np.concatenate(([0], np.cumsum(lengths)))
        first = 0
        while first < len(order):
            end = bound.end(lengths, sums, first)
            some = _taken(whole, order[first:end], starts[first:end], lengths[first:end])
            if end == len(order) and number > 0:
                left = some
            else:
                yield some
            first = end
    if left is not None:
        yield left


def _joined(one: Chunk, other: Chunk) -> Chunk:
    import numpy as np

    parts = [None if x is None or y is None else np.concatenate((x, y)) for x, y in zip(one, other, strict=True)]
    return Chunk(*parts)


def _taken(whole: Chunk, texts: Any, starts: Any, lengths: Any) -> Chunk:
    import numpy as np

    total = int(lengths.sum())
    tokens = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(total)
    types = None if whole.types is None else whole.types[tokens]
    return Chunk(whole.ids[tokens], lengths, whole.places[texts], types)


def packed(batch: Chunk, served: Any) -> Packed:
    """A batch as the encoder takes it, without a padded shape."""
    import numpy as np

    ids, lengths, _, types = batch
    rows, tokens, longest = len(lengths), len(ids), int(lengths.max())
    padding = served.padding
    counted = served.family.positions == "counted"
    most = served.facts.longest
    if most is not None and longest > (most - padding - 1 if counted else most):
        last = most - padding - 1 if counted else most
        raise InvalidArgument(f"a text has {longest} tokens; the positions of {type(served.model).__name__} end at {last}")
    ends = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    numbers = np.empty((4, tokens), dtype=np.int64)
    numbers[IDS], numbers[TYPES], numbers[PLACES] = ids, 0 if types is None else types, 0
    numbers[POSITIONS] = np.arange(tokens) - np.repeat(ends[:-1], lengths)
    if counted:
        real = ids != padding
        if real.all():
            numbers[POSITIONS] += padding + 1
        else:  # a text names the padding token, which is not counted
            sums = np.concatenate(([0], np.cumsum(real)))
            numbers[POSITIONS] = (sums[1:] - np.repeat(sums[ends[:-1]], lengths)) * real + padding
    return Packed((rows, longest), tokens, numbers, ends, longest)


def embed(served: Any, pool: Callable[[Tensor, Tensor], Tensor], batch: Packed) -> Tensor:
    """The pooled rows of a batch, `[sequences, E]` on the device. pool: what is applied where no graph has pooled."""
    rows = len(batch.ends) - 1
    with served.lock, torch.no_grad():
        state = served.state.read()
        device, watched = served.state.tensors[0].device, served.state.watched
        if base.has_graphs(device) and not watched and not served.failed:
            gpu = served._graphs_on(device)
            graph = gpu.graph(state, size_of(batch.tokens, rows, batch.longest, served.most), False)
            if graph is not None:
                hidden, *pooled = graph(batch, gpu.turns.take(device))
                served.last = f"captured: {batch.tokens} tokens in a graph of {graph.inputs.capacity}"
                # a copy, as the next replay overwrites both
                return (
                    pooled[0][:rows].clone()
                    if pooled and served.pool is pool
                    else pool(hidden, graph.inputs.ends[: rows + 1]).clone()
                )
        numbers, ends = (torch.as_tensor(x).to(device) for x in (batch.numbers, batch.ends))
        served.last = f"unpadded{f': {watched or served.failed}' if base.has_graphs(device) else ''}"
        hidden = served.run_packed(numbers, Borders(ends, max(1, batch.longest)))
        return pool(hidden, ends)


class Results:
    """Rows of batches, put in the order of the input. to_host: they travel back while the device goes on."""

    def __init__(self, count: int, to_host: bool):
        self.count, self.to_host = count, to_host
        self.whole: Tensor | None = None
        self._waiting: list[tuple[Tensor, Any, Any]] = []

    def add(self, rows: Tensor, places: Any) -> None:
        """The rows of a batch, and their places in the input."""
        event = None
        if self.to_host and rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            host.copy_(rows, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            rows = host
        self._waiting.append((rows, places, event))
        while len(self._waiting) > _BEHIND:
            self._put(*self._waiting.pop(0))

    def _put(self, rows: Tensor, places: Any, event: Any) -> None:
        if self.whole is None:
            self.whole = rows.new_empty((self.count, *rows.shape[1:]), pin_memory=False)
        if event is not None:
            event.synchronize()
        if rows.is_cuda:
            self.whole[torch.as_tensor(places).to(rows.device, non_blocking=True)] = rows
        else:  # by numpy: torch's threads would wait for cores that tokenise texts
            _bits(self.whole)[places] = _bits(rows)

    def finish(self) -> Tensor | None:
        """All rows; None if there were none."""
        for waiting in self._waiting:
            self._put(*waiting)
        self._waiting = []
        return self.whole


def _bits(x: Tensor) -> Any:
    """A host tensor in a form that numpy, which has no bfloat16, can read."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x.detach()).numpy()


def padded(batch: Chunk, padding: int, padding_type: int, left: bool) -> dict[str, Tensor]:
    """A batch as the tokenizer's padded tensors."""
    import numpy as np

    ids, lengths, _, types = batch
    columns = np.arange(int(lengths.max()))
    real = (columns >= columns.size - lengths[:, None]) if left else (columns < lengths[:, None])
    found = {"input_ids": np.full(real.shape, padding, dtype=np.int64), "attention_mask": real.astype(np.int64)}
    found["input_ids"][real] = ids
    if types is not None:
        found["token_type_ids"] = np.full(real.shape, padding_type, dtype=np.int64)
        found["token_type_ids"][real] = types
    return {name: torch.from_numpy(x) for name, x in found.items()}
