"""`saccade cache`: shows or deletes all compiled code that saccade keeps on disk. Imports no torch, as the command answers without it."""

from __future__ import annotations

from saccade.compiled import kernels, libraries
from saccade.errors import SaccadeError


def run(clear: bool) -> str:
    """A line for each kind; `clear` deletes them."""
    lines = []
    for kept in (kernels(), libraries()):
        said = kept.describe()
        if clear:
            try:
                kept.delete()
            except OSError as error:
                raise SaccadeError(f"the cache {kept.folder} cannot be cleared: {error}") from None
        lines.append(f"{kept.folder}: {'deleted ' if clear else ''}{said}")
    return "\n".join(lines)
