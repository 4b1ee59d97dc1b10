"""The command line of the programs here that draw a CSV."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def plot_command(draw: Callable[[Path], list[Path]], program: str, description: str | None) -> int:
    """Parse the command line, `PROGRAM CSV`, and draw; an exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    path = parser.parse_args().csv
    try:
        print(*draw(path), sep="\n")
    except (OSError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0
