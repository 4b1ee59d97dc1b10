"""`saccade cache`: reports or deletes the kernels that were compiled from CUDA C++ and kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.errors import SaccadeError
from saccade.nvrtc import store


def run(clear: bool) -> str:
    """One line about the kernels on disk, which `clear` deletes."""
    try:
        kept = store.clear() if clear else store.contents()
    except OSError as error:
        raise SaccadeError(f"the cache {store.folder()} cannot be cleared: {error}") from None
    return f"{kept.folder}: {'deleted ' if clear else ''}{size_of(kept._asdict())}"


def size_of(cache: Mapping[str, Any]) -> str:
    """Number and size of the kernels in words, from `entries` and `bytes`."""
    return f"{cache['entries']} kernel{'' if cache['entries'] == 1 else 's'}, {cache['bytes'] / 2**20:.1f} MiB"
