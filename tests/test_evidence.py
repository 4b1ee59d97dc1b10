"""The pages that compare with the papers: their files exist, their verdicts are known, and their numbers stand in the committed results."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = ROOT / "docs" / "evidence"
INDEX = (PLACE / "index.md").read_text(encoding="utf-8")
PAGES = {int(path.name[:3]): path.read_text(encoding="utf-8") for path in sorted(PLACE.glob("0*.md"))}
HEADER = "| Item | Paper | Ours | Verdict | Where |"
MOST_WORDS = 24
VERDICTS = {"reproduced", "better", "worse", "not comparable", "missing"}
sys.path.insert(0, str(ROOT / "benchmarks"))

import evidence  # noqa: E402

NUMBER = evidence.NUMBER


def rows_of(page: str) -> list[list[str]]:
    """Item, paper, ours, verdict and where of every row."""
    table = page.split(HEADER)[1].split("\n\n")[0].strip().splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


LINES = [line for page in PAGES.values() for line in rows_of(page)]


def details() -> list[tuple[str, str, str]]:
    """Heading, table with its caption, and caption, of what is too long for a row."""
    found = []
    for page in PAGES.values():
        for block in page.split("\n## ")[1:]:
            heading, _, text = block.partition("\n\n")
            (caption,) = re.findall(r"^\*([^*\n]+)\*$", text, re.MULTILINE)
            found.append((heading, text[: text.index(caption) + len(caption)], caption))
    return found


DETAILS = details()


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def csvs(where: str) -> list[str]:
    return [name for name in spans(where) if name.endswith(".csv")]


def test_every_paper_has_its_table():
    assert list(PAGES) == [1, 2, 3, 4]
    for paper, page in PAGES.items():
        assert page.startswith(f"# Paper 00{paper}: ")
        assert page.count(HEADER) == 1
        opening = page.split("\n\n")[1]
        assert 2 <= len(re.findall(r"\.(?:\s|$)", opening)) <= 4, "a page begins with what holds and what does not"
    assert all(len(line) == 5 for line in LINES), [line for line in LINES if len(line) != 5]


def test_the_pages_are_short():
    """A cell is no paragraph: what explains a row is in a log."""
    assert len(INDEX.split()) < 500
    long = {line[0]: cell for line in LINES for cell in line if len(cell.split()) > MOST_WORDS}
    assert not long


def test_every_verdict_is_explained():
    assert {verdict for *_, verdict, _ in LINES} == VERDICTS
    explained = INDEX[INDEX.index("| Verdict | Meaning |") :].split("\n\n")[0]
    assert not [verdict for verdict in VERDICTS if verdict not in explained]


def test_the_verdicts_of_each_paper_are_counted():
    said = re.findall(r"^\| \[00(\d)[^|]*\|([ \d|]+)\|$", INDEX, re.MULTILINE)
    (heads,) = re.findall(r"^\| Paper \| (reproduced .*) \|$", INDEX, re.MULTILINE)
    columns = heads.split(" | ")
    assert set(columns) == VERDICTS
    for paper, counts in said:
        found = [line[3] for line in rows_of(PAGES[int(paper)])]
        assert [int(count) for count in counts.split("|")] == [found.count(verdict) for verdict in columns], paper
    assert len(said) == 4


@pytest.mark.parametrize("line", LINES, ids=[f"{i}: {line[0][:30]}" for i, line in enumerate(LINES)])
def test_the_files_of_a_row_exist(line):
    item, _, _, verdict, where = line
    files = spans(where)
    assert all((RESULTS / file if file.endswith(".csv") else ROOT / file).is_file() for file in files), item
    if verdict == "missing":  # what is missing has a reason, in words
        assert len(re.sub(r"`[^`]+`", "", where).split()) >= 4
    else:
        assert files, item


@pytest.mark.parametrize("line", LINES, ids=[f"{i}: {line[0][:30]}" for i, line in enumerate(LINES)])
def test_the_numbers_of_a_row_are_cells_of_its_tables(line):
    """In code: a range or average of `benchmarks/evidence.py`. Without: a cell that `benchmarks/evidence_cells.csv` names."""
    item, _, ours, _, where = line
    tables = csvs(where)
    printed = [figure for name in tables for figure in evidence.figures().get(name, [])]
    ranges = [text for text in spans(ours) if NUMBER.search(text)]
    assert not [text for text in ranges if text not in printed], item
    if tables:
        named = {cell["number"] for cell in CELLS if item.startswith(cell["item"]) and cell["table"] in tables}
        quoted = set(NUMBER.findall(re.sub(r"`[^`]+`", "", ours)))
        assert quoted == named, item


@pytest.mark.parametrize(("heading", "table", "caption"), DETAILS, ids=[heading for heading, _, _ in DETAILS])
def test_the_numbers_of_a_table_below_are_those_of_its_caption(heading, table, caption):
    """Figures of the CSV that the caption names, each in code; a row of the paper's table names the CSV too."""
    tables = csvs(caption)
    assert tables
    assert [line for line in LINES if set(tables) <= set(csvs(line[4]))]
    assert any(f"](#{anchor(heading)})" in page for page in PAGES.values()), "no row links to the table"
    printed = [figure for name in tables for figure in evidence.figures()[name]]
    quoted = [text for text in spans(table) if text not in tables]
    assert not [text for text in quoted if text not in printed]
    assert not NUMBER.findall(re.sub(r"`[^`]+`", "", table))


