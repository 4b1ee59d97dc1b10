"""Synthetic tasks of recall: batches of tokens, the positions where an answer is due, and the answers.

    copy     d d d d . . . . . . . . ? ? ? ?        the first m tokens again, in order
    select   . d . . d . . d . . d . ? ? ? ?        the m data tokens, wherever they were, in order
    induce   . . . t v . . . . . . . . t            what followed the trigger token the first time
    mqar     k v k v k v . . k . . k . . . k        the value of each key: multi-query associative recall

Dots are filler, drawn from token ids of its own: a score that sees a token can tell it from data, as the scores of a dynamic mask
must. The data is `m` keys that a query needs from far away, among `n` that it could see.

Source: Copy, Select and Induce of "Trainable Dynamic Mask Sparse Attention" (paper 004), Fig. 3, where they are a drawing; the
paper names MQAR too. Forms are the usual ones of the field (selective copying, induction heads, MQAR with scattered queries).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FILLER = 16  # ids 0..15
MARK = FILLER  # "answer now", and the trigger of induce
FIRST_DATA = FILLER + 1
# questions per key of mqar: more answers per sequence need fewer steps
ASKED = 4


@dataclass(frozen=True)
class Batch:
    """tokens int64 `[N, T]`; the model must predict `answers[i, a]` at position `places[i, a]`, both int64 `[N, M]`."""

    tokens: Tensor
    places: Tensor
    answers: Tensor


@dataclass(frozen=True)
class Task:
    """A generator of batches: `length` tokens, `items` data items, and `symbols` different ids for each kind of data."""

    name: str
    length: int
    items: int
    symbols: int

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise ValueError(f"task is {self.name!r}; there are {', '.join(TASKS)}")
        room = {"copy": 2, "select": 2, "induce": 1, "mqar": 2 + ASKED}[self.name] * self.items + 3
        if self.items < 1 or self.length < room:
            raise ValueError(f"{self.name} with {self.items} items needs at least {room} tokens, got {self.length}")
        if self.symbols < self.items:
            raise ValueError(f"{self.symbols} symbols for {self.items} different items; there must be as many at least")

    @property
    def vocabulary(self) -> int:
        """Token ids in use: filler, the marker, data (for mqar keys, then values)."""
        return FIRST_DATA + self.symbols * (2 if self.name == "mqar" else 1)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """`count` fresh sequences on the generator's device."""
        return TASKS[self.name](self, count, generator)

    def shorter(self, length: int) -> Task:
        """The same on `length` tokens, with an eighth as many items, or as many as there are."""
        return replace(self, length=length, items=min(self.items, length // 8))


def copy(task: Task, count: int, generator: torch.Generator) -> Batch:
    """The data is at the start: each answer is exactly T - m tokens back."""
    data = _integers(count, task.items, task.symbols, generator) + FIRST_DATA
    tokens = _filler(task, count, generator)
    tokens[:, : task.items] = data
    return _answer_at_the_end(tokens, data)


def select(task: Task, count: int, generator: torch.Generator) -> Batch:
    """The data is scattered over all but the last m tokens."""
    data = _integers(count, task.items, task.symbols, generator) + FIRST_DATA
    tokens = _filler(task, count, generator)
    free = task.length - task.items
    tokens.scatter_(1, _distinct(count, task.items, free, generator).sort(dim=1).values, data)
    return _answer_at_the_end(tokens, data)


def induce(task: Task, count: int, generator: torch.Generator) -> Batch:
    """One trigger and its value among filler and other data; the trigger again at the end."""
    tokens = _filler(task, count, generator)
    others = _integers(count, task.items, task.symbols, generator) + FIRST_DATA
    tokens.scatter_(1, _distinct(count, task.items, task.length - 1, generator), others)
    place = _integers(count, 1, task.length - 3, generator)
    value = _integers(count, 1, task.symbols, generator) + FIRST_DATA
    tokens.scatter_(1, place, MARK).scatter_(1, place + 1, value)
    tokens[:, -1] = MARK
    return Batch(tokens, torch.full_like(place, task.length - 1), value)


def mqar(task: Task, count: int, generator: torch.Generator) -> Batch:
    """m pairs of different keys and any values at the start; then each key ASKED times at random places."""
    keys = _distinct(count, task.items, task.symbols, generator) + FIRST_DATA
    values = _integers(count, task.items, task.symbols, generator) + FIRST_DATA + task.symbols
    tokens = _filler(task, count, generator)
    shown = 2 * task.items
    tokens[:, :shown] = torch.stack((keys, values), 2).flatten(1)
    places = _distinct(count, ASKED * task.items, task.length - shown, generator) + shown
    keys, values = keys.repeat(1, ASKED), values.repeat(1, ASKED)
    tokens.scatter_(1, places, keys)
    return Batch(tokens, places, values)


TASKS: dict[str, Callable[[Task, int, torch.Generator], Batch]] = {"copy": copy, "select": select, "induce": induce, "mqar": mqar}


def accuracy(logits: Tensor, answers: Tensor) -> Tensor:
    """Share of answers whose logit is the largest, over all but the first dim: `[G, .., V]` and `[G, ..]` to `[G]`."""
    return (logits.argmax(-1) == answers).float().flatten(1).mean(1)


def _answer_at_the_end(tokens: Tensor, data: Tensor) -> Batch:
    length, items = tokens.shape[1], data.shape[1]
    tokens[:, length - items :] = MARK
    places = torch.arange(length - items, length, device=tokens.device).expand(tokens.shape[0], items)
    return Batch(tokens, places, data)


def _filler(task: Task, count: int, generator: torch.Generator) -> Tensor:
    return _integers(count, task.length, FILLER, generator)


def _integers(count: int, width: int, below: int, generator: torch.Generator) -> Tensor:
    return torch.randint(below, (count, width), generator=generator, device=generator.device)


def _distinct(count: int, width: int, below: int, generator: torch.Generator) -> Tensor:
    """`width` different integers below `below` in each row, in random order."""
    return torch.rand(count, below, generator=generator, device=generator.device).argsort(dim=1)[:, :width]
