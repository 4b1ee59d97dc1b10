"""A run measures a part of tables: it replaces the rows that it measures, stops at a limit, and says what is left."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
MACHINE = dict.fromkeys(("gpu", "torch", "triton", "driver", "commit", "date"), "x")


def header_of(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


# tables that a run writes; experiments have columns of their own
TABLES = [path for path in sorted(RESULTS.glob("*/*.csv")) if header_of(path)[:4] == ["table", "problem", "backend", "direction"]]
FAKE = """
from rows import Row

NAMES = ("ours", "theirs")
CASES = ["n=1 fwd", "n=1 fwd+bwd", "n=2 fwd"]
TIME = 1.0
seen = []
tick = int


def every_case():
    return CASES


def case_of(row):
    return row["problem"] + " " + row["direction"]


def run(writer, repeat_ms):
    for case in writer.part.cases(every_case()):
        tick()
        problem, direction = case.split()
        for name in writer.part.calls({name: None for name in NAMES}):
            seen.append((case, name))
            if "ends" in case:
                raise KeyboardInterrupt
            writer.add(Row("TABLE", problem, name, direction, "fp32", TIME, TIME, TIME, note=f"{TIME:.2f} ms"))
"""
WHOLE = """
from rows import Row


def run(writer, repeat_ms):
    writer.add(Row("short_whole", "p", "ours", "fwd", "fp32", 1.0, 1.0, 1.0))
