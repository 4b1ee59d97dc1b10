"""Calls of ever new shapes: memory and every cache stay as they are."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import saccade
from saccade import InvalidArgument
from saccade.engine import lengths
from saccade.launch import disabled
from saccade.launch.cache import LaunchCache
from tools.soak import leaks
from tools.soak.__main__ import app

CPU = torch.device("cpu")
# caches without a bound, and why they need none
FINITE = {
    "saccade.engine.tracing.load": "one for each backend",
    "saccade.exact.measured._lines": "no argument",
    "saccade.exact.varlen.by_torch._takes_grouped": "no argument",
    "saccade.exact.measured._nearest_architecture": "one for each architecture",
    "saccade.hardware.multiprocessors": "one for each device",
    "saccade.nvrtc.source._read_once": "the headers of the CUDA toolkit",
    "saccade.nvrtc.library.loaded": "the NVRTC libraries of the machine",
    "saccade.nvrtc.toolchain.find_all": "no argument",
    "saccade.nvrtc.toolchain._obstacles": "one for each architecture",
    "saccade.nvrtc.toolchain.toolkit_headers": "one for each CUDA version",
    "saccade.nvrtc.capture._driver": "no argument",
    "saccade.launch.cuda._names_of": "the names of tensors in our sources",
    "saccade.nvrtc.declared._declared": "one for each kernel in our sources",
    "saccade.nvrtc.declared._parameters": "one for each kernel in our sources and choice of its parameters",
    "saccade.nm_sparse.staged.launchers._source": "our sources",
    "saccade.exact.volta.launchers._source": "our sources",
    "saccade.exact.sdpa_mask._seen_and_hidden": "one for each dtype and device",
    "saccade.distributed.agreement._side_stream": "one for each device",
    "saccade.distributed.ring._mesh": "one for each process group",
    "saccade.integrations.pooled_layers.pooled_class": "one for each class of layers",
    "saccade.integrations.timm_layers._torch_with_ours": "no argument",
    "saccade.integrations.timm_layers.patched_class": "one for each class of layers",
    "saccade.integrations.refusal._source": "one for each class of models",
    "saccade.integrations.transformers.warn_weights": "no argument",
}


# bounds that a few thousand calls reach many times; a process of its own, without Triton's interpreter
SMALL = """
import functools, json, logging, torch
from tools.soak import leaks
from saccade.engine import dispatch, prepare
from saccade.launch.cache import LaunchCache
prepare._MAX_PREPARED, LaunchCache.limit = 32, 32
dispatch._warn_reference = functools.lru_cache(maxsize=32)(dispatch._warn_reference.__wrapped__)
logging.disable(logging.WARNING)
torch.set_num_threads(1)
watched = leaks.watch(2000, torch.device("cpu"))
print(json.dumps({"faults": watched.faults(), **vars(watched)}))
"""


def test_thousands_of_ever_new_shapes_hold_memory_flat():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.run([sys.executable, "-c", SMALL], env=environment, capture_output=True, check=True).stdout)
    assert found["faults"] == []
    largest = {name.removeprefix("saccade.engine."): max(seen) for name, seen in found["caches"].items()}
    assert 24 <= largest["prepare._PREPARED"] <= 32
    assert largest["dispatch._warn_reference"] == 32
    assert largest["lengths._CHECKED"] == 0  # each call's lengths are freed, and leave
    assert max(found["memory"]) > 2**26 or sys.platform != "linux"


def test_shapes_do_not_repeat():
    for shape_of, count in ((leaks._shape, 30_000), (leaks._shape_on_gpu, 30_000)):
        assert len({shape_of(n) for n in range(count)}) == count
    calls = list(itertools.islice(leaks.new_calls(CPU), 60))
    assert {call.func for call in calls} == set(leaks._CALLS)
    assert {call.args[1] for call in calls} == {True, False}


def test_a_cache_that_grows_is_found(monkeypatch):
    grows: dict[int, int] = {}
    monkeypatch.setattr(lengths, "_SOMETHING", grows, raising=False)
    counted = itertools.count()
    calls = iter(lambda: lambda: grows.update({next(counted): 0}), None)
    faults = leaks.watch(1000, CPU, calls).faults()
    assert len(faults) == 1
    assert faults[0].startswith("saccade.engine.lengths._SOMETHING grew from ")


def test_a_cache_with_a_limit_may_fill_up_slowly_but_not_beyond_it(monkeypatch):
    fills = LaunchCache()
    monkeypatch.setattr(lengths, "_SOMETHING", fills, raising=False)
    counted = itertools.count()
    calls = iter(lambda: lambda: fills.update({next(counted): 0}), None)
    assert leaks.watch(1000, CPU, calls).faults() == []
    assert leaks.limits()["saccade.engine.lengths._SOMETHING"] == LaunchCache.limit
    monkeypatch.setattr(LaunchCache, "limit", 500)
    (fault,) = leaks.watch(1000, CPU, calls).faults()
    assert fault.startswith("saccade.engine.lengths._SOMETHING holds 1990 entries")
    assert fault.endswith("its limit of 500 does not allow")


@pytest.mark.skipif(sys.platform != "linux", reason="the size of the process is read from /proc")
def test_memory_that_grows_is_found():
    """With memory that is mapped anew: in a process that ran before, the allocator has enough left to hide a few small pieces."""
    kept = []

    def grow():
        kept.append(mmap.mmap(-1, 2**17))
        kept[-1].write(b"x" * 2**17)

    faults = leaks.watch(640, CPU, iter(lambda: grow, None)).faults()
    assert len(faults) == 1
    assert faults[0].startswith("host memory grew from ")


@pytest.mark.parametrize("grown", [False, True])
def test_the_command(monkeypatch, grown):
    watched = leaks.Watched(
        [2**27, 2**27 + (2**25 if grown else 2**20)], [0, 0], {"a": [4000, 4096], "b": [40, 70 if grown else 40]}
    )
    monkeypatch.setattr(leaks, "watch", lambda count, device: watched)
    words = ["--leaks", "--count", "20000", "--device", "cpu"]
    faults = [
        "host memory grew from 128 to 160 MiB in the second half of the calls", "b grew from 40 to 70 entries in the second half of the calls",
    ]  # fmt: skip
    found = CliRunner().invoke(app, [*words, "--json"])
    answer = json.loads(found.stdout)
    assert (found.exit_code, answer["calls"], answer["faults"]) == (int(grown), 20_000, faults if grown else [])
    text = CliRunner().invoke(app, words)
    assert text.exit_code == int(grown)
    assert "20000 calls of ever new shapes: host memory 128 MiB in the first half" in text.stdout
    assert text.stdout.endswith("\n".join(faults) + "\n" if grown else "nothing grew\n")


def test_too_few_calls_would_find_caches_that_fill():
    with pytest.raises(InvalidArgument, match="count is 600; with --leaks it must be at least 20000, as caches fill up"):
        leaks.run(600, "cpu", False)


def test_every_cache_of_functions_is_bounded_or_finite():
    unbounded = set()
    root = Path(saccade.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in ("cli", "testing", "__main__", "__init__"):
            continue
        try:
            module = importlib.import_module(".".join(("saccade", *parts)).removesuffix(".__init__"))
        except ImportError:  # an integration whose package is not installed
            continue
        for name, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == module.__name__:
                if value.cache_parameters()["maxsize"] is None:
                    unbounded.add(f"{module.__name__}.{name}")
    assert unbounded <= set(FINITE), unbounded - set(FINITE)


def test_failures_of_ever_new_shapes_are_bounded(monkeypatch):
    monkeypatch.setattr(disabled, "_disabled", {})
    monkeypatch.setattr(disabled, "_warned", {"it fails"})
    for n in range(disabled._MOST + 10):
        disabled.disable(("short", n), "sdpa", RuntimeError("it fails"))
    assert len(disabled._disabled) == disabled._MOST
    assert disabled.failure_of(("short", 9)) is None
    assert disabled.failure_of(("short", disabled._MOST + 9)) is not None
