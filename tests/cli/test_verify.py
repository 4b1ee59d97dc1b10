"""`saccade verify`, with the checks of the operations replaced where they would be slow or have to fail."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from saccade import InvalidArgument, UnsupportedProblem
from saccade.cli import verify
from saccade.cli.verify import Selection
from saccade.operations import OPERATIONS


@dataclass(frozen=True)
class _Case:
    name: str
    batch: int = 1
    heads: int = 1
    q_len: int = 4
    kv_len: int = 4
    head_dim: int = 8
    dropout_p: float = 0.0
    tags: frozenset = frozenset()


@dataclass(frozen=True)
class _Result:
    name: str
    error: float
    budget: float = 1.0
    reason: str = "largest error over budget"

    @property
    def ratio(self):
        return self.error / self.budget

    @property
    def ok(self):
        return self.error <= self.budget


@pytest.fixture
def checked(monkeypatch):
    """Stand-ins for the cases and checks; the list of what was checked, and a dict to make a backend fail or decline."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    calls, verdicts = [], {}

    def check_attention(case, dtype, device, backend, seed=0, lse=True):
        if lse and verdicts.get(backend) == "has no lse":
            raise UnsupportedProblem("no lse")
        calls.append((backend, case.name, str(dtype)))
        if verdicts.get(backend) == "declines":
            raise UnsupportedProblem("cannot")
        return [_Result("out", 0.5), _Result("dq", 2.0 if verdicts.get(backend) == "fails" else 0.25)]

    cases = {
        "attention": (_Case("plain"), _Case("odd"), _Case("dropped", dropout_p=0.5), _Case("huge", tags=frozenset({"large"}))),
        "dynamic_mask_attention": (_Case("scored"), _Case("odd")),
        "nm_sparse_attention": (_Case("pruned"), _Case("odd")),
    }
    table = {name: replace(OPERATIONS[name], cases=cases[name], check=check_attention) for name in cases}
    monkeypatch.setattr(verify, "OPERATIONS", table)
    return calls, verdicts


def _selection(backends=(), cases=(), dtypes=("fp32",), device="cpu", every=False, operations=("attention",)):
    return Selection(list(backends), list(cases), list(dtypes), device, every=every, operations=list(operations))


def test_every_backend_and_case(checked, capsys):
    assert verify.run(_selection()) == 0
    expected = {
        (b, c)
        for b in ("short", "volta", "volta_fp16", "long", "shared_bias", "ragged", "sdpa", "reference")
        for c in ("plain", "odd", "dropped", "huge")
    }
    assert {(b, c) for b, c, _ in checked[0]} == expected - {("sdpa", "dropped")}
    assert "0.50" in capsys.readouterr().out


def test_every_operation(checked, capsys):
    assert verify.run(_selection(operations=())) == 0
    scored = {(b, c) for b, c, _ in checked[0] if c == "scored"}
    assert scored == {(b, "scored") for b in ("gather", "gather_cpp", "gather_torch", "reference")}
    assert "reference" in {b for b, c, _ in checked[0] if c == "pruned"}
    assert {b for b, c, _ in checked[0] if c == "huge"} == {
        "short",
        "volta",
        "volta_fp16",
        "long",
        "shared_bias",
        "ragged",
        "sdpa",
        "reference",
    }
    out = capsys.readouterr().out
    for title in ("attention against float64", "dynamic_mask_attention against float64", "nm_sparse_attention against float64"):
        assert title in out


def test_a_case_or_backend_of_one_operation_leaves_the_other_out(checked):
    verify.run(_selection(["gather_torch"], operations=()))
    assert checked[0] == [("gather_torch", c, "torch.float32") for c in ("scored", "odd")]
    checked[0].clear()
    verify.run(_selection(cases=["scored"], operations=()))
    assert {c for _, c, _ in checked[0]} == {"scored"}


def test_large_cases_are_left_out_of_the_interpreter(checked, monkeypatch):
    monkeypatch.setattr(verify, "interpreting_triton", lambda: True)
    verify.run(_selection(["short"]))
    assert [c for _, c, _ in checked[0]] == ["plain", "odd", "dropped"]
    verify.run(_selection(["short"], ["huge"], every=True))
    assert checked[0][-1][1] == "huge"


def test_a_backend_without_lse_is_checked_without_it(checked):
    checked[1]["sdpa"] = "has no lse"
    assert verify.run(_selection(["sdpa"])) == 0
    assert len(checked[0]) == 3


def test_lse_is_asked_for_first(monkeypatch):
    asked = []

    def check(case, dtype, device, backend, seed=0, lse=True):
        asked.append(lse)
        if lse:
            raise UnsupportedProblem("no lse")
        return [_Result("out", 0.5)]

    table = {"attention": replace(OPERATIONS["attention"], cases=(_Case("plain"),), check=check)}
    monkeypatch.setattr(verify, "OPERATIONS", table)
    assert verify.run(_selection(["sdpa"])) == 0
    assert asked == [True, False]


def test_an_error_is_no_refusal(monkeypatch):
    def check(*args, **options):
        raise ZeroDivisionError

    table = {"attention": replace(OPERATIONS["attention"], cases=(_Case("plain"),), check=check)}
    monkeypatch.setattr(verify, "OPERATIONS", table)
    with pytest.raises(ZeroDivisionError):
        verify.run(_selection(["sdpa"]))


