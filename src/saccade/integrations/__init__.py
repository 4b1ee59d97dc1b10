"""Integrations of saccade into other libraries. Importing this package imports none of them and registers nothing."""

from saccade.integrations import doge, transformers

__all__ = ["doge", "transformers"]
