"""The process group of a call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from saccade.errors import InvalidArgument


def group_of(group: Any) -> tuple[Any, int, int]:
    """(group, rank in it, its size) for a process group, a one-dimensional device mesh, or None for the default group.

    Raises:
        InvalidArgument: there is no process group, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            "there is no process group; call torch.distributed.init_process_group first, in a program that torchrun starts"
        )
    allowed = "it must be a process group that this rank is in, a device mesh of one dimension or None"
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise InvalidArgument(f"group is a device mesh of {group.ndim} dimensions; {allowed}")
        if group.get_coordinate() is None:
            raise InvalidArgument(f"group is {group}, which rank {dist.get_rank()} is not in; {allowed}")
        group = group.get_group()
    elif group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"group is {group!r}; {allowed}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidArgument(f"rank {dist.get_rank()} is not in the group; only the ranks of a group call an operation on it")
    return group, rank, dist.get_world_size(group)


def start_all_gather(everything: Tensor, mine: Tensor, group: Any) -> Any:
    """Begin to gather `mine`, of one dim, into `everything`, which has a row for each rank; returns what to wait for."""
    # torch 2.13 renames it and warns of the old name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(everything.view(-1), mine, group=group, async_op=True)
