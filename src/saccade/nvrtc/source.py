"""A CUDA C++ file with the headers it includes, read to be hashed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import InvalidArgument

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|([A-Za-z_]\w*))', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A CUDA C++ file. `headers`: folders in which `#include "name"` looks, after the folder of the file that includes."""

    path: Path
    headers: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).resolve())
        object.__setattr__(self, "headers", tuple(Path(folder).resolve() for folder in self.headers))
        if not self.path.is_file():
            raise InvalidArgument(f"there is no source {self.path}")
        for folder in self.headers:
            if not folder.is_dir():
                raise InvalidArgument(f"there is no folder {folder} for the headers of {self.path.name}")

    def text(self) -> str:
        """What the file holds."""
        return self.path.read_text(encoding="utf-8")


def digest_of(source: Source, toolkit: Sequence[Path] = ()) -> str:
    """Hash of the texts of a source and of every header that it can reach, in `source.headers` or in the folders `toolkit`.

    Reads more than the compiler might: an include that a condition switches off counts too. A header that is not found is left to
    the compiler. An include named by a macro would be missed, so it is refused.
    """
    digest = hashlib.sha256()
    pending, seen = [source.path], {source.path}
    while pending:
        path = pending.pop()
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
        for quoted, angled, macro in _INCLUDE.findall(content.decode("utf-8", errors="replace")):
            found = _find(quoted or angled, (path.parent, *source.headers, *toolkit))
            if macro and not any(path.is_relative_to(folder) for folder in toolkit):
                raise InvalidArgument(f"{path} includes {macro}, a macro: headers are named in quotes, so that changes are seen")
            if found is not None and found not in seen:
                seen.add(found)
                pending.append(found)
    return digest.hexdigest()


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    if not name:
        return None
    return next((path.resolve() for folder in folders if (path := folder / name).is_file()), None)
