"""Remembers what was worked out for a call. Knows nothing of attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

_ABSENT = object()


class LaunchCache(dict):
    """Launches by signature. It is emptied at `limit` entries, which only an endless stream of new shapes reaches."""

    limit = 4096

    def remember(self, key: Hashable, value: Any) -> Any:
        """Store and return `value`."""
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value stored under `key`, which may be None; it is made and stored if there is none."""
        found = self.get(key, _ABSENT)
        return self.remember(key, make()) if found is _ABSENT else found
