"""The table: each operation and the backends that compute it, most specific first, the reference last."""

from __future__ import annotations

from saccade.kernels.contract import Backend
from saccade.kernels.sdpa.backend import BACKEND as SDPA
from saccade.kernels.short.backend import BACKEND as SHORT
from saccade.reference.backend import ATTENTION as REFERENCE

ATTENTION: tuple[Backend, ...] = (SHORT, SDPA, REFERENCE)

OPERATIONS: dict[str, tuple[Backend, ...]] = {"attention": ATTENTION}


def find(operation: str, name: str) -> Backend:
    """The backend of that name; names reach here only after dispatch has checked them."""
    return next(b for b in OPERATIONS[operation] if b.name == name)
