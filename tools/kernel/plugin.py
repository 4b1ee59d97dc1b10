"""A plugin of pytest for one kernel: tests in one dtype, in an order that is a fair sample from its first test on, until the time is over.

It also writes down each CUDA source that a test compiles.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

DTYPE = re.compile(r"bfloat16|float16|float32|float64")
# tests that compile a kernel for its targets
BINARIES = re.compile(r"binar")
_WORDS = {"forward": "fwd", "backward": "bwd", "pooling": "pool", "write": "one_pass"}


def pytest_addoption(parser: Any) -> None:
    """The options that `tools.kernel` gives."""
    parser.addoption("--kernel", type=Path, default=None, help="the file of the kernel")
    parser.addoption("--kernel-dtype", default="float32", help="tests that name a dtype run in this one alone")
    parser.addoption("--kernel-part", default="contract", choices=["contract", "binaries"])
    parser.addoption("--kernel-together", action="store_true", help="a test may compile several sources")
    parser.addoption("--kernel-seconds", type=float, default=25.0, help="no test begins later")
    parser.addoption("--kernel-log", type=Path, default=None, help="a JSON line for each compiled source is added here")


@pytest.hookimpl(trylast=True)  # after those that leave tests out
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests of this part and dtype, the most fitting ones first."""
    kernel = config.getoption("--kernel")
    if kernel is None:
        return
    binaries, dtype = config.getoption("--kernel-part") == "binaries", config.getoption("--kernel-dtype")
    kept = [item for item in items if bool(BINARIES.search(item.name)) == binaries and (binaries or in_dtype(item.name, dtype))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: (-fit(item.nodeid, kernel.stem), zlib.crc32(item.nodeid.encode())))


def in_dtype(name: str, dtype: str) -> bool:
    """Whether a test runs for this dtype: it names it, or none."""
    named = set(DTYPE.findall(name))
    return not named or dtype in named


def fit(test: str, stem: str) -> int:
    """How many words of a kernel's name a test has in its own."""
    parts = [part for part in stem.split("_") if not part.startswith("sm")]
    return sum(part in test or _WORDS.get(part, part) in test for part in parts)


def pytest_configure(config: Any) -> None:
    """Begin to write down what is compiled."""
    log = config.getoption("--kernel-log")
    config.stash[_BEGAN] = time.monotonic()
    if log is not None and config.getoption("--kernel-part") == "binaries":
        _record(log, config.getoption("--kernel"), config.getoption("--kernel-together"))


_BEGAN = pytest.StashKey[float]()


def pytest_runtest_setup(item: Any) -> None:
    """Skip what would begin too late."""
    config = item.config
    if config.getoption("--kernel") and time.monotonic() - config.stash[_BEGAN] > config.getoption("--kernel-seconds"):
        pytest.skip("out of time")


def _record(log: Path, kernel: Path, together: bool) -> None:
    """Add a line to `log` for each source that NVRTC compiles; unless `together`, a test ends where it compiles another one."""
    from saccade.nvrtc import compiler
    from tools.cubin import resource_usage

    class Recorded(compiler.Program):
        def __init__(self, library: Any, text: str, name: str) -> None:
            if not together and Path(name) != kernel:
                pytest.skip(f"compiles {Path(name).name}")
            super().__init__(library, text, name)
            self._source = name

        def compile(self, flags: Sequence[str]) -> bool:
            done = super().compile(flags)
            usage = resource_usage(self.cubin()) if done else {}
            row = {"source": self._source, "arch": _architecture(flags), "usage": usage, "flags": list(flags)}
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            return done

    compiler.Program = Recorded  # type: ignore[misc]


def _architecture(flags: Sequence[str]) -> str:
    return next(flag.partition("=")[2] for flag in flags if flag.startswith("--gpu-architecture="))
