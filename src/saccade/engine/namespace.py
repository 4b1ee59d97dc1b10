"""The namespace of our ops in torch: the name under which this package was imported, `saccade` for the installed one.

A process can register an op in torch only once. The kernels hub loads packages under names of their own. So a copy loaded by it has its own
ops, beside those of the installed package.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = __name__.removesuffix(".engine.namespace").replace(".", "_")


def fragment() -> torch.library.Library:
    """A library of torch that defines and implements ops of ours; they live as long as it does."""
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def packet(name: str) -> Any:
    """A defined op of ours with its overloads; `.default` is the only one."""
    return getattr(getattr(torch.ops, NAMESPACE), name)
