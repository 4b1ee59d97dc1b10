"""Puts the benchmark tables into the wheel, for `saccade bench`: the runner, the tables and what they import. Makes the README's links absolute for an
index, which shows it without the repository around it."""

from __future__ import annotations

import ast
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Tables(BuildHookInterface):
    """In an editable installation the tables are found in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to what is built. version: "standard" or "editable"."""
        folder = Path(self.root) / "benchmarks"
        if version == "standard":
            build_data["force_include"] |= {
                str(p): f"saccade/benchmarks/{p.relative_to(folder).as_posix()}" for p in tables(folder)
            }
            # read when files are collected, which is after the hooks
            self.build_config.target_config["exclude"] = [
                *self.build_config.target_config.get("exclude", []),
                *(f"/src/{name}" for name in unknown(Path(self.root))),
            ]


class Readme(MetadataHookInterface):
    """config: `pages` and `files`, the addresses of pages and of raw files."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme of an index."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        absolute = with_addresses(text, self.config["pages"], self.config["files"])
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute}


def with_addresses(text: str, pages: str, files: str) -> str:
    """A page whose relative links and pictures are absolute."""
    text = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{pages}", text)
    return re.sub(r'((?:src|srcset)=")(?!https?:)', rf"\g<1>{files}", text)


def tables(folder: Path) -> list[Path]:
    """The runner, the tables and what they import: in a checkout those that git knows, so that nobody's own experiments go into a wheel."""
    found, pending = set(), [folder / "run.py", *folder.glob("tables/*.py")]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += [named for name in imported(path) if (named := folder / f"{name}.py").is_file()]
    return _known_to_git(folder, sorted(found))


def imported(path: Path) -> set[str]:
    """The first part of each module name that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _known_to_git(folder: Path, found: list[Path]) -> list[Path]:
    if not (folder.parent / ".git").exists():  # a source distribution
        return found
    known = _ls_files(folder)
    return found if known is None else [path for path in found if path.relative_to(folder).as_posix() in known]


def unknown(root: Path) -> list[str]:
    """Files under src that git does not know: nobody's own experiments go into a wheel."""
    return (_ls_files(root / "src", "--others", "--exclude-standard") if (root / ".git").exists() else None) or []


def _ls_files(folder: Path, *options: str) -> list[str] | None:
    """The files that `git ls-files` names in a folder; None, with a warning, if git does not say."""
    command = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        # as in a container without git, where a checkout is installed all the same
        warnings.warn(
            f"git does not say which files of {folder} belong to the checkout, so all go into the wheel: {said}", stacklevel=3
        )
        return None
    return [name for name in listed.split("\0") if name]
