"""saccade inside other libraries. Importing this imports none of them, and registers nothing."""

from saccade.integrations import doge, transformers

__all__ = ["doge", "transformers"]