@pytest.mark.parametrize("code", [0, 1])
def test_the_interpreters_exit_code_is_that_of_the_command(code, monkeypatch):
    monkeypatch.setattr(verify, "interpreting_triton", lambda: False)
    monkeypatch.setattr(verify.subprocess, "run", lambda command, **options: SimpleNamespace(returncode=code))
    assert verify.run(replace(_selection(["short"]), interpret=True)) == code


@pytest.mark.parametrize("device", ["cuda", "nonsense"])
def test_the_interpreter_runs_on_no_other_device(device, monkeypatch):
    monkeypatch.setattr(verify, "interpreting_triton", lambda: True)
    with pytest.raises(InvalidArgument, match=f"device is '{device}'; the interpreter runs on the CPU"):
        verify.run(replace(_selection(["short"], device=device), interpret=True))


def test_the_dtypes_of_a_cpu(checked, monkeypatch):
    for interpreted, dtypes in ((False, ["float32"]), (True, ["float16", "float32"])):
        checked[0].clear()
        monkeypatch.setattr(verify, "interpreting_triton", lambda interpreted=interpreted: interpreted)
        verify.run(_selection(["reference"], ["plain"], dtypes=()))
        assert [dtype for *_, dtype in checked[0]] == [f"torch.{name}" for name in dtypes]


def test_a_failure_gives_exit_code_1_and_is_named(checked, capsys):
    checked[1]["sdpa"] = "fails"
    assert verify.run(_selection()) == 1
    assert "attention sdpa fp32 odd: dq: error 2, budget 1" in capsys.readouterr().out


def test_declining_is_no_failure(checked):
    checked[1]["short"] = "declines"
    assert verify.run(_selection()) == 0


def test_nothing_ran_is_a_failure(checked, capsys):
    checked[1]["short"] = "declines"
    assert verify.run(_selection(["short"])) == 1
    assert "nothing ran" in capsys.readouterr().out


def test_as_json(checked, capsys):
    checked[1].update(sdpa="fails", short="declines")
    assert verify.run(replace(_selection(["short", "sdpa", "reference"]), as_json=True)) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert not report["ok"]
    found = {r["backend"]: r for r in report["results"]}
    assert (found["short"]["cases"], found["short"]["declined"], found["short"]["failures"]) == (0, 4, [])
    assert "worst_ratio" not in found["short"]
    assert found["sdpa"]["worst_ratio"] == 2.0
    assert "odd: dq: error 2, budget 1 (largest error over budget)" in found["sdpa"]["failures"]
    assert (found["reference"]["worst_ratio"], found["reference"]["failures"]) == (0.5, [])
    assert verify.run(replace(_selection(["reference"]), as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_selection(checked):
    verify.run(_selection(["reference"], ["dd", "uge"], ["fp32", "fp64"]))
    assert checked[0] == [("reference", c, f"torch.float{d}") for d in (32, 64) for c in ("odd", "huge")]


def test_all_is_for_the_interpreter(checked, monkeypatch):
    monkeypatch.setattr(verify, "interpreting_triton", lambda: False)
    with pytest.raises(InvalidArgument, match="--all is given without --interpret"):
        verify.run(_selection(["reference"], every=True))


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        (_selection(["fast"]), "backend is 'fast'"),
        (
            _selection(["gather"]),
            "backend is 'gather'; allowed are 'long', 'short', 'volta', 'volta_fp16', 'shared_bias', 'ragged', 'sdpa', 'reference'",
        ),
        (_selection(operations=["mean"]), "op is 'mean'; allowed are 'attention', 'dynamic_mask_attention'"),
        (_selection(cases=["nothing"]), "no case has 'nothing'"),
        (_selection(dtypes=["int8"]), "dtype is 'int8'"),
    ],
)
def test_unknown_names(checked, selection, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        verify.run(selection)


def test_arguments_round_trip():
    selection = Selection(["short", "sdpa"], ["odd"], ["fp16"], None, True, True, ["attention"], True)
    words = selection.arguments()
    assert words == [
        "--op",
        "attention",
        "--backend",
        "short",
        "--backend",
        "sdpa",
        "--case",
        "odd",
        "--dtype",
        "fp16",
        "--interpret",
        "--all",
        "--json",
    ]


def test_the_real_cases_of_dynamic_masks_pass(capsys):
    selection = Selection(["gather_torch", "reference"], ["length-3"], ["fp32"], "cpu", operations=["dynamic_mask_attention"])
    assert verify.run(selection) == 0
    assert "ok" in capsys.readouterr().out


def test_a_wrong_gradient_of_the_scores_is_found(monkeypatch, capsys):
    from saccade.dynamic_mask import op as ops_dynamic_mask

    def wrong(*call):
        dq, dk, dv, dscores = right(*call)
        return dq, dk, dv, dscores * 1.001

    right = ops_dynamic_mask._backward
    monkeypatch.setattr(ops_dynamic_mask, "_backward", wrong)
    selection = Selection(["gather_torch"], ["length-3"], ["fp32"], "cpu", operations=["dynamic_mask_attention"])
    assert verify.run(selection) == 1
    assert "dynamic_mask_attention gather_torch fp32 length-31: dscores: error" in capsys.readouterr().out.replace("\n", " ")


def test_names_of_cases_break_between_words():
    """In 80 columns, where the table has 14 for them."""
    names = [f"{case.name}: out" for operation in OPERATIONS.values() for case in operation.cases]
    for name in names:
        *lines, _ = verify._between_words(name, 80).split("\n")
        assert all(line.endswith(("-", ":")) for line in lines), name
        assert verify._between_words(name, 120) == name
