"""The recorder of this thread's launches, for calls that C++ is to replay (`saccade.native.recording`)."""

from __future__ import annotations

import threading
from typing import Any


class _Active(threading.local):
    recorder: Any = None


# read at every launch, hence one attribute
ACTIVE = _Active()
