"""The documents are true as far as a test can tell: their Python runs unchanged, their links lead somewhere, every plot is shown.

Code that needs a GPU has an `if` for that in its block, so it is compiled here all the same.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [p for folder in ("docs", "src", "benchmarks", "examples") for p in sorted((ROOT / folder).rglob("*.md"))]
DOCUMENTS += sorted(ROOT.glob("*.md"))
BLOCK = re.compile(r"^( *)```(?:python|py)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
IMAGE = re.compile(r"\b(?:src|srcset)=\"([^\"]+)\"")
SHOWN = re.compile(r"^!\[[^\]]+\]\((?:\.\./)+(benchmarks/results/[^)]+)\)\n\n\*([^*\n]+)\*", re.MULTILINE)
REPOSITORY = "https://github.com/saccade-attention/saccade"
RAW = "https://raw.githubusercontent.com/saccade-attention/saccade/main/"
MOST_WORDS = 560


def blocks(path: Path) -> list[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    return [(text[: m.start(2)].count("\n"), textwrap.dedent(m[2])) for m in BLOCK.finditer(text)]


def without_code(path: Path) -> str:
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path: Path) -> set[str]:
    """The anchors that the site makes of the headings of a page."""
    found = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in found}


FOUND = [(path.relative_to(ROOT), line, block) for path in DOCUMENTS for line, block in blocks(path)]


def test_the_readme_and_every_operation_have_python():
    places = {path.as_posix() for path, _, _ in FOUND}
    operations = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs" / "operations").glob("*.md")}
    assert places >= {"README.md", "docs/index.md"} | operations


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("path", "line", "block"), FOUND, ids=[f"{path}:{line}" for path, line, _ in FOUND])
def test_python_runs_as_it_stands(path, line, block, tmp_path, monkeypatch):
    # lines of the document in a traceback
    code = compile("\n" * line + block, str(ROOT / path), "exec")
    if re.search(r"saccade\.integrations\.|^from transformers", block, re.MULTILINE):
        pytest.importorskip("transformers")
    if re.search(r"^import timm", block, re.MULTILINE):
        pytest.importorskip("timm", reason="needs timm, which is not installed", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    for link in LINK.findall(without_code(path)):
        for prefix in (f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/", RAW):
            if link.startswith(prefix):
                link = "/" + link.removeprefix(prefix)
        if link.startswith(("http:", "https:")):
            continue
        file, _, anchor = link.partition("#")
        place = path if not file else ROOT / file[1:] if file.startswith("/") else path.parent / file
        assert place.exists(), f"{link} in {path.relative_to(ROOT)}"
        assert not anchor or anchor in anchors(place), f"{link} in {path.relative_to(ROOT)}"


def test_the_readme_is_read_in_a_minute_and_anywhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head = text[: text.index("\n|")]
    assert len(head.split()) <= MOST_WORDS
    images = IMAGE.findall(text)
    assert len(images) == 2  # light and dark
    # they work in a clone; a package index, which shows the page without the repository around it, gets them absolute
    assert all((ROOT / image).is_file() for image in images)
    assert not [link for link in LINK.findall(text) if link.startswith(REPOSITORY)]


def test_every_plot_is_shown():
    shown = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md"))
    every = {p.relative_to(ROOT).as_posix() for p in (ROOT / "benchmarks" / "results").rglob("*.png")}
    plots = {plot for plot in every if not plot.endswith(".dark.png")}
    assert plots
    assert every - plots == {plot.removesuffix(".png") + ".dark.png" for plot in plots}
    assert not [plot for plot in plots if plot not in shown]


def test_every_caption_says_what_the_plot_is_of():
    """The machine, a size, the peers, the day."""
    captions = [found for p in sorted((ROOT / "docs").rglob("*.md")) for found in SHOWN.findall(p.read_text(encoding="utf-8"))]
    plots = [p for p in (ROOT / "benchmarks" / "results").rglob("*.png") if not p.name.endswith(".dark.png")]
    assert len({plot for plot, _ in captions}) == len(plots)
    for plot, caption in captions:
        for needed in (r"\b(?:H[12]00|EPYC|CPU)\b", r"\b\w+ = \d|\d+ tokens", r"\bpeers?\b", r"\b20\d\d-\d\d-\d\d\b"):
            assert re.search(needed, caption), f"the caption of {plot} has nothing like {needed}"


def test_every_environment_variable_and_command_is_documented():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    source = (ROOT / "src" / "saccade" / "env.py").read_text(encoding="utf-8")
    variables = set(re.findall(r"environ\.get\(\"(\w+)\"", source))
    commands = re.findall(
        r"^@app\.command\(\)\ndef (\w+)", (ROOT / "src/saccade/cli/app.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(variables) > 3
    assert len(commands) > 3
    assert not [name for name in (*variables, *(f"`saccade {c}" for c in commands)) if name not in page]


def test_bibtex_can_read_the_entries_to_cite():
    """BibTeX knows no comments inside of an entry; it skips what stands between entries."""
    (text,) = re.findall(r"```bibtex\n(.*?)```", (ROOT / "docs" / "help.md").read_text(encoding="utf-8"), re.DOTALL)
    entries = re.findall(r"^@.*?^}", text, re.MULTILINE | re.DOTALL)
    assert len(entries) == 5
    assert not [entry for entry in entries if "%" in entry]


DOCS = ROOT / "docs"
TABLES = [DOCS / name for name in ("quality.md", "notes/log/speed.md", "notes/log/quality.md")]
TABLES += [*sorted((DOCS / "speed").glob("*.md")), *sorted((DOCS / "evidence").glob("0*.md"))]


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.relative_to(DOCS).as_posix())
def test_every_name_of_a_table_becomes_a_link(path):
    """The site links a name with its folder, as `h100/short_full.csv`."""
    names = re.findall(r"`([\w/]+\.csv)`", path.read_text(encoding="utf-8"))
    names = [name for name in names if not name.startswith("benchmarks/")]
    assert names
    assert not [
        name for name in names if not re.fullmatch(r"\w+/\w+\.csv", name) or not (ROOT / "benchmarks/results" / name).is_file()
    ]
