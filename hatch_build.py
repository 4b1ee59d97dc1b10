"""Puts the benchmark tables into the wheel, for `saccade bench`: without what was measured, and without what trains models."""

from __future__ import annotations

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
            found = (path for pattern in PATTERNS for path in folder.glob(pattern))
            build_data["force_include"] |= {str(p): f"saccade/benchmarks/{p.relative_to(folder).as_posix()}" for p in found}
