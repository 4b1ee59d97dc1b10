"""What was worked out for a call, remembered. Knows nothing of attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

_ABSENT = object()


class LaunchCache(dict):
    """Launches by signature; emptied when it holds `limit`, which only a stream of ever new shapes reaches."""

    limit = 4096

    def remember(self, key: Hashable, value: Any) -> Any:
        """Store and return `value`."""
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is stored under `key`, None included; made and stored where there is nothing."""
        found = self.get(key, _ABSENT)
        return self.remember(key, make()) if found is _ABSENT else found
