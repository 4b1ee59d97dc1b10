"""The covering lists of `python -m tools.soak`: every two arguments in every configuration class, and what the random cases had missed."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from saccade import InvalidArgument, UnsupportedProblem
from saccade.dynamic_mask.testing.inputs import make_dynamic_mask
from saccade.exact.ragged.config import TILES as RAGGED_TILES
from saccade.exact.ragged.config import long_config
from saccade.exact.short.config import tile_size
from saccade.launch.triton import pow2
from saccade.nm_sparse.masked.config import pick
from saccade.operations import OPERATIONS
from tools.soak import checks, cover, judged, run
from tools.soak.__main__ import app
from tools.soak.cover import MASKS, ONE, PATTERNS, SEEDS, TILES, Entry, entries, pairwise, tile_of
from tools.soak.draw import LARGE, SMALL, Draw, case_of
from tools.soak.judged import covering, pairs
from tools.soak.results import Batch, Found, command_line
from tools.soak.run import Task, covering_batches

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def drawn(operation, backend, entry, sizes=LARGE, dropout=True):
    return case_of(operation, Draw(operation, backend, 0, 8, entry), sizes, dropout)


# --- the cases have what the entries say


def _mask_of(case):
    if getattr(case, "windows", 0):
        return "windows"
    kind = "bool" if case.mask == "bool" else "bias" if case.bias is not None else "none"
    shape = case.mask_shape if kind == "bool" else case.bias
    if kind == "none":
        return kind
    if shape[-2] == 1 < case.q_len:
        return f"{kind} row"
    return f"{kind} shared" if shape[0] == 1 else kind


_SEEN = {
    "mask": _mask_of,
    "dropout": lambda c: c.dropout_p > 0,
    "causal": lambda c: c.causal if hasattr(c, "causal") else c.is_causal,
    "grouped": lambda c: c.heads != c.kv_heads,
    "dim": lambda c: tile_of(c.head_dim),
    "bias": lambda c: c.bias,
    "cross": lambda c: c.k_lengths is not None,
    "tail": lambda c: c.tail,
    "pattern": lambda c: c.pattern if c.pattern in PATTERNS else "other",
    "dense_first": lambda c: c.dense_first // int(c.pattern.partition(":")[2]),
    "dense_recent": lambda c: c.dense_recent // int(c.pattern.partition(":")[2]),
    "queries": lambda c: ONE if _lengths_of(c)[0] == 1 else cover.MANY,
    "longest": lambda c: tile_of(max(_lengths_of(c))),
}


def _lengths_of(case):
    return (max(case.q_lengths), max(case.keys)) if hasattr(case, "q_lengths") else (case.q_len, case.kv_len)


def seen(case, name):
    return _SEEN[name](case) if name in _SEEN else getattr(case, name)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("operation", "backend"), pairs())
def test_every_two_arguments_come_together_in_every_class(operation, backend, sizes):
    """Read from the cases that are drawn, not from the entries."""
    widths, ours = (2, 4), judged._by_us(operation, backend)
    axes = cover.classes_of(operation, backend, widths)
    space = cover.arguments_of(operation, backend, widths, ours)
    found = {}
    for entry in entries(operation, backend, widths, ours):
        case = drawn(operation, backend, entry, sizes, ours)
        told = {name: entry.choices["width"] if name == "width" else seen(case, name) for name in (*axes, *space)}
        if told.get("mask") in ("bool", "bias") and case.q_len == 1:
            told["mask"] = entry.choices["mask"]  # one query has one row
        assert told == dict(entry.choices)
        cell = tuple(told[name] for name in axes)
        found.setdefault(cell, set()).update(itertools.combinations(sorted((name, told[name]) for name in space), 2))
    assert set(found) == set(itertools.product(*axes.values()))
    wanted = {
        tuple(sorted(((a, x), (b, y))))
        for a, b in itertools.combinations(space, 2)
        for x, y in itertools.product(space[a], space[b])
        if cover.allowed(operation, (a, x), (b, y))
    }
    for cell, together in found.items():
        assert not wanted - together, cell


def test_only_what_is_refused_or_means_nothing_is_no_pair():
    never = {frozenset(name for name, _ in pair) for pairs in cover._FORBIDDEN.values() for pair in pairs}
    assert never == {
        frozenset({"causal", "mask"}), frozenset({"lengths", "mask"}), frozenset({"packed", "grouped"}), frozenset({"packed", "cross"}),
        frozenset({"window", "causal"}), frozenset({"window", "bias"}), frozenset({"window", "cross"}),
    }  # fmt: skip


def test_every_operation_and_every_family_of_kernels_has_a_list():
    assert set(cover.ARGUMENTS) == set(cover.SIZES) == {operation for operation, _ in pairs()}
    by_torch = {"sdpa", "reference", "gather_torch", "flash", "auto"}
    assert set(cover._CLASSES) == {backend for _, backend in pairs()} - by_torch
    assert set(OPERATIONS) <= set(cover.ARGUMENTS)


# --- the classes are those of the launchers


def test_launchers_tell_no_two_sizes_of_a_class_apart():
    assert all(tile_size(n) == tile_of(n) for n in range(1, 257))
    assert set(RAGGED_TILES) < set(TILES)
    of_class = {}
    for dim, dtype in itertools.product(range(1, 257), (torch.float16, torch.float32)):
        block = pow2(max(16, dim))
        choices = (
            *(long_config(d, block, dtype.itemsize, arch) for d in ("fwd", "keys", "queries") for arch in (80, 86, 90)),
            *(pick(d, dim, dtype) for d in ("fwd", "bwd", "bias")),
        )
        of_class.setdefault((tile_of(dim), dtype), set()).add(choices)
    assert all(len(choices) == 1 for choices in of_class.values())


# --- the generator


def test_pairs_need_few_rows():
    space = dict.fromkeys("abcd", (0, 1, 2))
    rows = pairwise("none", space)
    assert rows == pairwise("none", space)
    assert 9 <= len(rows) <= 13  # nine at least, of 81
    assert {(row["a"], row["d"]) for row in rows} == set(itertools.product(range(3), repeat=2))


def test_a_pair_that_is_not_allowed_is_in_no_row():
    rows = pairwise("attention", cover.ARGUMENTS["attention"])
    assert not any(row["causal"] and row["mask"] != "none" for row in rows)
    assert {row["mask"] for row in rows} == set(MASKS)


# --- a run walks them


def test_a_run_walks_the_lists_side_by_side_with_a_few_seeds_of_each():
    chosen = [("attention", "short"), ("attention", "sdpa")]
    walked = list(covering_batches(4097, chosen, GPU))
    assert [(b.operation, b.backend, b.entry) for b in walked[:3]] == [(*chosen[0], 0), (*chosen[1], 0), (*chosen[0], 1)]
    assert len(walked) == sum(len(covering(*pair, GPU)) for pair in chosen)
    assert {batch.seeds for batch in walked} == {(4096, 4097)}
    assert all(len(batch.seeds) == SEEDS for batch in walked)


def test_the_beginning_of_a_list_is_of_many_classes():
    first = covering("attention", "ragged", GPU)[: 2 * len(TILES) ** 2]
    assert len({(e.choices["dim"], e.choices["longest"], e.choices["width"]) for e in first}) == len(first)


def invoke(*words):
    return CliRunner().invoke(app, ["--device", "cpu", *words], env={"COLUMNS": "160"})


def test_it_says_how_many_entries_ran():
    entries = len(covering("expiry", "auto", CPU))
    result = invoke("--cover", "--op", "expiry")
    assert result.exit_code == 0
    assert f"covering lists: {entries} of {entries} entries ran, 0 were declined by their backends" in result.stdout
    assert f"{SEEDS * entries} cases, 0 failures" in result.stdout
    found = json.loads(invoke("--cover", "--count", "3", "--op", "expiry", "--json").stdout)
    assert (found["entries"], found["entries_ran"], found["entries_declined"]) == (entries, entries, 0)
    assert found["cases"] == SEEDS * entries + 3
    assert json.loads(invoke("--minutes", "0.0001", "--op", "expiry", "--json").stdout)["entries"] == entries
    assert "covering" not in invoke("--count", "1", "--op", "expiry").stdout


def test_parts_are_the_whole_lists_and_every_backend_is_in_each():
    chosen = [pair for pair in pairs() if len(covering(*pair, GPU)) >= 4]
    parts = [list(covering_batches(0, chosen, GPU, f"{number}/4")) for number in (1, 2, 3, 4)]
    assert all({(batch.operation, batch.backend) for batch in part} == set(chosen) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= len(chosen)
    assert sorted(itertools.chain(*parts)) == sorted(covering_batches(0, chosen, GPU))


def test_a_part_is_walked_and_told():
    entries = len(covering("expiry", "auto", CPU)[1::3])
    result = invoke("--cover", "--part", "2/3", "--op", "expiry")
    assert f"part 2/3 of the covering lists: {entries} of {entries} entries ran" in result.stdout
    found = json.loads(invoke("--cover", "--part", "2/3", "--op", "expiry", "--json").stdout)
    assert (found["part"], found["entries"], found["entries_ran"], found["cases"]) == ("2/3", entries, entries, SEEDS * entries)


def test_an_entry_that_is_declined_is_told(monkeypatch):
    asked = []
    monkeypatch.setattr(judged, "_results", lambda *call: asked.append(call))
    monkeypatch.setattr(run, "covering", lambda *of: covering(*of)[:3])
    found = json.loads(invoke("--cover", "--op", "attention", "--backend", "volta", "--json").stdout)
    assert (found["entries"], found["entries_ran"], found["entries_declined"], found["ok"]) == (3, 0, 3, False)
    assert len(asked) == 3 * SEEDS * judged._TRIES_OF_ENTRY


def test_a_failure_of_an_entry_names_it_and_its_line_repeats_it(monkeypatch):
    assert "--entry 7 --device cpu" in command_line(Batch("a", "x", (3,), entry=7), CPU)
    seen = []
    right = judged.case_of
    monkeypatch.setattr(judged, "case_of", lambda *given: seen.append(right(*given)) or seen[-1])
    (entry,) = (e for e in covering("attention", "sdpa", CPU) if e.number == 5)
    invoke("--seed", "4", "--count", "1", "--op", "attention", "--backend", "sdpa", "--entry", "5")
    assert seen == [drawn_at(4, entry)]


def drawn_at(seed, entry):
    return case_of("attention", Draw("attention", "sdpa", seed, 8, entry), SMALL, False)


def test_no_entry_is_lost_to_layouts_that_its_backend_declines(monkeypatch):
    """Kernels want dense rows. When an entry could have four layouts alone, one entry in six of `gather` never ran."""

    def dense_alone(cases, setting, lse, draws):
        inputs = checks._placed(make_dynamic_mask, cases[0], setting, draws)
        if any(x.stride(-1) != 1 for x in (inputs[0].query, inputs[0].key, inputs[0].value)):
            raise UnsupportedProblem("needs a last stride of 1")
        return [[] for _ in cases]

    monkeypatch.setitem(checks.CHECKS, "dynamic_mask_attention", dense_alone)
    every = covering("dynamic_mask_attention", "gather", CPU)
    batches = [Batch("dynamic_mask_attention", "gather", (0,), entry=e.number) for e in every]
    assert [batch.entry for batch in batches if not run.run_batch(batch, "cpu")[0].ran] == []


def test_an_entry_of_which_one_case_was_taken_ran():
    found = Found()
    for ran in (False, True):
        found.add(judged.Outcome("a", "x", 0, ran, True), CPU, entry=1)
    found.add(judged.Outcome("a", "x", 0, False, True), CPU, entry=2)
    assert (len(found.covered), found.entries_ran) == (2, 1)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (Task(entry=1, device="cpu"), "entry is 1 of 38 covering lists; name one operation and one backend"),
        (Task(entry=-1, operations=["expiry"], device="cpu"), "entry is -1; the covering list of expiry by auto has 0 to "),
        (Task(entry=99, operations=["expiry"], device="cpu"), "entry is 99; the covering list of expiry by auto has 0 to "),
        (Task(entry=1, operations=["expiry"], device="cpu", cover=True), "neither cover nor minutes"),
        (Task(entry=1, operations=["expiry"], device="cpu", minutes=1.0), "neither cover nor minutes"),
        *((Task(cover=True, part=part), f"part is '{part}'; it must be as '2/4'") for part in ("0/4", "5/4", "2", "a/b", "-1/4")),
        (Task(part="2/4"), "part is '2/4' of the covering lists; they are walked with cover or minutes"),
    ],
)
def test_mistakes_get_a_sentence(task, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        run.run(task)


# --- what the random cases had missed


def _misplaced_in_small_tiles(right):
    """`of_four_keys` as it was in tiles of 16 keys: half of the weights that it drops are others."""

    def of_four_keys(words, dropout_p, KEYS):
        kept = right(words, dropout_p, KEYS)
        return kept ^ 1 if int(KEYS) < 32 else kept

    return of_four_keys


def test_dropout_beside_a_mask_in_tiles_of_16_keys_is_found(monkeypatch):
    tiles = pytest.importorskip("saccade.exact.ragged.tiles")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, where a test cannot replace a part of them")
    small = [e for e in covering("attention", "ragged", CPU) if (e.choices["dim"], e.choices["longest"]) == (256, 16)]
    both: list[Entry] = [e for e in small if e.choices["dropout"] and e.choices["mask"].startswith("bool")]
    assert {e.choices["width"] for e in both} == {2, 4}
    assert _wrong(both[:1]) == 0
    monkeypatch.setattr(tiles, "of_four_keys", _misplaced_in_small_tiles(tiles.of_four_keys))
    assert _wrong(both) == len(both)
    assert _wrong([e for e in small if not e.choices["dropout"]][:2]) == 0
    wider = [e for e in covering("attention", "ragged", CPU) if e.choices["dim"] == 64 and e.choices["dropout"]]
    assert _wrong(wider[-1:]) == 0


def _wrong(some):
    batches = [Batch("attention", "ragged", (0,), entry=e.number) for e in some]
    outcomes = [outcome for batch in batches for outcome in run.run_batch(batch, "cpu")]
    assert all(outcome.ran for outcome in outcomes)
    return sum(not outcome.ok for outcome in outcomes)
