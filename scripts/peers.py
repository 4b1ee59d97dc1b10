"""Runs the test suites of other projects twice, as they are and with functions of this package in place of theirs, and shows both counts.

    python scripts/peers.py                                        # every suite that is there, from ../peers/<name>
    python scripts/peers.py --only pytorch --peers ~/sources -k causal

Nothing is fetched: a user clones a project beside this one, at the version that is installed, and what its tests import has to be installed. A
suite that is not there gets a sentence. The exit code is 1 if a test fails with our functions that does not fail without them, or if nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COLLECTING = " (collecting)"  # after the name of a file that cannot be collected, as `peers_plugin` writes it
_SHOWN = 20  # names of tests that are worse, for each suite


class Suite(NamedTuple):
    """Tests of another project. source: where its code is from. adapter: a name in `peers_plugin.ADAPTERS`. tests: patterns, from `within` on.
    imports: folders that its tests import from."""

    name: str
    source: str
    adapter: str
    tests: tuple[str, ...]
    within: str = "."
    imports: tuple[str, ...] = (".",)
    options: tuple[str, ...] = ()


SUITES = (
    Suite("flash-attention", "Dao-AILab/flash-attention", "flash_attn", ("tests/test_flash_attn.py",)),
    # its folder `torch` is not compiled, so that tests import the one that is installed
    Suite("pytorch", "pytorch/pytorch", "sdpa", ("test_transformers.py", "test_nestedtensor.py"), within="test", imports=()),
    Suite("xformers", "facebookresearch/xformers", "xformers", ("tests/test_mem_eff_attention.py",)),
    Suite("pytorch-image-models", "huggingface/pytorch-image-models", "sdpa", ("tests/test_layers*.py",)),
    Suite(
        "transformers", "huggingface/transformers", "transformers", ("tests/models/*/test_modeling_*.py",), imports=("src", "."),
        options=("-k", "sdpa"),
    ),
)  # fmt: skip


class Run(NamedTuple):
    """The outcome of each test by its name: "passed", "failed", "skipped" or "refused". ended: how pytest ended, where it did not come to its end."""

    outcomes: dict[str, str]
    ended: str = ""

    def count(self, outcome: str) -> int:
        """How many tests had that outcome."""
        return sum(found == outcome for found in self.outcomes.values())


def missing(suite: Suite, peers: Path) -> str:
    """A sentence on a suite that cannot run; an empty string if it can."""
    folder = peers / suite.name
    if not folder.is_dir():
        return f"{suite.name}: there is no folder {folder}; clone {suite.source} there"
    if not _files(suite, peers):
        return (
            f"{suite.name}: {folder / suite.within} has none of {', '.join(suite.tests)}; another version of {suite.source} may"
        )
    return ""


def _files(suite: Suite, peers: Path) -> list[str]:
    within = peers / suite.name / suite.within
    return sorted(str(path.relative_to(within)) for pattern in suite.tests for path in within.glob(pattern))


def run(
    suite: Suite, peers: Path, ours: bool, options: Iterable[str], minutes: float, names: Collection[str] | None = None
) -> Run:
    """Run a suite in a process of its own, with or without our functions; of its tests only `names`. The output of a test goes to stderr."""
    folder = (peers / suite.name).resolve()
    places = [ROOT / "scripts", ROOT / "src", *(folder / place for place in suite.imports), os.environ.get("PYTHONPATH")]
    with tempfile.TemporaryDirectory() as out:
        log = Path(out) / "outcomes.jsonl"
        adapter, files = suite.adapter if ours else "none", _files(suite, peers)
        if names is not None:
            options = [*options, f"--peers-names={_written(names, Path(out) / 'names.json')}"]
            files = [file for file in files if any(_file(name).endswith(file) for name in names)]
        # a file that cannot be collected is one failure, and the tests of other files run all the same
        words = [
            "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "peers_plugin", "-p", "no:cacheprovider", f"--peers-log={log}",
            "--continue-on-collection-errors", f"--peers-adapter={adapter}", *suite.options, *options, *files,
        ]  # fmt: skip
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(place) for place in places if place),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            code = subprocess.run(
                [sys.executable, *words], cwd=folder / suite.within, env=env, stdout=sys.stderr, timeout=60 * minutes
            ).returncode
        except subprocess.TimeoutExpired:
            return Run(read(log), f"was ended after {minutes:g} minutes")
        # 0 and 1: all tests ran; 5: none was collected; 2 to 4: the log tells of it too
        return Run(
            read(log), "" if code in (0, 1, 2, 3, 4, 5) else f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        )


def _written(names: Collection[str], path: Path) -> Path:
    path.write_text(json.dumps(sorted(names)), encoding="utf-8")
    return path


def _file(name: str) -> str:
    """The file of a test, or of a failure to collect it."""
    return name.partition("::")[0].removesuffix(COLLECTING)


def read(log: Path) -> dict[str, str]:
    """The outcome of each test that a log tells of: the worst of its phases."""
    worst = ("passed", "skipped", "refused", "failed")
    outcomes: dict[str, str] = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        name, outcome = json.loads(line)
        outcomes[name] = max(outcome, outcomes.get(name, outcome), key=worst.index)
    return outcomes


def worse(without: Run, ours: Run) -> list[str]:
    """The tests that fail with our functions and not without them."""
    return [name for name, outcome in ours.outcomes.items() if outcome == "failed" and without.outcomes.get(name) != "failed"]


def _both(suite: Suite, peers: Path, which: str, options: list[str], minutes: float) -> tuple[Run, Run]:
    """A suite without us and with us. which: the tests that run without us, "all", "failed" or "none"."""
    if which == "all":
        without = run(suite, peers, False, options, minutes)
        return without, run(suite, peers, True, options, minutes)
    ours = run(suite, peers, True, options, minutes)
    failed = [name for name, outcome in ours.outcomes.items() if outcome == "failed"]
    return run(suite, peers, False, options, minutes, failed) if failed and which == "failed" else Run({}), ours


def table(runs: dict[str, tuple[Run, Run]]) -> list[str]:
    """Lines of a table: the counts of each suite without us and with us."""
    heads = ("suite", "without: passed", "failed", "skipped", "with: passed", "failed", "skipped", "refused", "worse")
    rows = [heads]
    for name, (without, ours) in runs.items():
        counts = [without.count(o) for o in ("passed", "failed", "skipped")]
        counts += [ours.count(o) for o in ("passed", "failed", "skipped", "refused")]
        rows.append((name, *map(str, counts), str(len(worse(without, ours)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def main(words: list[str] | None = None, suites: tuple[Suite, ...] = SUITES) -> int:
    """Run what is there and print the table; 1 if a test is worse with us, a run did not end, or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [suite.name for suite in suites]
    parser.add_argument(
        "--peers", type=Path, default=ROOT.parent / "peers", help="folder of the other projects; ../peers by default"
    )
    parser.add_argument("--only", action="append", choices=names, help="only this suite; may be repeated")
    parser.add_argument("-k", help="only tests of that expression, as pytest takes it")
    parser.add_argument("--minutes", type=float, default=120.0, help="the most that one run of a suite may take; 120 by default")
    parser.add_argument("--processes", type=int, default=1, help="how many tests run at a time, by pytest-xdist; 1 by default")
    parser.add_argument("--every", type=int, default=1, help="about one test of so many, the same ones each time; all by default")
    parser.add_argument(
        "--without", choices=("all", "failed", "none"), default="all",
        help="the tests that run without us: all, those that fail with us, or none, where the suite's own package is not compiled",
    )  # fmt: skip
    given = parser.parse_args(words)
    options = [] if given.k is None else ["-k", given.k]
    options += ["-n", str(given.processes)] if given.processes > 1 else []
    options += [f"--peers-every={given.every}"] if given.every > 1 else []
    runs: dict[str, tuple[Run, Run]] = {}
    sentences = []
    for suite in (s for s in suites if s.name in (given.only or names)):
        if absent := missing(suite, given.peers):
            sentences.append(absent)
            continue
        without, ours = _both(suite, given.peers, given.without, options, given.minutes)
        runs[suite.name] = without, ours
        said = (("without us", without), ("with us", ours))
        sentences += [f"{suite.name}: the run {which} {found.ended}" for which, found in said if found.ended]
        names_of_worse = worse(without, ours)
        sentences += [f"{suite.name}: worse with us: {name}" for name in names_of_worse[:_SHOWN]]
        if len(names_of_worse) > _SHOWN:
            sentences.append(f"{suite.name}: and {len(names_of_worse) - _SHOWN} more are worse with us")
    print("\n".join([*(table(runs) if runs else ["nothing ran"]), *sentences]))
    ran = any(ours.outcomes for _, ours in runs.values())
    return 0 if ran and not any(worse(*pair) or pair[1].ended for pair in runs.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
