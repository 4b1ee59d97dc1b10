"""Folders from which code is loaded. Only their user, or root, may be able to change their contents, or to put other folders in their place."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # Linux's limit
# passing through a folder needs no permission to read it
_PASS = getattr(os, "O_PATH", os.O_RDONLY)


def make_private(folder: Path) -> None:
    """Make a folder that only its user can enter, or check an existing one and close it to others.

    Raises:
        PermissionError: the folder, one above it or a link on the way belongs to another user, or can be written by others: whoever put a file
            there would run code in this process.
        OSError: it cannot be made.
    """
    if not hasattr(os, "geteuid"):  # Windows, where the user's own folder is private
        folder.mkdir(parents=True, exist_ok=True)
        return
    with opened(folder):
        pass


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of such a folder: files opened through it lie in the checked folder, even if its path has been replaced."""
    folder = folder.absolute()
    above = _descend(folder.parent)
    try:
        _enter(above, folder.name, folder)
        here = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)
    try:
        found = os.fstat(here)
        _check(found, folder, sticky_allowed=False)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
            # made by hand, so others may be able to write folders inside; a read-only disk allows neither chmod nor writers
            with contextlib.suppress(OSError):
                os.fchmod(here, 0o700)
        yield here
    finally:
        os.close(here)


def read_file(folder: int, name: str, place: Path) -> bytes:
    """The contents of a file of such a folder. place: what errors call it.

    Raises:
        PermissionError: it belongs to another user, can be written by others, or is no plain file. OSError: it cannot be read.
    """
    # opening a pipe would wait
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        _check(found, place, sticky_allowed=False)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, f"{place} is no plain file")
        return file.read()


def _descend(folder: Path) -> int:
    """A descriptor of a folder, all steps to which were checked, links too; steps that are missing are made, for this user alone."""
    steps, links, here, place = [*reversed(folder.parts)], 0, -1, Path()
    try:
        while steps:
            step = steps.pop()
            place = place / step
            if not os.path.isabs(step) and _enter(here, step, place):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, f"{folder} has more than {_MOST_LINKS} links on its way")
                steps += reversed(Path(os.readlink(step, dir_fd=here)).parts)
                place = place.parent
                continue
            deeper = os.open(step, _PASS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=None if here < 0 else here)
            if here >= 0:
                os.close(here)
            here = deeper
            # in a folder with the sticky bit, as /tmp, others can add files but cannot replace ours
            _check(os.fstat(here), place, sticky_allowed=True)
    except OSError:
        if here >= 0:
            os.close(here)
        raise
    return here


def _enter(folder: int, name: str, place: Path) -> bool:
    """Make a folder in another one if there is none; whether a link that may be followed has its name."""
    # 0700 whatever the umask; one that another process makes at the same moment is as good
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        return False
    _check_owner(found, place)
    return True


def _check(found: os.stat_result, place: Path, sticky_allowed: bool) -> None:
    _check_owner(found, place)
    sticky = sticky_allowed and bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & _BY_OTHERS and not sticky:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(errno.EPERM, f"{place} can be written by other users (mode {mode:04o}); chmod go-w closes it")


def _check_owner(found: os.stat_result, place: Path) -> None:
    # the owner of a folder may rename its contents even with the sticky bit
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(
            errno.EPERM, f"{place} belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this process"
        )
