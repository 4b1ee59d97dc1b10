"""Parameter lists of kernels that tests make up."""

from __future__ import annotations

from saccade.nvrtc import Parameters


def listed(text: str) -> Parameters:
    """The list as its `repr` writes it: "pointer x, int32 n"."""
    return Parameters([(name, kind) for kind, name in map(str.split, filter(None, text.split(", ")))])
