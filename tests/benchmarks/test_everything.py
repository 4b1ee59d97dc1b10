"""The queue of all learning runs: its plan, its order, going on after a cut or a kill, merging and packing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "learning"))
import captured
import everything
import pieces
from everything import Queue, State, Unit

TRAIN = ("--quick", "--context", "16", "--batch", "2", "--steps", "4", "--every", "2", "--tested", "2")


def mlm_unit(method: str, base: str = "") -> Unit:
    name = pieces.stem(("tiny", method, 0))
    return Unit(
        "mlm",
        name,
        "mlm",
        (*TRAIN, "--tune", "2", "--method", method, "--seed", "0"),
        1.0,
        ("tiny", method, "0"),
        4,
        base,
        cut=True,
        quick=True,
    )


def few() -> list[Unit]:
    return [mlm_unit("1:2_tuned", "tiny-dense-0"), mlm_unit("dense"), mlm_unit("2:4_pruned", "tiny-dense-0")]


def made(state: State, minutes: float = 0, **options) -> Queue:
    queue = Queue(state, 1, 1, minutes, Console(quiet=True), **options)
    everything.make_all(queue, lambda gpu, slot: everything.Here())
    return queue


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    state = State(tmp_path_factory.mktemp("state"), few())
    made(state)
    return state


def test_everything_is_planned():
    units = everything.units_of()
    assert len({unit.folder for unit in units}) == len(units)
    counts = {p: sum(u.program == p for u in units) for p in ("needle", "mqar", "lra", "mlm", "language", "clock", "prepare")}
    assert counts == {"needle": 18, "mqar": 16, "lra": 63, "mlm": 24, "language": 72, "clock": 24, "prepare": 3}
    assert sum(u.seconds for u in units) / 60 < 70
    names = {u.name for u in units}
    assert {u.base for u in units if u.base} <= names
    assert all(u.steps > 0 for u in units if u.program in ("needle", "mqar", "language"))


def test_units_are_made_in_their_order(whole):
    assert all(whole.is_whole(unit) for unit in whole.units)
    logs = [whole.root / unit.folder / "log.txt" for unit in whole.units]
    assert logs[1].stat().st_mtime <= min(logs[0].stat().st_mtime, logs[2].stat().st_mtime)
    # nobody begins with them any more
    whole.repair()
    assert not list(whole.root.rglob("*.pt"))


def test_what_is_whole_is_not_made_again(whole):
    before = [whole.table(unit).read_bytes() for unit in whole.units]
    queue = made(State(whole.root, few()))
    assert queue.tried == set()
    assert [whole.table(unit).read_bytes() for unit in whole.units] == before


def test_rows_are_merged(whole, tmp_path):
    (path,) = whole.merge()
    rows = pieces.read(path)
    assert path == whole.root / "results" / "mlm.csv"
    # in the order of the plan, and the columns of the program
    assert list(dict.fromkeys(row["method"] for row in rows)) == ["1:2_tuned", "dense", "2:4_pruned"]
    assert list(rows[0]) == list(pieces.read(whole.table(whole.units[0]))[0])
    whole.note(whole.units[1], slots=3)
    whole.merge()
    assert {row["step_ms"] for row in pieces.read(path) if row["method"] == "dense"} == {"nan"}


def test_a_cut_unit_goes_on_and_packs(whole, tmp_path):
    state = State(tmp_path / "one", few())
    unit = state.units[1]
    # as a command whose minutes are over
    assert everything.run_unit("mlm", state.command(unit, 1e-6, None), tmp_path / "log.txt") == 0
    assert not state.is_whole(unit)
    parts = state.pack(tmp_path / "packed.tgz", 100_000, 10**9)
    assert len(parts) > 1
    assert max(part.stat().st_size for part in parts) == 100_000
    everything.unpack(tmp_path / "packed.tgz", tmp_path / "two")
    other = State(tmp_path / "two", few())
    assert [p.name for p in (other.root / unit.folder / "checkpoints").iterdir()] == ["tiny-dense-0-2.pt"]
    made(other)
    untimed = [[{k: v for k, v in row.items() if k != "step_ms"} for row in pieces.read(s.table(unit))] for s in (whole, other)]
    assert untimed[0] == untimed[1]
    # without room for checkpoints the rows travel alone
    (part,) = other.pack(tmp_path / "small.tgz", 10**9, limit=10_000)
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


def test_a_failed_unit_is_tried_once_more_without_graphs(tmp_path, monkeypatch):
    calls = []

    def failing(program, arguments, log):
        calls.append(arguments)
        log.write_text("RuntimeError: operation not permitted when stream is capturing\n")
        return 1

    monkeypatch.setattr(everything, "run_unit", failing)
    unit = mlm_unit("dense")
    for _ in range(2):
        made(State(tmp_path, [unit]))
    assert [arguments[-2:] == ["--plain", "graph"] for arguments in calls] == [False, True]
    made(State(tmp_path, [unit]), again=True)
    assert len(calls) == 3


def test_after_three_failures_all_are_made_without(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(everything, "run_unit", lambda program, arguments, log: calls.append("--plain" in arguments) or 1)
    made(State(tmp_path, [mlm_unit(method) for method in ("dense", "1:2_scratch", "2:4_scratch")]))
    assert calls[:2] == [False, True]
    assert calls[3:] == [True] * 3


def test_the_last_command_begins_nothing_long(tmp_path):
    unit = mlm_unit("dense")
    queue = Queue(State(tmp_path, [unit]), 1, 3, 1.0, Console(quiet=True), last=True)
    now = queue.deadline - everything.MARGIN
    assert queue._in_time(unit, now - 4, 1.0)
    assert not queue._in_time(unit, now - 4, 2.0)  # three slots, and twice as slow as predicted
    queue.last = False
    assert queue._in_time(unit, now - 1, 2.0)
    assert not queue._in_time(unit, now + 1, 1.0)


def test_a_dense_run_at_chance_puts_the_others_last(tmp_path, capsys):
    units = [
        Unit("mlm", n, g, (), s, probe=p)
        for n, g, s, p in (("a", "mlm", 9.0, True), ("b", "mlm", 9.0, False), ("c", "other", 1.0, False))
    ]
    state = State(tmp_path, units)
    table = state.table(units[0])
    table.parent.mkdir(parents=True)
    table.write_text("step,steps,perplexity\n4,4,900\n")
    queue = Queue(state, 1, 1, 0, Console())
    assert "has not learned it" in capsys.readouterr().out
    assert sorted(units[1:], key=queue._order) == [units[2], units[1]]
    table.write_text("step,steps,perplexity\n4,4,90\n")
    assert Queue(state, 1, 1, 0, Console()).hopeless == set()


def test_what_runs_alone_waits(tmp_path):
    beside, alone = mlm_unit("dense"), Unit("clock", "c", "g", (), 1.0, alone=True)
    queue = Queue(State(tmp_path, [alone, beside]), 2, 2, 0, Console(quiet=True))
    assert queue.take(0) is beside
    queue.deadline = time.monotonic() - 1
    assert queue.take(0) is None
    queue.deadline = float("inf")
    assert queue.take(1) is alone


def test_a_worker_makes_units_and_may_be_killed(tmp_path):
    state = State(tmp_path, [mlm_unit("dense")])
    worker = everything.Worker(None, 1, tmp_path / "errors.txt")
    unit = state.units[0]
    log = tmp_path / "log.txt"
    assert worker.do(unit, state.command(unit, 0, None), log) == 0
    assert state.is_whole(unit)
    assert "perplexity" in log.read_text()
    first = worker.process
    assert worker.do(unit, ["--nothing"], log) == 2
    assert "unrecognized arguments" in log.read_text()
    first.wait(20)  # after an error it ends
    worker.process = None
    worker.end()


def test_says_what_is_wrong(tmp_path, capsys):
    assert everything.main(["--state", str(tmp_path), "--data", "/nowhere"]) == 2
    assert "corpus.py --fetch" in capsys.readouterr().err
    assert everything.main(["--state", str(tmp_path), "--unpack", str(tmp_path / "none")]) == 2
    assert "none.00" in capsys.readouterr().err


def test_the_plan_is_listed(tmp_path, capsys):
    assert everything.main(["--quick", "--list", "--only", "mlm", "--state", str(tmp_path)]) == 0
    assert "GPU minutes predicted" in capsys.readouterr().out


@pytest.mark.parametrize("function", [captured.normed, captured.added_normed, captured.turned, captured.gated, captured.loss_of])
def test_compiled_parts_are_functions_of_their_own(function):
    assert function.__wrapped__.__doc__


def test_a_step_on_a_cpu_is_the_function():
    step = captured.Step(lambda x: x + 1, "cpu")
    assert not step.graphed
    assert step(torch.ones(())).item() == 2


@pytest.mark.gpu
def test_a_captured_step_trains_as_an_eager_one():
    def trained(eager: int) -> list[float]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8, device="cuda")
        optimizer = captured.adam(torch.optim.AdamW, layer.parameters(), 1e-2, "cuda")

        def update(x: torch.Tensor) -> torch.Tensor:
            loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, found = captured.Step(update, "cuda"), []
        step.graphed = not eager
        for number in range(12):
            captured.set_rate(optimizer, 1e-2 / (1 + number))
            x = torch.randn(6 if number < 7 else 3, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
            found.append(step(x).item())
        return found

    torch.testing.assert_close(trained(0), trained(1))
