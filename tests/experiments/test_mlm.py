"""Masked language models: which tokens are hidden, pruned and Nystrom attention of the encoder, training, pieces, and the plot."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import corpus
import encoder_model
import language
import mlm
import mlm_curves
from encoder_model import ATTENTIONS, Encoder
from language_model import SIZES

TINY = SIZES["tiny"]
SMALL = ["--quick", "--context", "16", "--batch", "4", "--steps", "4", "--tune", "2", "--every", "2", "--tested", "4"]


@pytest.fixture(scope="module")
def text():
    return corpus.bytes_of_reference()


def plan_of(**sizes) -> mlm.Plan:
    return mlm.Plan(**{"context": 32, "batch": 8, "steps": 40, "tune": 8, "every": 20, "warmup": 4, "tested": 16, "size": "tiny", "backend": "reference", "device": "cpu"} | sizes)  # fmt: skip


def tokens(length: int = 32) -> torch.Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(3))


def test_the_usual_shares_are_hidden():
    before = torch.randint(500, (200, 100), generator=torch.Generator().manual_seed(0))
    shown, places, answers = mlm.hidden(before, 500, 15, 7)
    assert places.shape == answers.shape == (200, 15)
    assert all(len(set(row)) == 15 for row in places.tolist())
    assert torch.equal(before.gather(1, places), answers)
    # nothing else has changed
    assert torch.equal(shown.scatter(1, places, answers), before)
    seen = shown.gather(1, places)
    masks, kept = (seen == 500).float().mean().item(), (seen == answers).float().mean().item()
    assert masks == pytest.approx(0.8, abs=0.03)
    assert kept == pytest.approx(0.1, abs=0.03)
    assert (places.flatten().bincount(minlength=100) > 0).all()  # every place has its turn


def test_places_are_of_the_number_alone():
    one, other = (mlm.hidden(tokens(), 50, 5, number) for number in (4, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[1], mlm.hidden(tokens(), 50, 5, 5)[1])
    assert not torch.equal(one[1], mlm.hidden(tokens(), 50, 5, -4)[1])


def test_all_attentions_start_from_the_same_weights():
    first = dict(Encoder(TINY, 50, "dense", 0).named_parameters())
    for attention in ATTENTIONS[1:]:
        other = dict(Encoder(TINY, 50, attention, 0).named_parameters())
        assert set(first) == set(other)
        assert all(torch.equal(first[name], other[name]) for name in first), attention
    assert not torch.equal(first["words.weight"], Encoder(TINY, 50, "dense", 1).words.weight)


@pytest.mark.unpoisoned  # memory that is poisoned is no longer meta
def test_ten_million_parameters():
    with torch.device("meta"):
        model = encoder_model.MaskedModel(SIZES["10M"], 8193, "dense", 0)
    assert 9e6 < model.count < 11e6


def test_every_token_sees_those_behind_it():
    changed = tokens()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    for attention in ATTENTIONS:
        model = Encoder(TINY, 50, attention, 0, "reference", landmarks=8)
        assert not torch.equal(model(tokens())[:, 0], model(changed)[:, 0]), attention


def by_hand(query, key, value, keep: int, group: int):
    """N:M pruned attention with a sort, in float64."""
    scores = (query.double() @ key.double().mT) / 8
    parts = scores.unflatten(-1, (-1, group))
    ranks = parts.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    scores = parts.masked_fill(ranks >= keep, float("-inf")).flatten(-2)
    return torch.softmax(scores, -1) @ value.double()


@pytest.mark.parametrize(("pattern", "keep", "group"), [("1:2", 1, 2), ("2:4", 2, 4)])
def test_pruned_attention_is_that_by_hand(pattern, keep, group):
    query, key, value = torch.randn(3, 2, 1, 32, 64).unbind()
    attention = encoder_model.EncoderAttention(64, pattern, "reference", 8)
    found = attention._attend(query, key, value, value, None)
    torch.testing.assert_close(found.double(), by_hand(query, key, value, keep, group), rtol=1e-4, atol=1e-5)


def nystrom(query, key, value, keep: int, group: int, parts: int = 8):
    """Nystromformer with the exact pseudo-inverse, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    few_queries, few_keys = (x.unflatten(2, (parts, -1)).mean(3) for x in (query, key))
    middle = torch.linalg.pinv(torch.softmax(few_queries @ few_keys.mT / 8, -1))
    return by_hand(query, few_keys, middle @ by_hand(few_queries, key, value, keep, group), keep, group)


