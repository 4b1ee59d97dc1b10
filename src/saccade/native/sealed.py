"""Compiled libraries on disk, each with a digest behind it: one that is truncated, damaged or another's is not loaded."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

# behind the library, where the loader does not look: this, and the digest of its name and all that lies before
MARK = b"\nsaccade library 1\n"
# what a process left that was killed while it compiled
_STALE_SECONDS = 3600


def seal(made: Path, target: Path) -> None:
    """Write the digest behind a compiled library that is to be called `target`, and close it to others: linkers make a new file, with a mode
    of their own."""
    made.chmod(0o600)
    written = digest(target, made.read_bytes())
    with made.open("ab") as file:
        file.write(MARK + written)


def is_sealed(target: Path) -> bool:
    """Whether the digest behind a library fits its name and all of its bytes."""
    kept = target.read_bytes()
    library, found = kept[: -len(MARK) - 32], kept[-len(MARK) - 32 :]
    return found == MARK + digest(target, library)


def digest(target: Path, library: bytes) -> bytes:
    """The digest of a library that is called `target`."""
    return hashlib.sha256(target.name.encode() + b"\0" + library).digest()


def sweep(folder: Path) -> None:
    """Delete what killed processes left."""
    for path in folder.glob("tmp*"):
        with contextlib.suppress(OSError):
            if path.suffix in (".so", ".log") and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
