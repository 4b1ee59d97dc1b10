"""The queue of all learning runs: its plan, its order, going on after a cut or a kill, merging and packing."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import everything
import lra
import outcomes
import pieces
import scheduler
from merging import merge, spread
from packing import pack, unpack
from scheduler import Scheduler
from state import State
from units import PROGRAMS, Unit, units_of
from workers import Worker, run_unit

TRAIN = ("--quick", "--context", "16", "--batch", "2", "--steps", "4", "--every", "2", "--tested", "2", "--tune", "2")
QUIET = Console(quiet=True)
H100 = Path(__file__).parents[2] / "benchmarks" / "results" / "h100"


def mlm_unit(method: str, base: Unit | None = None) -> Unit:
    arguments = (*TRAIN, "--method", method, "--seed", "0")
    return Unit("mlm", pieces.stem(("tiny", method, 0)), "mlm", arguments, 1.0, 4, base, cut=True, quick=True)


def pictures_unit() -> Unit:
    """The quickest of all: it draws pictures."""
    arguments = ("--quick", "--task", "image", "--examples", "4", "--tested", "2", "--prepare")
    return Unit("prepare", "lra-image", "image", arguments, 1.0, quick=True)


def few() -> list[Unit]:
    dense = mlm_unit("dense")
    return [mlm_unit("1:2_tuned", dense), dense, mlm_unit("2:4_pruned", dense)]


class Here:
    """In place of a worker: this process."""

    def do(self, program, arguments, log):
        return run_unit(program, arguments, log)


class Failing:
    """In place of a worker: notes what it is asked for, and fails."""

    def __init__(self, said: str):
        self.said, self.calls = said, []

    def do(self, program, arguments, log):
        self.calls.append(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(self.said)
        return 1


def made(state: State, worker=None, **options) -> Scheduler:
    found = Scheduler(state, 1, 1, 0, QUIET, **options)
    found.serve(0, worker or Here())
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    state = State(tmp_path_factory.mktemp("state"), few())
    made(state)
    return state


def test_everything_is_planned():
    units = units_of()
    assert len({unit.folder for unit in units}) == len(units)
    counts = {p: sum(u.program == p for u in units) for p in ("needle", "mqar", "lra", "mlm", "language", "clock", "prepare")}
    assert counts == {"needle": 18, "mqar": 16, "lra": 63, "mlm": 30, "language": 72, "clock": 24, "prepare": 3}
    assert sum(u.seconds for u in units) / 60 < 115
    for unit in units:
        assert {unit.base, unit.needs} <= {None, *units}
    assert all(u.steps > 0 for u in units if u.program in ("needle", "mqar", "language"))


def test_a_reversed_run_begins_with_the_weights_that_were_tuned():
    bases = {unit.name: unit.base and unit.base.name for unit in units_of() if unit.program == "mlm"}
    for seed in range(3):
        for pattern in ("1of2", "2of4"):
            assert bases[f"10M-{pattern}_reversed-{seed}"] == f"10M-{pattern}_tuned-{seed}"
            assert bases[f"10M-{pattern}_tuned-{seed}"] == bases[f"10M-{pattern}_pruned-{seed}"] == f"10M-dense-{seed}"
            assert bases[f"10M-{pattern}_scratch-{seed}"] is None


def test_units_are_made_in_their_order(whole):
    assert all(whole.is_whole(unit) for unit in whole.units)
    logs = [whole.log(unit) for unit in whole.units]
    assert logs[1].stat().st_mtime <= min(logs[0].stat().st_mtime, logs[2].stat().st_mtime)
    # nobody begins with them any more
    whole.repair()
    assert not list(whole.root.rglob("*.pt"))


def test_what_is_whole_is_not_made_again(whole):
    before = [whole.rows(unit) for unit in whole.units]
    assert made(State(whole.root, few())).tried == set()
    assert [whole.rows(unit) for unit in whole.units] == before


def test_rows_are_merged(whole):
    (path,) = merge(whole)
    rows = pieces.read(path)
    assert path == whole.root / "results" / "mlm.csv"
    # in the order of the plan, and the columns of the program
    assert list(dict.fromkeys(row["method"] for row in rows)) == ["1:2_tuned", "dense", "2:4_pruned"]
    assert list(rows[0]) == list(whole.rows(whole.units[0])[0])
    whole.note(whole.units[1], slots=3)
    merge(whole)
    assert {row["step_ms"] for row in pieces.read(path) if row["method"] == "dense"} == {"nan"}


def merged_again(root: Path, folder: Path, units: list[Unit]) -> dict[str, bytes]:
    """The CSVs that `merge` makes of a state that has nothing but what a folder knows."""
    state = State(root, units)
    spread(state, folder)
    return {path.name: path.read_bytes() for path in merge(state)}


def changed(folder: Path, name: str, change) -> Path:
    """A folder with a CSV of the H100, whose rows were changed."""
    pieces.write_rows(folder / name, list(pieces.read(H100 / name)[0]), change(pieces.read(H100 / name)))
    return folder


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


@pytest.fixture(scope="module")
def plan():
    return units_of()


def test_merged_rows_are_spread_and_merged_again(plan, tmp_path):
    committed = {path.name: path.read_bytes() for p in PROGRAMS if (path := H100 / f"{p}.csv").is_file()}
    state = State(tmp_path, plan)
    known, left = spread(state, H100)
    assert not left
    assert {path.name: path.read_bytes() for path in merge(state)} == committed
    assert [unit for unit in plan if state.is_whole(unit)] == sorted(known, key=plan.index)
    assert {unit.program for unit in known} >= {"needle", "mqar", "mlm", "language", "clock"}
    # and once more
    spread(state, H100)
    assert {path.name: path.read_bytes() for path in merge(state)} == committed


@pytest.mark.parametrize("gone", [1, -1])  # the first unit has a gap, or the last one no end
@pytest.mark.parametrize("name", ["needle", "mqar", "mlm", "language"])
def test_units_of_which_a_row_is_missing_are_left_out(plan, tmp_path, name, gone):
    units = [unit for unit in plan if unit.program in (name, "clock")]
    folder = changed(tmp_path / "known", f"{name}.csv", lambda rows: [row for row in rows if row is not rows[gone]])
    known, left = spread(State(tmp_path / "one", units), folder)
    (unit,) = left
    assert unit not in known
    again = merged_again(tmp_path / "two", folder, units)[f"{name}.csv"].decode().splitlines()
    lines = (folder / f"{name}.csv").read_text().splitlines()
    assert again == [line for line in lines if line in set(again)]
    assert len(again) < len(lines)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("language", "steps", "2000"), ("language", "corpus", "other"), ("mlm", "masked", "0.4"), ("needle", "size", "10M"),
        ("mqar", "task", "copy"), ("mqar", "keep", "64"),
    ],
)  # fmt: skip
def test_rows_with_other_settings_are_left_out(plan, tmp_path, name, column, value):
    data = tmp_path / "corpus.json"
    data.write_text(json.dumps({"train": {"sha256": "d096dc2f00"}}))
    folder = changed(tmp_path / "known", f"{name}.csv", lambda rows: [rows[0] | {column: value}, *rows[1:]])
    state = State(tmp_path / "state", [unit for unit in plan if unit.program == name], tmp_path)
    known, left = spread(state, folder)
    assert left == [state.units[0]]
    assert known
    # rows of another corpus altogether
    data.write_text(json.dumps({"train": {"sha256": "0123456700"}}))
    known, left = spread(state, folder)
    assert bool(known) == (name == "mqar")


def test_runs_of_the_arena_are_spread(plan, tmp_path):
    units = [unit for unit in plan if unit.program == "lra" and unit.group == "image"][:7]
    rows = []
    for unit in units:
        said = outcomes.settings(unit, tmp_path)
        _, variant, seed = unit.name.split("-")
        row = dict.fromkeys((f.name for f in dataclasses.fields(lra.Row)), "0") | said
        row |= {"task": "image", "variant": variant.replace("of", ":"), "seed": seed, "step_ms": "nan"}
        every, end = outcomes.planned(unit)[1].every, int(said["steps"])
        rows += [row | {"step": str(step)} for step in range(every, end + 1, every)]
    pieces.write_rows(tmp_path / "known" / "lra.csv", list(rows[0]), rows)
    assert len(rows) == 4 * 20 + 3 * 2
    assert merged_again(tmp_path / "one", tmp_path / "known", units) == {"lra.csv": (tmp_path / "known" / "lra.csv").read_bytes()}
    # without one that begins with its weights Nystromformer is made again
    pieces.write_rows(tmp_path / "known" / "lra.csv", list(rows[0]), rows[:-2])
    state = State(tmp_path / "two", units)
    assert spread(state, tmp_path / "known") == (units[:-1], [])
    state.repair()
    assert names([unit for unit in units if not state.is_whole(unit)]) == ["image-nystrom-0", "image-nystrom_2of4_tuned-0"]


def test_times_that_differ_are_of_no_clock(plan, tmp_path):
    units = [unit for unit in plan if unit.program in ("language", "clock")]

    def other(rows):
        """The first run has times of its own, all runs of the second method none."""
        rows[0]["step_ms"] = "5.0"
        method = next(row["method"] for row in rows if row["method"] != rows[0]["method"])
        return [row | {"step_ms": "nan"} if (row["size"], row["method"]) == (rows[0]["size"], method) else row for row in rows]

    whole, _ = spread(State(tmp_path / "one", units), H100)
    folder = changed(tmp_path / "known", "language.csv", other)
    known, left = spread(State(tmp_path / "two", units), folder)
    assert not left
    assert names([unit for unit in whole if unit not in known]) == ["3M-dense-0", "3M-window-0"]
    assert merged_again(tmp_path / "two", folder, units) == {"language.csv": (folder / "language.csv").read_bytes()}


def test_a_base_that_is_known_is_made_again_where_others_need_it(whole, tmp_path):
    (path,) = merge(whole)
    pruned = "2:4_pruned"
    kept = [row for row in pieces.read(path) if row["method"] != pruned]
    pieces.write_rows(tmp_path / "known" / "mlm.csv", list(kept[0]), kept)
    state = State(tmp_path / "state", few())
    tuned, dense, _ = state.units
    assert spread(state, tmp_path / "known") == ([tuned, dense], [])
    assert made(state).tried == {dense, state.units[2]}
    assert all(state.is_whole(unit) for unit in state.units)
    # where all are known it is not made again
    pieces.write_rows(tmp_path / "known" / "mlm.csv", list(kept[0]), pieces.read(merge(state)[0]))
    state = State(tmp_path / "other", few())
    spread(state, tmp_path / "known")
    assert not made(state).tried


def test_a_base_that_is_made_again_may_be_cut(whole, tmp_path):
    """Between commands that are given what is known each time, before its first row too."""
    (path,) = merge(whole)
    kept = [row for row in pieces.read(path) if row["method"] == "dense"]
    pieces.write_rows(tmp_path / "known" / "mlm.csv", list(kept[0]), kept)
    state = State(tmp_path / "state", few())
    dense = state.units[1]
    spread(state, tmp_path / "known")
    state.repair()
    assert run_unit("mlm", state.command(dense, 1e-6, None), tmp_path / "log.txt") == 0
    rows = state.rows(dense)
    for here in (rows, []):
        pieces.write_rows(state.folder(dense) / "mlm.csv", list(kept[0]), here)
        state = State(state.root, few())
        assert spread(state, tmp_path / "known")[0] == [dense]
        state.repair()
        assert state.rows(dense) == here
        assert list((state.folder(dense) / "checkpoints").iterdir())


def test_what_is_known_has_not_failed(whole, tmp_path):
    (path,) = merge(whole)
    state = State(tmp_path, few())
    state.note(state.units[0], failures=2, slots=3, seconds=9.0)
    spread(state, path.parent)
    assert not state.about(state.units[0])
    assert merge(state)[0].read_bytes() == path.read_bytes()


def test_a_cut_unit_goes_on_and_packs(whole, tmp_path):
    state = State(tmp_path / "one", few())
    unit = state.units[1]
    # as a command whose minutes are over
    assert run_unit("mlm", state.command(unit, 1e-6, None), tmp_path / "log.txt") == 0
    assert not state.is_whole(unit)
    parts = pack(state, tmp_path / "packed.tgz", 100_000, 10**9)
    assert len(parts) > 1
    assert max(part.stat().st_size for part in parts) == 100_000
    unpack(tmp_path / "packed.tgz", tmp_path / "two")
    other = State(tmp_path / "two", few())
    assert [p.name for p in (other.folder(unit) / "checkpoints").iterdir()] == ["tiny-dense-0-2.pt"]
    made(other)
    untimed = [[{k: v for k, v in row.items() if k != "step_ms"} for row in s.rows(unit)] for s in (whole, other)]
    assert untimed[0] == untimed[1]
    # without room for checkpoints the rows travel alone
    (part,) = pack(other, tmp_path / "small.tgz", 10**9, limit=10_000)
    assert part == tmp_path / "small.tgz"


def test_a_base_whose_weights_are_gone_is_made_again(whole, tmp_path):
    units = few()
    state = State(tmp_path, units[1:2])
    made(state)
    weights = state.weights(units[1])
    assert weights.is_file()
    weights.unlink()
    state = State(tmp_path, units)
    state.repair()
    assert not state.is_whole(units[1])
    made(state)
    assert all(state.is_whole(unit) for unit in units)


def test_a_failed_unit_is_tried_once_more_without_graphs(tmp_path):
    worker = Failing("RuntimeError: operation not permitted when stream is capturing\n")
    unit = mlm_unit("dense")
    for _ in range(2):
        made(State(tmp_path, [unit]), worker)
    assert [arguments[-2:] == ["--plain", "graph"] for arguments in worker.calls] == [False, True]
    made(State(tmp_path, [unit]), worker, again=True)
    assert len(worker.calls) == 3


def test_examples_that_cannot_be_drawn_are_not_tried_for_ever(tmp_path):
    worker, drawn = Failing("no tokenizer.json"), pictures_unit()
    made(State(tmp_path, [drawn, Unit("lra", "image-dense-0", "image", (), 1.0, needs=drawn)]), worker)
    assert len(worker.calls) == 2


def test_after_three_failures_all_are_made_without(tmp_path):
    worker = Failing("RuntimeError: [/] is no markup")
    made(State(tmp_path, [mlm_unit(method) for method in ("dense", "1:2_scratch", "2:4_scratch")]), worker)
    plain = ["--plain" in arguments for arguments in worker.calls]
    assert plain[:2] == [False, True]
    assert plain[3:] == [True] * 3


@pytest.mark.parametrize(
    ("said", "cause"),
    [("CUDAGraph, called from torch/_dynamo", "graph"), ('File "torch/_inductor/x.py"', "compile"), ("killed", "all")],
)
def test_a_log_says_what_to_leave_out(tmp_path, said, cause):
    (tmp_path / "log.txt").write_text(said)
    assert outcomes.cause_of(tmp_path / "log.txt") == cause


def test_the_last_command_begins_nothing_long(tmp_path):
    unit = mlm_unit("dense")
    queue = Scheduler(State(tmp_path, [unit]), 1, 3, 1.0, QUIET, last=True)
    now = queue.deadline - scheduler.MARGIN
    assert queue._is_in_time(unit, now - 4, 1.0)
    assert not queue._is_in_time(unit, now - 4, 2.0)  # three slots, and twice as slow as predicted
    queue.last = False
    assert queue._is_in_time(unit, now - 1, 2.0)
    assert not queue._is_in_time(unit, now + 1, 1.0)


def test_a_dense_run_at_chance_puts_the_others_last(tmp_path, capsys):
    units = [
        Unit("mlm", n, g, (), s, probe=p)
        for n, g, s, p in (("a", "mlm", 9.0, True), ("b", "mlm", 9.0, False), ("c", "other", 1.0, False))
    ]
    state = State(tmp_path, units)
    table = state.folder(units[0]) / "mlm.csv"
    table.parent.mkdir(parents=True)
    table.write_text("step,steps,perplexity\n4,4,900\n")
    queue = Scheduler(state, 1, 1, 0, Console())
    assert "has not learned it" in capsys.readouterr().out
    assert sorted(units[1:], key=queue._order) == [units[2], units[1]]
    table.write_text("step,steps,perplexity\n4,4,90\n")
    assert Scheduler(state, 1, 1, 0, QUIET).hopeless == set()


def test_what_runs_alone_waits(tmp_path):
    beside, alone = mlm_unit("dense"), Unit("clock", "c", "g", (), 1.0, alone=True)
    queue = Scheduler(State(tmp_path, [alone, beside]), 2, 2, 0, QUIET)
    assert queue.take(0) is beside
    queue.deadline = time.monotonic() - 1
    assert queue.take(0) is None
    queue.deadline = float("inf")
    assert queue.take(1) is alone


def test_what_is_killed_at_the_end_has_not_failed(tmp_path, monkeypatch):
    class Endless:
        def __init__(self):
            self.ended = threading.Event()

        def do(self, program, arguments, log):
            self.ended.wait()
            return -1

        def end(self):
            self.ended.set()

    monkeypatch.setattr(scheduler, "MARGIN", 0)
    state = State(tmp_path, [mlm_unit("dense"), mlm_unit("1:2_scratch"), mlm_unit("2:4_scratch")])
    queue = Scheduler(state, 1, 2, 0.2 / 60, QUIET)
    everything.make_all(queue, [(0, Endless()), (0, Endless())])
    assert len(queue.tried) == 2
    assert not queue.running
    assert [state.about(unit).get("failures") for unit in state.units] == [None] * 3


def test_a_worker_makes_units_until_one_fails(tmp_path):
    state = State(tmp_path, [pictures_unit()])
    (unit,), log = state.units, tmp_path / "log.txt"
    worker = Worker(None, 1, tmp_path / "errors.txt")
    assert worker.do("prepare", state.command(unit, 0, None), log) == 0
    assert state.is_whole(unit)
    process = worker.process
    assert worker.do("prepare", ["--nothing"], log) == 2
    assert worker.process is process
    assert "unrecognized arguments" in log.read_text()
    assert process.wait(20) == 1


def test_a_worker_may_be_killed(tmp_path, monkeypatch):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    worker = Worker(None, 1, tmp_path / "errors.txt")
    monkeypatch.setattr(worker, "_begun", lambda: subprocess.Popen(["true"], **pipes))
    assert worker.do("prepare", [], tmp_path / "log.txt") == -1
    worker.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    worker.end()
    assert worker.process.returncode == -signal.SIGKILL


def test_says_what_is_wrong(tmp_path, capsys):
    assert everything.main(["--state", str(tmp_path), "--data", "/nowhere"]) == 2
    assert "corpus.py --fetch" in capsys.readouterr().err
    assert everything.main(["--state", str(tmp_path), "--unpack", str(tmp_path / "none")]) == 2
    assert "none.00" in capsys.readouterr().err


def test_says_what_is_wrong_with_what_is_known(plan, tmp_path, capsys):
    def said(folder: Path) -> str:
        assert everything.main(["--list", "--state", str(tmp_path / "state"), "--known", str(folder)]) == 2
        return capsys.readouterr().err

    assert f"{tmp_path / 'none'} is no folder" in said(tmp_path / "none")
    assert f"{tmp_path} holds none of needle.csv, mqar.csv" in said(tmp_path)
    other = changed(tmp_path / "other", "language.csv", lambda rows: [*rows, rows[0] | {"seed": "7"}])
    lines = len(pieces.read(H100 / "language.csv")) + 2
    assert f"line {lines} of {other / 'language.csv'} is of a run that is not in the plan: size 3M" in said(other)
    short = changed(tmp_path / "short", "mlm.csv", lambda rows: rows)
    text = (short / "mlm.csv").read_text().splitlines()
    (short / "mlm.csv").write_text("\n".join([*text[:2], "dense,10M", *text[2:]]) + "\n")
    assert f"line 3 of {short / 'mlm.csv'} has not the columns method, size" in said(short)
    assert not list((tmp_path / "state").rglob("*.csv"))


def test_what_is_known_is_listed(tmp_path, capsys):
    state = tmp_path / "state"
    assert everything.main(["--list", "--only", "mlm", "--state", str(state), "--known", str(H100)]) == 0
    out = capsys.readouterr().out
    assert f"24 units are whole in {H100}" in out
    # the runs that came later, and those whose weights they need, which no CSV holds
    left = {line.split()[2].rsplit("-", 1)[0] for line in out.splitlines() if " left " in line and "mlm 10M" in line}
    assert left == {"10M-dense", *(f"10M-{p}_{way}" for p in ("1of2", "2of4") for way in ("tuned", "reversed"))}
    table = everything.report(Scheduler(State(state, units_of(programs=("mlm",))), 1, 1, 0, QUIET))
    cells = {column.header: list(column.cells) for column in table.columns}
    # their seconds are not known
    assert (cells["whole"], cells["over predicted"], cells["GPU min left"]) == (["15 of 30"], ["-"], ["4.5"])


def test_the_plan_is_listed(tmp_path, capsys):
    assert everything.main(["--quick", "--list", "--only", "mlm", "--state", str(tmp_path)]) == 0
    assert "GPU minutes predicted" in capsys.readouterr().out
