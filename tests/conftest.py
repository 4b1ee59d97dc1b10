"""The setup of every test: kernels that run here, poisoned memory, a seed."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import tempfile
import zlib
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
# calls are made from Python, whatever ran before; tests/native tests those made from C++
os.environ.setdefault("SACCADE_NATIVE", "0")
if not HAS_GPU:
    # Triton reads it at import, so it is set before any test module is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# Triton decides at decoration whether a kernel is interpreted, so they are imported here and not inside a test that changes the
# environment
import saccade.dynamic_mask.decode.launcher  # noqa: E402
import saccade.dynamic_mask.gather.launchers  # noqa: E402
import saccade.exact.short.launchers  # noqa: E402
import saccade.nm_sparse.masked.launchers  # noqa: E402, F401

# the contracts are a package of this folder, imported by name and with readable assertions; `tools` lies beside it
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
pytest.register_assert_rewrite("contracts.exact", "contracts.dynamic_mask", "contracts.nm_sparse")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import interpreter

    interpreter.speed_up()

hypothesis.settings.register_profile("saccade", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=25)
hypothesis.settings.load_profile("saccade")
torch.set_num_threads(1)  # tiny tensors; workers share the cores


def pytest_addoption(parser):
    said = "run every case of the tests marked `sampled`, which takes twice as long without a GPU"
    parser.addoption("--every-case", action="store_true", default=bool(os.environ.get("EVERY_CASE")), help=said)


def pytest_configure(config):
    if config.getoption("--every-case"):
        os.environ["EVERY_CASE"] = "1"  # for tests that choose within one case, and for processes that they start
    if "EMULATED_KERNELS" not in os.environ:  # workers, and processes that tests start, share what the first of them compiles
        folder = tempfile.TemporaryDirectory(prefix="saccade-emulator-")
        os.environ["EMULATED_KERNELS"] = folder.name
        config.add_cleanup(lambda: (os.environ.pop("EMULATED_KERNELS"), folder.cleanup()))
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "sm90: needs an sm_90 device; is marked gpu too")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "sampled(n): one case in n runs without a GPU, unless --every-case is given")
    config.addinivalue_line("markers", "unpoisoned: torch.empty stays as it is")
    # under the interpreter numpy warns of operations that kernels make on purpose: log2(0) and 1/0 in rows without a visible key
    config.addinivalue_line("filterwarnings", "ignore:.*encountered in:RuntimeWarning:triton.*")
    config.addinivalue_line("filterwarnings", "ignore:.*encountered in:RuntimeWarning:interpreter")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning:triton.*")


@pytest.hookimpl(tryfirst=True)  # before -m gpu chooses
def pytest_collection_modifyitems(config, items):
    if not HAS_GPU and not config.getoption("--every-case"):
        left_out = _beyond_samples(items)
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    on_sm90 = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if "sm90" in item.keywords:
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif "sm90" in item.keywords and not on_sm90:
            item.add_marker(pytest.mark.skip(reason="needs an sm_90 device"))


def _beyond_samples(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of sampled tests that do not run.

    Cases are taken in the order of the checksums of their names, which mixes all parameters and stays when cases are added: one in n, and beyond
    them those that have a value which no case before had, of a parameter with at most six values beside other parameters.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for found in cases.values():
        found.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        count = -(-len(found) // found[0].get_closest_marker("sampled").args[0])
        params = [{name: repr(value) for name, value in item.callspec.params.items()} for item in found]
        values = {name: {of[name] for of in params} for name in params[0]}
        covered = {name for name, known in values.items() if len(known) <= 6} if len(values) > 1 else set()
        seen: set[tuple[str, str]] = set()
        for place, (item, of) in enumerate(zip(found, params, strict=True)):
            has = {(name, of[name]) for name in covered}
            if place >= count and has <= seen:
                left_out.append(item)
            else:
                seen |= has
    return left_out


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_frozen():
    """Millions of objects that were imported and collected stay, so neither Python's garbage collector goes through them again nor tests that ask it
    for all objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1234)


def pytest_runtest_setup(item):
    """Free cached memory, because several workers share one GPU and what one worker's allocator keeps is missing for the
    others."""
    # before a test and not after it, when parts of torch.cuda may still be patched
    if HAS_GPU and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


def _poisoned(allocate):
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(request, monkeypatch):
    """Memory that is never written shows as NaN. A test of the compiler, which traces allocations, opts out with `unpoisoned`."""
    if request.node.get_closest_marker("unpoisoned"):
        return
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
