"""The public API: names, signatures, docstrings, and an import that needs only torch."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import saccade

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = [saccade.attention, saccade.attention_qkvpacked, saccade.explain]


def test_all_is_what_is_public():
    public = {n for n, x in vars(saccade).items() if not n.startswith("_") and not isinstance(x, types.ModuleType)}
    assert public - {"annotations"} == set(saccade.__all__) - {"__version__", "analysis", "integrations", "nm_sparse", "nn"}
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", saccade.__version__)


def test_attention_begins_with_torch_s_parameters():
    # torch's own has no Python signature, only a documented one
    documented = re.search(r"scaled_dot_product_attention\((.*?)\)", F.scaled_dot_product_attention.__doc__.replace("\n", " "))[1]
    theirs = [tuple(p.strip().partition("=")[::2]) for p in documented.split(",") if p.strip() != "*"]
    shared = list(inspect.signature(saccade.attention).parameters.values())[: len(theirs)]
    assert [p.name for p in shared] == [name for name, _ in theirs]
    for parameter, (name, default) in zip(shared, theirs, strict=True):
        expected = inspect.Parameter.empty if not default else eval(default)
        assert parameter.default == expected, name
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_our_own_parameters_are_by_keyword_only():
    parameters = inspect.signature(saccade.attention).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["lengths", "window", "key_mask", "return_lse", "backend"]
    parameters = inspect.signature(saccade.attention_qkvpacked).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["lengths", "window", "return_lse", "backend"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_no_catch_all_and_a_docstring_for_each(function):
    parameters = inspect.signature(function).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert len(function.__doc__) > 60


def test_takes_torch_s_place():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.rand(5, 7) < 0.8
    mask[:, 0] = True
    for keywords in ({}, {"attn_mask": mask}, {"is_causal": True}, {"scale": 0.3}):
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **keywords)
        torch.testing.assert_close(saccade.attention(q, k, v, enable_gqa=True, **keywords), expected)
    by_position = saccade.attention(q, k, v, mask, 0.0, False, 0.3, True)
    torch.testing.assert_close(by_position, F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.3, enable_gqa=True))


def test_packed_is_separate():
    qkv = torch.randn(2, 7, 3, 4, 8, device=DEVICE)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    for backend in ("auto", "reference", "short"):
        out = saccade.attention_qkvpacked(qkv, is_causal=True, backend=backend)
        torch.testing.assert_close(out, saccade.attention(q, k, v, is_causal=True, backend=backend).transpose(1, 2))
        assert out.shape == (2, 7, 4, 8)
    out, lse = saccade.attention_qkvpacked(qkv, return_lse=True)
    assert lse.shape == (2, 4, 7)
    assert lse.dtype == torch.float32


def test_out_has_the_layout_of_query():
    for backend in ("short", "auto"):
        q = torch.randn(2, 7, 4, 8, device=DEVICE).transpose(1, 2)
        assert saccade.attention(q, q, q, backend=backend).transpose(1, 2).is_contiguous()
    assert saccade.attention(q.contiguous(), q, q, backend="short").is_contiguous()
    q = torch.randn(7, 2, 4, 8, device=DEVICE).permute(1, 2, 0, 3)
    assert saccade.attention(q, q, q, backend="short").permute(2, 0, 1, 3).is_contiguous()


BLOCKED = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "cuda", "typer", "rich", "transformers", "matplotlib", "pytest", "numpy"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import torch, saccade, saccade.testing
x = torch.randn(2, 2, 9, 16, requires_grad=True)
saccade.attention(x, x, x).sum().backward()
out, lse = saccade.attention(x, x, x, return_lse=True)
assert "needs Triton, which is not installed" in saccade.explain(x, x, x)
try:
    saccade.attention(x, x, x, backend="short")
except saccade.UnsupportedProblem as error:
    assert "needs Triton" in str(error)
else:
    raise AssertionError("ran without Triton")
from saccade.exact.testing.cases import ATTENTION
from saccade.exact.testing.check import check_attention
assert all(r.ok for r in check_attention(ATTENTION[0], torch.float32, "cpu", "reference"))
print("fine")
"""


def test_import_needs_torch_alone():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