def anchor(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).lower())


CELLS = evidence.cells()


@pytest.mark.parametrize("cell", CELLS, ids=[f"{cell['item'][:30]}: {cell['number']}" for cell in CELLS])
def test_a_named_cell_holds_its_number(cell):
    assert [line for line in LINES if line[0].startswith(cell["item"])], "no row of the page begins so"
    assert evidence.holds(cell)


def test_another_cell_does_not():
    """The number of another row, of another column, or of no row."""
    cell = next(cell for cell in CELLS if cell["number"] == "3.107")
    assert evidence.holds(cell)
    assert not evidence.holds(cell | {"where": cell["where"].replace("sdpa_efficient", "sdpa_cudnn")})
    assert not evidence.holds(cell | {"column": "ms_p80"})
    assert not evidence.holds(cell | {"where": "backend=nobody"})


def test_every_figure_that_is_computed_is_quoted():
    for name, found in evidence.figures().items():
        told = [text for line in LINES if name in csvs(line[4]) for text in spans(line[2])]
        told += [text for _, table, caption in DETAILS if name in csvs(caption) for text in spans(table)]
        assert not [figure for figure in found if figure not in told], name


def test_every_figure_and_table_of_the_papers_is_a_row():
    """As many as each paper numbers, where its text says so."""
    numbered = [(1, "Fig.", 12), (1, "Table", 1), (3, "Fig.", 19), (3, "Table", 6), (3, "Eq.", 34)]
    for paper, kind, count in numbered:
        found: set[int] = set()
        for item, *_ in rows_of(PAGES[paper]):
            for listed in re.findall(rf"{re.escape(kind)} ((?:\d+(?:, | and | to )?)+)", item):
                for part in re.findall(r"\d+ to \d+|\d+", listed):
                    ends = [int(n) for n in part.split(" to ")]
                    found |= set(range(ends[0], ends[-1] + 1))
        assert found == set(range(1, count + 1)), f"{kind} of paper 00{paper}"


PAPERS = {1: "sparkattention", 3: "dfss", 4: "dynamic_mask"}


def stated(paper: int) -> list[dict[str, str]]:
    with open(ROOT / "benchmarks" / "paper" / f"{PAPERS[paper]}.csv", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.mark.parametrize("paper", PAPERS)
def test_numbers_of_a_paper_are_numbers_and_say_where_they_stand(paper):
    rows = stated(paper)
    assert list(rows[0]) == ["item", "setting", "value", "unit", "source_section"]
    assert all(all(row.values()) and float(row["value"]) > 0 for row in rows)
    assert len({(row["item"], row["setting"]) for row in rows}) == len(rows)


@pytest.mark.parametrize("paper", PAPERS)
def test_what_the_page_quotes_of_a_paper_stands_in_its_file(paper):
    """Every number with a decimal point, digit for digit; numbers of sections are none of the paper's figures."""
    values = {row["value"] for row in stated(paper)}
    missing = {}
    for row, theirs, *_ in rows_of(PAGES[paper]):
        item = re.sub(r"(?:Sections?|Proposition|Appendix A\.|and) [A-Z\d.]+", "", row)
        found = [number for number in NUMBER.findall(f"{item} {theirs}") if number not in values]
        missing |= {row: found} if found else {}
    assert not missing


def test_averages_of_the_arena_are_those_of_its_tasks():
    """A check of the file against itself: a mistyped number would show."""
    rows = [row for row in stated(3) if row["item"] == "Table 4: Long Range Arena"]
    models: dict[str, list[float]] = {}
    for row in rows:
        models.setdefault(row["setting"].split(", ")[0], []).append(float(row["value"]))
    assert len(models) == 14
    for model, (*tasks, average) in models.items():
        assert sum(tasks) / 4 == pytest.approx(average, abs=0.011), model


def test_a_number_that_is_nowhere_is_found():
    """The scheme itself: neither a rounded number nor one of another table passes."""
    text = (RESULTS / "h100" / "volta_accuracy.csv").read_text(encoding="utf-8")
    assert "0.0277" in NUMBER.findall(text)
    assert "0.028" not in NUMBER.findall(text)
    assert NUMBER.findall("at 65728.0 MiB, 1.0, n^1.98 and 3.5x") == ["65728.0", "1.0"]
