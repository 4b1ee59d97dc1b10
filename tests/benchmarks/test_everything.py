"""The queue of all learning runs: its plan, its order, going on after a cut or a kill, merging and packing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import everything
import outcomes
import pieces
import scheduler
from merging import merge
from packing import pack, unpack
from scheduler import Scheduler
from state import State
from units import Unit, units_of
from workers import Worker, run_unit

TRAIN = ("--quick", "--context", "16", "--batch", "2", "--steps", "4", "--every", "2", "--tested", "2", "--tune", "2")
QUIET = Console(quiet=True)


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
    assert counts == {"needle": 18, "mqar": 16, "lra": 63, "mlm": 24, "language": 72, "clock": 24, "prepare": 3}
    assert sum(u.seconds for u in units) / 60 < 70
    for unit in units:
        assert {unit.base, unit.needs} <= {None, *units}
    assert all(u.steps > 0 for u in units if u.program in ("needle", "mqar", "language"))


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


def test_the_plan_is_listed(tmp_path, capsys):
    assert everything.main(["--quick", "--list", "--only", "mlm", "--state", str(tmp_path)]) == 0
    assert "GPU minutes predicted" in capsys.readouterr().out
