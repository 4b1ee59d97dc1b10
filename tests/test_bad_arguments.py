"""Whatever is given in the place of any argument ends in a result or in one of our errors, never in a raw one or a hang."""

from __future__ import annotations

import time

import bad_arguments
import pytest
import torch
import typer
from click.testing import CliRunner

import saccade
from saccade.cli.app import app
from tools.soak.__main__ import app as soak

CALLS = bad_arguments.calls()
# what is typed in the place of a value of any option
WORDS = (
    "",
    "bad",
    "-1",
    "0",
    "3",
    "cpu:3",
    "cuda:99",
    "99999999999999999999",
    "nan",
    "inf",
    "1e400",
    "0.5",
    "1x",
    "x",
    "1x1x99999999999999999999",
)
# commands with options that make them quick
QUICK = {
    "explain": [],
    "time": ["--batch", "1", "--heads", "1", "--tq", "4", "--dim", "8", "--rounds", "1", "--device", "cpu"],
    "verify": ["--op", "attention", "--backend", "reference", "--case", "no such case", "--device", "cpu"],
    "soak": ["--count", "1", "--op", "attention", "--backend", "reference", "--device", "cpu"],
}
# (command, option) whose good values start something long, or write into the working folder: only these words are typed
BAD_ALONE = {
    ("soak", "--count"): ("", "bad", "-1", "0", "0.5", "nan", "1e400", "1x"),
    ("soak", "--minutes"): ("", "bad", "-1", "0", "nan", "inf", "1e400", "1x"),
    ("soak", "--processes"): ("", "bad", "-1", "0", "0.5", "99999999999999999999", "nan", "1x"),
    ("soak", "--log"): ("", "/", ".", "/dev/null/log.csv", "/no/such/folder/log.csv"),
    ("time", "--rounds"): ("", "bad", "-1", "0", "0.5", "nan", "1x"),
    ("time", "--plot"): ("", "bad", ".png", "/", "/dev/null/plot.png", "/no/such/folder/plot.png", "plot.txt"),
    ("demo", "--out"): ("/dev/null", "/dev/null/out", "/proc/out", "x" * 300),
}


@pytest.mark.parametrize("name", CALLS)
def test_good_arguments_are_taken(name):
    function, good = CALLS[name]
    if name in ("timm.patch", "cls_only"):
        return  # need models of other libraries
    function(**good)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments(name):
    function, _ = CALLS[name]
    raw = []
    torch.manual_seed(0)
    for argument in CALLS[name][1]:
        for kind, value in bad_arguments.bad_values().items():
            good = dict(CALLS[name][1])
            began = time.perf_counter()
            try:
                function(**good | {argument: value})
            except saccade.SaccadeError:
                pass
            except Exception as error:  # noqa: BLE001  # any other is what this test looks for
                raw.append(f"{argument}={kind}: {type(error).__name__}: {str(error)[:150]}")
            if time.perf_counter() - began > 30:  # what hangs takes hours; a busy machine takes seconds
                raw.append(f"{argument}={kind}: took {time.perf_counter() - began:.1f} s")
    assert not raw, f"{len(raw)} raw errors:\n" + "\n".join(raw)


COMMANDS = typer.main.get_command(app)
COMMANDS.add_command(typer.main.get_command(soak), "soak")


def options_of(command):
    made = COMMANDS.commands[command]
    return [max(option.opts, key=len) for option in made.params if option.param_type_name == "option" and not option.is_flag]


def outcome(*words):
    """The result with which a command ended; and a sentence that says what was raw in it, else None."""
    done = CliRunner().invoke(COMMANDS, words)
    fine = isinstance(done.exception, (type(None), SystemExit, saccade.SaccadeError))
    return done, None if fine else f"{' '.join(words)!r}: {type(done.exception).__name__}: {str(done.exception)[:150]}"


def raw_errors(command, options):
    found = [outcome(command, *QUICK[command], option, word)[1] for option in options for word in WORDS]
    return [raw for raw in found if raw]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", QUICK)
def test_bad_options(command):
    raw = raw_errors(command, [option for option in options_of(command) if (command, option) not in BAD_ALONE])
    assert not raw, f"{len(raw)} raw errors:\n" + "\n".join(raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("command", "option"), BAD_ALONE)
def test_bad_values_of_what_lasts_are_refused(command, option, monkeypatch, tmp_path):
    for started in ("tools.soak.run._soak", "saccade.cli.time._inputs", "saccade.cli.demo.interpreter.sentences"):
        monkeypatch.setattr(started, lambda *given: pytest.fail(f"began with {word!r}"))
    monkeypatch.chdir(tmp_path)
    for word in BAD_ALONE[command, option]:
        done, raw = outcome(command, *QUICK.get(command, []), option, word)
        assert raw is None
        assert done.exit_code, f"{option} {word!r} was taken"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", ["bench bad", "bench -1", "bench ../run", "bench /", "bench _common", "bench --bad", "bench a b"]
)
def test_a_table_that_there_is_not(words, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *given, **options: pytest.fail(f"ran {given}"))
    done, raw = outcome(*words.split())
    assert raw is None
    assert done.exit_code


@pytest.mark.parametrize("command", ["info", "cache", "demo", "bench"])
@pytest.mark.parametrize("more", [["--bad"], ["--json=3"], ["--clear=x"], ["--quick=2"], ["a", "b"]], ids=" ".join)
def test_commands_refuse_what_they_do_not_know(command, more, monkeypatch):
    monkeypatch.setattr("saccade.cli.demo.run", lambda *given: pytest.fail("began"))
    monkeypatch.setattr("saccade.cli.cache.run", lambda *given: pytest.fail("began"))
    done, raw = outcome(command, *more)
    assert raw is None
    assert done.exit_code
