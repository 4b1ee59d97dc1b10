"""Cubins on disk: written atomically, checked when read, bounded in total size. If the disk fails, a compilation is lost but no
call fails."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from saccade.compiled import kernels
from saccade.env import cache_folder
from saccade.folders import make_private

LIMIT_BYTES = 512 * 2**20
_MARK = b"saccade cubin 1\n"


class Contents(NamedTuple):
    """The contents of the cache folder."""

    folder: Path
    entries: int
    bytes: int


def folder() -> Path:
    """The folder of the cubins: `nvrtc` in `SACCADE_CACHE_DIR`, or in saccade's part of the user's cache folder."""
    return cache_folder() / "nvrtc"


def read(key: str) -> bytes | None:
    """The cubin stored under `key`; None if there is none, or if it is damaged."""
    files = _open()
    if files is None:
        return None
    try:
        kept = files.get(key)
    except OSError as error:
        _warn("read", error)
        return None
    return None if kept is None else unpack(key, kept)


def write(key: str, cubin: bytes) -> None:
    """Store a cubin; if that fails, warn once and continue without it."""
    files = _open()
    if files is None:
        return
    try:
        files[key] = pack(key, cubin)
    except OSError as error:
        _warn("write", error)


def pack(key: str, cubin: bytes) -> bytes:
    """A cubin with a header that identifies it and reveals damage."""
    return _MARK + _checksum(key, cubin) + cubin


def unpack(key: str, kept: bytes) -> bytes | None:
    """The cubin in `kept`; None if `kept` is not the result of `pack(key, ...)`."""
    start = len(_MARK) + 32
    cubin = kept[start:]
    return cubin if kept[:start] == _MARK + _checksum(key, cubin) else None


def contents() -> Contents:
    """The folder of the cubins, their number and their size, without opening any."""
    kept = kernels()
    return Contents(kept.folder, len(kept.files), kept.bytes)


def clear() -> Contents:
    """Delete every cubin and return what was there. Raises OSError if one cannot be deleted, or if others can write into the folder."""
    before = contents()
    kernels().delete()
    forget()
    return before


def forget() -> None:
    """Forget the cache folder, so that it is looked up again at the next use and warnings are repeated."""
    global _opened, _lock
    _opened, _lock = {}, threading.Lock()
    _warned.clear()


_opened: dict[Path, Any] = {}
_lock = threading.Lock()
_warned: set[str] = set()
if hasattr(os, "register_at_fork"):
    # a lock that another thread holds at a fork would stay held in the child
    os.register_at_fork(after_in_child=forget)


def _open() -> Any | None:
    """cuda-core's file cache (atomic writes, least recently used files are deleted first); None if the folder cannot be
    created, or if others can write into it: a cubin with the right checksum can be made by anybody who knows its key."""
    from cuda.core.utils import FileStreamProgramCache

    place = folder()
    with _lock:
        if place not in _opened:
            try:
                make_private(place)
                _opened[place] = FileStreamProgramCache(place, max_size_bytes=LIMIT_BYTES)
            except OSError as error:
                _warn("use", error)
                _opened[place] = None
        return _opened[place]


def _checksum(key: str, cubin: bytes) -> bytes:
    return hashlib.sha256(key.encode() + cubin).digest()


def _warn(action: str, error: OSError) -> None:
    if not _warned:
        _warned.add(action)
        warnings.warn(
            f"saccade cannot {action} its cache of compiled kernels in {folder()} ({error.strerror or error}); each process compiles "
            "them again (SACCADE_CACHE_DIR names another folder)",
            RuntimeWarning,
            stacklevel=2,
        )
