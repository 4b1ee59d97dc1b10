"""saccade inside other libraries. Importing this imports none of them, and registers nothing."""

from saccade.integrations import transformers

__all__ = ["transformers"]
