"""Integrations of saccade into other libraries. Importing this package imports none of them and registers nothing."""

from types import ModuleType

from saccade.integrations import doge, pooled, tabpfn, timm, transformers, triangle

__all__ = ["doge", "pooled", "tabpfn", "timm", "transformers", "triangle"]


def __getattr__(name: str) -> ModuleType:
    # its class has a base of transformers, which is imported only on request
    if name == "doge_cache":
        from saccade.integrations.doge_cache import DogeCache  # noqa: F401  which puts its module here

        found: ModuleType = globals()[name]
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