LAZY = """
import sys, torch
before = set(sys.modules)
import saccade, saccade.testing
new = {m.split(".")[0] for m in set(sys.modules) - before}
assert not new & {"triton", "cuda", "typer", "rich", "transformers", "matplotlib", "pytest"}, new
assert not [m for m in sys.modules if m.startswith("saccade.exact.short.") and not m.endswith((".backend", ".config", ".measured"))]
print("fine")
"""


def test_import_is_lazy():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


BY_ATTRIBUTE = """
import operator, sys, saccade
for path in sys.argv[1:]:
    assert operator.attrgetter(path)(saccade)
print("fine")
"""


def test_integrations_are_found_by_the_paths_of_the_reference():
    pytest.importorskip("transformers")  # `DogeCache` has a base there
    paths = [whole or alone for whole, _, alone in SHOWN.findall((REFERENCE / "integrations.md").read_text(encoding="utf-8"))]
    named = [path.removeprefix("saccade.") for path in paths]
    assert {"integrations.tabpfn.register", "integrations.doge_cache.DogeCache"} <= set(named)
    done = subprocess.run([sys.executable, "-c", BY_ATTRIBUTE, *named], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
    with pytest.raises(AttributeError, match=r"module 'saccade\.integrations' has no attribute 'nothing'"):
        saccade.integrations.nothing  # noqa: B018


REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
SHOWN = re.compile(r"^::: (\S+)\n(?: +.*\n)*? +members: \[([^\]]+)\]|^::: (\S+)$", re.MULTILINE)


def resolved(path: str) -> Any:
    """The object behind a dotted name; a lazily imported module on the way is imported."""
    found: Any = saccade
    for i, name in enumerate(path.split(".")[1:], 2):
        found = getattr(found, name, None) or importlib.import_module(".".join(path.split(".")[:i]))
    return found


def documented() -> Iterator[tuple[str, Any]]:
    """Every function, class and method that the API reference shows."""
    for page in sorted(REFERENCE.glob("*.md")):
        for whole, members, alone in SHOWN.findall(page.read_text(encoding="utf-8")):
            found = resolved(whole or alone)
            names = members.split(", ") if members else [n for n in vars(found) if not n.startswith("_")]
            if not isinstance(found, types.ModuleType):
                yield whole or alone, found
                if not inspect.isclass(found):
                    continue
            yield from members_of(whole or alone, found, names)


def members_of(path: str, whole: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Its functions and classes; of a module those that are written in it, if the page names no others."""
    for name in names:
        found = vars(whole)[name]
        elsewhere = isinstance(whole, types.ModuleType) and not str(getattr(found, "__module__", "")).startswith(whole.__name__)
        if inspect.isfunction(found) and not elsewhere:
            yield f"{path}.{name}", found
        elif inspect.isclass(found) and not elsewhere and not issubclass(found, Exception):
            yield f"{path}.{name}", found
            yield from members_of(f"{path}.{name}", found, [n for n in vars(found) if not n.startswith("_")])


EVERY = dict(documented())
ROW = re.compile(r"^(\*{0,2}\w+(?:, *\*{0,2}\w+)*)(?: \([^)]*\))?:", re.MULTILINE)
HIDDEN = re.compile(r"(?<=[.:;] )`?(\w+)`?: ")


def rows_of(docstring: str, section: str) -> dict[str, str]:
    """Each row of a section of a docstring: what stands before its colon, and its words."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    text = inspect.cleandoc("\n" + found[1]) if found else ""
    parts = ROW.split(text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("path", EVERY)
def test_every_parameter_of_a_public_function_has_a_row_of_its_own(path):
    thing = EVERY[path]
    docstring = thing.__doc__ or ""
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
        docstring += "\n\n" + (thing.__init__.__doc__ or "")
    rows = rows_of(docstring, "Args")
    if dataclasses.is_dataclass(thing):
        assert not rows, "a data class has `Attributes:`"
        names, rows = [f.name for f in dataclasses.fields(thing)], rows_of(docstring, "Attributes")
    else:
        names = [n for n in inspect.signature(thing).parameters if n != "self"]
    assert not [row for row in rows if "," in row]
    hidden = {row: [n for n in HIDDEN.findall(words) if n in names] for row, words in rows.items()}
    assert not {row: found for row, found in hidden.items() if found}
    if rows or (inspect.isfunction(thing) and len(names) > 4):
        assert [row.lstrip("*") for row in rows] == names
