"""The compiled code that saccade keeps on disk: kernels from CUDA C++ and libraries from C++.

Nothing here, nor what it imports, may import torch: `saccade cache` answers without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from saccade.env import cache_folder
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

    def delete(self) -> None:
        """Delete the files. Raises OSError if one cannot be deleted, or if others can write into the folder."""
        if self.folder.exists():
            make_private(self.folder)
        for path in self.files:
            path.unlink(missing_ok=True)


def kernels() -> Kept:
    """Cubins, `nvrtc` in the cache folder. Files are known by their names, so that nothing else is deleted, whatever the folder."""
    folder = cache_folder() / "nvrtc"
    # 2 and 62 digits of a hash
    found = [path for path in folder.glob("entries/??/*") if re.fullmatch(r"[0-9a-f]{64}", path.parent.name + path.name)]
    return Kept("kernel from CUDA C++", "kernels from CUDA C++", folder, found)


def libraries() -> Kept:
    """Libraries, `native` in the cache folder, and what an interrupted compiler left of them."""
    folder = cache_folder() / "native"
    ours = re.compile(r"saccade_\w+-[0-9a-f]{32}\.so|tmp[0-9a-f]{16}\.so")
    return Kept(
        "library from C++", "libraries from C++", folder, [path for path in folder.glob("*.so") if ours.fullmatch(path.name)]
    )
