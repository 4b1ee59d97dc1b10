"""Passkeys in text: where they lie, what is asked, that a model can learn them, and runs in pieces."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import corpus
import language_curves
import needle

VOCABULARY, DIGITS, LENGTH = 256, 3, 60
MARK, ASK, ZERO = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2
SMALL = ["--quick", "--context", "24", "--keep", "8", "--batch", "2", "--steps", "3", "--depths", "2", "--tested", "3"]


@pytest.fixture(scope="module")
def text():
    return corpus.bytes_of_reference()


def drawn(text, depths: torch.Tensor):
    return needle.draw(text.heldout, VOCABULARY, LENGTH, depths, DIGITS, torch.Generator().manual_seed(1))


def test_the_passkey_lies_at_its_depth(text):
    depths = torch.linspace(0, 1, 21)
    tokens, answers = drawn(text, depths)
    assert tokens.shape == (21, LENGTH)
    last = LENGTH - 2 * DIGITS - 1  # the mark's last place: mark and digits end where the question begins
    for depth, row, answer in zip(depths.tolist(), tokens.tolist(), answers.tolist(), strict=True):
        place = row.index(MARK)
        assert place == round(depth * last)
        assert row[place + 1 : place + 1 + DIGITS] == answer
        assert row.count(MARK) == 1
    assert tokens[0, 0] == MARK
    assert tokens[-1, last] == MARK


def test_the_question_and_its_answer(text):
    tokens, answers = drawn(text, torch.rand(30))
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        assert row[-DIGITS:] == [ASK, *answer[:-1]]
        assert all(ZERO <= digit < ZERO + 10 for digit in answer)
        assert row.count(ASK) == 1
        # all else is text
        assert sum(token >= VOCABULARY for token in row) == 2 + DIGITS + DIGITS - 1
    assert len({tuple(answer) for answer in answers.tolist()}) > 20


def test_training_asks_several_times(text):
    depths = torch.linspace(0, 1, 21)
    tokens, places, answers = needle.draw_asked(
        text.heldout, VOCABULARY, LENGTH, depths, DIGITS, torch.Generator().manual_seed(1), 5
    )
    assert places.shape == answers.shape == (21, 5 * DIGITS)
    asked = []
    for row, at, wanted in zip(tokens.tolist(), places.tolist(), answers.tolist(), strict=True):
        mark = row.index(MARK)
        digits = row[mark + 1 : mark + 1 + DIGITS]
        assert row.count(MARK) == 1
        assert row[-DIGITS:] == [ASK, *digits[:-1]]
        asked.append(row.count(ASK))
        assert wanted[-DIGITS:] == digits
        for first in range(0, len(at), DIGITS):
            if wanted[first] == -100:
                assert row[at[first]] < VOCABULARY or mark <= at[first] <= mark + DIGITS
            else:
                assert at[first] > mark + DIGITS
                assert wanted[first : first + DIGITS] == digits
                assert [row[place] for place in at[first : first + DIGITS]] == [ASK, *digits[:-1]]
    assert asked[-1] == 1  # there is no room behind the last passkey
    assert max(asked) == 5


def test_the_filler_is_text_of_the_corpus(text):
    tokens, _ = drawn(text, torch.ones(5))
    filler = tokens[:, : LENGTH - 2 * DIGITS - 1]
    windows = text.heldout.unfold(0, filler.shape[1], 1)
    assert all((windows == row).all(1).any() for row in filler)


def test_lengths_are_mixed_at_first():
    plan = needle.Plan(context=1024, steps=1000, mixed=0.4, device="cpu")
    found = [plan.length(step) for step in range(1, 1001)]
    assert {length: found[:400].count(length) for length in (128, 256, 512, 1024)} == dict.fromkeys((128, 256, 512, 1024), 100)
    assert set(found[400:]) == {1024}
    # no sequence is too short for its passkey
    assert min(needle.Plan(context=100, steps=10, device="cpu").length(step) for step in range(1, 11)) == 25


def test_a_run_that_was_cut_is_made_again(tmp_path):
    out = ["--out", str(tmp_path), "--method", "window"]
    assert needle.main([*SMALL, *out]) == 0
    rows = written(tmp_path)
    lines = (tmp_path / "needle.csv").read_text().splitlines()
    (tmp_path / "needle.csv").write_text("\n".join(lines[:3]) + "\n" + lines[3][:9])
    assert needle.main([*SMALL, *out, "--resume"]) == 0
    assert [row["accuracy"] for row in written(tmp_path)] == [row["accuracy"] for row in rows]


def test_tests_are_the_same_for_every_method(text, monkeypatch):
    plan = needle.Plan.quick()
    seen = []
    for method in ("dense", "dynamic"):
        run = needle.Run(plan, text, method, 0)
        monkeypatch.setattr(run, "_logits", lambda part: seen.append(part) or torch.zeros(len(part), plan.digits, 300))
        run.test(64, 0.5)
    assert torch.equal(seen[0], seen[1])


def test_dense_attention_learns_it(text):
    plan = needle.Plan(
        context=10, keep=8, digits=1, batch=32, steps=160, warmup=10, depths=3, tested=100, size="tiny", device="cpu"
    )
    run = needle.Run(plan, text, "dense", 0)
    losses = list(run.train())
    assert losses[-1] < losses[0]
    assert [run.test(10, depth)[0] > 0.9 for depth in (0.0, 0.5, 1.0)] == [True] * 3


def written(folder: Path) -> list[dict[str, str]]:
    with open(folder / "needle.csv", newline="") as handle:
        return list(csv.DictReader(handle))


def test_runs_in_pieces_and_draws(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--method", "window", "--method", "dynamic"]
    cut = [*SMALL, *out, "--resume", "--minutes", "1e-6"]
    assert needle.main(cut) == 0
    assert "with --resume goes on" in capsys.readouterr().out
    assert not written(tmp_path)
    assert needle.main([*SMALL, *out]) == 0
    rows = written(tmp_path)
    assert {(r["method"], r["length"], r["depth"]) for r in rows} == {
        (m, n, d) for m in ("window", "dynamic") for n in ("24", "48") for d in ("0.0", "1.0")
    }
    # nothing is left to do, and nothing is done
    assert needle.main(cut) == 0
    assert written(tmp_path) == rows
    assert needle.main([*SMALL, *out, "--resume", "--digits", "1"]) == 2
    assert "needs another --out" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    light, dark = language_curves.draw(tmp_path / "needle.csv")
    assert min(light.stat().st_size, dark.stat().st_size) > 5_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--digits", "20"], "20 digits need at least 82"),
        (["--quick", "--size", "7B"], "'7B'"),
        (["--quick", "--depths", "1"], "--depths is 1"),
    ],
)
def test_says_what_is_wrong(arguments, said, tmp_path, capsys):
    assert needle.main([*arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_results_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "needle.csv").write_text("rows\n")
    assert needle.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "--resume continues it" in capsys.readouterr().err
