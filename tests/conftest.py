"""The setup of every test: kernels that run here, poisoned memory, a seed."""

from __future__ import annotations

import importlib.util
import os
import sys
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

# the contracts are a package of this folder, imported by name and with readable assertions
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("contracts.exact", "contracts.dynamic_mask", "contracts.nm_sparse")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import interpreter

    interpreter.speed_up()

hypothesis.settings.register_profile("saccade", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=25)
hypothesis.settings.load_profile("saccade")
torch.set_num_threads(1)  # tiny tensors; workers share the cores


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "sm90: needs an sm_90 device; is marked gpu too")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "unpoisoned: torch.empty stays as it is")
    # under the interpreter numpy warns of operations that kernels make on purpose: log2(0) and 1/0 in rows without a visible key
    config.addinivalue_line("filterwarnings", "ignore:.*encountered in:RuntimeWarning:triton.*")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning:triton.*")


@pytest.hookimpl(tryfirst=True)  # before -m gpu chooses
def pytest_collection_modifyitems(items):
    on_sm90 = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if "sm90" in item.keywords:
            item.add_marker(pytest.mark.gpu)
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif "sm90" in item.keywords and not on_sm90:
            item.add_marker(pytest.mark.skip(reason="needs an sm_90 device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


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
