"""Folders from which code is loaded are closed to others, or not used."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from saccade.folders import make_private, opened, read_file

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no modes here")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_closed(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "saccade" / "nvrtc")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "saccade") == mode(tmp_path / "a" / "saccade" / "nvrtc") == 0o700


def test_what_others_can_read_is_closed(tmp_path):
    folder = tmp_path / "saccade" / "nvrtc"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    make_private(folder)
    assert mode(folder) == 0o700


@pytest.mark.parametrize("at", ["nvrtc", "saccade", "above"])
@pytest.mark.parametrize("bits", [0o775, 0o757, 0o777])
def test_what_others_can_write_is_refused(tmp_path, at, bits):
    folder = tmp_path / "above" / "home" / "saccade" / "nvrtc"
    folder.mkdir(parents=True)
    changed = next(path for path in (folder, *folder.parents) if path.name == at)
    changed.chmod(bits)
    with pytest.raises(
        PermissionError, match=rf"{changed} can be written by other users \(mode 0{bits:o}\); chmod go-w closes it"
    ):
        make_private(folder)


def test_a_folder_like_tmp_may_lie_around_it(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    make_private(tmp_path / "tmp" / "nvrtc")
    assert mode(tmp_path / "tmp" / "nvrtc") == 0o700
    (tmp_path / "tmp" / "nvrtc").chmod(0o1777)
    with pytest.raises(PermissionError, match="can be written by other users"):
        make_private(tmp_path / "tmp" / "nvrtc")


def test_what_belongs_to_another_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "saccade" / "nvrtc"
    make_private(folder)
    (folder / "file").write_text("")
    owner = folder.stat().st_uid
    with opened(folder) as here:
        if owner == 0:  # the tests run as root, whose files everybody trusts: the folder goes to another user
            for path in (folder / "file", folder):
                os.chown(path, 12345, -1)
            owner = 12345
        else:
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(PermissionError, match=f"file belongs to user {owner}, not to"):
            read_file(here, "file", folder / "file")
    with pytest.raises(PermissionError, match=f"belongs to user {owner}, not to"):
        make_private(folder)


def test_a_file_that_others_can_write_or_that_is_no_file_is_refused(tmp_path):
    folder = tmp_path / "nvrtc"
    make_private(folder)
    (folder / "file").write_text("x")
    (folder / "file").chmod(0o600)
    (folder / "link").symlink_to(folder / "file")
    (folder / "folder").mkdir(mode=0o700)
    os.mkfifo(folder / "pipe", 0o600)
    with opened(folder) as here:
        assert read_file(here, "file", folder / "file") == b"x"
        (folder / "file").chmod(0o620)
        with pytest.raises(PermissionError, match=r"\(mode 0620\)"):
            read_file(here, "file", folder / "file")
        for name in ("folder", "pipe"):
            with pytest.raises(OSError, match=r"is no plain file|Is a directory"):
                read_file(here, name, folder / name)
        with pytest.raises(OSError, match="symbolic links"):
            read_file(here, "link", folder / "link")


def test_a_link_is_followed_on_the_way_alone(tmp_path):
    """A user may keep the cache on another disk; the folder itself is ours."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to("disk/../disk")
    make_private(tmp_path / "cache" / "saccade" / "nvrtc")
    assert mode(tmp_path / "disk" / "saccade" / "nvrtc") == 0o700
    (tmp_path / "disk" / "precious").mkdir(mode=0o755)
    (tmp_path / "disk" / "saccade" / "native").symlink_to(tmp_path / "disk" / "precious")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        make_private(tmp_path / "disk" / "saccade" / "native")
    assert mode(tmp_path / "disk" / "precious") == 0o755
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="more than 40 links"):
        make_private(tmp_path / "round" / "saccade" / "nvrtc")


def test_no_descriptor_is_left_open(tmp_path):
    def count():
        return len(os.listdir("/proc/self/fd"))

    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed").chmod(0o777)
    make_private(tmp_path / "saccade" / "nvrtc")
    before = count()
    make_private(tmp_path / "saccade" / "nvrtc")
    for refused in (tmp_path / "closed" / "a" / "b", tmp_path / "closed"):
        with pytest.raises(PermissionError):
            make_private(refused)
    assert count() == before


# --- two users, of whom the tests can only be both as root

VICTIM, ATTACKER = 20001, 20002


def in_child(user, work):
    """Run `work` as another user, in a child; the error that it ended with, or nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it failed"
        try:
            os.close(read)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            work()
            said = ""
        except OSError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with open(read) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def shared():
    """A folder like /tmp, to which every user comes."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = Path(folder)
        place.chmod(0o1777)
        assert in_child(VICTIM, lambda: make_private(place / "own" / "nvrtc")) == ""
        yield place


def owned_by(user, path, bits=0o700):
    path.mkdir(parents=True)
    path.chmod(bits)
    os.chown(path, user, user)
    return path


@pytest.mark.parametrize("bits", [0o1777, 0o777, 0o755])
def test_a_folder_of_another_user_is_never_used_with_the_sticky_bit_neither(shared, bits):
    cache = owned_by(ATTACKER, shared / "cache", bits)
    owned_by(VICTIM, cache / "native")
    said = in_child(VICTIM, lambda: make_private(cache / "native"))
    assert said == f"PermissionError: [Errno 1] {cache} belongs to user {ATTACKER}, not to {VICTIM}, who runs this process"
    deep = owned_by(VICTIM, cache / "a" / "b" / "native")
    for path in (deep.parent, deep.parent.parent):
        os.chown(path, VICTIM, VICTIM)
    assert f"{cache} belongs to user {ATTACKER}" in in_child(VICTIM, lambda: make_private(deep))


def test_a_link_of_another_user_is_not_followed(shared):
    precious = owned_by(VICTIM, shared / "precious", 0o755)
    owned_by(VICTIM, precious / "native", 0o755)
    cache = shared / "cache"
    cache.symlink_to(precious)
    os.chown(cache, ATTACKER, ATTACKER, follow_symlinks=False)
    for user in (VICTIM, 0):
        said = in_child(user, lambda: make_private(cache / "native"))
        assert f"{cache} belongs to user {ATTACKER}, not to {user}" in said
    # as root meets it: the link has the name of the folder itself, and would be closed to everybody
    (shared / "native").symlink_to(precious)
    os.chown(shared / "native", ATTACKER, ATTACKER, follow_symlinks=False)
    assert in_child(0, lambda: make_private(shared / "native")) != ""
    assert mode(precious) == mode(precious / "native") == 0o755


def test_root_s_folders_serve_everybody(shared):
    folder = shared / "root" / "native"
    folder.mkdir(parents=True)
    assert in_child(VICTIM, lambda: make_private(folder)) == ""
    assert mode(folder) == 0o755
