"""The page that compares with the papers: its files exist, its verdicts are known, and its numbers stand in the committed results."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
HEADER = "| Item | Paper | Ours | Verdict | Where |"
VERDICTS = {"reproduced", "better", "worse", "not comparable", "missing"}
sys.path.insert(0, str(ROOT / "benchmarks"))

import evidence  # noqa: E402

NUMBER = evidence.NUMBER


def lines() -> list[list[str]]:
    """Item, paper, ours, verdict and where of every row."""
    found = []
    for block in PAGE.split(HEADER)[1:]:
        table = block.split("\n\n")[0].strip().splitlines()[1:]
        found += [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return found


LINES = lines()


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def csvs(where: str) -> list[str]:
    return [name for name in spans(where) if name.endswith(".csv")]


def test_every_paper_has_its_table():
    assert [int(n) for n in re.findall(r"^## Paper 00(\d)", PAGE, re.MULTILINE)] == [1, 2, 3, 4]
    assert PAGE.count(HEADER) == 4
    assert all(len(line) == 5 for line in LINES), [line for line in LINES if len(line) != 5]


def test_every_verdict_is_explained():
    assert {verdict for *_, verdict, _ in LINES} == VERDICTS
    explained = PAGE[PAGE.index("| Verdict | Meaning |") :].split("\n\n")[0]
    assert not [verdict for verdict in VERDICTS if verdict not in explained]


def test_the_verdicts_of_each_paper_are_counted():
    said = re.findall(r"^\| \[00(\d)\][^|]*\|([ \d|]+)\|$", PAGE, re.MULTILINE)
    (heads,) = re.findall(r"^\| Paper \| (reproduced .*) \|$", PAGE, re.MULTILINE)
    columns = heads.split(" | ")
    assert set(columns) == VERDICTS
    for paper, counts in said:
        section = PAGE.split(f"## Paper 00{paper}")[1].split("\n## ")[0]
        found = [line[3] for line in LINES if "| " + " | ".join(line) + " |" in section]
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


CELLS = evidence.cells()


@pytest.mark.parametrize("cell", CELLS, ids=[f"{cell['item'][:30]}: {cell['number']}" for cell in CELLS])
def test_a_named_cell_holds_its_number(cell):
    assert [line for line in LINES if line[0].startswith(cell["item"])], "no row of the page begins so"
    assert evidence.holds(cell)


def test_another_cell_does_not():
    """The number of another row, of another column, or of no row."""
    cell = next(cell for cell in CELLS if cell["number"] == "3.145")
    assert evidence.holds(cell)
    assert not evidence.holds(cell | {"where": cell["where"].replace("sdpa_efficient", "sdpa_cudnn")})
    assert not evidence.holds(cell | {"column": "ms_p80"})
    assert not evidence.holds(cell | {"where": "backend=nobody"})


def test_every_figure_that_is_computed_is_quoted():
    for name, found in evidence.figures().items():
        told = [text for line in LINES if name in csvs(line[4]) for text in spans(line[2])]
        assert not [figure for figure in found if figure not in told], name


def test_every_figure_and_table_of_the_papers_is_a_row():
    """As many as each paper numbers, where its text says so."""
    numbered = [(1, "Fig.", 12), (1, "Table", 1), (3, "Fig.", 19), (3, "Table", 6), (3, "Eq.", 34)]
    for paper, kind, count in numbered:
        section = PAGE.split(f"## Paper 00{paper}")[1].split("\n## ")[0]
        items = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
        found: set[int] = set()
        for item in items:
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
    section = PAGE.split(f"## Paper 00{paper}")[1].split("\n## ")[0]
    values = {row["value"] for row in stated(paper)}
    missing = {}
    for line in section.split(HEADER)[1].strip().splitlines()[1:]:
        item, theirs = line.strip("|").split(" | ")[:2]
        item = re.sub(r"(?:Sections?|Proposition|Appendix A\.|and) [A-Z\d.]+", "", item)
        found = [number for number in NUMBER.findall(f"{item} {theirs}") if number not in values]
        missing |= {line.split(" | ")[0]: found} if found else {}
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
    text = (RESULTS / "h200" / "volta_accuracy.csv").read_text(encoding="utf-8")
    assert "0.0277" in NUMBER.findall(text)
    assert "0.028" not in NUMBER.findall(text)
    assert NUMBER.findall("at 65728.0 MiB, 1.0, n^1.98 and 3.5x") == ["65728.0", "1.0"]
