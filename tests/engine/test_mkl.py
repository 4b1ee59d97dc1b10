"""The first exponential of a process is of one number, on one thread."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

_SCRIPT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name in ("aten::exp", "aten::log"):
            print(name, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))

with Seen():
    import saccade
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without oneMKL")
def test_import_settles_which_kernels_mkl_takes():
    """The import calls both functions in both dtypes before any tensor of many numbers: which thread comes first is a matter of luck."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    wanted = [f"aten::{name} {dtype} 1" for dtype in (torch.float32, torch.float64) for name in ("exp", "log")]
    assert done.stdout.splitlines() == wanted
