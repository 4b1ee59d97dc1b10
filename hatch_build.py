"""Puts the benchmark tables into the wheel, for `saccade bench`: without what was measured, and without what trains models."""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PATTERNS = ("*.py", "tables/*.py", "paper/*.csv")


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


def tables(folder: Path) -> list[Path]:
    """The files of the tables: in a checkout those that git knows, so that nobody's own experiments go into a wheel."""
    found = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    if not (folder.parent / ".git").exists():  # a source distribution
        return found
    known = _ls_files(folder)
    return found if known is None else [path for path in found if path.relative_to(folder).as_posix() in known]


def unknown(root: Path) -> list[str]:
    """Files under src that git does not know: nobody's own experiments go into a wheel."""
    return (_ls_files(root / "src", "--others", "--exclude-standard") if (root / ".git").exists() else None) or []


def _ls_files(folder: Path, *options: str) -> list[str] | None:
    """What `git ls-files` names in a folder; None, with a warning, if git does not say."""
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