@pytest.mark.parametrize(("attention", "keep", "group"), [("nystrom", 1, 1), ("nystrom_1:2", 1, 2), ("nystrom_2:4", 2, 4)])
def test_nystromformer_is_that_by_hand(attention, keep, group):
    noise, value = torch.randn(2, 2, 1, 32, 64, generator=torch.Generator().manual_seed(0)).unbind()
    # each part has a direction of its own: of random ones the matrix in the middle is nearly singular
    query = key = 5 * torch.eye(64)[:8].repeat_interleave(4, 0) + 0.5 * noise
    found = encoder_model.EncoderAttention(64, attention, "reference", 8)._attend(query, key, value, value, None)
    torch.testing.assert_close(found.double(), nystrom(query, key, value, keep, group), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_is_not_seen(attention):
    model = Encoder(TINY, 50, attention, 0, "reference", landmarks=8)
    lengths = torch.tensor([20, 32], dtype=torch.int32)
    seen = torch.arange(32).expand(2, 32) < lengths[:, None]
    changed = torch.where(seen, tokens(), 7)
    one, other = (model(t, lengths)[seen] for t in (tokens(), changed))
    torch.testing.assert_close(one, other)
    assert not torch.allclose(one, model(tokens())[seen])


def test_nystromformer_inverts_in_float32_under_autocast():
    noise, value = torch.randn(2, 2, 1, 32, 64, generator=torch.Generator().manual_seed(0)).unbind()
    query = key = 5 * torch.eye(64)[:8].repeat_interleave(4, 0) + 0.5 * noise
    attention = encoder_model.EncoderAttention(64, "nystrom", "reference", 8)
    expected = attention._attend(query, key, value, value, None)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention._attend(*(x.bfloat16() for x in (query, key, value, value)), None)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_landmarks_divide_the_tokens():
    with pytest.raises(ValueError, match="32 tokens are no multiple of 5"):
        Encoder(TINY, 50, "nystrom", 0, landmarks=5)(tokens())
    Encoder(TINY, 50, "2:4", 0, "reference", landmarks=5)(tokens())


@pytest.mark.parametrize("method", ["dense", "1:2_scratch", "2:4_scratch"])
def test_the_loss_falls(method, text):
    run = mlm.Run(plan_of(), text, "tiny", method, 0)
    first = run.evaluate()
    rows = list(run.rows())
    assert [row.step for row in rows] == [20, 40]
    assert rows[-1].heldout_loss < first - 1.0
    assert rows[-1].train_loss < rows[0].train_loss


def test_batches_are_the_same_for_every_method(text):
    losses = [next(mlm.Run(plan_of(every=1), text, "tiny", m, 0).rows()).train_loss for m in ("dense", "dense", "1:2_scratch")]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], abs=0.01)  # attention is even at the start, so pruning changes little
    other = next(mlm.Run(plan_of(every=1), text, "tiny", "dense", 1).rows()).train_loss
    assert other != losses[0]


def test_fine_tuning_goes_on_with_other_batches(text):
    plan = plan_of()
    run = mlm.Run(plan, text, "tiny", "2:4_tuned", 0)
    assert (run.before, run.plan.steps, run.plan.warmup) == (40, 8, 0)
    assert run.lr == pytest.approx(0.1 * TINY.lr)
    later = language.batch_of(text.train, plan, 0, 41)
    assert not torch.equal(later, language.batch_of(text.train, plan, 0, 1))


def written(folder: Path) -> list[dict[str, str]]:
    with open(folder / "mlm.csv", newline="") as handle:
        return list(csv.DictReader(handle))