"""


@pytest.fixture
def runner(load, monkeypatch, tmp_path):
    """Two small tables in parts and one that is measured as a whole; called with the words of the command line."""
    module = load("run")
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, text in {
        "short_fake": FAKE,
        "short_more": FAKE.replace('"theirs"', '"peer"').replace("n=", "m="),
        "short_whole": WHOLE,
    }.items():
        (folder / f"{name}.py").write_text(text.replace("TABLE", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "draw", lambda path: run.drawn.append(path.stem))

    monkeypatch.setattr(module, "start", module.main)

    def run(*words):
        return module.main([*words, "--no-gate", "--out", str(tmp_path / "out")])

    run.drawn = []
    yield run
    for name in ("short_fake", "short_more", "short_whole"):
        sys.modules.pop(f"tables.{name}", None)


@pytest.fixture
def fake(runner, load):
    return load("tables.short_fake")


def rows(tmp_path, table="short_fake"):
    with (tmp_path / "out" / f"{table}.csv").open(newline="") as file:
        return {(r["problem"], r["direction"], r["backend"]): r["ms_p50"] for r in csv.DictReader(file)}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_table_merged_with_itself_is_the_same(load, tmp_path, path):
    module = load("rows")
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    written = module.rows_of(path)
    assert len({module.key_of(row) for row in written}) == len(written)
    writer = module.Writer(copy, {})
    for row in written[:: max(1, len(written) // 20)]:
        writer.add(row)
    assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        ("", ""),
        ("kernel", "kernel"),
        ("T5, captured", "T5, captured"),
        ("triangle, compiled in 9 s, captured", "triangle, captured"),
        ("ViT-B/16", "ViT-B/16"),
        ("1234 texts/s; kernels 3.1 ms; compiled in 9 s; 4 graphs, 12 MiB", ""),
        ("5104 items/s; kernels 11.92 ms; compiled", "compiled"),
        ("12 items/s; x1.031 of stock, x1.2 predicted by multiplications, xnan by time", ""),
        ("2:4, error 0.31", "2:4"),
        ("with quantisation, error 0.0412", "with quantisation"),
        ("density 0.05, speed-up 3.1, theory 4", "density 0.05"),
        ("bytes of a sequence grow as n^1.998", ""),
        ("auto takes mma_sp, visible 0.1228, 1.21 of that share of unmasked, over 1.15", ""),
        ("640 items/s; timm's attention fused", ""),
        ("host zero_grad 0.10, forward 1.20, AdamW 0.31 ms", ""),
        ("1e+04 items/s", ""),
    ],
)
def test_the_kind_of_a_note_has_no_measured_number(load, note, kind):
    assert load("rows").kind_of(note) == kind


@pytest.mark.parametrize("name", sorted(path.stem for path in (BENCHMARKS / "tables").glob("*.py")))
def test_committed_rows_are_of_known_cases_and_implementations(load, name):
    pytest.importorskip("triton")
    if name == "encoders" or name == "models":
        pytest.importorskip("sentence_transformers")
    module, runner = load(f"tables.{name}"), load("run")
    if not hasattr(module, "every_case"):
        assert not hasattr(module, "NAMES")
        return
    names = set(map(str, module.every_case()))
    for path in RESULTS.glob(f"*/{name}.csv"):
        found = [vars(row) for row in load("rows").rows_of(path)]
        assert {runner.case_of(row, module) for row in found} <= names
        assert {row["backend"] for row in found} <= set(getattr(module, "NAMES", {row["backend"] for row in found}))


def test_only_measured_rows_are_replaced(runner, fake, tmp_path):
    assert runner("short_fake") == 0
    before = (tmp_path / "out" / "short_fake.csv").read_text().splitlines()
    fake.TIME = 2.0
    runner("short_fake", "--rows", "n=1", "--backends", "ours")
    after = (tmp_path / "out" / "short_fake.csv").read_text().splitlines()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, False, True, True, True]
    assert rows(tmp_path)["n=1", "fwd", "ours"] == "2"
    fake.CASES = [*fake.CASES[1:], "n=3 fwd"]
    fake.TIME = 3.0
    runner("short_fake", "--rows", "n=3")
    assert list(rows(tmp_path).items())[-2:] == [(("n=3", "fwd", name), "3") for name in fake.NAMES]  # behind all others
    assert len(rows(tmp_path)) == 8


def test_missing_results_and_a_folder_that_cannot_be_made_are_refused(runner, tmp_path, capsys):
    with pytest.raises(SystemExit):
        runner("short_fake", "--plot-only")
    assert f"there is no {tmp_path / 'out' / 'short_fake.csv'}" in capsys.readouterr().err
    (tmp_path / "out").touch()
    with pytest.raises(SystemExit):
        runner("short_fake")
    assert "where no folder can be made" in capsys.readouterr().err


def test_a_whole_run_drops_problems_that_are_gone(runner, fake, tmp_path):
    runner("short_fake")
    fake.CASES = ["n=1 fwd"]
    assert runner.drawn == ["short_fake"]
    runner("short_fake", "--backends", "ours")
    runner("short_fake", "--rows", "n=1")
    assert len(rows(tmp_path)) == 6
    assert runner.drawn == ["short_fake"]  # a part may be too little for a plot
    runner("short_fake")
    assert {problem for problem, *_ in rows(tmp_path)} == {"n=1"}


def test_a_whole_run_drops_rows_whose_note_is_gone(runner, fake, tmp_path):
    runner("short_fake")
    path = tmp_path / "out" / "short_fake.csv"
    path.write_text(path.read_text().replace(" ms,", " ms; an older word,").replace("n=2,theirs", "n=2,absent"))
    runner("short_fake", "--rows", "n=2")
    assert path.read_text().count("an older word") == 6  # a part drops none
    runner("short_fake")
    left = [line for line in path.read_text().splitlines() if "an older word" in line]
    assert [line.split(",")[1:3] for line in left] == [["n=2", "absent"]]  # a peer that this machine may lack


def test_a_run_that_is_cut_keeps_its_rows_and_all_others(runner, fake, tmp_path):
    runner("short_fake")
    fake.TIME, fake.CASES = 2.0, ["n=1 fwd", "n=9 ends", "n=2 fwd"]
    with pytest.raises(KeyboardInterrupt):
        runner("short_fake")
    found = rows(tmp_path)
    assert len(found) == 6
    assert [key for key, ms in found.items() if ms == "2"] == [("n=1", "fwd", "ours"), ("n=1", "fwd", "theirs")]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["short_fake.csv"]


def test_the_file_is_whole_at_every_moment(runner, fake, load, monkeypatch, tmp_path):
    runner("short_fake")
    path, module = tmp_path / "out" / "short_fake.csv", load("rows")
    before = path.read_bytes()

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        runner("short_fake")
    assert path.read_bytes() == before


def test_two_rows_of_a_kind_are_refused(load, tmp_path):
    module = load("rows")
    writer = module.Writer(tmp_path / "t.csv", MACHINE)
    writer.add(module.Row("t", "p", "ours", "fwd", "fp32", 1.0, 1.0, 1.0, note="peak 1 GiB"))
    with pytest.raises(ValueError, match="two rows of this run"):
        writer.add(module.Row("t", "p", "ours", "fwd", "fp32", 1.0, 1.0, 1.0, note="peak 2 GiB"))
    writer.add(module.Row("t", "p", "ours", "fwd", "bf16", 1.0, 1.0, 1.0))
    lines = writer.path.read_text().splitlines(keepends=True)
    writer.path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(SystemExit, match="has two rows of"):
        module.Writer(writer.path, MACHINE)


def test_a_limit_leaves_cases_in_words_for_rows(runner, fake, load, monkeypatch, tmp_path, capsys):
    now = [100.0]
    monkeypatch.setattr(load("parts").time, "monotonic", lambda: now[0])
    fake.tick = lambda: now.append(now.pop() + 10)
    assert runner("short_fake", "short_more", "short_whole", "--limit", "5") == 0
    printed = capsys.readouterr().out
    monkeypatch.undo()
    assert re.search(r"^\[1/3, \d+ s\] n=1 fwd$", printed, re.MULTILINE)
    left = {table: shlex.split(words) for table, words in re.findall(r"^left: (\w+) --rows (.*)$", printed, re.MULTILINE)}
    assert left == {"short_fake": fake.CASES[1:], "short_more": ["m=1 fwd", "m=1 fwd+bwd", "m=2 fwd"]}
    assert "left: short_whole as a whole" in printed
    assert {case for case, _ in fake.seen} == {"n=1 fwd"}
    part = load("parts").Part(left["short_fake"])
    assert list(part.cases(fake.CASES)) == fake.CASES[1:]


def test_a_whole_name_chooses_its_case_alone(runner, fake):
    runner("short_fake", "--rows", "n=1 fwd")
    assert {case for case, _ in fake.seen} == {"n=1 fwd"}


def test_a_limit_that_is_over_measures_nothing(runner, fake, tmp_path, capsys):
    runner("short_fake")
    before = (tmp_path / "out" / "short_fake.csv").read_bytes()
    fake.seen.clear()
    assert runner("short_fake", "--limit", "0") == 0
    assert not fake.seen
    assert (tmp_path / "out" / "short_fake.csv").read_bytes() == before
    assert "left: short_fake --rows 'n=1 fwd' 'n=1 fwd+bwd' 'n=2 fwd'" in capsys.readouterr().out


def test_several_tables_share_words(runner, fake, load, tmp_path):
    more = load("tables.short_more")
    runner("short_more", "short_fake", "--rows", "n=2", "m=1", "--backends", "peer", "ours")
    assert fake.seen == [("n=2 fwd", "ours")]
    assert more.seen == [(f"m=1 {way}", name) for way in ("fwd", "fwd+bwd") for name in ("ours", "peer")]
    runner("short_more", "short_fake", "--backends", "theirs")
    assert {name for *_, name in rows(tmp_path, "short_more")} == {"ours", "peer"}
    assert len(rows(tmp_path)) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["short_fake", "short_more", "--rows", "n=1", "n=7"], "--rows is n=7; the rows are n=1 fwd; n=1 fwd+bwd; n=2 fwd; m=1 fwd;"),
        (["short_fake", "short_more", "--backends", "ours", "flex"], "--backends is flex; known are ours, theirs, peer"),
        (["short_fake", "short_whole", "--rows", "n=1"], "--rows chooses cases, and these tables are measured as a whole: short_whole"),
        (["short_whole", "--stale-rows"], "--stale-rows chooses cases, and these tables are measured as a whole: short_whole"),
        (["short_whole", "--backends", "ours"], "these tables measure all of theirs together: short_whole"),
        (["short_fake", "nosuch"], "there is no table nosuch; there are short_fake, short_more, short_whole"),
        ([], "the table is missing; one of short_fake"),
        (["short_fake", "--commit", "abcde"], "it is 'abcde'; a commit is 7 to 40 hexadecimal digits"),
        (["short_fake", "--commit", "v2.13.0x"], "it is 'v2.13.0x'; a commit is"),
    ],
)  # fmt: skip
def test_mistakes_end_before_anything_is_measured(runner, fake, tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        runner(*words)
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not fake.seen
    assert not (tmp_path / "out").exists()


def test_the_commit_can_be_given(runner, fake, tmp_path):
    runner("short_fake", "--commit", "0123abc")
    with (tmp_path / "out" / "short_fake.csv").open(newline="") as file:
        assert {row["commit"] for row in csv.DictReader(file)} == {"0123abc"}


def test_stale_rows_are_measured_alone(runner, fake, load, monkeypatch, tmp_path, capsys):
    runner("short_fake")
    stale = load("stale")
    older = {"problem": "n=1", "direction": "fwd+bwd", "backend": "theirs"}
    monkeypatch.setattr(stale, "older_rows", lambda path: [older])
    fake.seen.clear()
    fake.CASES = [*fake.CASES, "n=4 fwd"]  # has no row yet
    runner("short_fake", "--stale-rows", "--limit", "0")
    assert "left: short_fake --rows 'n=1 fwd+bwd' 'n=4 fwd'" in capsys.readouterr().out
    runner("short_fake", "--stale-rows", "--backends", "theirs")
    assert fake.seen == [("n=1 fwd+bwd", "theirs"), ("n=4 fwd", "theirs")]
    fake.seen.clear()
    fake.CASES = fake.CASES[:3]
    runner("short_fake", "--stale-rows", "--backends", "ours")
    assert "nothing of short_fake is stale" in capsys.readouterr().out
    assert not fake.seen
    assert len(rows(tmp_path)) == 7  # a part drops none


def test_stale_rows_need_the_history(runner, fake, capsys):
    runner("short_fake", "--commit", "0000000")
    with pytest.raises(SystemExit):
        runner("short_fake", "--stale-rows")
    assert "nothing can be said: this checkout has no commit 0000000" in " ".join(capsys.readouterr().err.split())


def test_the_older_rows_are_those_that_the_verdict_counts(load):
    stale = load("stale")
    for found in stale.verdicts():
        if not found.unknown:
            assert len(stale.older_rows(found.path)) == found.stale


def test_tables_have_processes_of_their_own(runner, fake, load, monkeypatch):
    """With the gate of an operation once, and the first exit code that is not 0."""
    module, started = load("run"), []
    monkeypatch.setattr(module, "start", lambda words: started.append(words) or 7 * (words[0] == "short_more"))
    words = ["short_fake", "short_more", "short_whole", "--commit", "0123abc", "--limit", "60", "--out", "there"]
    assert module.main(words) == 7
    common = ["--out", "there", "--repeat-ms", "40", "--limit"]
    assert [(given[0], given[1:6]) for given in started] == [(table, common) for table in words[:3]]
    assert all(0 < float(given[6]) <= 60 for given in started)
    assert [given[7:] for given in started] == [["--commit", "0123abc"], *[["--commit", "0123abc", "--no-gate"]] * 2]
    assert not fake.seen


@pytest.mark.parametrize(
    ("table", "row", "number"),
    [("auto_cpu", "B=2 H=8 Tq=64 Tk=64 D=64 causal", 4), ("dynamic_mask_cpu", "Tq=2048", 6)],
)
def test_tables_of_a_cpu_in_parts(tmp_path, table, row, number):
    """By the command itself, and then one implementation of it again."""
    command = [
        sys.executable,
        str(BENCHMARKS / "run.py"),
        table,
        "--rows",
        row,
        "--out",
        str(tmp_path),
        "--no-gate",
        "--repeat-ms",
        "1",
    ]
    subprocess.run(command, check=True, capture_output=True)
    path = tmp_path / f"{table}.csv"
    before = path.read_text().splitlines()
    assert len(before) == number + 1
    subprocess.run([*command, "--backends", "sdpa", "--commit", "0" * 7], check=True, capture_output=True)
    after = path.read_text().splitlines()
    changed = [line for line in after if line not in before]
    assert len(after) == len(before)
    assert len(changed) == 2
    assert all(",sdpa," in line and ",0000000," in line for line in changed)


def test_a_table_waits_for_the_calls_that_cpp_replays(runner, fake, load, monkeypatch):
    order = []
    monkeypatch.setattr(load("run"), "wait_for_native", lambda: order.append("wait"))
    monkeypatch.setattr(fake, "run", lambda *given: order.append("table"))
    runner("short_fake")
    assert order == ["wait", "table"]
