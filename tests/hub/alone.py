"""Run by a test: `alone.py VARIANT` loads the copy in a process that has neither the installed package nor the
dependency that others lack, imports every module of it and calls it."""

from __future__ import annotations

import importlib
import importlib.abc
import os
import pkgutil
import sys
from pathlib import Path

import torch
from loading import load

BLOCKED = ("saccade", "saccade_command", "platformdirs")


class Blocked(importlib.abc.MetaPathFinder):
    """Lets nobody import what the process shall not have."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Blocked())
copy = load(Path(sys.argv[1]))
names = [info.name for info in pkgutil.walk_packages(copy.__path__, f"{copy.__name__}.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 150, len(names)

query, key, value = torch.randn(3, 2, 3, 7, 16, dtype=torch.float64, requires_grad=True).unbind(0)
out = copy.attention(query, key, value, is_causal=True)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))
out.sum().backward()

env = importlib.import_module(f"{copy.__name__}.env")
os.environ.pop("SACCADE_CACHE_DIR", None)
os.environ["XDG_CACHE_HOME"] = "elsewhere"
assert env.cache_folder() == Path("elsewhere", "saccade"), env.cache_folder()
source = importlib.import_module(f"{copy.__name__}.native.build").SOURCE
assert source.is_file(), source
assert Path(source).is_relative_to(sys.argv[1])
print("every module:", len(names))
