"""The entry of the command `saccade`, so that `--help` and shell completion answer in a fifth of a second.

It stands beside the package, because importing any module of `saccade` imports torch, which takes over a second. The file with the
commands is loaded by its path; each of them imports what it needs when it runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_PATIENT = ("demo", "verify")  # what they do is not timed against another library


def main() -> None:
    """Run the command line."""
    # Threads of torch that wait for each other spin by default. On two cores that others used, a part of the demo took 28 s, and 4 s without spinning.
    # The OpenMP runtime reads this when torch is loaded.
    if len(sys.argv) > 1 and sys.argv[1] in _PATIENT and not os.environ.get("OMP_WAIT_POLICY"):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    package = importlib.util.find_spec("saccade")  # of a package at the top this runs nothing
    if package is None or not package.submodule_search_locations:
        raise SystemExit("saccade: the package saccade is not installed for this Python")
    folder = Path(package.submodule_search_locations[0])
    place = folder / "cli" / "app.py"
    if not place.is_file():
        raise SystemExit(
            f"saccade: the package in {folder} is another project's, or is damaged: uninstall saccade and saccade-attention, then install "
            "saccade-attention again"
        )
    spec = importlib.util.spec_from_file_location("saccade_command.app", place)
    assert spec is not None, place
    assert spec.loader is not None, place
    commands = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = commands  # annotations of the commands are looked up there
    spec.loader.exec_module(commands)
    commands.main()
