"""The digest appended to a compiled library: a truncated, damaged or renamed library is not loaded."""

from __future__ import annotations

import hashlib

# appended to the library, where the loader does not look: this, and the digest of its name and contents
MARK = b"\nsaccade library 1\n"


def seal(name: str, library: bytes) -> bytes:
    """The seal that follows a library of this name."""
    return MARK + hashlib.sha256(name.encode() + b"\0" + library).digest()


def is_sealed(name: str, kept: bytes) -> bool:
    """Whether the digest behind a library fits its name and all of its bytes."""
    end = len(kept) - len(MARK) - 32
    return end >= 0 and kept[end:] == seal(name, kept[:end])
