"""The site as it is read on a phone and on a screen: tables scroll visibly, plots open in full, old addresses lead on, the column is wide.

`make docs` needs mkdocs, which this environment has not, so its hooks run here with the names that they import standing in.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
STYLE = (DOCS / "style.css").read_text(encoding="utf-8")
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PIXELS_OF_A_REM = 20  # of the theme


@pytest.fixture
def hooks(monkeypatch):
    for module, name in (("config.defaults", "MkDocsConfig"), ("structure.files", "File"), ("structure.pages", "Page")):
        stands_in = ModuleType(f"mkdocs.{module}")
        setattr(stands_in, name, object)
        monkeypatch.setitem(sys.modules, stands_in.__name__, stands_in)
    monkeypatch.setattr(sys.modules["mkdocs.structure.files"], "Files", object, raising=False)
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "_stale", dict)  # which results are stale is another test's question
    return found


def shown(hooks, place: str, text: str) -> str:
    page = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri=place))
    return hooks.on_page_markdown(text, page, None, None)


def test_a_plot_says_how_many_of_its_rows_are_stale(hooks, monkeypatch):
    monkeypatch.setattr(hooks, "_stale", lambda: {"h100/short_full": "12 of 1,030 rows"})
    text = "![Times](../benchmarks/results/h100/{}.png)"
    assert "*12 of 1,030 rows of these results are older than the code of today" in shown(
        hooks, "a.md", text.format("short_full")
    )
    assert "older" not in shown(hooks, "a.md", text.format("short_long"))


def test_a_name_of_a_table_says_how_many_of_its_rows_are_stale(hooks, monkeypatch):
    monkeypatch.setattr(hooks, "_stale", lambda: {"h100/short_full": "12 of 414 rows"})
    assert "short_full.csv) (stale: 12 of 414 rows)" in shown(hooks, "a.md", "`h100/short_full.csv`")
    assert "stale" not in shown(hooks, "a.md", "`h100/short_pooling.csv`")


def rule(selector: str) -> str:
    """The declarations of the rules whose selectors have this one."""
    return "".join(body for names, body in re.findall(r"([^{}]+)\{([^}]*)\}", STYLE) if selector in names)


def anchors(path: Path) -> set[str]:
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in found}


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda p: p.relative_to(DOCS).as_posix())
def test_every_plot_of_a_page_opens_in_full(hooks, path):
    place = path.relative_to(DOCS).as_posix()
    page = shown(hooks, place, path.read_text(encoding="utf-8"))
    assert "benchmarks/results/" not in "".join(re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page)), "the site has no such file"
    for inner, outer in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)\{[^}]*\}\]\(([^)]+)\)", page):
        assert inner == outer
    pictures = re.findall(r"!\[[^\]]*\]\([^)]+\.png\)", page)
    assert len(pictures) == len(re.findall(r"\[!\[[^\]]*\]\([^)]+\.png\)\{[^}]*\}\]\(", page))


def test_a_name_of_a_table_is_a_link(hooks):
    assert "results/h100/short_full.csv)" in shown(hooks, "speed/short.md", "*`h100/short_full.csv`.*")
    assert shown(hooks, "speed/short.md", "`h100/nobody.csv`") == "`h100/nobody.csv`"


def test_old_addresses_lead_to_pages_and_headings(hooks):
    for places in hooks.MOVED.values():
        for place in places.values():
            page, _, anchor = place.partition("#")
            source = DOCS / page.replace(".html", ".md")
            assert source.is_file()
            assert not anchor or anchor in anchors(source), place


def test_a_wide_table_scrolls_and_shows_that_it_does():
    wrap = rule(".md-typeset__scrollwrap")
    assert "overflow-x: auto" in wrap
    assert wrap.count("linear-gradient") == 4
    assert wrap.count(" local") == 2  # covers, which scroll with the table
    assert wrap.count(" scroll") == 2  # shadows, which stay at the edges


def test_a_drawing_stays_readable_on_a_phone():
    width = float(re.findall(r"min-width: ([\d.]+)rem", rule(".md-typeset figure svg"))[0])
    assert width * PIXELS_OF_A_REM > 390
    assert "overflow-x: auto" in rule(".md-typeset figure")


def test_the_column_uses_the_width_of_a_screen():
    width = float(re.findall(r"max-width: ([\d.]+)rem", rule(".md-grid"))[0])
    assert width * PIXELS_OF_A_REM >= 1280
    assert "toc.integrate" in CONFIG  # one rail, not two


@pytest.mark.parametrize("path", sorted((DOCS / "speed").glob("*.md")), ids=lambda p: p.name)
def test_a_page_of_speed_answers_a_question_and_is_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) < 450
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:] or [text]:
        shown = len(re.findall(r"^\|---", part, re.MULTILINE)) + len(re.findall(r"^!\[", part, re.MULTILINE))
        assert shown == 1 or path.name in ("bias.md", "index.md"), "one plot or one table"


def test_the_index_of_speed_leads_to_every_page():
    index = (DOCS / "speed" / "index.md").read_text(encoding="utf-8")
    assert not [path.name for path in (DOCS / "speed").glob("*.md") if path.name != "index.md" and f"({path.name}" not in index]
