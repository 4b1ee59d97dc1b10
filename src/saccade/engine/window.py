"""A sliding window `(left, right)`: query i sees the keys i - left to i + right of its sequence. None is no limit on a side."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from saccade.engine.arguments import shown
from saccade.errors import InvalidArgument

Window = tuple[int | None, int | None]
# no limit, in records of kernels, whose fields are plain numbers
NO_LIMIT = -1


def check_window(window: Any) -> Window | None:
    """A window as a tuple of plain numbers; None if it has no limit on either side.

    Raises:
        InvalidArgument: it is not a pair of integers or None.
    """
    if window is None:
        return None
    pair = tuple(window) if isinstance(window, (tuple, list)) and len(window) == 2 else ()
    ends = [_end(end) for end in pair]
    if not pair or any(end is not None and end < 0 for end in ends):
        allowed = "it must be (left, right), each a whole number of tokens of at least 0, or None for no limit"
        raise InvalidArgument(f"window is {shown(window)}; {allowed}")
    return None if ends == [None, None] else (ends[0], ends[1])


def check_alone(window: Window | None, name: str, other: Tensor | None) -> None:
    """Raise if a call has a window and another tensor that says what its queries see."""
    if window is not None and other is not None:
        advice = f"hide what lies outside of the window in {name}, and pass no window"
        raise InvalidArgument(f"{shown_window(window)} and {name} (shape {list(other.shape)}) are both given; {advice}")


def restricting(window: Window | None, causal: bool) -> Window | None:
    """The window of a call; None if a causal mask already hides everything that it hides."""
    return None if window is not None and causal and window[0] is None else window


def why_no_window(window: Window | None) -> list[str]:
    """The obstacles to a call for kernels that know no windows."""
    return [] if window is None else [f"takes no sliding window, got {shown_window(window)}"]


def shown_window(window: Window) -> str:
    """As messages have it."""
    return f"window=({window[0]}, {window[1]})"


def ends_of(window: Window | None) -> tuple[int, int]:
    """(left, right) as records of kernels have them."""
    left, right = window or (None, None)
    return NO_LIMIT if left is None else left, NO_LIMIT if right is None else right


def has_window(args: Any) -> bool:
    """Whether the record of a call has a window."""
    return (args.window_left, args.window_right) != (NO_LIMIT, NO_LIMIT)


def in_window(rows: Tensor, keys: Tensor, left: int, right: int) -> Tensor:
    """The pairs of rows and keys, places in one sequence, that lie within a window. left, right: as `ends_of` has them."""
    seen = torch.ones_like(rows - keys, dtype=torch.bool)
    if left != NO_LIMIT:
        seen = seen & (keys >= rows - left)
    return seen if right == NO_LIMIT else seen & (keys <= rows + right)


def _end(end: Any) -> int | None:
    """A plain number; -1 for anything else."""
    if end is None:
        return None
    if isinstance(end, bool) or not isinstance(end, (int, torch.SymInt, numbers.Integral)):
        return -1
    return int(end)
