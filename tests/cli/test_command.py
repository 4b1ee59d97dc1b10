"""The entry of the command line: what it loads, errors, and shell completion."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade import __version__

SRC = Path(saccade.__file__).parent.parent
ENTRY = """
import os
import sys
sys.argv = ["saccade", *sys.argv[1:]]
import saccade_command
try:
    saccade_command.main()
finally:
    print("policy:", repr(os.environ.get("OMP_WAIT_POLICY", "")), file=sys.stderr)
    print("loaded:", sorted({name.split(".")[0] for name in sys.modules} & {"torch", "saccade", "triton", "numpy"}), file=sys.stderr)
"""


def run(*words, **variables):
    environment = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "160", **variables}
    words = [sys.executable, "-c", ENTRY, *words]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("words", [("--help",), ("time", "--help"), ("explain", "--help"), ()], ids=" ".join)
def test_help_loads_no_torch(words):
    done = run(*words)
    assert "Usage:" in done.stdout + done.stderr
    assert "loaded: []" in done.stderr


def test_a_command_runs_and_an_error_is_one_sentence():
    assert run("--version").stdout == f"{__version__}\n"
    done = run("explain", "--heads", "8", "--hkv", "3", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("saccade: 8 query heads are no multiple of 3 key heads")


@pytest.mark.parametrize(
    ("command", "given", "policy"), [("demo", "", "PASSIVE"), ("verify", "ACTIVE", "ACTIVE"), ("time", "", "")]
)
def test_threads_of_what_is_not_timed_do_not_spin(command, given, policy):
    """The OpenMP runtime reads the variable when torch is loaded, so the command sets it before."""
    done = run(command, "--help", OMP_WAIT_POLICY=given)
    assert "loaded: []" in done.stderr
    assert f"policy: {policy!r}" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell):
    words = {
        "COMP_WORDS": "saccade e",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "saccade e",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = run(_SACCADE_COMPLETE=f"complete_{shell}", **words)
    assert "explain" in done.stdout
    assert "loaded: []" in done.stderr


def test_without_the_package_it_says_so(monkeypatch):
    import saccade_command

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="is not installed for this Python"):
        saccade_command.main()
