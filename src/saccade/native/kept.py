"""Compiled libraries on disk: loaded only if they are undamaged, and kept only after they have been loaded."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from saccade.folders import make_private, opened, read_file
from saccade.native.sealed import is_sealed, seal

# left by a process that was killed while it wrote
_STALE_SECONDS = 3600

Library = TypeVar("Library")
Open = Callable[[str], Library]


def load(target: Path, open_it: Open[Library]) -> Library | None:
    """The library that is kept at `target`. None if there is none; one that is damaged, or that cannot be loaded, is deleted.

    Raises:
        OSError: the folder cannot be used (see `saccade.folders`).
    """
    with opened(target.parent) as folder:
        try:
            kept = read_file(folder, target.name, target)
        except FileNotFoundError:
            return None
        if is_sealed(target.name, kept):
            # a library whose digest matches may still come from a broken compiler, or need another C library
            with contextlib.suppress(OSError, ImportError):
                return open_it(_path(folder, target.parent, target.name))
        os.unlink(target.name, dir_fd=folder)
    return None


def keep(made: Path, target: Path, open_it: Open[Library]) -> Library:
    """Load a library that was compiled to `made`, from the folder of `target`, and keep it there.

    Raises:
        OSError, ImportError: it cannot be written there, or not loaded from there.
    """
    library = made.read_bytes()
    with opened(target.parent) as folder:
        _sweep(target.parent)
        # under another name first: other processes may write the same library, and none may load half of one
        name = f"tmp{secrets.token_hex(8)}.so"
        try:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            with open(handle, "wb") as file:
                file.write(library)
                file.flush()
                found = open_it(_path(folder, target.parent, name))
                file.write(seal(target.name, library))
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    return found


class Workplace:
    """A private folder to compile in: among temporary files, or in the cache folder if there is no place for those. It is deleted by the process
    that made it. Raises OSError if there is neither."""

    def __init__(self, cache: Path):
        try:
            self.path = _made_in(Path(tempfile.gettempdir()))
        except OSError:
            self.path = _made_in(cache)
        self.delete = weakref.finalize(self, _delete, self.path, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.delete()


def _made_in(folder: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix="tmpsaccade-", dir=folder))
    try:
        make_private(made)  # the folder for temporary files is not safe itself
    except OSError:
        made.rmdir()
        raise
    return made


def _delete(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a child of a fork comes here too
        shutil.rmtree(folder, ignore_errors=True)


def _path(folder: int, place: Path, name: str) -> str:
    """The path of a file by the descriptor of its folder, which leads to no other folder than the one that was checked."""
    by_descriptor = f"/proc/self/fd/{folder}"
    # the loader identifies a library by its path, and a file's descriptor number is reused later
    return f"{by_descriptor if os.path.isdir(by_descriptor) else place}/{name}"


def _sweep(folder: Path) -> None:
    """Delete what killed processes left."""
    for path in folder.glob("tmp*"):
        with contextlib.suppress(OSError):
            if path.suffix in (".so", ".log") and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
