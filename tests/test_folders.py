"""Folders from which code is loaded are closed to others, or not used."""

from __future__ import annotations

import os
import stat

import pytest

from saccade.folders import check_file, make_private

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no modes here")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_closed(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "saccade" / "nvrtc")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "saccade") == mode(tmp_path / "a" / "saccade" / "nvrtc") == 0o700


def test_what_others_can_read_is_closed(tmp_path):
    folder = tmp_path / "saccade" / "nvrtc"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    make_private(folder)
    assert mode(folder) == 0o700


@pytest.mark.parametrize("at", ["nvrtc", "around"])
@pytest.mark.parametrize("bits", [0o775, 0o757, 0o777])
def test_what_others_can_write_is_refused(tmp_path, at, bits):
    folder = tmp_path / "saccade" / "nvrtc"
    folder.mkdir(parents=True)
    changed = folder if at == "nvrtc" else folder.parent
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
    if owner == 0:  # the tests run as root, whose files everybody trusts: the folder goes to another user
        for path in (folder / "file", folder):
            os.chown(path, 12345, -1)
        owner = 12345
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {owner}, not to"):
        make_private(folder)
    with pytest.raises(PermissionError, match=f"file belongs to user {owner}, not to"):
        check_file(folder / "file")


def test_a_file_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o600)
    check_file(tmp_path / "file")
    (tmp_path / "file").chmod(0o620)
    with pytest.raises(PermissionError, match=r"\(mode 0620\)"):
        check_file(tmp_path / "file")
