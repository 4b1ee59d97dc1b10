"""Integrations of saccade into other libraries. Importing this package imports none of them and registers nothing."""

import importlib
from types import ModuleType

from saccade.integrations import doge, pooled, tabpfn, timm, transformers, triangle

__all__ = ["doge", "pooled", "tabpfn", "timm", "transformers", "triangle"]


def __getattr__(name: str) -> ModuleType:
    # its class has a base of transformers, which is imported for those who ask alone
    if name == "doge_cache":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
