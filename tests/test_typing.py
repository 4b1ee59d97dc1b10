"""The knowledge that a type checker has of a call: its result has the type that `return_lse` asks for."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SNIPPET = """
import torch
import saccade
import saccade.distributed

x = torch.empty(0)
flag = bool(x.numel())

{calls}
out = saccade.attention(x, x, x)
out.sum()
out, lse = saccade.attention(x, x, x, return_lse=True)
lse.sum()
with saccade.replace_sdpa() as replacement:
    replacement.restore()
"""
WRONG = """
import torch
import saccade

x = torch.empty(0)
out, lse = saccade.attention(x, x, x, return_lse="yes")
saccade.attention(x, x, x, return_lse=True).sum()
"""
CALLS = {
    "attention": "x, x, x",
    "attention_qkvpacked": "x",
    "attention_varlen": "x, x, x, x, x, 1, 1",
    "attention_varlen_qkvpacked": "x, x, 1",
    "dynamic_mask_attention": "x, x, x, x, keep=1",
    "nm_sparse_attention": "x, x, x",
    "distributed.dynamic_mask_attention": "x, x, x, x, keep=1",
}
# of each call without `return_lse`, with False, with True and with a bool
TYPES = ["Tensor", "Tensor", "tuple[Tensor, Tensor]", "Tensor | tuple[Tensor, Tensor]"]
PYRIGHTS = ("basedpyright", "pyright")


def checked(folder: Path, source: str) -> str:
    """The output of mypy for a program."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy, which is not installed")
    (folder / "program.py").write_text(source)
    # the project's configuration and cache: to read torch anew takes a minute
    words = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(folder / "program.py")]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment).stdout


def pyright(folder: Path, source: str) -> str:
    """The output of Pyright for a program, by whichever of `PYRIGHTS` is installed."""
    found = [name for name in PYRIGHTS if importlib.util.find_spec(name)]
    if not found:
        pytest.skip(f"needs one of {', '.join(PYRIGHTS)}, of which none is installed")
    (folder / "program.py").write_text(source)
    settings = {"include": ["program.py"], "extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", found[0], "-p", str(folder), "--pythonpath", sys.executable]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def every_call() -> str:
    """A program that asks for the type of each call."""
    lines = [
        f"reveal_type(saccade.{name}({given}{asked}))"
        for name, given in CALLS.items()
        for asked in ("", ", return_lse=False", ", return_lse=True", ", return_lse=flag")
    ]
    return SNIPPET.format(calls="\n".join(lines))


@pytest.mark.slow
def test_results_have_the_types_that_a_call_asks_for(tmp_path):
    said = checked(tmp_path, every_call())
    assert "error:" not in said, said
    found = [re.sub(r"torch\._tensor\.Tensor", "Tensor", kind) for kind in re.findall(r'Revealed type is "(.*)"', said)]
    assert found == TYPES * len(CALLS)


@pytest.mark.slow
def test_pyright_knows_the_same_types(tmp_path):
    said = pyright(tmp_path, every_call())
    assert "0 errors" in said, said
    assert re.findall(r'Type of "saccade.*" is "(.*)"', said) == TYPES * len(CALLS)


@pytest.mark.slow
def test_a_wrong_use_is_found(tmp_path):
    said = checked(tmp_path, WRONG)
    assert 'No overload variant of "attention" matches argument types' in said
    assert '"tuple[Tensor, Tensor]" has no attribute "sum"' in said


@pytest.mark.slow
def test_pyright_finds_a_wrong_use(tmp_path):
    said = pyright(tmp_path, WRONG)
    assert 'No overloads for "attention" match' in said
    assert 'Cannot access attribute "sum" for class "tuple[Tensor, Tensor]"' in said
