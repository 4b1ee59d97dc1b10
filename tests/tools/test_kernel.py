"""The loop for one kernel: names resolve, tests of the family are found, and what is wrong is said."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from saccade.errors import InvalidArgument, SaccadeError
from tools.kernel import families, run, timed
from tools.kernel.__main__ import app
from tools.kernel.families import FAMILIES, ROOT, SRC, family_of, file_of, kernels
from tools.kernel.plugin import fit, in_dtype

KERNELS = kernels()


def test_every_kernel_file_has_a_name():
    found = set(SRC.rglob("*.cu")) | {path for path in SRC.rglob("*.py") if "\n@triton.jit" in path.read_text()}
    assert set(KERNELS.values()) == found
    assert len(KERNELS) == len(found) > 40
    # the folder may be left out where the name is nobody else's
    assert file_of("exact/short/forward_sm90") == KERNELS["exact/short/cuda/forward_sm90"]
    assert file_of("exact/ragged/backward").suffix == ".py"


@pytest.mark.parametrize("name", KERNELS)
def test_a_name_leads_to_its_file_and_to_tests(name):
    path = file_of(name)
    assert path == KERNELS[name] == file_of(str(path.relative_to(ROOT)))
    assert all((ROOT / test).is_file() for test in families.tests_of(family_of(path)))
    assert families.tests_of(family_of(path))


def test_every_pattern_of_tests_finds_some():
    for family in FAMILIES.values():
        for pattern in family.tests:
            assert list((ROOT / "tests").glob(pattern)), pattern


@pytest.mark.parametrize("name", ["", "nonsense", "exact/short", "exact/short/config", "../kernel"])
def test_an_unknown_name_lists_those_that_are_allowed(name):
    with pytest.raises(InvalidArgument, match=r"K is .*; allowed are .*exact/short/forward, "):
        file_of(name)


def test_a_test_runs_in_one_dtype():
    assert in_dtype("test_budget[plain-float32]", "float32")
    assert in_dtype("test_a_query", "float32")
    assert not in_dtype("test_budget[plain-bfloat16]", "float16")


def test_what_fits_a_kernel_comes_first():
    names = ["test_binary[('fwd', 64, 64)]", "test_binary[('pool_bwd', 64, 64)]", "test_binary[('bwd', 64, 64)]"]
    assert max(names, key=lambda name: fit(name, "pooling_backward")) == names[1]
    assert max(names, key=lambda name: fit(name, "forward_sm90")) == names[0]


def test_what_pytest_said():
    said = (
        "..F\n=== short test summary ===\nSKIPPED [3] tests/x.py:1: needs a CUDA device\nSKIPPED [2] plugin.py:9: out of time\n"
    )
    line = run.read_tests(said + "FAILED tests/x.py::test_budget\n1 failed, 2 passed, 5 skipped in 3.1s", 1, "contract")
    assert not line.ok
    assert line.found == "2 tests passed, 1 failed, 3 need a GPU, 2 left for lack of time"
    assert line.details == "FAILED tests/x.py::test_budget"
    assert run.read_tests("2 passed in 3.1s", 0, "contract").ok
    assert not run.read_tests("no such option", 4, "contract").ok


def test_binaries_of_a_source():
    kernel = file_of("exact/short/forward_sm90")
    row = {"source": str(kernel), "arch": "sm_90a", "usage": {"forward": [100, 8, 0]}}
    other = row | {"source": "elsewhere.cu"}
    (line,) = run.read_log(kernel, [row, row, other])
    assert line == run.Line("sm_90a", "2 builds: up to 100 registers, 8 bytes of stack", True)
    assert [line.ok for line in run.read_log(kernel, [row, row | {"usage": {}}])] == [False]
    assert [line.ok for line in run.read_log(kernel, [other])] == [False]


def timing(p50: float) -> dict:
    return {"forward": [p50, 0.99 * p50, 1.01 * p50]}


@pytest.mark.parametrize(("after", "ok"), [(1.0, True), (1.02, True), (1.1, False), (0.5, True)])
def test_slower_is_wrong(after, ok):
    (line,) = run.compared(("attention", "short"), [[timing(1.0), timing(after)]] * 2)
    assert line.ok == ok
    assert f"{after:.3f} of it" in line.found


def test_a_problem_that_is_refused_is_said():
    (line,) = run.compared(("attention", "short"), [[timing(1.0), {"refused": "no such GPU"}]])
    assert line == run.Line("attention short", "was not timed", True, "no such GPU")


@pytest.mark.parametrize(
    ("operation", "backend"), [
        ("attention", "sdpa"), ("attention_varlen", "reference"), ("dynamic_mask_attention", "gather_torch"), ("nm_sparse_attention", "reference"),
    ],
)  # fmt: skip
def test_each_operation_can_be_timed(operation, backend, capsys):
    timed.main([operation, backend, "1", "2", "16", "16", "8", "cpu", "float32"])
    assert set(json.loads(capsys.readouterr().out)) == {"forward", "forward and backward"}


def test_a_refusal_is_no_time(capsys):
    timed.main(["attention", "nonsense", "1", "2", "16", "16", "8", "cpu", "float32"])
    assert "nonsense" in json.loads(capsys.readouterr().out)["refused"]


def test_a_worktree_of_before_goes_again():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    with run.checkout_of("HEAD") as place:
        assert (place / "src" / "saccade" / "__init__.py").is_file()
    assert not place.exists()
    with pytest.raises(SaccadeError, match="git makes no worktree of 'no-such-revision'"), run.checkout_of("no-such-revision"):
        pass


def test_the_verdict(monkeypatch):
    bad = run.Line("contract", "1 failed", False, "FAILED x")
    monkeypatch.setattr(run, "tested", lambda *given: bad)
    monkeypatch.setattr(run, "compiled_by_triton", lambda path: [run.Line("sm_90", "1 build", True)])
    monkeypatch.setattr(run, "timed", lambda *given: [])
    found = CliRunner().invoke(app, ["exact/short/forward"], env={"COLUMNS": "160"})
    assert found.exit_code == 1
    assert "FAILED x" in found.stdout
    assert "exact/short/forward is wrong" in found.stdout
