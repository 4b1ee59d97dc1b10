"""Integrations of saccade into other libraries. Importing this package imports none of them and registers nothing."""

from saccade.integrations import doge, pooled, timm, transformers, triangle

__all__ = ["doge", "pooled", "timm", "transformers", "triangle"]
