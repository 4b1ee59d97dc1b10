"""Folders from which code is loaded: nobody but their user, or root, may be able to change what lies in them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_private(folder: Path) -> None:
    """Make a folder in the cache folder that its user alone can enter, or check the one that is there and close it to others.

    Raises:
        PermissionError: the folder, or the one around it, belongs to another user or can be written by others: whoever put a file
            there would run code in this process.
        OSError: it cannot be made.
    """
    around = folder.parent
    if not around.exists():
        around.parent.mkdir(parents=True, exist_ok=True)
        around.mkdir(mode=0o700, exist_ok=True)
    # in a folder with the sticky bit, as /tmp, others can add files but cannot replace ours
    _check(around, sticky_allowed=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = _check(folder, sticky_allowed=False)
    if _ours(found) and stat.S_IMODE(found.st_mode) & 0o077:
        # made by hand, and so perhaps with folders inside that others can write; a read-only disk has no chmod, nor writers
        with contextlib.suppress(OSError):
            folder.chmod(0o700)


def check_file(path: Path) -> None:
    """Check a file of such a folder.

    Raises:
        PermissionError: it belongs to another user or can be written by others. OSError: it cannot be looked at.
    """
    _check(path, sticky_allowed=False)


def _check(path: Path, sticky_allowed: bool) -> os.stat_result:
    found = path.stat()
    if not hasattr(os, "geteuid"):  # Windows, where the user's own folder is private
        return found
    sticky = sticky_allowed and bool(found.st_mode & stat.S_ISVTX)
    if found.st_uid not in (os.geteuid(), 0) and not sticky:
        raise PermissionError(errno.EPERM, f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this process")
    if found.st_mode & _BY_OTHERS and not sticky:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(errno.EPERM, f"{path} can be written by other users (mode {mode:04o}); chmod go-w closes it")
    return found


def _ours(found: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and found.st_uid == os.geteuid()
