"""A padded batch as packed tokens, and packed rows back into their padded places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import native
from saccade.encoders.families import Family, positions_of

# rows of `Packed.numbers`
IDS, POSITIONS, TYPES, PLACES = range(4)


def packed_on_host() -> int:
    """Numbers of a padded batch on the host up to which it is packed there; a larger one is packed on the device.

    By numpy MiniLM on 2,048 sentences at once took 14.1 ms, packed on the device 7.7 (two runs on H100s). C++ takes a third of numpy's time.
    """
    return 2**15 if native.module is None else 2**16


def pieces_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    """A large batch of the host in pieces of rows that are packed there, each while the device computes the one before; any other as it is."""
    ids = given["input_ids"]
    if native.module is None or ids.is_cuda or ids.numel() <= packed_on_host():
        return [given]
    rows = max(1, packed_on_host() // ids.shape[1])
    starts = range(0, ids.shape[0], rows)
    return [{name: x if x is None or x.shape[0] == 1 else x[i : i + rows] for name, x in given.items()} for i in starts]


class Given(NamedTuple):
    """A padded batch as a model is given it, each `[B, T]`: ids, the mask of real tokens, token types and positions."""

    ids: Tensor
    mask: Tensor | None
    types: Tensor | None
    positions: Tensor | None


@dataclass
class Packed:
    """The real tokens of a padded batch `[B, T]`; arrays of numpy if it lies on the host.

    numbers: int64 `[4, capacity]`: ids, positions, token types, and the place of each token in the padded batch; zeros behind the tokens.
    ends: int32 `[sequences + 1]`. longest: tokens of the longest sequence, or a bound where the host knows none.
    """

    shape: tuple[int, int]
    tokens: int
    numbers: Any
    ends: Any
    longest: int


def pack(given: Given, family: Family, padding: int, reads_first: bool) -> tuple[Packed, Tensor | bool]:
    """(the tokens of a padded batch, whether stock uses a padded position). On a GPU the latter is a tensor, so that nothing waits.

    Stock uses a position of mask 0 whose token is no padding, as ColBERT does. With `reads_first` it also uses the first column of a row that is padded on
    the left, where a pooler or a head reads.
    """
    return (_on_the_device if given.ids.is_cuda else _on_the_host)(given, family, padding, reads_first)


def _on_the_host(given: Given, family: Family, padding: int, reads_first: bool) -> tuple[Packed, bool]:
    found = None
    if native.module is not None:
        found = native.module.pack(*given, padding, family.positions == "counted", reads_first)
    if found is None:
        return _by_numpy(given, family, padding, reads_first)
    numbers, ends, longest, used = found
    rows, columns = given.ids.shape
    return Packed((rows, columns), numbers.shape[1], numbers.numpy(), ends.numpy(), longest), used


def _by_numpy(given: Given, family: Family, padding: int, reads_first: bool) -> tuple[Packed, bool]:
    import numpy as np  # transformers brings it; torch alone does not

    ids, mask, types, positions = given
    rows, columns = ids.shape
    table = ids.numpy()
    real = np.ones(table.shape, dtype=bool) if mask is None else (mask != 0).numpy()
    lengths = real.sum(1)
    places = np.flatnonzero(real)
    used = mask is not None and bool(((table != padding) & ~real).any())
    used |= reads_first and bool((~real[:, 0] & (lengths > 0)).any())
    numbers = np.empty((4, places.size), dtype=np.int64)
    numbers[IDS] = table.reshape(-1)[places]
    numbers[PLACES] = places
    if positions is not None:
        numbers[POSITIONS] = positions.expand(rows, columns).numpy().reshape(-1)[places]
    elif family.positions == "columns":
        numbers[POSITIONS] = places % max(1, columns)
    else:
        numbers[POSITIONS] = positions_of(family, ids, padding).numpy().reshape(-1)[places]
    numbers[TYPES] = 0 if types is None else types.expand(rows, columns).numpy().reshape(-1)[places]
    ends = np.zeros(rows + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    packed = Packed((rows, columns), places.size, numbers, ends, int(lengths.max(initial=0)))
    return packed, used


def _on_the_device(given: Given, family: Family, padding: int, reads_first: bool) -> tuple[Packed, Tensor]:
    ids, mask, types, positions = given
    rows, columns = ids.shape
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    used = ((ids != padding) & ~real).any()
    if reads_first:
        used |= (~real[:, 0] & real.any(1)).any()
    places = real.flatten().nonzero().squeeze(1)  # waits for the device, once: the number of tokens chooses the capacity
    positions = positions_of(family, ids, padding) if positions is None else positions.expand(rows, columns)
    types = torch.zeros_like(ids) if types is None else types.expand(rows, columns)
    numbers = torch.stack([x.reshape(-1)[places].long() for x in (ids, positions, types)] + [places])
    ends = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
    return Packed((rows, columns), numbers.shape[1], numbers, ends, columns), used


def has_gaps(batch: Packed) -> Any:
    """Whether padding lies between two tokens of a row; a tensor on a GPU. A sliding window counts it, and packed tokens have none."""
    places, columns = batch.numbers[PLACES], batch.shape[1]
    before, after = places[:-1], places[1:]
    return ((after - before > 1) & (after // columns == before // columns)).any()


def unpack(rows: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Packed rows `[tokens, E]` in the padded batch `[B, T, E]`, with zeros where there is padding."""
    padded = rows.new_zeros((shape[0] * shape[1], rows.shape[1]))
    return padded.index_copy_(0, places, rows).view(*shape, -1)  # in place: a copy would move the complete batch again
