"""`saccade cache`: shows or deletes all compiled code that saccade keeps on disk.

Nothing here, nor what it imports, may import torch: the command answers without it (see `app.without_torch`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from saccade.env import cache_folder
from saccade.errors import SaccadeError
from saccade.folders import make_private


class Kept(NamedTuple):
    """One kind of compiled code: a name and its plural, the folder, and the files that are ours."""

    name: str
    plural: str
    folder: Path
    files: list[Path]

    @property
    def bytes(self) -> int:
        """Their size, without those deleted since they were listed."""
        return sum([path.stat().st_size for path in self.files if path.exists()])

    def describe(self) -> str:
        """Number and size in words."""
        return f"{len(self.files)} {self.name if len(self.files) == 1 else self.plural}, {self.bytes / 2**20:.1f} MiB"


def contents() -> list[Kept]:
    """The kernels compiled from CUDA C++, and the libraries compiled from C++. Files are known by their names, so that nothing else is deleted,
    whatever the folder."""
    nvrtc, native = cache_folder() / "nvrtc", cache_folder() / "native"
    # 2 and 62 digits of a hash
    cubins = [path for path in nvrtc.glob("entries/??/*") if re.fullmatch(r"[0-9a-f]{64}", path.parent.name + path.name)]
    # saccade_<name>-<digest>.so, and what an interrupted compiler left
    ours = re.compile(r"saccade_\w+-[0-9a-f]{32}\.so|tmp[0-9a-f]{16}\.so")
    libraries = [path for path in native.glob("*.so") if ours.fullmatch(path.name)]
    return [
        Kept("kernel from CUDA C++", "kernels from CUDA C++", nvrtc, sorted(cubins)),
        Kept("library from C++", "libraries from C++", native, sorted(libraries)),
    ]


def run(clear: bool) -> str:
    """A line for each kind; `clear` deletes them."""
    return "\n".join(
        [f"{kept.folder}: {'deleted ' if clear else ''}{_cleared(kept) if clear else kept.describe()}" for kept in contents()]
    )


def _cleared(kept: Kept) -> str:
    said = kept.describe()
    try:
        if kept.folder.exists():
            make_private(kept.folder)
        for path in kept.files:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise SaccadeError(f"the cache {kept.folder} cannot be cleared: {error}") from None
    return said
