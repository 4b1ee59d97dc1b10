"""Warns if the other project called `saccade` on the package index, whose module has the same name, is installed too."""

from __future__ import annotations

import importlib.metadata
import warnings

_OURS = "saccade-attention"


def warn() -> None:
    """Warn if the other project's distribution is installed beside this module, which it shares a folder with."""
    try:
        other = importlib.metadata.distribution("saccade")
    except importlib.metadata.PackageNotFoundError:
        return
    # until 0.2.0 our own distribution had this name; its metadata links to our repository
    if _OURS not in (other.read_text("METADATA") or ""):
        warnings.warn(
            f"this module is saccade of {_OURS}, but the distribution 'saccade' {other.version} is installed too, another project's "
            f"whose module has the same name: uninstall both, then install {_OURS} again",
            stacklevel=3,
        )
