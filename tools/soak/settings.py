"""Settings of a process that runs many tiny problems."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator

import torch


def begin() -> None:
    """For a process of our own: without it, every problem that only the reference runs is told, once each; several threads are slower than one for
    tiny tensors; and garbage, which is collected before each capture of a graph, is sought among all that was loaded."""
    logging.getLogger("saccade").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    gc.freeze()


@contextlib.contextmanager
def for_tiny_problems() -> Iterator[None]:
    """The same for a while, in a process that goes on afterwards."""
    logger, level, threads = logging.getLogger("saccade"), logging.getLogger("saccade").level, torch.get_num_threads()
    begin()
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
        gc.unfreeze()