def untimed(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in ("step_ms", "peak_mib")} for row in written(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert mlm.main([*SMALL, "--out", str(folder)]) == 0
    return folder


def test_every_method_has_its_rows(whole):
    rows = written(whole)
    ends = {row["method"]: row for row in rows if row["step"] == row["steps"]}
    assert list(ends) == list(mlm.METHODS)
    assert {m: row["steps"] for m, row in ends.items()} == {
        m: "0" if m.endswith(mlm.UNTRAINED) else "2" if "tuned" in m else "4" for m in mlm.METHODS
    }
    losses = {m: row["heldout_loss"] for m, row in ends.items()}
    # the same weights with other attention
    assert len({losses["dense"], losses["1:2_pruned"], losses["2:4_pruned"]}) == 3
    assert float(losses["2:4_pruned"]) == pytest.approx(float(losses["dense"]), abs=0.2)
    assert losses["2:4_tuned"] != losses["2:4_pruned"]
    assert len({losses["2:4_reversed"], losses["2:4_tuned"], losses["dense"]}) == 3
    assert float(losses["2:4_reversed"]) == pytest.approx(float(losses["2:4_tuned"]), abs=0.2)
    assert len(list((whole / "weights").iterdir())) == 3


def test_pruned_runs_have_the_dense_weights(whole, text):
    plan = language.plan_of(mlm.parser_of("", mlm.Plan, Path(), mlm.METHODS).parse_args(SMALL), mlm.Plan)
    run = mlm.Run(plan, text, "tiny", "dense", 0)
    run.model.load_state_dict(torch.load(whole / "weights" / "tiny-dense-0.pt"))
    assert round(run.evaluate(), 5) == float(written(whole)[1]["heldout_loss"])
    run.model = run._model(plan, text.vocabulary)
    assert round(run.evaluate(), 5) != float(written(whole)[1]["heldout_loss"])


def test_in_pieces_the_losses_are_those_of_a_whole_run(whole, tmp_path, capsys):
    cut = [*SMALL, "--out", str(tmp_path), "--minutes", "1e-6", "--resume"]
    said = []
    while len(said) < 20 and (not said or "with --resume goes on" in said[-1]):
        assert mlm.main(cut) == 0
        said.append(capsys.readouterr().out)
    assert len(mlm.METHODS) <= len(said) < 20
    assert untimed(tmp_path) == untimed(whole)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_base_without_weights_is_made_again(whole, tmp_path):
    chosen = [*SMALL, "--method", "dense", "--out", str(tmp_path)]
    assert mlm.main(chosen) == 0
    (tmp_path / "weights" / "tiny-dense-0.pt").unlink()
    assert mlm.main([*chosen, "--method", "2:4_pruned", "--resume"]) == 0
    wanted = [row for row in untimed(whole) if row["method"] in ("dense", "2:4_pruned")]
    assert untimed(tmp_path) == wanted


def test_without_its_base_a_run_says_so(tmp_path, capsys):
    assert mlm.main([*SMALL, "--method", "2:4_tuned", "--out", str(tmp_path)]) == 2
    assert "begins with the weights of tiny-dense-0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--masked", "0"], "--masked is 0.0"),
        (["--quick", "--tune", "0"], "--tune is 0"),
        (["--quick", "--size", "7M"], "--size is '7M'"),
        (["--device", "cpu", "--data", "/nowhere"], "corpus.json"),
    ],
)
def test_says_what_is_wrong(arguments, said, tmp_path, capsys):
    assert mlm.main([*arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_draws(whole, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "mlm.csv").write_text((whole / "mlm.csv").read_text())
    light, dark = mlm_curves.draw(tmp_path / "mlm.csv")
    assert (light.name, dark.name) == ("mlm.png", "mlm.dark.png")
    assert min(light.stat().st_size, dark.stat().st_size) > 5_000
    (tmp_path / "mlm.csv").write_text("\n".join((whole / "mlm.csv").read_text().splitlines()[:2]) + "\n")
    with pytest.raises(ValueError, match="no dense run"):
        mlm_curves.draw(tmp_path / "mlm.csv")
