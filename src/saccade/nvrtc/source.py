"""A CUDA C++ file and the headers that it includes, which are read for hashing."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
        """The text of the file."""
        return self.path.read_text(encoding="utf-8")


def digest_of(source: Source, toolkit: Sequence[Path] = ()) -> str:
    """Hash of the text of a source and of every header that it can reach in `source.headers` or in the folders `toolkit`.

    This may read more than the compiler does, since includes disabled by a condition count too. A header that is not found is
    left to the compiler. An include named by a macro is refused, because it would be missed.
    """
    digest = hashlib.sha256()
    for path, file in reached(source, toolkit):
        digest.update(f"{path.name} {file.digest}\n".encode())
        if file.macros and not _is_in(path, toolkit):
            raise InvalidArgument(
                f"{path} includes {file.macros[0]}, a macro: name the header itself, so that its changes are seen"
            )
    return digest.hexdigest()


def reached(source: Source, toolkit: Sequence[Path] = ()) -> Iterator[tuple[Path, _File]]:
    """A source and every header that it can reach, with what each includes."""
    pending, seen = [source.path], {source.path}
    while pending:
        path = pending.pop()
        file = _read_once(path) if _is_in(path, toolkit) else _read(path)
        yield path, file
        for name in file.includes:
            found = _find(name, (path.parent, *source.headers, *toolkit))
            if found is not None and found not in seen:
                seen.add(found)
                pending.append(found)


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


class _File(NamedTuple):
    digest: str
    includes: tuple[str, ...]
    macros: tuple[str, ...]


def _read(path: Path) -> _File:
    content = path.read_bytes()
    found = _INCLUDE.findall(content.decode("utf-8", errors="replace"))
    names = tuple(quoted or angled for quoted, angled, _ in found if quoted or angled)
    return _File(hashlib.sha256(content).hexdigest(), names, tuple(macro for *_, macro in found if macro))


# a megabyte of CUDA headers, which do not change while the process runs
_read_once = functools.cache(_read)


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    return next((path.resolve() for folder in folders if (path := folder / name).is_file()), None)
