"""The namespace of our ops in torch: the name under which this package was imported, `saccade` for the installed one.

torch takes an op once a process. A copy that is loaded under a name of its own, as the kernels hub loads packages, so has ops of its
own beside those of the installed package.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = __name__.removesuffix(".engine.namespace").replace(".", "_")


def fragment() -> torch.library.Library:
    """A library of torch that defines and implements ops of ours; they live as long as it does."""
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def packet(name: str) -> Any:
    """A defined op of ours with its overloads, of which `.default` is the only one."""
    return getattr(getattr(torch.ops, NAMESPACE), name)
