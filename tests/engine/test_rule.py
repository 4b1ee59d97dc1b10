"""Rules that `explain` names: each exists in the committed table that it cites, and the rows say what the rule says."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from saccade.engine.dispatch import explain, verdicts
from saccade.engine.rule import Line, Row, Rule, Source, square
from saccade.exact.backends import BACKENDS
from saccade.exact.long.backend import LONG
from saccade.exact.problem import describe_attention
from saccade.exact.ragged.backend import RAGGED
from saccade.exact.short.backend import SHORT
from saccade.exact.varlen.problem import describe_varlen

ROOT = Path(__file__).parents[2]
# of the faster one's speed; rows repeat within about 5 %
NOISE = 0.95
FEATURES: dict[str, dict] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"lengths": True},
    "dropout": {"dropout_p": 0.1},
    "mask of a row": {"mask": "bool", "mask_shape": (64, 1, 1, 9)},
    "mask": {"mask": "bool", "mask_shape": (64, 1, 9, 9)},
    "bias of a row": {"mask": "bias", "mask_shape": (64, 1, 1, 9)},
    "shared bias": {"mask": "bias", "mask_shape": (1, 12, 9, 9), "bias_grad": True},
    "float32": {"dtype": torch.float32},
}


@functools.cache
def rows_of(path: str) -> list[dict[str, str]]:
    with open(ROOT / path, newline="") as handle:
        return list(csv.DictReader(handle))


def sizes(description: str) -> dict[str, int]:
    found = {name: int(number) for name, number in re.findall(r"\b(\w+)=(\d+)\b", description)}
    longest = found.get("longest", 0)
    return {"q_len": longest, "kv_len": longest, **{{"Tq": "q_len", "Tk": "kv_len"}.get(n, n): x for n, x in found.items()}}


def matching(path: str, row: Row | Line) -> list[dict[str, str]]:
    if isinstance(row, Line):
        return [r for r in rows_of(path) if r["problem"] == row.problem]
    wanted = {"q_len": row.q_len, "kv_len": row.kv_len, "D": row.head_dim}
    return [
        r
        for r in rows_of(path)
        if (n := sizes(r["problem"]))
        and wanted.items() <= n.items()
        and n["B"] * n["H"] == row.problems
        and row.features in r["problem"]
    ]


def problems():
    """Descriptions of calls of every kind that a rule tells apart, on an sm_90 GPU."""
    batches, lengths = (1, 32, 64, 128, 342, 1024, 8192), (1, 20, 50, 77, 100, 128, 197, 256, 300, 577, 700)
    for batch, length, dim, grad in itertools.product(batches, lengths, (32, 64, 128), (False, True)):
        key = torch.empty(batch, 12, max(length, 20), dim, dtype=torch.bfloat16, device="meta")
        query = key[:, :, :length]
        made = describe_attention(query, key, key, None, 0.0, False, None, False, None, False, False, grad)
        for changes, counts, kv_heads in itertools.product(FEATURES.values(), (False, True), (12, 2)):
            counted = {"host_counts": counts, "python_counts": counts, "kv_heads": kv_heads}
            yield replace(made, device_type="cuda", arch=90, **counted, **changes)


@pytest.mark.parametrize(
    "sizes", [(1, 12, 20, 32), (64, 12, 50, 64), (1, 12, 300, 64), (8192, 12, 20, 32), (64, 12, 100, 64)], ids=str
)
def test_rules_of_sizes_that_are_symbols(sizes):
    """As in `make_fx` on a GPU: a rule compares them, and prints them by their names."""

    def traced(key):
        query = key[:, :, 1:]
        made = describe_attention(query, key, key, None, 0.0, False, None, False, None, False, False, False)
        assert isinstance(made.q_len, torch.SymInt)
        for changes, counts, grad in itertools.product(FEATURES.values(), (False, True), (False, True)):
            problem = replace(
                made, device_type="cuda", arch=90, host_counts=counts, python_counts=counts, needs_grad=grad, **changes
            )
            assert [str(b.rule(problem)) for b in BACKENDS if not b.why_not(problem)]
        return query

    make_fx(traced, tracing_mode="symbolic")(torch.empty(sizes, dtype=torch.bfloat16))


def packed_problems():
    ends = torch.empty(9, dtype=torch.int32, device="meta")
    for longest, dim, grad in itertools.product((20, 64, 100, 300, 512, 600), (16, 64, 128), (False, True)):
        x = torch.empty(500, 12, dim, dtype=torch.bfloat16, device="meta")
        made = describe_varlen(x, x, x, ends, ends, longest, longest, 0.0, 0, None, False, None, False, grad, False)
        yield replace(made, device_type="cuda", arch=90)


@pytest.fixture(scope="module")
def rules() -> dict[tuple[str, Rule, bool], str]:
    """Every rule of a backend and whether there is a backward, with a call that it decides."""
    found = {}
    for backends, calls in (((SHORT, LONG), problems()), ((RAGGED,), packed_problems())):
        for problem, backend in itertools.product(calls, backends):
            rule = backend.rule(problem)
            assert rule.against != backend.prefers(problem)
            found[backend.name, rule, problem.needs_grad] = str(problem)
    return found


def test_every_source_is_committed(rules):
    sources = {(rule.source.path, row) for _, rule, _ in rules if rule.source for row in rule.source.rows or (None,)}
    missing = [f"{path}: {row}" for path, row in sources if not (ROOT / path).is_file() or (row and not matching(path, row))]
    assert not missing, "\n".join(missing)
    assert len(sources) > 40


def test_the_rows_say_what_the_rule_says(rules):
    """The kernels of a backend against the best of torch, in the direction of the call: not slower where the rule takes them, somewhere slower
    where it is against them."""
    wrong, judged = [], 0
    for (backend, rule, grad), call in rules.items():
        if not rule.source or not rule.source.rows or "measured with" in rule.said or "which were measured" in rule.said:
            continue
        direction, judged = "fwd+bwd" if grad else "fwd", judged + 1
        found = [x for row in rule.source.rows for x in speeds(backend, rule, row, direction)]
        assert found, f"{backend} was not measured in {rule}"
        if not contradicts(rule, grad, min(found, default=NOISE)):
            continue
        wrong.append(f"{min(found):.2f} {backend} {direction} {rule}: {call}")
    assert not wrong, "\n".join(wrong)
    assert judged > 40


def contradicts(rule: Rule, grad: bool, least: float) -> bool:
    if rule.against:
        # a rule that keeps forward from these kernels speaks of calls with backward too, which may gain
        return not grad and least > (1 / NOISE if "within noise" in rule.said else 1.0)
    return least < NOISE


def speeds(backend: str, rule: Rule, row: Row | Line, direction: str) -> list[float]:
    """The speeds of a backend, as multiples of torch's or of another backend's that the rule names.

    In the table of host time they are the speeds of a call that Python launches."""
    path, rival = rule.source.path, re.search(r"ms by `(\w+)`", rule.said)
    of_the_host = path.endswith("short_overhead.csv")
    name = "python" if of_the_host else backend
    called = "fwd+backward()" if of_the_host and direction != "fwd" else direction
    times: dict[tuple[str, str], dict[str, float]] = {}
    for r in matching(path, row):
        if r["direction"] == called and r["ms_p50"]:
            times.setdefault((r["problem"], r["note"]), {})[r["backend"]] = float(r["ms_p50"])
    theirs = ("sdpa", "varlen_attn") if rival is None else (rival[1],)
    found = []
    for measured in times.values():
        if name == "long" and name not in measured and "auto" in measured:  # tables up to 128 tokens time it as what `auto` takes
            measured["long"] = measured["auto"]
        peers = [t for n, t in measured.items() if n.startswith(theirs)]
        if name in measured and peers:
            found.append(min(peers) / measured[name])
    return found


def test_a_source_in_a_line():
    rule = Rule("slow", Source("a.csv", (square(8, 64, 4096, "lengths"), Row(1, 9, 32, 2))))
    assert str(rule) == "slow (a.csv at Tq=8 Tk=8 D=64 B*H=4,096 lengths; Tq=1 Tk=9 D=32 B*H=2)"
    assert str(Rule("slow", Source("page.md"))) == "slow (page.md)"
    assert str(Rule("slow")) == "slow"


def test_explain_names_rule_and_rows_of_the_chosen_and_of_the_others():
    problem = next(p for p in problems() if p.q_len == 50 and p.head_dim == 64 and p.batch == 1024 and p.needs_grad)
    text = explain((SHORT,), problem)
    row = "attention(B=1024 H=12 Tq=50 Tk=50 D=64 bf16 grad sm_90)"
    assert "the nearest measured call took 0." in text
    assert f"by torch's function (benchmarks/results/h200/short_sizes.csv at {row})" in text
    assert text.count("\n") == 1
    declined = replace(problem, batch_shape=(8,), host_counts=True)
    text = explain(BACKENDS, declined)
    assert "96 problems is host time" in text
    assert "(benchmarks/results/h200/short_overhead.csv at Tq=32 Tk=32 D=64 B*H=8)" in text
    assert "no kernel that can run was measured faster" in text
    (only,) = verdicts((SHORT,), declined)
    assert only.reasons[-1].startswith("the first that can, as none is preferred: the time of a call")


def test_explain_names_the_rows_of_one_that_came_later():
    problem = next(p for p in problems() if p.q_len == 77 and p.batch == 8192 and p.lengths and not p.host_counts)
    lines = explain((replace(SHORT, name="first"), SHORT), replace(problem, kv_heads=12)).splitlines()
    assert "could, but an earlier backend is preferred; measured faster" in lines[2]
    assert "short_auto.csv" in lines[2]
