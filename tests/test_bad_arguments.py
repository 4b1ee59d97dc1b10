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
# of the others a number is an honest wish, however long it takes
_LASTING = {
    ("soak", "--count"),
    ("soak", "--minutes"),
    ("soak", "--processes"),
    ("time", "--rounds"),
    ("time", "--plot"),
    ("soak", "--log"),
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
            if time.perf_counter() - began > 5:
                raw.append(f"{argument}={kind}: took {time.perf_counter() - began:.1f} s")
    assert not raw, f"{len(raw)} raw errors:\n" + "\n".join(raw)


COMMANDS = typer.main.get_command(app)


def options_of(command):
    made = COMMANDS.commands[command]
    return [max(option.opts, key=len) for option in made.params if option.param_type_name == "option" and not option.is_flag]


def raw_errors(command, options):
    raw = []
    for option in options:
        for word in WORDS:
            done = CliRunner().invoke(COMMANDS, [command, *QUICK[command], option, word])
            if not isinstance(done.exception, (type(None), SystemExit, saccade.SaccadeError)):
                raw.append(f"{command} {option} {word!r}: {type(done.exception).__name__}: {str(done.exception)[:150]}")
    return raw


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", QUICK)
def test_bad_options(command):
    raw = raw_errors(command, [option for option in options_of(command) if (command, option) not in _LASTING])
    assert not raw, f"{len(raw)} raw errors:\n" + "\n".join(raw)


@pytest.mark.parametrize(
    "words", [["--processes", "99999999999999999999"], ["--processes", "0"], ["--minutes", "nan"], ["--count", "-1"]]
)
def test_numbers_that_a_soak_cannot_have(words):
    done = CliRunner().invoke(COMMANDS, ["soak", *QUICK["soak"], *words])
    assert isinstance(done.exception, saccade.SaccadeError), done.exception
